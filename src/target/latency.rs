//! How long commands take, stage by stage: log-linear histograms for each queue and each namespace.
//!
//! A reactor adds to its own with a load and a store, no lock, no allocation, no division; whoever reads adds up the
//! reactors'. Time is taken once a round ([`Reactor::turn`]), so a stage that begins and ends in one round counts as nothing.
//! Off until asked for ([`super::Options::histograms`], [`super::Target::set_histograms`]); while off a command costs a few
//! branches, and no memory is held. On, each queue, and each namespace on each reactor, holds [`Stages`]: 5.2 KiB.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::reactor::Reactor;
use super::request::{Direction, Job, RequestId};
use super::shared::Message;
use super::tally;
use crate::rdma::Provider;

/// A part of a command's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From its receive until it has buffer and credits: parsed, checked, and what it waited for those.
    Receive,
    /// The RDMA READs of its data.
    ReadFromHost,
    /// The storage, range locks included.
    Backend,
    /// The RDMA WRITEs of its data and the response behind them: their completion is one.
    WriteToHost,
    /// The response of a command without data for the host.
    Send,
    /// From its receive until its response was sent.
    Total,
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::Receive, Self::ReadFromHost, Self::Backend, Self::WriteToHost, Self::Send, Self::Total];

    /// For labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::ReadFromHost => "read_from_host",
            Self::Backend => "backend",
            Self::WriteToHost => "write_to_host",
            Self::Send => "send",
            Self::Total => "total",
        }
    }
}

/// Buckets below are as wide as this many nanoseconds, as a power of two: a quarter of a microsecond.
const UNIT_SHIFT: u32 = 8;
/// Each doubling has four buckets.
const PARTS_SHIFT: u32 = 2;
/// Doublings of the unit up to a minute; what is longer counts in the last bucket.
const DOUBLINGS: u32 = 28;
const BUCKETS: usize = ((DOUBLINGS - PARTS_SHIFT + 1) << PARTS_SHIFT) as usize;

/// The bucket of a time.
fn bucket(nanos: u64) -> usize {
    let units = nanos >> UNIT_SHIFT;
    let shift = (units | 1).ilog2().saturating_sub(PARTS_SHIFT);
    let at = u64::from(shift << PARTS_SHIFT) + (units >> shift);
    (at as usize).min(BUCKETS - 1)
}

/// The first time, in nanoseconds, that is in none of the buckets up to this one.
fn bound(bucket: usize) -> u64 {
    let next = bucket as u64 + 1;
    let shift = (next >> PARTS_SHIFT).saturating_sub(1);
    (next - (shift << PARTS_SHIFT)) << shift << UNIT_SHIFT
}

/// Written by one reactor.
#[derive(Debug)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

impl Histogram {
    fn record(&self, nanos: u64) {
        tally::add(&self.buckets[bucket(nanos)], 1);
        tally::add(&self.nanos, nanos);
    }
}

/// One reactor's histograms of something, a stage each; made when first needed.
#[derive(Debug, Default)]
pub(crate) struct Stages(OnceLock<Box<[Histogram; Stage::ALL.len()]>>);

impl Stages {
    pub(crate) fn record(&self, stage: Stage, nanos: u64) {
        let make = || {
            let zeros = || AtomicU64::new(0);
            Box::new(array::from_fn(|_| Histogram { buckets: array::from_fn(|_| zeros()), nanos: zeros() }))
        };
        self.0.get_or_init(make)[stage as usize].record(nanos);
    }

    /// Adds what was recorded so far.
    pub(crate) fn add_to(&self, all: &mut Latencies) {
        let Some(stages) = self.0.get() else { return };
        for (histogram, sum) in stages.iter().zip(&mut all.0) {
            sum.nanos += histogram.nanos.load(Ordering::Relaxed);
            for (count, sum) in histogram.buckets.iter().zip(&mut sum.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
    }
}

/// What was recorded of one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latency {
    counts: [u64; BUCKETS],
    nanos: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], nanos: 0 }
    }
}

