//! Full queues, stalled disks, vanished hosts.

use std::time::{Duration, Instant};

use farside::host::raw::{RawQueue, RawQueueId};
use farside::host::wire::{self, Sqe};
use farside::target::{Options, Target};
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, Raw, Rig, SHORT_KATO, Setup, Silence, assert_status, small, within_short_kato};

pub(crate) fn whole_queue_at_once_is_served<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.admin_up();
    for (qid, entries) in [(1u16, 2u16), (2, 128), (3, 1024)] {
        let io = raw.queue(RawQueue { capsule: 576, ..RawQueue::new(qid, entries) }).expect("a connection");
        assert!(raw.connect_io(io, qid, entries - 1).status().is_success());
        for round in 0..4u8 {
            let bytes = [round; 512];
            let capsules = if entries == 2 { 2 } else { entries };
            for cid in 0..capsules {
                let sqe = wire::block_command(1, 1, cid.into(), 1).cid(cid).sgl(wire::by_offset(0, 512, 0x01));
                raw.host.post(io, &[&sqe.0[..], &bytes].concat()).expect("posted");
            }
            let mut answered = vec![false; capsules.into()];
            for _ in 0..capsules {
                let response = raw.host.response(io, LIMIT).expect("an answer");
                assert!(response.status().is_success(), "{}", response.status());
                let seen = &mut answered[usize::from(response.cid())];
                assert!(!std::mem::replace(seen, true), "{} was answered twice", response.cid());
                assert!(response.sqhd() < entries, "SQHD {} of {entries}", response.sqhd());
            }
            // Sent-completions come before the next round's capsules can be posted.
            let deadline = Instant::now() + LIMIT;
            while raw.read(io, 1, 0, 1).expect("a read") != bytes {
                assert!(Instant::now() < deadline);
            }
        }
    }
}

pub(crate) fn stalled_disk_leaves_admin_commands_alone<R: Rig>() {
    let mut options = small();
    // A pool that the stalled commands exhaust.
    options.pool_size = 4 << 20;
    let setup = Setup::<R>::with(R::new(), options);
    let mut raw = setup.raw();
    raw.kato_ms = 60_000;
    let (admin, _) = raw.bring_up();
    let io = raw.io_up(2, 256);
    let buffer = raw.host.take(64 << 10).expect("memory");
    setup.faults.stall();
    let sgl = raw.keyed(&buffer, 64 << 10);
    for cid in 0..200u16 {
        let sqe = wire::block_command(1 + (cid as u8 & 1), 1, u64::from(cid) * 128, 128).cid(cid).sgl(sgl);
        raw.host.post(io, &sqe.0).expect("posted");
    }
    raw.host.turn();
    // Keep Alive, Identify, Abort, and a whole new host, while nothing of the disk moves.
    for round in 0..20 {
        assert!(raw.call(admin, Sqe::new(0x18)).status().is_success(), "Keep Alive, round {round}");
        let (response, _) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
        assert!(response.status().is_success(), "Identify, round {round}");
    }
    let mut newcomer = setup.raw_as(4);
    let started = Instant::now();
    newcomer.bring_up();
    assert!(started.elapsed() < Duration::from_secs(5), "a new host took {:?}", started.elapsed());
    assert_eq!(raw.host.waiting(io), 0, "the disk is stalled");
    setup.faults.release();
    for _ in 0..200 {
        let response = raw.host.response(io, LIMIT).expect("an answer");
        assert!(response.status().is_success(), "{}", response.status());
    }
    raw.host.give(buffer);
}

pub(crate) fn aborts_of_stalled_commands_are_answered_and_harm_nobody<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, _) = setup.ready();
    let io = raw.io_up(2, 64);
    let buffer = raw.host.take(4096).expect("memory");
    let sgl = raw.keyed(&buffer, 4096);
    for round in 0..10 {
        setup.faults.stall();
        for cid in 0..32u16 {
            let sqe = wire::block_command([1, 2, 5, 8][usize::from(cid) % 4], 1, u64::from(cid) * 8, 8);
            raw.host.post(io, &sqe.cid(cid).sgl(sgl).0).expect("posted");
        }
        raw.host.turn();
        for cid in (0..32u32).step_by(3) {
            let response = raw.call(admin, Sqe::new(0x08).cdw(10, 2 | cid << 16));
            assert!(response.status().is_success(), "Abort: {}", response.status());
        }
        setup.faults.release();
        let mut answered = [false; 32];
        for _ in 0..32 {
            let response = raw.host.response(io, LIMIT).expect("an answer");
            let allowed = [Status::SUCCESS.code(), Status::ABORT_REQUESTED.code(), Status::COMPARE_FAILURE.code()];
            assert!(allowed.contains(&response.status().code()), "{}", response.status());
            assert!(!std::mem::replace(&mut answered[usize::from(response.cid())], true), "round {round}: twice");
        }
    }
    raw.host.give(buffer);
    raw.alive(io);
    bystander.check();
}

