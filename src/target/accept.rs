//! The birth of a queue: a connection request that the control thread admitted becomes a queue pair with its receives
//! posted, and is accepted; or rejected with the status that says why.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{debug, warn};

use super::fused::Detour;
use super::memory::{Home, Memory, SlotId};
use super::options::ADMIN_IN_CAPSULE;
use super::private_data::{QueueRequest, RejectStatus};
use super::queue::{CloseReason, Life, Queue};
use super::reactor::{Device, Reactor};
use super::request::{Tag, TagKind};
use super::share::STRANGERS;
use super::shared::{Activity, ControlMessage, QueueKey};
use crate::rdma::{ConnParams, Endpoint, Incoming, Provider, QpOptions, RecvQueue};

/// Send queue entries beyond two per command: room for one descriptor list, and the drain marker.
const EXTRA_SENDS: u32 = 17;

impl<P: Provider> Reactor<P> {
    pub(crate) fn accept(&mut self, incoming: P::Incoming, request: QueueRequest, now: Duration) {
        let (peer, local, conn) = (incoming.peer(), incoming.local(), incoming.conn());
        if let Err((incoming, status, detail)) = self.try_accept(incoming, request, now) {
            if self.log_budget.allow(now) {
                warn!(%peer, %local, qid = request.qid, "connection rejected: {status}: {detail}");
            }
            self.shared.counters.connections_rejected.fetch_add(1, Ordering::Relaxed);
            self.return_budget(request.sq_entries);
            if let Some(incoming) = incoming {
                incoming.reject(&status.encode());
            }
            self.shared.control_mail.send(ControlMessage::Gone(conn));
        }
    }

