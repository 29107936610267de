//! A RAM disk: shared by all reactors, allocated where it is written, gone with the process.
//!
//! Memory is cut into chunks with a lock each, held for one copy of at most a chunk; two reactors meet on it only when they
//! use the same chunk at the same time. Chunks that were never written, or were given back, take no memory.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Abilities, Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit};

/// See the module's doc.
#[derive(Debug)]
pub struct Memory {
    disk: Arc<Disk>,
}

#[derive(Debug)]
struct Disk {
    size: u64,
    chunk_shift: u32,
    chunks: Vec<Chunk>,
}

/// `None`: zeroes.
type Chunk = RwLock<Option<Box<[u8]>>>;

/// 64 KiB; larger where the table of chunks would become long.
const MIN_CHUNK_SHIFT: u32 = 16;
const MAX_CHUNKS: u64 = 1 << 20;

impl Memory {
    /// Of `size` bytes, all zeroes.
    pub fn new(size: u64) -> Self {
        let chunk_shift = (MIN_CHUNK_SHIFT..63).find(|shift| size >> shift < MAX_CHUNKS).unwrap_or(63);
        let count = size.div_ceil(1 << chunk_shift);
        let chunks = std::iter::repeat_with(Chunk::default).take(count as usize).collect();
        Self { disk: Arc::new(Disk { size, chunk_shift, chunks }) }
    }
}

impl Backend for Memory {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "memory".into(),
            size: self.disk.size,
            block_size: 512,
            preferred_write: 0,
            preferred_deallocate: 1 << self.disk.chunk_shift,
            optimal_write: 0,
            write_cache: false,
            read_only: false,
            abilities: Abilities { deallocate: true, write_zeroes: true, deallocated_reads_zero: true },
            max_transfer: u32::MAX,
            remarks: vec!["memory: contents end with the process".into()],
            identity: b"memory".to_vec(),
        }
    }

    fn open_queue(&self, _: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        Ok(Box::new(MemoryQueue { disk: self.disk.clone() }))
    }
}

struct MemoryQueue {
    disk: Arc<Disk>,
}

impl IoQueue for MemoryQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let Io { token, op, mut data } = io;
        let result = match (op, &mut data) {
            (IoOp::Read { offset }, Some(data)) => self.disk.read(offset, data.bytes_mut()),
            (IoOp::Write { offset, .. }, Some(data)) => self.disk.write(offset, data.bytes()),
            (IoOp::WriteZeroes { offset, len, .. } | IoOp::Deallocate { offset, len }, _) => {
                self.disk.zero(offset, len)
            }
            (IoOp::Flush, _) => Ok(()),
            (IoOp::Read { .. } | IoOp::Write { .. }, None) => panic!("{op:?} without a buffer"),
        };
        Submit::Done(IoDone { token, result, data })
    }
}

impl Disk {
    fn read(&self, offset: u64, mut into: &mut [u8]) -> Result<(), IoError> {
        self.check(offset, into.len() as u64)?;
        let mut at = offset;
        while !into.is_empty() {
            let (index, start, count) = self.piece(at, into.len() as u64);
            let (head, rest) = into.split_at_mut(count);
            match &*read(&self.chunks[index]) {
                Some(chunk) => head.copy_from_slice(&chunk[start..start + count]),
                None => head.fill(0),
            }
            into = rest;
            at += count as u64;
        }
        Ok(())
    }

    fn write(&self, offset: u64, mut from: &[u8]) -> Result<(), IoError> {
        self.check(offset, from.len() as u64)?;
        let mut at = offset;
        while !from.is_empty() {
            let (index, start, count) = self.piece(at, from.len() as u64);
            let (head, rest) = from.split_at(count);
            let mut chunk = write(&self.chunks[index]);
            if chunk.is_none() {
                *chunk = Some(self.new_chunk()?);
            }
            if let Some(chunk) = &mut *chunk {
                chunk[start..start + count].copy_from_slice(head);
            }
            from = rest;
            at += count as u64;
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.check(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (index, start, count) = self.piece(at, end - at);
            let mut chunk = write(&self.chunks[index]);
            if count == 1 << self.chunk_shift {
                *chunk = None;
            } else if let Some(chunk) = &mut *chunk {
                chunk[start..start + count].fill(0);
            }
            at += count as u64;
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), IoError> {
        if len <= self.size && offset <= self.size - len { Ok(()) } else { Err(IoError::OutOfRange) }
    }

    /// The part of a range that lies in one chunk: its index, where in it, how much.
    fn piece(&self, at: u64, left: u64) -> (usize, usize, usize) {
        let chunk = 1u64 << self.chunk_shift;
        let start = at & (chunk - 1);
        ((at >> self.chunk_shift) as usize, start as usize, left.min(chunk - start) as usize)
    }

    fn new_chunk(&self) -> Result<Box<[u8]>, IoError> {
        let len = 1 << self.chunk_shift;
        let mut chunk = Vec::new();
        chunk.try_reserve_exact(len).map_err(|_| IoError::NoSpace)?;
        chunk.resize(len, 0);
        Ok(chunk.into_boxed_slice())
    }
}

/// Copies do not panic, so a poisoned lock guards sound bytes all the same.
fn read(chunk: &Chunk) -> RwLockReadGuard<'_, Option<Box<[u8]>>> {
    chunk.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn write(chunk: &Chunk) -> RwLockWriteGuard<'_, Option<Box<[u8]>>> {
    chunk.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u64 = 300_000;

    #[test]
    fn chunks_grow_with_the_disk() {
        assert_eq!(Memory::new(1 << 30).disk.chunk_shift, MIN_CHUNK_SHIFT);
        let huge = Memory::new(1 << 40);
        assert!(huge.disk.chunks.len() as u64 <= MAX_CHUNKS);
        assert_eq!(huge.disk.read((1 << 40) - 4, &mut [0; 4]), Ok(()));
        assert_eq!(huge.disk.read((1 << 40) - 3, &mut [0; 4]), Err(IoError::OutOfRange));
    }

    #[test]
    fn zeroed_chunks_are_given_back() {
        let disk = Memory::new(1 << 20).disk;
        disk.write(0, &[1; 200_000]).unwrap();
        disk.zero(1, 150_000).unwrap();
        let held: Vec<_> = disk.chunks.iter().map(|chunk| read(chunk).is_some()).collect();
        assert_eq!(held[..4], [true, false, true, true]);
    }

    proptest! {
        #[test]
        fn memory_equals_a_byte_array(ops in prop::collection::vec((0..3u8, 0..SIZE + 10, 0u64..100_000, any::<u8>()), 1..60)) {
            let disk = Memory::new(SIZE).disk;
            let mut model = vec![0u8; SIZE as usize];
            for (kind, offset, len, byte) in ops {
                let inside = len <= SIZE && offset <= SIZE - len;
                let range = offset as usize..(offset + len) as usize;
                let result = match kind {
                    0 => disk.write(offset, &vec![byte; len as usize]),
                    1 => disk.zero(offset, len),
                    _ => {
                        let mut bytes = vec![0xa5; len as usize];
                        let result = disk.read(offset, &mut bytes);
                        if inside {
                            prop_assert_eq!(&bytes[..], &model[range.clone()]);
                        }
                        result
                    }
                };
                prop_assert_eq!(result.is_ok(), inside);
                if inside && kind < 2 {
                    model[range].fill(if kind == 0 { byte } else { 0 });
                }
            }
        }
    }
}
