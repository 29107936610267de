//! The reactor's io_uring: storage for all its file and device queues, and its one place to sleep.
//!
//! One [`Ring`] per reactor thread, made on that thread and used by it alone. Order of a loop: queues submit, `submit`,
//! `poll`; what `poll` continues (short transfers) is entered by the next `submit` or `wait`.
//!
//! Rules:
//! * An operation and its buffer move into the in-flight table before an entry is pushed and leave it with the last
//!   completion. Nothing else may touch the buffer's bytes meanwhile; the table owns it, so nothing can.
//! * A full submission queue is a list to wait in, never an error and never a wait.
//! * Tokens are the reactor's: unique among all operations in flight on its ring, whatever queue they came from.
//! * Dropping the ring cancels and waits a bounded time. What the kernel still holds then is leaked, the arena with it.

mod bounce;
mod queue;
mod request;
mod setup;
mod sqe;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use slab::Slab;

use super::open_file::OpenFile;
use super::{Io, IoData, IoDone, IoError, IoOp, Submit};
use crate::mem::Arena;
use bounce::Bounce;
use request::{Next, Request};
use setup::Mode;
use sqe::{Memory, Target};

pub(super) use queue::RingQueue;
pub(super) use request::io_error;
pub(crate) use setup::kernel_discards;
pub use setup::{RingError, RingOptions};

/// The ring as the queues of one reactor share it.
pub type RingHandle = Rc<RefCell<Ring>>;

/// See the module's doc. Neither `Send` nor `Sync`.
pub struct Ring {
    uring: IoUring,
    mode: Mode,
    in_flight: Slab<InFlight>,
    /// Slots of `in_flight` and of `watches` whose entry found no room.
    backlog: VecDeque<Waiting>,
    files: Slab<FileEntry>,
    registered_files: u32,
    watches: Slab<Watch>,
    arena: Option<Registered>,
    /// Answered without the kernel.
    answered: Vec<IoDone>,
    remarks: Vec<String>,
    #[cfg(test)]
    faults: Option<tests::Faults>,
}

#[derive(Debug)]
struct InFlight {
    token: u64,
    request: Request,
    data: Option<IoData>,
    /// Stands in for a buffer that is not aligned as O_DIRECT asks.
    bounce: Option<Bounce>,
    file: usize,
    place: Place,
    #[cfg(test)]
    fault: Option<i32>,
}

/// Where an operation in flight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Backlog,
    Kernel,
    /// A timer runs; the kernel has nothing of it.
    Pause,
}

#[derive(Clone, Copy, Debug)]
enum Waiting {
    Io(usize),
    Watch(usize),
    Cancel(u64),
}

#[derive(Debug)]
struct FileEntry {
    file: Arc<OpenFile>,
    target: Target,
    in_flight: u32,
    /// The queue is gone; the entry goes with its last operation.
    closing: bool,
}

#[derive(Debug)]
struct Watch {
    fd: RawFd,
    key: u32,
    multi: bool,
    armed: bool,
    removed: bool,
}

struct Registered {
    arena: Rc<Arena>,
    fixed: bool,
}

/// Bytes of one registered buffer. The kernel takes 1 GiB at most; pool buffers never straddle a multiple of it.
const FIXED_CHUNK: usize = 1 << 30;

const KIND_SHIFT: u32 = 56;
const IO: u64 = 1 << KIND_SHIFT;
const PAUSE: u64 = 2 << KIND_SHIFT;
const WATCH: u64 = 3 << KIND_SHIFT;
/// Completions nobody waits for.
const IGNORE: u64 = 4 << KIND_SHIFT;
const INDEX: u64 = (1 << KIND_SHIFT) - 1;

/// How long a dropped ring waits for what it has in flight.
const DRAIN: Duration = Duration::from_secs(1);

/// Pauses after EAGAIN: 1 ms to 64 ms.
static PAUSES: [types::Timespec; 7] = [pause(1), pause(2), pause(4), pause(8), pause(16), pause(32), pause(64)];

const fn pause(milliseconds: u32) -> types::Timespec {
    types::Timespec::new().nsec(milliseconds * 1_000_000)
}

