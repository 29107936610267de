//! The control plane: subsystems, namespaces, hosts and listeners come and go, and the hosts are told.

use core::net::SocketAddr;

use super::config::{Admission, ConfigError, Listener, NamespaceConfig, Referral, SubsystemConfig};
use super::controller::Controller;
use super::discovery::Referred;
use super::subsystem::{Audience, Namespace, Presence, Subsystem, host_nqn};
use super::{Change, ControllerId, Event, KillReason, Registry, SubsystemId, SubsystemInfo};
use crate::aer::Notice;
use crate::nqn::Nqn;

/// A namespace that was taken away and may come back. Until it is given back, its hosts are told that it is not ready.
#[derive(Debug)]
#[must_use]
pub struct TakenNamespace {
    id: SubsystemId,
    nsid: u32,
}

/// A subsystem that was taken away and may come back. Until it is given back, its hosts are told that it is not ready.
#[derive(Debug)]
#[must_use]
pub struct TakenSubsystem {
    id: SubsystemId,
}

impl Registry {
    /// Adds a subsystem without namespaces.
    ///
    /// # Errors
    /// Its configuration breaks a rule, or its NQN exists.
    pub fn add_subsystem(&mut self, config: &SubsystemConfig) -> Result<SubsystemId, ConfigError> {
        let subsystem = Subsystem::new(config, &self.config)?;
        if self.find_subsystem(&subsystem.nqn).is_some() || subsystem.nqn == self.discovery_nqn {
            return Err(ConfigError::DuplicateNqn(config.nqn.clone()));
        }
        let id = SubsystemId(self.next_subsystem);
        self.next_subsystem = self.next_subsystem.checked_add(1).expect("fewer than 2^32 subsystems in one process");
        self.subsystems.insert(id, subsystem);
        self.discovery_changed();
        Ok(id)
    }

    /// Removes a subsystem; its controllers are killed.
    ///
    /// # Errors
    /// There is none.
    pub fn remove_subsystem(&mut self, id: SubsystemId) -> Result<(), ConfigError> {
        let taken = self.take_subsystem(id)?;
        self.subsystem_gone(taken);
        Ok(())
    }

    /// Takes a subsystem away with all that it is. Hosts are not told: [`Self::subsystem_gone`] does that, and
    /// [`Self::put_subsystem_back`] makes it what it was, its controllers included. Until then no host connects to one of its
    /// name, and commands on its namespaces are told to come again.
    ///
    /// # Errors
    /// There is none.
    pub fn take_subsystem(&mut self, id: SubsystemId) -> Result<TakenSubsystem, ConfigError> {
        let subsystem = self.subsystem_mut(id)?;
        if !subsystem.is_served() {
            return Err(ConfigError::NoSuchSubsystem);
        }
        subsystem.presence = Presence::Away;
        self.publish_all(id);
        Ok(TakenSubsystem { id })
    }

    /// A subsystem that was taken away will not come back: its controllers are killed.
    pub fn subsystem_gone(&mut self, taken: TakenSubsystem) {
        let TakenSubsystem { id } = taken;
        self.subsystems.remove(&id);
        self.kill_where(KillReason::SubsystemRemoved, |controller| controller.association.subsystem == id);
        self.discovery_changed();
    }

    /// Puts back a subsystem that was taken away. Whoever checks commands opens its namespaces anew, and then says so by
    /// [`Self::subsystem_is_back`].
    ///
    /// # Errors
    /// Another one of its NQN came in the meantime: this one is to be gone.
    pub fn put_subsystem_back(&mut self, taken: &TakenSubsystem) -> Result<(), ConfigError> {
        let nqn = self.subsystem_mut(taken.id)?.nqn.clone();
        if self.find_subsystem(&nqn).is_some() {
            return Err(ConfigError::DuplicateNqn(nqn.to_string()));
        }
        self.subsystem_mut(taken.id)?.presence = Presence::Returning;
        Ok(())
    }

