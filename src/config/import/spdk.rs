//! What SPDK's `save_config` writes and `--json` reads: parts of the program, each with the calls that set it up, in order.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Map;

use super::draft::{Draft, From, Host, Namespace, Source, Subsystem, address, non_zero};
use super::object::{Object, Report};

/// A block device of SPDK's that this target can serve, too.
struct Bdev {
    source: Source,
    block_size: Option<From<i64>>,
    uuid: Option<From<String>>,
    read_only: bool,
    limits: Vec<(&'static str, i64)>,
}

#[derive(Default)]
struct Reader {
    bdevs: BTreeMap<String, Bdev>,
    /// Those that it cannot serve, and what to do about each.
    other_bdevs: BTreeMap<String, &'static str>,
    draft: Draft,
    /// Files of secrets, by the names that SPDK's keyring has for them.
    keys: BTreeMap<String, String>,
    /// Listeners by subsystem.
    listens: BTreeMap<String, BTreeSet<String>>,
    first_ids: Vec<From<i64>>,
    last_ids: Vec<From<i64>>,
}

pub(super) fn read(mut root: Object<'_>, report: &mut Report) -> Draft {
    let mut reader = Reader::default();
    for mut part in root.objects("subsystems", report) {
        let name = part.needed("subsystem", report).unwrap_or_default();
        for mut call in part.objects("config", report) {
            let method = call.needed("method", report).unwrap_or_default();
            let path = call.path().to_owned();
            let empty = Map::new();
            let params = call.object("params", report);
            let params = params.unwrap_or_else(|| Object::root(&empty));
            match name.as_str() {
                "bdev" => reader.bdev(&method, path, params, report),
                "nvmf" => reader.nvmf(&method, path, params, report),
                "keyring" if method == "keyring_file_add_key" => reader.key(params, report),
                _ => report.note(path, format!("{method} sets up SPDK's {name}; there is nothing like it here")),
            }
            call.finish(report);
        }
        part.finish(report);
    }
    root.finish(report);
    reader.finish(report)
}

impl Reader {
    fn bdev(&mut self, method: &str, path: String, mut params: Object<'_>, report: &mut Report) {
        let sized = matches!(method, "bdev_malloc_create" | "bdev_null_create");
        match method {
            "bdev_aio_create" | "bdev_uring_create" | "bdev_malloc_create" | "bdev_null_create" => {
                let Some(name) = params.needed("name", report) else { return };
                let at = params.at("block_size");
                // Zero: as the device says.
                let block_size = params.number("block_size", report).filter(|size| *size != 0);
                let source = if sized {
                    let at = params.at("num_blocks");
                    let blocks = params.number("num_blocks", report);
                    let Some(bytes) = blocks.and_then(|blocks| blocks.checked_mul(block_size.unwrap_or(512))) else {
                        return report.refuse(at, "is no size", "give the number of blocks");
                    };
                    let bytes = From::new(bytes, at);
                    if method == "bdev_null_create" { Source::Null(bytes) } else { Source::Memory(bytes) }
                } else {
                    let at = params.at("filename");
                    let Some(file) = params.needed("filename", report) else { return };
                    Source::Path(From::new(file, at))
                };
                let uuid = params.text("uuid", report).map(|uuid| From::new(uuid, params.at("uuid")));
                let read_only = params.flag("readonly", report).unwrap_or(false);
                params.not_carried("md_size", &["0"], "namespaces have no metadata here", report);
                params.not_carried("dif_type", &["0"], "protection information is not served; hosts see none", report);
                params.not_carried("physical_block_size", &["0"], "is taken from the storage", report);
                params.not_carried(
                    "fallocate",
                    &["true", "false"],
                    "blocks are deallocated where the storage can",
                    report,
                );
                params.finish(report);
                let block_size = block_size.map(|size| From::new(size, at));
                let limits = Vec::new();
                self.bdevs.insert(name, Bdev { source, block_size, uuid: non_zero(uuid), read_only, limits });
            }
            "bdev_nvme_attach_controller" => {
                if let Some(name) = params.text("name", report) {
                    // Its namespaces are bdevs of their own: Nvme0n1.
                    self.other_bdevs.insert(
                        format!("{name}n"),
                        "it is a drive that SPDK drives itself; give it back to the kernel, and name its block device",
                    );
                }
                report.note(path, "drives are the kernel's here: give it back, and name its block device");
            }
            "bdev_set_qos_limit" => {
                let name = params.needed("name", report);
                let mut limits = Vec::new();
                for (theirs, ours, unit) in [
                    ("rw_ios_per_sec", "iops", 1),
                    ("rw_mbytes_per_sec", "bandwidth", 1 << 20),
                    ("r_mbytes_per_sec", "read_bandwidth", 1 << 20),
                    ("w_mbytes_per_sec", "write_bandwidth", 1 << 20),
                ] {
                    // Zero is no limit.
                    let rate = params.number(theirs, report).filter(|rate| *rate != 0);
                    let rate = rate.map(|rate| rate.checked_mul(unit).filter(|rate| *rate > 0));
                    match rate {
                        Some(Some(rate)) => limits.push((ours, rate)),
                        Some(None) => report.refuse(params.at(theirs), "is no rate", "give a rate per second, or 0"),
                        None => {}
                    }
                }
                params.finish(report);
                match name.and_then(|name| self.bdevs.get_mut(&name)) {
                    Some(bdev) => bdev.limits = limits,
                    None => report.note(path, "its bdev is not served here"),
                }
            }
            _ => {
                if let Some(name) = params.text("name", report) {
                    self.other_bdevs
                        .insert(name, "there is no such kind of storage here; name a file or a block device");
                }
                report.note(path, format!("{method} has no counterpart here"));
            }
        }
    }

