//! Fused Compare and Write: two commands one behind the other in a submission queue, run as one.
//!
//! The first half waits at its queue for the second; what is not its second half ends it with "missing fused". Both halves then
//! get buffers and data like any command. When both are ready the blocks are locked against all reactors, the Compare runs, and
//! if it finds what it should, the Write. (NVMe Base 2.x, Fused Operations.)

use std::time::Duration;

use nvme::command::{Command, Fuse};
use nvme::completion::Completion;
use nvme::io::{IoCommand, check_pair};
use nvme::status::Status;

use super::capsule::{Capsule, Next};
use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use super::share::Of;
use crate::rdma::Provider;

/// What keeps commands of an I/O queue from the straight way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Detour {
    #[default]
    None,
    /// The first half of a fused pair waits for the second.
    First(RequestId),
    /// The first half of a fused pair was refused, and so the second half will be.
    Failed,
    /// Its host has not proven itself: nothing is taken.
    Unauthenticated,
}

impl<P: Provider> Reactor<P> {
    /// A half of a pair, or any command behind a first half.
    pub(crate) fn begin_fused(
        &mut self,
        at: u32,
        id: RequestId,
        command: &Command,
        capsule: Capsule,
        now: Duration,
    ) -> Result<Next, Status> {
        let before = std::mem::take(&mut self.queues[at as usize].detour);
        match (before, command.fuse) {
            (Detour::First(first), Fuse::Second) => self.join(at, first, id, command, capsule, now),
            (Detour::Failed, Fuse::Second) => Err(Status::FAILED_FUSED),
            (Detour::Unauthenticated, _) => {
                self.queues[at as usize].detour = Detour::Unauthenticated;
                Err(Status::AUTHENTICATION_REQUIRED.dnr())
            }
            (Detour::None, Fuse::Second) => Err(Status::MISSING_FUSED.dnr()),
            (before, fuse) => {
                if let Detour::First(first) = before {
                    self.fail(first, Status::MISSING_FUSED.dnr(), now);
                }
                if fuse == Fuse::Normal {
                    return self.begin_io(at, id, command, capsule);
                }
                let prepared = self.prepare_io(at, id, command, capsule);
                let queue = &mut self.queues[at as usize];
                if let Err(status) = prepared {
                    queue.detour = Detour::Failed;
                    return Err(status);
                }
                queue.detour = Detour::First(id);
                self.requests[id].state = State::AwaitsSecond;
                Ok(Next::Waits)
            }
        }
    }

    /// The second half arrived.
    fn join(
        &mut self,
        at: u32,
        first: RequestId,
        second: RequestId,
        command: &Command,
        capsule: Capsule,
        now: Duration,
    ) -> Result<Next, Status> {
        if let Err(status) = self.prepare_io(at, second, command, capsule) {
            self.fail(first, Status::FAILED_FUSED, now);
            return Err(status);
        }
        let (Job::Io { namespace: one, command: compare }, Job::Io { namespace: other, command: write }) =
            (self.requests[first].job, self.requests[second].job)
        else {
            return Err(Status::INTERNAL_ERROR);
        };
        let fits = if one == other { check_pair(&compare, &write) } else { Err(Status::INVALID_FIELD.dnr()) };
        if let Err(status) = fits {
            self.fail(first, status, now);
            return Err(status);
        }
        self.requests[first].extra_mut().partner = Some(second);
        self.requests[second].extra_mut().partner = Some(first);
        self.requests[first].state = State::Received;
        if let Next::Acquire = self.fence_or_acquire(at, first) {
            self.acquire(first, now);
        }
        Ok(self.fence_or_acquire(at, second))
    }

    /// A half of a pair wants its buffers: when both do, they get them in one step.
    #[cold]
    pub(crate) fn acquire_pair(&mut self, id: RequestId, partner: RequestId, now: Duration) {
        let queue = &self.queues[self.requests[id].queue as usize];
        let (of, share) = (Of::queue(queue.is_admin()), queue.share);
        let request = &mut self.requests[id];
        request.state = State::WaitBuffer;
        request.share = share;
        request.extra_mut().arrived = true;
        if !self.requests[partner].extra_mut().arrived {
            return;
        }
        if self.shares.take_pair(of, [id, partner], &mut self.requests, &mut self.memory) {
            self.pair_has_buffers(id, partner, now);
        }
    }

    /// Both halves have their buffers: the Compare goes first.
    pub(crate) fn pair_has_buffers(&mut self, id: RequestId, partner: RequestId, now: Duration) {
        let pair = if self.requests[id].changes_media { [partner, id] } else { [id, partner] };
        for half in pair {
            // The first one may have ended the queue.
            if self.requests[half].state == State::WaitBuffer {
                self.reserve_credits(half, now);
            }
        }
    }

    fn fail(&mut self, id: RequestId, status: Status, now: Duration) {
        let cid = self.requests[id].cid;
        let status = self.record_failure(id, status, now);
        self.finish(id, Completion::failed(cid, status), now);
    }

    /// A half has its data. With both there, the blocks are locked.
    pub(crate) fn half_ready(&mut self, id: RequestId, namespace: u32, command: &IoCommand, partner: RequestId) {
        if self.requests[partner].state != State::FusedReady {
            self.requests[id].state = State::FusedReady;
            return;
        }
        let Some(blocks) = command.blocks() else { return };
        let write = if command.changes_media() { id } else { partner };
        for half in [id, partner] {
            self.requests[half].state = State::LockWait;
        }
        self.ask_lock(write, namespace, [blocks].into());
    }

    /// The Compare of a pair found what it should: its partner, now on its own, is the next to run.
    pub(crate) fn take_second(&mut self, id: RequestId) -> Option<RequestId> {
        let second = self.requests[id].extra.as_mut()?.partner.take()?;
        self.requests[second].extra_mut().partner = None;
        Some(second)
    }

    /// A half ended and the other one does not go through: it is answered now, or when what it waits for is over.
    pub(crate) fn part(&mut self, id: RequestId, now: Duration) {
        let request = &mut self.requests[id];
        let extra = request.extra_mut();
        extra.partner = None;
        extra.failed = true;
        if matches!(request.state, State::FusedReady | State::LockWait | State::WaitBuffer) {
            self.leave_buffer_line(id);
            self.fail(id, Status::FAILED_FUSED, now);
        }
    }
}
