//! A file or block device that was opened for serving: what the ring and the backends know about it in common.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{IoError, ioctl};

/// What kind of storage a descriptor is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A regular file.
    File,
    /// A block device.
    Device,
}

/// Alignments that O_DIRECT asks for, in bytes (powers of two).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Direct {
    /// Of memory.
    pub(crate) memory: u32,
    /// Of offsets and lengths.
    pub(crate) offset: u32,
}

/// An open descriptor with what was learnt about it. Shared by the queues of all reactors.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: File,
    kind: Kind,
    read_only: bool,
    /// A device with zones: what some of its errors mean is about them.
    zoned: bool,
    direct: Option<Direct>,
    size: AtomicU64,
    /// What turned out not to work; asked once, remembered for every queue.
    refused: [AtomicBool; 3],
    /// Buffered writes that were answered may be gone: see `sync_failed`.
    lost: AtomicBool,
}

/// Ways to change a range without sending data, any of which a file system or a device may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeCall {
    /// fallocate that gives space back and leaves zeroes.
    Punch,
    /// fallocate that leaves zeroes.
    Zero,
    /// Discard of a block device; what reads return afterwards is up to it.
    Discard,
}

impl OpenFile {
    /// Takes over an open descriptor.
    pub(crate) fn new(file: File, kind: Kind, read_only: bool, direct: Option<Direct>, size: u64) -> Self {
        let refused = [AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(kind == Kind::File)];
        let (size, lost) = (AtomicU64::new(size), AtomicBool::new(false));
        Self { file, kind, read_only, zoned: false, direct, size, refused, lost }
    }

    /// It is a device with zones. Zeroes are written like any data then, where the write pointer is.
    pub(crate) fn with_zones(mut self) -> Self {
        [RangeCall::Punch, RangeCall::Zero, RangeCall::Discard].into_iter().for_each(|call| self.refuse(call));
        self.zoned = true;
        self
    }

    /// Whether it has zones.
    pub(crate) fn zoned(&self) -> bool {
        self.zoned
    }

    /// The descriptor.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The descriptor's number.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// File or device.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether writes are refused.
    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Alignments of O_DIRECT, or `None` when I/O goes through the page cache.
    pub(crate) fn direct(&self) -> Option<Direct> {
        self.direct
    }

    /// Bytes, as last seen.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Notes a new size.
    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Whether a call is worth trying.
    pub(crate) fn takes(&self, call: RangeCall) -> bool {
        !self.refused[call as usize].load(Ordering::Relaxed)
    }

    /// Notes that a call is refused here.
    pub(crate) fn refuse(&self, call: RangeCall) {
        self.refused[call as usize].store(true, Ordering::Relaxed);
    }

    /// Notes that data did not reach stable storage. Through the page cache that cannot be made good: the kernel reports the
    /// failure once and counts the pages as clean afterwards, so a later flush, of another host perhaps, would succeed
    /// although answered writes are gone. From here on every flush fails until the storage is opened anew.
    pub(crate) fn sync_failed(&self, error: IoError) {
        if self.direct.is_none() && !self.lost.swap(true, Ordering::AcqRel) {
            tracing::error!(fd = self.fd(), %error, "writes were lost in the page cache: every flush fails from now on");
        }
    }

    /// Whether a flush may still succeed.
    pub(crate) fn can_sync(&self) -> bool {
        !self.lost.load(Ordering::Acquire)
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // The ring lets go of its reference a little later than we do.
        let _ = ioctl::unlock(&self.file);
    }
}
