//! A buddy allocator over an arena: sizes 4 KiB, 8 KiB .. 1 MiB, each one contiguous and aligned to its size.
//!
//! Freed blocks of the size just freed are kept apart in a short stack per size, so the steady state of equal-sized I/O
//! neither splits nor merges; they merge when the stack is full or a larger block is wanted.

use std::ptr::NonNull;

use super::arena::{Arena, PAGE};
use crate::rdma::{Access, Endpoint, Mr, RdmaError};

const MIN_SHIFT: u32 = PAGE.trailing_zeros();
/// Orders 0 (4 KiB) to 8 (1 MiB).
const ORDERS: usize = 9;
const MAX_ORDER: u8 = (ORDERS - 1) as u8;
/// Free blocks of one size that stay unmerged.
const CACHE: usize = 256;
const NONE: u32 = u32::MAX;

/// An exclusive claim on part of an arena. Not `Clone`: one claim, one owner.
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    len: u32,
    order: u8,
    /// The name of its pool.
    pool: u8,
}

// Buffers move with their commands, at every step.
const _: () = assert!(size_of::<Option<Buffer>>() == 16);

// SAFETY: a buffer is the only claim on its bytes, and the arena outlives the reactor that hands it to others.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that are there.
    pub fn capacity(&self) -> usize {
        PAGE << self.order
    }

    /// First byte's address, for work requests.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The name of the pool that it is from.
    pub fn pool(&self) -> u8 {
        self.pool
    }

    /// Registers just this buffer with a device. Whoever holds the buffer deregisters before giving it back.
    pub fn register<E: Endpoint>(&self, endpoint: &mut E, access: Access) -> Result<Mr, RdmaError> {
        // SAFETY: the buffer's bytes stay mapped as long as its arena, and are its holder's alone until it is given back, which
        // is after `deregister` (this method's contract).
        unsafe { endpoint.register(self.base.as_ptr(), self.capacity(), access) }
    }

    /// The bytes. Nothing may be in flight on them (see the module's doc).
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the claim covers base..base + capacity, len <= capacity, and the arena is initialised memory. Exclusive:
        // there is one `Buffer` per range.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len as usize) }
    }

    /// The bytes, to write. Nothing may be in flight on them (see the module's doc).
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len as usize) }
    }
}

/// What a pool holds, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// In all.
    pub total: usize,
    /// Not handed out.
    pub free: usize,
}

/// The allocator. Single-threaded; all state is allocated when it is made.
#[derive(Debug)]
pub struct Pool {
    base: NonNull<u8>,
    name: u8,
    /// 4 KiB blocks.
    blocks: u32,
    free_blocks: u32,
    /// Head of the list of free blocks per order.
    head: [u32; ORDERS],
    next: Vec<u32>,
    prev: Vec<u32>,
    /// For the first block of a free piece that is in a list: its order + 1; else 0.
    listed: Vec<u8>,
    cache: [Vec<u32>; ORDERS],
}

// SAFETY: plain bookkeeping; the arena it points into is `Send` and kept by the pool's owner.
unsafe impl Send for Pool {}

impl Pool {
    /// The largest buffer.
    pub const MAX_BUFFER: usize = PAGE << MAX_ORDER;

    /// A pool over `bytes` of the arena from `offset` on (both whole MiB).
    ///
    /// # Panics
    /// If that is not inside the arena or larger than 16 TiB: sizes are the caller's own.
    pub fn new(arena: &Arena, offset: usize, bytes: usize) -> Self {
        Self::named(0, arena, offset, bytes)
    }

