//! What a registry is made of: configuration of the target, of subsystems, namespaces and listeners, and why one is
//! refused.

use core::fmt;
use core::net::SocketAddr;
use core::ops::RangeInclusive;
use core::time::Duration;

use crate::command::NSID_ALL;
use crate::io::IoLimits;
use crate::nqn::{Nqn, NqnError};
use crate::reservation::ReservationState;
use crate::zns::{Geometry, Zones};

/// What applies to all controllers.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// Model number (MN) of subsystems that have none of their own, at most 40 ASCII characters.
    pub model: String,
    /// Firmware revision (FR), at most 8 ASCII characters.
    pub firmware: String,
    /// I/O queues that one controller may have.
    pub max_io_queues: u16,
    /// Entries of the largest I/O queue; MQES is one less, MAXCMD the same.
    pub max_io_queue_entries: u16,
    /// Entries of the largest admin queue, for the discovery log (ASQSZ).
    pub admin_queue_entries: u16,
    /// Bytes of in-capsule data, a multiple of 16 up to 16384; 0 is off.
    pub in_capsule_data_size: u16,
    /// What one I/O command may ask for at most.
    pub io_limits: IoLimits,
    /// Granularity of the keep alive timeout (KAS), a multiple of 100 ms; not zero.
    pub keep_alive_granularity: Duration,
    /// Inactivity after which a discovery controller that was connected without a keep alive timeout ends; `None` is
    /// never.
    pub discovery_idle: Option<Duration>,
    /// A name of the discovery subsystem beside the well-known one, by which hosts tell it from others; hosts are told it
    /// wherever the subsystem names itself.
    pub discovery_nqn: Option<String>,
    /// Controller identifiers that this target may give out. Targets that serve the same NQN must not overlap.
    pub cntlids: RangeInclusive<u16>,
    /// Largest namespace identifier (NN), and how many namespaces may exist (MNAN).
    pub max_namespaces: u32,
    /// Worst time for CSTS.RDY to follow CC.EN (CAP.TO, CRTO), in units of 500 ms.
    pub ready_timeout: u8,
    /// Hosts may write protect namespaces. The Write Protect state outlasts power cycles, and a controller that has any of the
    /// states has this one, so only where the transport keeps [`NamespaceState`].
    pub write_protection: bool,
    /// Hosts may reset the NVM subsystem, which ends the associations of all.
    pub subsystem_reset: bool,
    /// When hosts should retry what failed for a reason that passes (CRDT1), a multiple of 100 ms; zero leaves it to them.
    pub retry_delay: Duration,
    /// Fills a slice with random bytes that nobody can guess; without, no host can be asked to authenticate.
    pub random: Option<fn(&mut [u8])>,
    /// How long a host has to authenticate after Connect.
    pub authentication_timeout: Duration,
    /// Longest time that a group is between two ANA states (ANATT), in whole seconds.
    pub ana_transition: Duration,
    /// Test hook: bytes laid over Identify data structures before they are sent, to see a host refuse them.
    pub identify_overrides: Vec<IdentifyOverride>,
}

impl Default for RegistryConfig {
    fn default() -> Self {
        Self {
            model: "farside".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
            max_io_queues: 128,
            max_io_queue_entries: 1024,
            admin_queue_entries: 128,
            in_capsule_data_size: 4096,
            io_limits: IoLimits::default(),
            keep_alive_granularity: Duration::from_secs(1),
            discovery_idle: Some(Duration::from_secs(120)),
            discovery_nqn: None,
            cntlids: CNTLID_MIN..=CNTLID_MAX,
            max_namespaces: 1024,
            ready_timeout: 30,
            write_protection: true,
            subsystem_reset: false,
            retry_delay: Duration::ZERO,
            random: None,
            authentication_timeout: Duration::from_secs(120),
            ana_transition: Duration::from_secs(10),
            identify_overrides: Vec::new(),
        }
    }
}

