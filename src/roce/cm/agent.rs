//! The CM protocol as a state machine: listeners and connections of one address.
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::mad::{
    CmaHeader, Ids, Mad, Message, Mra, REJ_PRIVATE, REP_PRIVATE, REQ_APPLICATION, Rej, Rep, Req, gid, reason,
    service_id, service_port,
};
use crate::mutation::{self, Mutation};
use crate::roce::{Mtu, Psn, Qpn};

/// A connection of an agent: its communication ID.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CmId(u32);

impl CmId {
    /// The communication ID.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// What the peer asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The port that it wants to reach.
    pub port: u16,
    /// The peer's address.
    pub remote: IpAddr,
    /// The peer's port.
    pub remote_port: u16,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// The PSN that the peer wants us to start with.
    pub psn: Psn,
    /// The path MTU that the peer proposes.
    pub mtu: Mtu,
    /// RDMA READs that we may have outstanding.
    pub initiator_depth: u8,
    /// RDMA READs that the peer wants to have outstanding.
    pub responder_resources: u8,
    /// The ACK timeout of the connection.
    pub ack_timeout: u8,
    /// How often silence is answered by a retransmission.
    pub retry_count: u8,
    /// How often we are to tolerate "receiver not ready".
    pub rnr_retry_count: u8,
    /// The application's private data, padded with zeros.
    pub private_data: [u8; REQ_APPLICATION],
}

/// How a request is accepted.
#[derive(Clone, Copy, Debug)]
pub struct Accept<'a> {
    /// Our queue pair.
    pub qpn: Qpn,
    /// The PSN that the peer is to start with.
    pub psn: Psn,
    /// RDMA READs that we let the peer have outstanding.
    pub responder_resources: u8,
    /// RDMA READs that we will have outstanding.
    pub initiator_depth: u8,
    /// How often the peer is to tolerate "receiver not ready".
    pub rnr_retry_count: u8,
    /// Receives come from a shared queue.
    pub srq: bool,
    /// The application's private data, of which 196 bytes fit.
    pub private_data: &'a [u8],
}

/// What to ask a peer for.
#[derive(Clone, Copy, Debug)]
pub struct Connect<'a> {
    /// The peer's address.
    pub remote: IpAddr,
    /// The port to reach there.
    pub port: u16,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The PSN that the peer is to start with.
    pub psn: Psn,
    /// The path MTU to propose.
    pub mtu: Mtu,
    /// RDMA READs that we let the peer have outstanding.
    pub responder_resources: u8,
    /// RDMA READs that we want to have outstanding.
    pub initiator_depth: u8,
    /// The ACK timeout of the connection.
    pub ack_timeout: u8,
    /// How often silence is answered by a retransmission.
    pub retry_count: u8,
    /// How often the peer is to tolerate "receiver not ready".
    pub rnr_retry_count: u8,
    /// Receives come from a shared queue.
    pub srq: bool,
    /// IP type of service.
    pub tos: u8,
    /// The application's private data, of which 56 bytes fit.
    pub private_data: &'a [u8],
}

/// The peer's answer to a request of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// The PSN that the peer wants us to start with.
    pub psn: Psn,
    /// The path MTU: what we proposed, or less if the peer refused that.
    pub mtu: Mtu,
    /// RDMA READs that we may have outstanding.
    pub initiator_depth: u8,
    /// RDMA READs that the peer will have outstanding.
    pub responder_resources: u8,
    /// How often we are to tolerate "receiver not ready".
    pub rnr_retry_count: u8,
    /// The application's private data, padded with zeros.
    pub private_data: Vec<u8>,
}

