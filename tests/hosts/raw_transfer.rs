//! Data by RDMA: keys, depths, descriptor lists, in-capsule sizes.

use farside::host::raw::RawQueue;
use farside::host::wire::{self, Sqe};
use farside::rdma::Access;
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, Rig, Setup, small};

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 11) as u8 ^ salt as u8).collect()
}

pub(crate) fn wrong_key_ends_its_queue_and_writes_nothing<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    for case in 0..6 {
        let (mut raw, _, io) = setup.ready();
        assert!(raw.write(io, 1, 0, &[0x5a; 4096]).is_success());
        let mut buffer = raw.host.take(4096).expect("memory");
        buffer.as_mut_slice().fill(0xa5);
        let (rkey, addr) = (raw.host.rkey(), buffer.addr());
        let local_only = raw.host.register(Access::Local).expect("registered");
        let withdrawn = raw.host.register(Access::Remote).expect("registered");
        raw.host.deregister(withdrawn);
        let (opcode, sgl) = match case {
            0 => (1, wire::keyed(addr, 4096, rkey ^ 1, false)),
            1 => (2, wire::keyed(addr, 4096, rkey ^ 1, true)),
            2 => (2, wire::keyed(addr, 4096, local_only.rkey, false)),
            3 => (1, wire::keyed(addr, 4096, withdrawn.rkey, false)),
            4 => (1, wire::keyed(u64::MAX - 100, 4096, rkey, false)),
            _ => (2, wire::keyed(addr + (1 << 40), 4096, rkey, false)),
        };
        raw.host.send(io, &wire::block_command(opcode, 1, 0, 8).cid(77).sgl(sgl).0).expect("sent");
        assert!(raw.host.end_of(io, LIMIT).is_some(), "case {case}: the queue goes on");
        assert_eq!(raw.host.waiting(io), 0, "case {case}: it was answered");
        raw.host.give(buffer);
        let mut fresh = setup.raw_as(3);
        let (_, io) = fresh.bring_up();
        assert_eq!(fresh.read(io, 1, 0, 8).expect("a read"), [0x5a; 4096], "case {case}: the namespace was written");
    }
    bystander.check();
}

pub(crate) fn key_is_invalidated_when_and_only_when_asked<R: Rig>() {
    for remote_invalidate in [true, false] {
        let mut options = small();
        options.remote_invalidate = remote_invalidate;
        let setup = Setup::<R>::with(R::new(), options);
        let (mut raw, _, io) = setup.ready();
        let buffer = raw.host.take(8192).expect("memory");
        for (opcode, ask) in [(1, false), (2, false), (1, true), (2, true), (2, true)] {
            let mr = raw.host.register(Access::Remote).expect("registered");
            let sgl = wire::keyed(buffer.addr(), 4096, mr.rkey, ask);
            let response = raw.call(io, wire::block_command(opcode, 1, 0, 8).sgl(sgl));
            assert!(response.status().is_success());
            assert_eq!(response.invalidated, (ask && remote_invalidate).then_some(mr.rkey));
            raw.host.deregister(mr);
        }
        // A refused command's key may be invalidated too; another one never is.
        let mr = raw.host.register(Access::Remote).expect("registered");
        let sgl = wire::keyed(buffer.addr(), 4096, mr.rkey, true);
        let response = raw.call(io, wire::block_command(2, 1, u64::MAX, 8).sgl(sgl));
        assert_eq!(response.status(), Status::LBA_OUT_OF_RANGE.dnr());
        assert!(response.invalidated.is_none_or(|rkey| remote_invalidate && rkey == mr.rkey));
        raw.host.deregister(mr);
        // One of a list asks.
        let mr = raw.host.register(Access::Remote).expect("registered");
        let list = [
            wire::keyed(buffer.addr(), 4096, raw.host.rkey(), false),
            wire::keyed(buffer.addr() + 4096, 4096, mr.rkey, true),
        ]
        .concat();
        let sqe = wire::block_command(2, 1, 0, 16).cid(5).sgl(wire::by_offset(0, 32, 0x31));
        let response = raw.host.call(io, &[&sqe.0[..], &list].concat(), LIMIT).expect("an answer");
        assert!(response.status().is_success());
        assert_eq!(response.invalidated, remote_invalidate.then_some(mr.rkey));
        raw.host.deregister(mr);
        raw.host.give(buffer);
        raw.alive(io);
    }
}

pub(crate) fn reads_never_exceed_the_depth_that_the_host_gave<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    for depth in [1, 2, 3, 16] {
        let mut raw = setup.raw();
        raw.admin_up();
        let queue = RawQueue { responder_resources: depth, ..RawQueue::new(1, 64) };
        let io = raw.queue(queue).expect("a connection");
        assert!(raw.connect_io(io, 1, 63).status().is_success());
        // Sixteen descriptors, several commands at once: many more READs than may be under way.
        let mut buffers: Vec<_> = (0..8).map(|_| raw.host.take(64 << 10).expect("memory")).collect();
        for (at, buffer) in buffers.iter_mut().enumerate() {
            buffer.as_mut_slice().copy_from_slice(&pattern(64 << 10, at as u64 + u64::from(depth)));
        }
        for (at, buffer) in buffers.iter().enumerate() {
            let list: Vec<u8> = (0..16)
                .flat_map(|piece| wire::keyed(buffer.addr() + piece * 4096, 4096, raw.host.rkey(), false))
                .collect();
            let sqe = wire::block_command(1, 1, at as u64 * 128, 128).cid(at as u16).sgl(wire::by_offset(0, 256, 0x31));
            raw.host.post(io, &[&sqe.0[..], &list].concat()).expect("posted");
        }
        for _ in 0..8 {
            let response = raw.host.response(io, LIMIT).expect("an answer");
            assert!(response.status().is_success(), "depth {depth}: {}", response.status());
        }
        for at in 0..8 {
            let bytes = raw.read(io, 1, at * 128, 128).expect("a read");
            assert_eq!(bytes, pattern(64 << 10, at + u64::from(depth)), "depth {depth}, command {at}");
        }
        buffers.into_iter().for_each(|buffer| raw.host.give(buffer));
    }
    bystander.check();
}

