//! Capsules: lengths, descriptors, flags, block ranges.

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use nvme::Status;

use crate::rig::{BLOCK, BLOCKS, LIMIT, Raw, Rig, Setup, assert_status, small};

/// Sends a write of `len` bytes whose capsule carries `arrives` bytes after the command.
fn inline_write<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, sgl: [u8; 16], blocks: u32, data: &[u8]) -> Status {
    let cid = raw.cid();
    let sqe = wire::block_command(1, 1, 0, blocks).cid(cid).sgl(sgl);
    let capsule = [&sqe.0[..], data].concat();
    let response = raw.host.call(io, &capsule, LIMIT).expect("an answer");
    assert_eq!(response.cid(), cid);
    response.status()
}

/// Blocks 0 to 63 of namespace 1 hold what the scenario wrote before.
fn untouched<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, what: &str) {
    let bytes = raw.read(io, 1, 0, 64).expect("a read");
    assert!(bytes.iter().all(|byte| *byte == 0x5a), "{what}: the namespace was written");
}

fn prepared<R: Rig>(setup: &Setup<R>) -> (Raw<R>, RawQueueId, RawQueueId) {
    let (mut raw, admin, io) = setup.ready();
    assert!(raw.write(io, 1, 0, &[0x5a; 64 * BLOCK]).is_success());
    (raw, admin, io)
}

pub(crate) fn in_capsule_descriptors_are_checked_against_what_arrived<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, _, io) = prepared(&setup);
    let page = [0xa5; 4096];
    // Offset, length, blocks written, bytes that arrive; all refused: the offset lies outside of what arrived, or the data end
    // outside of it or are fewer than the command's.
    let (outside, length) = (Status::SGL_OFFSET_INVALID.dnr(), Status::DATA_SGL_LENGTH_INVALID.dnr());
    let cases: [(u64, u32, u32, usize, Status); 14] = [
        (0xffff_ffff_ffff_fe00, 0x1000, 8, 4096, outside),
        (0xffff_ffff_ffff_0500, 0x1_0000, 128, 4096, outside),
        (0, 0x1000, 8, 4095, length),
        (0, 0x1000, 8, 0, length),
        (4097, 512, 1, 4096, outside),
        (101, 512, 1, 100, outside),
        (4096, 512, 1, 4096, length),
        (4095, 512, 1, 4096, length),
        (3585, 512, 1, 4096, length),
        (0, 0xffff_ffff, 8, 4096, length),
        (0, 512, 2, 4096, length),
        (0, 0x1000, 8, 100, length),
        (1 << 32, 512, 1, 4096, outside),
        (0, 1, 1, 4096, length),
    ];
    for (offset, len, blocks, arrives, expected) in cases {
        let status = inline_write(&mut raw, io, wire::by_offset(offset, len, 0x01), blocks, &page[..arrives]);
        assert_eq!(status, expected, "offset {offset:x} length {len:x}, {arrives} arrive");
        untouched(&mut raw, io, "in-capsule write");
    }
    raw.alive(io);
    bystander.check();
}

pub(crate) fn in_capsule_offset_carries_the_right_bytes<R: Rig>() {
    let mut options = small();
    options.in_capsule_data = 16 << 10;
    let setup = Setup::<R>::with(R::new(), options);
    let (mut raw, _, io) = prepared(&setup);
    let data: Vec<u8> = (0..16_384u32).map(|at| (at / 7) as u8).collect();
    for (offset, blocks) in [(0usize, 8usize), (0x2000, 8), (512, 1), (13, 3), (16_384 - 512, 1), (1, 31)] {
        let len = blocks * BLOCK;
        let sgl = wire::by_offset(offset as u64, len as u32, 0x01);
        let status = inline_write(&mut raw, io, sgl, blocks as u32, &data);
        assert!(status.is_success(), "offset {offset}: {status}");
        assert_eq!(raw.read(io, 1, 0, blocks as u32).expect("a read"), data[offset..offset + len], "offset {offset}");
    }
    // Not a byte more than arrived, though the receive has room.
    let sgl = wire::by_offset(0x2000, 0x1000, 0x01);
    let status = inline_write(&mut raw, io, sgl, 8, &data[..0x2fff]);
    assert_eq!(status, Status::DATA_SGL_LENGTH_INVALID.dnr());
}

