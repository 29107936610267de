//! The engine: all queue pairs of one address and one thread.
use core::cmp::Reverse;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BinaryHeap, VecDeque};

use super::Qpn;
use super::batch::{Path, TxBatch};
use super::keys::{Keys, Memory};
use super::packet::Packet;
use super::qp::{Polled, QueuePair};
use super::rate::Dcqcn;
use super::recv::{gather, total};
pub(super) use super::shared::Shared;
use super::shared::{Counters, CqId, SrqId};
use super::verbs::{Completion, Connection, MAX_INLINE, PostError, QpState, RecvWr, SendOp, SendWr, Status};

/// How an engine is set up.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The local address.
    pub local: IpAddr,
    /// Which of the engines of this address this is. It is the low bits of its queue pair numbers, by which the driver
    /// brings packets to it.
    pub index: u32,
    /// How many low bits of a queue pair number that takes.
    pub index_bits: u32,
    /// How many bits number the queue pairs of this engine. The rest of the 24 bits counts how often a slot was used, so
    /// that the packets of a connection that ended miss the next one.
    pub slot_bits: u32,
    /// Something random: where those counts and the keys start, so that numbers from before a restart do not fit.
    pub seed: u64,
    /// Bytes of RDMA READ responses that the receive buffer holds.
    pub read_credit: u64,
    /// The most bytes in one RDMA READ request.
    pub read_chunk: u32,
    /// Congestion control.
    pub dcqcn: Dcqcn,
}

impl Config {
    /// An engine that is the only one of its address.
    #[must_use]
    pub fn new(local: IpAddr) -> Self {
        Self {
            local,
            index: 0,
            index_bits: 4,
            slot_bits: 12,
            seed: 0,
            read_credit: 1 << 20,
            read_chunk: 1 << 16,
            dcqcn: Dcqcn::default(),
        }
    }
}

/// The queues of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Where completions of the send queue go.
    pub send_cq: CqId,
    /// Where completions of receives go.
    pub recv_cq: CqId,
    /// Receives come from here instead of a queue of its own.
    pub srq: Option<SrqId>,
    /// Send work requests that can be posted.
    pub max_send: usize,
    /// Receives that can be posted to its own queue.
    pub max_recv: usize,
}

/// Something that happened to a queue pair by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpEvent {
    /// The first request of the peer came: the connection is established, whatever became of the CM message that says so.
    Established(Qpn),
    /// It went to the error state; its work requests are flushed.
    Failed(Qpn),
}

/// See the module's documentation and that of [`super`].
#[derive(Debug)]
pub struct Engine {
    config: Config,
    shared: Shared,
    slots: Vec<Slot>,
    free: VecDeque<usize>,
    /// Queue pairs that may have something to send.
    ready: VecDeque<usize>,
    /// Queue pairs that wait for receive credit, and those whose turn it is to take some: they go before all others.
    starved: VecDeque<usize>,
    turn: VecDeque<usize>,
    timers: BinaryHeap<Reverse<(Duration, usize)>>,
    events: VecDeque<QpEvent>,
    #[cfg(test)]
    last_arrival: Duration,
}

#[derive(Debug)]
struct Slot {
    /// The part of the queue pair number above slot and index.
    generation: u32,
    qp: Option<Box<QueuePair>>,
}

