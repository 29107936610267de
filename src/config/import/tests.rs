use super::*;
use proptest::prelude::*;
use serde_json::json;

const NVMET: &str = include_str!("sample_nvmet.json");

const SPDK: &str = include_str!("sample_spdk.json");

/// The notes as lines; each of these has to be among them, and there are no others.
#[track_caller]
fn notes(imported: &Imported, expected: &[(&str, &str)]) {
    let lines: Vec<String> = imported.notes.iter().map(ToString::to_string).collect();
    for (path, says) in expected {
        let found = lines.iter().any(|line| line.starts_with(&format!("{path}: ")) && line.contains(says));
        assert!(found, "{path} ({says}) is not among\n{}", lines.join("\n"));
    }
    assert_eq!(lines.len(), expected.len(), "{}", lines.join("\n"));
}

#[test]
fn nvmetcli_file_is_carried_over_and_the_rest_is_said() {
    let imported = import(NVMET, "saved.json").unwrap();
    assert_eq!(imported.origin, "nvmetcli");
    let expected = r#"
        [[subsystem]]
        nqn = "nqn.2024-01.io.example:a"
        serial = "f00dfeed"
        model = "Linux"
        hosts = ["nqn.2014-08.org.example:host"]
        [[subsystem.ana]]
        group = 2
        listener = "192.0.2.1:4420"
        state = "inaccessible"
        [[subsystem.namespace]]
        nsid = 5
        device = "/dev/nvme0n1"
        uuid = "6d3f1f6a-5a0c-4b0e-9f0e-2c7c0b7a51de"
        ana_group = 2
        [[subsystem]]
        nqn = "nqn.2024-01.io.example:b"
        serial = "cafe"
        [[subsystem.ana]]
        group = 2
        listener = "192.0.2.1:4420"
        state = "inaccessible"
        [[subsystem.namespace]]
        nsid = 1
        file = "/srv/b.img"
        [[listener]]
        address = "192.0.2.1:4420"
        [[listener]]
        address = "[2001:db8::1]:4421"
        [[referral]]
        address = "192.0.2.7:4420"
        [options]
        cntlid_min = 10
        cntlid_max = 99
        io_queues = 16
        in_capsule_data = 8192
    "#;
    assert_eq!(imported.config, without_lines(Config::parse(expected, "expected").unwrap()));
    notes(
        &imported,
        &[
            ("ports[1]", "\"tcp\""),
            ("ports[2].addr.treq", "for TCP"),
            ("ports[2].subsystems", "also nqn.2024-01.io.example:b"),
            ("subsystems[0].attr.ieee_oui", "not reported"),
            ("subsystems[0].attr.pi_enable", "protection information"),
            ("subsystems[0].attr.version", "version"),
            ("subsystems[0].namespaces[1]", "disabled"),
            ("subsystems[1].attr.cntlid_min", "10 of subsystems[0].attr.cntlid_min is used"),
            ("subsystems[1].namespaces[0].colour", "no counterpart"),
            ("subsystems[2]", "no RDMA port serves it"),
        ],
    );
}

#[test]
fn spdk_file_is_carried_over_and_the_rest_is_said() {
    let imported = import(SPDK, "spdk.json").unwrap();
    assert_eq!(imported.origin, "SPDK");
    let expected = r#"
        [[subsystem]]
        nqn = "nqn.2016-06.io.spdk:cnode1"
        serial = "SPDK1"
        model = "A disk"
        hosts = ["nqn.2014-08.org.example:h"]
        [[subsystem.host]]
        nqn = "nqn.2014-08.org.example:s"
        dhchap_key = "/etc/k"
        [[subsystem.namespace]]
        nsid = 1
        memory = "8M"
        block_size = 512
        uuid = "6d3f1f6a-5a0c-4b0e-9f0e-2c7c0b7a51de"
        nguid = "6d3f1f6a5a0c4b0e9f0e2c7c0b7a51de"
        [[subsystem.namespace]]
        nsid = 2
        device = "/dev/sdz"
        block_size = 4096
        uuid = "00000000-0000-0000-0000-0000000000aa"
        limits = { iops = 20000, read_bandwidth = "100M" }
        [[subsystem.namespace]]
        nsid = 4
        file = "/srv/x.img"
        block_size = 512
        read_only = true
        hosts = ["nqn.2014-08.org.example:h"]
        [[listener]]
        address = "192.0.2.3:4420"
        [options]
        queue_depth = 1024
        io_queues = 127
        in_capsule_data = 4096
        mdts = "128K"
        receive_slots = 4096
        retry_delay = 500
        cntlid_min = 1
        cntlid_max = 65519
    "#;
    assert_eq!(imported.config, without_lines(Config::parse(expected, "expected").unwrap()));
    let (bdev, nvmf) = ("subsystems[2].config", "subsystems[3].config");
    let at = |part: &str, n: usize, rest: &str| format!("{part}[{n}]{rest}");
    let expected = [
        ("subsystems[1].config[0]".to_owned(), "SPDK's iobuf"),
        (at(bdev, 0, ""), "bdev_set_options"),
        (at(bdev, 1, ".params.physical_block_size"), "from the storage"),
        (at(bdev, 4, ""), "give it back"),
        (at(bdev, 6, ""), "bdev_wait_for_examine"),
        (at(nvmf, 0, ""), "nvmf_set_config"),
        (at(nvmf, 1, ".params.max_queue_depth"), "1024 is used"),
        (at(nvmf, 1, ".params.io_unit_size"), "another way"),
        (at(nvmf, 2, ".params"), "\"TCP\""),
        (at(nvmf, 3, ".params.max_namespaces"), "1024"),
        (at(nvmf, 3, ".params.ana_reporting"), "always told"),
        (at(nvmf, 8, ".params.namespace"), "Nvme0n1 is not served"),
        (at(nvmf, 9, ".params.namespace.ptpl_file"), "state_dir"),
        (at(nvmf, 11, ".params.crdt2"), "the first"),
        (at(nvmf, 13, ""), "\"TCP\""),
    ];
    let expected: Vec<(&str, &str)> = expected.iter().map(|(path, says)| (path.as_str(), *says)).collect();
    notes(&imported, &expected);
}

