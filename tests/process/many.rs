//! 1,000 queue pairs of 250 hosts in one process.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::host::{Command, Host, HostError, HostEvent, HostOptions, Op, Reconnect};
use farside::rdma::soft::Soft;

use crate::served::{NQN, Served, own_address};

const HOSTS: usize = 250;
/// Besides the admin queue.
const IO_QUEUES: u16 = 3;
const DEPTH: u16 = 8;
/// In which the second half of the hosts comes.
const STEPS: usize = 5;
/// A host that is gone without a word is forgotten after twice this time.
const KEEP_ALIVE: Duration = Duration::from_secs(120);
/// Each phase may take so long, and more than the target takes to forget a host.
const LIMIT: Duration = Duration::from_secs(300);
const BLOCK: usize = 4096;

/// A connection is given up after so long without a word from the other end (8 tries of 1.07 s at most).
const SILENCE: Duration = Duration::from_millis(8500);

/// How long the thread of this test and each of the target's was ready to run and had no processor, in all; that of the one
/// that waited longest.
fn starved(served: &Served) -> Duration {
    let waited = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split(' ').nth(1).and_then(|nanos| nanos.parse().ok()).map_or(Duration::ZERO, Duration::from_nanos)
    };
    let threads = std::fs::read_dir(format!("/proc/{}/task", served.pid())).expect("its threads");
    let threads = threads.flatten().map(|thread| waited(&thread.path().join("schedstat")));
    threads.chain([waited(Path::new("/proc/thread-self/schedstat"))]).max().unwrap_or_default()
}

struct Crowd<'a> {
    served: &'a Served,
    hosts: Vec<Host<Soft>>,
    /// How long somebody had waited for a processor when this began.
    starved: Duration,
    /// Connections that were lost to that.
    lost: usize,
}

impl<'a> Crowd<'a> {
    fn new(served: &'a Served) -> Self {
        Self { served, hosts: Vec::new(), starved: starved(served), lost: 0 }
    }

    fn host(&self, at: usize) -> Host<Soft> {
        let options = HostOptions {
            hostnqn: format!("nqn.2026-11.io.example:host{at}"),
            hostid: (at as u128 + 1).to_le_bytes(),
            io_queues: IO_QUEUES,
            queue_depth: DEPTH,
            keep_alive: KEEP_ALIVE,
            memory: 64 << 10,
            source: Some(own_address()),
            timeout: LIMIT,
            io_timeout: LIMIT,
            reconnect: Some(Reconnect::default()),
            ..HostOptions::default()
        };
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        Host::start(provider, self.served.address, NQN, options).expect("a host")
    }

    /// More hosts, up to so many. Those that are there go on meanwhile: they owe acknowledgements.
    fn grow_to(&mut self, count: usize) {
        while self.hosts.len() < count {
            self.hosts.push(self.host(self.hosts.len()));
            if self.hosts.len().is_multiple_of(8) {
                self.round("connect");
            }
        }
    }

    /// A round of all. Nobody loses a connection, unless somebody had no processor for as long as that takes.
    fn round(&mut self, what: &str) {
        for at in 0..self.hosts.len() {
            let host = &mut self.hosts[at];
            host.poll();
            // Who never was connected does not try again by itself.
            let failure = host.failure().cloned();
            let failed = failure.is_some();
            let events = std::iter::from_fn(|| host.next_event());
            let lost = events.filter_map(|event| if let HostEvent::Lost(error) = event { Some(error) } else { None });
            for error in lost.chain(failure).collect::<Vec<_>>() {
                self.excuse(at, what, &error);
            }
            if failed {
                self.hosts[at] = self.host(at);
            }
        }
    }

