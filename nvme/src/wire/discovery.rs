//! The discovery log page (LID 70h): a header and one entry per way to reach a subsystem.
//! (NVMe Base 2.x, Discovery Log Page; NVMe RDMA Transport, Transport Specific Address Subtype.)

use core::net::SocketAddr;

use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ascii, assert_offsets};
use crate::nqn::Nqn;

/// Header of the page.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) genctr: U64,
    pub(crate) numrec: U64,
    pub(crate) recfmt: U16,
    _reserved18: [u8; 1006],
}

const _: () = assert!(size_of::<Header>() == 1024);

/// One entry.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) trtype: u8,
    pub(crate) adrfam: u8,
    pub(crate) subtype: u8,
    pub(crate) treq: u8,
    pub(crate) portid: U16,
    pub(crate) cntlid: U16,
    pub(crate) asqsz: U16,
    pub(crate) eflags: U16,
    _reserved12: [u8; 20],
    pub(crate) trsvcid: [u8; 32],
    _reserved64: [u8; 192],
    pub(crate) subnqn: [u8; 256],
    pub(crate) traddr: [u8; 256],
    pub(crate) tsas: RdmaSubtype,
}

/// Transport specific address subtype of RDMA.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RdmaSubtype {
    /// RDMA QP service type: 1 is reliable connected.
    pub(crate) qptype: u8,
    /// RDMA provider type.
    pub(crate) prtype: u8,
    /// Connection management service: 1 is the RDMA connection manager.
    pub(crate) cms: u8,
    _reserved3: [u8; 5],
    pub(crate) pkey: U16,
    _reserved10: [u8; 246],
}

const _: () = assert!(size_of::<Entry>() == 1024);
assert_offsets!(Entry:
    portid = 4, cntlid = 6, asqsz = 8, eflags = 10, trsvcid = 32, subnqn = 256, traddr = 512, tsas = 768,
);
assert_offsets!(RdmaSubtype: cms = 2, pkey = 8);

/// Subsystem type (SUBTYPE) of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subtype {
    /// An NVM subsystem.
    Nvm,
    /// The discovery subsystem that this page was read from.
    CurrentDiscovery {
        /// The same is read through this entry as through the one that was used.
        same: bool,
    },
    /// Another discovery subsystem.
    Referral,
}

/// What an entry is made of.
pub(crate) struct EntryFields<'a> {
    pub(crate) subtype: Subtype,
    pub(crate) subnqn: &'a Nqn,
    pub(crate) addr: SocketAddr,
    pub(crate) portid: u16,
    /// RDMA provider type (RDMA_PRTYPE).
    pub(crate) prtype: u8,
    /// Entries of the largest admin submission queue.
    pub(crate) asqsz: u16,
}

impl Entry {
    /// TREQ says that secure channels are not specified and that SQ flow control can be disabled. CNTLID FFFFh: the
    /// dynamic controller model. TRADDR has no brackets and no scope, as the scope means nothing on another machine.
    pub(crate) fn new(fields: &EntryFields<'_>) -> Self {
        let mut entry = Self::new_zeroed();
        entry.trtype = TRTYPE_RDMA;
        entry.adrfam = match fields.addr {
            SocketAddr::V4(_) => ADRFAM_IPV4,
            SocketAddr::V6(_) => ADRFAM_IPV6,
        };
        entry.subtype = match fields.subtype {
            Subtype::Nvm => 2,
            Subtype::CurrentDiscovery { .. } => 3,
            Subtype::Referral => 1,
        };
        entry.treq = TREQ_SQ_FLOW_CONTROL_DISABLE;
        entry.portid.set(fields.portid);
        entry.cntlid.set(crate::fabrics::CNTLID_DYNAMIC);
        entry.asqsz.set(fields.asqsz);
        if let Subtype::CurrentDiscovery { same } = fields.subtype {
            entry.eflags.set(EFLAGS_EPCSD | if same { EFLAGS_DUPRETINFO } else { 0 });
        }
        entry.trsvcid = ascii(&fields.addr.port().to_string());
        entry.subnqn = fields.subnqn.to_wire();
        entry.traddr = ascii(&fields.addr.ip().to_string());
        entry.tsas.qptype = 1;
        entry.tsas.prtype = fields.prtype;
        entry.tsas.cms = 1;
        entry
    }
}

/// The page: NUMREC is always what follows.
pub(crate) fn page(genctr: u64, entries: &[Entry]) -> Vec<u8> {
    let mut header = Header::new_zeroed();
    header.genctr.set(genctr);
    header.numrec.set(u64::try_from(entries.len()).unwrap_or(u64::MAX));
    [header.as_bytes(), entries.as_bytes()].concat()
}

const TRTYPE_RDMA: u8 = 1;
const ADRFAM_IPV4: u8 = 1;
const ADRFAM_IPV6: u8 = 2;
const TREQ_SQ_FLOW_CONTROL_DISABLE: u8 = 1 << 2;
/// Duplicate Returned Information: all entries that have it lead to the same.
const EFLAGS_DUPRETINFO: u16 = 1;
/// Explicit Persistent Connection Support for Discovery: KATO makes a connection persistent.
const EFLAGS_EPCSD: u16 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(addr: &str, subtype: Subtype) -> Entry {
        Entry::new(&EntryFields {
            subtype,
            subnqn: &Nqn::lenient("nqn.2026-01.io.x:a").unwrap(),
            addr: addr.parse().unwrap(),
            portid: 3,
            prtype: 1,
            asqsz: 128,
        })
    }

    #[test]
    fn ipv4_entry_matches_golden_bytes() {
        let bytes = page(7, &[entry("10.0.0.1:4420", Subtype::Nvm)]);
        assert_eq!(bytes.len(), 2048);
        assert_eq!(bytes[..18], [7, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let entry = &bytes[1024..];
        assert_eq!(entry[..12], [1, 1, 2, 4, 3, 0, 0xff, 0xff, 128, 0, 0, 0]);
        assert_eq!(entry[32..64], *b"4420                            ");
        assert_eq!(entry[256..275], *b"nqn.2026-01.io.x:a\0");
        assert_eq!(entry[512..521], *b"10.0.0.1 ");
        assert_eq!(entry[767], b' ');
        assert_eq!(entry[768..771], [1, 1, 1]);
    }

    #[test]
    fn ipv6_entry_has_neither_brackets_nor_scope() {
        let entry = entry("[fe80::1%3]:8009", Subtype::CurrentDiscovery { same: false });
        assert_eq!((entry.adrfam, entry.subtype, entry.eflags.get()), (2, 3, 2));
        assert_eq!(entry.traddr[..8], *b"fe80::1 ");
    }

    #[test]
    fn discovery_services_are_told_apart() {
        let flags = |subtype| {
            let entry = entry("10.0.0.1:8009", subtype);
            (entry.subtype, entry.eflags.get())
        };
        assert_eq!(flags(Subtype::CurrentDiscovery { same: true }), (3, 3));
        assert_eq!(flags(Subtype::Referral), (1, 0));
    }
}
