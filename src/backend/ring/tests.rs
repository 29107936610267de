use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use nix::sys::eventfd::EventFd;
use proptest::prelude::*;

use super::request::{Step, io_error};
use super::*;
use crate::backend::IoQueue;
use crate::backend::open_file::{Direct, Kind, RangeCall};
use crate::mem::{Buffer, Pool};

/// A layer between the ring and the kernel that makes transfers short or fails them in passing, by a seed.
#[derive(Debug)]
pub(super) struct Faults {
    state: u64,
    /// What was done, by kind: short, EAGAIN, EINTR.
    made: [u32; 3],
}

impl Faults {
    fn new(seed: u64) -> Self {
        Self { state: seed | 1, made: [0; 3] }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state >> 16
    }
}

/// In the place of the entry that an operation would make: one that fails or does less.
pub(super) fn faulty_entry(ring: &mut Ring, index: usize) -> Option<squeue::Entry> {
    let faults = ring.faults.as_mut()?;
    let (choice, cut) = (faults.next() % 8, faults.next());
    let flight = &mut ring.in_flight[index];
    let unit = ring.files[flight.file].file.direct().map_or(1, |direct| direct.offset);
    let mut step = flight.request.step();
    match (choice, &mut step) {
        (0 | 1, Step::Read { len, .. } | Step::Write { len, .. } | Step::WriteZeroes { len, .. }) if *len > unit => {
            *len = (cut % u64::from(*len / unit)) as u32 * unit;
            *len = (*len).max(unit);
            faults.made[0] += 1;
            flight.place = Place::Kernel;
            Some(ring.step_entry(index, step))
        }
        (2 | 3, _) => {
            faults.made[choice as usize - 1] += 1;
            flight.fault = Some(-[libc::EAGAIN, libc::EINTR][choice as usize - 2]);
            flight.place = Place::Kernel;
            Some(opcode::Nop::new().build().user_data(IO | index as u64))
        }
        _ => None,
    }
}

/// A ring with a pool on its registered arena, a temporary file behind a queue.
struct Bench {
    queue: RingQueue,
    ring: RingHandle,
    pool: Pool,
    file: Arc<OpenFile>,
    next: u64,
}

const SIZE: u64 = 4 << 20;

impl Bench {
    fn new(direct: bool) -> Self {
        Self::with(direct, &RingOptions::default())
    }

    fn with(direct: bool, options: &RingOptions) -> Self {
        // O_DIRECT wants a real file system: the folder of the build, not /tmp that may be a tmpfs.
        let folder = std::env::current_exe().unwrap();
        let path = tempfile::NamedTempFile::new_in(folder.parent().unwrap()).unwrap();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(if direct { libc::O_DIRECT } else { 0 })
            .open(path.path())
            .unwrap();
        file.set_len(SIZE).unwrap();
        let direct = direct.then_some(Direct { memory: 512, offset: 512 });
        Self::on(OpenFile::new(file, Kind::File, false, direct, SIZE), options)
    }

    fn on(file: OpenFile, options: &RingOptions) -> Self {
        let mut ring = Ring::new(options).unwrap();
        let arena = Rc::new(Arena::new(8 << 20).unwrap());
        let pool = Pool::new(&arena, 0, 8 << 20);
        ring.register_arena(&arena);
        let ring = Rc::new(RefCell::new(ring));
        let file = Arc::new(file);
        let queue = RingQueue::open(&ring, file.clone());
        Self { queue, ring, pool, file, next: 0 }
    }

    fn data(&mut self, bytes: &[u8], start: u32) -> IoData {
        let mut buffer = self.pool.take(bytes.len() + start as usize).unwrap();
        buffer.as_mut_slice()[start as usize..].copy_from_slice(bytes);
        IoData { buffer, start, len: bytes.len() as u32 }
    }

    fn start(&mut self, op: IoOp, data: Option<IoData>) -> u64 {
        self.next += 1;
        match self.queue.submit(Io { token: self.next, op, data }) {
            Submit::Pending => {}
            Submit::Done(done) => self.ring.borrow_mut().answered.push(done),
        }
        self.next
    }

