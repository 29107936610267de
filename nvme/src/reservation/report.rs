//! Reservation Report: the extended reservation status data structure. (NVM Command Set 1.x, Reservation Report.)

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::HostId;
use crate::wire::assert_offsets;

#[derive(FromZeros, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    generation: U32,
    rtype: u8,
    /// Entries that follow (REGSTRNT).
    count: U16,
    _reserved7: [u8; 2],
    ptpls: u8,
    _reserved10: [u8; 54],
}

const _: () = assert!(size_of::<Header>() == 64);
assert_offsets!(Header: rtype = 4, count = 5, ptpls = 9);

#[derive(FromZeros, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Registrant {
    cntlid: U16,
    rcsts: u8,
    _reserved3: [u8; 5],
    rkey: U64,
    hostid: [u8; 16],
    _reserved32: [u8; 32],
}

const _: () = assert!(size_of::<Registrant>() == 64);
assert_offsets!(Registrant: rcsts = 2, rkey = 8, hostid = 16);

/// One registered controller, or a registered host without any.
pub(super) struct Entry {
    pub(super) cntlid: u16,
    pub(super) holds: bool,
    pub(super) key: u64,
    pub(super) host: HostId,
}

pub(super) fn report(generation: u32, rtype: u8, persist: bool, entries: impl Iterator<Item = Entry>) -> Vec<u8> {
    let mut header = Header::new_zeroed();
    let mut body = Vec::new();
    let mut count = 0u16;
    for entry in entries.take(usize::from(u16::MAX)) {
        let mut registrant = Registrant::new_zeroed();
        registrant.cntlid.set(entry.cntlid);
        registrant.rcsts = entry.holds.into();
        registrant.rkey.set(entry.key);
        registrant.hostid = entry.host;
        body.extend_from_slice(registrant.as_bytes());
        count = count.saturating_add(1);
    }
    header.generation.set(generation);
    header.rtype = rtype;
    header.count.set(count);
    header.ptpls = persist.into();
    [header.as_bytes(), &body].concat()
}
