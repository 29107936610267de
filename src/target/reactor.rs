//! The reactor: one thread, its devices, queues, requests, namespaces, ring and memory, and the loop that moves them.
//!
//! [`Reactor::turn`] does one round and never blocks; the thread's loop around it ([`Reactor::run`]) decides to spin or to
//! sleep. A round: completions of the devices, of the ring, of self-completing backends, messages, waiting requests, timers;
//! then one doorbell per queue pair and one ring submission.
//!
//! The path of a command through this module's siblings: `capsule` (receive to checked job), `data` (buffers, credits,
//! RDMA), `execute` (the backend), `teardown` (the end of a queue); each is a part of `impl Reactor`. Plain Reads and Writes take
//! a shorter one, `straight`.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slab::Slab;
use tracing::{debug, error, warn};

use super::abort::PendingAbort;
use super::limits::Turn;
use super::memory::Memory;
use super::namespace::Namespaces;
use super::pace::Pace;
use super::publish::Awaited;
use super::queue::{CloseReason, Life, Queue};
use super::removal::Retiring;
use super::request::{Requests, State, Tag, TagKind};
use super::share::Shares;
use super::shared::{ControlMessage, Message, QueueKey, Shared};
use super::shutdown::ShutdownFlush;
use super::stall::StallWatch;
use super::straight::Reached;
use crate::backend::{IoDone, QueueContext, Ring, RingError, RingHandle, RingOptions, Waker};
use crate::mem::{MemError, PoolStats};
use crate::rdma::{
    Access, Completion, ConnId, DeviceId, Endpoint, EndpointEvent, EndpointOptions, Mr, Provider, RdmaError, WcStatus,
};

/// Completions taken from a device at a time.
const BATCH: usize = 64;

/// Watch key of the mailbox; devices use `index * FDS_PER_DEVICE + position`.
const MAILBOX_KEY: u32 = u32::MAX;
const FDS_PER_DEVICE: u32 = 8;

/// How long a reactor that has queues sleeps at most before it looks at its devices by itself.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How often asynchronous events are looked for while there is no sleep that they could end.
const EVENT_CHECK: Duration = Duration::from_millis(50);

/// How long a stopping target lets commands finish.
const DRAIN_LIMIT: Duration = Duration::from_millis(1500);

/// What a reactor holds of one device.
pub(crate) struct Device<P: Provider> {
    pub(crate) id: DeviceId,
    pub(crate) endpoint: P::Endpoint,
    pub(crate) mr: Mr,
    /// Depth of the shared receive queue; 0 = the device has none.
    pub(crate) shared_depth: u32,
    /// Receives in the shared queue, and how many the admitted queues need there.
    pub(crate) posted: u32,
    pub(crate) wanted: u32,
    /// Queue index + 1 by queue pair.
    pub(crate) by_qp: Vec<u32>,
    pub(crate) inline: bool,
    pub(crate) invalidate: bool,
    /// iWARP: the sink of an RDMA READ is registered for it alone.
    pub(crate) sink_per_read: bool,
    pub(crate) removed: bool,
}

pub(crate) struct Reactor<P: Provider> {
    pub(crate) index: u32,
    pub(crate) shared: Arc<Shared<P>>,
    pub(crate) provider: Arc<P>,
    // Dropped in this order: queue pairs and registrations with the devices, then the ring, then the memory they named.
    pub(crate) devices: Vec<Option<Device<P>>>,
    pub(crate) namespaces: Namespaces,
    pub(crate) ring: Option<RingHandle>,
    pub(crate) queues: Slab<Queue>,
    pub(crate) requests: Requests,
    pub(crate) by_conn: HashMap<ConnId, u32>,
    pub(crate) next_generation: u32,
    /// New queues and when they must have had their Connect command, oldest first. A peer that is gone before that would hold
    /// its queue for ever: nothing is sent to it that could fail, and there is no controller whose keep alive could expire.
    pub(crate) unconnected: VecDeque<(Duration, QueueKey)>,
    /// Who holds buffers, and who waits for some.
    pub(crate) shares: Shares,
    pub(crate) stalls: StallWatch,
    pub(crate) buffers_returned: bool,
    /// Queues that are closing, or whose fence is up.
    pub(crate) closing: u32,
    pub(crate) fenced_queues: u32,
    /// Operations in backends that have to be polled.
    pub(crate) polled_pending: u32,
    /// Commands in progress whose end somebody waits for.
    pub(crate) awaited: Vec<Awaited>,
    /// Commands that wait for their turn under a limit.
    pub(crate) throttled: BinaryHeap<Turn>,
    /// Abort commands that wait for such.
    pub(crate) aborts: Vec<PendingAbort>,
    pub(crate) shutdowns: Slab<ShutdownFlush>,
    pub(crate) retiring: Vec<Retiring>,
    pub(crate) draining_since: Option<Duration>,
    pub(crate) log_budget: LogBudget,
    /// Histograms of latencies are on.
    pub(crate) timing: bool,
    next_event_check: Duration,
    pub(crate) done: Vec<IoDone>,
    ready: Vec<u32>,
    completions: Box<[Completion]>,
    context: QueueContext,
    pub(crate) memory: Memory,
}