    /// All that is in flight, to its end.
    fn finish(&mut self) -> Vec<IoDone> {
        let (mut done, mut ready) = (Vec::new(), Vec::new());
        let end = Instant::now() + Duration::from_secs(60);
        while self.ring.borrow().in_flight() > 0 {
            assert!(Instant::now() < end, "operations hang");
            self.ring.borrow_mut().wait(Some(Duration::from_secs(5))).unwrap();
            self.ring.borrow_mut().poll(&mut done, &mut ready);
        }
        done
    }

    fn run(&mut self, op: IoOp, data: Option<IoData>) -> IoDone {
        let token = self.start(op, data);
        let mut done = self.finish();
        assert_eq!(done.len(), 1);
        assert_eq!(done[0].token, token);
        done.remove(0)
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), IoError> {
        let data = self.data(bytes, 0);
        let done = self.run(IoOp::Write { offset, fua }, Some(data));
        self.pool.give(done.data.unwrap().buffer);
        done.result
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let data = self.data(&vec![0xa5; len], 0);
        let done = self.run(IoOp::Read { offset }, Some(data));
        let data = done.data.unwrap();
        let bytes = data.bytes().to_vec();
        self.pool.give(data.buffer);
        done.result.map(|()| bytes)
    }
}

/// The same file through the page cache.
fn buffered_view(bench: &Bench) -> std::fs::File {
    std::fs::File::open(format!("/proc/self/fd/{}", bench.file.fd())).unwrap()
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((at >> 8) as u8)).collect()
}

#[test]
fn what_is_written_is_read_by_either_way() {
    for direct in [false, true] {
        let mut bench = Bench::new(direct);
        let bytes = pattern(1 << 20, 7);
        bench.write(8192, &bytes, true).unwrap();
        assert_eq!(bench.read(8192, 1 << 20).unwrap(), bytes);
        assert_eq!(bench.read(0, 8192).unwrap(), vec![0; 8192]);
        assert_eq!(bench.run(IoOp::Flush, None).result, Ok(()));
        let mut behind = vec![0; 1 << 20];
        buffered_view(&bench).read_exact_at(&mut behind, 8192).unwrap();
        assert_eq!(behind, bytes);
        assert_eq!(bench.ring.borrow().remarks(), &[] as &[String]);
    }
}

#[test]
fn unaligned_memory_goes_through_a_bounce() {
    let mut bench = Bench::new(true);
    let bytes = pattern(4096, 3);
    let data = bench.data(&bytes, 24);
    let done = bench.run(IoOp::Write { offset: 4096, fua: false }, Some(data));
    assert_eq!(done.result, Ok(()));
    let data = bench.data(&[0; 4096], 40);
    let done = bench.run(IoOp::Read { offset: 4096 }, Some(data));
    assert_eq!(done.result, Ok(()));
    assert_eq!(done.data.unwrap().bytes(), bytes);
}

#[test]
fn zeroes_are_zeroes_by_every_way() {
    let ways: [&[RangeCall]; 3] = [&[], &[RangeCall::Punch], &[RangeCall::Punch, RangeCall::Zero]];
    for (direct, refused, deallocate) in
        [false, true].into_iter().flat_map(|d| ways.iter().flat_map(move |w| [(d, w, false), (d, w, true)]))
    {
        let mut bench = Bench::new(direct);
        refused.iter().for_each(|call| bench.file.refuse(*call));
        bench.write(0, &[0xff; 1 << 20], false).unwrap();
        bench.write(1 << 20, &[0xff; 1 << 20], false).unwrap();
        let done = bench.run(IoOp::WriteZeroes { offset: 512, len: (2 << 20) - 1024, deallocate, fua: true }, None);
        assert_eq!(done.result, Ok(()));
        let (first, second) = (bench.read(0, 1 << 20).unwrap(), bench.read(1 << 20, 1 << 20).unwrap());
        let all = [first, second].concat();
        assert!(all[..512].iter().chain(&all[all.len() - 512..]).all(|byte| *byte == 0xff));
        assert!(all[512..all.len() - 512].iter().all(|byte| *byte == 0), "{direct} {refused:?} {deallocate}");
    }
}

