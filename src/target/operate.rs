//! What an operator changes while a target runs: typed methods of [`Target`].
//!
//! A method returns when the change holds on every reactor; one that is refused leaves everything as it was.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use nvme::Nqn;
use nvme::registry::{AnaState, ConfigError, Drain, Registry, SubsystemId, WriteProtection};

use super::builder::{Target, TargetError};
use super::keeper::Keeper;
use super::live::OpenNamespace;
use super::locks::NamespaceKey;
use super::shared::{Control, ControlMessage, Message, Shared};
use super::ticket::Ticket;
use crate::rdma::Provider;

/// A running target, whatever its provider.
pub(crate) trait Running: Send + Sync {
    /// Works on the registry and carries out what follows.
    fn change(&self, work: &mut dyn FnMut(&mut Registry));

    /// Works on all that changes by the control plane, and carries out what follows.
    fn control(&self, work: &mut dyn FnMut(&mut Control));

    /// Opens a namespace on every reactor; how many answers there will be.
    fn open(&self, order: &OpenNamespace) -> usize;

    /// Has every reactor let go of the ticket when it has closed a removed namespace's storage.
    fn retire(&self, key: NamespaceKey, ticket: &Ticket);

    /// Has every thread let go of the ticket in its next round.
    fn turns(&self, ticket: Ticket);

    /// Tells the control thread.
    fn tell(&self, message: ControlMessage);

    /// The target's clock.
    fn now(&self) -> Duration;

    /// Waits until every reactor acts on the last change and its commands that `drain` names have ended.
    fn settle(&self, key: NamespaceKey, drain: Drain);

    /// Puts what a namespace remembers onto stable storage, where there is a place for it.
    fn keep(&self, key: NamespaceKey) -> Result<(), TargetError>;

    /// What namespaces remember through power loss.
    fn keeper(&self) -> Option<&Keeper>;
}

impl<P: Provider> Running for Arc<Shared<P>> {
    fn change(&self, work: &mut dyn FnMut(&mut Registry)) {
        self.with_control(|control| work(&mut control.registry));
    }

    fn control(&self, work: &mut dyn FnMut(&mut Control)) {
        self.with_control(work);
    }

    fn open(&self, order: &OpenNamespace) -> usize {
        self.broadcast(|| Message::OpenNamespace(order.clone()));
        self.reactors.len()
    }

    fn retire(&self, key: NamespaceKey, ticket: &Ticket) {
        self.broadcast(|| Message::Retire { key, ticket: ticket.clone() });
    }

    fn turns(&self, ticket: Ticket) {
        self.broadcast(|| Message::Turns(ticket.clone()));
        self.control_mail.send(ControlMessage::Turns(ticket));
    }

    fn tell(&self, message: ControlMessage) {
        self.control_mail.send(message);
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn settle(&self, key: NamespaceKey, drain: Drain) {
        let (done, settled) = channel();
        Shared::settle(self, key, drain, move || {
            let _ = done.send(());
        });
        let _ = settled.recv();
    }

    fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_ref()
    }

    fn keep(&self, key: NamespaceKey) -> Result<(), TargetError> {
        let (done, kept) = channel();
        Shared::keep(self, key, move |kept| {
            let _ = done.send(kept);
        });
        if kept.recv().unwrap_or(false) {
            return Ok(());
        }
        let remedy = "see the log, and repair the folder that state_dir names";
        Err(TargetError::new(format!("namespace {}", key.1), "its state could not be kept", remedy))
    }
}

impl Target {
    /// Whether every thread of the target does a round within `limit`: what a watchdog is fed on. A thread that hangs, or is
    /// gone, makes it `false`.
    pub fn turns(&self, limit: Duration) -> bool {
        let (done, turned) = channel();
        self.running.turns(Ticket::new(move || {
            let _ = done.send(());
        }));
        turned.recv_timeout(limit).is_ok()
    }

    /// Write protects a namespace, or lets it be written again, as a host can with Set Features. Returns when writes in
    /// progress have ended.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn set_write_protection(&self, nqn: &str, nsid: u32, state: WriteProtection) -> Result<(), TargetError> {
        let key = (self.subsystem(nqn)?, nsid);
        self.registry(nqn, |registry| registry.set_write_protection(key.0, nsid, state))?;
        self.running.settle(key, Drain::Writes);
        self.running.keep(key)
    }

    /// Says how well a group of a subsystem's namespaces is reached through a listener, or through all of them. Returns when that
    /// holds; where the group is not to be reached any more, when the commands in progress on it have ended.
    ///
    /// # Errors
    /// There is no such subsystem, group or listener.
    pub fn set_ana_state(
        &self,
        nqn: &str,
        group: u32,
        listener: Option<SocketAddr>,
        state: AnaState,
    ) -> Result<(), TargetError> {
        let (id, now) = (self.subsystem(nqn)?, self.running.now());
        let nsids = self.registry(nqn, |registry| {
            registry.set_ana_state(id, group, listener, state, now)?;
            Ok(registry.namespaces_of_group(id, group))
        })?;
        let reached = matches!(state, AnaState::Optimized | AnaState::NonOptimized);
        let drain = if reached { Drain::Nothing } else { Drain::Everything };
        nsids.into_iter().for_each(|nsid| self.running.settle((id, nsid), drain.clone()));
        Ok(())
    }

    /// Moves a namespace to another ANA group.
    ///
    /// # Errors
    /// There is no such subsystem, namespace or group.
    pub fn set_ana_group(&self, nqn: &str, nsid: u32, group: u32) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        self.registry(nqn, |registry| registry.set_ana_group(id, nsid, group))?;
        self.running.settle((id, nsid), Drain::Nothing);
        Ok(())
    }

    fn subsystem(&self, nqn: &str) -> Result<SubsystemId, TargetError> {
        self.registry(nqn, |registry| {
            let found = Nqn::lenient(nqn).ok().and_then(|nqn| registry.find_subsystem(&nqn));
            found.ok_or(ConfigError::NoSuchSubsystem)
        })
    }

    /// Works on the registry; a refusal is about `object`.
    fn registry<T>(
        &self,
        object: &str,
        work: impl Fn(&mut Registry) -> Result<T, ConfigError>,
    ) -> Result<T, TargetError> {
        let mut outcome = Err(ConfigError::NoSuchSubsystem);
        self.running.change(&mut |registry| outcome = work(registry));
        outcome.map_err(|error| TargetError::new(object, error, ""))
    }
}
