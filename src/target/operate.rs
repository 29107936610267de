//! What an operator changes while a target runs: typed methods of [`Target`].
//!
//! A method returns when the change holds on every reactor; one that is refused leaves everything as it was.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use nvme::Nqn;
use nvme::auth::HostAuth;
use nvme::registry::{Admission, AnaState, ConfigError, Drain, Referral, Registry, SubsystemId, WriteProtection};

use super::builder::{AnaSpec, Target, TargetError, expand_states};
use super::causes::Disconnect;
use super::keeper::Keeper;
use super::limits::Limits;
use super::live::OpenNamespace;
use super::locks::NamespaceKey;
use super::namespace::Instance;
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
    fn retire(&self, instance: Instance, ticket: &Ticket);

    /// Has every thread let go of the ticket in its next round.
    fn turns(&self, ticket: Ticket);

    /// Keeps histograms of latencies from now on, or not.
    fn set_timing(&self, on: bool);

    /// Whether they are kept.
    fn is_timing(&self) -> bool;

    /// The latest ends of queues.
    fn disconnects(&self) -> Vec<Disconnect>;

    /// Tells the control thread.
    fn tell(&self, message: ControlMessage);

    /// The target's clock.
    fn now(&self) -> Duration;

    /// Has commands that wait for their turn looked at again.
    fn limits_changed(&self);

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

    fn retire(&self, instance: Instance, ticket: &Ticket) {
        self.broadcast(|| Message::Retire { instance, ticket: ticket.clone() });
    }

    fn turns(&self, ticket: Ticket) {
        self.broadcast(|| Message::Turns(ticket.clone()));
        self.control_mail.send(ControlMessage::Turns(ticket));
    }

    fn set_timing(&self, on: bool) {
        self.broadcast_timing(on);
    }

    fn is_timing(&self) -> bool {
        self.timing.load(Ordering::Acquire)
    }

    fn disconnects(&self) -> Vec<Disconnect> {
        self.ends.disconnects(self.clock.now())
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

    fn limits_changed(&self) {
        self.broadcast(|| Message::LimitsChanged);
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

    /// Write protects a namespace, or lets it be written again, as a host can with Set Features where there is a folder for
    /// states. Without one it holds until the target ends. Returns when writes in progress have ended.
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
        self.set_ana_states(nqn, &[], &[AnaSpec { group, listener, state }])
    }

    /// The same for many: of the first ones those that can be set, and of the others all, or none of either.
    pub(crate) fn set_ana_states(
        &self,
        nqn: &str,
        possible: &[AnaSpec],
        needed: &[AnaSpec],
    ) -> Result<(), TargetError> {
        let (id, now) = (self.subsystem(nqn)?, self.running.now());
        let expand = |states: &[AnaSpec]| expand_states(states, |address| self.live.addresses(address));
        let (possible, needed) = (expand(possible), expand(needed));
        let set = self.registry(nqn, |registry| {
            let check = |registry: &Registry, one: &AnaSpec| registry.check_ana_state(one.group, one.listener);
            needed.iter().try_for_each(|one| check(registry, one))?;
            let mut set = Vec::new();
            for one in possible.iter().filter(|one| check(registry, one).is_ok()).chain(&needed).collect::<Vec<_>>() {
                registry.set_ana_state(id, one.group, one.listener, one.state, now)?;
                set.push((registry.namespaces_of_group(id, one.group), one.state));
            }
            Ok(set)
        })?;
        for (nsids, state) in set {
            let reached = matches!(state, AnaState::Optimized | AnaState::NonOptimized);
            let drain = if reached { Drain::Nothing } else { Drain::Everything };
            nsids.into_iter().for_each(|nsid| self.running.settle((id, nsid), drain.clone()));
        }
        Ok(())
    }

    /// Has a host prove who it is, from its next connection or its next exchange on; `None` asks it no more. Connections stay:
    /// a host that is to use a new secret authenticates again by itself, or is disconnected.
    ///
    /// # Errors
    /// The subsystem is not served, or the host's NQN breaks a rule.
    pub fn set_host_auth(&self, nqn: &str, host: &str, auth: Option<HostAuth>) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        self.registry(host, |registry| registry.set_host_auth(id, host, auth.clone()))
    }

    /// What is asked of a host; `None` when it need not prove who it is.
    ///
    /// # Errors
    /// The subsystem is not served, or the host's NQN breaks a rule.
    pub fn host_auth(&self, nqn: &str, host: &str) -> Result<Option<HostAuth>, TargetError> {
        let id = self.subsystem(nqn)?;
        self.registry(host, |registry| registry.host_auth(id, host).map(Option::<&HostAuth>::cloned))
    }

    /// Says which hosts see a namespace; `None` = all of the subsystem. Returns when that holds and, where a host may see it no
    /// more, the commands in progress on it have ended.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or an NQN breaks a rule.
    pub fn set_namespace_hosts(&self, nqn: &str, nsid: u32, hosts: Option<&[String]>) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        self.registry(nqn, |registry| registry.set_namespace_hosts(id, nsid, hosts))?;
        self.running.settle((id, nsid), Drain::Everything);
        Ok(())
    }

    /// Says how many controllers a subsystem has at a time. Those that are too many stay.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn set_admission(&self, nqn: &str, admission: Admission) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        self.registry(nqn, |registry| registry.set_admission(id, admission))
    }

    /// Says what all hosts together may do with a namespace per second.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn set_namespace_limits(&self, nqn: &str, nsid: u32, limits: Limits) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        let mut found = false;
        self.running.control(&mut |control| {
            if let Some(published) = control.published.get(&(id, nsid)) {
                published.limiter.set(limits);
                found = true;
            }
        });
        if !found {
            return Err(TargetError::config(nqn, ConfigError::NoSuchNamespace(nsid)));
        }
        self.running.limits_changed();
        Ok(())
    }

    /// Says what a host may do with a subsystem's namespaces per second, through all of its queues.
    ///
    /// # Errors
    /// There is no such subsystem, or the host's NQN breaks a rule.
    pub fn set_host_limits(&self, nqn: &str, host: &str, limits: Limits) -> Result<(), TargetError> {
        let id = self.subsystem(nqn)?;
        let refuse = |rule| TargetError::config(nqn, ConfigError::HostNqn(host.to_owned(), rule));
        let name = Nqn::lenient(host).map_err(refuse)?;
        self.running.control(&mut |control| control.limiter(id, name.clone()).set(limits));
        self.running.limits_changed();
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

    /// Tells hosts of another discovery service; those with a discovery controller are told at once.
    ///
    /// # Errors
    /// No host can connect to its address, or hosts are told of it already.
    pub fn add_referral(&self, referral: Referral) -> Result<(), TargetError> {
        self.registry(&format!("referral to {}", referral.addr), |registry| registry.add_referral(referral.clone()))
    }

    /// Tells hosts no more of the discovery service of that address and name.
    ///
    /// # Errors
    /// They are not told of it.
    pub fn remove_referral(&self, referral: &Referral) -> Result<(), TargetError> {
        let (addr, nqn) = (referral.addr, referral.nqn.as_deref());
        self.registry(&format!("referral to {addr}"), |registry| registry.remove_referral(addr, nqn))
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
        outcome.map_err(|error| TargetError::config(object, error))
    }
}
