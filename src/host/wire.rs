//! The host's side of the wire: commands written, identify data and log pages read.
//!
//! Written from the specifications and not with the target's code, so that the two check each other. Readers take any bytes:
//! what is missing reads as absent.

use std::net::SocketAddr;

/// Bytes of a submission queue entry.
pub const SQE_LEN: usize = 64;

/// A submission queue entry being written. All fields are zero at first, but for PSDT, which says "SGL".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sqe(pub [u8; SQE_LEN]);

impl Sqe {
    /// With an opcode, and without data: a keyed descriptor of no bytes says so. All zeroes in its place would be an address
    /// of the host's own, which the Linux target refuses.
    pub fn new(opcode: u8) -> Self {
        let mut bytes = [0; SQE_LEN];
        bytes[0] = opcode;
        bytes[1] = 0x40;
        bytes[39] = 0x40;
        Self(bytes)
    }

    /// A fabrics command.
    pub fn fabrics(fctype: u8) -> Self {
        let mut sqe = Self::new(0x7f);
        sqe.0[4] = fctype;
        sqe
    }

    /// Command identifier (CID).
    #[must_use]
    pub fn cid(mut self, cid: u16) -> Self {
        self.0[2..4].copy_from_slice(&cid.to_le_bytes());
        self
    }

    /// Namespace identifier (NSID).
    #[must_use]
    pub fn nsid(mut self, nsid: u32) -> Self {
        self.0[4..8].copy_from_slice(&nsid.to_le_bytes());
        self
    }

