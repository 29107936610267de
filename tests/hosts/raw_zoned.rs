//! Zoned namespaces: the rules of writing, appends from many sides, what is done to zones, reports, limits, reservations; and that
//! a write pointer is right after whatever went wrong.

use std::collections::BTreeMap;
use std::sync::Arc;

use farside::backend::{Backend, FaultControl, FaultPlan, Faulty, Memory, MemoryZones};
use farside::host::raw::{RawQueueId, RawResponse};
use farside::host::wire::{self, Sqe};
use farside::host::zones::{self, ZoneDescriptor};
use farside::target::{NamespaceSpec, SubsystemSpec};
use nvme::Status;

use crate::raw_blocks::u32_at;
use crate::rig::{BLOCK, LIMIT, Raw, Rig, Setup, assert_status, small, until, until_held};

const ZONED_NQN: &str = "nqn.2026-11.io.farside:zoned";
/// Zones of 1 MiB, 768 KiB of which can be written.
pub(crate) const ZONE: u64 = (1 << 20) / BLOCK as u64;
pub(crate) const CAPACITY: u64 = (768 << 10) / BLOCK as u64;
pub(crate) const ZONES: u64 = 32;
const MAX_OPEN: u32 = 4;
const MAX_ACTIVE: u32 = 6;

pub(crate) const EMPTY: u8 = 1;
pub(crate) const IMPLICITLY_OPENED: u8 = 2;
const EXPLICITLY_OPENED: u8 = 3;
pub(crate) const CLOSED: u8 = 4;
pub(crate) const FULL: u8 = 0xe;

pub(crate) const CLOSE: u8 = 1;
pub(crate) const FINISH: u8 = 2;
pub(crate) const OPEN: u8 = 3;
pub(crate) const RESET: u8 = 4;

/// A target with one zoned namespace beside the others, behind faults.
pub(crate) struct Zoned<R: Rig> {
    pub(crate) setup: Setup<R>,
    pub(crate) faults: FaultControl,
}

impl<R: Rig> Zoned<R> {
    fn start() -> Self {
        Self::of(ZONES, MAX_OPEN, MAX_ACTIVE)
    }

    fn of(count: u64, max_open: u32, max_active: u32) -> Self {
        let zones =
            MemoryZones { zone_size: 1 << 20, zone_capacity: Some(CAPACITY * BLOCK as u64), max_open, max_active };
        Self::on(Arc::new(Memory::zoned(count << 20, &zones, BLOCK as u32).expect("zones")))
    }

    pub(crate) fn on(backend: Arc<dyn Backend>) -> Self {
        let rig = R::new();
        let provider = rig.target();
        let faulty = Faulty::new(backend, FaultPlan::default());
        let faults = faulty.control();
        let zoned = SubsystemSpec::new(ZONED_NQN).namespace(NamespaceSpec::new(1, Arc::new(faulty)));
        let setup = Setup::built(rig, small(), provider, |builder| builder.subsystem(zoned));
        Self { setup, faults }
    }

    pub(crate) fn host(&self, identity: u8) -> Host<R> {
        let mut raw = self.setup.raw_as(identity);
        raw.subnqn = ZONED_NQN.into();
        let admin = raw.good_queue(0, 32);
        assert!(raw.connect_admin(admin).status().is_success());
        // All command sets.
        assert!(raw.call(admin, wire::property_set(0x14, 0x0046_0061)).status().is_success());
        let io = raw.io_up(1, 32);
        Host { raw, admin, io }
    }
}

pub(crate) struct Host<R: Rig> {
    pub(crate) raw: Raw<R>,
    admin: RawQueueId,
    pub(crate) io: RawQueueId,
}

impl<R: Rig> Host<R> {
    pub(crate) fn write(&mut self, slba: u64, bytes: &[u8]) -> Status {
        self.raw.write(self.io, 1, slba, bytes)
    }

    fn read(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        self.raw.read(self.io, 1, slba, blocks).expect("a read")
    }

