//! The system calls about files and devices that have no safe form elsewhere. An unsafe island; no logic lives here.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use super::open_file::Direct;

mod raw {
    nix::ioctl_read_bad!(blksszget, libc::BLKSSZGET, std::ffi::c_int);
    nix::ioctl_read_bad!(blkpbszget, libc::BLKPBSZGET, std::ffi::c_uint);
}

/// Bytes of a device's smallest unit.
pub(crate) fn logical_block_size(device: &File) -> io::Result<u32> {
    let mut size: c_int = 0;
    // SAFETY: the descriptor is open, and the call writes one int.
    unsafe { raw::blksszget(device.as_raw_fd(), &mut size) }?;
    u32::try_from(size).map_err(io::Error::other)
}

/// Bytes that a device writes without reading before.
pub(crate) fn physical_block_size(device: &File) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the descriptor is open, and the call writes one unsigned int.
    unsafe { raw::blkpbszget(device.as_raw_fd(), &mut size) }?;
    Ok(size)
}

/// What statx says about a file beyond the classic fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statx {
    /// O_DIRECT: `None` = it does not say (a file system or kernel that predates the question).
    pub(crate) direct: Option<DirectAnswer>,
    /// When the file was made: seconds and nanoseconds.
    pub(crate) born: Option<(i64, u32)>,
}

/// A file system's answer to whether O_DIRECT works on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectAnswer {
    Refused,
    Aligned(Direct),
}

/// Asks statx about an open file.
pub(crate) fn statx(file: &File) -> io::Result<Statx> {
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BTIME | libc::STATX_DIOALIGN;
    // SAFETY: the path is an empty C string, which AT_EMPTY_PATH allows; the call fills at most one `statx`.
    let result = unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, mask, answer.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain integers, zeroed before the call.
    let answer = unsafe { answer.assume_init() };
    let direct = match (answer.stx_dio_mem_align, answer.stx_dio_offset_align) {
        _ if answer.stx_mask & libc::STATX_DIOALIGN == 0 => None,
        (0, _) | (_, 0) => Some(DirectAnswer::Refused),
        (memory, offset) => Some(DirectAnswer::Aligned(Direct { memory, offset })),
    };
    let born =
        (answer.stx_mask & libc::STATX_BTIME != 0).then_some((answer.stx_btime.tv_sec, answer.stx_btime.tv_nsec));
    Ok(Statx { direct, born })
}

/// Takes an advisory lock on the open file, or says at once that another has it.
pub(crate) fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    flock(file, if exclusive { libc::LOCK_EX } else { libc::LOCK_SH } | libc::LOCK_NB)
}

/// Gives the lock up, also while the kernel or a child process about to exec still holds a reference to the open file.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_UN)
}

fn flock(file: &File, operation: c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open; the call takes no pointer.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