impl RegistryConfig {
    /// Checks what [`super::Registry::new`] takes for granted. Values that are not possible do no harm there, but hosts
    /// would be told something that is not true.
    ///
    /// # Errors
    /// The first limit that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let granularity = self.keep_alive_granularity.as_millis();
        let limits = [
            (is_printable(&self.model, 40), "model: 1 to 40 printable ASCII characters"),
            (is_printable(&self.firmware, 8), "firmware: 1 to 8 printable ASCII characters"),
            (self.max_io_queues != 0, "max_io_queues: at least 1"),
            (self.max_io_queue_entries >= 2, "max_io_queue_entries: at least 2"),
            (self.admin_queue_entries >= 32, "admin_queue_entries: at least 32"),
            (
                self.in_capsule_data_size.is_multiple_of(16) && self.in_capsule_data_size <= 16384,
                "in_capsule_data_size: a multiple of 16, at most 16384",
            ),
            (
                granularity != 0 && granularity.is_multiple_of(100) && granularity <= 6_553_500,
                "keep_alive_granularity: a multiple of 100 ms, at most 6553.5 s",
            ),
            (
                !self.cntlids.is_empty() && *self.cntlids.start() >= CNTLID_MIN && *self.cntlids.end() <= CNTLID_MAX,
                "cntlids: from 1 to 65519, not empty",
            ),
            (
                self.retry_delay.as_millis().is_multiple_of(100) && self.retry_delay.as_millis() <= 6_553_500,
                "retry_delay: a multiple of 100 ms, at most 6553.5 s",
            ),
            (
                self.discovery_nqn.as_ref().is_none_or(|nqn| Nqn::strict(nqn).is_ok()),
                "discovery_nqn: of the form nqn.yyyy-mm.reversed.domain:name",
            ),
            (
                (1..=127).contains(&self.ana_transition.as_secs()) && self.ana_transition.subsec_nanos() == 0,
                "ana_transition: 1 to 127 whole seconds",
            ),
            (self.max_namespaces != 0 && self.max_namespaces < NSID_ALL - 1, "max_namespaces: from 1 to 4294967293"),
        ];
        match limits.into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(ConfigError::Limit(rule)),
            None => self.io_limits.check().map_err(ConfigError::Limit),
        }
    }
}

/// Bytes laid over one Identify data structure (test hook).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentifyOverride {
    /// Which structure (CNS).
    pub cns: u8,
    /// Where in its 4096 bytes.
    pub offset: usize,
    /// What.
    pub bytes: Vec<u8>,
}

/// A subsystem to be served.
#[derive(Clone, Debug, Default)]
pub struct SubsystemConfig {
    /// Its name, in the strict form that [`crate::Nqn::strict`] checks.
    pub nqn: String,
    /// Serial number (SN): 1 to 20 ASCII characters, one per subsystem.
    pub serial: String,
    /// Model number (MN), at most 40 ASCII characters; `None` takes the registry's.
    pub model: Option<String>,
    /// Any host may connect, whether listed or not.
    pub allow_any_host: bool,
    /// NQNs of hosts that may connect.
    pub hosts: Vec<String>,
    /// How many controllers of its hosts it has.
    pub admission: Admission,
}

/// How many controllers a subsystem has at a time, and of whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// All together; `None`: as many as there are identifiers.
    pub controllers: Option<u16>,
    /// Of one host.
    pub controllers_per_host: Option<u16>,
    /// What becomes of a host that comes twice.
    pub duplicates: Duplicates,
}

/// What becomes of a host that comes by a port by which it is connected already, or under another host identifier than before:
/// it lost its connection, it was restarted, or it is another machine that uses the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duplicates {
    /// It is connected once more.
    #[default]
    Allow,
    /// It is told to come back later; so it will be until the earlier association is over.
    Refuse,
    /// Its earlier association ends, and what that one wrote has landed before it goes on.
    Replace,
}

