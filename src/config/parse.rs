//! From TOML to the checked types.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use nvme::nqn::Nqn;
use nvme::registry::AnaState;
use toml::de::DeTable;
use uuid::Uuid;

use super::keys::{GROUPS, HASHES, HostSpec};
use super::problem::ConfigError;
use super::reader::{At, Problems, Section};
use super::size::Bytes;
use super::{
    AnaSpec, CNTLID_MAX, CNTLID_MIN, Config, ListenAddress, NamespaceSpec, Options, ProviderChoice, ReferralSpec,
    SubsystemSpec, derive_serial,
};
use crate::backend::{BackendSpec, FaultPlan, MemoryZones, Source};
use crate::roce::Dcqcn;
use crate::target::{Admission, Duplicates, Limits};

/// A file to start from: it serves something.
pub(super) fn parse(text: &str, name: &str) -> Result<Config, ConfigError> {
    parse_with(text, name, false)
}

/// What a running target is to become: it may serve nothing for a while.
pub(super) fn parse_running(text: &str, name: &str) -> Result<Config, ConfigError> {
    parse_with(text, name, true)
}

fn parse_with(text: &str, name: &str, may_be_empty: bool) -> Result<Config, ConfigError> {
    let mut problems = Problems::new(name, text);
    let (table, errors) = DeTable::parse_recoverable(text);
    // What follows the first error is guesswork.
    let start = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    if let Some(error) = errors.iter().min_by_key(|error| start(error)) {
        let at = start(error);
        problems.add(at, "", error.message().replace('\n', ", "), "correct the TOML here");
    }
    let mut seen = Seen { may_be_empty, ..Seen::default() };
    let config = errors.is_empty().then(|| read(Section::new(table.get_ref(), "", 0), &mut seen, &mut problems));
    if let Some(config) = config.filter(|_| problems.found.is_empty()) {
        return Ok(config);
    }
    problems.found.sort_by_key(|problem| problem.line);
    Err(ConfigError(problems.found))
}

