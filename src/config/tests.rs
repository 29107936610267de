use std::path::PathBuf;

use super::*;
use crate::backend::{FaultPlan, Source};
use crate::target::{Group, Hash};

const GOOD: &str = r#"
[[subsystem]]
nqn = "nqn.2024-01.io.example:store"
serial = "S1"
hosts = ["nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5", "testnqn"]

[[subsystem.namespace]]
file = "/srv/disk.img"
size = "10G"
block_size = 4096
uuid = "e8ae0a15-06b8-4b4c-9e2e-9d9c5a1e3c11"

[[subsystem.namespace]]
nsid = 7
device = "/dev/nvme0n1"
nguid = "0102030405060708090a0b0c0d0e0f10"
eui64 = "0102030405060708"
read_only = true

[[subsystem]]
nqn = "nqn.2024-01.io.example:scratch"
[[subsystem.namespace]]
memory = "1G"
[[subsystem.namespace]]
null = "1T"

[[listener]]
address = "192.0.2.1"
tos = 106
[[listener]]
address = "[fe80::1%eth0]:4421"

[options]
provider = "soft"
reactors = 2
in_capsule_data = "16K"
cntlid_min = 100
cntlid_max = 200
poll = true
"#;

fn problems(text: &str) -> Vec<String> {
    Config::parse(text, "f.toml").unwrap_err().0.iter().map(ToString::to_string).collect()
}

/// The problems of a sound file with one line put into its first namespace.
fn with_namespace(lines: &str) -> Vec<String> {
    problems(&format!("[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\n{lines}\n"))
}

fn with_options(lines: &str) -> Vec<String> {
    problems(&format!(
        "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nnull = \"1G\"\n[options]\n{lines}\n"
    ))
}

#[test]
fn a_whole_file_is_read() {
    let config = Config::parse(GOOD, "f").unwrap();
    let [store, scratch] = &config.subsystems[..] else { panic!("{config:?}") };
    assert_eq!((store.serial.as_str(), store.allow_any_host, store.hosts.len()), ("S1", false, 2));
    let [file, device] = &store.namespaces[..] else { panic!("{store:?}") };
    assert_eq!(file.backend.source, Source::File { path: "/srv/disk.img".into(), size: Some(10 << 30) });
    assert_eq!((file.nsid, file.backend.block_size, file.backend.read_only), (1, Some(4096), false));
    assert_eq!(file.uuid("x", b"y").to_string(), "e8ae0a15-06b8-4b4c-9e2e-9d9c5a1e3c11");
    assert_eq!((device.nsid, device.backend.read_only, device.eui64), (7, true, [1, 2, 3, 4, 5, 6, 7, 8]));
    assert_eq!(device.nguid("x", b"y")[..4], [1, 2, 3, 4]);
    assert!(scratch.allow_any_host && scratch.serial.len() == 20);
    assert_eq!(scratch.namespaces[1].backend.source, Source::Null { size: 1 << 40 });
    assert_eq!(scratch.namespaces[1].nsid, 2);
    let listeners: Vec<_> = config.listeners.iter().map(ToString::to_string).collect();
    assert_eq!(listeners, ["192.0.2.1:4420", "[fe80::1%eth0]:4421"]);
    assert_eq!(config.listeners[0].tos, Some(106));
    let options = &config.options;
    assert_eq!((options.provider, options.reactors, options.poll), (ProviderChoice::Soft, Some(2), true));
    assert_eq!((options.in_capsule_data, options.cntlid.clone()), (16384, 100..=200));
    assert_eq!(options.queue_depth, Options::default().queue_depth);
}