/// A namespace of a subsystem.
#[derive(Clone, Debug, Default)]
pub struct NamespaceConfig {
    /// Namespace identifier, 1 to [`RegistryConfig::max_namespaces`].
    pub nsid: u32,
    /// UUID; hosts take namespaces of the same UUID for the same disk. Not all zero.
    pub uuid: [u8; 16],
    /// NGUID; all zero means none.
    pub nguid: [u8; 16],
    /// EUI-64; all zero means none.
    pub eui64: [u8; 8],
    /// Size in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// Preferred sizes and alignments.
    pub limits: NamespaceLimits,
    /// A volatile write cache lies behind it, so that Flush has something to do.
    pub volatile_write_cache: bool,
    /// It is a rotating disk.
    pub rotational: bool,
    /// Dataset Management with Attribute Deallocate is supported.
    pub deallocate: bool,
    /// Deallocated blocks read as zeroes for sure: hosts then deallocate where they would write zeroes.
    pub deallocated_reads_zero: bool,
    /// Write Zeroes is supported.
    pub write_zeroes: bool,
    /// Compare is supported, alone and fused with a Write.
    pub compare: bool,
    /// Verify is supported.
    pub verify: bool,
    /// Copy is supported.
    pub copy: bool,
    /// NQNs of the hosts that see it; `None`: all hosts of the subsystem.
    pub hosts: Option<Vec<String>>,
    /// ANA group (ANAGRPID), from 1; 0 takes the default group.
    pub ana_group: u32,
    /// Reservations are supported.
    pub reservations: bool,
    /// The transport keeps [`NamespaceState`] through power loss.
    pub persistent: bool,
    /// What was kept.
    pub kept: NamespaceState,
    /// Writes are refused.
    pub read_only: bool,
    /// It is of the Zoned Namespace command set.
    pub zones: Option<ZonedNamespace>,
}

/// What hosts are told of a zoned namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedNamespace {
    /// What its zones have in common.
    pub geometry: Geometry,
    /// Blocks that can be written, of all zones (NCAP).
    pub capacity: u64,
}

impl ZonedNamespace {
    /// Of these zones.
    #[must_use]
    pub fn of(zones: &Zones) -> Self {
        Self { geometry: zones.geometry(), capacity: zones.capacity() }
    }

    pub(crate) fn shift(&self) -> u8 {
        u8::try_from(self.geometry.zone_blocks.trailing_zeros()).unwrap_or(0)
    }
}

/// What a namespace has to remember through power loss. Given out by [`super::Registry::kept_state`] after a change, and given
/// back when the namespace is made again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceState {
    /// Registrants and reservation; `None` while the hosts have not asked for persistence.
    pub reservations: Option<ReservationState>,
    /// A host write protected it.
    pub write_protected: bool,
}

/// Preferred sizes in logical blocks, as real counts; 0 means "not known".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLimits {
    /// Preferred write granularity (NPWG).
    pub npwg: u16,
    /// Preferred write alignment (NPWA).
    pub npwa: u16,
    /// Preferred deallocate granularity (NPDG).
    pub npdg: u16,
    /// Preferred deallocate alignment (NPDA).
    pub npda: u16,
    /// Optimal write size (NOWS).
    pub nows: u16,
    /// Optimal I/O boundary (NOIOB).
    pub noiob: u16,
}

/// An address that hosts can connect to, for the discovery log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Where it listens. An unspecified address is advertised as the one that the reading host reached.
    pub addr: SocketAddr,
    /// Port identifier (PORTID); 0 has the registry choose one, the same for an address that comes back.
    pub portid: u16,
    /// RDMA provider.
    pub provider: RdmaProvider,
}

/// Another discovery service, which hosts of this one are told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referral {
    /// Where it is.
    pub addr: SocketAddr,
    /// Its name; `None` is the well-known one.
    pub nqn: Option<String>,
    /// Hosts that are told; `None`: all.
    pub hosts: Option<Vec<String>>,
    /// Port identifier there (PORTID).
    pub portid: u16,
    /// RDMA provider there.
    pub provider: RdmaProvider,
}

/// RDMA provider type of a listener (RDMA_PRTYPE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaProvider {
    /// Nothing said.
    #[default]
    NotSpecified,
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1.
    RoceV1,
    /// RoCE version 2.
    RoceV2,
    /// iWARP.
    Iwarp,
}

impl RdmaProvider {
    pub(crate) const fn to_wire(self) -> u8 {
        match self {
            Self::NotSpecified => 1,
            Self::InfiniBand => 2,
            Self::RoceV1 => 3,
            Self::RoceV2 => 4,
            Self::Iwarp => 5,
        }
    }
}

