//! Scatter gather lists (SGL): where a command's data are.
//!
//! Over RDMA a command names host memory by one keyed descriptor, names data inside its own capsule by an offset
//! descriptor, or names a list of keyed descriptors inside the capsule by a last-segment descriptor. Everything else is
//! refused here, so no later code can turn a bad descriptor into an RDMA operation. (NVMe Base 2.x, Scatter Gather
//! List; NVMe RDMA Transport, Keyed SGL Data Block.)

use core::ops::{Deref, Range};

use zerocopy::byteorder::little_endian::U64;

use crate::status::Status;

/// Most keyed descriptors that a last-segment list may hold (MSDBD).
pub const MAX_KEYED: usize = 16;

/// Bytes of one descriptor.
pub const SGL_LEN: usize = 16;

/// A keyed data block: host memory behind an RDMA key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyedSgl {
    /// Address in the host's memory region.
    pub addr: u64,
    /// Bytes, at most 2^24 - 1.
    pub len: u32,
    /// The host's remote key.
    pub rkey: u32,
    /// The host asks that `rkey` be invalidated by the response (subtype Fh).
    pub invalidate: bool,
}

/// What the SGL of a command says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sgl {
    /// No data: a descriptor of length zero, or a command whose opcode moves none.
    #[default]
    None,
    /// One region of host memory.
    Keyed(KeyedSgl),
    /// Data inside the capsule, `offset` bytes after the command. Not yet checked against what arrived:
    /// [`check_in_capsule`].
    InCapsule {
        /// Bytes from the end of the 64-byte command.
        offset: u64,
        /// Bytes of data.
        len: u32,
    },
    /// A list of keyed descriptors inside the capsule. Not yet checked: [`check_in_capsule`], then
    /// [`resolve_last_segment`].
    LastSegment {
        /// Bytes from the end of the 64-byte command.
        offset: u64,
        /// Bytes of the list.
        len: u32,
    },
}

/// Up to [`MAX_KEYED`] keyed descriptors, checked, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyedList {
    items: [KeyedSgl; MAX_KEYED],
    count: usize,
    total: u32,
}

impl KeyedList {
    /// Sum of the lengths.
    #[must_use]
    pub fn total_len(&self) -> u32 {
        self.total
    }

    /// The one key that the response shall invalidate, if the list asks for one.
    #[must_use]
    pub fn invalidate(&self) -> Option<u32> {
        self.iter().find(|sgl| sgl.invalidate).map(|sgl| sgl.rkey)
    }
}

impl Deref for KeyedList {
    type Target = [KeyedSgl];

    fn deref(&self) -> &[KeyedSgl] {
        self.items.get(..self.count).unwrap_or_default()
    }
}

impl Sgl {
    /// Parses the descriptor at byte 24 of a command.
    ///
    /// # Errors
    /// A type or subtype that this transport does not carry is SGL Descriptor Type Invalid.
    #[inline(always)]
    pub fn parse(bytes: &[u8; SGL_LEN]) -> Result<Self, Status> {
        // Two loads; what follows works on registers.
        let [addr, rest]: [U64; 2] = zerocopy::transmute!(*bytes);
        let (addr, rest) = (addr.get(), rest.get());
        let len = low(rest);
        let [id, ..] = (rest >> 56).to_le_bytes();
        match id {
            KEYED_ADDRESS | KEYED_INVALIDATE => {
                let len = len & 0xff_ffff;
                if len == 0 {
                    // A null keyed descriptor is how the Linux host says "no data"; its key means nothing.
                    return Ok(Self::None);
                }
                Ok(Self::Keyed(KeyedSgl { addr, len, rkey: low(rest >> 24), invalidate: id == KEYED_INVALIDATE }))
            }
            DATA_BLOCK_ADDRESS | DATA_BLOCK_OFFSET if len == 0 => Ok(Self::None),
            DATA_BLOCK_OFFSET => Ok(Self::InCapsule { offset: addr, len }),
            LAST_SEGMENT_OFFSET => Ok(Self::LastSegment { offset: addr, len }),
            _ => Err(Status::SGL_TYPE_INVALID.dnr()),
        }
    }

    /// Checks that `needed` bytes fit what the descriptor describes, in the direction of the transfer. A longer
    /// descriptor is fine (SGLS bit 18 says so to hosts). A last segment's sum is known only after
    /// [`resolve_last_segment`]; check it there with [`check_length`].
    ///
    /// # Errors
    /// Data SGL Length Invalid when it is shorter; SGL Descriptor Type Invalid for in-capsule data of a transfer to the
    /// host.
    #[inline(always)]
    pub fn check_transfer(&self, needed: u32, to_host: bool) -> Result<(), Status> {
        if needed == 0 {
            return Ok(());
        }
        match *self {
            Self::None => Err(Status::DATA_SGL_LENGTH_INVALID.dnr()),
            Self::Keyed(keyed) => check_length(keyed.len, needed),
            Self::InCapsule { .. } if to_host => Err(Status::SGL_TYPE_INVALID.dnr()),
            Self::InCapsule { len, .. } => check_length(len, needed),
            Self::LastSegment { .. } => Ok(()),
        }
    }

