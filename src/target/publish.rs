//! What changes while commands run: published views, commands that a change waits for, range locks.
//!
//! A change is a message to every reactor. A command is checked against the view when it arrives, and, if the view changed or a
//! lock came up since, once more before it goes to the backend: after that it counts as in progress. Whoever has to know that
//! nothing of the old kind is in progress any more sends a ticket behind the change; a reactor lets go of it when its own
//! commands of that kind have ended. Without changes and locks this costs a command one comparison.

use std::sync::Arc;
use std::time::Duration;

use nvme::completion::Completion;
use nvme::gate::Gate;
use nvme::io::{BlockRange, IoCommand, NamespaceView};
use nvme::registry::{Drain, Settle};
use nvme::status::Status;
use uuid::Uuid;

use super::locks::{LockId, NamespaceKey, RangeLock};
use super::namespace::Instance;
use super::reactor::Reactor;
use super::request::{Extra, Job, Request, RequestId, State};
use super::shared::{Message, RequestRef, Shared};
use super::ticket::Ticket;
use crate::rdma::Provider;

/// Commands in progress whose end somebody waits for.
#[derive(Debug)]
pub(crate) struct Awaited {
    requests: Vec<RequestId>,
    #[expect(dead_code, reason = "held for its drop")]
    ticket: Ticket,
}

impl<P: Provider> Shared<P> {
    /// Sends a message to every reactor.
    pub(crate) fn broadcast(&self, message: impl Fn() -> Message<P>) {
        for reactor in &self.reactors {
            reactor.mailbox.send(message());
        }
    }

    /// Has every reactor act on what was published before and let the commands that `drain` names end; then `then`.
    pub(crate) fn settle(&self, key: NamespaceKey, drain: Drain, then: impl FnOnce() + Send + 'static) {
        let ticket = Ticket::new(then);
        self.broadcast(|| Message::Settle { key, drain: drain.clone(), ticket: ticket.clone() });
    }

    /// Puts what a namespace remembers onto stable storage; `then` hears whether that worked. Without a place for it there is
    /// nothing to do.
    pub(crate) fn keep(&self, key: NamespaceKey, then: impl FnOnce(bool) + Send + 'static) {
        let Some(keeper) = &self.keeper else { return then(true) };
        // Handed over under the registry's lock: states are written in the order in which they came to be.
        self.with_control(|control| {
            let registry = &control.registry;
            match (registry.namespace_uuid(key.0, key.1), registry.kept_state(key.0, key.1)) {
                (Some(uuid), Some(state)) => keeper.keep(Uuid::from_bytes(uuid), state, then),
                _ => then(true),
            }
        });
    }

    /// A ticket that tells a request's reactor.
    fn ticket_for(
        self: &Arc<Self>,
        owner: RequestRef,
        message: impl FnOnce() -> Message<P> + Send + 'static,
    ) -> Ticket {
        // Messages lie in mailboxes of what is shared: a strong reference would keep it alive for ever.
        let shared = Arc::downgrade(self);
        Ticket::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.reactors[owner.reactor as usize].mailbox.send(message());
            }
        })
    }

    /// Asks for a lock; [`Message::Granted`] tells the owner's reactor when it is held.
    fn ask_lock(self: &Arc<Self>, on: Instance, ranges: Arc<[BlockRange]>, owner: RequestRef) -> LockId {
        // Published under the table's lock, so that all reactors see locks in one order.
        let mut table = self.locks();
        let (id, lock) = table.ask(on, ranges, owner);
        if let Some(lock) = lock {
            self.publish_lock(&lock);
        }
        id
    }

    fn release_lock(self: &Arc<Self>, id: LockId) {
        let mut table = self.locks();
        let (held, granted) = table.release(id);
        if let Some(lock) = held {
            self.broadcast(|| Message::Unlock { on: lock.on, id });
        }
        for lock in granted {
            self.publish_lock(&lock);
        }
    }

    fn publish_lock(self: &Arc<Self>, lock: &RangeLock) {
        let (owner, id) = (lock.owner, lock.id);
        let ticket = self.ticket_for(owner, move || Message::Granted { owner, id });
        self.broadcast(|| Message::Lock { lock: lock.clone(), ticket: ticket.clone() });
    }
}

impl<P: Provider> Reactor<P> {
    /// A namespace looks different from now on; `None`: it is gone.
    pub(crate) fn publish(
        &mut self,
        key: NamespaceKey,
        view: Option<NamespaceView>,
        gate: Option<Arc<Gate>>,
        now: Duration,
    ) {
        let Some(at) = self.namespaces.find_key(key) else { return };
        match view {
            Some(view) => self.namespaces[at].set_view(view, gate),
            None => {
                self.retire(key);
                // What waits for a lock there would wait for ever.
                self.retry_locked(at, now);
                self.end_turns(at, now);
            }
        }
    }