    pub(crate) fn append(&mut self, zone: u64, bytes: &[u8]) -> Result<u64, Status> {
        let sqe = zones::append(1, zone * ZONE, (bytes.len() / BLOCK) as u32);
        let response = self.raw.call_with(self.io, sqe, bytes);
        if response.status().is_success() { Ok(response.result()) } else { Err(response.status()) }
    }

    pub(crate) fn act(&mut self, zone: u64, action: u8) -> Status {
        self.raw.call(self.io, zones::send(1, Some(zone * ZONE), action)).status()
    }

    pub(crate) fn all(&mut self, action: u8) -> Status {
        self.raw.call(self.io, zones::send(1, None, action)).status()
    }

    pub(crate) fn report(&mut self, slba: u64, len: usize, states: u8, partial: bool) -> (u64, Vec<ZoneDescriptor>) {
        let (response, bytes) = self.raw.call_for(self.io, zones::receive(1, slba, len, states, partial), len);
        assert!(response.status().is_success(), "report: {}", response.status());
        zones::read_report(&bytes)
    }

    /// State and written blocks of a zone.
    pub(crate) fn zone(&mut self, zone: u64) -> (u8, u64) {
        let (_, zones) = self.report(zone * ZONE, 128, 0, true);
        assert_eq!((zones[0].zslba, zones[0].capacity), (zone * ZONE, CAPACITY));
        (zones[0].state, zones[0].wp - zones[0].zslba)
    }

    /// Writes a zone up to its capacity, a MiB at most at a time.
    fn fill(&mut self, zone: u64) {
        let (_, written) = self.zone(zone);
        let mut at = written;
        while at < CAPACITY {
            let blocks = (CAPACITY - at).min(256);
            ok(self.write(zone * ZONE + at, &pattern(zone + at, blocks)));
            at += blocks;
        }
    }
}

pub(crate) fn pattern(seed: u64, blocks: u64) -> Vec<u8> {
    (0..blocks * BLOCK as u64).map(|at| (at * 13 + at / 503 + seed * 7) as u8).collect()
}

#[track_caller]
pub(crate) fn ok(status: Status) {
    assert!(status.is_success(), "{status}");
}

#[track_caller]
pub(crate) fn is(status: Status, expected: Status) {
    assert_eq!(status.code(), expected.code(), "{status}");
}

pub(crate) fn zones_are_told_to_hosts_that_know_them<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    let (_, bytes) = host.raw.call_for(host.admin, zones::identify_zoned(5, 1), 4096);
    let expected = zones::ZonedNamespace { zone_blocks: ZONE, max_open: Some(MAX_OPEN), max_active: Some(MAX_ACTIVE) };
    assert_eq!(zones::ZonedNamespace::read(&bytes), Some(expected));
    let (_, bytes) = host.raw.call_for(host.admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(
        [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))),
        [ZONES * ZONE, ZONES * CAPACITY],
        "NSZE and NCAP"
    );
    let (_, bytes) = host.raw.call_for(host.admin, zones::identify_zoned(7, 0), 4096);
    assert_eq!(u32_at(&bytes, 0), 1);
    let (_, bytes) =
        host.raw.call_for(host.admin, wire::get_log_page(5, u32::MAX, 0, 4096, false).cdw(14, 2 << 24), 4096);
    for opcode in [0x79, 0x7a, 0x7d] {
        assert_eq!(u32_at(&bytes, 1024 + opcode * 4) & 1, 1, "{opcode:x} is supported");
    }
    // What hosts that do not know of zones are told is that there is nothing.
    let mut old = zoned.setup.raw_as(2);
    old.subnqn = ZONED_NQN.into();
    let admin = old.admin_up();
    let (_, bytes) = old.call_for(admin, wire::identify(2, 0, 0), 4096);
    assert_eq!(u32_at(&bytes, 0), 0);
    let io = old.io_up(1, 32);
    is(old.write(io, 1, 0, &pattern(1, 1)), Status::INVALID_NAMESPACE);
    is(old.read(io, 1, 0, 1).unwrap_err(), Status::INVALID_NAMESPACE);
    is(old.call(io, zones::send(1, None, RESET)).status(), Status::INVALID_NAMESPACE);
    assert_eq!(host.zone(0), (EMPTY, 0));
}

