//! Sends that nobody waits for: they ask for few acknowledgements, and lose nothing by it.
use core::time::Duration;

use super::net::{Buf, Faults, Net, OPEN};
use crate::roce::*;

const US: Duration = Duration::from_micros(1);

fn post(net: &mut Net, a: Qpn, tag: u64, from: Buf, signaled: bool) {
    let sges = [from.sge()];
    net.post(0, a, &SendWr { tag, op: SendOp::Send, sges: &sges, signaled, solicited: false, inline: false });
}

/// A pair that has measured its round trip, all of it acknowledged; receives of node 1 are posted.
fn warm(seed: u64) -> (Net, Qpn, Buf, Buf) {
    let (mut net, a, b) = Net::pair(seed, |conn| (conn.ack_timeout, conn.retry_count) = (14, 3));
    let (from, to) = (net.buffer(0, 64, OPEN), net.buffer(1, 64, OPEN));
    for tag in 0..256 {
        net.recv(1, b, tag, &[to.sge()]);
    }
    for tag in 0..8 {
        post(&mut net, a, tag, from, true);
        net.run_until(net.now + 100 * US);
    }
    net.nodes.iter_mut().for_each(|node| node.done.clear());
    (net, a, from, to)
}

#[test]
fn few_acknowledgements_are_asked_for() {
    let (mut net, a, from, _) = warm(1);
    let before = net.nodes[0].engine.counters().received;
    for tag in 0..65 {
        post(&mut net, a, tag, from, false);
        net.run_until(net.now + 10 * US);
    }
    let acknowledgements = net.nodes[0].engine.counters().received - before;
    assert_eq!((net.nodes[1].done.len(), acknowledgements), (65, 4), "one for 16 messages");
    post(&mut net, a, 65, from, false);
    post(&mut net, a, 66, from, true);
    net.run_until(net.now + 100 * US);
    assert_eq!(net.done(0).map(|done| done.tag), Some(66), "at once for who waits");
}

/// The last packet of all, and what repairs it, may be lost though nobody waits for an acknowledgement.
#[test]
fn the_last_one_is_repaired_soon() {
    for lose in [&[0][..], &[0, 1], &[0, 1, 2]] {
        let (mut net, a, from, _) = warm(2);
        net.lose = lose.iter().map(|packet| net.sent + packet).collect();
        post(&mut net, a, 1, from, false);
        let begun = net.now;
        while net.nodes[1].done.is_empty() {
            net.step(begun + Duration::from_secs(1));
        }
        assert!(net.lose.is_empty());
        assert!(net.now - begun < 4500 * US, "{lose:?}: {:?}", net.now - begun);
        net.run();
        assert_eq!(net.nodes[0].engine.send_room(a), Some(256), "it is known to have arrived");
        assert_eq!((net.nodes[0].done.len(), net.nodes[1].done.len()), (0, 1));
    }
}

/// Whatever number of packets was not asked about: the peer's death is noticed, and everything completes.
#[test]
fn a_dead_peer_is_noticed_and_all_are_flushed() {
    for count in [1, 2, 15, 16, 17, 100] {
        let (mut net, a, from, _) = warm(3);
        net.blackhole = true;
        let (start, budget) = (net.now, Duration::from_nanos(4096 << 14) * 2 * 4);
        for tag in 0..count {
            post(&mut net, a, tag, from, false);
        }
        net.run_until(start + budget - US);
        assert_eq!(net.nodes[0].engine.poll_event(), None, "{count}");
        net.run_until(start + budget + Duration::from_millis(2));
        assert_eq!(net.nodes[0].engine.poll_event(), Some(QpEvent::Failed(a)), "{count}");
        let done: Vec<_> = net.nodes[0].done.drain(..).map(|done| (done.tag, done.status)).collect();
        let status = |tag| if tag == 0 { Status::RetryExcErr } else { Status::WrFlushErr };
        assert_eq!(done, (0..count).map(|tag| (tag, status(tag))).collect::<Vec<_>>());
    }
}

/// More than the window holds, lossless and not: none waits for an acknowledgement that nobody asks for.
#[test]
fn a_full_send_queue_drains_by_itself() {
    for seed in 0..40 {
        let (mut net, a, from, _) = warm(seed);
        net.faults = Faults { loss: (seed % 4) * 500, ..Faults::default() };
        for tag in 0..240 {
            post(&mut net, a, tag, from, false);
        }
        let begun = net.now;
        while net.nodes[1].done.len() < 240 {
            assert!(net.now - begun < Duration::from_secs(2), "{} of 240, seed {seed}", net.nodes[1].done.len());
            net.step(begun + Duration::from_secs(3));
        }
        net.run();
        assert_eq!(net.nodes[0].engine.send_room(a), Some(256), "seed {seed}");
        let tags: Vec<_> = net.nodes[1].done.iter().map(|done| done.tag).collect();
        assert_eq!(tags, (8..248).collect::<Vec<_>>(), "seed {seed}");
    }
}

/// An answer proves that a capsule arrived, so its memory is used again before the acknowledgement. What is sent again then
/// has other bytes, and the peer has to drop it.
#[test]
fn what_is_sent_again_from_memory_in_new_use_is_dropped() {
    let (mut net, a, from, to) = warm(4);
    net.bytes_mut(0, from).fill(7);
    post(&mut net, a, 1, from, false);
    net.run_until(net.now + 50 * US);
    assert_eq!(net.nodes[1].done.len(), 1, "it arrived");
    net.bytes_mut(0, from).fill(9);
    let before = *net.nodes[1].engine.counters();
    net.run();
    let after = *net.nodes[1].engine.counters();
    assert_eq!((after.received - before.received, after.duplicates - before.duplicates), (1, 1), "it was sent again");
    assert!(net.bytes(1, to).iter().all(|byte| *byte == 7));
    assert_eq!(net.nodes[1].done.len(), 1);
    assert_eq!(net.nodes[0].engine.counters().retransmitted, 0, "a question, not a loss");
    assert_eq!(net.nodes[0].engine.send_room(a), Some(256));
}
