//! `farside bench`: load on a namespace, in fio's words.

use std::io::{IsTerminal, Write};
use std::net::IpAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use farside::config::parse_size;
use farside::host::bench::{self, BenchOptions, Pattern, Progress, Report, Side};
use farside::host::{HostError, HostOptions};
use farside::rdma::{Provider, soft};

use super::connect::{Connect, WithProvider, only_subsystem};

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    connect: Connect,
    /// Subsystem; may be left out where there is only one
    #[arg(long)]
    nqn: Option<String>,
    /// Namespace
    #[arg(long, default_value_t = 1)]
    nsid: u32,
    /// read, write, rw, randread, randwrite or randrw. Whatever writes, destroys what the namespace holds
    #[arg(long, default_value = "randread", value_parser = word)]
    rw: String,
    /// Percent of reads of rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: u8,
    /// Bytes of one operation
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_size)]
    bs: u64,
    /// Operations under way per job
    #[arg(long, default_value_t = 32)]
    iodepth: u16,
    /// Jobs, each an I/O queue
    #[arg(long, default_value_t = 1)]
    numjobs: u16,
    /// Threads that the jobs share [default: one]
    #[arg(long, default_value_t = 1)]
    threads: u16,
    /// Seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    runtime: f64,
    /// Operations per second, all jobs together [default: as many as go]
    #[arg(long, value_name = "NUMBER")]
    rate_iops: Option<u64>,
    /// Bytes of the namespace to use, from its start [default: all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Write what can be told apart, check every read of it, and read all of it back at the end
    #[arg(long)]
    verify: bool,
    /// Data of writes up to this size travel in the capsule
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_size)]
    in_capsule: u64,
    /// Where chance starts
    #[arg(long, default_value_t = 0x5eed)]
    seed: u64,
    /// Print the result for scripts
    #[arg(long)]
    json: bool,
}

fn word(text: &str) -> Result<String, String> {
    text.parse::<Pattern>().map(|_| text.to_string())
}

impl Bench {
    pub(crate) fn run(self) -> ExitCode {
        match self.connect.with(self.threads.into(), Work(&self)) {
            Ok(report) => {
                if self.json {
                    println!("{:#}", report.json());
                } else {
                    print!("{}", text(&report));
                }
                if report.reads.errors + report.writes.errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => {
                eprintln!("farside: {error}");
                ExitCode::FAILURE
            }
        }
    }

    fn options(&self) -> BenchOptions {
        BenchOptions {
            pattern: Pattern::parse(&self.rw, self.rwmixread).unwrap_or(Pattern { random: true, reads: 100 }),
            block_size: u32::try_from(self.bs).unwrap_or(u32::MAX),
            iodepth: self.iodepth,
            jobs: self.numjobs,
            threads: self.threads,
            runtime: Duration::try_from_secs_f64(self.runtime).unwrap_or(Duration::from_secs(10)),
            operations: None,
            rate: self.rate_iops,
            size: self.size,
            nsid: self.nsid,
            verify: self.verify,
            seed: self.seed,
        }
    }
}

struct Work<'a>(&'a Bench);

impl WithProvider for Work<'_> {
    type Output = Report;

    fn run<P: Provider>(self, provider: Arc<P>, options: HostOptions) -> Result<Report, HostError> {
        let bench = self.0;
        let address = bench.connect.address;
        let in_capsule = u32::try_from(bench.in_capsule).unwrap_or(u32::MAX).min(16 << 10);
        let options = HostOptions { in_capsule, ..options };
        let nqn = match &bench.nqn {
            Some(nqn) => nqn.clone(),
            None => only_subsystem(&provider, address, &options)?,
        };
        let progress = Progress::default();
        let live = !bench.json && std::io::stderr().is_terminal();
        std::thread::scope(|scope| {
            let (done, finished) = std::sync::mpsc::channel::<()>();
            if live {
                let progress = &progress;
                scope.spawn(move || show(progress, &finished));
            }
            let target = LocalTarget::of(address.ip());
            let report = bench::run(provider, address, &nqn, &options, &bench.options(), &progress);
            drop(done);
            report.map(|report| Report { target: target.and_then(LocalTarget::took), ..report })
        })
    }
}

