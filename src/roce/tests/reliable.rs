//! What a reliable connection promises, without and with a network that loses, doubles, reorders and breaks packets.
use super::net::{Buf, Faults, Net, Node, OPEN};
use crate::roce::*;
use core::time::Duration;

const MTUS: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

/// Bytes on both sides of each packet boundary.
fn lengths(mtu: u32) -> [u32; 8] {
    [0, 1, 3, mtu - 1, mtu, mtu + 1, 3 * mtu, 40 * mtu + 5]
}

#[test]
fn send_arrives() {
    for mtu in MTUS {
        let (mut net, a, b) = Net::pair(1, |conn| conn.mtu = mtu);
        for len in lengths(mtu.bytes()) {
            let (from, to) = (net.buffer(0, len, OPEN), net.buffer(1, len + 7, OPEN));
            net.fill(0, from, u64::from(len));
            net.recv(1, b, 2, &[to.sge()]);
            net.send(0, a, 1, SendOp::Send, &[from.sge()]);
            net.run();
            let sent = net.done(0).expect("send completion");
            assert_eq!((sent.tag, sent.status, sent.qpn), (1, Status::Success, a));
            let got = net.done(1).expect("receive completion");
            assert_eq!((got.tag, got.status, got.byte_len, got.qpn), (2, Status::Success, len, b));
            assert_eq!(net.bytes(0, from)[..], net.bytes(1, to)[..len as usize]);
        }
        assert!(net.done(0).is_none() && net.done(1).is_none());
        let packets: u32 = lengths(mtu.bytes()).iter().map(|len| len.div_ceil(mtu.bytes()).max(1)).sum();
        assert_eq!(net.nodes[1].engine.counters().received, u64::from(packets), "{mtu:?}");
        assert_eq!(net.nodes[0].engine.counters().retransmitted, 0);
    }
}

#[test]
fn rdma_write_and_read() {
    for mtu in MTUS {
        let (mut net, a, _) = Net::pair(2, |conn| conn.mtu = mtu);
        for len in lengths(mtu.bytes()) {
            let (near, far, back) = (net.buffer(0, len, OPEN), net.buffer(1, len, OPEN), net.buffer(0, len, OPEN));
            net.fill(0, near, 9);
            net.send(0, a, 1, SendOp::RdmaWrite(far.remote()), &[near.sge()]);
            net.send(0, a, 2, SendOp::RdmaRead(far.remote()), &[back.sge()]);
            net.run();
            for tag in [1, 2] {
                let done = net.done(0).expect("completion");
                assert_eq!((done.tag, done.status), (tag, Status::Success));
                if tag == 2 {
                    assert_eq!(done.byte_len, len);
                }
            }
            assert_eq!(net.bytes(1, far), net.bytes(0, near));
            assert_eq!(net.bytes(0, back), net.bytes(0, near));
        }
        assert!(net.done(1).is_none(), "one-sided operations are silent at the other end");
        assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
        assert_eq!(net.nodes[0].engine.counters().retransmitted, 0);
        assert_eq!(net.nodes[1].engine.counters().duplicates, 0);
    }
}

#[test]
fn immediate_data_and_invalidation_come_with_the_completion() {
    let (mut net, a, b) = Net::pair(3, |_| ());
    let (near, far, sink) = (net.buffer(0, 3000, OPEN), net.buffer(1, 3000, OPEN), net.buffer(1, 3000, OPEN));
    for tag in 0..4 {
        net.recv(1, b, tag, &[sink.sge()]);
    }
    net.send(0, a, 0, SendOp::SendImm(0xdead_beef), &[near.sge()]);
    net.send(0, a, 1, SendOp::RdmaWriteImm(far.remote(), 77), &[near.sge()]);
    let short = Sge { len: 10, ..near.sge() };
    net.send(0, a, 2, SendOp::RdmaWriteImm(far.remote(), 78), &[short]);
    net.send(0, a, 3, SendOp::SendInv(far.rkey), &[short]);
    net.run();
    let mut done = |_| net.done(1).expect("receive completion");
    let got: Vec<Completion> = (0..4).map(&mut done).collect();
    assert!(got.iter().all(|c| c.status == Status::Success));
    assert_eq!((got[0].imm, got[0].byte_len), (Some(0xdead_beef), 3000));
    assert_eq!((got[1].imm, got[1].byte_len), (Some(77), 3000));
    assert_eq!((got[2].imm, got[2].byte_len), (Some(78), 10));
    assert_eq!((got[3].invalidated, got[3].byte_len), (Some(far.rkey), 10));
    // The key is gone: the peer refuses it.
    net.nodes[0].done.clear();
    net.send(0, a, 4, SendOp::RdmaWrite(far.remote()), &[short]);
    net.run();
    assert_eq!(net.done(0).expect("completion").status, Status::RemAccessErr);
    assert_eq!(net.nodes[0].engine.qp_state(a), Some(QpState::Err));
    assert_eq!(net.nodes[1].engine.qp_state(b), Some(QpState::Err));
}

