//! What `nvmetcli save` writes of the kernel's target: subsystems with namespaces, ports with the subsystems that they serve, hosts.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::{Ana, Draft, From, Host, Namespace, Source, Subsystem, address, non_zero};
use super::object::{Object, Report};

/// An RDMA port.
struct Port {
    path: String,
    address: String,
    subsystems: Vec<(String, String)>,
    /// Groups that are not reached optimally, with their paths.
    ana: Vec<(String, i64, String)>,
}

pub(super) fn read(mut root: Object<'_>, report: &mut Report) -> Draft {
    let mut draft = Draft::default();
    let (mut first_ids, mut last_ids, mut queues) = (Vec::new(), Vec::new(), Vec::new());
    for mut one in root.objects("subsystems", report) {
        let (nqn, path) = (one.needed("nqn", report), one.path().to_owned());
        let mut subsystem = Subsystem { path, nqn: nqn.unwrap_or_default(), ..Subsystem::default() };
        if let Some(mut attr) = one.object("attr", report) {
            subsystem.allow_any_host = attr.flag("allow_any_host", report).unwrap_or(false);
            let path = attr.at("serial");
            subsystem.serial = attr.text("serial", report).map(|serial| From::new(serial, path));
            let path = attr.at("model");
            subsystem.model = attr.text("model", report).map(|model| From::new(model, path));
            for (key, all) in [("cntlid_min", &mut first_ids), ("cntlid_max", &mut last_ids), ("qid_max", &mut queues)]
            {
                let path = attr.at(key);
                all.extend(attr.number(key, report).map(|value| From::new(value, path)));
            }
            attr.not_carried("pi_enable", &["0"], "protection information is not served; hosts see none", report);
            attr.not_carried("version", &[], "hosts are told the version that this target implements", report);
            attr.not_carried("firmware", &[], "hosts are told this program's version", report);
            attr.not_carried("ieee_oui", &["0x000000", "0"], "is not reported", report);
            attr.finish(report);
        }
        let hosts = one.texts("allowed_hosts", report);
        if subsystem.allow_any_host {
            hosts.iter().for_each(|(path, _)| report.note(path, "any host may connect to its subsystem"));
        } else {
            subsystem.hosts = hosts.into_iter().map(|(path, host)| plain(host, path)).collect();
        }
        for namespace in one.objects("namespaces", report) {
            subsystem.namespaces.extend(read_namespace(namespace, report));
        }
        if let Some(passthru) = one.object("passthru", report) {
            let path = passthru.path().to_owned();
            if passthru_is_on(passthru, report) {
                let remedy = "give its block device as a namespace: \"device\": {\"path\": \"/dev/nvme0n1\"}";
                report.refuse(path, "a whole controller is not passed through here", remedy);
            }
        }
        one.finish(report);
        draft.subsystems.push(subsystem);
    }
    draft.one_option("cntlid_min", &first_ids, "one range of controller identifiers serves all subsystems", report);
    draft.one_option("cntlid_max", &last_ids, "one range of controller identifiers serves all subsystems", report);
    draft.one_option("io_queues", &queues, "one limit of queues serves all subsystems", report);
    read_hosts(&mut root, report);
    let ports = read_ports(&mut root, &mut draft, report);
    root.finish(report);
    link(&mut draft, &ports, report);
    draft
}

fn plain(nqn: String, path: String) -> Host {
    Host { nqn: From::new(nqn, path), key: None, controller_key: None }
}

fn passthru_is_on(mut passthru: Object<'_>, report: &mut Report) -> bool {
    passthru.flag("enable", report).unwrap_or(false)
}

