//! Faults that only the in-process provider can be ordered to have, and what exists on it afterwards.

use std::sync::Arc;
use std::time::Duration;

use farside::host::bench::{self, BenchOptions, Pattern, Progress};
use farside::host::raw::RawQueue;
use farside::host::wire;
use farside::host::{Host, HostEvent, HostOptions, Reconnect};
use farside::rdma::local::{LocalOptions, WorkKind};
use farside::target::{Cause, Options};

use crate::raw_ends::counted;
use crate::rig::{LIMIT, LocalRig, NQN, Rig, Setup, settles, small, until};

type LocalSetup = Setup<LocalRig>;

/// A target whose device is not the default one.
fn over(change: impl FnOnce(&mut LocalOptions)) -> LocalSetup {
    let rig = LocalRig::new();
    let mut options = LocalOptions::default();
    change(&mut options);
    let provider = rig.local.with(options);
    Setup::over(rig, small(), provider)
}

fn exercise(setup: &LocalSetup, salt: u8) {
    println!("device {salt}");
    let (mut raw, _, io) = setup.ready();
    for blocks in [1, 8, 16, 128, 2048] {
        let bytes: Vec<u8> = (0..blocks * 512usize).map(|at| (at / 3) as u8 ^ salt).collect();
        let status = raw.write(io, 1, 5, &bytes);
        assert!(status.is_success(), "write of {blocks}: {status}");
        assert_eq!(raw.read(io, 1, 5, blocks as u32).expect("a read"), bytes);
    }
}

#[test]
fn devices_of_other_kinds_serve_too() {
    // iWARP: the sink of a READ needs remote write access, for the length of the transfer only.
    let setup = over(|options| options.caps.read_sink_needs_remote_write = true);
    exercise(&setup, 1);
    // No SEND with invalidate; a depth of 1; no inline data; few work requests.
    exercise(&over(|options| options.caps.send_with_invalidate = false), 2);
    exercise(&over(|options| options.caps.max_initiator_depth = 1), 3);
    exercise(&over(|options| options.caps.max_inline = 0), 5);
    exercise(&over(|options| options.pad_private_data = Some(56)), 7);
}

#[test]
fn device_with_few_or_no_shared_receives_serves_too() {
    exercise(&over(|options| options.caps.max_srq_wr = 0), 4);
    exercise(&over(|options| options.caps.max_srq_wr = 64), 6);
}

#[test]
fn queue_beyond_the_devices_work_requests_is_rejected_or_clamped() {
    let setup = over(|options| options.caps.max_qp_wr = 256);
    exercise(&setup, 1);
    let mut raw = setup.raw();
    raw.admin_up();
    // Either a connection that works, or a reject with "no resources"; never silence.
    match raw.queue(RawQueue { capsule: 64, ..RawQueue::new(1, 1024) }) {
        Ok(io) => assert!(raw.connect_io(io, 1, 1023).status().is_success()),
        Err(error) => assert!(error.to_string().contains("no resources"), "{error}"),
    }
}

#[test]
fn invalidate_that_the_device_only_claims_ends_one_queue_and_is_not_used_again() {
    let setup = LocalSetup::start();
    let (mut raw, _, io) = setup.ready();
    setup.rig.local.faults().fail_send_invalidate(1);
    let buffer = raw.host.take(4096).expect("memory");
    let sgl = wire::keyed(buffer.addr(), 4096, raw.host.rkey(), true);
    raw.host.send(io, &wire::block_command(2, 1, 0, 8).cid(1).sgl(sgl).0).expect("sent");
    let _ = raw.host.response(io, Duration::from_secs(2));
    setup.rig.local.faults().fail_send_invalidate(1_000_000);
    // The host comes back, and is served without it.
    let mut again = setup.raw();
    let (_, io) = again.bring_up();
    let buffer = again.host.take(4096).expect("memory");
    let sgl = wire::keyed(buffer.addr(), 4096, again.host.rkey(), true);
    let sqe = wire::block_command(2, 1, 0, 8).cid(1).sgl(sgl);
    let response = again.host.call(io, &sqe.0, LIMIT);
    assert!(
        response.is_ok_and(|response| response.status().is_success() && response.invalidated.is_none()),
        "the target goes on using what its device cannot do"
    );
}

