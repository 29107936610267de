//! What one reactor holds of one device.
//!
//! It opens the device for itself, so that nothing in it is shared: not the domain, not the queues, not the asynchronous
//! events. Queue pairs are made by `ibv_create_qp` and named to the CM by number; their state changes are made here, on
//! the reactor, with the attributes that the CM gives. So librdmacm's event reader never touches one, a disconnect does
//! flush it, and the receiver-not-ready timer and traffic class are ours to set.
//!
//! After [`destroy`](crate::rdma::Endpoint::destroy) a queue pair's own requests complete no more. A shared receive that
//! it took and had completed is still delivered, with [`Completion::NO_QP`]; one in the middle of a message may be lost
//! with it, which is why [`EndpointEvent::LastReceive`] is worth a bounded wait.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use rdma_sys as ib;
use slab::Slab;
use tracing::{debug, info, warn};

use super::chain::{Chain, MAX_RECV_SGE, RecvPool, SendPool};
use super::cm::{Incoming, Outgoing};
use super::device::Device;
use super::ids::{Id, private_data_len};
use super::objects::{CompChannel, Context, Cq, Domain, QueuePair, Region, Srq};
use super::placement::{Ledger, new_capacity};
use super::qp::{Parts, Qp, State, change};
use super::queue::{Kind, Slots, WrId};
use super::{status, sys};
use crate::rdma::{
    Access, Caps, Completion, ConnParams, EndpointEvent, EndpointOptions, Mr, PostError, QpId, QpOptions, RdmaError,
    RecvQueue, SendWr, Sge, WcStatus,
};

/// Completions taken off a queue in one call.
const BATCH: usize = 64;

/// Retries that a peer makes when we had no receive posted: 7 = without end.
const RNR_RETRY: u8 = 7;
/// Retries of the transport: the largest.
const RETRY: u8 = 7;

pub(super) struct SharedReceives {
    srq: Srq,
    slots: Slots,
    chain: Chain,
    sge: u32,
    /// Receives below which one event is wanted.
    limit: u32,
    pub(super) armed: bool,
}

struct Queue {
    cq: Cq,
    ledger: Ledger,
}

/// A completion that was taken off its queue before anyone asked for it.
struct Stashed {
    completion: Completion,
    shared: bool,
}

/// See [`crate::rdma::Endpoint`].
pub struct Endpoint {
    // Dropped in this order: queue pairs, completion queues, shared receive queue, regions, channel, domain, context,
    // device.
    pub(super) qps: Slab<Qp>,
    cqs: Slab<Queue>,
    pub(super) srq: Option<SharedReceives>,
    mrs: Slab<Region>,
    pub(super) channel: CompChannel,
    domain: Domain,
    pub(super) context: Context,
    pub(super) device: Arc<Device>,

    caps: Caps,
    comp_vector: u32,
    pub(super) reactor: usize,
    pub(super) by_number: HashMap<u32, QpId, BuildHasherDefault<NumberHasher>>,
    send_pool: SendPool,
    recv_pool: RecvPool,
    /// Queue pairs with a chain of sends, of receives, and with refused requests to hand back.
    sending: Vec<QpId>,
    receiving: Vec<QpId>,
    refusals: Vec<QpId>,
    stash: VecDeque<Stashed>,
    wcs: Box<[ib::ibv_wc]>,
    next_cq: usize,
}

// SAFETY: the pointers in the work completions and pools are only ever looked at through the endpoint, which one thread
// has at a time; libibverbs has no thread affinity.
unsafe impl Send for Endpoint {}

impl Endpoint {
    pub(super) fn open(device: Arc<Device>, reactor: usize, options: &EndpointOptions) -> Result<Self, RdmaError> {
        let caps = device.caps().clone();
        let context = Context::open(&device)?;
        let domain = Domain::new(&context)?;
        let channel = CompChannel::new(&context)?;
        let srq = match options.srq_depth {
            0 => None,
            depth => {
                at_most("receives in a shared queue", depth, caps.max_srq_wr)?;
                at_most("elements per receive", options.srq_sge, caps.max_recv_sge)?;
                Some(SharedReceives {
                    srq: Srq::new(&domain, depth, options.srq_sge)?,
                    slots: Slots::new(depth),
                    chain: Chain::EMPTY,
                    sge: options.srq_sge,
                    limit: (depth / 8).max(1),
                    armed: false,
                })
            }
        };
        info!(device = device.name(), reactor, srq = options.srq_depth, "RDMA endpoint open");
        Ok(Self {
            qps: Slab::new(),
            cqs: Slab::new(),
            srq,
            mrs: Slab::new(),
            channel,
            domain,
            context,
            device,
            caps,
            comp_vector: options.comp_vector,
            reactor,
            by_number: HashMap::default(),
            send_pool: SendPool::new(),
            recv_pool: RecvPool::new(),
            sending: Vec::new(),
            receiving: Vec::new(),
            refusals: Vec::new(),
            stash: VecDeque::new(),
            // SAFETY: a C struct of integers: all zeros is a value of it.
            wcs: (0..BATCH).map(|_| unsafe { std::mem::zeroed() }).collect(),
            next_cq: 0,
        })
    }

