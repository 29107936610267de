//! What a command does once its data are here: I/O goes to the namespace's backend, Connect and admin data to the registry.

use std::sync::Arc;
use std::time::Duration;

use nvme::completion::Completion;
use nvme::gate::Sender;
use nvme::io::IoCommand;
use nvme::registry::{Drain, QueueContext as ConnectContext, SubsystemId};
use nvme::status::Status;
use tracing::{debug, info, warn};

use super::abort::has_several_operations;
use super::fused::Detour;
use super::latency::Stage;
use super::queue::{Association, Life};
use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use super::shared::{ControlMessage, Fence, QueueRef};
use super::shutdown::is_shutdown;
use super::tally::Tally;
use crate::backend::{Io, IoData, IoDone, IoError, IoOp, Submit};
use crate::mem::PAGE;
use crate::mutation::{self, Mutation};
use crate::rdma::Provider;

impl<P: Provider> Reactor<P> {
    /// Runs a request whose data and credits are there.
    #[inline(always)]
    pub(crate) fn execute(&mut self, id: RequestId, now: Duration) {
        match self.requests[id].job {
            Job::Respond | Job::SendData => self.respond(id, now),
            Job::Connect => self.connect(id, now),
            Job::Admin => self.admin_with_data(id, now),
            Job::Io { namespace, command } => self.start_io(id, namespace, command, now),
        }
    }

    /// An I/O command whose data and credits are there goes to the backend, unless something changed since it was checked.
    #[inline(always)]
    fn start_io(&mut self, id: RequestId, namespace: u32, command: IoCommand, now: Duration) {
        let request = &self.requests[id];
        if request.epoch != self.namespaces[namespace].start_epoch && !self.may_start(id, namespace, &command, now) {
            return;
        }
        if let Some(extra) = &self.requests[id].extra {
            match extra.partner {
                Some(partner) => return self.half_ready(id, namespace, &command, partner),
                None if extra.failed => {
                    let cid = self.requests[id].cid;
                    return self.finish(id, Completion::failed(cid, Status::FAILED_FUSED), now);
                }
                None => {}
            }
        }
        match command {
            IoCommand::Copy { slba, ranges, fua } => self.begin_copy(id, namespace, slba, ranges, fua, now),
            IoCommand::Reservation(command) => self.reserve(id, namespace, command, now),
            _ => self.submit_io(id, namespace, command, now),
        }
    }

    pub(crate) fn submit_io(&mut self, id: RequestId, namespace: u32, command: IoCommand, now: Duration) {
        let shift = self.namespaces[namespace].view.block_shift;
        let (op, len) = match command {
            IoCommand::Read { slba, blocks, .. }
            | IoCommand::Compare { slba, blocks }
            | IoCommand::Verify { slba, blocks } => (IoOp::Read { offset: slba << shift }, blocks << shift),
            IoCommand::Write { slba, blocks, fua } => (IoOp::Write { offset: slba << shift, fua }, blocks << shift),
            IoCommand::Copy { .. } => match self.copy_step(id, shift) {
                Some(step) => step,
                None => {
                    let cid = self.requests[id].cid;
                    return self.finish(id, Completion::success(cid), now);
                }
            },
            IoCommand::WriteZeroes { slba, blocks, deallocate, fua } => {
                (IoOp::WriteZeroes { offset: slba << shift, len: u64::from(blocks) << shift, deallocate, fua }, 0)
            }
            IoCommand::Flush if mutation::is_on(Mutation::FlushDropped) => {
                let cid = self.requests[id].cid;
                return self.finish(id, Completion::success(cid), now);
            }
            IoCommand::Flush => (IoOp::Flush, 0),
            IoCommand::Deallocate { ranges } => match self.next_range(id, namespace, ranges) {
                Ok(Some((offset, len))) => (IoOp::Deallocate { offset, len }, 0),
                Ok(None) => return self.end_ranges(id, Status::SUCCESS, now),
                Err(status) => return self.end_ranges(id, status, now),
            },
            IoCommand::Zone(command) => match self.zone_command(id, namespace, command) {
                Some(step) => step,
                None => {
                    let cid = self.requests[id].cid;
                    return self.finish(id, Completion::failed(cid, Status::INTERNAL_ERROR), now);
                }
            },
            _ => {
                let cid = self.requests[id].cid;
                return self.finish(id, Completion::success(cid), now);
            }
        };
        let data = if len > 0 { self.io_data(id, len) } else { None };
        self.hand_over(id, namespace, op, data, now);
    }