    /// Lets go of the ticket when the commands that `drain` names have ended.
    pub(crate) fn settle(&mut self, key: NamespaceKey, drain: &Drain, ticket: Ticket, now: Duration) {
        let Some(at) = self.decided(key).or_else(|| self.namespaces.find_key(key)) else { return };
        match drain {
            Drain::Nothing => {}
            Drain::Writes => self.await_commands(at, IoCommand::changes_media, ticket),
            Drain::Everything => self.await_commands(at, |_| true, ticket),
            Drain::Hosts(hosts) => self.expel(at, hosts, ticket, now),
        }
    }

    /// The namespace that a change is about: not what is in the place of one that was taken away and may come back, but that one,
    /// as long as commands are in progress on it.
    fn decided(&self, key: NamespaceKey) -> Option<u32> {
        let is_held = |at: &u32| self.namespaces[*at].gate.as_ref().is_some_and(|gate| gate.is_held());
        self.namespaces.find_key(key).filter(|at| !is_held(at)).or_else(|| self.last_retiring(key))
    }

    /// A lock comes up: from now on commands on its blocks wait, and the ticket is held until those in progress have ended.
    pub(crate) fn lock(&mut self, lock: RangeLock, ticket: Ticket) {
        let Some(at) = self.namespaces.find_instance(lock.on) else { return };
        let ranges = Arc::clone(&lock.ranges);
        self.namespaces[at].add_lock(lock);
        let overlaps = |command: &IoCommand| match command.blocks() {
            Some(blocks) => ranges.iter().any(|range| range.overlaps(&blocks)),
            None => command.changes_media(),
        };
        self.await_commands(at, overlaps, ticket);
    }

    /// A lock goes: what waited for it is looked at again.
    pub(crate) fn unlock(&mut self, on: Instance, id: LockId, now: Duration) {
        let Some(at) = self.namespaces.find_instance(on) else { return };
        self.namespaces[at].remove_lock(id);
        self.retry_locked(at, now);
    }

    fn retry_locked(&mut self, at: u32, now: Duration) {
        for (request, generation) in std::mem::take(&mut self.namespaces[at].locked) {
            let waits = self.requests.find(request, generation).is_some_and(|request| request.state == State::Locked);
            if waits {
                self.execute(request, now);
            }
        }
    }

    fn await_commands(&mut self, at: u32, matches: impl Fn(&IoCommand) -> bool, ticket: Ticket) {
        if self.namespaces[at].pending == 0 {
            return;
        }
        let requests = self.requests.in_backend(at, matches).collect();
        self.await_requests(requests, ticket);
    }

    /// Holds the ticket until these commands, which are in progress, have ended.
    pub(crate) fn await_requests(&mut self, requests: Vec<RequestId>, ticket: Ticket) {
        if !requests.is_empty() {
            self.awaited.push(Awaited { requests, ticket });
        }
    }

    /// A command is over that somebody may wait for.
    pub(crate) fn ended(&mut self, id: RequestId, status: Option<Status>) {
        self.tell_aborts(id, status);
        self.awaited.retain_mut(|awaited| {
            awaited.requests.retain(|other| *other != id);
            !awaited.requests.is_empty()
        });
    }

    /// Whether a command may go to the backend although something changed since it was checked. If not, it is answered, or it
    /// waits for a lock.
    pub(crate) fn may_start(&mut self, id: RequestId, at: u32, command: &IoCommand, now: Duration) -> bool {
        let queue = &self.queues[self.requests[id].queue as usize];
        let Some(sender) = queue.association.as_ref().map(|association| association.sender) else { return false };
        let namespace = &mut self.namespaces[at];
        if let Err(status) = namespace.recheck(command, &sender) {
            let cid = self.requests[id].cid;
            let status = self.record_failure(id, status, now);
            self.finish(id, Completion::failed(cid, status), now);
            return false;
        }
        let request = &mut self.requests[id];
        // What asks for a lock of its own waits for that.
        if !request.locks() && namespace.is_locked(command) {
            request.state = State::Locked;
            namespace.locked.push((id, request.generation));
            return false;
        }
        self.enter_zones(id, at, command, now)
    }

