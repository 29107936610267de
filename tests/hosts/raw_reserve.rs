//! Reservations between hosts: types, registrations that outlive connections, preempting, notifications, a new start.

use std::time::Duration;

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, ReservationReport, Sqe};
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, Raw, Rig, Setup, assert_status, small};

/// Not a single one of the reservation commands is forbidden to a host.
struct Host<R: Rig> {
    raw: Raw<R>,
    admin: RawQueueId,
    io: RawQueueId,
    key: u64,
}

impl<R: Rig> Host<R> {
    fn new(setup: &Setup<R>, identity: u8) -> Self {
        let mut raw = setup.raw_as(identity);
        let (admin, io) = raw.bring_up();
        Self { raw, admin, io, key: u64::from(identity) * 0x0101 }
    }

    fn register(&mut self, persist: u32) -> Status {
        let keys = wire::reservation_keys(0, self.key);
        self.raw.call_with(self.io, wire::reservation_register(1, 0, false, persist), &keys).status()
    }

    fn unregister(&mut self) -> Status {
        let keys = wire::reservation_keys(self.key, 0);
        self.raw.call_with(self.io, wire::reservation_register(1, 1, false, 0), &keys).status()
    }

    fn acquire(&mut self, action: u32, rtype: u8, preempted: u64) -> Status {
        let keys = wire::reservation_keys(self.key, preempted);
        self.raw.call_with(self.io, wire::reservation_acquire(1, action, rtype), &keys).status()
    }

    fn release(&mut self, action: u32, rtype: u8) -> Status {
        let key = self.key.to_le_bytes();
        self.raw.call_with(self.io, wire::reservation_release(1, action, rtype), &key).status()
    }

    fn report(&mut self) -> ReservationReport {
        let (response, bytes) = self.raw.call_for(self.io, wire::reservation_report(1, 65_536), 65_536);
        assert!(response.status().is_success(), "report: {}", response.status());
        ReservationReport::read(&bytes)
    }

    /// Whether it may read, and write.
    fn access(&mut self) -> [bool; 2] {
        let allowed = |status: Status| {
            let known = status.is_success() || status.code() == Status::RESERVATION_CONFLICT.code();
            assert!(known, "neither done nor a conflict: {status}");
            status.is_success()
        };
        let read = self.raw.read(self.io, 1, 0, 1).map_or_else(|status| status, |_| Status::SUCCESS);
        let mut writes = vec![self.raw.write(self.io, 1, 0, &[7; BLOCK])];
        writes.push(self.raw.call(self.io, wire::block_command(8, 1, 0, 1)).status());
        writes.push(self.raw.call_with(self.io, Sqe::new(9).nsid(1).cdw(11, 4), &wire::dsm_range(9, 1)).status());
        writes.push(self.raw.call(self.io, Sqe::new(0).nsid(1)).status());
        let writes: Vec<bool> = writes.into_iter().map(allowed).collect();
        assert!(writes.iter().all(|write| *write == writes[0]), "write, zeroes, deallocate, flush: {writes:?}");
        [allowed(read), writes[0]]
    }
}

fn ok(status: Status) {
    assert!(status.is_success(), "{status}");
}

#[track_caller]
fn conflict(status: Status) {
    assert_eq!(status.code(), Status::RESERVATION_CONFLICT.code(), "{status}");
}