fn without_lines(mut config: Config) -> Config {
    config.listeners.iter_mut().for_each(|listener| listener.line = None);
    config.subsystems.iter_mut().flat_map(|one| &mut one.namespaces).for_each(|one| one.line = None);
    config
}

#[test]
fn converted_text_says_what_was_checked() {
    for text in [NVMET, SPDK] {
        let imported = import(text, "x").unwrap();
        let again = Config::parse(&imported.toml, "converted").unwrap();
        assert_eq!(without_lines(again), imported.config);
    }
}

/// A sample with one part replaced.
fn changed(sample: &str, pointer: &str, value: Value) -> String {
    let mut root: Value = serde_json::from_str(sample).unwrap();
    *root.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer} is not there")) = value;
    root.to_string()
}

#[test]
fn bad_input_names_object_reason_and_remedy() {
    let port = "/ports/0";
    for (text, object, reason) in [
        ("{".to_owned(), "bad.json:1", "EOF"),
        ("{\"ports\": [}".to_owned(), "bad.json:1", "column 12"),
        ("{}".to_owned(), "bad.json", "neither nvmetcli's form nor SPDK's"),
        (NVMET.replace("nqn.2024-01.io.example:a", "testnqn"), "subsystems[0]", "testnqn"),
        (changed(NVMET, "/subsystems/0/nqn", json!(7.5)), "ports[0].subsystems[0]", "no subsystem"),
        (changed(NVMET, "/subsystems/1/nqn", json!(null)), "subsystems[1].nqn", "is missing"),
        (changed(NVMET, "/subsystems/0/attr", json!([])), "subsystems[0].attr", "no object"),
        (
            changed(NVMET, "/subsystems/0/attr/allow_any_host", json!("maybe")),
            "attr.allow_any_host",
            "neither on nor off",
        ),
        (changed(NVMET, "/subsystems/0/attr/serial", json!("a serial number that is too long")), "attr.serial", "fit"),
        (changed(NVMET, "/subsystems/0/namespaces/0/nsid", json!("x")), "namespaces[0].nsid", "no whole number"),
        (changed(NVMET, "/subsystems/0/namespaces/0/nsid", json!(0)), "subsystems[0].namespaces[0].nsid", ""),
        (changed(NVMET, "/subsystems/0/namespaces/0/device/uuid", json!("x")), "device.uuid", "is none"),
        (changed(NVMET, "/subsystems/0/namespaces/0/device/path", json!("")), "device.path", "is missing"),
        (changed(NVMET, "/subsystems/0/namespaces/0/device/path", json!("/srv/b.img")), "device.path", "twice"),
        (changed(NVMET, "/subsystems/0/namespaces/0", json!(1)), "subsystems[0].namespaces[0]", "no object"),
        (
            changed(NVMET, "/hosts/0", json!({"nqn": "nqn.h", "dhchap_key": "DHHC-1:00:x:"})),
            "hosts[0].dhchap_key",
            "authenticate",
        ),
        (changed(NVMET, &format!("{port}/addr/traddr"), json!("nowhere")), "ports[0].addr.traddr", "nowhere"),
        (changed(NVMET, &format!("{port}/addr"), json!(null)), "ports[0].addr", "is missing"),
        (
            changed(NVMET, &format!("{port}/ana_groups/1/ana/state"), json!("gone")),
            "ports[0].ana_groups[1]",
            "no state",
        ),
        (changed(NVMET, &format!("{port}/subsystems/1"), json!("nqn.x")), "ports[0].subsystems[1]", "no subsystem"),
        (changed(NVMET, &format!("{port}/param/inline_data_size"), json!("100")), "param.inline_data_size", "multiple"),
        (changed(NVMET, "/ports", json!([])), "ports", "transport rdma"),
        (changed(SPDK, "/subsystems/2/config/2/params/filename", json!(null)), "params.filename", "is missing"),
        (changed(SPDK, "/subsystems/2/config/1/params/num_blocks", json!(i64::MAX)), "params.num_blocks", "no size"),
        (changed(SPDK, "/subsystems/2/config/1/params/block_size", json!(520)), "params.block_size", "520"),
        (
            changed(SPDK, "/subsystems/3/config/6/params/namespace/bdev_name", json!("gone")),
            "namespace.bdev_name",
            "no bdev",
        ),
        (changed(SPDK, "/subsystems/3/config/6/params/nqn", json!("nqn.x")), "config[6].params.nqn", "no subsystem"),
        (changed(SPDK, "/subsystems/3/config/5/params/dhchap_key", json!("gone")), "params.dhchap_key", "authenticate"),
        (changed(SPDK, "/subsystems/2/config/5/params/rw_ios_per_sec", json!(-1)), "rw_ios_per_sec", "no rate"),
        (
            changed(SPDK, "/subsystems/3/config/12/params/listen_address", json!(null)),
            "params.listen_address",
            "is missing",
        ),
    ] {
        let problems = import(&text, "bad.json").expect_err(object);
        let fits = |problem: &Problem| {
            let line = problem.to_string();
            line.starts_with("bad.json") && line.contains(object) && line.contains(reason) && !problem.remedy.is_empty()
        };
        assert!(problems.0.iter().any(fits), "{object} ({reason}) is not among\n{problems}");
    }
}

