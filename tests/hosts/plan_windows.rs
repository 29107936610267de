//! While a plan is carried out that is refused in the end: what hosts are told meanwhile of what it took away, and that commands
//! in progress go on as if nothing had been.

use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use farside::control::Request;
use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use nix::fcntl::{FcntlArg, fcntl};
use nvme::Status;

use crate::plans::{Managed, file, options};
use crate::rig::{BLOCK, LIMIT, NQN, OTHER_NQN, Raw, Rig, until};

const WRITE_PROTECTION: u32 = 0x84;

/// Long enough to see that something does not happen.
const WHILE: Duration = Duration::from_millis(150);

/// A target of two subsystems, and a plan that takes namespaces 1, 3 and 4 of the first one and all of the second one away. It
/// stops where the file of namespace 3 has to be closed, until that is let go, and is refused when it opens that of namespace 4.
struct Window<R: Rig> {
    managed: Managed<R>,
    /// Has a command in progress on namespace 3.
    holder: (Raw<R>, RawQueueId),
    wanted: String,
    _locked: File,
    _folder: tempfile::TempDir,
}

const OF_1: usize = 0;
const OF_3: usize = 2;

impl<R: Rig> Window<R> {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| -> PathBuf { folder.path().join(name) };
        let (moved, locked) = (file(&path("moved.img")), file(&path("locked.img")));
        let text = |address: SocketAddr, memory: &str, uuid: &str, read_only: bool, serial: &str| {
            format!(
                "[[subsystem]]\nnqn = \"{NQN}\"\n\
                 [[subsystem.namespace]]\nnsid = 1\nmemory = \"{memory}\"\nblock_size = 512\n\
                 [[subsystem.namespace]]\nnsid = 2\nmemory = \"1M\"\nblock_size = 512\n\
                 [[subsystem.namespace]]\nnsid = 3\n{moved}\n{uuid}\n\
                 [[subsystem.namespace]]\nnsid = 4\n{locked}\nread_only = {read_only}\n\
                 [[subsystem]]\nnqn = \"{OTHER_NQN}\"\nserial = \"{serial}\"\n\
                 [[subsystem.namespace]]\nmemory = \"1M\"\nblock_size = 512\nlimits = {{ iops = 1 }}\n\
                 [[listener]]\naddress = \"{address}\"\n{}state_dir = \"{}\"\n",
                options(),
                path("states").display()
            )
        };
        let managed = Managed::<R>::start(|address| text(address, "8M", "", true, "one"));
        let file = OpenOptions::new().read(true).write(true).open(path("locked.img")).expect("the file");
        let range = libc::flock {
            l_type: libc::F_RDLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: 0,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&file, FcntlArg::F_OFD_SETLK(&range)).expect("locked");
        let uuid = "uuid = \"5f0c3b4e-8d6b-4b43-9d9d-0a4f6a1c7e11\"";
        let wanted = text(managed.rig.address(), "16M", uuid, false, "two");
        let mut holder = managed.host(0xaa, NQN);
        let (_, io) = holder.bring_up();
        let requests = || managed.manager.target().counters().requests;
        until("nothing is under way", || requests() == 0);
        managed.faults[OF_3].stall();
        holder.host.send(io, &Sqe::new(0).nsid(3).cid(0x303).0).expect("sent");
        until("the command is in the backend", || requests() == 1);
        Self { managed, holder: (holder, io), wanted, _locked: file, _folder: folder }
    }

    /// Carries the plan out, with `meanwhile` where it stops.
    fn refuse(&mut self, meanwhile: impl FnOnce(&Managed<R>)) {
        let Self { managed, holder: (holder, io), wanted, .. } = self;
        let managed = &*managed;
        std::thread::scope(|scope| {
            let (manager, apply) = (&managed.manager, Request::Apply { config: wanted.clone(), dry_run: false });
            let plan = scope.spawn(move || manager.handle(&apply));
            until("the plan waits for the file", || {
                let status = managed.manager.target().status();
                let sizes = status.subsystems.iter().filter(|one| one.nqn == NQN).flat_map(|one| &one.namespaces);
                let sizes: Vec<(u32, u64)> = sizes.map(|one| (one.nsid, one.blocks)).collect();
                status.subsystems.len() == 1 && sizes == [(1, 32_768), (2, 2048)]
            });
            meanwhile(managed);
            assert!(!plan.is_finished(), "nothing was open any more");
            managed.faults[OF_3].release();
            // The answer has to arrive, too.
            until("the plan ends", || {
                holder.host.turn();
                plan.is_finished()
            });
            let error = plan.join().expect("no panic").expect_err("refused").to_string();
            assert!(error.contains("locked.img") && error.contains("in use"), "{error}");
        });
        assert!(holder.host.response(*io, LIMIT).expect("an answer").status().is_success());
    }
}