pub(crate) fn writes_follow_the_write_pointer<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    is(host.write(8, &pattern(1, 8)), Status::ZONE_INVALID_WRITE);
    ok(host.write(0, &pattern(1, 8)));
    is(host.write(0, &pattern(1, 8)), Status::ZONE_INVALID_WRITE);
    assert_eq!(host.append(0, &pattern(2, 3)), Ok(8));
    assert_eq!(host.zone(0), (IMPLICITLY_OPENED, 11));
    assert_eq!(host.read(0, 11), [pattern(1, 8), pattern(2, 3)].concat());
    // Write Zeroes is a write.
    let zeroes = |host: &mut Host<R>, slba| host.raw.call(host.io, wire::block_command(8, 1, slba, 5)).status();
    is(zeroes(&mut host, 0), Status::ZONE_INVALID_WRITE);
    ok(zeroes(&mut host, 11));
    assert_eq!((host.zone(0).1, host.read(11, 5)), (16, vec![0; 5 * BLOCK]));
    // To the last block that can be written, and no further; behind it there is room that cannot be.
    host.fill(0);
    assert_eq!(host.zone(0), (FULL, ZONE));
    is(host.write(CAPACITY, &pattern(3, 1)), Status::ZONE_IS_FULL);
    is(host.append(0, &pattern(3, 1)).unwrap_err(), Status::ZONE_IS_FULL);
    assert!(host.raw.read(host.io, 1, ZONE - 8, 16).is_ok(), "reads go across zones");
    let blocks = CAPACITY - 4;
    ok(host.raw.call(host.io, wire::block_command(8, 1, ZONE, blocks as u32)).status());
    is(host.write(ZONE + blocks, &pattern(4, 5)), Status::ZONE_BOUNDARY_ERROR);
    is(host.append(1, &pattern(4, 5)).unwrap_err(), Status::ZONE_BOUNDARY_ERROR);
    assert_eq!(host.append(1, &pattern(4, 4)), Ok(ZONE + blocks));
    // What there is not.
    let response = host.raw.call_with(host.io, zones::append(1, 1, 1), &pattern(5, 1));
    assert_status(&response, Status::INVALID_FIELD, "an append that does not name a zone's first block");
    let response = host.raw.call_with(host.io, zones::append(1, ZONES * ZONE, 1), &pattern(5, 1));
    assert_status(&response, Status::LBA_OUT_OF_RANGE, "an append outside");
    let response = host.raw.call_with(host.io, Sqe::new(9).nsid(1).cdw(11, 4), &wire::dsm_range(0, 1));
    assert_status(&response, Status::INVALID_OPCODE, "Dataset Management");
    zoned.setup.bystander().check();
}

/// Sends appends without waiting, and collects where they went.
struct Stream<R: Rig> {
    host: Host<R>,
    tag: u64,
    sent: u64,
    /// By command identifier.
    under_way: BTreeMap<u16, (farside::mem::Buffer, Vec<u8>)>,
    landed: BTreeMap<u64, Vec<u8>>,
    refused: u64,
}

impl<R: Rig> Stream<R> {
    fn new(host: Host<R>, tag: u64) -> Self {
        Self { host, tag, sent: 0, under_way: BTreeMap::new(), landed: BTreeMap::new(), refused: 0 }
    }

    fn send(&mut self, zone: u64) {
        let raw = &mut self.host.raw;
        self.sent += 1;
        let bytes = pattern(self.tag * 1000 + self.sent, 1 + self.sent % 5);
        let mut buffer = raw.host.take(bytes.len()).expect("memory");
        buffer.as_mut_slice().copy_from_slice(&bytes);
        let cid = raw.cid();
        let sqe = zones::append(1, zone * ZONE, (bytes.len() / BLOCK) as u32).sgl(raw.keyed(&buffer, bytes.len()));
        raw.host.send(self.host.io, &sqe.cid(cid).0).expect("sent");
        self.under_way.insert(cid, (buffer, bytes));
    }