    fn qp(&self, qp: QpId) -> Result<&Qp, RdmaError> {
        self.qps.get(qp.0 as usize).ok_or_else(|| RdmaError::new("queue pair", "it does not exist", ""))
    }

    /// Finds room on a completion queue, or makes one.
    fn place(&mut self, entries: u32) -> Result<usize, RdmaError> {
        for (index, queue) in &mut self.cqs {
            if queue.ledger.take(entries) {
                return Ok(index);
            }
        }
        let reserve = self.srq.as_ref().map_or(0, |srq| srq.slots.capacity());
        let what = || format!("completion queue for {entries} work requests and {reserve} shared receives");
        let capacity = new_capacity(entries, reserve, self.caps.max_cqe).ok_or_else(|| {
            let reason = format!("{} has at most {}", self.device.name(), self.caps.max_cqe);
            RdmaError::new(what(), reason, "choose smaller queues")
        })?;
        let cq = Cq::new(&self.context, capacity, Some(&self.channel), self.comp_vector)?;
        let mut ledger = Ledger::new(cq.capacity(), reserve);
        if !ledger.take(entries) {
            return Err(RdmaError::new(what(), format!("the device gave {} entries", cq.capacity()), ""));
        }
        debug!(device = self.device.name(), reactor = self.reactor, entries = cq.capacity(), "completion queue made");
        Ok(self.cqs.insert(Queue { cq, ledger }))
    }

    /// Gives room back. The first completion queue stays, others go with their last queue pair.
    fn unplace(&mut self, index: usize, entries: u32) {
        let Some(queue) = self.cqs.get_mut(index) else { return };
        queue.ledger.give(entries);
        if queue.ledger.is_empty() && index != 0 {
            self.channel.drain();
            self.stash_completions(index);
            self.cqs.remove(index);
        }
    }

    fn check(&self, options: &QpOptions) -> Result<(), RdmaError> {
        at_most("sends in a queue", options.send_wr, self.caps.max_qp_wr)?;
        at_most("receives in a queue", options.recv_wr, self.caps.max_qp_wr)?;
        at_most("elements per receive", options.recv_sge, self.caps.max_recv_sge)?;
        at_most("bytes inline", options.inline, self.caps.max_inline)?;
        if options.recv_wr == 0 && self.srq.is_none() {
            let remedy = "ask for receives of its own";
            return Err(RdmaError::new("queue pair", "the endpoint has no shared receive queue", remedy));
        }
        Ok(())
    }

    /// Makes a queue pair, ready for receives. The caller owns `id` until this succeeds.
    fn make(&mut self, id: &Id, options: &QpOptions) -> Result<(QueuePair, usize, u32), RdmaError> {
        self.check(options)?;
        let entries = options.send_wr.saturating_add(options.recv_wr);
        let index = self.place(entries)?;
        let srq = self.srq.as_ref().filter(|_| options.recv_wr == 0).map(|shared| &shared.srq);
        let made = QueuePair::new(&self.domain, &self.cqs[index].cq, srq, options).and_then(|qp| {
            change(&self.device, id, &qp, ib::ibv_qp_state::IBV_QPS_INIT, |_| ())
                .map_err(|errno| RdmaError::os("queue pair, initial state", errno, "the peer may be gone already"))?;
            Ok(qp)
        });
        match made {
            Ok(qp) => Ok((qp, index, entries)),
            Err(error) => {
                self.unplace(index, entries);
                Err(error)
            }
        }
    }

