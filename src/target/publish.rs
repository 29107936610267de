//! What changes while commands run: published views, commands that a change waits for, range locks.
//!
//! A change is a message to every reactor. A command is checked against the view when it arrives, and, if the view changed or a
//! lock came up since, once more before it goes to the backend: after that it counts as in progress. Whoever has to know that
//! nothing of the old kind is in progress any more sends a ticket behind the change; a reactor lets go of it when its own
//! commands of that kind have ended. Without changes and locks this costs a command one comparison.

use std::sync::Arc;
use std::time::Duration;

use nvme::completion::Completion;
use nvme::io::{BlockRange, IoCommand, NamespaceView};
use nvme::registry::{Drain, Settle};

use super::locks::{LockId, NamespaceKey, RangeLock};
use super::reactor::Reactor;
use super::request::{Extra, Job, RequestId, State};
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
        self.broadcast(|| Message::Settle { key, drain, ticket: ticket.clone() });
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
    fn ask_lock(self: &Arc<Self>, key: NamespaceKey, ranges: Arc<[BlockRange]>, owner: RequestRef) -> LockId {
        // Published under the table's lock, so that all reactors see locks in one order.
        let mut table = self.locks();
        let (id, lock) = table.ask(key, ranges, owner);
        if let Some(lock) = lock {
            self.publish_lock(&lock);
        }
        id
    }

    fn release_lock(self: &Arc<Self>, id: LockId) {
        let mut table = self.locks();
        let (held, granted) = table.release(id);
        if let Some(lock) = held {
            self.broadcast(|| Message::Unlock { key: lock.key, id });
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
    pub(crate) fn publish(&mut self, key: NamespaceKey, view: Option<NamespaceView>, now: Duration) {
        let Some(at) = self.namespaces.find_key(key) else { return };
        match view {
            Some(view) => self.namespaces[at].set_view(view),
            None => {
                self.retire(key);
                // What waits for a lock there would wait for ever.
                self.retry_locked(at, now);
            }
        }
    }

    /// Lets go of the ticket when the commands that `drain` names have ended.
    pub(crate) fn settle(&mut self, key: NamespaceKey, drain: Drain, ticket: Ticket) {
        let matches = |command: &IoCommand| match drain {
            Drain::Nothing => false,
            Drain::Writes => command.changes_media(),
            Drain::Everything => true,
        };
        self.await_commands(key, matches, ticket);
    }

    /// A lock comes up: from now on commands on its blocks wait, and the ticket is held until those in progress have ended.
    pub(crate) fn lock(&mut self, lock: RangeLock, ticket: Ticket) {
        let key = lock.key;
        let Some(at) = self.namespaces.find_key(key) else { return };
        let ranges = Arc::clone(&lock.ranges);
        self.namespaces[at].add_lock(lock);
        let overlaps = |command: &IoCommand| match command.blocks() {
            Some(blocks) => ranges.iter().any(|range| range.overlaps(&blocks)),
            None => command.changes_media(),
        };
        self.await_commands(key, overlaps, ticket);
    }

    /// A lock goes: what waited for it is looked at again.
    pub(crate) fn unlock(&mut self, key: NamespaceKey, id: LockId, now: Duration) {
        let Some(at) = self.namespaces.find_key(key) else { return };
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

    fn await_commands(&mut self, key: NamespaceKey, matches: impl Fn(&IoCommand) -> bool, ticket: Ticket) {
        let Some(at) = self.namespaces.find_key(key) else { return };
        if self.namespaces[at].pending == 0 {
            return;
        }
        let requests: Vec<RequestId> = self.requests.in_backend(at, matches).collect();
        if !requests.is_empty() {
            self.awaited.push(Awaited { requests, ticket });
        }
    }

    /// A command is over that somebody may wait for.
    pub(crate) fn ended(&mut self, id: RequestId) {
        self.awaited.retain_mut(|awaited| {
            awaited.requests.retain(|other| *other != id);
            !awaited.requests.is_empty()
        });
    }

    /// Whether a command may go to the backend although something changed since it was checked. If not, it is answered, or it
    /// waits for a lock.
    pub(crate) fn may_start(&mut self, id: RequestId, at: u32, command: &IoCommand, now: Duration) -> bool {
        let namespace = &mut self.namespaces[at];
        if let Err(status) = namespace.recheck(command) {
            let cid = self.requests[id].cid;
            self.record_failure(id, status, now);
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
        true
    }

    /// Asks for a lock on these blocks of the request's namespace, and waits.
    pub(crate) fn ask_lock(&mut self, id: RequestId, at: u32, ranges: Arc<[BlockRange]>) {
        let key = self.namespaces[at].key;
        let owner = self.reference(id);
        let request = &mut self.requests[id];
        request.state = State::LockWait;
        let lock = self.shared.ask_lock(key, ranges, owner);
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
        request.extra_mut().settle = Some(settle);
        let ticket = self.shared.ticket_for(owner, move || Message::Settled { owner });
        let key = (settle.subsystem, settle.nsid);
        self.shared.broadcast(|| Message::Settle { key, drain: settle.drain, ticket: ticket.clone() });
    }

    /// The change holds everywhere; what was written before goes onto stable storage if that was asked for.
    pub(crate) fn settled(&mut self, owner: RequestRef, now: Duration) {
        let Some(request) = self.requests.find(owner.request, owner.generation) else { return };
        if request.state != State::Settling {
            return;
        }
        let id = owner.request;
        let settle = request.extra.as_ref().and_then(|extra| extra.settle);
        let flush = settle.filter(|settle| settle.flush);
        match flush.and_then(|settle| self.namespaces.find_key((settle.subsystem, settle.nsid))) {
            Some(namespace) => {
                let command = IoCommand::Flush;
                self.requests[id].job = Job::Io { namespace, command };
                self.submit_io(id, namespace, command, now);
            }
            None => {
                self.requests[id].state = State::Received;
                self.acquire(id, now);
            }
        }
    }

    /// Lets go of everything that an ending request shares with others.
    pub(crate) fn release_extra(&mut self, id: RequestId, now: Duration) {
        let Some(extra) = self.requests[id].extra.take() else { return };
        let Extra { lock, partner, .. } = *extra;
        if let Some(lock) = lock {
            self.shared.release_lock(lock);
        }
        if let Some(partner) = partner {
            self.part(partner, now);
        }
    }

    fn reference(&self, id: RequestId) -> RequestRef {
        RequestRef { reactor: self.index, request: id, generation: self.requests[id].generation }
    }
}
