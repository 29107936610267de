//! The verbs provider against itself, over one RDMA device of this machine (rdma_rxe will do).
//!
//! Skips, and says so, where there is none. Run with `--test-threads=1`: some tests count file descriptors and objects.
//! `FARSIDE_TEST_REMOVE=rxe0/eth0` names a device and its interface that one test may remove and add again,
//! `FARSIDE_TEST_FAILOVER=bond0/eth1` a bond below the device and the slave that another may make the active one.
#![cfg(feature = "verbs")]

mod removal;
mod rig;
mod storm;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use farside::rdma::{
    Cm as _, CmEvent, Completion, ConnParams, Endpoint as _, EndpointEvent, EndpointOptions, Incoming as _,
    ListenOptions, Outgoing as _, PostError, Provider, QpId, QpOptions, RecvQueue, RejectReason, SendOp, SendWr,
    WcStatus,
};
use rig::{Link, NOW, Rig, held, held_again, name, next_event, qp_options, rdma_addresses, wait_readable};

#[test]
fn every_operation_carries_its_bytes() {
    let Some(mut rig) = Rig::new(18_500, 0) else { return };
    eprintln!("{:?}", rig.verbs.device_info(rig.device).unwrap());
    let link = rig.connect(8);

    rig.client.memory[0x8000..0x8100].fill(0x11);
    rig.client.send(link.client, 1, SendOp::Send, 0x8000, 256).unwrap();
    rig.client.ep.flush(NOW);
    let got = rig.server.complete_one();
    assert_eq!((got.tag, got.status, got.byte_len, got.qp), (200, WcStatus::Success, 256, link.server));
    assert_eq!(got.invalidated, None);
    assert!(rig.server.memory[..256].iter().all(|byte| *byte == 0x11));
    assert_eq!(rig.client.complete_one().tag, 1);

    // The target's way: a WRITE unsignaled, the SEND chained behind it, one doorbell.
    rig.server.memory[0x10_000..0x20_000].fill(0x22);
    let (remote, rkey) = rig.client.remote(0x40_000);
    let sge = rig.server.sge(0x10_000, 0x10_000);
    let op = SendOp::RdmaWrite { remote, rkey };
    let write = SendWr { tag: 2, op, sge, signaled: false, solicited: false, inline: false };
    rig.server.ep.post_send(link.server, &write).unwrap();
    rig.server.memory[0x20_000..0x20_010].copy_from_slice(b"response capsule");
    let sge = rig.server.sge(0x20_000, 16);
    let send = SendWr { tag: 3, op: SendOp::Send, sge, signaled: true, solicited: true, inline: true };
    rig.server.ep.post_send(link.server, &send).unwrap();
    rig.server.ep.flush(NOW);
    let got = rig.client.complete_one();
    assert_eq!((got.tag, got.byte_len), (100, 16));
    assert_eq!(&rig.client.memory[..16], b"response capsule");
    assert!(rig.client.memory[0x40_000..0x50_000].iter().all(|byte| *byte == 0x22));
    assert_eq!(rig.server.complete_one().tag, 3);

    rig.client.memory[0x50_000..0x60_000].fill(0x33);
    let (remote, rkey) = rig.client.remote(0x50_000);
    for part in 0..16 {
        let op = SendOp::RdmaRead { remote: remote + part * 0x1000, rkey };
        rig.server.send(link.server, 10 + part, op, 0x30_000 + part as usize * 0x1000, 0x1000).unwrap();
    }
    assert_eq!(rig.server.send(link.server, 99, SendOp::Send, 0, 1), Err(PostError::Full));
    rig.server.ep.flush(NOW);
    let tags: Vec<u64> = rig.server.complete(16).iter().map(|done| done.tag).collect();
    assert_eq!(tags, (10..26).collect::<Vec<_>>());
    assert!(rig.server.memory[0x30_000..0x40_000].iter().all(|byte| *byte == 0x33));

    // An empty message is one.
    rig.server.send(link.server, 4, SendOp::Send, 0, 0).unwrap();
    rig.server.ep.flush(NOW);
    assert_eq!(rig.client.complete_one().byte_len, 0);
    assert_eq!(rig.server.complete_one().tag, 4);
    rig.disconnect(link);
}

