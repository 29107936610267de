//! The storage path: a backend under the null NIC, in fio's words.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::plan::{End, Kind, Order, Plan};
use crate::run::{Storage, run};

/// Bytes of a write that still travel in the capsule.
const IN_CAPSULE: u32 = 4096;

#[derive(Debug, Args)]
pub(crate) struct StorageArguments {
    /// File or block device; whatever writes destroys what it holds
    path: PathBuf,
    /// randread, randwrite, read or write
    #[arg(long, default_value = "randread")]
    rw: String,
    /// Bytes of one operation
    #[arg(long, default_value_t = 4096)]
    bs: u32,
    #[arg(long, default_value_t = 1)]
    iodepth: u16,
    /// Seconds
    #[arg(long, default_value_t = 3.0)]
    runtime: f64,
    /// Flush after each write
    #[arg(long)]
    fsync: bool,
    /// Spin instead of sleeping
    #[arg(long)]
    spin: bool,
}

/// Runs it and prints JSON.
pub(crate) fn storage(arguments: &StorageArguments, cpu: usize) -> Result<(), String> {
    let (order, write) = match arguments.rw.as_str() {
        "randread" => (Order::Random, false),
        "randwrite" => (Order::Random, true),
        "read" => (Order::Sequential, false),
        "write" => (Order::Sequential, true),
        other => return Err(format!("--rw {other}: randread, randwrite, read or write")),
    };
    let kind = match (write, arguments.bs) {
        (false, bs) => Kind::Read(bs),
        (true, bs @ ..=IN_CAPSULE) => Kind::WriteInCapsule(bs),
        (true, bs) => Kind::WriteKeyed(bs),
    };
    let kinds = if arguments.fsync { vec![kind, Kind::Flush] } else { vec![kind] };
    let plan = Plan {
        in_turn: true,
        order,
        depth: arguments.iodepth,
        batch: 64,
        warmup: 200,
        end: End::Time(Duration::from_secs_f64(arguments.runtime)),
        rests: false,
        latency: true,
        ..Plan::new(kinds.clone())
    };
    let outcome = run(&plan, &Storage::Path(arguments.path.clone()), cpu, arguments.spin)?;
    let seconds = outcome.elapsed.as_secs_f64();
    // As fio counts: a flush is no I/O of its own.
    let operations = outcome.operations as f64 / kinds.len() as f64;
    let latency = outcome.latency.ok_or("no latencies")?;
    let microseconds = |ns: u64| ns as f64 / 1000.0;
    println!(
        "{}",
        json!({
            "iops": operations / seconds,
            "bandwidth": operations * f64::from(arguments.bs) / seconds,
            "latency_us": {
                "mean": latency.mean() / 1000.0,
                "p50": microseconds(latency.value_at_quantile(0.5)),
                "p99": microseconds(latency.value_at_quantile(0.99)),
                "p99.9": microseconds(latency.value_at_quantile(0.999)),
                "p99.99": microseconds(latency.value_at_quantile(0.9999)),
            },
            "cpu_us": outcome.cpu.as_secs_f64() * 1e6 / operations,
        })
    );
    Ok(())
}
