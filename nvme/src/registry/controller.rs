//! One controller: an association between a host and a subsystem.
//!
//! It ends in two steps. First it is dying: its transport was told to close the queues ([`super::Event::Kill`]),
//! nothing new is accepted. Then, when the last queue is closed, it is gone, and only then its identifier can be given
//! to another.

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::config::RegistryConfig;
use super::{ControllerId, Event, KillReason, SubsystemId};
use crate::aer::{AsyncEvents, Fired, Notice};
use crate::auth::exchange::Exchange;
use crate::completion::Completion;
use crate::features::{FeatureContext, Features};
use crate::logs::{ChangedNamespaces, ErrorLog};
use crate::nqn::Nqn;
use crate::properties::{Capabilities, Properties};
use crate::reservation::NotificationLog;
use crate::status::Status;

/// What the admin Connect brought.
#[derive(Clone, Debug)]
pub(crate) struct Association {
    pub(crate) cntlid: u16,
    pub(crate) subsystem: SubsystemId,
    pub(crate) subnqn: Nqn,
    pub(crate) hostnqn: Nqn,
    /// Number of that NQN, for gates.
    pub(crate) host: u64,
    pub(crate) hostid: [u8; 16],
    /// Address that the host reached us at.
    pub(crate) local: SocketAddr,
    /// Port that it stands for.
    pub(crate) portid: u16,
    pub(crate) kato: Option<Duration>,
}

impl Association {
    /// Whether a host that comes by this port, as it says itself, is here already: by the same port, or as another machine of
    /// the same name. Another port is another path of one host.
    pub(crate) fn is_duplicate(&self, hostnqn: &Nqn, hostid: [u8; 16], portid: u16) -> bool {
        self.hostnqn == *hostnqn && (self.portid == portid || self.hostid != hostid)
    }
}

#[derive(Debug)]
pub(crate) struct Controller {
    pub(crate) id: ControllerId,
    pub(crate) association: Association,
    pub(crate) properties: Properties,
    pub(crate) features: Features,
    pub(crate) events: AsyncEvents,
    pub(crate) errors: ErrorLog,
    pub(crate) changed: ChangedNamespaces,
    pub(crate) reservation_log: NotificationLog,
    /// Having proven itself, its host took the place of earlier associations, which may have commands in progress.
    pub(crate) replaces: bool,
    /// Queues on which the host has to prove itself, or did.
    pub(crate) exchanges: BTreeMap<u16, Exchange>,
    /// I/O queues that are connected.
    pub(crate) io_queues: BTreeSet<u16>,
    admin_open: bool,
    dying: bool,
    /// Abort commands that the transport works on.
    pub(crate) aborts: u8,
    /// When a command of it was last seen.
    pub(crate) last_activity: Duration,
}

impl Controller {
    pub(crate) fn new(
        id: ControllerId,
        association: Association,
        config: &RegistryConfig,
        was_reset: bool,
        now: Duration,
    ) -> Self {
        let discovery = association.subsystem.is_discovery();
        let capabilities = Capabilities {
            mqes: config.max_io_queue_entries.saturating_sub(1),
            timeout: config.ready_timeout,
            io: !discovery,
            subsystem_reset: config.subsystem_reset && !discovery,
            subsystem_was_reset: was_reset,
        };
        let context = FeatureContext {
            discovery,
            max_io_queues: config.max_io_queues,
            keep_alive_granularity: config.keep_alive_granularity,
            io_queues_exist: false,
            hostid: association.hostid,
        };
        Self {
            id,
            properties: Properties::new(capabilities),
            features: Features::new(&context, association.kato),
            association,
            events: AsyncEvents::default(),
            errors: ErrorLog::default(),
            changed: ChangedNamespaces::default(),
            reservation_log: NotificationLog::default(),
            replaces: false,
            exchanges: BTreeMap::new(),
            io_queues: BTreeSet::new(),
            admin_open: true,
            dying: false,
            aborts: 0,
            last_activity: now,
        }
    }

    pub(crate) fn is_discovery(&self) -> bool {
        self.association.subsystem.is_discovery()
    }

