//! Who sees which namespace, how many controllers there are, what one host may do to all, how much each may do.

use std::time::{Duration, Instant};

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use farside::target::{Admission, AnaState, Duplicates, Limits, Options, Target};
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, NQN, OTHER_NQN, Raw, Rig, Setup, assert_status, small, until};

const OTHER_HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:99999999-2222-3333-4444-555555555555";

fn target<R: Rig>(setup: &Setup<R>) -> &Target {
    setup.target.as_ref().expect("a target")
}

/// A host of another name and identifier.
fn other<R: Rig>(setup: &Setup<R>) -> Raw<R> {
    let mut raw = setup.raw_as(4);
    raw.hostnqn = OTHER_HOST.into();
    raw
}

fn active<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Vec<u32> {
    let (response, list) = raw.call_for(admin, wire::identify(2, 0, 0), 4096);
    assert!(response.status().is_success(), "{}", response.status());
    let (nsids, _) = list.as_chunks::<4>();
    nsids.iter().map(|nsid| u32::from_le_bytes(*nsid)).take_while(|nsid| *nsid != 0).collect()
}

pub(crate) fn a_namespace_is_not_there_for_hosts_that_may_not_see_it<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut first, admin1, io1) = setup.ready();
    let mut second = other(&setup);
    let (admin2, io2) = second.bring_up();
    for (raw, admin) in [(&mut first, admin1), (&mut second, admin2)] {
        raw.host.send(admin, &Sqe::new(0x0c).cid(0x900).0).expect("sent");
    }
    let bytes = [7; BLOCK];
    assert!(second.write(io2, 1, 0, &bytes).is_success());
    target(&setup).set_namespace_hosts(NQN, 1, Some(&[first.hostnqn.clone()])).expect("a mask");
    let event = second.host.response(admin2, LIMIT).expect("an event");
    assert_eq!((event.cid(), event.dword0()), (0x900, 0x0004_0002), "namespace attributes");
    let (_, changed) = second.call_for(admin2, wire::get_log_page(4, 0xffff_ffff, 0, 4096, false), 4096);
    assert_eq!(changed[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((active(&mut first, admin1), active(&mut second, admin2)), (vec![1, 2, 3], vec![2, 3]));
    // Number 9 is nobody's: the answers are the same, whatever the command.
    let commands = |nsid| {
        let writes = Sqe::new(0).nsid(nsid);
        [wire::block_command(0x0c, nsid, 0, 1), wire::block_command(8, nsid, 0, 1), writes]
    };
    for (hidden, absent) in commands(1).into_iter().zip(commands(9)) {
        let (hidden, absent) = (second.call(io2, hidden), second.call(io2, absent));
        assert_eq!(
            (hidden.status(), absent.status()),
            (Status::INVALID_NAMESPACE.dnr(), Status::INVALID_NAMESPACE.dnr())
        );
    }
    assert_status(&second.call_for(io2, wire::block_command(2, 1, 0, 1), BLOCK).0, Status::INVALID_NAMESPACE, "Read");
    for cns in [0, 3, 8] {
        let answers = [1, 9].map(|nsid| second.call_for(admin2, wire::identify(cns, nsid, 0), 4096));
        assert_eq!(answers[0].0.status(), answers[1].0.status(), "CNS {cns}");
        assert!(answers[0].1 == answers[1].1, "CNS {cns}");
    }
    assert_eq!(first.read(io1, 1, 0, 1).expect("a read"), bytes, "the other host sees it");
    assert_eq!(first.host.waiting(admin1), 0, "and hears of nothing");
    target(&setup).set_namespace_hosts(NQN, 1, None).expect("no mask");
    assert_eq!(second.read(io2, 1, 0, 1).expect("a read"), bytes);
    assert_eq!(active(&mut second, admin2), [1, 2, 3]);
    assert!(target(&setup).set_namespace_hosts(NQN, 9, None).is_err(), "no such namespace");
}

pub(crate) fn a_mask_waits_for_commands_in_progress<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = setup.ready();
    setup.faults.stall();
    raw.host.send(io, &wire::block_command(8, 1, 0, 1).cid(0x100).0).expect("sent");
    setup.until_held(&mut raw, 1);
    let target = target(&setup);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| target.set_namespace_hosts(NQN, 1, Some(&[])).expect("a mask"));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!change.is_finished(), "a write that could still land was not waited for");
        setup.faults.release();
        change.join().expect("the change");
    });
    assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    assert_status(&raw.call(io, wire::block_command(8, 1, 0, 1)), Status::INVALID_NAMESPACE, "what comes later");
}

