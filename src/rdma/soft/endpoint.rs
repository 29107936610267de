//! What one reactor holds of one address: an engine with its socket.
//!
//! [`Endpoint::poll`] reads packets and hands them to the engine; what these lead to is sent with whatever the caller
//! posts next, at [`Endpoint::flush`], so that an acknowledgement and a response leave in one system call.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::cm::{SoftIncoming, SoftOutgoing};
use super::device::Device;
use super::headers::Headers;
use super::hold::{Held, Order};
use super::ids::PeerIds;
use super::memory::Regions;
use super::socket::{RxBatch, SendResult, Socket, TxScratch};
use crate::rdma::{
    Access, Caps, Completion, ConnParams, Endpoint, EndpointEvent, EndpointOptions, Incoming, Mr, Outgoing, PostError,
    QpId, QpOptions, RdmaError, RecvQueue, SendOp, SendWr, Sge, WcStatus,
};
use crate::roce::cm::{Accept, CmId, Connect};
use crate::roce::icrc::{Checker, Flow, Verdict};
use crate::roce::{
    self, Connection, CqId, Engine, Lkey, Psn, QpConfig, QpEvent, Qpn, RegionId, Rkey, SrqId, Status, TxBatch,
};

/// See the module's documentation. Drop order: queue pairs go with the engine, which only then lets go of the regions.
pub struct SoftEndpoint {
    engine: Engine,
    regions: Regions,
    inner: Arc<Inner>,
    device: Arc<Device>,
    socket: Arc<Socket>,
    cq: CqId,
    srq: Option<SrqId>,
    caps: Caps,
    qps: Vec<Option<Qp>>,
    /// Queue pairs with SENDs that are held back until the doorbell.
    holding: Vec<QpId>,
    mrs: Vec<Option<Lkey>>,
    rx: RxBatch,
    tx: TxBatch,
    scratch: TxScratch,
    /// The first run of `tx` that the socket did not take, and when to try again.
    unsent: Option<(usize, Duration)>,
    checker: Checker,
    ids: PeerIds,
    headers: Option<Headers>,
    /// Packets whose identification was seen, not solved.
    identified: u64,
    done: Vec<roce::Completion>,
    events: VecDeque<EndpointEvent>,
    /// Changes of the network device that were told.
    changes: u32,
    /// What happened to packets below the engine.
    drops: Drops,
}

/// Packets that did not reach the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// The invariant CRC was wrong.
    pub corrupt: u64,
    /// The socket's buffer was full.
    pub overflow: u64,
}

#[derive(Debug)]
struct Qp {
    qpn: Qpn,
    link: Link,
    psn: Psn,
    held: Held,
}

/// Where a queue pair stands with connection management.
#[derive(Debug)]
enum Link {
    Incoming(Box<SoftIncoming>),
    Outgoing(SoftOutgoing, Option<CmId>, u8, u8),
    Accepted(CmId),
    Gone,
}

impl SoftEndpoint {
    pub(super) fn new(
        inner: Arc<Inner>,
        device: Arc<Device>,
        reactor: usize,
        options: &EndpointOptions,
    ) -> Result<Self, RdmaError> {
        let (socket, ids) = (device.socket(reactor)?, PeerIds::new(&device.ids));
        let (headers, changes) = (device.headers(reactor)?, device.changes());
        let config = roce::Config {
            index: u32::try_from(reactor).unwrap_or(0),
            index_bits: device.index_bits,
            slot_bits: SLOT_BITS,
            seed: inner.world.engine_seed(),
            // The kernel accounts about twice its bytes to a packet of 4 KiB, and what it reports is twice what was asked
            // for; half of the rest is left to requests and to what is sent again.
            read_credit: (socket.receive_buffer as u64 / 4).min(MAX_READ_CREDIT),
            dcqcn: inner.options.dcqcn,
            ..roce::Config::new(device.address)
        };
        let mut engine = Engine::new(config);
        let rx = inner.world.receive_batch(RX_DATAGRAMS);
        let cq = engine.create_cq(CQ_DEPTH);
        let srq = (options.srq_depth > 0).then(|| engine.create_srq(options.srq_depth as usize));
        Ok(Self {
            engine,
            regions: Regions::default(),
            inner,
            device,
            socket,
            cq,
            srq,
            caps: caps(),
            qps: Vec::new(),
            holding: Vec::new(),
            mrs: Vec::new(),
            rx,
            tx: TxBatch::new(TX_BYTES, 64),
            scratch: TxScratch::default(),
            unsent: None,
            checker: Checker::new(MAX_PACKET),
            ids,
            headers,
            identified: 0,
            done: Vec::new(),
            events: VecDeque::new(),
            changes,
            drops: Drops::default(),
        })
    }