/// Brings the disk to a stand, and a command of each opcode to it.
fn stall_with<R: Rig>(setup: &Setup<R>, raw: &mut Raw<R>, io: RawQueueId, sgl: [u8; 16], opcodes: &[u8]) {
    setup.faults.stall();
    for (cid, opcode) in (0u16..).zip(opcodes) {
        let sqe = wire::block_command(*opcode, 1, u64::from(cid) * 8, 8);
        raw.host.post(io, &sqe.cid(cid).sgl(sgl).0).expect("posted");
    }
    setup.until_held(raw, opcodes.len());
}

/// Commands that the storage failed, of all namespaces.
fn failed_by(target: &Target) -> u64 {
    target.status().subsystems.iter().flat_map(|subsystem| &subsystem.namespaces).map(|one| one.io.errors).sum()
}

/// Dword 0, bit 0 of the answer to Abort: 0 = the command was aborted.
fn abort<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId, cid: u16) -> bool {
    let response = raw.call(admin, Sqe::new(0x08).cdw(10, 1 | u32::from(cid) << 16));
    assert!(response.status().is_success(), "Abort: {}", response.status());
    response.dword0() & 1 == 0
}

pub(crate) fn aborted_commands_end_while_the_disk_is_stalled<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let buffer = raw.host.take(4096).expect("memory");
    let sgl = raw.keyed(&buffer, 4096);
    // Write, Read, Compare, Write Zeroes.
    let opcodes = [1, 2, 5, 8, 1, 2, 5, 8];
    stall_with(&setup, &mut raw, io, sgl, &opcodes);
    for cid in 0..4 {
        assert!(abort(&mut raw, admin, cid), "opcode {}: not aborted", opcodes[usize::from(cid)]);
        let response = raw.host.response(io, LIMIT).expect("an answer while the disk is stalled");
        assert_eq!(response.cid(), cid);
        assert_status(&response, Status::ABORT_REQUESTED, "an aborted command");
    }
    let target = setup.target.as_ref().expect("running");
    let errors = target.status().hosts.iter().map(|host| host.io.errors).sum::<u64>();
    assert_eq!((errors, failed_by(target)), (0, 0), "what a host has aborted is no error");
    let (response, log) = raw.call_for(admin, wire::get_log_page(2, u32::MAX, 0, 512, false), 512);
    assert!(response.status().is_success());
    assert_eq!(log[160..176], [0; 16], "SMART: Media and Data Integrity Errors");
    assert!(!abort(&mut raw, admin, 0x77), "a command that there is not was aborted");
    assert_eq!(raw.host.waiting(io), 0, "the others wait for the disk");
    setup.faults.release();
    for _ in 4..8 {
        let response = raw.host.response(io, LIMIT).expect("an answer");
        let expected = [Status::SUCCESS.code(), Status::COMPARE_FAILURE.code()];
        assert!(response.cid() >= 4 && expected.contains(&response.status().code()), "{}", response.status());
    }
    // A disk that cannot end a command early: the host is told that it goes on, and it does.
    setup.faults.ignore_cancel(true);
    stall_with(&setup, &mut raw, io, sgl, &[2, 8]);
    for cid in 0..2 {
        assert!(!abort(&mut raw, admin, cid), "the disk has it, and it was called aborted");
    }
    assert_eq!(raw.host.waiting(io), 0, "answered before the disk did it");
    setup.faults.release();
    for _ in 0..2 {
        let response = raw.host.response(io, LIMIT).expect("an answer");
        assert!(response.status().is_success(), "{}", response.status());
    }
    raw.host.give(buffer);
    raw.alive(io);
}

