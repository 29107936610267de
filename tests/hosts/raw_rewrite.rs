//! The host's application goes on writing to pages that are under way, as direct I/O and memory maps allow: the target reads host
//! memory once, what it checked is what it uses, and nobody's queue ends for it.

use std::collections::HashSet;
use std::time::Instant;

use farside::host::raw::{RawQueueId, RawResponse};
use farside::host::wire::{self, Sqe};
use farside::mem::Buffer;
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, Raw, Rig, Setup};

/// Sends a command whose data lie in `buffer`, and rewrites them until it is answered.
fn call_while<R: Rig>(
    raw: &mut Raw<R>,
    io: RawQueueId,
    sqe: Sqe,
    buffer: &mut Buffer,
    mut rewrite: impl FnMut(usize, &mut [u8]),
) -> RawResponse {
    let len = buffer.as_slice().len();
    let (cid, sgl) = (raw.cid(), raw.keyed(buffer, len));
    raw.host.send(io, &sqe.cid(cid).sgl(sgl).0).expect("sent");
    let deadline = Instant::now() + LIMIT;
    let mut turn = 0;
    while raw.host.waiting(io) == 0 {
        assert!(Instant::now() < deadline && raw.host.down(io).is_none(), "no answer");
        turn += 1;
        rewrite(turn, buffer.as_mut_slice());
        raw.host.turn();
    }
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert_eq!(response.cid(), cid);
    response
}

/// From the end to the beginning, against the way the target reads.
fn flip(turn: usize, bytes: &mut [u8]) {
    for piece in bytes.chunks_mut(4096).rev() {
        piece.fill(if turn.is_multiple_of(2) { 0xaa } else { 0x55 });
    }
}

pub(crate) fn data_rewritten_under_way_are_read_once<R: Rig>() {
    const LEN: usize = 1 << 20;
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, _, io) = setup.ready();
    let mut buffer = raw.host.take(LEN).expect("host memory");
    let blocks = (LEN / BLOCK) as u32;
    let deadline = Instant::now() + LIMIT;
    let mut mixed = 0;
    while mixed < 3 {
        assert!(Instant::now() < deadline, "no write was rewritten under way");
        buffer.as_mut_slice().fill(0xaa);
        let response = call_while(&mut raw, io, wire::block_command(1, 1, 0, blocks), &mut buffer, flip);
        assert!(response.status().is_success(), "{}", response.status());
        let stored = raw.read(io, 1, 0, blocks).expect("a read");
        assert!(stored.iter().all(|byte| [0xaa, 0x55].contains(byte)), "bytes that the host never had there");
        assert!(raw.read(io, 1, 0, blocks).expect("a read") == stored, "the namespace changed by itself");
        mixed += usize::from(stored.contains(&0xaa) && stored.contains(&0x55));
        // A Compare of data that change says one thing or the other.
        let response = call_while(&mut raw, io, wire::block_command(5, 1, 0, blocks), &mut buffer, flip);
        assert!([Status::SUCCESS.code(), Status::COMPARE_FAILURE.code()].contains(&response.status().code()));
    }
    bystander.check();
}

pub(crate) fn ranges_rewritten_under_way_are_checked_and_used_as_one_copy<R: Rig>() {
    const RANGES: u64 = 256;
    /// Sets every range beyond the namespace, or back inside.
    fn move_out_and_in(turn: usize, bytes: &mut [u8]) {
        for range in bytes.chunks_mut(16).rev() {
            range[12] = (turn % 2) as u8;
        }
    }
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, _, io) = setup.ready();
    let mut buffer = raw.host.take(RANGES as usize * 16).expect("host memory");
    let full = vec![0x5a; 2 * RANGES as usize * BLOCK];
    let every_other: Vec<u8> = full
        .chunks(BLOCK)
        .enumerate()
        .flat_map(|(at, block)| block.iter().map(move |byte| byte * (at % 2) as u8))
        .collect();
    let deadline = Instant::now() + LIMIT;
    let mut seen = HashSet::new();
    while seen.len() < 2 {
        assert!(Instant::now() < deadline, "no list was rewritten in time: {seen:?}");
        assert!(raw.write(io, 1, 0, &full).is_success());
        let ranges: Vec<u8> = (0..RANGES).flat_map(|at| wire::dsm_range(2 * at, 1)).collect();
        buffer.as_mut_slice().copy_from_slice(&ranges);
        let dsm = Sqe::new(9).nsid(1).cdw(10, RANGES as u32 - 1).cdw(11, 4);
        let response = call_while(&mut raw, io, dsm, &mut buffer, move_out_and_in);
        let left = raw.read(io, 1, 0, 2 * RANGES as u32).expect("a read");
        if response.status().is_success() {
            assert!(left == every_other, "what was deallocated is not what the list said");
        } else {
            assert_eq!(response.status().code(), Status::LBA_OUT_OF_RANGE.code());
            assert!(left == full, "a refused list had an effect");
        }
        seen.insert(response.status().is_success());
    }
    bystander.check();
}
