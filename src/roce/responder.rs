//! The responder of a queue pair: what the peer's requests do, and the answers they get.
//!
//! A request passes checks in the order of the specification (IBTA 9.7.4): sequence number, order of opcodes, validity,
//! resources, length, key. Then it is executed. Answers leave in the order of the requests, so they wait in one queue:
//! an acknowledgement must not overtake the responses of an RDMA READ before it.
use core::time::Duration;
use std::collections::VecDeque;

use super::batch::{NotAdded, Path, TxBatch};
use super::engine::Shared;
use super::keys::{Access, KeyError, Memory};
use super::packet::{Aeth, Ext, Header, Nak, Packet, Reth, Syndrome};
use super::recv::{RecvQueue, ScatterError, Taken, scatter};
use super::verbs::{Completion, Connection, Status};
use super::{Opcode, Place, Psn, Qpn, Rkey};
use crate::mutation::{self, Mutation};

/// The receive side of one queue pair.
#[derive(Debug, Default)]
pub(super) struct Responder {
    /// The expected PSN.
    epsn: Psn,
    /// Message sequence number: messages completed.
    msn: u32,
    message: Message,
    /// The receive that the message at hand goes to.
    recv: Taken,
    recv_at: u64,
    refusal: Refusal,
    /// The RDMA READs that may still be asked for again, oldest first.
    reads: VecDeque<Read>,
    replies: VecDeque<Reply>,
    /// No congestion notification before this.
    cnp_after: Duration,
    cnp_due: bool,
}

/// The message that packets belong to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// Between messages.
    #[default]
    None,
    /// In a SEND.
    Send,
    /// In an RDMA WRITE.
    Write {
        /// Where the next packet goes.
        va: u64,
        rkey: Rkey,
        /// Bytes to come.
        left: u32,
        /// Bytes in all.
        len: u32,
    },
}

/// Whether the expected packet was refused, so that those after it are dropped without a word.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    #[default]
    None,
    /// A packet is missing; `last` is the last one that came after it, and the peer was told at `told`.
    Gap { last: Psn, told: Duration },
    /// There was no receive for it.
    NotReady,
}

/// An RDMA READ that was executed.
#[derive(Debug, Clone, Copy)]
struct Read {
    first: Psn,
    packets: u32,
    reth: Reth,
    msn: u32,
}

/// An answer to send.
#[derive(Debug, Clone, Copy)]
enum Reply {
    /// ACK up to a PSN, or NAK at it.
    Aeth { psn: Psn, aeth: Aeth },
    /// The rest of an RDMA READ's responses.
    Read { psn: Psn, sent: u32, packets: u32, reth: Reth, msn: u32, again: bool },
}

/// What a request leads to, besides answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// Nothing to send.
    Quiet,
    /// There is something to send.
    Reply,
    /// The connection is broken; the peer is told so.
    Fatal,
}

/// What the receive side needs to know of its queue pair.
pub(super) struct Local<'a> {
    pub(super) qpn: Qpn,
    pub(super) conn: &'a Connection,
    pub(super) cq: usize,
    pub(super) own: &'a mut RecvQueue,
    pub(super) srq: Option<usize>,
    pub(super) now: Duration,
    /// How long the peer takes to repair a loss that it was told of.
    pub(super) patience: Duration,
}

/// Why a request is not executed.
enum Refused {
    /// Class B of the specification's errors: later it may be.
    NotReady,
    /// Class A or C: never. The receive at hand, if any, completes with the status.
    Nak(Nak, Status),
}

impl From<KeyError> for Refused {
    fn from(_: KeyError) -> Self {
        Self::Nak(Nak::RemoteAccess, Status::WrFlushErr)
    }
}

const INVALID: Refused = Refused::Nak(Nak::InvalidRequest, Status::RemInvReqErr);

impl Responder {
    pub(super) fn connect(&mut self, conn: &Connection) {
        self.epsn = conn.recv_psn;
    }