pub(crate) fn every_reservation_type_keeps_out_whom_it_should<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let [mut holder, mut other, mut stranger] = [1, 2, 3].map(|identity| Host::new(&setup, identity));
    ok(holder.register(0));
    ok(other.register(0));
    for host in [&mut holder, &mut other, &mut stranger] {
        assert_eq!(host.access(), [true; 2], "registrations alone keep nobody out");
    }
    // Read, write: of another registrant, of a stranger.
    let table: [[[bool; 2]; 2]; 6] = [
        [[true, false], [true, false]],
        [[false, false], [false, false]],
        [[true, true], [true, false]],
        [[true, true], [false, false]],
        [[true, true], [true, false]],
        [[true, true], [false, false]],
    ];
    for (rtype, expected) in (1u8..).zip(table) {
        ok(holder.acquire(0, rtype, 0));
        assert_eq!(holder.access(), [true; 2], "type {rtype}: the holder");
        assert_eq!(other.access(), expected[0], "type {rtype}: another registrant");
        assert_eq!(stranger.access(), expected[1], "type {rtype}: a stranger");
        let report = stranger.report();
        let holders: Vec<bool> = report.registrants.iter().map(|(_, holds, ..)| *holds).collect();
        assert_eq!((report.rtype, holders), (rtype, vec![true, rtype > 4]));
        ok(holder.release(0, rtype));
    }
    bystander.check();
}

pub(crate) fn reservations_are_of_hosts_and_outlive_their_connections<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut first = Host::new(&setup, 1);
    let mut second = Host::new(&setup, 2);
    ok(first.register(0));
    ok(first.acquire(0, 1, 0));
    let cntlid = first.raw.cntlid;
    let expected = |cntlid| vec![(cntlid, true, first_key(), [1; 16])];
    assert_eq!(second.report().registrants, expected(cntlid));
    drop(first);
    // Its controller goes when the target has seen the end of its queues.
    let deadline = std::time::Instant::now() + LIMIT;
    while second.report().registrants != expected(0xffff) {
        assert!(std::time::Instant::now() < deadline, "{:?}", second.report());
    }
    assert_eq!(second.access(), [true, false], "the host that left still holds");
    // It comes back and is the holder; another queue of it is too.
    let mut again = Host::new(&setup, 1);
    assert_eq!(again.access(), [true; 2]);
    again.io = again.raw.io_up(2, 32);
    assert_eq!(again.access(), [true; 2], "on another reactor");
    ok(again.unregister());
    assert_eq!(second.access(), [true; 2], "the holder unregistered");
    assert_eq!(second.report(), ReservationReport { generation: 2, ..ReservationReport::default() });
}

fn first_key() -> u64 {
    0x0101
}

pub(crate) fn two_hundred_hosts_register_and_one_preempts_them_all<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut last = Host::new(&setup, 0xff);
    for identity in 1..=200u8 {
        let mut raw = setup.raw_as(identity);
        let (admin, io) = raw.bring_up();
        let key = u64::from(identity % 2 + 1);
        let mut host = Host { raw, admin, io, key };
        ok(host.register(0));
        host.raw.host.close(host.io);
        host.raw.host.close(host.admin);
    }
    ok(last.register(0));
    ok(last.acquire(0, 5, 0));
    let report = last.report();
    assert_eq!((report.registrants.len(), report.rtype), (201, 5));
    ok(last.acquire(2, 1, 2));
    assert_eq!(last.report().registrants.len(), 101, "those of key 2 are gone");
    conflict(last.acquire(1, 1, 2));
    ok(last.acquire(1, 1, 0));
    let report = last.report();
    assert_eq!((report.registrants.len(), report.rtype), (1, 1), "key 0 preempts all that hold");
}