    fn conn_param(&self, qp: &Qp, params: &ConnParams<'_>) -> Result<ib::rdma_conn_param, RdmaError> {
        at_most("RDMA READs outstanding", params.initiator_depth.into(), self.caps.max_initiator_depth.into())?;
        let (resources, most) = (params.responder_resources, self.caps.max_responder_resources);
        at_most("RDMA READs of the peer outstanding", resources.into(), most.into())?;
        let private_data_len = private_data_len(params.private_data)
            .ok_or_else(|| RdmaError::new("private data", "more than 255 bytes", ""))?;
        Ok(ib::rdma_conn_param {
            private_data: params.private_data.as_ptr().cast(),
            private_data_len,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            flow_control: 1,
            retry_count: RETRY,
            rnr_retry_count: RNR_RETRY,
            srq: u8::from(qp.shared),
            qp_num: qp.number,
        })
    }

    fn insert(&mut self, qp: Qp) -> QpId {
        let number = qp.number;
        let id = QpId(self.qps.insert(qp) as u32);
        self.by_number.insert(number, id);
        id
    }

    fn push_sends(&mut self) {
        let mut sending = std::mem::take(&mut self.sending);
        for id in sending.drain(..) {
            let Some(qp) = self.qps.get_mut(id.0 as usize) else { continue };
            let chain = std::mem::replace(&mut qp.sends, Chain::EMPTY);
            if chain.is_empty() {
                continue;
            }
            let first = self.send_pool.link(chain);
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair lives; the list is linked and stays so during the call. The memory that it names
            // is the poster's duty (contract of `Endpoint`).
            let errno = unsafe { ib::ibv_post_send(qp.qp.raw(), first, &mut bad) };
            if errno == 0 {
                continue;
            }
            debug!(qpn = qp.number, errno, "sends refused by the device");
            if let Some(WrId { seq, .. }) = self.send_pool.ids_from(chain, bad).next().and_then(WrId::unpack) {
                qp.send.refuse(seq);
                if !std::mem::replace(&mut qp.in_refusals, true) {
                    self.refusals.push(id);
                }
            }
            // Requests before the refused one, and all where only the doorbell failed, are with the device: they
            // complete in the error state.
            qp.fail();
        }
        // Put back, so that its memory is used again.
        self.sending = sending;
        self.send_pool.reset();
    }

    fn push_recvs(&mut self) {
        let mut receiving = std::mem::take(&mut self.receiving);
        for id in receiving.drain(..) {
            let Some(qp) = self.qps.get_mut(id.0 as usize) else { continue };
            let chain = std::mem::replace(&mut qp.recvs, Chain::EMPTY);
            if chain.is_empty() {
                continue;
            }
            let first = self.recv_pool.link(chain);
            let mut bad = first;
            let errno = if qp.is_dead() {
                // It flushes what it holds, but not every device (rxe in 6.1) looks at its receives again.
                libc::EPIPE
            } else {
                // SAFETY: as for sends.
                unsafe { ib::ibv_post_recv(qp.qp.raw(), first, &mut bad) }
            };
            if errno == 0 {
                continue;
            }
            debug!(qpn = qp.number, errno, "receives refused by the device");
            if let Some(WrId { seq, .. }) = self.recv_pool.ids_from(chain, bad).next().and_then(WrId::unpack) {
                qp.recv.refuse(seq);
                if !std::mem::replace(&mut qp.in_refusals, true) {
                    self.refusals.push(id);
                }
            }
            qp.fail();
        }
        self.receiving = receiving;
        self.push_shared();
        self.recv_pool.reset();
    }

    fn push_shared(&mut self) {
        let Some(shared) = self.srq.as_mut() else { return };
        let chain = std::mem::replace(&mut shared.chain, Chain::EMPTY);
        if chain.is_empty() {
            return;
        }
        let first = self.recv_pool.link(chain);
        let mut bad = ptr::null_mut();
        // SAFETY: as for sends.
        let errno = unsafe { ib::ibv_post_srq_recv(shared.srq.raw(), first, &mut bad) };
        if errno != 0 {
            warn!(device = self.device.name(), errno, "shared receives refused by the device");
            for id in self.recv_pool.ids_from(chain, bad).filter_map(WrId::unpack) {
                if let Some(tag) = shared.slots.give(id.seq) {
                    let completion = flushed(tag, Completion::NO_QP);
                    self.stash.push_back(Stashed { completion, shared: true });
                }
            }
        }
        if !shared.armed && shared.slots.outstanding() > shared.limit {
            shared.armed = shared.srq.arm_limit(shared.limit);
        }
    }