    /// No longer usable: its queues are being closed.
    pub(crate) fn is_dying(&self) -> bool {
        self.dying
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.dying && !self.admin_open && self.io_queues.is_empty()
    }

    pub(crate) fn feature_context(&self, config: &RegistryConfig) -> FeatureContext {
        FeatureContext {
            discovery: self.is_discovery(),
            max_io_queues: config.max_io_queues,
            keep_alive_granularity: config.keep_alive_granularity,
            io_queues_exist: !self.io_queues.is_empty(),
            hostid: self.association.hostid,
        }
    }

    /// Ends the association: parked requests are dropped with their queue, and the transport closes what is open.
    pub(crate) fn kill(&mut self, reason: KillReason, events: &mut VecDeque<Event>) {
        if self.dying {
            return;
        }
        self.dying = true;
        self.properties.fail();
        self.events.reset();
        events.push_back(Event::Kill { ctrl: self.id, reason });
    }

    /// A queue is drained and destroyed.
    pub(crate) fn queue_closed(&mut self, qid: u16, events: &mut VecDeque<Event>) {
        self.exchanges.remove(&qid);
        if qid == 0 {
            self.admin_open = false;
            if self.io_queues.is_empty() {
                // Nothing is left to close.
                self.dying = true;
            } else {
                self.kill(KillReason::AdminQueueClosed, events);
            }
            return;
        }
        self.io_queues.remove(&qid);
        if self.properties.is_draining() && self.io_queues.is_empty() {
            self.properties.reset_done();
        }
    }

    /// Tells the host of something, if it enabled the controller and the notice.
    pub(crate) fn notify(&mut self, notice: Notice, events: &mut VecDeque<Event>) {
        let wanted = notice.enable_bit().is_none_or(|bit| self.features.notice_enabled(bit));
        if self.dying || !self.properties.is_ready() || !wanted {
            return;
        }
        if let Some(fired) = self.events.raise(notice) {
            events.push_back(self.fired(fired));
        }
    }

    /// The host read the log of a notice.
    pub(crate) fn log_read(&mut self, notice: Notice, offset: u64, retain: bool, events: &mut VecDeque<Event>) {
        if let Some(fired) = self.events.log_read(notice, offset, retain) {
            events.push_back(self.fired(fired));
        }
    }

    fn fired(&self, fired: Fired) -> Event {
        Event::CompleteHeld { ctrl: self.id, completion: Completion::with_result(fired.cid, fired.dword0.into()) }
    }

    /// CC.EN went 1 to 0.
    pub(crate) fn reset(&mut self, config: &RegistryConfig, events: &mut VecDeque<Event>) {
        for cid in self.events.reset() {
            events.push_back(Event::CompleteHeld {
                ctrl: self.id,
                completion: Completion::failed(cid, Status::ABORT_REQUESTED),
            });
        }
        self.features.reset(&self.feature_context(config));
        self.changed.clear();
        self.reservation_log.clear();
        if self.io_queues.is_empty() {
            self.properties.reset_done();
        } else {
            events.push_back(Event::CloseIoQueues { ctrl: self.id });
        }
    }

    /// How long it may be silent. A host may send a Keep Alive just inside each timeout, and with traffic based keep
    /// alive any command resets the timer only when it expires, so silence is certain after twice the timeout alone.
    pub(crate) fn patience(&self, config: &RegistryConfig) -> Option<Duration> {
        match self.features.kato() {
            Some(kato) => Some(kato.saturating_mul(2)),
            None if self.is_discovery() => config.discovery_idle,
            None => None,
        }
    }

    /// When it expires if nothing more is heard of it. While its host proves itself, on whatever queue, that has a time of its own:
    /// the host is silent while it computes, and the Linux host sends no Keep Alive before all of its queues are there.
    pub(crate) fn deadline(&self, config: &RegistryConfig) -> Option<Duration> {
        if self.dying {
            return None;
        }
        self.authentication_deadline()
            .or_else(|| self.patience(config).map(|patience| self.last_activity.saturating_add(patience)))
    }
}
