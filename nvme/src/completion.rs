//! The completion queue entry (CQE): what goes back in a response capsule.

use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

use crate::status::Status;

/// Bytes of a completion queue entry, and so of a response capsule (IORCSZ is 1, in units of 16 bytes).
pub const CQE_LEN: usize = 16;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Cqe {
    result: U64,
    sqhd: U16,
    sqid: U16,
    cid: U16,
    /// Phase tag in bit 0, the status above it.
    status: U16,
}

const _: () = assert!(size_of::<Cqe>() == CQE_LEN);
const _: () = assert!(core::mem::offset_of!(Cqe, sqhd) == 8);
const _: () = assert!(core::mem::offset_of!(Cqe, sqid) == 10);
const _: () = assert!(core::mem::offset_of!(Cqe, cid) == 12);
const _: () = assert!(core::mem::offset_of!(Cqe, status) == 14);

/// One answer: Dword 0 and 1 (`result`), the command identifier and the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Dword 0 in the low half, Dword 1 in the high half. Most commands use Dword 0 only; Property Get uses both.
    pub result: u64,
    /// Command identifier (CID) of the command that is answered.
    pub cid: u16,
    /// What became of it.
    pub status: Status,
}

impl Completion {
    /// A success with nothing in Dword 0 and 1.
    #[must_use]
    pub const fn success(cid: u16) -> Self {
        Self { result: 0, cid, status: Status::SUCCESS }
    }

    /// A success with `result` in Dword 0 and 1.
    #[must_use]
    pub const fn with_result(cid: u16, result: u64) -> Self {
        Self { result, cid, status: Status::SUCCESS }
    }

    /// A failure (or any status) with nothing in Dword 0 and 1.
    #[must_use]
    pub const fn failed(cid: u16, status: Status) -> Self {
        Self { result: 0, cid, status }
    }

    /// The 16 bytes of the wire. `sqhd` is the submission queue head pointer, FFFFh on a queue whose flow control was
    /// disabled by Connect; `sqid` the queue's identifier (fabrics reserves the field; nvmet fills it and so do we).
    /// The phase tag is reserved on fabrics and written as zero.
    #[inline]
    #[must_use]
    pub fn encode(&self, sqhd: u16, sqid: u16) -> [u8; CQE_LEN] {
        transmute!(Cqe {
            result: U64::new(self.result),
            sqhd: U16::new(sqhd),
            sqid: U16::new(sqid),
            cid: U16::new(self.cid),
            status: U16::new(self.status.to_wire() << 1),
        })
    }

    /// The other direction, for hosts: the completion, SQHD and SQID.
    #[must_use]
    pub fn decode(cqe: &[u8; CQE_LEN]) -> (Self, u16, u16) {
        let Cqe { result, sqhd, sqid, cid, status } = transmute!(*cqe);
        let status = Status::from_wire(status.get() >> 1);
        (Self { result: result.get(), cid: cid.get(), status }, sqhd.get(), sqid.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_matches_golden_bytes() {
        let completion = Completion { result: 0x0011_2233_4455_6677, cid: 0xabcd, status: Status::INVALID_FIELD.dnr() };
        let golden = [0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00, 0xff, 0xff, 0x03, 0x00, 0xcd, 0xab, 0x04, 0x80];
        assert_eq!(completion.encode(0xffff, 3), golden);
        assert_eq!(Completion::decode(&golden), (completion, 0xffff, 3));
    }
}
