//! Commands that end before their time: by a host's Abort command, or because another host took the reservation and had them
//! aborted.
//!
//! A command that only waits is answered at once. One whose data are on their way from the host is answered instead of run. One
//! that a backend holds ends when the backend says so; an Abort command waits for that, but not for long: a disk that hangs
//! must not keep an admin queue.

use std::time::Duration;

use nvme::completion::Completion;
use nvme::io::IoCommand;
use nvme::registry::AbortReply;
use nvme::reservation::HostId;
use nvme::status::Status;
use nvme::zns::ZoneCommand;

use super::fused::Detour;
use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use super::shared::{Message, RequestRef, find_queue};
use super::ticket::Ticket;
use crate::rdma::Provider;

/// How long an Abort command waits for the backend.
const PATIENCE: Duration = Duration::from_millis(500);

/// An Abort command that waits for a command in a backend to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingAbort {
    /// The command, by index and generation.
    target: (RequestId, u32),
    asker: RequestRef,
    until: Duration,
}

/// What became of a command that was to end.
enum Ending {
    /// It is answered as aborted, or will be without fail.
    Aborted,
    /// A backend has it.
    InBackend,
    /// There is nothing to end.
    Nothing,
}

impl<P: Provider> Reactor<P> {
    /// Starts an Abort command: the queue that has the command may live on another reactor.
    pub(crate) fn start_abort(&mut self, at: u32, id: RequestId, sqid: u16, cid: u16, reply: AbortReply) {
        let Some(association) = &self.queues[at as usize].association else { return };
        let ctrl = association.ctrl;
        let asker = self.reference(id);
        let request = &mut self.requests[id];
        request.state = State::Aborting;
        request.abort_reply = Some(reply);
        let target = self.shared.with_control(|control| find_queue(control, ctrl, sqid).map(|queue| queue.key));
        let (reactor, message) = match target {
            Some(queue) => (queue.reactor, Message::Abort { queue, cid, asker }),
            None => (self.index, Message::AbortDone { asker, aborted: false }),
        };
        self.shared.reactors[reactor as usize].mailbox.send(message);
    }

    /// Aborts a command of a queue; the asker hears of it, at once or when the backend is done with it.
    pub(crate) fn abort(&mut self, at: Option<u32>, cid: u16, asker: RequestRef, now: Duration) {
        let found = at.and_then(|at| {
            self.requests.of_queue(at).find(|id| {
                let request = &self.requests[*id];
                request.cid == cid && !matches!(request.state, State::Responding | State::Aborting | State::Held)
            })
        });
        let aborted = match found.map(|id| (id, self.end_early(id, Status::ABORT_REQUESTED, now))) {
            Some((_, Ending::Aborted)) => true,
            Some((id, Ending::InBackend)) => {
                // The backend may have let go of it within the call.
                let generation = self.requests[id].generation;
                let target = (id, generation);
                self.aborts.push(PendingAbort { target, asker, until: now + PATIENCE });
                return;
            }
            Some((_, Ending::Nothing)) | None => false,
        };
        self.tell_asker(asker, aborted);
    }

    fn tell_asker(&self, asker: RequestRef, aborted: bool) {
        self.shared.reactors[asker.reactor as usize].mailbox.send(Message::AbortDone { asker, aborted });
    }

    /// A command ended that Abort commands may wait for; `status` is its answer, if it gets one.
    pub(crate) fn tell_aborts(&mut self, id: RequestId, status: Option<Status>) {
        let target = (id, self.requests[id].generation);
        let aborted = status.is_some_and(|status| status.code() == Status::ABORT_REQUESTED.code());
        let (told, left) = std::mem::take(&mut self.aborts).into_iter().partition(|pending| pending.target == target);
        self.aborts = left;
        let told: Vec<PendingAbort> = told;
        told.into_iter().for_each(|pending| self.tell_asker(pending.asker, aborted));
    }