pub(crate) fn descriptor_types_are_checked_on_every_command<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, io) = prepared(&setup);
    let mut buffer = raw.host.take(4096).expect("memory");
    buffer.as_mut_slice().fill(0xa5);
    for kind in 0..=255u8 {
        if [0x40, 0x4f, 0x01, 0x31].contains(&kind) {
            continue;
        }
        let mut sgl = wire::by_offset(buffer.addr(), 4096, kind);
        for sqe in [wire::block_command(1, 1, 0, 8), wire::block_command(2, 1, 0, 8), wire::block_command(5, 1, 0, 8)] {
            assert_status(&raw.call(io, sqe.sgl(sgl)), Status::SGL_TYPE_INVALID, &format!("type {kind:02x}"));
        }
        sgl[11..15].copy_from_slice(&raw.host.rkey().to_le_bytes());
        assert_status(&raw.call(admin, wire::identify(1, 0, 0).sgl(sgl)), Status::SGL_TYPE_INVALID, "Identify");
    }
    // Data for the host cannot go into its capsule.
    let inline = wire::by_offset(0, 4096, 0x01);
    assert_status(&raw.call(io, wire::block_command(2, 1, 0, 8).sgl(inline)), Status::SGL_TYPE_INVALID, "Read");
    assert_status(&raw.call(admin, wire::identify(1, 0, 0).sgl(inline)), Status::SGL_TYPE_INVALID, "Identify");
    // A descriptor shorter than the data.
    let short = raw.keyed(&buffer, 4095);
    for opcode in [1, 2, 5] {
        let response = raw.call(io, wire::block_command(opcode, 1, 0, 8).sgl(short));
        assert_status(&response, Status::DATA_SGL_LENGTH_INVALID, "a short descriptor");
    }
    let none = raw.call(io, wire::block_command(2, 1, 0, 8).sgl([0; 16]));
    assert_status(&none, Status::DATA_SGL_LENGTH_INVALID, "no descriptor");
    let none = raw.call(io, wire::block_command(1, 1, 0, 8).sgl(wire::keyed(0, 0, 0, false)));
    assert_status(&none, Status::DATA_SGL_LENGTH_INVALID, "an empty keyed descriptor");
    // A longer one is fine, and only the data are moved.
    buffer.as_mut_slice().fill(0);
    let long = raw.keyed(&buffer, 4096);
    assert!(raw.call(io, wire::block_command(2, 1, 0, 1).sgl(long)).status().is_success());
    assert!(buffer.as_slice()[..512].iter().all(|byte| *byte == 0x5a));
    assert!(buffer.as_slice()[512..].iter().all(|byte| *byte == 0));
    raw.host.give(buffer);
    untouched(&mut raw, io, "bad descriptors");
    bystander.check();
}

pub(crate) fn descriptor_lists_are_checked<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = prepared(&setup);
    let buffer = raw.host.take(64 * BLOCK).expect("memory");
    let rkey = raw.host.rkey();
    let piece = |at: u64, invalidate| wire::keyed(buffer.addr() + at * 512, 512, rkey, invalidate);
    let list = |count: u64| (0..count).flat_map(|at| piece(at, false)).collect::<Vec<u8>>();
    let mut write = |blocks: u32, offset: u64, len: u32, data: &[u8]| {
        inline_write(&mut raw, io, wire::by_offset(offset, len, 0x31), blocks, data)
    };
    let code = |status: Status| status.code();
    assert_eq!(code(write(17, 0, 17 * 16, &list(17))), Status::INVALID_SGL_COUNT.code(), "17 descriptors");
    assert_eq!(code(write(1, 0, 15, &list(1))), Status::INVALID_SGL_SEGMENT.code(), "15 bytes");
    assert_eq!(code(write(2, 0, 24, &list(2))), Status::INVALID_SGL_SEGMENT.code(), "one and a half");
    assert_eq!(code(write(2, 0, 32, &list(2)[..31])), Status::DATA_SGL_LENGTH_INVALID.code(), "cut");
    assert_eq!(code(write(2, u64::MAX - 15, 32, &list(2))), Status::SGL_OFFSET_INVALID.code(), "wild");
    assert_eq!(code(write(3, 0, 32, &list(2))), Status::DATA_SGL_LENGTH_INVALID.code(), "two of three blocks");
    let nested = [&list(1)[..], &wire::by_offset(0, 16, 0x31)].concat();
    assert_eq!(code(write(2, 0, 32, &nested)), Status::SGL_TYPE_INVALID.code(), "a list in a list");
    let inline = [&list(1)[..], &wire::by_offset(0, 512, 0x01)].concat();
    assert_eq!(code(write(2, 0, 32, &inline)), Status::SGL_TYPE_INVALID.code(), "in-capsule data in a list");
    assert_eq!(code(write(1, 0, 0, &[])), Status::INVALID_SGL_COUNT.code(), "an empty list");
    untouched(&mut raw, io, "bad lists");
    // Longer than the data is legal, and the keys of what is not needed are never used.
    let longer = [piece(0, false), wire::keyed(0, 0xff_ffff, !rkey, false)].concat();
    let sqe = wire::block_command(2, 1, 0, 1).cid(9).sgl(wire::by_offset(0, 32, 0x31));
    let response = raw.host.call(io, &[&sqe.0[..], &longer].concat(), LIMIT).expect("an answer");
    assert!(response.status().is_success(), "a list longer than the data: {}", response.status());
    assert_eq!(buffer.as_slice()[..BLOCK], [0x5a; BLOCK]);
    raw.host.give(buffer);
    raw.alive(io);
}

