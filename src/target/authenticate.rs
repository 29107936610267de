//! Authentication of hosts, as far as it concerns queues: the messages travel as data of fabrics commands, what takes long is
//! computed on a thread of its own, and an I/O queue takes nothing else before its host has proven itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, unbounded};
use nvme::auth::{Computed, Job};
use nvme::completion::Completion;
use nvme::registry::Action;
use nvme::status::Status;
use tracing::debug;

use super::fused::Detour;
use super::reactor::Reactor;
use super::request::{RequestId, State};
use super::shared::{Message, RequestRef};
use crate::rdma::Provider;

type Work = Box<dyn FnOnce() + Send>;

/// The thread for what takes long, started when there is something for the first time. One: hosts that authenticate wait for
/// each other, and nobody else does.
#[derive(Debug, Default)]
pub(crate) struct Calculator(Mutex<Option<(Sender<Work>, JoinHandle<()>)>>);

impl Calculator {
    /// Has work done. When no thread can be started it is done here: slow is better than never.
    fn run(&self, work: Work) {
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (sender, todo) = unbounded::<Work>();
            let spawned = std::thread::Builder::new().name("farside-auth".into()).spawn(move || {
                for work in todo {
                    work();
                }
            });
            *thread = spawned.ok().map(|handle| (sender, handle));
        }
        let refused = match &*thread {
            Some((sender, _)) => sender.send(work).err().map(|refused| refused.0),
            None => Some(work),
        };
        if let Some(work) = refused {
            work();
        }
    }

    /// Ends the thread after what it has.
    pub(crate) fn stop(&self) {
        let thread = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((sender, handle)) = thread {
            drop(sender);
            let _ = handle.join();
        }
    }
}

/// Random bytes from the kernel.
///
/// # Panics
/// When the kernel has none, which it says only before it ever had some.
pub(crate) fn random(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the kernel's random bytes");
}

impl<P: Provider> Reactor<P> {
    /// A command of an authentication waits for a computation.
    pub(crate) fn start_computing(&mut self, id: RequestId, job: Job) {
        let owner = self.reference(id);
        self.requests[id].state = State::Settling;
        let shared = Arc::downgrade(&self.shared);
        self.shared.calculator.run(Box::new(move || {
            let result = job.run();
            if let Some(shared) = shared.upgrade() {
                shared.reactors[owner.reactor as usize].mailbox.send(Message::Computed { owner, result });
            }
        }));
    }

    /// The computation is done.
    pub(crate) fn computed(&mut self, owner: RequestRef, result: &Computed, now: Duration) {
        let id = owner.request;
        let Some(request) = self.requests.find(id, owner.generation) else { return };
        if request.state != State::Settling {
            return;
        }
        let (at, cid) = (request.queue, request.cid);
        let queue = &self.queues[at as usize];
        let Some(association) = &queue.association else { return };
        let (ctrl, qid) = (association.ctrl, queue.request.qid);
        let action = self.shared.with_control(|control| control.registry.computed(ctrl, qid, cid, result));
        let completion = match action {
            Action::Complete(completion) => completion,
            _ => Completion::failed(cid, Status::INTERNAL_ERROR),
        };
        self.finish(id, completion, now);
    }

    /// Opens an I/O queue for commands once its host has proven itself on it.
    pub(crate) fn note_authentication(&mut self, at: u32) {
        let queue = &mut self.queues[at as usize];
        let Some(association) = queue.association.as_ref().filter(|_| queue.detour == Detour::Unauthenticated) else {
            return;
        };
        let (ctrl, qid) = (association.ctrl, queue.request.qid);
        if self.shared.with_control(|control| control.registry.is_authenticated(ctrl, qid)) {
            debug!(peer = %queue.peer, qid, reactor = self.index, "the host authenticated");
            queue.detour = Detour::None;
        }
    }
}