#[test]
fn elements_are_gathered_and_scattered() {
    let (mut net, a, b) = Net::pair(4, |conn| conn.mtu = Mtu::B256);
    let (from, to) = (net.buffer(0, 1000, OPEN), net.buffer(1, 1000, OPEN));
    net.fill(0, from, 1);
    let cut = |buf: Buf, parts: &[u32]| -> Vec<Sge> {
        let mut va = buf.va;
        let part = |&len: &u32| {
            let sge = Sge { va, len, lkey: buf.lkey };
            va += u64::from(len);
            sge
        };
        parts.iter().map(part).collect()
    };
    net.recv(1, b, 1, &cut(to, &[300, 0, 1, 500, 199]));
    net.send(0, a, 1, SendOp::Send, &cut(from, &[1, 254, 2, 0, 743]));
    net.run();
    assert_eq!(net.done(1).map(|c| c.status), Some(Status::Success));
    assert_eq!(net.bytes(0, from), net.bytes(1, to));
    let back = net.buffer(0, 1000, OPEN);
    net.send(0, a, 2, SendOp::RdmaRead(to.remote()), &cut(back, &[7, 600, 393]));
    net.run();
    assert_eq!(net.bytes(0, from), net.bytes(0, back));
}

#[test]
fn only_signaled_successes_are_reported() {
    let (mut net, a, b) = Net::pair(5, |_| ());
    let (from, to) = (net.buffer(0, 100, OPEN), net.buffer(1, 100, OPEN));
    for tag in 0..3 {
        net.recv(1, b, tag, &[to.sge()]);
        let wr = SendWr {
            tag,
            op: SendOp::Send,
            sges: &[from.sge()],
            signaled: tag == 2,
            solicited: tag == 1,
            inline: false,
        };
        net.post(0, a, &wr);
    }
    net.run();
    assert_eq!(net.done(0).map(|c| c.tag), Some(2));
    assert!(net.done(0).is_none());
    assert_eq!((0..3).map(|_| net.done(1).expect("received").solicited).collect::<Vec<_>>(), [false, true, false]);
}

#[test]
fn too_long_a_message_fails_both_ends() {
    let (mut net, a, b) = Net::pair(6, |_| ());
    let (from, to) = (net.buffer(0, 101, OPEN), net.buffer(1, 100, OPEN));
    net.recv(1, b, 7, &[to.sge()]);
    net.recv(1, b, 8, &[to.sge()]);
    net.send(0, a, 1, SendOp::Send, &[from.sge()]);
    net.send(0, a, 2, SendOp::Send, &[from.sge()]);
    net.run();
    let statuses =
        |net: &mut Net, node: usize| net.nodes[node].done.drain(..).map(|c| (c.tag, c.status)).collect::<Vec<_>>();
    assert_eq!(statuses(&mut net, 1), [(7, Status::LocLenErr), (8, Status::WrFlushErr)]);
    assert_eq!(statuses(&mut net, 0), [(1, Status::RemInvReqErr), (2, Status::WrFlushErr)]);
}