pub(crate) fn controllers_have_limits_and_duplicates_a_policy<R: Rig>() {
    let setup = Setup::<R>::start();
    let connect = |raw: &mut Raw<R>| {
        let admin = raw.good_queue(0, 32);
        let response = raw.connect_admin(admin);
        (admin, response.status())
    };
    let admission = Admission { controllers_per_host: Some(1), ..Admission::default() };
    target(&setup).set_admission(NQN, admission).expect("a limit");
    let (mut first, mut second, mut third) = (setup.raw(), setup.raw(), other(&setup));
    let (admin, status) = connect(&mut first);
    assert!(status.is_success());
    let (refused, status) = connect(&mut second);
    assert_eq!(status, Status::CONNECT_CONTROLLER_BUSY, "come back later");
    second.host.close(refused);
    assert!(connect(&mut third).1.is_success(), "another host");
    target(&setup)
        .set_admission(NQN, Admission { duplicates: Duplicates::Refuse, ..Admission::default() })
        .expect("set");
    assert_eq!(connect(&mut second).1, Status::CONNECT_CONTROLLER_BUSY);
    target(&setup)
        .set_admission(NQN, Admission { duplicates: Duplicates::Replace, ..Admission::default() })
        .expect("set");
    assert!(connect(&mut second).1.is_success());
    assert!(first.host.end_of(admin, LIMIT).is_some(), "the earlier association ends");
}

pub(crate) fn a_host_that_takes_its_own_place_waits_for_its_old_writes<R: Rig>() {
    for duplicates in [Duplicates::Replace, Duplicates::Allow] {
        old_writes_come_first::<R>(duplicates);
    }
}

/// With `Allow` the old life is still there: it may be a host that lost its power, and nobody knows yet.
fn old_writes_come_first<R: Rig>(duplicates: Duplicates) {
    let setup = Setup::<R>::start();
    target(&setup).set_admission(NQN, Admission { duplicates, ..Admission::default() }).expect("set");
    let (mut old, _, old_io) = setup.ready();
    let sleeping = old.host.take(BLOCK).map(|mut buffer| {
        buffer.as_mut_slice().fill(1);
        buffer
    });
    let buffer = sleeping.expect("memory");
    let sgl = old.keyed(&buffer, BLOCK);
    setup.faults.stall();
    old.host.send(old_io, &wire::block_command(1, 1, 5, 1).cid(0x77).sgl(sgl).0).expect("sent");
    setup.until_held(&mut old, 1);
    // Another machine of the same name.
    let mut new = setup.raw_as(if duplicates == Duplicates::Replace { 9 } else { 1 });
    let (_, io) = new.bring_up();
    match duplicates {
        Duplicates::Replace => assert!(old.host.end_of(old_io, LIMIT).is_some(), "the old one ends"),
        _ => assert_eq!(new.hostid, old.hostid),
    }
    let mut own = new.host.take(BLOCK).expect("memory");
    own.as_mut_slice().fill(2);
    let sgl = new.keyed(&own, BLOCK);
    new.host.send(io, &wire::block_command(1, 1, 5, 1).cid(0x78).sgl(sgl).0).expect("sent");
    std::thread::sleep(Duration::from_millis(200));
    new.host.turn();
    assert_eq!(new.host.waiting(io), 0, "it does not wait for the old write");
    setup.faults.release();
    assert!(new.host.response(io, LIMIT).expect("an answer").status().is_success());
    assert_eq!(new.read(io, 1, 5, 1).expect("a read"), [2; BLOCK], "the old write landed after the new one");
}

