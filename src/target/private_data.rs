//! The private data of connection management: what a host says of a queue before the first capsule (NVMe RDMA Transport,
//! "Connection Establishment"; all fields little-endian).
//!
//! Request, 32 bytes: RECFMT, QID, HRQSIZE (1-based: the host's receives, so our send limit), HSQSIZE (0-based: the
//! submission queue), CNTLID, zeros. InfiniBand and RoCE pad it, so more than 32 bytes are normal; on iWARP fewer than 32
//! can arrive. Old hosts leave CNTLID zero; it is not checked here, the Connect command decides.

use std::fmt;

use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

/// Bytes of what is said of a queue, in a request and in an accept.
const LEN: usize = 32;

/// The private data of a request.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestData {
    recfmt: U16,
    qid: U16,
    hrqsize: U16,
    hsqsize: U16,
    cntlid: U16,
    _reserved: [u8; 22],
}

const _: () = assert!(size_of::<RequestData>() == LEN);
const _: () = assert!(std::mem::offset_of!(RequestData, qid) == 2);
const _: () = assert!(std::mem::offset_of!(RequestData, hrqsize) == 4);
const _: () = assert!(std::mem::offset_of!(RequestData, hsqsize) == 6);
const _: () = assert!(std::mem::offset_of!(RequestData, cntlid) == 8);

/// The private data of an accept.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AcceptData {
    recfmt: U16,
    crqsize: U16,
    _reserved: [u8; 28],
}

const _: () = assert!(size_of::<AcceptData>() == LEN);
const _: () = assert!(std::mem::offset_of!(AcceptData, crqsize) == 2);

/// The private data of a reject.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RejectData {
    recfmt: U16,
    sts: U16,
}

const _: () = assert!(size_of::<RejectData>() == 4);
const _: () = assert!(std::mem::offset_of!(RejectData, sts) == 2);

/// What a host asks for in its connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueRequest {
    /// Queue Identifier (QID): 0 is the admin queue.
    pub(crate) qid: u16,
    /// Host Receive Queue Size (HRQSIZE): responses that the host can take at a time.
    pub(crate) hrqsize: u16,
    /// Entries of the submission queue: HSQSIZE + 1.
    pub(crate) sq_entries: u32,
    /// Controller ID, or 0 from hosts that do not say.
    pub(crate) cntlid: u16,
}

/// Bounds that a request is held against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    /// Entries of an admin submission queue.
    pub(crate) admin_entries: u32,
    /// Entries of an I/O submission queue.
    pub(crate) io_entries: u32,
    /// The highest QID.
    pub(crate) max_qid: u16,
}

/// Why a connection is rejected: the status in the reject's private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum RejectStatus {
    InvalidLength = 1,
    InvalidRecordFormat = 2,
    InvalidQueueId = 3,
    InvalidHsqsize = 4,
    InvalidHrqsize = 5,
    NoResources = 6,
    InvalidIrd = 7,
}

impl RejectStatus {
    /// The reject's private data.
    pub(crate) fn encode(self) -> [u8; 4] {
        transmute!(RejectData { recfmt: U16::ZERO, sts: U16::new(self as u16) })
    }
}

impl fmt::Display for RejectStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidLength => "its private data are shorter than 32 bytes",
            Self::InvalidRecordFormat => "its private data have a record format other than 0",
            Self::InvalidQueueId => "its queue ID is higher than this target allows",
            Self::InvalidHsqsize => "its submission queue size is out of range",
            Self::InvalidHrqsize => "its receive queue size is smaller than its submission queue, or 0",
            Self::NoResources => "this target has no room for it",
            Self::InvalidIrd => "it lets us have no RDMA READ outstanding",
        })
    }
}

impl QueueRequest {
    /// Parses a request's private data and holds it against the limits.
    pub(crate) fn parse(bytes: &[u8], limits: &QueueLimits) -> Result<Self, RejectStatus> {
        let (data, _) = RequestData::read_from_prefix(bytes).map_err(|_| RejectStatus::InvalidLength)?;
        if data.recfmt != 0 {
            return Err(RejectStatus::InvalidRecordFormat);
        }
        let request = Self {
            qid: data.qid.get(),
            hrqsize: data.hrqsize.get(),
            sq_entries: u32::from(data.hsqsize.get()) + 1,
            cntlid: data.cntlid.get(),
        };
        if request.qid > limits.max_qid {
            return Err(RejectStatus::InvalidQueueId);
        }
        let most = if request.qid == 0 { limits.admin_entries } else { limits.io_entries };
        if request.sq_entries < 2 || request.sq_entries > most {
            return Err(RejectStatus::InvalidHsqsize);
        }
        // Fewer receives than commands would make us hold responses back for a host that asked for trouble.
        if u32::from(request.hrqsize) < request.sq_entries {
            return Err(RejectStatus::InvalidHrqsize);
        }
        Ok(request)
    }

    /// Host Submission Queue Size (HSQSIZE), 0-based.
    pub(crate) fn hsqsize(&self) -> u16 {
        u16::try_from(self.sq_entries.saturating_sub(1)).unwrap_or(u16::MAX)
    }

    /// The accept's private data: Controller Receive Queue Size (CRQSIZE), our receives for this queue.
    pub(crate) fn encode_accept(&self) -> [u8; LEN] {
        let crqsize = u16::try_from(self.sq_entries).unwrap_or(u16::MAX);
        transmute!(AcceptData { recfmt: U16::ZERO, crqsize: U16::new(crqsize), _reserved: [0; 28] })
    }