#[test]
fn every_problem_is_reported_at_once_with_its_line() {
    let text = r#"[[subsystem]]
nqn = "testnqn"
hosst = []
[[subsystem.namespace]]
nsid = 0
file = "a"
size = "1000"
[[subsystem.namespace]]
memory = true
[[subsystem]]
nqn = "testnqn"
[listener]
address = "here"
[options]
queue_depth = 1025
"#;
    let lines = problems(text);
    let starts = [
        "f.toml:2: subsystem.nqn: \"testnqn\": the NQN does not start with \"nqn.\"",
        "f.toml:3: subsystem.hosst: is no key that exists; did you mean hosts?",
        "f.toml:4: subsystem.namespace.size: 1000 is not a multiple of the block size 512",
        "f.toml:5: subsystem.namespace.nsid: is out of range; give a number from 1 to 1024",
        "f.toml:9: subsystem.namespace.memory: is of the wrong type",
        "f.toml:10: subsystem.namespace: there is none",
        "f.toml:11: subsystem.nqn: \"testnqn\"",
        "f.toml:11: subsystem.nqn: \"testnqn\" is there twice",
        "f.toml:12: listener: is of the wrong type (table); give tables: [[listener]]",
        "f.toml:15: options.queue_depth: is out of range; give a number from 2 to 1024",
    ];
    assert_eq!(lines.len(), starts.len(), "{lines:#?}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}\nand not\n{start}");
        assert!(!line.contains('\n') && line.contains("; "), "one line with a remedy: {line}");
    }
}

#[test]
fn broken_toml_names_its_line() {
    let lines = problems("[[subsystem]]\nnqn = \n[options\n");
    assert!(lines[0].starts_with("f.toml:2: "), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains('\n') && line.ends_with("; correct the TOML here")));
    assert_eq!(problems("")[0], "f.toml:1: subsystem: there is none; add [[subsystem]] with an nqn");
}

#[test]
fn nqn_rules_are_named() {
    let rule = |nqn: &str| {
        let text = format!("[[subsystem]]\nnqn = {nqn:?}\n[[subsystem.namespace]]\nnull = \"1G\"\n");
        Config::parse(&text, "f").map_err(|error| error.to_string())
    };
    let name = |len: usize| format!("nqn.2024-01.io.example:{}", "x".repeat(len - 23));
    assert!(rule(&name(223)).is_ok());
    assert!(rule(&name(224)).unwrap_err().contains("longer than 223 bytes"));
    assert!(rule("nqn.2016-06.io.3x:y").is_ok());
    assert!(rule("testnqn").unwrap_err().contains("does not start"));
    assert!(rule("nqn.2024.io.example:a").unwrap_err().contains("date"));
    assert!(rule("nqn.2024-01.io.example:a\n").unwrap_err().contains("line end"));
    assert!(rule("nqn.2014-08.org.nvmexpress.discovery").unwrap_err().contains("discovery"));
}

#[test]
fn a_namespace_has_exactly_one_thing_behind_it() {
    assert!(with_namespace("")[0].contains("has nothing behind it"));
    assert!(with_namespace("memory = \"1G\"\nnull = \"1G\"")[0].contains("more than one thing"));
    assert!(with_namespace("memory = \"1G\"\nsize = \"1G\"")[0].contains("is for files"));
    assert!(with_namespace("memory = \"1G\"\nread_only = true")[0].contains("is for files and devices"));
    let zoned = |keys: &str| with_namespace(&format!("memory = \"8M\"\n{keys}")).join(" ");
    assert!(with_namespace("file = \"a\"\nsize = \"8M\"\nzone_size = \"1M\"")[0].contains("is for memory"));
    assert!(zoned("zone_capacity = \"1M\"").contains("give zone_size too"));
    assert!(zoned("max_active_zones = 3").contains("give zone_size too"));
    assert!(zoned("zone_size = \"3M\"").contains("choose a power of two"));
    assert!(zoned("zone_size = \"16M\"").contains("not a multiple of the zone size"));
    assert!(zoned("zone_size = \"1M\"\nzone_capacity = \"2M\"").contains("from 1 to the size of a zone"));
    assert!(zoned("zone_size = \"1M\"\nzone_capacity = 1000").contains("not a multiple of the block size"));
    let limits = "zone_size = \"1M\"\nmax_open_zones = 4\nmax_active_zones = 3";
    assert!(zoned(limits).contains("4 open zones is above that of 3"));
    assert!(with_namespace("memory = \"1GB\"")[0].contains("\"1GB\" is no size"));
    assert!(with_namespace("memory = 1000")[0].contains("not a multiple"));
    assert!(with_namespace("memory = -1")[0].contains("out of range"));
    assert!(with_namespace("file = \"a\"\nblock_size = 1024")[0].contains("choose 512 or 4096"));
    assert!(with_namespace("file = \"a\"\nsize = \"4608\"\nblock_size = \"4K\"")[0].contains("block size 4096"));
}