impl Engine {
    /// An engine without queue pairs.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let [key_seed, ..] = config.seed.to_le_bytes();
        Self {
            config,
            shared: Shared::new(key_seed, config.read_credit, config.read_chunk),
            slots: Vec::new(),
            free: VecDeque::new(),
            ready: VecDeque::new(),
            starved: VecDeque::new(),
            turn: VecDeque::new(),
            timers: BinaryHeap::new(),
            events: VecDeque::new(),
            #[cfg(test)]
            last_arrival: Duration::ZERO,
        }
    }

    /// The memory keys.
    pub const fn keys(&mut self) -> &mut Keys {
        &mut self.shared.keys
    }

    /// A test's fault: as if no receive were posted.
    #[cfg(test)]
    pub(crate) const fn hold_receives(&mut self, hold: bool) {
        self.shared.receives_held = hold;
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Bytes of RDMA READ responses under way.
    #[must_use]
    pub const fn read_credit_used(&self) -> u64 {
        self.shared.credit.used()
    }

    /// A completion queue. `depth` only reserves memory: it never overflows, as the work requests that it serves are
    /// bounded.
    pub fn create_cq(&mut self, depth: usize) -> CqId {
        self.shared.create_cq(depth)
    }

    /// Ends a completion queue; what completes later is forgotten.
    pub fn destroy_cq(&mut self, cq: CqId) {
        self.shared.destroy_cq(cq);
    }

    /// A shared receive queue.
    pub fn create_srq(&mut self, depth: usize) -> SrqId {
        self.shared.create_srq(depth)
    }

    /// Ends a shared receive queue with its receives.
    pub fn destroy_srq(&mut self, srq: SrqId) {
        self.shared.destroy_srq(srq);
    }

    /// A queue pair, which takes receives from now on. None when all numbers are in use.
    pub fn create_qp(&mut self, qp: &QpConfig) -> Option<Qpn> {
        let most = 1_usize << self.config.slot_bits;
        let index = if self.slots.len() < most {
            let generation = u32::try_from(self.config.seed >> 8 & 0xff_ffff).unwrap_or(0);
            self.slots.push(Slot { generation, qp: None });
            self.slots.len() - 1
        } else {
            self.free.pop_front()?
        };
        let qpn = self.next_qpn(index)?;
        let depth = (qp.max_send, qp.max_recv);
        let mut new = QueuePair::new(qpn, qp.send_cq.0, qp.recv_cq.0, qp.srq.map(|srq| srq.0), depth);
        new.state = QpState::Init;
        self.slots.get_mut(index)?.qp = Some(Box::new(new));
        Some(qpn)
    }

    /// Connects a queue pair to its peer. False when it does not exist or was connected before.
    pub fn connect(&mut self, qpn: Qpn, conn: Connection) -> bool {
        let path = Path { local: self.config.local, remote: conn.remote, tos: conn.tos };
        match self.qp(qpn) {
            Some((_, qp)) if qp.state == QpState::Init => {
                qp.connect(conn, path);
                true
            }
            _ => false,
        }
    }

    /// The slot of a queue pair number of this engine: small, and used again when the queue pair is gone.
    #[must_use]
    pub fn slot_number(&self, qpn: Qpn) -> Option<usize> {
        self.slot_of(qpn)
    }

    /// The state of a queue pair.
    #[must_use]
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        let qp = self.slots.get(self.slot_of(qpn)?)?.qp.as_ref()?;
        (qp.qpn == qpn).then_some(qp.state)
    }

    /// Takes a queue pair to the error state: everything that is posted completes as flushed.
    pub fn fail_qp(&mut self, qpn: Qpn) {
        let Self { slots, shared, config, events, .. } = self;
        let Some(qp) = find(slots, config, qpn) else {
            return;
        };
        if qp.state != QpState::Err {
            qp.end(None, shared);
            events.push_back(QpEvent::Failed(qpn));
        }
        self.feed_starved();
    }

    /// Ends a queue pair. What was posted and did not complete never will, and its memory is not touched any more.
    pub fn destroy_qp(&mut self, qpn: Qpn) {
        let Some(index) = self.slot_of(qpn) else {
            return;
        };
        let Some(slot) = self.slots.get_mut(index).filter(|s| s.qp.as_ref().is_some_and(|qp| qp.qpn == qpn)) else {
            return;
        };
        if let Some(qp) = slot.qp.take() {
            for chunk in &qp.requester.chunks {
                self.shared.credit.give(chunk.bytes);
            }
            self.free.push_back(index);
        }
        self.feed_starved();
    }

    /// Posts to a send queue. Nothing is sent before [`Engine::poll_transmit`]. In the error state the work request
    /// completes as flushed.
    ///
    /// # Errors
    /// When nothing was posted.
    pub fn post_send<M: Memory>(&mut self, qpn: Qpn, wr: &SendWr<'_>, memory: &M) -> Result<(), PostError> {
        let inline = if wr.inline { copy_inline(&self.shared.keys, memory, wr) } else { None };
        let (index, qp) = self.qp(qpn).ok_or(PostError::Unknown)?;
        match (qp.state, qp.conn) {
            (QpState::Rts, Some((conn, _))) => qp.requester.post(conn.mtu.bytes(), wr, inline)?,
            (QpState::Err, _) => {
                let cq = qp.send_cq;
                self.shared.complete(cq, Completion::new(wr.tag, Status::WrFlushErr, qpn, 0));
                return Ok(());
            }
            _ => return Err(PostError::State),
        }
        self.make_ready(index);
        Ok(())
    }

    /// Send work requests that can be posted now. In the error state any number can.
    #[must_use]
    pub fn send_room(&self, qpn: Qpn) -> Option<usize> {
        let qp = self.slots.get(self.slot_of(qpn)?)?.qp.as_ref().filter(|qp| qp.qpn == qpn)?;
        Some(if qp.state == QpState::Err { usize::MAX } else { qp.requester.room() })
    }

    /// Posts to a queue pair's own receive queue. In the error state the receive completes as flushed.
    ///
    /// # Errors
    /// When nothing was posted.
    pub fn post_recv(&mut self, qpn: Qpn, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let (_, qp) = self.qp(qpn).ok_or(PostError::Unknown)?;
        match qp.state {
            QpState::Init | QpState::Rts => qp.recv.post(wr),
            QpState::Reset => Err(PostError::State),
            QpState::Err => {
                let cq = qp.recv_cq;
                self.shared.complete(cq, Completion::new(wr.tag, Status::WrFlushErr, qpn, 0));
                Ok(())
            }
        }
    }

    /// Posts to a shared receive queue.
    ///
    /// # Errors
    /// When nothing was posted.
    pub fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.shared.srq(srq.0).ok_or(PostError::Unknown)?.post(wr)
    }

    /// Receives in a shared receive queue.
    pub fn srq_len(&mut self, srq: SrqId) -> usize {
        self.shared.srq(srq.0).map_or(0, |queue| queue.len())
    }

    /// Moves up to `out.len()` completions out of a completion queue, oldest first.
    pub fn poll_cq(&mut self, cq: CqId, out: &mut Vec<Completion>, most: usize) -> usize {
        let Some(queue) = self.shared.cq(cq) else {
            return 0;
        };
        let count = most.min(queue.len());
        out.extend(queue.drain(..count));
        count
    }

    /// Completions in a completion queue, and whether one of them is solicited or a failure.
    pub fn cq_len(&mut self, cq: CqId) -> usize {
        self.shared.cq(cq).map_or(0, |queue| queue.len())
    }

    /// What happened to queue pairs.
    pub fn poll_event(&mut self) -> Option<QpEvent> {
        self.events.pop_front()
    }

    /// Takes in a packet whose ICRC is right: a whole UDP payload. `congested` is the ECN mark of its IP header.
    pub fn handle_packet<M: Memory>(
        &mut self,
        now: Duration,
        from: IpAddr,
        congested: bool,
        bytes: &[u8],
        memory: &mut M,
    ) {
        #[cfg(test)]
        if self.last_arrival < now {
            self.last_arrival = now;
            self.shared.place_late(memory);
        }
        self.shared.counters.received += 1;
        let Ok(packet) = Packet::parse(bytes) else {
            self.shared.counters.malformed += 1;
            return;
        };
        let qpn = packet.header.dest;
        let Self { slots, shared, config, .. } = self;
        let qp = find(slots, config, qpn).filter(|qp| qp.conn.is_some_and(|(conn, _)| conn.remote == from));
        let Some(qp) = qp else {
            shared.counters.unknown_qp += 1;
            return;
        };
        let (before, heard) = (qp.state, qp.heard);
        let ready = qp.handle_packet(now, &packet, congested, &config.dcqcn, shared, memory);
        let (after, hears) = (qp.state, qp.heard);
        if hears && !heard {
            self.events.push_back(QpEvent::Established(qpn));
        }
        if after != before {
            self.events.push_back(QpEvent::Failed(qpn));
        }
        if let Some(index) = self.slot_of(qpn) {
            self.note_deadline(index);
            if ready {
                self.make_ready(index);
            }
        }
        self.feed_starved();
    }

    /// Adds packets to `batch` until it is full or there are no more. True when there is more to send.
    pub fn poll_transmit<M: Memory>(&mut self, now: Duration, batch: &mut TxBatch, memory: &M) -> bool {
        while let Some(index) = self.turn.pop_front().or_else(|| self.ready.pop_front()) {
            let credit = &mut self.shared.credit;
            credit.contended = !self.starved.is_empty();
            credit.shared_out = credit.contended || !self.turn.is_empty();
            let Some(qp) = self.slots.get_mut(index).and_then(|slot| slot.qp.as_mut()) else {
                continue;
            };
            qp.queued = false;
            let before = qp.state;
            let polled = qp.poll(now, &mut self.shared, memory, batch);
            let failed = qp.state != before;
            if failed {
                self.events.push_back(QpEvent::Failed(qp.qpn));
            }
            match polled {
                Polled::Idle => {}
                Polled::More => self.make_ready(index),
                Polled::Full => {
                    qp.queued = true;
                    self.ready.push_front(index);
                    self.note_deadline(index);
                    return true;
                }
                Polled::NoCredit if !qp.starved => {
                    qp.starved = true;
                    self.starved.push_back(index);
                }
                Polled::NoCredit => {}
            }
            self.note_deadline(index);
            if failed {
                self.feed_starved();
            }
        }
        false
    }

    /// When [`Engine::handle_timeout`] has something to do. It may be early, and then has nothing.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Duration> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Does what time asks for.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some(Reverse((at, index))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            let Self { slots, shared, events, .. } = self;
            let Some(qp) = slots.get_mut(index).and_then(|slot| slot.qp.as_mut()) else {
                continue;
            };
            if qp.timer_at == Some(at) {
                qp.timer_at = None;
            }
            if qp.deadline().is_some_and(|deadline| deadline <= now) {
                let before = qp.state;
                let ready = qp.handle_timeout(now, shared);
                if qp.state != before {
                    events.push_back(QpEvent::Failed(qp.qpn));
                }
                if ready {
                    self.make_ready(index);
                }
            }
            self.note_later_deadline(index, now);
        }
        self.feed_starved();
    }

    /// Sees to it that the timers know a queue pair's deadline. Entries are lazy: a deadline that moves away keeps its old
    /// entry, so that nothing is done per packet.
    fn note_deadline(&mut self, index: usize) {
        let Some(qp) = self.slots.get_mut(index).and_then(|slot| slot.qp.as_mut()) else {
            return;
        };
        if let Some(deadline) = qp.deadline()
            && qp.timer_at.is_none_or(|at| deadline < at)
        {
            qp.timer_at = Some(deadline);
            self.timers.push(Reverse((deadline, index)));
        }
    }

    /// As [`Engine::note_deadline`], for a queue pair that was just given its turn: what is due already waits for
    /// [`Engine::poll_transmit`], not for the timer.
    fn note_later_deadline(&mut self, index: usize, now: Duration) {
        let due = self.slots.get(index).and_then(|slot| slot.qp.as_ref()).and_then(|qp| qp.deadline());
        if due.is_some_and(|at| at > now) {
            self.note_deadline(index);
        }
    }

    fn make_ready(&mut self, index: usize) {
        if let Some(qp) = self.slots.get_mut(index).and_then(|slot| slot.qp.as_mut())
            && !qp.queued
        {
            qp.queued = true;
            self.ready.push_back(index);
        }
    }

    /// Lets queue pairs try again that waited for receive credit, oldest first and before all others.
    fn feed_starved(&mut self) {
        if self.starved.is_empty() || !self.shared.has_credit() {
            return;
        }
        while let Some(index) = self.starved.pop_front() {
            if let Some(qp) = self.slots.get_mut(index).and_then(|slot| slot.qp.as_mut()) {
                qp.starved = false;
            }
            self.turn.push_back(index);
        }
    }

    fn qp(&mut self, qpn: Qpn) -> Option<(usize, &mut QueuePair)> {
        let index = self.slot_of(qpn)?;
        Some((index, find(&mut self.slots, &self.config, qpn)?))
    }

    fn slot_of(&self, qpn: Qpn) -> Option<usize> {
        slot_of(&self.config, qpn)
    }

    /// The next number of a slot: never 0, 1 or all ones, which mean something else.
    fn next_qpn(&mut self, index: usize) -> Option<Qpn> {
        let shift = self.config.index_bits + self.config.slot_bits;
        let slot = self.slots.get_mut(index)?;
        let low = u32::try_from(index).ok()? << self.config.index_bits | self.config.index;
        loop {
            slot.generation = slot.generation.wrapping_add(1);
            let generation = slot.generation & (0xff_ffff >> shift);
            let qpn = Qpn::new(generation << shift | low);
            if generation != 0 && qpn.get() != 0xff_ffff {
                return Some(qpn);
            }
        }
    }
}

/// The bytes of a work request, if they are few. Those that no key names are for the requester to refuse.
fn copy_inline<M: Memory>(keys: &Keys, memory: &M, wr: &SendWr<'_>) -> Option<[u8; MAX_INLINE]> {
    let mut bytes = [0; MAX_INLINE];
    let len = usize::try_from(total(wr.sges)).ok()?;
    let place = bytes.get_mut(..len).filter(|_| !matches!(wr.op, SendOp::RdmaRead(_)))?;
    gather(keys, memory, wr.sges.iter(), 0, place).ok()?;
    Some(bytes)
}

fn slot_of(config: &Config, qpn: Qpn) -> Option<usize> {
    let index = qpn.get() & ((1 << config.index_bits) - 1);
    let slot = qpn.get() >> config.index_bits & ((1 << config.slot_bits) - 1);
    if index == config.index { usize::try_from(slot).ok() } else { None }
}

fn find<'s>(slots: &'s mut [Slot], config: &Config, qpn: Qpn) -> Option<&'s mut QueuePair> {
    let qp = slots.get_mut(slot_of(config, qpn)?)?.qp.as_deref_mut()?;
    (qp.qpn == qpn).then_some(qp)
}
