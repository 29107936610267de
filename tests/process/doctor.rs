//! `farside doctor` on machines with faults: a network namespace of its own, limits of its own.

use std::process::Command;

/// What it says, and whether it found a fault, after these commands in a new network namespace.
fn doctor(prepare: &str, arguments: &str) -> (bool, String) {
    let program = env!("CARGO_BIN_EXE_farside");
    let script = format!("set -e; {NAMESPACE} {prepare}\nexec {program} doctor {arguments}");
    let output = Command::new("unshare").args(["-rnm", "sh", "-c", &script]).output().expect("unshare (util-linux)");
    let text = String::from_utf8(output.stdout).expect("text");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.is_empty() && !text.is_empty(), "{prepare}: {stderr}");
    (output.status.success(), text)
}

/// The line about an object.
#[track_caller]
fn line<'a>(text: &'a str, object: &str) -> &'a str {
    text.lines().find(|line| line.contains(object)).unwrap_or_else(|| panic!("nothing about {object}:\n{text}"))
}

/// The namespace's own view of its interfaces.
const NAMESPACE: &str = "mount -t sysfs sysfs /sys; ip link set lo up;";
const ADDRESS: &str = "ip address add 10.77.0.1/24 dev lo;";

#[test]
fn faults_of_the_network_have_their_sentences() {
    let (well, text) = doctor("", "--listen 10.77.0.1");
    assert!(!well, "{text}");
    let said = line(&text, "address 10.77.0.1");
    assert!(said.starts_with("FAULT") && said.contains("no address of this machine; see `ip address`"), "{said}");

    let (_, text) = doctor(&format!("{ADDRESS} ip link set lo mtu 1500"), "--listen 10.77.0.1 --peer 192.0.2.9");
    assert!(line(&text, "address 10.77.0.1").contains("is lo's"), "{text}");
    let said = line(&text, "MTU of lo");
    assert!(said.starts_with("hint") && said.contains("carry 1024 bytes; ip link set lo mtu 4200"), "{said}");
    let said = line(&text, "route to 192.0.2.9");
    assert!(
        said.starts_with("FAULT") && said.contains("unreachable") && said.contains("ip route get 192.0.2.9"),
        "{said}"
    );

    let (_, text) = doctor(ADDRESS, "--listen 10.77.0.1 --peer 10.77.0.9");
    assert!(line(&text, "MTU of lo").starts_with("ok"), "{text}");
    assert!(line(&text, "UDP port 4791 of 10.77.0.1").contains("is free"), "{text}");
    let said = line(&text, "route to 10.77.0.9");
    assert!(said.starts_with("ok") && said.contains("leaves from 10.77.0.1"), "{said}");

    // Of the route, which the interface does not tell.
    let route = format!("{ADDRESS} ip route add 10.78.0.0/24 dev lo mtu 1400;");
    let (_, text) = doctor(&route, "--listen 10.77.0.1 --peer 10.78.0.9");
    assert!(line(&text, "MTU of lo").starts_with("ok"), "{text}");
    let said = line(&text, "MTU towards 10.78.0.9");
    assert!(said.starts_with("hint") && said.contains("1400: packets carry 1024 bytes"), "{said}");

    let (_, text) = doctor("ip -6 address add fd77::1/64 dev lo nodad;", "--listen fd77::1");
    assert!(line(&text, "address fd77::1").contains("is lo's"), "{text}");
}

#[test]
fn port_that_a_software_target_holds_is_named() {
    let program = env!("CARGO_BIN_EXE_farside");
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("control");
    let prepare = format!(
        "{NAMESPACE} {ADDRESS} {program} serve --null 1G --provider soft --reactors 1 --listen 10.77.0.1 --control {0} >{1} 2>&1 & \
         n=0; while ! {program} ctl --control {0} status >{1}.status 2>&1; do \
         n=$((n + 1)); test $n -lt 300; sleep 0.1; done; \
         trap 'kill %1' EXIT; {program} doctor --listen 10.77.0.1 || true; exit 0",
        socket.display(),
        folder.path().join("log").display(),
    );
    let output = Command::new("unshare").args(["-rnm", "bash", "-c", &prepare]).output().expect("unshare (util-linux)");
    let text = String::from_utf8(output.stdout).expect("text");
    let said = line(&text, "UDP port 4791 of 10.77.0.1");
    assert!(said.starts_with("ok") && said.contains("is held by a farside process"), "{said}");
}

#[test]
fn small_memlock_limit_of_an_unprivileged_user_is_a_fault() {
    let mut command = Command::new("setpriv");
    // Root may lock what it wants, unless that is taken from it.
    if nix::unistd::geteuid().is_root() {
        command.arg("--bounding-set=-ipc_lock");
    }
    command.args(["prlimit", "--memlock=65536", env!("CARGO_BIN_EXE_farside"), "doctor", "--provider", "verbs"]);
    let output = command.output().expect("setpriv and prlimit (util-linux)");
    let text = String::from_utf8(output.stdout).expect("text");
    let said = line(&text, "memlock limit");
    assert!(said.starts_with("FAULT") && said.contains("is 64K") && said.contains("LimitMEMLOCK=infinity"), "{said}");
}