fn read_namespace(mut one: Object<'_>, report: &mut Report) -> Option<Namespace> {
    let path = one.path().to_owned();
    let nsid = one.number("nsid", report).map(|nsid| From::new(nsid, one.at("nsid")));
    let enabled = one.flag("enable", report).unwrap_or(true);
    let mut namespace = None;
    if let Some(mut device) = one.object("device", report) {
        let at = device.at("path");
        let source = device.text("path", report);
        let mut id = |key| {
            let at = device.at(key);
            non_zero(device.text(key, report).map(|id| From::new(id, at)))
        };
        let (uuid, nguid, eui64) = (id("uuid"), id("nguid"), id("eui64"));
        device.finish(report);
        namespace = source.map(|source| Namespace {
            path: path.clone(),
            nsid,
            source: Source::Path(From::new(source, at)),
            block_size: None,
            read_only: false,
            uuid,
            nguid,
            eui64,
            ana_group: None,
            hosts: None,
            limits: Vec::new(),
        });
    }
    let own = one.number("ana_grpid", report).map(|group| From::new(group, one.at("ana_grpid")));
    let below = one.object("ana", report).and_then(|mut ana| {
        let group = ana.number("grpid", report).map(|group| From::new(group, ana.at("grpid")));
        ana.finish(report);
        group
    });
    one.not_carried("buffered_io", &["0"], "files are read and written past the page cache where they can be", report);
    one.not_carried("resv_enable", &["0", "1"], "reservations are always there", report);
    one.finish(report);
    match namespace {
        Some(mut namespace) if enabled => {
            namespace.ana_group = own.or(below);
            Some(namespace)
        }
        Some(_) => {
            report.note(path, "it is disabled: it is not served");
            None
        }
        None if enabled => {
            report.refuse(format!("{path}.device.path"), "is missing", "name a file or a block device");
            None
        }
        None => None,
    }
}

fn read_hosts(root: &mut Object<'_>, report: &mut Report) {
    for mut host in root.objects("hosts", report) {
        host.needed("nqn", report);
        let mut keys = vec![(host.at("dhchap_key"), host.text("dhchap_key", report))];
        if let Some(mut group) = host.object("dhchap", report) {
            keys.push((group.at("key"), group.text("key", report)));
            group.finish_with("goes with a key", report);
        }
        for (path, key) in keys {
            if key.is_some() {
                let remedy = "`farside convert` a copy without the key, and add dhchap_key = FILE for this host there";
                report.refuse(path, "this host has to authenticate, and its key is no file of its own", remedy);
            }
        }
        host.finish_with("goes with a key", report);
    }
}

fn read_ports(root: &mut Object<'_>, draft: &mut Draft, report: &mut Report) -> Vec<Port> {
    let mut ports = Vec::new();
    let (mut capsules, mut depths, mut transfers) = (Vec::new(), Vec::new(), Vec::new());
    for mut one in root.objects("ports", report) {
        let path = one.path().to_owned();
        one.number("portid", report);
        let Some(mut addr) = one.object("addr", report) else {
            report.refuse(one.at("addr"), "is missing", "give trtype, traddr and trsvcid");
            continue;
        };
        let trtype = addr.needed("trtype", report).unwrap_or_default();
        if trtype != "rdma" {
            report.note(path, format!("its transport is {trtype:?}; this target serves RDMA"));
            continue;
        }
        let ip = addr.needed("traddr", report).unwrap_or_default();
        let port = addr.text("trsvcid", report).unwrap_or_else(|| super::super::PORT.to_string());
        addr.not_carried("adrfam", &["ipv4", "ipv6"], "the address itself says its family", report);
        addr.not_carried("treq", &["not specified", ""], "secure channels are for TCP", report);
        addr.not_carried("tsas", &["none", ""], "secure channels are for TCP", report);
        addr.finish(report);
        let address = address(&ip, &port);
        draft.listeners.push(From::new(address.clone(), format!("{path}.addr.traddr")));
        if let Some(mut param) = one.object("param", report) {
            let at = param.at("inline_data_size");
            // Negative: the kernel chooses, and so do we.
            let size = param.number("inline_data_size", report).filter(|size| *size >= 0);
            capsules.extend(size.map(|size| From::new(size.min(16_384), at)));
            let at = param.at("max_queue_size");
            depths
                .extend(param.number("max_queue_size", report).filter(|n| *n > 0).map(|n| From::new(n.min(1024), at)));
            let at = param.at("mdts");
            // A power of two, in units of 4 KiB; zero is no limit.
            let mdts = param.number("mdts", report).filter(|power| (1..=8).contains(power));
            transfers.extend(mdts.map(|power| From::new(4096 << power, at)));
            param.not_carried("pi_enable", &["0"], "protection information is not served; hosts see none", report);
            param.finish(report);
        }
        let ana = read_groups(&mut one, report);
        let subsystems = one.texts("subsystems", report);
        for referral in one.objects("referrals", report) {
            read_referral(referral, draft, report);
        }
        one.not_carried("enable", &["1"], "listeners that are configured are served", report);
        one.finish(report);
        ports.push(Port { path, address, subsystems, ana });
    }
    if ports.is_empty() {
        report.refuse("ports", "no port has the transport rdma", "add one, or change a port's trtype to rdma");
    }
    draft.one_option("in_capsule_data", &capsules, "one size serves all listeners", report);
    draft.one_option("queue_depth", &depths, "one depth serves all listeners", report);
    draft.one_option("mdts", &transfers, "one size serves all listeners", report);
    ports
}

