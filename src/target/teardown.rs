//! The end of a queue, in one order whatever began it:
//!
//! 1. The queue pair goes to the error state; requests that nothing has touched yet are dropped; a marker is posted behind
//!    everything else in the send queue.
//! 2. When the marker comes back (or, from a device that is gone, a moment later) the queue pair is destroyed: from now on no
//!    device touches our memory for it. Its requests' buffers return, but for those that a backend still holds (orphans).
//! 3. When the last orphan is answered the queue is forgotten and the registry is told: only then is the controller's queue
//!    closed, a reset complete, the association over.

use std::collections::VecDeque;
use std::time::Duration;

use tracing::{info, warn};

use super::queue::{CloseReason, Life};
use super::reactor::Reactor;
use super::request::{RequestId, State, Tag, TagKind};
use super::shared::ControlMessage;
use crate::rdma::{Endpoint, Provider, SendOp, SendWr, Sge};

/// How long the marker may take before the queue pair is destroyed without it.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

impl<P: Provider> Reactor<P> {
    /// Begins the end of a queue. Later reasons for the same queue change nothing, unless
    /// they tell more: a flush and a lost connection are consequences.
    pub(crate) fn close_queue(&mut self, at: u32, reason: CloseReason, now: Duration) {
        let Some(queue) = self.queues.get_mut(at as usize) else { return };
        if queue.life != Life::Live {
            if queue.reason.is_some_and(|known| known.tells() < reason.tells()) {
                queue.reason = Some(reason);
            }
            return;
        }
        queue.life = Life::Closing { since: now };
        queue.reason = Some(reason);
        if !queue.fenced.is_empty() {
            self.fenced_queues -= 1;
        }
        queue.wait_credits.clear();
        queue.wait_reads.clear();
        queue.fenced.clear();
        self.closing += 1;
        if self.log_budget.allow(now) {
            info!(peer = %queue.peer, qid = queue.request.qid, reactor = self.index, "queue closes: {reason}");
        }
        let marker = SendWr {
            tag: Tag { kind: TagKind::Drain, generation: queue.key.generation, index: at }.encode(),
            op: SendOp::Send,
            sge: Sge { addr: 0, len: 0, lkey: 0 },
            signaled: true,
            solicited: false,
            inline: false,
        };
        if let Some(device) = self.devices[queue.device].as_mut() {
            device.endpoint.flush(now);
            device.endpoint.disconnect(queue.qp);
            // Refused by a device that is gone: the limit ends the wait.
            let _ = device.endpoint.post_send(queue.qp, &marker);
        }
        let ids: Vec<RequestId> = self.requests.of_queue(at).collect();
        for id in ids {
            match self.requests[id].state {
                State::Received
                | State::WaitBuffer
                | State::WaitCredits
                | State::Fenced
                | State::Throttled
                | State::Held
                | State::Aborting
                | State::AwaitsSecond
                | State::FusedReady
                | State::LockWait
                | State::Locked
                | State::Settling => {
                    self.drop_waiting(id, now);
                }
                State::Executing => {
                    let request = &mut self.requests[id];
                    request.state = State::Orphan;
                    if request.changes_media
                        && let Some(association) = &self.queues[at as usize].association
                    {
                        association.fence.raise(request.subject.nsid);
                    }
                }
                State::ReadingFromHost | State::Responding | State::Orphan | State::Free => {}
            }
        }
    }

    /// Closes the queues whose hosts had their time for a Connect command.
    pub(crate) fn close_unconnected(&mut self, now: Duration) {
        while let Some((_, key)) = self.unconnected.front().copied().filter(|(due, _)| *due <= now) {
            self.unconnected.pop_front();
            if let Some(at) = self.queue_by_key(key)
                && self.queues[at as usize].association.is_none()
            {
                self.close_queue(at, CloseReason::NeverConnected, now);
            }
        }
    }

    fn drop_waiting(&mut self, id: RequestId, now: Duration) {
        self.leave_line(id);
        self.leave_buffer_line(id);
        // The other half of a pair is of the same queue, and dropped as well.
        if let Some(extra) = self.requests[id].extra.as_mut()
            && let Some(partner) = extra.partner.take()
            && let Some(other) = self.requests[partner].extra.as_mut()
        {
            other.partner = None;
        }
        self.release_extra(id, now);
        self.withdraw_sink(id);
        self.return_buffers(id);
        self.requests.release(id);
    }

    /// The marker came back: the send queue is empty.
    pub(crate) fn on_drained(&mut self, tag: Tag, now: Duration) {
        let drained = self.queues.get(tag.index as usize).is_some_and(|queue| {
            queue.key.generation & super::request::GENERATION_MASK == tag.generation
                && matches!(queue.life, Life::Closing { .. })
        });
        if drained {
            self.destroy_queue_pair(tag.index, now);
        }
    }