impl<P: Provider> Reactor<P> {
    /// Builds a reactor on the calling thread. `ring` is `None` only where every backend completes by itself.
    pub(crate) fn new(
        index: u32,
        shared: Arc<Shared<P>>,
        provider: Arc<P>,
        ring: Option<RingHandle>,
    ) -> Result<Self, MemError> {
        let memory = Memory::new(&shared.options)?;
        let port = Arc::clone(&shared);
        let waker = Waker::new(move || port.reactors[index as usize].mailbox.wake());
        let requests = Requests::new(shared.options.requests());
        let mut reactor = Self {
            index,
            provider,
            devices: Vec::new(),
            namespaces: Namespaces::default(),
            queues: Slab::new(),
            requests,
            by_conn: HashMap::new(),
            next_generation: 1,
            unconnected: VecDeque::new(),
            shares: Shares::new(),
            stalls: StallWatch::default(),
            buffers_returned: false,
            closing: 0,
            fenced_queues: 0,
            polled_pending: 0,
            awaited: Vec::new(),
            throttled: BinaryHeap::new(),
            aborts: Vec::new(),
            shutdowns: Slab::new(),
            retiring: Vec::new(),
            draining_since: None,
            log_budget: LogBudget::default(),
            timing: shared.timing.load(Ordering::Acquire),
            next_event_check: Duration::ZERO,
            done: Vec::with_capacity(BATCH),
            ready: Vec::with_capacity(BATCH),
            completions: Box::new([Completion::EMPTY; BATCH]),
            context: QueueContext { ring: ring.clone(), waker },
            ring,
            memory,
            shared,
        };
        if let Some(ring) = &reactor.ring {
            let mut ring = ring.borrow_mut();
            ring.register_arena(reactor.memory.arena());
            ring.watch(reactor.shared.reactors[index as usize].mailbox.fd(), MAILBOX_KEY);
        }
        reactor.done.reserve(reactor.shared.options.requests().min(4096));
        Ok(reactor)
    }

    /// What its ring fell back from.
    pub(crate) fn remarks(&self) -> Vec<String> {
        self.ring.as_ref().map(|ring| ring.borrow().remarks().to_vec()).unwrap_or_default()
    }

    /// The thread's loop, until the target drains.
    pub(crate) fn run(mut self) {
        let clock = self.shared.clock;
        let spin = self.shared.options.poll;
        let mut pace = Pace::new(self.shared.options.poll_window);
        loop {
            let now = clock.now();
            let worked = self.turn(now);
            if self.finished() {
                break;
            }
            if worked {
                pace.worked(now);
            } else if spin || pace.spins(now) {
                std::hint::spin_loop();
            } else {
                self.sleep(now);
            }
        }
        debug!(reactor = self.index, "reactor ended");
    }

