//! What `discover`, `identify` and `bench` share: where to connect to, over which provider, as which host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use farside::ProviderChoice;
use farside::host::{HostError, HostErrorKind, HostOptions, discover};
use farside::rdma::Provider;
use farside::rdma::soft::Soft;
#[cfg(feature = "verbs")]
use farside::rdma::verbs::Verbs;
use nvme::DISCOVERY_NQN;

const DEFAULT_PORT: u16 = 4420;

#[derive(Debug, Args)]
pub(crate) struct Connect {
    /// The target's address; the port is 4420 unless given
    #[arg(value_name = "ADDR[:PORT]", value_parser = target_address)]
    pub(crate) address: SocketAddr,
    /// verbs (a NIC, rdma_rxe), soft (the software stack) or auto, the first of them that this machine has
    #[arg(long, default_value = "auto")]
    provider: ProviderChoice,
    /// Local address to connect from; the software stack takes one of its own towards a loopback address
    #[arg(long, value_name = "ADDR")]
    source: Option<IpAddr>,
    /// Host NQN to connect as [default: made of this machine]
    #[arg(long)]
    hostnqn: Option<String>,
    /// How long each step of connecting may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,
    /// Keep alive timeout, in seconds; 0 = none
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    keep_alive: u64,
}

/// Something to do with a provider, whichever it is.
pub(crate) trait WithProvider {
    type Output;

    fn run<P: Provider>(self, provider: Arc<P>, options: HostOptions) -> Result<Self::Output, HostError>;
}

impl Connect {
    /// Opens the chosen provider with room for `threads`, and runs `work` with it.
    pub(crate) fn with<W: WithProvider>(&self, threads: usize, work: W) -> Result<W::Output, HostError> {
        let mut options = HostOptions { source: self.source, ..HostOptions::default() };
        options.timeout = Duration::from_secs(self.timeout.max(1));
        options.keep_alive = Duration::from_secs(self.keep_alive);
        if let Some(hostnqn) = &self.hostnqn {
            options.hostnqn.clone_from(hostnqn);
        }
        match self.provider {
            #[cfg(feature = "verbs")]
            ProviderChoice::Verbs => work.run(Arc::new(Verbs::open()?), options),
            #[cfg(feature = "verbs")]
            ProviderChoice::Auto if Verbs::device_names().is_ok_and(|names| !names.is_empty()) => {
                work.run(Arc::new(Verbs::open()?), options)
            }
            #[cfg(not(feature = "verbs"))]
            ProviderChoice::Verbs => Err(farside::rdma::RdmaError::new(
                "provider verbs",
                "this binary was built without it",
                "build with the cargo feature `verbs`, or use --provider soft",
            )
            .into()),
            _ => {
                options.source = options.source.or_else(|| own_loopback(self.address.ip()));
                work.run(Arc::new(Soft::new(threads)?), options)
            }
        }
    }
}

/// Towards a loopback address the software stack needs one that no other process uses: one in 127/8 made of the process ID.
fn own_loopback(target: IpAddr) -> Option<IpAddr> {
    let IpAddr::V4(ip) = target else { return None };
    let [_, b, c, _] = std::process::id().to_be_bytes();
    let [.., d] = std::process::id().to_be_bytes();
    ip.is_loopback().then(|| IpAddr::V4(Ipv4Addr::new(127, 128 | b, c, d.clamp(2, 254))))
}

/// The one subsystem that an address serves, for those who did not name it.
pub(crate) fn only_subsystem<P: Provider>(
    provider: &Arc<P>,
    address: SocketAddr,
    options: &HostOptions,
) -> Result<String, HostError> {
    let mut names: Vec<String> = discover(Arc::clone(provider), address, options.clone())?
        .into_iter()
        .filter(|entry| entry.subtype == 2 && entry.subnqn != DISCOVERY_NQN)
        .map(|entry| entry.subnqn)
        .collect();
    names.sort();
    names.dedup();
    match names.len() {
        1 => Ok(names.remove(0)),
        0 => Err(usage(address, "it serves no subsystem to this host", "see farside discover")),
        _ => Err(usage(address, format!("it serves {}", names.join(", ")), "choose one by --nqn")),
    }
}

pub(crate) fn usage(what: impl ToString, why: impl Into<String>, remedy: impl Into<String>) -> HostError {
    HostError::new(what.to_string(), HostErrorKind::Usage(why.into()), remedy)
}

fn target_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let ip = text.trim_start_matches('[').trim_end_matches(']');
    ip.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, DEFAULT_PORT)).map_err(|_| {
        format!("{text:?} is not an IP address with an optional port, such as 192.0.2.1 or [fd00::2]:4420")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_targets_are_reached_from_an_address_of_our_own() {
        let own = own_loopback("127.0.0.1".parse().unwrap()).unwrap();
        assert!(own.is_loopback());
        assert_ne!(own, "127.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(own_loopback("192.0.2.1".parse().unwrap()), None);
        assert_eq!(own_loopback("::1".parse().unwrap()), None);
    }

    #[test]
    fn port_is_optional() {
        assert_eq!(target_address("fd00::2"), Ok("[fd00::2]:4420".parse().unwrap()));
        assert_eq!(target_address("192.0.2.1:8009"), Ok("192.0.2.1:8009".parse().unwrap()));
        assert!(target_address("localhost").is_err());
    }
}