/// Events that a device loses: the target looks at its completions by itself, once a second.
#[test]
fn completions_whose_events_are_lost_are_found() {
    let setup = over(|options| options.lost_events = true);
    let (mut raw, _, io) = setup.ready();
    for at in 0..3u8 {
        // Long enough for the reactor to sleep.
        std::thread::sleep(Duration::from_millis(100));
        let asked = std::time::Instant::now();
        assert!(raw.write(io, 1, 0, &[at; 4096]).is_success());
        assert!(asked.elapsed() < Duration::from_secs(5), "answered after {:?}", asked.elapsed());
    }
    assert_eq!(raw.read(io, 1, 0, 8).expect("a read"), [2; 4096]);
}

#[test]
fn link_that_breaks_in_the_middle_of_anything_harms_nobody_else() {
    let setup = LocalSetup::start();
    for (kind, opcode) in [(WorkKind::Read, 1), (WorkKind::Write, 2), (WorkKind::Send, 2), (WorkKind::Send, 1)] {
        let (mut raw, _, io) = setup.ready();
        assert!(raw.write(io, 1, 0, &[0x5a; 4096]).is_success());
        let buffer = raw.host.take(4096).expect("memory");
        let sgl = raw.keyed(&buffer, 4096);
        // The second SEND from now: the first is the capsule.
        setup.rig.local.faults().break_link_at(kind, if kind == WorkKind::Send { 2 } else { 1 });
        raw.host.send(io, &wire::block_command(opcode, 1, 0, 8).cid(1).sgl(sgl).0).expect("sent");
        assert!(raw.host.response(io, Duration::from_millis(300)).is_err(), "{kind:?}: answered over a broken link");
        raw.host.give(buffer);
        // The same host comes back at once.
        drop(raw);
        let mut again = setup.raw();
        let (_, io) = again.bring_up();
        if kind == WorkKind::Read {
            assert_eq!(again.read(io, 1, 0, 8).expect("a read"), [0x5a; 4096], "half a transfer was written");
        }
        again.alive(io);
    }
}

#[test]
fn key_withdrawn_under_a_transfer_ends_the_queue_and_writes_nothing() {
    let setup = LocalSetup::start();
    let bystander = setup.bystander();
    for opcode in [1, 2] {
        let (mut raw, _, io) = setup.ready();
        assert!(raw.write(io, 1, 0, &[0x5a; 4096]).is_success());
        let mut buffer = raw.host.take(4096).expect("memory");
        buffer.as_mut_slice().fill(0xa5);
        let mr = raw.host.register(farside::rdma::Access::Remote).expect("registered");
        let conn = raw.host.conn(io).expect("connected");
        let sgl = wire::keyed(buffer.addr(), 4096, mr.rkey, false);
        raw.host.send(io, &wire::block_command(opcode, 1, 0, 8).cid(1).sgl(sgl).0).expect("sent");
        setup.rig.local.faults().pause(conn);
        raw.host.deregister(mr);
        std::thread::sleep(Duration::from_millis(20));
        setup.rig.local.faults().resume(conn);
        // The target may have been quicker than the withdrawal; then it is answered.
        let ended = raw.host.response(io, Duration::from_secs(1)).is_err();
        raw.host.give(buffer);
        let mut fresh = setup.raw_as(3);
        let (_, io) = fresh.bring_up();
        if ended && opcode == 1 {
            assert_eq!(fresh.read(io, 1, 0, 8).expect("a read"), [0x5a; 4096]);
        }
    }
    bystander.check();
}

#[test]
fn failures_while_connecting_leave_nothing_behind() {
    let setup = LocalSetup::start();
    let local = &setup.rig.local;
    let mut raw = setup.raw();
    raw.admin_up();
    settles(local, "one connection", |counters| counters.queue_pairs == 2);
    for round in 0..20 {
        let faults = local.faults();
        match round % 3 {
            0 => faults.fail_create(1),
            1 => faults.fail_accept(1),
            _ => {}
        }
        let id = raw.host.start_connect(raw.address, RawQueue::new(1, 32), LIMIT).expect("asked for");
        if round % 3 == 2 {
            // The host loses patience before it is answered.
            raw.host.close(id);
        } else {
            assert!(raw.host.finish_connect(id, LIMIT).is_err(), "round {round}");
        }
    }
    settles(local, "connections that failed", |counters| counters.queue_pairs == 2);
    let io = raw.io_up(1, 32);
    raw.alive(io);
}

