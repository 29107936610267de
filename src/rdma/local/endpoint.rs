//! One reactor's endpoint: posting, handing over, polling, and the life of its queue pairs.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slab::Slab;

use super::LocalOptions;
use super::cm::{LocalIncoming, LocalOutgoing};
use super::fabric::{Answer, Fabric};
use super::faults::FaultState;
use super::memory;
use super::shell::{Origin, Phase, QpShared, Recv, Shell, lock_pair};
use super::work::{Ends, OwnQp, Peer, Step, Work};
use crate::rdma::{
    Access, Caps, CmEvent, Completion, ConnId, ConnParams, DeviceId, Endpoint, EndpointEvent, EndpointOptions, Mr,
    PostError, QpId, QpOptions, RdmaError, RecvQueue, RejectReason, SendOp, SendWr, Sge, WcStatus,
};

/// What one reactor holds of the local device.
pub struct LocalEndpoint {
    fabric: Arc<Fabric>,
    shell: Arc<Shell>,
    options: LocalOptions,
    shared_depth: u32,
    shared_sge: usize,
    shared_posted: u32,
    qps: Slab<OwnQp>,
    /// Queue pairs with requests to hand over, and those whose requests wait.
    dirty: Vec<QpId>,
    stalled: Vec<QpId>,
    receives: Vec<(RecvQueue, Recv)>,
    /// Hand-overs not yet in the counters.
    doorbells: u64,
}

impl std::fmt::Debug for LocalEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEndpoint").field("queue_pairs", &self.qps.len()).finish_non_exhaustive()
    }
}

impl LocalEndpoint {
    pub(super) fn open(
        fabric: &Arc<Fabric>,
        device: DeviceId,
        endpoint: &EndpointOptions,
        options: LocalOptions,
    ) -> Result<Self, RdmaError> {
        if !fabric.device_is(device) {
            return Err(RdmaError::new("local device", "there is no such device", ""));
        }
        if endpoint.srq_depth > options.caps.max_srq_wr {
            let reason = format!("{} receives, of {} allowed", endpoint.srq_depth, options.caps.max_srq_wr);
            return Err(RdmaError::new("shared receive queue", reason, "ask for fewer"));
        }
        let shell = Shell::new(fabric.next_id(), options.solicited_only, options.lost_events)?;
        shell.lock().counters.vectors = 1 << (endpoint.comp_vector % u64::BITS);
        fabric.add_shell(&shell);
        Ok(Self {
            fabric: Arc::clone(fabric),
            shell,
            options,
            shared_depth: endpoint.srq_depth,
            shared_sge: endpoint.srq_sge as usize,
            shared_posted: 0,
            qps: Slab::new(),
            dirty: Vec::new(),
            stalled: Vec::new(),
            receives: Vec::new(),
            doorbells: 0,
        })
    }

    fn create(&mut self, options: &QpOptions) -> Result<QpId, RdmaError> {
        let caps = &self.options.caps;
        let refuse = |what: &str, have: u32, most: u32| {
            Err(RdmaError::os(format!("queue pair: {have} {what}, of {most} allowed"), libc::EINVAL, "ask for fewer"))
        };
        if options.send_wr > caps.max_qp_wr {
            return refuse("send requests", options.send_wr, caps.max_qp_wr);
        }
        if options.recv_wr > caps.max_qp_wr {
            return refuse("receives", options.recv_wr, caps.max_qp_wr);
        }
        if options.recv_sge > caps.max_recv_sge {
            return refuse("elements per receive", options.recv_sge, caps.max_recv_sge);
        }
        if options.inline > caps.max_inline {
            return refuse("inline bytes", options.inline, caps.max_inline);
        }
        if self.qps.len() as u64 >= u64::from(caps.max_qp) {
            return Err(RdmaError::os("queue pair", libc::ENOMEM, "close some"));
        }
        if options.recv_wr == 0 && self.shared_depth == 0 {
            return Err(RdmaError::new("queue pair", "no receives of its own and no shared receive queue", ""));
        }
        let qp = QpId(self.qps.insert(OwnQp {
            queue: VecDeque::new(),
            flushed: 0,
            capacity: options.send_wr,
            used: 0,
            silent: 0,
            receive_capacity: options.recv_wr,
            receives: 0,
            reads: 0,
            depth: 0,
            transfers: 0,
            dirty: false,
            peer: None,
            link: None,
            incoming: None,
            outgoing: None,
        }) as u32);
        let mut state = self.shell.lock();
        let index = qp.0 as usize;
        if state.qps.len() <= index {
            state.qps.resize_with(index + 1, || None);
        }
        state.qps[index] = Some(QpShared {
            phase: Phase::Idle,
            link: 0,
            receives: VecDeque::new(),
            takes_shared: options.recv_wr == 0,
        });
        Ok(qp)
    }

