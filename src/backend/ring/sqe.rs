//! A [`Step`] as an entry of the submission queue.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::sync::OnceLock;

use io_uring::{opcode, squeue, types};

use super::request::{Step, ZERO_CHUNK};

/// The descriptor an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// By its slot in the table of registered files.
    Slot(u32),
    /// By its number.
    Fd(i32),
}

/// Where the data are: an address, and the registered buffer that it lies in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) base: *mut u8,
    pub(super) fixed: Option<u16>,
}

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h (6.12), `_IO(0x12, 0)`.
const DISCARD: u32 = 0x1200;

/// The entry for a step. Its pointers lead into `memory`, which must stay until the completion.
pub(super) fn entry(step: Step, target: Target, memory: Option<Memory>) -> squeue::Entry {
    let (fd, flags) = match target {
        Target::Slot(slot) => (types::Fd(slot as i32), squeue::Flags::FIXED_FILE),
        Target::Fd(fd) => (types::Fd(fd), squeue::Flags::empty()),
    };
    let entry = match (step, memory) {
        (Step::Read { offset, done, len }, Some(Memory { base, fixed })) => {
            let at = base.wrapping_add(done as usize);
            match fixed {
                Some(index) => opcode::ReadFixed::new(fd, at, len, index).offset(offset).build(),
                None => opcode::Read::new(fd, at, len).offset(offset).build(),
            }
        }
        (Step::Write { offset, done, len, dsync }, Some(Memory { base, fixed })) => {
            let at = base.wrapping_add(done as usize);
            let flags = if dsync { libc::RWF_DSYNC } else { 0 };
            match fixed {
                Some(index) => opcode::WriteFixed::new(fd, at, len, index).offset(offset).rw_flags(flags).build(),
                None => opcode::Write::new(fd, at, len).offset(offset).rw_flags(flags).build(),
            }
        }
        (Step::WriteZeroes { offset, len }, _) => opcode::Write::new(fd, zeroes().as_ptr(), len).offset(offset).build(),
        (Step::Sync, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        (Step::Fallocate { mode, offset, len }, _) => opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build(),
        (Step::Discard { offset, len }, _) => {
            // The length travels where other operations have their second address: the first 8 bytes of the command.
            let mut command = [0; 16];
            command[..8].copy_from_slice(&len.to_ne_bytes());
            opcode::UringCmd16::new(fd, DISCARD).cmd(command).addr(Some(offset)).build()
        }
        (Step::Read { .. } | Step::Write { .. }, None) => unreachable!("a transfer is started with its buffer"),
    };
    entry.flags(flags)
}

/// A page-aligned megabyte of zeroes, made at its first use and kept.
fn zeroes() -> &'static [u8] {
    static ZEROES: OnceLock<&'static [u8]> = OnceLock::new();
    ZEROES.get_or_init(|| {
        let layout = const {
            match Layout::from_size_align(ZERO_CHUNK as usize, crate::mem::PAGE) {
                Ok(layout) => layout,
                Err(_) => panic!("a page is a power of two"),
            }
        };
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: `base` is an allocation of this size, zeroed, never freed and never written again.
        unsafe { std::slice::from_raw_parts(base, ZERO_CHUNK as usize) }
    })
}