/// The rules of the whole file: whether it has to serve something, and what must be unique, by where it was first.
#[derive(Default)]
struct Seen {
    may_be_empty: bool,
    nqns: HashMap<String, usize>,
    /// UUID, NGUID and EUI-64, each with its kind.
    ids: HashMap<(&'static str, Vec<u8>), usize>,
    paths: HashMap<PathBuf, usize>,
    addresses: HashMap<(std::net::IpAddr, Option<String>, u16), usize>,
    referrals: HashMap<(std::net::SocketAddr, String), usize>,
    /// Listeners that ANA states are for, and where that is said.
    ana_listeners: Vec<(usize, ListenAddress)>,
}

fn read(mut root: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Config {
    let subsystems = root.sections("subsystem", "subsystem", problems);
    if subsystems.is_empty() && !seen.may_be_empty {
        problems.add(0, "subsystem", "there is none", "add [[subsystem]] with an nqn");
    }
    let subsystems = subsystems.into_iter().map(|section| read_subsystem(section, seen, problems)).collect();
    let listeners = root.sections("listener", "listener", problems);
    let listeners: Vec<ListenAddress> =
        listeners.into_iter().filter_map(|section| read_listener(section, seen, problems)).collect();
    let referrals = root.sections("referral", "referral", problems);
    let referrals = referrals.into_iter().filter_map(|section| read_referral(section, seen, problems)).collect();
    for (at, named) in &seen.ana_listeners {
        let place = (named.ip, named.scope.clone(), named.port);
        if !seen.addresses.contains_key(&place) && (*named != ListenAddress::any() || !listeners.is_empty()) {
            let remedy = "name a listener as it is configured, or leave it out for all of them";
            problems.add(*at, "subsystem.ana.listener", format!("{named} is no listener"), remedy);
        }
    }
    let options = match root.section("options", "options", problems) {
        Some(section) => read_options(section, seen, problems),
        None => Options::default(),
    };
    root.finish(problems);
    Config { subsystems, listeners, referrals, options }
}

fn read_subsystem(mut section: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> SubsystemSpec {
    let nqn = match section.string("nqn", problems) {
        Some(nqn) => {
            if let Err(rule) = Nqn::strict(&nqn.value) {
                problems.add(nqn.at, "subsystem.nqn", format!("{:?}: {rule}", nqn.value), NQN_REMEDY);
            }
            unique(&mut seen.nqns, nqn.value.clone(), &nqn, "subsystem.nqn", "choose another NQN", problems);
            nqn.value
        }
        None => {
            missing(&section, "nqn", NQN_REMEDY, problems);
            String::new()
        }
    };
    let serial = text(&mut section, "serial", 20, problems).unwrap_or_else(|| derive_serial(&nqn));
    let model = text(&mut section, "model", 40, problems);
    let hosts = section.strings("hosts", problems);
    let allow_any_host = section.bool("allow_any_host", problems);
    if allow_any_host == Some(true) && hosts.as_ref().is_some_and(|hosts| !hosts.is_empty()) {
        problems.add(section.at(), "subsystem.hosts", "contradicts allow_any_host = true", "leave one of them out");
    }
    let specs = section.sections("host", "subsystem.host", problems);
    let allow_any_host = allow_any_host.unwrap_or_else(|| hosts.is_none() && specs.is_empty());
    let mut hosts = read_hosts(hosts.unwrap_or_default(), problems);
    let host_specs = read_host_specs(specs, &mut hosts, problems);
    let sections = section.sections("namespace", "subsystem.namespace", problems);
    if sections.is_empty() && !seen.may_be_empty {
        let remedy = "add [[subsystem.namespace]] with a file, device, memory or null";
        problems.add(section.at(), "subsystem.namespace", "there is none", remedy);
    }
    let admission = read_admission(&mut section, problems);
    let ana = section.sections("ana", "subsystem.ana", problems);
    let ana = ana.into_iter().filter_map(|section| read_ana(section, seen, problems)).collect();
    let mut nsids = HashMap::new();
    let mut namespaces = Vec::new();
    for (place, section) in sections.into_iter().enumerate() {
        namespaces.extend(read_namespace(section, place, &mut nsids, seen, problems));
    }
    section.finish(problems);
    SubsystemSpec { nqn, serial, model, allow_any_host, hosts, host_specs, namespaces, ana, admission }
}

fn read_admission(section: &mut Section<'_, '_>, problems: &mut Problems<'_>) -> Admission {
    let mut count = |key| section.number(key, 1..u64::from(CNTLID_MAX) + 1, problems).map(|count| count.value as u16);
    let (controllers, controllers_per_host) = (count("max_controllers"), count("max_controllers_per_host"));
    let mut duplicates = Duplicates::Allow;
    if let Some(word) = section.string("duplicate_hosts", problems) {
        match DUPLICATES.iter().find(|(name, _)| *name == word.value) {
            Some((_, known)) => duplicates = *known,
            None => {
                let remedy = "choose allow, refuse or replace";
                problems.add(word.at, "subsystem.duplicate_hosts", format!("{:?} is none", word.value), remedy);
            }
        }
    }
    Admission { controllers, controllers_per_host, duplicates }
}

fn read_limits(mut section: Section<'_, '_>, problems: &mut Problems<'_>) -> Limits {
    let iops = section.number("iops", 1..MAX_IOPS, problems).map_or(0, |number| number.value);
    let mut bytes = |key| section.size(key, 512..MAX_SIZE, problems).map_or(0, |size| size.value);
    let limits = Limits {
        iops,
        bandwidth: bytes("bandwidth"),
        read_bandwidth: bytes("read_bandwidth"),
        write_bandwidth: bytes("write_bandwidth"),
    };
    section.finish(problems);
    limits
}

fn read_ana(mut section: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Option<AnaSpec> {
    let before = problems.found.len();
    let group = section.number("group", ANA_GROUPS, problems);
    if group.is_none() && problems.found.len() == before {
        missing(&section, "group", "give one of 1 to 128", problems);
    }
    let listener = section.string("listener", problems).and_then(|text| match text.value.parse::<ListenAddress>() {
        Ok(address) => {
            seen.ana_listeners.push((text.at, address.clone()));
            Some(address)
        }
        Err(reason) => {
            problems.add(text.at, "subsystem.ana.listener", reason, ADDRESS_REMEDY);
            None
        }
    });
    let before = problems.found.len();
    let state = section.string("state", problems);
    if state.is_none() && problems.found.len() == before {
        missing(&section, "state", STATE_REMEDY, problems);
    }
    section.finish(problems);
    let state = state.and_then(|text| {
        let known = ANA_STATES.iter().find(|(name, _)| *name == text.value);
        if known.is_none() {
            problems.add(text.at, "subsystem.ana.state", format!("{:?} is no state", text.value), STATE_REMEDY);
        }
        known.map(|(_, state)| *state)
    });
    Some(AnaSpec { group: group?.value as u32, listener, state: state? })
}

fn read_hosts(hosts: Vec<At<String>>, problems: &mut Problems<'_>) -> Vec<String> {
    read_host_names(hosts, "subsystem.hosts", problems)
}

fn read_host_names(hosts: Vec<At<String>>, key: &str, problems: &mut Problems<'_>) -> Vec<String> {
    let mut seen = HashMap::new();
    for host in &hosts {
        if let Err(rule) = Nqn::lenient(&host.value) {
            let remedy = "give the host's own NQN, from /etc/nvme/hostnqn there";
            problems.add(host.at, key, format!("{:?}: {rule}", host.value), remedy);
        }
        unique(&mut seen, host.value.clone(), host, key, "name each host once", problems);
    }
    hosts.into_iter().map(|host| host.value).collect()
}

/// The name of a file that holds a secret. A secret in its place is not repeated, here or where the file would be opened.
fn read_key_file(section: &mut Section<'_, '_>, key: &'static str, problems: &mut Problems<'_>) -> Option<PathBuf> {
    let file = section.string(key, problems)?;
    if file.value.starts_with("DHHC-1:") {
        let remedy = "write the secret into a file of mode 600 and name that";
        problems.add(file.at, &format!("subsystem.host.{key}"), "is a secret, not the name of a file", remedy);
        return None;
    }
    Some(file.value.into())
}

/// Hosts with rules of their own; each may connect, so it joins the list.
fn read_host_specs(
    sections: Vec<Section<'_, '_>>,
    hosts: &mut Vec<String>,
    problems: &mut Problems<'_>,
) -> Vec<HostSpec> {
    let mut specs = Vec::new();
    for mut section in sections {
        let Some(nqn) = section.string("nqn", problems) else {
            missing(&section, "nqn", "give the host's own NQN, from /etc/nvme/hostnqn there", problems);
            continue;
        };
        let nqn = read_hosts(vec![nqn], problems);
        let Some(nqn) = nqn.into_iter().next() else { continue };
        if hosts.contains(&nqn) {
            problems.add(section.at(), "subsystem.host.nqn", format!("{nqn:?} is there twice"), "name each host once");
        }
        hosts.push(nqn.clone());
        let mut spec = HostSpec::new(nqn);
        spec.dhchap_key = read_key_file(&mut section, "dhchap_key", problems);
        spec.dhchap_controller_key = read_key_file(&mut section, "dhchap_controller_key", problems);
        if spec.dhchap_key.is_none() && spec.dhchap_controller_key.is_some() {
            let remedy = "give the host's own as dhchap_key too";
            problems.add(section.at(), "subsystem.host.dhchap_controller_key", "is not used alone", remedy);
        }
        words(&mut section, "dhchap_hashes", &HASHES, &mut spec.dhchap_hashes, problems);
        words(&mut section, "dhchap_groups", &GROUPS, &mut spec.dhchap_groups, problems);
        if let Some(limits) = section.section("limits", "subsystem.host.limits", problems) {
            spec.limits = read_limits(limits, problems);
        }
        spec.line = Some(problems.line(section.at()));
        section.finish(problems);
        specs.push(spec);
    }
    specs
}

/// A list of known words, not empty.
fn words<T: Copy>(
    section: &mut Section<'_, '_>,
    key: &'static str,
    known: &[(&str, T)],
    list: &mut Vec<T>,
    problems: &mut Problems<'_>,
) {
    let Some(words) = section.strings(key, problems) else { return };
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let remedy = format!("choose from {}", names.join(", "));
    if words.is_empty() {
        problems.add(section.at(), &section.key(key), "is empty", &remedy);
    }
    list.clear();
    for word in words {
        match known.iter().find(|(name, _)| *name == word.value) {
            Some((_, value)) => list.push(*value),
            None => problems.add(word.at, &section.key(key), format!("{:?} is none", word.value), &remedy),
        }
    }
}

fn read_namespace(
    mut section: Section<'_, '_>,
    place: usize,
    nsids: &mut HashMap<u32, usize>,
    seen: &mut Seen,
    problems: &mut Problems<'_>,
) -> Option<NamespaceSpec> {
    let nsid = section.number("nsid", 1..MAX_NSID + 1, problems);
    let nsid = nsid.unwrap_or_else(|| At { value: place as u64 + 1, at: section.at() });
    let nsid = At { value: nsid.value as u32, at: nsid.at };
    unique(nsids, nsid.value, &nsid, "subsystem.namespace.nsid", "give each namespace its own", problems);
    let source = read_source(&mut section, seen, problems);
    let block_size = section.size("block_size", 512..4097, problems);
    if let Some(size) = block_size.as_ref().filter(|size| !matches!(size.value, 512 | 4096)) {
        problems.add(size.at, "subsystem.namespace.block_size", Bytes(size.value), "choose 512 or 4096");
    }
    let read_only = section.bool("read_only", problems).unwrap_or(false);
    let buffered = section.bool("buffered", problems).unwrap_or(false);
    let faults = section.section("faults", "subsystem.namespace.faults", problems);
    let faults = faults.map(|section| read_faults(section, problems));
    let uuid = read_id(&mut section, "uuid", seen, problems, |text| Uuid::try_parse(text).ok().map(Uuid::into_bytes));
    let nguid = read_id(&mut section, "nguid", seen, problems, hex::<16>);
    let eui64 = read_id(&mut section, "eui64", seen, problems, hex::<8>);
    let ana_group = section.number("ana_group", ANA_GROUPS, problems).map_or(1, |group| group.value as u32);
    let hosts = section.strings("hosts", problems);
    let hosts = hosts.map(|hosts| read_host_names(hosts, "subsystem.namespace.hosts", problems));
    let limits = section.section("limits", "subsystem.namespace.limits", problems);
    let limits = limits.map(|section| read_limits(section, problems)).unwrap_or_default();
    let zones = read_zones(&mut section, problems);
    let at = section.at();
    section.finish(problems);
    let source = source?;
    if let Some(zones) = &zones {
        check_zones(&source, &zones.value, block_size.as_ref().map(|size| size.value), zones.at, problems);
    }
    let zones = zones.map(|zones| zones.value);
    check_sizes(&source, block_size.as_ref().map(|size| size.value), at, problems);
    if read_only && matches!(source.value, Source::Memory { .. } | Source::Null { .. }) {
        let remedy = "leave it out: nothing could ever be in it";
        problems.add(at, "subsystem.namespace.read_only", "is for files and devices", remedy);
    }
    let block_size = block_size.map(|size| size.value as u32);
    Some(NamespaceSpec {
        nsid: nsid.value,
        backend: BackendSpec { source: source.value, block_size, read_only, buffered, zones, faults },
        configured_uuid: uuid.map(Uuid::from_bytes),
        configured_nguid: nguid,
        eui64: eui64.unwrap_or_default(),
        ana_group,
        hosts,
        limits,
        line: Some(problems.line(at)),
    })
}

/// Exactly one of the four kinds.
fn read_source(section: &mut Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Option<At<Source>> {
    let before = problems.found.len();
    let size = section.size("size", 512..MAX_SIZE, problems);
    let file = section.string("file", problems);
    let device = section.string("device", problems);
    let memory = section.size("memory", 512..MAX_SIZE, problems);
    let null = section.size("null", 512..MAX_SIZE, problems);
    let broken = problems.found.len() > before;
    let is_file = file.is_some();
    for path in [&file, &device].into_iter().flatten() {
        let remedy = "serve it once";
        unique(&mut seen.paths, normal(Path::new(&path.value)), path, "subsystem.namespace", remedy, problems);
    }
    let size_of_file = size.as_ref().map(|size| size.value);
    let sources: Vec<At<Source>> = [
        file.map(|file| At { value: Source::File { path: file.value.into(), size: size_of_file }, at: file.at }),
        device.map(|device| At { value: Source::Device { path: device.value.into() }, at: device.at }),
        memory.map(|size| At { value: Source::Memory { size: size.value }, at: size.at }),
        null.map(|size| At { value: Source::Null { size: size.value }, at: size.at }),
    ]
    .into_iter()
    .flatten()
    .collect();
    let remedy = "give exactly one of file, device, memory, null";
    match &sources[..] {
        [] if broken => {}
        [] => problems.add(section.at(), "subsystem.namespace", "has nothing behind it", remedy),
        [_] => {}
        [_, second, ..] => problems.add(second.at, "subsystem.namespace", "has more than one thing behind it", remedy),
    }
    if let Some(size) = size.filter(|_| !is_file && !sources.is_empty()) {
        let remedy = "leave it out: a device has its own, memory and null are given theirs";
        problems.add(size.at, "subsystem.namespace.size", "is for files", remedy);
    }
    sources.into_iter().next()
}

fn check_sizes(source: &At<Source>, block_size: Option<u64>, at: usize, problems: &mut Problems<'_>) {
    let (key, size) = match source.value {
        Source::File { size: Some(size), .. } => ("subsystem.namespace.size", size),
        Source::Memory { size } => ("subsystem.namespace.memory", size),
        Source::Null { size } => ("subsystem.namespace.null", size),
        Source::File { size: None, .. } | Source::Device { .. } => return,
    };
    let lba = block_size.unwrap_or(512);
    if matches!(lba, 512 | 4096) && size % lba != 0 {
        let at = if key.ends_with("size") { at } else { source.at };
        let reason = format!("{} is not a multiple of the block size {lba}", Bytes(size));
        problems.add(at, key, reason, "change the size or the block_size");
    }
}

/// Zones of memory.
fn read_zones(section: &mut Section<'_, '_>, problems: &mut Problems<'_>) -> Option<At<MemoryZones>> {
    let zone_size = section.size("zone_size", 512..MAX_SIZE, problems);
    let zone_capacity = section.size("zone_capacity", 512..MAX_SIZE, problems);
    let mut limit = |key| section.number(key, 1..1 << 32, problems);
    let (open, active) = (limit("max_open_zones"), limit("max_active_zones"));
    let others = [("zone_capacity", &zone_capacity), ("max_open_zones", &open), ("max_active_zones", &active)];
    let Some(zone_size) = zone_size else {
        for (key, value) in others {
            if let Some(value) = value {
                let reason = "is for memory that has a zone_size";
                problems.add(value.at, &section.key(key), reason, "give zone_size too, or leave it out");
            }
        }
        return None;
    };
    let number = |value: Option<At<u64>>| value.map_or(0, |value| value.value as u32);
    let zones = MemoryZones {
        zone_size: zone_size.value,
        zone_capacity: zone_capacity.map(|capacity| capacity.value),
        max_open: number(open),
        max_active: number(active),
    };
    Some(At { value: zones, at: zone_size.at })
}

fn check_zones(
    source: &At<Source>,
    zones: &MemoryZones,
    block_size: Option<u64>,
    at: usize,
    problems: &mut Problems<'_>,
) {
    let key = "subsystem.namespace.zone_size";
    let Source::Memory { size } = source.value else {
        let remedy = "leave it out: a zoned device has its own zones, and nothing else has any";
        return problems.add(at, key, "is for memory", remedy);
    };
    let block_size = block_size.and_then(|size| u32::try_from(size).ok()).unwrap_or(512);
    if let Err(error) = zones.check(size, block_size) {
        problems.add(at, key, error.reason, error.remedy);
    }
}

/// Faults before the backend: a test tool.
fn read_faults(mut section: Section<'_, '_>, problems: &mut Problems<'_>) -> FaultPlan {
    let number = |value: Option<At<u64>>| value.map_or(0, |value| value.value);
    let plan = FaultPlan {
        seed: number(section.number("seed", 0..u64::MAX, problems)),
        fail_one_in: number(section.number("fail_one_in", 0..1 << 32, problems)) as u32,
        delay_polls: number(section.number("delay_polls", 0..1 << 20, problems)) as u32,
        drop_flush: section.bool("drop_flush", problems).unwrap_or(false),
        hang_on_flush: section.bool("hang_on_flush", problems).unwrap_or(false),
    };
    section.finish(problems);
    plan
}

fn read_id<const N: usize>(
    section: &mut Section<'_, '_>,
    key: &'static str,
    seen: &mut Seen,
    problems: &mut Problems<'_>,
    read: impl Fn(&str) -> Option<[u8; N]>,
) -> Option<[u8; N]> {
    let text = section.string(key, problems)?;
    let name = section.key(key);
    match read(&text.value) {
        None => {
            let wanted = if key == "uuid" { "8-4-4-4-12".to_owned() } else { (2 * N).to_string() };
            problems.add(
                text.at,
                &name,
                format!("{:?} is none", text.value),
                format!("give {wanted} hexadecimal digits"),
            );
            None
        }
        Some(id) if id == [0; N] => {
            problems.add(text.at, &name, "is all zero", "leave it out, or give another");
            None
        }
        Some(id) => {
            let remedy = "give each namespace its own: hosts take equal ones for one disk";
            unique(&mut seen.ids, (key, id.to_vec()), &text, &name, remedy, problems);
            Some(id)
        }
    }
}

fn read_listener(mut section: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Option<ListenAddress> {
    let text = section.string("address", problems);
    let tos = section.number("tos", 0..256, problems);
    let at = section.at();
    let Some(text) = text else {
        missing(&section, "address", ADDRESS_REMEDY, problems);
        section.finish(problems);
        return None;
    };
    section.finish(problems);
    match text.value.parse::<ListenAddress>() {
        Ok(address) => {
            let key = (address.ip, address.scope.clone(), address.port);
            let place = At { value: text.value.clone(), at };
            unique(&mut seen.addresses, key, &place, "listener.address", "listen on each address once", problems);
            Some(ListenAddress { tos: tos.map(|tos| tos.value as u8), line: Some(problems.line(at)), ..address })
        }
        Err(reason) => {
            problems.add(text.at, "listener.address", reason, ADDRESS_REMEDY);
            None
        }
    }
}

fn read_referral(mut section: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Option<ReferralSpec> {
    let text = section.string("address", problems);
    let nqn = section.string("nqn", problems);
    let hosts = section.strings("hosts", problems).map(|hosts| read_host_names(hosts, "referral.hosts", problems));
    if text.is_none() {
        missing(&section, "address", ADDRESS_REMEDY, problems);
    }
    let at = section.at();
    section.finish(problems);
    if let Some(nqn) = &nqn
        && let Err(rule) = Nqn::lenient(&nqn.value)
    {
        problems.add(nqn.at, "referral.nqn", format!("{:?}: {rule}", nqn.value), NQN_REMEDY);
    }
    let text = text?;
    let address = match text.value.parse::<ListenAddress>() {
        Ok(address) if address.scope.is_some() || address.ip.is_unspecified() || address.ip.is_multicast() => {
            let reason = format!("{:?} means nothing to a host", text.value);
            problems.add(text.at, "referral.address", reason, "give one that hosts can connect to");
            return None;
        }
        Ok(address) => address,
        Err(reason) => {
            problems.add(text.at, "referral.address", reason, ADDRESS_REMEDY);
            return None;
        }
    };
    let nqn = nqn.map(|nqn| nqn.value);
    let name = nqn.clone().unwrap_or_else(|| nvme::DISCOVERY_NQN.to_owned());
    let key = (std::net::SocketAddr::new(address.ip, address.port), name);
    let place = At { value: text.value, at };
    unique(&mut seen.referrals, key, &place, "referral.address", "refer to each service once", problems);
    Some(ReferralSpec { address, nqn, hosts })
}

fn read_options(mut section: Section<'_, '_>, seen: &mut Seen, problems: &mut Problems<'_>) -> Options {
    let mut options = Options::default();
    if let Some(text) = section.string("provider", problems) {
        match text.value.parse::<ProviderChoice>() {
            Ok(provider) => options.provider = provider,
            Err(reason) => problems.add(text.at, "options.provider", reason, "choose auto, verbs or soft"),
        }
    }
    options.reactors = section.number("reactors", 1..257, problems).map(|number| number.value as u16);
    set(&mut options.io_queues, section.number("io_queues", 1..129, problems));
    set(&mut options.queue_depth, section.number("queue_depth", 2..1025, problems));
    set(
        &mut options.in_capsule_data,
        multiple(16, "in_capsule_data", section.size("in_capsule_data", 0..16385, problems), problems),
    );
    let mdts = section.size("mdts", 4096..(1 << 20) + 1, problems);
    if let Some(size) = mdts.as_ref().filter(|size| !size.value.is_power_of_two()) {
        problems.add(
            size.at,
            "options.mdts",
            format!("{} is no power of two", Bytes(size.value)),
            "choose 64K, 128K, .. 1M",
        );
    }
    set(&mut options.mdts, mdts);
    set(
        &mut options.pool_size,
        multiple(1 << 20, "pool_size", section.size("pool_size", 4 << 20..(1 << 40) + 1, problems), problems),
    );
    set(&mut options.receive_slots, section.number("receive_slots", 128..(1 << 20) + 1, problems));
    set_flag(&mut options.subsystem_reset, section.bool("subsystem_reset", problems));
    let delay = section.number("retry_delay", 0..6_553_501, problems);
    set(&mut options.retry_delay, multiple(100, "retry_delay", delay, problems));
    options.discovery_nqn = section.string("discovery_nqn", problems).map(|nqn| {
        if let Err(rule) = Nqn::strict(&nqn.value) {
            problems.add(nqn.at, "options.discovery_nqn", format!("{:?}: {rule}", nqn.value), NQN_REMEDY);
        }
        unique(&mut seen.nqns, nqn.value.clone(), &nqn, "options.discovery_nqn", "choose another NQN", problems);
        nqn.value
    });
    options.state_dir = section.string("state_dir", problems).map(|folder| {
        if !Path::new(&folder.value).is_absolute() {
            let reason = format!("{:?} is no absolute path", folder.value);
            problems.add(folder.at, "options.state_dir", reason, "give one, such as /var/lib/farside");
        }
        folder.value.into()
    });
    set_flag(&mut options.poll, section.bool("poll", problems));
    set_flag(&mut options.histograms, section.bool("histograms", problems));
    set_flag(&mut options.remote_invalidate, section.bool("remote_invalidate", problems));
    set_flag(&mut options.raw_headers, section.bool("raw_headers", problems));
    set(&mut options.connect_timeout, section.number("connect_timeout", 1000..600_001, problems));
    let granularity = section.number("keep_alive_granularity", 100..60_001, problems);
    set(&mut options.keep_alive_granularity, multiple(100, "keep_alive_granularity", granularity, problems));
    read_cntlid(&mut options, &mut section, problems);
    if let Some(section) = section.section("dcqcn", "options.dcqcn", problems) {
        read_dcqcn(&mut options.dcqcn, section, problems);
    }
    if let Some(text) = section.string("log", problems) {
        if !LOG_LEVELS.contains(&text.value.as_str()) {
            let reason = format!("{:?} is no level", text.value);
            problems.add(text.at, "options.log", reason, format!("choose one of {}", LOG_LEVELS.join(", ")));
        }
        options.log = text.value;
    }
    section.finish(problems);
    options
}

/// The parameters that the paper has letters for carry its letters in their comments.
fn read_dcqcn(dcqcn: &mut Dcqcn, mut section: Section<'_, '_>, problems: &mut Problems<'_>) {
    let rate = 1000..(1_u64 << 40);
    set(&mut dcqcn.line_rate, section.size("line_rate", rate.clone(), problems));
    set(&mut dcqcn.min_rate, section.size("min_rate", rate.clone(), problems));
    set(&mut dcqcn.g_shift, section.number("g_shift", 1..20, problems)); // g
    set_micros(&mut dcqcn.alpha_timer, section.number("alpha_timer_us", 1..1_000_001, problems)); // K
    set_micros(&mut dcqcn.rate_timer, section.number("rate_timer_us", 1..1_000_001, problems)); // T
    set(&mut dcqcn.byte_counter, section.size("byte_counter", 1000..1 << 40, problems)); // B
    set(&mut dcqcn.fast_recovery, section.number("fast_recovery", 1..1001, problems)); // F
    set(&mut dcqcn.r_ai, section.size("r_ai", rate.clone(), problems)); // R_AI
    set(&mut dcqcn.r_hai, section.size("r_hai", rate, problems)); // R_HAI
    set_micros(&mut dcqcn.cnp_interval, section.number("cnp_interval_us", 0..1_000_001, problems)); // N
    if dcqcn.min_rate > dcqcn.line_rate {
        problems.add(section.at(), "options.dcqcn.min_rate", "is above line_rate", "give a lower one");
    }
    section.finish(problems);
}

fn set_micros(option: &mut Duration, value: Option<At<u64>>) {
    if let Some(micros) = value {
        *option = Duration::from_micros(micros.value);
    }
}

fn read_cntlid(options: &mut Options, section: &mut Section<'_, '_>, problems: &mut Problems<'_>) {
    let range = u64::from(CNTLID_MIN)..u64::from(CNTLID_MAX) + 1;
    let min = section.number("cntlid_min", range.clone(), problems);
    let max = section.number("cntlid_max", range, problems);
    let at = max.as_ref().or(min.as_ref()).map_or(0, |value| value.at);
    let low = min.map_or(CNTLID_MIN, |value| value.value as u16);
    let high = max.map_or(CNTLID_MAX, |value| value.value as u16);
    if low > high {
        problems.add(at, "options.cntlid_max", "is below cntlid_min", "give a range that is not empty");
    }
    options.cntlid = low..=high;
}

const MAX_NSID: u64 = 1024;
const ANA_GROUPS: std::ops::Range<u64> = 1..nvme::ana::MAX_GROUPS as u64 + 1;
pub(super) const ANA_STATES: [(&str, AnaState); 5] = [
    ("optimized", AnaState::Optimized),
    ("non-optimized", AnaState::NonOptimized),
    ("inaccessible", AnaState::Inaccessible),
    ("persistent-loss", AnaState::PersistentLoss),
    ("change", AnaState::Change),
];
pub(super) const DUPLICATES: [(&str, Duplicates); 3] =
    [("allow", Duplicates::Allow), ("refuse", Duplicates::Refuse), ("replace", Duplicates::Replace)];
const MAX_IOPS: u64 = 1_000_000_001;
const STATE_REMEDY: &str = "give optimized, non-optimized, inaccessible, persistent-loss or change";
/// Offsets of files are signed.
const MAX_SIZE: u64 = 1 << 63;
const LOG_LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
const NQN_REMEDY: &str = "give one of the form nqn.yyyy-mm.reversed.domain:name";
const ADDRESS_REMEDY: &str = "give one of the form 192.0.2.1:4420, [2001:db8::1]:4420 or [fe80::1%eth0]:4420";

fn missing(section: &Section<'_, '_>, key: &str, remedy: &str, problems: &mut Problems<'_>) {
    problems.add(section.at(), &section.key(key), "is missing", remedy);
}

/// Notes a value, or the problem that it was there before.
fn unique<K: std::hash::Hash + Eq, T: std::fmt::Debug>(
    seen: &mut HashMap<K, usize>,
    key: K,
    place: &At<T>,
    name: &str,
    remedy: &str,
    problems: &mut Problems<'_>,
) {
    if seen.insert(key, place.at).is_some() {
        problems.add(place.at, name, format!("{:?} is there twice", place.value), remedy);
    }
}

/// Printable ASCII of a limited length (NVMe Base 2.x, ASCII strings).
fn text(section: &mut Section<'_, '_>, key: &'static str, max: usize, problems: &mut Problems<'_>) -> Option<String> {
    let text = section.string(key, problems)?;
    let fits = (1..=max).contains(&text.value.len()) && text.value.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if !fits {
        let remedy = format!("give 1 to {max} printable ASCII characters");
        problems.add(text.at, &section.key(key), format!("{:?} does not fit", text.value), remedy);
    }
    Some(text.value)
}

fn multiple(of: u64, key: &str, size: Option<At<u64>>, problems: &mut Problems<'_>) -> Option<At<u64>> {
    let size = size?;
    if !size.value.is_multiple_of(of) {
        let reason = format!("{} is no multiple of {}", Bytes(size.value), Bytes(of));
        problems.add(size.at, &format!("options.{key}"), reason, format!("choose a multiple of {}", Bytes(of)));
    }
    Some(size)
}

/// Takes a number over; its range was checked to fit.
fn set<T: TryFrom<u64>>(option: &mut T, value: Option<At<u64>>) {
    if let Some(value) = value.and_then(|value| T::try_from(value.value).ok()) {
        *option = value;
    }
}

fn set_flag(option: &mut bool, value: Option<bool>) {
    *option = value.unwrap_or(*option);
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.len() != 2 * N || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// A path without `.` and double slashes, to compare.
fn normal(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}