    fn take(&mut self) {
        let response: RawResponse = self.host.raw.host.response(self.host.io, LIMIT).expect("an answer");
        let (buffer, bytes) = self.under_way.remove(&response.cid()).expect("asked for");
        self.host.raw.host.give(buffer);
        if response.status().is_success() {
            assert!(self.landed.insert(response.result(), bytes).is_none(), "two at one place");
        } else {
            let no_room = [Status::ZONE_BOUNDARY_ERROR, Status::ZONE_IS_FULL].map(Status::code);
            assert!(no_room.contains(&response.status().code()), "an append: {}", response.status());
            self.refused += 1;
        }
    }
}

pub(crate) fn appends_from_many_sides_land_once_each<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut streams: Vec<Stream<R>> = (1..=4).map(|tag| Stream::new(zoned.host(tag), tag.into())).collect();
    for round in 0..30u64 {
        for stream in &mut streams {
            (0..16).for_each(|_| stream.send(round % 3));
        }
        for stream in &mut streams {
            (0..16).for_each(|_| stream.take());
        }
    }
    let landed: BTreeMap<u64, Vec<u8>> = streams.iter().flat_map(|stream| stream.landed.clone()).collect();
    let host = &mut streams[0].host;
    let mut expected: BTreeMap<u64, u64> = BTreeMap::new();
    for (lba, bytes) in &landed {
        let blocks = (bytes.len() / BLOCK) as u64;
        let next = expected.entry(lba / ZONE).or_insert(lba / ZONE * ZONE);
        assert_eq!(*next, *lba, "neither gaps nor overlaps");
        *next += blocks;
        assert!(host.read(*lba, blocks as u32) == *bytes, "what was appended at {lba}");
    }
    for (zone, end) in expected {
        let (state, written) = host.zone(zone);
        assert_eq!((state == FULL, zone * ZONE + written.min(CAPACITY)), (end == zone * ZONE + CAPACITY, end));
    }
    let refused: u64 = streams.iter().map(|stream| stream.refused).sum();
    assert_eq!(landed.len() as u64 + refused, 4 * 30 * 16);
    assert!(landed.len() > 1000 && refused > 100, "{} landed, {refused} refused", landed.len());
    zoned.setup.bystander().check();
}

pub(crate) fn zones_change_their_states_as_hosts_ask<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    ok(host.act(3, OPEN));
    assert_eq!(host.zone(3), (EXPLICITLY_OPENED, 0));
    ok(host.write(3 * ZONE, &pattern(3, 8)));
    assert_eq!(host.zone(3), (EXPLICITLY_OPENED, 8));
    ok(host.act(3, CLOSE));
    assert_eq!(host.zone(3), (CLOSED, 8));
    ok(host.act(3, FINISH));
    assert_eq!(host.zone(3), (FULL, ZONE));
    assert_eq!(host.read(3 * ZONE, 8), pattern(3, 8));
    for action in [OPEN, CLOSE] {
        is(host.act(3, action), Status::INVALID_ZONE_STATE_TRANSITION);
    }
    ok(host.act(3, RESET));
    assert_eq!((host.zone(3), host.read(3 * ZONE, 8)), ((EMPTY, 0), vec![0; 8 * BLOCK]));
    is(host.act(3, 5), Status::INVALID_ZONE_STATE_TRANSITION);
    is(host.act(3, 0x10), Status::INVALID_FIELD);
    let response = host.raw.call(host.io, zones::send(1, Some(3 * ZONE + 1), RESET));
    assert_status(&response, Status::INVALID_FIELD, "not a zone's first block");
    // Limits: what a write opened is closed for another, what a host opened is not.
    for zone in 0..u64::from(MAX_OPEN) {
        ok(host.act(zone, OPEN));
    }
    is(host.act(8, OPEN), Status::TOO_MANY_OPEN_ZONES);
    is(host.write(8 * ZONE, &pattern(8, 1)), Status::TOO_MANY_OPEN_ZONES);
    ok(host.act(0, CLOSE));
    ok(host.write(8 * ZONE, &pattern(8, 1)));
    ok(host.write(9 * ZONE, &pattern(9, 1)));
    assert_eq!(host.zone(8), (CLOSED, 1), "made room");
    let refused = host.raw.write(host.io, 1, 10 * ZONE, &pattern(1, 1));
    is(refused, Status::TOO_MANY_ACTIVE_ZONES);
    assert!(!refused.is_dnr());
    // All zones at once.
    is(host.all(OPEN), Status::TOO_MANY_OPEN_ZONES);
    ok(host.all(CLOSE));
    assert_eq!(host.report(0, 64, 4, false).0, u64::from(MAX_ACTIVE), "closed");
    ok(host.all(FINISH));
    assert_eq!(host.report(0, 64, 5, false).0, u64::from(MAX_ACTIVE), "full");
    ok(host.all(RESET));
    assert_eq!(host.report(0, 64, 1, false).0, ZONES, "empty");
    ok(host.all(5));
}

