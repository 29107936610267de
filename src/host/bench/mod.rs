//! Load on a namespace, in fio's vocabulary: how many operations, how much bandwidth, how long each took.
//!
//! A job is one I/O queue with `iodepth` commands under way; jobs are spread over threads, each with a host of its own. A
//! thread polls while there is work and for a short time after, then sleeps, so one job of depth 1 measures latency and not
//! the wake-up of a sleeping thread. Over [`Local`](crate::rdma::local::Local), the null NIC, what is measured is the cost of
//! target and host alone.

mod job;
mod report;

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub use report::{Latency, Report, Side, cpu_time_of};

use super::error::HostError;
use super::options::HostOptions;
use crate::rdma::Provider;
use job::Job;

/// Access pattern (`--rw`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Offsets at random, else ascending.
    pub random: bool,
    /// Percent of reads.
    pub reads: u8,
}

impl Pattern {
    /// fio's word for it, with the share of reads of the mixed ones.
    pub fn parse(word: &str, mix: u8) -> Option<Self> {
        let (random, reads) = match word {
            "read" => (false, 100),
            "write" => (false, 0),
            "rw" | "readwrite" => (false, mix),
            "randread" => (true, 100),
            "randwrite" => (true, 0),
            "randrw" => (true, mix),
            _ => return None,
        };
        Some(Self { random, reads })
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::parse(word, 50).ok_or_else(|| format!("{word:?} is none of read, write, rw, randread, randwrite, randrw"))
    }
}

/// What to do and for how long.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Access pattern.
    pub pattern: Pattern,
    /// Bytes of one operation.
    pub block_size: u32,
    /// Operations that a job has under way.
    pub iodepth: u16,
    /// I/O queues.
    pub jobs: u16,
    /// Threads, each a host with its share of the jobs.
    pub threads: u16,
    /// How long.
    pub runtime: Duration,
    /// Stop after so many operations, all jobs together; `None` = only by time.
    pub operations: Option<u64>,
    /// Operations per second, all jobs together, evenly spaced; `None` = as many as go.
    pub rate: Option<u64>,
    /// Bytes of the namespace to use, from its start; `None` = all.
    pub size: Option<u64>,
    /// Namespace.
    pub nsid: u32,
    /// Write blocks that can be told apart, check every read of one, and read all of them back at the end.
    pub verify: bool,
    /// Where chance starts.
    pub seed: u64,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            pattern: Pattern { random: true, reads: 100 },
            block_size: 4096,
            iodepth: 32,
            jobs: 1,
            threads: 1,
            runtime: Duration::from_secs(10),
            operations: None,
            rate: None,
            size: None,
            nsid: 1,
            verify: false,
            seed: 0x5eed,
        }
    }
}

/// What a running benchmark has done so far; and the switch that ends it early.
#[derive(Debug, Default)]
pub struct Progress {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) started: AtomicBool,
    pub(crate) stop: AtomicBool,
    pub(crate) verifying: AtomicBool,
}

impl Progress {
    /// Reads, writes and bytes done.
    pub fn done(&self) -> (u64, u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.reads), get(&self.writes), get(&self.bytes))
    }

    /// Whether the load runs already (connections stand).
    pub fn started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    /// Whether what was written is being read back.
    pub fn verifying(&self) -> bool {
        self.verifying.load(Ordering::Acquire)
    }

    /// Ends the load now.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// Runs a benchmark on the calling thread and `threads - 1` others.
pub fn run<P: Provider>(
    provider: Arc<P>,
    address: SocketAddr,
    subnqn: &str,
    host: &HostOptions,
    bench: &BenchOptions,
    progress: &Progress,
) -> Result<Report, HostError> {
    check(bench)?;
    let threads = bench.threads.clamp(1, bench.jobs);
    let before = report::cpu_time();
    let barrier = std::sync::Barrier::new(threads.into());
    let work = |thread: u16| {
        let jobs = (0..bench.jobs).filter(|job| job % threads == thread).collect::<Vec<_>>();
        let mut options = host.clone();
        options.thread = thread.into();
        let mut job = Job::connect(Arc::clone(&provider), address, subnqn, options, bench, &jobs);
        // Everybody starts together, also when one could not connect.
        barrier.wait();
        progress.started.store(true, Ordering::Release);
        if job.is_err() {
            progress.stop();
        }
        job.as_mut().map_err(|error| error.clone())?.run(progress)
    };
    let parts: Vec<Result<Report, HostError>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || work_on(&work, thread))).collect();
        let mut parts = vec![work(0)];
        parts.extend(others.into_iter().map(|other| {
            other.join().unwrap_or_else(|_| Err(HostError::usage("bench", "one of its threads panicked", "")))
        }));
        parts
    });
    let mut report = Report::default();
    for part in parts {
        report.add(part?);
    }
    report.cpu = report::cpu_time().saturating_sub(before);
    Ok(report)
}

/// A closure borrowed by several threads.
fn work_on<T>(work: &(impl Fn(u16) -> T + Sync), thread: u16) -> T {
    work(thread)
}

fn check(bench: &BenchOptions) -> Result<(), HostError> {
    let wrong = |why: &str| Err(HostError::usage("bench", why, ""));
    if bench.block_size == 0 || bench.block_size as usize > crate::mem::Pool::MAX_BUFFER {
        return wrong("the block size is 1 byte to 1 MiB");
    }
    if bench.iodepth == 0 || bench.iodepth > 1023 {
        return wrong("the depth is 1 to 1023");
    }
    if bench.jobs == 0 || bench.jobs > 128 {
        return wrong("there are 1 to 128 jobs");
    }
    if bench.pattern.reads > 100 {
        return wrong("the share of reads is 0 to 100 percent");
    }
    Ok(())
}