/// The receiver's own fault, as the sender hears of it.
#[test]
fn a_receive_without_valid_memory_is_a_remote_operational_error() {
    let (mut net, a, b) = Net::pair(14, |_| ());
    let (from, to) = (net.buffer(0, 100, OPEN), net.buffer(1, 100, OPEN));
    net.fill(0, from, 1);
    net.recv(1, b, 7, &[Sge { lkey: Lkey(to.lkey.0 ^ 1), ..to.sge() }]);
    net.send(0, a, 1, SendOp::Send, &[from.sge()]);
    net.run();
    assert_eq!(net.done(1).map(|done| (done.tag, done.status)), Some((7, Status::LocProtErr)));
    assert_eq!(net.done(0).map(|done| (done.tag, done.status)), Some((1, Status::RemOpErr)));
    assert_eq!([net.nodes[0].engine.qp_state(a), net.nodes[1].engine.qp_state(b)], [Some(QpState::Err); 2]);
    assert!(net.bytes(1, to).iter().all(|byte| *byte == 0), "nothing was written");
}

/// IBTA 9.7.5.1.3: a response acknowledges what was asked for before it, whatever became of the acknowledgements.
#[test]
fn read_responses_acknowledge_what_came_before_them() {
    for read in [false, true] {
        let (mut net, a, b) = Net::pair(15, |_| ());
        let (near, far, sink) = (net.buffer(0, 5000, OPEN), net.buffer(1, 5000, OPEN), net.buffer(1, 5000, OPEN));
        net.lose_opcode = Some(Opcode::Acknowledge);
        net.recv(1, b, 9, &[sink.sge()]);
        net.send(0, a, 1, SendOp::Send, &[near.sge()]);
        net.send(0, a, 2, SendOp::RdmaWrite(far.remote()), &[near.sge()]);
        if read {
            net.send(0, a, 3, SendOp::RdmaRead(far.remote()), &[near.sge()]);
        }
        net.run_until(net.now + Duration::from_millis(20));
        let done: Vec<_> = net.nodes[0].done.iter().map(|done| (done.tag, done.status)).collect();
        let expected: &[_] = if read { &[1, 2, 3].map(|tag| (tag, Status::Success)) } else { &[] };
        assert_eq!(done, expected, "with an RDMA READ: {read}");
        assert_eq!(net.done(1).map(|done| done.tag), Some(9));
        assert_eq!(net.nodes[0].engine.counters().retransmitted == 0, read);
    }
}

/// IBTA 10.3.1: a queue pair takes receives before it is connected, and sends only then.
#[test]
fn nothing_is_sent_before_the_connection() {
    let mut net = Net::new(16, 2);
    let qpn = net.create_qp(0);
    let buf = net.buffer(0, 64, OPEN);
    let sges = [buf.sge()];
    let wr = SendWr { tag: 1, op: SendOp::Send, sges: &sges, signaled: true, solicited: false, inline: false };
    let Node { engine, arena, .. } = &mut net.nodes[0];
    assert_eq!(engine.qp_state(qpn), Some(QpState::Init), "it leaves RESET when it is created");
    assert_eq!(engine.post_send(qpn, &wr, arena), Err(PostError::State));
    assert_eq!(engine.post_recv(qpn, &RecvWr { tag: 2, sges: &sges }), Ok(()));
    net.run();
    assert!(net.done(0).is_none());
    assert_eq!(net.sent, 0, "nothing leaves");
    let Node { engine, arena, .. } = &mut net.nodes[0];
    engine.fail_qp(qpn);
    assert_eq!(engine.post_send(qpn, &wr, arena), Ok(()), "to be flushed");
    net.run();
    let done: Vec<_> = net.nodes[0].done.drain(..).map(|done| (done.tag, done.status)).collect();
    assert_eq!(done, [(2, Status::WrFlushErr), (1, Status::WrFlushErr)]);
    let Node { engine, arena, .. } = &mut net.nodes[0];
    engine.destroy_qp(qpn);
    assert_eq!(engine.post_send(qpn, &wr, arena), Err(PostError::Unknown));
    assert_eq!(engine.post_recv(qpn, &RecvWr { tag: 3, sges: &sges }), Err(PostError::Unknown));
}

