//! Authentication: hosts that prove themselves on every queue, those that cannot, and secrets that change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use farside::target::{Admission, Cause, Group, Hash, HostAuth, Secret, Target};
use nvme::Status;
use nvme::auth::{AuthError, Initiator};

use crate::rig::{BLOCK, LIMIT, NQN, Raw, Rig, Setup, assert_status, until};

/// A host that has to authenticate; the rig's other hosts have not.
const AUTH_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:99999999-2222-3333-4444-555555555555";

/// `DHHC-1:01:` of 32 bytes 01h; the same of 02h; and of 03h.
const SECRETS: [&str; 3] = [
    "DHHC-1:01:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQHMnzFi:",
    "DHHC-1:01:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgJvwX3v:",
    "DHHC-1:01:AwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMOC0aU:",
];

fn secret(at: usize) -> Secret {
    SECRETS[at].parse().expect("a secret")
}

/// Not to be guessed is not what tests need of it.
fn random(bytes: &mut [u8]) {
    static STATE: AtomicU64 = AtomicU64::new(0x5eed);
    for byte in bytes {
        let step = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        *byte = (step ^ step >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes()[0];
    }
}

fn ask(target: &Target, key: usize, hashes: &[Hash], groups: &[Group]) {
    let auth = HostAuth {
        key: secret(key),
        controller_key: Some(secret(1)),
        hashes: hashes.to_vec(),
        groups: groups.to_vec(),
    };
    target.set_host_auth(NQN, AUTH_NQN, Some(auth)).expect("asked");
}

fn host<R: Rig>(setup: &Setup<R>, identity: u8) -> Raw<R> {
    let mut raw = setup.raw_as(identity);
    raw.hostnqn = AUTH_NQN.into();
    raw
}

fn target<R: Rig>(setup: &Setup<R>) -> &Target {
    setup.target.as_ref().expect("a target")
}

fn initiator(key: usize, controller_key: Option<usize>) -> Initiator {
    Initiator::new(AUTH_NQN, NQN, secret(key), controller_key.map(secret), 0x77, random)
}

fn send<R: Rig>(raw: &mut Raw<R>, queue: RawQueueId, message: &[u8]) {
    let response = raw.call_with(queue, wire::authentication_send(message.len() as u32), message);
    assert!(response.status().is_success(), "Authentication Send: {}", response.status());
}

fn receive<R: Rig>(raw: &mut Raw<R>, queue: RawQueueId) -> Vec<u8> {
    let (response, message) = raw.call_for(queue, wire::authentication_receive(4096), 4096);
    assert!(response.status().is_success(), "Authentication Receive: {}", response.status());
    message
}

fn authenticate<R: Rig>(raw: &mut Raw<R>, queue: RawQueueId, mut host: Initiator) -> Result<(), AuthError> {
    send(raw, queue, &host.negotiate(&Hash::ALL, &Group::ALL));
    let challenge = receive(raw, queue);
    let reply = host.reply(&challenge)?;
    send(raw, queue, &reply);
    let success = receive(raw, queue);
    if let Some(last) = host.finish(&success)? {
        send(raw, queue, &last);
    }
    Ok(())
}

/// An admin queue, connected and not authenticated.
fn admin_connected<R: Rig>(raw: &mut Raw<R>) -> RawQueueId {
    let admin = raw.good_queue(0, 32);
    let response = raw.connect_admin(admin);
    assert!(response.status().is_success(), "{}", response.status());
    assert_eq!(response.dword0() >> 16, 2, "AUTHREQ: ATR");
    admin
}

fn io_connected<R: Rig>(raw: &mut Raw<R>, qid: u16) -> RawQueueId {
    let io = raw.good_queue(qid, 32);
    let response = raw.connect_io(io, qid, 31);
    assert!(response.status().is_success(), "{}", response.status());
    assert_eq!(response.dword0() >> 16, 2, "AUTHREQ: ATR");
    io
}

/// A host that has proven itself on both of its queues.
fn proven<R: Rig>(setup: &Setup<R>) -> (Raw<R>, RawQueueId, RawQueueId) {
    let mut raw = host(setup, 1);
    let admin = admin_connected(&mut raw);
    authenticate(&mut raw, admin, initiator(0, None)).expect("the admin queue");
    raw.enable(admin);
    let io = io_connected(&mut raw, 1);
    authenticate(&mut raw, io, initiator(0, None)).expect("the I/O queue");
    (raw, admin, io)
}

pub(crate) fn hosts_prove_themselves_on_every_queue<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let before = target(&setup).counters().authentications;
    let mut queues = 0;
    let cases = [
        (Hash::Sha256, Group::Null, None),
        (Hash::Sha384, Group::Null, Some(1)),
        (Hash::Sha512, Group::Ffdhe2048, None),
        (Hash::Sha256, Group::Ffdhe2048, Some(1)),
        (Hash::Sha384, Group::Ffdhe3072, Some(1)),
    ];
    for (at, (hash, group, controller_key)) in (1u8..).zip(cases) {
        ask(target(&setup), 0, &[hash], &[group]);
        let mut raw = host(&setup, at);
        let admin = admin_connected(&mut raw);
        authenticate(&mut raw, admin, initiator(0, controller_key)).expect("the admin queue");
        raw.enable(admin);
        for qid in 1..=2 {
            let io = io_connected(&mut raw, qid);
            authenticate(&mut raw, io, initiator(0, controller_key)).expect("an I/O queue");
            assert!(raw.write(io, 1, 0, &[at; BLOCK]).is_success(), "{hash:?} {group:?}");
            assert_eq!(raw.read(io, 1, 0, 1).expect("a read"), [at; BLOCK]);
        }
        queues += 3;
        assert_eq!(target(&setup).counters().authentications - before, queues);
    }
    bystander.check();
}