#[test]
fn identifiers_are_checked_and_unique_across_subsystems() {
    assert!(with_namespace("null = \"1G\"\nuuid = \"x\"")[0].contains("8-4-4-4-12"));
    assert!(with_namespace("null = \"1G\"\neui64 = \"0102\"")[0].contains("16 hexadecimal digits"));
    assert!(with_namespace("null = \"1G\"\nnguid = \"00000000000000000000000000000000\"")[0].contains("all zero"));
    let one = |nqn: &str, key: &str| {
        format!("[[subsystem]]\nnqn = \"nqn.2024-01.io.example:{nqn}\"\n[[subsystem.namespace]]\n{key}\n")
    };
    for key in [
        "null = \"1G\"\nuuid = \"e8ae0a15-06b8-4b4c-9e2e-9d9c5a1e3c11\"",
        "null = \"1G\"\nnguid = \"0102030405060708090a0b0c0d0e0f10\"",
        "null = \"1G\"\neui64 = \"0102030405060708\"",
        "file = \"/srv/a\"",
        "device = \"/dev/sda\"",
    ] {
        let lines = problems(&(one("a", key) + &one("b", &key.replace("/srv/a", "/srv//./a"))));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("is there twice"), "{lines:?}");
    }
    assert!(Config::parse(&(one("a", "nsid = 2\nnull = \"1G\"") + &one("b", "nsid = 2\nnull = \"1G\"")), "f").is_ok());
    let twice = with_namespace("nsid = 2\nnull = \"1G\"\n[[subsystem.namespace]]\nnull = \"1G\"");
    assert!(twice[0].contains("nsid: 2 is there twice"), "{twice:?}");
    for nsid in ["0", "1025", "0xFFFFFFFF", "0xFFFFFFFE", "-1"] {
        assert!(with_namespace(&format!("null = \"1G\"\nnsid = {nsid}"))[0].contains("out of range"));
    }
}

#[test]
fn hosts_are_lenient_and_do_not_contradict() {
    let with = |lines: &str| {
        format!("[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n{lines}\n[[subsystem.namespace]]\nnull = \"1G\"\n")
    };
    assert!(problems(&with("allow_any_host = true\nhosts = [\"a\"]"))[0].contains("contradicts"));
    assert!(problems(&with("hosts = [\"a b\"]"))[0].contains("hostnqn"));
    assert!(problems(&with("hosts = [\"a\", \"a\"]"))[0].contains("is there twice"));
    assert!(problems(&with("hosts = [3]"))[0].contains("strings only"));
    let closed = Config::parse(&with("hosts = []"), "f").unwrap();
    assert!(!closed.subsystems[0].allow_any_host, "an empty list admits nobody");
    assert!(problems(&with("serial = \"\""))[0].contains("1 to 20 printable"));
    assert!(problems(&with("model = \"é\""))[0].contains("1 to 40 printable"));
}

#[test]
fn the_example_of_the_readme_is_valid_as_it_is_and_with_all_that_is_commented_out() {
    let example = include_str!("../../README.md").split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let is_key = |line: &str| {
        let word = line.split([' ', ']']).next().unwrap_or_default();
        line.starts_with('[') || line.starts_with(&format!("{word} = "))
    };
    let commented = |line: &&str| line.strip_prefix("# ").is_some_and(is_key);
    let whole: Vec<&str> =
        example.lines().map(|line| if commented(&line) { line.trim_start_matches("# ") } else { line }).collect();
    assert!(example.lines().filter(commented).count() > 20, "nothing is commented out any more");
    Config::parse(example, "README.md").unwrap();
    let config = Config::parse(&whole.join("\n"), "README.md").unwrap();
    assert_eq!((config.subsystems[0].host_specs.len(), config.referrals.len(), config.listeners.len()), (1, 1, 1));
}