    /// Timers of queues that are closing, and of a target that stops.
    pub(crate) fn advance_teardown(&mut self, now: Duration) {
        if let Some(since) = self.draining_since {
            self.drain_step(since, now);
        }
        let overdue: Vec<u32> = self
            .queues
            .iter()
            .filter(
                |(_, queue)| matches!(queue.life, Life::Closing { since } if now.saturating_sub(since) >= FLUSH_LIMIT),
            )
            .map(|(at, _)| at as u32)
            .collect();
        for at in overdue {
            self.destroy_queue_pair(at, now);
        }
    }

    fn destroy_queue_pair(&mut self, at: u32, now: Duration) {
        let queue = &mut self.queues[at as usize];
        let (device_at, qp, shared, entries) =
            (queue.device, queue.qp, queue.shared_receives, queue.request.sq_entries);
        queue.life = Life::Draining;
        self.closing -= 1;
        self.note_end(at, now);
        if let Some(device) = self.devices[device_at].as_mut() {
            device.endpoint.destroy(qp);
            if let Some(entry) = device.by_qp.get_mut(qp.0 as usize) {
                *entry = 0;
            }
            if shared {
                device.wanted = device.wanted.saturating_sub(entries);
            }
        }
        let ids: Vec<RequestId> =
            self.requests.of_queue(at).filter(|id| self.requests[*id].state != State::Orphan).collect();
        for id in ids {
            self.drop_waiting(id, now);
        }
        if !shared {
            self.memory.free_queue_slots(at);
        }
        self.buffers_returned = true;
        self.drop_device_if_unused(device_at);
        self.forget_if_empty(at, now);
    }

    /// Forgets a queue when no backend holds anything of it, and tells the registry.
    pub(crate) fn forget_if_empty(&mut self, at: u32, now: Duration) {
        let queue = &self.queues[at as usize];
        if queue.executing > 0 {
            return;
        }
        let (qid, association, key) = (queue.request.qid, queue.association.clone(), queue.key);
        let traffic = queue.activity.tally.traffic();
        self.forget_queue(at);
        if let Some(association) = association {
            let ctrl = association.ctrl;
            self.shared.with_control(|control| {
                control.note_past(ctrl, traffic);
                let empty = control.queues.get_mut(&ctrl).is_none_or(|queues| {
                    queues.retain(|queue| queue.key != key);
                    queues.is_empty()
                });
                if empty {
                    control.queues.remove(&ctrl);
                }
                control.registry.queue_closed(ctrl, qid, now);
                self.shared.finish_shutdown(control, ctrl);
            });
        }
    }

    /// Removes a queue from the tables. Its queue pair is destroyed, its requests are released.
    pub(crate) fn forget_queue(&mut self, at: u32) {
        let queue = self.queues.remove(at as usize);
        self.shares.leave(queue.share);
        self.by_conn.remove(&queue.conn);
        if queue.life == Life::Live
            && let Some(device) = self.devices[queue.device].as_mut()
        {
            // It never began to close: its accept was refused.
            if let Some(entry) = device.by_qp.get_mut(queue.qp.0 as usize) {
                *entry = 0;
            }
            if queue.shared_receives {
                device.wanted = device.wanted.saturating_sub(queue.request.sq_entries);
            } else {
                self.memory.free_queue_slots(at);
            }
        } else {
            self.return_budget(queue.request.sq_entries);
            self.shared.control_mail.send(ControlMessage::Gone(queue.conn));
        }
        self.drop_device_if_unused(queue.device);
    }

    /// A removed device goes when its last queue pair is destroyed.
    fn drop_device_if_unused(&mut self, at: usize) {
        let removed = self.devices[at].as_ref().is_some_and(|device| device.removed);
        if removed && !self.queues.iter().any(|(_, queue)| queue.device == at && queue.life != Life::Draining) {
            self.drop_device(at);
        }
    }

    /// A device is gone: everything on it ends at once.
    pub(crate) fn remove_device(&mut self, at: usize, now: Duration) {
        let Some(device) = self.devices[at].as_mut() else { return };
        device.removed = true;
        warn!(reactor = self.index, "an RDMA device was removed; its connections end");
        let queues: Vec<u32> =
            self.queues.iter().filter(|(_, queue)| queue.device == at).map(|(index, _)| index as u32).collect();
        for queue in &queues {
            self.close_queue(*queue, CloseReason::DeviceRemoved, now);
        }
        self.drop_device_if_unused(at);
    }

    /// Commands that waited for a host's earlier writes to their namespace go on when those are answered.
    pub(crate) fn serve_fences(&mut self, now: Duration) {
        let waiting: Vec<u32> =
            self.queues.iter().filter(|(_, queue)| !queue.fenced.is_empty()).map(|(at, _)| at as u32).collect();
        for at in waiting {
            let queue = &mut self.queues[at as usize];
            let Some(fence) = queue.association.as_ref().map(|association| association.fence.clone()) else { continue };
            let (held, free): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut queue.fenced)
                .into_iter()
                .partition(|id| fence.holds(self.requests[*id].subject.nsid));
            if held.is_empty() {
                self.fenced_queues -= 1;
            }
            queue.fenced = held;
            for id in free {
                if self.requests[id].state == State::Fenced {
                    self.acquire(id, now);
                }
            }
        }
    }
}
