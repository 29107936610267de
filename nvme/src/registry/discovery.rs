//! The discovery log of one host: every subsystem that it may use, at every address that it can be expected to reach, and
//! other discovery services that it is told of.

use core::net::{IpAddr, SocketAddr};

use super::Surroundings;
use super::config::{ConfigError, Listener, Referral, RegistryConfig};
use super::controller::Controller;
use super::subsystem::host_nqn;
use crate::nqn::{DISCOVERY_NQN, Nqn};
use crate::wire::discovery::{Entry, EntryFields, Subtype, page};

/// Another discovery service, checked.
#[derive(Clone, Debug)]
pub(super) struct Referred {
    config: Referral,
    nqn: Nqn,
    /// Hosts that are told; `None`: all.
    hosts: Option<Vec<Nqn>>,
}

impl Referred {
    pub(super) fn new(config: Referral) -> Result<Self, ConfigError> {
        let addr = config.addr;
        if addr.ip().is_unspecified() || addr.ip().is_multicast() || addr.port() == 0 {
            return Err(ConfigError::ReferralAddress(addr));
        }
        let nqn = config.nqn.as_ref().map(|nqn| Nqn::lenient(nqn).map_err(|rule| ConfigError::Nqn(nqn.clone(), rule)));
        let hosts = config.hosts.as_ref().map(|hosts| hosts.iter().map(|host| host_nqn(host)).collect());
        Ok(Self { nqn: nqn.transpose()?.unwrap_or_else(Nqn::discovery), hosts: hosts.transpose()?, config })
    }

    pub(super) fn config(&self) -> &Referral {
        &self.config
    }

    /// Whether a host would find one and the same service behind both.
    pub(super) fn leads_where(&self, other: &Self) -> bool {
        self.config.addr == other.config.addr && self.nqn == other.nqn
    }

    pub(super) fn leads_to(&self, addr: SocketAddr, nqn: Option<&str>) -> bool {
        self.config.addr == addr && self.nqn.as_bytes() == nqn.unwrap_or(DISCOVERY_NQN).as_bytes()
    }

    fn concerns(&self, host: &Nqn) -> bool {
        self.hosts.as_ref().is_none_or(|hosts| hosts.contains(host))
    }

    fn entry(&self) -> Entry {
        Entry::new(&EntryFields {
            subtype: Subtype::Referral,
            subnqn: &self.nqn,
            addr: self.config.addr,
            portid: self.config.portid,
            prtype: self.config.provider.to_wire(),
            // What any admin queue has at least: more is not known of it.
            asqsz: 32,
        })
    }
}

/// The name by which the discovery subsystem calls itself.
pub(super) fn name(config: &RegistryConfig) -> Nqn {
    let own = config.discovery_nqn.as_deref().and_then(|nqn| Nqn::strict(nqn).ok());
    own.unwrap_or_else(Nqn::discovery)
}

/// The whole page (LID 70h): one entry for this discovery subsystem per address, then the subsystems in the order they
/// were added, then referrals.
pub(super) fn log_page(controller: &Controller, cx: &Surroundings<'_>) -> Vec<u8> {
    let association = &controller.association;
    let addresses = addresses(cx.listeners, association.local);
    // One that was taken away and may come back is listed, and not what came in its place.
    let away = |nqn: &Nqn| cx.subsystems.values().any(|subsystem| !subsystem.is_served() && subsystem.nqn == *nqn);
    let subsystems = cx
        .subsystems
        .values()
        .filter(|subsystem| !subsystem.is_served() || !away(&subsystem.nqn))
        .filter(|subsystem| subsystem.allows(&association.hostnqn))
        .map(|subsystem| (&subsystem.nqn, Subtype::Nvm));
    let entry = |(subnqn, subtype): (&Nqn, Subtype), (addr, listener): &(SocketAddr, Listener)| {
        Entry::new(&EntryFields {
            subtype,
            subnqn,
            addr: *addr,
            portid: listener.portid,
            prtype: listener.provider.to_wire(),
            asqsz: cx.config.admin_queue_entries,
        })
    };
    let itself = addresses.iter().map(|address| {
        // Whether a host that goes there reads what it reads here: what is not listed to it may differ by the way it came.
        let same = self::addresses(cx.listeners, address.0)
            .iter()
            .map(|(addr, _)| addr)
            .eq(addresses.iter().map(|(addr, _)| addr));
        entry((&association.subnqn, Subtype::CurrentDiscovery { same }), address)
    });
    let subsystems = subsystems.flat_map(|subsystem| addresses.iter().map(move |address| entry(subsystem, address)));
    let referrals = cx.referrals.iter().filter(|referred| referred.concerns(&association.hostnqn)).map(Referred::entry);
    let entries: Vec<Entry> = itself.chain(subsystems).chain(referrals).collect();
    page(cx.genctr, &entries)
}