pub(crate) fn short_capsule_ends_its_queue_alone<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    for len in [1, 16, 63] {
        let (mut raw, admin, io) = prepared(&setup);
        // A whole command before it, so that stale bytes of a write lie in every receive.
        let full = wire::block_command(1, 1, 0, 1).cid(1).sgl(wire::by_offset(0, 512, 0x01)).0;
        let capsule = [&full[..], &[0x5a; 512]].concat();
        for _ in 0..64 {
            assert!(raw.host.call(io, &capsule, LIMIT).expect("an answer").status().is_success());
        }
        raw.host.send(io, &full[..len]).expect("sent");
        assert!(raw.host.end_of(io, LIMIT).is_some(), "{len} bytes: the queue goes on");
        assert_eq!(raw.host.waiting(io), 0, "{len} bytes: it was taken for a command");
        assert!(
            raw.call(admin, wire::property_get(0x1c, false)).status().is_success() || raw.host.down(admin).is_some()
        );
    }
    bystander.check();
}

pub(crate) fn more_commands_than_entries_end_their_queue_alone<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, _, _) = prepared(&setup);
    let mut queue = farside::host::raw::RawQueue::new(2, 8);
    (queue.entries, queue.receives) = (32, 32);
    let io = raw.queue(queue).expect("a connection");
    assert!(raw.connect_io(io, 2, 7).status().is_success());
    setup.faults.stall();
    for cid in 0..20 {
        let sqe = wire::block_command(8, 1, 0, 1).cid(cid);
        let _ = raw.host.post(io, &sqe.0);
    }
    raw.host.turn();
    assert!(raw.host.end_of(io, LIMIT).is_some(), "20 commands in a queue of 8");
    setup.faults.release();
    bystander.check();
}

pub(crate) fn flags_that_fabrics_forbids_are_refused<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = prepared(&setup);
    let mut buffer = raw.host.take(4096).expect("memory");
    buffer.as_mut_slice().fill(0xa5);
    let sgl = raw.keyed(&buffer, 4096);
    // 41h: the first half of a pair that does not exist.
    for flags in [0x00, 0x80, 0xc0, 0x43, 0x41] {
        for (queue, sqe) in [(io, wire::block_command(1, 1, 0, 8)), (admin, wire::identify(1, 0, 0))] {
            let mut sqe = sqe.sgl(sgl);
            sqe.0[1] = flags;
            let status = raw.call(queue, sqe).status();
            assert_eq!(status.code(), Status::INVALID_FIELD.code(), "flags {flags:02x}: {status}");
        }
    }
    for opcode in [0x03, 0x0a, 0x7e, 0x80, 0xff] {
        let status = raw.call(io, Sqe::new(opcode).nsid(1).sgl(sgl)).status();
        assert_eq!(status.code(), Status::INVALID_OPCODE.code(), "opcode {opcode:02x}: {status}");
    }
    for nsid in [0, 4, 1024, 0xffff_fffe, 0xffff_ffff] {
        let status = raw.call(io, wire::block_command(1, nsid, 0, 8).sgl(sgl)).status();
        assert_eq!(status.code(), Status::INVALID_NAMESPACE.code(), "namespace {nsid:x}: {status}");
    }
    raw.host.give(buffer);
    untouched(&mut raw, io, "bad flags");
}

