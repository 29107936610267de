//! One queue pair: requester and responder with what they have in common.
use core::time::Duration;

use super::batch::{Path, TxBatch};
use super::completer::Outcome;
use super::keys::Memory;
use super::packet::Packet;
use super::rate::Dcqcn;
use super::recv::RecvQueue;
use super::requester::{Peer, Requester, Sent};
use super::responder::{Local, Replied, Responder, Served};
use super::shared::Shared;
use super::verbs::{Connection, QpState, Status};
use super::{Opcode, Qpn};

/// A queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) qpn: Qpn,
    pub(super) state: QpState,
    pub(super) send_cq: usize,
    pub(super) recv_cq: usize,
    pub(super) srq: Option<usize>,
    pub(super) recv: RecvQueue,
    pub(super) conn: Option<(Connection, Path)>,
    pub(super) requester: Requester,
    responder: Responder,
    /// In the engine's list of queue pairs with something to send.
    pub(super) queued: bool,
    /// In the engine's list of queue pairs that wait for receive credit.
    pub(super) starved: bool,
    /// The earliest entry of this queue pair in the engine's timers.
    pub(super) timer_at: Option<Duration>,
    /// A request of the peer came.
    pub(super) heard: bool,
}

/// What became of an attempt to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Polled {
    /// Nothing more for now.
    Idle,
    /// More, after the others.
    More,
    /// The batch is full.
    Full,
    /// Waits for receive credit.
    NoCredit,
}

impl QueuePair {
    pub(super) fn new(qpn: Qpn, send_cq: usize, recv_cq: usize, srq: Option<usize>, depth: (usize, usize)) -> Self {
        let (send, recv) = depth;
        Self {
            qpn,
            state: QpState::Reset,
            send_cq,
            recv_cq,
            srq,
            recv: RecvQueue::new(if srq.is_some() { 0 } else { recv }),
            conn: None,
            requester: Requester::new(send),
            responder: Responder::default(),
            queued: false,
            starved: false,
            timer_at: None,
            heard: false,
        }
    }

    pub(super) fn connect(&mut self, conn: Connection, path: Path) {
        self.requester.connect(&conn);
        self.responder.connect(&conn);
        self.conn = Some((conn, path));
        self.state = QpState::Rts;
    }

    /// Takes in a packet. True when there may be something to send.
    pub(super) fn handle_packet<M: Memory>(
        &mut self,
        now: Duration,
        packet: &Packet<'_>,
        congested: bool,
        dcqcn: &Dcqcn,
        shared: &mut Shared,
        memory: &mut M,
    ) -> bool {
        let Some((conn, _)) = self.conn else {
            return false;
        };
        if self.state != QpState::Rts {
            return false;
        }
        if congested && packet.header.opcode != Opcode::Cnp {
            self.responder.congested(now, dcqcn.cnp_interval);
        }
        match packet.header.opcode {
            Opcode::Cnp => {
                shared.counters.cnps_received += 1;
                self.requester.rate.notified(now, dcqcn);
                true
            }
            opcode if opcode.is_response() => {
                let outcome = self.requester.handle_response(now, packet, &conn, shared, memory);
                self.requester.retire(self.qpn, self.send_cq, &conn, shared);
                if let Outcome::Failed(index, status) = outcome {
                    self.fail(Some((index, status)), shared);
                }
                true
            }
            opcode if opcode.is_request() => {
                self.heard = true;
                let patience = self.requester.timer.round_trip();
                let (cq, own) = (self.recv_cq, &mut self.recv);
                let mut local = Local { qpn: self.qpn, conn: &conn, cq, own, srq: self.srq, now, patience };
                match self.responder.handle_request(packet, &mut local, shared, memory) {
                    Served::Quiet => self.responder.has_replies(),
                    Served::Reply => true,
                    Served::Fatal => {
                        self.fail(None, shared);
                        true
                    }
                }
            }
            _ => false,
        }
    }

    /// Sends answers first, then requests; but a lone acknowledgement goes last: it may end a run of larger packets, which
    /// costs nothing, while in front of them it would be a run of its own.
    pub(super) fn poll<M: Memory>(
        &mut self,
        now: Duration,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
    ) -> Polled {
        let Some((conn, path)) = self.conn else {
            return Polled::Idle;
        };
        let answers_last = self.state == QpState::Rts && self.responder.has_only_an_acknowledgement();
        if !answers_last && let Some(end) = self.poll_answers(&conn, &path, shared, memory, batch) {
            return end;
        }
        if self.state != QpState::Rts {
            return Polled::Idle;
        }
        let peer = Peer { conn: &conn, path: &path };
        batch.keep_open(answers_last);
        let polled = self.requester.poll(now, &peer, shared, memory, batch, QUANTUM);
        batch.keep_open(false);
        let requests = match polled {
            Sent::Idle => Polled::Idle,
            Sent::More => Polled::More,
            Sent::Full => return Polled::Full,
            Sent::NoCredit => Polled::NoCredit,
            Sent::Failed(index, status) => {
                self.fail(Some((index, status)), shared);
                Polled::Idle
            }
        };
        if answers_last && let Some(end) = self.poll_answers(&conn, &path, shared, memory, batch) {
            return end;
        }
        requests
    }

    /// Sends answers. Some for a reason to stop there.
    fn poll_answers<M: Memory>(
        &mut self,
        conn: &Connection,
        path: &Path,
        shared: &mut Shared,
        memory: &M,
        batch: &mut TxBatch,
    ) -> Option<Polled> {
        match self.responder.poll(conn, path, shared, memory, batch, QUANTUM) {
            Replied::Done => None,
            Replied::More => Some(Polled::More),
            Replied::Full => Some(Polled::Full),
            Replied::Failed => {
                self.fail(None, shared);
                Some(Polled::More)
            }
        }
    }

    /// What the timers say. True when there may be something to send.
    pub(super) fn handle_timeout(&mut self, now: Duration, shared: &mut Shared) -> bool {
        if self.state != QpState::Rts {
            return false;
        }
        if let Outcome::Failed(index, status) = self.requester.handle_timeout(now, shared) {
            self.fail(Some((index, status)), shared);
        }
        true
    }

    /// The earliest time at which [`QueuePair::handle_timeout`] has something to do.
    pub(super) fn deadline(&self) -> Option<Duration> {
        if self.state != QpState::Rts {
            return None;
        }
        let pace = self.requester.rate.deadline();
        let Requester { timer, rnr_until, lent_until, .. } = &self.requester;
        [timer.deadline(), *rnr_until, *lent_until, pace].into_iter().flatten().min()
    }

    /// To the error state, by itself.
    fn fail(&mut self, failed: Option<(usize, Status)>, shared: &mut Shared) {
        if self.state != QpState::Err {
            shared.counters.qp_errors += 1;
            self.end(failed, shared);
        }
    }

    /// To the error state: everything posted completes, first of all the work request that failed.
    pub(super) fn end(&mut self, failed: Option<(usize, Status)>, shared: &mut Shared) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.requester.flush(failed, self.qpn, self.send_cq, shared);
        self.responder.flush(self.qpn, self.recv_cq, &mut self.recv, shared);
    }
}

/// Packets that one queue pair sends before others have their turn, and before a lone acknowledgement: two runs of full packets,
/// or one of data and the one of responses that belong to them.
const QUANTUM: u32 = 30;