    pub(super) fn handle_request<M: Memory>(
        &mut self,
        packet: &Packet<'_>,
        local: &mut Local<'_>,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Served {
        let psn = packet.header.psn;
        let ahead = psn.ahead_of(self.epsn);
        if ahead > 0 {
            return self.refuse_gap(psn, local, shared);
        }
        if ahead < 0 {
            shared.counters.duplicates += 1;
            if mutation::is_on(Mutation::DoubleCompletion) && packet.header.opcode == Opcode::Send(Place::Only) {
                let epsn = self.epsn;
                let _ = self.execute(packet, local, shared, memory);
                self.epsn = epsn;
            }
            return self.repeat(packet, local.conn);
        }
        match self.execute(packet, local, shared, memory) {
            Ok(()) => {
                self.refusal = Refusal::None;
                if packet.header.ack_req && packet.header.opcode != Opcode::RdmaReadRequest {
                    self.acknowledge();
                }
                if self.replies.is_empty() { Served::Quiet } else { Served::Reply }
            }
            Err(Refused::NotReady) => {
                self.refusal = Refusal::NotReady;
                shared.counters.rnr_naks_sent += 1;
                self.answer(psn, Syndrome::RnrNak(local.conn.min_rnr_timer));
                Served::Reply
            }
            Err(Refused::Nak(nak, status)) => {
                self.answer(psn, Syndrome::Nak(nak));
                if self.message == Message::Send {
                    shared.complete(local.cq, Completion::new(self.recv.tag, status, local.qpn, 0));
                    self.message = Message::None;
                }
                Served::Fatal
            }
        }
    }

    /// A packet that came before an earlier one: one NAK says so, and again when the peer has visibly gone back and something
    /// is missing still, or when it should have gone back and did not: then the NAK was lost.
    fn refuse_gap(&mut self, psn: Psn, local: &Local<'_>, shared: &mut Shared) -> Served {
        let told = match self.refusal {
            Refusal::NotReady => return Served::Quiet,
            Refusal::Gap { last, told } if last.precedes(psn) && local.now < told + local.patience => Some(told),
            Refusal::Gap { .. } | Refusal::None => None,
        };
        self.refusal = Refusal::Gap { last: psn, told: told.unwrap_or(local.now) };
        if told.is_some() {
            return Served::Quiet;
        }
        shared.counters.sequence_naks_sent += 1;
        self.answer(self.epsn, Syndrome::Nak(Nak::PsnSequence));
        Served::Reply
    }

    /// A request that was executed before (IBTA 9.7.5.1.3 and C9-105): SEND and RDMA WRITE are acknowledged again, an RDMA
    /// READ is executed again as far as it lies within the original one.
    fn repeat(&mut self, packet: &Packet<'_>, conn: &Connection) -> Served {
        let psn = packet.header.psn;
        let (Opcode::RdmaReadRequest, Ext::Reth(reth, _)) = (packet.header.opcode, packet.header.ext) else {
            self.acknowledge();
            return Served::Reply;
        };
        let mtu = conn.mtu.bytes();
        let Some(read) = self.reads.iter().rev().find(|read| psn.since(read.first) < read.packets).copied() else {
            return Served::Quiet;
        };
        let skipped = u64::from(psn.since(read.first)) * u64::from(mtu);
        let within = reth.rkey == read.reth.rkey
            && reth.va == read.reth.va.wrapping_add(skipped)
            && skipped + u64::from(reth.len) <= u64::from(read.reth.len);
        if !within {
            return Served::Quiet;
        }
        // What has not left yet need not be sent twice.
        let packets = reth.len.div_ceil(mtu).max(1);
        let end = psn.plus(packets);
        let pending = self.replies.iter().any(|reply| match reply {
            Reply::Read { psn: first, sent, packets, .. } => {
                !psn.precedes(first.plus(*sent)) && !first.plus(*packets).precedes(end)
            }
            Reply::Aeth { .. } => false,
        });
        if !pending && self.replies.len() < 4 * usize::from(conn.responder_resources) + 8 {
            self.replies.push_back(Reply::Read { psn, sent: 0, packets, reth, msn: read.msn, again: true });
        }
        Served::Reply
    }