pub(crate) fn nothing_is_taken_before_authentication<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Null]);
    let mut raw = host(&setup, 1);
    let admin = admin_connected(&mut raw);
    let (response, _) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_status(&response, Status::AUTHENTICATION_REQUIRED, "Identify");
    for sqe in [wire::property_get(0x1c, false), wire::property_set(0x14, 0x0046_0001), Sqe::new(0x18)] {
        assert_status(&raw.call(admin, sqe), Status::AUTHENTICATION_REQUIRED, "admin");
    }
    authenticate(&mut raw, admin, initiator(0, None)).expect("the admin queue");
    raw.enable(admin);
    let io = io_connected(&mut raw, 1);
    let status = raw.write(io, 1, 0, &[0xa5; BLOCK]);
    assert_eq!(status.code(), Status::AUTHENTICATION_REQUIRED.code(), "{status}");
    let mut half = wire::block_command(5, 1, 0, 1);
    half.0[1] = 0x41;
    for sqe in [Sqe::new(0).nsid(1), wire::block_command(8, 1, 0, 1), half] {
        assert_status(&raw.call(io, sqe), Status::AUTHENTICATION_REQUIRED, "I/O");
    }
    authenticate(&mut raw, io, initiator(0, None)).expect("the I/O queue");
    assert_eq!(raw.read(io, 1, 0, 1).expect("a read"), [0; BLOCK], "nothing was written");
    bystander.check();
}

