//! The submission queue entry (SQE): 64 bytes from a host, parsed once.
//!
//! [`Command`] is what all queues share: identifier, opcode, namespace, SGL. What the Command Dwords mean depends on
//! the opcode; the modules [`crate::io`], `fabrics` and `admin` give them types, and nothing past those looks at
//! Dwords. (NVMe Base 2.x, Common Command Format.)

use core::fmt;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::sgl::Sgl;
use crate::status::Status;

/// Bytes of a submission queue entry.
pub const SQE_LEN: usize = 64;

/// Namespace identifier (NSID) that means all namespaces.
pub const NSID_ALL: u32 = 0xffff_ffff;

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Sqe {
    opcode: u8,
    flags: u8,
    cid: U16,
    nsid: U32,
    cdw2: U32,
    cdw3: U32,
    _mptr: U64,
    sgl: [u8; 16],
    cdw10: U32,
    cdw11: U32,
    cdw12: U32,
    cdw13: U32,
    cdw14: U32,
    cdw15: U32,
}

const _: () = assert!(size_of::<Sqe>() == SQE_LEN);
const _: () = assert!(core::mem::offset_of!(Sqe, sgl) == 24);
const _: () = assert!(core::mem::offset_of!(Sqe, cdw10) == 40);

/// Opcode (OPC) of a command. The two low bits tell which way data go.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// Fabrics commands; the fabrics command type tells them apart.
    pub const FABRICS: Self = Self(0x7f);

    /// Which way data go, by the two low bits. For a fabrics command ask with its command type instead of its opcode.
    #[inline]
    #[must_use]
    pub const fn transfer(self) -> Transfer {
        match self.0 & 3 {
            0 => Transfer::None,
            1 => Transfer::FromHost,
            2 => Transfer::ToHost,
            _ => Transfer::Both,
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}h", self.0)
    }
}

/// Direction of the data of an opcode, in the host's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// No data.
    None,
    /// Host to controller: an RDMA READ for us.
    FromHost,
    /// Controller to host: an RDMA WRITE for us.
    ToHost,
    /// Both; no command of ours does.
    Both,
}

/// Fused operation (FUSE): whether a command is half of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// A command of its own.
    Normal,
    /// First of a fused pair.
    First,
    /// Second of a fused pair.
    Second,
}

/// A command as it arrived: common fields checked, Dwords still raw and private to this crate's parsers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Command identifier (CID).
    pub cid: u16,
    /// Opcode (OPC).
    pub opcode: Opcode,
    /// Fused operation (FUSE).
    pub fuse: Fuse,
    /// Namespace identifier (NSID). In a fabrics command its low byte is the fabrics command type.
    pub nsid: u32,
    /// Where the data are.
    pub sgl: Sgl,
    pub(crate) cdw10: u32,
    pub(crate) cdw11: u32,
    pub(crate) cdw12: u32,
    pub(crate) cdw13: u32,
    pub(crate) cdw14: u32,
}

/// A capsule that is no command: answer `cid` with `status`; the queue pair survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadCommand {
    /// Command identifier to answer.
    pub cid: u16,
    /// Why it was refused.
    pub status: Status,
}

impl Command {
    /// Parses the 64 bytes at the start of a capsule.
    ///
    /// # Errors
    /// A reserved FUSE value or a PSDT other than 01b (fabrics carries SGLs, and a metadata pointer that is a plain
    /// address) is Invalid Field; a descriptor that this transport does not carry is SGL Descriptor Type Invalid. The
    /// descriptor of a command that moves no data is not looked at.
    #[inline(always)]
    pub fn parse(sqe: &[u8; SQE_LEN]) -> Result<Self, BadCommand> {
        let sqe: &Sqe = zerocopy::transmute_ref!(sqe);
        let cid = sqe.cid.get();
        let bad = |status| BadCommand { cid, status };
        let fuse = match sqe.flags & 3 {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => return Err(bad(Status::INVALID_FIELD.dnr())),
        };
        if sqe.flags & PSDT_MASK != PSDT_SGL {
            return Err(bad(Status::INVALID_FIELD.dnr()));
        }
        let opcode = Opcode(sqe.opcode);
        let [fctype, ..] = sqe.nsid.get().to_le_bytes();
        let transfer = if opcode == Opcode::FABRICS { Opcode(fctype).transfer() } else { opcode.transfer() };
        let sgl = match transfer {
            Transfer::None => Sgl::None,
            _ => Sgl::parse(&sqe.sgl).map_err(bad)?,
        };
        Ok(Self {
            cid,
            opcode,
            fuse,
            nsid: sqe.nsid.get(),
            sgl,
            cdw10: sqe.cdw10.get(),
            cdw11: sqe.cdw11.get(),
            cdw12: sqe.cdw12.get(),
            cdw13: sqe.cdw13.get(),
            cdw14: sqe.cdw14.get(),
        })
    }

