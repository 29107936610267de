//! What a running target holds and has done, for its owner to look at; reading costs the reactors nothing.

use std::sync::atomic::Ordering;

use super::causes::Ends;
use super::namespace::Published;
use super::shared::Shared;
use super::tally::Traffic;
use crate::rdma::Provider;

/// What a target holds at a moment, all reactors together. With no host connected all but the totals are zero, but for
/// receives of the shared queues: those stay posted, with their pages, for the next host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections accepted since the start.
    pub connections_accepted: u64,
    /// Connections rejected since the start.
    pub connections_rejected: u64,
    /// Controllers, those that are being torn down included.
    pub controllers: usize,
    /// How often hosts authenticated since the start, on each queue and each time.
    pub authentications: u64,
    /// Queues.
    pub queues: usize,
    /// Commands under way.
    pub requests: usize,
    /// Bytes of data buffers in use.
    pub pool_used: usize,
    /// Bytes of receive pages in use: those of posted receives, and those with the in-capsule data of commands under way.
    pub pages_used: usize,
    /// Bytes of admin buffers in use.
    pub admin_pool_used: usize,
    /// Receive slots in use.
    pub slots_used: usize,
    /// Receives that no admitted queue has reserved.
    pub receives_free: usize,
    /// Queues that ended since the start, by cause.
    pub ends: Ends,
}

/// What hosts did with one namespace since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IoTotals {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Namespace ID.
    pub nsid: u32,
    /// Read and Compare commands whose data were read; also those of a Compare that found others.
    pub reads: u64,
    /// Bytes of those.
    pub bytes_read: u64,
    /// Write commands that succeeded.
    pub writes: u64,
    /// Bytes of those.
    pub bytes_written: u64,
    /// Commands of any kind that the backend failed; those that hosts had cancelled are none of them.
    pub errors: u64,
}

impl Published {
    pub(crate) fn totals(&self) -> IoTotals {
        let sum: Traffic = self.counters.iter().map(|counters| counters.tally.traffic()).sum();
        IoTotals {
            nqn: self.nqn.to_string(),
            nsid: self.view.nsid,
            reads: sum.reads,
            bytes_read: sum.bytes_read,
            writes: sum.writes,
            bytes_written: sum.bytes_written,
            errors: sum.errors,
        }
    }
}

pub(crate) fn count<P: Provider>(shared: &Shared<P>) -> Counters {
    let mut counters = Counters {
        connections_accepted: shared.counters.connections_accepted.load(Ordering::Relaxed),
        connections_rejected: shared.counters.connections_rejected.load(Ordering::Relaxed),
        controllers: shared.with_control(|control| control.registry.controllers().count()),
        authentications: shared.with_control(|control| control.registry.authentications()),
        ends: shared.ends.counts(),
        ..Counters::default()
    };
    for port in &shared.reactors {
        counters.queues += port.queues.load(Ordering::Relaxed) as usize;
        counters.receives_free += port.free_slots.load(Ordering::Relaxed) as usize;
        counters.requests += port.gauges.requests.load(Ordering::Relaxed);
        counters.pool_used += port.gauges.pool_used.load(Ordering::Relaxed);
        counters.pages_used += port.gauges.pages_used.load(Ordering::Relaxed);
        counters.admin_pool_used += port.gauges.admin_pool_used.load(Ordering::Relaxed);
        counters.slots_used += port.gauges.slots_used.load(Ordering::Relaxed);
    }
    counters
}