    fn nvmf(&mut self, method: &str, path: String, mut params: Object<'_>, report: &mut Report) {
        match method {
            "nvmf_create_transport" => self.transport(params, report),
            "nvmf_create_subsystem" => self.subsystem(path, params, report),
            "nvmf_subsystem_add_ns" => self.namespace(params, report),
            "nvmf_subsystem_add_listener" => self.listener(path, params, report),
            "nvmf_subsystem_add_host" => {
                let host = params.needed("host", report).map(|host| From::new(host, params.at("host")));
                let key = self.file_of(&mut params, "dhchap_key", report);
                let controller_key = self.file_of(&mut params, "dhchap_ctrlr_key", report);
                params.not_carried("psk", &[], "is for TCP", report);
                if let (Some(subsystem), Some(nqn)) = (self.find(&mut params, report), host) {
                    subsystem.hosts.push(Host { nqn, key, controller_key });
                }
                params.finish(report);
            }
            "nvmf_subsystem_allow_any_host" => {
                let allow = params.flag("allow_any_host", report).unwrap_or(true);
                if let Some(subsystem) = self.find(&mut params, report) {
                    subsystem.allow_any_host = allow;
                }
                params.finish(report);
            }
            "nvmf_ns_add_host" => {
                let (nsid, host) = (params.number("nsid", report), params.needed("host", report));
                let subsystem = self.find(&mut params, report);
                let namespaces = subsystem.map(|subsystem| subsystem.namespaces.iter_mut());
                let found =
                    namespaces.and_then(|mut all| all.find(|one| one.nsid.as_ref().map(|nsid| nsid.value) == nsid));
                match (found.map(|namespace| namespace.hosts.as_mut()), host) {
                    (Some(Some(hosts)), Some(host)) => hosts.push(host),
                    (Some(None), _) => report.note(path, "every host sees that namespace: no_auto_visible is not set"),
                    (None, _) => report.note(path, "that namespace is not served"),
                    (Some(Some(_)), None) => {}
                }
                params.finish(report);
            }
            "nvmf_discovery_add_referral" => self.referral(path, params, report),
            "nvmf_set_crdt" => {
                let at = params.at("crdt1");
                if let Some(units) = params.number("crdt1", report).filter(|units| *units != 0) {
                    self.draft.options.push(("retry_delay", From::new(units.saturating_mul(100).into(), at)));
                }
                params.finish_with("there is one delay here, the first", report);
            }
            _ => report.note(path, format!("{method} has no counterpart here")),
        }
    }

    fn transport(&mut self, mut params: Object<'_>, report: &mut Report) {
        let kind = params.needed("trtype", report).unwrap_or_default();
        if !kind.eq_ignore_ascii_case("rdma") {
            return report.note(params.path(), format!("its transport is {kind:?}; this target serves RDMA"));
        }
        for (theirs, ours, least, most) in [
            ("max_queue_depth", "queue_depth", 2, 1024),
            ("max_io_qpairs_per_ctrlr", "io_queues", 1, 128),
            ("in_capsule_data_size", "in_capsule_data", 0, 16_384),
            ("max_io_size", "mdts", 4096, 1 << 20),
            ("max_srq_depth", "receive_slots", 64, 1 << 20),
        ] {
            let path = params.at(theirs);
            let Some(number) = params.number(theirs, report) else { continue };
            let within = number.clamp(least, most);
            if within != number {
                report.note(&path, format!("{number} is beyond what can be had here; {within} is used"));
            }
            self.draft.options.push((ours, From::new(within.into(), path)));
        }
        let reason = "buffers and queues are laid out in another way here: see pool_size and receive_slots";
        params.not_carried("dif_insert_or_strip", &["false"], "protection information is not served", report);
        params.not_carried(
            "zcopy",
            &["false", "true"],
            "data are never copied here, in-capsule data at odd places apart",
            report,
        );
        params.finish_with(reason, report);
    }

