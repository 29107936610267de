//! How the program starts, or does not, and how it ends: what it says, and what a start that fails leaves behind.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::host::{Host, HostOptions, Op};
use farside::rdma::soft::Soft;
use nix::sys::signal::Signal;

use crate::served::{NQN, Served, own_address};

const LIMIT: Duration = Duration::from_secs(20);

/// Small, so that it starts at once.
const SMALL: &str = "reactors = 1\npool_size = \"4M\"\nreceive_slots = 256";

fn farside(folder: &Path, arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_farside");
    Command::new(program).args(arguments).current_dir(folder).output().expect("the program")
}

/// The one line that a start says that fails.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = farside(folder, &[&["serve", "--provider", "soft"], arguments].concat());
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{arguments:?}: {said}");
    said
}

#[test]
fn start_that_fails_leaves_no_file_behind() {
    let held = Served::start(SMALL);
    let (taken, free) = (held.address.to_string(), SocketAddr::new(own_address(), 4420).to_string());
    let metrics = TcpListener::bind((own_address(), 0)).expect("a port");
    let metrics = metrics.local_addr().map(|address| (metrics, address.to_string())).expect("an address");
    let folder = tempfile::tempdir().expect("a folder");
    File::create(folder.path().join("socket")).expect("a file");
    // The port in use, which comes out last of all; other ways in; what only this machine's arguments make wrong.
    for (arguments, names) in [
        (["--reactors", "1", "--listen", &taken].as_slice(), &*held.address.ip().to_string()),
        (&["--reactors", "1", "--listen", &free, "--metrics", &metrics.1], &metrics.1),
        (&["--reactors", "1", "--listen", &free, "--control", "socket"], "control socket socket"),
        (&["--reactors", "257", "--listen", &free], "options.reactors"),
    ] {
        let new = [&["--nqn", NQN, "--file", "new.img", "--size", "16M"], arguments].concat();
        let said = refused(folder.path(), &new);
        assert!(said.contains(names), "{arguments:?}: {said}");
        assert!(!folder.path().join("new.img").exists(), "{arguments:?} leaves a file");
    }
    // A file that was there, and empty, is as it was.
    File::create(folder.path().join("new.img")).expect("a file");
    refused(folder.path(), &["--file", "new.img", "--size", "16M", "--reactors", "1", "--listen", &taken]);
    assert_eq!(folder.path().join("new.img").metadata().expect("the file").len(), 0);
}

#[test]
fn file_that_was_made_and_served_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("new.img");
    let namespace = format!("file = \"{}\"\nsize = \"16M\"", path.display());
    let mut served = Served::start_with(SMALL, &namespace, |_| ());
    assert!(served.terminate(), "{}", served.log());
    assert_eq!(path.metadata().expect("the file").len(), 16 << 20);
}

#[test]
fn check_makes_no_file_and_does_not_listen() {
    // Where it says that it would listen somebody else does already.
    let held = Served::start(SMALL);
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!(
        "[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nfile = \"new.img\"\nsize = \"16M\"\n\
         [[listener]]\naddress = \"{}\"\n[options]\nprovider = \"soft\"\nstate_dir = \"{}\"\n",
        held.address,
        folder.path().join("state").display(),
    );
    std::fs::write(folder.path().join("farside.toml"), text).expect("a file");
    let output = farside(folder.path(), &["check", "farside.toml"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said, "farside.toml: sound, and this machine can serve it\n");
    let left: Vec<_> = folder.path().read_dir().expect("the folder").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["farside.toml"], "check leaves something behind");
}

#[test]
fn table_at_the_start_says_device_gid_and_memory() {
    let served = Served::start(SMALL);
    let log = served.log();
    let line = |word: &str| {
        let found: Vec<&str> = log.lines().filter(|line| line.split(' ').next() == Some(word)).collect();
        let [line] = found[..] else { panic!("{word}: {found:?} of\n{log}") };
        line.split("  ").map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>()
    };
    let (address, ip) = (served.address.to_string(), served.address.ip());
    assert_eq!(line("listener"), ["listener", &address, "udp/lo", &format!("GID {ip} (RoCE v2)"), "path MTU 4096"]);
    // README, "Memory": 4 MiB + 256 x (4096 + 64 + 32) + 4 MiB, rounded up to 2 MiB.
    assert_eq!(line("memory"), ["memory", "10 MiB registered, 1 reactor, provider soft"]);
    assert_eq!(line("subsystem"), ["subsystem", NQN]);
    // Nothing need follow it: there may be no control socket to name.
    let connect = format!("connect    nvme connect -t rdma -a {ip} -s 4420 -n {NQN}");
    assert!(log.lines().any(|line| line == connect), "{log}");
}

#[test]
fn second_signal_ends_at_once_what_the_first_waits_for() {
    // Its watchdog tells when the reactor hangs.
    let mut served = Served::start_with(SMALL, "memory = \"64M\"", |command| {
        command.arg("--test-hang-on-flush").env("WATCHDOG_USEC", "3000000");
    });
    let provider = Arc::new(Soft::new(1).expect("the software provider"));
    let options = HostOptions { source: Some(own_address()), reconnect: None, ..HostOptions::default() };
    let mut host = Host::connect(provider, served.address, NQN, options).expect("the listener accepts");
    host.namespace(1).expect("it serves");
    let flush = farside::host::Command { token: 1, op: Op::Flush, nsid: 1, slba: 0, blocks: 0, data: None };
    assert!(host.submit(0, flush).is_ok(), "an idle queue has room");
    let deadline = Instant::now() + LIMIT;
    while !served.log().contains("the watchdog of 3s is not fed") {
        assert!(Instant::now() < deadline, "the reactor does not hang:\n{}", served.log());
        host.poll();
    }
    served.signal(Signal::SIGTERM);
    // Longer than a drain may take.
    assert_eq!(
        served.status_within(Duration::from_secs(3)),
        None,
        "the reactor hung, and the first signal did not wait"
    );
    served.signal(Signal::SIGINT);
    let status = served.status_within(LIMIT).expect("the second signal ends it");
    assert_eq!(status.code(), Some(1), "{}", served.log());
}

#[test]
fn mistyped_names_of_hosts_and_empty_storage_are_pointed_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!(
        "[[subsystem]]\nnqn = \"{NQN}\"\nhosts = [\"foo\"]\n[[subsystem.namespace]]\nmemory = \"8M\"\n\
         [[listener]]\naddress = \"{}:4420\"\n[options]\nprovider = \"soft\"\n",
        own_address()
    );
    std::fs::write(folder.path().join("farside.toml"), &text).expect("a file");
    let output = farside(folder.path(), &["check", "farside.toml"]);
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!((output.status.code(), said.lines().count()), (Some(0), 1), "{said}");
    let names = format!("farside: farside.toml: host \"foo\" of {NQN}: ");
    assert!(said.starts_with(&names) && said.contains("/etc/nvme/hostnqn"), "{said}");
    let said =
        refused(folder.path(), &["--memory", "0", "--listen", &SocketAddr::new(own_address(), 4420).to_string()]);
    assert!(said.contains("memory") && said.contains("is empty") && !said.contains("multiple"), "{said}");
}