    /// Gives an operation of a request to the namespace's backend.
    #[inline(always)]
    pub(crate) fn hand_over(&mut self, id: RequestId, namespace: u32, op: IoOp, data: Option<IoData>, now: Duration) {
        let request = &mut self.requests[id];
        request.state = State::Executing;
        let token = request.token(id);
        let queue = &mut self.queues[request.queue as usize];
        queue.executing += 1;
        let namespace = &mut self.namespaces[namespace];
        namespace.pending += 1;
        let polled = namespace.polled;
        match namespace.queue.submit(Io { token, op, data }) {
            Submit::Done(done) => {
                self.polled_pending += u32::from(polled);
                self.on_io_done(done, now);
            }
            Submit::Pending => self.polled_pending += u32::from(polled),
        }
    }

    /// The buffer that the backend gets. In-capsule data at an odd place move to an aligned one first.
    #[inline(always)]
    fn io_data(&mut self, id: RequestId, len: u32) -> Option<IoData> {
        let request = &mut self.requests[id];
        if let Some(second) = request.second.take() {
            // What the namespace holds, beside what the host sent.
            return Some(IoData { buffer: second, start: 0, len });
        }
        let mut buffer = request.buffer.take()?;
        let mut start = request.data_start;
        if !(start as usize).is_multiple_of(PAGE) {
            let bytes = buffer.as_mut_slice();
            bytes.copy_within(start as usize..(start + len) as usize, 0);
            start = 0;
        }
        Some(IoData { buffer, start, len })
    }

    /// The next range of a Dataset Management command, in bytes; empty ranges are passed over.
    fn next_range(&mut self, id: RequestId, namespace: u32, ranges: u16) -> Result<Option<(u64, u64)>, Status> {
        let view = &self.namespaces[namespace].view;
        let shift = view.block_shift;
        let request = &mut self.requests[id];
        let start = request.data_start as usize;
        let Some(bytes) =
            request.buffer.as_ref().and_then(|buffer| buffer.as_slice().get(start..start + request.data_len as usize))
        else {
            return Err(Status::INTERNAL_ERROR);
        };
        // Every range is checked before the first one has an effect, and again each time: the bytes are ours and stay as they are.
        let left =
            nvme::io::parse_ranges(bytes, ranges, view, &self.shared.io_limits)?.skip(usize::from(request.next_range));
        for range in left {
            request.next_range += 1;
            if range.blocks > 0 {
                return Ok(Some((range.slba << shift, u64::from(range.blocks) << shift)));
            }
        }
        Ok(None)
    }

    /// A Dataset Management command has no range left, or one that is wrong.
    fn end_ranges(&mut self, id: RequestId, status: Status, now: Duration) {
        if !self.awaited.is_empty() || !self.aborts.is_empty() {
            self.ended(id, Some(status));
        }
        let cid = self.requests[id].cid;
        self.finish(id, Completion::failed(cid, status), now);
    }

