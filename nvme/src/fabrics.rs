//! Fabrics commands: Connect, Property Get and Set, Disconnect, given types.
//!
//! (NVMe Base 2.x, Fabrics Command Set. Connect's data are 1024 bytes that the host describes by the command's SGL.)

use core::time::Duration;

use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::command::Command;
use crate::nqn::NQN_FIELD;
use crate::status::Status;

/// Bytes of Connect's data.
pub const CONNECT_DATA_LEN: u32 = 1024;

pub(crate) const FCTYPE_PROPERTY_SET: u8 = 0x00;
pub(crate) const FCTYPE_CONNECT: u8 = 0x01;
pub(crate) const FCTYPE_PROPERTY_GET: u8 = 0x04;
pub(crate) const FCTYPE_AUTH_SEND: u8 = 0x05;
pub(crate) const FCTYPE_AUTH_RECEIVE: u8 = 0x06;
pub(crate) const FCTYPE_DISCONNECT: u8 = 0x08;

/// Longest message of an authentication, both ways.
pub(crate) const AUTH_MESSAGE_MAX: u32 = 4096;

/// AUTHREQ of Connect's answer: the host has to authenticate (ATR).
pub(crate) const CONNECT_AUTHENTICATION_REQUIRED: u32 = 1 << 17;

/// CNTLID in Connect's data that asks for a dynamically chosen controller.
pub(crate) const CNTLID_DYNAMIC: u16 = 0xffff;

/// A fabrics command with its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FabricsCommand {
    Connect(Connect),
    PropertyGet(PropertyRef),
    PropertySet { property: PropertyRef, value: u64 },
    Disconnect { recfmt: u16 },
    AuthenticationSend(AuthTransfer),
    AuthenticationReceive(AuthTransfer),
}

/// What Authentication Send and Receive transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AuthTransfer {
    /// Security protocol E9h and its specific fields 0101h: the one that NVMe defines.
    pub(crate) protocol: bool,
    /// Bytes (TL, AL).
    pub(crate) len: u32,
}

impl AuthTransfer {
    fn parse(command: &Command) -> Self {
        let [_, spsp0, spsp1, secp] = command.cdw10.to_le_bytes();
        Self { protocol: (spsp0, spsp1, secp) == (1, 1, 0xe9), len: command.cdw11 }
    }
}

/// Which property, and of what size the host believes it to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PropertyRef {
    pub(crate) offset: u32,
    /// 4 or 8.
    pub(crate) size: u8,
}

/// The Connect command's own fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connect {
    pub(crate) recfmt: u16,
    pub(crate) qid: u16,
    /// Zero's based.
    pub(crate) sqsize: u16,
    /// CATTR bit 2: the host does not want SQ flow control.
    pub(crate) disable_sq_flow_control: bool,
    /// Keep alive timeout (KATO); `None` is off. Only of meaning on the admin queue.
    pub(crate) kato: Option<Duration>,
}

impl FabricsCommand {
    pub(crate) fn parse(command: &Command) -> Result<Self, Status> {
        match command.fctype() {
            FCTYPE_CONNECT => Ok(Self::Connect(Connect::parse(command))),
            FCTYPE_PROPERTY_GET => Ok(Self::PropertyGet(PropertyRef::parse(command)?)),
            FCTYPE_PROPERTY_SET => Ok(Self::PropertySet {
                property: PropertyRef::parse(command)?,
                value: u64::from(command.cdw12) | u64::from(command.cdw13) << 32,
            }),
            FCTYPE_DISCONNECT => {
                let [r0, r1, ..] = command.cdw10.to_le_bytes();
                Ok(Self::Disconnect { recfmt: u16::from_le_bytes([r0, r1]) })
            }
            FCTYPE_AUTH_SEND => Ok(Self::AuthenticationSend(AuthTransfer::parse(command))),
            FCTYPE_AUTH_RECEIVE => Ok(Self::AuthenticationReceive(AuthTransfer::parse(command))),
            _ => Err(Status::INVALID_OPCODE.dnr()),
        }
    }
}

impl PropertyRef {
    /// ATTRIB bits 2:0 are the size: 0 is 4 bytes, 1 is 8 bytes, the rest reserved.
    fn parse(command: &Command) -> Result<Self, Status> {
        let size = match command.cdw10 & 7 {
            0 => 4,
            1 => 8,
            _ => return Err(Status::INVALID_FIELD.dnr()),
        };
        Ok(Self { offset: command.cdw11, size })
    }
}

impl Connect {
    pub(crate) fn parse(command: &Command) -> Self {
        let [r0, r1, q0, q1] = command.cdw10.to_le_bytes();
        let [s0, s1, cattr, _] = command.cdw11.to_le_bytes();
        Self {
            recfmt: u16::from_le_bytes([r0, r1]),
            qid: u16::from_le_bytes([q0, q1]),
            sqsize: u16::from_le_bytes([s0, s1]),
            disable_sq_flow_control: cattr & 4 != 0,
            kato: (command.cdw12 != 0).then(|| Duration::from_millis(command.cdw12.into())),
        }
    }
}

