//! From a receive to a checked job: the capsule is parsed, its command is checked, its host memory is mapped, its receive is
//! posted again; only then does anything happen.

use std::collections::HashMap;
use std::time::Duration;

use nvme::command::{Command, Fuse, Transfer};
use nvme::completion::Completion;
use nvme::io::{IoCommand, NamespaceView};
use nvme::registry::CommandError;
use nvme::sgl::{self, Sgl};
use nvme::status::Status;
use tracing::{debug, warn};

use super::fused::Detour;
use super::limits::Line;
use super::memory::{Home, SlotId};
use super::queue::{CloseReason, Life};
use super::reactor::Reactor;
use super::request::{Direction, HostData, Job, Request, RequestId, State, Subject, Tag};
use crate::rdma::{Completion as WorkCompletion, Provider, WcStatus};

/// Bytes of the Connect command's data.
const CONNECT_DATA: u32 = 1024;

/// Where a capsule's in-capsule data are: the slot's page, and how many bytes of it arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capsule {
    slot: SlotId,
    arrived: u32,
}

impl<P: Provider> Reactor<P> {
    /// A command arrived that does not take the straight way.
    #[inline(never)]
    pub(crate) fn on_receive(&mut self, device: usize, tag: Tag, completion: &WorkCompletion, now: Duration) {
        let slot = tag.index;
        let Some(home) = self.memory.home(slot, tag.generation) else {
            // Of a queue pair that is destroyed: the slot serves another already.
            return;
        };
        if let (Home::Shared { .. }, Some(device)) = (home, self.devices[device].as_mut()) {
            device.posted = device.posted.saturating_sub(1);
        }
        let Some(at) = self.queue_of(device, completion.qp) else {
            self.recycle(device, slot);
            return;
        };
        if completion.status != WcStatus::Success {
            self.memory.free_slot(slot);
            self.close_queue(at, CloseReason::WorkFailed("a receive", completion.status), now);
            return;
        }
        let draining = self.draining_since.is_some();
        let queue = &self.queues[at as usize];
        let in_capsule = queue.in_capsule;
        queue.activity.touch(now);
        if queue.life != Life::Live || draining {
            self.recycle(device, slot);
            return;
        }
        if completion.byte_len < 64 {
            self.recycle(device, slot);
            self.close_queue(at, CloseReason::Protocol("a capsule shorter than 64 bytes"), now);
            return;
        }
        if queue.outstanding >= queue.sq_entries {
            self.recycle(device, slot);
            self.close_queue(at, CloseReason::Protocol("more commands than its submission queue has entries"), now);
            return;
        }
        let sqe = self.memory.command(slot);
        let parsed = Command::parse(&sqe);
        let cid = match &parsed {
            Ok(command) => command.cid,
            Err(bad) => bad.cid,
        };
        if self.requests.is_scarce() && self.close_hoarders(at, now) {
            self.recycle(device, slot);
            return;
        }
        let Some((id, _)) = self.requests.take(at, cid) else {
            self.recycle(device, slot);
            self.close_queue(at, CloseReason::Protocol("more commands under way than queues can hold"), now);
            return;
        };
        self.queues[at as usize].outstanding += 1;
        if self.timing {
            self.begin_timing(id, now);
        }
        // What arrived, not what the buffer holds, and no more than was offered.
        let capsule = Capsule { slot, arrived: (completion.byte_len - 64).min(in_capsule) };
        let begun = match parsed {
            Ok(command) => {
                // Also a refused command's key is invalidated.
                self.requests[id].invalidate = command.sgl.invalidate();
                self.begin(at, id, command, capsule, now)
            }
            Err(bad) => Err(bad.status),
        };
        // The host's slot is free once the response leaves; its receive stands before that.
        self.recycle(device, slot);
        match begun {
            Ok(Next::Acquire) => self.acquire(id, now),
            Ok(Next::Waits) => {}
            Err(status) => {
                let status = self.record_failure(id, status, now);
                self.finish(id, Completion::failed(cid, status), now);
            }
        }
    }

    /// Few requests are left: queues that hold more than their sizes allow end. Their hosts send commands and take no answers.
    /// Whether this queue was one of them.
    #[cold]
    fn close_hoarders(&mut self, at: u32, now: Duration) -> bool {
        let mut held: HashMap<u32, u32> = HashMap::new();
        for queue in self.requests.holders() {
            *held.entry(queue).or_default() += 1;
        }
        held.retain(|queue, count| {
            let queue = self.queues.get(*queue as usize).filter(|queue| queue.life == Life::Live);
            queue.is_some_and(|queue| *count > 2 * queue.sq_entries)
        });
        for queue in held.keys() {
            self.close_queue(
                *queue,
                CloseReason::Protocol("commands without end, whose answers it does not take"),
                now,
            );
        }
        held.contains_key(&at)
    }