pub(crate) fn who_takes_no_answers_is_closed_and_nobody_else<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), Options { reactors: 1, ..small() });
    let bystander = setup.bystander();
    let mut raw = setup.raw();
    // Small queues that post no receives: far more commands than they have entries are answered, and none of that arrives.
    let greedy: Vec<_> = (0..220)
        .map(|_| {
            let queue = RawQueue { entries: 24, receives: 0, capsule: 64, ..RawQueue::new(1, 2) };
            raw.queue(queue).expect("a connection")
        })
        .collect();
    for queue in &greedy {
        for cid in 0..22 {
            // Refused once the queue is closed.
            let _ = raw.host.post(*queue, &Sqe::new(0).nsid(1).cid(cid).0);
        }
    }
    assert!(raw.host.end_of(greedy[0], LIMIT).is_some(), "it was not closed");
    bystander.check();
    let (mut other, _, io) = setup.ready();
    other.alive(io);
}

pub(crate) fn connections_without_a_connect_command_are_closed<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), Options { connect_timeout: Duration::from_secs(1), ..small() });
    let bystander = setup.bystander();
    let mut raw = setup.raw();
    // One says nothing, the Connect command of another is refused.
    let begun = Instant::now();
    let silent = raw.good_queue(0, 32);
    let refused = raw.good_queue(0, 32);
    let response = raw.call_with(refused, wire::connect(0, 0, 0), &raw.connect_data(0xffff));
    assert_status(&response, Status::CONNECT_INVALID_PARAMETERS, "SQSIZE 0");
    for queue in [silent, refused] {
        assert!(raw.host.end_of(queue, LIMIT).is_some(), "the connection is kept");
        let after = begun.elapsed();
        assert!(after >= Duration::from_millis(900) && after < Duration::from_secs(6), "after {after:?}");
    }
    let (admin, io) = raw.bring_up();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(raw.host.down(io).is_none() && raw.host.down(admin).is_none(), "a connected queue was closed");
    raw.alive(io);
    bystander.check();
}

pub(crate) fn vanished_host_is_forgotten_after_its_keep_alive<R: Rig>() {
    within_short_kato(vanishes::<R>);
}

fn vanishes<R: Rig>(silence: &mut Silence) {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.kato_ms = SHORT_KATO;
    let (admin, io) = silence.broken_by(|| raw.bring_up());
    // The disk hangs and the host is busy waiting for it, but alive.
    setup.faults.stall();
    let buffer = raw.host.take(4096).expect("memory");
    let sgl = raw.keyed(&buffer, 4096);
    raw.host.send(io, &wire::block_command(2, 1, 0, 8).cid(1).sgl(sgl).0).expect("sent");
    let alive_until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < alive_until {
        let answer = silence.broken_by(|| raw.call(admin, Sqe::new(0x18)));
        assert!(answer.status().is_success(), "Keep Alive");
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(raw.host.down(io).is_none() && raw.host.down(admin).is_none());
    setup.faults.release();
    assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    // Now it falls silent.
    let silent = silence.begins();
    assert!(raw.host.end_of(admin, LIMIT).is_some(), "a silent host keeps its controller");
    assert!(raw.host.end_of(io, LIMIT).is_some());
    let after = silent.elapsed();
    assert!(after >= Duration::from_millis(900) && after < Duration::from_secs(8), "after {after:?}");
}

/// TBKAS: commands of any queue keep the association alive, without one Keep Alive command.
pub(crate) fn io_alone_keeps_the_association_alive<R: Rig>() {
    within_short_kato(works::<R>);
}

fn works<R: Rig>(silence: &mut Silence) {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.kato_ms = SHORT_KATO;
    let (admin, io) = silence.broken_by(|| raw.bring_up());
    let (_, identify) = silence.broken_by(|| raw.call_for(admin, wire::identify(1, 0, 0), 4096));
    assert_eq!(identify[96] >> 6 & 1, 1, "CTRATT says TBKAS");
    // Four times the timeout, and nothing at all on the admin queue.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        silence.broken_by(|| raw.alive(io));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(raw.host.down(io).is_none() && raw.host.down(admin).is_none(), "it was taken for dead");
    let answer = silence.broken_by(|| raw.call(admin, wire::property_get(0x1c, false)));
    assert!(answer.status().is_success());
    // And it is no timeout that never comes.
    let silent = silence.begins();
    assert!(raw.host.end_of(io, LIMIT).is_some(), "a silent host keeps its controller");
    assert!(silent.elapsed() >= Duration::from_millis(900), "after {:?}", silent.elapsed());
}

/// What full queues ask for does not stand before the admin queue's commands.
pub(crate) fn keep_alives_are_answered_beside_full_queues<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.kato_ms = 5000;
    let (admin, _) = raw.bring_up();
    let queues = [raw.io_up(2, 48), raw.io_up(3, 48)];
    let buffer = raw.host.take(64 << 10).expect("memory");
    let sgl = raw.keyed(&buffer, 64 << 10);
    for round in 0..5 {
        for cid in 0..47u16 {
            for (at, io) in queues.into_iter().enumerate() {
                let sqe = wire::block_command(1 + at as u8, 3, u64::from(cid) * 128, 128).cid(cid).sgl(sgl);
                raw.host.post(io, &sqe.0).expect("posted");
            }
        }
        raw.host.turn();
        let asked = Instant::now();
        assert!(raw.call(admin, Sqe::new(0x18)).status().is_success(), "Keep Alive, round {round}");
        assert!(asked.elapsed() < Duration::from_secs(2), "round {round}: after {:?}", asked.elapsed());
        for io in queues {
            for _ in 0..47 {
                assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
            }
        }
    }
    raw.host.give(buffer);
}