pub(crate) fn wrong_secrets_end_their_queue_alone<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Null, Group::Ffdhe2048]);
    let before = target(&setup).counters().authentications;
    let mut raw = host(&setup, 1);
    let admin = admin_connected(&mut raw);
    assert_eq!(authenticate(&mut raw, admin, initiator(2, None)), Err(AuthError::Refused(1)), "a wrong secret");
    assert!(raw.host.end_of(admin, LIMIT).is_some(), "the queue goes on");
    // The target does not have the secret that the host wants proven.
    let mut raw = host(&setup, 2);
    let admin = admin_connected(&mut raw);
    assert_eq!(authenticate(&mut raw, admin, initiator(0, Some(2))), Err(AuthError::Controller));
    // Messages that are none, one after the other.
    for message in [&[][..], &[0; 3], &[1, 4, 0, 0, 0x77, 0], &[0xff; 200]] {
        let mut raw = host(&setup, 3);
        let admin = admin_connected(&mut raw);
        if message.is_empty() {
            let response = raw.call(admin, wire::authentication_send(0));
            assert_status(&response, Status::INVALID_FIELD, "no message at all");
        } else {
            send(&mut raw, admin, message);
        }
        assert_eq!(receive(&mut raw, admin)[1], 0xf1, "{message:x?}");
        assert!(raw.host.end_of(admin, LIMIT).is_some(), "the queue goes on after {message:x?}");
    }
    // An I/O queue with a wrong secret takes its controller with it no further than itself.
    let mut raw = host(&setup, 4);
    let admin = admin_connected(&mut raw);
    authenticate(&mut raw, admin, initiator(0, None)).expect("the admin queue");
    raw.enable(admin);
    let io = io_connected(&mut raw, 1);
    assert_eq!(authenticate(&mut raw, io, initiator(2, None)), Err(AuthError::Refused(1)));
    assert!(raw.host.end_of(io, LIMIT).is_some());
    assert!(raw.call(admin, wire::property_get(0x1c, false)).status().is_success(), "the admin queue");
    assert_eq!(target(&setup).counters().authentications - before, 1);
    bystander.check();
}

pub(crate) fn secrets_change_and_hosts_authenticate_again_under_io<R: Rig>() {
    let setup = Setup::<R>::start();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Ffdhe2048]);
    let (mut raw, admin, io) = proven(&setup);
    let mut key = 0;
    for round in 0..6u8 {
        key = 2 - key;
        ask(target(&setup), key, &Hash::ALL, &[Group::Ffdhe2048]);
        for queue in [admin, io] {
            let mut host = initiator(key, None);
            send(&mut raw, queue, &host.negotiate(&Hash::ALL, &Group::ALL));
            assert!(raw.write(io, 1, 0, &[round; BLOCK]).is_success(), "I/O while it authenticates again");
            let reply = host.reply(&receive(&mut raw, queue)).expect("a challenge");
            send(&mut raw, queue, &reply);
            assert_eq!(raw.read(io, 1, 0, 1).expect("a read"), [round; BLOCK]);
            assert_eq!(host.finish(&receive(&mut raw, queue)), Ok(None), "round {round}");
        }
    }
    assert_eq!(authenticate(&mut raw, admin, initiator(2 - key, None)), Err(AuthError::Refused(1)), "the old secret");
    assert!(raw.host.end_of(io, LIMIT).is_some(), "what cannot be proven again ends");
}

pub(crate) fn who_has_not_proven_itself_takes_no_place<R: Rig>() {
    let setup = Setup::<R>::start();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Null]);
    let admission = Admission { controllers: Some(2), controllers_per_host: Some(1), ..Admission::default() };
    target(&setup).set_admission(NQN, admission).expect("a limit");
    let mut strangers: Vec<_> = (0..8).map(|at| host(&setup, 0x20 + at)).collect();
    let unproven: Vec<_> = strangers.iter_mut().map(admin_connected).collect();
    let (mut raw, _, io) = proven(&setup);
    assert!(raw.write(io, 1, 0, &[3; BLOCK]).is_success());
    // One of the others turns out to have the secret too: the place that a host has is taken.
    let (stranger, queue, mut late) = (&mut strangers[0], unproven[0], initiator(0, None));
    send(stranger, queue, &late.negotiate(&Hash::ALL, &Group::ALL));
    let challenge = receive(stranger, queue);
    send(stranger, queue, &late.reply(&challenge).expect("a challenge"));
    let buffer = stranger.host.take(4096).expect("memory");
    let sgl = stranger.keyed(&buffer, 4096);
    // The end of its queue may overtake the answer.
    stranger.host.send(queue, &wire::authentication_receive(4096).sgl(sgl).cid(0x55).0).expect("sent");
    assert!(strangers[0].host.end_of(unproven[0], LIMIT).is_some(), "two controllers of a host that may have one");
    assert_eq!(raw.read(io, 1, 0, 1).expect("a read"), [3; BLOCK]);
    assert_eq!(target(&setup).counters().ends.of(Cause::TooManyControllers), 1);
}