    /// As `new`, with a name that its buffers carry.
    ///
    /// # Panics
    /// As `new`.
    pub fn named(name: u8, arena: &Arena, offset: usize, bytes: usize) -> Self {
        assert!(offset.is_multiple_of(Self::MAX_BUFFER), "a pool at {offset}");
        assert!(
            offset <= arena.len() && bytes <= arena.len() - offset,
            "a pool of {bytes} bytes at {offset} in an arena of {}",
            arena.len()
        );
        let chunks = bytes / Self::MAX_BUFFER;
        let blocks = u32::try_from(chunks << MAX_ORDER).expect("an arena below 16 TiB");
        let mut pool = Self {
            // SAFETY: offset <= len, so this is inside the mapping or one past its end.
            base: unsafe { arena.base().add(offset) },
            name,
            blocks,
            free_blocks: blocks,
            head: [NONE; ORDERS],
            next: vec![NONE; blocks as usize],
            prev: vec![NONE; blocks as usize],
            listed: vec![0; blocks as usize],
            cache: std::array::from_fn(|_| Vec::with_capacity(CACHE)),
        };
        for chunk in (0..blocks).step_by(1 << MAX_ORDER).rev() {
            pool.link(chunk, MAX_ORDER);
        }
        pool
    }

    /// Bytes that a buffer of `len` bytes takes.
    pub fn footprint(len: usize) -> usize {
        PAGE << order_of(len)
    }

    /// A buffer of `len` bytes (0 counts as 1), or `None` if none is free: wait, or it is too large for ever.
    #[inline(always)]
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        self.take_leaving(len, 0)
    }

    /// As `take`, but `None` too if fewer than `rest` bytes would be left.
    #[inline(always)]
    pub fn take_leaving(&mut self, len: usize, rest: usize) -> Option<Buffer> {
        if len > Self::MAX_BUFFER {
            return None;
        }
        let order = order_of(len);
        let left = self.free_blocks.checked_sub(1 << order)?;
        if ((left as usize) << MIN_SHIFT) < rest {
            return None;
        }
        let block = match self.cache[usize::from(order)].pop() {
            Some(block) => block,
            None => self.take_uncached(order)?,
        };
        self.free_blocks = left;
        // SAFETY: block < blocks, so the offset lies inside the arena that `new` was given.
        let base = unsafe { self.base.add((block as usize) << MIN_SHIFT) };
        Some(Buffer { base, len: len as u32, order, pool: self.name })
    }

    #[cold]
    fn take_uncached(&mut self, order: u8) -> Option<u32> {
        self.split(order).or_else(|| {
            self.drain_caches();
            self.split(order)
        })
    }

    /// Takes a buffer back. Nothing is in flight on it any more.
    ///
    /// # Panics
    /// If it is of another pool.
    #[inline(always)]
    pub fn give(&mut self, buffer: Buffer) {
        let Buffer { base, order, .. } = buffer;
        let block = (base.as_ptr() as usize).wrapping_sub(self.base.as_ptr() as usize) >> MIN_SHIFT;
        assert!(block < self.blocks as usize, "a buffer returned to a pool that it was not taken from");
        let block = block as u32;
        self.free_blocks += 1 << order;
        let cache = &mut self.cache[usize::from(order)];
        // The stacks never grow.
        if order < MAX_ORDER && cache.len() < cache.capacity() {
            cache.push(block);
        } else {
            self.merge(block, order);
        }
    }

    /// Free and total bytes.
    pub fn stats(&self) -> PoolStats {
        PoolStats { total: (self.blocks as usize) << MIN_SHIFT, free: (self.free_blocks as usize) << MIN_SHIFT }
    }

    fn split(&mut self, order: u8) -> Option<u32> {
        let mut have = (order..=MAX_ORDER).find(|have| self.head[usize::from(*have)] != NONE)?;
        let block = self.head[usize::from(have)];
        self.unlink(block, have);
        while have > order {
            have -= 1;
            self.link(block + (1 << have), have);
        }
        Some(block)
    }

    fn drain_caches(&mut self) {
        for order in 0..MAX_ORDER {
            while let Some(block) = self.cache[usize::from(order)].pop() {
                self.merge(block, order);
            }
        }
    }

    #[cold]
    fn merge(&mut self, mut block: u32, mut order: u8) {
        while order < MAX_ORDER {
            let buddy = block ^ (1 << order);
            if self.listed[buddy as usize] != order + 1 {
                break;
            }
            self.unlink(buddy, order);
            block = block.min(buddy);
            order += 1;
        }
        self.link(block, order);
    }

    fn link(&mut self, block: u32, order: u8) {
        let head = self.head[usize::from(order)];
        self.next[block as usize] = head;
        self.prev[block as usize] = NONE;
        if head != NONE {
            self.prev[head as usize] = block;
        }
        self.head[usize::from(order)] = block;
        self.listed[block as usize] = order + 1;
    }

    fn unlink(&mut self, block: u32, order: u8) {
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        if prev == NONE {
            self.head[usize::from(order)] = next;
        } else {
            self.next[prev as usize] = next;
        }
        if next != NONE {
            self.prev[next as usize] = prev;
        }
        self.listed[block as usize] = 0;
    }
}