#[test]
fn keys_are_checked_at_both_ends() {
    for (case, expected) in [
        ("bounds", Status::RemAccessErr),
        ("stale", Status::RemAccessErr),
        ("access", Status::RemAccessErr),
        ("qp", Status::RemInvReqErr),
        ("local", Status::LocProtErr),
        ("sink", Status::LocProtErr),
    ] {
        let (mut net, a, _) = Net::pair(7, |conn| conn.remote_write = case != "qp");
        let near = net.buffer(0, 5000, OPEN);
        let far =
            net.buffer(1, 5000, if case == "access" { Access::LOCAL_WRITE.union(Access::REMOTE_READ) } else { OPEN });
        let read_only = net.buffer(0, 5000, Access::LOCAL_READ);
        let mut to = far.remote();
        let mut sge = near.sge();
        match case {
            "bounds" => to.va += 1,
            "stale" => to.rkey = Rkey(to.rkey.0 ^ 1),
            "local" => sge.lkey = Lkey(sge.lkey.0 ^ 1),
            _ => {}
        }
        if case == "sink" {
            net.send(0, a, 1, SendOp::RdmaRead(to), &[read_only.sge()]);
        } else {
            net.fill(0, near, 5);
            net.send(0, a, 1, SendOp::RdmaWrite(to), &[sge]);
        }
        net.run();
        assert_eq!(net.done(0).map(|c| c.status), Some(expected), "{case}");
        assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
        assert!(net.bytes(1, far).iter().all(|byte| *byte == 0), "{case}: nothing was written");
    }
}

#[test]
fn a_peer_without_a_receive_is_waited_for() {
    let (mut net, a, b) = Net::pair(8, |conn| {
        (conn.rnr_retry_count, conn.min_rnr_timer) = (7, 14);
    });
    let (from, to) = (net.buffer(0, 3000, OPEN), net.buffer(1, 3000, OPEN));
    net.fill(0, from, 3);
    net.send(0, a, 1, SendOp::Send, &[from.sge()]);
    net.send(0, a, 2, SendOp::RdmaWrite(to.remote()), &[from.sge()]);
    net.run_until(net.now + Duration::from_secs(20));
    assert!(net.done(0).is_none());
    assert!(net.nodes[0].engine.counters().rnr_naks_received > 1000);
    net.recv(1, b, 2, &[to.sge()]);
    net.run();
    assert_eq!(net.done(1).map(|c| c.status), Some(Status::Success));
    assert_eq!(net.done(0).map(|c| c.tag), Some(1));
    assert_eq!(net.done(0).map(|c| c.tag), Some(2));
    assert_eq!(net.bytes(0, from), net.bytes(1, to));
}

#[test]
fn the_rnr_budget_holds_on_both_sides() {
    for (posted_after, expected) in [(2, Status::Success), (3, Status::RnrRetryExcErr)] {
        let (mut net, a, b) = Net::pair(9, |conn| {
            (conn.rnr_retry_count, conn.min_rnr_timer) = (2, 26);
        });
        let (from, to) = (net.buffer(0, 10, OPEN), net.buffer(1, 10, OPEN));
        net.send(0, a, 1, SendOp::Send, &[from.sge()]);
        // Each wait is 81.92 ms; the first attempt and two retries find no receive, or the last one does.
        let at = net.now + rnr_time(26) * posted_after - Duration::from_millis(40);
        net.run_until(at);
        if net.nodes[1].engine.post_recv(b, &RecvWr { tag: 1, sges: &[to.sge()] }).is_ok() {
            net.run();
        }
        assert_eq!(net.done(0).map(|c| c.status), Some(expected));
    }
}

#[test]
fn a_dead_peer_ends_the_queue_pair_within_the_budget() {
    let (mut net, a, b) = Net::pair(10, |conn| {
        (conn.ack_timeout, conn.retry_count) = (14, 3);
    });
    let (from, to) = (net.buffer(0, 100, OPEN), net.buffer(1, 100, OPEN));
    net.blackhole = true;
    let start = net.now;
    let budget = Duration::from_nanos(4096 << 14) * 2 * 4;
    for tag in 0..3 {
        net.send(0, a, tag, SendOp::RdmaRead(to.remote()), &[from.sge()]);
    }
    net.run_until(start + budget - Duration::from_millis(1));
    assert!(net.done(0).is_none());
    net.run_until(start + budget + Duration::from_millis(1));
    let statuses: Vec<_> = net.nodes[0].done.drain(..).map(|c| c.status).collect();
    assert_eq!(statuses, [Status::RetryExcErr, Status::WrFlushErr, Status::WrFlushErr]);
    assert_eq!(net.nodes[0].engine.poll_event(), Some(QpEvent::Failed(a)));
    assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
    assert_eq!(net.nodes[1].engine.qp_state(b), Some(QpState::Rts));
}