    fn execute<M: Memory>(
        &mut self,
        packet: &Packet<'_>,
        local: &mut Local<'_>,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Result<(), Refused> {
        let (header, payload) = (&packet.header, packet.payload);
        match (header.opcode, header.ext) {
            (Opcode::Send(place) | Opcode::SendImm(place) | Opcode::SendInv(place), ext) => {
                self.check_place(place, Message::Send, payload.len(), local.conn)?;
                self.execute_send(place, ext, packet, local, shared, memory)
            }
            (Opcode::RdmaWrite(place) | Opcode::RdmaWriteImm(place), ext) => {
                if !local.conn.remote_write {
                    return Err(INVALID);
                }
                let kind = Message::Write { va: 0, rkey: Rkey(0), left: 0, len: 0 };
                self.check_place(place, kind, payload.len(), local.conn)?;
                self.execute_write(place, ext, packet, local, shared, memory)
            }
            (Opcode::RdmaReadRequest, Ext::Reth(reth, _)) => {
                if !local.conn.remote_read || self.message != Message::None || !payload.is_empty() {
                    return Err(INVALID);
                }
                self.execute_read(reth, local.conn, shared)
            }
            // Atomic operations are not offered (IBTA 9.7.5.2.4: unsupported requests are invalid ones).
            _ => Err(INVALID),
        }
    }

    /// The order of opcodes (IBTA 9.7.4.1.2) and the length of a packet for its place (9.7.4.1.6).
    fn check_place(&self, place: Place, kind: Message, len: usize, conn: &Connection) -> Result<(), Refused> {
        let same_kind = core::mem::discriminant(&self.message) == core::mem::discriminant(&kind);
        let in_order = if place.starts() { self.message == Message::None } else { same_kind };
        let mtu = conn.mtu.bytes() as usize;
        let fits = match place {
            Place::First | Place::Middle => len == mtu,
            Place::Last => (1..=mtu).contains(&len),
            Place::Only => len <= mtu,
        };
        if in_order && fits { Ok(()) } else { Err(INVALID) }
    }

    fn execute_send<M: Memory>(
        &mut self,
        place: Place,
        ext: Ext,
        packet: &Packet<'_>,
        local: &mut Local<'_>,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Result<(), Refused> {
        if place.starts() {
            self.take_receive(local, shared)?;
            self.message = Message::Send;
        }
        let sges = self.recv.sges.iter();
        scatter(&shared.keys, memory, sges, self.recv_at, packet.payload).map_err(|error| match error {
            ScatterError::Length => Refused::Nak(Nak::InvalidRequest, Status::LocLenErr),
            ScatterError::Key(_) => Refused::Nak(Nak::RemoteOperational, Status::LocProtErr),
        })?;
        self.recv_at += packet.payload.len() as u64;
        let mut completion = Completion::new(self.recv.tag, Status::Success, local.qpn, 0);
        match ext {
            Ext::Imm(imm) => completion.imm = Some(imm),
            Ext::Inv(rkey) => {
                shared
                    .keys
                    .invalidate_remotely(rkey)
                    .map_err(|_| Refused::Nak(Nak::RemoteAccess, Status::RemInvReqErr))?;
                completion.invalidated = Some(rkey);
            }
            _ => {}
        }
        self.epsn = self.epsn.plus(1);
        if place.ends() {
            self.message = Message::None;
            self.count_message();
            completion.byte_len = u32::try_from(self.recv_at).unwrap_or(u32::MAX);
            completion.solicited = packet.header.solicited;
            shared.complete(local.cq, completion);
        }
        Ok(())
    }

    fn execute_write<M: Memory>(
        &mut self,
        place: Place,
        ext: Ext,
        packet: &Packet<'_>,
        local: &mut Local<'_>,
        shared: &mut Shared,
        memory: &mut M,
    ) -> Result<(), Refused> {
        let (mut va, rkey, left, len, imm) = match (ext, self.message) {
            (Ext::Reth(reth, imm), Message::None) => {
                if u64::from(reth.len) > 1 << 31 {
                    return Err(INVALID);
                }
                if reth.len > 0 {
                    shared.keys.remote(reth.rkey, reth.va, reth.len, Access::REMOTE_WRITE)?;
                }
                (reth.va, reth.rkey, reth.len, reth.len, imm)
            }
            (Ext::Imm(imm), Message::Write { va, rkey, left, len }) => (va, rkey, left, len, Some(imm)),
            (_, Message::Write { va, rkey, left, len }) => (va, rkey, left, len, None),
            _ => return Err(INVALID),
        };
        // The last packet brings exactly what is left, any other less than that (C9-100 and following).
        let got = u32::try_from(packet.payload.len()).map_err(|_| INVALID)?;
        let left = left.checked_sub(got).ok_or(INVALID)?;
        if place.ends() != (left == 0) {
            return Err(INVALID);
        }
        let with_imm = matches!(packet.header.opcode, Opcode::RdmaWriteImm(_));
        let span = if got > 0 { Some(shared.keys.remote(rkey, va, got, Access::REMOTE_WRITE)?) } else { None };
        if with_imm {
            self.take_receive(local, shared)?;
        }
        if let Some(span) = span {
            if !shared.place(memory, span, packet.payload) {
                return Err(KeyError::Unknown.into());
            }
            va = va.wrapping_add(u64::from(got));
        }
        self.epsn = self.epsn.plus(1);
        if !place.ends() {
            self.message = Message::Write { va, rkey, left, len };
            return Ok(());
        }
        self.message = Message::None;
        self.count_message();
        if with_imm {
            let mut completion = Completion::new(self.recv.tag, Status::Success, local.qpn, len);
            completion.imm = imm;
            completion.solicited = packet.header.solicited;
            shared.complete(local.cq, completion);
        }
        Ok(())
    }

