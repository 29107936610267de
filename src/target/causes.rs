//! Why queues ended: a counter for each of a fixed set of causes, and the latest ends with names.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use nvme::registry::{ControllerId, KillReason};

use super::queue::CloseReason;
use super::reactor::Reactor;
use crate::rdma::{Provider, WcStatus};

/// Declares the causes with their words for labels.
macro_rules! causes {
    ($($(#[$doc:meta])* $cause:ident = $name:literal),+ $(,)?) => {
        /// Why a queue ended.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Cause { $($(#[$doc])* $cause),+ }

        impl Cause {
            /// All of them, in order.
            pub const ALL: [Self; [$(Self::$cause),+].len()] = [$(Self::$cause),+];

            /// For labels.
            pub fn name(self) -> &'static str {
                match self { $(Self::$cause => $name),+ }
            }
        }
    };
}

causes! {
    /// The host ended the connection.
    HostDisconnected = "host_disconnected",
    /// The host sent a Disconnect command, or the end of its authentication.
    DisconnectCommand = "disconnect_command",
    /// The connection broke: the device or the connection manager says so.
    ConnectionLost = "connection_lost",
    /// The RDMA device went.
    DeviceRemoved = "device_removed",
    /// A work request failed: a local buffer was too short.
    LocalLength = "transport_local_length",
    /// A work request failed: a local key was wrong.
    LocalProtection = "transport_local_protection",
    /// Work requests were flushed: the queue pair failed before.
    Flushed = "transport_flushed",
    /// A work request failed: the host found it invalid.
    RemoteInvalidRequest = "transport_remote_invalid_request",
    /// A work request failed: the host's key, bound or permission refused it.
    RemoteAccess = "transport_remote_access",
    /// A work request failed: the host could not carry it out.
    RemoteOperation = "transport_remote_operation",
    /// The host's device did not answer.
    RetryExceeded = "transport_retry_exceeded",
    /// The host had no receive posted for too long.
    RnrRetryExceeded = "transport_rnr_retry_exceeded",
    /// A work request failed with a status of the device's own.
    OtherStatus = "transport_other",
    /// A capsule broke the transport's rules.
    RefusedCapsule = "refused_capsule",
    /// The host reset the controller.
    ControllerReset = "controller_reset",
    /// The host shut the controller down.
    ControllerShutdown = "controller_shutdown",
    /// Nothing was heard of the host for twice its keep alive timeout.
    KeepAliveExpired = "keep_alive_expired",
    /// Its admin queue ended.
    AdminQueueClosed = "admin_queue_closed",
    /// The operator took the host off the list.
    HostRemoved = "host_removed",
    /// The operator removed the subsystem.
    SubsystemRemoved = "subsystem_removed",
    /// The host did not authenticate in time.
    AuthenticationTimedOut = "authentication_timed_out",
    /// Its subsystem had as many controllers as it may when its host had proven itself.
    TooManyControllers = "too_many_controllers",
    /// The transport asked for the end of the controller.
    Transport = "transport",
    /// The operator disconnected the host.
    Operator = "operator",
    /// The same host connected again and took its place.
    Replaced = "replaced",
    /// A host reset the NVM subsystem.
    SubsystemReset = "subsystem_reset",
    /// No Connect command came, or none that succeeded.
    NeverConnected = "never_connected",
    /// The host took no answers, or gave no data, while others waited for the buffers of its commands.
    KeepsBuffers = "keeps_buffers",
    /// The target stops.
    TargetStops = "target_stops",
    /// The connection could not be accepted.
    AcceptFailed = "accept_failed",
}

impl CloseReason {
    /// How much it tells: what follows from something else tells less than what it follows from.
    pub(crate) fn tells(self) -> u8 {
        match self {
            Self::WorkFailed(_, WcStatus::Flushed) => 0,
            Self::ConnectionLost => 1,
            _ => 2,
        }
    }

    pub(crate) fn cause(self) -> Cause {
        match self {
            Self::HostDisconnected => Cause::HostDisconnected,
            Self::QueueDisconnect => Cause::DisconnectCommand,
            Self::ConnectionLost => Cause::ConnectionLost,
            Self::DeviceRemoved => Cause::DeviceRemoved,
            Self::WorkFailed(_, status) => match status {
                WcStatus::LocalLength => Cause::LocalLength,
                WcStatus::LocalProtection => Cause::LocalProtection,
                WcStatus::Flushed => Cause::Flushed,
                WcStatus::RemoteInvalidRequest => Cause::RemoteInvalidRequest,
                WcStatus::RemoteAccess => Cause::RemoteAccess,
                WcStatus::RemoteOperation => Cause::RemoteOperation,
                WcStatus::RetryExceeded => Cause::RetryExceeded,
                WcStatus::RnrRetryExceeded => Cause::RnrRetryExceeded,
                WcStatus::Success | WcStatus::Other(_) => Cause::OtherStatus,
            },
            Self::KeepsBuffers => Cause::KeepsBuffers,
            Self::Protocol(_) => Cause::RefusedCapsule,
            Self::ControllerReset => Cause::ControllerReset,
            Self::ControllerShutdown => Cause::ControllerShutdown,
            Self::Killed(reason) => match reason {
                KillReason::KeepAliveExpired => Cause::KeepAliveExpired,
                KillReason::AdminQueueClosed => Cause::AdminQueueClosed,
                KillReason::HostRemoved => Cause::HostRemoved,
                KillReason::SubsystemRemoved => Cause::SubsystemRemoved,
                KillReason::AuthenticationTimedOut => Cause::AuthenticationTimedOut,
                KillReason::TooMany => Cause::TooManyControllers,
                KillReason::Transport => Cause::Transport,
                KillReason::Operator => Cause::Operator,
                KillReason::Replaced => Cause::Replaced,
                KillReason::SubsystemReset => Cause::SubsystemReset,
            },
            Self::NeverConnected => Cause::NeverConnected,
            Self::TargetStops => Cause::TargetStops,
            Self::AcceptFailed => Cause::AcceptFailed,
        }
    }
}

/// Queues that ended, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends([u64; Cause::ALL.len()]);

impl Ends {
    /// Those of one cause.
    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }
}