#[test]
fn a_blackhole_that_ends_heals() {
    let (mut net, a, b) = Net::pair(11, |_| ());
    let (from, to) = (net.buffer(0, 1 << 20, OPEN), net.buffer(1, 1 << 20, OPEN));
    net.fill(0, from, 3);
    net.recv(1, b, 3, &[to.sge()]);
    net.send(0, a, 1, SendOp::RdmaWrite(to.remote()), &[from.sge()]);
    net.send(0, a, 2, SendOp::RdmaRead(to.remote()), &[from.sge()]);
    net.send(0, a, 3, SendOp::Send, &[from.sge()]);
    net.run_until(net.now + Duration::from_micros(50));
    net.blackhole = true;
    net.run_until(net.now + Duration::from_secs(5));
    net.blackhole = false;
    net.run();
    assert_eq!(net.nodes[0].done.drain(..).map(|c| c.status).collect::<Vec<_>>(), [Status::Success; 3]);
    assert_eq!(net.bytes(0, from), net.bytes(1, to));
}

#[test]
fn outstanding_reads_keep_to_the_depth_and_to_the_credit() {
    let (mut net, a, _) = Net::pair(12, |conn| conn.initiator_depth = 2);
    net.delay = Duration::from_millis(1);
    let (near, far) = (net.buffer(0, 1 << 18, OPEN), net.buffer(1, 1 << 18, OPEN));
    net.fill(1, far, 8);
    for tag in 0..4 {
        net.send(0, a, tag, SendOp::RdmaRead(far.remote()), &[near.sge()]);
    }
    let mut most = 0;
    while net.nodes[0].done.len() < 4 {
        net.run_until(net.now + Duration::from_micros(100));
        most = most.max(net.nodes[0].engine.read_credit_used());
    }
    assert_eq!(most, 2 << 16, "two requests of 64 KiB");
    assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
    assert_eq!(net.bytes(0, near), net.bytes(1, far));
    assert_eq!(net.nodes[0].engine.counters().retransmitted, 0);
}

#[test]
fn destroyed_queue_pairs_leave_nothing_and_their_numbers_do_not_come_back_soon() {
    let (mut net, a, _) = Net::pair(13, |_| ());
    net.delay = Duration::from_millis(1);
    let (near, far) = (net.buffer(0, 1 << 18, OPEN), net.buffer(1, 1 << 18, OPEN));
    net.send(0, a, 1, SendOp::RdmaRead(far.remote()), &[near.sge()]);
    net.run_until(net.now + Duration::from_micros(1500));
    assert!(net.nodes[0].engine.read_credit_used() > 0);
    net.nodes[0].engine.destroy_qp(a);
    assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
    let before = net.nodes[0].arena.written;
    net.run();
    assert_eq!(net.nodes[0].arena.written, before, "late responses are not placed");
    assert!(net.done(0).is_none());
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5000 {
        let qpn = net.create_qp(0);
        assert!(seen.insert(qpn), "{qpn}");
        assert!(qpn.get() > 1 && qpn.get() < 0xff_ffff);
        net.nodes[0].engine.destroy_qp(qpn);
    }
}