#[test]
fn deallocate_gives_space_back_or_does_nothing() {
    use std::os::unix::fs::MetadataExt;
    let mut bench = Bench::new(true);
    bench.write(0, &[1; 1 << 20], true).unwrap();
    let before = bench.file.file().metadata().unwrap().blocks();
    assert_eq!(bench.run(IoOp::Deallocate { offset: 0, len: 1 << 20 }, None).result, Ok(()));
    assert!(bench.file.file().metadata().unwrap().blocks() < before);
    assert_eq!(bench.read(0, 4096).unwrap(), vec![0; 4096]);
    bench.file.refuse(RangeCall::Punch);
    bench.write(0, &[1; 4096], false).unwrap();
    assert_eq!(bench.run(IoOp::Deallocate { offset: 0, len: 4096 }, None).result, Ok(()));
    assert_eq!(bench.read(0, 4096).unwrap(), vec![1; 4096]);
}

#[test]
fn read_behind_a_shrunk_end_is_out_of_range() {
    for direct in [false, true] {
        let mut bench = Bench::new(direct);
        bench.file.file().set_len(6000).unwrap();
        assert_eq!(bench.read(8192, 4096), Err(IoError::OutOfRange));
        assert_eq!(bench.read(4096, 4096), Err(IoError::OutOfRange));
        assert_eq!(bench.read(0, 4096).unwrap().len(), 4096);
    }
}

#[test]
fn more_than_the_queue_holds_waits_in_the_backlog() {
    let mut bench = Bench::with(false, &RingOptions { entries: 8, files: 0, ..Default::default() });
    for at in 0..300u64 {
        let data = bench.data(&[at as u8; 4096], 0);
        bench.start(IoOp::Write { offset: at * 4096, fua: false }, Some(data));
    }
    assert_eq!(bench.ring.borrow().in_flight(), 300);
    let done = bench.finish();
    assert_eq!(done.len(), 300);
    assert!(done.iter().all(|done| done.result.is_ok()));
    done.into_iter().for_each(|done| bench.pool.give(done.data.unwrap().buffer));
    for at in [0u64, 150, 299] {
        assert_eq!(bench.read(at * 4096, 4096).unwrap(), vec![at as u8; 4096]);
    }
}

#[test]
fn lost_page_cache_writes_fail_every_later_flush() {
    let mut bench = Bench::new(false);
    assert_eq!(bench.run(IoOp::Flush, None).result, Ok(()));
    bench.file.sync_failed(IoError::Write);
    assert_eq!(bench.run(IoOp::Flush, None).result, Err(IoError::Write));
    assert_eq!(bench.write(0, &[0; 512], true), Err(IoError::Write));
    assert_eq!(bench.write(0, &[0; 512], false), Ok(()));
    let zeroes = IoOp::WriteZeroes { offset: 0, len: 512, deallocate: false, fua: true };
    assert_eq!(bench.run(zeroes, None).result, Err(IoError::Write));
}

#[test]
fn read_only_storage_refuses_all_but_reads() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let mut bench = Bench::on(OpenFile::new(file, Kind::File, true, None, 8192), &RingOptions::default());
    assert_eq!(bench.write(0, &[0; 512], false), Err(IoError::ReadOnly));
    assert_eq!(bench.run(IoOp::Deallocate { offset: 0, len: 512 }, None).result, Err(IoError::ReadOnly));
    assert_eq!(bench.read(0, 512).unwrap(), vec![0; 512]);
}

#[test]
fn cancelled_in_the_kernel_or_in_the_backlog_is_answered_once() {
    // A pipe's read end never has data: a read that only a cancel can end.
    let (read, _write) = nix::unistd::pipe().unwrap();
    let file = OpenFile::new(read.into(), Kind::File, false, None, SIZE);
    let mut bench = Bench::on(file, &RingOptions { entries: 8, files: 4, ..Default::default() });
    let tokens: Vec<_> = (0..20)
        .map(|_| {
            let data = bench.data(&[0; 512], 0);
            bench.start(IoOp::Read { offset: 0 }, Some(data))
        })
        .collect();
    bench.ring.borrow_mut().submit().unwrap();
    for token in tokens.iter().chain([&999]) {
        bench.queue.cancel(*token);
    }
    let mut done = bench.finish();
    done.sort_by_key(|done| done.token);
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), tokens);
    assert!(done.iter().all(|done| done.result == Err(IoError::Cancelled)), "{done:?}");
}