#[test]
fn a_sleeper_is_woken_by_a_completion() {
    let Some(mut rig) = Rig::new(18_501, 0) else { return };
    let link = rig.connect(8);
    for round in 0..5 {
        rig.server.ep.arm().unwrap();
        assert_eq!(rig.server.ep.poll(NOW, &mut [Completion::EMPTY; 4]), 0);
        assert!(!wait_readable(&rig.server.ep.fds(), Duration::from_millis(50)), "round {round}: awake for nothing");
        rig.client.send(link.client, round, SendOp::Send, 0x8000, 64).unwrap();
        rig.client.ep.flush(NOW);
        assert!(wait_readable(&rig.server.ep.fds(), Duration::from_secs(10)), "round {round}: not woken");
        assert_eq!(rig.server.complete_one().byte_len, 64);
        rig.client.complete_one();
    }
    rig.disconnect(link);
}

#[test]
fn two_queue_pairs_share_receives() {
    const DEPTH: usize = 64;
    let Some(mut rig) = Rig::new(18_502, DEPTH as u32) else { return };
    for slot in 0..DEPTH {
        rig.server.recv(RecvQueue::Shared, 1000 + slot as u64, slot);
    }
    let sge = rig.server.sge(0, 64);
    assert_eq!(rig.server.ep.post_recv(RecvQueue::Shared, 0, &[sge]), Err(PostError::Full));
    rig.server.ep.flush(NOW);
    let links = [rig.connect(0), rig.connect(0)];
    let mut events = Vec::new();
    for round in 0..100 {
        let link = links[round % 2];
        let len = 64 + (round % 2) as u32;
        rig.client.send(link.client, round as u64, SendOp::Send, 0x8000, len).unwrap();
        rig.client.ep.flush(NOW);
        let got = rig.server.complete_one();
        assert_eq!((got.status, got.qp, got.byte_len), (WcStatus::Success, link.server, len));
        let slot = (got.tag - 1000) as usize;
        assert!(slot < DEPTH);
        // In the first half each is given back; in the second the queue runs down to 14.
        if round < 50 {
            rig.server.recv(RecvQueue::Shared, got.tag, slot);
            rig.server.ep.flush(NOW);
        }
        rig.client.complete_one();
        events.extend(std::iter::from_fn(|| rig.server.ep.poll_event()));
    }
    assert!(!events.contains(&EndpointEvent::ReceivesLow), "14 of 64 are left: {events:?}");
    for round in 0..10 {
        rig.client.send(links[0].client, round, SendOp::Send, 0x8000, 64).unwrap();
        rig.client.ep.flush(NOW);
        rig.server.complete_one();
        rig.client.complete_one();
    }
    events.extend(std::iter::from_fn(|| rig.server.ep.poll_event()));
    assert!(events.contains(&EndpointEvent::ReceivesLow), "4 of 64 are left: {events:?}");
    for link in links {
        rig.disconnect(link);
    }
    let events: Vec<_> = std::iter::from_fn(|| rig.server.ep.poll_event()).collect();
    eprintln!("after the end: {events:?}");
}

#[test]
fn a_disconnect_flushes_each_request_once() {
    let Some(mut rig) = Rig::new(18_503, 0) else { return };
    let link = rig.connect(8);
    rig.server.ep.disconnect(link.server);
    // Posted to a dead queue pair: a normal thing.
    for tag in 0..16 {
        rig.server.send(link.server, tag, SendOp::Send, 0x8000, 64).unwrap();
    }
    rig.server.ep.flush(NOW);
    let done = rig.server.complete(16 + 8);
    assert!(done.iter().all(|done| done.status == WcStatus::Flushed && done.qp == link.server), "{done:?}");
    let sends: Vec<u64> = done.iter().map(|done| done.tag).filter(|tag| *tag < 100).collect();
    assert_eq!(sends, (0..16).collect::<Vec<_>>());
    assert_eq!(done.iter().filter(|done| done.tag >= 200).count(), 8);
    // The marker, and a receive.
    rig.server.send(link.server, 77, SendOp::Send, 0, 0).unwrap();
    rig.server.recv(RecvQueue::Qp(link.server), 277, 0);
    rig.server.ep.flush(NOW);
    let mut tags: Vec<u64> = rig.server.complete(2).iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [77, 277]);
    rig.server.ep.disconnect(link.server);
    rig.wait_ended(link.client_conn);
    rig.client.ep.disconnect(link.client);
    assert!(rig.client.complete(4).iter().all(|done| done.status == WcStatus::Flushed));
    rig.destroy(link);
    assert_eq!(rig.server.send(link.server, 1, SendOp::Send, 0, 1), Err(PostError::NoQp));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.server.ep.poll(NOW, &mut [Completion::EMPTY; 8]), 0);
}