/// A run of everything at once. Every work request completes once, in order, and memory is right.
fn storm(seed: u64, faults: Faults, mtu: Mtu) -> Net {
    let (mut net, a, b) = Net::pair(seed, |conn| {
        conn.mtu = mtu;
        conn.min_rnr_timer = 4;
        conn.tos = 2;
    });
    net.faults = faults;
    let mut expected = [Vec::new(), Vec::new()];
    let mut checks = Vec::new();
    let mut late_receives: Vec<(usize, Qpn, u64, Buf)> = Vec::new();
    for tag in 0..60_u64 {
        let side = (net.rng.below(2)) as usize;
        let (qpn, other, other_qpn) = if side == 0 { (a, 1, b) } else { (b, 0, a) };
        let len = match net.rng.below(4) {
            0 => net.rng.below(64) as u32,
            1 => mtu.bytes() + net.rng.below(3) as u32,
            2 => net.rng.below(20_000) as u32,
            _ => net.rng.below(300_000) as u32,
        };
        let (near, far) = (net.buffer(side, len, OPEN), net.buffer(other, len, OPEN));
        let (source, sink) = match net.rng.below(3) {
            0 => {
                net.fill(side, near, tag);
                // Some receives are posted late, so that their messages meet "receiver not ready".
                let behind = late_receives.iter().any(|(node, ..)| *node == other);
                if behind || net.rng.below(4) == 0 {
                    late_receives.push((other, other_qpn, 1000 + tag, far));
                } else {
                    net.recv(other, other_qpn, 1000 + tag, &[far.sge()]);
                }
                expected[other].push(1000 + tag);
                net.send(side, qpn, tag, SendOp::Send, &[near.sge()]);
                ((side, near), (other, far))
            }
            1 => {
                net.fill(side, near, tag);
                net.send(side, qpn, tag, SendOp::RdmaWrite(far.remote()), &[near.sge()]);
                ((side, near), (other, far))
            }
            _ => {
                net.fill(other, far, tag);
                net.send(side, qpn, tag, SendOp::RdmaRead(far.remote()), &[near.sge()]);
                ((other, far), (side, near))
            }
        };
        expected[side].push(tag);
        checks.push((source, sink));
        if net.rng.below(3) == 0 {
            net.run_until(net.now + Duration::from_micros(100));
        }
    }
    net.run_until(net.now + Duration::from_millis(1));
    for (node, qpn, tag, buf) in late_receives {
        net.recv(node, qpn, tag, &[buf.sge()]);
    }
    net.run_until(net.now + Duration::from_secs(120));
    for (node, expected) in expected.iter().enumerate() {
        let done: Vec<_> = net.nodes[node].done.iter().copied().collect();
        let failed = done.iter().find(|c| c.status != Status::Success);
        assert_eq!(failed, None, "seed {seed}, {faults:?}, {mtu:?}, {:?}", net.nodes[node].engine.counters());
        for receives in [false, true] {
            let of =
                |tags: &mut dyn Iterator<Item = u64>| tags.filter(|t| (*t >= 1000) == receives).collect::<Vec<_>>();
            let got = of(&mut done.iter().map(|c| c.tag));
            assert_eq!(got, of(&mut expected.iter().copied()), "seed {seed}");
        }
        assert_eq!(net.nodes[node].engine.read_credit_used(), 0, "seed {seed}");
    }
    for ((from, source), (to, sink)) in checks {
        assert!(net.bytes(from, source) == net.bytes(to, sink), "seed {seed}: {source:?} {sink:?}");
    }
    net
}