pub(crate) fn refused_reservation_commands_change_nothing<R: Rig>() {
    let setup = Setup::<R>::start();
    let [mut holder, mut other, mut stranger] = [1, 2, 3].map(|identity| Host::new(&setup, identity));
    ok(holder.register(0));
    ok(other.register(0));
    ok(holder.acquire(0, 1, 0));
    let before = holder.report();
    let wrong = wire::reservation_keys(0xbad, 0xbad);
    let mut refused = |sqe: Sqe, data: &[u8], expected: Status, what: &str| {
        let response = other.raw.call_with(other.io, sqe, data);
        assert_status(&response, expected, what);
    };
    let keys = wire::reservation_keys(0x0202, 0x0101);
    let conflict = Status::RESERVATION_CONFLICT;
    refused(wire::reservation_register(1, 0, false, 0), &wrong, conflict, "another key");
    refused(wire::reservation_register(1, 2, false, 0), &wrong, conflict, "replace with a wrong key");
    refused(wire::reservation_register(1, 1, false, 0), &wrong, conflict, "unregister with a wrong key");
    refused(wire::reservation_acquire(1, 0, 1), &keys, conflict, "held by another");
    refused(wire::reservation_acquire(1, 2, 1), &wrong, conflict, "preempt and abort with a wrong key");
    let nobody = wire::reservation_keys(0x0202, 0x7777);
    refused(wire::reservation_acquire(1, 2, 1), &nobody, conflict, "preempt and abort of nobody");
    let zero = wire::reservation_keys(0x0202, 0);
    refused(wire::reservation_acquire(1, 2, 1), &zero, Status::INVALID_FIELD, "preempt and abort of key 0");
    refused(wire::reservation_release(1, 1, 1), &wrong, conflict, "clear with a wrong key");
    for (what, sqe) in [
        ("register action 3", wire::reservation_register(1, 3, false, 0)),
        ("persistence without a place", wire::reservation_register(1, 0, false, 3)),
        ("acquire action 3", wire::reservation_acquire(1, 3, 1)),
        ("type 0", wire::reservation_acquire(1, 0, 0)),
        ("type 7", wire::reservation_acquire(1, 0, 7)),
        ("acquire with IEKEY", wire::reservation_acquire(1, 8, 1)),
        ("release with IEKEY", wire::reservation_release(1, 8, 1)),
        ("release action 2", wire::reservation_release(1, 2, 1)),
    ] {
        refused(sqe, &keys, Status::INVALID_FIELD, what);
    }
    let short = other.raw.call_with(other.io, wire::reservation_acquire(1, 0, 1), &keys[..8]);
    assert_status(&short, Status::DATA_SGL_LENGTH_INVALID, "half the keys");
    let (response, _) = other.raw.call_for(other.io, wire::reservation_report(1, 64).cdw(11, 0), 64);
    assert_status(&response, Status::HOST_ID_INCONSISTENT, "a report without the extended structure");
    super::raw_reserve::conflict(stranger.acquire(2, 1, 0x0101));
    super::raw_reserve::conflict(stranger.release(1, 1));
    assert_eq!(holder.report(), before);
    assert_eq!(holder.access(), [true; 2]);
    ok(other.release(0, 1));
    assert_eq!(holder.report(), before, "release of somebody else's has no effect");
    assert_eq!(holder.release(0, 2).code(), Status::INVALID_FIELD.code(), "release of another type");
}

/// Three writes of the other host hang in the disk.
fn in_progress<R: Rig>(setup: &Setup<R>, host: &mut Host<R>) {
    setup.faults.stall();
    for cid in 0..3 {
        let sqe = wire::block_command(8, 1, u64::from(cid), 1).cid(0x100 + cid);
        host.raw.host.send(host.io, &sqe.0).expect("sent");
    }
    setup.until_held(&mut host.raw, 3);
    assert_eq!(host.raw.host.waiting(host.io), 0, "answered by a disk that hangs");
}

pub(crate) fn preempt_and_abort_ends_what_the_other_host_has_in_progress<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let [mut first, mut second] = [1, 2].map(|identity| Host::new(&setup, identity));
    second.io = second.raw.io_up(2, 32);
    ok(first.register(0));
    ok(second.register(0));
    ok(first.acquire(0, 1, 0));
    in_progress(&setup, &mut first);
    ok(second.acquire(2, 1, first.key));
    for _ in 0..3 {
        let response = first.raw.host.response(first.io, LIMIT).expect("an answer");
        assert_status(&response, Status::ABORTED_BY_PREEMPT, "a command in progress");
    }
    setup.faults.release();
    assert_eq!((first.access(), second.access()), ([true, false], [true; 2]));
    bystander.check();
}

