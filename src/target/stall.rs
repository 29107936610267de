//! Hosts that keep buffers and do not let go of them: those that take no responses, or answer no RDMA READs.
//!
//! A device may wait for such a host for ever (`rnr_retry` 7). Their share of the pool is bounded, but other hosts could use it.
//! So while others have to wait for buffers, a queue with data on their way ends when none of them arrived for [`PATIENCE`].
//! Nothing of this is done, or counted beyond one number per queue, while no host waits.

use std::collections::HashMap;
use std::time::Duration;

use super::queue::{CloseReason, Life};
use super::reactor::Reactor;
use super::request::State;
use super::shared::QueueKey;
use crate::rdma::Provider;

/// How long a queue may let data wait that are on their way, while others want their buffers.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often is looked.
const INTERVAL: Duration = Duration::from_secs(1);

/// Queues with data on their way: how far they were, and since when.
#[derive(Debug, Default)]
pub(crate) struct StallWatch {
    seen: HashMap<QueueKey, (u32, Duration)>,
    due: Option<Duration>,
}

impl StallWatch {
    /// When to look next.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.due
    }
}

impl<P: Provider> Reactor<P> {
    /// Looks for queues that keep buffers which others wait for.
    pub(crate) fn watch_stalls(&mut self, now: Duration) {
        if self.stalls.due.is_some_and(|due| now < due) {
            return;
        }
        if !self.shares.anybody_waited() {
            self.stalls = StallWatch::default();
            return;
        }
        let mut seen = HashMap::new();
        let mut stalled = Vec::new();
        for (at, queue) in self.queues.iter().filter(|(_, queue)| queue.life == Life::Live) {
            let at = at as u32;
            if !self.shares.others_waited(queue.share) || !self.has_data_on_their_way(at) {
                continue;
            }
            let before = self.stalls.seen.get(&queue.key).filter(|(progress, _)| *progress == queue.progress);
            let since = before.map_or(now, |(_, since)| *since);
            if now.saturating_sub(since) >= PATIENCE {
                stalled.push(at);
            }
            seen.insert(queue.key, (queue.progress, since));
        }
        self.stalls = StallWatch { seen, due: Some(now + INTERVAL) };
        self.shares.look_away();
        for at in stalled {
            self.close_queue(at, CloseReason::KeepsBuffers, now);
        }
    }

    fn has_data_on_their_way(&self, at: u32) -> bool {
        self.requests.of_queue(at).any(|id| {
            let request = &self.requests[id];
            // What waits for send queue entries may wait for a disk: commands in a backend hold some.
            matches!(request.state, State::ReadingFromHost | State::Responding)
        }) && self.requests.of_queue(at).any(|id| {
            let request = &self.requests[id];
            request.buffer.is_some() || request.second.is_some()
        })
    }
}