#[test]
fn everything_completes_once_over_any_network() {
    let runs: u64 = std::env::var("FARSIDE_SIM_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let mut total = Counters::default();
    let first: u64 = std::env::var("FARSIDE_SIM_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + runs {
        let level = seed % 5;
        let faults = Faults {
            loss: [0, 10, 100, 500, 1000][level as usize],
            duplicate: (seed / 5 % 3) * 100,
            reorder: (seed / 15 % 3) * 250,
            corrupt: (seed % 2) * 50,
            mark: (seed / 2 % 2) * 300,
        };
        let mtu = MTUS[(seed / 3 % 5) as usize];
        let net = storm(seed, faults, mtu);
        for node in &net.nodes {
            let counters = node.engine.counters();
            total.duplicates += counters.duplicates;
            total.retransmitted += counters.retransmitted;
            total.timeouts += counters.timeouts;
            total.read_gaps += counters.read_gaps;
            total.sequence_naks_sent += counters.sequence_naks_sent;
            total.rnr_naks_sent += counters.rnr_naks_sent;
            total.cnps_received += counters.cnps_received;
        }
    }
    println!("{runs} runs: {total:?}");
    assert!(total.duplicates > 0 && total.retransmitted > 0 && total.timeouts > 0 && total.read_gaps > 0);
    assert!(total.sequence_naks_sent > 0 && total.rnr_naks_sent > 0 && total.cnps_received > 0);
}

/// The network may keep a copy of an RDMA READ request until its key is gone. Nobody needs that answer any more.
#[test]
fn a_late_duplicate_of_a_read_whose_key_was_invalidated_harms_nobody() {
    let finish = |net: &mut Net, tag| {
        while net.nodes[0].done.is_empty() {
            net.run_until(net.now + Duration::from_micros(5));
        }
        assert_eq!(net.done(0).map(|done| (done.tag, done.status)), Some((tag, Status::Success)));
    };
    let mut late = 0;
    for seed in 0..40 {
        let (mut net, a, b) = Net::pair(seed, |_| ());
        net.faults = Faults { duplicate: 5000, reorder: 3000, ..Faults::default() };
        let (message, sink) = (net.buffer(0, 16, OPEN), net.buffer(0, 4000, OPEN));
        for tag in 0..10 {
            let (from, place) = (net.buffer(1, 4000, OPEN), net.buffer(1, 16, OPEN));
            net.recv(1, b, tag, &[place.sge()]);
            net.send(0, a, tag, SendOp::RdmaRead(from.remote()), &[sink.sge()]);
            finish(&mut net, tag);
            net.send(0, a, 100 + tag, SendOp::SendInv(from.rkey), &[message.sge()]);
            finish(&mut net, 100 + tag);
        }
        net.run();
        assert_eq!(net.nodes[1].engine.counters().qp_errors, 0, "seed {seed}");
        late += net.nodes[1].engine.counters().duplicates;
    }
    assert!(late > 100, "only {late} duplicates");
}

/// Every packet is marked; what comes back, and how fast the sender then is, follows the parameters.
#[test]
fn congestion_notifications_follow_the_parameters() {
    let storm = |dcqcn: Dcqcn| {
        let mut net = Net::with(1, 2, dcqcn);
        let (a, _) = net.connect(0, 1, |_| ());
        net.faults = Faults { mark: 10_000, ..Faults::default() };
        let (near, far) = (net.buffer(0, 1 << 20, OPEN), net.buffer(1, 1 << 20, OPEN));
        let begun = net.now;
        net.send(0, a, 1, SendOp::RdmaWrite(far.remote()), &[near.sge()]);
        while net.nodes[0].done.is_empty() {
            net.run_until(net.now + Duration::from_micros(20));
        }
        (net.nodes[1].engine.counters().cnps_sent, net.now - begun)
    };
    let usual = Dcqcn { min_rate: 50_000_000, ..Dcqcn::default() };
    let (many, slow) = storm(Dcqcn { cnp_interval: Duration::from_micros(10), ..usual });
    let (few, _) = storm(Dcqcn { cnp_interval: Duration::from_millis(100), ..usual });
    assert_eq!(few, 1, "one interval, one notification");
    assert!(many > 20, "{many}");
    let (_, slower) = storm(Dcqcn { cnp_interval: Duration::from_micros(10), min_rate: 10_000_000, ..usual });
    assert!(slower > 2 * slow, "at a fifth of the rate {slower:?}, against {slow:?}");
}

/// What was sent inline may be overwritten at once, also where it is lost and sent again; what is too long for that may not.
#[test]
fn inline_bytes_are_those_of_the_moment_they_were_posted() {
    for (len, kept) in [(0, true), (1, true), (MAX_INLINE as u32, true), (MAX_INLINE as u32 + 1, false)] {
        let (mut net, a, b) = Net::pair(3, |_| ());
        let (near, far) = (net.buffer(0, 64, OPEN), net.buffer(1, 64, OPEN));
        net.bytes_mut(0, near).fill(7);
        net.recv(1, b, 1, &[far.sge()]);
        let sges = [Sge { len, ..near.sge() }];
        net.post(
            0,
            a,
            &SendWr { tag: 1, op: SendOp::Send, sges: &sges, signaled: true, solicited: false, inline: true },
        );
        net.blackhole = true;
        net.run_until(net.now + Duration::from_millis(1));
        net.bytes_mut(0, near).fill(9);
        net.blackhole = false;
        net.run();
        assert_eq!(net.done(1).map(|done| (done.status, done.byte_len)), Some((Status::Success, len)));
        assert!(net.nodes[0].engine.counters().retransmitted > 0);
        let expected = if kept { 7 } else { 9 };
        assert!(net.bytes(1, far)[..len as usize].iter().all(|byte| *byte == expected), "{len} bytes");
        assert_eq!(net.done(0).map(|done| done.status), Some(Status::Success));
    }
}
