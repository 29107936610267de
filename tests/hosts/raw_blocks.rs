//! Commands that move no data of the host: Verify, Copy, Write Zeroes, Dataset Management; their limits; write protection.

use std::path::Path;
use std::time::Duration;

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use farside::target::WriteProtection;
use nvme::Status;

use crate::rig::{BLOCK, BLOCKS, LIMIT, NQN, Raw, Rig, Setup, assert_status, small};

/// A Copy to `slba` of these source ranges.
fn copy<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, slba: u64, ranges: &[(u64, u32)]) -> (Status, u32) {
    let entry = |(slba, blocks): &(u64, u32)| {
        let mut bytes = [0u8; 32];
        bytes[8..16].copy_from_slice(&slba.to_le_bytes());
        bytes[16..18].copy_from_slice(&((blocks - 1) as u16).to_le_bytes());
        bytes
    };
    let entries: Vec<u8> = ranges.iter().flat_map(entry).collect();
    let sqe =
        Sqe::new(0x19).nsid(1).cdw(10, slba as u32).cdw(11, (slba >> 32) as u32).cdw(12, (ranges.len() - 1) as u32);
    let response = raw.call_with(io, sqe, &entries);
    (response.status(), response.dword0())
}

fn pattern(seed: u64, blocks: u64) -> Vec<u8> {
    (0..blocks * BLOCK as u64).map(|at| (at * 7 + at / 509 + seed) as u8).collect()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

pub(crate) fn copy_moves_ranges_in_their_order_up_to_its_limits<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let (_, identify) = raw.call_for(admin, wire::identify(0, 1, 0), 4096);
    let (mssrl, mcl, msrc) = (u32::from(u16_at(&identify, 74)), u32_at(&identify, 76), u32::from(identify[80]));
    assert!(mssrl > 0 && mcl >= mssrl, "MSSRL {mssrl} MCL {mcl}");
    let (_, controller) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(u16_at(&controller, 520) & 1 << 8, 1 << 8, "ONCS: Copy");
    assert_eq!(u16_at(&controller, 534), 1, "OCFS: format 0");
    for at in 0..40u64 {
        assert!(raw.write(io, 1, at * 1000, &pattern(at, 1000)).is_success());
    }
    // Backwards, one block between, unaligned places.
    assert_eq!(copy(&mut raw, io, 100_001, &[(39_000, 700), (3, 1), (17_013, 900)]), (Status::SUCCESS, 0));
    let mut expected = raw.read(io, 1, 39_000, 700).expect("a read");
    expected.extend(raw.read(io, 1, 3, 1).expect("a read"));
    expected.extend(raw.read(io, 1, 17_013, 900).expect("a read"));
    assert!(raw.read(io, 1, 100_001, 1601).expect("a read") == expected, "the copy is not what was copied");
    assert!(raw.read(io, 1, 100_000, 1).expect("a read") == [0; BLOCK], "before the destination");
    assert!(raw.read(io, 1, 101_602, 1).expect("a read") == [0; BLOCK], "behind the destination");
    // One range of the most blocks, and the most ranges; one more of either is refused, with the range at fault.
    assert_eq!(copy(&mut raw, io, 60_000, &[(0, mssrl)]), (Status::SUCCESS, 0));
    assert!(raw.read(io, 1, 60_000 + 32_000, 700).expect("a read") == pattern(32, 1000)[..700 * BLOCK]);
    let size = Status::COMMAND_SIZE_LIMIT_EXCEEDED.code();
    let refused = |(status, range): (Status, u32)| (status.code(), range);
    assert_eq!(refused(copy(&mut raw, io, 60_000, &[(0, 1), (0, mssrl + 1)])), (size, 1));
    let ranges = vec![(5, 1); msrc as usize + 1];
    assert_eq!(copy(&mut raw, io, 50_000, &ranges), (Status::SUCCESS, 0));
    assert_eq!(refused(copy(&mut raw, io, 50_000, &[ranges, vec![(5, 1)]].concat())).0, size);
    let over = vec![(0, mssrl); (mcl / mssrl) as usize + 1];
    assert_eq!(refused(copy(&mut raw, io, 60_000, &over)).0, size, "MCL");
    // Nothing of a refused one is done.
    let overlap = refused(copy(&mut raw, io, 200, &[(0, 100), (250, 10), (299, 2)]));
    assert_eq!(overlap, (Status::OVERLAPPING_IO_RANGE.code(), 1));
    assert_eq!(refused(copy(&mut raw, io, 200, &[(0, 100), (BLOCKS - 1, 2)])), (Status::LBA_OUT_OF_RANGE.code(), 1));
    assert!(raw.read(io, 1, 0, 1000).expect("a read") == pattern(0, 1000), "a refused copy wrote");
}