/// Connect's data, as it lies on the wire.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ConnectData {
    pub(crate) hostid: [u8; 16],
    pub(crate) cntlid: U16,
    _reserved18: [u8; 238],
    pub(crate) subnqn: [u8; NQN_FIELD],
    pub(crate) hostnqn: [u8; NQN_FIELD],
    _reserved768: [u8; 256],
}

const _: () = assert!(size_of::<ConnectData>() == 1024);
const _: () = assert!(core::mem::offset_of!(ConnectData, cntlid) == 16);
const _: () = assert!(core::mem::offset_of!(ConnectData, subnqn) == 256);
const _: () = assert!(core::mem::offset_of!(ConnectData, hostnqn) == 512);

impl ConnectData {
    /// A view of the first 1024 bytes; a host may describe more, never less.
    pub(crate) fn parse(data: &[u8]) -> Result<&Self, Status> {
        Self::ref_from_prefix(data).map(|(data, _)| data).map_err(|_| Status::DATA_SGL_LENGTH_INVALID.dnr())
    }
}

/// Which field made a Connect invalid: Dword 0 of the completion, IPO in the low half, IATTR bit 0 (the field lies in
/// the data) above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectField {
    Qid,
    Sqsize,
    HostId,
    Cntlid,
    Subnqn,
    Hostnqn,
}

impl ConnectField {
    pub(crate) const fn to_dword0(self) -> u32 {
        const IN_DATA: u32 = 1 << 16;
        match self {
            Self::Qid => 42,
            Self::Sqsize => 44,
            Self::HostId => IN_DATA,
            Self::Cntlid => IN_DATA | 16,
            Self::Subnqn => IN_DATA | 256,
            Self::Hostnqn => IN_DATA | 512,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::sqe;

    fn fabrics(fctype: u32, cdws: [u32; 6]) -> Command {
        Command::parse(&sqe(0x7f, fctype, [0; 16], cdws)).unwrap()
    }

    #[test]
    fn connect_of_the_kernel_host_is_parsed() {
        // RECFMT 0, QID 0, SQSIZE 31, CATTR 4, KATO 5000 ms.
        let command = fabrics(1, [0, 0x0004_001f, 5000, 0, 0, 0]);
        assert!(command.is_connect());
        let connect = Connect {
            recfmt: 0,
            qid: 0,
            sqsize: 31,
            disable_sq_flow_control: true,
            kato: Some(Duration::from_secs(5)),
        };
        assert_eq!(FabricsCommand::parse(&command), Ok(FabricsCommand::Connect(connect)));
        let command = fabrics(1, [0x0003_0001, 0x0000_007f, 0, 0, 0, 0]);
        let connect = Connect { recfmt: 1, qid: 3, sqsize: 127, disable_sq_flow_control: false, kato: None };
        assert_eq!(FabricsCommand::parse(&command), Ok(FabricsCommand::Connect(connect)));
    }

    #[test]
    fn property_commands_are_parsed_and_reserved_sizes_refused() {
        let cap = PropertyRef { offset: 0, size: 8 };
        assert_eq!(FabricsCommand::parse(&fabrics(4, [1, 0, 0, 0, 0, 0])), Ok(FabricsCommand::PropertyGet(cap)));
        let cc = PropertyRef { offset: 0x14, size: 4 };
        assert_eq!(
            FabricsCommand::parse(&fabrics(0, [0, 0x14, 0x0046_0001, 9, 0, 0])),
            Ok(FabricsCommand::PropertySet { property: cc, value: 0x9_0046_0001 })
        );
        for size in 2..8 {
            assert_eq!(FabricsCommand::parse(&fabrics(4, [size, 0, 0, 0, 0, 0])), Err(Status::INVALID_FIELD.dnr()));
        }
    }

    #[test]
    fn only_six_command_types_exist() {
        for fctype in 0..=0xff_u32 {
            let known = FabricsCommand::parse(&fabrics(fctype, [0; 6])).is_ok();
            assert_eq!(known, [0, 1, 4, 5, 6, 8].contains(&fctype), "{fctype:x}");
        }
    }

    #[test]
    fn connect_data_shorter_than_1024_bytes_are_refused() {
        for len in [0, 512, 1023] {
            assert_eq!(ConnectData::parse(&vec![0; len]).err(), Some(Status::DATA_SGL_LENGTH_INVALID.dnr()));
        }
        assert!(ConnectData::parse(&[0; 1024]).is_ok());
    }

    #[test]
    fn invalid_parameter_offsets_are_those_of_the_wire() {
        assert_eq!(ConnectField::Qid.to_dword0(), 42);
        assert_eq!(ConnectField::HostId.to_dword0(), 0x1_0000);
        assert_eq!(ConnectField::Hostnqn.to_dword0(), 0x1_0200);
    }
}