pub(crate) fn sixteen_descriptors_carry_a_megabyte<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, io) = setup.ready();
    let data = pattern(1 << 20, 3);
    let mut buffer = raw.host.take(1 << 20).expect("memory");
    buffer.as_mut_slice().copy_from_slice(&data);
    // Pieces of unequal length, the last longer than needed, one empty.
    let mut list = Vec::new();
    let mut at = 0;
    for piece in 0..16u64 {
        let len = match piece {
            3 => 0,
            15 => (1 << 20) - at,
            _ => 4096 * (piece + 1),
        };
        list.extend(wire::keyed(buffer.addr() + at, len as u32, raw.host.rkey(), false));
        at += len;
    }
    let blocks = (1u32 << 20) / BLOCK as u32;
    for opcode in [1, 2] {
        let sqe = wire::block_command(opcode, 1, 64, blocks).cid(opcode.into()).sgl(wire::by_offset(0, 256, 0x31));
        let response = raw.host.call(io, &[&sqe.0[..], &list].concat(), LIMIT).expect("an answer");
        assert!(response.status().is_success(), "opcode {opcode}: {}", response.status());
        assert_eq!(buffer.as_slice(), data);
        buffer.as_mut_slice().fill(if opcode == 1 { 0 } else { 1 });
        if opcode == 1 {
            continue;
        }
    }
    assert_eq!(raw.read(io, 1, 64, 64).expect("a read"), data[..64 * BLOCK]);
    raw.host.give(buffer);
}

/// Below 256 bytes the list of sixteen does not fit, so there is one descriptor (MSDBD), in a list or without.
pub(crate) fn small_capsules_carry_one_descriptor<R: Rig>() {
    for (size, most) in [(0u32, 1), (16, 1), (240, 1), (256, 16)] {
        let mut options = small();
        options.in_capsule_data = size;
        let setup = Setup::<R>::with(R::new(), options);
        let (mut raw, admin, io) = setup.ready();
        let identify = raw.identify_controller(admin);
        assert_eq!((identify.in_capsule(), identify.msdbd), (size, most), "IOCCSZ and MSDBD");
        let buffer = raw.host.take(32 << 10).expect("memory");
        for count in [1, 2, 15, 16] {
            let list: Vec<u8> = (0..u64::from(count))
                .flat_map(|piece| wire::keyed(buffer.addr() + piece * 512, 512, raw.host.rkey(), false))
                .collect();
            let sqe = wire::block_command(2, 1, 0, u32::from(count)).cid(count.into());
            let sqe = sqe.sgl(wire::by_offset(0, list.len() as u32, 0x31));
            let capsule = [&sqe.0[..], &list].concat();
            let fits = list.len() <= size as usize;
            // What does not fit the capsule may not be sent at all: the command then names bytes that did not come.
            let sent = if fits { &capsule[..] } else { &sqe.0[..] };
            let status = raw.host.call(io, sent, LIMIT).expect("an answer").status();
            let expected = match () {
                () if !fits => Status::DATA_SGL_LENGTH_INVALID.dnr(),
                () if count > most => Status::INVALID_SGL_COUNT.dnr(),
                () => Status::SUCCESS,
            };
            assert_eq!(status, expected, "{count} descriptors in {size} bytes");
        }
        raw.host.give(buffer);
        raw.alive(io);
    }
}

pub(crate) fn every_in_capsule_size_works<R: Rig>() {
    for size in [0u32, 512, 4096, 8192, 16_384] {
        let mut options = small();
        options.in_capsule_data = size;
        let setup = Setup::<R>::with(R::new(), options);
        let (mut raw, admin, io) = setup.ready();
        let identify = raw.identify_controller(admin);
        assert_eq!(identify.in_capsule(), size, "IOCCSZ and SGLS");
        assert_eq!(identify.icdoff, 0);
        if size > 0 {
            for len in [512, size] {
                let data = pattern(len as usize, u64::from(len));
                let sqe = wire::block_command(1, 1, 0, len / 512).cid(3).sgl(wire::by_offset(0, len, 0x01));
                let response = raw.host.call(io, &[&sqe.0[..], &data].concat(), LIMIT).expect("an answer");
                assert!(response.status().is_success(), "{len} of {size}: {}", response.status());
                assert_eq!(raw.read(io, 1, 0, len / 512).expect("a read"), data);
            }
        }
        let sqe = wire::block_command(1, 1, 0, 1).cid(4).sgl(wire::by_offset(u64::from(size), 512, 0x01));
        let expected = if size == 0 { Status::DATA_SGL_LENGTH_INVALID } else { Status::SGL_OFFSET_INVALID };
        assert_eq!(raw.host.call(io, &sqe.0, LIMIT).expect("an answer").status(), expected.dnr());
        assert!(raw.write(io, 1, 0, &pattern(8192, 9)).is_success());
        assert_eq!(raw.read(io, 1, 0, 16).expect("a read"), pattern(8192, 9));
        assert!(raw.call(io, Sqe::new(0).nsid(1)).status().is_success());
    }
}
