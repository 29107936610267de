//! The receive buffer of one engine, which RDMA READ responses of all its peers share: nobody keeps it from the others.
use core::time::Duration;

use super::net::{Buf, Net, OPEN, Service};
use crate::roce::*;

/// Node 0 reads from all others.
const READER: usize = 0;
/// What `Config::new` gives it.
const LIMIT: u64 = 1 << 20;
const LARGE: u32 = 1 << 20;

/// A queue pair and the buffers of its reads.
#[derive(Clone, Copy)]
struct Reader {
    qpn: Qpn,
    near: Buf,
    far: Buf,
}

struct Rig {
    net: Net,
    /// The most credit that was in use.
    most: u64,
}

impl Rig {
    fn new(seed: u64, nodes: u8) -> Self {
        let mut net = Net::new(seed, nodes);
        net.service = Some(Service { packet: Duration::from_micros(1), kib: Duration::from_nanos(500) });
        Self { net, most: 0 }
    }

    fn connect(&mut self, node: usize, shape: impl Fn(&mut Connection)) -> Reader {
        let (qpn, other) = self.net.connect(READER, node, |conn| {
            conn.mtu = Mtu::B4096;
            (conn.initiator_depth, conn.responder_resources) = (64, 64);
            shape(conn);
        });
        let (near, far) = (self.net.buffer(READER, LARGE, OPEN), self.net.buffer(node, LARGE, OPEN));
        self.net.fill(node, far, u64::from(other.get()));
        Reader { qpn, near, far }
    }

    fn read(&mut self, reader: Reader, tag: u64, len: u32) {
        let sge = Sge { len, ..reader.near.sge() };
        self.net.send(READER, reader.qpn, tag, SendOp::RdmaRead(reader.far.remote()), &[sge]);
    }

    fn step(&mut self, until: Duration) -> bool {
        let any = self.net.step(until);
        self.most = self.most.max(self.used());
        any
    }

    fn used(&self) -> u64 {
        self.net.nodes[READER].engine.read_credit_used()
    }

    /// The next success of a queue pair; how long it took.
    fn finish(&mut self, reader: Reader, within: Duration) -> Duration {
        let begun = self.net.now;
        loop {
            while let Some(done) = self.net.done(READER) {
                if done.qpn == reader.qpn {
                    assert_eq!(done.status, Status::Success);
                    return self.net.now - begun;
                }
            }
            assert!(self.net.now - begun < within, "not read within {within:?}, {} bytes in use", self.used());
            self.step(begun + within);
        }
    }
}

/// Reads of 1 MiB from a peer that is there, while all queue pairs to one that vanished wait for its answers. Nobody knows how
/// long a peer takes from which nothing was read yet, so those may hold their credit for longer.
#[test]
fn the_reads_of_a_vanished_peer_do_not_hold_up_others() {
    for (pairs, measured, bound) in
        [(1, true, 15), (16, true, 25), (128, true, 250), (1, false, 110), (128, false, 1500)]
    {
        let mut rig = Rig::new(pairs, 3);
        let there = rig.connect(2, |_| ());
        let gone: Vec<Reader> = (0..pairs).map(|_| rig.connect(1, |conn| conn.retry_count = 1)).collect();
        for reader in gone.iter().chain([&there]).filter(|_| measured) {
            rig.read(*reader, 0, 4096);
            rig.finish(*reader, Duration::from_millis(1));
        }
        rig.net.vanished = Some(1);
        for reader in &gone {
            (0..4).for_each(|tag| rig.read(*reader, tag, LARGE));
        }
        let begun = rig.net.now;
        let mut longest = Duration::ZERO;
        let mut count = 0;
        while rig.net.now < begun + Duration::from_secs(2) {
            rig.read(there, 7, LARGE);
            longest = longest.max(rig.finish(there, Duration::from_secs(3)));
            assert_eq!(rig.net.bytes(READER, there.near), rig.net.bytes(2, there.far));
            count += 1;
        }
        println!("{pairs} queue pairs, measured {measured}: {count} reads of 1 MiB, the longest took {longest:?}");
        assert!(longest < Duration::from_millis(bound), "{pairs} {measured}: {longest:?}");
        assert!(rig.most <= LIMIT, "{}", rig.most);
        // Two ACK timeouts and as many more for the retry.
        while rig.step(begun + Duration::from_secs(4)) {}
        for reader in &gone {
            assert_eq!(rig.net.nodes[READER].engine.qp_state(reader.qpn), Some(QpState::Err));
        }
        assert_eq!(rig.used(), 0);
    }
}