pub(crate) fn preempt_and_abort_waits_for_a_disk_that_cannot_cancel<R: Rig>() {
    let setup = Setup::<R>::start();
    setup.faults.ignore_cancel(true);
    let [mut first, mut second] = [1, 2].map(|identity| Host::new(&setup, identity));
    ok(first.register(0));
    ok(second.register(0));
    ok(first.acquire(0, 1, 0));
    in_progress(&setup, &mut first);
    let mut buffer = second.raw.host.take(16).expect("memory");
    buffer.as_mut_slice().copy_from_slice(&wire::reservation_keys(second.key, first.key));
    let sqe = wire::reservation_acquire(1, 2, 1).cid(0x700).sgl(second.raw.keyed(&buffer, 16));
    second.raw.host.send(second.io, &sqe.0).expect("sent");
    let early = second.raw.host.response(second.io, Duration::from_millis(300));
    assert!(early.is_err(), "answered while the other host's writes could land");
    setup.faults.release();
    let response = second.raw.host.response(second.io, LIMIT).expect("an answer");
    assert!(response.cid() == 0x700 && response.status().is_success(), "{}", response.status());
    // What the disk did anyway is told truthfully.
    for _ in 0..3 {
        let response = first.raw.host.response(first.io, LIMIT).expect("an answer");
        assert!(response.status().is_success(), "{}", response.status());
    }
    second.raw.host.give(buffer);
}

/// xorshift64*: the seed alone decides.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// Hosts take the namespace from each other while the loser has writes in every stage, on queues that may end in the middle; what
/// the winner writes after its preempt-and-abort stays.
pub(crate) fn preempt_and_abort_in_random_disorder_lets_no_late_write_land<R: Rig>() {
    let seed = std::env::var("FARSIDE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
    println!("FARSIDE_SEED={seed}");
    let mut state = seed;
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let [mut loser, mut winner] = [1, 2].map(|identity| Host::new(&setup, identity));
    ok(winner.register(0));
    for round in 0..150u64 {
        if loser.raw.host.down(loser.io).is_some() {
            loser = Host::new(&setup, loser.raw.hostid[0]);
        }
        let _ = loser.register(0);
        let mut buffer = loser.raw.host.take(8 * BLOCK).expect("memory");
        buffer.as_mut_slice().fill(0x11);
        let sgl = loser.raw.keyed(&buffer, 8 * BLOCK);
        let count = 1 + random(&mut state) % 12;
        let mut posted = 0;
        if random(&mut state) & 3 == 0 {
            setup.faults.stall();
        }
        for at in 0..count {
            let sqe = match random(&mut state) % 4 {
                0 => wire::block_command(8, 1, 0, 8),
                1 => wire::block_command(2, 1, 0, 8).sgl(sgl),
                2 => {
                    let mut half = wire::block_command(5, 1, 0, 8).sgl(sgl);
                    half.0[1] = 0x41;
                    half
                }
                _ => wire::block_command(1, 1, 0, 8).sgl(sgl),
            };
            posted += u32::from(loser.raw.host.post(loser.io, &sqe.cid(0x4000 + at as u16).0).is_ok());
        }
        loser.raw.host.turn();
        if random(&mut state) & 3 == 0 {
            loser.raw.host.close(loser.io);
        }
        if random(&mut state) & 1 == 0 {
            std::thread::sleep(Duration::from_micros(random(&mut state) % 2000));
        }
        let status = winner.acquire(2, 1, loser.key);
        setup.faults.release();
        ok(status);
        ok(winner.acquire(0, 1, 0));
        let mark = vec![0x80 | round as u8; 8 * BLOCK];
        ok(winner.raw.write(winner.io, 1, 0, &mark));
        std::thread::sleep(Duration::from_micros(random(&mut state) % 1000));
        let found = winner.raw.read(winner.io, 1, 0, 8).expect("a read");
        assert!(found == mark, "round {round}: a write of the preempted host landed late");
        ok(winner.release(0, 1));
        // An ordinary command ends the half of a pair that waits; then everything is answered.
        if loser.raw.host.down(loser.io).is_none() {
            loser.raw.host.send(loser.io, &Sqe::new(0).nsid(2).cid(0x5000).0).expect("sent");
            for _ in 0..=posted {
                loser.raw.host.response(loser.io, LIMIT).expect("an answer to every command");
            }
        }
        loser.raw.host.give(buffer);
    }
    bystander.check();
}

pub(crate) fn preempted_hosts_are_notified_and_read_why<R: Rig>() {
    let setup = Setup::<R>::start();
    let [mut first, mut second] = [1, 2].map(|identity| Host::new(&setup, identity));
    ok(first.register(0));
    ok(second.register(0));
    ok(first.acquire(0, 3, 0));
    first.raw.host.send(first.admin, &Sqe::new(0x0c).cid(0x900).0).expect("sent");
    ok(second.acquire(1, 3, first.key));
    let event = first.raw.host.response(first.admin, LIMIT).expect("an event");
    assert_eq!((event.cid(), event.dword0()), (0x900, 0x0080_0006));
    let page = |host: &mut Host<R>| {
        let (response, page) = host.raw.call_for(host.admin, wire::get_log_page(0x80, 0, 0, 64, false), 64);
        ok(response.status());
        page
    };
    let found = page(&mut first);
    assert_eq!(found[..16], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0], "registration preempted");
    assert_eq!(page(&mut first), [0; 64]);
    ok(first.register(0));
    ok(second.release(0, 3));
    assert_eq!(page(&mut first)[8], 2, "reservation released");
    ok(second.release(1, 0));
    assert_eq!(page(&mut first)[8], 3, "reservation preempted");
    assert_eq!(page(&mut second), [0; 64], "who did it is not told");
}

