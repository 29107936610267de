//! Configurations of other targets, as an operator gives them to the program.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;

use farside::host::{Host, HostOptions};
use farside::rdma::soft::Soft;

use crate::served::{Served, own_address};

const NQN: &str = "nqn.2026-11.io.example:foreign";

/// What nvmetcli saves of a target that serves one file.
fn saved(file: &str, address: SocketAddr) -> String {
    format!(
        r#"{{"hosts": [], "ports": [{{"addr": {{"adrfam": "ipv4", "traddr": "{}", "treq": "required",
            "trsvcid": "{}", "trtype": "rdma"}}, "portid": 1, "referrals": [], "subsystems": ["{NQN}"]}}],
            "subsystems": [{{"allowed_hosts": [], "attr": {{"allow_any_host": "1", "serial": "feed"}}, "nqn": "{NQN}",
            "namespaces": [{{"device": {{"path": "{file}"}}, "enable": 1, "nsid": 3}}]}}]}}"#,
        address.ip(),
        address.port()
    )
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_farside")).args(arguments).output().expect("the program");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn kernel_targets_configuration_is_checked_converted_and_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = folder.path().join("disk.img");
    std::fs::write(&disk, vec![0; 1 << 20]).expect("a file");
    let address = SocketAddr::new(own_address(), 4420);
    let json = saved(&disk.display().to_string(), address);
    let name = folder.path().join("saved.json").display().to_string();
    std::fs::write(&name, &json).expect("a file");
    let said = format!("farside: {name}: ports[0].addr.treq: not carried over: secure channels are for TCP\n");
    let (_, _, stderr) = run(&["check", &name]);
    assert!(stderr.starts_with(&said), "{stderr}");
    let (code, toml, stderr) = run(&["convert", &name]);
    assert_eq!((code, &stderr), (Some(0), &said), "{toml}");
    let served = |name: &str, text: &str| {
        let served = Served::start_file(name, text, address, |command| {
            command.args(["--provider", "soft", "--reactors", "1"]);
        });
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        let options = HostOptions { source: Some(own_address()), reconnect: None, ..HostOptions::default() };
        let mut host = Host::connect(provider, address, NQN, options).expect("a host");
        assert_eq!(host.active_namespaces().expect("a list"), [3]);
        served.log()
    };
    let log = served("saved.json", &json);
    assert!(log.contains("ports[0].addr.treq: not carried over"), "{log}");
    served("converted.toml", &toml);
}

#[test]
fn bad_foreign_file_is_one_line_with_object_reason_and_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = folder.path().join("saved.json").display().to_string();
    let json = saved("/nowhere/disk.img", SocketAddr::new(own_address(), 4420)).replace("\"rdma\"", "\"tcp\"");
    std::fs::write(&name, json).expect("a file");
    for command in ["check", "convert"] {
        let (code, stdout, stderr) = run(&[command, &name]);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{command}: {stderr}");
        let line = format!("farside: {name}: ports: no port has the transport rdma; add one, or change");
        assert!(stderr.starts_with(&line), "{command}: {stderr}");
        assert!(!stderr.contains("subsystem: there is none"), "{command} says what follows from it: {stderr}");
    }
}
