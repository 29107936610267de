//! What the threads of a target share: the registry, where each queue lives, mailboxes and budgets.
//!
//! Nothing here is touched per I/O but relaxed atomics: a queue's activity stamp and counters (written by its reactor alone) and a
//! host's fence (read, and written only when a connection died with writes under way).

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use nvme::auth::Computed;
use nvme::completion::Completion;
use nvme::gate::Gate;
use nvme::io::{IoLimits, NamespaceView};
use nvme::nqn::Nqn;
use nvme::registry::{ControllerId, Drain, Event, KillReason, Registry, SubsystemId};

use super::authenticate::Calculator;
use super::causes::EndBook;
use super::keeper::Keeper;
use super::latency::Stages;
use super::limits::Limiter;
use super::live::OpenNamespace;
use super::locks::{LockId, LockTable, NamespaceKey, RangeLock};
use super::mailbox::Mailbox;
use super::namespace::{Instance, IoCounters, Published};
use super::private_data::QueueRequest;
use super::queue::CloseReason;
use super::tally::{Past, Tally, Traffic};
use super::ticket::Ticket;
use super::zones::ZoneTurns;
use crate::rdma::{ConnId, DeviceId, Provider, RdmaError};

/// Where a queue lives. The generation tells it from a later one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub(crate) reactor: u32,
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A connected queue, as the directory knows it.
#[derive(Clone, Debug)]
pub(crate) struct QueueRef {
    pub(crate) key: QueueKey,
    pub(crate) qid: u16,
    pub(crate) activity: Arc<Activity>,
}

/// What a queue does, for others to look at.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    /// When it last carried a command, in nanoseconds of the target's clock.
    last: AtomicU64,
    pub(crate) tally: Tally,
    /// How long its commands took.
    pub(crate) stages: Stages,
}

impl Activity {
    pub(crate) fn touch(&self, now: Duration) {
        self.last.store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn last(&self) -> Duration {
        Duration::from_nanos(self.last.load(Ordering::Relaxed))
    }
}

/// Writes of a host whose connection is gone and whose backend has not answered. While there are any, I/O commands of that
/// host's next association on the same namespace wait: nothing of the old life may land after something of the new one.
///
/// The count is what every command looks at; the namespaces behind it only while it is not zero.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    raised: AtomicUsize,
    namespaces: Mutex<HashMap<u32, usize>>,
}

impl Fence {
    pub(crate) fn raise(&self, nsid: u32) {
        *self.held().entry(nsid).or_default() += 1;
        self.raised.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn lower(&self, nsid: u32) {
        if let Some(count) = self.held().get_mut(&nsid) {
            *count = count.saturating_sub(1);
        }
        self.raised.fetch_sub(1, Ordering::AcqRel);
    }

    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.raised.load(Ordering::Acquire) != 0
    }

