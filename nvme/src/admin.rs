//! Admin commands, given types.
//!
//! Only what this controller serves is here; any other opcode is Invalid Command Opcode. (NVMe Base 2.x, Admin Command
//! Set.)

use crate::command::{Command, Fuse, NSID_ALL};
use crate::status::Status;

pub(crate) const GET_LOG_PAGE: u8 = 0x02;
pub(crate) const IDENTIFY: u8 = 0x06;
pub(crate) const ABORT: u8 = 0x08;
pub(crate) const SET_FEATURES: u8 = 0x09;
pub(crate) const GET_FEATURES: u8 = 0x0a;
pub(crate) const ASYNC_EVENT_REQUEST: u8 = 0x0c;
pub(crate) const KEEP_ALIVE: u8 = 0x18;

/// Why a command was refused, and the byte of the command at fault for the error log (FFFFh: none in particular).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) status: Status,
    pub(crate) location: u16,
}

impl Refused {
    pub(crate) const NO_LOCATION: u16 = 0xffff;

    /// Refused because of the byte at `location` of the command.
    pub(crate) const fn at(location: u16, status: Status) -> Self {
        Self { status, location }
    }

    /// Invalid Field in Command, never to be retried, because of the byte at `location`.
    pub(crate) const fn invalid_field(location: u16) -> Self {
        Self::at(location, Status::INVALID_FIELD.dnr())
    }
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self::at(Self::NO_LOCATION, status)
    }
}

/// Bytes of the command that refusals point at.
pub(crate) mod location {
    pub(crate) const OPCODE: u16 = 0;
    pub(crate) const FUSE: u16 = 1;
    pub(crate) const NSID: u16 = 4;
    pub(crate) const SGL_LENGTH: u16 = 32;
    pub(crate) const CDW10: u16 = 40;
    pub(crate) const CDW11: u16 = 44;
    pub(crate) const CDW12: u16 = 48;
    pub(crate) const CDW14: u16 = 56;
}

/// An admin command with its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdminCommand {
    GetLogPage(GetLogPage),
    Identify(Identify),
    Abort { sqid: u16, cid: u16 },
    SetFeatures(SetFeatures),
    GetFeatures(GetFeatures),
    AsyncEventRequest,
    KeepAlive,
}

/// Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GetLogPage {
    pub(crate) nsid: u32,
    /// Log page identifier (LID).
    pub(crate) lid: u8,
    /// Log specific parameter (LSP).
    pub(crate) lsp: u8,
    /// Retain asynchronous event (RAE).
    pub(crate) retain: bool,
    /// Bytes to transfer.
    pub(crate) len: u64,
    /// Log page offset (LPO) in bytes.
    pub(crate) offset: u64,
    /// Command set identifier (CSI).
    pub(crate) csi: u8,
}

/// Identify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identify {
    pub(crate) nsid: u32,
    /// Controller or namespace structure (CNS).
    pub(crate) cns: u8,
    /// Controller identifier (CNTID), for the structures that take one.
    pub(crate) cntid: u16,
    /// Command set identifier (CSI).
    pub(crate) csi: u8,
}

/// Set Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetFeatures {
    pub(crate) nsid: u32,
    /// Feature identifier (FID).
    pub(crate) fid: u8,
    /// Save (SV).
    pub(crate) save: bool,
    pub(crate) value: u32,
}

/// Get Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GetFeatures {
    pub(crate) nsid: u32,
    /// Feature identifier (FID).
    pub(crate) fid: u8,
    pub(crate) select: Select,
    pub(crate) value: u32,
}

/// Select (SEL) of Get Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Select {
    Current,
    Default,
    Saved,
    Capabilities,
}

impl AdminCommand {
    pub(crate) fn parse(command: &Command) -> Result<Self, Refused> {
        let parsed = match command.opcode.0 {
            GET_LOG_PAGE => Self::GetLogPage(GetLogPage::parse(command)?),
            IDENTIFY => Self::Identify(Identify::parse(command)),
            ABORT => {
                let [s0, s1, c0, c1] = command.cdw10.to_le_bytes();
                Self::Abort { sqid: u16::from_le_bytes([s0, s1]), cid: u16::from_le_bytes([c0, c1]) }
            }
            SET_FEATURES => Self::SetFeatures(SetFeatures::parse(command)),
            GET_FEATURES => Self::GetFeatures(GetFeatures::parse(command)?),
            ASYNC_EVENT_REQUEST => Self::AsyncEventRequest,
            KEEP_ALIVE => Self::KeepAlive,
            _ => {
                let status = Status::INVALID_OPCODE.dnr();
                return Err(Refused::at(location::OPCODE, status));
            }
        };
        if command.fuse != Fuse::Normal {
            return Err(Refused::invalid_field(location::FUSE));
        }
        Ok(parsed)
    }
}

impl GetLogPage {
    /// NUMD is a zero's based count of dwords, split over two Dwords; LPO must be dword aligned unless the page is
    /// indexed, and no page of ours is (IOS of log page 00h is clear, so Offset Type 1 is refused).
    fn parse(command: &Command) -> Result<Self, Refused> {
        let [lid, lsp_rae, n0, n1] = command.cdw10.to_le_bytes();
        let [n2, n3, ..] = command.cdw11.to_le_bytes();
        let [_, _, ot, csi] = command.cdw14.to_le_bytes();
        let dwords = u64::from(u32::from_le_bytes([n0, n1, n2, n3])) + 1;
        let offset = u64::from(command.cdw12) | u64::from(command.cdw13) << 32;
        if offset & 3 != 0 {
            return Err(Refused::invalid_field(location::CDW12));
        }
        if ot & 0x80 != 0 {
            return Err(Refused::invalid_field(location::CDW14));
        }
        Ok(Self {
            nsid: command.nsid,
            lid,
            lsp: lsp_rae & 0x7f,
            retain: lsp_rae & 0x80 != 0,
            len: dwords * 4,
            offset,
            csi,
        })
    }

