//! Authentication of hosts, as far as it concerns queues: the messages travel as data of fabrics commands, what takes long is
//! computed on a thread of its own, and an I/O queue takes nothing else before its host has proven itself.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

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

/// Held by whoever waits for a piece of work: without it, the work is not begun.
#[derive(Debug)]
pub(crate) struct Wanted(#[expect(dead_code, reason = "held for its drop")] Arc<()>);

/// Work for one peer.
struct Order {
    wanted: Weak<()>,
    work: Work,
}

/// What is to be computed, by peer: each in its turn, so that one with many connections makes others wait for one computation and
/// not for all of its own. A queue asks for one thing at a time, so there is never more than there are queues.
#[derive(Default)]
struct Turns {
    lines: HashMap<IpAddr, VecDeque<Order>>,
    turns: VecDeque<IpAddr>,
    stopped: bool,
}

impl Turns {
    fn add(&mut self, peer: IpAddr, order: Order) {
        let line = self.lines.entry(peer).or_insert_with(|| {
            self.turns.push_back(peer);
            VecDeque::new()
        });
        // What nobody waits for any more takes no room.
        line.retain(|order| order.wanted.strong_count() > 0);
        line.push_back(order);
    }

    /// The next that somebody waits for.
    fn next(&mut self) -> Option<Work> {
        while let Some(peer) = self.turns.pop_front() {
            let Some(line) = self.lines.get_mut(&peer) else { continue };
            line.retain(|order| order.wanted.strong_count() > 0);
            let next = line.pop_front();
            if line.is_empty() {
                self.lines.remove(&peer);
            } else {
                self.turns.push_back(peer);
            }
            if let Some(order) = next {
                return Some(order.work);
            }
        }
        None
    }
}

/// The thread for what takes long, started when there is something for the first time. One: hosts that authenticate wait for
/// each other, and nobody else does.
#[derive(Default)]
pub(crate) struct Calculator {
    shared: Arc<(Mutex<Turns>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Calculator {
    /// Has work done for a peer, unless what is returned is dropped before its turn comes. When no thread can be started it is
    /// done here: slow is better than never.
    fn run(&self, peer: IpAddr, work: Work) -> Wanted {
        let wanted = Arc::new(());
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            *thread = std::thread::Builder::new().name("farside-auth".into()).spawn(move || compute(&shared)).ok();
        }
        if thread.is_some() {
            let (turns, added) = &*self.shared;
            turns
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .add(peer, Order { wanted: Arc::downgrade(&wanted), work });
            added.notify_one();
        } else {
            work();
        }
        Wanted(wanted)
    }

    /// Ends the thread after what it is at. What waits is not done: whoever waits for it ends as well.
    pub(crate) fn stop(&self) {
        let (turns, added) = &*self.shared;
        turns.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
        added.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The thread.
fn compute(shared: &(Mutex<Turns>, Condvar)) {
    let (turns, added) = shared;
    let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
    while !turns.stopped {
        let Some(work) = turns.next() else {
            turns = added.wait(turns).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(turns);
        work();
        turns = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        let peer = self.queues[self.requests[id].queue as usize].peer.ip();
        let shared = Arc::downgrade(&self.shared);
        let work = Box::new(move || {
            let result = job.run();
            if let Some(shared) = shared.upgrade() {
                shared.reactors[owner.reactor as usize].mailbox.send(Message::Computed { owner, result });
            }
        });
        // Let go of with the request, also where its queue ends before the turn comes.
        self.requests[id].extra_mut().computing = Some(self.shared.calculator.run(peer, work));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const CROWD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const ONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    /// A calculator that is busy until something is sent.
    fn busy() -> (Calculator, Sender<()>, Wanted) {
        let calculator = Calculator::default();
        let (go, gone) = channel::<()>();
        let (begun, begins) = channel();
        let wanted = calculator.run(
            CROWD,
            Box::new(move || {
                let _ = begun.send(());
                let _ = gone.recv();
            }),
        );
        begins.recv().unwrap();
        (calculator, go, wanted)
    }

    fn note(done: &Sender<u32>, number: u32) -> Work {
        let done = done.clone();
        Box::new(move || {
            let _ = done.send(number);
        })
    }

    fn all(done: Sender<u32>, results: &Receiver<u32>, count: usize) -> Vec<u32> {
        drop(done);
        results.iter().take(count).collect()
    }

    #[test]
    fn peers_take_turns_and_what_nobody_waits_for_is_not_done() {
        let (calculator, go, _first) = busy();
        let (done, results) = channel();
        let mut crowd: Vec<_> = (0..100).map(|number| calculator.run(CROWD, note(&done, number))).collect();
        let one: Vec<_> = (100..102).map(|number| calculator.run(ONE, note(&done, number))).collect();
        // All but two of the crowd are gone before their turn.
        crowd.drain(1..99);
        go.send(()).unwrap();
        assert_eq!(all(done, &results, 5), [0, 100, 99, 101], "one each");
        drop((crowd, one));
        calculator.stop();
    }

    #[test]
    fn a_stop_waits_for_what_is_begun_and_for_nothing_else() {
        let (calculator, go, _first) = busy();
        let (done, results) = channel();
        let waiting: Vec<_> = (0..100).map(|number| calculator.run(ONE, note(&done, number))).collect();
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| calculator.stop());
            while !calculator.shared.0.lock().unwrap().stopped {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
            stopping.join().unwrap();
        });
        drop((calculator, waiting));
        assert!(all(done, &results, 100).is_empty(), "a backlog was worked off");
    }

    #[test]
    fn peers_that_come_and_go_leave_nothing() {
        let mut turns = Turns::default();
        for number in 0..1000u32 {
            let peer = IpAddr::V4(number.into());
            let wanted = Arc::new(());
            turns.add(peer, Order { wanted: Arc::downgrade(&wanted), work: Box::new(|| {}) });
            drop(wanted);
        }
        assert!(turns.next().is_none());
        assert_eq!((turns.lines.len(), turns.turns.len()), (0, 0));
    }
}