    /// Whether commands on this namespace have to wait.
    #[inline]
    pub(crate) fn holds(&self, nsid: u32) -> bool {
        self.is_up() && self.held().get(&nsid).is_some_and(|count| *count > 0)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.namespaces.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Everything that changes by Connect, admin commands and the control plane.
pub(crate) struct Control {
    pub(crate) registry: Registry,
    pub(crate) queues: HashMap<ControllerId, Vec<QueueRef>>,
    fences: HashMap<(SubsystemId, [u8; 16]), Arc<Fence>>,
    /// What each host of a subsystem may do.
    limiters: HashMap<(SubsystemId, Nqn), Arc<Limiter>>,
    /// Every namespace that is served, as the reactors have it.
    pub(crate) published: BTreeMap<(SubsystemId, u32), Published>,
    /// Changes that the reactors do not all know yet: until they do, hosts are not told.
    pub(crate) changes: u32,
    /// What hosts are told then.
    held_events: VecDeque<Event>,
    /// Controllers whose shutdown ends when their I/O queues are gone.
    pub(crate) shutting_down: Vec<ControllerId>,
    /// What hosts did on queues that ended.
    pub(crate) past: Past,
}

impl Control {
    pub(crate) fn new(registry: Registry) -> Self {
        Self {
            registry,
            queues: HashMap::new(),
            fences: HashMap::new(),
            limiters: HashMap::new(),
            published: BTreeMap::new(),
            changes: 0,
            held_events: VecDeque::new(),
            shutting_down: Vec::new(),
            past: Past::default(),
        }
    }

    /// The fence of a host in a subsystem.
    pub(crate) fn fence(&mut self, subsystem: SubsystemId, host_id: [u8; 16]) -> Arc<Fence> {
        // Hosts come and go; fences that nobody holds are dropped when a new one is made.
        self.fences.retain(|_, fence| Arc::strong_count(fence) > 1 || fence.is_up());
        Arc::clone(self.fences.entry((subsystem, host_id)).or_default())
    }

    /// The limits of a controller's host.
    pub(crate) fn limiter_of(&mut self, ctrl: ControllerId) -> Arc<Limiter> {
        let Some(info) = self.registry.controller(ctrl) else { return Arc::default() };
        self.limiter(info.subsystem, info.hostnqn)
    }

    /// A subsystem is gone.
    pub(crate) fn forget_limits(&mut self, subsystem: SubsystemId) {
        self.limiters.retain(|(of, _), _| *of != subsystem);
    }

    /// The limits of a host in a subsystem.
    pub(crate) fn limiter(&mut self, subsystem: SubsystemId, host: Nqn) -> Arc<Limiter> {
        // As with fences: what limits nobody and nobody has is dropped.
        self.limiters.retain(|_, limiter| limiter.is_on() || Arc::strong_count(limiter) > 1);
        Arc::clone(self.limiters.entry((subsystem, host)).or_default())
    }

    /// The namespaces on which an older association of the same host may have writes in progress; none without such an
    /// association. It may be another path of the same host, which then waits for nothing that it would not wait for anyway.
    pub(crate) fn older_life(&self, ctrl: ControllerId, subsystem: SubsystemId, hostid: [u8; 16]) -> Vec<u32> {
        let older = |one: &nvme::registry::ControllerInfo| {
            one.ctrl != ctrl && one.subsystem == subsystem && one.hostid == hostid
        };
        if !self.registry.controllers().any(|one| older(&one)) {
            return Vec::new();
        }
        self.registry.nsids(subsystem)
    }

    /// A queue of a controller ended: what was done on it counts for its host.
    pub(crate) fn note_past(&mut self, ctrl: ControllerId, traffic: Traffic) {
        let name = |ctrl: &ControllerId| Some(self.registry.controller(*ctrl)?.hostnqn.to_string());
        let Some(host) = name(&ctrl) else { return };
        let connected: LazyCell<BTreeSet<String>, _> = LazyCell::new(|| self.queues.keys().filter_map(name).collect());
        self.past.note(&host, traffic, |host| connected.contains(host));
    }

    /// The next event to carry out. While a change is not known everywhere, only what makes it known.
    fn next_event(&mut self) -> Option<Event> {
        if self.changes == 0
            && let Some(event) = self.held_events.pop_front()
        {
            return Some(event);
        }
        loop {
            let event = self.registry.poll_event()?;
            if self.changes == 0 || matches!(event, Event::Publish { .. }) {
                return Some(event);
            }
            self.held_events.push_back(event);
        }
    }

    /// What hosts did with a subsystem's namespaces.
    pub(crate) fn io_counters(&self, subsystem: SubsystemId) -> nvme::registry::IoCounters {
        IoCounters::total(self.published_of(subsystem).flat_map(|(_, published)| published.counters.iter()))
    }

    /// A subsystem's namespaces by NSID.
    pub(crate) fn published_of(&self, subsystem: SubsystemId) -> impl Iterator<Item = (u32, &Published)> {
        let namespaces = self.published.range((subsystem, 0)..=(subsystem, u32::MAX));
        namespaces.map(|((_, nsid), published)| (*nsid, published))
    }
}

/// To a reactor.
pub(crate) enum Message<P: Provider> {
    /// A connection that the control thread admitted; its receive slots are reserved.
    Accept { incoming: P::Incoming, request: QueueRequest },
    /// The handshake completed.
    Established(ConnId),
    /// The connection is over.
    Disconnected(ConnId, CloseReason),
    /// Everything on that device has to go.
    DeviceRemoved(DeviceId),
    /// End one queue.
    Close(QueueKey, CloseReason),
    /// A parked Asynchronous Event Request fires.
    CompleteHeld(QueueKey, Completion),
    /// Look for a command, cancel it if possible, and tell the asker.
    Abort { queue: QueueKey, cid: u16, asker: RequestRef },
    /// The answer to `Abort`.
    AbortDone { asker: RequestRef, aborted: bool },
    /// A namespace changed; `None`: it is gone.
    Publish { key: NamespaceKey, view: Option<NamespaceView>, gate: Option<Arc<Gate>> },
    /// Let go of the ticket when these commands have ended.
    Settle { key: NamespaceKey, drain: Drain, ticket: Ticket },
    /// What an admin command changed holds everywhere.
    Settled { owner: RequestRef },
    /// Its state is on stable storage, or could not be put there.
    Kept { owner: RequestRef, kept: bool },
    /// What an authentication needs is computed.
    Computed { owner: RequestRef, result: Computed },
    /// Limits changed: commands that wait for their turn are looked at again.
    LimitsChanged,
    /// A range lock comes up; let go of the ticket when commands on its blocks have ended.
    Lock { lock: RangeLock, ticket: Ticket },
    /// A range lock goes.
    Unlock { on: Instance, id: LockId },
    /// A range lock is held.
    Granted { owner: RequestRef, id: LockId },
    /// A zone is the owner's to work on, or the owner of a command on all zones goes on.
    ZoneTurn { owner: RequestRef, turn: Option<(Arc<ZoneTurns>, u32)> },
    /// Flush a subsystem, then complete the shutdown of a controller.
    FlushForShutdown { ctrl: ControllerId, subsystem: SubsystemId },
    /// Open one more namespace.
    OpenNamespace(OpenNamespace),
    /// Take times, or not.
    Timing(bool),
    /// Let go of the ticket: this reactor turns.
    Turns(Ticket),
    /// Let go of the ticket when the storage of a removed namespace is closed.
    Retire { instance: Instance, ticket: Ticket },
    /// Finish what is under way, disconnect everything, end.
    Drain,
}

/// A request of a reactor, for messages that come back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestRef {
    pub(crate) reactor: u32,
    pub(crate) request: u32,
    pub(crate) generation: u32,
}

/// To the control thread.
#[derive(Debug)]
pub(crate) enum ControlMessage {
    /// A connection's queue is gone from its reactor.
    Gone(ConnId),
    /// A deadline may be earlier than it was.
    Deadline,
    /// Let go of the ticket: this thread turns.
    Turns(Ticket),
    /// Listen on one more address.
    Listen { address: SocketAddr, tos: Option<u8>, answer: Sender<Result<(), RdmaError>> },
    /// Stop to listen on an address. Connections stay.
    Unlisten { address: SocketAddr, answer: Sender<Result<(), RdmaError>> },
    /// A reactor let go of a device.
    DeviceReleased(DeviceId),
    /// Stop listening, and have the reactors drain; connection events are handled until `End`.
    Stop,
    /// The reactors are gone: end.
    End,
}

/// What other threads need of a reactor.
pub(crate) struct ReactorPort<P: Provider> {
    pub(crate) mailbox: Mailbox<Message<P>>,
    /// Receive slots that no admitted queue holds.
    pub(crate) free_slots: AtomicU32,
    /// Queues, for placement.
    pub(crate) queues: AtomicU32,
    pub(crate) gauges: Gauges,
}

/// What a reactor has in use; stored by it after a round with work, read by anyone.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) requests: AtomicUsize,
    pub(crate) pool_used: AtomicUsize,
    pub(crate) pages_used: AtomicUsize,
    pub(crate) admin_pool_used: AtomicUsize,
    pub(crate) slots_used: AtomicUsize,
}

