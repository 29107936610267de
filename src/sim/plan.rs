//! What happens in a run, drawn from its seed: the network, the disk, the hosts, and the faults with their moments.

use std::time::Duration;

use super::disk::Habits;
use super::net::Conditions;
use super::rng::Rng;
use crate::roce::Mtu;

const MTUS: [Mtu; 6] = [Mtu::B4096, Mtu::B4096, Mtu::B4096, Mtu::B1024, Mtu::B1024, Mtu::B512];
pub(crate) const HOSTS: usize = 3;
/// Commands of all hosts together.
pub(crate) const COMMANDS: u64 = 1000;

/// Kinds of faults.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Fault {
    Loss,
    Reorder,
    Duplication,
    Delay,
    /// A machine is out of reach for a moment, or for longer than anybody waits.
    DeadPeer,
    /// Receives that are posted are not found for a while.
    Rnr,
    /// Small inboxes, and a target without free buffers.
    FullQueues,
    /// Packets of connection management are lost.
    CmLoss,
    /// A host dies and comes back with the queue pair numbers and keys that it had.
    HostReboot,
    /// The target likewise; its disk keeps what it has.
    TargetReboot,
    DiskErrors,
    DiskStall,
    /// The target and its disk lose power.
    PowerCut,
    Corruption,
    Congestion,
}

impl Fault {
    pub(crate) const ALL: [Self; 15] = [
        Self::Loss,
        Self::Reorder,
        Self::Duplication,
        Self::Delay,
        Self::DeadPeer,
        Self::Rnr,
        Self::FullQueues,
        Self::CmLoss,
        Self::HostReboot,
        Self::TargetReboot,
        Self::DiskErrors,
        Self::DiskStall,
        Self::PowerCut,
        Self::Corruption,
        Self::Congestion,
    ];

    /// Those of which every run has three kinds or more; the others come on top.
    pub(crate) const LISTED: [Self; 11] = [
        Self::Loss,
        Self::Reorder,
        Self::Duplication,
        Self::Delay,
        Self::DeadPeer,
        Self::Rnr,
        Self::FullQueues,
        Self::CmLoss,
        Self::HostReboot,
        Self::TargetReboot,
        Self::DiskErrors,
    ];

    /// Listed kinds among `faults`; a reboot is one kind, whoever reboots.
    pub(crate) fn listed_kinds(faults: &[Self]) -> usize {
        let has = |fault: &&Self| faults.contains(fault);
        let both = [Self::HostReboot, Self::TargetReboot].iter().all(|fault| has(&fault));
        Self::LISTED.iter().filter(has).count() - usize::from(both)
    }
}

/// Something that happens once so many commands are done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) after: u64,
    pub(crate) what: What,
}

/// See [`Event`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    /// Machine 0 is the target, the others are hosts.
    CutOff {
        node: usize,
        span: Duration,
    },
    HoldReceives {
        node: usize,
        span: Duration,
    },
    HogBuffers {
        span: Duration,
    },
    RebootHost {
        host: usize,
        away: Duration,
    },
    RebootTarget {
        away: Duration,
        power: bool,
    },
    StallDisk {
        span: Duration,
    },
}

/// How one host behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPlan {
    pub(crate) io_queues: u16,
    pub(crate) queue_depth: u16,
    pub(crate) in_capsule: u32,
    pub(crate) descriptors: u8,
    pub(crate) invalidate: bool,
    pub(crate) read_depth: u8,
    /// Larger than the target's in some.
    pub(crate) mtu: Mtu,
    pub(crate) keep_alive: Duration,
    pub(crate) events: bool,
    pub(crate) commands: u64,
    /// Commands that it keeps under way, more than fit its queues in some hosts.
    pub(crate) concurrency: usize,
    /// The largest transfer, in blocks.
    pub(crate) max_blocks: usize,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) faults: Vec<Fault>,
    pub(crate) conditions: Conditions,
    pub(crate) disk: Habits,
    /// The target's path MTU.
    pub(crate) mtu: Mtu,
    pub(crate) reactors: usize,
    pub(crate) receive_slots: u32,
    pub(crate) in_capsule_data: u32,
    pub(crate) mdts: u32,
    pub(crate) hosts: [HostPlan; HOSTS],
    /// By the number of commands done.
    pub(crate) events: Vec<Event>,
}