/// Binary logarithm of the 4 KiB blocks that `len` bytes take.
#[inline]
fn order_of(len: usize) -> u8 {
    let last = len.saturating_sub(1) >> MIN_SHIFT;
    (usize::BITS - last.leading_zeros()) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_round_up_to_powers_of_two_pages() {
        assert_eq!(order_of(0), 0);
        assert_eq!(order_of(4096), 0);
        assert_eq!(order_of(4097), 1);
        assert_eq!(order_of(128 << 10), 5);
        assert_eq!(order_of(1 << 20), 8);
    }

    #[test]
    fn too_large_is_refused_and_largest_is_given() {
        let arena = Arena::new(2 << 20).unwrap();
        let mut pool = Pool::new(&arena, 0, 2 << 20);
        assert!(pool.take(Pool::MAX_BUFFER + 1).is_none());
        let buffer = pool.take(Pool::MAX_BUFFER).unwrap();
        assert_eq!(buffer.capacity(), 1 << 20);
        pool.give(buffer);
    }

    #[test]
    fn small_blocks_merge_when_a_large_one_is_wanted() {
        let arena = Arena::new(2 << 20).unwrap();
        let mut pool = Pool::new(&arena, 0, 2 << 20);
        let small: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
        assert_eq!(small.len(), 512);
        assert!(pool.take(1).is_none());
        small.into_iter().for_each(|buffer| pool.give(buffer));
        let large: Vec<_> = std::iter::from_fn(|| pool.take(1 << 20)).collect();
        assert_eq!(large.len(), 2);
        large.into_iter().for_each(|buffer| pool.give(buffer));
    }

    #[test]
    #[should_panic(expected = "not taken from")]
    fn buffer_of_another_pool_is_refused() {
        let (one, two) = (Arena::new(1).unwrap(), Arena::new(1).unwrap());
        let buffer = Pool::new(&one, 0, 1 << 20).take(1).unwrap();
        Pool::new(&two, 0, 1 << 20).give(buffer);
    }

    proptest! {
        #[test]
        fn buffers_never_overlap_and_all_memory_comes_back(sizes in prop::collection::vec((1usize..=1 << 20, any::<bool>()), 1..200)) {
            let arena = Arena::new(8 << 20).unwrap();
            let mut pool = Pool::new(&arena, 0, 8 << 20);
            let mut held: Vec<(Buffer, u8)> = Vec::new();
            for (at, (size, give)) in sizes.into_iter().enumerate() {
                if give && !held.is_empty() {
                    let (buffer, mark) = held.swap_remove(at % held.len());
                    prop_assert!(buffer.as_slice().iter().all(|byte| *byte == mark));
                    pool.give(buffer);
                } else if let Some(mut buffer) = pool.take(size) {
                    prop_assert_eq!(buffer.addr() as usize % buffer.capacity().min(2 << 20), 0);
                    let mark = at as u8;
                    buffer.as_mut_slice().fill(mark);
                    held.push((buffer, mark));
                }
            }
            for (buffer, mark) in held {
                prop_assert!(buffer.as_slice().iter().all(|byte| *byte == mark));
                pool.give(buffer);
            }
            prop_assert_eq!(pool.stats().free, pool.stats().total);
            for _ in 0..8 {
                prop_assert!(pool.take(1 << 20).is_some());
            }
        }
    }
}