    /// Asks for a lock on these blocks of the request's namespace, and waits.
    pub(crate) fn ask_lock(&mut self, id: RequestId, at: u32, ranges: Arc<[BlockRange]>) {
        let on = self.namespaces[at].instance;
        let owner = self.reference(id);
        let request = &mut self.requests[id];
        request.state = State::LockWait;
        let lock = self.shared.ask_lock(on, ranges, owner);
        self.requests[id].extra_mut().lock = Some(lock);
    }

    /// The lock is held: nothing else is in progress on its blocks.
    pub(crate) fn granted(&mut self, owner: RequestRef, id: LockId, now: Duration) {
        let Some(request) = self.requests.find(owner.request, owner.generation) else { return };
        let mine = request.extra.as_ref().is_some_and(|extra| extra.lock == Some(id));
        if mine && request.state == State::LockWait {
            self.run_locked(owner.request, now);
        }
    }

    /// An admin command made a change: it is answered when that holds everywhere.
    pub(crate) fn start_settling(&mut self, id: RequestId, settle: Settle, completion: Completion) {
        let owner = self.reference(id);
        let request = &mut self.requests[id];
        request.state = State::Settling;
        request.completion = completion;
        let key = (settle.subsystem, settle.nsid);
        let drain = settle.drain.clone();
        request.extra_mut().settle = Some(settle);
        let ticket = self.shared.ticket_for(owner, move || Message::Settled { owner });
        self.shared.broadcast(|| Message::Settle { key, drain: drain.clone(), ticket: ticket.clone() });
    }

    /// The change holds everywhere.
    pub(crate) fn settled(&mut self, owner: RequestRef, now: Duration) {
        let settling = |request: &Request| request.state == State::Settling;
        if self.requests.find(owner.request, owner.generation).is_some_and(settling) {
            self.settle_step(owner.request, now);
        }
    }

    /// What is left to be done for a change: what was written before goes onto stable storage, the new state is kept, and then
    /// the command is answered.
    pub(crate) fn settle_step(&mut self, id: RequestId, now: Duration) {
        let owner = self.reference(id);
        let request = &mut self.requests[id];
        let Some(settle) = &mut request.extra_mut().settle else { return };
        let key = (settle.subsystem, settle.nsid);
        if std::mem::take(&mut settle.flush) {
            let Some(namespace) = self.decided(key) else { return self.cannot_settle(id, now) };
            let command = IoCommand::Flush;
            self.requests[id].job = Job::Io { namespace, command };
            return self.submit_io(id, namespace, command, now);
        }
        if std::mem::take(&mut settle.keep) {
            request.state = State::Settling;
            let shared = Arc::downgrade(&self.shared);
            return self.shared.keep(key, move |kept| {
                if let Some(shared) = shared.upgrade() {
                    shared.reactors[owner.reactor as usize].mailbox.send(Message::Kept { owner, kept });
                }
            });
        }
        let completion = request.completion;
        self.finish(id, completion, now);
    }

    /// The namespace that a command changed was taken away since, and is closed here: what was written before cannot be flushed.
    fn cannot_settle(&mut self, id: RequestId, now: Duration) {
        let request = &mut self.requests[id];
        let cid = request.cid;
        if let Some(settle) = request.extra_mut().settle.take() {
            self.shared.with_control(|control| control.registry.settle_failed(&settle));
        }
        self.finish(id, Completion::failed(cid, Status::NAMESPACE_NOT_READY), now);
    }

    /// The new state is on stable storage, or not.
    pub(crate) fn kept(&mut self, owner: RequestRef, kept: bool, now: Duration) {
        let id = owner.request;
        let settling = |request: &Request| request.state == State::Settling;
        if !self.requests.find(id, owner.generation).is_some_and(settling) {
            return;
        }
        if !kept {
            let cid = self.requests[id].cid;
            return self.finish(id, Completion::failed(cid, Status::INTERNAL_ERROR), now);
        }
        self.settle_step(id, now);
    }

    /// Lets go of everything that an ending request shares with others.
    pub(crate) fn release_extra(&mut self, id: RequestId, now: Duration) {
        let Some(extra) = self.requests[id].extra.take() else { return };
        let Extra { lock, partner, zone, .. } = *extra;
        if let Some(on) = zone {
            self.leave_zones(id, &on);
        }
        if let Some(lock) = lock {
            self.shared.release_lock(lock);
        }
        if let Some(partner) = partner {
            self.part(partner, now);
        }
    }

    pub(crate) fn reference(&self, id: RequestId) -> RequestRef {
        RequestRef { reactor: self.index, request: id, generation: self.requests[id].generation }
    }
}