/// Sends a command with data, and waits for nothing. Its identifier.
fn send_with<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, sqe: Sqe, data: &[u8]) -> u16 {
    let mut buffer = raw.host.take(data.len()).expect("host memory");
    buffer.as_mut_slice().copy_from_slice(data);
    let (sgl, cid) = (raw.keyed(&buffer, data.len()), raw.cid());
    raw.host.send(io, &sqe.sgl(sgl).cid(cid).0).expect("sent");
    // The buffer is not given back: it is the target's as long as it likes.
    cid
}

fn send_write<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, slba: u64, byte: u8) -> u16 {
    send_with(raw, io, wire::block_command(1, 1, slba, 1), &[byte; BLOCK])
}

/// Sends a Copy of the first block of namespace 1 to block 100.
fn send_copy<R: Rig>(raw: &mut Raw<R>, io: RawQueueId) -> u16 {
    send_with(raw, io, Sqe::new(0x19).nsid(1).cdw(10, 100), &[0; 32])
}

/// The status of the next answer, which is to this command.
#[track_caller]
fn answer<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, cid: u16) -> Status {
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert_eq!(response.cid(), cid, "another command was answered: {}", response.status());
    response.status()
}

#[track_caller]
fn no_answer<R: Rig>(raw: &mut Raw<R>, io: RawQueueId, what: &str) {
    if let Ok(response) = raw.host.response(io, WHILE) {
        panic!("{what}: {}", response.status());
    }
}

fn protect<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Status {
    raw.call(admin, Sqe::new(0x09).nsid(1).cdw(10, WRITE_PROTECTION).cdw(11, 1)).status()
}

/// What a host knows of the subsystem and of namespace 1, and its list of namespaces.
fn look<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Vec<Vec<u8>> {
    let all = [wire::identify(1, 0, 0), wire::identify(0, 1, 0), wire::identify(3, 1, 0), wire::identify(2, 0, 0)];
    let answers = all.map(|sqe| {
        let (response, bytes) = raw.call_for(admin, sqe, 4096);
        assert!(response.status().is_success(), "{}", response.status());
        bytes
    });
    answers.into()
}