    fn try_accept(
        &mut self,
        incoming: P::Incoming,
        request: QueueRequest,
        now: Duration,
    ) -> Result<(), (Option<P::Incoming>, RejectStatus, String)> {
        let entries = request.sq_entries;
        if self.draining_since.is_some() {
            return Err((Some(incoming), RejectStatus::NoResources, "the target stops".into()));
        }
        let at = match self.device_for(incoming.device()) {
            Ok(at) => at,
            Err(error) => return Err((Some(incoming), RejectStatus::NoResources, error.to_string())),
        };
        let (peer, local, conn) = (incoming.peer(), incoming.local(), incoming.conn());
        self.reclaim_receives(entries, at);
        let Some(device) = self.devices[at].as_mut() else {
            return Err((Some(incoming), RejectStatus::NoResources, "the device is gone".into()));
        };
        let caps = device.endpoint.caps();
        let reads = incoming.initiator_depth().min(caps.max_initiator_depth);
        if reads == 0 {
            return Err((Some(incoming), RejectStatus::InvalidIrd, "RDMA READ depth 0".into()));
        }
        let send_wr = (2 * entries + EXTRA_SENDS).min(caps.max_qp_wr);
        if send_wr <= EXTRA_SENDS {
            return Err((Some(incoming), RejectStatus::NoResources, format!("the device allows {send_wr} sends")));
        }
        let room = device.shared_depth > 0 && device.wanted + entries <= device.shared_depth;
        // Receives in a shared queue cannot be taken back when the queues that they were for are gone: what is short elsewhere is
        // there, and an admin queue uses it too.
        let short = (self.memory.free_slots.len() as u32) < entries;
        let shared_receives = room && (request.qid != 0 || short);
        let own = if shared_receives { 0 } else { entries };
        if own > caps.max_qp_wr {
            return Err((
                Some(incoming),
                RejectStatus::NoResources,
                format!("{own} receives are more than the device allows"),
            ));
        }
        let options = QpOptions { send_wr, recv_wr: own, recv_sge: 2, inline: if device.inline { 16 } else { 0 } };
        let qp = match device.endpoint.create_incoming(incoming, &options) {
            Ok(qp) => qp,
            Err((incoming, error)) => return Err((Some(incoming), RejectStatus::NoResources, error.to_string())),
        };

        let generation = self.next_generation;
        self.next_generation = self.next_generation.wrapping_add(1).max(1);
        let entry = self.queues.vacant_entry();
        let index = entry.key() as u32;
        let key = QueueKey { reactor: self.index, index, generation };
        entry.insert(Queue {
            key,
            device: at,
            qp,
            conn,
            peer,
            local,
            request,
            life: Life::Live,
            reason: None,
            association: None,
            activity: Arc::new(Activity::default()),
            shared_receives,
            share: STRANGERS,
            in_capsule: if request.qid == 0 { ADMIN_IN_CAPSULE } else { self.shared.options.in_capsule_data },
            sq_entries: entries,
            sqhd: 0,
            no_sqhd: false,
            outstanding: 0,
            send_credits: send_wr - 1,
            read_credits: u32::from(reads),
            wait_credits: VecDeque::with_capacity(entries as usize),
            wait_reads: VecDeque::with_capacity(entries as usize),
            fenced: VecDeque::new(),
            progress: 0,
            executing: 0,
            detour: Detour::None,
        });
        if device.by_qp.len() <= qp.0 as usize {
            device.by_qp.resize(qp.0 as usize + 1, 0);
        }
        device.by_qp[qp.0 as usize] = index + 1;
        self.by_conn.insert(conn, index);
        let mut unconnected = std::mem::take(&mut self.unconnected);
        forget_gone(&mut unconnected, self.queues.len(), |key| self.queue_by_key(key).is_some());
        unconnected.push_back((now + self.shared.options.connect_timeout, key));
        self.unconnected = unconnected;

        // All receives stand before the peer may send.
        if !self.post_receives(index) {
            let status = RejectStatus::NoResources;
            if let Some(device) = self.devices[at].as_mut() {
                device.endpoint.reject(qp, &status.encode());
            }
            self.forget_queue(index);
            return Err((None, status, "no memory for its receives".into()));
        }
        let Some(device) = self.devices[at].as_mut() else { return Ok(()) };
        device.endpoint.flush(now);
        let reply = request.encode_accept();
        let params = ConnParams { private_data: &reply, initiator_depth: reads, responder_resources: 0 };
        match device.endpoint.accept(qp, &params) {
            Ok(()) => {
                self.shared.counters.connections_accepted.fetch_add(1, Ordering::Relaxed);
                debug!(%peer, %local, qid = request.qid, entries, reads, reactor = self.index, "connection accepted");
            }
            Err(error) => {
                if self.log_budget.allow(now) {
                    warn!(%peer, %local, qid = request.qid, "accept failed: {error}");
                }
                self.close_queue(index, CloseReason::AcceptFailed, now);
            }
        }
        Ok(())
    }

    /// Where receives are short, devices without queues let go of those in their shared queues: they are opened anew when
    /// somebody connects through them.
    fn reclaim_receives(&mut self, entries: u32, except: usize) {
        if self.memory.free_slots.len() >= entries as usize {
            return;
        }
        for at in 0..self.devices.len() {
            let posts = self.devices[at].as_ref().is_some_and(|device| device.posted > 0);
            if at != except && posts && !self.queues.iter().any(|(_, queue)| queue.device == at) {
                debug!(reactor = self.index, "a device without connections lets go of its receives");
                self.drop_device(at);
            }
        }
    }

    /// Posts the receives of a new queue: its own, or what the shared queue lacks. `false` when memory is short.
    fn post_receives(&mut self, at: u32) -> bool {
        let queue = &self.queues[at as usize];
        let (device, entries, shared) = (queue.device, queue.sq_entries, queue.shared_receives);
        if !shared {
            return (0..entries).all(|_| self.post_new_receive(device, Home::Queue { queue: at }));
        }
        if let Some(device) = self.devices[device].as_mut() {
            device.wanted += entries;
        }
        self.top_up(device)
    }