/// Why a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// A limit of [`RegistryConfig`] is out of its range.
    Limit(&'static str),
    /// The NQN breaks a rule.
    Nqn(String, NqnError),
    /// The NQN of a host breaks a rule.
    HostNqn(String, NqnError),
    /// A subsystem of this NQN exists.
    DuplicateNqn(String),
    /// The serial number is empty, too long or not printable ASCII.
    Serial(String),
    /// The model number is too long or not printable ASCII.
    Model(String),
    /// There is no such subsystem.
    NoSuchSubsystem,
    /// The namespace identifier is 0 or above the maximum.
    NsidOutOfRange(u32),
    /// The subsystem has a namespace of this identifier.
    DuplicateNsid(u32),
    /// There is no such namespace.
    NoSuchNamespace(u32),
    /// A namespace of this UUID, or of the same NGUID or EUI-64, exists; hosts would take both for one disk.
    DuplicateUuid([u8; 16]),
    /// The UUID is all zero.
    ZeroUuid,
    /// The block size is neither 512 nor 4096.
    BlockSize(u32),
    /// The size is zero, or more bytes than 64 bits count.
    Size(u64),
    /// The zone size is no power of two, or not a part of the size.
    ZoneSize(u64),
    /// The ANA group is not one of 1 to 128.
    AnaGroup(u32),
    /// This address has a listener.
    DuplicateListener(SocketAddr),
    /// There is no listener at this address.
    NoSuchListener(SocketAddr),
    /// There is a referral to this address and name.
    DuplicateReferral(SocketAddr),
    /// There is no referral to this address and name.
    NoSuchReferral(SocketAddr),
    /// A referral leads to an address that no host can connect to.
    ReferralAddress(SocketAddr),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(rule) => f.write_str(rule),
            Self::Nqn(nqn, rule) => write!(f, "subsystem {nqn:?}: {rule}"),
            Self::HostNqn(nqn, rule) => write!(f, "host {nqn:?}: {rule}"),
            Self::DuplicateNqn(nqn) => write!(f, "subsystem {nqn} exists twice"),
            Self::Serial(serial) => write!(f, "serial number {serial:?} is not 1 to 20 printable ASCII characters"),
            Self::Model(model) => write!(f, "model number {model:?} is not 1 to 40 printable ASCII characters"),
            Self::NoSuchSubsystem => f.write_str("there is no such subsystem"),
            Self::NsidOutOfRange(nsid) => {
                write!(f, "namespace identifier {nsid} is out of range")
            }
            Self::DuplicateNsid(nsid) => write!(f, "namespace {nsid} exists twice"),
            Self::NoSuchNamespace(nsid) => write!(f, "there is no namespace {nsid}"),
            Self::DuplicateUuid(uuid) => write!(
                f,
                "the namespace of UUID {:032x} shares an identifier with another; hosts would take them for one disk",
                u128::from_be_bytes(*uuid)
            ),
            Self::ZeroUuid => f.write_str("the UUID is all zero"),
            Self::BlockSize(size) => write!(f, "block size {size} is neither 512 nor 4096"),
            Self::Size(blocks) => write!(f, "a size of {blocks} blocks is not possible"),
            Self::ZoneSize(blocks) => {
                write!(f, "a zone size of {blocks} blocks is no power of two, or the size is not a multiple of it")
            }
            Self::AnaGroup(group) => write!(f, "ANA group {group} is not one of 1 to {}", crate::ana::MAX_GROUPS),
            Self::DuplicateListener(addr) => write!(f, "listener {addr} exists twice"),
            Self::NoSuchListener(addr) => write!(f, "there is no listener {addr}"),
            Self::DuplicateReferral(addr) => write!(f, "the referral to {addr} exists twice"),
            Self::NoSuchReferral(addr) => write!(f, "there is no referral to {addr}"),
            Self::ReferralAddress(addr) => write!(f, "no host can connect to {addr}"),
        }
    }
}

impl core::error::Error for ConfigError {}

/// 1 to `max` printable ASCII characters, as serial and model numbers are.
pub(crate) fn is_printable(text: &str, max: usize) -> bool {
    (1..=max).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Smallest controller identifier that a dynamic controller may have.
pub const CNTLID_MIN: u16 = 1;

/// Largest controller identifier that a dynamic controller may have; F0h values above are reserved.
pub const CNTLID_MAX: u16 = 0xffef;