/// What happened to a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer wants to connect; to be answered by [`Agent::accept`] or [`Agent::reject`].
    Request(CmId, Box<Request>),
    /// The peer answered; connect the queue pair, then call [`Agent::ready`].
    Reply(CmId, Box<Reply>),
    /// The connecting side knows of our acceptance.
    Established(CmId),
    /// The peer refused; the connection is gone.
    Rejected(CmId, u16, Vec<u8>),
    /// The connection is gone, by the peer or by [`Agent::disconnect`].
    Disconnected(CmId),
    /// The peer did not answer; the connection is gone.
    TimedOut(CmId),
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Agent {
    local: IpAddr,
    ca_guid: u64,
    next_id: u32,
    next_tid: u64,
    listeners: BTreeSet<u16>,
    conns: BTreeMap<u32, Conn>,
    out: VecDeque<(IpAddr, Mad)>,
    events: VecDeque<Event>,
    /// Connections that await an answer to what was sent.
    max_conns: usize,
}

#[derive(Debug)]
struct Conn {
    remote: IpAddr,
    remote_id: u32,
    remote_qpn: Qpn,
    remote_guid: u64,
    local_qpn: Qpn,
    tid: u64,
    state: State,
    /// The path MTU that was proposed.
    mtu: Mtu,
    /// What is repeated until it is answered.
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A request was reported and is not answered.
    Requested,
    /// We accepted, and wait to be told that the peer knows.
    RepSent,
    /// We asked.
    ReqSent,
    /// The peer accepted; our side is being connected.
    RepReceived,
    /// Both sides know.
    Established,
    /// We want to end it.
    DreqSent,
}

#[derive(Debug)]
struct Pending {
    mad: Box<Mad>,
    left: u8,
    wait: Duration,
    at: Duration,
}

impl Agent {
    /// An agent without listeners. `seed` should be random: IDs from before a restart must not fit.
    #[must_use]
    pub fn new(local: IpAddr, seed: u64) -> Self {
        let address = gid(local)
            .into_iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let [a, b, c, d, ..] = seed.to_le_bytes();
        Self {
            local,
            ca_guid: address,
            next_id: u32::from_le_bytes([a, b, c, d]),
            next_tid: seed,
            listeners: BTreeSet::new(),
            conns: BTreeMap::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            max_conns: MAX_CONNS,
        }
    }

    /// Reports requests for a port from now on. False when they are already.
    pub fn listen(&mut self, port: u16) -> bool {
        self.listeners.insert(port)
    }

    /// Rejects requests for a port from now on.
    pub fn unlisten(&mut self, port: u16) {
        self.listeners.remove(&port);
    }

    /// How many connections there are, in any state.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Asks a peer for a connection.
    pub fn connect(&mut self, now: Duration, ask: &Connect<'_>) -> CmId {
        let id = self.new_id();
        let tid = self.new_tid();
        let port = u16::try_from(0x8000 | id & 0x7fff).unwrap_or(0x8000);
        let cma = CmaHeader { src: self.local, dst: ask.remote, port };
        let req = Req {
            local: id,
            service_id: service_id(ask.port),
            ca_guid: self.ca_guid,
            qpn: ask.qpn,
            responder_resources: ask.responder_resources,
            initiator_depth: ask.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            local_response_timeout: RESPONSE_TIMEOUT,
            psn: ask.psn,
            retry_count: ask.retry_count,
            rnr_retry_count: ask.rnr_retry_count,
            mtu: ask.mtu.code(),
            max_cm_retries: RETRIES,
            srq: ask.srq,
            local_gid: gid(self.local),
            remote_gid: gid(ask.remote),
            traffic_class: ask.tos,
            hop_limit: HOP_LIMIT,
            ack_timeout: ask.ack_timeout,
            private_data: cma.emit(ask.private_data),
        };
        let mut conn = Conn {
            remote: ask.remote,
            remote_id: 0,
            remote_qpn: Qpn::default(),
            remote_guid: 0,
            local_qpn: ask.qpn,
            tid,
            state: State::ReqSent,
            mtu: ask.mtu,
            pending: None,
        };
        conn.send(now, &Message::Req(Box::new(req)), &mut self.out);
        self.conns.insert(id, conn);
        CmId(id)
    }