pub(crate) fn a_subsystem_reset_disconnects_its_hosts_and_no_others<R: Rig>() {
    let setup = Setup::<R>::with(R::new(), Options { subsystem_reset: true, ..small() });
    let (mut first, admin, io) = setup.ready();
    let mut second = other(&setup);
    let (_, second_io) = second.bring_up();
    let mut third = setup.raw_as(6);
    third.subnqn = OTHER_NQN.into();
    let (third_admin, _) = third.bring_up();
    assert_eq!(first.call(admin, wire::property_get(0, true)).result() >> 36 & 1, 1, "CAP.NSSRS");
    assert!(first.call(admin, wire::property_set(0x20, 0x4e56_4d65)).status().is_success());
    assert!(first.host.end_of(io, LIMIT).is_some());
    assert!(second.host.end_of(second_io, LIMIT).is_some());
    assert!(third.call(third_admin, wire::property_get(0x1c, false)).status().is_success());
    let (mut again, admin, io) = setup.ready();
    assert_eq!(again.call(admin, wire::property_get(0x1c, false)).dword0(), 0x11, "ready, and reset once");
    again.alive(io);
}

pub(crate) fn retry_delays_come_with_what_passes<R: Rig>() {
    let options = Options { retry_delay: Duration::from_millis(300), ..small() };
    let setup = Setup::<R>::with(R::new(), options);
    let (mut raw, admin, io) = setup.ready();
    let (_, identify) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(identify[128..134], [3, 0, 0, 0, 0, 0]);
    target(&setup).set_ana_state(NQN, 1, None, AnaState::Change).expect("a state");
    let flush = Sqe::new(0).nsid(1);
    assert_eq!(raw.call(io, flush).status(), Status::ANA_TRANSITION);
    let mut behavior = [0; 512];
    behavior[0] = 1;
    assert!(raw.call_with(admin, Sqe::new(0x09).cdw(10, 0x16), &behavior).status().is_success());
    assert_eq!(raw.call(io, flush).status(), Status::ANA_TRANSITION.retry_later());
}

/// How many reads are asked for at once, and how many a second a limit lets through.
const READS: u32 = 30;
const IOPS: u64 = 20;

/// How long reads of one block take that are asked for together: a host that seldom has its turn needs few.
fn reads<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, nsid: u32) -> Duration {
    let buffer = raw.host.take(BLOCK).expect("memory");
    let sqe = wire::block_command(2, nsid, 0, 1).sgl(raw.keyed(&buffer, BLOCK));
    let begun = Instant::now();
    for _ in 0..READS {
        let cid = raw.cid();
        raw.host.post(io, &sqe.cid(cid).0).expect("posted");
    }
    for _ in 0..READS {
        assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    }
    raw.host.give(buffer);
    begun.elapsed()
}

/// The reads take as long as [`IOPS`] says, or no time worth naming. They never take less; that they take no more has three
/// attempts, as a busy machine may be what delays them.
fn rate<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, nsid: u32, limited: bool, what: &str) {
    // How exact limits are is for the simulation to say.
    let exact = Duration::from_secs((READS - 1).into()) / IOPS as u32;
    let (least, most) = if limited { (exact * 9 / 10, exact * 2) } else { (Duration::ZERO, exact / 2) };
    let mut took = Vec::new();
    while took.len() < 3 {
        let now = reads(raw, io, nsid);
        assert!(now >= least, "{what}: {READS} reads took {now:?}");
        if now <= most {
            return;
        }
        took.push(now);
    }
    panic!("{what}: {READS} reads took {took:?}");
}

