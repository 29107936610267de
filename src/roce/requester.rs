//! The requester of a queue pair: its send queue, from the work request to the packets of the request.
//!
//! Sequence numbers are given out when a work request is posted, so that every packet of every request has one fixed PSN,
//! and a position in the queue and a PSN are the same thing. Transmission continues at `next`; a retransmission moves
//! `next` back (go-back-N). What comes back from the peer is in the completer.
//!
//! An RDMA READ is asked for in *chunks*: each is an RDMA READ request of its own on the wire, takes one of the outstanding
//! reads that were negotiated, and is counted against the bytes that the driver's receive buffer holds. Its responses
//! are placed in whatever order they come, and only what is missing is asked for again.
//!
//! The receive buffer is everybody's, so a peer that vanished must not keep its share of it. When a peer was silent for so
//! long that everything is sent again, its queue pair gives back what its chunks hold, and until the peer gives a sign of
//! life it takes credit for one chunk at a time, for as long as an answer takes.
use core::time::Duration;
use std::collections::VecDeque;

use super::batch::{NotAdded, Path, TxBatch};
use super::engine::Shared;
use super::keys::Memory;
use super::packet::{Ext, Header, Reth};
use super::rate::Rate;
use super::recv::{ScatterError, gather, total};
use super::verbs::{Connection, MAX_INLINE, MAX_SGE, PostError, RemoteAddr, SendOp, SendWr, Sge, Status};
use super::window::{RetryTimer, Window};
use super::{Opcode, Place, Psn};

/// The send side of one queue pair.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) wqes: VecDeque<Wqe>,
    /// The running number of `wqes[0]`.
    pub(super) wqe_head: u64,
    /// The elements of all work requests, in order; `sge_head` is the running number of `sges[0]`.
    pub(super) sges: VecDeque<Sge>,
    sge_head: u64,
    capacity: usize,
    /// RDMA READ requests, from the oldest one whose responses are not all here.
    pub(super) chunks: VecDeque<Chunk>,
    /// The first PSN of the next work request to be posted.
    post_psn: Psn,
    /// Where transmission continues: the index of a work request and a packet of it.
    next: usize,
    next_packet: u32,
    /// The first PSN that the peer is not known to have executed.
    pub(super) una: Psn,
    /// The first PSN that was never sent.
    pub(super) top: Psn,
    /// Packets since the last one that asked for an acknowledgement.
    since_ack_req: u32,
    /// Somebody waits for the completion of a work request that went out since then.
    ack_wanted: bool,
    /// Behind the last packet that asked for an acknowledgement.
    asked: Psn,
    pub(super) window: Window,
    pub(super) timer: RetryTimer,
    pub(super) rate: Rate,
    /// The peer asked to wait until then.
    pub(super) rnr_until: Option<Duration>,
    pub(super) rnr_left: u8,
    /// When and to where transmission last went back, so that one loss is not answered twice.
    pub(super) went_back: Option<(Psn, Duration)>,
    /// Where the repair of the last loss ends.
    pub(super) recovered: Psn,
    /// The last packet that was sent is to be sent again.
    pub(super) probe: bool,
    pub(super) silence: Silence,
    /// Until when a silent peer's chunk holds credit.
    pub(super) lent_until: Option<Duration>,
}

/// Whether everything has to be sent again since the peer was silent, and how far its RDMA READs are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug, Default)]
pub(super) enum Silence {
    /// The peer is heard.
    #[default]
    None,
    /// One chunk may be asked for.
    MayAsk,
    /// It was: nothing more before the peer is heard, or is late again.
    Asked,
}

/// A posted send work request.
#[derive(Debug)]
pub(super) struct Wqe {
    pub(super) tag: u64,
    pub(super) op: SendOp,
    pub(super) signaled: bool,
    solicited: bool,
    pub(super) len: u32,
    pub(super) first: Psn,
    pub(super) packets: u32,
    /// The running number of its first element.
    sge_at: u64,
    sge_count: usize,
    /// All of its bytes, copied when it was posted.
    inline: Option<[u8; MAX_INLINE]>,
    /// Packets of an RDMA READ that are here.
    pub(super) got: u32,
}

