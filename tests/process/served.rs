//! `farside serve` as a child process: its log is read and counted, its memory looked at.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

pub(crate) const NQN: &str = "nqn.2026-11.io.example:process";

/// A log filter with which endpoints of the software provider say at their end what they counted.
pub(crate) const ENDPOINTS: &str = "info,farside::rdma::soft::endpoint=debug";

/// What only the last log line of an endpoint has.
const COUNTERS: &str = "counters=";

/// The values of a counter in the last log lines of endpoints: there is such a line, and each of them has it.
#[track_caller]
pub(crate) fn counted(log: &str, name: &str) -> Vec<u64> {
    let start = format!(" {name}: ");
    let value = |line: &str| line.split_once(&start)?.1.split([',', ' ']).next()?.parse().ok();
    let closed = log.lines().filter(|line| line.contains(COUNTERS));
    let values: Vec<u64> =
        closed.map(|line| value(line).unwrap_or_else(|| panic!("there is no {name} in {line}"))).collect();
    assert!(!values.is_empty(), "no endpoint has told what it counted:\n{log}");
    values
}

/// Lines of a log that are kept, besides those of [`COUNTERS`], which are kept all.
const KEPT: usize = 200;

/// Keeps a line, and gives up the first of those that are too many.
fn keep(last: &mut Vec<String>, line: String) {
    last.push(line);
    if last.len() > KEPT
        && let Some(first) = last.iter().position(|line| !line.contains(COUNTERS))
    {
        last.remove(first);
    }
}

pub(crate) struct Served {
    child: Child,
    pub(crate) address: SocketAddr,
    lines: Arc<AtomicUsize>,
    last: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

/// An address in 127/8 that nobody else in this process has, and no other process at this time.
pub(crate) fn own_address() -> IpAddr {
    static NEXT: AtomicU64 = AtomicU64::new(2);
    let at = NEXT.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id() % 100;
    Ipv4Addr::new(127, 130 + process as u8, (at / 250) as u8, (at % 250 + 2) as u8).into()
}

impl Served {
    /// Starts a target with 64 MiB of memory behind it and waits until it serves.
    pub(crate) fn start(options: &str) -> Self {
        Self::start_with(options, "memory = \"64M\"", |_| ())
    }

    /// Starts a target with something else behind it, in a folder of its own; `prepare` sees its command before it runs.
    pub(crate) fn start_with(options: &str, namespace: &str, prepare: impl FnOnce(&mut Command)) -> Self {
        let address = SocketAddr::new(own_address(), 4420);
        let text = format!(
            "[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nnsid = 1\n{namespace}\n\
             [[listener]]\naddress = \"{address}\"\n[options]\nprovider = \"soft\"\n{options}\n"
        );
        Self::start_file("farside.toml", &text, address, prepare)
    }

    /// Starts a target of a configuration that listens on `address`.
    pub(crate) fn start_file(name: &str, text: &str, address: SocketAddr, prepare: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join(name);
        std::fs::write(&config, text).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
        command.args(["serve", "--config"]).arg(&config).current_dir(folder.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().expect("the program");
        let (lines, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let outputs: [Option<Box<dyn Read + Send>>; 2] =
            [child.stdout.take().map(|out| Box::new(out) as _), child.stderr.take().map(|out| Box::new(out) as _)];
        let read = |output: Box<dyn Read + Send>| {
            let (lines, last) = (Arc::clone(&lines), Arc::clone(&last));
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    lines.fetch_add(1, Ordering::Relaxed);
                    keep(&mut last.lock().expect("sound"), line);
                }
            })
        };
        let readers = outputs.into_iter().flatten().map(read).collect();
        let mut served = Self { child, address, lines, last, readers, _folder: folder };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !served.last.lock().expect("sound").iter().any(|line| line.starts_with("connect ")) {
            served.check_alive();
            assert!(Instant::now() < deadline, "it does not start:\n{}", served.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        served
    }

    pub(crate) fn check_alive(&mut self) {
        if let Some(status) = self.child.try_wait().expect("a child") {
            panic!("the target ended with {status}:\n{}", self.log());
        }
    }

    /// Asks it to stop; whether it ended well. All that it wrote has been read then.
    pub(crate) fn terminate(&mut self) -> bool {
        self.signal(Signal::SIGTERM);
        let status = self.status_within(Duration::from_secs(20));
        let status = status.unwrap_or_else(|| panic!("it does not stop:\n{}", self.log()));
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader"));
        status.success()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("its own child");
    }

    /// How it ended, if it does in time.
    pub(crate) fn status_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.child.try_wait().expect("a child");
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What its endpoints counted under a name: they say it in their last log line, where `--log` asks for that
    /// ([`ENDPOINTS`]). One number for each that had packets.
    pub(crate) fn counted(&self, name: &str) -> Vec<u64> {
        counted(&self.log(), name)
    }

    /// Lines that it wrote so far.
    pub(crate) fn lines(&self) -> usize {
        self.lines.load(Ordering::Relaxed)
    }

    /// The last lines that it wrote, and what its endpoints counted.
    pub(crate) fn log(&self) -> String {
        self.last.lock().expect("sound").join("\n")
    }

    /// Bytes of memory that it has resident.
    pub(crate) fn resident(&self) -> usize {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("its status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") << 10
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn counters_are_kept_and_a_missing_one_is_told() {
    let mut log = Vec::new();
    keep(&mut log, "closed counters=Counters { received: 7, overflow: 1 }".into());
    (0..3 * KEPT).for_each(|line| keep(&mut log, format!("line {line}")));
    keep(&mut log, "closed counters=Counters { received: 5, overflow: 0 }".into());
    assert_eq!(log.len(), KEPT);
    assert_eq!(log[KEPT - 2], format!("line {}", 3 * KEPT - 1));
    let log = log.join("\n");
    assert_eq!(counted(&log, "received"), [7, 5]);
    let refused = |log: &str, name: &str| std::panic::catch_unwind(|| counted(log, name)).is_err();
    assert!(refused(&log, "overflows"), "a counter of another name");
    assert!(refused(&format!("{log}\ncounters=Counters {{ received: 1 }}"), "overflow"), "one line is without it");
    assert!(refused("line 1", "received"), "nobody told");
}