    fn pad(&self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        if let Some(len) = self.options.pad_private_data {
            bytes.resize(bytes.len().max(len), 0);
        }
        bytes
    }

    /// Carries out what was handed over and can be.
    fn progress(&mut self, qp: QpId) {
        let Some(own) = self.qps.get_mut(qp.0 as usize) else { return };
        if own.flushed == 0 {
            return;
        }
        // Taken out while the queue is worked on; put back below.
        let Some(peer) = own.peer.take() else {
            let mut state = self.shell.lock();
            if state.phase(qp) == Phase::Error {
                own.flush_all(qp, &mut state);
            } else {
                own.save_inline(&state);
            }
            return;
        };
        let (shell, link, peer_qp, read_limit) = (&peer.shell, &peer.link, peer.qp, peer.read_limit);
        let (mut mine, mut theirs) = lock_pair(&self.shell, shell);
        let mut wait = false;
        mine.counters.doorbells += std::mem::take(&mut self.doorbells);
        if own.reads > 0 {
            mine.counters.peak_reads = mine.counters.peak_reads.max(u64::from(own.reads));
            mine.counters.reads_over_depth += u64::from(own.reads > own.depth);
        }
        while own.flushed > 0 {
            if mine.phase(qp) == Phase::Error {
                break;
            }
            if link.paused.load(Ordering::Acquire) && !link.lost.load(Ordering::Acquire) {
                wait = true;
                break;
            }
            let Some(work) = own.queue.front() else { break };
            let step = if link.lost.load(Ordering::Acquire) || theirs.peer_phase(peer_qp, link.id) != Phase::Ready {
                Step::Failed(WcStatus::RetryExceeded)
            } else {
                let copies = own.transfers < self.options.copied_transfers;
                let ends = Ends { fabric: &self.fabric, options: &self.options, link, peer_qp, copies };
                ends.carry_out(work, own.reads, read_limit, &mut mine, &mut theirs)
            };
            let read = matches!(work.wr.op, SendOp::RdmaRead { .. });
            let rdma = read || matches!(work.wr.op, SendOp::RdmaWrite { .. });
            match step {
                Step::Wait => {
                    mine.counters.rnr_waits += u64::from(!work.waited);
                    if let Some(work) = own.queue.front_mut() {
                        work.waited = true;
                    }
                    theirs.add_waiter(&self.shell);
                    wait = true;
                    break;
                }
                Step::Done => {
                    let (tag, signaled) = (work.wr.tag, work.wr.signaled);
                    own.queue.pop_front();
                    own.flushed -= 1;
                    own.silent += 1;
                    own.transfers += u64::from(rdma);
                    if signaled {
                        let completion =
                            Completion { tag, status: WcStatus::Success, byte_len: 0, qp, invalidated: None };
                        let slots = std::mem::take(&mut own.silent);
                        mine.complete(completion, Origin::Send { slots, read }, false);
                    } else if read {
                        own.reads = own.reads.saturating_sub(1);
                    }
                }
                Step::Failed(status) => {
                    let tag = work.wr.tag;
                    own.queue.pop_front();
                    own.flushed -= 1;
                    let slots = std::mem::take(&mut own.silent) + 1;
                    mine.complete_failed(qp, tag, status, Origin::Send { slots, read });
                    mine.fail(qp, false);
                }
            }
        }
        if mine.phase(qp) == Phase::Error {
            own.flush_all(qp, &mut mine);
        }
        if wait {
            own.save_inline(&mine);
        }
        drop((mine, theirs));
        own.peer = Some(peer);
        if wait && !self.stalled.contains(&qp) {
            self.stalled.push(qp);
        }
    }

    fn retry_stalled(&mut self) {
        for qp in std::mem::take(&mut self.stalled) {
            self.progress(qp);
        }
    }