pub(crate) fn block_ranges_and_transfer_size_have_both_sides<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = prepared(&setup);
    let mut buffer = raw.host.take(1 << 20).expect("memory");
    buffer.as_mut_slice().fill(0xa5);
    let long = wire::keyed(buffer.addr(), 0xff_ffff, raw.host.rkey(), false);
    for (slba, blocks) in
        [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (u64::MAX - 7, 8), (1 << 55, 1), (BLOCKS - 7, 8)]
    {
        for opcode in [1, 2, 5, 8] {
            let response = raw.call(io, wire::block_command(opcode, 1, slba, blocks).sgl(long));
            assert_status(&response, Status::LBA_OUT_OF_RANGE, &format!("opcode {opcode} at {slba:x}"));
        }
    }
    let most = (1 << 20) / BLOCK as u32;
    let sgl = raw.keyed(&buffer, 1 << 20);
    for opcode in [2, 1, 5] {
        let response = raw.call(io, wire::block_command(opcode, 3, 0, most).sgl(sgl));
        assert!(
            response.status().is_success() || response.status().code() == Status::COMPARE_FAILURE.code(),
            "opcode {opcode} of MDTS: {}",
            response.status()
        );
        for blocks in [most + 1, 0x8000, 0x1_0000] {
            let response = raw.call(io, wire::block_command(opcode, 3, 0, blocks).sgl(long));
            assert_status(&response, Status::INVALID_FIELD, &format!("opcode {opcode} of {blocks} blocks"));
        }
    }
    // The last block is there.
    assert!(raw.write(io, 1, BLOCKS - 1, &[1; BLOCK]).is_success());
    assert_eq!(raw.read(io, 1, BLOCKS - 1, 1).expect("a read"), [1; BLOCK]);
    raw.host.give(buffer);
    untouched(&mut raw, io, "bad ranges");
}

pub(crate) fn ranges_of_dataset_management_are_checked_before_any_effect<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = prepared(&setup);
    let dsm = |count: u32| Sqe::new(9).nsid(1).cdw(10, count - 1).cdw(11, 4);
    let good = wire::dsm_range(0, 64);
    for bad in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX)] {
        let ranges = [good, wire::dsm_range(bad.0, bad.1)].concat();
        let response = raw.call_with(io, dsm(2), &ranges);
        assert_status(&response, Status::LBA_OUT_OF_RANGE, &format!("{bad:x?}"));
        untouched(&mut raw, io, "a list with one bad range");
    }
    let response = raw.call_with(io, dsm(2), &good);
    assert_status(&response, Status::DATA_SGL_LENGTH_INVALID, "fewer bytes than ranges");
    untouched(&mut raw, io, "a short list");
    let ranges: Vec<u8> = (0..256).flat_map(|at| wire::dsm_range(1000 + at, 1)).collect();
    assert!(raw.call_with(io, dsm(256), &ranges).status().is_success());
    assert!(raw.call_with(io, dsm(1), &good).status().is_success());
    assert!(raw.read(io, 1, 0, 64).expect("a read").iter().all(|byte| *byte == 0), "deallocated blocks read as zeroes");
}

/// xorshift64*: the seed alone decides.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

pub(crate) fn random_capsules_are_answered_or_end_their_queue_alone<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let seed = std::env::var("FARSIDE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
    println!("FARSIDE_SEED={seed}");
    let mut state = seed;
    let mut answered = 0;
    let mut ended = 0;
    for round in 0..40 {
        let (mut raw, admin, io) = setup.ready();
        for step in 0..100 {
            let queue = if random(&mut state) & 1 == 0 { io } else { admin };
            let mut capsule: Vec<u8> = (0..64 + random(&mut state) % 600).map(|_| random(&mut state) as u8).collect();
            // Mostly near the truth: a random command is refused at its first field. Namespace 2 is the bystander's.
            capsule[0] = [0, 1, 2, 5, 6, 8, 9, 0x0c, 0x7f, capsule[0]][random(&mut state) as usize % 10];
            capsule[1] = if random(&mut state) < u64::MAX / 8 { capsule[1] } else { 0x40 };
            let nsid = if capsule[0] == 0x7f { 4 } else { [1, 3][random(&mut state) as usize % 2] };
            capsule[4..8].copy_from_slice(&u32::to_le_bytes(nsid));
            if random(&mut state) > u64::MAX / 4 {
                capsule[39] = [0x40, 0x4f, 0x01, 0x31][random(&mut state) as usize % 4];
            }
            if random(&mut state) > u64::MAX / 2 {
                capsule[44..64].fill(0);
            }
            capsule[2..4].copy_from_slice(&u16::to_le_bytes(step));
            if raw.host.send(queue, &capsule).is_err() {
                break;
            }
        }
        // Event requests may be held; everything else is answered, or its queue ends.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
        while std::time::Instant::now() < deadline && raw.host.down(io).is_none() && raw.host.down(admin).is_none() {
            raw.host.turn();
            let (left, _) = (raw.host.waiting(io) + raw.host.waiting(admin), round);
            if left >= 90 {
                break;
            }
        }
        answered += raw.host.waiting(io) + raw.host.waiting(admin);
        ended += usize::from(raw.host.down(io).is_some()) + usize::from(raw.host.down(admin).is_some());
    }
    println!("{answered} capsules answered, {ended} queues ended");
    assert!(answered > 100, "almost nothing was answered");
    let (mut raw, _, io) = setup.ready();
    raw.alive(io);
    bystander.check();
}