pub(crate) fn copy_that_fails_in_the_middle_names_the_range<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = setup.ready();
    assert!(raw.write(io, 1, 0, &pattern(1, 8)).is_success());
    setup.faults.fail_next(1);
    let (status, range) = copy(&mut raw, io, 100, &[(0, 4), (4, 4)]);
    assert_eq!((status.code(), range), (Status::UNRECOVERED_READ_ERROR.code(), 0));
    assert_eq!(copy(&mut raw, io, 100, &[(0, 4), (4, 4)]), (Status::SUCCESS, 0));
    assert!(raw.read(io, 1, 100, 8).expect("a read") == pattern(1, 8));
}

pub(crate) fn verify_reads_and_tells_of_the_medium<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let (_, limits) = raw.call_for(admin, wire::identify(6, 0, 0), 4096);
    let most = (4096 << limits[0]) / BLOCK as u32;
    for (slba, blocks) in [(0, 1), (BLOCKS - 1, 1), (0, most)] {
        let response = raw.call(io, wire::block_command(0x0c, 1, slba, blocks));
        assert!(response.status().is_success(), "{blocks} at {slba}: {}", response.status());
    }
    let response = raw.call(io, wire::block_command(0x0c, 1, 0, most + 1));
    assert_status(&response, Status::INVALID_FIELD, "more than VSL");
    let response = raw.call(io, wire::block_command(0x0c, 1, BLOCKS, 1));
    assert_status(&response, Status::LBA_OUT_OF_RANGE, "outside");
    setup.faults.fail_next(1);
    let response = raw.call(io, wire::block_command(0x0c, 1, 0, 8));
    assert_status(&response, Status::UNRECOVERED_READ_ERROR, "a bad medium");
}

pub(crate) fn limits_that_identify_tells_are_enforced<R: Rig>() {
    let mut options = small();
    options.io_limits.write_zeroes_bytes = 8192;
    options.io_limits.verify_bytes = 4096;
    (options.io_limits.dsm_ranges, options.io_limits.dsm_range_blocks, options.io_limits.dsm_blocks) = (4, 100, 300);
    let setup = Setup::<R>::with(R::new(), options);
    let (mut raw, admin, io) = setup.ready();
    let (_, limits) = raw.call_for(admin, wire::identify(6, 0, 0), 4096);
    assert_eq!(limits[..4], [0, 1, 0, 4], "VSL WZSL WUSL DMRL");
    assert_eq!((u32_at(&limits, 4), u32_at(&limits, 8)), (100, 300), "DMRSL DMSL");
    assert!(raw.call(io, wire::block_command(8, 1, 0, 16)).status().is_success());
    assert_status(&raw.call(io, wire::block_command(8, 1, 0, 17)), Status::INVALID_FIELD, "WZSL");
    assert!(raw.call(io, wire::block_command(0x0c, 1, 0, 8)).status().is_success());
    assert_status(&raw.call(io, wire::block_command(0x0c, 1, 0, 9)), Status::INVALID_FIELD, "VSL");
    let mut dsm = |blocks: &[u32]| {
        let ranges: Vec<u8> = blocks.iter().flat_map(|blocks| wire::dsm_range(0, *blocks)).collect();
        raw.call_with(io, Sqe::new(9).nsid(1).cdw(10, blocks.len() as u32 - 1).cdw(11, 4), &ranges).status().code()
    };
    assert_eq!((dsm(&[100; 3]), dsm(&[1; 4])), (0, 0));
    let size = Status::COMMAND_SIZE_LIMIT_EXCEEDED.code();
    assert_eq!((dsm(&[101]), dsm(&[1; 5]), dsm(&[100, 100, 100, 1])), (size, size, size));
}

pub(crate) fn write_zeroes_with_deallocate_reads_as_zeroes<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let (_, identify) = raw.call_for(admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(identify[33], 9, "DLFEAT: zeroes, and Write Zeroes deallocates");
    for deallocate in [0, 1 << 25] {
        assert!(raw.write(io, 1, 0, &pattern(3, 1024)).is_success());
        let mut sqe = wire::block_command(8, 1, 100, 800);
        sqe = sqe.cdw(12, 799 | deallocate);
        assert!(raw.call(io, sqe).status().is_success());
        let mut expected = pattern(3, 1024);
        expected[100 * BLOCK..900 * BLOCK].fill(0);
        assert!(raw.read(io, 1, 0, 1024).expect("a read") == expected, "deallocate {deallocate:x}");
    }
}

/// A target that keeps states.
fn keeping<R: Rig>(folder: &Path) -> Setup<R> {
    let rig = R::new();
    let provider = rig.target();
    Setup::built(rig, small(), provider, |builder| builder.state_dir(folder))
}

