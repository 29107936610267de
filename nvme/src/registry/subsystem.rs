//! Subsystems and namespaces: what exists, checked when it is made.

use std::collections::{BTreeMap, BTreeSet};

use super::config::{
    Admission, ConfigError, NamespaceConfig, NamespaceState, RegistryConfig, SubsystemConfig, is_printable,
};
use super::paths::{DEFAULT_GROUP, check_group};
use crate::ana::AnaStates;
use crate::auth::HostAuth;
use crate::gate::Gate;
use crate::io::NamespaceView;
use crate::logs::{IoCounters, NamespaceCommands};
use crate::nqn::Nqn;
use crate::reservation::Reservations;
use crate::wire::ascii;
use crate::{io, zns};

/// A subsystem of I/O controllers.
#[derive(Debug)]
pub(crate) struct Subsystem {
    pub(crate) nqn: Nqn,
    pub(crate) serial: [u8; 20],
    pub(crate) model: [u8; 40],
    pub(crate) allow_any_host: bool,
    pub(crate) hosts: BTreeSet<Nqn>,
    pub(crate) admission: Admission,
    /// A host reset it.
    pub(crate) was_reset: bool,
    /// Hosts that have to authenticate.
    pub(crate) auth: BTreeMap<Nqn, HostAuth>,
    pub(crate) namespaces: BTreeMap<u32, Namespace>,
    /// Namespaces that were taken away and may come back, by NSID; `None`: back among the others, and not open everywhere yet.
    /// To its hosts each is what it was but not ready, whatever has its place.
    pub(crate) away: BTreeMap<u32, Option<Namespace>>,
    pub(crate) presence: Presence,
    pub(crate) counters: IoCounters,
    pub(crate) ana: AnaStates,
}

/// Whether a subsystem is served. One that is not, is to its hosts what it was, but none of its namespaces is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It is.
    #[default]
    Served,
    /// It was taken away, and may come back.
    Away,
    /// It comes back: its namespaces are being opened.
    Returning,
}

/// A namespace, checked.
#[derive(Clone, Debug)]
pub(crate) struct Namespace {
    pub(crate) config: NamespaceConfig,
    pub(crate) block_shift: u8,
    pub(crate) audience: Audience,
    pub(crate) protection: WriteProtection,
    pub(crate) reservations: Reservations,
    /// Reservation Notification Mask (feature 82h).
    pub(crate) notification_mask: u32,
}

/// The hosts that see a namespace, each with its number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Audience(Option<BTreeMap<Nqn, u64>>);

impl Audience {
    /// `None`: all hosts.
    pub(crate) fn new(hosts: Option<&[String]>, mut number: impl FnMut(&Nqn) -> u64) -> Result<Self, ConfigError> {
        let Some(hosts) = hosts else { return Ok(Self(None)) };
        let numbered = hosts.iter().map(|host| {
            let host = host_nqn(host)?;
            let number = number(&host);
            Ok((host, number))
        });
        Ok(Self(Some(numbered.collect::<Result<_, _>>()?)))
    }

    pub(crate) fn sees(&self, host: &Nqn) -> bool {
        self.0.as_ref().is_none_or(|hosts| hosts.contains_key(host))
    }

    fn numbers(&self) -> Option<Box<[u64]>> {
        let mut numbers: Vec<u64> = self.0.as_ref()?.values().copied().collect();
        numbers.sort_unstable();
        Some(numbers.into())
    }
}

/// Namespace Write Protection state (feature 84h), as hosts set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteProtection {
    /// Writes are taken.
    #[default]
    None,
    /// Writes are refused.
    Protected,
    /// Writes are refused, and nothing but a new start of the target changes that.
    UntilPowerCycle,
}

impl WriteProtection {
    /// From Write Protection State (WPS); permanent protection, and what is reserved, is not supported.
    pub(crate) const fn from_wire(wps: u32) -> Option<Self> {
        match wps {
            0 => Some(Self::None),
            1 => Some(Self::Protected),
            2 => Some(Self::UntilPowerCycle),
            _ => None,
        }
    }

    pub(crate) const fn to_wire(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Protected => 1,
            Self::UntilPowerCycle => 2,
        }
    }
}