pub(crate) fn reports_are_cut_where_the_host_says<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    ok(host.write(2 * ZONE, &pattern(1, 1)));
    let (count, zones) = host.report(0, 64 * (ZONES as usize + 9), 0, false);
    assert_eq!((count, zones.len() as u64), (ZONES, ZONES));
    assert!(zones.iter().zip(0..).all(|(zone, number)| zone.zslba == number * ZONE && zone.capacity == CAPACITY));
    assert_eq!(host.report(5 * ZONE + 7, 64 + 64 * 3 + 60, 0, true), (3, zones[5..8].to_vec()));
    assert_eq!(host.report(5 * ZONE + 7, 64 + 64 * 3, 0, false), (ZONES - 5, zones[5..8].to_vec()));
    assert_eq!(host.report(0, 64 + 64 * 3, 2, false), (1, vec![zones[2]]));
    assert_eq!(host.report(0, 64, 1, true), (0, vec![]));
    let mut refused = |sqe: Sqe, len: usize| host.raw.call_for(host.io, sqe, len).0;
    let response = refused(zones::receive(1, ZONES * ZONE, 128, 0, false), 128);
    assert_status(&response, Status::LBA_OUT_OF_RANGE, "outside");
    assert_status(&refused(zones::receive(1, 0, 60, 0, false), 64), Status::INVALID_FIELD, "no room for the header");
    assert_status(&refused(zones::receive(1, 0, 128, 8, false), 128), Status::INVALID_FIELD, "reserved options");
    assert_status(&refused(zones::receive(1, 0, 128, 0, false).cdw(13, 1), 128), Status::INVALID_FIELD, "extended");
    let response = refused(zones::receive(1, 0, 4096, 0, false), 4092);
    assert_status(&response, Status::DATA_SGL_LENGTH_INVALID, "less memory than asked for");
}

pub(crate) fn write_pointers_are_right_after_failed_writes<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    ok(host.write(0, &pattern(1, 8)));
    for failed in [1, 2] {
        // The write; or the write, and the storage that is asked about it.
        zoned.faults.fail_next(failed);
        is(host.append(0, &pattern(2, 4)).unwrap_err(), Status::WRITE_FAULT);
        if failed == 2 {
            is(host.append(0, &pattern(2, 4)).unwrap_err(), Status::WRITE_FAULT);
        }
        let (lba, written) = (host.append(0, &pattern(3, 4)).expect("an append"), host.zone(0).1);
        assert_eq!((lba, host.read(lba, 4)), (written - 4, pattern(3, 4)));
    }
    assert_eq!(host.zone(0), (IMPLICITLY_OPENED, 16));
    zoned.faults.fail_next(1);
    is(host.act(0, RESET), Status::WRITE_FAULT);
    ok(host.write(16, &pattern(4, 1)));
    ok(host.act(0, RESET));
    assert_eq!(host.zone(0), (EMPTY, 0));
    // What fails opens no zone: as many as there may be can be opened beside.
    for zone in 0..2 * u64::from(MAX_ACTIVE) {
        zoned.faults.fail_next(1);
        let failed = if zone % 2 == 0 { host.write(zone * ZONE, &pattern(5, 1)) } else { host.act(zone, OPEN) };
        is(failed, Status::WRITE_FAULT);
        assert_eq!(host.zone(zone), (EMPTY, 0));
    }
    (20..20 + u64::from(MAX_OPEN)).for_each(|zone| ok(host.act(zone, OPEN)));
    // A report is a read.
    zoned.faults.fail_next(1);
    let response = host.raw.call_for(host.io, zones::receive(1, 0, 128, 0, true), 128).0;
    assert_status(&response, Status::UNRECOVERED_READ_ERROR, "a report");
}

