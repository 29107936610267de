//! One mapping of anonymous memory: on huge pages when there are any.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::rdma::{Access, Endpoint, Mr, RdmaError};

/// The page that sizes and alignments are counted in.
pub const PAGE: usize = 4096;

const HUGE_PAGE: usize = 2 << 20;

/// Memory could not be had.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes of buffer memory: {reason}; lower options.pool_size or options.reactors")]
pub struct MemError {
    bytes: usize,
    reason: String,
}

/// An anonymous mapping, zeroed, resident, aligned to 2 MiB. Unmapped when dropped: whoever registered it deregisters before.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    huge: bool,
}

// SAFETY: the arena is plain memory without thread affinity; exclusive use of its bytes is governed by `Buffer`s.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps at least `bytes`, rounded up to 2 MiB: explicit huge pages first, then plain pages with a hint for
    /// transparent ones.
    pub fn new(bytes: usize) -> Result<Self, MemError> {
        let len = bytes
            .max(1)
            .checked_next_multiple_of(HUGE_PAGE)
            .ok_or_else(|| MemError { bytes, reason: "the size does not fit the address space".into() })?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_POPULATE;
        if let Ok(base) = map(len, flags | MapFlags::MAP_HUGETLB) {
            return Ok(Self { base, len, huge: true });
        }
        let base = map_aligned(len).map_err(|errno| MemError { bytes, reason: errno.desc().into() })?;
        // SAFETY: the range was mapped just now and is ours; MADV_HUGEPAGE changes no content. A refusal costs speed only.
        let _ = unsafe { madvise(base.cast(), len, MmapAdvise::MADV_HUGEPAGE) };
        // Touch every page now, so that no page fault stands in the path of an I/O.
        for offset in (0..len).step_by(PAGE) {
            // SAFETY: inside the mapping, which is zeroed and not shared yet.
            unsafe { base.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(Self { base, len, huge: false })
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Registers all of it with a device. The arena's owner drops the endpoint, or deregisters, before the arena.
    pub fn register<E: Endpoint>(&self, endpoint: &mut E, access: Access) -> Result<Mr, RdmaError> {
        // SAFETY: mapped, readable and writable until the arena is dropped, which its owner does after the endpoint (this
        // method's contract); its parts are touched by their owners only while no work request names them.
        unsafe { endpoint.register(self.base.as_ptr(), self.len, access) }
    }

    /// Never true: an arena has at least one huge page's worth of bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether explicit huge pages back it.
    pub fn huge(&self) -> bool {
        self.huge
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; registrations are withdrawn before (see the type's doc).
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

fn map(len: usize, flags: MapFlags) -> nix::Result<NonNull<u8>> {
    let length = NonZeroUsize::new(len).ok_or(nix::Error::EINVAL)?;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
    unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }.map(NonNull::cast)
}

/// Maps `len` bytes at a multiple of 2 MiB, so that transparent huge pages can back all of it.
fn map_aligned(len: usize) -> nix::Result<NonNull<u8>> {
    let wide = len.checked_add(HUGE_PAGE).ok_or(nix::Error::ENOMEM)?;
    let start = map(wide, MapFlags::MAP_PRIVATE)?;
    let head = start.as_ptr().align_offset(HUGE_PAGE);
    // SAFETY: head < 2 MiB and wide = len + 2 MiB, so head..head + len lies inside the mapping; the two ends outside it are
    // ours, page aligned and unmapped once.
    unsafe {
        let base = start.add(head);
        if head > 0 {
            munmap(start.cast(), head)?;
        }
        if HUGE_PAGE > head {
            munmap(base.add(len).cast(), HUGE_PAGE - head)?;
        }
        Ok(base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_is_aligned_zeroed_and_rounded_up() {
        let arena = Arena::new(3 << 20).unwrap();
        assert_eq!(arena.len(), 4 << 20);
        assert_eq!(arena.base().as_ptr() as usize % HUGE_PAGE, 0);
        // SAFETY: the whole mapping is readable and nobody else has it.
        let bytes = unsafe { std::slice::from_raw_parts(arena.base().as_ptr(), arena.len()) };
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn impossible_size_is_refused_with_a_remedy() {
        let error = Arena::new(usize::MAX - 5).unwrap_err().to_string();
        assert!(error.contains("pool_size"), "{error}");
    }
}