    /// One round; whether there was anything to do. Never blocks.
    pub(crate) fn turn(&mut self, now: Duration) -> bool {
        let mut worked = self.poll_devices(now);
        worked |= self.poll_backends(now);
        worked |= self.read_mail(now);
        if self.buffers_returned {
            self.buffers_returned = false;
            self.serve_buffer_waits(now);
        }
        if self.shares.anybody_waited() || self.stalls.due().is_some() {
            self.watch_stalls(now);
        }
        if self.fenced_queues > 0 {
            self.serve_fences(now);
        }
        if !self.throttled.is_empty() {
            worked |= self.serve_turns(now);
        }
        if !self.aborts.is_empty() {
            self.expire_aborts(now);
        }
        if self.unconnected.front().is_some_and(|(due, _)| *due <= now) {
            self.close_unconnected(now);
        }
        if self.closing > 0 || self.draining_since.is_some() {
            self.advance_teardown(now);
        }
        if !self.retiring.is_empty() {
            self.retire_drained();
        }
        if now >= self.next_event_check {
            self.next_event_check = now + EVENT_CHECK;
            for at in 0..self.devices.len() {
                self.read_device_events(at, now);
            }
        }
        self.submit(now);
        if worked {
            self.publish_gauges();
        }
        worked
    }

    fn publish_gauges(&self) {
        let gauges = &self.shared.reactors[self.index as usize].gauges;
        let used = |pool: PoolStats| pool.total - pool.free;
        gauges.requests.store(self.requests.in_use(), Ordering::Relaxed);
        gauges.pool_used.store(used(self.memory.pool.stats()), Ordering::Relaxed);
        gauges.pages_used.store(used(self.memory.pages.stats()), Ordering::Relaxed);
        gauges.admin_pool_used.store(used(self.memory.admin_pool.stats()), Ordering::Relaxed);
        gauges.slots_used.store(self.memory.slots.len() - self.memory.free_slots.len(), Ordering::Relaxed);
    }

    fn poll_devices(&mut self, now: Duration) -> bool {
        let mut worked = false;
        let mut completions = std::mem::take(&mut self.completions);
        for at in 0..self.devices.len() {
            let Some(device) = self.devices[at].as_mut() else { continue };
            let count = device.endpoint.poll(now, &mut completions);
            for completion in completions.iter().take(count) {
                self.on_completion(at, completion, now);
            }
            worked |= count > 0;
        }
        self.completions = completions;
        worked
    }