#[test]
fn destroying_a_busy_queue_pair_leaves_nothing_behind() {
    let Some(mut rig) = Rig::new(18_504, 0) else { return };
    let link = rig.connect(8);
    for tag in 0..15 {
        rig.server.send(link.server, tag, SendOp::Send, 0x8000, 64).unwrap();
    }
    rig.server.ep.flush(NOW);
    rig.server.send(link.server, 15, SendOp::Send, 0x8000, 64).unwrap();
    rig.server.ep.destroy(link.server);
    rig.wait_ended(link.client_conn);
    let next = rig.connect(8);
    rig.server.send(next.server, 5, SendOp::Send, 0x8000, 64).unwrap();
    rig.server.ep.flush(NOW);
    let got = rig.server.complete_one();
    assert_eq!((got.tag, got.status, got.qp), (5, WcStatus::Success, next.server));
    rig.client.ep.destroy(link.client);
    rig.destroy(next);
}

#[test]
fn a_wrong_key_ends_one_queue_pair_only() {
    let Some(mut rig) = Rig::new(18_505, 0) else { return };
    let (bad, good) = (rig.connect(8), rig.connect(8));
    let (remote, rkey) = rig.client.remote(0);
    rig.server.send(bad.server, 1, SendOp::RdmaRead { remote, rkey: rkey ^ 1 }, 0x8000, 64).unwrap();
    rig.server.send(bad.server, 2, SendOp::Send, 0x8000, 64).unwrap();
    rig.server.ep.flush(NOW);
    let done = rig.server.complete(2 + 8);
    let of = |tag| done.iter().find(|done| done.tag == tag).unwrap();
    assert_eq!(of(1).status, WcStatus::RemoteAccess);
    assert_eq!(of(2).status, WcStatus::Flushed);
    rig.server.send(good.server, 3, SendOp::RdmaRead { remote, rkey }, 0x8000, 64).unwrap();
    rig.server.ep.flush(NOW);
    let got = rig.server.complete_one();
    assert_eq!((got.tag, got.status), (3, WcStatus::Success));
    rig.destroy(bad);
    rig.destroy(good);
}

/// A region registered by user space cannot be invalidated by a peer. That the peer's queue pair refuses shows that
/// opcode and key arrived; that it works where it may is for the kernel host to show.
#[test]
fn send_with_invalidate_reaches_the_peer() {
    let Some(mut rig) = Rig::new(18_506, 0) else { return };
    if !rig.server.ep.caps().send_with_invalidate {
        eprintln!("SKIPPED: the device has no SEND with invalidate");
        return;
    }
    let link = rig.connect(8);
    let (_, rkey) = rig.client.remote(0);
    rig.server.send(link.server, 1, SendOp::SendInvalidate { rkey }, 0x8000, 64).unwrap();
    rig.server.ep.flush(NOW);
    let got = rig.client.complete(4)[0];
    eprintln!("SEND with invalidate of a region that does not allow it: {got:?}");
    assert_eq!(got.tag, 100);
    assert!(got.invalidated == Some(rkey) || got.status != WcStatus::Success);
    rig.destroy(link);
}

