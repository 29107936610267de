//! The configuration: what is served, where, and with which limits.
//!
//! One TOML file, read whole before anything starts. [`Config::load`] and [`Config::parse`] touch nothing but the text and
//! report every problem at once, each with its line, its key and a remedy. [`Config::check_host`] compares a sound
//! configuration with this machine: files, addresses, the memlock limit. [`Config::quick`] is the form without a file.
//!
//! ```toml
//! [[subsystem]]
//! nqn = "nqn.2024-01.io.example:store"
//! hosts = ["nqn.2014-08.org.nvmexpress:uuid:07e4a0a6-41d5-4bff-96b2-8a173dcfb6b5"]   # none: any host
//!
//! [[subsystem.namespace]]
//! file = "/srv/disk.img"
//! size = "10G"
//!
//! [[listener]]
//! address = "192.0.2.1:4420"
//!
//! [options]
//! queue_depth = 128
//! ```

mod host;
mod ids;
mod import;
mod keys;
mod odd_hosts;
mod open;
mod parse;
mod problem;
mod quick;
mod reader;
mod size;
#[cfg(test)]
mod tests;
mod write;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use nvme::registry::AnaState;
use uuid::Uuid;

use crate::backend::BackendSpec;
use crate::roce::Dcqcn;
use crate::target::{self, Admission, Limits};

pub(crate) use host::{Addition, may_lock_anything};
pub use ids::{derive_nguid, derive_nqn, derive_serial, derive_uuid};
pub use import::{Imported, Loaded, Note, import, is_foreign};
pub use keys::HostSpec;
pub use problem::{ConfigError, Problem};
pub use quick::{Quick, machine_id};
pub use size::{Bytes, parse_size};

/// A whole configuration: checked in itself, not yet against the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// At least one.
    pub subsystems: Vec<SubsystemSpec>,
    /// None: port 4420 of every address that the provider can use.
    pub listeners: Vec<ListenAddress>,
    /// Other discovery services that hosts are told of.
    pub referrals: Vec<ReferralSpec>,
    /// Everything else.
    pub options: Options,
}

/// A subsystem: what a host connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemSpec {
    /// NVMe Qualified Name, by the strict rules.
    pub nqn: String,
    /// Serial number (SN), 1 to 20 printable characters; derived from the NQN when none is given.
    pub serial: String,
    /// Model number (MN), 1 to 40 printable characters; `None`: the target's.
    pub model: Option<String>,
    /// Whether hosts need not be listed: so unless hosts are.
    pub allow_any_host: bool,
    /// NQNs of the hosts that may connect, those with rules of their own included.
    pub hosts: Vec<String>,
    /// Hosts with rules of their own.
    pub host_specs: Vec<HostSpec>,
    /// At least one.
    pub namespaces: Vec<NamespaceSpec>,
    /// How well groups of namespaces are reached at first, where not optimally.
    pub ana: Vec<AnaSpec>,
    /// How many controllers it has at a time.
    pub admission: Admission,
}

/// Another discovery service that hosts are told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferralSpec {
    /// Where it is; an address without scope.
    pub address: ListenAddress,
    /// Its name; `None`: the well-known one.
    pub nqn: Option<String>,
    /// NQNs of the hosts that are told; `None`: all.
    pub hosts: Option<Vec<String>>,
}

impl ReferralSpec {
    /// As a target takes it.
    pub(crate) fn referral(&self) -> target::Referral {
        target::Referral {
            addr: SocketAddr::new(self.address.ip, self.address.port),
            nqn: self.nqn.clone(),
            hosts: self.hosts.clone(),
            portid: 0,
            provider: target::RdmaProvider::NotSpecified,
        }
    }
}

/// How well a group of namespaces is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaSpec {
    /// The group, 1 to 128.
    pub group: u32,
    /// Through which listener; `None`: all of them.
    pub listener: Option<ListenAddress>,
    /// How well.
    pub state: AnaState,
}

/// The word for an ANA state in a configuration.
pub fn ana_state_name(state: AnaState) -> &'static str {
    parse::ANA_STATES.iter().find(|(_, known)| *known == state).map_or("optimized", |(name, _)| name)
}

/// A namespace: a disk as a host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Namespace identifier (NSID); its place in the subsystem, from 1, when none is given.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: BackendSpec,
    /// As configured; see [`NamespaceSpec::uuid`].
    pub configured_uuid: Option<Uuid>,
    /// As configured; see [`NamespaceSpec::nguid`].
    pub configured_nguid: Option<[u8; 16]>,
    /// IEEE Extended Unique Identifier; zero is none.
    pub eui64: [u8; 8],
    /// ANA group, 1 to 128.
    pub ana_group: u32,
    /// NQNs of the hosts that see it; `None`: all hosts of the subsystem.
    pub hosts: Option<Vec<String>>,
    /// What all hosts together may do with it per second.
    pub limits: Limits,
    /// Its line in the file, for messages.
    pub line: Option<usize>,
}