impl Ring {
    /// A ring for the calling thread.
    pub fn new(options: &RingOptions) -> Result<Self, RingError> {
        let wanted = options.entries.clamp(8, 32_768);
        let (uring, mode) = setup::build(wanted)?;
        let mut remarks = Vec::new();
        if uring.params().sq_entries() < wanted {
            remarks.push(format!(
                "io_uring: queues of {} entries instead of {wanted}; raise the memlock limit (ulimit -l, LimitMEMLOCK=)",
                uring.params().sq_entries()
            ));
        }
        if mode != Mode::Deferred {
            remarks.push("io_uring: an old kernel's way of completing (Linux 6.1 has a faster one)".into());
        }
        if options.workers > 0 {
            // Refused before 5.15: the kernel's limit stays.
            let _ = uring.submitter().register_iowq_max_workers(&mut [options.workers, 0]);
        }
        let registered_files = match uring.submitter().register_files_sparse(options.files) {
            Ok(()) => options.files,
            Err(_) => 0,
        };
        let entries = options.entries as usize;
        Ok(Self {
            uring,
            mode,
            in_flight: Slab::with_capacity(entries),
            backlog: VecDeque::with_capacity(entries),
            files: Slab::new(),
            registered_files,
            watches: Slab::new(),
            arena: None,
            answered: Vec::new(),
            remarks,
            #[cfg(test)]
            faults: None,
        })
    }

    /// Makes the arena's memory known to the kernel, so that I/O on it need not pin pages each time. Where that is refused
    /// (memlock, mostly) I/O works without, and a remark says so. Once per ring; the ring keeps the arena mapped as long as it
    /// lives.
    pub fn register_arena(&mut self, arena: &Rc<Arena>) {
        let chunks: Vec<_> = (0..arena.len())
            .step_by(FIXED_CHUNK)
            .map(|start| libc::iovec {
                iov_base: arena.base().as_ptr().wrapping_add(start).cast(),
                iov_len: FIXED_CHUNK.min(arena.len() - start),
            })
            .collect();
        // SAFETY: the ranges are mapped memory of the arena, which `self.arena` keeps mapped until the ring is gone.
        let result = unsafe { self.uring.submitter().register_buffers(&chunks) };
        if let Err(error) = &result {
            self.remarks.push(format!(
                "io_uring: buffers are not registered ({error}), I/O is somewhat slower; raise the memlock limit (ulimit -l, \
                 LimitMEMLOCK=)"
            ));
        }
        self.arena = Some(Registered { arena: arena.clone(), fixed: result.is_ok() });
    }