    /// A backend answered.
    pub(crate) fn on_io_done(&mut self, done: IoDone, now: Duration) {
        if is_shutdown(done.token) {
            return self.on_shutdown_flushed(&done);
        }
        let IoDone { token, result, data } = done;
        let (id, generation) = (token as u32, (token >> 32) as u32);
        let Some(request) = self.requests.find_mut(id, generation) else {
            warn!(reactor = self.index, token, "a backend answered what was not asked, or twice");
            return;
        };
        let Job::Io { namespace, command } = request.job else { return };
        let state = &mut self.namespaces[namespace];
        state.pending = state.pending.saturating_sub(1);
        if state.polled {
            self.polled_pending = self.polled_pending.saturating_sub(1);
        }
        if let Some(queue) = self.queues.get_mut(request.queue as usize) {
            queue.executing = queue.executing.saturating_sub(1);
        }
        request.take_data_back(data);
        // A plain end of a plain command, which nobody waits for: it is answered at once.
        let plain = result.is_ok()
            && request.state == State::Executing
            && request.abort.is_none()
            && request.extra.is_none()
            && !request.is_compare()
            && !has_several_operations(&command);
        if plain && self.awaited.is_empty() && self.aborts.is_empty() && !self.timing {
            let (cid, len, at) = (request.cid, request.data_len, request.queue);
            request.completion = Completion::success(cid);
            self.tally(at, namespace, &command, len, Ok(()));
            return self.respond(id, now);
        }
        if request.state == State::Orphan {
            self.orphan_on_zones(id, result.is_ok());
            self.release_orphan(id, now);
            return;
        }
        let on_zones = request.extra.as_ref().is_some_and(|extra| extra.zone.is_some());
        if on_zones && self.storage_answered(id, namespace, result, now) {
            return;
        }
        let request = &self.requests[id];
        if has_several_operations(&command)
            && result.is_ok()
            && request.abort.is_none()
            && self.goes_on(id, namespace, &command)
        {
            return self.submit_io(id, namespace, command, now);
        }
        if self.timing {
            self.end_stage(id, Stage::Backend, now);
        }
        let request = &self.requests[id];
        let cid = request.cid;
        self.tally(request.queue, namespace, &command, request.data_len, result);
        let mut status = match result {
            Err(IoError::Cancelled) => request.abort.unwrap_or(Status::ABORT_REQUESTED),
            Err(error) => status_of(error),
            Ok(()) if has_several_operations(&command) && request.abort.is_some() => {
                request.abort.unwrap_or(Status::ABORT_REQUESTED)
            }
            Ok(()) if request.is_compare() && !self.equal(id) => Status::COMPARE_FAILURE.dnr(),
            Ok(()) => Status::SUCCESS,
        };
        if !self.awaited.is_empty() || !self.aborts.is_empty() {
            self.ended(id, Some(status));
        }
        if on_zones {
            return self.end_on_zones(id, result.is_ok(), status, now);
        }
        if self.requests[id].extra.is_some() {
            return self.finish_special(id, namespace, status, now);
        }
        if !status.is_success() {
            status = self.record_failure(id, status, now);
        }
        self.finish(id, Completion::failed(cid, status), now);
    }

    /// Counts a command that ended in the backend, for its namespace and its queue.
    #[inline(always)]
    pub(crate) fn tally(&self, at: u32, namespace: u32, command: &IoCommand, bytes: u32, result: Result<(), IoError>) {
        let Some(queue) = self.queues.get(at as usize) else { return };
        let both = [&self.namespaces[namespace].counters[self.index as usize].tally, &queue.activity.tally];
        Tally::count(both, command, bytes, result);
    }

    /// Whether a command of several operations has another.
    fn goes_on(&mut self, id: RequestId, namespace: u32, command: &IoCommand) -> bool {
        match command {
            // It ends itself when no range is left.
            IoCommand::Deallocate { .. } => true,
            IoCommand::Copy { .. } => {
                let shift = self.namespaces[namespace].view.block_shift;
                let request = &mut self.requests[id];
                let most = request.scratch_len;
                request.extra_mut().copy.as_mut().is_some_and(|copy| copy.advance(shift, most))
            }
            _ => false,
        }
    }

    /// The end of a command that shares something with others.
    fn finish_special(&mut self, id: RequestId, namespace: u32, status: Status, now: Duration) {
        let request = &mut self.requests[id];
        let cid = request.cid;
        let extra = request.extra_mut();
        let status = if status.is_success() && extra.failed { Status::FAILED_FUSED } else { status };
        let mut completion = Completion::failed(cid, status);
        if status.is_success() {
            if extra.settle.is_some() {
                return self.settle_step(id, now);
            }
            let second = self.take_second(id);
            self.finish(id, completion, now);
            // Answering may have ended the queue.
            if let Some(second) = second
                && self.requests[second].state == State::LockWait
                && let Job::Io { command, .. } = self.requests[second].job
            {
                self.submit_io(second, namespace, command, now);
            }
            return;
        }
        if let Some(copy) = &extra.copy {
            completion.result = copy.at().into();
        }
        if let Some(settle) = extra.settle.take() {
            self.shared.with_control(|control| control.registry.settle_failed(&settle));
        }
        completion.status = self.record_failure(id, status, now);
        self.finish(id, completion, now);
    }