    /// What the engine counted.
    #[must_use]
    pub const fn counters(&self) -> &roce::Counters {
        self.engine.counters()
    }

    /// Packets whose IPv4 identification was seen.
    #[must_use]
    pub const fn identified(&self) -> u64 {
        self.identified
    }

    /// What drives it, for a simulation to look at.
    #[cfg(test)]
    pub(crate) const fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Its socket, for tests to look at.
    #[cfg(test)]
    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Its registered memory, for tests to look at.
    #[cfg(test)]
    pub(super) const fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Queue pairs that exist, and connections of the address.
    #[cfg(test)]
    pub(crate) fn in_use(&self) -> (usize, usize) {
        (self.qps.iter().flatten().count(), self.device.cm().agent.connections())
    }

    /// Packets that did not reach the engine.
    #[must_use]
    pub const fn drops(&self) -> Drops {
        self.drops
    }

    fn create_qp(&mut self, options: &QpOptions, link: Link) -> Result<QpId, Box<(Link, RdmaError)>> {
        let srq = if options.recv_wr == 0 { self.srq } else { None };
        let config = QpConfig {
            send_cq: self.cq,
            recv_cq: self.cq,
            srq,
            max_send: options.send_wr as usize,
            max_recv: options.recv_wr as usize,
        };
        let Some(qpn) = self.engine.create_qp(&config) else {
            let reason = format!("all {} are in use", 1 << SLOT_BITS);
            return Err(Box::new((link, RdmaError::new("queue pair", reason, ""))));
        };
        let slot = self.engine.slot_number(qpn).unwrap_or(0);
        if self.qps.len() <= slot {
            self.qps.resize_with(slot + 1, || None);
        }
        let psn = Psn::new(self.inner.world.psn());
        self.qps[slot] = Some(Qp { qpn, link, psn, held: Held::default() });
        Ok(QpId(slot as u32))
    }

    fn qp(&mut self, qp: QpId) -> Option<&mut Qp> {
        self.qps.get_mut(qp.0 as usize)?.as_mut()
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.get(qp.0 as usize)?.as_ref().map(|qp| qp.qpn)
    }

    fn no_qp(qp: QpId) -> RdmaError {
        RdmaError::new(format!("queue pair {}", qp.0), "it is not in a state for this", "")
    }

    /// Ends the connection of a queue pair, in whatever state it is.
    fn unlink(&mut self, qp: QpId, private_data: &[u8]) {
        let Some(link) = self.qp(qp).map(|qp| std::mem::replace(&mut qp.link, Link::Gone)) else {
            return;
        };
        match link {
            Link::Incoming(incoming) => incoming.reject(private_data),
            Link::Outgoing(_, Some(id), ..) | Link::Accepted(id) => {
                self.device.with_cm(&self.inner, |state, now| state.agent.disconnect(now, id));
            }
            Link::Outgoing(..) | Link::Gone => {}
        }
    }