    /// Posts shared receives until the admitted queues have theirs. `false` when memory is short.
    pub(crate) fn top_up(&mut self, device: usize) -> bool {
        while self.devices[device].as_ref().is_some_and(|device| device.posted < device.wanted) {
            if !self.post_new_receive(device, Home::Shared { device: device as u32 }) {
                return false;
            }
        }
        true
    }

    fn post_new_receive(&mut self, device: usize, home: Home) -> bool {
        match self.memory.take_slot(home) {
            Some(slot) => self.post_slot(device, slot),
            None => false,
        }
    }

    /// Posts a slot where it belongs. On failure the slot is free again: the queue pair is dying.
    pub(crate) fn post_slot(&mut self, at: usize, slot: SlotId) -> bool {
        let Some(device) = self.devices[at].as_mut() else {
            self.memory.free_slot(slot);
            return false;
        };
        let to = match self.memory.slots[slot as usize].home {
            Home::Shared { .. } => RecvQueue::Shared,
            Home::Queue { queue } => RecvQueue::Qp(self.queues[queue as usize].qp),
            Home::Free => return false,
        };
        let tag = Tag { kind: TagKind::Receive, generation: self.memory.slots[slot as usize].generation, index: slot };
        post_receive(device, to, &mut self.memory, tag)
    }
}

/// Posts the receive again, of this tag and home, that took a command of a queue that is live; or frees its slot when the queues
/// that needed it are gone.
#[inline(always)]
pub(super) fn repost<P: Provider>(device: &mut Device<P>, queue: &Queue, memory: &mut Memory, tag: Tag, home: Home) {
    let to = match home {
        Home::Free => return,
        Home::Shared { .. } if device.posted >= device.wanted => return memory.free_slot(tag.index),
        Home::Shared { .. } => RecvQueue::Shared,
        Home::Queue { .. } => RecvQueue::Qp(queue.qp),
    };
    post_receive(device, to, memory, tag);
}

/// Posts a slot's receive. On failure the slot is free again: the queue pair is dying.
#[inline(always)]
fn post_receive<P: Provider>(device: &mut Device<P>, to: RecvQueue, memory: &mut Memory, tag: Tag) -> bool {
    let (sges, count) = memory.receive_sges(tag.index, device.mr.lkey);
    if device.endpoint.post_recv(to, tag.encode(), &sges[..count]).is_err() {
        memory.free_slot(tag.index);
        return false;
    }
    if to == RecvQueue::Shared {
        device.posted += 1;
    }
    true
}

/// Whoever connects and disconnects at once leaves an entry each time, for as long as a Connect command may take: those of
/// queues that are gone go when they are more than half, so that there are about twice as many entries as queues at most.
fn forget_gone(unconnected: &mut VecDeque<(Duration, QueueKey)>, queues: usize, is_there: impl Fn(QueueKey) -> bool) {
    if unconnected.len() > 2 * queues + FEW {
        unconnected.retain(|(_, key)| is_there(*key));
    }
}

/// Entries that are not worth a search.
const FEW: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_that_are_gone_are_forgotten_and_the_others_wait_for_their_turn() {
        let key = |generation: u32| QueueKey { reactor: 0, index: generation % 8, generation };
        let (mut unconnected, mut most) = (VecDeque::new(), 0);
        // One in a thousand stays.
        let is_there = |key: QueueKey| key.generation.is_multiple_of(1000);
        for generation in 0..10_000 {
            let queues = 1 + generation as usize / 1000;
            forget_gone(&mut unconnected, queues, is_there);
            unconnected.push_back((Duration::from_millis(generation.into()), key(generation)));
            most = most.max(unconnected.len());
        }
        assert!((FEW..=2 * 10 + FEW + 1).contains(&most), "{most} entries");
        forget_gone(&mut unconnected, 0, is_there);
        let left: Vec<u32> = unconnected.iter().map(|(_, key)| key.generation).filter(|at| at % 1000 == 0).collect();
        assert_eq!(left, [0, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000], "the oldest first");
    }
}