    /// Accepts a request. False when the connection is gone or was answered.
    pub fn accept(&mut self, now: Duration, id: CmId, accept: &Accept<'_>) -> bool {
        let Some(conn) = self.conns.get_mut(&id.0).filter(|conn| conn.state == State::Requested) else {
            return false;
        };
        conn.state = State::RepSent;
        conn.local_qpn = accept.qpn;
        let rep = Rep {
            ids: Ids { local: id.0, remote: conn.remote_id },
            qpn: accept.qpn,
            psn: accept.psn,
            responder_resources: accept.responder_resources,
            initiator_depth: accept.initiator_depth,
            target_ack_delay: TARGET_ACK_DELAY,
            rnr_retry_count: accept.rnr_retry_count,
            srq: accept.srq,
            ca_guid: self.ca_guid,
            private_data: padded::<REP_PRIVATE>(accept.private_data),
        };
        conn.send(now, &Message::Rep(Box::new(rep)), &mut self.out);
        true
    }

    /// Refuses a request, or an answer of the peer.
    pub fn reject(&mut self, id: CmId, reason: u16, private_data: &[u8]) -> bool {
        let Some(conn) = self.conns.remove(&id.0) else {
            return false;
        };
        let ids = Ids { local: id.0, remote: conn.remote_id };
        let message = u8::from(conn.state != State::Requested);
        self.push_rej(conn.remote, conn.tid, ids, message, reason, private_data);
        true
    }

    /// Tells the peer that our side of an answered request is connected.
    pub fn ready(&mut self, id: CmId) -> bool {
        let Some(conn) = self.conns.get_mut(&id.0).filter(|conn| conn.state == State::RepReceived) else {
            return false;
        };
        conn.state = State::Established;
        let rtu = Message::Rtu(Ids { local: id.0, remote: conn.remote_id });
        self.out.push_back((conn.remote, rtu.emit(conn.tid)));
        true
    }

    /// The peer used the connection of this queue pair of ours, so it knows that it is established: the message that says
    /// so may be lost.
    pub fn established_by_traffic(&mut self, qpn: Qpn) {
        if mutation::is_on(Mutation::LostRtu) {
            return;
        }
        let found = self.conns.iter_mut().find(|(_, conn)| conn.local_qpn == qpn && conn.state == State::RepSent);
        if let Some((id, conn)) = found {
            conn.establish();
            self.events.push_back(Event::Established(CmId(*id)));
        }
    }

    /// Ends a connection; [`Event::Disconnected`] follows when the peer knows or is taken for dead.
    pub fn disconnect(&mut self, now: Duration, id: CmId) {
        let tid = self.new_tid();
        let Some(conn) = self.conns.get_mut(&id.0) else {
            return;
        };
        match conn.state {
            State::DreqSent => {}
            State::Requested | State::ReqSent | State::RepReceived => {
                self.reject(id, reason::CONSUMER, &[]);
                self.events.push_back(Event::Disconnected(id));
            }
            State::RepSent | State::Established => {
                conn.tid = tid;
                conn.state = State::DreqSent;
                let ids = Ids { local: id.0, remote: conn.remote_id };
                conn.send(now, &Message::Dreq(ids, conn.remote_qpn), &mut self.out);
            }
        }
    }

    /// Takes in a datagram.
    pub fn handle_datagram(&mut self, now: Duration, from: IpAddr, bytes: &[u8]) {
        let Ok((tid, message)) = Message::parse(bytes) else {
            return;
        };
        match message {
            Message::Req(req) => self.handle_req(from, tid, &req),
            Message::Rep(rep) => self.handle_rep(from, tid, &rep),
            Message::Rtu(ids) => {
                if let Some(conn) = self.conn(from, ids).filter(|conn| conn.state == State::RepSent) {
                    conn.establish();
                    self.events.push_back(Event::Established(CmId(ids.remote)));
                }
            }
            Message::Mra(mra) => {
                if let Some(pending) = self.conn(from, mra.ids).and_then(|conn| conn.pending.as_mut()) {
                    // IBTA 12.10.7.2: the timeout starts anew, and the retries with it.
                    pending.left = RETRIES;
                    pending.at = now + cm_time(mra.timeout).min(MAX_MRA);
                }
            }
            Message::Rej(rej) if rej.reason == reason::INVALID_MTU && self.ask_for_less(now, from, tid, &rej) => {}
            Message::Rej(rej) => self.handle_rej(from, &rej),
            Message::Dreq(ids, qpn) => self.handle_dreq(from, tid, ids, qpn),
            Message::Drep(ids) => {
                if self.conn(from, ids).is_some_and(|conn| conn.state == State::DreqSent) {
                    self.conns.remove(&ids.remote);
                    self.events.push_back(Event::Disconnected(CmId(ids.remote)));
                }
            }
        }
    }