/// The Write Protect state outlasts power cycles: where nothing is kept, hosts are not told that there is one.
pub(crate) fn hosts_write_protect_only_where_that_is_kept<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let (_, identify) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(identify[531], 0, "NWPC");
    let (response, features) = raw.call_for(admin, wire::get_log_page(0x12, 0, 0, 1024, false), 1024);
    assert!(response.status().is_success());
    assert_eq!((features[4 * 0x83], features[4 * 0x84]), (1, 0), "feature identifiers supported");
    for state in 0..3 {
        let response = raw.call(admin, Sqe::new(0x09).nsid(1).cdw(10, 0x84).cdw(11, state));
        assert_status(&response, Status::INVALID_FIELD, "Set Features");
    }
    assert_status(&raw.call(admin, Sqe::new(0x0a).nsid(1).cdw(10, 0x84)), Status::INVALID_FIELD, "Get Features");
    assert!(raw.write(io, 1, 0, &[1; BLOCK]).is_success());
    // The operator's way holds until the target ends, and is told as what it is.
    setup.target.as_ref().expect("running").set_write_protection(NQN, 1, WriteProtection::Protected).expect("set");
    let (_, identify) = raw.call_for(admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(identify[99] & 1, 1, "NSATTR");
    let status = raw.write(io, 1, 0, &[1; BLOCK]);
    assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "{status}");
}

pub(crate) fn write_protection_set_by_one_host_holds_for_all<R: Rig>() {
    let folder = tempfile::tempdir().expect("a folder");
    let setup = keeping::<R>(folder.path());
    let bystander = setup.bystander();
    let (mut raw, admin, io) = setup.ready();
    let mut other = setup.raw_as(0x77);
    let (other_admin, other_io) = other.bring_up();
    other.host.send(other_admin, &Sqe::new(0x0c).cid(0x9000).0).expect("sent");
    let (_, identify) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(identify[531] & 1, 1, "NWPC");
    let set = |state: u32| Sqe::new(0x09).nsid(1).cdw(10, 0x84).cdw(11, state);
    assert!(other.write(other_io, 1, 0, &[0x5a; BLOCK]).is_success());
    assert!(raw.call(admin, set(1)).status().is_success());
    // The other host is told, finds the bit, and cannot write by any command; reading goes on.
    let event = other.host.response(other_admin, LIMIT).expect("an event");
    assert_eq!((event.cid(), event.dword0()), (0x9000, 0x0004_0002));
    let (_, identify) = other.call_for(other_admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(identify[99] & 1, 1, "NSATTR");
    for host in [(&mut raw, io), (&mut other, other_io)] {
        let (host, io) = host;
        let status = host.write(io, 1, 0, &[0xa5; BLOCK]);
        assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "{status}");
        let response = host.call(io, wire::block_command(8, 1, 0, 1));
        assert_status(&response, Status::NAMESPACE_WRITE_PROTECTED, "Write Zeroes");
        let (status, _) = copy(host, io, 100, &[(0, 1)]);
        assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "Copy");
        assert_eq!(host.read(io, 1, 0, 1).expect("a read"), [0x5a; BLOCK]);
    }
    assert!(raw.call(admin, set(0)).status().is_success());
    assert!(other.write(other_io, 1, 0, &[0xa5; BLOCK]).is_success(), "writable again");
    // The operator's way.
    let target = setup.target.as_ref().expect("a target");
    target.set_write_protection(NQN, 1, WriteProtection::Protected).expect("protected");
    let status = raw.write(io, 1, 0, &[0x11; BLOCK]);
    assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "{status}");
    assert!(target.set_write_protection(NQN, 99, WriteProtection::None).is_err(), "no such namespace");
    assert!(target.set_write_protection("nqn.2026-01.io.x:y", 1, WriteProtection::None).is_err(), "no such subsystem");
    target.set_write_protection(NQN, 1, WriteProtection::None).expect("writable");
    assert!(raw.write(io, 1, 0, &[0x11; BLOCK]).is_success());
    bystander.check();
}

/// Protection is answered only when writes in progress have ended, and what was written is flushed.
pub(crate) fn write_protection_waits_for_writes_in_progress<R: Rig>() {
    let folder = tempfile::tempdir().expect("a folder");
    let setup = keeping::<R>(folder.path());
    let (mut raw, admin, io) = setup.ready();
    let set = Sqe::new(0x09).nsid(1).cdw(10, 0x84).cdw(11, 1).cid(0x500);
    setup.faults.stall();
    let zeroes = wire::block_command(8, 1, 0, 8).cid(0x600);
    raw.host.send(io, &zeroes.0).expect("sent");
    setup.until_held(&mut raw, 1);
    raw.host.send(admin, &set.0).expect("sent");
    assert!(raw.host.response(admin, Duration::from_millis(200)).is_err(), "answered while a write was in progress");
    setup.faults.release();
    let zeroed = raw.host.response(io, LIMIT).expect("an answer");
    assert!(zeroed.cid() == 0x600 && zeroed.status().is_success());
    let response = raw.host.response(admin, LIMIT).expect("an answer");
    assert!(response.cid() == 0x500 && response.status().is_success(), "{}", response.status());
    // A flush that fails leaves the namespace as it was.
    assert!(raw.call(admin, Sqe::new(0x09).nsid(1).cdw(10, 0x84).cdw(11, 0)).status().is_success());
    setup.faults.fail_next(1);
    let response = raw.call(admin, set);
    assert_status(&response, Status::WRITE_FAULT, "the flush failed");
    assert!(raw.write(io, 1, 0, &[1; BLOCK]).is_success(), "still writable");
}