    /// The key that the response shall invalidate, for a single keyed descriptor.
    #[inline]
    #[must_use]
    pub fn invalidate(&self) -> Option<u32> {
        match self {
            Self::Keyed(keyed) if keyed.invalidate => Some(keyed.rkey),
            _ => None,
        }
    }
}

/// An SGL that describes `described` bytes must cover the `needed` ones.
///
/// # Errors
/// Data SGL Length Invalid.
#[inline(always)]
pub fn check_length(described: u32, needed: u32) -> Result<(), Status> {
    if described < needed {
        return Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
    }
    Ok(())
}

/// Checks an in-capsule offset and length against `capacity`, the bytes of in-capsule data that *arrived*, and gives
/// the range inside them.
///
/// # Errors
/// SGL Offset Invalid when the offset lies outside, Data SGL Length Invalid when the data end outside.
#[inline(always)]
pub fn check_in_capsule(offset: u64, len: u32, capacity: u32) -> Result<Range<usize>, Status> {
    let offset = u32::try_from(offset).map_err(|_| Status::SGL_OFFSET_INVALID.dnr())?;
    let room = capacity.checked_sub(offset).ok_or(Status::SGL_OFFSET_INVALID.dnr())?;
    if len > room {
        return Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
    }
    let start = usize::try_from(offset).map_err(|_| Status::SGL_OFFSET_INVALID.dnr())?;
    let len = usize::try_from(len).map_err(|_| Status::DATA_SGL_LENGTH_INVALID.dnr())?;
    let end = start.checked_add(len).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
    Ok(start..end)
}

/// Parses the list that a last-segment descriptor names; `bytes` is exactly that list. `max` is the MSDBD that was
/// advertised.
///
/// The RDMA transport invalidates one key per response, so a list that asks for more than one is refused.
///
/// # Errors
/// Invalid SGL Segment Descriptor when the length is no multiple of 16, Invalid Number of SGL Descriptors for none or
/// too many, SGL Descriptor Type Invalid for anything but keyed data blocks, Data SGL Length Invalid when the sum
/// overflows.
pub fn resolve_last_segment(bytes: &[u8], max: usize) -> Result<KeyedList, Status> {
    let (descriptors, rest) = bytes.as_chunks::<SGL_LEN>();
    if !rest.is_empty() {
        return Err(Status::INVALID_SGL_SEGMENT.dnr());
    }
    if descriptors.is_empty() || descriptors.len() > max.min(MAX_KEYED) {
        return Err(Status::INVALID_SGL_COUNT.dnr());
    }
    let mut list = KeyedList::default();
    for (item, bytes) in list.items.iter_mut().zip(descriptors) {
        *item = match Sgl::parse(bytes)? {
            Sgl::Keyed(keyed) => keyed,
            Sgl::None => continue,
            Sgl::InCapsule { .. } | Sgl::LastSegment { .. } => {
                return Err(Status::SGL_TYPE_INVALID.dnr());
            }
        };
        list.total = list.total.checked_add(item.len).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
    }
    list.count = descriptors.len();
    if list.iter().filter(|sgl| sgl.invalidate).count() > 1 {
        return Err(Status::SGL_TYPE_INVALID.dnr());
    }
    Ok(list)
}

/// The low half.
#[inline(always)]
fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