/// The target's process, where it runs on this machine and may be looked at.
struct LocalTarget {
    pid: u32,
    before: Duration,
}

impl LocalTarget {
    fn of(address: IpAddr) -> Option<Self> {
        let pid = soft::owner(address).filter(|pid| *pid != std::process::id())?;
        Some(Self { pid, before: bench::cpu_time_of(pid)? })
    }

    /// The process and its processor time since.
    fn took(self) -> Option<(u32, Duration)> {
        Some((self.pid, bench::cpu_time_of(self.pid)?.saturating_sub(self.before)))
    }
}

/// A line that is written anew four times a second, until the benchmark ends.
fn show(progress: &Progress, finished: &std::sync::mpsc::Receiver<()>) {
    let mut before = (Instant::now(), (0, 0, 0));
    let started = Instant::now();
    loop {
        let ended = finished.recv_timeout(Duration::from_millis(250));
        if !matches!(ended, Err(std::sync::mpsc::RecvTimeoutError::Timeout)) {
            eprint!("\r\x1b[K");
            return;
        }
        let now = Instant::now();
        let done = progress.done();
        let seconds = (now - before.0).as_secs_f64();
        let rate = |from: u64, to: u64| to.saturating_sub(from) as f64 / seconds;
        let line = if progress.verifying() {
            "reading back what was written".to_string()
        } else if progress.started() {
            format!(
                "{:4.0} s  read {:>9}/s  write {:>9}/s  {:8.1} MiB/s",
                started.elapsed().as_secs_f64(),
                thousands(rate(before.1.0, done.0)),
                thousands(rate(before.1.1, done.1)),
                rate(before.1.2, done.2) / f64::from(1 << 20)
            )
        } else {
            "connecting".to_string()
        };
        eprint!("\r\x1b[K{line}");
        let _ = std::io::stderr().flush();
        before = (now, done);
    }
}

fn thousands(rate: f64) -> String {
    if rate >= 10_000.0 { format!("{:.1}k", rate / 1000.0) } else { format!("{rate:.0}") }
}

fn micros(latency: Duration) -> String {
    format!("{:.1}", latency.as_nanos() as f64 / 1000.0)
}

fn text(report: &Report) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let seconds = report.elapsed.as_secs_f64().max(1e-9);
    let mut side = |name: &str, side: &Side| {
        if side.operations + side.errors == 0 {
            return;
        }
        let _ = writeln!(
            text,
            "{name:<6} {:>9} IOPS  {:>8.1} MiB/s  {} operations, {} errors",
            thousands(side.operations as f64 / seconds),
            side.bytes as f64 / seconds / f64::from(1 << 20),
            side.operations,
            side.errors
        );
        let latency = &side.latency;
        let at = |percent| micros(latency.percentile(percent));
        let _ = writeln!(
            text,
            "       us: avg {}  p50 {}  p99 {}  p99.9 {}  max {}",
            micros(latency.mean()),
            at(50.0),
            at(99.0),
            at(99.9),
            micros(latency.max())
        );
    };
    side("read", &report.reads);
    side("write", &report.writes);
    let busy = report.cpu.as_secs_f64() / seconds * 100.0;
    let _ = write!(
        text,
        "time   {seconds:.2} s, {busy:.0}% of a processor here, {} ns per operation",
        report.cpu_per_operation().as_nanos()
    );
    if let Some((pid, cpu)) = report.target {
        let busy = cpu.as_secs_f64() / seconds * 100.0;
        let each = report.per_operation(cpu).as_nanos();
        let _ = write!(text, "; of the target (process {pid}) {busy:.0}%, {each} ns");
    }
    if report.verified > 0 {
        let _ = write!(text, "; {} blocks verified", report.verified);
    }
    text.push('\n');
    text
}