/// A peer that comes back after a while gets everything that was asked of it, and the credit was never exceeded.
#[test]
fn a_peer_that_was_silent_for_a_while_is_read_from_again() {
    for silence in [5, 50, 500, 3000] {
        let mut rig = Rig::new(silence, 3);
        let (back, there) = (rig.connect(1, |_| ()), rig.connect(2, |_| ()));
        for tag in 0..8 {
            rig.read(back, tag, LARGE);
        }
        let begun = rig.net.now;
        rig.step(begun + Duration::from_micros(500));
        rig.net.vanished = Some(1);
        let heals = begun + Duration::from_millis(silence);
        while rig.net.now < heals {
            rig.read(there, 7, LARGE);
            rig.finish(there, Duration::from_secs(1));
        }
        rig.net.vanished = None;
        rig.net.nodes[READER].done.clear();
        let before = rig.net.now;
        rig.read(back, 99, 4096);
        loop {
            rig.step(before + Duration::from_secs(2));
            if rig.net.done(READER).is_some_and(|done| (done.tag, done.status) == (99, Status::Success)) {
                break;
            }
            assert!(rig.net.now < before + Duration::from_secs(2), "after {silence} ms");
        }
        println!("after {silence} ms of silence 8 MiB were read {:?} later", rig.net.now - before);
        assert_eq!(rig.net.bytes(READER, back.near), rig.net.bytes(1, back.far));
        rig.net.run();
        assert!(rig.most <= LIMIT, "{}", rig.most);
        assert_eq!(rig.used(), 0);
    }
}

/// Answers to a peer that posts no receives wait for ever; its reads behind them are not executed, and hold nothing meanwhile.
#[test]
fn reads_behind_a_message_that_is_not_received_hold_no_credit() {
    let mut rig = Rig::new(5, 3);
    let (full, there) = (rig.connect(1, |conn| conn.min_rnr_timer = 14), rig.connect(2, |_| ()));
    rig.net.send(READER, full.qpn, 1, SendOp::Send, &[Sge { len: 64, ..full.near.sge() }]);
    (0..4).for_each(|tag| rig.read(full, 10 + tag, LARGE));
    for _ in 0..100 {
        rig.read(there, 7, LARGE);
        let took = rig.finish(there, Duration::from_secs(1));
        assert!(took < Duration::from_millis(10), "{took:?}");
    }
    assert!(rig.net.nodes[READER].engine.counters().rnr_naks_received > 10);
    assert!(rig.most <= LIMIT, "{}", rig.most);
}

/// Who waits longest is next, and takes one request's worth at a time: a small read is not kept waiting by large ones, nor a
/// large one by ever more small ones.
#[test]
fn queue_pairs_that_wait_for_credit_take_turns() {
    let mut rig = Rig::new(6, 4);
    let readers: Vec<(Reader, u32)> = (0..24)
        .map(|at| (rig.connect(1 + at % 3, |_| ()), if at < 12 { LARGE } else { 4096 * (1 + at as u32 % 4) }))
        .collect();
    for (at, (reader, len)) in (0..).zip(&readers) {
        (0..8).for_each(|_| rig.read(*reader, at, *len));
    }
    let begun = rig.net.now;
    let mut done = vec![0_u64; readers.len()];
    let mut scarce = 0;
    while rig.net.now < begun + Duration::from_secs(1) {
        rig.step(begun + Duration::from_secs(1));
        scarce += u32::from(rig.used() + (1 << 16) > LIMIT);
        while let Some(completion) = rig.net.done(READER) {
            assert_eq!(completion.status, Status::Success);
            let at = usize::try_from(completion.tag).expect("few");
            done[at] += 1;
            rig.read(readers[at].0, completion.tag, readers[at].1);
        }
    }
    println!("reads in a second: {done:?}");
    assert!(scarce > 1000, "they had to wait: {scarce}");
    assert!(rig.most <= LIMIT, "{}", rig.most);
    let share = |of: &[u64]| (*of.iter().min().expect("some"), *of.iter().max().expect("some"));
    let (least, most) = share(&done[..12]);
    assert!(least > 0 && most <= 2 * least, "large ones: {least} to {most}");
    let (least_small, most_small) = share(&done[12..]);
    assert!(least_small > 2 * most && most_small <= 3 * least_small, "small ones: {least_small} to {most_small}");
}