impl Subsystem {
    pub(crate) fn new(config: &SubsystemConfig, registry: &RegistryConfig) -> Result<Self, ConfigError> {
        let nqn = Nqn::strict(&config.nqn).map_err(|rule| ConfigError::Nqn(config.nqn.clone(), rule))?;
        if !is_printable(&config.serial, 20) {
            return Err(ConfigError::Serial(config.serial.clone()));
        }
        let model = config.model.as_ref().unwrap_or(&registry.model);
        if !is_printable(model, 40) {
            return Err(ConfigError::Model(model.clone()));
        }
        let hosts = config.hosts.iter().map(|host| host_nqn(host));
        Ok(Self {
            nqn,
            serial: ascii(&config.serial),
            model: ascii(model),
            allow_any_host: config.allow_any_host,
            hosts: hosts.collect::<Result<_, _>>()?,
            admission: config.admission,
            was_reset: false,
            auth: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            away: BTreeMap::new(),
            presence: Presence::Served,
            counters: IoCounters::default(),
            ana: AnaStates::default(),
        })
    }

    /// What keeps hosts out of a namespace; `None` when nothing does.
    pub(crate) fn gate(&self, nsid: u32) -> Option<Gate> {
        let namespace = self.known(nsid)?;
        let unreached = self.ana.refusals(namespace.config.ana_group);
        let audience = namespace.audience.numbers();
        let reservation = namespace.reservations.guard();
        let gate = Gate { audience, reservation, unreached, held: self.holds(nsid) };
        (!gate.is_open()).then_some(gate)
    }

    /// The ANA log page as a host sees it through a port.
    pub(crate) fn ana_page(&self, port: u16, groups_only: bool, host: &Nqn) -> Vec<u8> {
        self.ana.page(port, groups_only, |nsid| self.seen(nsid, host).is_some())
    }

    /// A namespace as hosts know it.
    pub(crate) fn known(&self, nsid: u32) -> Option<&Namespace> {
        self.away.get(&nsid).and_then(Option::as_ref).or_else(|| self.namespaces.get(&nsid))
    }

    /// A namespace as hosts know it, if this one sees it.
    pub(crate) fn seen(&self, nsid: u32, host: &Nqn) -> Option<&Namespace> {
        self.known(nsid).filter(|namespace| namespace.audience.sees(host))
    }

    /// NSIDs that hosts know, ascending.
    pub(crate) fn nsids(&self) -> BTreeSet<u32> {
        self.namespaces.keys().chain(self.away.keys()).copied().collect()
    }

    /// Whether commands on a namespace are told to come again: what will be there is not decided.
    pub(crate) fn holds(&self, nsid: u32) -> bool {
        !self.is_served() || self.away.contains_key(&nsid)
    }

    /// Whether a host that knows a namespace is told to come again.
    pub(crate) fn holds_for(&self, nsid: u32, host: &Nqn) -> bool {
        self.holds(nsid) && self.seen(nsid, host).is_some()
    }

    pub(crate) fn is_served(&self) -> bool {
        self.presence == Presence::Served
    }

    /// A namespace that commands are to be checked against.
    pub(crate) fn view(&self, nsid: u32) -> Option<NamespaceView> {
        let namespace = self.namespaces.get(&nsid).filter(|_| self.presence != Presence::Away);
        namespace.map(Namespace::view)
    }

    pub(crate) fn allows(&self, hostnqn: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(hostnqn)
    }

    /// The optional commands that its namespaces have between them. An empty subsystem announces all, as a namespace
    /// that comes later could not announce them to hosts that are connected already.
    pub(crate) fn commands(&self) -> NamespaceCommands {
        self.commands_of(|_| true)
    }

    /// The same of the namespaces of one command set.
    pub(crate) fn commands_of_set(&self, csi: u8) -> NamespaceCommands {
        self.commands_of(|namespace| namespace.csi() == csi)
    }

