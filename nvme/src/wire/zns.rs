//! Structures of the Zoned Namespace command set: Identify Namespace (CNS 05h, CSI 02h), Identify Controller (CNS 06h, CSI
//! 02h), and what a report of zones consists of. (Zoned Namespace Command Set 1.x, Identify; Zone Management Receive.)

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::assert_offsets;

/// Identify Namespace of the Zoned Namespace command set.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyNamespaceZoned {
    /// Zone operation characteristics.
    pub(crate) zoc: U16,
    /// Optional zoned command support.
    pub(crate) ozcs: U16,
    /// Maximum active resources, zero's based; FFFFFFFFh is no limit.
    pub(crate) mar: U32,
    /// Maximum open resources, zero's based; FFFFFFFFh is no limit.
    pub(crate) mor: U32,
    pub(crate) rrl: [U32; 1],
    pub(crate) frl: [U32; 1],
    _more_limits: [U32; 6],
    pub(crate) numzrwa: U32,
    pub(crate) zrwafg: U16,
    pub(crate) zrwasz: U16,
    pub(crate) zrwacap: u8,
    _reserved53: [u8; 2763],
    pub(crate) lbafe: [LbaFormatExtension; 64],
    _vendor: [u8; 256],
}

/// LBA format extension: zone size in blocks, zone descriptor extension size in units of 64 bytes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct LbaFormatExtension {
    pub(crate) zsze: U64,
    pub(crate) zdes: u8,
    _reserved9: [u8; 7],
}

const _: () = assert!(size_of::<IdentifyNamespaceZoned>() == 4096);
const _: () = assert!(size_of::<LbaFormatExtension>() == 16);
assert_offsets!(IdentifyNamespaceZoned:
    zoc = 0, ozcs = 2, mar = 4, mor = 8, rrl = 12, frl = 16, numzrwa = 44, zrwafg = 48, zrwasz = 50, zrwacap = 52,
    lbafe = 2816,
);

impl IdentifyNamespaceZoned {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Identify Controller of the Zoned Namespace command set.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyControllerZoned {
    /// Zone append size limit, as MDTS; 0: MDTS applies.
    pub(crate) zasl: u8,
    _reserved1: [u8; 4095],
}

const _: () = assert!(size_of::<IdentifyControllerZoned>() == 4096);

impl IdentifyControllerZoned {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// What a report of zones begins with.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ZoneReportHeader {
    pub(crate) zones: U64,
    _reserved8: [u8; 56],
}

/// One zone of a report.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ZoneDescriptor {
    /// Zone type, in the low four bits.
    pub(crate) zt: u8,
    /// Zone state, in the high four bits.
    pub(crate) zs: u8,
    /// Zone attributes.
    pub(crate) za: u8,
    pub(crate) zai: u8,
    _reserved4: U32,
    /// Capacity in blocks.
    pub(crate) zcap: U64,
    /// First block.
    pub(crate) zslba: U64,
    /// Write pointer.
    pub(crate) wp: U64,
    _reserved32: [u8; 32],
}

const _: () = assert!(size_of::<ZoneReportHeader>() == 64);
const _: () = assert!(size_of::<ZoneDescriptor>() == 64);
assert_offsets!(ZoneDescriptor: zt = 0, zs = 1, za = 2, zai = 3, zcap = 8, zslba = 16, wp = 24);

impl ZoneReportHeader {
    pub(crate) fn of(zones: u64) -> Self {
        let mut header = Self::new_zeroed();
        header.zones.set(zones);
        header
    }
}

impl ZoneDescriptor {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}