    fn execute_read(&mut self, reth: Reth, conn: &Connection, shared: &Shared) -> Result<(), Refused> {
        let most = usize::from(conn.responder_resources);
        let unanswered = self.replies.iter().filter(|reply| matches!(reply, Reply::Read { .. })).count();
        if u64::from(reth.len) > 1 << 31 || most == 0 || unanswered > 2 * most {
            return Err(INVALID);
        }
        if reth.len > 0 {
            shared.keys.remote(reth.rkey, reth.va, reth.len, Access::REMOTE_READ)?;
        }
        // C9-148: a read counts as a message when it is executed.
        self.count_message();
        let (psn, packets) = (self.epsn, reth.len.div_ceil(conn.mtu.bytes()).max(1));
        let read = Read { first: psn, packets, reth, msn: self.msn };
        if self.reads.len() >= most {
            self.reads.pop_front();
        }
        self.reads.push_back(read);
        self.replies.push_back(Reply::Read { psn, sent: 0, packets, reth, msn: self.msn, again: false });
        self.epsn = psn.plus(packets);
        Ok(())
    }

    fn take_receive(&mut self, local: &mut Local<'_>, shared: &mut Shared) -> Result<(), Refused> {
        #[cfg(test)]
        if shared.receives_held {
            return Err(Refused::NotReady);
        }
        let queue = match local.srq {
            Some(srq) => shared.srq(srq).ok_or(Refused::NotReady)?,
            None => &mut *local.own,
        };
        if !queue.take(&mut self.recv) {
            return Err(Refused::NotReady);
        }
        self.recv_at = 0;
        Ok(())
    }

    fn count_message(&mut self) {
        self.msn = self.msn.wrapping_add(1) & 0xff_ffff;
    }

    /// Acknowledges everything so far, in one packet with any acknowledgement that has not left.
    fn acknowledge(&mut self) {
        let (psn, aeth) = (self.epsn.before(), Aeth { syndrome: Syndrome::ACK, msn: self.msn });
        match self.replies.back_mut() {
            Some(Reply::Aeth { psn: last, aeth: said }) if matches!(said.syndrome, Syndrome::Ack(_)) => {
                (*last, *said) = (psn, aeth);
            }
            _ => self.replies.push_back(Reply::Aeth { psn, aeth }),
        }
    }

    fn answer(&mut self, psn: Psn, syndrome: Syndrome) {
        let aeth = Aeth { syndrome, msn: self.msn };
        // Repeated refusals of one packet are one.
        if let Some(Reply::Aeth { psn: last, aeth: said }) = self.replies.back_mut()
            && (*last == psn || matches!(said.syndrome, Syndrome::Ack(_)) && last.plus(1) == psn)
        {
            // A refusal acknowledges what went before it.
            (*last, *said) = (psn, aeth);
            return;
        }
        self.replies.push_back(Reply::Aeth { psn, aeth });
    }

    /// A packet came with the mark of congestion. One notification per interval.
    pub(super) fn congested(&mut self, now: Duration, interval: Duration) {
        if now >= self.cnp_after {
            self.cnp_due = true;
            self.cnp_after = now + interval;
        }
    }

    pub(super) fn has_replies(&self) -> bool {
        !self.replies.is_empty() || self.cnp_due
    }