impl NamespaceSpec {
    /// A namespace with derived identifiers.
    pub fn new(nsid: u32, backend: BackendSpec) -> Self {
        Self {
            nsid,
            backend,
            configured_uuid: None,
            configured_nguid: None,
            eui64: [0; 8],
            ana_group: 1,
            hosts: None,
            limits: Limits::default(),
            line: None,
        }
    }

    /// Its UUID: as configured, else derived from what identifies the storage.
    pub fn uuid(&self, nqn: &str, identity: &[u8]) -> Uuid {
        self.configured_uuid.unwrap_or_else(|| derive_uuid(nqn, self.nsid, identity))
    }

    /// Its Namespace Globally Unique Identifier: as configured, else derived from what identifies the storage.
    pub fn nguid(&self, nqn: &str, identity: &[u8]) -> [u8; 16] {
        self.configured_nguid.unwrap_or_else(|| derive_nguid(nqn, self.nsid, identity))
    }
}

/// The port that NVMe over RDMA has by registration.
pub const PORT: u16 = 4420;

/// An address to listen on: `192.0.2.1`, `192.0.2.1:4420`, `2001:db8::1`, `[2001:db8::1]:4420`, `[fe80::1%eth0]:4420`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListenAddress {
    /// The address; all of the machine's when it is the unspecified one.
    pub ip: IpAddr,
    /// The interface that a link-local address belongs to.
    pub scope: Option<String>,
    /// The port.
    pub port: u16,
    /// Traffic class of the connections (DSCP and ECN bits); `None`: the device's default.
    pub tos: Option<u8>,
    /// Its line in the file, for messages.
    pub line: Option<usize>,
}

impl ListenAddress {
    /// Where a target listens that is not told: every IPv4 address.
    pub fn any() -> Self {
        Self { ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED), scope: None, port: PORT, tos: None, line: None }
    }

    /// As a socket address. A scope is looked up among this machine's interfaces.
    pub fn resolve(&self) -> std::io::Result<SocketAddr> {
        let (IpAddr::V6(ip), Some(scope)) = (self.ip, &self.scope) else {
            return Ok(SocketAddr::new(self.ip, self.port));
        };
        let index = match scope.parse() {
            Ok(index) => index,
            Err(_) => nix::net::if_::if_nametoindex(scope.as_str())?,
        };
        Ok(SocketAddrV6::new(ip, self.port, 0, index).into())
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address");
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
                let port = match port {
                    "" => None,
                    port => Some(port.strip_prefix(':').ok_or_else(wrong)?),
                };
                (host, port)
            }
            None if text.matches(':').count() == 1 => {
                text.split_once(':').map(|(host, port)| (host, Some(port))).ok_or_else(wrong)?
            }
            None => (text, None),
        };
        let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| wrong()))?;
        if port == 0 {
            return Err(format!("{text:?} has port 0"));
        }
        let (ip, scope) = match host.split_once('%') {
            Some((ip, scope)) if !scope.is_empty() => (ip, Some(scope.to_owned())),
            Some(_) => return Err(wrong()),
            None => (host, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| wrong())?;
        match (ip, &scope) {
            (IpAddr::V4(_), Some(_)) => Err(wrong()),
            (IpAddr::V6(v6), None) if v6.is_unicast_link_local() => {
                Err(format!("{text:?} is link-local and names no interface"))
            }
            _ => Ok(Self { ip, scope, port, tos: None, line: None }),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ip, &self.scope) {
            (IpAddr::V4(ip), _) => write!(f, "{ip}:{}", self.port),
            (IpAddr::V6(ip), None) => write!(f, "[{ip}]:{}", self.port),
            (IpAddr::V6(ip), Some(scope)) => write!(f, "[{ip}%{scope}]:{}", self.port),
        }
    }
}

/// Which RDMA is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProviderChoice {
    /// Verbs if a device is usable, else software.
    #[default]
    Auto,
    /// libibverbs and librdmacm.
    Verbs,
    /// RoCEv2 over UDP in this process.
    Soft,
}

impl fmt::Display for ProviderChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Verbs => "verbs",
            Self::Soft => "soft",
        })
    }
}

impl FromStr for ProviderChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "verbs" => Ok(Self::Verbs),
            "soft" => Ok(Self::Soft),
            _ => Err(format!("{text:?} is no provider; choose verbs, soft or auto")),
        }
    }
}