impl Plan {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let (mut listed, mut others) = (Fault::LISTED.to_vec(), Fault::ALL.to_vec());
        others.retain(|fault| !Fault::LISTED.contains(fault));
        let draw = |from: &mut Vec<Fault>, rng: &mut Rng| from.swap_remove(rng.below(from.len() as u64) as usize);
        let count = rng.within(3, 6) as usize;
        let mut faults = Vec::new();
        while Fault::listed_kinds(&faults) < count {
            faults.push(draw(&mut listed, rng));
        }
        for _ in 0..rng.within(0, 2) {
            faults.push(draw(&mut others, rng));
        }
        faults.sort_unstable();
        Self::with(faults, rng)
    }

    /// With these faults.
    pub(crate) fn with(faults: Vec<Fault>, rng: &mut Rng) -> Self {
        let has = |fault: Fault| faults.contains(&fault);
        let mut rate = |fault: Fault, low: u64, high: u64| if has(fault) { rng.within(low, high) } else { 0 };
        let conditions = Conditions {
            loss: rate(Fault::Loss, 20, 300),
            cm_loss: rate(Fault::CmLoss, 2000, 4000),
            duplicate: rate(Fault::Duplication, 50, 500),
            reorder: rate(Fault::Reorder, 50, 500),
            corrupt: rate(Fault::Corruption, 20, 200),
            mark: rate(Fault::Congestion, 20, 500),
            jitter: Duration::from_micros(rate(Fault::Delay, 100, 20_000)),
            delay: Duration::from_micros(if has(Fault::Delay) { rng.within(10, 3000) } else { rng.within(5, 50) }),
            inbox: if has(Fault::FullQueues) { 64 << 10 } else { rng.pick(&[212_992, 425_984, 4 << 20]) },
            merge: rng.one_in(2),
        };
        let disk = Habits {
            volatile: has(Fault::PowerCut) || rng.one_in(2),
            errors: if has(Fault::DiskErrors) { rng.within(50, 300) } else { 0 },
            latency: rng.pick(&[0, 50, 200, 1000]),
        };
        let mut left = COMMANDS;
        let hosts = std::array::from_fn(|at| {
            let commands = if at + 1 == HOSTS { left } else { COMMANDS / HOSTS as u64 };
            left -= commands;
            HostPlan::new(commands, rng)
        });
        let in_capsule_data = rng.pick(&[0, 4096, 4096, 8192]);
        let events = events(&faults, rng);
        Self {
            conditions,
            disk,
            mtu: rng.pick(&MTUS),
            reactors: rng.within(1, 2) as usize,
            // Three hosts of the largest kind need 384.
            receive_slots: rng.pick(&[400, 512]),
            in_capsule_data,
            mdts: 1 << 17,
            hosts,
            events,
            faults,
        }
    }
}

impl HostPlan {
    fn new(commands: u64, rng: &mut Rng) -> Self {
        let io_queues = rng.within(1, 3) as u16;
        let queue_depth = rng.pick(&[4, 8, 16, 32]);
        let room = usize::from(io_queues) * (usize::from(queue_depth) - 1);
        Self {
            io_queues,
            queue_depth,
            in_capsule: rng.pick(&[0, 4096]),
            descriptors: rng.pick(&[1, 1, 2, 8, 16]),
            invalidate: rng.one_in(2),
            read_depth: rng.pick(&[1, 2, 4, 16]),
            mtu: rng.pick(&MTUS),
            keep_alive: Duration::from_secs(rng.within(4, 6)),
            events: rng.one_in(2),
            commands,
            concurrency: rng.within(1, room as u64 + 4) as usize,
            max_blocks: rng.pick(&[8, 16, 16, 64, 128]),
        }
    }
}

/// The moments of faults that have one.
fn events(faults: &[Fault], rng: &mut Rng) -> Vec<Event> {
    let mut events = Vec::new();
    for fault in faults {
        let after = rng.within(20, COMMANDS - 100);
        let node = rng.below(HOSTS as u64 + 1) as usize;
        let what = match fault {
            Fault::DeadPeer => {
                let span = if rng.one_in(2) { rng.micros(1000, 900_000) } else { rng.micros(9_000_000, 20_000_000) };
                What::CutOff { node, span }
            }
            Fault::Rnr => What::HoldReceives { node, span: rng.micros(100, 100_000) },
            Fault::FullQueues => What::HogBuffers { span: rng.micros(1000, 1_000_000) },
            Fault::HostReboot => {
                What::RebootHost { host: rng.below(HOSTS as u64) as usize, away: rng.micros(1000, 3_000_000) }
            }
            Fault::TargetReboot => What::RebootTarget { away: rng.micros(1000, 3_000_000), power: false },
            Fault::PowerCut => What::RebootTarget { away: rng.micros(1000, 3_000_000), power: true },
            Fault::DiskStall => What::StallDisk { span: rng.micros(50_000, 8_000_000) },
            _ => continue,
        };
        events.push(Event { after, what });
        // A host that comes back while its writes are stuck in the disk has to wait for them.
        if let (Fault::DiskStall, true) = (fault, faults.contains(&Fault::HostReboot)) {
            let host = rng.below(HOSTS as u64) as usize;
            events.push(Event { after: after + 3, what: What::RebootHost { host, away: rng.micros(1000, 300_000) } });
        }
        // Some happen twice.
        if rng.one_in(3) {
            events.push(Event { after: rng.within(20, COMMANDS - 100), what });
        }
    }
    events.sort_by_key(|event| event.after);
    events
}