#[test]
fn a_reject_carries_its_private_data() {
    let Some(mut rig) = Rig::new(18_507, 0) else { return };
    for with_qp in [false, true] {
        let (client, client_conn, incoming) = rig.request(&[7; 32]);
        if with_qp {
            let qp = rig.server.ep.create_incoming(incoming, &qp_options(8)).map_err(|(_, e)| e).unwrap();
            rig.server.ep.reject(qp, &[0, 0, 6, 0]);
        } else {
            incoming.reject(&[0, 0, 6, 0]);
        }
        match next_event(&mut rig.cm) {
            CmEvent::Refused { conn, reason, private_data } => {
                assert_eq!((conn, reason), (client_conn, RejectReason::CONSUMER));
                assert_eq!(&private_data[..4], &[0, 0, 6, 0]);
            }
            other => panic!("{}", name(&other)),
        }
        rig.client.ep.destroy(client);
    }
}

#[test]
fn a_dropped_request_is_refused() {
    let Some(mut rig) = Rig::new(18_508, 0) else { return };
    let (client, client_conn, incoming) = rig.request(&[]);
    drop(incoming);
    match next_event(&mut rig.cm) {
        CmEvent::Refused { conn, .. } | CmEvent::Failed { conn, .. } => assert_eq!(conn, client_conn),
        other => panic!("{}", name(&other)),
    }
    rig.client.ep.destroy(client);
}

#[test]
fn nobody_listening_is_an_invalid_service() {
    let Some(mut rig) = Rig::new(18_509, 0) else { return };
    rig.cm.unlisten(rig.listener);
    let outgoing = rig.resolve();
    let client_conn = outgoing.conn();
    let qp = rig.client.ep.create_outgoing(outgoing, &qp_options(8)).unwrap();
    let params = ConnParams { private_data: &[], initiator_depth: 1, responder_resources: 1 };
    rig.client.ep.connect(qp, &params).unwrap();
    match next_event(&mut rig.cm) {
        CmEvent::Refused { conn, reason, .. } => {
            assert_eq!((conn, reason), (client_conn, RejectReason::INVALID_SERVICE_ID));
        }
        other => panic!("{}", name(&other)),
    }
}

/// The accept fails or the connection ends at once, and nothing hangs.
#[test]
fn accepting_a_client_that_went_away_ends_in_an_error() {
    let Some(mut rig) = Rig::new(18_510, 0) else { return };
    for _ in 0..10 {
        let (client, _, incoming) = rig.request(&[]);
        let server_conn = incoming.conn();
        let server = rig.server.ep.create_incoming(incoming, &qp_options(8)).map_err(|(_, e)| e).unwrap();
        rig.client.ep.destroy(client);
        rig.settle();
        let params = ConnParams { private_data: &[], initiator_depth: 1, responder_resources: 0 };
        match rig.server.ep.accept(server, &params) {
            Ok(()) => match next_event(&mut rig.cm) {
                CmEvent::Failed { conn, .. } | CmEvent::Disconnected { conn } => assert_eq!(conn, server_conn),
                other => panic!("{}", name(&other)),
            },
            Err(error) => eprintln!("{error}"),
        }
        rig.server.ep.destroy(server);
    }
}

#[test]
fn listeners_are_refused_with_a_reason() {
    let Some(mut rig) = Rig::new(18_511, 0) else { return };
    let options = ListenOptions { backlog: 1, tos: None };
    let refusals = [
        (rig.address, libc::EADDRINUSE),
        ("198.51.100.1:18512".parse().unwrap(), libc::EADDRNOTAVAIL),
        ("127.0.0.1:18512".parse().unwrap(), 0),
        (SocketAddr::new(rig.address.ip(), 0), 0),
    ];
    for (address, errno) in refusals {
        let error = rig.cm.listen(address, &options).unwrap_err();
        eprintln!("{error}");
        assert_eq!(error.errno, errno, "{error}");
        assert!(!error.remedy.is_empty());
    }
    // Free again at once.
    rig.cm.unlisten(rig.listener);
    rig.listener = rig.cm.listen(rig.address, &options).unwrap().id;
    let link = rig.connect(8);
    rig.disconnect(link);
}