/// A part of an RDMA READ that was asked for.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) first: Psn,
    pub(super) packets: u32,
    /// The running number of its work request.
    pub(super) wqe: u64,
    /// What it holds of the driver's receive buffer; nothing when it is complete, or the peer silent.
    pub(super) bytes: u32,
    /// A bit for each response that is here.
    received: [u64; MAX_CHUNK_PACKETS as usize / 64],
    pub(super) count: u32,
    /// Responses and acknowledgements that came although an earlier response is missing.
    pub(super) gaps: u32,
    pub(super) asked_at: Duration,
    /// Ask for the first missing part again.
    pub(super) reread: bool,
}

/// What became of an attempt to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sent {
    /// Nothing more to send until something else happens.
    Idle,
    /// There may be more, after others had their turn.
    More,
    /// The batch is full.
    Full,
    /// Waits for credit of the receive buffer.
    NoCredit,
    /// The work request at this index failed.
    Failed(usize, Status),
}

/// What the send side needs to know of its queue pair.
pub(super) struct Peer<'a> {
    pub(super) conn: &'a Connection,
    pub(super) path: &'a Path,
}

impl Requester {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            wqes: VecDeque::with_capacity(capacity),
            wqe_head: 0,
            sges: VecDeque::with_capacity(capacity),
            sge_head: 0,
            capacity,
            chunks: VecDeque::new(),
            post_psn: Psn::default(),
            next: 0,
            next_packet: 0,
            una: Psn::default(),
            top: Psn::default(),
            since_ack_req: 0,
            ack_wanted: false,
            asked: Psn::default(),
            window: Window::default(),
            timer: RetryTimer::default(),
            rate: Rate::default(),
            rnr_until: None,
            rnr_left: 0,
            went_back: None,
            recovered: Psn::default(),
            probe: false,
            silence: Silence::None,
            lent_until: None,
        }
    }

    pub(super) fn connect(&mut self, conn: &Connection) {
        self.post_psn = conn.send_psn;
        self.una = conn.send_psn;
        self.top = conn.send_psn;
        self.recovered = conn.send_psn;
        self.asked = conn.send_psn;
        self.rnr_left = conn.rnr_retry_count;
        self.timer = RetryTimer::new(conn);
    }

    /// Work requests that can be posted.
    pub(super) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.wqes.len())
    }

    pub(super) fn post(
        &mut self,
        mtu: u32,
        wr: &SendWr<'_>,
        inline: Option<[u8; MAX_INLINE]>,
    ) -> Result<(), PostError> {
        if self.room() == 0 {
            return Err(PostError::Full);
        }
        let len = total(wr.sges);
        if wr.sges.len() > MAX_SGE || len > MAX_MESSAGE {
            return Err(PostError::TooLong);
        }
        let len = u32::try_from(len).map_err(|_| PostError::TooLong)?;
        let packets = len.div_ceil(mtu).max(1);
        self.wqes.push_back(Wqe {
            tag: wr.tag,
            op: wr.op,
            signaled: wr.signaled,
            solicited: wr.solicited,
            len,
            first: self.post_psn,
            packets,
            sge_at: self.sge_head + self.sges.len() as u64,
            sge_count: wr.sges.len(),
            inline,
            got: 0,
        });
        self.sges.extend(wr.sges);
        self.post_psn = self.post_psn.plus(packets);
        Ok(())
    }

    /// Sends up to `quantum` packets.
    pub(super) fn poll<M: Memory>(
        &mut self,
        now: Duration,
        peer: &Peer<'_>,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
        quantum: u32,
    ) -> Sent {
        if self.rnr_until.is_some() {
            self.rate.rest();
            return Sent::Idle;
        }
        for _ in 0..quantum {
            if self.rate.waits(now) {
                return Sent::Idle;
            }
            let before = batch.len();
            let again = self.chunks.iter().position(|chunk| chunk.reread).filter(|_| self.silence != Silence::Asked);
            let missing = again.map_or(0, |at| self.missing_credit(at, peer.conn.mtu.bytes()));
            // What waits for credit lets pass what needs none.
            let starved = !shared.credit.fits(missing);
            let step = if core::mem::take(&mut self.probe) {
                self.send_probe(now, peer, shared, memory, batch)
            } else if let Some(at) = again.filter(|_| !starved) {
                self.send_reread(now, (at, missing), peer, shared, batch)
            } else {
                match self.wqes.get(self.next).map(|wqe| wqe.op) {
                    None => Some(Sent::Idle),
                    Some(SendOp::RdmaRead(from)) => self.send_read(now, from, peer, shared, batch),
                    Some(_) => self.send_packet(now, peer, shared, memory, batch),
                }
            };
            self.rate.sent(now, batch.len() - before);
            match step {
                None => {}
                Some(Sent::Idle) if starved => return Sent::NoCredit,
                Some(end) => return end,
            }
        }
        Sent::More
    }

    /// Sends the next packet of a SEND or RDMA WRITE.
    fn send_packet<M: Memory>(
        &mut self,
        now: Duration,
        peer: &Peer<'_>,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
    ) -> Option<Sent> {
        let in_flight = self.in_flight();
        if in_flight >= self.window.packets() {
            return Some(Sent::Idle);
        }
        let wqe = self.wqes.get(self.next)?;
        let (index, place) = (self.next_packet, Place::of(self.next_packet, wqe.packets));
        let psn = wqe.first.plus(index);
        let pauses = place.ends() && self.wqes.get(self.next + 1).is_none_or(Wqe::is_read);
        // Without a completion that somebody waits for, an acknowledgement can wait for the next request to ask.
        let wanted = self.ack_wanted || wqe.signaled;
        let ack_req = pauses && wanted || self.since_ack_req + 1 >= ACK_EVERY || in_flight + 1 >= self.window.packets();
        if let Some(end) = self.push_packet((self.next, index), ack_req, peer, shared, memory, batch) {
            return Some(end);
        }
        self.ack_wanted = wanted && !ack_req;
        self.since_ack_req = if ack_req { 0 } else { self.since_ack_req + 1 };
        self.note_sent(now, psn, 1, shared);
        if ack_req {
            self.asked = psn.plus(1);
            self.timer.sample(psn, now);
        }
        self.next_packet += 1;
        if place.ends() {
            self.next += 1;
            self.next_packet = 0;
        }
        None
    }

    /// Lays out packet `index` of the work request at `at`.
    fn push_packet<M: Memory>(
        &self,
        (at, index): (usize, u32),
        ack_req: bool,
        peer: &Peer<'_>,
        shared: &Shared,
        memory: &M,
        batch: &mut TxBatch,
    ) -> Option<Sent> {
        let wqe = self.wqes.get(at)?;
        let (mtu, place) = (peer.conn.mtu.bytes(), Place::of(index, wqe.packets));
        let offset = u64::from(index) * u64::from(mtu);
        let payload = packet_payload(wqe, index, mtu);
        let mut header = Header::new(wqe.opcode(place), peer.conn.remote_qpn, wqe.first.plus(index));
        header.ext = wqe.ext(place);
        header.solicited = wqe.solicited && place.ends();
        header.ack_req = ack_req;
        let sges = self.sges_of(wqe);
        let filled =
            batch.push(peer.path, &header, payload, |out| match wqe.inline.and_then(|copy| from(&copy, offset, out)) {
                Some(()) => Ok(()),
                None => gather(&shared.keys, memory, sges, offset, out),
            });
        match filled {
            Ok(()) => None,
            Err(NotAdded::Full) => Some(Sent::Full),
            Err(NotAdded::Payload(ScatterError::Length)) => Some(Sent::Failed(at, Status::LocLenErr)),
            Err(NotAdded::Payload(ScatterError::Key(_))) => Some(Sent::Failed(at, Status::LocProtErr)),
        }
    }

    /// Sends the last packet again that is under way: the peer acknowledges it, or says what it misses before it. For an RDMA
    /// READ its request does that, as far as its responses are not here.
    fn send_probe<M: Memory>(
        &mut self,
        now: Duration,
        peer: &Peer<'_>,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
    ) -> Option<Sent> {
        let next = self.next_psn();
        let last = if self.una.precedes(next) { next.before() } else { self.top.before() };
        let at = self.index_of(last).filter(|_| !last.precedes(self.una))?;
        let wqe = self.wqes.get(at)?;
        if wqe.is_read() {
            if let Some(chunk) = self.chunks.iter_mut().rev().find(|chunk| last.since(chunk.first) < chunk.packets) {
                chunk.reread = !chunk.is_complete();
            }
            return None;
        }
        let late = self.has_asked();
        let sent = self.push_packet((at, last.since(wqe.first)), true, peer, shared, memory, batch);
        match sent {
            None => {
                shared.counters.retransmitted += u64::from(late);
                self.asked = last.plus(1);
            }
            Some(_) => self.probe = sent == Some(Sent::Full),
        }
        self.timer.arm(now);
        sent
    }

    /// Asks for the next chunk of an RDMA READ.
    fn send_read(
        &mut self,
        now: Duration,
        from: RemoteAddr,
        peer: &Peer<'_>,
        shared: &mut Shared,
        batch: &mut TxBatch,
    ) -> Option<Sent> {
        let mtu = peer.conn.mtu.bytes();
        let wqe = self.wqes.get(self.next)?;
        let per_chunk = shared.chunk_packets(mtu);
        let start = self.next_packet - self.next_packet % per_chunk;
        let packets = per_chunk.min(wqe.packets - start);
        let psn = wqe.first.plus(start);
        // A chunk of which something came was executed; what is missing of it is asked for by `send_reread`.
        if !psn.precedes(self.una) {
            let bytes = chunk_bytes(wqe, start, packets, mtu);
            let known = self.chunks.iter().position(|chunk| chunk.first == psn);
            let silent = if known.is_some() { Silence::Asked } else { Silence::MayAsk };
            if self.silence >= silent || known.is_none() && self.chunks.len() >= usize::from(peer.conn.initiator_depth)
            {
                return Some(Sent::Idle);
            }
            let missing = known.map_or(bytes, |at| self.missing_credit(at, mtu));
            if !shared.credit.fits(missing) {
                return Some(Sent::NoCredit);
            }
            let header = read_request(peer, wqe, from, start, bytes, mtu);
            if batch.push(peer.path, &header, 0, |_| Ok::<(), ()>(())).is_err() {
                return Some(Sent::Full);
            }
            shared.credit.take(missing);
            match known.and_then(|at| self.chunks.get_mut(at)) {
                Some(chunk) => chunk.bytes += missing,
                None => {
                    let wqe = self.wqe_head + self.next as u64;
                    self.chunks.push_back(Chunk::new(psn, packets, wqe, bytes, now));
                }
            }
            self.note_asked(now);
            self.note_sent(now, psn, packets, shared);
            self.timer.sample(psn, now);
            self.since_ack_req = 0;
            self.asked = psn.plus(packets);
        }
        let ends = self.wqes.get(self.next).is_some_and(|wqe| start + packets >= wqe.packets);
        (self.next, self.next_packet) = if ends { (self.next + 1, 0) } else { (self.next, start + packets) };
        shared.credit.is_scarce().then_some(Sent::More)
    }

    /// What a chunk has to take of the driver's receive buffer before it is asked for again.
    fn missing_credit(&self, at: usize, mtu: u32) -> u32 {
        let Some(chunk) = self.chunks.get(at).filter(|chunk| chunk.bytes == 0) else {
            return 0;
        };
        (chunk.packets - chunk.count).saturating_mul(mtu)
    }

    /// A chunk was asked for. If the peer is silent, its credit is not for long.
    fn note_asked(&mut self, now: Duration) {
        if self.silence == Silence::MayAsk {
            self.silence = Silence::Asked;
            self.lent_until = Some(now + self.timer.answer_wait());
        }
    }

    /// Asks again for the first missing part of a chunk, which takes `missing` of the receive buffer.
    fn send_reread(
        &mut self,
        now: Duration,
        (at, missing): (usize, u32),
        peer: &Peer<'_>,
        shared: &mut Shared,
        batch: &mut TxBatch,
    ) -> Option<Sent> {
        let mtu = peer.conn.mtu.bytes();
        let chunk = self.chunks.get(at)?;
        let wqe = self.wqes.get(self.wqe_index(chunk.wqe)?)?;
        let SendOp::RdmaRead(from) = wqe.op else {
            return None;
        };
        let (hole, packets) = chunk.first_hole();
        let start = chunk.first.since(wqe.first) + hole;
        let bytes = chunk_bytes(wqe, start, packets, mtu);
        let header = read_request(peer, wqe, from, start, bytes, mtu);
        if batch.push(peer.path, &header, 0, |_| Ok::<(), ()>(())).is_err() {
            return Some(Sent::Full);
        }
        shared.counters.retransmitted += 1;
        shared.credit.take(missing);
        let chunk = self.chunks.get_mut(at)?;
        chunk.bytes += missing;
        chunk.reread = false;
        chunk.gaps = 0;
        chunk.asked_at = now;
        self.timer.arm(now);
        self.note_asked(now);
        None
    }

    fn note_sent(&mut self, now: Duration, psn: Psn, packets: u32, shared: &mut Shared) {
        let end = psn.plus(packets);
        if self.top.precedes(end) {
            self.top = end;
        } else {
            shared.counters.retransmitted += 1;
        }
        self.timer.arm(now);
    }

    /// SEND and RDMA WRITE packets under way: PSNs that are out, less those of RDMA READ responses.
    fn in_flight(&self) -> u32 {
        let next = self.next_psn();
        if !self.una.precedes(next) {
            return 0;
        }
        let reads: u32 = self
            .chunks
            .iter()
            .filter(|chunk| chunk.first.precedes(next))
            .map(|chunk| {
                let from = if chunk.first.precedes(self.una) { self.una } else { chunk.first };
                u32::try_from(chunk.end().ahead_of(from)).unwrap_or(0)
            })
            .sum();
        next.since(self.una).saturating_sub(reads)
    }

    /// The PSN of the packet to be sent next.
    pub(super) fn next_psn(&self) -> Psn {
        self.wqes.get(self.next).map_or(self.post_psn, |wqe| wqe.first.plus(self.next_packet))
    }

    /// Continues transmission at `psn`.
    pub(super) fn seek(&mut self, psn: Psn) {
        let at = self.wqes.partition_point(|wqe| !psn.precedes(wqe.first));
        self.since_ack_req = 0;
        (self.next, self.next_packet) = match at.checked_sub(1).and_then(|i| Some((i, self.wqes.get(i)?))) {
            Some((i, wqe)) if psn.since(wqe.first) < wqe.packets => (i, psn.since(wqe.first)),
            _ => (at, 0),
        };
    }

    /// The index of the work request that `psn` belongs to.
    pub(super) fn index_of(&self, psn: Psn) -> Option<usize> {
        let index = self.wqes.partition_point(|wqe| !psn.precedes(wqe.first)).checked_sub(1)?;
        let wqe = self.wqes.get(index)?;
        (psn.since(wqe.first) < wqe.packets).then_some(index)
    }

    /// The index of the work request with a running number.
    pub(super) fn wqe_index(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.wqe_head)?).ok()
    }

    pub(super) fn sges_of(&self, wqe: &Wqe) -> impl Iterator<Item = &Sge> {
        let start = usize::try_from(wqe.sge_at - self.sge_head).unwrap_or(usize::MAX);
        self.sges.iter().skip(start).take(wqe.sge_count)
    }

    /// Takes the oldest work request off the queue.
    pub(super) fn pop(&mut self) -> Option<Wqe> {
        let wqe = self.wqes.pop_front()?;
        self.wqe_head += 1;
        self.sges.drain(..wqe.sge_count.min(self.sges.len()));
        self.sge_head += wqe.sge_count as u64;
        if self.next == 0 {
            self.next_packet = 0;
        } else {
            self.next -= 1;
        }
        Some(wqe)
    }

    /// Whether the peer was asked for an acknowledgement that it did not give.
    pub(super) fn has_asked(&self) -> bool {
        self.una.precedes(self.asked) || !self.chunks.is_empty()
    }

    /// Whether an answer of the peer is due.
    pub(super) fn is_waiting(&self) -> bool {
        self.una != self.top || !self.chunks.is_empty()
    }
}