    fn subsystem(&mut self, path: String, mut params: Object<'_>, report: &mut Report) {
        let nqn = params.needed("nqn", report).unwrap_or_default();
        let mut subsystem = Subsystem { path, nqn, ..Subsystem::default() };
        subsystem.allow_any_host = params.flag("allow_any_host", report).unwrap_or(false);
        subsystem.serial = params.text("serial_number", report).map(|text| From::new(text, params.at("serial_number")));
        // What SPDK says for none.
        let unnamed = |serial: &From<String>| serial.value.bytes().all(|byte| byte == b'0');
        subsystem.serial = subsystem.serial.filter(|serial| !unnamed(serial));
        subsystem.model = params.text("model_number", report).map(|text| From::new(text, params.at("model_number")));
        for (key, all) in [("min_cntlid", &mut self.first_ids), ("max_cntlid", &mut self.last_ids)] {
            let number = params.number(key, report);
            all.extend(number.map(|number| From::new(number, params.at(key))));
        }
        params.not_carried("max_namespaces", &[], "a subsystem has room for 1024", report);
        params.not_carried("ana_reporting", &["true"], "how well namespaces are reached is always told", report);
        params.finish(report);
        self.draft.subsystems.push(subsystem);
    }

    fn namespace(&mut self, mut params: Object<'_>, report: &mut Report) {
        let Some(mut one) = params.object("namespace", report) else {
            return report.refuse(params.at("namespace"), "is missing", "give bdev_name and nsid");
        };
        let path = one.path().to_owned();
        let Some(name) = one.needed("bdev_name", report) else { return };
        let nsid = one.number("nsid", report).map(|nsid| From::new(nsid, one.at("nsid")));
        let mut id = |key| {
            let at = one.at(key);
            non_zero(one.text(key, report).map(|id| From::new(id, at)))
        };
        let (uuid, nguid, eui64) = (id("uuid"), id("nguid"), id("eui64"));
        let ana_group = one.number("anagrpid", report).map(|group| From::new(group, one.at("anagrpid")));
        one.not_carried(
            "ptpl_file",
            &[],
            "reservations are kept in state_dir here; those in that file are not read",
            report,
        );
        let masked = one.flag("no_auto_visible", report) == Some(true);
        let at = one.at("bdev_name");
        one.finish(report);
        let Some(bdev) = self.bdevs.get(&name) else {
            let other = self
                .other_bdevs
                .iter()
                .find(|(other, _)| name == **other || other.ends_with('n') && name.starts_with(*other));
            match other {
                Some((_, why)) => report.note(path, format!("{name} is not served: {why}")),
                None => report.refuse(at, format!("there is no bdev {name:?}"), "create it before it is used"),
            }
            return;
        };
        let namespace = Namespace {
            path,
            nsid,
            source: bdev.source.clone(),
            block_size: bdev.block_size.clone(),
            read_only: bdev.read_only,
            uuid: uuid.or_else(|| bdev.uuid.clone()),
            nguid,
            eui64,
            ana_group,
            hosts: masked.then(Vec::new),
            limits: bdev.limits.clone(),
        };
        if let Some(subsystem) = self.find(&mut params, report) {
            subsystem.namespaces.push(namespace);
        }
        params.finish(report);
    }

    fn listener(&mut self, path: String, mut params: Object<'_>, report: &mut Report) {
        let Some(mut addr) = params.object("listen_address", report) else {
            return report.refuse(params.at("listen_address"), "is missing", "give trtype, traddr and trsvcid");
        };
        let kind = addr.needed("trtype", report).unwrap_or_default();
        if !kind.eq_ignore_ascii_case("rdma") {
            return report.note(path, format!("its transport is {kind:?}; this target serves RDMA"));
        }
        let ip = addr.needed("traddr", report).unwrap_or_default();
        let port = addr.text("trsvcid", report).unwrap_or_else(|| super::super::PORT.to_string());
        addr.not_carried("adrfam", &["IPv4", "IPv6", "ipv4", "ipv6"], "the address itself says its family", report);
        let at = addr.at("traddr");
        addr.finish(report);
        params.not_carried("secure_channel", &["false"], "secure channels are for TCP", report);
        let address = address(&ip, &port);
        let nqn = self.find(&mut params, report).map(|subsystem| subsystem.nqn.clone());
        params.finish(report);
        if !self.draft.listeners.iter().any(|known| known.value == address) {
            self.draft.listeners.push(From::new(address.clone(), at));
        }
        if let Some(nqn) = nqn {
            self.listens.entry(nqn).or_default().insert(address);
        }
    }