    fn poll_backends(&mut self, now: Duration) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let mut ready = std::mem::take(&mut self.ready);
        if let Some(ring) = &self.ring {
            ring.borrow_mut().poll(&mut done, &mut ready);
        }
        if self.polled_pending > 0 {
            for namespace in self.namespaces.iter_mut().filter(|namespace| namespace.polled && namespace.pending > 0) {
                namespace.queue.poll(&mut done);
            }
        }
        let worked = !done.is_empty() || !ready.is_empty();
        for io in done.drain(..) {
            self.on_io_done(io, now);
        }
        for key in ready.drain(..) {
            if key != MAILBOX_KEY {
                self.read_device_events((key / FDS_PER_DEVICE) as usize, now);
            }
        }
        self.done = done;
        self.ready = ready;
        worked
    }

    /// Asynchronous events of a device, read when one of its descriptors woke us.
    fn read_device_events(&mut self, at: usize, now: Duration) {
        while let Some(Some(event)) = self.devices.get_mut(at).map(|device| device.as_mut()?.endpoint.poll_event()) {
            debug!(reactor = self.index, ?event, "device event");
            match event {
                EndpointEvent::QpError(qp) => {
                    if let Some(queue) = self.queue_of(at, qp) {
                        self.close_queue(queue, CloseReason::ConnectionLost, now);
                    }
                }
                EndpointEvent::DeviceFailed => {
                    warn!(reactor = self.index, "the RDMA device reports a fatal error; its connections end");
                    self.remove_device(at, now);
                }
                EndpointEvent::LastReceive(_) | EndpointEvent::ReceivesLow | EndpointEvent::PortChanged => {}
            }
        }
    }

    #[inline(always)]
    fn on_completion(&mut self, device: usize, completion: &Completion, now: Duration) {
        let Some(tag) = Tag::decode(completion.tag) else {
            error!(reactor = self.index, tag = completion.tag, "a completion with a tag that was never posted");
            return;
        };
        match tag.kind {
            TagKind::Receive => match self.straight(device, tag, completion, now) {
                Reached::Start => self.on_receive(device, tag, completion, now),
                Reached::End => {}
                Reached::DeadEnd(queue) => self.close_queue(queue, CloseReason::ConnectionLost, now),
            },
            TagKind::Drain => self.on_drained(tag, now),
            _ if completion.status != WcStatus::Success => self.on_work_failed(tag, completion.status, now),
            TagKind::Send => self.on_sent(tag, now),
            TagKind::Read => self.on_read(tag, now),
            TagKind::Write => {}
        }
    }

    #[cold]
    fn on_work_failed(&mut self, tag: Tag, status: WcStatus, now: Duration) {
        let what = match tag.kind {
            TagKind::Read => "an RDMA READ",
            TagKind::Write => "an RDMA WRITE",
            _ => "a response",
        };
        if let Some(request) = self.requests.find(tag.index, tag.generation) {
            let queue = request.queue;
            let device = self.queues.get(queue as usize).map(|queue| queue.device);
            if tag.kind == TagKind::Send
                && request.invalidate.is_some()
                && is_local_failure(status)
                && let Some(Some(device)) = device.map(|at| self.devices[at].as_mut())
                && device.invalidate
            {
                warn!(reactor = self.index, "the device claims SEND with invalidate and fails it: it is used no more");
                device.invalidate = false;
            }
            self.close_queue(queue, CloseReason::WorkFailed(what, status), now);
        }
    }

    fn read_mail(&mut self, now: Duration) -> bool {
        let shared = Arc::clone(&self.shared);
        let mailbox = &shared.reactors[self.index as usize].mailbox;
        let mut worked = false;
        // Not what comes meanwhile: a message may have another one sent here, again and again.
        for _ in 0..mailbox.len() {
            let Some(message) = mailbox.take() else { break };
            worked = true;
            match message {
                Message::Accept { incoming, request } => self.accept(incoming, request, now),
                Message::Established(conn) => debug!(reactor = self.index, conn = conn.0, "established"),
                Message::Disconnected(conn, reason) => {
                    if let Some(queue) = self.by_conn.get(&conn).copied() {
                        self.close_queue(queue, reason, now);
                    }
                }
                Message::DeviceRemoved(id) => {
                    match self.devices.iter().position(|device| device.as_ref().is_some_and(|device| device.id == id)) {
                        Some(at) => self.remove_device(at, now),
                        None => shared.control_mail.send(ControlMessage::DeviceReleased(id)),
                    }
                }
                Message::Close(key, reason) => {
                    if let Some(queue) = self.queue_by_key(key) {
                        self.close_queue(queue, reason, now);
                    }
                }
                Message::CompleteHeld(key, completion) => {
                    if let Some(queue) = self.queue_by_key(key) {
                        self.complete_held(queue, completion, now);
                    }
                }
                Message::Abort { queue, cid, asker } => {
                    let queue = self.queue_by_key(queue);
                    self.abort(queue, cid, asker, now);
                }
                Message::AbortDone { asker, aborted } => self.abort_done(asker, aborted, now),
                Message::Publish { key, view, gate } => self.publish(key, view, gate, now),
                Message::Settle { key, drain, ticket } => self.settle(key, &drain, ticket, now),
                Message::Settled { owner } => self.settled(owner, now),
                Message::Computed { owner, result } => self.computed(owner, &result, now),
                Message::Kept { owner, kept } => self.kept(owner, kept, now),
                Message::LimitsChanged => self.line_up_again(now),
                Message::Lock { lock, ticket } => self.lock(lock, ticket),
                Message::Unlock { on, id } => self.unlock(on, id, now),
                Message::Granted { owner, id } => self.granted(owner, id, now),
                Message::ZoneTurn { owner, turn } => self.zone_turn(owner, turn, now),
                Message::FlushForShutdown { ctrl, subsystem } => self.flush_for_shutdown(ctrl, subsystem),
                Message::OpenNamespace(order) => self.open_live(order),
                Message::Timing(on) => self.set_timing(on),
                Message::Turns(ticket) => drop(ticket),
                Message::Retire { instance, ticket } => self.retired(instance, ticket),
                Message::Drain => self.draining_since = Some(now),
            }
        }
        worked
    }

    /// Opens this reactor's queue of a namespace.
    pub(crate) fn open_namespace(
        &mut self,
        published: super::namespace::Published,
    ) -> Result<(), crate::backend::BackendError> {
        let instance = published.instance;
        let at = self.namespaces.add(published, &self.context)?;
        // One that is put back may be under the lock of a command on another reactor. What is in our mail by now comes again.
        for lock in self.shared.locks().held_on(instance) {
            self.namespaces[at].add_lock(lock);
        }
        Ok(())
    }

    /// Hands everything posted to the devices and the kernel.
    fn submit(&mut self, now: Duration) {
        for device in self.devices.iter_mut().flatten() {
            device.endpoint.flush(now);
        }
        if let Some(ring) = &self.ring
            && let Err(error) = ring.borrow_mut().submit()
        {
            error!(reactor = self.index, "{error}");
        }
    }

    /// Sleeps until something happens, unless something did.
    fn sleep(&mut self, now: Duration) {
        let shared = Arc::clone(&self.shared);
        let mailbox = &shared.reactors[self.index as usize].mailbox;
        if !mailbox.prepare_sleep() {
            return;
        }
        for (at, device) in (0u32..).zip(&mut self.devices) {
            let Some(device) = device else { continue };
            if let Err(error) = device.endpoint.arm() {
                warn!(reactor = self.index, "{error}");
            }
            if let Some(ring) = &self.ring {
                // Once per sleep: a descriptor that reports every packet would cost more than it tells while we poll anyway.
                let mut ring = ring.borrow_mut();
                for (position, fd) in (0..FDS_PER_DEVICE).zip(device.endpoint.fds()) {
                    ring.watch_once(fd, at * FDS_PER_DEVICE + position);
                }
            }
        }
        // What completed before the queue was armed makes no event: look once more.
        if !self.poll_devices(now) {
            // An event that a device loses costs its hosts no more than this.
            let again = (!self.queues.is_empty()).then_some(LOOK_AGAIN);
            let timeout = self.next_timeout(now).into_iter().chain(again).min();
            if let Some(ring) = &self.ring
                && let Err(error) = ring.borrow_mut().wait(timeout)
            {
                error!(reactor = self.index, "{error}");
            }
        }
        mailbox.awake();
    }

    /// How long nothing can become due by time alone.
    pub(crate) fn next_timeout(&self, now: Duration) -> Option<Duration> {
        if self.buffers_returned {
            return Some(Duration::ZERO);
        }
        let devices = self.devices.iter().flatten().filter_map(|device| device.endpoint.next_timeout());
        let teardown = (self.closing > 0 || self.draining_since.is_some()).then(|| now + Duration::from_millis(10));
        let waits = self.fenced_queues > 0 || !self.retiring.is_empty();
        let waits = waits.then(|| now + Duration::from_millis(1));
        let turns = self.next_abort().into_iter().chain(self.next_turn());
        let connects = self.unconnected.front().map(|(due, _)| *due).into_iter().chain(self.stalls.due());
        devices.chain(teardown).chain(waits).chain(turns).chain(connects).min().map(|due| due.saturating_sub(now))
    }

    /// Whether a drained reactor may end.
    fn finished(&self) -> bool {
        self.draining_since.is_some() && self.queues.is_empty()
    }

    /// A stopping target: closes each queue as soon as nothing of it is under way, all of them at the limit.
    pub(crate) fn drain_step(&mut self, since: Duration, now: Duration) {
        let overdue = now.saturating_sub(since) >= DRAIN_LIMIT;
        let idle: Vec<u32> = self
            .queues
            .iter()
            .filter(|(_, queue)| queue.life == Life::Live)
            .map(|(at, _)| at as u32)
            .filter(|at| overdue || !self.requests.of_queue(*at).any(|id| self.requests[id].state != State::Held))
            .collect();
        for queue in idle {
            self.close_queue(queue, CloseReason::TargetStops, now);
        }
        if overdue && now.saturating_sub(since) >= 2 * DRAIN_LIMIT {
            // What a backend never answered: the process ends, the kernel waits for it.
            self.queues.retain(|_, queue| queue.life != Life::Draining);
        }
    }

    /// The device of a connection, opened on first use.
    pub(crate) fn device_for(&mut self, id: DeviceId) -> Result<usize, RdmaError> {
        let found = self
            .devices
            .iter()
            .position(|device| device.as_ref().is_some_and(|device| device.id == id && !device.removed));
        if let Some(at) = found {
            return Ok(at);
        }
        let options = &self.shared.options;
        let most = self.provider.device_info(id).map_or(0, |info| info.caps.max_srq_wr);
        let srq_depth = options.receive_slots.min(most);
        let wanted = EndpointOptions { srq_depth, srq_sge: 2, comp_vector: self.index };
        let mut endpoint = self.provider.open_endpoint(id, self.index as usize, &wanted)?;
        let arena = self.memory.arena();
        let mr = arena.register(&mut endpoint, Access::Local)?;
        let caps = endpoint.caps().clone();
        let device = Device {
            id,
            mr,
            shared_depth: srq_depth,
            posted: 0,
            wanted: 0,
            by_qp: Vec::new(),
            inline: caps.max_inline >= 16,
            invalidate: options.remote_invalidate && caps.send_with_invalidate,
            sink_per_read: caps.read_sink_needs_remote_write,
            removed: false,
            endpoint,
        };
        let at = self.devices.iter().position(Option::is_none).unwrap_or_else(|| {
            self.devices.push(None);
            self.devices.len() - 1
        });
        self.devices[at] = Some(device);
        Ok(at)
    }

    /// Lets go of a device whose queues are all gone.
    pub(crate) fn drop_device(&mut self, at: usize) {
        let Some(device) = self.devices[at].take() else { return };
        if let Some(ring) = &self.ring {
            let mut ring = ring.borrow_mut();
            for position in 0..device.endpoint.fds().len().min(FDS_PER_DEVICE as usize) as u32 {
                ring.unwatch(at as u32 * FDS_PER_DEVICE + position);
            }
        }
        let id = device.id;
        drop(device);
        self.memory.free_shared_slots(at as u32);
        self.shared.control_mail.send(ControlMessage::DeviceReleased(id));
    }

    pub(crate) fn queue_of(&self, device: usize, qp: crate::rdma::QpId) -> Option<u32> {
        self.devices.get(device)?.as_ref()?.by_qp.get(qp.0 as usize)?.checked_sub(1)
    }

    pub(crate) fn queue_by_key(&self, key: super::shared::QueueKey) -> Option<u32> {
        self.queues.get(key.index as usize).filter(|queue| queue.key == key).map(|_| key.index)
    }

    /// Gives a reactor's share of the receives back to the budget.
    pub(crate) fn return_budget(&self, entries: u32) {
        let port = &self.shared.reactors[self.index as usize];
        port.free_slots.fetch_add(entries, Ordering::AcqRel);
        port.queues.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The ring of a reactor thread.
pub(crate) fn open_ring(entries: u32) -> Result<RingHandle, RingError> {
    let options = RingOptions { entries, ..Default::default() };
    Ok(std::rc::Rc::new(std::cell::RefCell::new(Ring::new(&options)?)))
}

/// Whether a work request failed in the device itself: not flushed, and not for what the peer did.
fn is_local_failure(status: WcStatus) -> bool {
    matches!(status, WcStatus::Other(_) | WcStatus::LocalLength | WcStatus::LocalProtection)
}

/// Lines that peers may cause: ten a second, and a count of what was left out.
#[derive(Debug, Default)]
pub(crate) struct LogBudget {
    window: Duration,
    used: u32,
    dropped: u64,
}

impl LogBudget {
    const PER_SECOND: u32 = 10;

    /// Whether a line may be written now. The count of dropped lines is written with the first one after a drought.
    pub(crate) fn allow(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.window) >= Duration::from_secs(1) {
            if self.dropped > 0 {
                warn!(dropped = self.dropped, "log lines caused by peers were left out");
            }
            *self = Self { window: now, used: 0, dropped: 0 };
        }
        self.used += 1;
        let allowed = self.used <= Self::PER_SECOND;
        self.dropped += u64::from(!allowed);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_cause_ten_lines_a_second_at_most() {
        let mut budget = LogBudget::default();
        let allowed =
            |budget: &mut LogBudget, at: u64| (0..100).filter(|_| budget.allow(Duration::from_millis(at))).count();
        assert_eq!(allowed(&mut budget, 1000), 10);
        assert_eq!(allowed(&mut budget, 1999), 0);
        assert_eq!(allowed(&mut budget, 2000), 10);
    }
}
