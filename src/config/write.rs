//! From the checked types back to TOML: what [`super::Config::parse`] reads as the same configuration. What is as by default
//! is left out.

use std::time::Duration;

use nvme::auth::{Group, Hash};
use toml::{Table, Value};

use super::keys::{GROUPS, HASHES, HostSpec};
use super::parse::DUPLICATES;
use super::size::Bytes;
use super::{
    AnaSpec, Config, ListenAddress, NamespaceSpec, Options, ReferralSpec, SubsystemSpec, ana_state_name, derive_serial,
};
use crate::backend::{FaultPlan, Source};
use crate::roce::Dcqcn;
use crate::target::{Duplicates, Limits};

impl Config {
    /// As the text of a configuration file.
    pub fn to_toml(&self) -> String {
        let mut root = Table::new();
        put_all(&mut root, "subsystem", self.subsystems.iter().map(subsystem));
        put_all(&mut root, "listener", self.listeners.iter().map(listener));
        put_all(&mut root, "referral", self.referrals.iter().map(referral));
        let options = options(&self.options);
        if !options.is_empty() {
            root.insert("options".into(), Value::Table(options));
        }
        root.to_string()
    }
}

fn put_all(table: &mut Table, key: &str, all: impl Iterator<Item = Table>) {
    let all: Vec<Value> = all.map(Value::Table).collect();
    if !all.is_empty() {
        table.insert(key.into(), Value::Array(all));
    }
}

fn put(table: &mut Table, key: &str, value: impl Into<Value>) {
    table.insert(key.into(), value.into());
}

fn put_size(table: &mut Table, key: &str, bytes: u64) {
    put(table, key, Bytes(bytes).to_string());
}

fn subsystem(subsystem: &SubsystemSpec) -> Table {
    let mut table = Table::new();
    put(&mut table, "nqn", subsystem.nqn.as_str());
    if subsystem.serial != derive_serial(&subsystem.nqn) {
        put(&mut table, "serial", subsystem.serial.as_str());
    }
    if let Some(model) = &subsystem.model {
        put(&mut table, "model", model.as_str());
    }
    let plain = |host: &&String| !subsystem.host_specs.iter().any(|spec| spec.nqn == **host);
    let hosts: Vec<String> = subsystem.hosts.iter().filter(plain).cloned().collect();
    match (subsystem.allow_any_host, subsystem.host_specs.is_empty()) {
        // Hosts with rules of their own say by themselves that not any host may.
        (true, false) => put(&mut table, "allow_any_host", true),
        (false, false) if hosts.is_empty() => {}
        (false, _) => put(&mut table, "hosts", hosts),
        (true, true) => {}
    }
    let admission = &subsystem.admission;
    for (key, count) in
        [("max_controllers", admission.controllers), ("max_controllers_per_host", admission.controllers_per_host)]
    {
        if let Some(count) = count {
            put(&mut table, key, i64::from(count));
        }
    }
    if let Some((word, _)) = DUPLICATES.iter().find(|(_, known)| *known == admission.duplicates)
        && admission.duplicates != Duplicates::default()
    {
        put(&mut table, "duplicate_hosts", *word);
    }
    put_all(&mut table, "host", subsystem.host_specs.iter().map(host));
    put_all(&mut table, "ana", subsystem.ana.iter().map(ana));
    put_all(&mut table, "namespace", subsystem.namespaces.iter().map(namespace));
    table
}

fn host(host: &HostSpec) -> Table {
    let mut table = Table::new();
    put(&mut table, "nqn", host.nqn.as_str());
    for (key, file) in [("dhchap_key", &host.dhchap_key), ("dhchap_controller_key", &host.dhchap_controller_key)] {
        if let Some(file) = file {
            put(&mut table, key, file.display().to_string());
        }
    }
    if host.dhchap_hashes != Hash::ALL {
        put(&mut table, "dhchap_hashes", words(&host.dhchap_hashes, &HASHES));
    }
    if host.dhchap_groups != Group::ALL {
        put(&mut table, "dhchap_groups", words(&host.dhchap_groups, &GROUPS));
    }
    put_limits(&mut table, &host.limits);
    table
}

