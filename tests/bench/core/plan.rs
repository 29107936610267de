//! What a run does: which commands, on how many queues, how deep, and when it is over.

use std::time::Duration;

/// One kind of command that the load sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Read of so many bytes, by RDMA WRITE.
    Read(u32),
    /// Write of so many bytes that travel in the capsule.
    WriteInCapsule(u32),
    /// Write of so many bytes that the target fetches by RDMA READ.
    WriteKeyed(u32),
    Flush,
    WriteZeroes,
    /// Dataset Management, Deallocate of one range, which travels in the capsule.
    Deallocate,
    /// Read beyond the end of the namespace: to be refused.
    Refused,
}

/// How the blocks that commands are about follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Random,
    Sequential,
}

/// When a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Operations(u64),
    Time(Duration),
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Chosen from by chance, or in turn.
    pub(crate) kinds: Vec<Kind>,
    pub(crate) in_turn: bool,
    pub(crate) order: Order,
    /// I/O queues, 128 per host at most.
    pub(crate) queues: usize,
    /// Commands under way per queue.
    pub(crate) depth: u16,
    /// Commands that arrive in one poll.
    pub(crate) batch: usize,
    pub(crate) namespaces: u32,
    /// Operations before the measurement starts.
    pub(crate) warmup: u64,
    pub(crate) end: End,
    /// The NIC rests when it has nothing to report: before and after a run, spinning would cost instructions by chance. For
    /// backends that answer at once, with which it never runs dry in between.
    pub(crate) rests: bool,
    /// Take the time of each command.
    pub(crate) latency: bool,
}

/// Operations that come before so many that are measured.
pub(crate) fn warmup(operations: u64) -> u64 {
    operations / 10
}

/// I/O queues of one host.
pub(crate) const QUEUES_PER_HOST: usize = 128;

impl Plan {
    /// One queue, as deep as it fills a poll.
    pub(crate) fn new(kinds: Vec<Kind>) -> Self {
        Self {
            kinds,
            in_turn: false,
            order: Order::Random,
            queues: 1,
            depth: 32,
            batch: 32,
            namespaces: 1,
            warmup: 20_000,
            end: End::Operations(2_000_000),
            rests: true,
            latency: false,
        }
    }

    /// Entries of an I/O submission queue.
    pub(crate) fn entries(&self) -> u16 {
        (self.depth + 1).max(2)
    }

    pub(crate) fn hosts(&self) -> usize {
        self.queues.div_ceil(QUEUES_PER_HOST)
    }
}

/// A host's usual day: mostly reads and small writes, and some of everything else, errors included.
pub(crate) fn mix() -> Vec<Kind> {
    let parts = [
        (Kind::Read(4096), 160),
        (Kind::WriteInCapsule(4096), 64),
        (Kind::WriteKeyed(16_384), 16),
        (Kind::Flush, 8),
        (Kind::WriteZeroes, 4),
        (Kind::Deallocate, 3),
        (Kind::Refused, 1),
    ];
    parts.into_iter().flat_map(|(kind, count)| std::iter::repeat_n(kind, count)).collect()
}
