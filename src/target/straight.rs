//! The straight way: a plain Read, or a plain Write whose data came in its capsule, from its receive to the backend and, where that
//! answers at once, to its response, with each table looked up once.
//!
//! Plain is a command that nothing special holds for: it is none of a fused pair, and its queue, host and namespace have no
//! fence, limit, gate or lock; buffer and credits are there. It is parsed and checked like any other, and what is done for it is
//! what the general way does (`capsule`, `data`, `execute`), in the same order. As long as anything may still speak against it
//! nothing is done, so the general way can begin anew.

use nvme::command::{Command, Fuse};
use nvme::io::{IoCommand, IoLimits, opcode};
use nvme::sgl::{self, KeyedSgl, Sgl};

use super::accept::repost;
use super::capsule::Capsule;
use super::data::{post_response, post_write};
use super::fused::Detour;
use super::memory::Memory;
use super::namespace::{Namespace, Namespaces};
use super::queue::Queue;
use super::reactor::Device;
use super::request::{Direction, HostData, Job, Requests, State, Subject, Tag, TagKind};
use super::share::Shares;
use crate::backend::{Io, IoData, IoDone, IoOp, Submit};
use crate::rdma::{Provider, Sge};

/// What a command on the straight way meets: where it came from, and what its reactor has.
pub(super) struct Way<'a, P: Provider> {
    pub(super) device: &'a mut Device<P>,
    /// Its queue, and the index of that.
    pub(super) queue: &'a mut Queue,
    pub(super) at: u32,
    pub(super) requests: &'a mut Requests,
    pub(super) memory: &'a mut Memory,
    pub(super) namespaces: &'a mut Namespaces,
    pub(super) shares: &'a mut Shares,
    pub(super) limits: &'a IoLimits,
    /// Index of the reactor.
    pub(super) reactor: u32,
}

/// How far it got.
pub(super) enum Reached {
    /// Nowhere: it is not plain.
    Start,
    /// The backend has it. `polled`: and has to be asked for its answer.
    Backend { polled: bool },
    /// The backend answered, and not just that all is well.
    Answer { done: IoDone, polled: bool },
    /// The response is posted. `returned`: buffers came back.
    End { returned: bool },
    /// The queue pair takes no more work requests.
    DeadEnd,
}

/// What a plain command is to do, and where.
struct Task {
    cid: u16,
    /// Index of its namespace.
    namespace: u32,
    io: IoCommand,
    op: IoOp,
    subject: Subject,
    /// Bytes.
    len: u32,
}