pub(crate) fn aborted_while_the_storage_is_asked_is_not_run<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    ok(host.write(0, &pattern(1, 8)));
    zoned.faults.fail_next(1);
    is(host.append(0, &pattern(2, 4)).unwrap_err(), Status::WRITE_FAULT);
    // The storage is asked where the write pointer is, and takes its time.
    zoned.faults.ignore_cancel(true);
    zoned.faults.stall();
    let mut stream = Stream::new(zoned.host(2), 2);
    stream.send(0);
    until_held(&zoned.faults, &mut stream.host.raw, 1);
    let cid = *stream.under_way.keys().next_back().expect("one");
    let aborted = stream.host.raw.call(stream.host.admin, Sqe::new(8).cdw(10, 1 | u32::from(cid) << 16));
    assert_eq!((aborted.status(), aborted.dword0()), (Status::SUCCESS, 1), "the storage has it");
    zoned.faults.release();
    let response = stream.host.raw.host.response(stream.host.io, LIMIT).expect("an answer");
    assert_status(&response, Status::ABORT_REQUESTED, "the append");
    assert_eq!((host.zone(0).1, host.append(0, &pattern(3, 1))), (8, Ok(8)));
}

pub(crate) fn appends_of_ended_queues_leave_the_zone_to_others<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    let mut leaving = Stream::new(zoned.host(2), 2);
    assert_eq!(host.append(0, &pattern(1, 1)), Ok(0));
    // One append is in the storage, others wait for their turn behind it; then their queue ends.
    zoned.faults.ignore_cancel(true);
    zoned.faults.stall();
    (0..8).for_each(|_| leaving.send(0));
    let cid = host.raw.cid();
    std::thread::sleep(std::time::Duration::from_millis(50));
    let bytes = pattern(9, 2);
    let mut buffer = host.raw.host.take(bytes.len()).expect("memory");
    buffer.as_mut_slice().copy_from_slice(&bytes);
    let sqe = zones::append(1, 0, 2).sgl(host.raw.keyed(&buffer, bytes.len()));
    host.raw.host.send(host.io, &sqe.cid(cid).0).expect("sent");
    leaving.host.raw.host.close(leaving.host.io);
    leaving.host.raw.host.close(leaving.host.admin);
    std::thread::sleep(std::time::Duration::from_millis(50));
    zoned.faults.release();
    let response = host.raw.host.response(host.io, LIMIT).expect("an answer");
    assert_status(&response, Status::SUCCESS, "the append behind them");
    host.raw.host.give(buffer);
    let lba = response.result();
    let (state, written) = host.zone(0);
    assert_eq!((state, written), (IMPLICITLY_OPENED, lba + 2), "it was the last");
    assert_eq!(host.read(lba, 2), bytes);
    assert_eq!(host.append(0, &pattern(1, 1)), Ok(written));
    // The same with an Abort instead of the end of a queue.
    zoned.faults.ignore_cancel(false);
    zoned.faults.stall();
    let mut stream = Stream::new(zoned.host(3), 3);
    (0..3).for_each(|_| stream.send(0));
    std::thread::sleep(std::time::Duration::from_millis(50));
    let last = *stream.under_way.keys().next_back().expect("three");
    let abort = Sqe::new(8).cdw(10, 1 | u32::from(last) << 16);
    let aborted = stream.host.raw.call(stream.host.admin, abort);
    assert_eq!((aborted.status(), aborted.dword0()), (Status::SUCCESS, 0), "it waited");
    let response = stream.host.raw.host.response(stream.host.io, LIMIT).expect("an answer");
    assert_status(&response, Status::ABORT_REQUESTED, "the one that was aborted");
    zoned.faults.release();
    stream.under_way.remove(&last);
    (0..2).for_each(|_| stream.take());
    let blocks: usize = stream.landed.values().map(|bytes| bytes.len() / BLOCK).sum();
    assert_eq!(host.zone(0).1, written + 1 + blocks as u64);
}