#[test]
fn everything_is_given_back_after_many_connections_and_at_the_end() {
    let mut setup = LocalSetup::start();
    let target = setup.target.take().expect("running");
    let hosts = |count: usize| {
        for _ in 0..count {
            let (mut raw, _, io) = setup.ready();
            assert!(raw.write(io, 1, 0, &[1; 8192]).is_success());
        }
        settles(&setup.rig.local, "hosts gone", |counters| counters.queue_pairs == 0);
    };
    hosts(8);
    let held = target.counters();
    hosts(200);
    // An endpoint with one registration per reactor. Receives of the shared queues may stay for the next host, as many as one host ever needed.
    settles(&setup.rig.local, "200 hosts gone", |counters| {
        (counters.queue_pairs, counters.receives <= 64) == (0, true) && counters.regions <= 2 && counters.endpoints <= 2
    });
    until("the target's own counters", || {
        let now = target.counters();
        (now.controllers, now.queues, now.requests, now.admin_pool_used, now.pool_used) == (0, 0, 0, 0, 0)
            && now.receives_free == held.receives_free
            && now.slots_used <= 64
            && now.pages_used == now.slots_used * 4096
    });
    target.shutdown();
    settles(&setup.rig.local, "the target gone", |counters| {
        (counters.queue_pairs, counters.regions, counters.endpoints, counters.receives) == (0, 0, 0, 0)
    });
}

#[test]
fn no_conforming_host_waits_for_a_receive_and_reads_stay_in_their_depth() {
    let setup = LocalSetup::start();
    exercise(&setup, 9);
    crate::raw_limits::whole_queue_at_once_is_served::<LocalRig>();
    let mut raw = setup.raw();
    raw.admin_up();
    let io = raw.io_up(1, 64);
    for round in 0..50u16 {
        for cid in 0..64 {
            let sqe = wire::block_command(1, 1, u64::from(cid), 1).cid(cid).sgl(wire::by_offset(0, 512, 0x01));
            raw.host.send(io, &[&sqe.0[..], &[round as u8; 512]].concat()).expect("sent");
        }
        for _ in 0..64 {
            assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
        }
    }
    let counters = setup.rig.local.counters();
    assert_eq!(counters.rnr_waits, 0, "{counters:?}");
    assert_eq!(counters.reads_over_depth, 0, "{counters:?}");
}