    /// Command Dword `n`, 10 to 15.
    ///
    /// # Panics
    /// For any other `n`.
    #[must_use]
    pub fn cdw(mut self, n: usize, value: u32) -> Self {
        assert!((10..16).contains(&n), "Dword {n}");
        self.0[n * 4..n * 4 + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// The data descriptor, 16 bytes.
    #[must_use]
    pub fn sgl(mut self, sgl: [u8; 16]) -> Self {
        self.0[24..40].copy_from_slice(&sgl);
        self
    }
}

/// A keyed data block: type 4, with subtype Fh when the key is to be invalidated.
pub fn keyed(addr: u64, len: u32, rkey: u32, invalidate: bool) -> [u8; 16] {
    let mut sgl = [0; 16];
    sgl[..8].copy_from_slice(&addr.to_le_bytes());
    sgl[8..11].copy_from_slice(&len.to_le_bytes()[..3]);
    sgl[11..15].copy_from_slice(&rkey.to_le_bytes());
    sgl[15] = if invalidate { 0x4f } else { 0x40 };
    sgl
}

/// A descriptor that names bytes by an offset: 01h in-capsule data, 31h last segment.
pub fn by_offset(offset: u64, len: u32, kind: u8) -> [u8; 16] {
    let mut sgl = [0; 16];
    sgl[..8].copy_from_slice(&offset.to_le_bytes());
    sgl[8..12].copy_from_slice(&len.to_le_bytes());
    sgl[15] = kind;
    sgl
}

/// Private data of a connection request: RECFMT, QID, HRQSIZE (1-based), HSQSIZE (0-based), CNTLID, zeros.
pub fn private_data(qid: u16, hrqsize: u16, hsqsize: u16, cntlid: u16) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (at, value) in [qid, hrqsize, hsqsize, cntlid].into_iter().enumerate() {
        bytes[2 + 2 * at..4 + 2 * at].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The Connect command; its data go with it. `sqsize` is zero's based.
pub fn connect(qid: u16, sqsize: u16, kato_ms: u32) -> Sqe {
    Sqe::fabrics(0x01)
        .cdw(10, u32::from(qid) << 16)
        .cdw(11, u32::from(sqsize))
        .cdw(12, if qid == 0 { kato_ms } else { 0 })
}

/// The data of a Connect command.
pub fn connect_data(hostid: &[u8; 16], cntlid: u16, subnqn: &str, hostnqn: &str) -> [u8; 1024] {
    let mut bytes = [0; 1024];
    bytes[..16].copy_from_slice(hostid);
    bytes[16..18].copy_from_slice(&cntlid.to_le_bytes());
    for (at, nqn) in [(256, subnqn), (512, hostnqn)] {
        let len = nqn.len().min(256);
        bytes[at..at + len].copy_from_slice(&nqn.as_bytes()[..len]);
    }
    bytes
}

/// Property Get; `wide` for 8-byte properties.
pub fn property_get(offset: u32, wide: bool) -> Sqe {
    Sqe::fabrics(0x04).cdw(10, u32::from(wide)).cdw(11, offset)
}

/// Property Set of a 4-byte property.
pub fn property_set(offset: u32, value: u32) -> Sqe {
    Sqe::fabrics(0x00).cdw(11, offset).cdw(12, value)
}

/// Authentication Send of a message of `len` bytes.
pub fn authentication_send(len: u32) -> Sqe {
    Sqe::fabrics(0x05).cdw(10, 0xe901_0100).cdw(11, len)
}

/// Authentication Receive of a message of up to `len` bytes.
pub fn authentication_receive(len: u32) -> Sqe {
    Sqe::fabrics(0x06).cdw(10, 0xe901_0100).cdw(11, len)
}

/// Identify.
pub fn identify(cns: u8, nsid: u32, cntid: u16) -> Sqe {
    Sqe::new(0x06).nsid(nsid).cdw(10, u32::from(cns) | u32::from(cntid) << 16)
}

/// Get Log Page of `len` bytes (a multiple of 4, not 0) from `offset` on.
pub fn get_log_page(lid: u8, nsid: u32, offset: u64, len: u32, retain: bool) -> Sqe {
    let numd = (len / 4).wrapping_sub(1);
    Sqe::new(0x02)
        .nsid(nsid)
        .cdw(10, u32::from(lid) | u32::from(retain) << 15 | (numd & 0xffff) << 16)
        .cdw(11, numd >> 16)
        .cdw(12, offset as u32)
        .cdw(13, (offset >> 32) as u32)
}

/// Set Features, Number of Queues: `count` pairs.
pub fn set_queue_count(count: u16) -> Sqe {
    let zeros_based = u32::from(count.max(1) - 1);
    Sqe::new(0x09).cdw(10, 0x07).cdw(11, zeros_based << 16 | zeros_based)
}

/// An I/O command on a range of blocks; `blocks` is a real count.
pub fn block_command(opcode: u8, nsid: u32, slba: u64, blocks: u32) -> Sqe {
    Sqe::new(opcode)
        .nsid(nsid)
        .cdw(10, slba as u32)
        .cdw(11, (slba >> 32) as u32)
        .cdw(12, blocks.wrapping_sub(1) & 0xffff)
}

/// One range of Dataset Management.
pub fn dsm_range(slba: u64, blocks: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
    bytes[8..].copy_from_slice(&slba.to_le_bytes());
    bytes
}

/// Reservation Register: action 0 registers, 1 unregisters, 2 replaces; `persist` 0 leaves persistence alone, 2 turns it off, 3 on.
pub fn reservation_register(nsid: u32, action: u32, ignore_key: bool, persist: u32) -> Sqe {
    Sqe::new(0x0d).nsid(nsid).cdw(10, action | u32::from(ignore_key) << 3 | persist << 30)
}

/// Reservation Acquire: action 0 acquires, 1 preempts, 2 preempts and aborts.
pub fn reservation_acquire(nsid: u32, action: u32, rtype: u8) -> Sqe {
    Sqe::new(0x11).nsid(nsid).cdw(10, action | u32::from(rtype) << 8)
}

/// Reservation Release: action 0 releases, 1 clears.
pub fn reservation_release(nsid: u32, action: u32, rtype: u8) -> Sqe {
    Sqe::new(0x15).nsid(nsid).cdw(10, action | u32::from(rtype) << 8)
}

/// Reservation Report of `len` bytes, with host identifiers of 128 bits.
pub fn reservation_report(nsid: u32, len: u32) -> Sqe {
    Sqe::new(0x0e).nsid(nsid).cdw(10, (len / 4).wrapping_sub(1)).cdw(11, 1)
}

/// The keys that Register (current, new) and Acquire (current, to preempt) carry.
pub fn reservation_keys(current: u64, other: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&current.to_le_bytes());
    bytes[8..].copy_from_slice(&other.to_le_bytes());
    bytes
}

/// What a Reservation Report says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationReport {
    /// Generation.
    pub generation: u32,
    /// Type of the reservation; 0 = none.
    pub rtype: u8,
    /// Persistence through power loss is on.
    pub persist: bool,
    /// Controller identifier, whether it holds, key, host.
    pub registrants: Vec<(u16, bool, u64, [u8; 16])>,
}

impl ReservationReport {
    /// Reads the extended data structure, as far as the bytes go.
    pub fn read(bytes: &[u8]) -> Self {
        let count = usize::from(u16_at(bytes, 5));
        let entries = bytes.get(64..).unwrap_or_default().chunks_exact(64).take(count);
        let entry = |entry: &[u8]| {
            let host = entry[16..32].first_chunk().copied().unwrap_or_default();
            (u16_at(entry, 0), entry[2] & 1 != 0, u64_at(entry, 8), host)
        };
        Self {
            generation: u32_at(bytes, 0),
            rtype: bytes.get(4).copied().unwrap_or(0),
            persist: bytes.get(9).is_some_and(|ptpls| *ptpls != 0),
            registrants: entries.map(entry).collect(),
        }
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u16::from_le_bytes(*field))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u32::from_le_bytes(*field))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u64::from_le_bytes(*field))
}