/// Counters of the whole target. Each is written rarely or by one reactor.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) connections_accepted: AtomicU64,
    pub(crate) connections_rejected: AtomicU64,
}

/// Time since the target's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        // Starts at one second, so that zero can mean "never".
        Self(Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or_else(Instant::now))
    }

    pub(crate) fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Shared by the control thread, the reactors and the owner of the target.
pub(crate) struct Shared<P: Provider> {
    control: Mutex<Control>,
    locks: Mutex<LockTable>,
    /// What namespaces remember through power loss, where there is a place for it.
    pub(crate) keeper: Option<Keeper>,
    /// Computes what takes long.
    pub(crate) calculator: Calculator,
    /// What each I/O command is checked against.
    pub(crate) io_limits: IoLimits,
    pub(crate) reactors: Vec<ReactorPort<P>>,
    pub(crate) control_mail: Mailbox<ControlMessage>,
    pub(crate) counters: Counters,
    /// Why queues ended.
    pub(crate) ends: EndBook,
    pub(crate) clock: Clock,
    pub(crate) options: super::options::Options,
    /// Histograms of latencies are on.
    pub(crate) timing: AtomicBool,
    /// Set once the target drains.
    pub(crate) draining: AtomicBool,
}

impl<P: Provider> Shared<P> {
    pub(crate) fn new(
        registry: Registry,
        options: super::options::Options,
        keeper: Option<Keeper>,
    ) -> std::io::Result<Self> {
        let reactors = (0..options.reactors)
            .map(|_| {
                Ok(ReactorPort {
                    mailbox: Mailbox::new()?,
                    free_slots: AtomicU32::new(options.receive_slots),
                    queues: AtomicU32::new(0),
                    gauges: Gauges::default(),
                })
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self {
            io_limits: registry.io_limits(),
            control: Mutex::new(Control::new(registry)),
            locks: Mutex::new(LockTable::default()),
            keeper,
            calculator: Calculator::default(),
            reactors,
            control_mail: Mailbox::new()?,
            counters: Counters::default(),
            ends: EndBook::default(),
            clock: Clock::start(),
            timing: AtomicBool::new(options.histograms),
            options,
            draining: AtomicBool::new(false),
        })
    }

    /// Runs `work` on the registry, then carries out the events that it caused.
    pub(crate) fn with_control<R>(&self, work: impl FnOnce(&mut Control) -> R) -> R {
        let mut control = self.lock();
        let result = work(&mut control);
        while let Some(event) = control.next_event() {
            self.carry_out(&mut control, event);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, Control> {
        // A panic while the lock was held is a bug of ours in one host's command; the others' data structures are whole
        // (the registry changes state only after its checks), so they keep being served.
        self.control.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The table of range locks.
    pub(crate) fn locks(&self) -> MutexGuard<'_, LockTable> {
        self.locks.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn carry_out(&self, control: &mut Control, event: Event) {
        match event {
            Event::Publish { subsystem, nsid } => {
                let view = control.registry.namespace_view(subsystem, nsid);
                let gate = control.registry.namespace_gate(subsystem, nsid).map(Arc::new);
                let key = (subsystem, nsid);
                if let (Some(published), Some(view)) = (control.published.get_mut(&key), view) {
                    published.view = view;
                    published.gate = gate.clone();
                }
                self.broadcast(|| Message::Publish { key, view, gate: gate.clone() });
            }
            Event::CompleteHeld { ctrl, completion } => {
                if let Some(queue) = find_queue(control, ctrl, 0) {
                    self.send(queue.key, Message::CompleteHeld(queue.key, completion));
                }
            }
            Event::CloseQueue { ctrl, qid } => {
                if let Some(queue) = find_queue(control, ctrl, qid) {
                    let reason = CloseReason::Killed(KillReason::AuthenticationTimedOut);
                    self.send(queue.key, Message::Close(queue.key, reason));
                }
            }
            Event::CloseIoQueues { ctrl } => {
                for queue in control.queues.get(&ctrl).into_iter().flatten().filter(|queue| queue.qid != 0) {
                    self.send(queue.key, Message::Close(queue.key, CloseReason::ControllerReset));
                }
            }
            Event::ShutDown { ctrl } => {
                for queue in control.queues.get(&ctrl).into_iter().flatten().filter(|queue| queue.qid != 0) {
                    self.send(queue.key, Message::Close(queue.key, CloseReason::ControllerShutdown));
                }
                control.shutting_down.push(ctrl);
                self.finish_shutdown(control, ctrl);
            }
            Event::Kill { ctrl, reason } => {
                for queue in control.queues.get(&ctrl).into_iter().flatten() {
                    self.send(queue.key, Message::Close(queue.key, CloseReason::Killed(reason)));
                }
            }
        }
    }

    /// Has a shutdown flushed whose last I/O queue is gone, by the reactor of the admin queue. Without an admin queue nobody
    /// waits for it.
    pub(crate) fn finish_shutdown(&self, control: &mut Control, ctrl: ControllerId) {
        if let Some(subsystem) = control.shutdown_to_flush(ctrl)
            && let Some(admin) = find_queue(control, ctrl, 0)
        {
            self.send(admin.key, Message::FlushForShutdown { ctrl, subsystem });
        }
    }

    fn send(&self, key: QueueKey, message: Message<P>) {
        self.reactors[key.reactor as usize].mailbox.send(message);
    }
}

/// A controller's queue by its ID.
pub(crate) fn find_queue(control: &Control, ctrl: ControllerId, qid: u16) -> Option<&QueueRef> {
    control.queues.get(&ctrl)?.iter().find(|queue| queue.qid == qid)
}

/// When any queue of a controller last carried a command.
pub(crate) fn last_activity(queues: &HashMap<ControllerId, Vec<QueueRef>>, ctrl: ControllerId) -> Option<Duration> {
    queues.get(&ctrl)?.iter().map(|queue| queue.activity.last()).max()
}