    /// Reads packets until there are none, or enough for one turn. True when there are none.
    fn receive(&mut self, now: Duration) -> bool {
        for _ in 0..RX_ROUNDS {
            let drained = self.socket.receive(&mut self.rx);
            let count = self.rx.len();
            self.headers.iter_mut().for_each(Headers::receive);
            for index in 0..count {
                self.take_in(now, index);
            }
            if drained || count < RX_DATAGRAMS {
                return drained;
            }
            // More is waiting: what was asked for so far is answered before it.
            self.transmit(now);
        }
        false
    }

    fn take_in(&mut self, now: Duration, index: usize) {
        let Some(received) = self.rx.get(index) else {
            return;
        };
        if let Some(dropped) = received.dropped {
            self.drops.overflow = u64::from(dropped);
        }
        let flow = Flow { src: received.from, dst: self.device.address, src_port: received.from_port };
        let header = self.headers.as_mut().and_then(|headers| headers.take(received.from, received.bytes));
        for (place, packet) in (0..).zip(received.bytes.chunks(received.segment)) {
            let good = match self.checker.check_with(&flow, place, packet) {
                Verdict::Valid => true,
                Verdict::ValidWithId { id, dont_fragment } => match header {
                    Some(header) => {
                        self.identified += 1;
                        header.explains(place, id, dont_fragment)
                    }
                    None => self.ids.accept(now, received.from, (id, dont_fragment), packet),
                },
                Verdict::Corrupt => false,
            };
            if good {
                self.engine.handle_packet(now, received.from, received.congested(), packet, &mut self.regions);
            } else {
                self.drops.corrupt += 1;
            }
        }
    }

    /// Sends what there is to send, as far as the socket takes it.
    fn transmit(&mut self, now: Duration) {
        if let Some((first, at)) = self.unsent
            && (now < at || !self.send(now, first))
        {
            return;
        }
        loop {
            self.tx.clear();
            let more = self.engine.poll_transmit(now, &mut self.tx, &self.regions);
            if self.tx.is_empty() || !self.send(now, 0) || !more {
                return;
            }
        }
    }

    /// Sends the batch from run `first` on. False when the socket is full.
    fn send(&mut self, now: Duration, mut first: usize) -> bool {
        self.unsent = None;
        loop {
            match self.socket.send(&self.tx, first, &mut self.scratch) {
                SendResult::Done => return true,
                SendResult::Full(at) => {
                    self.unsent = Some((at, now + SOCKET_FULL_WAIT));
                    return false;
                }
                SendResult::NoSegmentation(at) => {
                    // The packets of this run have their CRCs for a segmented one: retransmission brings them.
                    self.tx.set_max_segments(1);
                    first = at + 1;
                }
            }
        }
    }

    /// Posts what is held of a queue pair.
    fn release(&mut self, qp: QpId) {
        let Some(known) = self.qps.get_mut(qp.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        for wr in known.held.release() {
            // There was room when it was held, and in the error state it completes as flushed.
            let posted = post(&mut self.engine, &self.regions, known.qpn, &wr);
            debug_assert!(posted.is_ok(), "{posted:?}");
        }
    }

    fn take_events(&mut self) {
        while let Some(event) = self.engine.poll_event() {
            match event {
                QpEvent::Established(qpn) => {
                    self.device.with_cm(&self.inner, |state, _| state.agent.established_by_traffic(qpn));
                }
                QpEvent::Failed(qpn) => {
                    if let Some(qp) = self.id_of(qpn) {
                        self.events.push_back(EndpointEvent::QpError(qp));
                        self.events.push_back(EndpointEvent::LastReceive(qp));
                    }
                }
            }
        }
    }

    fn id_of(&self, qpn: Qpn) -> Option<QpId> {
        let slot = self.engine.slot_number(qpn)?;
        let known = self.qps.get(slot)?.as_ref()?;
        (known.qpn == qpn).then_some(QpId(slot as u32))
    }

    fn completion(&self, done: &roce::Completion) -> Completion {
        Completion {
            tag: done.tag,
            status: status(done.status),
            byte_len: done.byte_len,
            qp: self.id_of(done.qpn).unwrap_or(Completion::NO_QP),
            invalidated: done.invalidated.map(|rkey| rkey.0),
        }
    }
}

impl Endpoint for SoftEndpoint {
    type Incoming = SoftIncoming;
    type Outgoing = SoftOutgoing;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, addr: *mut u8, len: usize, access: Access) -> Result<Mr, RdmaError> {
        // SAFETY: the caller promises what `add` asks for, until `deregister` or our drop.
        let region = unsafe { self.regions.add(addr, len) };
        let local = roce::Access::LOCAL_WRITE;
        let access = match access {
            Access::Local | Access::ReadSink => local,
            // A peer that may use the key may also end it, as with the regions of NICs.
            Access::Remote => local
                .union(roce::Access::REMOTE_READ)
                .union(roce::Access::REMOTE_WRITE)
                .union(roce::Access::REMOTE_INVALIDATE),
        };
        let registration = roce::Registration { region, offset: 0, va: addr as u64, len: len as u64, access };
        let Some((lkey, rkey)) = self.engine.keys().register(registration) else {
            self.regions.remove(region);
            return Err(RdmaError::new("memory region", "all keys are in use", ""));
        };
        let id = region.0 as usize;
        if self.mrs.len() <= id {
            self.mrs.resize(id + 1, None);
        }
        self.mrs[id] = Some(lkey);
        Ok(Mr { id: region.0, lkey: lkey.0, rkey: rkey.0 })
    }

