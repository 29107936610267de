//! The completion queue entry (CQE): what goes back in a response capsule.

use crate::status::Status;

/// Bytes of a completion queue entry, and so of a response capsule (IORCSZ is 1, in units of 16 bytes).
pub const CQE_LEN: usize = 16;

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
        let tail = u64::from(sqhd)
            | u64::from(sqid) << 16
            | u64::from(self.cid) << 32
            | u64::from(self.status.to_wire() << 1) << 48;
        (u128::from(self.result) | u128::from(tail) << 64).to_le_bytes()
    }

    /// The other direction, for hosts: the completion, SQHD and SQID.
    #[must_use]
    pub fn decode(cqe: &[u8; CQE_LEN]) -> (Self, u16, u16) {
        let [r0, r1, r2, r3, r4, r5, r6, r7, h0, h1, q0, q1, c0, c1, s0, s1] = *cqe;
        let completion = Self {
            result: u64::from_le_bytes([r0, r1, r2, r3, r4, r5, r6, r7]),
            cid: u16::from_le_bytes([c0, c1]),
            status: Status::from_wire(u16::from_le_bytes([s0, s1]) >> 1),
        };
        let sqhd = u16::from_le_bytes([h0, h1]);
        let sqid = u16::from_le_bytes([q0, q1]);
        (completion, sqhd, sqid)
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
