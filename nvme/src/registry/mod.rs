//! The registry: all subsystems, hosts, listeners and controllers, and every decision that is not an I/O command's.
//!
//! It is one value that its owner keeps behind a lock; Connect, admin, fabrics and control-plane calls go through it,
//! I/O commands never do ([`crate::io`]). It never waits: what must happen outside is an [`Action`] or an [`Event`],
//! and what happened outside is reported by [`Registry::queue_closed`], [`Registry::shutdown_done`] and
//! [`Registry::abort_finished`].
//!
//! A controller that was connected must be given back: the transport calls `queue_closed` for each queue of each
//! successful Connect, once the queue can touch nothing any more. What [`Registry::io_allowed`] says changes only
//! inside calls, so looking after each call and each event is enough.

pub mod config;

mod admin;
mod authenticate;
mod connect;
mod control;
mod controller;
mod discovery;
mod identify;
mod keepalive;
mod namespace_features;
mod paths;
mod reserve;
mod subsystem;
#[cfg(test)]
mod tests;

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::auth::Job;
use crate::completion::Completion;
use crate::gate::Gate;
use crate::io::{IoLimits, NamespaceView};
pub use crate::logs::{CommandError, IoCounters};
use crate::nqn::Nqn;
use crate::reservation::HostId;
use crate::status::Status;

pub use crate::ana::AnaState;
pub use config::{
    Admission, ConfigError, Duplicates, IdentifyOverride, Listener, NamespaceConfig, NamespaceLimits, NamespaceState,
    RdmaProvider, Referral, RegistryConfig, SubsystemConfig, ZonedNamespace,
};
pub use connect::{Connected, QueueContext};
pub use control::{TakenNamespace, TakenSubsystem};
pub use subsystem::WriteProtection;

use controller::{Association, Controller};
use discovery::Referred;
use subsystem::Subsystem;

/// A subsystem of this registry; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubsystemId(u32);

impl SubsystemId {
    /// The discovery subsystem, which always exists and has no namespaces.
    pub const DISCOVERY: Self = Self(0);

    /// Whether it is the discovery subsystem.
    #[must_use]
    pub const fn is_discovery(self) -> bool {
        self.0 == Self::DISCOVERY.0
    }
}

/// A controller of this registry: a slot and the generation of its tenant, so that a stale handle names nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ControllerId {
    slot: usize,
    generation: u64,
}

/// What the transport does about an admin or fabrics command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answer it.
    Complete(Completion),
    /// Send `data` to the host, then answer. `data` is exactly the length of the transfer; the descriptor covers it (a
    /// last-segment list's sum is for the transport to check).
    SendData {
        /// To the host.
        data: Vec<u8>,
        /// The answer after it.
        completion: Completion,
    },
    /// Send `data` to the host, then answer, then close this queue.
    SendLast {
        /// To the host.
        data: Vec<u8>,
        /// The answer after it.
        completion: Completion,
    },
    /// Run this where it holds up nobody, and call [`Registry::computed`] with what it came to.
    Compute {
        /// What to run.
        job: Job,
    },
    /// Fetch `len` bytes from the host and call [`Registry::admin`], or on an I/O queue [`Registry::io_fabrics`], again with
    /// them.
    FetchData {
        /// Bytes to fetch.
        len: u32,
    },
    /// Do not answer: an Asynchronous Event Request is parked. [`Event::CompleteHeld`] answers it.
    Hold,
    /// Look for the named command, cancel it if that is possible, answer with [`AbortReply::completion`], and call
    /// [`Registry::abort_finished`].
    Abort {
        /// Queue of the command to abort: an I/O queue that is connected.
        sqid: u16,
        /// Its command identifier.
        cid: u16,
        /// Makes the answer.
        reply: AbortReply,
    },
    /// Answer once every reactor acts on what was published last and what [`Settle`] names is over.
    Settle {
        /// What has to be over.
        settle: Settle,
        /// The answer after it.
        completion: Completion,
    },
    /// Answer, then close this I/O queue.
    DisconnectQueue {
        /// The answer.
        completion: Completion,
    },
}