    fn deregister(&mut self, mr: Mr) {
        if let Some(lkey) = self.mrs.get_mut(mr.id as usize).and_then(Option::take) {
            self.engine.keys().deregister(lkey);
            self.regions.remove(RegionId(mr.id));
        }
    }

    fn create_incoming(
        &mut self,
        incoming: SoftIncoming,
        options: &QpOptions,
    ) -> Result<QpId, (SoftIncoming, RdmaError)> {
        match self.create_qp(options, Link::Incoming(Box::new(incoming))) {
            Ok(qp) => Ok(qp),
            Err(failed) => match *failed {
                (Link::Incoming(incoming), error) => Err((*incoming, error)),
                _ => unreachable!("the link comes back as it went in"),
            },
        }
    }

    fn accept(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let has_srq = self.srq.is_some();
        let known = self.qp(qp).ok_or_else(|| Self::no_qp(qp))?;
        let (qpn, psn) = (known.qpn, known.psn);
        let Link::Incoming(mut incoming) = std::mem::replace(&mut known.link, Link::Gone) else {
            return Err(Self::no_qp(qp));
        };
        let request = &incoming.request;
        let initiator_depth = params.initiator_depth.min(request.initiator_depth).min(self.caps.max_initiator_depth);
        let responder_resources =
            params.responder_resources.min(request.responder_resources).min(self.caps.max_responder_resources);
        let connection = Connection {
            remote: request.remote,
            remote_qpn: request.qpn,
            mtu: request.mtu,
            send_psn: request.psn,
            recv_psn: psn,
            initiator_depth,
            responder_resources,
            ack_timeout: request.ack_timeout,
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
            min_rnr_timer: MIN_RNR_TIMER,
            tos: incoming.tos.unwrap_or(ECN_CAPABLE),
            remote_read: true,
            remote_write: true,
        };
        if !self.engine.connect(qpn, connection) {
            return Err(Self::no_qp(qp));
        }
        let id = incoming.id;
        let accept = Accept {
            qpn,
            psn,
            responder_resources,
            initiator_depth,
            rnr_retry_count: RNR_RETRY,
            srq: has_srq,
            private_data: params.private_data,
        };
        let accepted = self.device.with_cm(&self.inner, |state, now| state.agent.accept(now, id, &accept));
        incoming.answered();
        if let Some(known) = self.qp(qp) {
            known.link = if accepted { Link::Accepted(id) } else { Link::Gone };
        }
        if accepted { Ok(()) } else { Err(RdmaError::new("connection request", "the peer withdrew it", "")) }
    }