    /// Flushes the send queues of queue pairs that others put into the error state.
    fn attend(&mut self) {
        let mut state = self.shell.lock();
        for qp in std::mem::take(&mut state.errored) {
            if state.phase(qp) == Phase::Error
                && let Some(own) = self.qps.get_mut(qp.0 as usize)
            {
                own.flush_all(qp, &mut state);
            }
        }
    }

    fn hand_over_receives(&mut self) {
        let mut state = self.shell.lock();
        for (queue, receive) in self.receives.drain(..) {
            match queue {
                RecvQueue::Shared => state.shared.push_back(receive),
                RecvQueue::Qp(qp) => match state.qp(qp) {
                    Some(shared) if shared.phase != Phase::Error => shared.receives.push_back(receive),
                    _ => state.complete_failed(qp, receive.tag, WcStatus::Flushed, Origin::OwnReceive),
                },
            }
        }
        let waiters = std::mem::take(&mut state.waiters);
        // Another shell is locked to be kicked: not while this one is.
        drop(state);
        for waiter in waiters {
            if let Some(shell) = waiter.upgrade() {
                shell.kick();
            }
        }
    }

    /// Puts the queue pair into the error state and tells both ends' managers.
    fn end(&mut self, qp: QpId) {
        let Some(own) = self.qps.get_mut(qp.0 as usize) else { return };
        if let Some(mut incoming) = own.incoming.take() {
            incoming.refuse(&[]);
        }
        own.outgoing = None;
        let mut state = self.shell.lock();
        let connected = state.phase(qp) == Phase::Ready;
        state.fail(qp, false);
        own.flush_all(qp, &mut state);
        drop(state);
        if connected && let Some(link) = &own.link {
            link.end();
        }
    }
}

impl Endpoint for LocalEndpoint {
    type Incoming = LocalIncoming;
    type Outgoing = LocalOutgoing;

    fn caps(&self) -> &Caps {
        &self.options.caps
    }

    unsafe fn register(&mut self, addr: *mut u8, len: usize, access: Access) -> Result<Mr, RdmaError> {
        if FaultState::take(&self.fabric.faults.fail_register) {
            return Err(RdmaError::os(format!("register {len} bytes"), libc::ENOMEM, "raise the memlock limit"));
        }
        // The caller's promise (contract of `register`) is what `memory` relies on until `deregister` or drop.
        Ok(self.shell.lock().regions.insert(addr, len, access))
    }

    fn deregister(&mut self, mr: Mr) {
        self.shell.lock().regions.remove(mr.id);
    }

    fn create_incoming(
        &mut self,
        incoming: LocalIncoming,
        options: &QpOptions,
    ) -> Result<QpId, (LocalIncoming, RdmaError)> {
        if FaultState::take(&self.fabric.faults.fail_create) {
            return Err((incoming, RdmaError::os("queue pair", libc::EINVAL, "")));
        }
        match self.create(options) {
            Ok(qp) => {
                if let Some(own) = self.qps.get_mut(qp.0 as usize) {
                    own.link = Some(Arc::clone(&incoming.link));
                    own.incoming = Some(incoming);
                }
                Ok(qp)
            }
            Err(error) => Err((incoming, error)),
        }
    }

    fn accept(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let private_data = self.pad(params.private_data);
        let own = self.qps.get_mut(qp.0 as usize).ok_or_else(no_qp)?;
        let mut incoming = own.incoming.take().ok_or_else(|| RdmaError::new("accept", "nothing to accept", ""))?;
        if FaultState::take(&self.fabric.faults.fail_accept) {
            // The request is dropped here, which rejects it.
            return Err(RdmaError::os(format!("accept {}", incoming.peer), libc::ETIMEDOUT, ""));
        }
        if incoming.shell.id == self.shell.id {
            return Err(RdmaError::new("accept", "both ends on one endpoint", "open another endpoint"));
        }
        incoming.answered = true;
        let link = Arc::clone(&incoming.link);
        let alive = {
            let (mut mine, mut theirs) = lock_pair(&self.shell, &incoming.shell);
            if let Some(shared) = mine.qp(qp).filter(|shared| shared.phase == Phase::Idle) {
                shared.phase = Phase::Ready;
                shared.link = link.id;
            }
            match theirs.qp(incoming.qp) {
                Some(shared) if shared.link == link.id && shared.phase == Phase::Idle => {
                    shared.phase = Phase::Ready;
                    true
                }
                _ => false,
            }
        };
        own.depth = u32::from(params.initiator_depth);
        own.peer = Some(Peer {
            shell: Arc::clone(&incoming.shell),
            qp: incoming.qp,
            link: Arc::clone(&link),
            read_limit: u32::from(incoming.initiator_depth),
        });
        let (conn, cm) = &link.passive;
        if !alive {
            let error = RdmaError::new(format!("connection from {}", incoming.peer), "the peer gave up", "");
            cm.push(CmEvent::Failed { conn: *conn, error });
            return Ok(());
        }
        *link.answer() =
            Some(Answer { shell: Arc::clone(&self.shell), qp, responder_resources: params.responder_resources });
        let (peer_conn, peer_cm) = &link.active;
        peer_cm.push(CmEvent::Established { conn: *peer_conn, private_data });
        cm.push(CmEvent::Established { conn: *conn, private_data: Vec::new() });
        Ok(())
    }

