//! Fused Compare and Write: pairs that fit and pairs that do not, and pairs against everything else on their blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, Raw, Rig, Setup, assert_status};

const FIRST: u8 = 0x41;
const SECOND: u8 = 0x42;

fn flagged(mut sqe: Sqe, flags: u8) -> Sqe {
    sqe.0[1] = flags;
    sqe
}

/// Sends two commands with data one behind the other; their statuses, in the order of the commands.
fn pair<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, halves: [(Sqe, &[u8]); 2]) -> [Status; 2] {
    let mut buffers = Vec::new();
    let mut cids = [0; 2];
    for (at, (sqe, data)) in halves.into_iter().enumerate() {
        let mut buffer = raw.host.take(data.len()).expect("host memory");
        buffer.as_mut_slice().copy_from_slice(data);
        let sgl = raw.keyed(&buffer, data.len());
        cids[at] = raw.cid();
        raw.host.post(io, &sqe.sgl(sgl).cid(cids[at]).0).expect("posted");
        buffers.push(buffer);
    }
    let mut statuses = [None; 2];
    for _ in 0..2 {
        let response = raw.host.response(io, LIMIT).expect("an answer");
        let at = cids.iter().position(|cid| *cid == response.cid()).expect("an answer to one of the two");
        assert!(statuses[at].replace(response.status()).is_none(), "answered twice");
    }
    buffers.into_iter().for_each(|buffer| raw.host.give(buffer));
    statuses.map(|status| status.expect("both answered"))
}

/// Compare with `old` and write `new` at a block.
fn swap<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, slba: u64, old: &[u8], new: &[u8]) -> [Status; 2] {
    let blocks = (old.len() / BLOCK) as u32;
    let compare = flagged(wire::block_command(5, 1, slba, blocks), FIRST);
    let write = flagged(wire::block_command(1, 1, slba, blocks), SECOND);
    pair(raw, io, [(compare, old), (write, new)])
}

#[track_caller]
fn assert_statuses(found: [Status; 2], expected: [Status; 2], what: &str) {
    assert_eq!(found.map(Status::code), expected.map(Status::code), "{what}: {found:?}");
}

pub(crate) fn compare_and_write_writes_only_what_it_compared<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let (_, identify) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(identify[522] & 1, 1, "FUSES");
    let largest = 1 << 20;
    for (slba, len) in [(0, BLOCK), (7, 8 * BLOCK), (4096, largest)] {
        let [old, new, other] = [0x11u8, 0x22, 0x33].map(|byte| vec![byte; len]);
        assert!(raw.write(io, 1, slba, &old).is_success());
        let done = [Status::SUCCESS; 2];
        assert_statuses(swap(&mut raw, io, slba, &old, &new), done, "equal");
        let refused = [Status::COMPARE_FAILURE, Status::FAILED_FUSED];
        assert_statuses(swap(&mut raw, io, slba, &old, &other), refused, "not equal");
        let found = raw.read(io, 1, slba, (len / BLOCK) as u32).expect("a read");
        assert!(found == new, "{len} bytes at {slba}: not what the pair wrote");
    }
}

pub(crate) fn halves_that_do_not_fit_are_refused_and_nothing_is_written<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, _, io) = setup.ready();
    let [old, new] = [0x5au8, 0xa5].map(|byte| vec![byte; 8 * BLOCK]);
    assert!(raw.write(io, 1, 0, &old).is_success());
    let compare = |slba, blocks| flagged(wire::block_command(5, 1, slba, blocks), FIRST);
    let write = |nsid, slba, blocks| flagged(wire::block_command(1, nsid, slba, blocks), SECOND);
    let invalid = [Status::INVALID_FIELD; 2];
    for (what, second) in
        [("other blocks", write(1, 1, 8)), ("fewer blocks", write(1, 0, 7)), ("another namespace", write(2, 0, 8))]
    {
        assert_statuses(pair(&mut raw, io, [(compare(0, 8), &old), (second, &new)]), invalid, what);
    }
    let beyond = [Status::LBA_OUT_OF_RANGE, Status::FAILED_FUSED];
    let outside = pair(&mut raw, io, [(compare(u64::MAX, 8), &old), (write(1, 0, 8), &new)]);
    assert_statuses(outside, beyond, "a first half outside");
    let outside = pair(&mut raw, io, [(compare(0, 8), &old), (write(1, u64::MAX, 8), &new)]);
    assert_statuses(outside, [beyond[1], beyond[0]], "a second half outside");
    // A first half alone waits; what comes instead of the second half ends it and is served.
    let stray = pair(&mut raw, io, [(compare(0, 8), &old), (wire::block_command(5, 1, 0, 8), &old)]);
    assert_statuses(stray, [Status::MISSING_FUSED, Status::SUCCESS], "an ordinary command behind a first half");
    assert!(raw.read(io, 1, 0, 8).expect("a read") == old, "a refused pair wrote");
    bystander.check();
}