    fn referral(&mut self, path: String, mut params: Object<'_>, report: &mut Report) {
        let Some(mut addr) = params.object("address", report) else {
            return report.refuse(path, "has no address", "give address.traddr and address.trsvcid");
        };
        let kind = addr.needed("trtype", report).unwrap_or_default();
        if !kind.eq_ignore_ascii_case("rdma") {
            return report.note(path, format!("its transport is {kind:?}"));
        }
        let at = addr.at("traddr");
        let ip = addr.needed("traddr", report).unwrap_or_default();
        let port = addr.text("trsvcid", report).unwrap_or_else(|| super::super::PORT.to_string());
        addr.not_carried("adrfam", &["IPv4", "IPv6", "ipv4", "ipv6"], "the address itself says its family", report);
        addr.finish(report);
        params.not_carried("secure_channel", &["false"], "secure channels are for TCP", report);
        params.finish(report);
        self.draft.referrals.push(From::new(address(&ip, &port), at));
    }

    /// A secret in a file, for whoever names it.
    fn key(&mut self, mut params: Object<'_>, report: &mut Report) {
        let (name, file) = (params.needed("name", report), params.needed("path", report));
        self.keys.extend(name.zip(file));
        params.finish(report);
    }

    /// The file of a secret that a host has to know.
    fn file_of(&self, params: &mut Object<'_>, key: &'static str, report: &mut Report) -> Option<From<String>> {
        let (name, path) = (params.text(key, report)?, params.at(key));
        let Some(file) = self.keys.get(&name) else {
            let reason = format!("this host has to authenticate, and there is no file of the key {name:?}");
            report.refuse(path, reason, "add it to the keyring (keyring_file_add_key)");
            return None;
        };
        Some(From::new(file.clone(), path))
    }

    /// The subsystem that a call is about.
    fn find(&mut self, params: &mut Object<'_>, report: &mut Report) -> Option<&mut Subsystem> {
        let nqn = params.needed("nqn", report)?;
        let found = self.draft.subsystems.iter_mut().find(|subsystem| subsystem.nqn == nqn);
        if found.is_none() {
            report.refuse(params.at("nqn"), format!("there is no subsystem {nqn:?}"), "create it before it is used");
        }
        found
    }

    fn finish(mut self, report: &mut Report) -> Draft {
        let range = "one range of controller identifiers serves all subsystems";
        self.draft.one_option("cntlid_min", &self.first_ids, range, report);
        self.draft.one_option("cntlid_max", &self.last_ids, range, report);
        let mut seen = BTreeSet::new();
        // The last transport call of a kind is the one that counts.
        self.draft.options.reverse();
        self.draft.options.retain(|(key, _)| seen.insert(*key));
        self.draft.options.reverse();
        if self.draft.listeners.is_empty() {
            let remedy = "add one (nvmf_subsystem_add_listener)";
            report.refuse("subsystems", "no subsystem has an RDMA listener", remedy);
        }
        let (draft, listens) = (&mut self.draft, &self.listens);
        draft.subsystems.retain(|subsystem| {
            let served = listens.contains_key(&subsystem.nqn);
            if !served {
                report.note(&subsystem.path, "it has no RDMA listener: it is not served here either");
            }
            served
        });
        for subsystem in &mut draft.subsystems {
            let on = listens.get(&subsystem.nqn);
            for listener in draft.listeners.iter().filter(|one| on.is_none_or(|on| !on.contains(&one.value))) {
                let reason = format!("every listener serves every subsystem here, also {}", subsystem.nqn);
                report.note(&listener.path, reason);
            }
            if subsystem.allow_any_host {
                // Those with a key have to prove who they are all the same.
                for host in subsystem.hosts.extract_if(.., |host| host.key.is_none()) {
                    report.note(host.nqn.path, "any host may connect to its subsystem");
                }
            }
        }
        self.draft
    }
}
