//! Lists of ranges that come as a command's data: Dataset Management and Copy. (NVM Command Set 1.x.)

use super::{NamespaceView, within};
use crate::io::IoLimits;
use crate::status::Status;

/// Bytes of a Dataset Management range descriptor.
pub(super) const DSM_RANGE_LEN: u32 = 16;

/// Bytes of a Copy source range entry of descriptor format 0.
pub(super) const COPY_RANGE_LEN: u32 = 32;

/// One range of logical blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockRange {
    /// Starting LBA.
    pub slba: u64,
    /// Length in logical blocks; in Dataset Management zero is legal and means nothing to do.
    pub blocks: u32,
}

impl BlockRange {
    /// Whether the two share a block.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let end = |range: &Self| range.slba.saturating_add(range.blocks.into());
        self.slba < end(other) && other.slba < end(self)
    }
}

/// The ranges of a Dataset Management command, all checked; an iterator over the bytes, so that nothing is copied.
#[derive(Clone, Debug)]
pub struct Ranges<'a> {
    descriptors: core::slice::Iter<'a, [u8; 16]>,
}

impl Iterator for Ranges<'_> {
    type Item = BlockRange;

    fn next(&mut self) -> Option<BlockRange> {
        self.descriptors.next().map(parse_range)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.descriptors.size_hint()
    }
}

impl ExactSizeIterator for Ranges<'_> {}

/// Checks the first `count` range descriptors in `bytes` against the namespace and the limits.
///
/// # Errors
/// Data SGL Length Invalid when the bytes are too few, LBA Out of Range when any range reaches outside, Command Size Limit
/// Exceeded when there are more ranges (DMRL), longer ones (DMRSL), or more blocks in all (DMSL) than hosts were told;
/// then none is done.
pub fn parse_ranges<'a>(
    bytes: &'a [u8],
    count: u16,
    view: &NamespaceView,
    limits: &IoLimits,
) -> Result<Ranges<'a>, Status> {
    let (descriptors, _) = bytes.as_chunks::<16>();
    let descriptors = descriptors.get(..usize::from(count)).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
    let mut all = 0u64;
    let exceeded = |limit: u64, value: u64| limit != 0 && value > limit;
    for range in descriptors.iter().map(parse_range) {
        within(range.slba, u64::from(range.blocks), view)?;
        all += u64::from(range.blocks);
        if exceeded(limits.dsm_range_blocks.into(), range.blocks.into()) {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr());
        }
    }
    if exceeded(limits.dsm_ranges.into(), count.into()) || exceeded(limits.dsm_blocks, all) {
        return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr());
    }
    Ok(Ranges { descriptors: descriptors.iter() })
}

fn parse_range(bytes: &[u8; 16]) -> BlockRange {
    let [_, _, _, _, l0, l1, l2, l3, s0, s1, s2, s3, s4, s5, s6, s7] = *bytes;
    BlockRange {
        slba: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        blocks: u32::from_le_bytes([l0, l1, l2, l3]),
    }
}

/// The source ranges of a Copy command, all checked, in their order; they land one behind the other at `slba`.
///
/// # Errors
/// The status, and the number of the source range at fault for Dword 0 of the answer; nothing was done. A source that
/// shares a block with the destination is refused: what such a copy gives would depend on its order.
pub fn parse_copy(
    bytes: &[u8],
    slba: u64,
    count: u16,
    view: &NamespaceView,
    limits: &IoLimits,
) -> Result<Vec<BlockRange>, (Status, u32)> {
    let (entries, _) = bytes.as_chunks::<32>();
    let entries = entries.get(..usize::from(count)).ok_or((Status::DATA_SGL_LENGTH_INVALID.dnr(), 0))?;
    let ranges: Vec<BlockRange> = entries.iter().map(parse_source).collect();
    let mut all = 0u64;
    for (at, range) in (0u32..).zip(&ranges) {
        within(range.slba, range.blocks.into(), view).map_err(|status| (status, at))?;
        all += u64::from(range.blocks);
        if range.blocks > u32::from(limits.copy_range_blocks(view)) || all > limits.copy_blocks(view).into() {
            return Err((Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr(), at));
        }
    }
    within(slba, all, view).map_err(|status| (status, 0))?;
    let destination = BlockRange { slba, blocks: u32::try_from(all).unwrap_or(u32::MAX) };
    match (0u32..).zip(&ranges).find(|(_, range)| range.overlaps(&destination)) {
        Some((at, _)) => Err((Status::OVERLAPPING_IO_RANGE.dnr(), at)),
        None => Ok(ranges),
    }
}

/// Source range entry of descriptor format 0: SLBA at byte 8, NLB (zero's based) at byte 16.
fn parse_source(bytes: &[u8; 32]) -> BlockRange {
    let [_, _, _, _, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, ..] = *bytes;
    BlockRange {
        slba: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        blocks: u32::from(u16::from_le_bytes([n0, n1])) + 1,
    }
}
