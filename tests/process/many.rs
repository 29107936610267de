//! 1,000 queue pairs of 250 hosts in one process.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::host::{Command, Host, HostOptions, Op};
use farside::rdma::soft::Soft;

use crate::served::{NQN, Served, own_address};

const HOSTS: usize = 250;
/// Besides the admin queue.
const IO_QUEUES: u16 = 3;
const DEPTH: u16 = 8;
const LIMIT: Duration = Duration::from_secs(120);
const BLOCK: usize = 4096;

fn drive(hosts: &mut [Host<Soft>], what: &str, mut done: impl FnMut(&mut [Host<Soft>]) -> bool) -> Duration {
    let begun = Instant::now();
    while !done(hosts) {
        for (at, host) in hosts.iter_mut().enumerate() {
            host.poll();
            assert!(host.failure().is_none(), "{what}: host {at}: {:?}", host.failure());
        }
        assert!(begun.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
    }
    begun.elapsed()
}

/// One command on each queue of each host, with a buffer of its own; all have to succeed.
fn on_every_queue(hosts: &mut [Host<Soft>], op: Op, what: &str) -> Duration {
    for (at, host) in hosts.iter_mut().enumerate() {
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
    let mut left = hosts.len() * usize::from(IO_QUEUES);
    drive(hosts, what, |hosts| {
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

/// And of packets on their way, for two reactors.
const PACKET_BUFFERS: usize = 8 << 20;

/// What README says of the memory of a queue pair: 6 KiB, and half a KiB per entry.
fn formula(entries: usize) -> usize {
    6144 + 512 * entries
}

#[test]
fn a_thousand_queue_pairs_of_250_hosts() {
    let receives = HOSTS * (32 + usize::from(IO_QUEUES) * usize::from(DEPTH));
    let served = Served::start(&format!("reactors = 2\nreceive_slots = {receives}\npool_size = \"16M\""));
    let at_rest = served.resident();
    let connect = |from: usize| -> Vec<Host<Soft>> {
        let start = |at| {
            let options = HostOptions {
                hostnqn: format!("nqn.2026-11.io.example:host{at}"),
                hostid: (at as u128 + 1).to_le_bytes(),
                io_queues: IO_QUEUES,
                queue_depth: DEPTH,
                keep_alive: Duration::from_secs(60),
                memory: 64 << 10,
                source: Some(own_address()),
                timeout: LIMIT,
                ..HostOptions::default()
            };
            let provider = Arc::new(Soft::new(1).expect("the software provider"));
            Host::start(provider, served.address, NQN, options).expect("a host")
        };
        (from..from + HOSTS / 2).map(start).collect()
    };
    let mut hosts = connect(0);
    drive(&mut hosts, "connect", |hosts| hosts.iter().all(Host::is_ready));
    on_every_queue(&mut hosts, Op::Write { fua: false }, "write");
    // Packet buffers and the allocator have been used by now: what the second half adds is the queue pairs'.
    let half = served.resident();
    hosts.extend(connect(HOSTS / 2));
    let connected = drive(&mut hosts, "connect", |hosts| hosts.iter().all(Host::is_ready));
    let queues: usize = hosts.iter().map(|host| host.queues() + 1).sum();
    assert_eq!(queues, 1000);
    let written = on_every_queue(&mut hosts, Op::Write { fua: false }, "write");
    let read = on_every_queue(&mut hosts, Op::Read, "read");
    let in_use = served.resident();
    let each = in_use.saturating_sub(half) / (queues / 2);
    let entries = (32 + usize::from(IO_QUEUES) * usize::from(DEPTH)) / (1 + usize::from(IO_QUEUES));
    // Past the test harness, which keeps what a good test prints to itself: these are figures for the reader.
    let printed = writeln!(
        std::io::stderr(),
        "{queues} queue pairs: the second half connected in {connected:?}, all written in {written:?}, read in {read:?}; {each} \
         bytes each (of {entries} entries on average; the formula allows {}), {} bytes for all of them beside the arenas",
        formula(entries),
        in_use.saturating_sub(at_rest)
    );
    printed.expect("standard error");
    assert!(each <= formula(entries), "{each} bytes per queue pair, the formula says {}", formula(entries));
    let all = in_use.saturating_sub(at_rest);
    assert!(all <= queues * formula(entries) + PACKET_BUFFERS, "{all} bytes for {queues} queue pairs");
    drop(hosts);
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