    /// A failed command leaves a line and, on an I/O queue, an entry in its controller's error log (the registry keeps its own
    /// admin failures). Returns what to answer: the status may get a retry delay.
    pub(crate) fn record_failure(&self, id: RequestId, status: Status, _now: Duration) -> Status {
        let request = &self.requests[id];
        let queue = &self.queues[request.queue as usize];
        let Subject { opcode, nsid, lba } = request.subject;
        debug!(qid = queue.request.qid, cid = request.cid, opcode, nsid, lba, %status, "command failed");
        let Some(association) = queue.association.as_ref().filter(|_| !queue.is_admin()) else { return status };
        let error = CommandError {
            sqid: queue.request.qid,
            cid: request.cid,
            opcode,
            nsid,
            lba,
            status,
            location: nvme::io::error_location(status),
        };
        self.shared.with_control(|control| control.registry.record_error(association.ctrl, &error))
    }

    /// Posts a receive again, or frees its slot when the queues that needed it are gone.
    pub(crate) fn recycle(&mut self, device: usize, slot: SlotId) {
        let keep = match self.memory.slots[slot as usize].home {
            Home::Free => return,
            Home::Shared { .. } => self.devices[device].as_ref().is_some_and(|device| device.posted < device.wanted),
            Home::Queue { queue } => self.queues.get(queue as usize).is_some_and(|queue| queue.life == Life::Live),
        };
        if keep {
            self.post_slot(device, slot);
        } else {
            self.memory.free_slot(slot);
        }
    }

    #[inline(always)]
    fn begin(
        &mut self,
        at: u32,
        id: RequestId,
        command: Command,
        capsule: Capsule,
        now: Duration,
    ) -> Result<Next, Status> {
        let queue = &self.queues[at as usize];
        let Some(association) = &queue.association else {
            if !command.is_connect() {
                return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
            }
            self.map(id, &command.sgl, Direction::FromHost, CONNECT_DATA, capsule)?;
            let request = &mut self.requests[id];
            request.job = Job::Connect;
            request.command = Some(command);
            return Ok(Next::Acquire);
        };
        if queue.is_admin() {
            return self.begin_admin(at, id, command, capsule, now);
        }
        if command.is_fabrics() {
            let (ctrl, qid) = (association.ctrl, queue.request.qid);
            let action =
                self.shared.with_control(|control| control.registry.io_fabrics(ctrl, qid, &command, None, now));
            self.note_authentication(at);
            return self.apply(at, id, command, action, capsule);
        }
        if command.fuse != Fuse::Normal || queue.detour != Detour::None {
            return self.begin_fused(at, id, &command, capsule, now);
        }
        self.begin_io(at, id, &command, capsule)
    }

    #[inline(always)]
    pub(crate) fn begin_io(
        &mut self,
        at: u32,
        id: RequestId,
        command: &Command,
        capsule: Capsule,
    ) -> Result<Next, Status> {
        self.prepare_io(at, id, command, capsule)?;
        Ok(self.fence_or_acquire(at, id))
    }

    /// Checks an I/O command and maps its data.
    #[inline(always)]
    pub(crate) fn prepare_io(
        &mut self,
        at: u32,
        id: RequestId,
        command: &Command,
        capsule: Capsule,
    ) -> Result<(), Status> {
        let queue = &self.queues[at as usize];
        let Some(association) = &queue.association else { return Err(Status::COMMAND_SEQUENCE_ERROR.dnr()) };
        self.requests[id].subject = Subject { opcode: command.opcode.0, nsid: command.nsid, lba: 0 };
        let Some(at) = self.namespaces.find(association.place, command.nsid) else {
            return Err(nvme::io::no_namespace());
        };
        let namespace = &self.namespaces[at];
        let (view, epoch) = (&namespace.view, namespace.epoch);
        // A host that chose the NVM command set alone is not shown any either.
        if view.zone_shift.is_some() && !association.knows_zones {
            return Err(nvme::io::no_namespace());
        }
        let io = nvme::io::check(command, view, &self.shared.io_limits)
            .map_err(|status| namespace.gate.as_ref().map_or(status, |gate| gate.refusal(status)))?;
        if let Some(gate) = &namespace.gate {
            gate.check(&association.sender, &io)?;
        }
        let limited = association.limiter.is_on() || namespace.limiter.is_on();
        let request = &mut self.requests[id];
        request.job = Job::Io { namespace: at, command: io };
        request.epoch = epoch;
        if limited {
            request.line = Line::Host;
        }
        // Nearly all commands are these two.
        let (direction, len) = match io {
            IoCommand::Read { slba, blocks, .. } => {
                request.subject.lba = slba;
                (Direction::ToHost, blocks << view.block_shift)
            }
            IoCommand::Write { slba, blocks, .. } => {
                request.subject.lba = slba;
                request.changes_media = true;
                (Direction::FromHost, blocks << view.block_shift)
            }
            _ => describe_other(request, &io, view, self.shared.options.mdts),
        };
        self.map(id, &command.sgl, direction, len, capsule)
    }