impl Latency {
    /// Commands.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their times, added up.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// Their mean; zero without any.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.nanos.checked_div(self.count()).unwrap_or(0))
    }

    /// A time that this part of them did not exceed, at most a quarter too long; zero without any. Those beyond the last
    /// bucket (a minute) count as its end.
    pub fn quantile(&self, part: f64) -> Duration {
        let count = self.count();
        if count == 0 {
            return Duration::ZERO;
        }
        let wanted = ((count as f64 * part).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        Duration::from_nanos(bound(at.unwrap_or(BUCKETS - 1)))
    }

    /// Bounds, a doubling apart, and how many commands took less than each.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let parts = 1 << PARTS_SHIFT;
        (0..BUCKETS / parts).map(move |doubling| {
            let end = (doubling + 1) * parts;
            (Duration::from_nanos(bound(end - 1)), self.counts[..end].iter().sum())
        })
    }
}

/// What was recorded of every stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies([Latency; Stage::ALL.len()]);

impl Latencies {
    /// One of the stages.
    pub fn stage(&self, stage: Stage) -> &Latency {
        &self.0[stage as usize]
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|latency| latency.counts.iter().all(|count| *count == 0))
    }

    /// Adds another's.
    pub fn merge(&mut self, other: &Self) {
        for (sum, one) in self.0.iter_mut().zip(&other.0) {
            sum.nanos += one.nanos;
            sum.counts.iter_mut().zip(&one.counts).for_each(|(sum, count)| *sum += count);
        }
    }
}

/// How long commands took, since histograms were switched on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyReport {
    /// Whether they are on.
    pub on: bool,
    /// I/O commands by namespace: NQN, NSID.
    pub namespaces: Vec<(String, u32, Latencies)>,
    /// Commands by connected queue.
    pub queues: Vec<QueueLatency>,
}

/// Those of one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueLatency {
    /// NQN of the subsystem.
    pub subnqn: String,
    /// NQN of the host.
    pub hostnqn: String,
    /// Controller ID.
    pub cntlid: u16,
    /// Queue ID; 0 is the admin queue.
    pub qid: u16,
    /// How long its commands took.
    pub latencies: Latencies,
}

impl LatencyReport {
    /// By host, all of its connected queues for I/O together.
    pub fn hosts(&self) -> Vec<(&str, Latencies)> {
        let mut hosts: Vec<(&str, Latencies)> = Vec::new();
        for queue in self.queues.iter().filter(|queue| queue.qid != 0) {
            let at = hosts.iter().position(|(host, _)| *host == queue.hostnqn).unwrap_or_else(|| {
                hosts.push((&queue.hostnqn, Latencies::default()));
                hosts.len() - 1
            });
            hosts[at].1.merge(&queue.latencies);
        }
        hosts
    }
}

impl<P: Provider> Reactor<P> {
    /// Histograms go on or off.
    pub(crate) fn set_timing(&mut self, on: bool) {
        self.timing = on;
    }

    /// A command arrived.
    #[inline(never)]
    pub(crate) fn begin_timing(&mut self, id: RequestId, now: Duration) {
        let now = now.as_nanos() as u64;
        let request = &mut self.requests[id];
        (request.born, request.stamp) = (now, now);
    }

    /// A command's stage ends. Those that arrived before histograms were switched on are not counted.
    #[inline(never)]
    pub(crate) fn end_stage(&mut self, id: RequestId, stage: Stage, now: Duration) {
        let now = now.as_nanos() as u64;
        let request = &mut self.requests[id];
        if request.born == 0 {
            return;
        }
        let (took, born) = (now.saturating_sub(request.stamp), request.born);
        request.stamp = now;
        let (job, queue, direction) = (request.job, request.queue, request.direction);
        // The last one is known by what was sent.
        let ends = stage == Stage::Send;
        let stage = if ends && direction == Direction::ToHost { Stage::WriteToHost } else { stage };
        let record = |stages: &Stages| {
            stages.record(stage, took);
            if ends {
                stages.record(Stage::Total, now.saturating_sub(born));
            }
        };
        record(&self.queues[queue as usize].activity.stages);
        if let Job::Io { namespace, .. } = job {
            record(&self.namespaces[namespace].counters[self.index as usize].stages);
        }
    }
}

impl super::Target {
    /// Switches histograms on or off; what was recorded stays.
    pub fn set_histograms(&self, on: bool) {
        self.running.set_timing(on);
    }