#[test]
fn dropped_ring_waits_for_what_can_end_and_leaves_what_cannot() {
    let (read, _write) = nix::unistd::pipe().unwrap();
    let mut bench = Bench::on(OpenFile::new(read.into(), Kind::File, false, None, SIZE), &RingOptions::default());
    let data = bench.data(&[0; 512], 0);
    bench.start(IoOp::Read { offset: 0 }, Some(data));
    bench.ring.borrow_mut().submit().unwrap();
    let before = Instant::now();
    drop(bench);
    assert!(before.elapsed() < DRAIN, "the cancel did not reach the kernel");
}

#[test]
fn queue_dropped_with_operations_in_flight_still_answers_them() {
    let mut bench = Bench::new(true);
    let data = bench.data(&pattern(65536, 1), 0);
    let token = bench.start(IoOp::Write { offset: 0, fua: false }, Some(data));
    let other = RingQueue::open(&bench.ring, bench.file.clone());
    drop(mem::replace(&mut bench.queue, other));
    assert_eq!(bench.ring.borrow().files.len(), 2);
    let done = bench.finish();
    assert_eq!((done[0].token, done[0].result), (token, Ok(())));
    assert_eq!(bench.ring.borrow().files.len(), 1);
    assert_eq!(bench.read(0, 65536).unwrap(), pattern(65536, 1));
}

#[test]
fn watched_descriptors_report_until_unwatched() {
    let mut ring = Ring::new(&RingOptions::default()).unwrap();
    let (event, once) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    let (mut done, mut ready) = (Vec::new(), Vec::new());
    let round = |ring: &mut Ring, done: &mut Vec<IoDone>, ready: &mut Vec<u32>| {
        ready.clear();
        ring.wait(Some(Duration::from_millis(20))).unwrap();
        ring.poll(done, ready);
    };
    ring.watch(event.as_fd(), 7);
    ring.watch_once(once.as_fd(), 8);
    round(&mut ring, &mut done, &mut ready);
    assert!(ready.is_empty());
    for _ in 0..3 {
        event.write(1).unwrap();
        once.write(1).unwrap();
        round(&mut ring, &mut done, &mut ready);
        assert!(ready.contains(&7), "{ready:?}");
        event.read().unwrap();
    }
    assert!(!ready.contains(&8));
    ring.watch_once(once.as_fd(), 8);
    round(&mut ring, &mut done, &mut ready);
    assert_eq!(ready, [8]);
    ring.unwatch(7);
    ring.unwatch(8);
    round(&mut ring, &mut done, &mut ready);
    event.write(1).unwrap();
    round(&mut ring, &mut done, &mut ready);
    assert!(ready.is_empty());
    assert_eq!(ring.watches.len(), 0);
}

#[test]
fn wait_ends_by_its_timeout_and_by_another_threads_event() {
    let mut ring = Ring::new(&RingOptions::default()).unwrap();
    let before = Instant::now();
    ring.wait(Some(Duration::from_millis(30))).unwrap();
    assert!(before.elapsed() >= Duration::from_millis(29));
    let event = Arc::new(EventFd::new().unwrap());
    ring.watch(event.as_fd(), 1);
    let other = event.clone();
    let thread = std::thread::spawn(move || other.write(1).unwrap());
    let (mut done, mut ready) = (Vec::new(), Vec::new());
    while ready.is_empty() {
        ring.wait(None).unwrap();
        ring.poll(&mut done, &mut ready);
    }
    thread.join().unwrap();
    assert_eq!(ready, [1]);
}