    /// Takes all that a completion queue has, for later.
    fn stash_completions(&mut self, index: usize) {
        while let Some(queue) = self.cqs.get(index) {
            let got = queue.cq.poll(&mut self.wcs);
            for at in 0..got {
                if let Some(stashed) = self.take(at) {
                    self.stash.push_back(stashed);
                }
            }
            if got < self.wcs.len() {
                return;
            }
        }
    }

    /// Books work completion number `at` of the batch. `None` for a leftover of a destroyed queue pair.
    fn take(&mut self, at: usize) -> Option<Stashed> {
        let wc = &self.wcs[at];
        let id = WrId::unpack(wc.wr_id)?;
        let status = status::from_wc(wc.status);
        let shared = id.kind == Kind::SharedRecv;
        let (tag, qp) = match id.kind {
            Kind::SharedRecv => {
                let tag = self.srq.as_mut()?.slots.give(id.seq)?;
                (tag, self.by_number.get(&wc.qp_num).copied().unwrap_or(Completion::NO_QP))
            }
            kind => {
                let qp = self.qps.get_mut(id.queue as usize).filter(|qp| qp.number == wc.qp_num)?;
                let ring = if kind == Kind::Send { &mut qp.send } else { &mut qp.recv };
                (ring.complete(id.seq)?, QpId(id.queue))
            }
        };
        let mut completion = Completion { tag, status, byte_len: 0, qp, invalidated: None };
        if status == WcStatus::Success {
            if id.kind != Kind::Send {
                completion.byte_len = wc.byte_len;
                if wc.wc_flags & ib::ibv_wc_flags::IBV_WC_WITH_INV.0 != 0 {
                    // SAFETY: the flag says that this member is the one that was written; both are plain integers.
                    completion.invalidated = Some(unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey });
                }
            }
        } else if status != WcStatus::Flushed {
            debug!(qpn = wc.qp_num, %status, vendor = wc.vendor_err, "work request failed");
        }
        Some(Stashed { completion, shared })
    }

    /// Hands back refused requests that are due.
    fn poll_refused(&mut self, out: &mut [Completion]) -> usize {
        let mut filled = 0;
        for id in &self.refusals {
            let Some(qp) = self.qps.get_mut(id.0 as usize) else { continue };
            while filled < out.len() {
                let Some(tag) = qp.send.pop_refused().or_else(|| qp.recv.pop_refused()) else { break };
                out[filled] = flushed(tag, *id);
                filled += 1;
            }
        }
        filled
    }
}