impl Wqe {
    pub(super) const fn is_read(&self) -> bool {
        matches!(self.op, SendOp::RdmaRead(_))
    }

    /// The first PSN behind it.
    pub(super) const fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    const fn opcode(&self, place: Place) -> Opcode {
        match self.op {
            SendOp::SendImm(_) if place.ends() => Opcode::SendImm(place),
            SendOp::SendInv(_) if place.ends() => Opcode::SendInv(place),
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => Opcode::Send(place),
            SendOp::RdmaWriteImm(..) if place.ends() => Opcode::RdmaWriteImm(place),
            SendOp::RdmaWrite(_) | SendOp::RdmaWriteImm(..) => Opcode::RdmaWrite(place),
            SendOp::RdmaRead(_) => Opcode::RdmaReadRequest,
        }
    }

    const fn ext(&self, place: Place) -> Ext {
        match self.op {
            SendOp::SendImm(imm) if place.ends() => Ext::Imm(imm),
            SendOp::SendInv(rkey) if place.ends() => Ext::Inv(rkey),
            SendOp::RdmaWriteImm(to, imm) if place.starts() && place.ends() => {
                Ext::Reth(Reth { va: to.va, rkey: to.rkey, len: self.len }, Some(imm))
            }
            SendOp::RdmaWrite(to) | SendOp::RdmaWriteImm(to, _) if place.starts() => {
                Ext::Reth(Reth { va: to.va, rkey: to.rkey, len: self.len }, None)
            }
            SendOp::RdmaWriteImm(_, imm) if place.ends() => Ext::Imm(imm),
            _ => Ext::None,
        }
    }
}