#[test]
fn refused_buffers_cost_a_remark_and_nothing_else() {
    let mut bench = Bench::new(true);
    let arena = bench.ring.borrow().arena.as_ref().unwrap().arena.clone();
    // The kernel takes buffers once.
    bench.ring.borrow_mut().register_arena(&arena);
    assert!(bench.ring.borrow().remarks()[0].contains("memlock"), "{:?}", bench.ring.borrow().remarks());
    bench.write(4096, &pattern(8192, 4), true).unwrap();
    assert_eq!(bench.read(4096, 8192).unwrap(), pattern(8192, 4));
}

#[test]
fn many_files_beyond_the_registered_ones_work() {
    let bench = Bench::with(true, &RingOptions { entries: 64, files: 2, ..Default::default() });
    let mut queues: Vec<_> = (0..5).map(|_| RingQueue::open(&bench.ring, bench.file.clone())).collect();
    let targets: Vec<_> = bench.ring.borrow().files.iter().map(|(_, entry)| entry.target).collect();
    assert!(matches!(targets[..], [Target::Slot(0), Target::Slot(1), Target::Fd(_), ..]), "{targets:?}");
    let mut bench = bench;
    for (at, queue) in queues.iter_mut().enumerate() {
        let data = bench.data(&[at as u8; 512], 0);
        let io = Io { token: at as u64, op: IoOp::Write { offset: at as u64 * 512, fua: false }, data: Some(data) };
        assert!(matches!(queue.submit(io), Submit::Pending));
    }
    assert!(bench.finish().iter().all(|done| done.result.is_ok()));
    drop(queues);
    assert_eq!(bench.ring.borrow().files.len(), 1);
    assert_eq!(bench.read(4 * 512, 512).unwrap(), vec![4; 512]);
}