#[test]
fn removed_device_takes_its_connections_and_a_restored_one_is_listened_on_again() {
    let setup = LocalSetup::start();
    let (mut raw, _, io) = setup.ready();
    raw.alive(io);
    setup.rig.local.faults().remove_device();
    assert!(raw.host.end_of(io, LIMIT).is_some());
    drop(raw);
    // The admin queue and the I/O queue.
    counted(&setup, Cause::DeviceRemoved, 2);
    settles(&setup.rig.local, "the device's queue pairs", |counters| counters.queue_pairs == 0);
    setup.rig.local.faults().restore_device();
    let deadline = std::time::Instant::now() + LIMIT;
    let mut raw = setup.raw();
    while raw.queue(RawQueue::new(0, 32)).is_err() {
        assert!(std::time::Instant::now() < deadline, "the listener does not come back");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (_, io) = setup.raw_as(2).bring_up();
    let _ = io;
}

/// What the target's own device says of a peer that does not answer, or has no receive.
#[test]
fn peers_that_do_not_answer_are_told_apart() {
    let setup = LocalSetup::start();
    let (mut raw, _, io) = setup.ready();
    setup.faults.stall();
    raw.host.send(io, &wire::block_command(8, 1, 0, 1).cid(1).0).expect("sent");
    let target = setup.target.as_ref().expect("running");
    until("the disk has it", || target.counters().requests == 1);
    let conn = raw.host.conn(io).expect("connected");
    setup.rig.local.faults().cut(conn);
    setup.faults.release();
    counted(&setup, Cause::RetryExceeded, 1);
    setup.rig.local.faults().fatal_rnr(true);
    // Three answers at once, and one receive.
    let deaf = raw.queue(RawQueue { receives: 1, ..RawQueue::new(2, 32) }).expect("a connection");
    assert!(raw.connect_io(deaf, 2, 31).status().is_success());
    for cid in 0..3 {
        raw.host.post(deaf, &wire::block_command(8, 2, 0, 1).cid(cid).0).expect("posted");
    }
    raw.host.turn();
    counted(&setup, Cause::RnrRetryExceeded, 1);
}

#[test]
fn cut_cable_is_noticed_by_both_ends_and_no_write_is_lost() {
    let setup = LocalSetup::start();
    let options = HostOptions {
        io_queues: 2,
        queue_depth: 16,
        memory: 32 << 20,
        keep_alive: Duration::from_secs(2),
        io_timeout: Duration::from_secs(1),
        reconnect: Some(Reconnect { first: Duration::from_millis(10), ..Reconnect::default() }),
        ..HostOptions::default()
    };
    let (provider, _) = setup.rig.host();
    let mut host = Host::connect(provider, setup.rig.address(), NQN, options).expect("a connection");
    let mut next = 300;
    crate::load::mixed(&mut host, 0xcab1e, 1200, 64, |host, answered| {
        if answered >= next {
            // The admin queue's connection, then each I/O queue's: nobody is told.
            let qid = next as usize / 300 % 3;
            next += 300;
            if let Some(conn) = host.conn(qid) {
                setup.rig.local.faults().cut(conn);
            }
        }
    });
    let lost = std::iter::from_fn(|| host.next_event()).filter(|event| matches!(event, HostEvent::Lost(_))).count();
    assert!(lost >= 2, "lost {lost} times");
    // The target forgets what was cut: only the last association is left, on both ends.
    settles(&setup.rig.local, "cut connections", |counters| counters.queue_pairs <= 6);
}

/// `cargo test --release --test hosts null_nic -- --ignored --nocapture`
#[test]
#[ignore = "a figure, not a check: what target and host cost over the null NIC, one thread each"]
fn null_nic_figures() {
    let rig = LocalRig::new();
    let null = rig.local.with(LocalOptions { copied_transfers: 64, ..LocalOptions::default() });
    let setup = Setup::over(rig, Options { reactors: 1, ..small() }, null.clone());
    for (word, depth, in_capsule) in
        [("randread", 1, 0), ("randread", 32, 0), ("randwrite", 32, 4096), ("randwrite", 32, 0)]
    {
        let bench = BenchOptions {
            pattern: Pattern::parse(word, 0).expect("a word of fio's"),
            iodepth: depth,
            runtime: Duration::from_secs(2),
            nsid: 3,
            ..BenchOptions::default()
        };
        let options = HostOptions { in_capsule, ..HostOptions::default() };
        let provider = Arc::new(null.clone());
        let before = null.counters();
        let report = bench::run(provider, setup.rig.address(), NQN, &options, &bench, &Progress::default());
        let report = report.expect("a report");
        let (after, operations) = (null.counters(), report.reads.operations + report.writes.operations);
        println!(
            "{word} 4 KiB, depth {depth}, {in_capsule} B in the capsule: {:.0} IOPS, {} ns of processor per operation, \
             {:.2} completions and {:.2} doorbells per operation, both ends",
            report.iops(),
            report.cpu_per_operation().as_nanos(),
            (after.completions - before.completions) as f64 / operations as f64,
            (after.doorbells - before.doorbells) as f64 / operations as f64,
        );
    }
}

#[test]
fn shutdown_under_load_ends_in_time() {
    let mut setup = LocalSetup::start();
    let (mut raw, _, io) = setup.ready();
    let buffer = raw.host.take(4096).expect("memory");
    let sgl = raw.keyed(&buffer, 4096);
    setup.faults.stall();
    for cid in 0..16 {
        raw.host.post(io, &wire::block_command(1, 1, 0, 8).cid(cid).sgl(sgl).0).expect("posted");
    }
    raw.host.turn();
    std::thread::sleep(Duration::from_millis(20));
    let faults = setup.faults.clone();
    let released = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3));
        faults.release();
    });
    let started = std::time::Instant::now();
    setup.target.take().expect("running").shutdown();
    assert!(started.elapsed() < Duration::from_secs(6), "shutdown took {:?}", started.elapsed());
    released.join().expect("released");
}