    /// The next datagram to send, and where to.
    pub fn poll_transmit(&mut self) -> Option<(IpAddr, Mad)> {
        self.out.pop_front()
    }

    /// What happened.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Agent::handle_timeout`] has something to do.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Duration> {
        self.conns.values().filter_map(|conn| Some(conn.pending.as_ref()?.at)).min()
    }

    /// Repeats what was not answered, and gives up on peers that never answer.
    pub fn handle_timeout(&mut self, now: Duration) {
        let mut dead = Vec::new();
        for (id, conn) in &mut self.conns {
            let Some(pending) = conn.pending.as_mut().filter(|pending| pending.at <= now) else {
                continue;
            };
            if pending.left == 0 {
                dead.push(*id);
                continue;
            }
            pending.left -= 1;
            pending.wait = (pending.wait * 2).min(MAX_WAIT);
            pending.at = now + pending.wait;
            self.out.push_back((conn.remote, *pending.mad));
        }
        for id in dead {
            let Some(conn) = self.conns.remove(&id) else { continue };
            let event = match conn.state {
                State::DreqSent => Event::Disconnected(CmId(id)),
                _ => Event::TimedOut(CmId(id)),
            };
            if conn.state != State::DreqSent {
                let ids = Ids { local: id, remote: conn.remote_id };
                let message = u8::from(conn.state == State::RepSent);
                self.push_rej(conn.remote, conn.tid, ids, message, reason::TIMEOUT, &[]);
            }
            self.events.push_back(event);
        }
    }

    fn handle_req(&mut self, from: IpAddr, tid: u64, req: &Req) {
        let refuse = Ids { local: 0, remote: req.local };
        if let Some((id, conn)) = self
            .conns
            .iter()
            .find(|(_, conn)| conn.remote == from && conn.remote_id == req.local && conn.is_passive(req))
        {
            let repeat = match conn.state {
                State::Requested => {
                    let ids = Ids { local: *id, remote: req.local };
                    Some(Message::Mra(Mra { ids, message: 0, timeout: SERVICE_TIMEOUT }).emit(tid))
                }
                _ => conn.pending.as_ref().map(|pending| *pending.mad),
            };
            self.out.extend(repeat.map(|mad| (from, mad)));
            return;
        }
        let stale = |conn: &Conn| {
            conn.remote == from && conn.remote_guid == req.ca_guid && conn.remote_qpn == req.qpn && conn.state.is_open()
        };
        if let Some(id) = self.conns.iter().find(|(_, conn)| stale(conn)).map(|(id, _)| *id) {
            // IBTA 12.9.8.3.1: the peer forgot the old connection; both go, and the peer asks again.
            self.conns.remove(&id);
            self.events.push_back(Event::Disconnected(CmId(id)));
            self.push_rej(from, tid, refuse, 0, reason::STALE_CONNECTION, &[]);
            return;
        }
        let port = service_port(req.service_id).filter(|port| self.listeners.contains(port));
        let parsed = port.and_then(|port| Some((port, CmaHeader::parse(&req.private_data)?)));
        let Some((port, (cma, private_data))) = parsed else {
            self.push_rej(from, tid, refuse, 0, reason::INVALID_SERVICE_ID, &[]);
            return;
        };
        let Some(mtu) = Mtu::from_code(req.mtu) else {
            self.push_rej(from, tid, refuse, 0, reason::INVALID_MTU, &[]);
            return;
        };
        if self.conns.len() >= self.max_conns {
            self.push_rej(from, tid, refuse, 0, reason::NO_RESOURCES, &[]);
            return;
        }
        let id = self.new_id();
        let conn = Conn {
            remote: from,
            remote_id: req.local,
            remote_qpn: req.qpn,
            remote_guid: req.ca_guid,
            local_qpn: Qpn::default(),
            tid,
            state: State::Requested,
            mtu,
            pending: None,
        };
        self.conns.insert(id, conn);
        let request = Request {
            port,
            remote: from,
            remote_port: cma.port,
            qpn: req.qpn,
            psn: req.psn,
            mtu,
            initiator_depth: req.responder_resources,
            responder_resources: req.initiator_depth,
            ack_timeout: req.ack_timeout,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            private_data,
        };
        self.events.push_back(Event::Request(CmId(id), Box::new(request)));
    }

    fn handle_rep(&mut self, from: IpAddr, tid: u64, rep: &Rep) {
        let ids = Ids { local: rep.ids.remote, remote: rep.ids.local };
        let found = self.conns.get_mut(&rep.ids.remote).filter(|conn| conn.remote == from);
        match found {
            Some(conn) if conn.state == State::ReqSent => {
                conn.state = State::RepReceived;
                conn.pending = None;
                (conn.remote_id, conn.remote_qpn, conn.remote_guid) = (rep.ids.local, rep.qpn, rep.ca_guid);
                let reply = Reply {
                    qpn: rep.qpn,
                    psn: rep.psn,
                    mtu: conn.mtu,
                    initiator_depth: rep.responder_resources,
                    responder_resources: rep.initiator_depth,
                    rnr_retry_count: rep.rnr_retry_count,
                    private_data: rep.private_data.to_vec(),
                };
                self.events.push_back(Event::Reply(CmId(ids.local), Box::new(reply)));
            }
            // Our RTU was lost.
            Some(conn) if conn.state == State::Established && conn.remote_id == rep.ids.local => {
                if mutation::is_on(Mutation::LostRtu) {
                    return;
                }
                self.out.push_back((from, Message::Rtu(ids).emit(tid)));
            }
            Some(conn) if conn.state == State::RepReceived && conn.remote_id == rep.ids.local => {
                let mra = Message::Mra(Mra { ids, message: 1, timeout: SERVICE_TIMEOUT });
                self.out.push_back((from, mra.emit(tid)));
            }
            Some(_) => {}
            None => self.push_rej(from, tid, ids, 1, reason::TIMEOUT, &[]),
        }
    }

    fn handle_rej(&mut self, from: IpAddr, rej: &Rej) {
        let local = rej.ids.remote;
        let Some(conn) = self.conns.get(&local).filter(|conn| conn.remote == from) else {
            return;
        };
        // A peer that refuses a REQ outright has no communication ID of its own.
        let ours = rej.ids.local == conn.remote_id || conn.state == State::ReqSent;
        let event = match conn.state {
            State::ReqSent => Event::Rejected(CmId(local), rej.reason, rej.private_data.to_vec()),
            _ => Event::Disconnected(CmId(local)),
        };
        if ours {
            self.conns.remove(&local);
            self.events.push_back(event);
        }
    }

    /// The peer cannot have packets as large as were proposed: asks again. False when there is nothing smaller.
    fn ask_for_less(&mut self, now: Duration, from: IpAddr, tid: u64, rej: &Rej) -> bool {
        let next_tid = self.new_tid();
        let Some(conn) = self.conns.get_mut(&rej.ids.remote) else { return false };
        if conn.remote != from || conn.state != State::ReqSent {
            return false;
        }
        if conn.tid != tid {
            // It refuses what is not asked for any more.
            return true;
        }
        // Some say what they can have, by its code.
        let said = rej.private_data.first().and_then(|code| Mtu::from_code(*code)).filter(|mtu| *mtu < conn.mtu);
        let asked = conn.pending.as_ref().and_then(|pending| Message::parse(&*pending.mad).ok());
        let (Some(mtu), Some((_, Message::Req(mut req)))) = (said.or_else(|| conn.mtu.smaller()), asked) else {
            return false;
        };
        req.mtu = mtu.code();
        (conn.mtu, conn.tid) = (mtu, next_tid);
        conn.send(now, &Message::Req(req), &mut self.out);
        true
    }

    fn handle_dreq(&mut self, from: IpAddr, tid: u64, ids: Ids, qpn: Qpn) {
        let drep = Message::Drep(Ids { local: ids.remote, remote: ids.local });
        let known = self.conn(from, ids).map(|conn| conn.local_qpn == qpn);
        if known == Some(false) {
            return;
        }
        // An unknown connection is one that ended: the peer missed our answer.
        self.out.push_back((from, drep.emit(tid)));
        if known.is_some() {
            self.conns.remove(&ids.remote);
            self.events.push_back(Event::Disconnected(CmId(ids.remote)));
        }
    }

    /// The connection that a message with these IDs is for.
    fn conn(&mut self, from: IpAddr, ids: Ids) -> Option<&mut Conn> {
        let conn = self.conns.get_mut(&ids.remote)?;
        let asked = conn.state == State::ReqSent;
        (conn.remote == from && (asked || conn.remote_id == ids.local)).then_some(conn)
    }

    fn push_rej(&mut self, to: IpAddr, tid: u64, ids: Ids, message: u8, reason: u16, private_data: &[u8]) {
        let private_data = padded::<REJ_PRIVATE>(private_data);
        let rej = Message::Rej(Box::new(Rej { ids, message, reason, private_data }));
        self.out.push_back((to, rej.emit(tid)));
    }

    fn new_id(&mut self) -> u32 {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            if self.next_id != 0 && !self.conns.contains_key(&self.next_id) {
                return self.next_id;
            }
        }
    }

    const fn new_tid(&mut self) -> u64 {
        self.next_tid = self.next_tid.wrapping_add(1);
        self.next_tid
    }
}

