//! Identify Namespace data structures: NVM (CNS 00h), command set independent (CNS 08h), and the identification
//! descriptor list (CNS 03h). (NVM Command Set 1.x, Identify Namespace; NVMe Base 2.x, Identify command.)

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::assert_offsets;

/// Bytes of every Identify data structure.
pub(crate) const IDENTIFY_LEN: usize = 4096;

/// Identify Namespace of the NVM command set.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyNamespace {
    pub(crate) nsze: U64,
    pub(crate) ncap: U64,
    pub(crate) nuse: U64,
    pub(crate) nsfeat: u8,
    pub(crate) nlbaf: u8,
    pub(crate) flbas: u8,
    pub(crate) mc: u8,
    pub(crate) dpc: u8,
    pub(crate) dps: u8,
    pub(crate) nmic: u8,
    pub(crate) rescap: u8,
    pub(crate) fpi: u8,
    pub(crate) dlfeat: u8,
    pub(crate) nawun: U16,
    pub(crate) nawupf: U16,
    pub(crate) nacwu: U16,
    pub(crate) nabsn: U16,
    pub(crate) nabo: U16,
    pub(crate) nabspf: U16,
    pub(crate) noiob: U16,
    pub(crate) nvmcap: [u8; 16],
    pub(crate) npwg: U16,
    pub(crate) npwa: U16,
    pub(crate) npdg: U16,
    pub(crate) npda: U16,
    pub(crate) nows: U16,
    pub(crate) mssrl: U16,
    pub(crate) mcl: U32,
    pub(crate) msrc: u8,
    _reserved81: [u8; 11],
    pub(crate) anagrpid: U32,
    _reserved96: [u8; 3],
    pub(crate) nsattr: u8,
    pub(crate) nvmsetid: U16,
    pub(crate) endgid: U16,
    pub(crate) nguid: [u8; 16],
    pub(crate) eui64: [u8; 8],
    pub(crate) lbaf: [LbaFormat; 64],
    _vendor: [u8; 3712],
}

/// LBA format: metadata size, data size as a power of two, relative performance.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct LbaFormat {
    pub(crate) ms: U16,
    pub(crate) lbads: u8,
    pub(crate) rp: u8,
}

const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_LEN);
assert_offsets!(IdentifyNamespace:
    nsfeat = 24, flbas = 26, nmic = 30, rescap = 31, dlfeat = 33, nawun = 34, noiob = 46, nvmcap = 48, npwg =
    64, npwa = 66, npdg = 68, npda = 70, nows = 72, mssrl = 74, mcl = 76, msrc = 80, anagrpid = 92, nsattr = 99, endgid = 102, nguid =
    104, eui64 = 120, lbaf = 128,
);

impl IdentifyNamespace {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Identify Namespace, I/O command set independent.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct IdentifyNamespaceIndependent {
    pub(crate) nsfeat: u8,
    pub(crate) nmic: u8,
    pub(crate) rescap: u8,
    pub(crate) fpi: u8,
    pub(crate) anagrpid: U32,
    pub(crate) nsattr: u8,
    _reserved9: u8,
    pub(crate) nvmsetid: U16,
    pub(crate) endgid: U16,
    pub(crate) nstat: u8,
    _reserved15: [u8; 4081],
}

const _: () = assert!(size_of::<IdentifyNamespaceIndependent>() == IDENTIFY_LEN);
assert_offsets!(IdentifyNamespaceIndependent:
    anagrpid = 4, nsattr = 8, nvmsetid = 10, endgid = 12, nstat = 14,
);

impl IdentifyNamespaceIndependent {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// One entry of the namespace identification descriptor list.
pub(crate) enum Descriptor<'a> {
    Eui64(&'a [u8; 8]),
    Nguid(&'a [u8; 16]),
    Uuid(&'a [u8; 16]),
    /// Command set identifier (CSI).
    CommandSet(u8),
}

/// The namespace identification descriptor list: each entry a type, a length, two reserved bytes, the identifier;
/// zeroes end it.
pub(crate) fn descriptor_list<'a>(descriptors: impl IntoIterator<Item = Descriptor<'a>>) -> Vec<u8> {
    let mut list = Vec::with_capacity(IDENTIFY_LEN);
    for descriptor in descriptors {
        match descriptor {
            Descriptor::Eui64(id) => push(&mut list, [1, 8], id),
            Descriptor::Nguid(id) => push(&mut list, [2, 16], id),
            Descriptor::Uuid(id) => push(&mut list, [3, 16], id),
            Descriptor::CommandSet(csi) => push(&mut list, [4, 1], &[csi]),
        }
    }
    list.resize(IDENTIFY_LEN, 0);
    list
}

fn push(list: &mut Vec<u8>, [nidt, nidl]: [u8; 2], id: &[u8]) {
    list.extend_from_slice(&[nidt, nidl, 0, 0]);
    list.extend_from_slice(id);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_list_matches_golden_bytes() {
        let list = descriptor_list([
            Descriptor::Eui64(&[1, 2, 3, 4, 5, 6, 7, 8]),
            Descriptor::Uuid(&[9; 16]),
            Descriptor::CommandSet(0),
        ]);
        let golden = [
            1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 16, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 4, 1, 0,
            0, 0,
        ];
        assert_eq!(list[..golden.len()], golden);
        assert_eq!(list.len(), 4096);
        assert!(list[golden.len()..].iter().all(|&byte| byte == 0));
    }
}