impl Chunk {
    fn new(first: Psn, packets: u32, wqe: u64, bytes: u32, now: Duration) -> Self {
        let received = [0; MAX_CHUNK_PACKETS as usize / 64];
        Self { first, packets, wqe, bytes, received, count: 0, gaps: 0, asked_at: now, reread: false }
    }

    pub(super) const fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Marks a response as here. False when it was already.
    pub(super) fn mark(&mut self, index: u32) -> bool {
        let Some(word) = self.received.get_mut(index as usize / 64) else {
            return false;
        };
        let bit = 1 << (index % 64);
        let new = *word & bit == 0;
        *word |= bit;
        self.count += u32::from(new);
        new
    }

    pub(super) fn has(&self, index: u32) -> bool {
        self.received.get(index as usize / 64).is_some_and(|word| word & 1 << (index % 64) != 0)
    }

    /// The first responses in a row that are missing: the index of the first, and how many.
    pub(super) fn first_hole(&self) -> (u32, u32) {
        let full = self.received.iter().take_while(|word| **word == u64::MAX).count();
        let ones = self.received.get(full).map_or(0, |word| word.trailing_ones());
        let start = u32::try_from(full * 64).unwrap_or(0) + ones;
        let end = (start..self.packets).find(|&index| self.has(index)).unwrap_or(self.packets);
        (start, end.saturating_sub(start))
    }

