//! Recovery from loss: how fast a connection is over a network that loses packets, as a share of what it is without, and that
//! each single loss is repaired in a few round trips.
use core::time::Duration;

use super::load::{Load, Shape};
use super::net::{Faults, Net, OPEN};
use crate::roce::*;

/// Small operations, many at a time, and large ones, each of many packets.
const SHAPES: [Shape; 2] = [Shape { size: 4096, depth: 32 }, Shape { size: 128 << 10, depth: 8 }];

/// Packets lost in 10,000; the least share of the lossless speed in percent that is promised to users; and the margin above
/// it that is seen here, where every packet costs the same and no other process is in the way.
const LEAST: [(u64, u64, u64); 3] = [(10, 70, 8), (100, 30, 3), (500, 8, 3)];

#[test]
fn loss_costs_no_more_speed_than_promised() {
    for shape in SHAPES {
        let time = Duration::from_millis(100);
        let lossless = Load::new(1, shape).run(time);
        for (loss, least, margin) in LEAST {
            let runs = (1..=4).map(|seed| {
                let mut load = Load::new(seed, shape);
                load.net.faults = Faults { loss, ..Faults::default() };
                (load.run(time), load)
            });
            let runs: Vec<_> = runs.collect();
            let share = runs.iter().map(|(done, _)| done).sum::<u64>() * 100 / (4 * lossless);
            let worst = runs.iter().map(|(done, _)| 100 * done / lossless).min().unwrap_or(0);
            println!("{shape:?}, {loss} of 10,000 packets lost: {share} % of the lossless speed, at least {worst} %");
            for node in 0..2 {
                println!("  node {node}, seed 1: {:?}", runs[0].1.net.nodes[node].engine.counters());
            }
            assert!(
                share >= least + margin,
                "{shape:?}, {loss} of 10,000 packets lost: {share} % of the lossless speed"
            );
            assert!(worst >= least, "{shape:?}, {loss} of 10,000 packets lost: {worst} % in one of the runs");
        }
    }
}

/// How long a pair of measured round-trip time takes for one operation after `lose`d packets, counted from the next one on.
fn repaired(op: fn(&mut Net, Qpn, u64), lose: &[u64]) -> (Duration, Net) {
    let (mut net, a, b) = Net::pair(1, |conn| conn.mtu = Mtu::B1024);
    let sink = net.buffer(1, 64, OPEN);
    for tag in 0..40 {
        net.recv(1, b, 1000 + tag, &[sink.sge()]);
    }
    for tag in 0..20 {
        op(&mut net, a, tag);
        net.run_until(net.now + Duration::from_millis(1));
        assert_eq!(net.done(0).map(|done| done.tag), Some(tag));
    }
    net.lose = lose.iter().map(|packet| net.sent + packet).collect();
    let begun = net.now;
    op(&mut net, a, 99);
    while net.nodes[0].done.is_empty() {
        net.step(begun + Duration::from_secs(1));
    }
    assert_eq!(net.done(0).map(|done| (done.tag, done.status)), Some((99, Status::Success)));
    assert!(net.lose.is_empty(), "not lost: {:?}", net.lose);
    (net.now - begun, net)
}

fn send(net: &mut Net, a: Qpn, tag: u64) {
    let buf = net.buffer(0, 64, OPEN);
    net.send(0, a, tag, SendOp::Send, &[buf.sge()]);
}

fn write(net: &mut Net, a: Qpn, tag: u64) {
    let (near, far) = (net.buffer(0, 8192, OPEN), net.buffer(1, 8192, OPEN));
    net.send(0, a, tag, SendOp::RdmaWrite(far.remote()), &[near.sge()]);
}

fn read(net: &mut Net, a: Qpn, tag: u64) {
    let (near, far) = (net.buffer(0, 8192, OPEN), net.buffer(1, 8192, OPEN));
    net.fill(1, far, tag);
    net.send(0, a, tag, SendOp::RdmaRead(far.remote()), &[near.sge()]);
}

