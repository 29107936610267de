//! What a benchmark found.

use std::time::Duration;

use hdrhistogram::Histogram;
use nix::sys::resource::{UsageWho, getrusage};

/// Latencies of one kind of operation.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        // 1 ns to 100 s with three digits: these bounds are always valid.
        Self(Histogram::new_with_bounds(1, 100_000_000_000, 3).unwrap_or_else(|_| unreachable!("fixed bounds")))
    }
}

impl Latency {
    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(1));
    }

    /// At this percentile.
    pub fn percentile(&self, percent: f64) -> Duration {
        Duration::from_nanos(self.0.value_at_percentile(percent))
    }

    /// On average.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.0.mean() as u64)
    }

    /// The longest.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.0.max())
    }

    /// The shortest.
    pub fn min(&self) -> Duration {
        Duration::from_nanos(self.0.min())
    }
}

/// Reads, or writes.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// Operations done.
    pub operations: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// How long each took.
    pub latency: Latency,
}

/// What a benchmark found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Reads.
    pub reads: Side,
    /// Writes.
    pub writes: Side,
    /// From the first submission to the last answer.
    pub elapsed: Duration,
    /// Processor time of this process.
    pub cpu: Duration,
    /// The target's process and its processor time, where it runs on this machine: for the caller to find out.
    pub target: Option<(u32, Duration)>,
    /// Blocks whose content was checked.
    pub verified: u64,
}

/// Percentiles that are shown.
pub(crate) const PERCENTILES: [f64; 5] = [50.0, 90.0, 99.0, 99.9, 99.99];

impl Side {
    fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.errors += other.errors;
        // Both have the same bounds.
        let _ = self.latency.0.add(&other.latency.0);
    }

    fn json(&self, elapsed: Duration) -> serde_json::Value {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let percentiles: serde_json::Map<String, serde_json::Value> = PERCENTILES
            .iter()
            .map(|at| (at.to_string(), (self.latency.percentile(*at).as_nanos() as u64).into()))
            .collect();
        serde_json::json!({
            "operations": self.operations,
            "bytes": self.bytes,
            "errors": self.errors,
            "iops": self.operations as f64 / seconds,
            "bytes_per_second": self.bytes as f64 / seconds,
            "latency_ns": {
                "min": self.latency.min().as_nanos() as u64,
                "mean": self.latency.mean().as_nanos() as u64,
                "max": self.latency.max().as_nanos() as u64,
                "percentile": percentiles,
            },
        })
    }
}

impl Report {
    pub(crate) fn add(&mut self, other: Self) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.elapsed = self.elapsed.max(other.elapsed);
        self.verified += other.verified;
    }

    /// Operations per second, reads and writes together.
    pub fn iops(&self) -> f64 {
        (self.reads.operations + self.writes.operations) as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Processor time of this process per operation.
    pub fn cpu_per_operation(&self) -> Duration {
        self.per_operation(self.cpu)
    }

    /// A time that all operations took together, per operation.
    pub fn per_operation(&self, time: Duration) -> Duration {
        let operations = self.reads.operations + self.writes.operations;
        Duration::from_nanos((time.as_nanos() as u64).checked_div(operations).unwrap_or(0))
    }

    /// For scripts. Times are in nanoseconds.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "elapsed_ns": self.elapsed.as_nanos() as u64,
            "cpu_ns": self.cpu.as_nanos() as u64,
            "target_pid": self.target.map(|(pid, _)| pid),
            "target_cpu_ns": self.target.map(|(_, cpu)| cpu.as_nanos() as u64),
            "verified_blocks": self.verified,
            "iops": self.iops(),
            "read": self.reads.json(self.elapsed),
            "write": self.writes.json(self.elapsed),
        })
    }
}

/// User and system time of this process so far.
pub(crate) fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| {
            Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or(0))
                + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
        })
        .sum()
}

/// User and system time of a process of this machine so far.
pub fn cpu_time_of(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything; the fields after it begin with the third.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * (1000 / TICKS)))
}

/// Per second, in what the kernel tells of processes (USER_HZ), on every machine that this runs on.
const TICKS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_process_is_what_it_is_told_itself() {
        let before = cpu_time();
        let mut worked = 0_u64;
        while cpu_time() < before + Duration::from_millis(50) {
            worked = std::hint::black_box(worked + 1);
        }
        // Other threads of this process work meanwhile: it is between what is told before and after.
        let least = cpu_time();
        let told = cpu_time_of(std::process::id()).expect("this process");
        let most = cpu_time();
        // Of user and system time only whole ticks are told.
        let ticks = Duration::from_millis(2 * 1000 / TICKS);
        assert!(least <= told + ticks && told <= most, "{least:?} {told:?} {most:?}");
        assert_eq!(cpu_time_of(u32::MAX), None);
    }

    #[test]
    fn parts_add_up_and_percentiles_are_those_of_the_samples() {
        let mut whole = Report::default();
        for part in 0..2u64 {
            let mut report = Report { elapsed: Duration::from_secs(1 + part), ..Report::default() };
            for at in 1..=500 {
                report.reads.latency.record(Duration::from_micros(part * 500 + at));
            }
            report.reads.operations = 500;
            whole.add(report);
        }
        assert_eq!((whole.reads.operations, whole.elapsed), (1000, Duration::from_secs(2)));
        assert!((whole.iops() - 500.0).abs() < 1e-6);
        let near = |at: Duration, micros: u64| at.as_micros().abs_diff(micros.into()) <= micros as u128 / 500 + 1;
        assert!(near(whole.reads.latency.percentile(50.0), 500));
        assert!(near(whole.reads.latency.percentile(99.0), 990));
        assert!(near(whole.reads.latency.max(), 1000));
        let json = whole.json();
        assert_eq!(json["read"]["operations"], 1000);
        assert!(json["read"]["latency_ns"]["percentile"]["99.9"].as_u64().is_some_and(|at| at > 990_000));
        assert_eq!(json["write"]["operations"], 0);
    }
}
