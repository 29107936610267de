//! Which provider to serve on, decided at run time.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;
use tracing::info;

use crate::config::ProviderChoice;
use crate::rdma::soft::Soft;
#[cfg(feature = "verbs")]
use crate::rdma::verbs::Verbs;
use crate::target::{Target, TargetBuilder, TargetError};

impl TargetBuilder {
    /// Starts everything on the chosen provider, or nothing.
    pub fn start_on(self, choice: ProviderChoice) -> Result<Target, TargetError> {
        match choice {
            choice if uses_verbs(choice) => self.start_verbs(),
            ProviderChoice::Auto => {
                info!("no RDMA device: using the software provider");
                self.start_soft()
            }
            _ => self.start_soft(),
        }
    }

    #[cfg(feature = "verbs")]
    fn start_verbs(self) -> Result<Target, TargetError> {
        self.start(Verbs::open()?)
    }

    #[cfg(not(feature = "verbs"))]
    fn start_verbs(self) -> Result<Target, TargetError> {
        Err(TargetError {
            object: "provider verbs".into(),
            reason: "this binary was built without it".into(),
            remedy: "build with the cargo feature `verbs`, or use the provider soft".into(),
        })
    }

    fn start_soft(self) -> Result<Target, TargetError> {
        let options = self.soft_options();
        // The software provider binds addresses, never a wildcard: another process may hold port 4791 of another address.
        self.map_listeners(addresses_of).start(Soft::with(&options)?)
    }
}

/// The addresses of this machine that a wildcard stands for; loopback where there is no other. Other addresses as they are.
fn addresses_of(listen: SocketAddr) -> Vec<SocketAddr> {
    if !listen.ip().is_unspecified() {
        return vec![listen];
    }
    let found: Vec<IpAddr> = getifaddrs().into_iter().flatten().filter_map(|interface| usable(&interface)).collect();
    let same_family = |ip: &&IpAddr| ip.is_ipv4() == listen.is_ipv4();
    let addresses: Vec<_> = found.iter().filter(same_family).map(|ip| SocketAddr::new(*ip, listen.port())).collect();
    if !addresses.is_empty() {
        return addresses;
    }
    let loopback = if listen.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    vec![SocketAddr::new(loopback, listen.port())]
}

/// The address of an interface that is up, unless only this machine (loopback) or only this link can reach it.
fn usable(interface: &InterfaceAddress) -> Option<IpAddr> {
    if !interface.flags.contains(InterfaceFlags::IFF_UP) || interface.flags.contains(InterfaceFlags::IFF_LOOPBACK) {
        return None;
    }
    let address = interface.address.as_ref()?;
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(v4.ip().into());
    }
    let v6 = address.as_sockaddr_in6()?.ip();
    (!v6.is_unicast_link_local()).then_some(v6.into())
}

/// Whether a choice comes to the verbs provider on this machine.
pub(crate) fn uses_verbs(choice: ProviderChoice) -> bool {
    match choice {
        ProviderChoice::Verbs => true,
        ProviderChoice::Soft => false,
        ProviderChoice::Auto => has_verbs_device(),
    }
}

#[cfg(feature = "verbs")]
fn has_verbs_device() -> bool {
    Verbs::device_names().is_ok_and(|names| !names.is_empty())
}

#[cfg(not(feature = "verbs"))]
fn has_verbs_device() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_is_never_bound() {
        let listen: SocketAddr = "0.0.0.0:4420".parse().unwrap();
        let addresses = addresses_of(listen);
        assert!(!addresses.is_empty());
        assert!(
            addresses
                .iter()
                .all(|address| !address.ip().is_unspecified() && address.is_ipv4() && address.port() == 4420)
        );
        let one: SocketAddr = "192.0.2.7:4420".parse().unwrap();
        assert_eq!(addresses_of(one), [one]);
    }
}
