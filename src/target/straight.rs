//! The straight way: a plain Read, or a plain Write whose data came in its capsule, from its receive to the backend and, where that
//! answers at once, to its response, with each table looked up once.
//!
//! Plain is a command that nothing special holds for: it is none of a fused pair, and its queue, host and namespace have no
//! fence, limit, gate or lock; buffer and credits are there. It is parsed and checked like any other, and what is done for it is
//! what the general way does (`capsule`, `data`, `execute`), in the same order. As long as anything may still speak against it
//! nothing is done, so that the general way can begin anew: what is refused, or waits, is refused or waits there.

use std::time::Duration;

use nvme::command::{Command, Fuse};
use nvme::io::{IoCommand, opcode};
use nvme::sgl::{self, Sgl};

use super::accept::repost;
use super::data::{post_response, post_write};
use super::fused::Detour;
use super::memory::Home;
use super::queue::Life;
use super::reactor::Reactor;
use super::request::{Direction, HostData, Job, State, Subject, Tag, TagKind};
use super::tally::Tally;
use crate::backend::{Io, IoData, IoDone, IoOp, Submit};
use crate::rdma::{Completion, Provider, Sge, WcStatus};

/// How far a received command got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// Nowhere: it is not plain, and nothing was done.
    Start,
    /// The backend has it, or its response is posted.
    End,
    /// The queue pair of this queue takes no more work requests.
    DeadEnd(u32),
}

/// Send queue entries of a plain Read: its RDMA WRITE and its response.
const CREDITS: u32 = 2;

impl<P: Provider> Reactor<P> {
    /// Takes a command from its receive as far as it goes.
    #[inline(never)]
    pub(super) fn straight(&mut self, device: usize, tag: Tag, completion: &Completion, now: Duration) -> Reached {
        if self.timing || self.draining_since.is_some() {
            return Reached::Start;
        }
        if completion.status != WcStatus::Success || completion.byte_len < 64 {
            return Reached::Start;
        }
        let Some(home) = self.memory.home(tag.index, tag.generation) else { return Reached::Start };
        let Some(Some(device)) = self.devices.get_mut(device) else { return Reached::Start };
        let entry = device.by_qp.get(completion.qp.0 as usize).copied().unwrap_or_default();
        let at = entry.wrapping_sub(1);
        let Some(queue) = self.queues.get_mut(at as usize) else { return Reached::Start };
        let Some(association) = &queue.association else { return Reached::Start };
        if queue.life != Life::Live
            || queue.outstanding >= queue.sq_entries
            || queue.is_admin()
            || queue.detour != Detour::None
            || !queue.wait_credits.is_empty()
            || queue.send_credits < CREDITS
            || association.fence.is_up()
            || association.limiter.is_on()
            || self.requests.is_scarce()
        {
            return Reached::Start;
        }

        let Ok(command) = Command::parse(&self.memory.command(tag.index)) else { return Reached::Start };
        // Where the host wants its data; without, they are in the capsule, of which counts what arrived.
        let to = match (command.opcode, command.sgl) {
            (opcode::READ, Sgl::Keyed(keyed)) => Some(keyed),
            (opcode::WRITE, Sgl::InCapsule { offset: 0, len }) => {
                let arrived = (completion.byte_len - 64).min(queue.in_capsule);
                if sgl::check_in_capsule(0, len, arrived).is_err() {
                    return Reached::Start;
                }
                None
            }
            _ => return Reached::Start,
        };
        let Some(namespace_at) = self.namespaces.find(association.place, command.nsid) else { return Reached::Start };
        let namespace = &mut self.namespaces[namespace_at];
        if command.fuse != Fuse::Normal || !namespace.is_plain() {
            return Reached::Start;
        }
        let view = &namespace.view;
        let Ok(io) = nvme::io::check(&command, view, &self.shared.io_limits) else { return Reached::Start };
        let (slba, len, op) = match io {
            IoCommand::Read { slba, blocks, .. } => {
                (slba, blocks << view.block_shift, IoOp::Read { offset: slba << view.block_shift })
            }
            IoCommand::Write { slba, blocks, fua } => {
                (slba, blocks << view.block_shift, IoOp::Write { offset: slba << view.block_shift, fua })
            }
            _ => return Reached::Start,
        };
        let Some((id, request)) = self.requests.take(at, command.cid) else { return Reached::Start };
        let buffer = match to {
            Some(_) => self.shares.take_one(queue.share, len, &mut self.memory),
            None => self.memory.swap_page(tag.index),
        };
        let Some(buffer) = buffer else {
            self.requests.release(id);
            return Reached::Start;
        };

        queue.activity.touch(now);
        request.state = State::Executing;
        request.job = Job::Io { namespace: namespace_at, command: io };
        request.subject = Subject { opcode: command.opcode.0, nsid: command.nsid, lba: slba };
        request.epoch = namespace.epoch;
        request.data_len = len;
        match to {
            Some(keyed) => {
                request.share = queue.share;
                request.direction = Direction::ToHost;
                request.host = HostData::One(keyed);
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
        queue.outstanding += 1;
        queue.send_credits -= u32::from(request.credits);
        // The host's slot is free once the response leaves; its receive stands before that.
        if let Home::Shared { .. } = home {
            device.posted = device.posted.saturating_sub(1);
        }
        repost(device, queue, &mut self.memory, tag, home);

        let token = request.token(id);
        let data = match namespace.queue.submit(Io { token, op, data: Some(IoData { buffer, start: 0, len }) }) {
            Submit::Done(IoDone { token: of, result: Ok(()), data }) if of == token => data,
            submitted => {
                queue.executing += 1;
                namespace.pending += 1;
                self.polled_pending += u32::from(namespace.polled);
                if let Submit::Done(done) = submitted {
                    // Not just that all is well: it goes where answers go.
                    self.done.push(done);
                }
                return Reached::End;
            }
        };
        let both = [&namespace.counters[self.index as usize].tally, &queue.activity.tally];
        Tally::count(both, &io, len, Ok(()));
        request.state = State::Responding;
        let buffer = data.map(|data| data.buffer);
        let written = match (to, &buffer) {
            (Some(keyed), Some(buffer)) => {
                let tag = Tag { kind: TagKind::Write, generation: request.generation, index: id }.encode();
                let sge = Sge { addr: buffer.addr(), len, lkey: device.mr.lkey };
                post_write(&mut device.endpoint, queue.qp, tag, sge, &keyed)
            }
            _ => Ok(()),
        };
        request.buffer = buffer;
        match written.and_then(|()| post_response(device, queue, id, request, &mut self.memory, &mut self.shares)) {
            Ok(returned) => {
                self.buffers_returned |= returned;
                Reached::End
            }
            Err(_) => Reached::DeadEnd(at),
        }
    }
}