/// Text of a fixed field: up to the first NUL, trailing spaces off, what is not printable replaced.
pub(crate) fn text_at(bytes: &[u8], at: usize, len: usize) -> String {
    let field = bytes.get(at..at.saturating_add(len)).unwrap_or_default();
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let printable = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '?' };
    field[..end].iter().map(printable).collect::<String>().trim_end().to_string()
}

/// What a host needs of Identify Controller (CNS 01h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentifyController {
    /// Serial number (SN).
    pub serial: String,
    /// Model number (MN).
    pub model: String,
    /// Firmware revision (FR).
    pub firmware: String,
    /// Maximum data transfer size in bytes; `None` = no limit.
    pub mdts: Option<u32>,
    /// Controller ID (CNTLID).
    pub cntlid: u16,
    /// Version (VER).
    pub version: u32,
    /// Controller type (CNTRLTYPE): 1 I/O, 2 discovery.
    pub kind: u8,
    /// Asynchronous event limit as a real count (AERL + 1).
    pub aer_limit: u16,
    /// Keep alive granularity in units of 100 ms (KAS).
    pub kas: u16,
    /// Most commands under way (MAXCMD).
    pub maxcmd: u16,
    /// Number of namespaces (NN).
    pub nn: u32,
    /// Optional commands (ONCS).
    pub oncs: u16,
    /// A volatile write cache is there (VWC bit 0).
    pub write_cache: bool,
    /// SGL support (SGLS).
    pub sgls: u32,
    /// Subsystem NQN (SUBNQN).
    pub subnqn: String,
    /// Capsule of a command in bytes (IOCCSZ x 16).
    pub capsule_in: u32,
    /// Capsule of a response in bytes (IORCSZ x 16).
    pub capsule_out: u32,
    /// In-capsule data offset (ICDOFF).
    pub icdoff: u16,
    /// Most data block descriptors (MSDBD); 0 = no limit given.
    pub msdbd: u8,
}

impl IdentifyController {
    /// Reads the 4096 bytes. `page` is the controller's smallest page (CAP.MPSMIN), the unit of MDTS.
    pub fn read(bytes: &[u8], page: u32) -> Self {
        let mdts = bytes.get(77).copied().unwrap_or(0);
        Self {
            serial: text_at(bytes, 4, 20),
            model: text_at(bytes, 24, 40),
            firmware: text_at(bytes, 64, 8),
            mdts: (mdts != 0).then(|| page.checked_shl(u32::from(mdts)).filter(|size| *size != 0).unwrap_or(1 << 31)),
            cntlid: u16_at(bytes, 78),
            version: u32_at(bytes, 80),
            kind: bytes.get(111).copied().unwrap_or(0),
            aer_limit: u16::from(bytes.get(259).copied().unwrap_or(0)) + 1,
            kas: u16_at(bytes, 320),
            maxcmd: u16_at(bytes, 514),
            nn: u32_at(bytes, 516),
            oncs: u16_at(bytes, 520),
            write_cache: bytes.get(525).is_some_and(|vwc| vwc & 1 != 0),
            sgls: u32_at(bytes, 536),
            subnqn: text_at(bytes, 768, 256),
            capsule_in: u32_at(bytes, 1792).saturating_mul(16),
            capsule_out: u32_at(bytes, 1796).saturating_mul(16),
            icdoff: u16_at(bytes, 1800),
            msdbd: bytes.get(1803).copied().unwrap_or(0),
        }
    }

