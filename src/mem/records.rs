//! Small fixed-size records in an arena: received commands, responses to send.

use std::ptr::NonNull;

use super::arena::Arena;

/// An array of `N`-byte records in registered memory. As with a buffer, nobody reads or writes a record while a work
/// request on it is under way; that is the caller's duty.
#[derive(Debug)]
pub struct Records<const N: usize> {
    base: NonNull<u8>,
    count: usize,
}

// SAFETY: a range of an arena without thread affinity; the owner of the arena owns it too.
unsafe impl<const N: usize> Send for Records<N> {}

impl<const N: usize> Records<N> {
    /// Records at `offset` of the arena.
    ///
    /// # Panics
    /// If they do not fit: sizes are the caller's own.
    pub fn new(arena: &Arena, offset: usize, count: usize) -> Self {
        assert!(offset <= arena.len() && count * N <= arena.len() - offset, "{count} records at {offset} do not fit");
        // SAFETY: offset <= len, so this is inside the mapping or one past its end.
        Self { base: unsafe { arena.base().add(offset) }, count }
    }

    /// Address of a record, for work requests.
    #[inline(always)]
    pub fn addr(&self, at: u32) -> u64 {
        self.ptr(at) as u64
    }

    /// A copy of a record.
    #[inline(always)]
    pub fn read(&self, at: u32) -> [u8; N] {
        // SAFETY: `ptr` checked the bound; bytes have no alignment; the arena is initialised.
        unsafe { self.ptr(at).cast::<[u8; N]>().read_unaligned() }
    }

    /// Replaces a record.
    #[inline(always)]
    pub fn write(&mut self, at: u32, record: [u8; N]) {
        // SAFETY: as in `read`; `&mut self` makes this the only access of ours.
        unsafe { self.ptr(at).cast::<[u8; N]>().write_unaligned(record) }
    }

    #[inline(always)]
    fn ptr(&self, at: u32) -> *mut u8 {
        assert!((at as usize) < self.count, "record {at} of {}", self.count);
        // SAFETY: at < count, and `new` checked that count records fit.
        unsafe { self.base.as_ptr().add(at as usize * N) }
    }
}