/// What has to be over before a change counts as made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settle {
    /// The subsystem of the namespace.
    pub subsystem: SubsystemId,
    /// The namespace that changed.
    pub nsid: u32,
    /// Commands in progress on it that must end first.
    pub drain: Drain,
    /// Flush it after that. When that fails, the answer is its status, and [`Registry::settle_failed`] is told.
    pub flush: bool,
    /// After that, keep [`Registry::kept_state`] on stable storage.
    pub keep: bool,
}

/// Commands in progress that a change waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drain {
    /// None: new commands alone are concerned.
    Nothing,
    /// Those that change the namespace.
    Writes,
    /// All.
    Everything,
    /// All of these hosts; those that can be are aborted, with [`Status::ABORTED_BY_PREEMPT`].
    Hosts(Arc<[HostId]>),
}

/// The answer to an Abort command, once it is known what became of the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortReply {
    cid: u16,
}

impl AbortReply {
    /// Success, with bit 0 of Dword 0 set when the command was *not* aborted.
    #[must_use]
    pub const fn completion(self, aborted: bool) -> Completion {
        Completion::with_result(self.cid, if aborted { 0 } else { 1 })
    }
}

/// What the transport does without a command asking for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A namespace came, went or changed: publish [`Registry::namespace_view`] to all who check commands. Comes before any
    /// event that tells a host of it.
    Publish {
        /// Its subsystem.
        subsystem: SubsystemId,
        /// The namespace.
        nsid: u32,
    },
    /// Send this completion on the admin queue: a parked Asynchronous Event Request fires or is aborted.
    CompleteHeld {
        /// Whose admin queue.
        ctrl: ControllerId,
        /// The answer.
        completion: Completion,
    },
    /// CC.EN went 1 to 0: close the I/O queues. CSTS.RDY follows when [`Registry::queue_closed`] was called for all of
    /// them.
    CloseIoQueues {
        /// Whose queues.
        ctrl: ControllerId,
    },
    /// The host of this I/O queue did not authenticate in time: close it.
    CloseQueue {
        /// Whose queue.
        ctrl: ControllerId,
        /// Which.
        qid: u16,
    },
    /// CC.SHN asks for a shutdown: let I/O in progress finish, flush, then call [`Registry::shutdown_done`].
    ShutDown {
        /// Whose I/O.
        ctrl: ControllerId,
    },
    /// The association is over: close all queues.
    Kill {
        /// Whose queues.
        ctrl: ControllerId,
        /// Why.
        reason: KillReason,
    },
}

/// Why an association is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// Nothing was heard of the host for twice its keep alive timeout.
    KeepAliveExpired,
    /// The admin queue closed, and an association does not outlive it.
    AdminQueueClosed,
    /// The host may no longer use the subsystem.
    HostRemoved,
    /// The subsystem is no longer served.
    SubsystemRemoved,
    /// The host did not authenticate in time, or before too many others came that have not either.
    AuthenticationTimedOut,
    /// When the host had proven itself, its subsystem had as many controllers as it may.
    TooMany,
    /// The transport asked for it.
    Transport,
    /// The operator asked for it.
    Operator,
    /// The same host came again, and the subsystem has it replace what it was.
    Replaced,
    /// A host reset the NVM subsystem.
    SubsystemReset,
}

impl core::fmt::Display for KillReason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::KeepAliveExpired => "keep alive expired",
            Self::AdminQueueClosed => "admin queue closed",
            Self::HostRemoved => "host removed",
            Self::SubsystemRemoved => "subsystem removed",
            Self::AuthenticationTimedOut => "the host did not authenticate in time",
            Self::TooMany => "its subsystem has as many controllers as it may",
            Self::Transport => "transport failed",
            Self::Operator => "the operator disconnected it",
            Self::Replaced => "its host connected again and takes its place",
            Self::SubsystemReset => "a host reset the subsystem",
        })
    }
}

