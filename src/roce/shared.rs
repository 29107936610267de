//! What the queue pairs of one engine share: keys, completion queues, shared receive queues, receive credit, counters.
use std::collections::VecDeque;

use super::keys::{Keys, Memory, Span};
use super::recv::RecvQueue;
use super::requester::MAX_CHUNK_PACKETS;
use super::verbs::Completion;
#[cfg(test)]
use crate::mutation::{self, Mutation};

/// Names a completion queue of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CqId(pub(super) usize);

/// Names a shared receive queue of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqId(pub(super) usize);

/// What happened so far, for the operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Packets that were taken in.
    pub received: u64,
    /// Packets that are none, or of an unknown kind.
    pub malformed: u64,
    /// Packets for a queue pair that does not exist or is not connected, or from another address than its peer's.
    pub unknown_qp: u64,
    /// Requests and responses that came before.
    pub duplicates: u64,
    /// Responses to what was not asked.
    pub ghosts: u64,
    /// Packets and RDMA READ requests that were sent again.
    pub retransmitted: u64,
    /// Times that a peer was silent for too long.
    pub timeouts: u64,
    /// Packets that were sent again since the peer was silent for longer than a round trip takes.
    pub probes: u64,
    /// Parts of RDMA READs that were asked for again since later ones came.
    pub read_gaps: u64,
    /// NAKs for a missing packet that were sent.
    pub sequence_naks_sent: u64,
    /// NAKs for a missing packet that came.
    pub sequence_naks_received: u64,
    /// "Receiver not ready" that was sent.
    pub rnr_naks_sent: u64,
    /// "Receiver not ready" that came.
    pub rnr_naks_received: u64,
    /// Congestion notifications that were sent.
    pub cnps_sent: u64,
    /// Congestion notifications that came.
    pub cnps_received: u64,
    /// Queue pairs that failed by themselves: not those that their owner ended.
    pub qp_errors: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) keys: Keys,
    cqs: Vec<Option<VecDeque<Completion>>>,
    srqs: Vec<Option<RecvQueue>>,
    pub(super) credit: Credit,
    read_chunk: u32,
    pub(super) counters: Counters,
    /// A test's fault: no receive is found.
    #[cfg(test)]
    pub(super) receives_held: bool,
    /// What [`Mutation::AckBeforePlacement`] holds back.
    #[cfg(test)]
    held_back: Vec<(Span, Vec<u8>)>,
}

/// Bytes of RDMA READ responses that may be under way: as many as the receive buffer holds, and as many again for what is
/// sent again or comes when it was taken for lost.
#[derive(Debug)]
pub(super) struct Credit {
    limit: u64,
    used: u64,
    /// Queue pairs wait for their turn: nobody else takes credit before them.
    pub(super) contended: bool,
    /// Other queue pairs have their turn next.
    pub(super) shared_out: bool,
}

impl Credit {
    /// Whether a queue pair may take so much now.
    pub(super) fn fits(&self, bytes: u32) -> bool {
        bytes == 0 || !self.contended && self.has(bytes)
    }

    fn has(&self, bytes: u32) -> bool {
        // A single chunk always fits, or nothing would ever move.
        self.used == 0 || self.used + u64::from(bytes) <= self.limit
    }

    /// Whether a queue pair should ask for no more than one chunk before others have their turn.
    pub(super) const fn is_scarce(&self) -> bool {
        self.shared_out || self.used > self.limit / 2
    }

    pub(super) fn take(&mut self, bytes: u32) {
        self.used += u64::from(bytes);
    }

    pub(super) fn give(&mut self, bytes: u32) {
        self.used = self.used.saturating_sub(u64::from(bytes));
    }

    pub(super) const fn used(&self) -> u64 {
        self.used
    }
}

impl Shared {
    pub(super) fn new(key_seed: u8, read_credit: u64, read_chunk: u32) -> Self {
        Self {
            keys: Keys::new(key_seed),
            cqs: Vec::new(),
            srqs: Vec::new(),
            credit: Credit { limit: read_credit, used: 0, contended: false, shared_out: false },
            read_chunk: u32::try_from(read_credit).unwrap_or(u32::MAX).min(read_chunk),
            counters: Counters::default(),
            #[cfg(test)]
            receives_held: false,
            #[cfg(test)]
            held_back: Vec::new(),
        }
    }

    /// Puts the data of a peer's RDMA WRITE into memory. False when they do not belong there.
    pub(super) fn place<M: Memory>(&mut self, memory: &mut M, span: Span, data: &[u8]) -> bool {
        #[cfg(test)]
        if mutation::is_on(Mutation::AckBeforePlacement) {
            self.held_back.push((span, data.to_vec()));
            return true;
        }
        memory.write(span, data)
    }

    /// Time passed.
    #[cfg(test)]
    pub(super) fn place_late<M: Memory>(&mut self, memory: &mut M) {
        for (span, data) in self.held_back.drain(..) {
            memory.write(span, &data);
        }
    }

    /// Packets of one RDMA READ request.
    pub(super) fn chunk_packets(&self, mtu: u32) -> u32 {
        (self.read_chunk / mtu).clamp(1, MAX_CHUNK_PACKETS)
    }

    /// Whether any RDMA READ request has credit.
    pub(super) fn has_credit(&self) -> bool {
        self.credit.has(self.read_chunk)
    }

    pub(super) fn create_cq(&mut self, depth: usize) -> CqId {
        CqId(insert(&mut self.cqs, VecDeque::with_capacity(depth)))
    }

    pub(super) fn destroy_cq(&mut self, cq: CqId) {
        if let Some(slot) = self.cqs.get_mut(cq.0) {
            *slot = None;
        }
    }

    pub(super) fn cq(&mut self, cq: CqId) -> Option<&mut VecDeque<Completion>> {
        self.cqs.get_mut(cq.0)?.as_mut()
    }

    pub(super) fn create_srq(&mut self, depth: usize) -> SrqId {
        SrqId(insert(&mut self.srqs, RecvQueue::new(depth)))
    }

    pub(super) fn destroy_srq(&mut self, srq: SrqId) {
        if let Some(slot) = self.srqs.get_mut(srq.0) {
            *slot = None;
        }
    }

    pub(super) fn srq(&mut self, srq: usize) -> Option<&mut RecvQueue> {
        self.srqs.get_mut(srq)?.as_mut()
    }

    pub(super) fn complete(&mut self, cq: usize, completion: Completion) {
        if let Some(Some(cq)) = self.cqs.get_mut(cq) {
            cq.push_back(completion);
        }
    }
}

/// Puts a value into the first free slot.
fn insert<T>(slots: &mut Vec<Option<T>>, value: T) -> usize {
    if let Some((index, slot)) = slots.iter_mut().enumerate().find(|(_, slot)| slot.is_none()) {
        *slot = Some(value);
        return index;
    }
    slots.push(Some(value));
    slots.len() - 1
}
