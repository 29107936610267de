//! What the target itself costs: its code between a null NIC and a null backend, in nanoseconds and in instructions; and what
//! its storage path reaches, with the same NIC and real storage. See ../README.md.

mod callgrind;
mod cm;
mod distance;
mod gate;
mod load;
mod memory;
mod nic;
mod plan;
mod rows;
mod run;
mod script;
mod storage;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use plan::End;
use run::Storage;
use serde_json::json;

const NQN: &str = "nqn.2026-11.io.farside:bench";
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 4420);

#[derive(Debug, Parser)]
struct Arguments {
    /// CPU to run on
    #[arg(long, global = true, default_value_t = 0)]
    cpu: usize,
    /// What `cargo bench` says to every benchmark
    #[arg(long, hide = true, global = true)]
    bench: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One row, timed; prints JSON
    Core {
        row: String,
        #[arg(long, default_value_t = 2_000_000)]
        operations: u64,
    },
    /// A file or device as a namespace, in fio's words; prints JSON
    Storage(storage::StorageArguments),
    /// Cache line round trip between two CPUs; prints JSON
    Distance {
        #[arg(default_value_t = 0)]
        one: usize,
        #[arg(default_value_t = 1)]
        other: usize,
    },
    /// One row's instructions by stage, counted by callgrind; prints JSON
    Split { row: String },
    /// The instructions of all rows, against bounds and record
    Gate {
        /// What was recorded, by compiler
        record: PathBuf,
        /// Record what is measured now
        #[arg(long)]
        write: bool,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Command::Core { row, operations } => core(row, *operations, arguments.cpu),
        Command::Storage(wanted) => storage::storage(wanted, arguments.cpu),
        Command::Distance { one, other } => {
            distance::distance(*one, *other).map(|ns| println!("{}", json!({ "round_trip_ns": ns })))
        }
        Command::Split { row } => gate::split(row, arguments.cpu),
        Command::Gate { record, write } => gate::run(record, *write, arguments.cpu),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn core(row: &str, operations: u64, cpu: usize) -> Result<(), String> {
    let row = rows::find(row)?;
    let plan = plan::Plan { end: End::Operations(operations), warmup: plan::warmup(operations), ..row.plan };
    let outcome = run::run(&plan, &Storage::Null, cpu, true)?;
    let ns = outcome.elapsed.as_nanos() as f64 / outcome.operations as f64;
    println!("{}", json!({ "row": row.name, "operations": outcome.operations, "ns": ns }));
    Ok(())
}