/// What the world may know of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemInfo {
    /// Handle.
    pub id: SubsystemId,
    /// Its name.
    pub nqn: Nqn,
    /// Any host may connect.
    pub allow_any_host: bool,
    /// Hosts that may.
    pub hosts: Vec<Nqn>,
}

/// What the world may know of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Handle.
    pub ctrl: ControllerId,
    /// Controller identifier (CNTLID), unique within the subsystem while it lives.
    pub cntlid: u16,
    /// Its subsystem.
    pub subsystem: SubsystemId,
    /// The NQN that the host connected to.
    pub subnqn: Nqn,
    /// The host's NQN.
    pub hostnqn: Nqn,
    /// The host's 128-bit identifier.
    pub hostid: HostId,
    /// Keep alive timeout as it is applied.
    pub kato: Option<Duration>,
    /// Port that the host came by.
    pub portid: u16,
    /// I/O queues that are connected.
    pub io_queues: usize,
    /// It is being torn down.
    pub dying: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Registry {
    config: RegistryConfig,
    subsystems: BTreeMap<SubsystemId, Subsystem>,
    next_subsystem: u32,
    listeners: Vec<Listener>,
    referrals: Vec<Referred>,
    /// Name of the discovery subsystem where it names itself.
    discovery_nqn: Nqn,
    /// Port identifiers by address, also of listeners that are gone.
    ports: BTreeMap<SocketAddr, u16>,
    /// Generation counter (GENCTR) of the discovery log.
    genctr: u64,
    slots: Vec<Slot>,
    /// Where the search for a free controller identifier goes on, so that one that was just freed comes last.
    next_cntlid: u16,
    /// Numbers of hosts that the configuration names.
    known_hosts: BTreeMap<Nqn, u64>,
    last_host: u64,
    events: VecDeque<Event>,
    changes: Vec<Change>,
    authentications: u64,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u64,
    tenant: Option<Controller>,
}

/// Everything but the controllers, while one of them is at work.
struct Surroundings<'a> {
    config: &'a RegistryConfig,
    subsystems: &'a mut BTreeMap<SubsystemId, Subsystem>,
    listeners: &'a [Listener],
    referrals: &'a [Referred],
    genctr: u64,
    events: &'a mut VecDeque<Event>,
    changes: &'a mut Vec<Change>,
    authentications: &'a mut u64,
}

/// Something that controllers have to be told of, once none is at work.
#[derive(Clone, Copy, Debug)]
enum Change {
    Namespace {
        subsystem: SubsystemId,
        nsid: u32,
    },
    /// The host of a new association has proven who it is.
    Authenticated {
        ctrl: ControllerId,
    },
    /// A host reset its subsystem; its own association ends by itself.
    SubsystemReset {
        subsystem: SubsystemId,
        by: ControllerId,
    },
}

impl Registry {
    /// An empty registry: the discovery subsystem alone.
    #[must_use]
    pub fn new(config: RegistryConfig) -> Self {
        Self {
            next_cntlid: *config.cntlids.start(),
            discovery_nqn: discovery::name(&config),
            config,
            subsystems: BTreeMap::new(),
            next_subsystem: 1,
            listeners: Vec::new(),
            referrals: Vec::new(),
            ports: BTreeMap::new(),
            genctr: 1,
            slots: Vec::new(),
            known_hosts: BTreeMap::new(),
            last_host: 0,
            events: VecDeque::new(),
            changes: Vec::new(),
            authentications: 0,
        }
    }

    /// The next thing to do; drain it after each call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether I/O commands of this controller are to be executed: CC.EN and CSTS.RDY are 1, CSTS.CFS is 0, no
    /// shutdown.
    #[must_use]
    pub fn io_allowed(&self, ctrl: ControllerId) -> bool {
        self.controller_ref(ctrl).is_some_and(|controller| !controller.is_dying() && controller.properties.io_allowed())
    }