    fn excuse(&mut self, at: usize, what: &str, error: &HostError) {
        let starved = starved(self.served).saturating_sub(self.starved);
        assert!(starved >= SILENCE, "{what}: host {at}: {error}, and nobody waited for a processor but {starved:?}");
        self.lost += 1;
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut [Host<Soft>]) -> bool) -> Duration {
        let begun = Instant::now();
        while !done(&mut self.hosts) {
            self.round(what);
            assert!(begun.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        }
        begun.elapsed()
    }

    fn until_ready(&mut self) -> Duration {
        self.until("connect", |hosts| hosts.iter().all(Host::is_ready))
    }

    /// One command on each queue of each host, with a buffer of its own; all have to succeed.
    fn on_every_queue(&mut self, op: Op, what: &str) -> Duration {
        self.until_ready();
        for (at, host) in self.hosts.iter_mut().enumerate() {
            for queue in 0..host.queues() {
                let slot = (at * usize::from(IO_QUEUES) + queue) as u64;
                let mut data = host.take_buffer(BLOCK).expect("memory");
                let content = if op == Op::Read { 0 } else { slot as u8 ^ 0x5a };
                data.as_mut_slice().fill(content);
                let blocks = (BLOCK / 512) as u32;
                let command =
                    Command { token: slot, op, nsid: 1, slba: slot * u64::from(blocks), blocks, data: Some(data) };
                assert!(host.submit(queue, command).is_ok(), "{what}: host {at} has no room");
            }
        }
        let mut left = self.hosts.len() * usize::from(IO_QUEUES);
        self.until(what, |hosts| {
            for host in hosts {
                while let Some(done) = host.next_done() {
                    assert!(done.result.is_ok(), "{what}: {:?}", done.result);
                    let data = done.data.expect("its buffer");
                    assert!(data.as_slice().iter().all(|byte| *byte == done.token as u8 ^ 0x5a), "{what}: wrong data");
                    host.give_buffer(data);
                    left -= 1;
                }
            }
            left == 0
        })
    }
}

/// And of packets on their way, for two reactors.
const PACKET_BUFFERS: usize = 8 << 20;

/// What README says of the memory of a queue pair: 6 KiB, and half a KiB per entry.
fn formula(entries: usize) -> usize {
    6144 + 512 * entries
}

#[test]
fn a_thousand_queue_pairs_of_250_hosts() {
    let receives = HOSTS * (32 + usize::from(IO_QUEUES) * usize::from(DEPTH));
    let options = format!(
        "reactors = 2\nreceive_slots = {receives}\npool_size = \"16M\"\nconnect_timeout = {}",
        LIMIT.as_millis()
    );
    let served = Served::start(&options);
    let at_rest = served.resident();
    let mut crowd = Crowd::new(&served);
    crowd.grow_to(HOSTS / 2);
    crowd.on_every_queue(Op::Write { fua: false }, "write");
    // Packet buffers and the allocator have been used by now: what more hosts add is the queue pairs'. Of several steps the one
    // in the middle counts, as a packet that comes late or twice has its memory too; that is in the sum below.
    let (mut steps, mut connected) = (Vec::new(), Duration::ZERO);
    for step in 1..=STEPS {
        let before = served.resident();
        let begun = Instant::now();
        crowd.grow_to(HOSTS / 2 + step * HOSTS / 2 / STEPS);
        crowd.until_ready();
        connected += begun.elapsed();
        crowd.on_every_queue(Op::Write { fua: false }, "write");
        steps.push(served.resident().saturating_sub(before) * STEPS / (HOSTS / 2 * (1 + usize::from(IO_QUEUES))));
    }
    steps.sort_unstable();
    let each = steps[STEPS / 2];
    crowd.until_ready();
    let queues: usize = crowd.hosts.iter().map(|host| host.queues() + 1).sum();
    assert_eq!(queues, 1000);
    let written = crowd.on_every_queue(Op::Write { fua: false }, "write");
    let read = crowd.on_every_queue(Op::Read, "read");
    let in_use = served.resident();
    let entries = (32 + usize::from(IO_QUEUES) * usize::from(DEPTH)) / (1 + usize::from(IO_QUEUES));
    // Past the test harness, which keeps what a good test prints to itself: these are figures for the reader.
    let printed = writeln!(
        std::io::stderr(),
        "{queues} queue pairs: the second half connected in {connected:?}, all written in {written:?}, read in {read:?}; {steps:?} \
         bytes each (of {entries} entries on average; the formula allows {}), {} bytes for all of them beside the arenas",
        formula(entries),
        in_use.saturating_sub(at_rest)
    );
    printed.expect("standard error");
    assert!(
        each <= formula(entries),
        "{each} bytes per queue pair of {steps:?}, the formula says {}",
        formula(entries)
    );
    let all = in_use.saturating_sub(at_rest);
    assert!(all <= queues * formula(entries) + PACKET_BUFFERS, "{all} bytes for {queues} queue pairs");
    // On a machine that has time there are none: `Crowd::excuse`.
    println!("{} connections lost to waiting for a processor", crowd.lost);
    drop(crowd);
    // All is given back: the same hosts find room a second time.
    let options =
        HostOptions { source: Some(own_address()), io_queues: 16, queue_depth: 128, ..HostOptions::default() };
    let deadline = Instant::now() + LIMIT;
    loop {
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        match Host::connect(provider, served.address, NQN, options.clone()) {
            Ok(host) => {
                assert_eq!(host.queues(), 16);
                break;
            }
            Err(error) => assert!(Instant::now() < deadline, "no room after the disconnects: {error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