impl<P: Provider> Way<'_, P> {
    /// Goes as far as it goes.
    #[inline(always)]
    pub(super) fn go(self, capsule: Capsule) -> Reached {
        let Ok(command) = Command::parse(&self.memory.command(capsule.slot)) else { return Reached::Start };
        let Some((at, namespace)) = self.way_is_free(&command) else { return Reached::Start };
        let (view, cid, opcode, nsid) = (&namespace.view, command.cid, command.opcode, command.nsid);
        match (opcode, &command.sgl) {
            (opcode::READ, Sgl::Keyed(keyed)) => match nvme::io::check(&command, view, self.limits) {
                Ok(io @ IoCommand::Read { slba, blocks, .. }) => {
                    let op = IoOp::Read { offset: slba << view.block_shift };
                    let subject = Subject { opcode: opcode.0, nsid, lba: slba };
                    let task = Task { cid, namespace: at, io, op, subject, len: blocks << view.block_shift };
                    self.run(capsule, &task, Some(keyed))
                }
                _ => Reached::Start,
            },
            (opcode::WRITE, Sgl::InCapsule { offset: 0, len }) => match nvme::io::check(&command, view, self.limits) {
                Ok(io @ IoCommand::Write { slba, blocks, fua })
                    if sgl::check_in_capsule(0, *len, capsule.arrived).is_ok() =>
                {
                    let op = IoOp::Write { offset: slba << view.block_shift, fua };
                    let subject = Subject { opcode: opcode.0, nsid, lba: slba };
                    let task = Task { cid, namespace: at, io, op, subject, len: blocks << view.block_shift };
                    self.run(capsule, &task, None)
                }
                _ => Reached::Start,
            },
            _ => Reached::Start,
        }
    }

    /// The namespace of a command that nothing special holds for, and its index.
    #[inline(always)]
    fn way_is_free(&self, command: &Command) -> Option<(u32, &Namespace)> {
        let queue = &*self.queue;
        let association = queue.association.as_ref()?;
        let special = queue.is_admin()
            || queue.detour != Detour::None
            || command.fuse != Fuse::Normal
            || association.fence.is_up()
            || association.limiter.is_on();
        if special || !queue.wait_credits.is_empty() || queue.send_credits < CREDITS {
            return None;
        }
        let at = self.namespaces.find(association.place, command.nsid)?;
        let namespace = &self.namespaces[at];
        namespace.is_plain().then_some((at, namespace))
    }

    /// Does what was checked. `to`: where the host wants its data; without, its data are in the capsule.
    #[inline(always)]
    fn run(self, capsule: Capsule, task: &Task, to: Option<&KeyedSgl>) -> Reached {
        let Self { device, queue, at, requests, memory, namespaces, shares, reactor, .. } = self;
        let Task { cid, namespace, io, op, subject, len } = *task;
        let Some((id, request)) = requests.take(at, cid) else { return Reached::Start };
        let buffer = match to {
            Some(_) => shares.take_one(queue.share, len, memory),
            None => memory.swap_page(capsule.slot),
        };
        let Some(buffer) = buffer else {
            requests.release(id);
            return Reached::Start;
        };
        match to {
            Some(keyed) => {
                request.share = queue.share;
                request.direction = Direction::ToHost;
                request.host = HostData::One(*keyed);
                request.invalidate = keyed.invalidate.then_some(keyed.rkey);
                request.credits = 2;
            }
            None => {
                request.direction = Direction::FromHost;
                request.host = HostData::InCapsule;
                request.changes_media = true;
                request.credits = 1;
            }
        }
        let namespace_at = namespace;
        let namespace = &mut namespaces[namespace_at];
        request.state = State::Executing;
        request.job = Job::Io { namespace: namespace_at, command: io };
        request.subject = subject;
        request.epoch = namespace.epoch;
        request.data_len = len;
        queue.outstanding += 1;
        queue.send_credits -= u32::from(request.credits);
        // The host's slot is free once the response leaves; its receive stands before that.
        repost(device, queue, memory, capsule.slot);

        let token = request.token(id);
        let polled = namespace.polled;
        let data = match namespace.queue.submit(Io { token, op, data: Some(IoData { buffer, start: 0, len }) }) {
            Submit::Done(IoDone { token: of, result: Ok(()), data }) if of == token => data,
            submitted => {
                queue.executing += 1;
                namespace.pending += 1;
                return match submitted {
                    Submit::Done(done) => Reached::Answer { done, polled },
                    Submit::Pending => Reached::Backend { polled },
                };
            }
        };
        namespace.counters[reactor as usize].count(&io, len, true);
        request.state = State::Responding;
        let buffer = data.map(|data| data.buffer);
        let written = match (to, &buffer) {
            (Some(keyed), Some(buffer)) => {
                let tag = Tag { kind: TagKind::Write, generation: request.generation, index: id }.encode();
                let sge = Sge { addr: buffer.addr(), len, lkey: device.mr.lkey };
                post_write(&mut device.endpoint, queue.qp, tag, sge, keyed)
            }
            _ => Ok(()),
        };
        request.buffer = buffer;
        match written.and_then(|()| post_response(device, queue, id, request, memory, shares)) {
            Ok(returned) => Reached::End { returned },
            Err(_) => Reached::DeadEnd,
        }
    }
}

/// Send queue entries of a plain Read: its RDMA WRITE and its response.
const CREDITS: u32 = 2;