    /// A queue of a controller is fully drained and destroyed: none of its writes can land any more.
    pub fn queue_closed(&mut self, ctrl: ControllerId, qid: u16, _now: Duration) {
        let Some(slot) = self.slots.get_mut(ctrl.slot) else {
            return;
        };
        let Some(controller) = slot.tenant.as_mut().filter(|tenant| tenant.id == ctrl) else {
            return;
        };
        controller.queue_closed(qid, &mut self.events);
        if controller.is_gone() {
            slot.tenant = None;
        }
    }

    /// I/O is settled and flushed, as [`Event::ShutDown`] asked.
    pub fn shutdown_done(&mut self, ctrl: ControllerId) {
        if let Some(controller) = self.controller_mut(ctrl) {
            controller.properties.shutdown_done();
        }
    }

    /// An [`Action::Abort`] was answered.
    pub fn abort_finished(&mut self, ctrl: ControllerId) {
        if let Some(controller) = self.controller_mut(ctrl) {
            controller.aborts = controller.aborts.saturating_sub(1);
        }
    }

    /// The transport cannot go on with this controller.
    pub fn fail_controller(&mut self, ctrl: ControllerId) {
        let Self { slots, events, .. } = self;
        if let Some(controller) = tenant_mut(slots, ctrl) {
            controller.kill(KillReason::Transport, events);
        }
    }

    /// An I/O command failed: an entry for the error log. Returns the status to answer with, which may have a retry delay.
    pub fn record_error(&mut self, ctrl: ControllerId, error: &CommandError) -> Status {
        let delays = !self.config.retry_delay.is_zero();
        let status = self.status_for(ctrl, error);
        let Some(controller) = self.controller_mut(ctrl) else { return status };
        controller.errors.record(&CommandError { status, ..*error });
        let passes = [Status::ANA_TRANSITION, Status::NAMESPACE_NOT_READY, Status::COMMAND_INTERRUPTED];
        let delayed = delays && passes.contains(&status) && controller.features.advanced_retry();
        if delayed { status.retry_later() } else { status }
    }

    /// A namespace that was taken away and may come back is not where commands are checked; to its hosts it is not ready.
    fn status_for(&self, ctrl: ControllerId, error: &CommandError) -> Status {
        let Some(controller) = self.controller_ref(ctrl) else { return error.status };
        let Association { subsystem, hostnqn, .. } = &controller.association;
        let held = |subsystem: &Subsystem| subsystem.holds_for(error.nsid, hostnqn);
        let missing = error.status.code() == Status::INVALID_NAMESPACE.code();
        if missing && self.subsystems.get(subsystem).is_some_and(held) {
            return Status::NAMESPACE_NOT_READY;
        }
        error.status
    }

    /// The counters of a subsystem's I/O, for the SMART / health log. Best fed just before a Get Log Page of that log
    /// is handed to [`Self::admin`]; [`crate::Command::reads_counters`] tells.
    pub fn set_io_counters(&mut self, subsystem: SubsystemId, counters: IoCounters) {
        if let Some(subsystem) = self.subsystems.get_mut(&subsystem) {
            subsystem.counters = counters;
        }
    }

    /// The namespaces of a subsystem, for publication to those who check I/O commands.
    #[must_use]
    pub fn namespace_views(&self, subsystem: SubsystemId) -> Vec<NamespaceView> {
        let subsystem = self.subsystems.get(&subsystem).into_iter();
        subsystem.flat_map(|subsystem| subsystem.namespaces.keys().filter_map(|nsid| subsystem.view(*nsid))).collect()
    }