fn put_limits(table: &mut Table, limits: &Limits) {
    if *limits == Limits::default() {
        return;
    }
    let mut limited = Table::new();
    if limits.iops != 0 {
        put(&mut limited, "iops", limits.iops as i64);
    }
    for (key, rate) in [
        ("bandwidth", limits.bandwidth),
        ("read_bandwidth", limits.read_bandwidth),
        ("write_bandwidth", limits.write_bandwidth),
    ] {
        if rate != 0 {
            put_size(&mut limited, key, rate);
        }
    }
    put(table, "limits", limited);
}

fn words<T: PartialEq>(list: &[T], known: &[(&'static str, T)]) -> Vec<&'static str> {
    let word = |value: &T| known.iter().find(|(_, known)| known == value).map(|(word, _)| *word);
    list.iter().filter_map(word).collect()
}

fn ana(ana: &AnaSpec) -> Table {
    let mut table = Table::new();
    put(&mut table, "group", i64::from(ana.group));
    if let Some(listener) = &ana.listener {
        put(&mut table, "listener", listener.to_string());
    }
    put(&mut table, "state", ana_state_name(ana.state));
    table
}

fn namespace(namespace: &NamespaceSpec) -> Table {
    let mut table = Table::new();
    put(&mut table, "nsid", i64::from(namespace.nsid));
    let backend = &namespace.backend;
    match &backend.source {
        Source::File { path, size } => {
            put(&mut table, "file", path.display().to_string());
            if let Some(size) = size {
                put_size(&mut table, "size", *size);
            }
        }
        Source::Device { path } => put(&mut table, "device", path.display().to_string()),
        Source::Memory { size } => put_size(&mut table, "memory", *size),
        Source::Null { size } => put_size(&mut table, "null", *size),
    }
    if let Some(zones) = &backend.zones {
        put_size(&mut table, "zone_size", zones.zone_size);
        if let Some(capacity) = zones.zone_capacity {
            put_size(&mut table, "zone_capacity", capacity);
        }
        for (key, limit) in [("max_open_zones", zones.max_open), ("max_active_zones", zones.max_active)] {
            if limit != 0 {
                put(&mut table, key, i64::from(limit));
            }
        }
    }
    if let Some(size) = backend.block_size {
        put(&mut table, "block_size", i64::from(size));
    }
    for (key, set) in [("read_only", backend.read_only), ("buffered", backend.buffered)] {
        if set {
            put(&mut table, key, true);
        }
    }
    if let Some(uuid) = namespace.configured_uuid {
        put(&mut table, "uuid", uuid.to_string());
    }
    if let Some(nguid) = namespace.configured_nguid {
        put(&mut table, "nguid", hex(&nguid));
    }
    if namespace.eui64 != [0; 8] {
        put(&mut table, "eui64", hex(&namespace.eui64));
    }
    if namespace.ana_group != 1 {
        put(&mut table, "ana_group", i64::from(namespace.ana_group));
    }
    if let Some(hosts) = &namespace.hosts {
        put(&mut table, "hosts", hosts.clone());
    }
    put_limits(&mut table, &namespace.limits);
    if let Some(plan) = &backend.faults {
        put(&mut table, "faults", faults(plan));
    }
    table
}

fn faults(plan: &FaultPlan) -> Table {
    let mut table = Table::new();
    put(&mut table, "seed", plan.seed as i64);
    put(&mut table, "fail_one_in", i64::from(plan.fail_one_in));
    put(&mut table, "delay_polls", i64::from(plan.delay_polls));
    put(&mut table, "drop_flush", plan.drop_flush);
    put(&mut table, "hang_on_flush", plan.hang_on_flush);
    table
}

fn listener(listener: &ListenAddress) -> Table {
    let mut table = Table::new();
    put(&mut table, "address", listener.to_string());
    if let Some(tos) = listener.tos {
        put(&mut table, "tos", i64::from(tos));
    }
    table
}

fn referral(referral: &ReferralSpec) -> Table {
    let mut table = Table::new();
    put(&mut table, "address", referral.address.to_string());
    if let Some(nqn) = &referral.nqn {
        put(&mut table, "nqn", nqn.as_str());
    }
    if let Some(hosts) = &referral.hosts {
        put(&mut table, "hosts", hosts.clone());
    }
    table
}

fn options(options: &Options) -> Table {
    let default = Options::default();
    let mut table = Table::new();
    let mut number = |key: &str, value: u64, default: u64| {
        if value != default {
            put(&mut table, key, value as i64);
        }
    };
    if let Some(reactors) = options.reactors {
        number("reactors", reactors.into(), 0);
    }
    number("io_queues", options.io_queues.into(), default.io_queues.into());
    number("queue_depth", options.queue_depth.into(), default.queue_depth.into());
    number("in_capsule_data", options.in_capsule_data.into(), default.in_capsule_data.into());
    number("receive_slots", options.receive_slots.into(), default.receive_slots.into());
    let granularity = (options.keep_alive_granularity, default.keep_alive_granularity);
    number("keep_alive_granularity", granularity.0.into(), granularity.1.into());
    number("connect_timeout", options.connect_timeout.into(), default.connect_timeout.into());
    number("retry_delay", options.retry_delay.into(), default.retry_delay.into());
    number("cntlid_min", (*options.cntlid.start()).into(), (*default.cntlid.start()).into());
    number("cntlid_max", (*options.cntlid.end()).into(), (*default.cntlid.end()).into());
    for (key, size, default) in [
        ("mdts", u64::from(options.mdts), u64::from(default.mdts)),
        ("pool_size", options.pool_size, default.pool_size),
    ] {
        if size != default {
            put_size(&mut table, key, size);
        }
    }
    for (key, set, default) in [
        ("poll", options.poll, default.poll),
        ("histograms", options.histograms, default.histograms),
        ("remote_invalidate", options.remote_invalidate, default.remote_invalidate),
        ("raw_headers", options.raw_headers, default.raw_headers),
        ("subsystem_reset", options.subsystem_reset, default.subsystem_reset),
    ] {
        if set != default {
            put(&mut table, key, set);
        }
    }
    if options.provider != default.provider {
        put(&mut table, "provider", options.provider.to_string());
    }
    if let Some(nqn) = &options.discovery_nqn {
        put(&mut table, "discovery_nqn", nqn.as_str());
    }
    if let Some(folder) = &options.state_dir {
        put(&mut table, "state_dir", folder.display().to_string());
    }
    let dcqcn = dcqcn(&options.dcqcn);
    if !dcqcn.is_empty() {
        table.insert("dcqcn".into(), Value::Table(dcqcn));
    }
    if options.log != default.log {
        put(&mut table, "log", options.log.as_str());
    }
    table
}

fn dcqcn(dcqcn: &Dcqcn) -> Table {
    let default = Dcqcn::default();
    let mut table = Table::new();
    let mut number = |key: &str, value: u64, default: u64| {
        if value != default {
            put(&mut table, key, value as i64);
        }
    };
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    number("line_rate", dcqcn.line_rate, default.line_rate);
    number("min_rate", dcqcn.min_rate, default.min_rate);
    number("g_shift", dcqcn.g_shift.into(), default.g_shift.into());
    number("alpha_timer_us", micros(dcqcn.alpha_timer), micros(default.alpha_timer));
    number("rate_timer_us", micros(dcqcn.rate_timer), micros(default.rate_timer));
    number("byte_counter", dcqcn.byte_counter, default.byte_counter);
    number("fast_recovery", dcqcn.fast_recovery.into(), default.fast_recovery.into());
    number("r_ai", dcqcn.r_ai, default.r_ai);
    number("r_hai", dcqcn.r_hai, default.r_hai);
    number("cnp_interval_us", micros(dcqcn.cnp_interval), micros(default.cnp_interval));
    table
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERYTHING: &str = r#"
[[subsystem]]
nqn = "nqn.2024-01.io.example:one"
serial = "S1"
model = "M \"quoted\" \\ model"
max_controllers = 9
max_controllers_per_host = 2
duplicate_hosts = "replace"
hosts = ["nqn.2014-08.org.nvmexpress:uuid:07e4a0a6-41d5-4bff-96b2-8a173dcfb6b5", "odd.host"]
[[subsystem.ana]]
group = 9
state = "inaccessible"
[[subsystem.ana]]
group = 1
listener = "[2001:db8::1]:4421"
state = "non-optimized"
[[subsystem.namespace]]
nsid = 7
file = "/srv/a b\"c.img"
size = "10G"
block_size = 4096
uuid = "07e4a0a6-41d5-4bff-96b2-8a173dcfb6b5"
nguid = "000102030405060708090a0b0c0d0e0f"
eui64 = "0102030405060708"
ana_group = 9
hosts = ["odd.host"]
limits = { iops = 1000, bandwidth = "100M" }
[[subsystem.namespace]]
device = "/dev/sdz"
read_only = true
[[subsystem.host]]
nqn = "nqn.strong"
dhchap_key = "/etc/farside/a.key"
dhchap_controller_key = "/etc/farside/b.key"
dhchap_hashes = ["sha512", "sha256"]
dhchap_groups = ["ffdhe2048", "null"]
limits = { read_bandwidth = "10M", write_bandwidth = "1M" }
[[subsystem]]
nqn = "nqn.2024-01.io.example:three"
allow_any_host = true
[[subsystem.host]]
nqn = "nqn.known"
[[subsystem.namespace]]
null = "1G"
[[subsystem]]
nqn = "nqn.2024-01.io.example:four"
[[subsystem.host]]
nqn = "nqn.known"
[[subsystem.namespace]]
null = "1G"
[[subsystem]]
nqn = "nqn.2024-01.io.example:two"
hosts = []
[[subsystem.namespace]]
memory = "1536K"
zone_size = "512K"
zone_capacity = "384K"
max_open_zones = 2
max_active_zones = 3
faults = { seed = 3, fail_one_in = 100, delay_polls = 2, drop_flush = true, hang_on_flush = true }
[[subsystem.namespace]]
null = "1T"
[[listener]]
address = "192.0.2.1"
tos = 104
[[listener]]
address = "[2001:db8::1]:4421"
[[referral]]
address = "192.0.2.9:8009"
[[referral]]
address = "[2001:db8::9]:8009"
nqn = "nqn.2024-01.io.example:discovery-2"
hosts = ["odd.host"]
[options]
provider = "soft"
discovery_nqn = "nqn.2024-01.io.example:discovery"
reactors = 3
io_queues = 8
queue_depth = 64
in_capsule_data = "8K"
mdts = "128K"
pool_size = "32M"
receive_slots = 512
poll = true
histograms = true
remote_invalidate = false
raw_headers = true
subsystem_reset = true
retry_delay = 300
connect_timeout = 20000
keep_alive_granularity = 500
cntlid_min = 10
cntlid_max = 20
state_dir = "/var/lib/x"
log = "debug"
[options.dcqcn]
line_rate = 3125000000
min_rate = 1000000
g_shift = 7
alpha_timer_us = 60
rate_timer_us = 300
byte_counter = 1000000
fast_recovery = 6
r_ai = 4000000
r_hai = 40000000
cnp_interval_us = 25
"#;

    /// Without places in a file, which a written file has others of.
    fn read(text: &str) -> Config {
        let mut config = Config::parse(text, "test").unwrap_or_else(|error| panic!("{error}\n{text}"));
        config.subsystems.iter_mut().flat_map(|one| &mut one.namespaces).for_each(|one| one.line = None);
        config.subsystems.iter_mut().flat_map(|one| &mut one.host_specs).for_each(|one| one.line = None);
        config.listeners.iter_mut().for_each(|one| one.line = None);
        config
    }

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let small = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:x\"\n[[subsystem.namespace]]\nnull = \"1G\"\n";
        for text in [EVERYTHING, small] {
            let config = read(text);
            assert_eq!(read(&config.to_toml()), config, "{}", config.to_toml());
        }
        assert_eq!(read(small).to_toml().matches('\n').count(), 6, "{}", read(small).to_toml());
    }
}