/// Nothing comes after the last packet of a burst, so only a probe finds out that it, or its answer, was lost.
#[test]
fn what_is_lost_at_the_end_is_repaired_by_a_probe() {
    // A message of one packet and its acknowledgement; the last of eight packets of an RDMA WRITE, its acknowledgement; the
    // request of an RDMA READ, its last response, all of its responses.
    let all: Vec<u64> = (1..9).collect();
    type Case<'a> = (fn(&mut Net, Qpn, u64), &'a [u64]);
    let cases: [Case<'_>; 7] =
        [(send, &[0]), (send, &[1]), (write, &[7]), (write, &[8]), (read, &[0]), (read, &[8]), (read, &all)];
    for (op, lose) in cases {
        let (took, net) = repaired(op, lose);
        assert!(took < Duration::from_micros(700), "{lose:?}: {took:?}");
        let counters = net.nodes[0].engine.counters();
        assert_eq!((counters.timeouts, counters.probes > 0), (0, true), "{lose:?}: {counters:?}");
    }
}

/// Where nothing that comes later tells of a loss, probes do, after silences of 0.5, 1 and 2 ms: as many as the repairs that got
/// lost as well, three at most here, and half a millisecond for the round trips between them.
const THREE_PROBES: Duration = Duration::from_millis(4);

#[test]
fn a_lost_complaint_and_a_lost_repair_are_repaired_too() {
    // The first packet of eight; then the NAK, the first packet again, the NAK of that.
    for lose in [&[0][..], &[0, 8], &[0, 9], &[0, 8, 9]] {
        let (took, net) = repaired(write, lose);
        assert!(took < THREE_PROBES, "{lose:?}: {took:?}");
        assert_eq!(net.nodes[0].engine.counters().timeouts, 0, "{lose:?}: {:?}", net.nodes[0].engine.counters());
    }
    for lose in [&[1][..], &[3, 5], &[3, 9], &[1, 2, 3, 9, 10]] {
        let (took, net) = repaired(read, lose);
        assert!(took < THREE_PROBES, "{lose:?}: {took:?}");
        assert_eq!(net.nodes[0].engine.counters().timeouts, 0, "{lose:?}: {:?}", net.nodes[0].engine.counters());
    }
}

/// A missing part of an RDMA READ is asked for by itself.
#[test]
fn only_the_missing_part_of_a_read_is_read_again() {
    let (_, net) = repaired(read, &[3]);
    let read_again = net.nodes[0].engine.counters();
    assert_eq!((read_again.retransmitted, read_again.duplicates), (1, 0), "{read_again:?}");
}

/// Between complaints the peer has the time of a round trip, whatever else arrives.
#[test]
fn a_peer_that_goes_back_by_itself_is_not_told_twice() {
    let (_, net) = repaired(write, &[0]);
    assert_eq!(net.nodes[1].engine.counters().sequence_naks_sent, 1);
    assert_eq!(net.nodes[0].engine.counters().retransmitted, 8, "eight packets, once");
}

#[test]
fn a_blackhole_under_load_heals_soon_after_it_ends() {
    for (shape, silence) in SHAPES.into_iter().flat_map(|shape| [10, 500, 5000].map(|silence| (shape, silence))) {
        let mut load = Load::new(7, shape);
        load.run(Duration::from_millis(5));
        load.net.blackhole = true;
        load.run(Duration::from_millis(silence));
        load.net.blackhole = false;
        let end = load.net.now;
        while load.run(Duration::from_micros(100)) == 0 {}
        let healed = load.net.now - end;
        println!("{shape:?}: after {silence} ms of silence healed in {healed:?}");
        // No retransmission comes later than the ACK timeout after the one before, nor than the silence lasted.
        let most = Duration::from_millis(2 * silence).min(Duration::from_millis(540)) + Duration::from_millis(2);
        assert!(healed <= most, "{shape:?}: after {silence} ms of silence healed in {healed:?} only");
        assert!(load.run(Duration::from_millis(20)) > 100, "and is as fast as before");
    }
}