    /// What the operator should know: fallbacks taken.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Operations started and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.answered.len()
    }

    /// Reports `key` from `poll` whenever `fd` becomes readable (or fails). Edges, not levels: whoever is told reads until
    /// there is nothing more. The descriptor must stay open until `unwatch`.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, key: u32) {
        self.add_watch(fd, key, true);
    }

    /// Like `watch`, reporting once: for descriptors that matter only to a sleeper. Watching again while it is still armed
    /// changes nothing.
    pub fn watch_once(&mut self, fd: BorrowedFd<'_>, key: u32) {
        self.add_watch(fd, key, false);
    }

    /// Stops reporting `key`. One report that was on its way may still come.
    pub fn unwatch(&mut self, key: u32) {
        let found = self.watches.iter().find(|(_, watch)| watch.key == key && !watch.removed).map(|(index, _)| index);
        let Some(index) = found else { return };
        if self.watches[index].armed {
            self.watches[index].removed = true;
            self.enqueue(Waiting::Cancel(WATCH | index as u64));
        } else {
            self.watches.remove(index);
        }
    }

    /// Adds finished operations and keys of readable descriptors. Enters the kernel only when it has completions to hand over
    /// that it cannot hand over otherwise.
    pub fn poll(&mut self, done: &mut Vec<IoDone>, ready: &mut Vec<u32>) {
        let (taskrun, overflow) = {
            let queue = self.uring.submission();
            (queue.taskrun(), queue.cq_overflow())
        };
        if taskrun || overflow {
            // SAFETY: no argument is passed; nothing is submitted.
            let _ = unsafe { self.uring.submitter().enter::<()>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
        }
        done.append(&mut self.answered);
        let mut batch = [const { MaybeUninit::<cqueue::Entry>::uninit() }; 64];
        loop {
            let completions = self.uring.completion().fill(&mut batch);
            if completions.is_empty() {
                break;
            }
            for completion in completions.iter() {
                self.handle_completion(completion, done, ready);
            }
        }
    }

    /// Hands new entries to the kernel, if there are any. Never waits.
    pub fn submit(&mut self) -> Result<(), RingError> {
        loop {
            self.drain_backlog();
            if self.uring.submission().is_empty() {
                return Ok(());
            }
            match self.uring.submit() {
                Ok(taken) if taken > 0 && !self.backlog.is_empty() => {}
                Ok(_) => return Ok(()),
                Err(error) => return tolerate(&error),
            }
        }
    }

    /// Hands new entries to the kernel and sleeps until there is a completion or the time is over.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<(), RingError> {
        self.submit()?;
        if !self.answered.is_empty() || !self.uring.completion().is_empty() || !self.backlog.is_empty() {
            return Ok(());
        }
        let timespec = timeout.map(types::Timespec::from);
        let args = types::SubmitArgs::new();
        let args = match &timespec {
            Some(timespec) => args.timespec(timespec),
            None => args,
        };
        // Sleeping for work to come is no I/O wait; without this an idle target shows as 100% iowait (6.15).
        let flags = match self.uring.params().is_feature_no_iowait() {
            true => EnterFlags::NO_IOWAIT,
            false => EnterFlags::empty(),
        };
        match self.uring.submitter().submit_with_args_and_flags(1, &args, flags) {
            Ok(_) => Ok(()),
            Err(error) => tolerate(&error),
        }
    }

    /// Waits until nothing is in flight or the time is over; returns how many operations still are. Answers are dropped.
    pub fn drain(&mut self, limit: Duration) -> usize {
        let end = Instant::now() + limit;
        let (mut done, mut ready) = (Vec::new(), Vec::new());
        loop {
            self.poll(&mut done, &mut ready);
            done.clear();
            ready.clear();
            let now = Instant::now();
            if self.in_flight.is_empty() || now >= end || self.wait(Some(end - now)).is_err() {
                return self.in_flight.len();
            }
        }
    }

    fn add_file(&mut self, file: Arc<OpenFile>) -> usize {
        let fd = file.fd();
        let slot = self.files.vacant_key() as u32;
        let fixed = slot < self.registered_files
            && self.uring.submitter().register_files_update(slot, &[fd]).is_ok_and(|count| count == 1);
        let target = if fixed { Target::Slot(slot) } else { Target::Fd(fd) };
        self.files.insert(FileEntry { file, target, in_flight: 0, closing: false })
    }

    fn close_file(&mut self, file: usize) {
        self.files[file].closing = true;
        self.release_file(file);
    }

    fn release_file(&mut self, file: usize) {
        let entry = &self.files[file];
        if entry.closing && entry.in_flight == 0 {
            if let Target::Slot(slot) = entry.target {
                let _ = self.uring.submitter().register_files_update(slot, &[-1]);
            }
            self.files.remove(file);
        }
    }

    fn start(&mut self, file: usize, io: Io) -> Submit {
        let Io { token, op, data } = io;
        let transfer = matches!(op, IoOp::Read { .. } | IoOp::Write { .. });
        assert!(transfer == data.is_some(), "{op:?} with the wrong kind of data");
        if let Some(IoData { buffer, start, len }) = &data {
            let fits = (*start as usize).checked_add(*len as usize).is_some_and(|end| end <= buffer.capacity());
            assert!(fits, "an I/O range outside of its buffer");
        }
        let entry = &mut self.files[file];
        let request = match Request::new(op, data.as_ref().map_or(0, |data| data.len), &entry.file) {
            Ok(request) => request,
            Err(result) => return Submit::Done(IoDone { token, result, data }),
        };
        let bounce = data.as_ref().and_then(|data| Bounce::needed(data, op, &entry.file));
        entry.in_flight += 1;
        let index = self.in_flight.insert(InFlight {
            token,
            request,
            data,
            bounce,
            file,
            place: Place::Backlog,
            #[cfg(test)]
            fault: None,
        });
        self.enqueue(Waiting::Io(index));
        Submit::Pending
    }

    fn cancel(&mut self, token: u64) {
        let found = self.in_flight.iter_mut().find(|(_, flight)| flight.token == token);
        let Some((index, flight)) = found else { return };
        flight.request.cancel();
        // In the backlog or in a pause it ends when its turn comes.
        if flight.place == Place::Kernel {
            self.enqueue(Waiting::Cancel(IO | index as u64));
        }
    }

    fn add_watch(&mut self, fd: BorrowedFd<'_>, key: u32, multi: bool) {
        let old = self.watches.iter_mut().find(|(_, watch)| watch.key == key && !watch.removed);
        let index = match old {
            Some((_, watch)) if watch.armed => return,
            Some((index, watch)) => {
                (watch.fd, watch.multi) = (fd.as_raw_fd(), multi);
                index
            }
            None => self.watches.insert(Watch { fd: fd.as_raw_fd(), key, multi, armed: false, removed: false }),
        };
        self.arm(index);
    }

    fn arm(&mut self, index: usize) {
        self.watches[index].armed = true;
        self.enqueue(Waiting::Watch(index));
    }

    fn enqueue(&mut self, waiting: Waiting) {
        if !self.backlog.is_empty() || !self.push(waiting) {
            self.backlog.push_back(waiting);
        }
    }

    fn drain_backlog(&mut self) {
        while let Some(waiting) = self.backlog.front().copied() {
            if !self.push(waiting) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Makes and pushes the entry, unless the queue is full.
    fn push(&mut self, waiting: Waiting) -> bool {
        if self.uring.submission().is_full() {
            return false;
        }
        let entry = match waiting {
            Waiting::Io(index) => {
                if self.in_flight[index].request.cancelled() {
                    let done = self.take(index, Err(IoError::Cancelled));
                    self.answered.push(done);
                    return true;
                }
                self.io_entry(index)
            }
            Waiting::Watch(index) => {
                let watch = &self.watches[index];
                opcode::PollAdd::new(types::Fd(watch.fd), libc::POLLIN as u32)
                    .multi(watch.multi)
                    .build()
                    .user_data(WATCH | index as u64)
            }
            Waiting::Cancel(user_data) => opcode::AsyncCancel::new(user_data).build().user_data(IGNORE),
        };
        self.push_entry(&entry)
    }

    fn push_entry(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: an entry's pointers lead into the buffer (or bounce memory) of an operation that sits in `in_flight` until its
        // completion, into the zero buffer, or into `PAUSES`, which live for ever. Its descriptor is kept open by
        // `files`, or by the watcher (see `watch`).
        unsafe { self.uring.submission().push(entry) }.is_ok()
    }

    fn io_entry(&mut self, index: usize) -> squeue::Entry {
        #[cfg(test)]
        if let Some(entry) = tests::faulty_entry(self, index) {
            return entry;
        }
        let flight = &mut self.in_flight[index];
        flight.place = Place::Kernel;
        let patient = flight.request.patient();
        let step = flight.request.step();
        let entry = self.step_entry(index, step);
        if patient { entry.flags(squeue::Flags::ASYNC) } else { entry }
    }

    fn step_entry(&mut self, index: usize, step: request::Step) -> squeue::Entry {
        let flight = &mut self.in_flight[index];
        let memory = match (&mut flight.bounce, &flight.data) {
            (Some(bounce), _) => Some(Memory { base: bounce.aligned().as_mut_ptr(), fixed: None }),
            (None, Some(data)) => {
                let base = data.buffer.as_ptr().wrapping_add(data.start as usize);
                let fixed = self.arena.as_ref().and_then(|arena| arena.index(base, data.len));
                Some(Memory { base, fixed })
            }
            (None, None) => None,
        };
        sqe::entry(step, self.files[flight.file].target, memory).user_data(IO | index as u64)
    }

    fn handle_completion(&mut self, entry: &cqueue::Entry, done: &mut Vec<IoDone>, ready: &mut Vec<u32>) {
        let index = (entry.user_data() & INDEX) as usize;
        match entry.user_data() & !INDEX {
            IO => self.handle_io(index, entry.result(), done),
            PAUSE => self.enqueue(Waiting::Io(index)),
            WATCH => self.handle_watch(index, entry, ready),
            _ => {}
        }
    }

    fn handle_io(&mut self, index: usize, result: i32, done: &mut Vec<IoDone>) {
        let flight = &mut self.in_flight[index];
        #[cfg(test)]
        let result = flight.fault.take().unwrap_or(result);
        flight.place = Place::Backlog;
        match flight.request.handle(result, &self.files[flight.file].file) {
            Next::Done(result) => {
                let answer = self.take(index, result);
                done.push(answer);
            }
            Next::Continue => self.enqueue(Waiting::Io(index)),
            Next::Pause(count) => self.pause(index, count),
        }
    }

    fn pause(&mut self, index: usize, count: u8) {
        let timespec = &PAUSES[usize::from(count - 1).min(PAUSES.len() - 1)];
        let entry = opcode::Timeout::new(timespec).build().user_data(PAUSE | index as u64);
        if self.uring.submission().is_full() || !self.push_entry(&entry) {
            // No room for a timer: the list is pause enough.
            self.backlog.push_back(Waiting::Io(index));
        } else {
            self.in_flight[index].place = Place::Pause;
        }
    }

    fn handle_watch(&mut self, index: usize, entry: &cqueue::Entry, ready: &mut Vec<u32>) {
        let watch = &mut self.watches[index];
        let more = cqueue::more(entry.flags());
        if watch.removed {
            if !more {
                self.watches.remove(index);
            }
            return;
        }
        ready.push(watch.key);
        if more {
            return;
        }
        watch.armed = false;
        if entry.result() < 0 {
            let (key, errno) = (watch.key, -entry.result());
            tracing::warn!(key, errno, "a watched descriptor cannot be polled");
        } else if watch.multi {
            self.arm(index);
        }
    }

    /// Takes a finished operation out of the table.
    fn take(&mut self, index: usize, result: Result<(), IoError>) -> IoDone {
        let InFlight { token, request, mut data, mut bounce, file, .. } = self.in_flight.remove(index);
        if let (Some(bounce), Some(data), true, true) = (&mut bounce, &mut data, request.is_read(), result.is_ok()) {
            bounce.copy_out(data);
        }
        self.files[file].in_flight -= 1;
        self.release_file(file);
        IoDone { token, result, data }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (index, flight) in &mut self.in_flight {
            flight.request.cancel();
            if flight.place == Place::Kernel {
                self.backlog.push_back(Waiting::Cancel(IO | index as u64));
            }
        }
        let left = self.drain(DRAIN);
        if left > 0 {
            tracing::warn!(left, "operations do not end: their memory is left to the kernel");
            mem::forget(mem::take(&mut self.in_flight));
            mem::forget(mem::take(&mut self.files));
            mem::forget(self.arena.take());
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("mode", &self.mode)
            .field("in_flight", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}

impl Registered {
    /// The registered buffer that a range lies in.
    fn index(&self, base: *mut u8, len: u32) -> Option<u16> {
        let first = (base as usize).wrapping_sub(self.arena.base().as_ptr() as usize);
        let last = first.checked_add((len as usize).saturating_sub(1))?;
        let inside = last < self.arena.len() && first / FIXED_CHUNK == last / FIXED_CHUNK;
        (self.fixed && inside).then_some((first / FIXED_CHUNK) as u16)
    }
}

/// A busy or interrupted kernel is asked again by the next loop; what is left in the queue stays there.
fn tolerate(error: &io::Error) -> Result<(), RingError> {
    match error.raw_os_error() {
        Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
        Some(libc::EEXIST) => {
            Err(RingError::new("used from a thread that it was not made on", "make the ring on its reactor's thread"))
        }
        _ => Err(RingError::new(error.to_string(), "report this: the ring is in a state that should not be")),
    }
}