    /// Whether an acknowledgement is all that there is to answer.
    pub(super) fn has_only_an_acknowledgement(&self) -> bool {
        let ack =
            |reply: &Reply| matches!(reply, Reply::Aeth { aeth, .. } if matches!(aeth.syndrome, Syndrome::Ack(_)));
        !self.cnp_due && self.replies.len() == 1 && self.replies.front().is_some_and(ack)
    }

    /// Sends up to `quantum` answers. Some for a reason to stop; `Failed` when memory that was promised is gone.
    pub(super) fn poll<M: Memory>(
        &mut self,
        conn: &Connection,
        path: &Path,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
        quantum: u32,
    ) -> Replied {
        if self.cnp_due {
            let mut header = Header::new(Opcode::Cnp, conn.remote_qpn, Psn::default());
            header.becn = true;
            let path = Path { tos: CNP_TOS, ..*path };
            if batch.push(&path, &header, 0, |_| Ok::<(), ()>(())).is_err() {
                return Replied::Full;
            }
            shared.counters.cnps_sent += 1;
            self.cnp_due = false;
        }
        for _ in 0..quantum {
            let Some(reply) = self.replies.front_mut() else {
                return Replied::Done;
            };
            match reply {
                Reply::Aeth { psn, aeth } => {
                    let mut header = Header::new(Opcode::Acknowledge, conn.remote_qpn, *psn);
                    header.ext = Ext::Aeth(*aeth);
                    if batch.push(path, &header, 0, |_| Ok::<(), ()>(())).is_err() {
                        return Replied::Full;
                    }
                    self.replies.pop_front();
                }
                Reply::Read { psn, sent, packets, reth, msn, again } => {
                    let place = Place::of(*sent, *packets);
                    let mut header = Header::new(Opcode::RdmaReadResponse(place), conn.remote_qpn, psn.plus(*sent));
                    if place != Place::Middle {
                        header.ext = Ext::Aeth(Aeth { syndrome: Syndrome::ACK, msn: *msn });
                    }
                    let at = u64::from(*sent) * u64::from(conn.mtu.bytes());
                    let payload = u64::from(reth.len).saturating_sub(at).min(u64::from(conn.mtu.bytes()));
                    let (va, len) = (reth.va.wrapping_add(at), u32::try_from(payload).unwrap_or(0));
                    let filled = batch.push(path, &header, len as usize, |out| {
                        if out.is_empty() {
                            return Ok(());
                        }
                        let span = shared.keys.remote(reth.rkey, va, len, Access::REMOTE_READ)?;
                        memory.read(span, out).then_some(()).ok_or(KeyError::Unknown)
                    });
                    match filled {
                        Ok(()) => {}
                        Err(NotAdded::Full) => return Replied::Full,
                        // The peer has what it asked for, or it would not have let the key go: this was a late duplicate.
                        Err(NotAdded::Payload(_)) if *again => {
                            self.replies.pop_front();
                            continue;
                        }
                        Err(NotAdded::Payload(_)) => {
                            // The key was invalidated while its data left (IBTA 9.7.5.2.4).
                            let (psn, msn) = (psn.plus(*sent), *msn);
                            let aeth = Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), msn };
                            self.replies.clear();
                            self.replies.push_back(Reply::Aeth { psn, aeth });
                            return Replied::Failed;
                        }
                    }
                    *sent += 1;
                    if *sent == *packets {
                        self.replies.pop_front();
                    }
                }
            }
        }
        if self.replies.is_empty() { Replied::Done } else { Replied::More }
    }

    /// Ends the receives: the one at hand and those of the queue pair's own queue.
    pub(super) fn flush(&mut self, qpn: Qpn, cq: usize, own: &mut RecvQueue, shared: &mut Shared) {
        let at_hand = (self.message == Message::Send).then_some(self.recv.tag);
        self.message = Message::None;
        for tag in at_hand.into_iter().chain(core::iter::from_fn(|| own.flush_one())) {
            shared.complete(cq, Completion::new(tag, Status::WrFlushErr, qpn, 0));
        }
    }
}

/// What became of an attempt to send answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Replied {
    /// All are sent.
    Done,
    /// There are more, after others had their turn.
    More,
    /// The batch is full.
    Full,
    /// The queue pair failed.
    Failed,
}

/// Congestion notifications travel in a class of their own: DSCP 48, and are not marked themselves.
const CNP_TOS: u8 = 48 << 2;