    fn reject(&mut self, qp: QpId, private_data: &[u8]) {
        self.unlink(qp, private_data);
        self.destroy(qp);
    }

    fn create_outgoing(&mut self, outgoing: SoftOutgoing, options: &QpOptions) -> Result<QpId, RdmaError> {
        self.create_qp(options, Link::Outgoing(outgoing, None, 0, 0)).map_err(|failed| failed.1)
    }

    fn connect(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let (mtu, srq) = (self.device.mtu(), self.srq.is_some());
        let depth = params.initiator_depth.min(self.caps.max_initiator_depth);
        let resources = params.responder_resources.min(self.caps.max_responder_resources);
        let (inner, device) = (Arc::clone(&self.inner), Arc::clone(&self.device));
        let known = self.qp(qp).ok_or_else(|| Self::no_qp(qp))?;
        let (qpn, psn) = (known.qpn, known.psn);
        let Link::Outgoing(outgoing, asked @ None, want, give) = &mut known.link else {
            return Err(Self::no_qp(qp));
        };
        let ask = Connect {
            remote: outgoing.peer.ip(),
            port: outgoing.peer.port(),
            qpn,
            psn,
            mtu,
            responder_resources: resources,
            initiator_depth: depth,
            ack_timeout: ACK_TIMEOUT,
            retry_count: RETRY,
            rnr_retry_count: RNR_RETRY,
            srq,
            tos: ECN_CAPABLE,
            private_data: params.private_data,
        };
        let conn = outgoing.conn();
        let id = device.with_cm(&inner, |state, now| {
            let id = state.agent.connect(now, &ask);
            state.conns.insert(id, conn);
            id
        });
        (*asked, *want, *give) = (Some(id), depth, resources);
        Ok(())
    }

    fn established(&mut self, qp: QpId) -> Result<(), RdmaError> {
        let (inner, device) = (Arc::clone(&self.inner), Arc::clone(&self.device));
        let known = self.qp(qp).ok_or_else(|| Self::no_qp(qp))?;
        let (qpn, psn) = (known.qpn, known.psn);
        let Link::Outgoing(outgoing, Some(id), depth, resources) = &known.link else {
            return Err(Self::no_qp(qp));
        };
        let (id, remote, conn) = (*id, outgoing.peer.ip(), outgoing.conn());
        let (depth, resources) = (*depth, *resources);
        let reply = device.cm().replies.remove(&conn).ok_or_else(|| Self::no_qp(qp))?;
        let connection = Connection {
            remote,
            remote_qpn: reply.qpn,
            mtu: reply.mtu,
            send_psn: reply.psn,
            recv_psn: psn,
            initiator_depth: depth.min(reply.initiator_depth),
            responder_resources: resources.min(reply.responder_resources),
            ack_timeout: ACK_TIMEOUT,
            retry_count: RETRY,
            rnr_retry_count: reply.rnr_retry_count,
            min_rnr_timer: MIN_RNR_TIMER,
            tos: ECN_CAPABLE,
            remote_read: true,
            remote_write: true,
        };
        if !self.engine.connect(qpn, connection) {
            return Err(Self::no_qp(qp));
        }
        if !device.with_cm(&inner, |state, _| state.agent.ready(id)) {
            return Err(RdmaError::new("connection", "the peer ended it", ""));
        }
        Ok(())
    }

    fn post_recv(&mut self, queue: RecvQueue, tag: u64, sges: &[Sge]) -> Result<(), PostError> {
        let mut list = [EMPTY_SGE; roce::MAX_SGE];
        let list = list.get_mut(..sges.len()).ok_or(PostError::Device(libc::EINVAL))?;
        list.iter_mut().zip(sges).for_each(|(to, from)| *to = sge(from));
        let wr = roce::RecvWr { tag, sges: list };
        match queue {
            RecvQueue::Shared => self.engine.post_srq_recv(self.srq.ok_or(PostError::NoQp)?, &wr),
            RecvQueue::Qp(qp) => self.engine.post_recv(self.qpn(qp).ok_or(PostError::NoQp)?, &wr),
        }
        .map_err(post_error)
    }

