//! What one operation asks of the kernel, step by step. Pure: results go in, the next step or the answer comes out.
//!
//! Short transfers, EAGAIN and EINTR end here and are continued from where they stopped; a refused fallocate falls back to
//! the next way of doing the same.

use crate::backend::open_file::{Kind, OpenFile, RangeCall};
use crate::backend::{IoError, IoOp};

/// One thing for the kernel to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Into the buffer from byte `done` on.
    Read { offset: u64, done: u32, len: u32 },
    /// From the buffer from byte `done` on; stable when it ends if `dsync`.
    Write { offset: u64, done: u32, len: u32, dsync: bool },
    /// Zeroes from the zero buffer.
    WriteZeroes { offset: u64, len: u32 },
    /// fdatasync.
    Sync,
    /// fallocate.
    Fallocate { mode: i32, offset: u64, len: u64 },
    /// Discard on a block device.
    Discard { offset: u64, len: u64 },
}

/// What follows a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Go on with `step` at once.
    Continue,
    /// Go on with `step` after a pause, the longer the higher the number, and on a worker thread of the kernel that may wait.
    Pause(u8),
    /// The answer.
    Done(Result<(), IoError>),
}

/// The way an operation is being done right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Read,
    Write,
    Sync,
    Call(RangeCall),
    Zeroes,
}

/// The progress of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    op: IoOp,
    way: Way,
    len: u64,
    done: u64,
    /// Unit that a continued transfer starts at: that of O_DIRECT, else 1.
    unit: u64,
    pauses: u8,
    /// An answer that is no error is wanted no more.
    cancelled: bool,
}

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

impl Request {
    /// For an operation on `data_len` bytes of a buffer, or its answer where nothing is to be done.
    pub(super) fn new(op: IoOp, data_len: u32, file: &OpenFile) -> Result<Self, Result<(), IoError>> {
        if file.read_only() && !matches!(op, IoOp::Read { .. } | IoOp::Flush) {
            return Err(Err(IoError::ReadOnly));
        }
        let (way, len) = match op {
            IoOp::Read { .. } => (Way::Read, u64::from(data_len)),
            IoOp::Write { .. } => (Way::Write, u64::from(data_len)),
            IoOp::Flush => (Way::Sync, 0),
            IoOp::Zone { .. } => return Err(Err(IoError::Unsupported)),
            IoOp::WriteZeroes { deallocate, len, .. } => (first_zero_way(deallocate, file), len),
            IoOp::Deallocate { len, .. } => match first_deallocate_way(file) {
                Some(way) => (way, len),
                None => return Err(Ok(())),
            },
        };
        if matches!(op, IoOp::Flush | IoOp::Write { fua: true, .. } | IoOp::WriteZeroes { fua: true, .. })
            && !file.can_sync()
        {
            return Err(Err(IoError::Write));
        }
        if len == 0 && way != Way::Sync {
            return Err(Ok(()));
        }
        let unit = file.direct().map_or(1, |direct| u64::from(direct.offset));
        Ok(Self { op, way, len, done: 0, unit, pauses: 0, cancelled: false })
    }

    /// What the kernel is to do now.
    pub(super) fn step(&self) -> Step {
        let offset = start(self.op) + self.done;
        let left = self.len - self.done;
        let (done, short) = (self.done as u32, left.min(ZERO_CHUNK) as u32);
        match self.way {
            Way::Read => Step::Read { offset, done, len: left as u32 },
            Way::Write => Step::Write { offset, done, len: left as u32, dsync: fua(self.op) },
            Way::Sync => Step::Sync,
            Way::Zeroes => Step::WriteZeroes { offset, len: short },
            Way::Call(RangeCall::Punch) => Step::Fallocate { mode: PUNCH, offset, len: left },
            Way::Call(RangeCall::Zero) => Step::Fallocate { mode: ZERO, offset, len: left },
            Way::Call(RangeCall::Discard) => Step::Discard { offset, len: left },
        }
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(self.op, IoOp::Read { .. })
    }

