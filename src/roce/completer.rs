//! The completer of a queue pair: what the peer's responses mean for the send queue.
//!
//! Any response tells that everything before it was executed (IBTA 9.7.5.1.2, implied acknowledgement), and by the same
//! token that an RDMA READ response that should have come before it was lost.
use core::time::Duration;

use super::engine::Shared;
use super::keys::Memory;
use super::packet::{Ext, Nak, Packet, Syndrome};
use super::recv::{ScatterError, scatter};
use super::requester::{Chunk, Requester, Silence, packet_payload};
use super::verbs::{Completion, Connection, Status, rnr_time};
use super::window::Expiry;
use super::{Opcode, Psn, Qpn};
use crate::mutation::{self, Mutation};

/// What a response leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Carry on.
    Continue,
    /// The work request at this index failed, and the queue pair with it.
    Failed(usize, Status),
}

impl Requester {
    pub(super) fn handle_response<M: Memory>(
        &mut self,
        now: Duration,
        packet: &Packet<'_>,
        conn: &Connection,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Outcome {
        let psn = packet.header.psn;
        // Nothing sent, nothing to answer: a ghost, or forged.
        if !psn.precedes(self.top) {
            shared.counters.ghosts += 1;
            return Outcome::Continue;
        }
        match (packet.header.opcode, packet.header.ext) {
            (Opcode::RdmaReadResponse(_), Ext::Aeth(aeth)) if !matches!(aeth.syndrome, Syndrome::Ack(_)) => {
                Outcome::Continue
            }
            (Opcode::RdmaReadResponse(_), _) => {
                self.handle_read_response(now, psn, packet.payload, conn, shared, memory)
            }
            (Opcode::Acknowledge, Ext::Aeth(aeth)) => self.handle_acknowledge(now, psn, aeth.syndrome, conn, shared),
            _ => Outcome::Continue,
        }
    }

    fn handle_acknowledge(
        &mut self,
        now: Duration,
        psn: Psn,
        syndrome: Syndrome,
        conn: &Connection,
        shared: &mut Shared,
    ) -> Outcome {
        match syndrome {
            Syndrome::Ack(_) => {
                self.advance(now, psn.plus(1), shared);
                Outcome::Continue
            }
            // What was answered already is not refused any more.
            _ if psn.precedes(self.una) => {
                shared.counters.ghosts += 1;
                Outcome::Continue
            }
            Syndrome::Nak(Nak::PsnSequence) => {
                self.hear();
                self.advance(now, psn, shared);
                self.go_back(now, shared);
                Outcome::Continue
            }
            Syndrome::RnrNak(code) => {
                self.hear();
                self.advance(now, psn, shared);
                self.wait_for_receive(now, psn, code, conn, shared)
            }
            Syndrome::Nak(nak) => {
                self.advance(now, psn, shared);
                let status = match nak {
                    Nak::InvalidRequest => Status::RemInvReqErr,
                    Nak::RemoteAccess => Status::RemAccessErr,
                    _ => Status::RemOpErr,
                };
                self.index_of(psn).map_or(Outcome::Continue, |index| Outcome::Failed(index, status))
            }
        }
    }

    fn wait_for_receive(
        &mut self,
        now: Duration,
        psn: Psn,
        code: u8,
        conn: &Connection,
        shared: &mut Shared,
    ) -> Outcome {
        shared.counters.rnr_naks_received += 1;
        if self.rnr_left == 0 {
            return self
                .index_of(psn)
                .map_or(Outcome::Continue, |index| Outcome::Failed(index, Status::RnrRetryExcErr));
        }
        if conn.rnr_retry_count != 7 {
            self.rnr_left -= 1;
        }
        // What comes behind the message that was refused was dropped, and is asked for again after it.
        self.give_credit(psn, shared);
        self.rnr_until = Some(now + rnr_time(code));
        self.timer.stop();
        self.seek(psn);
        Outcome::Continue
    }

    fn handle_read_response<M: Memory>(
        &mut self,
        now: Duration,
        psn: Psn,
        payload: &[u8],
        conn: &Connection,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Outcome {
        let holds = |first: Psn, packets: u32| psn.since(first) < packets;
        let Some(at) = self.chunks.iter().position(|chunk| holds(chunk.first, chunk.packets)) else {
            shared.counters.duplicates += 1;
            return Outcome::Continue;
        };
        let Some(chunk) = self.chunks.get(at) else {
            return Outcome::Continue;
        };
        let (in_chunk, number) = (psn.since(chunk.first), chunk.wqe);
        if chunk.has(in_chunk) {
            shared.counters.duplicates += 1;
            return Outcome::Continue;
        }
        let Some((index, wqe)) = self.wqe_index(number).and_then(|index| Some((index, self.wqes.get(index)?))) else {
            return Outcome::Continue;
        };
        let packet = psn.since(wqe.first);
        let mtu = conn.mtu.bytes();
        if payload.len() != packet_payload(wqe, packet, mtu) {
            return Outcome::Failed(index, Status::LocLenErr);
        }
        let offset = u64::from(packet) * u64::from(mtu);
        match scatter(&shared.keys, memory, self.sges_of(wqe), offset, payload) {
            Ok(()) => {}
            Err(ScatterError::Length) => return Outcome::Failed(index, Status::LocLenErr),
            Err(ScatterError::Key(_)) => return Outcome::Failed(index, Status::LocProtErr),
        }
        if let Some(wqe) = self.wqes.get_mut(index) {
            wqe.got += 1;
        }
        if let Some(chunk) = self.chunks.get_mut(at)
            && chunk.mark(in_chunk)
            && chunk.is_complete()
        {
            shared.credit.give(core::mem::take(&mut chunk.bytes));
            chunk.reread = false;
        }
        // A complete chunk behind one that is not still counts as outstanding: the peer remembers only so many requests,
        // and the oldest one may have to be repeated.
        while self.chunks.front().is_some_and(Chunk::is_complete) {
            self.chunks.pop_front();
        }
        // A late response is progress too, though it acknowledges nothing new.
        self.hear();
        self.timer.progress(now, true);
        self.advance(now, psn.plus(1), shared);
        Outcome::Continue
    }

    /// Everything before `una` was executed.
    fn advance(&mut self, now: Duration, una: Psn, shared: &mut Shared) {
        for chunk in &mut self.chunks {
            if chunk.misses_before(una) && !chunk.reread {
                chunk.gaps += 1;
                let since = now.saturating_sub(chunk.asked_at);
                if chunk.gaps >= REORDERING && since >= self.timer.round_trip() {
                    chunk.reread = true;
                    shared.counters.read_gaps += 1;
                }
            }
        }
        if !self.una.precedes(una) {
            return;
        }
        self.hear();
        self.window.acked(una.since(self.una));
        self.una = una;
        self.timer.answered(una, now);
        if self.next_psn().precedes(una) {
            self.seek(una);
        }
        self.timer.progress(now, self.is_waiting());
    }

    /// The peer gave a sign of life.
    const fn hear(&mut self) {
        (self.silence, self.lent_until) = (Silence::None, None);
    }

    /// Gives back what chunks from `from` on hold of the receive buffer. They take it anew before they are asked for again.
    fn give_credit(&mut self, from: Psn, shared: &mut Shared) {
        for chunk in self.chunks.iter_mut().filter(|chunk| !chunk.first.precedes(from)) {
            shared.credit.give(core::mem::take(&mut chunk.bytes));
        }
    }

    /// As [`Requester::give_credit`], of all chunks.
    fn give_all_credit(&mut self, shared: &mut Shared) {
        self.lent_until = None;
        if let Some(first) = self.chunks.front().map(|chunk| chunk.first) {
            self.give_credit(first, shared);
        }
    }

    /// Sends again what the peer did not get, unless that has just been done.
    fn go_back(&mut self, now: Duration, shared: &mut Shared) {
        shared.counters.sequence_naks_received += 1;
        let just_done = self
            .went_back
            .is_some_and(|(psn, at)| psn == self.una && now.saturating_sub(at) < self.timer.shortest_round_trip());
        if just_done {
            return;
        }
        self.went_back = Some((self.una, now));
        // What was lost of one window's packets, and of those that repair it, is one loss.
        if !self.una.precedes(self.recovered) {
            self.window.lost();
            self.recovered = self.top;
        }
        self.timer.forget_sample();
        self.seek(self.resume_at());
    }

    /// The first packet to be sent again.
    fn resume_at(&self) -> Psn {
        if mutation::is_on(Mutation::SkippedRetransmit) { self.una.plus(1) } else { self.una }
    }

    /// Reports what is done, in order.
    pub(super) fn retire(&mut self, qpn: Qpn, cq: usize, conn: &Connection, shared: &mut Shared) -> bool {
        let mut any = false;
        while let Some(wqe) = self.wqes.front() {
            let done = if wqe.is_read() { wqe.got == wqe.packets } else { !self.una.precedes(wqe.end()) };
            if !done || self.top.precedes(wqe.end()) {
                break;
            }
            self.rnr_left = conn.rnr_retry_count;
            any = true;
            let Some(wqe) = self.pop() else { break };
            if wqe.signaled {
                let byte_len = if wqe.is_read() { wqe.len } else { 0 };
                shared.complete(cq, Completion::new(wqe.tag, Status::Success, qpn, byte_len));
            }
        }
        if any && !self.is_waiting() {
            self.timer.stop();
        }
        any
    }

    /// The timers of the send side. `due` says whether there is something to send.
    pub(super) fn handle_timeout(&mut self, now: Duration, shared: &mut Shared) -> Outcome {
        if self.lent_until.is_some_and(|at| at <= now) {
            self.give_all_credit(shared);
        }
        if self.rnr_until.is_some_and(|at| at <= now) {
            self.rnr_until = None;
            return Outcome::Continue;
        }
        // Nobody is late who was not asked: the last packet goes out again, and asks.
        if !self.has_asked() && self.timer.is_due(now) {
            shared.counters.probes += 1;
            self.probe = true;
            self.timer.progress(now, true);
            return Outcome::Continue;
        }
        match self.timer.expired(now) {
            None => {}
            Some(Expiry::GiveUp) => {
                let index = self.index_of(self.una).unwrap_or(0);
                return Outcome::Failed(index, Status::RetryExcErr);
            }
            Some(Expiry::Probe) => {
                shared.counters.probes += 1;
                self.probe = true;
                if let Some(chunk) = self.chunks.front_mut().filter(|chunk| chunk.first.precedes(self.una)) {
                    chunk.reread = true;
                }
            }
            Some(Expiry::Retry) => {
                shared.counters.timeouts += 1;
                self.window.silent();
                self.silence = Silence::MayAsk;
                self.give_all_credit(shared);
                for chunk in &mut self.chunks {
                    chunk.reread = !chunk.is_complete() && chunk.first.precedes(self.una);
                }
                self.went_back = Some((self.una, now));
                self.seek(self.resume_at());
            }
        }
        Outcome::Continue
    }

    /// Ends every work request: the one at `failed` with its status, the others flushed.
    pub(super) fn flush(&mut self, failed: Option<(usize, Status)>, qpn: Qpn, cq: usize, shared: &mut Shared) {
        for chunk in self.chunks.drain(..) {
            shared.credit.give(chunk.bytes);
        }
        self.timer.stop();
        (self.rnr_until, self.lent_until) = (None, None);
        let mut index = 0;
        while let Some(wqe) = self.pop() {
            let status = match failed {
                Some((at, status)) if at == index => status,
                _ => Status::WrFlushErr,
            };
            shared.complete(cq, Completion::new(wqe.tag, status, qpn, 0));
            index += 1;
        }
    }
}

impl Completion {
    pub(super) const fn new(tag: u64, status: Status, qpn: Qpn, byte_len: u32) -> Self {
        Self { tag, status, qpn, byte_len, imm: None, invalidated: None, solicited: false }
    }
}

/// A response that is this many packets late is taken for lost.
const REORDERING: u32 = 3;
