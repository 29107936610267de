//! The log of a running target, and who asked it for what.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::served::Served;

const LIMIT: Duration = Duration::from_secs(20);

/// Small, so that it starts at once.
const SMALL: &str = "reactors = 1\npool_size = \"4M\"\nreceive_slots = 256";

/// Runs `farside ctl`, and says which process it was.
fn ctl(socket: &Path, arguments: &[&str]) -> u32 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command.arg("ctl").arg("--control").arg(socket).args(arguments).stdout(Stdio::null());
    let mut child: Child = command.spawn().expect("the program");
    let pid = child.id();
    assert!(child.wait().expect("a child").success(), "{arguments:?}");
    pid
}

/// Waits for a line that has all of these words.
fn wait_for(served: &Served, words: &[&str]) {
    let deadline = Instant::now() + LIMIT;
    while !served.log().lines().any(|line| words.iter().all(|word| line.contains(word))) {
        assert!(Instant::now() < deadline, "no line with {words:?}:\n{}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn debug_lines(served: &Served) -> usize {
    served.log().lines().filter(|line| line.contains(" DEBUG ")).count()
}

#[test]
fn log_level_changes_while_it_runs_and_who_asked_is_logged() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let served = Served::start_with(SMALL, "memory = \"8M\"", |command| {
        command.arg("--control").arg(&socket);
    });
    let user = format!("uid {} ", nix::unistd::getuid());
    ctl(&socket, &["status"]);
    let pid = ctl(&socket, &["log", "debug"]);
    let who = format!("{user}pid {pid}");
    wait_for(&served, &["INFO", "control request done", &who, "op=\"log\""]);
    assert_eq!(debug_lines(&served), 0, "before it was asked for:\n{}", served.log());
    // A connection is a debug line, with its peer.
    let pid = ctl(&socket, &["status"]);
    wait_for(&served, &[" DEBUG ", "control connection", &format!("{user}pid {pid}")]);
    let pid = ctl(&socket, &["log", "info"]);
    wait_for(&served, &["control request done", &format!("{user}pid {pid}")]);
    let before = debug_lines(&served);
    ctl(&socket, &["status"]);
    // What comes after it on the same pipe has overtaken nothing.
    let pid = ctl(&socket, &["log", "info"]);
    wait_for(&served, &["control request done", &format!("{user}pid {pid}")]);
    assert_eq!(debug_lines(&served), before, "after it was ended:\n{}", served.log());
}