    /// Whether it is a fabrics command (Connect, Property Get and Set, Disconnect).
    #[must_use]
    pub fn is_fabrics(&self) -> bool {
        self.opcode == Opcode::FABRICS
    }

    /// Whether it is Connect, the only command that an unconnected queue takes.
    #[must_use]
    pub fn is_connect(&self) -> bool {
        self.is_fabrics() && self.fctype() == crate::fabrics::FCTYPE_CONNECT
    }

    /// Fabrics command type (FCTYPE); only of meaning in a fabrics command.
    pub(crate) fn fctype(&self) -> u8 {
        let [fctype, ..] = self.nsid.to_le_bytes();
        fctype
    }
}

const PSDT_MASK: u8 = 0xc0;
const PSDT_SGL: u8 = 0x40;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sgl::KeyedSgl;
    use proptest::prelude::*;

    /// A command with the given Dwords, for the tests of this crate.
    pub(crate) fn sqe(opcode: u8, nsid: u32, sgl: [u8; 16], cdws: [u32; 6]) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[0] = opcode;
        bytes[1] = 0x40;
        bytes[2..4].copy_from_slice(&0x1234u16.to_le_bytes());
        bytes[4..8].copy_from_slice(&nsid.to_le_bytes());
        bytes[24..40].copy_from_slice(&sgl);
        for (n, cdw) in cdws.iter().enumerate() {
            bytes[40 + n * 4..44 + n * 4].copy_from_slice(&cdw.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn command(opcode: u8, nsid: u32, data: u32, cdws: [u32; 6]) -> Command {
        let sgl = crate::sgl::tests::keyed(0x1000, data, 0xcafe, 0x4f);
        Command::parse(&sqe(opcode, nsid, sgl, cdws)).unwrap()
    }

    #[test]
    fn a_kernel_read_command_matches_golden_bytes() {
        // Read of 8 blocks at LBA 16 of namespace 1 into a keyed, to-be-invalidated region of 4096 bytes.
        let mut bytes = [0u8; 64];
        bytes[..8].copy_from_slice(&[0x02, 0x40, 0x2a, 0x00, 0x01, 0, 0, 0]);
        bytes[24..40].copy_from_slice(&[0, 0, 0, 0, 0x10, 0, 0, 0, 0x00, 0x10, 0x00, 0x01, 0x02, 0x03, 0x04, 0x4f]);
        bytes[40..44].copy_from_slice(&[0x10, 0, 0, 0]);
        bytes[48..52].copy_from_slice(&[0x07, 0, 0, 0]);
        let command = Command::parse(&bytes).unwrap();
        assert_eq!(command.cid, 0x2a);
        assert_eq!(command.opcode, Opcode(2));
        assert_eq!(command.nsid, 1);
        assert_eq!(
            command.sgl,
            Sgl::Keyed(KeyedSgl { addr: 0x10_0000_0000, len: 4096, rkey: 0x0403_0201, invalidate: true })
        );
        assert_eq!((command.cdw10, command.cdw12), (16, 7));
        assert!(!command.is_fabrics());
    }

    #[test]
    fn prps_reserved_psdt_and_reserved_fuse_are_refused_with_the_cid() {
        for flags in [0x00, 0x80, 0xc0, 0x43] {
            let mut bytes = sqe(2, 1, [0; 16], [0; 6]);
            bytes[1] = flags;
            assert_eq!(Command::parse(&bytes), Err(BadCommand { cid: 0x1234, status: Status::INVALID_FIELD.dnr() }));
        }
    }

    #[test]
    fn descriptor_of_a_command_without_data_is_not_looked_at() {
        let garbage = [0xee; 16];
        let flush = Command::parse(&sqe(0, 1, garbage, [0; 6])).unwrap();
        assert_eq!(flush.sgl, Sgl::None);
        let property_get = Command::parse(&sqe(0x7f, 4, garbage, [0; 6])).unwrap();
        assert_eq!(property_get.sgl, Sgl::None);
        for opcode in [1, 2, 3] {
            let refused = Command::parse(&sqe(opcode, 1, garbage, [0; 6])).unwrap_err();
            assert_eq!(refused.status, Status::SGL_TYPE_INVALID.dnr());
        }
        let connect = Command::parse(&sqe(0x7f, 1, garbage, [0; 6])).unwrap_err();
        assert_eq!(connect.status, Status::SGL_TYPE_INVALID.dnr());
    }

    proptest! {
        #[test]
        fn any_64_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 64)) {
            let bytes: [u8; 64] = bytes.try_into().unwrap();
            let cid = u16::from_le_bytes([bytes[2], bytes[3]]);
            match Command::parse(&bytes) {
                Ok(command) => prop_assert_eq!(command.cid, cid),
                Err(bad) => {
                    prop_assert_eq!(bad.cid, cid);
                    prop_assert!(bad.status.is_dnr());
                }
            }
        }
    }
}