/// The addresses that a host which reached us at `local` can be expected to reach, each once.
///
/// A wildcard is advertised as the address that the host reached, when it covers that family. A loopback or link-local
/// address means something else on the host's machine unless the host came by one.
fn addresses(listeners: &[Listener], local: SocketAddr) -> Vec<(SocketAddr, Listener)> {
    let local = local.ip().to_canonical();
    let mut found: Vec<(SocketAddr, Listener)> = Vec::new();
    for listener in listeners {
        let ip = listener.addr.ip().to_canonical();
        let ip = if ip.is_unspecified() {
            if ip.is_ipv4() != local.is_ipv4() && ip.is_ipv4() {
                continue;
            }
            local
        } else {
            ip
        };
        let addr = SocketAddr::new(ip, listener.addr.port());
        let reachable = scope(ip) == Scope::Global || scope(ip) == scope(local);
        if reachable && !found.iter().any(|(other, _)| *other == addr) {
            found.push((addr, *listener));
        }
    }
    found
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Loopback,
    Link,
    Global,
}

fn scope(ip: IpAddr) -> Scope {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_loopback() {
        Scope::Loopback
    } else if link_local {
        Scope::Link
    } else {
        Scope::Global
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::RdmaProvider;

    fn resolve(listeners: &[&str], local: &str) -> Vec<String> {
        let listeners: Vec<Listener> = listeners
            .iter()
            .map(|addr| Listener { addr: addr.parse().unwrap(), portid: 1, provider: RdmaProvider::NotSpecified })
            .collect();
        addresses(&listeners, local.parse().unwrap()).iter().map(|(addr, _)| addr.to_string()).collect()
    }

    #[test]
    fn wildcards_become_the_address_that_the_host_reached() {
        assert_eq!(resolve(&["0.0.0.0:4420"], "10.0.0.1:4420"), ["10.0.0.1:4420"]);
        assert_eq!(resolve(&["[::]:4420"], "[fd00::2]:4420"), ["[fd00::2]:4420"]);
        assert_eq!(resolve(&["[::]:4420"], "[::ffff:10.0.0.1]:4420"), ["10.0.0.1:4420"]);
        assert_eq!(resolve(&["0.0.0.0:4420"], "[fd00::2]:4420"), [""; 0]);
    }

    #[test]
    fn each_address_is_listed_once() {
        assert_eq!(
            resolve(&["0.0.0.0:4420", "10.0.0.1:4420", "10.0.0.1:8009", "[::]:4420"], "10.0.0.1:4420"),
            ["10.0.0.1:4420", "10.0.0.1:8009"]
        );
    }

    #[test]
    fn loopback_and_link_local_are_for_hosts_that_came_by_them() {
        let listeners = ["127.0.0.1:4420", "[fe80::1]:4420", "10.0.0.1:4420"];
        assert_eq!(resolve(&listeners, "10.0.0.1:1"), ["10.0.0.1:4420"]);
        assert_eq!(resolve(&listeners, "127.0.0.1:1"), ["127.0.0.1:4420", "10.0.0.1:4420"]);
        assert_eq!(resolve(&listeners, "[fe80::1%2]:1"), ["[fe80::1]:4420", "10.0.0.1:4420"]);
    }
}