    /// Bytes of data that a capsule may carry: what IOCCSZ leaves, if SGLS allows offsets (bit 20).
    pub fn in_capsule(&self) -> u32 {
        if self.sgls & 1 << 20 != 0 { self.capsule_in.saturating_sub(SQE_LEN as u32) } else { 0 }
    }
}

/// What a host needs of Identify Namespace (CNS 00h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdentifyNamespace {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size in blocks (NSZE).
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI64.
    pub eui64: [u8; 8],
    /// Attributes (NSATTR): bit 0 = write protected.
    pub nsattr: u8,
}

impl IdentifyNamespace {
    /// Reads the 4096 bytes; `None` when the namespace is not active or its format makes no sense.
    pub fn read(nsid: u32, bytes: &[u8]) -> Option<Self> {
        let flbas = bytes.get(26).copied()?;
        let index = usize::from(flbas & 0xf | (flbas >> 1) & 0x30);
        let lbads = bytes.get(128 + index * 4 + 2).copied()?;
        let blocks = u64_at(bytes, 0);
        if blocks == 0 || !(9..=16).contains(&lbads) {
            return None;
        }
        Some(Self {
            nsid,
            blocks,
            block_size: 1 << lbads,
            nguid: *bytes.get(104..)?.first_chunk()?,
            eui64: *bytes.get(120..)?.first_chunk()?,
            nsattr: bytes.get(99).copied()?,
        })
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }
}

/// One entry of the discovery log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// Transport type (TRTYPE): 1 is RDMA.
    pub trtype: u8,
    /// Address family (ADRFAM): 1 IPv4, 2 IPv6.
    pub adrfam: u8,
    /// Subsystem type (SUBTYPE): 1 referral, 2 NVM subsystem, 3 this discovery subsystem.
    pub subtype: u8,
    /// Transport requirements (TREQ).
    pub treq: u8,
    /// Port identifier (PORTID).
    pub portid: u16,
    /// Controller ID (CNTLID): FFFFh dynamic.
    pub cntlid: u16,
    /// Admin queue size (ASQSZ).
    pub asqsz: u16,
    /// Service (TRSVCID).
    pub trsvcid: String,
    /// Subsystem NQN (SUBNQN).
    pub subnqn: String,
    /// Address (TRADDR).
    pub traddr: String,
}

/// Bytes of the discovery log's header, and of each of its entries.
pub const DISCOVERY_ENTRY: usize = 1024;