    /// Whether a Compare found what the host sent: one copy of it, read once.
    fn equal(&self, id: RequestId) -> bool {
        let request = &self.requests[id];
        let (start, len) = (request.data_start as usize, request.data_len as usize);
        let (Some(host), Some(medium)) = (&request.buffer, &request.second) else { return false };
        host.as_slice().get(start..start + len) == medium.as_slice().get(..len)
    }

    /// The data of an admin command arrived.
    fn admin_with_data(&mut self, id: RequestId, now: Duration) {
        let request = &self.requests[id];
        let (start, len, cid) = (request.data_start as usize, request.data_len as usize, request.cid);
        let queue = &self.queues[request.queue as usize];
        let (Some(command), Some(association)) = (&request.command, &queue.association) else {
            return self.finish(id, Completion::failed(cid, Status::INTERNAL_ERROR), now);
        };
        let data = request.buffer.as_ref().and_then(|buffer| buffer.as_slice().get(start..start + len));
        let (ctrl, qid, at) = (association.ctrl, queue.request.qid, request.queue);
        let action = self.shared.with_control(|control| match qid {
            0 => control.registry.admin(ctrl, command, data, now),
            _ => control.registry.io_fabrics(ctrl, qid, command, data, now),
        });
        self.note_authentication(at);
        let completion = match action {
            nvme::registry::Action::Complete(completion) => completion,
            nvme::registry::Action::Settle { settle, completion } => {
                return self.start_settling(id, settle, completion);
            }
            nvme::registry::Action::Compute { job } => return self.start_computing(id, job),
            nvme::registry::Action::DisconnectQueue { completion } => {
                self.requests[id].close_after = true;
                completion
            }
            other => {
                warn!(?other, "an admin command with data was answered in a way that has no meaning");
                Completion::failed(cid, Status::INTERNAL_ERROR)
            }
        };
        self.finish(id, completion, now);
    }

    /// The Connect command's data arrived: the queue joins a controller, or is told why not.
    fn connect(&mut self, id: RequestId, now: Duration) {
        let request = &self.requests[id];
        let (start, len, cid, at) =
            (request.data_start as usize, request.data_len as usize, request.cid, request.queue);
        let queue = &self.queues[at as usize];
        if queue.association.is_some() {
            // Of two Connect commands at once, both found none when they arrived.
            return self.finish(id, Completion::failed(cid, Status::COMMAND_SEQUENCE_ERROR.dnr()), now);
        }
        let data = request.buffer.as_ref().and_then(|buffer| buffer.as_slice().get(start..start + len));
        let (Some(command), Some(data)) = (&request.command, data) else {
            return self.finish(id, Completion::failed(cid, Status::INTERNAL_ERROR), now);
        };
        let context = ConnectContext {
            qid: queue.request.qid,
            hsqsize: queue.request.hsqsize(),
            hrqsize: queue.request.hrqsize,
            local: queue.local,
        };
        let reference = QueueRef { key: queue.key, qid: queue.request.qid, activity: Arc::clone(&queue.activity) };
        let host_id: [u8; 16] = data.first_chunk().copied().unwrap_or_default();
        let outcome = self.shared.with_control(|control| {
            let connected = control.registry.connect(&context, command, data, now)?;
            control.queues.entry(connected.ctrl).or_default().push(reference);
            let fence = control.fence(connected.subsystem, host_id);
            let portid = control.registry.port_of(context.local);
            let older = match (connected.replaces, connected.qid) {
                (true, _) => control.registry.nsids(connected.subsystem),
                (false, 0) => control.older_life(connected.ctrl, connected.subsystem, host_id),
                (false, _) => Vec::new(),
            };
            let limiter = control.limiter_of(connected.ctrl);
            Ok((connected, fence, portid, older, limiter))
        });
        match outcome {
            Ok((connected, fence, portid, older, limiter)) => {
                self.fence_off(connected.subsystem, &older, &fence);
                let queue = &mut self.queues[at as usize];
                let (peer, cntlid, reactor) = (queue.peer, connected.cntlid, self.index);
                if connected.qid != 0 {
                    debug!(%peer, cntlid, qid = connected.qid, reactor, "queue connected");
                } else if self.log_budget.allow(now) {
                    info!(%peer, cntlid, reactor, "controller connected");
                }
                let place = self.namespaces.place(connected.subsystem);
                let (ctrl, subsystem) = (connected.ctrl, connected.subsystem);
                let sender = Sender { hostid: host_id, portid, host: connected.host };
                queue.share = self.shares.join(&limiter);
                let knows_zones = connected.all_command_sets;
                queue.association = Some(Association { ctrl, subsystem, place, sender, knows_zones, limiter, fence });
                if connected.authenticate && connected.qid != 0 {
                    queue.detour = Detour::Unauthenticated;
                }
                queue.sq_entries = u32::from(connected.sqsize) + 1;
                queue.no_sqhd = connected.sq_flow_control_disabled;
                self.shared.control_mail.send(ControlMessage::Deadline);
                self.finish(id, connected.completion, now);
            }
            Err(completion) => {
                let completion: Completion = completion;
                if self.log_budget.allow(now) {
                    let queue = &self.queues[at as usize];
                    warn!(peer = %queue.peer, qid = context.qid, status = %completion.status, "Connect refused");
                }
                self.finish(id, completion, now);
            }
        }
    }