pub(crate) fn what_may_come_back_is_not_ready_and_nothing_else<R: Rig>() {
    const NOT_READY: Status = Status::NAMESPACE_NOT_READY;
    let mut window = Window::<R>::new();
    let (mut raw, mut other) = (window.managed.host(1, NQN), window.managed.host(2, OTHER_NQN));
    let ((admin, io), (other_admin, other_io)) = (raw.bring_up(), other.bring_up());
    let second = raw.io_up(2, 32);
    assert!(raw.write(io, 1, 0, &[0x51; BLOCK]).is_success());
    // Under way when the plan comes: a Copy in its backend, a write that waits for it, and commands that wait for their turn.
    window.managed.faults[OF_1].stall_reads();
    let copy = send_copy(&mut raw, io);
    no_answer(&mut raw, io, "the Copy does not wait for the disk");
    let waits = send_write(&mut raw, second, 100, 0x77);
    no_answer(&mut raw, second, "the write does not wait for the Copy");
    for cid in 0x501..=0x514 {
        other.host.post(other_io, &Sqe::new(0).nsid(1).cid(cid).0).expect("posted");
    }
    let (before, others) = (look(&mut raw, admin), look(&mut other, other_admin));
    let mut held_back = Vec::new();
    window.refuse(|managed| {
        // In full: nothing of it says not to try again.
        assert_eq!(answer(&mut raw, second, waits), NOT_READY, "a write that waited for a lock");
        while held_back.last().is_none_or(|(cid, _)| *cid != 0x514) {
            let response = other.host.response(other_io, LIMIT).expect("an answer");
            held_back.push((response.cid(), response.status()));
        }
        for nsid in [1, 3, 4] {
            assert_eq!(raw.read(second, nsid, 0, 1), Err(NOT_READY), "namespace {nsid}");
            assert_eq!(raw.write(second, nsid, 0, &[1; BLOCK]), NOT_READY, "namespace {nsid}");
        }
        assert_eq!(raw.read(second, 1, 1 << 40, 1), Err(NOT_READY), "of a size that is not decided");
        assert_eq!(raw.read(second, 77, 0, 1), Err(Status::INVALID_NAMESPACE.dnr()), "one that never was");
        raw.alive(second);
        assert_eq!(protect(&mut raw, admin), NOT_READY);
        assert!(look(&mut raw, admin) == before, "hosts see what may come back");

        assert_eq!(other.read(other_io, 1, 0, 1), Err(NOT_READY));
        assert!(look(&mut other, other_admin) == others, "a live controller is what it was");
        let mut late = managed.host(3, OTHER_NQN);
        let queue = late.good_queue(0, 32);
        assert_eq!(late.connect_admin(queue).status(), Status::CONNECT_CONTROLLER_BUSY);
        let mut stranger = managed.host(4, "nqn.2026-11.io.farside:none");
        let queue = stranger.good_queue(0, 32);
        assert_eq!(stranger.connect_admin(queue).status(), Status::CONNECT_INVALID_PARAMETERS.dnr());
    });
    assert_eq!(held_back.last(), Some(&(0x514, NOT_READY)));
    let told = |status: &Status| status.is_success() || *status == NOT_READY;
    assert!(held_back.iter().all(|(_, status)| told(status)), "{held_back:?}");

    window.managed.faults[OF_1].release();
    assert!(answer(&mut raw, io, copy).is_success(), "the Copy");
    for queue in [io, second] {
        assert_eq!(raw.read(queue, 1, 100, 1).as_deref(), Ok(&[0x51; BLOCK][..]), "what the Copy copied");
    }
    assert!(raw.write(second, 1, 100, &[0x78; BLOCK]).is_success());
    assert!(raw.write(io, 3, 0, &[0x79; BLOCK]).is_success());
    assert_eq!(raw.read(second, 1, 20_000, 1), Err(Status::LBA_OUT_OF_RANGE.dnr()), "it has the size that it had");
    assert!(look(&mut raw, admin) == before && look(&mut other, other_admin) == others);
    other.read(other_io, 1, 0, 1).expect("the other subsystem is back");
    let mut late = window.managed.host(3, OTHER_NQN);
    late.bring_up();
}

pub(crate) fn a_copy_keeps_its_blocks_through_a_refused_plan<R: Rig>() {
    let mut window = Window::<R>::new();
    let mut raw = window.managed.host(1, NQN);
    // Two queues, on two reactors.
    let (_, io) = raw.bring_up();
    let second = raw.io_up(2, 32);
    assert!(raw.write(io, 1, 0, &[0x51; BLOCK]).is_success());
    window.managed.faults[OF_1].stall_reads();
    let copy = send_copy(&mut raw, io);
    no_answer(&mut raw, io, "the Copy does not wait for the disk");
    window.refuse(|_| {});
    let write = send_write(&mut raw, second, 0, 0x52);
    no_answer(&mut raw, second, "a write into a Copy");
    window.managed.faults[OF_1].release();
    assert!(answer(&mut raw, io, copy).is_success());
    assert!(answer(&mut raw, second, write).is_success());
    assert_eq!(raw.read(io, 1, 100, 1).as_deref(), Ok(&[0x51; BLOCK][..]), "copied from under a write");
    assert_eq!(raw.read(io, 1, 0, 1).as_deref(), Ok(&[0x52; BLOCK][..]));
}

