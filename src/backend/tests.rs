//! Backends through their public face: what opens, what is refused, and that each keeps the contract.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;
use crate::mem::{Arena, Pool};
use crate::skipped::skipped;

/// A reactor's worth of one backend.
struct Reactor {
    queue: Box<dyn IoQueue>,
    ring: RingHandle,
    pool: Pool,
    woken: Arc<AtomicBool>,
    next: u64,
}

impl Reactor {
    fn new(backend: &dyn Backend) -> Self {
        let mut ring = Ring::new(&RingOptions::default()).unwrap();
        let arena = Rc::new(Arena::new(4 << 20).unwrap());
        let pool = Pool::new(&arena, 0, 4 << 20);
        ring.register_arena(&arena);
        let ring = Rc::new(RefCell::new(ring));
        let woken = Arc::new(AtomicBool::new(false));
        let flag = woken.clone();
        let waker = Waker::new(move || flag.store(true, Ordering::Release));
        let queue = backend.open_queue(&QueueContext { waker, ring: Some(ring.clone()) }).unwrap();
        Self { queue, ring, pool, woken, next: 0 }
    }

    fn start(&mut self, op: IoOp, bytes: Option<&[u8]>) -> Submit {
        self.next += 1;
        let data = bytes.map(|bytes| {
            let mut buffer = self.pool.take(bytes.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(bytes);
            IoData { buffer, start: 0, len: bytes.len() as u32 }
        });
        self.queue.submit(Io { token: self.next, op, data })
    }

    fn poll(&mut self) -> Vec<IoDone> {
        let (mut done, mut ready) = (Vec::new(), Vec::new());
        self.ring.borrow_mut().wait(Some(Duration::from_millis(1))).unwrap();
        self.ring.borrow_mut().poll(&mut done, &mut ready);
        if !self.queue.completes_on_ring() {
            self.queue.poll(&mut done);
        }
        done
    }

    fn run(&mut self, op: IoOp, bytes: Option<&[u8]>) -> (Result<(), IoError>, Vec<u8>) {
        let mut done = match self.start(op, bytes) {
            Submit::Done(done) => vec![done],
            Submit::Pending => vec![],
        };
        let end = Instant::now() + Duration::from_secs(30);
        while done.is_empty() {
            assert!(Instant::now() < end, "{op:?} is not answered");
            done = self.poll();
        }
        let IoDone { token, result, data } = done.remove(0);
        assert_eq!((token, done.len()), (self.next, 0));
        let bytes = data.map_or(Vec::new(), |data| {
            let bytes = data.bytes().to_vec();
            self.pool.give(data.buffer);
            bytes
        });
        (result, bytes)
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let (result, bytes) = self.run(IoOp::Read { offset }, Some(&vec![0xa5; len]));
        result.map(|()| bytes)
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), IoError> {
        self.run(IoOp::Write { offset, fua }, Some(bytes)).0
    }

    fn zero(&mut self, offset: u64, len: u64, deallocate: bool) -> Result<(), IoError> {
        self.run(IoOp::WriteZeroes { offset, len, deallocate, fua: true }, None).0
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.run(IoOp::Flush, None).0
    }
}

/// The contract that a host sees, on any storage that keeps data.
fn keeps_the_contract(backend: &dyn Backend) {
    let (mut one, mut two) = (Reactor::new(backend), Reactor::new(backend));
    let size = backend.info().size;
    let bytes: Vec<u8> = (0..65536u32).map(|at| ((at * 7) >> 3) as u8).collect();
    one.write(0, &bytes, false).unwrap();
    assert_eq!(two.read(0, 65536).unwrap(), bytes, "a write is visible through another queue");
    two.write(size - 4096, &bytes[..4096], true).unwrap();
    assert_eq!(one.read(size - 4096, 4096).unwrap(), bytes[..4096]);
    one.flush().unwrap();
    if backend.info().abilities.write_zeroes {
        for deallocate in [false, true] {
            one.write(0, &bytes, false).unwrap();
            one.zero(4096, 8192, deallocate).unwrap();
            let now = two.read(0, 65536).unwrap();
            assert_eq!(now[..4096], bytes[..4096]);
            assert!(now[4096..12288].iter().all(|byte| *byte == 0));
            assert_eq!(now[12288..], bytes[12288..]);
        }
    }
    if backend.info().abilities.deallocate {
        one.write(0, &bytes, false).unwrap();
        assert_eq!(one.run(IoOp::Deallocate { offset: 0, len: 65536 }, None).0, Ok(()));
        if backend.info().abilities.deallocated_reads_zero {
            assert_eq!(two.read(0, 65536).unwrap(), vec![0; 65536]);
        }
    }
}

/// A folder on the file system of the build: one with O_DIRECT, which /tmp may not be.
fn folder() -> TempDir {
    tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

fn file_at(path: impl Into<PathBuf>, size: Option<u64>) -> BackendSpec {
    BackendSpec::new(Source::File { path: path.into(), size })
}

fn device(path: impl Into<PathBuf>) -> BackendSpec {
    BackendSpec::new(Source::Device { path: path.into() })
}

/// A mounted file system that vanishes with it. `None`, loudly, where mounting is not allowed.
struct Mount(TempDir);

impl Mount {
    fn new(kind: &str, options: &str) -> Option<Self> {
        let folder = folder();
        let mounted = Command::new("mount").args(["-t", kind, "-o", options, "none"]).arg(folder.path()).output();
        if mounted.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(folder));
        }
        skipped(&format!("mounting a {kind} needs root: {mounted:?}"));
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// A loop device on a file.
struct Loop(PathBuf, TempDir);

impl Loop {
    fn new(size: u64, options: &[&str]) -> Option<Self> {
        let folder = folder();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(size).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(&path).output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8(output.stdout).unwrap().trim().into(), folder))
            }
            refused => {
                skipped(&format!("a loop device needs root: {refused:?}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn refusal(spec: &BackendSpec) -> String {
    open(spec).unwrap_err().to_string()
}

#[test]
fn memory_and_files_keep_the_contract() {
    let folder = folder();
    keeps_the_contract(&*open(&BackendSpec::new(Source::Memory { size: 1 << 20 })).unwrap());
    let direct = open(&file_at(folder.path().join("direct"), Some(1 << 20))).unwrap();
    assert_eq!(direct.info().remarks, &[] as &[String]);
    keeps_the_contract(&*direct);
    let buffered = BackendSpec { buffered: true, ..file_at(folder.path().join("buffered"), Some(1 << 20)) };
    let buffered = open(&buffered).unwrap();
    assert_eq!(buffered.info().remarks, ["buffered: chosen"]);
    keeps_the_contract(&*buffered);
}

#[test]
fn null_reads_zeroes_and_forgets() {
    let null = open(&BackendSpec::new(Source::Null { size: 1 << 40 })).unwrap();
    let mut reactor = Reactor::new(&*null);
    reactor.write(0, &[1; 4096], true).unwrap();
    assert_eq!(reactor.read(0, 4096).unwrap(), vec![0; 4096]);
    reactor.flush().unwrap();
    reactor.zero(0, 1 << 40, true).unwrap();
}

#[test]
fn size_makes_an_absent_or_empty_file_and_checks_any_other() {
    let folder = folder();
    let path = folder.path().join("disk");
    assert!(refusal(&file_at(&path, None)).contains("give a size to create it"));
    open(&file_at(&path, Some(1 << 20))).unwrap().keep();
    let metadata = path.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks(), metadata.mode() & 0o777), (1 << 20, 0, 0o600));
    drop(open(&file_at(&path, Some(1 << 20))).unwrap());
    assert!(refusal(&file_at(&path, Some(2 << 20))).contains("has 1048576 bytes"));
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap();
    assert!(refusal(&file_at(&empty, None)).contains("give a size"));
    open(&file_at(&empty, Some(4096))).unwrap().keep();
    assert_eq!(empty.metadata().unwrap().len(), 4096);
}

#[test]
fn what_was_made_and_never_served_is_taken_back_unless_it_became_something() {
    let folder = folder();
    let path = folder.path().join("disk");
    let spec = file_at(&path, Some(1 << 20));
    // By whatever stands before it.
    drop(open(&BackendSpec { faults: Some(FaultPlan::default()), ..spec.clone() }).unwrap());
    assert!(!path.exists(), "a file that nothing was served from is left");
    open(&BackendSpec { faults: Some(FaultPlan::default()), ..spec.clone() }).unwrap().keep();
    assert!(path.exists(), "a file that was served is gone");
    drop(open(&spec).unwrap());
    assert!(path.exists(), "a file that was there before is gone");
    // An empty file was not made here, and its size was.
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap();
    drop(open(&file_at(&empty, Some(4096))).unwrap());
    assert_eq!(empty.metadata().unwrap().len(), 0);
    // Somebody wrote to it.
    let written = folder.path().join("written");
    let opened = open(&file_at(&written, Some(1 << 20))).unwrap();
    File::options().write(true).open(&written).unwrap().write_all_at(&[1; 4096], 0).unwrap();
    drop(opened);
    assert!(written.exists(), "data are gone");
    // Another file has the name now.
    let moved = folder.path().join("moved");
    let opened = open(&file_at(&moved, Some(1 << 20))).unwrap();
    std::fs::rename(&moved, folder.path().join("elsewhere")).unwrap();
    File::create(&moved).unwrap();
    drop(opened);
    assert!(moved.exists() && folder.path().join("elsewhere").exists(), "another file is gone");
}

#[test]
fn unfit_sizes_and_blocks_are_refused_before_a_file_is_made() {
    let folder = folder();
    let path = folder.path().join("disk");
    assert!(refusal(&file_at(&path, Some(1000))).contains("not a multiple of the block size 512"));
    let spec = BackendSpec { block_size: Some(4096), ..file_at(&path, Some(512 * 3)) };
    assert!(refusal(&spec).contains("not a multiple of the block size 4096"));
    let spec = BackendSpec { block_size: Some(1024), ..file_at(&path, Some(1 << 20)) };
    assert!(refusal(&spec).contains("512 or 4096"));
    assert!(refusal(&file_at(&path, Some(1 << 63))).contains("8 EiB"));
    assert!(!path.exists());
    std::fs::write(&path, [0; 700]).unwrap();
    assert!(refusal(&file_at(&path, None)).contains("700 bytes, is not a multiple"));
    assert!(
        refusal(&BackendSpec { read_only: true, ..BackendSpec::new(Source::Memory { size: 512 }) })
            .contains("read_only")
    );
}

#[test]
fn wrong_kinds_of_paths_say_what_to_do() {
    let folder = folder();
    assert!(refusal(&file_at(folder.path(), None)).contains("folder"));
    assert!(refusal(&file_at("/dev/null", None)).contains("no regular file"));
    assert!(refusal(&device("/dev/null")).contains("no block device"));
    assert!(refusal(&device("/dev/absent")).contains("check the path"));
    let path = folder.path().join("file");
    File::create(&path).unwrap();
    assert!(refusal(&device(&path)).contains("serve it as a file"));
}

#[test]
fn a_file_is_served_once_and_the_refusal_names_the_holder() {
    let folder = folder();
    let path = folder.path().join("disk");
    let first = open(&file_at(&path, Some(1 << 20))).unwrap();
    first.keep();
    let second = refusal(&file_at(&path, None));
    assert!(second.contains(&format!("this farside itself (pid {})", std::process::id())), "{second}");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(refusal(&file_at(&link, None)).contains("in use"));
    drop(first);
    let read_only = BackendSpec { read_only: true, ..file_at(&path, None) };
    let (one, two) = (open(&read_only).unwrap(), open(&read_only).unwrap());
    assert!(refusal(&file_at(&path, None)).contains("in use"));
    drop((one, two));
    let mut other = Command::new("flock").arg(&path).arg("cat").stdin(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    let text = loop {
        // Until the other process has come so far.
        match open(&file_at(&path, None)) {
            Err(error) => break error.to_string(),
            Ok(_) => assert!(Instant::now() < end),
        }
        std::thread::yield_now();
    };
    assert!(text.contains(&format!("flock (pid {})", other.id())) || text.contains("cat (pid"), "{text}");
    drop(other.stdin.take());
    other.wait().unwrap();
    drop(open(&file_at(&path, None)).unwrap());
}

#[test]
fn a_file_that_others_lock_their_way_is_refused() {
    let folder = folder();
    let path = folder.path().join("disk");
    let file_spec = file_at(&path, Some(1 << 20));
    open(&file_spec).unwrap().keep();
    // The lock that QEMU takes belongs to an open file, here to one of this process.
    let holder = File::options().read(true).write(true).open(&path).unwrap();
    let lock =
        libc::flock { l_type: libc::F_RDLCK as _, l_whence: libc::SEEK_SET as _, l_start: 100, l_len: 1, l_pid: 0 };
    nix::fcntl::fcntl(&holder, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    assert!(refusal(&file_spec).contains("is in use"));
    drop(holder);
    drop(open(&file_spec).unwrap());
}

#[test]
fn a_read_only_file_takes_no_writes() {
    let folder = folder();
    let path = folder.path().join("disk");
    open(&file_at(&path, Some(1 << 20))).unwrap().keep();
    let backend = open(&BackendSpec { read_only: true, ..file_at(&path, None) }).unwrap();
    let info = backend.info();
    assert!(info.read_only && !info.write_cache && info.abilities == Abilities::default());
    let mut reactor = Reactor::new(&*backend);
    assert_eq!(reactor.write(0, &[1; 4096], false), Err(IoError::ReadOnly));
    assert_eq!(reactor.zero(0, 4096, false), Err(IoError::ReadOnly));
    assert_eq!(reactor.read(0, 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn refresh_sees_growth_and_shrinkage() {
    let folder = folder();
    let path = folder.path().join("disk");
    let backend = open(&file_at(&path, Some(1 << 20))).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(backend.info().size, 1 << 20);
    assert_eq!(backend.refresh().unwrap().size, 2 << 20);
    File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let error = backend.refresh().unwrap_err().to_string();
    assert!(error.contains("5000 bytes") && error.contains("512"), "{error}");
    File::options().write(true).open(&path).unwrap().set_len(4608).unwrap();
    assert_eq!(backend.refresh().unwrap().size, 4608);
    assert_eq!(Reactor::new(&*backend).read(8192, 4096), Err(IoError::OutOfRange));
}

#[test]
fn identity_belongs_to_the_file_and_not_to_its_name() {
    let folder = folder();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let identity = |path: &Path| {
        let backend = open(&file_at(path, Some(4096))).unwrap();
        backend.keep();
        backend.info().identity
    };
    let first = identity(&one);
    assert_ne!(first, identity(&two));
    std::fs::rename(&one, folder.path().join("moved")).unwrap();
    assert_eq!(identity(&folder.path().join("moved")), first);
    std::fs::remove_file(folder.path().join("moved")).unwrap();
    assert_ne!(identity(&one), first, "a new file with an old inode number is another disk");
}

#[test]
fn a_full_file_system_is_no_space_and_harms_nothing_else() {
    let Some(mount) = Mount::new("tmpfs", "size=1M") else { return };
    let backend = open(&file_at(mount.0.path().join("disk"), Some(4 << 20))).unwrap();
    assert_eq!(backend.info().size, 4 << 20);
    let mut reactor = Reactor::new(&*backend);
    reactor.write(0, &[7; 65536], true).unwrap();
    let results: Vec<_> = (1..40).map(|at| reactor.write(at * 65536, &[8; 65536], false)).collect();
    assert!(results.contains(&Err(IoError::NoSpace)), "{results:?}");
    assert!(results.iter().all(|result| matches!(result, Ok(()) | Err(IoError::NoSpace))), "{results:?}");
    assert_eq!(reactor.read(0, 65536).unwrap(), vec![7; 65536]);
    assert_eq!(reactor.zero(0, 2 << 20, true), Ok(()));
    assert_eq!(reactor.write(3 << 20, &[9; 65536], true), Ok(()));
    reactor.flush().unwrap();
}

#[test]
fn tmpfs_keeps_the_contract_without_zero_range() {
    let Some(mount) = Mount::new("tmpfs", "size=8M") else { return };
    keeps_the_contract(&*open(&file_at(mount.0.path().join("disk"), Some(1 << 20))).unwrap());
}

#[test]
fn a_file_system_without_direct_io_is_buffered_and_says_so() {
    let Some(mount) = Mount::new("ramfs", "mode=700") else { return };
    let backend = open(&file_at(mount.0.path().join("disk"), Some(1 << 20))).unwrap();
    let info = backend.info();
    assert_eq!(info.remarks, ["buffered: the file system refuses O_DIRECT"]);
    assert!(!info.abilities.deallocate, "ramfs cannot punch holes, and must not be said to");
    keeps_the_contract(&*backend);
}

#[test]
fn a_block_device_keeps_the_contract_and_is_opened_exclusively() {
    let Some(disk) = Loop::new(8 << 20, &["--direct-io=on"]) else { return };
    let backend = open(&device(&disk.0)).unwrap();
    let info = backend.info();
    assert_eq!((info.size, info.block_size, info.remarks.len()), (8 << 20, 512, 0));
    assert!(info.abilities.deallocate && info.abilities.write_zeroes && info.write_cache);
    assert_eq!(info.preferred_deallocate, 4096);
    keeps_the_contract(&*backend);
    let second = refusal(&device(&disk.0));
    // By this process, or by a child of another test's between fork and exec.
    assert!(second.contains("is in use by ") && second.contains("(pid "), "{second}");
    drop(backend);
    open(&device(&disk.0)).unwrap();
}

#[test]
fn a_device_discards_when_told_to_deallocate() {
    let Some(disk) = Loop::new(8 << 20, &[]) else { return };
    let backing = disk.1.path().join("disk");
    let backend = open(&device(&disk.0)).unwrap();
    let mut reactor = Reactor::new(&*backend);
    reactor.write(0, &[1; 1 << 20], true).unwrap();
    assert!(backing.metadata().unwrap().blocks() >= 2048);
    assert_eq!(reactor.run(IoOp::Deallocate { offset: 0, len: 1 << 20 }, None).0, Ok(()));
    assert_eq!(backing.metadata().unwrap().blocks(), 0);
}

#[test]
fn a_device_with_large_blocks_refuses_small_ones() {
    let Some(disk) = Loop::new(8 << 20, &["--sector-size=4096"]) else { return };
    let spec = device(&disk.0);
    let error = refusal(&BackendSpec { block_size: Some(512), ..spec.clone() });
    assert!(error.contains("needs blocks of 4096 bytes, 512 are configured; set block_size to 4096"), "{error}");
    let backend = open(&spec).unwrap();
    assert_eq!((spec.lba(&*backend), backend.info().preferred_write), (4096, 4096));
    keeps_the_contract(&*backend);
}

#[test]
fn a_mounted_device_is_refused_and_the_mount_named() {
    let Some(disk) = Loop::new(32 << 20, &[]) else { return };
    if !Command::new("mkfs.ext4").arg("-q").arg(&disk.0).status().is_ok_and(|status| status.success()) {
        skipped("no mkfs.ext4");
        return;
    }
    let folder = folder();
    assert!(Command::new("mount").arg(&disk.0).arg(folder.path()).status().unwrap().success());
    let text = refusal(&device(&disk.0));
    let backing = refusal(&file_at(disk.1.path().join("disk"), None));
    assert!(Command::new("umount").arg(folder.path()).status().unwrap().success());
    assert!(text.contains(&format!("a mount on {}", folder.path().display())), "{text}");
    assert!(backing.contains(&format!("in use by {}", disk.0.display())), "{backing}");
}

#[derive(Debug, Default)]
struct Shelf {
    bytes: std::sync::Mutex<Vec<u8>>,
    flushes: AtomicU32,
}

impl BlockingStorage for Arc<Shelf> {
    fn info(&self) -> BackendInfo {
        let size = self.bytes.lock().unwrap().len() as u64;
        let abilities = Abilities { write_zeroes: true, ..Default::default() };
        BackendInfo { size, abilities, name: "shelf".into(), ..Memory::new(512).info() }
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        assert_ne!(offset, 666 * 512, "a bug of the embedder's");
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, from: &[u8], _: bool) -> Result<(), IoError> {
        self.bytes.lock().unwrap()[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&self) -> Result<(), IoError> {
        self.flushes.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

#[test]
fn blocking_storage_keeps_the_contract_and_survives_its_panics() {
    let shelf = Arc::new(Shelf { bytes: vec![0; 1 << 20].into(), ..Default::default() });
    let backend = Blocking::new(shelf.clone(), 2).unwrap();
    keeps_the_contract(&backend);
    assert_eq!(shelf.flushes.load(Ordering::Acquire), 1);
    let mut reactor = Reactor::new(&backend);
    for _ in 0..5 {
        assert_eq!(reactor.read(666 * 512, 512), Err(IoError::Read));
    }
    assert_eq!(reactor.read(0, 512).unwrap().len(), 512);
    assert!(reactor.woken.load(Ordering::Acquire));
    // Dropped with work in flight: the buffers are not given up before it ends.
    for at in 0..64 {
        assert!(matches!(
            reactor.start(IoOp::Write { offset: at * 4096, fua: false }, Some(&[3; 4096])),
            Submit::Pending
        ));
    }
    drop(reactor);
    assert!(shelf.bytes.lock().unwrap()[..64 * 4096].iter().all(|byte| *byte == 3));
}

#[test]
fn faults_are_made_as_told_and_by_the_seed() {
    let memory = || -> Arc<dyn Backend> { Arc::new(Memory::new(1 << 20)) };
    let faulty = Faulty::new(memory(), FaultPlan::default());
    keeps_the_contract(&faulty);
    let (mut reactor, control) = (Reactor::new(&faulty), faulty.control());
    reactor.write(0, &[1; 512], false).unwrap();
    control.fail_next(2);
    assert_eq!(reactor.write(0, &[2; 512], false), Err(IoError::Write));
    assert_eq!(reactor.read(0, 512), Err(IoError::Read));
    assert_eq!(reactor.read(0, 512).unwrap(), vec![1; 512]);
    control.stall();
    assert!(matches!(reactor.start(IoOp::Flush, None), Submit::Pending));
    assert!((0..20).all(|_| reactor.poll().is_empty()));
    assert_eq!(control.held(), 1);
    reactor.queue.cancel(reactor.next);
    assert_eq!((reactor.poll()[0].result, control.held()), (Err(IoError::Cancelled), 0));
    assert!(matches!(reactor.start(IoOp::Flush, None), Submit::Pending));
    reactor.woken.store(false, Ordering::Release);
    control.release();
    assert!(reactor.woken.load(Ordering::Acquire));
    assert_eq!((reactor.poll()[0].result, control.held()), (Ok(()), 0));
    control.stall();
    assert!(matches!(reactor.start(IoOp::Flush, None), Submit::Pending));
    assert_eq!(control.held(), 1);
    drop(reactor);
    assert_eq!(control.held(), 0, "its queue is gone");
    let plan = FaultPlan { seed: 5, fail_one_in: 3, delay_polls: 4, ..Default::default() };
    let run = || {
        let mut reactor = Reactor::new(&Faulty::new(memory(), plan));
        (0..60).map(|_| reactor.flush().is_ok()).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
    assert!(run().contains(&true) && run().contains(&false));
}

#[test]
fn dropped_flushes_never_reach_the_storage() {
    let shelf = Arc::new(Shelf { bytes: vec![0; 1 << 20].into(), ..Default::default() });
    let plan = FaultPlan { drop_flush: true, ..Default::default() };
    let faulty = Faulty::new(Arc::new(Blocking::new(shelf.clone(), 1).unwrap()), plan);
    assert!(faulty.info().remarks.iter().any(|remark| remark.contains("TEST TOOL")));
    let mut reactor = Reactor::new(&faulty);
    reactor.flush().unwrap();
    reactor.write(0, &[1; 512], true).unwrap();
    assert_eq!((shelf.flushes.load(Ordering::Acquire), faulty.control().dropped()), (0, 2));
    faulty.control().drop_flush(false);
    reactor.flush().unwrap();
    assert_eq!(shelf.flushes.load(Ordering::Acquire), 1);
}

#[test]
fn faults_before_a_file_on_the_ring_are_answered_too() {
    let folder = folder();
    let plan = FaultPlan { seed: 9, delay_polls: 3, ..Default::default() };
    let spec = BackendSpec { faults: Some(plan), ..file_at(folder.path().join("disk"), Some(1 << 20)) };
    keeps_the_contract(&*open(&spec).unwrap());
}

#[test]
fn files_refuse_to_do_without_a_ring() {
    let folder = folder();
    let backend = open(&file_at(folder.path().join("disk"), Some(4096))).unwrap();
    let context = QueueContext { waker: Waker::new(|| {}), ring: None };
    assert!(backend.open_queue(&context).err().unwrap().to_string().contains("io_uring"));
}

#[test]
fn storage_is_open_without_nonblock() {
    // With it the ring returns EAGAIN where it should wait: seen as a pause of a millisecond per operation on ramfs.
    let folder = folder();
    let flags = |storage: &Storage| nix::fcntl::fcntl(storage.descriptor(), nix::fcntl::FcntlArg::F_GETFL).unwrap();
    for buffered in [false, true] {
        let wish = file::Wish { size: Some(4096), read_only: false, buffered };
        let storage = file::open(&folder.path().join("disk"), wish).unwrap();
        assert_eq!(flags(&storage) & libc::O_NONBLOCK, 0);
        assert_eq!(flags(&storage) & libc::O_DIRECT == 0, buffered);
    }
    let Some(disk) = Loop::new(8 << 20, &[]) else { return };
    assert_eq!(flags(&block::open_storage(&disk.0, false, false).unwrap().0) & libc::O_NONBLOCK, 0);
}

/// Through the page cache of the same file: what a buffered reader sees after an answer.
#[test]
fn answered_direct_writes_are_seen_by_everybody() {
    let folder = folder();
    let path = folder.path().join("disk");
    let backend = open(&file_at(&path, Some(1 << 20))).unwrap();
    Reactor::new(&*backend).write(8192, &[9; 8192], false).unwrap();
    let mut bytes = [0; 8192];
    File::open(&path).unwrap().read_exact_at(&mut bytes, 8192).unwrap();
    assert_eq!(bytes, [9; 8192]);
}
