//! A RAM disk: shared by all reactors, allocated where it is written, gone with the process.
//!
//! Memory is cut into chunks with a lock each, held for one copy of at most a chunk; two reactors meet on it only when they
//! use the same chunk at the same time. Chunks that were never written, or were given back, take no memory.
//!
//! It can be cut into zones: then a zone that is reset gives its memory back.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nvme::zns::{Geometry, Zone, ZoneAction, ZoneState, Zones};

use super::{
    Abilities, Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit, ZoneWork,
    Zoned,
};

/// See the module's doc.
#[derive(Debug)]
pub struct Memory {
    disk: Arc<Disk>,
    zoned: Option<Arc<Zoned>>,
}

/// Zones of memory: sizes in bytes, limits in zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryZones {
    /// From one zone to the next: a power of two.
    pub zone_size: u64,
    /// What can be written of each; `None`: all.
    pub zone_capacity: Option<u64>,
    /// Most that can be open at a time; 0 is no limit.
    pub max_open: u32,
    /// Most that can be open or closed at a time; 0 is no limit.
    pub max_active: u32,
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
        Self { disk: Arc::new(Disk { size, chunk_shift, chunks }), zoned: None }
    }

    /// Of zones, all empty, in blocks of `block_size`.
    pub fn zoned(size: u64, zones: &MemoryZones, block_size: u32) -> Result<Self, BackendError> {
        let zones = zones.check(size, block_size)?;
        Ok(Self { zoned: Some(Arc::new(Zoned::new(zones, block_size))), ..Self::new(size) })
    }
}

impl MemoryZones {
    /// The zones that so much memory is cut into.
    pub(crate) fn check(&self, size: u64, block_size: u32) -> Result<Zones, BackendError> {
        let refuse = |reason: String, remedy: &str| Err(BackendError::new("memory", reason, remedy));
        let Self { zone_size, zone_capacity, max_open, max_active } = *self;
        let (capacity, block) = (zone_capacity.unwrap_or(zone_size), u64::from(block_size));
        if !zone_size.is_power_of_two() || zone_size < block {
            return refuse(format!("a zone size of {zone_size} bytes"), "choose a power of two, at least block_size");
        }
        if size == 0 || !size.is_multiple_of(zone_size) {
            let reason = format!("its size, {size} bytes, is not a multiple of the zone size {zone_size}");
            return refuse(reason, "change the size or zone_size");
        }
        if !capacity.is_multiple_of(block) {
            let reason =
                format!("a zone capacity of {capacity} bytes is not a multiple of the block size {block_size}");
            return refuse(reason, "change zone_capacity or block_size");
        }
        if size / zone_size > MAX_ZONES {
            return refuse(format!("{} zones", size / zone_size), "choose a larger zone_size: at most 2^24 zones");
        }
        let geometry = Geometry { zone_blocks: zone_size / block, max_open, max_active };
        let empty = Zone { state: ZoneState::Empty, capacity: capacity / block, written: 0 };
        let remedy = "choose a zone_capacity up to zone_size, and max_open_zones up to max_active_zones";
        let count = (size / zone_size) as usize;
        Zones::new(geometry, std::iter::repeat_n(empty, count)).or_else(|error| refuse(error.to_string(), remedy))
    }
}

/// Zones take some bytes each.
const MAX_ZONES: u64 = 1 << 24;

impl Backend for Memory {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "memory".into(),
            size: self.disk.size,
            block_size: 512,
            preferred_write: 0,
            preferred_deallocate: if self.zoned.is_some() { 0 } else { 1 << self.disk.chunk_shift },
            optimal_write: 0,
            write_cache: false,
            read_only: false,
            rotational: false,
            abilities: Abilities { deallocate: true, write_zeroes: true, deallocated_reads_zero: true },
            max_transfer: u32::MAX,
            remarks: vec!["memory: contents end with the process".into()],
            identity: b"memory".to_vec(),
        }
    }

    fn zoned(&self) -> Option<Arc<Zoned>> {
        self.zoned.clone()
    }

    fn open_queue(&self, _: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        Ok(Box::new(MemoryQueue { disk: self.disk.clone(), zoned: self.zoned.clone() }))
    }
}

struct MemoryQueue {
    disk: Arc<Disk>,
    zoned: Option<Arc<Zoned>>,
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
            (IoOp::Zone { offset, len, work }, _) => self.work(offset, len, work),
            (IoOp::Flush, _) => Ok(()),
            (IoOp::Read { .. } | IoOp::Write { .. }, None) => panic!("{op:?} without a buffer"),
        };
        Submit::Done(IoDone { token, result, data })
    }
}

impl MemoryQueue {
    fn work(&self, offset: u64, len: u64, work: ZoneWork) -> Result<(), IoError> {
        let zoned = self.zoned.as_ref().ok_or(IoError::Unsupported)?;
        let zone = zoned.zone_at(offset);
        match work {
            ZoneWork::Act(action) => {
                if action == ZoneAction::Reset {
                    // Giving memory back takes a while, in which others may look at the zones.
                    self.disk.zero(offset, len)?;
                }
                zoned.zones().end_action(zone, action, true);
            }
            // What is written down there is all that there is to know.
            ZoneWork::Look => zoned.zones().trust(zone),
        }
        Ok(())
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

    #[test]
    fn zones_can_be_looked_at_while_one_gives_its_memory_back() {
        let zones = MemoryZones { zone_size: 1 << 20, zone_capacity: None, max_open: 0, max_active: 0 };
        let memory = Memory::zoned(4 << 20, &zones, 4096).unwrap();
        memory.disk.write(1 << 20, &[1; 65536]).unwrap();
        let mut queue = MemoryQueue { disk: memory.disk.clone(), zoned: memory.zoned.clone() };
        let zoned = memory.zoned.unwrap();
        let looks = zoned.zones();
        let op = IoOp::Zone { offset: 1 << 20, len: 1 << 20, work: ZoneWork::Act(ZoneAction::Reset) };
        let reset = std::thread::spawn(move || {
            let Submit::Done(done) = queue.submit(Io { token: 0, op, data: None }) else { panic!("at once") };
            done.result
        });
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while read(&memory.disk.chunks[16]).is_some() {
            assert!(std::time::Instant::now() < end, "it waits for who looks");
            std::thread::yield_now();
        }
        drop(looks);
        assert_eq!(reset.join().unwrap(), Ok(()));
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