pub(crate) fn limits_hold_while_they_are_set<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = setup.ready();
    let limits = Limits { iops: IOPS, ..Limits::default() };
    target(&setup).set_host_limits(NQN, &raw.hostnqn, limits).expect("set");
    rate(&mut raw, io, 1, true, "of the host");
    target(&setup).set_host_limits(NQN, &raw.hostnqn, Limits::default()).expect("set");
    target(&setup).set_namespace_limits(NQN, 1, limits).expect("set");
    rate(&mut raw, io, 1, true, "of the namespace");
    rate(&mut raw, io, 2, false, "of another namespace");
    let bytes = Limits { bandwidth: IOPS * BLOCK as u64, ..Limits::default() };
    target(&setup).set_namespace_limits(NQN, 1, bytes).expect("set");
    rate(&mut raw, io, 1, true, "of bytes");
    target(&setup).set_namespace_limits(NQN, 1, Limits::default()).expect("set");
    rate(&mut raw, io, 1, false, "of nothing");
    assert!(target(&setup).set_namespace_limits(NQN, 9, limits).is_err(), "no such namespace");
}

pub(crate) fn commands_held_back_end_like_any_others<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, io) = setup.ready();
    let slow = Limits { iops: 1, ..Limits::default() };
    target(&setup).set_namespace_limits(NQN, 1, slow).expect("set");
    let flush = |cid| Sqe::new(0).nsid(1).cid(cid).0;
    for cid in 0x100..0x108 {
        raw.host.send(io, &flush(cid)).expect("sent");
    }
    assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success(), "the first has its turn");
    // Aborted while it waits; the queues' packets need not be in order, so the first Abort may come before it.
    until("one that waits is aborted", || {
        let response = raw.call(admin, Sqe::new(0x08).cdw(10, 1 | 0x107 << 16));
        response.dword0() & 1 == 0
    });
    // Where this took long some had their turn.
    let mut left = 6;
    let ended = loop {
        let response = raw.host.response(io, LIMIT).expect("an answer");
        if response.cid() == 0x107 {
            break response;
        }
        assert!(response.status().is_success(), "{}", response.status());
        left -= 1;
    };
    assert_eq!(ended.status(), Status::ABORT_REQUESTED);
    // A limit that goes lets all go on at once.
    let begun = Instant::now();
    target(&setup).set_namespace_limits(NQN, 1, Limits::default()).expect("set");
    for _ in 0..left {
        assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    }
    // One a second, and the first of them may have been about to.
    assert!(left < 2 || begun.elapsed() < Duration::from_secs(left - 1), "{left} took {:?}", begun.elapsed());
    // A namespace that goes does not wait for turns.
    target(&setup).set_namespace_limits(NQN, 1, slow).expect("set");
    for cid in 0x200..0x208 {
        raw.host.send(io, &flush(cid)).expect("sent");
    }
    assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    target(&setup).remove_namespace(NQN, 1).expect("removed");
    let answers = [(); 7].map(|()| raw.host.response(io, LIMIT).expect("an answer"));
    // One a second had its turn before.
    let before = answers.iter().take_while(|answer| answer.status().is_success()).count();
    assert!(before < 7, "each of them had its turn");
    for answer in &answers[before..] {
        assert_status(answer, Status::INVALID_NAMESPACE, "no namespace");
    }
    // And a host that goes leaves nothing behind.
    target(&setup).set_host_limits(NQN, &raw.hostnqn, slow).expect("set");
    for cid in 0x300..0x308 {
        raw.host.send(io, &Sqe::new(0).nsid(2).cid(cid).0).expect("sent");
    }
    raw.host.close(io);
    raw.host.close(admin);
    target(&setup).set_host_limits(NQN, &raw.hostnqn, Limits::default()).expect("set");
    bystander.check();
}