// Descriptor type in the high half, subtype in the low half of byte 15.
const DATA_BLOCK_ADDRESS: u8 = 0x00;
const DATA_BLOCK_OFFSET: u8 = 0x01;
const LAST_SEGMENT_OFFSET: u8 = 0x31;
const KEYED_ADDRESS: u8 = 0x40;
const KEYED_INVALIDATE: u8 = 0x4f;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn keyed(addr: u64, len: u32, rkey: u32, id: u8) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..11].copy_from_slice(&len.to_le_bytes()[..3]);
        bytes[11..15].copy_from_slice(&rkey.to_le_bytes());
        bytes[15] = id;
        bytes
    }

    fn offset(offset: u64, len: u32, id: u8) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[15] = id;
        bytes
    }

    #[test]
    fn keyed_descriptor_matches_golden_bytes() {
        let bytes = [0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x00, 0x00, 0x10, 0x78, 0x56, 0x34, 0x12, 0x4f];
        let expected = KeyedSgl { addr: 0x7060_5040_3020_1000, len: 0x10_0000, rkey: 0x1234_5678, invalidate: true };
        assert_eq!(Sgl::parse(&bytes), Ok(Sgl::Keyed(expected)));
        assert_eq!(Sgl::Keyed(expected).invalidate(), Some(0x1234_5678));
    }

    #[test]
    fn null_descriptors_mean_no_data() {
        assert_eq!(Sgl::parse(&[0; 16]), Ok(Sgl::None));
        assert_eq!(Sgl::parse(&keyed(0, 0, 0, 0x40)), Ok(Sgl::None));
        assert_eq!(Sgl::parse(&keyed(9, 0, 7, 0x4f)), Ok(Sgl::None));
        assert_eq!(Sgl::parse(&offset(0, 0, 0x01)), Ok(Sgl::None));
    }

    #[test]
    fn only_four_descriptor_types_with_data_are_accepted() {
        for id in 0..=u8::MAX {
            let parsed = Sgl::parse(&offset(0, 0x100, id));
            match id {
                0x01 => assert_eq!(parsed, Ok(Sgl::InCapsule { offset: 0, len: 0x100 })),
                0x31 => assert_eq!(parsed, Ok(Sgl::LastSegment { offset: 0, len: 0x100 })),
                0x40 | 0x4f => assert!(matches!(parsed, Ok(Sgl::Keyed(_)))),
                _ => assert_eq!(parsed, Err(Status::SGL_TYPE_INVALID.dnr())),
            }
        }
    }

    #[test]
    fn in_capsule_bounds_are_checked_on_both_sides() {
        let type_of = |r: Result<_, Status>| r.map_err(Status::code);
        assert_eq!(check_in_capsule(0, 4096, 4096), Ok(0..4096));
        assert_eq!(check_in_capsule(0x2000, 0x1000, 0x4000), Ok(0x2000..0x3000));
        assert_eq!(check_in_capsule(4096, 0, 4096), Ok(4096..4096));
        assert_eq!(type_of(check_in_capsule(4096, 1, 4096)), Err(0x00f));
        assert_eq!(type_of(check_in_capsule(4095, 2, 4096)), Err(0x00f));
        assert_eq!(type_of(check_in_capsule(4097, 0, 4096)), Err(0x016));
        assert_eq!(type_of(check_in_capsule(0, u32::MAX, 4096)), Err(0x00f));
        assert_eq!(type_of(check_in_capsule(0xffff_ffff_ffff_fe00, 0x1000, 4096)), Err(0x016));
        assert_eq!(type_of(check_in_capsule(0xffff_ffff_ffff_0500, 0x1_0000, 4096)), Err(0x016));
    }

    #[test]
    fn last_segment_of_sixteen_is_accepted_and_seventeen_refused() {
        let list: Vec<u8> = (0..16).flat_map(|n| keyed(n, 0x1000, 7, 0x40)).collect();
        let parsed = resolve_last_segment(&list, 16).unwrap();
        assert_eq!(parsed.len(), 16);
        assert_eq!(parsed.total_len(), 0x1_0000);
        assert_eq!(parsed.invalidate(), None);
        let list: Vec<u8> = (0..17).flat_map(|n| keyed(n, 0x1000, 7, 0x40)).collect();
        assert_eq!(resolve_last_segment(&list, 99), Err(Status::INVALID_SGL_COUNT.dnr()));
        assert_eq!(resolve_last_segment(&list[..32], 1), Err(Status::INVALID_SGL_COUNT.dnr()));
        assert_eq!(resolve_last_segment(&[], 16), Err(Status::INVALID_SGL_COUNT.dnr()));
    }

    #[test]
    fn last_segment_refuses_truncations_foreign_types_and_two_invalidations() {
        let one = keyed(1, 8, 7, 0x4f);
        for len in 1..16 {
            assert_eq!(resolve_last_segment(&one[..len], 16), Err(Status::INVALID_SGL_SEGMENT.dnr()));
        }
        let list = resolve_last_segment(&one, 16).unwrap();
        assert_eq!(list.invalidate(), Some(7));
        let nested = [one, offset(0, 16, 0x31)].concat();
        assert_eq!(resolve_last_segment(&nested, 16), Err(Status::SGL_TYPE_INVALID.dnr()));
        assert_eq!(resolve_last_segment(&[one, one].concat(), 16), Err(Status::SGL_TYPE_INVALID.dnr()));
    }

    #[test]
    fn shorter_sgl_is_refused_and_longer_accepted() {
        let sgl = Sgl::parse(&keyed(0, 512, 1, 0x40)).unwrap();
        assert_eq!(sgl.check_transfer(512, false), Ok(()));
        assert_eq!(sgl.check_transfer(100, true), Ok(()));
        assert_eq!(sgl.check_transfer(513, true), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
        assert_eq!(Sgl::None.check_transfer(1, true), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
        assert_eq!(Sgl::None.check_transfer(0, true), Ok(()));
        let inline = Sgl::InCapsule { offset: 0, len: 512 };
        assert_eq!(inline.check_transfer(512, false), Ok(()));
        assert_eq!(inline.check_transfer(512, true), Err(Status::SGL_TYPE_INVALID.dnr()));
    }

    proptest! {
        #[test]
        fn a_range_that_is_given_lies_inside(offset: u64, len: u32, capacity: u32) {
            if let Ok(range) = check_in_capsule(offset, len, capacity) {
                prop_assert!(range.start <= range.end);
                prop_assert!(range.end <= usize::try_from(capacity).unwrap());
            }
        }

        #[test]
        fn any_list_is_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), max in 0usize..20) {
            if let Ok(list) = resolve_last_segment(&bytes, max) {
                prop_assert!(list.len() <= max.min(MAX_KEYED));
                let sum: u64 = list.iter().map(|sgl| u64::from(sgl.len)).sum();
                prop_assert_eq!(sum, u64::from(list.total_len()));
            }
        }
    }
}