impl Conn {
    /// Sends a message, and again until it is answered.
    fn send(&mut self, now: Duration, message: &Message, out: &mut VecDeque<(IpAddr, Mad)>) {
        let mad = message.emit(self.tid);
        out.push_back((self.remote, mad));
        self.pending = Some(Pending { mad: Box::new(mad), left: RETRIES, wait: FIRST_WAIT, at: now + FIRST_WAIT });
    }

    fn establish(&mut self) {
        self.state = State::Established;
        self.pending = None;
    }

    /// Whether it came from this request.
    fn is_passive(&self, req: &Req) -> bool {
        self.remote_qpn == req.qpn && matches!(self.state, State::Requested | State::RepSent | State::Established)
    }
}

impl State {
    const fn is_open(self) -> bool {
        matches!(self, Self::Requested | Self::RepSent | Self::RepReceived | Self::Established)
    }
}

fn padded<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
    out
}

/// A time as CM messages carry it.
fn cm_time(code: u8) -> Duration {
    Duration::from_nanos(4096) * (1 << code.min(31))
}

/// Connections, in any state, of one agent.
const MAX_CONNS: usize = 65_536;
/// Repetitions of a message; with the waits between them, 30 s.
const RETRIES: u8 = 10;
const FIRST_WAIT: Duration = Duration::from_millis(250);
const MAX_WAIT: Duration = Duration::from_secs(4);
/// The longest that a peer can make us wait by saying that it is busy.
const MAX_MRA: Duration = Duration::from_secs(10);
/// 4.3 s: what is said of how long an answer may take.
const RESPONSE_TIMEOUT: u8 = 20;
/// 4.3 s: what a peer is told that asks again.
const SERVICE_TIMEOUT: u8 = 20;
/// 1.07 s: acknowledgements of a process that shares its processor may be late. Linux makes an ACK timeout of 2.1 s out of
/// it, instead of 0.54 s. `rdma_rxe` does not survive one that is too short: when it sends again, it also repeats the
/// registrations of memory in between, and ends the connection as these are valid already.
const TARGET_ACK_DELAY: u8 = 18;
const HOP_LIMIT: u8 = 64;
