//! Zoned namespaces from a host's side: the commands, and what comes back. (Zoned Namespace Command Set 1.x.)

use super::wire::{Sqe, identify, u64_at};

/// Command set identifier (CSI) of the Zoned Namespace command set.
pub const CSI: u8 = 2;

/// Identify for the Zoned Namespace command set (CNS 05h, 06h, 07h).
pub fn identify_zoned(cns: u8, nsid: u32) -> Sqe {
    identify(cns, nsid, 0).cdw(11, u32::from(CSI) << 24)
}

/// Zone Append of `blocks` (a real count) to the zone that begins at `zslba`.
pub fn append(nsid: u32, zslba: u64, blocks: u32) -> Sqe {
    at(0x7d, nsid, zslba).cdw(12, blocks.wrapping_sub(1) & 0xffff)
}

/// Zone Management Send: 1 closes, 2 finishes, 3 opens, 4 resets the zone that begins at `zslba`; `None`: all (Select All).
pub fn send(nsid: u32, zslba: Option<u64>, action: u8) -> Sqe {
    at(0x79, nsid, zslba.unwrap_or(0)).cdw(13, u32::from(action) | u32::from(zslba.is_none()) << 8)
}

/// Zone Management Receive of `len` bytes: zones from the one that `slba` lies in; `states` as the Reporting Options number them.
pub fn receive(nsid: u32, slba: u64, len: usize, states: u8, partial: bool) -> Sqe {
    let dwords = u32::try_from(len / 4).unwrap_or(u32::MAX).wrapping_sub(1);
    at(0x7a, nsid, slba).cdw(12, dwords).cdw(13, u32::from(states) << 8 | u32::from(partial) << 16)
}

fn at(opcode: u8, nsid: u32, slba: u64) -> Sqe {
    Sqe::new(opcode).nsid(nsid).cdw(10, slba as u32).cdw(11, (slba >> 32) as u32)
}

/// What a zoned namespace says of its zones (CNS 05h, CSI 02h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedNamespace {
    /// Blocks from one zone to the next (ZSZE).
    pub zone_blocks: u64,
    /// Most open zones (MOR); `None` is no limit.
    pub max_open: Option<u32>,
    /// Most active zones (MAR); `None` is no limit.
    pub max_active: Option<u32>,
}

impl ZonedNamespace {
    /// Reads the 4096 bytes.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let limit = |offset: usize| {
            let value = u32::from_le_bytes(*bytes.get(offset..)?.first_chunk()?);
            value.checked_add(1)
        };
        let zone_blocks = u64::from_le_bytes(*bytes.get(2816..)?.first_chunk()?);
        (zone_blocks > 0).then(|| Self { zone_blocks, max_active: limit(4), max_open: limit(8) })
    }
}

/// One zone of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneDescriptor {
    /// Zone state (ZS).
    pub state: u8,
    /// Blocks that can be written (ZCAP).
    pub capacity: u64,
    /// First block (ZSLBA).
    pub zslba: u64,
    /// Write pointer (WP).
    pub wp: u64,
}

/// What Zone Management Receive transfers: Number of Zones, and the descriptors that are there.
pub fn read_report(bytes: &[u8]) -> (u64, Vec<ZoneDescriptor>) {
    let read = |bytes: &[u8]| ZoneDescriptor {
        state: bytes.get(1).map_or(0, |zs| zs >> 4),
        capacity: u64_at(bytes, 8),
        zslba: u64_at(bytes, 16),
        wp: u64_at(bytes, 24),
    };
    let count = bytes.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
    let there = bytes.get(64..).unwrap_or_default().chunks_exact(64);
    let there = there.take_while(|descriptor| descriptor.first().is_some_and(|kind| kind & 0xf != 0));
    (count, there.map(read).collect())
}
