//! Ports and how well they reach what: listeners get port identifiers, ANA groups get states, hosts are told.

use core::net::SocketAddr;
use core::time::Duration;

use super::config::{ConfigError, Listener};
use super::{Event, Registry, SubsystemId};
use crate::aer::Notice;
use crate::ana::{AnaState, MAX_GROUPS};

/// Group of namespaces that name none.
pub(super) const DEFAULT_GROUP: u32 = 1;

impl Registry {
    /// Says how well a group of a subsystem is reached through a listener, or through all of them and those to come. What has to end first is for
    /// the caller to wait for: commands in progress on [`Self::namespaces_of_group`].
    ///
    /// # Errors
    /// There is no such subsystem, group or listener.
    pub fn set_ana_state(
        &mut self,
        id: SubsystemId,
        group: u32,
        listener: Option<SocketAddr>,
        state: AnaState,
        now: Duration,
    ) -> Result<(), ConfigError> {
        let ports = self.ports_of_state(group, listener)?;
        let until = now.saturating_add(self.config.ana_transition);
        let ana = &mut self.subsystem_mut(id)?.ana;
        if listener.is_none() {
            ana.set_everywhere(group, state);
        }
        let changed = ports.into_iter().filter(|port| ana.set(*port, group, state, until)).count();
        if changed > 0 {
            self.ana_changed(id, group);
        }
        Ok(())
    }

    /// Whether [`Self::set_ana_state`] takes such a state.
    ///
    /// # Errors
    /// There is no such group or listener.
    pub fn check_ana_state(&self, group: u32, listener: Option<SocketAddr>) -> Result<(), ConfigError> {
        self.ports_of_state(group, listener).map(drop)
    }

    fn ports_of_state(&self, group: u32, listener: Option<SocketAddr>) -> Result<Vec<u16>, ConfigError> {
        check_group(group)?;
        match listener {
            None => Ok(self.listeners.iter().map(|listener| listener.portid).collect()),
            Some(addr) => {
                let found = self.listeners.iter().find(|listener| listener.addr == addr);
                Ok(vec![found.ok_or(ConfigError::NoSuchListener(addr))?.portid])
            }
        }
    }

    /// Moves a namespace to another group.
    ///
    /// # Errors
    /// There is no such subsystem, namespace or group.
    pub fn set_ana_group(&mut self, id: SubsystemId, nsid: u32, group: u32) -> Result<(), ConfigError> {
        check_group(group)?;
        let namespaces = &mut self.subsystem_mut(id)?.namespaces;
        let namespace = namespaces.get_mut(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?;
        if core::mem::replace(&mut namespace.config.ana_group, group) != group {
            self.namespace_changed(id, nsid);
        }
        Ok(())
    }

    /// Namespaces of a group.
    #[must_use]
    pub fn namespaces_of_group(&self, id: SubsystemId, group: u32) -> Vec<u32> {
        let namespaces = self.subsystems.get(&id).map(|subsystem| &subsystem.namespaces);
        let all = namespaces.into_iter().flatten();
        all.filter(|(_, namespace)| namespace.config.ana_group == group).map(|(nsid, _)| *nsid).collect()
    }

    /// The port that a host reached; 0 when its listener is gone.
    #[must_use]
    pub fn port_of(&self, local: SocketAddr) -> u16 {
        let (ip, port) = (local.ip().to_canonical(), local.port());
        let reaches = |listener: &&Listener| {
            let addr = listener.addr.ip().to_canonical();
            let same_family = addr.is_ipv4() == ip.is_ipv4() || !addr.is_ipv4();
            listener.addr.port() == port && (addr == ip || (addr.is_unspecified() && same_family))
        };
        let exact = |listener: &&Listener| listener.addr.ip().to_canonical() == ip;
        let mut candidates = self.listeners.iter().filter(reaches);
        let best = candidates.clone().find(exact).or_else(|| candidates.next());
        best.map_or(0, |listener| listener.portid)
    }

    /// The identifier of a listener's port: the one that the address had before, so that states outlive its absence.
    pub(super) fn assign_port(&mut self, listener: &mut Listener) {
        let next = self.ports.values().copied().max().unwrap_or(0).saturating_add(1);
        let wanted = if listener.portid == 0 { next } else { listener.portid };
        listener.portid = *self.ports.entry(listener.addr).or_insert(wanted);
    }

    /// Transitions that lasted longer than hosts were told.
    pub(super) fn expire_transitions(&mut self, now: Duration) {
        let over: Vec<(SubsystemId, u32)> = self
            .subsystems
            .iter_mut()
            .flat_map(|(id, subsystem)| subsystem.ana.expire(now).into_iter().map(|group| (*id, group)))
            .collect();
        for (id, group) in over {
            self.ana_changed(id, group);
        }
    }

    /// Publishes a group's namespaces and tells the hosts.
    pub(super) fn ana_changed(&mut self, id: SubsystemId, group: u32) {
        for nsid in self.namespaces_of_group(id, group) {
            self.events.push_back(Event::Publish { subsystem: id, nsid });
        }
        self.notify_ana(id);
    }

    pub(super) fn notify_ana(&mut self, id: SubsystemId) {
        for controller in self.slots.iter_mut().filter_map(|slot| slot.tenant.as_mut()) {
            if controller.association.subsystem == id {
                controller.notify(Notice::AsymmetricAccess, &mut self.events);
            }
        }
    }
}

pub(super) fn check_group(group: u32) -> Result<(), ConfigError> {
    if (1..=MAX_GROUPS).contains(&group) { Ok(()) } else { Err(ConfigError::AnaGroup(group)) }
}