/// Queues of one controller, or of one peer without a controller, that ended for one cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disconnect {
    /// Time since then.
    pub ago: Duration,
    /// Where the host is.
    pub peer: SocketAddr,
    /// NQN of the host; `None`: it never got as far as a Connect command.
    pub hostnqn: Option<String>,
    /// NQN of the subsystem and controller ID, where there was one.
    pub controller: Option<(String, u16)>,
    /// Why.
    pub cause: Cause,
    /// The same in a sentence, of the first queue.
    pub detail: String,
    /// How many queues.
    pub queues: u32,
}

/// How many ends are remembered with names.
const REMEMBERED: usize = 64;

/// Ends of the same kind this close to each other are one.
const TOGETHER: Duration = Duration::from_secs(10);

/// Counts and remembers ends.
#[derive(Debug, Default)]
pub(crate) struct EndBook {
    counts: [AtomicU64; Cause::ALL.len()],
    /// With the time of each, and whose controller it was.
    latest: Mutex<VecDeque<(Option<ControllerId>, Disconnect)>>,
}

impl EndBook {
    pub(crate) fn counts(&self) -> Ends {
        Ends(std::array::from_fn(|at| self.counts[at].load(Ordering::Relaxed)))
    }

    fn latest(&self) -> MutexGuard<'_, VecDeque<(Option<ControllerId>, Disconnect)>> {
        self.latest.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The latest first.
    pub(crate) fn disconnects(&self, now: Duration) -> Vec<Disconnect> {
        let latest = self.latest();
        let ago = |one: &Disconnect| Disconnect { ago: now.saturating_sub(one.ago), ..one.clone() };
        latest.iter().rev().map(|(_, one)| ago(one)).collect()
    }

    /// `end.ago` is the time of the end.
    fn note(&self, ctrl: Option<ControllerId>, end: Disconnect) {
        self.counts[end.cause as usize].fetch_add(1, Ordering::Relaxed);
        let mut latest = self.latest();
        let same = |(other, one): &&mut (Option<ControllerId>, Disconnect)| {
            *other == ctrl
                && one.cause == end.cause
                && one.peer.ip() == end.peer.ip()
                && end.ago.saturating_sub(one.ago) < TOGETHER
        };
        if let Some((_, one)) = latest.iter_mut().rev().find(same) {
            one.queues += 1;
            return;
        }
        if latest.len() == REMEMBERED {
            latest.pop_front();
        }
        latest.push_back((ctrl, end));
    }
}

impl<P: Provider> Reactor<P> {
    /// A queue pair is destroyed.
    pub(crate) fn note_end(&self, at: u32, now: Duration) {
        let queue = &self.queues[at as usize];
        let Some(reason) = queue.reason else { return };
        let ctrl = queue.association.as_ref().map(|association| association.ctrl);
        let info = ctrl.and_then(|ctrl| self.shared.with_control(|control| control.registry.controller(ctrl)));
        let end = Disconnect {
            ago: now,
            peer: queue.peer,
            hostnqn: info.as_ref().map(|info| info.hostnqn.to_string()),
            controller: info.as_ref().map(|info| (info.subnqn.to_string(), info.cntlid)),
            cause: reason.cause(),
            detail: reason.to_string(),
            queues: 1,
        };
        self.shared.ends.note(ctrl, end);
    }
}

impl super::Target {
    /// The latest ends of queues, those of one controller and cause together, the latest first; 64 at most.
    pub fn disconnects(&self) -> Vec<Disconnect> {
        self.running.disconnects()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(at: u64, cause: Cause, peer: &str) -> Disconnect {
        let peer = peer.parse().unwrap();
        let (hostnqn, controller, detail) = (None, None, String::new());
        Disconnect { ago: Duration::from_secs(at), peer, hostnqn, controller, cause, detail, queues: 1 }
    }

    #[test]
    fn causes_have_names_of_their_own() {
        let mut names: Vec<&str> = Cause::ALL.iter().map(|cause| cause.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Cause::ALL.len());
        assert!(Cause::ALL.iter().enumerate().all(|(at, cause)| *cause as usize == at));
    }

    #[test]
    fn queues_of_one_end_are_one_line_and_lines_are_limited() {
        let book = EndBook::default();
        for port in 1..=5 {
            book.note(None, end(10, Cause::RetryExceeded, &format!("192.0.2.1:{port}")));
        }
        book.note(None, end(11, Cause::RetryExceeded, "192.0.2.2:1"));
        book.note(None, end(30, Cause::RetryExceeded, "192.0.2.1:1"));
        let seen: Vec<_> =
            book.disconnects(Duration::from_secs(31)).iter().map(|one| (one.ago.as_secs(), one.queues)).collect();
        assert_eq!(seen, [(1, 1), (20, 1), (21, 5)]);
        (0..100).for_each(|at| book.note(None, end(at * 20, Cause::Operator, "192.0.2.3:1")));
        assert_eq!(book.disconnects(Duration::ZERO).len(), REMEMBERED);
        assert_eq!(book.counts().of(Cause::Operator), 100);
        assert_eq!(book.counts().of(Cause::RetryExceeded), 7);
        assert_eq!(book.counts().of(Cause::TargetStops), 0);
    }
}