    /// A command that may not run beside writes of its host's earlier life waits.
    #[inline(always)]
    pub(crate) fn fence_or_acquire(&mut self, at: u32, id: RequestId) -> Next {
        let queue = &mut self.queues[at as usize];
        let Some(association) = queue.association.as_ref().filter(|association| association.fence.is_up()) else {
            return Next::Acquire;
        };
        let nsid = self.requests[id].subject.nsid;
        if !association.fence.holds(nsid) {
            return Next::Acquire;
        }
        self.requests[id].state = State::Fenced;
        if queue.fenced.is_empty() {
            self.fenced_queues += 1;
        }
        queue.fenced.push_back(id);
        Next::Waits
    }

    fn begin_admin(
        &mut self,
        at: u32,
        id: RequestId,
        command: Command,
        capsule: Capsule,
        now: Duration,
    ) -> Result<Next, Status> {
        let Some(association) = &self.queues[at as usize].association else {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        };
        let (ctrl, subsystem) = (association.ctrl, association.subsystem);
        let action = self.shared.with_control(|control| {
            if command.reads_counters() {
                let counters = control.io_counters(subsystem);
                control.registry.set_io_counters(subsystem, counters);
            }
            control.registry.admin(ctrl, &command, None, now)
        });
        self.apply(at, id, command, action, capsule)
    }

    /// Carries out what the controller decided.
    fn apply(
        &mut self,
        at: u32,
        id: RequestId,
        command: Command,
        action: nvme::registry::Action,
        capsule: Capsule,
    ) -> Result<Next, Status> {
        use nvme::registry::Action;
        match action {
            Action::Complete(completion) => {
                self.requests[id].completion = completion;
                Ok(Next::Acquire)
            }
            Action::SendLast { data, completion } => {
                self.requests[id].close_after = true;
                self.apply(at, id, command, Action::SendData { data, completion }, capsule)
            }
            // What is computed comes with data.
            Action::Compute { .. } => Err(Status::INTERNAL_ERROR),
            Action::SendData { data, completion } => {
                let len = u32::try_from(data.len()).map_err(|_| Status::INTERNAL_ERROR)?;
                self.map(id, &command.sgl, Direction::ToHost, len, capsule)?;
                let request = &mut self.requests[id];
                request.job = Job::SendData;
                request.payload = data;
                request.completion = completion;
                Ok(Next::Acquire)
            }
            Action::FetchData { len } => {
                self.map(id, &command.sgl, Direction::FromHost, len, capsule)?;
                let request = &mut self.requests[id];
                request.job = Job::Admin;
                request.command = Some(command);
                Ok(Next::Acquire)
            }
            Action::Hold => {
                self.requests[id].state = State::Held;
                Ok(Next::Waits)
            }
            Action::Abort { sqid, cid, reply } => {
                self.start_abort(at, id, sqid, cid, reply);
                Ok(Next::Waits)
            }
            Action::Settle { settle, completion } => {
                self.start_settling(id, settle, completion);
                Ok(Next::Waits)
            }
            Action::DisconnectQueue { completion } => {
                let request = &mut self.requests[id];
                request.completion = completion;
                request.close_after = true;
                Ok(Next::Acquire)
            }
        }
    }

