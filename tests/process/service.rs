//! The program under a service manager, played by the test: readiness, the watchdog, the end.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::host::{Host, HostOptions, Op};
use farside::rdma::soft::Soft;

use crate::served::{NQN, Served, own_address};

const LIMIT: Duration = Duration::from_secs(30);

/// Small, so that it starts at once.
const SMALL: &str = "reactors = 1\npool_size = \"4M\"\nreceive_slots = 256";

struct Manager {
    socket: UnixDatagram,
    folder: tempfile::TempDir,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = UnixDatagram::bind(folder.path().join("notify")).expect("a socket");
        Self { socket, folder }
    }

    fn path(&self) -> String {
        self.folder.path().join("notify").display().to_string()
    }

    /// The next message, if one comes in time.
    fn next(&self, within: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(within)).expect("a time");
        let mut bytes = [0; 4096];
        match self.socket.recv(&mut bytes) {
            Ok(len) => Some(String::from_utf8_lossy(&bytes[..len]).into_owned()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => None,
            Err(error) => panic!("the manager's socket: {error}"),
        }
    }

    /// Waits for a message that has this line; what came before it.
    fn until(&self, line: &str) -> Vec<String> {
        let deadline = Instant::now() + LIMIT;
        let mut before = Vec::new();
        loop {
            let message = self.next(LIMIT).unwrap_or_else(|| panic!("no {line}; only {before:?}"));
            if message.lines().any(|one| one == line) {
                return before;
            }
            assert!(Instant::now() < deadline, "no {line}; only {before:?}");
            before.push(message);
        }
    }
}

fn served(arguments: &[&str], environment: &[(&str, &str)]) -> Served {
    Served::start_with(SMALL, "memory = \"64M\"", |command| {
        command.args(arguments).envs(environment.iter().copied());
    })
}

fn host(served: &Served) -> Host<Soft> {
    let provider = Arc::new(Soft::new(1).expect("the software provider"));
    let options = HostOptions { source: Some(own_address()), reconnect: None, ..HostOptions::default() };
    Host::connect(provider, served.address, NQN, options).expect("the listener accepts")
}

#[test]
fn manager_is_told_when_hosts_can_connect_that_all_is_well_and_of_the_end() {
    let manager = Manager::new();
    let path = manager.path();
    let environment = [("NOTIFY_SOCKET", path.as_str()), ("WATCHDOG_USEC", "600000")];
    let mut served = served(&[], &environment);
    let before = manager.until("READY=1");
    assert!(before.iter().all(|message| message == "WATCHDOG=1\n"), "{before:?}");
    // No second attempt: ready means that this one is accepted.
    let mut host = host(&served);
    host.namespace(1).expect("it serves");
    for round in 0..3 {
        assert_eq!(manager.until("WATCHDOG=1"), [""; 0], "round {round}");
    }
    assert!(served.terminate(), "{}", served.log());
    let before = manager.until("STOPPING=1");
    assert!(before.iter().all(|message| message == "WATCHDOG=1\n"), "{before:?}");
    assert_eq!(manager.next(Duration::from_millis(50)), None, "something after the end");
}

#[test]
fn start_that_fails_is_not_called_ready() {
    let manager = Manager::new();
    let held = served(&[], &[]);
    let listen = held.address.to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_farside"))
        .args(["serve", "--null", "1G", "--provider", "soft", "--reactors", "1", "--listen", &listen])
        .env("NOTIFY_SOCKET", manager.path())
        .output()
        .expect("the program");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(manager.next(Duration::from_millis(50)), None);
}

#[test]
fn hung_reactor_starves_the_watchdog() {
    let manager = Manager::new();
    let path = manager.path();
    let environment = [("NOTIFY_SOCKET", path.as_str()), ("WATCHDOG_USEC", "600000")];
    let served = served(&["--test-hang-on-flush"], &environment);
    manager.until("READY=1");
    let mut host = host(&served);
    host.namespace(1).expect("it serves");
    // A silent hour would be well: nothing but a hung reactor ends the pings.
    manager.until("WATCHDOG=1");
    let flush = farside::host::Command { token: 1, op: Op::Flush, nsid: 1, slba: 0, blocks: 0, data: None };
    assert!(host.submit(0, flush).is_ok(), "an idle queue has room");
    let deadline = Instant::now() + LIMIT;
    let mut heard = Instant::now();
    // Three times the watchdog's limit without a ping: it has bitten by then.
    while heard.elapsed() < Duration::from_millis(1800) {
        host.poll();
        if manager.next(Duration::from_millis(20)).is_some() {
            heard = Instant::now();
        }
        assert!(Instant::now() < deadline, "the watchdog is fed though the reactor hangs:\n{}", served.log());
    }
    assert!(served.log().contains("the watchdog of 600ms is not fed"), "{}", served.log());
}

#[test]
fn generated_files_are_what_shell_and_manager_take() {
    let generate = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_farside")).arg("generate").args(arguments).output().expect("the program");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    // The shell itself completes with the script.
    let script = generate(&["completions", "bash"]);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("farside.bash");
    std::fs::write(&file, script).expect("a file");
    let complete = |words: &[&str]| {
        let question = format!(
            "source {}; COMP_WORDS=(farside {}); COMP_CWORD={}; _farside farside '{}' farside; echo ${{COMPREPLY[@]}}",
            Path::display(&file),
            words.join(" "),
            words.len(),
            words[words.len() - 1],
        );
        let output = Command::new("bash").args(["--norc", "-c", &question]).output().expect("bash");
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    };
    assert_eq!(complete(&["doc"]), "doctor");
    assert_eq!(complete(&["ctl", "resi"]), "resize-namespace");
    assert!(complete(&["serve", "--prov"]).contains("--provider"));
    assert!(generate(&["man"]).starts_with(".ie"), "no manual page");
    let unit = generate(&["systemd", "--binary", "/usr/bin/farside", "--config", "/etc/farside.toml"]);
    assert!(unit.contains("\nExecStart=/usr/bin/farside serve --config /etc/farside.toml\n"), "{unit}");
}