    /// How long commands took.
    pub fn latency(&self) -> LatencyReport {
        let mut report = LatencyReport { on: self.running.is_timing(), ..LatencyReport::default() };
        self.running.control(&mut |control| {
            for published in control.published.values() {
                let mut latencies = Latencies::default();
                published.counters.iter().for_each(|reactor| reactor.stages.add_to(&mut latencies));
                report.namespaces.push((published.nqn.to_string(), published.view.nsid, latencies));
            }
            for controller in control.registry.controllers() {
                for queue in control.queues.get(&controller.ctrl).into_iter().flatten() {
                    let mut latencies = Latencies::default();
                    queue.activity.stages.add_to(&mut latencies);
                    report.queues.push(QueueLatency {
                        subnqn: controller.subnqn.to_string(),
                        hostnqn: controller.hostnqn.to_string(),
                        cntlid: controller.cntlid,
                        qid: queue.qid,
                        latencies,
                    });
                }
            }
        });
        report
    }
}

impl<P: Provider> super::shared::Shared<P> {
    /// Has every reactor take times, or not.
    pub(crate) fn broadcast_timing(self: &Arc<Self>, on: bool) {
        self.timing.store(on, Ordering::Release);
        self.broadcast(|| Message::Timing(on));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        let mut start = 0;
        for at in 0..BUCKETS {
            let end = bound(at);
            assert!(end > start, "bucket {at}");
            assert_eq!((bucket(start), bucket(end - 1)), (at, at), "bucket {at} from {start} to {end}");
            // At most a quarter of its start wide, from where buckets are wider than the unit.
            assert!(start < 1 << (UNIT_SHIFT + PARTS_SHIFT) || end - start <= start / 4, "bucket {at} is too wide");
            start = end;
        }
        assert_eq!((bucket(start), bucket(u64::MAX)), (BUCKETS - 1, BUCKETS - 1), "longer is the last one");
        assert!(Duration::from_nanos(start) > Duration::from_secs(60));
    }

    #[test]
    fn known_distribution_is_found_again() {
        let stages = Stages::default();
        // 1 to 1000 us, each once; and one of 30 s.
        (1..=1000).for_each(|micros| stages.record(Stage::Backend, micros * 1000));
        let mut all = Latencies::default();
        stages.add_to(&mut all);
        let backend = all.stage(Stage::Backend);
        assert_eq!((backend.count(), backend.sum()), (1000, Duration::from_micros(500_500)));
        assert_eq!(backend.mean(), Duration::from_nanos(500_500));
        for (part, micros) in [(0.001, 1), (0.5, 500), (0.9, 900), (0.99, 990), (1.0, 1000)] {
            let (found, exact) = (backend.quantile(part), Duration::from_micros(micros));
            assert!(found > exact && found <= exact + exact / 4 + Duration::from_nanos(256), "{part}: {found:?}");
        }
        for (end, count) in backend.cumulative() {
            let exact = (end.as_nanos() as u64).div_ceil(1000).saturating_sub(1).min(1000);
            assert_eq!(count, exact, "below {end:?}");
        }
        stages.record(Stage::Backend, 30_000_000_000);
        let mut twice = Latencies::default();
        stages.add_to(&mut twice);
        assert!(twice.stage(Stage::Backend).quantile(1.0) >= Duration::from_secs(30));
        assert!(twice.stage(Stage::Send).count() == 0 && twice.stage(Stage::Send).quantile(0.5).is_zero());
        twice.merge(&all);
        assert_eq!(twice.stage(Stage::Backend).count(), 2001);
    }

    proptest! {
        #[test]
        fn any_time_is_in_its_bucket(nanos in any::<u64>()) {
            let at = bucket(nanos);
            prop_assert!(at == BUCKETS - 1 || nanos < bound(at));
            prop_assert!(at == 0 || nanos >= bound(at - 1));
        }

        #[test]
        fn quantiles_are_at_most_a_quarter_too_long(mut times in prop::collection::vec(0u64..60_000_000_000, 1..200), part in 0.0f64..1.0) {
            let stages = Stages::default();
            times.iter().for_each(|nanos| stages.record(Stage::Total, *nanos));
            let mut all = Latencies::default();
            stages.add_to(&mut all);
            times.sort_unstable();
            let exact = times[((times.len() as f64 * part).ceil() as usize).clamp(1, times.len()) - 1];
            let found = all.stage(Stage::Total).quantile(part).as_nanos() as u64;
            prop_assert!(found > exact && found <= exact + exact / 4 + 256, "{} for {}", found, exact);
        }
    }
}