pub(crate) fn a_lock_that_ends_while_its_namespace_is_away_holds_nothing<R: Rig>() {
    let mut window = Window::<R>::new();
    let mut raw = window.managed.host(1, NQN);
    let (admin, io) = raw.bring_up();
    window.managed.faults[OF_1].stall_reads();
    let copy = send_copy(&mut raw, io);
    // It keeps the namespace open on that reactor.
    let mut buffer = raw.host.take(BLOCK).expect("host memory");
    buffer.as_mut_slice().fill(0xee);
    let (sgl, read) = (raw.keyed(&buffer, BLOCK), raw.cid());
    raw.host.send(io, &wire::block_command(2, 1, 50, 1).sgl(sgl).cid(read).0).expect("sent");
    no_answer(&mut raw, io, "neither waits for the disk");
    window.refuse(|_| {
        let abort = raw.call(admin, Sqe::new(8).cdw(10, 1 | u32::from(copy) << 16));
        assert_eq!((abort.status(), abort.dword0() & 1), (Status::SUCCESS, 0), "aborted");
        assert_eq!(answer(&mut raw, io, copy).code(), Status::ABORT_REQUESTED.code());
    });
    let write = send_write(&mut raw, io, 100, 0x53);
    assert!(answer(&mut raw, io, write).is_success(), "behind a lock that nobody holds");
    window.managed.faults[OF_1].release();
    assert!(answer(&mut raw, io, read).is_success());
    assert_eq!(buffer.as_slice(), [0; BLOCK]);
    raw.host.give(buffer);
}

pub(crate) fn a_new_life_waits_for_writes_on_what_was_away<R: Rig>() {
    let mut window = Window::<R>::new();
    let mut old = window.managed.host(1, NQN);
    let (_, io) = old.bring_up();
    window.managed.faults[OF_1].stall_writes();
    let write = send_write(&mut old, io, 0, 0x54);
    no_answer(&mut old, io, "the write does not wait for the disk");
    let mut new = window.managed.host(1, NQN);
    let mut new_io = None;
    window.refuse(|_| new_io = Some(new.bring_up().1));
    let new_io = new_io.expect("connected");
    let mut buffer = new.host.take(BLOCK).expect("host memory");
    let (sgl, read) = (new.keyed(&buffer, BLOCK), new.cid());
    new.host.send(new_io, &wire::block_command(2, 1, 0, 1).sgl(sgl).cid(read).0).expect("sent");
    no_answer(&mut new, new_io, "a read of the new life, before a write of the old one");
    window.managed.faults[OF_1].release();
    assert!(answer(&mut old, io, write).is_success());
    assert!(answer(&mut new, new_io, read).is_success());
    assert_eq!(buffer.as_mut_slice(), [0x54; BLOCK]);
    new.host.give(buffer);
}

pub(crate) fn write_protection_under_way_is_flushed_or_not_told<R: Rig>() {
    let mut window = Window::<R>::new();
    let mut raw = window.managed.host(1, NQN);
    let (admin, io) = raw.bring_up();
    let faults = window.managed.faults[OF_1].clone();
    faults.stall_writes();
    faults.drop_flush(true);
    let write = send_write(&mut raw, io, 0, 0x55);
    no_answer(&mut raw, io, "the write does not wait for the disk");
    let set = raw.cid();
    let protect = Sqe::new(0x09).nsid(1).cdw(10, WRITE_PROTECTION).cdw(11, 1).cid(set);
    raw.host.send(admin, &protect.0).expect("sent");
    no_answer(&mut raw, admin, "protected with a write under way");
    let mut status = None;
    window.refuse(|_| {
        faults.release();
        assert!(answer(&mut raw, io, write).is_success());
        status = Some(answer(&mut raw, admin, set));
    });
    let status = status.expect("answered");
    let now = raw.call(admin, Sqe::new(0x0a).nsid(1).cdw(10, WRITE_PROTECTION));
    println!("{status}, flushes: {}", faults.dropped());
    match now.dword0() {
        1 => assert_eq!((status, faults.dropped()), (Status::SUCCESS, 1), "told without a flush"),
        state => assert_eq!((status, state), (Status::NAMESPACE_NOT_READY, 0), "refused, and protected"),
    }
}