fn read_referral(mut one: Object<'_>, draft: &mut Draft, report: &mut Report) {
    let path = one.path().to_owned();
    let (enabled, _) = (one.flag("enable", report), (one.text("name", report), one.number("portid", report)));
    let addr = one.object("addr", report);
    one.finish(report);
    let Some(mut addr) = addr else {
        return report.refuse(path, "has no address", "give addr.traddr and addr.trsvcid");
    };
    if enabled == Some(false) {
        return report.note(path, "it is disabled: hosts are not told of it");
    }
    if addr.text("trtype", report).is_some_and(|kind| kind != "rdma") {
        return report.note(path, "its transport is not RDMA");
    }
    let at = addr.at("traddr");
    let ip = addr.needed("traddr", report).unwrap_or_default();
    let port = addr.text("trsvcid", report).unwrap_or_else(|| super::super::PORT.to_string());
    addr.not_carried("adrfam", &["ipv4", "ipv6"], "the address itself says its family", report);
    addr.not_carried("treq", &["not specified"], "secure channels are for TCP", report);
    addr.finish(report);
    let address = address(&ip, &port);
    if !draft.referrals.iter().any(|known| known.value == address) {
        draft.referrals.push(From::new(address, at));
    }
}

fn read_groups(port: &mut Object<'_>, report: &mut Report) -> Vec<(String, i64, String)> {
    let mut groups = Vec::new();
    for mut one in port.objects("ana_groups", report) {
        let group = one.number("grpid", report);
        let state = one.object("ana", report).and_then(|mut ana| {
            let state = ana.text("state", report);
            ana.finish(report);
            state
        });
        let path = one.path().to_owned();
        one.finish(report);
        if let (Some(group), Some(state)) = (group, state.filter(|state| state != "optimized")) {
            groups.push((path, group, state));
        }
    }
    groups
}

/// Ports serve the subsystems that they are linked to; our listeners serve all.
fn link(draft: &mut Draft, ports: &[Port], report: &mut Report) {
    let mut linked: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (at, port) in ports.iter().enumerate() {
        for (path, nqn) in &port.subsystems {
            if !draft.subsystems.iter().any(|subsystem| subsystem.nqn == *nqn) {
                report.refuse(path, format!("there is no subsystem {nqn:?}"), "add it, or take the name out here");
            }
            linked.entry(nqn).or_default().insert(at);
        }
    }
    draft.subsystems.retain(|subsystem| {
        let served = linked.contains_key(subsystem.nqn.as_str());
        if !served {
            report.note(&subsystem.path, "no RDMA port serves it: it is not served here either");
        }
        served
    });
    for subsystem in &mut draft.subsystems {
        let Some(on) = linked.get(subsystem.nqn.as_str()) else { continue };
        for (at, port) in ports.iter().enumerate() {
            if !on.contains(&at) {
                let path = format!("{}.subsystems", port.path);
                report.note(path, format!("every listener serves every subsystem here, also {}", subsystem.nqn));
                continue;
            }
            subsystem.ana.extend(port.ana.iter().map(|(path, group, state)| Ana {
                path: path.clone(),
                group: *group,
                listener: port.address.clone(),
                state: state.clone(),
            }));
        }
    }
}