#[test]
fn wildcard_and_ipv6_listeners_share_a_port() {
    let Some(mut rig) = Rig::new(18_513, 0) else { return };
    rig.cm.unlisten(rig.listener);
    let options = ListenOptions { backlog: 8, tos: None };
    let v4 = rig.cm.listen("0.0.0.0:18513".parse().unwrap(), &options).unwrap();
    let v6 = rig.cm.listen("[::]:18513".parse().unwrap(), &options).unwrap();
    assert_eq!((v4.device, v6.device), (None, None));
    rig.listener = v4.id;
    let link = rig.connect(8);
    rig.disconnect(link);
    match rdma_addresses().into_iter().find(IpAddr::is_ipv6) {
        Some(ip) => {
            rig.listener = v6.id;
            rig.address.set_ip(ip);
            let link = rig.connect(8);
            rig.disconnect(link);
        }
        None => eprintln!("SKIPPED: the IPv6 half: no RDMA device with a global IPv6 address"),
    }
}

#[test]
fn options_beyond_the_device_are_refused() {
    let Some(mut rig) = Rig::new(18_514, 0) else { return };
    let caps = rig.server.ep.caps().clone();
    let mut incoming = rig.request(&[]).2;
    for options in [
        QpOptions { send_wr: caps.max_qp_wr + 1, ..qp_options(8) },
        QpOptions { recv_sge: caps.max_recv_sge + 1, ..qp_options(8) },
        QpOptions { inline: caps.max_inline + 1, ..qp_options(8) },
        qp_options(0),
    ] {
        let Err((back, error)) = rig.server.ep.create_incoming(incoming, &options) else { panic!("{options:?}") };
        eprintln!("{error}");
        incoming = back;
    }
    incoming.reject(&[0, 0, 6, 0]);
    let many = EndpointOptions { srq_depth: caps.max_srq_wr + 1, srq_sge: 2, comp_vector: 0 };
    assert!(rig.verbs.open_endpoint(rig.device, 0, &many).is_err());
}

#[test]
fn many_queue_pairs_spread_over_completion_queues() {
    let Some(mut rig) = Rig::new(18_515, 0) else { return };
    let links: Vec<Link> = (0..40).map(|_| rig.connect(8)).collect();
    for (index, link) in links.iter().enumerate() {
        rig.client.send(link.client, index as u64, SendOp::Send, 0x8000, 64).unwrap();
    }
    rig.client.ep.flush(NOW);
    let mut qps: Vec<QpId> = rig.server.complete(40).iter().map(|done| done.qp).collect();
    qps.sort_unstable();
    let mut expected: Vec<QpId> = links.iter().map(|link| link.server).collect();
    expected.sort_unstable();
    assert_eq!(qps, expected);
    rig.client.complete(40);
    for link in links {
        rig.disconnect(link);
    }
}

#[test]
fn two_hundred_connections_leave_nothing_behind() {
    let Some(mut rig) = Rig::new(18_516, 0) else { return };
    let link = rig.connect(8);
    rig.disconnect(link);
    rig.settle();
    let before = held();
    let start = Instant::now();
    for _ in 0..200 {
        let link = rig.connect(8);
        rig.client.send(link.client, 1, SendOp::Send, 0x8000, 64).unwrap();
        rig.client.ep.flush(NOW);
        assert_eq!(rig.server.complete_one().byte_len, 64);
        rig.client.complete_one();
        rig.disconnect(link);
        while rig.cm.poll_event(NOW).is_some() {}
    }
    eprintln!("200 connections in {:?}", start.elapsed());
    rig.settle();
    held_again(&before);
    eprintln!("{} descriptors; {}", before.0, before.1);
}

#[test]
fn everything_closed_leaves_nothing_behind() {
    let Some(rig) = Rig::new(18_517, 64) else { return };
    drop(rig);
    let before = held();
    for _ in 0..3 {
        let mut rig = Rig::new(18_517, 64).unwrap();
        // Connected, requested and resolved at once; some of it outlives the CM.
        rig.connect(8);
        let (_, _, incoming) = rig.request(&[]);
        let outgoing = rig.cm.resolve(rig.address, None, Duration::from_secs(1)).unwrap();
        eprintln!("{outgoing:?} is left unresolved");
        drop(rig);
        drop(incoming);
    }
    held_again(&before);
    eprintln!("{} descriptors; {}", before.0, before.1);
}