#[test]
fn option_limits_hold_on_both_sides() {
    let sound = |line: &str| {
        let text = format!(
            "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nnull = \"1G\"\n[options]\n{line}\n"
        );
        Config::parse(&text, "f").map(|config| config.options)
    };
    for (inside, outside) in [
        ("queue_depth = 1024", "queue_depth = 1025"),
        ("queue_depth = 2", "queue_depth = 1"),
        ("io_queues = 128", "io_queues = 129"),
        ("in_capsule_data = 0", "in_capsule_data = 8"),
        ("in_capsule_data = \"16K\"", "in_capsule_data = 16400"),
        ("mdts = \"4K\"", "mdts = \"2K\""),
        ("mdts = \"1M\"", "mdts = \"2M\""),
        ("mdts = \"128K\"", "mdts = \"96K\""),
        ("pool_size = \"4M\"", "pool_size = \"3M\""),
        ("pool_size = \"5M\"", "pool_size = \"4097K\""),
        ("receive_slots = 128", "receive_slots = 127"),
        ("reactors = 1", "reactors = 0"),
        ("reactors = 256", "reactors = 257"),
        ("cntlid_max = 0xffef", "cntlid_max = 0xfff0"),
        ("cntlid_min = 1", "cntlid_min = 0"),
        ("cntlid_min = 5\ncntlid_max = 5", "cntlid_min = 6\ncntlid_max = 5"),
        ("connect_timeout = 1000", "connect_timeout = 999"),
        ("keep_alive_granularity = 100", "keep_alive_granularity = 150"),
        ("log = \"debug\"", "log = \"loud\""),
        ("provider = \"verbs\"", "provider = \"magic\""),
        ("remote_invalidate = false", "remote_invalidat = false"),
        ("state_dir = \"/var/lib/farside\"", "state_dir = \"farside\""),
    ] {
        let options = sound(inside).unwrap_or_else(|error| panic!("{inside}: {error}"));
        // What the file's reader takes, a start takes.
        target::Options::from(&options).check().unwrap_or_else(|error| panic!("{inside}: {error}"));
        let lines = with_options(outside);
        assert_eq!(lines.len(), 1, "{outside}: {lines:?}");
        assert!(lines[0].starts_with("f.toml:6: ") || lines[0].starts_with("f.toml:7: "), "{lines:?}");
    }
}

#[test]
fn options_that_arguments_made_wrong_are_found_before_anything_is_opened() {
    let mut config =
        Config::parse("[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nnull = \"1G\"", "f")
            .unwrap();
    config.options.provider = ProviderChoice::Soft;
    assert_eq!(config.check_host("f"), []);
    config.options.reactors = Some(0);
    let [problem] = &config.check_host("f")[..] else { panic!("{:?}", config.check_host("f")) };
    assert_eq!(problem.to_string(), "f: options.reactors: 0 is out of range; use 1 to 256");
}

#[test]
fn hosts_with_rules_of_their_own_join_the_list() {
    let read = |keys: &str| {
        let text = format!(
            "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n{keys}\n[[subsystem.namespace]]\nnull = \"1G\"\n"
        );
        Config::parse(&text, "f")
    };
    let host = "[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_key = \"/k\"\ndhchap_groups = [\"null\"]\n";
    let config = read(&format!("hosts = [\"nqn.g\"]\n{host}")).unwrap();
    let subsystem = &config.subsystems[0];
    assert_eq!((subsystem.allow_any_host, &subsystem.hosts[..]), (false, &["nqn.g".to_owned(), "nqn.h".into()][..]));
    let spec = &subsystem.host_specs[0];
    assert_eq!((&spec.dhchap_key, &spec.dhchap_groups[..]), (&Some("/k".into()), &[Group::Null][..]));
    assert_eq!(spec.dhchap_hashes, Hash::ALL);
    assert!(!read(host).unwrap().subsystems[0].allow_any_host, "the list is not empty");
    assert!(read(&format!("allow_any_host = true\n{host}")).unwrap().subsystems[0].allow_any_host);
    for (keys, named) in [
        ("[[subsystem.host]]\ndhchap_key = \"/k\"", "subsystem.host.nqn"),
        ("hosts = [\"nqn.h\"]\n[[subsystem.host]]\nnqn = \"nqn.h\"", "twice"),
        ("[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_controller_key = \"/k\"", "dhchap_key"),
        ("[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_hashes = [\"md5\"]", "sha256, sha384, sha512"),
        ("[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_groups = []", "empty"),
        ("[[subsystem.host]]\nnqn = \"nqn.h\"\nkey = \"/k\"", "key"),
    ] {
        let problems = read(keys).unwrap_err();
        assert_eq!(problems.0.len(), 1, "{keys}: {problems}");
        assert!(problems.to_string().contains(named), "{keys}: {problems}");
    }
}