    /// Whether all responses are here.
    pub(super) const fn is_complete(&self) -> bool {
        self.count == self.packets
    }

    /// Whether a response before `psn` is missing.
    pub(super) fn misses_before(&self, psn: Psn) -> bool {
        !self.is_complete() && self.first.precedes(psn) && self.first.plus(self.first_hole().0).precedes(psn)
    }
}

/// Fills `out` from byte `at` of a copy on.
fn from(copy: &[u8], at: u64, out: &mut [u8]) -> Option<()> {
    let bytes = copy.get(usize::try_from(at).ok()?..)?.get(..out.len())?;
    out.copy_from_slice(bytes);
    Some(())
}

/// Payload bytes of packet `index`.
pub(super) fn packet_payload(wqe: &Wqe, index: u32, mtu: u32) -> usize {
    let at = u64::from(index) * u64::from(mtu);
    usize::try_from(u64::from(wqe.len).saturating_sub(at).min(u64::from(mtu))).unwrap_or(0)
}

/// Payload bytes of `packets` packets from packet `start` on.
fn chunk_bytes(wqe: &Wqe, start: u32, packets: u32, mtu: u32) -> u32 {
    let at = u64::from(start) * u64::from(mtu);
    let most = u64::from(packets) * u64::from(mtu);
    u32::try_from(u64::from(wqe.len).saturating_sub(at).min(most)).unwrap_or(u32::MAX)
}

fn read_request(peer: &Peer<'_>, wqe: &Wqe, from: RemoteAddr, start: u32, bytes: u32, mtu: u32) -> Header {
    let at = u64::from(start) * u64::from(mtu);
    let mut header = Header::new(Opcode::RdmaReadRequest, peer.conn.remote_qpn, wqe.first.plus(start));
    header.ext = Ext::Reth(Reth { va: from.va.wrapping_add(at), rkey: from.rkey, len: bytes }, None);
    header.ack_req = true;
    header
}

/// The longest message (IBTA 9.4.1).
const MAX_MESSAGE: u64 = 1 << 31;
/// Packets of the longest chunk of an RDMA READ.
pub(super) const MAX_CHUNK_PACKETS: u32 = 256;
/// An acknowledgement is asked for at least this often.
const ACK_EVERY: u32 = 16;