    fn commands_of(&self, which: impl Fn(&Namespace) -> bool) -> NamespaceCommands {
        let known =
            || self.namespaces.values().chain(self.away.values().flatten()).filter(|namespace| which(namespace));
        let none = known().next().is_none();
        let any = |has: fn(&NamespaceConfig) -> bool| none || known().any(|ns| has(&ns.config));
        NamespaceCommands {
            compare: any(|ns| ns.compare),
            write_zeroes: any(|ns| ns.write_zeroes),
            deallocate: any(|ns| ns.deallocate),
            verify: any(|ns| ns.verify),
            copy: any(|ns| ns.copy),
            reservations: any(|ns| ns.reservations),
        }
    }
}

impl Namespace {
    pub(crate) fn new(mut config: NamespaceConfig, max: u32) -> Result<Self, ConfigError> {
        if config.nsid == 0 || config.nsid > max {
            return Err(ConfigError::NsidOutOfRange(config.nsid));
        }
        if config.uuid == [0; 16] {
            return Err(ConfigError::ZeroUuid);
        }
        let block_shift = match config.block_size {
            512 => 9,
            4096 => 12,
            size => return Err(ConfigError::BlockSize(size)),
        };
        check_size(config.blocks, block_shift)?;
        if let Some(zones) = &config.zones {
            check_zones(config.blocks, zones.geometry.zone_blocks)?;
        }
        if config.ana_group == 0 {
            config.ana_group = DEFAULT_GROUP;
        }
        check_group(config.ana_group)?;
        let kept = core::mem::take(&mut config.kept);
        let protection = if kept.write_protected { WriteProtection::Protected } else { WriteProtection::None };
        let reservations = kept.reservations.map(Reservations::restored).unwrap_or_default();
        let audience = Audience::default();
        Ok(Self { config, block_shift, audience, protection, reservations, notification_mask: 0 })
    }

    pub(crate) fn resize(&mut self, blocks: u64) -> Result<(), ConfigError> {
        check_size(blocks, self.block_shift)?;
        if let Some(zones) = &self.config.zones {
            check_zones(blocks, zones.geometry.zone_blocks)?;
        }
        self.config.blocks = blocks;
        Ok(())
    }

    /// Its command set (CSI).
    pub(crate) fn csi(&self) -> u8 {
        if self.config.zones.is_some() { zns::CSI } else { io::CSI }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.config.read_only || self.protection != WriteProtection::None
    }

    /// Whether a host would take both for one disk.
    pub(crate) fn same_identity(&self, other: &NamespaceConfig) -> bool {
        let mine = &self.config;
        mine.uuid == other.uuid
            || (mine.nguid != [0; 16] && mine.nguid == other.nguid)
            || (mine.eui64 != [0; 8] && mine.eui64 == other.eui64)
    }

    pub(crate) fn view(&self) -> NamespaceView {
        NamespaceView {
            nsid: self.config.nsid,
            blocks: self.config.blocks,
            block_shift: self.block_shift,
            read_only: self.is_read_only(),
            compare: self.config.compare,
            write_zeroes: self.config.write_zeroes,
            deallocate: self.config.deallocate,
            verify: self.config.verify,
            copy: self.config.copy,
            reservations: self.config.reservations,
            persistent: self.config.persistent,
            zone_shift: self.config.zones.map(|zones| zones.shift()),
        }
    }

    /// What is to be kept through power loss.
    pub(crate) fn kept(&self) -> NamespaceState {
        NamespaceState {
            reservations: self.reservations.kept().cloned(),
            write_protected: self.protection == WriteProtection::Protected,
        }
    }
}

/// A size whose last byte has a 64-bit address.
fn check_size(blocks: u64, block_shift: u8) -> Result<(), ConfigError> {
    if blocks == 0 || blocks > u64::MAX >> block_shift {
        return Err(ConfigError::Size(blocks));
    }
    Ok(())
}

fn check_zones(blocks: u64, zone_blocks: u64) -> Result<(), ConfigError> {
    if !zone_blocks.is_power_of_two() || !blocks.is_multiple_of(zone_blocks) {
        return Err(ConfigError::ZoneSize(zone_blocks));
    }
    Ok(())
}

pub(crate) fn host_nqn(host: &str) -> Result<Nqn, ConfigError> {
    Nqn::lenient(host).map_err(|rule| ConfigError::HostNqn(host.to_owned(), rule))
}