    fn post_send(&mut self, qp: QpId, wr: &SendWr) -> Result<(), PostError> {
        if wr.inline && wr.sge.len > self.caps.max_inline {
            return Err(PostError::Device(libc::EINVAL));
        }
        let mtu = self.device.mtu().bytes();
        let known = self.qps.get_mut(qp.0 as usize).and_then(Option::as_mut).ok_or(PostError::NoQp)?;
        let order = known.held.order(wr, mtu);
        if known.held.len() > 0 || order == Order::Hold {
            let room = self.engine.send_room(known.qpn).ok_or(PostError::NoQp)?;
            if room <= known.held.len() {
                return Err(PostError::Full);
            }
        }
        match order {
            Order::Now => {}
            Order::AfterHeld => self.release(qp),
            Order::Hold => {
                if known.held.len() == 0 {
                    self.holding.push(qp);
                }
                if known.held.push(wr) {
                    self.release(qp);
                }
                return Ok(());
            }
        }
        let qpn = self.qpn(qp).ok_or(PostError::NoQp)?;
        post(&mut self.engine, &self.regions, qpn, wr)
    }

    fn flush(&mut self, now: Duration) {
        while let Some(qp) = self.holding.pop() {
            self.release(qp);
        }
        self.transmit(now);
    }

    fn poll(&mut self, now: Duration, out: &mut [Completion]) -> usize {
        let drained = self.engine.cq_len(self.cq) < out.len() && self.receive(now);
        // Nobody is late whose packets are still in our own buffer.
        if drained && self.engine.next_timeout().is_some_and(|at| at <= now) {
            self.engine.handle_timeout(now);
        }
        self.take_events();
        self.done.clear();
        let count = self.engine.poll_cq(self.cq, &mut self.done, out.len());
        for (to, from) in out.iter_mut().zip(&self.done) {
            *to = self.completion(from);
        }
        // With completions the caller has something to post and flushes; without, nobody else sends.
        if count == 0 {
            self.transmit(now);
        }
        count
    }

    fn arm(&mut self) -> Result<(), RdmaError> {
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.fd.as_fd()]
    }

    fn next_timeout(&self) -> Option<Duration> {
        let full = self.unsent.map(|(_, at)| at);
        [self.engine.next_timeout(), full].into_iter().flatten().min()
    }

    fn poll_event(&mut self) -> Option<EndpointEvent> {
        let changes = self.device.changes();
        if std::mem::replace(&mut self.changes, changes) != changes {
            self.events.push_back(EndpointEvent::PortChanged);
        }
        self.events.pop_front()
    }

    fn disconnect(&mut self, qp: QpId) {
        self.release(qp);
        if let Some(qpn) = self.qpn(qp) {
            self.engine.fail_qp(qpn);
            self.unlink(qp, &[]);
        }
    }

    fn destroy(&mut self, qp: QpId) {
        self.unlink(qp, &[]);
        if let Some(known) = self.qps.get_mut(qp.0 as usize).and_then(Option::take) {
            self.engine.destroy_qp(known.qpn);
        }
    }
}

impl Drop for SoftEndpoint {
    /// Tells the peers, and the log what became of the packets.
    fn drop(&mut self) {
        for slot in 0..self.qps.len() {
            self.unlink(QpId(slot as u32), &[]);
        }
        tracing::debug!(address = %self.device.address, counters = ?self.engine.counters(), drops = ?self.drops, "closed");
    }
}

/// The limits, which are the same for every address.
pub(super) const fn caps() -> Caps {
    Caps {
        max_qp_wr: 16_384,
        max_cqe: 1 << 20,
        max_qp: 1 << SLOT_BITS,
        max_srq_wr: 1 << 16,
        max_recv_sge: roce::MAX_SGE as u32,
        max_inline: roce::MAX_INLINE as u32,
        max_initiator_depth: READS,
        max_responder_resources: READS,
        send_with_invalidate: true,
        read_sink_needs_remote_write: false,
    }
}