impl crate::rdma::Endpoint for Endpoint {
    type Incoming = Incoming;
    type Outgoing = Outgoing;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, addr: *mut u8, len: usize, access: Access) -> Result<Mr, RdmaError> {
        // SAFETY: the caller's duty, passed on.
        let region = unsafe { Region::new(&self.domain, addr, len, access, self.device.is_iwarp()) }?;
        let (lkey, rkey) = region.keys();
        Ok(Mr { id: self.mrs.insert(region) as u32, lkey, rkey })
    }

    fn deregister(&mut self, mr: Mr) {
        drop(self.mrs.try_remove(mr.id as usize));
    }

    fn create_incoming(&mut self, incoming: Incoming, options: &QpOptions) -> Result<QpId, (Incoming, RdmaError)> {
        if incoming.device.id() != self.device.id() {
            return Err((incoming, RdmaError::new("queue pair", "the request came over another device", "")));
        }
        match self.make(&incoming.id, options) {
            Ok((qp, cq, entries)) => {
                let made = Parts { qp, cq, entries, active: false, tos: incoming.tos };
                let Incoming { id, conn, peer, local, .. } = incoming;
                Ok(self.insert(made.assemble(id, conn.0, (local, peer), options)))
            }
            Err(error) => {
                debug!(peer = %incoming.peer, device = self.device.name(), %error, "no queue pair for a request");
                Err((incoming, error))
            }
        }
    }

    fn accept(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let this = self.qp(qp)?;
        let mut conn_param = self.conn_param(this, params)?;
        let accepted =
            this.make_ready(&self.device, Some((params.initiator_depth, params.responder_resources))).and_then(|()| {
                // SAFETY: the id is ours; the parameters and the private data are read during the call.
                match unsafe { ib::rdma_accept(this.id.raw(), &mut conn_param) } {
                    0 => Ok(()),
                    _ => Err(sys::errno()),
                }
            });
        match accepted {
            Ok(()) => {
                debug!(conn = this.conn, qpn = this.number, peer = %this.peer, "accepted");
                self.qps[qp.0 as usize].state = State::Ready;
                Ok(())
            }
            Err(errno) => {
                let (device, gid, mtu) = (self.device.name(), self.device.gid(), self.device.mtu());
                let what = format!("accepting {} at {} ({device}, GID {gid}, MTU {mtu})", this.peer, this.local);
                debug!(conn = this.conn, qpn = this.number, errno, "{what} failed");
                let error = RdmaError::os(what, errno, "");
                self.qps[qp.0 as usize].fail();
                Err(error)
            }
        }
    }

    fn reject(&mut self, qp: QpId, private_data: &[u8]) {
        if let Some(this) = self.qps.get(qp.0 as usize) {
            if let Err(errno) = this.id.reject(private_data) {
                debug!(conn = this.conn, peer = %this.peer, errno, "reject: the peer is gone");
            }
            self.destroy(qp);
        }
    }

    fn create_outgoing(&mut self, outgoing: Outgoing, options: &QpOptions) -> Result<QpId, RdmaError> {
        if outgoing.device.id() != self.device.id() {
            return Err(RdmaError::new("queue pair", "the peer is reached over another device", ""));
        }
        let (qp, cq, entries) = self.make(&outgoing.id, options)?;
        let made = Parts { qp, cq, entries, active: true, tos: None };
        let Outgoing { id, conn, peer, local, .. } = outgoing;
        Ok(self.insert(made.assemble(id, conn.0, (local, peer), options)))
    }

    fn connect(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let this = self.qp(qp)?;
        let mut conn_param = self.conn_param(this, params)?;
        // SAFETY: the id is ours; the parameters and the private data are read during the call.
        if unsafe { ib::rdma_connect(this.id.raw(), &mut conn_param) } != 0 {
            return Err(RdmaError::os(format!("connecting to {}", this.peer), sys::errno(), ""));
        }
        self.qps[qp.0 as usize].state = State::Connecting;
        Ok(())
    }

    fn established(&mut self, qp: QpId) -> Result<(), RdmaError> {
        let this = self.qp(qp)?;
        if !this.active || this.state != State::Connecting {
            return Ok(());
        }
        // iWARP's connection manager is in the kernel and moved the queue pair already.
        let ready = if self.device.is_iwarp() {
            Ok(())
        } else {
            this.make_ready(&self.device, None).and_then(|()| {
                // SAFETY: the id is ours.
                match unsafe { ib::rdma_establish(this.id.raw()) } {
                    0 => Ok(()),
                    _ => Err(sys::errno()),
                }
            })
        };
        let peer = this.peer;
        self.qps[qp.0 as usize].state = State::Ready;
        ready.map_err(|errno| {
            self.qps[qp.0 as usize].fail();
            RdmaError::os(format!("completing the connection to {peer}"), errno, "")
        })
    }

    fn post_recv(&mut self, queue: RecvQueue, tag: u64, sges: &[Sge]) -> Result<(), PostError> {
        if sges.len() > MAX_RECV_SGE {
            return Err(PostError::Device(libc::EINVAL));
        }
        if self.recv_pool.is_full() {
            self.push_recvs();
        }
        match queue {
            RecvQueue::Shared => {
                let shared = self.srq.as_mut().ok_or(PostError::NoQp)?;
                if sges.len() > shared.sge as usize {
                    return Err(PostError::Device(libc::EINVAL));
                }
                let seq = shared.slots.take(tag).ok_or(PostError::Full)?;
                let id = WrId { kind: Kind::SharedRecv, queue: 0, seq };
                self.recv_pool.push(&mut shared.chain, id.pack(), sges);
            }
            RecvQueue::Qp(id) => {
                let qp = self.qps.get_mut(id.0 as usize).ok_or(PostError::NoQp)?;
                if sges.len() > qp.recv_sge as usize {
                    return Err(PostError::Device(libc::EINVAL));
                }
                let refusing = qp.recv.is_refusing();
                let seq = qp.recv.push(tag, true).ok_or(PostError::Full)?;
                if refusing {
                    return Ok(());
                }
                if qp.recvs.is_empty() {
                    self.receiving.push(id);
                }
                self.recv_pool.push(&mut qp.recvs, WrId { kind: Kind::Recv, queue: id.0, seq }.pack(), sges);
            }
        }
        Ok(())
    }

    fn post_send(&mut self, qp: QpId, wr: &SendWr) -> Result<(), PostError> {
        if self.send_pool.is_full() {
            self.push_sends();
        }
        let this = self.qps.get_mut(qp.0 as usize).ok_or(PostError::NoQp)?;
        if wr.inline && wr.sge.len > this.max_inline {
            return Err(PostError::Device(libc::EINVAL));
        }
        let refusing = this.send.is_refusing();
        let seq = this.send.push(wr.tag, wr.signaled).ok_or(PostError::Full)?;
        if refusing {
            return Ok(());
        }
        if this.sends.is_empty() {
            self.sending.push(qp);
        }
        self.send_pool.push(&mut this.sends, WrId { kind: Kind::Send, queue: qp.0, seq }.pack(), wr);
        Ok(())
    }

    fn flush(&mut self, _now: Duration) {
        // Receives first: what a send provokes must find them.
        self.push_recvs();
        self.push_sends();
    }

    fn poll(&mut self, _now: Duration, out: &mut [Completion]) -> usize {
        let mut filled = 0;
        while filled < out.len() {
            let Some(stashed) = self.stash.pop_front() else { break };
            out[filled] = stashed.completion;
            filled += 1;
        }
        let queues = self.cqs.capacity();
        for step in 0..queues {
            let index = (self.next_cq + step) % queues;
            while filled < out.len() {
                let Some(queue) = self.cqs.get(index) else { break };
                let want = (out.len() - filled).min(BATCH);
                let got = queue.cq.poll(&mut self.wcs[..want]);
                for at in 0..got {
                    if let Some(stashed) = self.take(at) {
                        out[filled] = stashed.completion;
                        filled += 1;
                    }
                }
                if got < want {
                    break;
                }
            }
        }
        self.next_cq = self.next_cq.wrapping_add(1);
        if !self.refusals.is_empty() {
            filled += self.poll_refused(&mut out[filled..]);
        }
        filled
    }

    fn arm(&mut self) -> Result<(), RdmaError> {
        self.channel.drain();
        self.cqs.iter().try_for_each(|(_, queue)| queue.cq.arm())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        // SAFETY: the completion channel and the context are this endpoint's and stay open as long as it is borrowed.
        [self.channel.fd(), self.context.async_fd()].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) }).to_vec()
    }

    fn next_timeout(&self) -> Option<Duration> {
        (!self.stash.is_empty()).then_some(Duration::ZERO)
    }

    fn poll_event(&mut self) -> Option<EndpointEvent> {
        self.next_async()
    }

    fn disconnect(&mut self, qp: QpId) {
        let Some(this) = self.qps.get_mut(qp.0 as usize) else { return };
        if this.state == State::Ended {
            return;
        }
        this.fail();
        this.state = State::Ended;
        // SAFETY: the id is ours. It fails where there is no connection (yet, or any more), which is no harm.
        if unsafe { ib::rdma_disconnect(this.id.raw()) } != 0 {
            debug!(conn = this.conn, qpn = this.number, errno = sys::errno(), "disconnect");
        }
    }

    fn destroy(&mut self, qp: QpId) {
        let Some(this) = self.qps.get_mut(qp.0 as usize) else { return };
        this.fail();
        // Some devices take a destroyed queue pair's completions off the queue, and a shared receive would be lost.
        let (cq, shared) = (this.cq, this.shared);
        if shared {
            self.stash_completions(cq);
        }
        let this = self.qps.remove(qp.0 as usize);
        self.by_number.remove(&this.number);
        debug!(conn = this.conn, qpn = this.number, peer = %this.peer, "queue pair destroyed");
        let entries = this.entries;
        drop(this);
        self.refusals.retain(|id| *id != qp);
        self.stash.retain_mut(|stashed| {
            if stashed.completion.qp == qp {
                stashed.completion.qp = Completion::NO_QP;
                return stashed.shared;
            }
            true
        });
        self.unplace(cq, entries);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        for (_, qp) in &mut self.qps {
            qp.fail();
        }
        info!(device = self.device.name(), reactor = self.reactor, "RDMA endpoint closed");
    }
}

fn flushed(tag: u64, qp: QpId) -> Completion {
    Completion { tag, status: WcStatus::Flushed, ..Completion { qp, ..Completion::EMPTY } }
}

fn at_most(what: &str, asked: u32, limit: u32) -> Result<(), RdmaError> {
    if asked <= limit {
        return Ok(());
    }
    Err(RdmaError::new(what, format!("{asked} asked for, the device has at most {limit}"), "ask for less"))
}

/// Queue pair numbers are spread enough by one multiplication.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