/// Hosts that ask for long computations and go leave none behind for others to wait for.
pub(crate) fn ended_associations_leave_no_work_behind<R: Rig>() {
    const CROWD: u32 = 60;
    let setup = Setup::<R>::start();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Ffdhe8192]);
    let negotiate = initiator(0, None).negotiate(&Hash::ALL, &Group::ALL);
    let (mut one, mut two) = (host(&setup, 1), host(&setup, 2));
    let mut crowd: Vec<_> = (3..18).map(|at| host(&setup, at)).collect();
    let (first, second) = (admin_connected(&mut one), admin_connected(&mut two));
    let begun = Instant::now();
    send(&mut one, first, &negotiate);
    let alone = begun.elapsed();
    let mut queues = Vec::new();
    for at in (0..crowd.len()).cycle().take(CROWD as usize) {
        let queue = admin_connected(&mut crowd[at]);
        let mut buffer = crowd[at].host.take(negotiate.len()).expect("memory");
        buffer.as_mut_slice().copy_from_slice(&negotiate);
        queues.push((at, queue, buffer));
    }
    until("nothing is under way", || target(&setup).counters().requests == 0);
    for (at, queue, buffer) in &queues {
        let sgl = crowd[*at].keyed(buffer, negotiate.len());
        let sqe = wire::authentication_send(negotiate.len() as u32).sgl(sgl).cid(1);
        crowd[*at].host.send(*queue, &sqe.0).expect("sent");
    }
    until("the messages are there", || {
        crowd.iter_mut().for_each(|raw| raw.host.turn());
        target(&setup).counters().requests > CROWD as usize / 2
    });
    for (at, queue, _) in queues {
        crowd[at].host.close(queue);
    }
    until("they are gone", || target(&setup).status().controllers.len() == 2);
    let begun = Instant::now();
    send(&mut two, second, &negotiate);
    let after = begun.elapsed();
    println!("one computation takes {alone:?}, and {after:?} after {CROWD} that nobody waits for");
    assert!(after < alone * CROWD / 4, "{after:?}, where one takes {alone:?}");
}

/// Exchanges in the largest group are computed beside the reactors: a bystander on the same ones hardly notices.
pub(crate) fn large_groups_delay_nobody_else<R: Rig>() {
    let setup = Setup::<R>::start();
    ask(target(&setup), 0, &Hash::ALL, &[Group::Ffdhe8192]);
    let (mut other, _, io) = setup.ready();
    let mut hosts: Vec<_> = (1..=6).map(|at| host(&setup, 0x40 + at)).collect();
    let negotiate = initiator(0, None).negotiate(&Hash::ALL, &Group::ALL);
    let mut waiting = Vec::new();
    for raw in &mut hosts {
        let admin = admin_connected(raw);
        let mut buffer = raw.host.take(negotiate.len()).expect("memory");
        buffer.as_mut_slice().copy_from_slice(&negotiate);
        let sgl = raw.keyed(&buffer, negotiate.len());
        let sqe = wire::authentication_send(negotiate.len() as u32).sgl(sgl).cid(1);
        raw.host.send(admin, &sqe.0).expect("sent");
        waiting.push((admin, buffer));
    }
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut rounds = 0;
    while hosts.iter().zip(&waiting).any(|(raw, (admin, _))| raw.host.waiting(*admin) == 0) {
        let one = Instant::now();
        other.alive(io);
        slowest = slowest.max(one.elapsed());
        rounds += 1;
        hosts.iter_mut().for_each(|raw| raw.host.turn());
        assert!(begun.elapsed() < LIMIT, "the exchanges never come to an end");
    }
    println!("{rounds} commands of a bystander during 6 exchanges in {:?}, the slowest {slowest:?}", begun.elapsed());
    assert!(rounds > 6, "the bystander waited for every exchange");
    for (raw, (admin, buffer)) in hosts.iter_mut().zip(waiting) {
        assert!(raw.host.response(admin, LIMIT).expect("an answer").status().is_success());
        raw.host.give(buffer);
    }
}