impl DiscoveryEntry {
    /// Reads one entry of 1024 bytes.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..DISCOVERY_ENTRY)?;
        Some(Self {
            trtype: bytes[0],
            adrfam: bytes[1],
            subtype: bytes[2],
            treq: bytes[3],
            portid: u16_at(bytes, 4),
            cntlid: u16_at(bytes, 6),
            asqsz: u16_at(bytes, 8),
            trsvcid: text_at(bytes, 32, 32),
            subnqn: text_at(bytes, 256, 256),
            traddr: text_at(bytes, 512, 256),
        })
    }

    /// Where to connect, if it is an IP address.
    pub fn address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.traddr.parse().ok()?, self.trsvcid.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn read_command_matches_golden_bytes() {
        // As the Linux host sends it: read of 8 blocks at LBA 16, keyed and to be invalidated.
        let sqe = block_command(0x02, 1, 16, 8).cid(0x2a).sgl(keyed(0x10_0000_0000, 4096, 0x0403_0201, true)).0;
        assert_eq!(sqe[..8], [0x02, 0x40, 0x2a, 0, 1, 0, 0, 0]);
        assert_eq!(sqe[24..40], [0, 0, 0, 0, 0x10, 0, 0, 0, 0x00, 0x10, 0x00, 0x01, 0x02, 0x03, 0x04, 0x4f]);
        assert_eq!(sqe[40..52], [0x10, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
    }

    #[test]
    fn connect_and_private_data_match_golden_bytes() {
        let sqe = connect(0, 31, 5000).0;
        assert_eq!((sqe[0], sqe[4]), (0x7f, 1));
        assert_eq!(sqe[40..52], [0, 0, 0, 0, 31, 0, 0, 0, 0x88, 0x13, 0, 0]);
        assert_eq!(private_data(3, 128, 127, 7)[..12], [0, 0, 3, 0, 128, 0, 127, 0, 7, 0, 0, 0]);
        let data = connect_data(&[9; 16], 0xffff, "sub", "host");
        assert_eq!(
            (&data[..18], &data[256..260], &data[512..517]),
            (&[[9; 16].as_slice(), &[0xff, 0xff]].concat()[..], &b"sub\0"[..], &b"host\0"[..])
        );
    }

    #[test]
    fn log_page_length_is_in_dwords_zeros_based() {
        let sqe = get_log_page(0x70, 0, 0x1_0000_0010, 1024, true).0;
        assert_eq!(sqe[40..56], [0x70, 0x80, 0xff, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn short_identify_data_read_as_absent() {
        assert_eq!(IdentifyController::read(&[], 4096).in_capsule(), 0);
        assert_eq!(IdentifyNamespace::read(1, &[0; 100]), None);
        assert_eq!(IdentifyNamespace::read(1, &[0; 4096]), None);
        assert_eq!(DiscoveryEntry::read(&[0; 1023]), None);
        let mut wild = [0xff; 4096];
        assert_eq!(IdentifyController::read(&wild, 4096).mdts, Some(1 << 31));
        wild[26] = 0;
        wild[130] = 64;
        assert_eq!(IdentifyNamespace::read(1, &wild), None);
    }

    /// Any bytes of any length up to what a target may send, and all the lengths around a structure's end.
    fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
        let sizes = prop_oneof![0..=130_usize, 1020..=1026_usize, 4090..=4098_usize];
        (sizes, any::<u8>(), proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..200)).prop_map(
            |(len, fill, changes)| {
                let mut bytes = vec![fill; len];
                for (at, value) in changes.into_iter().filter(|_| len > 0) {
                    bytes[at.index(len)] = value;
                }
                bytes
            },
        )
    }

    proptest! {
        #[test]
        fn any_bytes_of_an_identify_structure_are_read(bytes in any_bytes(), shift in 0..16_u32) {
            let controller = IdentifyController::read(&bytes, 4096 << shift);
            prop_assert!(controller.mdts != Some(0));
            prop_assert!(controller.in_capsule() <= controller.capsule_in);
            prop_assert!((1..=256).contains(&controller.aer_limit));
            for text in [&controller.serial, &controller.model, &controller.firmware, &controller.subnqn] {
                prop_assert!(text.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{:?}", text);
            }
            if let Some(namespace) = IdentifyNamespace::read(7, &bytes) {
                prop_assert!(namespace.nsid == 7 && namespace.blocks > 0 && namespace.bytes() >= 512);
                prop_assert!(namespace.block_size.is_power_of_two() && (512..=65536).contains(&namespace.block_size));
            }
        }

        #[test]
        fn any_bytes_of_a_log_or_report_are_read(bytes in any_bytes()) {
            let entry = DiscoveryEntry::read(&bytes);
            prop_assert_eq!(entry.is_some(), bytes.len() >= DISCOVERY_ENTRY);
            if let Some(entry) = entry {
                prop_assert!(entry.traddr.len() <= 256 && entry.subnqn.len() <= 256 && entry.trsvcid.len() <= 32);
                let _ = entry.address();
            }
            let report = ReservationReport::read(&bytes);
            prop_assert!(report.registrants.len() <= bytes.len().saturating_sub(64) / 64);
            prop_assert!(report.registrants.len() <= usize::from(u16_at(&bytes, 5)));
        }

        #[test]
        fn any_field_of_any_bytes_is_read(bytes in any_bytes(), at in any::<usize>(), len in any::<usize>()) {
            for at in [at, at % 5000] {
                let whole = |size: usize| at.checked_add(size).is_some_and(|end| end <= bytes.len());
                prop_assert!(whole(2) || u16_at(&bytes, at) == 0);
                prop_assert!(whole(4) || u32_at(&bytes, at) == 0);
                prop_assert!(whole(8) || u64_at(&bytes, at) == 0);
                prop_assert!(whole(len) || text_at(&bytes, at, len).is_empty());
            }
        }
    }
}