#[test]
fn ana_groups_and_states_are_read_and_refused() {
    let sound = |ana: &str, group: &str| {
        let text = format!(
            "[[listener]]\naddress = \"192.0.2.2\"\n[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.ana]]\n{ana}\n[[subsystem.namespace]]\nnull = \"1G\"\n{group}\n"
        );
        Config::parse(&text, "f")
    };
    let config = sound("group = 128\nstate = \"inaccessible\"\nlistener = \"192.0.2.2\"", "ana_group = 128").unwrap();
    let subsystem = &config.subsystems[0];
    let expected = AnaSpec { group: 128, listener: "192.0.2.2".parse().ok(), state: AnaState::Inaccessible };
    assert_eq!((&subsystem.ana[..], subsystem.namespaces[0].ana_group), (&[expected][..], 128));
    assert_eq!(sound("group = 1\nstate = \"change\"", "").unwrap().subsystems[0].ana[0].listener, None);
    for (ana, group) in [
        ("group = 129\nstate = \"change\"", ""),
        ("group = 0\nstate = \"change\"", ""),
        ("state = \"change\"", ""),
        ("group = 1", ""),
        ("group = 1\nstate = \"fine\"", ""),
        ("group = 1\nstate = \"change\"\nlistener = \"here\"", ""),
        ("group = 1\nstate = \"change\"\nlistener = \"192.0.2.3\"", ""),
        ("group = 1\nstate = \"change\"\nlistener = \"192.0.2.2:4421\"", ""),
        ("group = 1\nstate = \"change\"", "ana_group = 0"),
    ] {
        let problems = sound(ana, group).unwrap_err();
        assert_eq!(problems.0.len(), 1, "{ana} {group}: {problems}");
    }
}

#[test]
fn a_secret_in_the_place_of_its_file_is_not_repeated() {
    let text = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.host]]\nnqn = \"nqn.h\"\n\
                dhchap_key = \"DHHC-1:00:c2VjcmV0:\"\n[[subsystem.namespace]]\nnull = \"1G\"\n";
    let problems = Config::parse(text, "f").unwrap_err().to_string();
    assert!(problems.contains("dhchap_key") && problems.contains("mode 600"), "{problems}");
    assert!(!problems.contains("c2VjcmV0"), "{problems}");
}

#[test]
fn listen_addresses_are_read_and_written() {
    for (text, written) in [
        ("192.0.2.1", "192.0.2.1:4420"),
        ("192.0.2.1:1", "192.0.2.1:1"),
        ("2001:db8::1", "[2001:db8::1]:4420"),
        ("[2001:db8::1]", "[2001:db8::1]:4420"),
        ("[2001:db8::1]:65535", "[2001:db8::1]:65535"),
        ("fe80::1%eth0", "[fe80::1%eth0]:4420"),
        ("0.0.0.0", "0.0.0.0:4420"),
        ("::", "[::]:4420"),
    ] {
        assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), written);
    }
    for text in [
        "",
        "host",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "192.0.2.1%eth0",
        "[::1",
        "[::1]x",
        "fe80::1",
        "fe80::1%",
        ":4420",
    ] {
        assert!(text.parse::<ListenAddress>().is_err(), "{text}");
    }
    let loopback = "[::1%lo]:4420".parse::<ListenAddress>().unwrap().resolve().unwrap();
    assert_eq!(loopback.to_string(), "[::1%1]:4420");
    assert!("[fe80::1%absent0]:1".parse::<ListenAddress>().unwrap().resolve().is_err());
}