    /// Ties a request to the host memory, or the in-capsule bytes, that its command names. `needed` bytes move.
    #[inline(always)]
    fn map(
        &mut self,
        id: RequestId,
        sgl: &Sgl,
        direction: Direction,
        needed: u32,
        capsule: Capsule,
    ) -> Result<(), Status> {
        let request = &mut self.requests[id];
        if direction == Direction::None || needed == 0 {
            return Ok(());
        }
        request.direction = direction;
        request.data_len = needed;
        match sgl {
            Sgl::None => Err(Status::DATA_SGL_LENGTH_INVALID.dnr()),
            Sgl::Keyed(keyed) => {
                sgl::check_length(keyed.len, needed)?;
                request.host = HostData::One(*keyed);
                Ok(())
            }
            Sgl::InCapsule { offset, len } => {
                if direction != Direction::FromHost {
                    return Err(Status::SGL_TYPE_INVALID.dnr());
                }
                let range = sgl::check_in_capsule(*offset, *len, capsule.arrived)?;
                sgl::check_length(*len, needed)?;
                self.take_in_capsule(id, range.start, capsule.slot)
            }
            Sgl::LastSegment { offset, len } => {
                let range = sgl::check_in_capsule(*offset, *len, capsule.arrived)?;
                let page = self.memory.slots[capsule.slot as usize].page.as_ref().ok_or(Status::INTERNAL_ERROR)?;
                let bytes = page.as_slice().get(range).ok_or(Status::INTERNAL_ERROR)?;
                let list = sgl::resolve_last_segment(bytes, self.shared.options.max_descriptors())?;
                sgl::check_length(list.total_len(), needed)?;
                let (count, invalidate) = (list.len(), list.invalidate());
                self.requests.list_mut(id)[..count].copy_from_slice(&list);
                let request = &mut self.requests[id];
                request.host = HostData::List(count as u8);
                request.invalidate = invalidate;
                Ok(())
            }
        }
    }

    /// Moves the in-capsule page to the request. When no page can be spared the slot gives its own and is posted later.
    fn take_in_capsule(&mut self, id: RequestId, start: usize, slot: SlotId) -> Result<(), Status> {
        let page = match self.memory.swap_page(slot) {
            Some(page) => page,
            None => {
                let Some(page) = self.memory.slots[slot as usize].page.take() else {
                    return Err(Status::INTERNAL_ERROR);
                };
                self.starve_slot(slot);
                page
            }
        };
        let request = &mut self.requests[id];
        request.host = HostData::InCapsule;
        request.data_start = start as u32;
        request.buffer = Some(page);
        Ok(())
    }

    /// A slot without a page: its receive alone waits until a buffer comes back.
    fn starve_slot(&mut self, slot: SlotId) {
        self.memory.starved.push((slot, self.memory.slots[slot as usize].home));
        self.memory.slots[slot as usize].home = Home::Free;
    }

    /// Posts receives that waited for a page.
    pub(crate) fn feed_starved(&mut self) {
        while let Some((slot, home)) = self.memory.starved.pop() {
            let device = match home {
                Home::Shared { device } => device as usize,
                Home::Queue { queue } => match self.queues.get(queue as usize) {
                    Some(queue) => queue.device,
                    None => {
                        self.memory.free_slots.push(slot);
                        continue;
                    }
                },
                Home::Free => continue,
            };
            if !self.memory.refill(slot, home) {
                self.memory.starved.push((slot, home));
                return;
            }
            self.recycle(device, slot);
        }
    }

    /// A parked Asynchronous Event Request fires, or is aborted.
    pub(crate) fn complete_held(&mut self, at: u32, completion: Completion, now: Duration) {
        let held = self
            .requests
            .of_queue(at)
            .find(|id| self.requests[*id].state == State::Held && self.requests[*id].cid == completion.cid);
        match held {
            Some(id) => self.finish(id, completion, now),
            None => warn!(cid = completion.cid, "an event completes a request that is not parked"),
        }
    }
}

/// What commands other than Read and Write ask of their request: which way their data go, and how many bytes.
fn describe_other(request: &mut Request, io: &IoCommand, view: &NamespaceView, mdts: u32) -> (Direction, u32) {
    let len = io.data_len(view);
    request.changes_media = io.changes_media();
    request.subject.lba = io.blocks().map_or(0, |blocks| blocks.slba);
    match *io {
        IoCommand::Compare { .. } => request.scratch_len = len,
        IoCommand::Zone(command) => request.subject.lba = command.slba(),
        IoCommand::Verify { blocks, .. } => request.scratch_len = blocks << view.block_shift,
        IoCommand::Copy { slba, .. } => {
            request.scratch_len = mdts;
            request.subject.lba = slba;
        }
        _ => {}
    }
    let direction = match io.direction() {
        Transfer::ToHost => Direction::ToHost,
        Transfer::FromHost => Direction::FromHost,
        Transfer::None | Transfer::Both => Direction::None,
    };
    (direction, len)
}

/// How a begun command goes on.
pub(crate) enum Next {
    /// Buffer and credits are to be reserved.
    Acquire,
    /// It waits already, or nothing is to be done now.
    Waits,
}