/// Limits and switches of the whole target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which RDMA.
    pub provider: ProviderChoice,
    /// Reactor threads; `None`: one per core.
    pub reactors: Option<u16>,
    /// I/O queues of one controller.
    pub io_queues: u16,
    /// Entries of the largest I/O queue.
    pub queue_depth: u16,
    /// Bytes of in-capsule data; 0 is off.
    pub in_capsule_data: u16,
    /// Bytes of the largest read or write.
    pub mdts: u32,
    /// Bytes of buffers per reactor.
    pub pool_size: u64,
    /// Receives per reactor.
    pub receive_slots: u32,
    /// Spin instead of sleeping.
    pub poll: bool,
    /// Keep histograms of how long commands take.
    pub histograms: bool,
    /// Answer with SEND with invalidate where the host asks for it.
    pub remote_invalidate: bool,
    /// Controller identifiers to give out.
    pub cntlid: RangeInclusive<u16>,
    /// How long a connection may be without a successful Connect command, in milliseconds.
    pub connect_timeout: u32,
    /// Granularity of keep alive timeouts (KAS), in milliseconds: a multiple of 100.
    pub keep_alive_granularity: u32,
    /// Hosts may reset a subsystem.
    pub subsystem_reset: bool,
    /// When hosts should retry what failed for a reason that passes, in milliseconds: a multiple of 100; 0 leaves it to them.
    pub retry_delay: u32,
    /// NQN of the discovery subsystem beside the well-known one.
    pub discovery_nqn: Option<String>,
    /// Where namespaces keep what has to survive a power loss: reservations and write protection. `None`: nowhere.
    pub state_dir: Option<PathBuf>,
    /// Let the software provider see IPv4 headers, for a whole check of each packet.
    pub raw_headers: bool,
    /// Congestion control of the software provider.
    pub dcqcn: Dcqcn,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`.
    pub log: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            provider: ProviderChoice::Auto,
            reactors: None,
            io_queues: 128,
            queue_depth: 1024,
            in_capsule_data: 4096,
            mdts: 1 << 20,
            pool_size: 64 << 20,
            receive_slots: 4096,
            poll: false,
            histograms: false,
            remote_invalidate: true,
            cntlid: CNTLID_MIN..=CNTLID_MAX,
            connect_timeout: 30_000,
            keep_alive_granularity: 1000,
            subsystem_reset: false,
            retry_delay: 0,
            discovery_nqn: None,
            state_dir: None,
            raw_headers: false,
            dcqcn: Dcqcn::default(),
            log: "info".into(),
        }
    }
}

/// The smallest identifier of a dynamic controller.
const CNTLID_MIN: u16 = 1;
/// The largest: those above are reserved (NVMe Base 2.x, Connect).
const CNTLID_MAX: u16 = 0xffef;

impl Options {
    /// Bytes that one reactor maps and registers.
    pub fn registered_memory(&self) -> u64 {
        target::Options::from(self).memory_plan().arena as u64
    }
}

impl Options {
    /// Where state is kept: as configured, else where a service manager says ($STATE_DIRECTORY).
    pub fn state_folder(&self) -> Option<PathBuf> {
        self.state_dir.clone().or_else(|| std::env::var_os("STATE_DIRECTORY").map(PathBuf::from))
    }
}

impl From<&Options> for target::Options {
    fn from(options: &Options) -> Self {
        let defaults = Self::default();
        Self {
            reactors: options.reactors.map_or(defaults.reactors, usize::from),
            io_queues: options.io_queues,
            queue_depth: options.queue_depth.into(),
            in_capsule_data: options.in_capsule_data.into(),
            mdts: options.mdts,
            pool_size: usize::try_from(options.pool_size).unwrap_or(usize::MAX / 2),
            receive_slots: options.receive_slots,
            remote_invalidate: options.remote_invalidate,
            poll: options.poll,
            histograms: options.histograms,
            cntlid: (*options.cntlid.start(), *options.cntlid.end()),
            connect_timeout: Duration::from_millis(options.connect_timeout.into()),
            keep_alive_granularity: Duration::from_millis(options.keep_alive_granularity.into()),
            subsystem_reset: options.subsystem_reset,
            retry_delay: Duration::from_millis(options.retry_delay.into()),
            discovery_nqn: options.discovery_nqn.clone(),
            ..defaults
        }
    }
}

impl Config {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        parse::parse(&Self::read_text(path)?, &path.display().to_string())
    }

    fn read_text(path: &Path) -> Result<String, ConfigError> {
        std::fs::read_to_string(path).map_err(|error| {
            let (reason, remedy) = match error.kind() {
                std::io::ErrorKind::InvalidData => ("is not UTF-8".to_owned(), "save it as UTF-8 text"),
                _ => (error.to_string(), "check the path of the configuration"),
            };
            ConfigError(vec![Problem {
                file: path.display().to_string(),
                line: None,
                key: String::new(),
                reason,
                remedy: remedy.into(),
            }])
        })
    }

    /// Reads a text. `name` stands for its file in problems.
    pub fn parse(text: &str, name: &str) -> Result<Self, ConfigError> {
        parse::parse(text, name)
    }

    /// Reads a text that a running target is to become: it may serve nothing.
    pub fn parse_running(text: &str, name: &str) -> Result<Self, ConfigError> {
        parse::parse_running(text, name)
    }

    /// What this machine has against it: files and devices, addresses, memory that may be locked. Opens nothing for
    /// serving, and leaves nothing behind.
    pub fn check_host(&self, name: &str) -> Vec<Problem> {
        host::check(self, name)
    }

    /// As `check_host`, for what a running target is to serve besides what it serves already.
    pub(crate) fn check_additions(&self, name: &str, added: &[Addition<'_>]) -> Vec<Problem> {
        host::check_additions(self, name, added)
    }
}