/// CC.EN goes to 0 while the disk has commands: CSTS.RDY goes to 0 when they have ended, and no write of the old life lands in
/// the next one.
pub(crate) fn reset_under_io_lets_no_old_write_land<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, mut io) = setup.ready();
    for round in 1..=6u8 {
        let mut buffer = raw.host.take(4096).expect("memory");
        buffer.as_mut_slice().fill(0xee);
        let sgl = raw.keyed(&buffer, 4096);
        setup.faults.stall();
        for cid in 0..16u16 {
            let sqe = wire::block_command(1 + (cid as u8 & 1), 1, u64::from(cid / 2) * 8, 8);
            raw.host.post(io, &sqe.cid(cid).sgl(sgl).0).expect("posted");
        }
        setup.until_held(&mut raw, 16);
        assert!(raw.call(admin, wire::property_set(0x14, 0x0046_0000)).status().is_success());
        assert!(raw.host.end_of(io, LIMIT).is_some(), "the I/O queue survived a reset");
        for _ in 0..5 {
            let csts = raw.call(admin, wire::property_get(0x1c, false)).dword0();
            assert_eq!(csts & 1, 1, "round {round}: CSTS.RDY is 0 while the disk holds writes");
            std::thread::sleep(Duration::from_millis(5));
        }
        setup.faults.release();
        let deadline = Instant::now() + LIMIT;
        while raw.call(admin, wire::property_get(0x1c, false)).dword0() & 1 == 1 {
            assert!(Instant::now() < deadline, "the reset never completes");
        }
        raw.enable(admin);
        io = raw.io_up(1, 32);
        for at in 0..8 {
            assert!(raw.write(io, 1, at * 8, &[round; 4096]).is_success());
        }
        assert_eq!(raw.read(io, 1, 0, 64).expect("a read"), [round; 64 * BLOCK]);
        raw.host.give(buffer);
    }
    bystander.check();
}

pub(crate) fn ended_queues_with_commands_in_the_disk_come_back_to_zero<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    for round in 0..10 {
        let (mut raw, admin, io) = setup.ready();
        let buffer = raw.host.take(64 << 10).expect("memory");
        let sgl = raw.keyed(&buffer, 64 << 10);
        setup.faults.stall();
        for cid in 0..30u16 {
            raw.host
                .post(io, &wire::block_command(1 + (cid as u8 & 1), 1, 0, 128).cid(cid).sgl(sgl).0)
                .expect("posted");
        }
        for cid in 0..3 {
            raw.host.post(admin, &Sqe::new(0x0c).cid(cid).0).expect("posted");
        }
        raw.host.turn();
        match round % 3 {
            0 => raw.host.close(io),
            1 => raw.host.close(admin),
            _ => drop(raw),
        }
        std::thread::sleep(Duration::from_millis(10));
        setup.faults.release();
    }
    // The same identity connects and works: no write of the past stands in its way for ever.
    let (mut raw, _, io) = setup.ready();
    assert!(raw.write(io, 1, 0, &[7; 4096]).is_success());
    assert_eq!(raw.read(io, 1, 0, 8).expect("a read"), [7; 4096]);
    bystander.check();
}