pub(crate) fn reservations_take_zone_commands_for_what_they_are<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let [mut holder, mut other] = [1, 2].map(|identity| zoned.host(identity));
    let register =
        holder.raw.call_with(holder.io, wire::reservation_register(1, 0, false, 0), &wire::reservation_keys(0, 5));
    ok(register.status());
    let acquire = |host: &mut Host<R>, rtype| {
        host.raw.call_with(host.io, wire::reservation_acquire(1, 0, rtype), &wire::reservation_keys(5, 0)).status()
    };
    ok(acquire(&mut holder, 1));
    is(other.append(0, &pattern(1, 1)).unwrap_err(), Status::RESERVATION_CONFLICT);
    is(other.act(0, OPEN), Status::RESERVATION_CONFLICT);
    is(other.all(RESET), Status::RESERVATION_CONFLICT);
    assert_eq!(other.zone(0), (EMPTY, 0), "reports are reads");
    assert_eq!(holder.append(0, &pattern(1, 1)), Ok(0));
    ok(holder
        .raw
        .call_with(holder.io, wire::reservation_release(1, 0, 1), &wire::reservation_keys(5, 0)[..8])
        .status());
    ok(acquire(&mut holder, 2));
    let (response, _) = other.raw.call_for(other.io, zones::receive(1, 0, 128, 0, true), 128);
    assert_status(&response, Status::RESERVATION_CONFLICT, "exclusive access");
}

/// An action on all zones waits behind a reset of the one zone that it is for.
pub(crate) fn actions_on_all_zones_leave_those_that_are_empty_by_their_turn<R: Rig>() {
    for action in [FINISH, OPEN] {
        let zoned = Zoned::<R>::start();
        let [mut host, mut other] = [1, 2].map(|identity| zoned.host(identity));
        assert_eq!(host.append(5, &pattern(5, 1)), Ok(5 * ZONE));
        ok(host.act(5, CLOSE));
        zoned.faults.stall();
        let reset = host.raw.cid();
        host.raw.host.send(host.io, &zones::send(1, Some(5 * ZONE), RESET).cid(reset).0).expect("sent");
        until_held(&zoned.faults, &mut host.raw, 1);
        let all = other.raw.cid();
        other.raw.host.send(other.io, &zones::send(1, None, action).cid(all).0).expect("sent");
        let target = zoned.setup.target.as_ref().expect("running");
        until("the other action is there", || {
            other.raw.host.turn();
            target.counters().requests == 2
        });
        zoned.faults.release();
        for host in [&mut host, &mut other] {
            ok(host.raw.host.response(host.io, LIMIT).expect("an answer").status());
        }
        assert_eq!(host.zone(5), (EMPTY, 0), "action {action}");
    }
}

pub(crate) fn resetting_a_thousand_zones_delays_nobody<R: Rig>() {
    let zoned = Zoned::<R>::of(4000, 0, 0);
    let bystander = zoned.setup.bystander();
    let mut host = zoned.host(1);
    for zone in 0..1000 {
        assert_eq!(host.append(zone * 4, &pattern(zone, 1)), Ok(zone * 4 * ZONE));
    }
    ok(host.all(FINISH));
    assert_eq!(host.report(0, 64, 5, false).0, 1000);
    ok(host.all(RESET));
    assert_eq!(host.report(0, 64, 1, false).0, 4000);
    assert_eq!(host.read(400 * ZONE, 1), vec![0; BLOCK]);
    bystander.check();
}

pub(crate) fn pairs_are_refused_where_there_are_zones<R: Rig>() {
    let zoned = Zoned::<R>::start();
    let mut host = zoned.host(1);
    let mut compare = wire::block_command(5, 1, 0, 1);
    compare.0[1] |= 1;
    let response = host.raw.call_with(host.io, compare, &[0; BLOCK]);
    assert_status(&response, Status::INVALID_FIELD, "the first of a pair");
    let response = host.raw.call_with(host.io, wire::block_command(5, 1, 0, 1), &[0; BLOCK]);
    assert_status(&response, Status::SUCCESS, "a Compare of its own");
    assert_eq!(host.zone(0), (EMPTY, 0));
}