/// Counts what each thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; the counter is a plain thread-local number.
unsafe impl std::alloc::GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise about the layout is passed on.
        unsafe { std::alloc::System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: the caller's promise about the block is passed on.
        unsafe { std::alloc::System.dealloc(base, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steady_state_allocates_nothing() {
    let mut bench = Bench::new(true);
    let (mut done, mut ready) = (Vec::with_capacity(64), Vec::with_capacity(64));
    let mut buffers: Vec<_> = (0..32).map(|_| bench.data(&[1; 4096], 0)).collect();
    let mut allocations = 0;
    for round in 0..200u64 {
        let before = ALLOCATIONS.get();
        let ops = [IoOp::Write { offset: round % 64 * 65536, fua: round % 8 == 0 }, IoOp::Read { offset: 0 }];
        while let Some(data) = buffers.pop() {
            bench.start(ops[buffers.len() % 2], Some(data));
        }
        bench.start(IoOp::Flush, None);
        bench.start(IoOp::WriteZeroes { offset: 1 << 20, len: 8192, deallocate: true, fua: true }, None);
        while bench.ring.borrow().in_flight() > 0 {
            bench.ring.borrow_mut().wait(Some(Duration::from_secs(5))).unwrap();
            bench.ring.borrow_mut().poll(&mut done, &mut ready);
            for done in done.drain(..) {
                assert_eq!(done.result, Ok(()));
                buffers.extend(done.data);
            }
        }
        if round >= 20 {
            allocations += ALLOCATIONS.get() - before;
        }
    }
    assert_eq!(allocations, 0);
}

#[derive(Clone, Debug)]
enum Act {
    Read(u64, u64),
    Write(u64, u64, u8, bool),
    Zero(u64, u64, bool, bool),
    Deallocate(u64, u64),
    Flush,
}

/// Ranges in blocks of 512.
fn act() -> impl Strategy<Value = Act> {
    let range = || (0..SIZE / 512, 1..256u64).prop_map(|(at, len)| (at, len.min(SIZE / 512 - at)));
    prop_oneof![
        4 => range().prop_map(|(at, len)| Act::Read(at, len)),
        4 => (range(), any::<u8>(), any::<bool>()).prop_map(|((at, len), byte, fua)| Act::Write(at, len, byte, fua)),
        1 => (range(), any::<bool>(), any::<bool>()).prop_map(|((at, len), hole, fua)| Act::Zero(at, len, hole, fua)),
        1 => range().prop_map(|(at, len)| Act::Deallocate(at, len)),
        1 => Just(Act::Flush),
    ]
}

/// Runs the acts at depth, with a barrier wherever one overlaps an act in flight, against a byte array.
fn compare(bench: &mut Bench, acts: &[Act]) -> Result<(), TestCaseError> {
    let mut model = vec![0u8; SIZE as usize];
    let mut busy: Vec<(u64, u64)> = Vec::new();
    let mut expected: std::collections::HashMap<u64, Vec<u8>> = Default::default();
    for act in acts.iter().chain([&Act::Read(0, 1)]) {
        let (at, len) = match *act {
            Act::Read(at, len) | Act::Write(at, len, ..) | Act::Zero(at, len, ..) | Act::Deallocate(at, len) => {
                (at, len)
            }
            Act::Flush => (0, 0),
        };
        if busy.len() >= 32 || busy.iter().any(|(other, count)| at < other + count && *other < at + len) {
            settle(bench, &mut expected)?;
            busy.clear();
        }
        busy.push((at, len));
        let (offset, bytes) = (at * 512, (len * 512) as usize);
        let range = offset as usize..offset as usize + bytes;
        match *act {
            Act::Read(..) => {
                let data = bench.data(&vec![0x5a; bytes], 0);
                let token = bench.start(IoOp::Read { offset }, Some(data));
                expected.insert(token, model[range].to_vec());
            }
            Act::Write(.., seed, fua) => {
                let bytes = pattern(bytes, seed);
                let data = bench.data(&bytes, 0);
                bench.start(IoOp::Write { offset, fua }, Some(data));
                model[range].copy_from_slice(&bytes);
            }
            Act::Zero(.., deallocate, fua) => {
                bench.start(IoOp::WriteZeroes { offset, len: bytes as u64, deallocate, fua }, None);
                model[range].fill(0);
            }
            Act::Deallocate(..) => {
                bench.start(IoOp::Deallocate { offset, len: bytes as u64 }, None);
                model[range].fill(0);
            }
            Act::Flush => {
                bench.start(IoOp::Flush, None);
            }
        }
    }
    settle(bench, &mut expected)?;
    let mut all = vec![0; SIZE as usize];
    buffered_view(bench).read_exact_at(&mut all, 0).unwrap();
    prop_assert!(all == model, "the file differs from the model");
    Ok(())
}

fn settle(bench: &mut Bench, expected: &mut std::collections::HashMap<u64, Vec<u8>>) -> Result<(), TestCaseError> {
    for done in bench.finish() {
        prop_assert_eq!(done.result, Ok(()));
        if let Some(data) = done.data {
            if let Some(bytes) = expected.remove(&done.token) {
                prop_assert!(data.bytes() == bytes, "a read returned other bytes");
            }
            bench.pool.give(data.buffer);
        }
    }
    prop_assert!(expected.is_empty());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..Default::default() })]

    #[test]
    fn ring_equals_a_byte_array(acts in prop::collection::vec(act(), 1..150), direct in any::<bool>()) {
        compare(&mut Bench::new(direct), &acts)?;
    }

    #[test]
    fn ring_equals_a_byte_array_through_short_transfers_and_passing_errors(
        acts in prop::collection::vec(act(), 20..80), direct in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut bench = Bench::new(direct);
        bench.ring.borrow_mut().faults = Some(Faults::new(seed));
        compare(&mut bench, &acts)?;
        let made = bench.ring.borrow().faults.as_ref().map(|faults| faults.made);
        prop_assert!(made.is_some_and(|made| made.iter().sum::<u32>() > 0), "no fault was made: {:?}", made);
    }
}