    /// Identifiers of the namespaces of a subsystem, those included that were taken away and may come back.
    #[must_use]
    pub fn nsids(&self, subsystem: SubsystemId) -> Vec<u32> {
        self.subsystems.get(&subsystem).into_iter().flat_map(Subsystem::nsids).collect()
    }

    /// One namespace, for publication; `None` when it is not there (any more).
    #[must_use]
    pub fn namespace_view(&self, subsystem: SubsystemId, nsid: u32) -> Option<NamespaceView> {
        self.subsystems.get(&subsystem)?.view(nsid)
    }

    /// What keeps commands out of a namespace, for publication with its view; `None` when nothing does.
    #[must_use]
    pub fn namespace_gate(&self, subsystem: SubsystemId, nsid: u32) -> Option<Gate> {
        self.subsystems.get(&subsystem)?.gate(nsid)
    }

    /// UUID of a namespace.
    #[must_use]
    pub fn namespace_uuid(&self, subsystem: SubsystemId, nsid: u32) -> Option<[u8; 16]> {
        Some(self.subsystems.get(&subsystem)?.known(nsid)?.config.uuid)
    }

    /// What a namespace has to remember through power loss.
    #[must_use]
    pub fn kept_state(&self, subsystem: SubsystemId, nsid: u32) -> Option<NamespaceState> {
        Some(self.subsystems.get(&subsystem)?.known(nsid)?.kept())
    }

    /// Limits that apply to each I/O command.
    #[must_use]
    pub fn io_limits(&self) -> IoLimits {
        self.config.io_limits
    }

    /// Most descriptors of a last-segment list (MSDBD), as hosts are told.
    #[must_use]
    pub fn msdbd(&self) -> usize {
        identify::msdbd(self.config.in_capsule_data_size).into()
    }

    /// One controller.
    #[must_use]
    pub fn controller(&self, ctrl: ControllerId) -> Option<ControllerInfo> {
        self.controller_ref(ctrl).map(info)
    }

    /// All controllers.
    pub fn controllers(&self) -> impl Iterator<Item = ControllerInfo> {
        self.slots.iter().filter_map(|slot| slot.tenant.as_ref()).map(info)
    }

    fn controller_ref(&self, ctrl: ControllerId) -> Option<&Controller> {
        self.slots.get(ctrl.slot).and_then(|slot| slot.tenant.as_ref()).filter(|controller| controller.id == ctrl)
    }

    fn controller_mut(&mut self, ctrl: ControllerId) -> Option<&mut Controller> {
        tenant_mut(&mut self.slots, ctrl)
    }

    /// The controller and everything else, to work on both.
    fn split(&mut self, ctrl: ControllerId) -> Option<(&mut Controller, Surroundings<'_>)> {
        let Self { config, subsystems, listeners, referrals, slots, events, changes, authentications, .. } = self;
        let genctr = self.genctr;
        let surroundings =
            Surroundings { config, subsystems, listeners, referrals, genctr, events, changes, authentications };
        tenant_mut(slots, ctrl).map(|controller| (controller, surroundings))
    }
}

fn tenant_mut(slots: &mut [Slot], ctrl: ControllerId) -> Option<&mut Controller> {
    slots.get_mut(ctrl.slot).and_then(|slot| slot.tenant.as_mut()).filter(|controller| controller.id == ctrl)
}

fn info(controller: &Controller) -> ControllerInfo {
    let association = &controller.association;
    ControllerInfo {
        ctrl: controller.id,
        cntlid: association.cntlid,
        subsystem: association.subsystem,
        subnqn: association.subnqn.clone(),
        hostnqn: association.hostnqn.clone(),
        hostid: association.hostid,
        kato: controller.features.kato(),
        portid: association.portid,
        io_queues: controller.io_queues.len(),
        dying: controller.is_dying(),
    }
}

/// The answer to a command of a controller that is gone: its queue is on the way out too.
fn gone(cid: u16) -> Completion {
    Completion::failed(cid, Status::ABORTED_SQ_DELETION)
}