    fn reject(&mut self, qp: QpId, private_data: &[u8]) {
        let padded = self.pad(private_data);
        if let Some(mut incoming) = self.qps.get_mut(qp.0 as usize).and_then(|own| own.incoming.take()) {
            incoming.refuse(&padded);
        }
        self.destroy(qp);
    }

    fn create_outgoing(&mut self, outgoing: LocalOutgoing, options: &QpOptions) -> Result<QpId, RdmaError> {
        let qp = self.create(options)?;
        if let Some(own) = self.qps.get_mut(qp.0 as usize) {
            own.outgoing = Some(outgoing);
        }
        Ok(qp)
    }

    fn connect(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError> {
        let private_data = self.pad(params.private_data);
        let own = self.qps.get_mut(qp.0 as usize).ok_or_else(no_qp)?;
        let outgoing = own.outgoing.take().ok_or_else(|| RdmaError::new("connect", "nothing to connect", ""))?;
        let LocalOutgoing { conn, device, peer, local, cm } = outgoing;
        let Some((listener, passive)) = self.fabric.find_listener(peer) else {
            cm.push(CmEvent::Refused { conn, reason: RejectReason::INVALID_SERVICE_ID, private_data: Vec::new() });
            return Ok(());
        };
        let link = self.fabric.link((conn, cm), (ConnId(self.fabric.next_id()), Arc::clone(&passive)));
        own.link = Some(Arc::clone(&link));
        own.depth = u32::from(params.initiator_depth);
        if let Some(shared) = self.shell.lock().qp(qp) {
            shared.link = link.id;
        }
        passive.push(CmEvent::Request(LocalIncoming {
            link,
            shell: Arc::clone(&self.shell),
            qp,
            listener,
            device,
            peer: local,
            local: peer,
            private_data,
            initiator_depth: params.responder_resources.min(self.options.caps.max_responder_resources),
            responder_resources: params.initiator_depth,
            answered: false,
        }));
        Ok(())
    }

    fn established(&mut self, qp: QpId) -> Result<(), RdmaError> {
        let own = self.qps.get_mut(qp.0 as usize).ok_or_else(no_qp)?;
        let link = own.link.clone().ok_or_else(|| RdmaError::new("connection", "it was not asked for", ""))?;
        let answer = link.answer().take();
        let answer = answer.ok_or_else(|| RdmaError::new("connection", "it was not accepted", ""))?;
        own.peer =
            Some(Peer { shell: answer.shell, qp: answer.qp, link, read_limit: u32::from(answer.responder_resources) });
        self.progress(qp);
        Ok(())
    }

    fn post_recv(&mut self, queue: RecvQueue, tag: u64, sges: &[Sge]) -> Result<(), PostError> {
        let receive = Recv::new(tag, sges).ok_or(PostError::Device(libc::EINVAL))?;
        match queue {
            RecvQueue::Shared => {
                if sges.len() > self.shared_sge {
                    return Err(PostError::Device(libc::EINVAL));
                }
                if self.shared_posted >= self.shared_depth {
                    return Err(PostError::Full);
                }
                self.shared_posted += 1;
            }
            RecvQueue::Qp(qp) => {
                let own = self.qps.get_mut(qp.0 as usize).ok_or(PostError::NoQp)?;
                if own.receives >= own.receive_capacity {
                    return Err(PostError::Full);
                }
                own.receives += 1;
            }
        }
        self.receives.push((queue, receive));
        Ok(())
    }

    fn post_send(&mut self, qp: QpId, wr: &SendWr) -> Result<(), PostError> {
        let own = self.qps.get_mut(qp.0 as usize).ok_or(PostError::NoQp)?;
        if own.used >= own.capacity {
            return Err(PostError::Full);
        }
        if wr.inline && wr.sge.len > self.options.caps.max_inline {
            return Err(PostError::Device(libc::EINVAL));
        }
        own.used += 1;
        own.queue.push_back(Work { wr: *wr, saved: None, waited: false });
        if !own.dirty {
            own.dirty = true;
            self.dirty.push(qp);
        }
        Ok(())
    }

    fn flush(&mut self, _now: Duration) {
        if !self.receives.is_empty() {
            self.hand_over_receives();
        }
        if self.dirty.is_empty() {
            return;
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        for qp in dirty.drain(..) {
            let Some(own) = self.qps.get_mut(qp.0 as usize) else { continue };
            own.dirty = false;
            own.take_over();
            self.doorbells += 1;
            self.progress(qp);
        }
        self.dirty = dirty;
    }

    fn poll(&mut self, _now: Duration, out: &mut [Completion]) -> usize {
        if self.shell.take_attention() {
            self.attend();
        }
        if !self.stalled.is_empty() {
            self.retry_stalled();
        }
        if !self.shell.has_completions() {
            return 0;
        }
        let mut state = self.shell.lock();
        let mut count = 0;
        while count < out.len()
            && let Some(entry) = state.cq.pop_front()
        {
            let mut completion = entry.completion;
            let own = self.qps.get_mut(completion.qp.0 as usize);
            match (entry.origin, own) {
                (Origin::SharedReceive, own) => {
                    self.shared_posted = self.shared_posted.saturating_sub(1);
                    if own.is_none() {
                        completion.qp = Completion::NO_QP;
                    }
                }
                (Origin::OwnReceive, Some(own)) => own.receives = own.receives.saturating_sub(1),
                (Origin::Send { slots, read }, Some(own)) => {
                    own.used = own.used.saturating_sub(slots);
                    own.reads = own.reads.saturating_sub(u32::from(read));
                }
                (_, None) => completion.qp = Completion::NO_QP,
            }
            out[count] = completion;
            count += 1;
        }
        state.counters.completions += count as u64;
        count
    }

    fn arm(&mut self) -> Result<(), RdmaError> {
        self.shell.arm();
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.shell.fd()]
    }

    fn next_timeout(&self) -> Option<Duration> {
        None
    }

    fn poll_event(&mut self) -> Option<EndpointEvent> {
        let mut state = self.shell.lock();
        let event = state.events.pop_front();
        if event.is_none() {
            self.shell.drain(&mut state);
        }
        event
    }

    fn disconnect(&mut self, qp: QpId) {
        self.end(qp);
    }

    fn destroy(&mut self, qp: QpId) {
        if !self.qps.contains(qp.0 as usize) {
            return;
        }
        self.end(qp);
        self.qps.remove(qp.0 as usize);
        self.receives.retain(|(queue, _)| *queue != RecvQueue::Qp(qp));
        let mut state = self.shell.lock();
        state.qps[qp.0 as usize] = None;
        state.errored.retain(|errored| *errored != qp);
        // The number may serve another soon: what is left to poll must not be taken for its completions.
        for entry in state.cq.iter_mut().filter(|entry| entry.completion.qp == qp) {
            entry.completion.qp = Completion::NO_QP;
        }
    }
}

impl Drop for LocalEndpoint {
    fn drop(&mut self) {
        let all: Vec<QpId> = self.qps.iter().map(|(index, _)| QpId(index as u32)).collect();
        for qp in all {
            self.destroy(qp);
        }
        let mut state = self.shell.lock();
        // Peers may hold the shell longer than this: no registration outlives its endpoint.
        state.regions = memory::Regions::new(self.shell.id);
        state.shared.clear();
        state.closed = true;
        let counters = std::mem::take(&mut state.counters);
        drop(state);
        self.fabric.retire(&counters);
    }
}

fn no_qp() -> RdmaError {
    RdmaError::new("queue pair", "there is none of that number", "")
}