    /// The namespaces of a subsystem that was put back are open everywhere.
    pub fn subsystem_is_back(&mut self, taken: TakenSubsystem) {
        let TakenSubsystem { id } = taken;
        if let Some(subsystem) = self.subsystems.get_mut(&id) {
            subsystem.presence = Presence::Served;
        }
        self.publish_all(id);
    }

    fn publish_all(&mut self, id: SubsystemId) {
        let Self { subsystems, events, .. } = self;
        let namespaces = subsystems.get(&id).into_iter().flat_map(|subsystem| subsystem.namespaces.keys());
        events.extend(namespaces.map(|nsid| Event::Publish { subsystem: id, nsid: *nsid }));
    }

    /// The subsystems but the discovery one.
    pub fn subsystems(&self) -> impl Iterator<Item = SubsystemInfo> + '_ {
        self.subsystems.iter().filter(|(_, subsystem)| subsystem.is_served()).map(|(id, subsystem)| SubsystemInfo {
            id: *id,
            nqn: subsystem.nqn.clone(),
            allow_any_host: subsystem.allow_any_host,
            hosts: subsystem.hosts.iter().cloned().collect(),
        })
    }

    /// The subsystem of this name.
    #[must_use]
    pub fn find_subsystem(&self, nqn: &Nqn) -> Option<SubsystemId> {
        let mut served = self.subsystems.iter().filter(|(_, subsystem)| subsystem.is_served());
        served.find(|(_, subsystem)| subsystem.nqn == *nqn).map(|(id, _)| *id)
    }

    /// Adds a namespace. Publish [`Self::namespace_views`] before the hosts see the notice, that is before events are
    /// polled.
    ///
    /// # Errors
    /// Its configuration breaks a rule, or its identifier or UUID exists.
    pub fn add_namespace(&mut self, id: SubsystemId, config: NamespaceConfig) -> Result<(), ConfigError> {
        let nsid = config.nsid;
        self.insert_namespace(id, config)?;
        self.namespace_came(id, nsid);
        Ok(())
    }

    /// Adds a namespace. Hosts that ask see it, and are not told: [`Self::namespace_came`] does that.
    ///
    /// # Errors
    /// Its configuration breaks a rule, or its identifier or UUID exists.
    pub fn insert_namespace(&mut self, id: SubsystemId, config: NamespaceConfig) -> Result<(), ConfigError> {
        let mut namespace = Namespace::new(config, self.config.max_namespaces)?;
        self.check_identity(id, &namespace.config)?;
        namespace.audience = self.audience(namespace.config.hosts.as_deref())?;
        let nsid = namespace.config.nsid;
        self.subsystem_mut(id)?.namespaces.insert(nsid, namespace);
        self.events.push_back(Event::Publish { subsystem: id, nsid });
        Ok(())
    }

    /// A namespace that was inserted stays: hosts are told.
    pub fn namespace_came(&mut self, id: SubsystemId, nsid: u32) {
        self.namespace_changed(id, nsid);
    }

    /// Removes a namespace. New commands must be refused (publish the views) before what is outstanding is drained.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn remove_namespace(&mut self, id: SubsystemId, nsid: u32) -> Result<(), ConfigError> {
        let taken = self.take_namespace(id, nsid)?;
        self.namespace_gone(taken);
        Ok(())
    }

    /// Takes a namespace away with all that it remembers: reservations, protection, ANA group. Hosts are not told:
    /// [`Self::namespace_gone`] does that, and [`Self::put_namespace_back`] makes it what it was. Until then commands on its
    /// NSID are told to come again, whatever else comes there.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or one of this identifier was taken away already.
    pub fn take_namespace(&mut self, id: SubsystemId, nsid: u32) -> Result<TakenNamespace, ConfigError> {
        let subsystem = self.subsystem_mut(id)?;
        if subsystem.away.contains_key(&nsid) {
            return Err(ConfigError::NoSuchNamespace(nsid));
        }
        let namespace = subsystem.namespaces.remove(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?;
        subsystem.away.insert(nsid, Some(namespace));
        self.events.push_back(Event::Publish { subsystem: id, nsid });
        Ok(TakenNamespace { id, nsid })
    }

    /// A namespace that was taken away will not come back: hosts are told.
    pub fn namespace_gone(&mut self, taken: TakenNamespace) {
        let TakenNamespace { id, nsid } = taken;
        let away = self.subsystems.get_mut(&id).and_then(|subsystem| subsystem.away.remove(&nsid));
        let audience = away.flatten().map(|namespace| namespace.audience);
        self.namespace_changed_for(id, nsid, |host| audience.as_ref().is_some_and(|audience| audience.sees(host)));
    }

    /// Removes a namespace that no host was told of.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn withdraw_namespace(&mut self, id: SubsystemId, nsid: u32) -> Result<(), ConfigError> {
        let namespaces = &mut self.subsystem_mut(id)?.namespaces;
        namespaces.remove(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?;
        self.events.push_back(Event::Publish { subsystem: id, nsid });
        Ok(())
    }

    /// Puts back a namespace that was taken away. Whoever checks commands opens it anew, and then says so by
    /// [`Self::namespace_is_back`].
    ///
    /// # Errors
    /// Its subsystem is gone, or its identifier or UUID came to another one in the meantime: it is to be gone.
    pub fn put_namespace_back(&mut self, taken: &TakenNamespace) -> Result<(), ConfigError> {
        let TakenNamespace { id, nsid } = *taken;
        let away = self.subsystem_mut(id)?.away.get(&nsid).and_then(Option::as_ref);
        let config = away.ok_or(ConfigError::NoSuchNamespace(nsid))?.config.clone();
        self.check_identity(id, &config)?;
        let Subsystem { namespaces, away, .. } = self.subsystem_mut(id)?;
        namespaces.extend(away.get_mut(&nsid).and_then(Option::take).map(|namespace| (nsid, namespace)));
        Ok(())
    }

    /// A namespace that was put back is open everywhere.
    pub fn namespace_is_back(&mut self, taken: TakenNamespace) {
        let TakenNamespace { id, nsid } = taken;
        if let Some(subsystem) = self.subsystems.get_mut(&id) {
            subsystem.away.remove(&nsid);
        }
        self.events.push_back(Event::Publish { subsystem: id, nsid });
    }

    /// Whether a namespace of these identifiers may come.
    fn check_identity(&self, id: SubsystemId, config: &NamespaceConfig) -> Result<(), ConfigError> {
        let subsystem = self.subsystems.get(&id).ok_or(ConfigError::NoSuchSubsystem)?;
        if subsystem.namespaces.contains_key(&config.nsid) {
            return Err(ConfigError::DuplicateNsid(config.nsid));
        }
        // Hosts know a disk by its identifiers, across subsystems too.
        let served = self.subsystems.values().filter(|subsystem| subsystem.is_served());
        let mut others = served.flat_map(|subsystem| subsystem.namespaces.values());
        if others.any(|other| other.same_identity(config)) {
            return Err(ConfigError::DuplicateUuid(config.uuid));
        }
        Ok(())
    }

    /// Changes the size of a namespace.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or the size is not possible.
    pub fn resize_namespace(&mut self, id: SubsystemId, nsid: u32, blocks: u64) -> Result<(), ConfigError> {
        self.subsystem_mut(id)?.namespaces.get_mut(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?.resize(blocks)?;
        self.namespace_changed(id, nsid);
        Ok(())
    }

    /// Says which hosts see a namespace; `None`: all of the subsystem. Commands in progress of those that do not any more are
    /// for the caller to wait for.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or an NQN breaks a rule.
    pub fn set_namespace_hosts(
        &mut self,
        id: SubsystemId,
        nsid: u32,
        hosts: Option<&[String]>,
    ) -> Result<(), ConfigError> {
        self.subsystem_mut(id)?;
        let after = self.audience(hosts)?;
        let namespaces = &mut self.subsystem_mut(id)?.namespaces;
        let namespace = namespaces.get_mut(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?;
        let before = core::mem::replace(&mut namespace.audience, after.clone());
        namespace.config.hosts = hosts.map(<[String]>::to_vec);
        if before != after {
            self.namespace_changed_for(id, nsid, |host| before.sees(host) != after.sees(host));
        }
        Ok(())
    }

    fn audience(&mut self, hosts: Option<&[String]>) -> Result<Audience, ConfigError> {
        Audience::new(hosts, |host| self.known_host(host))
    }

    /// Says how many controllers a subsystem has at a time. Those that are too many stay.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn set_admission(&mut self, id: SubsystemId, admission: Admission) -> Result<(), ConfigError> {
        self.subsystem_mut(id)?.admission = admission;
        Ok(())
    }

    /// Lets a host connect.
    ///
    /// # Errors
    /// There is no such subsystem, or the NQN breaks a rule.
    pub fn allow_host(&mut self, id: SubsystemId, host: &str) -> Result<(), ConfigError> {
        let host = host_nqn(host)?;
        if self.subsystem_mut(id)?.hosts.insert(host) {
            self.discovery_changed();
        }
        Ok(())
    }

    /// Lets a host no longer connect; its controllers are killed unless any host is allowed.
    ///
    /// # Errors
    /// There is no such subsystem, or the NQN breaks a rule.
    pub fn remove_host(&mut self, id: SubsystemId, host: &str) -> Result<(), ConfigError> {
        let host = host_nqn(host)?;
        let subsystem = self.subsystem_mut(id)?;
        subsystem.hosts.remove(&host);
        if !subsystem.allow_any_host {
            self.kill_where(KillReason::HostRemoved, |controller| {
                controller.association.subsystem == id && controller.association.hostnqn == host
            });
            self.discovery_changed();
        }
        Ok(())
    }

    /// Turns "any host may connect" on or off; when it goes off, controllers of hosts that are not listed are killed.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn set_allow_any_host(&mut self, id: SubsystemId, allow: bool) -> Result<(), ConfigError> {
        let subsystem = self.subsystem_mut(id)?;
        subsystem.allow_any_host = allow;
        let hosts = subsystem.hosts.clone();
        if !allow {
            self.kill_where(KillReason::HostRemoved, |controller| {
                controller.association.subsystem == id && !hosts.contains(&controller.association.hostnqn)
            });
        }
        self.discovery_changed();
        Ok(())
    }

    /// Ends an association because the operator says so; the host may connect again. Whether there was one.
    pub fn disconnect(&mut self, ctrl: ControllerId) -> bool {
        let Self { slots, events, .. } = self;
        let Some(controller) = super::tenant_mut(slots, ctrl) else { return false };
        controller.kill(KillReason::Operator, events);
        true
    }

    /// Addresses in the discovery log.
    #[must_use]
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Adds an address to the discovery log.
    ///
    /// # Errors
    /// It is there already.
    pub fn add_listener(&mut self, mut listener: Listener) -> Result<(), ConfigError> {
        if self.listeners.iter().any(|l| l.addr == listener.addr) {
            return Err(ConfigError::DuplicateListener(listener.addr));
        }
        self.assign_port(&mut listener);
        let port = listener.portid;
        self.listeners.push(listener);
        let arrived = self.subsystems.iter_mut().map(|(id, subsystem)| (*id, subsystem.ana.arrive(port)));
        for (id, groups) in arrived.collect::<Vec<_>>() {
            groups.into_iter().for_each(|group| self.ana_changed(id, group));
        }
        self.discovery_changed();
        Ok(())
    }

    /// Takes an address out of the discovery log.
    ///
    /// # Errors
    /// It is not there.
    pub fn remove_listener(&mut self, addr: SocketAddr) -> Result<(), ConfigError> {
        let index = self.listeners.iter().position(|l| l.addr == addr);
        self.listeners.remove(index.ok_or(ConfigError::NoSuchListener(addr))?);
        self.discovery_changed();
        Ok(())
    }

    /// Other discovery services that hosts are told of.
    pub fn referrals(&self) -> impl Iterator<Item = &Referral> {
        self.referrals.iter().map(Referred::config)
    }

    /// Tells hosts of another discovery service.
    ///
    /// # Errors
    /// It breaks a rule, or hosts are told of it already.
    pub fn add_referral(&mut self, referral: Referral) -> Result<(), ConfigError> {
        let referred = Referred::new(referral)?;
        if self.referrals.iter().any(|other| other.leads_where(&referred)) {
            return Err(ConfigError::DuplicateReferral(referred.config().addr));
        }
        self.referrals.push(referred);
        self.discovery_changed();
        Ok(())
    }

    /// Tells hosts no more of the discovery service of this address and name.
    ///
    /// # Errors
    /// They are not told of it.
    pub fn remove_referral(&mut self, addr: SocketAddr, nqn: Option<&str>) -> Result<(), ConfigError> {
        let found = self.referrals.iter().position(|referred| referred.leads_to(addr, nqn));
        self.referrals.remove(found.ok_or(ConfigError::NoSuchReferral(addr))?);
        self.discovery_changed();
        Ok(())
    }

    pub(super) fn subsystem_mut(&mut self, id: SubsystemId) -> Result<&mut Subsystem, ConfigError> {
        self.subsystems.get_mut(&id).ok_or(ConfigError::NoSuchSubsystem)
    }

    /// Publishes a namespace and tells the hosts, also the one that asked for the change: the part of it that knows its disks is
    /// not the one that sent the command.
    pub(super) fn namespace_changed(&mut self, id: SubsystemId, nsid: u32) {
        let namespaces = self.subsystems.get(&id).map(|subsystem| &subsystem.namespaces);
        let audience = namespaces.and_then(|namespaces| namespaces.get(&nsid)).map(|found| found.audience.clone());
        self.namespace_changed_for(id, nsid, |host| audience.as_ref().is_none_or(|audience| audience.sees(host)));
    }

    fn namespace_changed_for(&mut self, id: SubsystemId, nsid: u32, concerned: impl Fn(&Nqn) -> bool) {
        self.events.push_back(Event::Publish { subsystem: id, nsid });
        let grouped = |subsystem: &Subsystem| subsystem.namespaces.get(&nsid).map(|found| found.config.ana_group);
        let regrouped = self.subsystems.get_mut(&id).is_some_and(|subsystem| {
            let group = grouped(subsystem);
            subsystem.ana.place(nsid, group)
        });
        for controller in self.slots.iter_mut().filter_map(|slot| slot.tenant.as_mut()) {
            if controller.association.subsystem == id && concerned(&controller.association.hostnqn) {
                controller.changed.add(nsid);
                controller.notify(Notice::NamespaceAttribute, &mut self.events);
            }
        }
        if regrouped {
            self.notify_ana(id);
        }
    }

    /// Tells the controllers what one of them changed.
    pub(super) fn tell_changes(&mut self) {
        while let Some(change) = self.changes.pop() {
            match change {
                Change::Namespace { subsystem, nsid } => self.namespace_changed(subsystem, nsid),
                Change::Authenticated { ctrl } => self.take_place(ctrl),
                Change::SubsystemReset { subsystem, by } => {
                    if let Some(subsystem) = self.subsystems.get_mut(&subsystem) {
                        subsystem.was_reset = true;
                    }
                    self.kill_where(KillReason::SubsystemReset, |controller| {
                        controller.association.subsystem == subsystem && controller.id != by
                    });
                }
            }
        }
    }

    fn discovery_changed(&mut self) {
        self.genctr = self.genctr.wrapping_add(1);
        for controller in self.slots.iter_mut().filter_map(|slot| slot.tenant.as_mut()) {
            if controller.is_discovery() {
                controller.notify(Notice::DiscoveryLog, &mut self.events);
            }
        }
    }

    pub(super) fn kill_where(&mut self, reason: KillReason, mut condition: impl FnMut(&Controller) -> bool) {
        for controller in self.slots.iter_mut().filter_map(|slot| slot.tenant.as_mut()) {
            if condition(controller) {
                controller.kill(reason, &mut self.events);
            }
        }
    }
}
