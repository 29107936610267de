//! What one host cannot take from another: receives, and data buffers.

use std::time::{Duration, Instant};

use farside::host::raw::RawQueue;
use farside::host::wire;
use farside::target::{Cause, Options};

use crate::rig::{LIMIT, Raw, Rig, Setup, small};

const TRANSFER: u32 = 128 << 10;

/// A target that has little of everything.
fn scarce() -> Options {
    Options { reactors: 1, pool_size: 4 << 20, receive_slots: 256, ..small() }
}

fn another_host<R: Rig>(setup: &Setup<R>, name: &str) -> Raw<R> {
    let mut raw = setup.raw_as(name.len() as u8);
    raw.hostnqn = format!("nqn.2026-11.io.example:{name}");
    raw
}

/// Connects a host whose queues have so many entries in all.
fn fill<R: Rig>(raw: &mut Raw<R>, mut entries: u16) {
    raw.admin_up();
    entries -= 32;
    for qid in 1.. {
        if entries == 0 {
            return;
        }
        let part = entries.min(96);
        let io = raw.io_up(qid, part);
        raw.alive(io);
        entries -= part;
    }
}

fn until_no_queue_is_left<R: Rig>(setup: &Setup<R>) {
    let target = setup.target.as_ref().expect("running");
    crate::rig::until("all queues gone", || target.counters().queues == 0);
}

/// Receives in a shared queue cannot be taken back.
pub(crate) fn receives_of_ended_io_queues_serve_admin_queues<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), scarce());
    for _ in 0..2 {
        let mut full = setup.raw();
        fill(&mut full, 256);
        drop(full);
        until_no_queue_is_left(&setup);
    }
    let mut hosts: Vec<Raw<R>> = (0..8).map(|_| setup.raw()).collect();
    for raw in &mut hosts {
        let admin = raw.admin_up();
        // More commands than the queue has entries.
        for _ in 0..80 {
            assert!(raw.call(admin, wire::property_get(0x1c, false)).status().is_success());
        }
    }
    // The ninth host finds no receive.
    let status = setup.raw().rejected(RawQueue::new(0, 32));
    assert_eq!(status, Some(6), "no resources");
}

pub(crate) fn receives_of_an_idle_device_serve_another<R: Rig>() {
    let rig = R::new();
    let (provider, second) = (rig.target(), rig.another());
    let setup = Setup::built(rig, scarce(), provider, |builder| builder.listen(second));
    for round in 0..4 {
        let mut full = setup.raw();
        if round % 2 == 1 {
            full.address = second;
        }
        fill(&mut full, 256);
        drop(full);
        until_no_queue_is_left(&setup);
    }
}

/// Fills the pool with what a stalled disk holds; another host's large reads go on.
pub(crate) fn commands_of_a_stalled_disk_leave_buffers_to_other_hosts<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), scarce());
    let (mut raw, ..) = setup.ready();
    let io = raw.io_up(2, 64);
    let buffer = raw.host.take(TRANSFER as usize).expect("memory");
    let sgl = raw.keyed(&buffer, TRANSFER as usize);
    setup.faults.stall();
    for cid in 0..64u16 {
        let sqe = wire::block_command(2, 1, u64::from(cid), TRANSFER / 512).cid(cid).sgl(sgl);
        raw.host.post(io, &sqe.0).expect("posted");
    }
    raw.host.turn();
    let mut other = another_host(&setup, "other");
    let (_, other_io) = other.bring_up();
    let begun = Instant::now();
    for _ in 0..50 {
        other.read(other_io, 2, 0, TRANSFER / 512).expect("a read");
        raw.host.turn();
    }
    assert!(begun.elapsed() < Duration::from_secs(3), "50 reads took {:?}", begun.elapsed());
    setup.faults.release();
    for _ in 0..64 {
        assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    }
    raw.host.give(buffer);
}

/// A queue that posts no receives keeps the buffers of its reads, until others want them.
pub(crate) fn who_takes_no_answers_loses_its_buffers_when_others_wait<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), scarce());
    let mut raw = setup.raw();
    raw.admin_up();
    let silent = RawQueue { receives: 0, ..RawQueue::new(1, 64) };
    let io = raw.queue(silent).expect("a connection");
    let (data, buffer) = (raw.connect_data(raw.cntlid), raw.host.take(TRANSFER as usize).expect("memory"));
    let connect = wire::connect(1, 63, 0).sgl(wire::by_offset(0, 1024, 0x01));
    raw.host.send(io, &[&connect.0[..], &data].concat()).expect("sent");
    let sgl = raw.keyed(&buffer, TRANSFER as usize);
    for cid in 0..60u16 {
        let sqe = wire::block_command(2, 2, 0, TRANSFER / 512).cid(cid).sgl(sgl);
        raw.host.post(io, &sqe.0).expect("posted");
    }
    // Nobody else wants them: it may keep them.
    assert!(raw.host.end_of(io, Duration::from_secs(12)).is_none(), "it was closed though nobody waited");
    let mut other = another_host(&setup, "other");
    let (_, other_io) = other.bring_up();
    let begun = Instant::now();
    // More at once than what is left for it.
    let theirs = other.host.take(512 << 10).expect("memory");
    let large = other.keyed(&theirs, 512 << 10);
    let mut reads = 0;
    while raw.host.down(io).is_none() {
        for cid in 0..8u16 {
            let sqe = wire::block_command(2, 3, 0, 1024).cid(cid).sgl(large);
            other.host.post(other_io, &sqe.0).expect("posted");
        }
        for _ in 0..8 {
            raw.host.turn();
            assert!(other.host.response(other_io, LIMIT).expect("an answer").status().is_success());
            reads += 1;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it was not closed; {reads} reads");
    }
    assert!(begun.elapsed() >= Duration::from_secs(8), "closed after {:?}", begun.elapsed());
    assert!(reads > 100, "the other host did {reads} reads");
    other.host.give(theirs);
    other.alive(other_io);
    let ends = setup.target.as_ref().expect("running").counters().ends;
    assert_eq!(ends.of(Cause::KeepsBuffers), 1, "{ends:?}");
    raw.host.give(buffer);
}