#[test]
fn own_files_are_told_from_foreign_ones() {
    assert!(is_foreign("\u{feff} \n{}") && !is_foreign("[[subsystem]]") && !is_foreign(""));
    let own = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:x\"\n[[subsystem.namespace]]\nnull = \"1G\"\n";
    let loaded = Config::parse_any(own, "x").unwrap();
    assert!(!loaded.foreign && loaded.notes.is_empty());
    assert!(Config::parse_any(SPDK, "x").unwrap().foreign);
}

/// Any JSON, more often with the keys and shapes that mean something.
fn any_json() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "nqn",
        "nsid",
        "path",
        "uuid",
        "rdma",
        "RDMA",
        "tcp",
        "4420",
        "192.0.2.1",
        "::1",
        "bdev",
        "nvmf",
        "0",
        "1",
        "-1",
        "nvmf_create_subsystem",
        "nvmf_subsystem_add_ns",
        "nvmf_subsystem_add_listener",
        "nvmf_create_transport",
        "bdev_malloc_create",
        "bdev_nvme_attach_controller",
        "nqn.2024-01.io.example:a",
        "inaccessible",
        "\u{1}\n\"",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word.prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    let key = prop::sample::select(vec![
        "subsystems",
        "ports",
        "hosts",
        "nqn",
        "attr",
        "namespaces",
        "device",
        "path",
        "uuid",
        "nguid",
        "addr",
        "trtype",
        "traddr",
        "trsvcid",
        "ana_groups",
        "ana",
        "state",
        "grpid",
        "param",
        "inline_data_size",
        "mdts",
        "allowed_hosts",
        "subsystem",
        "config",
        "method",
        "params",
        "name",
        "block_size",
        "num_blocks",
        "filename",
        "namespace",
        "bdev_name",
        "listen_address",
        "allow_any_host",
        "serial",
        "serial_number",
        "nsid",
        "enable",
        "max_io_size",
        "host",
        "other",
    ]);
    leaf.prop_recursive(6, 96, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|pairs| pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

/// Every place in a value.
fn pointers(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(key, value)| pointers(value, format!("{at}/{key}"), found));
        }
        Value::Object(map) => map.iter().for_each(|(key, value)| pointers(value, format!("{at}/{key}"), found)),
        _ => {}
    }
    found.push(at);
}

proptest! {
    #[test]
    fn any_json_is_imported_or_refused(root in any_json()) {
        if let Err(ConfigError(problems)) = import(&root.to_string(), "any") {
            prop_assert!(!problems.is_empty());
        }
    }

    #[test]
    fn any_text_is_imported_or_refused(text in ".{0,200}") {
        let _ = import(&text, "any");
        let _ = import(&format!("{{{text}"), "any");
    }

    #[test]
    fn a_sample_with_anything_in_it_is_imported_or_refused(
        spdk in any::<bool>(), at in any::<prop::sample::Index>(), value in any_json()
    ) {
        let sample: Value = serde_json::from_str(if spdk { SPDK } else { NVMET }).unwrap();
        let mut places = Vec::new();
        pointers(&sample, String::new(), &mut places);
        let mut changed = sample;
        *changed.pointer_mut(&places[at.index(places.len())]).unwrap() = value;
        match import(&changed.to_string(), "any") {
            Ok(imported) => prop_assert!(Config::parse(&imported.toml, "again").is_ok()),
            Err(ConfigError(problems)) => prop_assert!(!problems.is_empty()),
        }
    }
}