#[test]
fn faults_are_a_table_of_their_own() {
    let text = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nnull = \"1G\"\nfaults = { drop_flush = true, seed = 3 }\n";
    let config = Config::parse(text, "f").unwrap();
    let plan = FaultPlan { seed: 3, drop_flush: true, ..Default::default() };
    assert_eq!(config.subsystems[0].namespaces[0].backend.faults, Some(plan));
    assert!(with_namespace("null = \"1G\"\nfaults = { drop = true }")[0].contains("faults.drop"));
}

fn quick(source: Source) -> Quick {
    Quick { source, block_size: None, nqn: None, uuid: None, listen: Vec::new(), provider: ProviderChoice::Auto }
}

#[test]
fn quick_form_makes_up_what_it_is_not_given() {
    let source = Source::Memory { size: 1 << 30 };
    let one = Config::quick(quick(source.clone()), "machine").unwrap();
    let nqn = &one.subsystems[0].nqn;
    assert!(nqn.starts_with("nqn.2014-08.org.nvmexpress:uuid:"));
    assert_eq!(one, Config::quick(quick(source.clone()), "machine").unwrap());
    assert_ne!(*nqn, Config::quick(quick(source.clone()), "another").unwrap().subsystems[0].nqn);
    assert!(one.subsystems[0].allow_any_host && one.listeners.is_empty());
    let wrong = Quick { nqn: Some("x".into()), uuid: Some("y".into()), listen: vec!["z".into()], ..quick(source) };
    let error = Config::quick(wrong, "machine").unwrap_err();
    let keys: Vec<_> = error.0.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["--nqn", "--uuid", "--listen"]);
    assert!(error.to_string().starts_with("command line: --nqn: "));
}

#[test]
fn the_machine_has_its_say() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("odd"), [0; 700]).unwrap();
    std::fs::write(path("good"), [0; 4096]).unwrap();
    std::fs::write(path("empty"), []).unwrap();
    std::os::unix::fs::symlink(path("good"), path("link")).unwrap();
    let file = |name: &str, size| Source::File { path: path(name), size };
    let check = |source: Source| {
        let config = Config::quick(quick(source), "machine").unwrap();
        config.check_host("f").iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(check(file("good", None)), [] as [String; 0]);
    assert_eq!(check(file("new", Some(1 << 20))), [] as [String; 0]);
    assert!(!path("new").exists(), "a check makes nothing");
    for (source, text) in [
        (file("absent", None), "give a size to create it"),
        (file("absent/disk", Some(4096)), "make the folder"),
        (file("odd", None), "700 bytes, not a multiple"),
        (file("good", Some(8192)), "has 4096 bytes, not 8K"),
        (file("empty", None), "is empty; give a size"),
        (Source::File { path: folder.path().into(), size: None }, "no regular file"),
        (Source::Device { path: path("good") }, "write file ="),
        (Source::Device { path: "/dev/null".into() }, "no block device"),
        (Source::Device { path: path("absent") }, "check the path"),
    ] {
        let lines = check(source.clone());
        assert_eq!(lines.len(), 1, "{source:?}: {lines:?}");
        assert!(lines[0].contains(text), "{lines:?}");
    }
    let two = format!(
        "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nfile = {:?}\n[[subsystem.namespace]]\nfile = {:?}\n[[listener]]\naddress = \"192.0.2.77\"\n[[listener]]\naddress = \"127.0.0.1\"\n",
        path("good"),
        path("link")
    );
    let lines = Config::parse(&two, "f").unwrap().check_host("f");
    let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("f:5: namespace 2 of") && lines[0].contains("under another name"), "{lines:?}");
    assert!(lines[1].contains("f:7: listener 192.0.2.77:4420: is no address of this machine"), "{lines:?}");
}

