//! Identify Controller data structure (CNS 01h) and what belongs to it: the NVM command set's controller structure (CNS
//! 06h, CSI 00h) and the I/O command set vectors (CNS 1Ch). (NVMe Base 2.x, Identify command; NVM Command Set 1.x,
//! Identify.)

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::assert_offsets;
use crate::{io, zns};

/// Identify Controller.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyController {
    pub(crate) vid: U16,
    pub(crate) ssvid: U16,
    pub(crate) sn: [u8; 20],
    pub(crate) mn: [u8; 40],
    pub(crate) fr: [u8; 8],
    pub(crate) rab: u8,
    pub(crate) ieee: [u8; 3],
    pub(crate) cmic: u8,
    pub(crate) mdts: u8,
    pub(crate) cntlid: U16,
    pub(crate) ver: U32,
    pub(crate) rtd3r: U32,
    pub(crate) rtd3e: U32,
    pub(crate) oaes: U32,
    pub(crate) ctratt: U32,
    pub(crate) rrls: U16,
    _reserved102: [u8; 9],
    pub(crate) cntrltype: u8,
    pub(crate) fguid: [u8; 16],
    pub(crate) crdt: [U16; 3],
    _reserved134: [u8; 119],
    pub(crate) nvmsr: u8,
    pub(crate) vwci: u8,
    pub(crate) mec: u8,
    pub(crate) oacs: U16,
    pub(crate) acl: u8,
    pub(crate) aerl: u8,
    pub(crate) frmw: u8,
    pub(crate) lpa: u8,
    pub(crate) elpe: u8,
    pub(crate) npss: u8,
    pub(crate) avscc: u8,
    pub(crate) apsta: u8,
    pub(crate) wctemp: U16,
    pub(crate) cctemp: U16,
    pub(crate) mtfa: U16,
    pub(crate) hmpre: U32,
    pub(crate) hmmin: U32,
    pub(crate) tnvmcap: [u8; 16],
    pub(crate) unvmcap: [u8; 16],
    pub(crate) rpmbs: U32,
    pub(crate) edstt: U16,
    pub(crate) dsto: u8,
    pub(crate) fwug: u8,
    pub(crate) kas: U16,
    pub(crate) hctma: U16,
    pub(crate) mntmt: U16,
    pub(crate) mxtmt: U16,
    pub(crate) sanicap: U32,
    pub(crate) hmminds: U32,
    pub(crate) hmmaxd: U16,
    pub(crate) nsetidmax: U16,
    pub(crate) endgidmax: U16,
    pub(crate) anatt: u8,
    pub(crate) anacap: u8,
    pub(crate) anagrpmax: U32,
    pub(crate) nanagrpid: U32,
    pub(crate) pels: U32,
    pub(crate) domain_id: U16,
    _reserved358: [u8; 10],
    pub(crate) megcap: [u8; 16],
    _reserved384: [u8; 128],
    pub(crate) sqes: u8,
    pub(crate) cqes: u8,
    pub(crate) maxcmd: U16,
    pub(crate) nn: U32,
    pub(crate) oncs: U16,
    pub(crate) fuses: U16,
    pub(crate) fna: u8,
    pub(crate) vwc: u8,
    pub(crate) awun: U16,
    pub(crate) awupf: U16,
    pub(crate) icsvscc: u8,
    pub(crate) nwpc: u8,
    pub(crate) acwu: U16,
    /// Optional copy formats supported (OCFS).
    pub(crate) ocfs: U16,
    pub(crate) sgls: U32,
    pub(crate) mnan: U32,
    pub(crate) maxdna: [u8; 16],
    pub(crate) maxcna: U32,
    pub(crate) oaqd: U32,
    _reserved568: [u8; 200],
    pub(crate) subnqn: [u8; 256],
    _reserved1024: [u8; 768],
    pub(crate) ioccsz: U32,
    pub(crate) iorcsz: U32,
    pub(crate) icdoff: U16,
    pub(crate) fcatt: u8,
    pub(crate) msdbd: u8,
    pub(crate) ofcs: U16,
    pub(crate) dctype: u8,
    _reserved1807: [u8; 241],
    pub(crate) psd: [[u8; 32]; 32],
    _vendor: [u8; 1024],
}

const _: () = assert!(size_of::<IdentifyController>() == 4096);
assert_offsets!(IdentifyController:
    sn = 4, mn = 24, fr = 64, cmic = 76, mdts = 77, cntlid = 78, ver = 80, oaes = 92, ctratt = 96, cntrltype =
    111, crdt = 128, nvmsr = 253, oacs = 256, acl = 258, aerl = 259, frmw = 260, lpa = 261, elpe = 262, npss =
    263, wctemp = 266, tnvmcap = 280, kas = 320, sanicap = 328, anatt = 342, nanagrpid = 348, domain_id = 356,
    megcap = 368, sqes = 512, cqes = 513, maxcmd = 514, nn = 516, oncs = 520, fuses = 522, fna = 524, vwc = 525,
    awun = 526, nwpc = 531, acwu = 532, ocfs = 534, sgls = 536, mnan = 540, subnqn = 768, ioccsz = 1792, iorcsz = 1796,
    icdoff = 1800, fcatt = 1802, msdbd = 1803, ofcs = 1804, dctype = 1806, psd = 2048,
);

impl IdentifyController {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Identify Controller of the NVM command set.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyControllerNvm {
    pub(crate) vsl: u8,
    pub(crate) wzsl: u8,
    pub(crate) wusl: u8,
    /// Most ranges of a Dataset Management command; 0 is the format's own 256.
    pub(crate) dmrl: u8,
    /// Most blocks of one range; 0 is no limit.
    pub(crate) dmrsl: U32,
    /// Most blocks of all ranges of one command; 0 is no limit.
    pub(crate) dmsl: U64,
    _reserved16: [u8; 4080],
}

const _: () = assert!(size_of::<IdentifyControllerNvm>() == 4096);
assert_offsets!(IdentifyControllerNvm: wzsl = 1, dmrl = 3, dmrsl = 4, dmsl = 8);

impl IdentifyControllerNvm {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Identify I/O Command Set: each entry is a combination of command sets that can be enabled together.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyIoCommandSets {
    pub(crate) combinations: [U64; 512],
}

const _: () = assert!(size_of::<IdentifyIoCommandSets>() == 4096);

impl IdentifyIoCommandSets {
    /// One combination: the NVM and the Zoned Namespace command set.
    pub(crate) fn nvm_and_zoned() -> Self {
        let mut sets = Self::new_zeroed();
        if let Some(first) = sets.combinations.first_mut() {
            first.set(1 << io::CSI | 1 << zns::CSI);
        }
        sets
    }
}