fn post(engine: &mut Engine, regions: &Regions, qpn: Qpn, wr: &SendWr) -> Result<(), PostError> {
    let op = match wr.op {
        SendOp::Send => roce::SendOp::Send,
        SendOp::SendInvalidate { rkey } => roce::SendOp::SendInv(Rkey(rkey)),
        SendOp::RdmaWrite { remote, rkey } => roce::SendOp::RdmaWrite(remote_addr(remote, rkey)),
        SendOp::RdmaRead { remote, rkey } => roce::SendOp::RdmaRead(remote_addr(remote, rkey)),
    };
    let sges = [sge(&wr.sge)];
    let SendWr { tag, signaled, solicited, inline, .. } = *wr;
    let wr = roce::SendWr { tag, op, sges: &sges, signaled, solicited, inline };
    engine.post_send(qpn, &wr, regions).map_err(post_error)
}

const fn sge(sge: &Sge) -> roce::Sge {
    roce::Sge { va: sge.addr, len: sge.len, lkey: Lkey(sge.lkey) }
}

const fn remote_addr(va: u64, rkey: u32) -> roce::RemoteAddr {
    roce::RemoteAddr { va, rkey: Rkey(rkey) }
}

const fn post_error(error: roce::PostError) -> PostError {
    match error {
        roce::PostError::Full => PostError::Full,
        roce::PostError::Unknown => PostError::NoQp,
        roce::PostError::TooLong | roce::PostError::State => PostError::Device(libc::EINVAL),
    }
}

const fn status(status: Status) -> WcStatus {
    match status {
        Status::Success => WcStatus::Success,
        Status::LocLenErr => WcStatus::LocalLength,
        Status::LocProtErr => WcStatus::LocalProtection,
        Status::WrFlushErr => WcStatus::Flushed,
        Status::RemInvReqErr => WcStatus::RemoteInvalidRequest,
        Status::RemAccessErr => WcStatus::RemoteAccess,
        Status::RemOpErr => WcStatus::RemoteOperation,
        Status::RetryExcErr => WcStatus::RetryExceeded,
        Status::RnrRetryExcErr => WcStatus::RnrRetryExceeded,
    }
}

const EMPTY_SGE: roce::Sge = roce::Sge { va: 0, len: 0, lkey: Lkey(0) };
/// Queue pairs of one reactor, as a power of two.
const SLOT_BITS: u32 = 12;
/// Completions for which there is room from the start.
const CQ_DEPTH: usize = 4096;
/// Outstanding RDMA READs of one queue pair, in each direction.
const READS: u8 = 64;
/// RDMA READ responses under way, whatever the buffer holds: requests of peers queue up behind them in the same socket,
/// and rdma_rxe does not survive an acknowledgement that is later than its timeout (it registers its memory again when it
/// repeats a request, and fails on that).
const MAX_READ_CREDIT: u64 = 1 << 20;
/// Datagrams that one system call takes in, each of them up to 64 KiB when the kernel delivers several together.
const RX_DATAGRAMS: usize = 32;
/// System calls of one turn, so that a flood does not keep the reactor from everything else.
const RX_ROUNDS: usize = 4;
/// Bytes that are laid out before they are sent.
const TX_BYTES: usize = 1 << 18;
/// The largest UDP payload of a packet: headers, 4,096 bytes, ICRC, and some to spare.
const MAX_PACKET: usize = 4096 + 64;
/// A full socket is tried again after this.
const SOCKET_FULL_WAIT: Duration = Duration::from_micros(200);
/// 0.54 s, as Linux proposes.
const ACK_TIMEOUT: u8 = 17;
const RETRY: u8 = 7;
/// For ever.
const RNR_RETRY: u8 = 7;
/// 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
/// ECT(0): switches may mark instead of drop.
const ECN_CAPABLE: u8 = 2;