#[test]
fn a_file_that_cannot_be_read_is_one_line() {
    let absent = Config::load(&PathBuf::from("/absent/farside.toml")).unwrap_err().to_string();
    assert!(
        absent.starts_with("/absent/farside.toml: ") && absent.ends_with("; check the path of the configuration"),
        "{absent}"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(Config::load(&path).unwrap_err().to_string().contains("UTF-8"));
    std::fs::write(&path, GOOD).unwrap();
    assert!(Config::load(&path).is_ok());
}

proptest::proptest! {
    #[test]
    fn any_text_is_an_answer_and_never_a_panic(text in "\\PC{0,200}") {
        let _ = Config::parse(&text, "f");
    }

    #[test]
    fn any_change_of_a_sound_file_is_an_answer_and_never_a_panic(at in 0..GOOD.len(), len in 0..40usize, put in "[\\[\\]=\"0-9a-z\n.{}-]{0,12}") {
        let (start, end) = (at, (at + len).min(GOOD.len()));
        if GOOD.is_char_boundary(start) && GOOD.is_char_boundary(end) {
            let text = format!("{}{put}{}", &GOOD[..start], &GOOD[end..]);
            if let Err(error) = Config::parse(&text, "f") {
                proptest::prop_assert!(!error.0.is_empty());
                proptest::prop_assert!(error.0.iter().all(|problem| !problem.to_string().contains('\n')), "{}", error);
            }
        }
    }
}

#[test]
fn congestion_control_has_the_papers_parameters() {
    let text = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n[[subsystem.namespace]]\nnull = \"1G\"\n\
                [options.dcqcn]\nline_rate = 3125000000\nrate_timer_us = 300\ncnp_interval_us = 0\n";
    let dcqcn = Config::parse(text, "f").unwrap().options.dcqcn;
    let default = Options::default().dcqcn;
    assert_eq!(
        (dcqcn.line_rate, dcqcn.rate_timer.as_micros(), dcqcn.cnp_interval.as_micros()),
        (3_125_000_000, 300, 0)
    );
    assert_eq!((dcqcn.r_ai, dcqcn.alpha_timer), (default.r_ai, default.alpha_timer));
    for (wrong, key) in [
        ("dcqcn = { g_shift = 0 }", "g_shift"),
        ("dcqcn = { g_shift = 20 }", "g_shift"),
        ("dcqcn = { rate_timer_us = 0 }", "rate_timer_us"),
        ("dcqcn = { min_rate = 999 }", "min_rate"),
        ("dcqcn = { line_rate = 1000, min_rate = 1001 }", "min_rate"),
        ("dcqcn = { rai = 5 }", "rai"),
    ] {
        let found = with_options(wrong);
        assert!(found.len() == 1 && found[0].contains(&format!("options.dcqcn.{key}")), "{wrong}: {found:?}");
    }
}

#[test]
fn odd_host_names_are_taken_and_pointed_out() {
    let text = "[[subsystem]]\nnqn = \"nqn.2024-01.io.example:a\"\n\
        hosts = [\"foo\", \"nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555\"]\n\
        [[subsystem.host]]\nnqn = \"nqn.2014-08.org.nvmexpress:uuid:1\"\n\
        [[subsystem.namespace]]\nnull = \"1G\"\nhosts = [\"nqn.bar\"]\n";
    let config = Config::parse(text, "f").unwrap();
    assert_eq!(config.subsystems[0].hosts.len(), 3);
    let odd = config.odd_hosts();
    let objects = [
        "host \"foo\" of nqn.2024-01.io.example:a: ",
        "host \"nqn.2014-08.org.nvmexpress:uuid:1\" of nqn.2024-01.io.example:a: ",
        "host \"nqn.bar\" of namespace 1 of nqn.2024-01.io.example:a: ",
    ];
    assert_eq!(odd.len(), objects.len(), "{odd:?}");
    for (line, object) in odd.iter().zip(objects) {
        assert!(line.starts_with(object) && line.contains("; ") && line.contains("/etc/nvme/hostnqn"), "{line}");
    }
}