pub(crate) fn reservations_and_write_protection_survive_a_new_start<R: Rig>() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = |rig: R| {
        let provider = rig.target();
        Setup::<R>::built(rig, small(), provider, |builder| builder.state_dir(folder.path()))
    };
    let setup = start(R::new());
    let [mut first, mut second] = [1, 2].map(|identity| Host::new(&setup, identity));
    ok(second.register(0));
    ok(first.register(3));
    ok(first.acquire(0, 2, 0));
    let before = first.report();
    assert!(before.persist);
    let protect = Sqe::new(0x09).nsid(2).cdw(10, 0x84).cdw(11, 1);
    assert!(first.raw.call(first.admin, protect).status().is_success());
    drop((first, second));
    let Setup { target, rig, .. } = setup;
    target.expect("a target").shutdown();

    let setup = start(rig);
    let [mut first, mut second] = [1, 2].map(|identity| Host::new(&setup, identity));
    assert_eq!(second.access(), [false, false], "before anybody registered anew");
    assert_eq!(first.access(), [true; 2]);
    let after = first.report();
    let hosts =
        |report: &ReservationReport| report.registrants.iter().map(|(_, h, k, id)| (*h, *k, *id)).collect::<Vec<_>>();
    assert_eq!((after.rtype, hosts(&after)), (2, hosts(&before)));
    let status = first.raw.write(first.io, 2, 0, &[1; BLOCK]);
    assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "{status}");
    // Persistence off: what was kept is forgotten.
    let keys = wire::reservation_keys(first.key, first.key);
    let off = first.raw.call_with(first.io, wire::reservation_register(1, 2, false, 2), &keys);
    ok(off.status());
    assert!(first.raw.call(first.admin, protect.cdw(11, 0)).status().is_success());
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "state files");
    drop((first, second));
    let Setup { target, rig, .. } = setup;
    target.expect("a target").shutdown();
    let setup = start(rig);
    let mut second = Host::new(&setup, 2);
    assert_eq!((second.access(), second.report()), ([true; 2], ReservationReport::default()));
}