    /// Notes the wish to end early.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
    }

    pub(super) fn cancelled(&self) -> bool {
        self.cancelled
    }

    /// Whether the next attempt should wait on a worker thread rather than come back with EAGAIN again.
    pub(super) fn patient(&self) -> bool {
        self.pauses > 0
    }

    /// Takes the kernel's result of the current step.
    pub(super) fn handle(&mut self, result: i32, file: &OpenFile) -> Next {
        let next = match result {
            ..0 => self.handle_error(-result, file),
            _ => self.handle_success(result as u64, file),
        };
        match next {
            Next::Continue | Next::Pause(_) if self.cancelled => Next::Done(Err(IoError::Cancelled)),
            next => next,
        }
    }

    fn handle_success(&mut self, count: u64, file: &OpenFile) -> Next {
        match self.way {
            Way::Read | Way::Write | Way::Zeroes => self.handle_transfer(count, file),
            Way::Sync => Next::Done(Ok(())),
            Way::Call(_) => self.finish(file),
        }
    }

    fn handle_transfer(&mut self, count: u64, file: &OpenFile) -> Next {
        let before = self.done;
        let reached = (before + count).min(self.len);
        if reached == self.len {
            self.done = reached;
            return self.finish(file);
        }
        // A transfer with O_DIRECT goes on at an aligned place: what lies before it is done again.
        self.done = reached - reached % self.unit;
        if self.done == before {
            let error = if self.way == Way::Read { IoError::OutOfRange } else { IoError::Write };
            return Next::Done(Err(error));
        }
        self.pauses = 0;
        Next::Continue
    }

    /// The range is as it should be; what is left is to make it stable.
    fn finish(&mut self, file: &OpenFile) -> Next {
        match self.op {
            IoOp::WriteZeroes { fua: true, .. } => {
                if !file.can_sync() {
                    return Next::Done(Err(IoError::Write));
                }
                self.way = Way::Sync;
                self.pauses = 0;
                Next::Continue
            }
            _ => Next::Done(Ok(())),
        }
    }

    fn handle_error(&mut self, errno: i32, file: &OpenFile) -> Next {
        match (errno, self.way) {
            (libc::EINTR, _) => Next::Continue,
            (libc::EAGAIN, _) => {
                self.pauses = self.pauses.saturating_add(1);
                Next::Pause(self.pauses)
            }
            (libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY, Way::Call(call)) => self.handle_refusal(call, file),
            _ => {
                let error = match errno {
                    // The block layer's words for a zone that cannot be opened.
                    libc::ETOOMANYREFS if file.zoned() => IoError::OpenZones,
                    libc::EOVERFLOW if file.zoned() => IoError::ActiveZones,
                    _ => io_error(errno, matches!(self.op, IoOp::Read { .. })),
                };
                if error != IoError::Cancelled && (self.way == Way::Sync || (self.way == Way::Write && fua(self.op))) {
                    file.sync_failed(error);
                }
                Next::Done(Err(error))
            }
        }
    }

    /// Falls back to the next way with the same promise.
    fn handle_refusal(&mut self, call: RangeCall, file: &OpenFile) -> Next {
        file.refuse(call);
        match (self.op, call) {
            (IoOp::WriteZeroes { .. }, _) => self.way = first_zero_way(false, file),
            (_, RangeCall::Discard) if file.takes(RangeCall::Punch) => self.way = Way::Call(RangeCall::Punch),
            // A hint: nothing has to happen.
            _ => return Next::Done(Ok(())),
        }
        Next::Continue
    }
}

/// Bytes of the buffer that zeroes are written from.
pub(super) const ZERO_CHUNK: u64 = 1 << 20;

/// After success reads return zeroes, whichever way is taken (NVMe NVM, Write Zeroes). A hole in a file is zeroes; a punched
/// range of a block device is zeroed by the kernel with leave to unmap, and refused where it could only be written out.
fn first_zero_way(deallocate: bool, file: &OpenFile) -> Way {
    if deallocate && file.takes(RangeCall::Punch) {
        Way::Call(RangeCall::Punch)
    } else if file.takes(RangeCall::Zero) {
        Way::Call(RangeCall::Zero)
    } else {
        Way::Zeroes
    }
}

/// A discard says nothing about the contents and is what a device does fastest; files and kernels without it punch.
fn first_deallocate_way(file: &OpenFile) -> Option<Way> {
    let call = match file.kind() {
        Kind::Device if file.takes(RangeCall::Discard) => RangeCall::Discard,
        _ if file.takes(RangeCall::Punch) => RangeCall::Punch,
        _ => return None,
    };
    Some(Way::Call(call))
}

fn start(op: IoOp) -> u64 {
    match op {
        IoOp::Read { offset }
        | IoOp::Write { offset, .. }
        | IoOp::WriteZeroes { offset, .. }
        | IoOp::Deallocate { offset, .. }
        | IoOp::Zone { offset, .. } => offset,
        IoOp::Flush => 0,
    }
}

fn fua(op: IoOp) -> bool {
    matches!(op, IoOp::Write { fua: true, .. } | IoOp::WriteZeroes { fua: true, .. })
}

/// What an error number means to a host. Not one-to-one: the block layer's many ways to say "the medium" become one.
pub(in crate::backend) fn io_error(errno: i32, read: bool) -> IoError {
    match errno {
        libc::EIO | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ | libc::EUCLEAN if read => IoError::Read,
        libc::EIO | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ | libc::EUCLEAN => IoError::Write,
        libc::ENOSPC | libc::EDQUOT => IoError::NoSpace,
        libc::EFBIG | libc::EOVERFLOW => IoError::OutOfRange,
        libc::EROFS => IoError::ReadOnly,
        libc::EPERM | libc::EACCES | libc::EBADF if !read => IoError::ReadOnly,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => IoError::Unsupported,
        libc::ENODEV | libc::ENXIO | libc::ESHUTDOWN | libc::ENOMEDIUM | libc::ESTALE => IoError::Gone,
        libc::ECANCELED => IoError::Cancelled,
        libc::EBADE => IoError::Reservation,
        errno => IoError::Other(errno),
    }
}