#[test]
fn every_error_number_has_one_meaning() {
    let table = [
        (libc::EIO, IoError::Read, IoError::Write),
        (libc::EREMOTEIO, IoError::Read, IoError::Write),
        (libc::ENODATA, IoError::Read, IoError::Write),
        (libc::EILSEQ, IoError::Read, IoError::Write),
        (libc::ENOSPC, IoError::NoSpace, IoError::NoSpace),
        (libc::EDQUOT, IoError::NoSpace, IoError::NoSpace),
        (libc::EFBIG, IoError::OutOfRange, IoError::OutOfRange),
        (libc::EROFS, IoError::ReadOnly, IoError::ReadOnly),
        (libc::EPERM, IoError::Other(libc::EPERM), IoError::ReadOnly),
        (libc::EOPNOTSUPP, IoError::Unsupported, IoError::Unsupported),
        (libc::ENODEV, IoError::Gone, IoError::Gone),
        (libc::ENXIO, IoError::Gone, IoError::Gone),
        (libc::ECANCELED, IoError::Cancelled, IoError::Cancelled),
        (libc::EBADE, IoError::Reservation, IoError::Reservation),
        (libc::EINVAL, IoError::Other(libc::EINVAL), IoError::Other(libc::EINVAL)),
        (libc::ETIMEDOUT, IoError::Other(libc::ETIMEDOUT), IoError::Other(libc::ETIMEDOUT)),
    ];
    for (errno, read, write) in table {
        assert_eq!((io_error(errno, true), io_error(errno, false)), (read, write), "errno {errno}");
    }
}

#[test]
fn result_zero_is_success_and_short_ends_are_told_apart() {
    let file = OpenFile::new(tempfile::tempfile().unwrap(), Kind::File, false, None, SIZE);
    let new = |op, len| Request::new(op, len, &file).unwrap();
    assert_eq!(new(IoOp::Flush, 0).handle(0, &file), Next::Done(Ok(())));
    let mut read = new(IoOp::Read { offset: 100 }, 1000);
    assert_eq!(read.handle(400, &file), Next::Continue);
    assert_eq!(read.step(), Step::Read { offset: 500, done: 400, len: 600 });
    assert_eq!(read.handle(-libc::EAGAIN, &file), Next::Pause(1));
    assert_eq!(read.handle(-libc::EAGAIN, &file), Next::Pause(2));
    assert_eq!(read.handle(0, &file), Next::Done(Err(IoError::OutOfRange)));
    assert_eq!(new(IoOp::Write { offset: 0, fua: false }, 512).handle(0, &file), Next::Done(Err(IoError::Write)));
    assert_eq!(Request::new(IoOp::Read { offset: 0 }, 0, &file).unwrap_err(), Ok(()));
}

#[test]
fn limits_of_zones_are_told_by_devices_that_have_zones() {
    let errors = |zoned: bool| {
        let file = OpenFile::new(tempfile::tempfile().unwrap(), Kind::Device, false, None, SIZE);
        let file = if zoned { file.with_zones() } else { file };
        [libc::ETOOMANYREFS, libc::EOVERFLOW].map(|errno| {
            let mut write = Request::new(IoOp::Write { offset: 0, fua: false }, 512, &file).unwrap();
            write.handle(-errno, &file)
        })
    };
    let failed = |error| Next::Done(Err(error));
    assert_eq!(errors(true), [IoError::OpenZones, IoError::ActiveZones].map(failed));
    assert_eq!(errors(false), [IoError::Other(libc::ETOOMANYREFS), IoError::OutOfRange].map(failed));
}

#[test]
fn continued_direct_transfers_start_aligned() {
    let direct = Some(Direct { memory: 512, offset: 4096 });
    let file = OpenFile::new(tempfile::tempfile().unwrap(), Kind::File, false, direct, SIZE);
    let mut write = Request::new(IoOp::Write { offset: 8192, fua: true }, 16384, &file).unwrap();
    assert_eq!(write.handle(5000, &file), Next::Continue);
    assert_eq!(write.step(), Step::Write { offset: 12288, done: 4096, len: 12288, dsync: true });
    assert_eq!(write.handle(100, &file), Next::Done(Err(IoError::Write)));
}

#[test]
#[should_panic(expected = "outside of its buffer")]
fn range_outside_of_its_buffer_is_refused() {
    let mut bench = Bench::new(false);
    let buffer: Buffer = bench.pool.take(4096).unwrap();
    bench.start(IoOp::Read { offset: 0 }, Some(IoData { buffer, start: 4000, len: 200 }));
}