pub(crate) fn half_alone_waits_for_its_second_and_can_be_aborted<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let old = vec![0u8; BLOCK];
    let write = flagged(wire::block_command(1, 1, 0, 1), SECOND);
    let status = raw.call_with(io, write, &[0xa5; BLOCK]).status();
    assert_eq!(status.code(), Status::MISSING_FUSED.code(), "a second half alone");
    let mut buffer = raw.host.take(BLOCK).expect("memory");
    buffer.as_mut_slice().copy_from_slice(&old);
    let sgl = raw.keyed(&buffer, BLOCK);
    let compare = flagged(wire::block_command(5, 1, 0, 1), FIRST).sgl(sgl);
    raw.host.send(io, &compare.cid(0x111).0).expect("sent");
    // A first half behind a first half: the older one misses its second.
    raw.host.send(io, &compare.cid(0x222).0).expect("sent");
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert_eq!(response.cid(), 0x111);
    assert_status(&response, Status::MISSING_FUSED, "a first half behind a first half");
    let abort = raw.call(admin, Sqe::new(8).cdw(10, 1 | 0x222 << 16));
    assert_eq!((abort.status().code(), abort.dword0() & 1), (0, 0), "the waiting half is aborted");
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert_eq!(response.cid(), 0x222);
    assert_status(&response, Status::ABORT_REQUESTED, "the waiting half");
    let status = raw.call_with(io, write, &[0xa5; BLOCK]).status();
    assert_eq!(status.code(), Status::FAILED_FUSED.code(), "the second half of an aborted first");
    assert_eq!(raw.read(io, 1, 0, 1).expect("a read"), old, "written by half a pair");
    // A queue that ends with a half waiting takes nothing with it.
    raw.host.send(io, &compare.cid(0x333).0).expect("sent");
    raw.host.give(buffer);
    raw.host.close(io);
    let io = raw.io_up(2, 32);
    raw.alive(io);
}

/// What the blocks of a round say: the plain write that they come from, and how many pairs came after it.
fn content(base: u64, pairs: u64) -> Vec<u8> {
    [base.to_le_bytes(), pairs.to_le_bytes()].concat().repeat(8 * BLOCK / 16)
}

fn base_of(bytes: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let (base, pairs) = (word(0), word(8));
    assert!(bytes == content(base, pairs), "the blocks are torn: base {base}, pairs {pairs}");
    base
}

/// A pair that compared what a later plain write replaced must not have written over that.
pub(crate) fn pairs_against_plain_writes_of_another_queue_are_never_torn<R: Rig>() {
    const ROUNDS: u64 = 10_000;
    let setup = Setup::<R>::start();
    let (mut writer, admin, io) = setup.ready();
    assert!(writer.write(io, 1, 0, &content(0, 0)).is_success());
    let done = Arc::new(AtomicBool::new(false));
    let swapped = Arc::new(AtomicU64::new(0));
    let swappers: Vec<_> = (1..=2u16)
        .map(|at| {
            let (done, swapped) = (Arc::clone(&done), Arc::clone(&swapped));
            let (provider, address) = (setup.rig.host(), setup.rig.address());
            std::thread::spawn(move || {
                let mut raw = Raw::<R>::open(provider, address, 0x20 + at as u8);
                let _admin = raw.admin_up();
                let io = raw.io_up(at, 32);
                while !done.load(Ordering::Acquire) {
                    let old = raw.read(io, 1, 0, 8).expect("a read");
                    let (base, pairs) = (base_of(&old), u64::from_le_bytes(old[8..16].try_into().expect("8 bytes")));
                    match swap(&mut raw, io, 0, &old, &content(base, pairs + 1)).map(|status| status.code()) {
                        [0, 0] => {
                            swapped.fetch_add(1, Ordering::AcqRel);
                        }
                        found => assert_eq!(
                            found,
                            [Status::COMPARE_FAILURE.code(), Status::FAILED_FUSED.code()],
                            "neither done nor refused"
                        ),
                    }
                }
            })
        })
        .collect();
    let mut round = 0;
    while round < ROUNDS || swapped.load(Ordering::Acquire) < 100 {
        round += 1;
        assert!(writer.write(io, 1, 0, &content(round, 0)).is_success());
        let found = writer.read(io, 1, 0, 8).expect("a read");
        assert_eq!(base_of(&found), round, "a pair wrote over what it had not compared");
    }
    done.store(true, Ordering::Release);
    swappers.into_iter().for_each(|thread| thread.join().expect("a swapper"));
    println!("{round} plain writes, {} pairs", swapped.load(Ordering::Acquire));
    writer.host.close(admin);
}