    /// The page is for the whole controller, not for one namespace.
    pub(crate) fn is_controller_scope(&self) -> bool {
        matches!(self.nsid, 0 | NSID_ALL)
    }
}

impl Identify {
    fn parse(command: &Command) -> Self {
        let [cns, _, i0, i1] = command.cdw10.to_le_bytes();
        let [_, _, _, csi] = command.cdw11.to_le_bytes();
        Self { nsid: command.nsid, cns, cntid: u16::from_le_bytes([i0, i1]), csi }
    }
}

impl SetFeatures {
    fn parse(command: &Command) -> Self {
        let [fid, _, _, sv] = command.cdw10.to_le_bytes();
        Self { nsid: command.nsid, fid, save: sv & 0x80 != 0, value: command.cdw11 }
    }
}

impl GetFeatures {
    fn parse(command: &Command) -> Result<Self, Refused> {
        let [fid, sel, ..] = command.cdw10.to_le_bytes();
        let select = match sel & 7 {
            0 => Select::Current,
            1 => Select::Default,
            2 => Select::Saved,
            3 => Select::Capabilities,
            _ => return Err(Refused::invalid_field(location::CDW10 + 1)),
        };
        Ok(Self { nsid: command.nsid, fid, select, value: command.cdw11 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::{command, sqe};

    #[test]
    fn get_log_page_joins_its_halves() {
        // LID 70h, RAE, NUMDL FFFFh; NUMDU 1; LPO 8_0000_0004h; CSI 2.
        let cdws = [0xffff_8070, 1, 4, 8, 0x0200_0000, 0];
        assert_eq!(
            AdminCommand::parse(&command(0x02, 7, 4096, cdws)),
            Ok(AdminCommand::GetLogPage(GetLogPage {
                nsid: 7,
                lid: 0x70,
                lsp: 0,
                retain: true,
                len: 0x2_0000 * 4,
                offset: 0x8_0000_0004,
                csi: 2,
            }))
        );
    }

    #[test]
    fn largest_numd_does_not_overflow() {
        let cdws = [0xffff_0001, 0xffff, 0, 0, 0, 0];
        let Ok(AdminCommand::GetLogPage(get)) = AdminCommand::parse(&command(2, 0, 4, cdws)) else {
            panic!("refused");
        };
        assert_eq!(get.len, 1 << 34);
    }

    #[test]
    fn unaligned_offsets_and_indexed_offsets_are_refused() {
        for lpo in [1, 2, 3, 0x401] {
            let refused = AdminCommand::parse(&command(2, 0, 4, [1, 0, lpo, 0, 0, 0]));
            assert_eq!(refused, Err(Refused::invalid_field(48)));
        }
        let indexed = command(2, 0, 4, [1, 0, 0, 0, 1 << 23, 0]);
        assert_eq!(AdminCommand::parse(&indexed), Err(Refused::invalid_field(56)));
    }

    #[test]
    fn features_and_abort_and_identify_are_parsed() {
        assert_eq!(
            AdminCommand::parse(&command(9, 0, 0, [0x8000_000b, 0x100, 0, 0, 0, 0])),
            Ok(AdminCommand::SetFeatures(SetFeatures { nsid: 0, fid: 0x0b, save: true, value: 0x100 }))
        );
        assert_eq!(
            AdminCommand::parse(&command(10, 0, 0, [0x0000_0307, 0, 0, 0, 0, 0])),
            Ok(AdminCommand::GetFeatures(GetFeatures { nsid: 0, fid: 7, select: Select::Capabilities, value: 0 }))
        );
        assert_eq!(
            AdminCommand::parse(&command(8, 0, 0, [0xabcd_0003, 0, 0, 0, 0, 0])),
            Ok(AdminCommand::Abort { sqid: 3, cid: 0xabcd })
        );
        assert_eq!(
            AdminCommand::parse(&command(6, 1, 4096, [0xffff_001c, 0x0200_0000, 0, 0, 0, 0])),
            Ok(AdminCommand::Identify(Identify { nsid: 1, cns: 0x1c, cntid: 0xffff, csi: 2 }))
        );
    }

    #[test]
    fn reserved_selects_are_refused() {
        for sel in 4..8u32 {
            let refused = AdminCommand::parse(&command(10, 0, 0, [sel << 8 | 7, 0, 0, 0, 0, 0]));
            assert_eq!(refused, Err(Refused::invalid_field(41)));
        }
    }

    #[test]
    fn unknown_opcodes_and_fused_commands_are_refused() {
        for opcode in (0..=0x7eu8).chain(0x80..=0xff) {
            let known = [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18].contains(&opcode);
            let parsed = AdminCommand::parse(&command(opcode, 0, 4096, [0; 6]));
            assert_eq!(parsed.is_ok(), known, "{opcode:x}");
        }
        let mut bytes = sqe(0x18, 0, [0; 16], [0; 6]);
        bytes[1] = 0x41;
        let fused = Command::parse(&bytes).unwrap();
        assert_eq!(AdminCommand::parse(&fused), Err(Refused::invalid_field(1)));
    }
}