    /// A host has begun a new life while an older one is not known to be over: on these namespaces its commands wait until the
    /// writes that are in progress now have ended, or one of the old life could land after one of the new.
    fn fence_off(&self, subsystem: SubsystemId, namespaces: &[u32], fence: &Arc<Fence>) {
        for nsid in namespaces.iter().copied() {
            fence.raise(nsid);
            let fence = Arc::clone(fence);
            self.shared.settle((subsystem, nsid), Drain::Writes, move || fence.lower(nsid));
        }
    }

    /// A request whose queue is gone: its backend is done with it.
    fn release_orphan(&mut self, id: RequestId, now: Duration) {
        let request = &self.requests[id];
        let (at, changes_media, nsid) = (request.queue, request.changes_media, request.subject.nsid);
        self.return_buffers(id);
        self.release_extra(id, now);
        if !self.awaited.is_empty() || !self.aborts.is_empty() {
            self.ended(id, None);
        }
        self.requests.release(id);
        // A target that stops does not wait for a backend that never answers: its queue may be gone.
        let Some(queue) = self.queues.get(at as usize) else { return };
        if changes_media && let Some(association) = &queue.association {
            association.fence.lower(nsid);
        }
        if queue.life == Life::Draining {
            self.forget_if_empty(at, now);
        }
    }
}

/// What a host is told of a backend's failure. Whether it helps to try again is decided here (Do Not Retry).
pub(crate) fn status_of(error: IoError) -> Status {
    match error {
        IoError::Read => Status::UNRECOVERED_READ_ERROR,
        IoError::Write => Status::WRITE_FAULT,
        IoError::NoSpace => Status::CAPACITY_EXCEEDED.dnr(),
        IoError::OutOfRange => Status::LBA_OUT_OF_RANGE.dnr(),
        IoError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.dnr(),
        IoError::Unsupported => Status::INVALID_OPCODE.dnr(),
        IoError::Gone => Status::NAMESPACE_NOT_READY.dnr(),
        IoError::Cancelled => Status::ABORT_REQUESTED,
        IoError::OpenZones => Status::TOO_MANY_OPEN_ZONES,
        IoError::ActiveZones => Status::TOO_MANY_ACTIVE_ZONES,
        IoError::Reservation => Status::INTERNAL_ERROR.dnr(),
        IoError::Other(_) => Status::INTERNAL_ERROR,
    }
}