    /// Abort commands that waited long enough are answered.
    pub(crate) fn expire_aborts(&mut self, now: Duration) {
        let (over, left) = std::mem::take(&mut self.aborts).into_iter().partition(|pending| pending.until <= now);
        self.aborts = left;
        let over: Vec<PendingAbort> = over;
        over.into_iter().for_each(|pending| self.tell_asker(pending.asker, false));
    }

    /// When the next Abort command has waited long enough.
    pub(crate) fn next_abort(&self) -> Option<Duration> {
        self.aborts.iter().map(|pending| pending.until).min()
    }

    /// The outcome of an Abort reached its asker.
    pub(crate) fn abort_done(&mut self, asker: RequestRef, aborted: bool, now: Duration) {
        let id = asker.request;
        let Some(request) = self.requests.find(id, asker.generation) else { return };
        if request.state != State::Aborting {
            return;
        }
        let queue = request.queue;
        let Some(reply) = self.requests[id].abort_reply.take() else { return };
        if let Some(association) = &self.queues[queue as usize].association {
            let ctrl = association.ctrl;
            self.shared.with_control(|control| control.registry.abort_finished(ctrl));
        }
        self.finish(id, reply.completion(aborted), now);
    }

    /// Ends a command as soon as that can be, with this status.
    fn end_early(&mut self, id: RequestId, status: Status, now: Duration) -> Ending {
        let request = &mut self.requests[id];
        let (at, cid) = (request.queue, request.cid);
        match request.state {
            State::WaitBuffer
            | State::WaitCredits
            | State::Fenced
            | State::Throttled
            | State::AwaitsSecond
            | State::FusedReady
            | State::LockWait
            | State::Locked => {
                self.leave_line(id);
                self.leave_buffer_line(id);
                let queue = &mut self.queues[at as usize];
                queue.wait_credits.retain(|other| *other != id);
                if queue.detour == Detour::First(id) {
                    queue.detour = Detour::Failed;
                }
                let was_fenced = !queue.fenced.is_empty();
                queue.fenced.retain(|other| *other != id);
                if was_fenced && queue.fenced.is_empty() {
                    self.fenced_queues -= 1;
                }
                self.return_buffers(id);
                self.finish(id, Completion::failed(cid, status), now);
                Ending::Aborted
            }
            State::ReadingFromHost => {
                // Its buffer is in use until the READs complete; then it is answered instead of run.
                request.abort = Some(status);
                Ending::Aborted
            }
            State::Executing => {
                request.abort = Some(status);
                let token = request.token(id);
                let Job::Io { namespace, .. } = request.job else { return Ending::Nothing };
                self.namespaces[namespace].queue.cancel(token);
                Ending::InBackend
            }
            _ => Ending::Nothing,
        }
    }

    /// Ends the commands of hosts that were preempted on a namespace; the ticket is held until backends have let go of the last.
    pub(crate) fn expel(&mut self, namespace: u32, hosts: &[HostId], ticket: Ticket, now: Duration) {
        let concerned: Vec<RequestId> = self
            .requests
            .of_namespace(namespace)
            .filter(|id| {
                let queue = self.queues.get(self.requests[*id].queue as usize);
                let association = queue.and_then(|queue| queue.association.as_ref());
                association.is_some_and(|association| hosts.contains(&association.sender.hostid))
            })
            .collect();
        let mut held = Vec::new();
        for id in concerned {
            if self.requests[id].state == State::Orphan {
                let token = self.requests[id].token(id);
                self.namespaces[namespace].queue.cancel(token);
                held.push(id);
                continue;
            }
            // Half of a pair may have ended with the other half.
            let is_io = matches!(self.requests[id].job, Job::Io { .. });
            if is_io && matches!(self.end_early(id, Status::ABORTED_BY_PREEMPT, now), Ending::InBackend) {
                held.push(id);
            }
        }
        self.await_requests(held, ticket);
    }
}

/// Whether a command is done in several operations, and can end between them.
pub(crate) fn has_several_operations(command: &IoCommand) -> bool {
    let all_zones = matches!(command, IoCommand::Zone(ZoneCommand::Send { zslba: None, .. }));
    matches!(command, IoCommand::Copy { .. } | IoCommand::Deallocate { .. }) || all_zones
}