    /// What a host sends.
    #[cfg(test)]
    pub(crate) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[2..4].copy_from_slice(&self.qid.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.hrqsize.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.hsqsize().to_le_bytes());
        bytes[8..10].copy_from_slice(&self.cntlid.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: QueueLimits = QueueLimits { admin_entries: 128, io_entries: 1024, max_qid: 128 };

    fn parse(qid: u16, hrqsize: u16, hsqsize: u16) -> Result<QueueRequest, RejectStatus> {
        let mut bytes = [0; 56];
        bytes[2..4].copy_from_slice(&qid.to_le_bytes());
        bytes[4..6].copy_from_slice(&hrqsize.to_le_bytes());
        bytes[6..8].copy_from_slice(&hsqsize.to_le_bytes());
        QueueRequest::parse(&bytes, &LIMITS)
    }

    #[test]
    fn linux_admin_request_is_taken() {
        let request = parse(0, 32, 31).unwrap();
        assert_eq!(request, QueueRequest { qid: 0, hrqsize: 32, sq_entries: 32, cntlid: 0 });
        assert_eq!(request.encode_accept()[..6], [0, 0, 32, 0, 0, 0]);
        assert_eq!(QueueRequest::parse(&request.encode(), &LIMITS), Ok(request));
    }

    #[test]
    fn every_length_below_32_is_refused() {
        let bytes = QueueRequest { qid: 1, hrqsize: 128, sq_entries: 128, cntlid: 7 }.encode();
        for len in 0..32 {
            assert_eq!(QueueRequest::parse(&bytes[..len], &LIMITS), Err(RejectStatus::InvalidLength));
        }
        assert!(QueueRequest::parse(&bytes, &LIMITS).is_ok());
    }

    #[test]
    fn record_format_is_checked() {
        let mut bytes = [0; 32];
        bytes[0] = 1;
        assert_eq!(QueueRequest::parse(&bytes, &LIMITS), Err(RejectStatus::InvalidRecordFormat));
    }

    #[test]
    fn queue_id_and_sizes_have_both_sides() {
        assert!(parse(128, 128, 127).is_ok());
        assert_eq!(parse(129, 128, 127), Err(RejectStatus::InvalidQueueId));
        assert_eq!(parse(65535, 128, 127), Err(RejectStatus::InvalidQueueId));
        assert_eq!(parse(0, 32, 0), Err(RejectStatus::InvalidHsqsize));
        assert!(parse(0, 2, 1).is_ok());
        assert!(parse(0, 128, 127).is_ok());
        assert_eq!(parse(0, 129, 128), Err(RejectStatus::InvalidHsqsize));
        assert!(parse(1, 1024, 1023).is_ok());
        assert_eq!(parse(1, 1025, 1024), Err(RejectStatus::InvalidHsqsize));
        assert_eq!(parse(1, 65535, 65535), Err(RejectStatus::InvalidHsqsize));
        assert_eq!(parse(1, 0, 31), Err(RejectStatus::InvalidHrqsize));
        assert_eq!(parse(1, 31, 31), Err(RejectStatus::InvalidHrqsize));
        assert!(parse(1, 32, 31).is_ok());
    }

    #[test]
    fn reject_says_its_status() {
        assert_eq!(RejectStatus::NoResources.encode(), [0, 0, 6, 0]);
    }

    proptest! {
        /// What is taken is what was sent, and within the limits.
        #[test]
        fn any_bytes_are_a_request_within_the_limits_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..=64)) {
            match QueueRequest::parse(&bytes, &LIMITS) {
                Ok(request) => {
                    prop_assert_eq!(&request.encode()[..10], &bytes[..10]);
                    prop_assert!(bytes.len() >= LEN && bytes[..2] == [0, 0] && request.qid <= LIMITS.max_qid);
                    let most = if request.qid == 0 { LIMITS.admin_entries } else { LIMITS.io_entries };
                    prop_assert!((2..=most).contains(&request.sq_entries));
                    prop_assert!(u32::from(request.hrqsize) >= request.sq_entries);
                    prop_assert_eq!(u32::from(request.hsqsize()) + 1, request.sq_entries);
                }
                Err(RejectStatus::InvalidLength) => prop_assert!(bytes.len() < LEN),
                Err(RejectStatus::InvalidRecordFormat) => prop_assert!(bytes[..2] != [0, 0]),
                Err(_) => prop_assert!(bytes.len() >= LEN && bytes[..2] == [0, 0]),
            }
        }

        /// Small numbers, of which many are taken.
        #[test]
        fn any_numbers_are_taken_by_the_rules(qid in 0..140_u16, hrqsize in 0..1100_u16, hsqsize in 0..1100_u16) {
            let most: u16 = if qid == 0 { 128 } else { 1024 };
            let expected = if qid > 128 {
                Err(RejectStatus::InvalidQueueId)
            } else if !(1..most).contains(&hsqsize) {
                Err(RejectStatus::InvalidHsqsize)
            } else if hrqsize <= hsqsize {
                Err(RejectStatus::InvalidHrqsize)
            } else {
                Ok(())
            };
            prop_assert_eq!(parse(qid, hrqsize, hsqsize).map(|_| ()), expected);
        }
    }
}
