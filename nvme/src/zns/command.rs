//! Zone Append, Zone Management Send and Zone Management Receive, given types.
//! (Zoned Namespace Command Set 1.x, I/O commands.)

use super::ZoneState;
use super::opcode;
use crate::command::{Command, Transfer};
use crate::io::NamespaceView;
use crate::status::Status;

/// A command that only zoned namespaces have, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneCommand {
    /// Write `blocks` where the zone's write pointer is; the answer says where that was.
    Append {
        /// First LBA of the zone.
        zslba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
        /// Force unit access: stable when answered.
        fua: bool,
    },
    /// Change the state of one zone, or of all that are in a state that the action is for.
    Send {
        /// What is to be done.
        action: ZoneAction,
        /// First LBA of the zone; `None`: all zones (Select All).
        zslba: Option<u64>,
    },
    /// Report zones from the one that `slba` lies in.
    Receive {
        /// An LBA of the first zone.
        slba: u64,
        /// Bytes that the host takes.
        len: u32,
        /// Which zones.
        filter: ZoneFilter,
        /// Count only what is transferred (Partial Report).
        partial: bool,
    },
}

/// Zone Send Action (ZSA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneAction {
    /// Close Zone.
    Close,
    /// Finish Zone.
    Finish,
    /// Open Zone.
    Open,
    /// Reset Zone.
    Reset,
    /// Offline Zone.
    Offline,
}

/// Which zones a report lists (Zone Receive Action Specific field).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneFilter {
    /// All.
    All,
    /// Those in one state.
    In(ZoneState),
}

impl ZoneFilter {
    /// Whether a zone in this state is listed.
    #[must_use]
    pub fn takes(self, state: ZoneState) -> bool {
        self == Self::All || self == Self::In(state)
    }

    fn from_wire(zras: u8) -> Option<Self> {
        Some(match zras {
            0 => Self::All,
            1 => Self::In(ZoneState::Empty),
            2 => Self::In(ZoneState::ImplicitlyOpened),
            3 => Self::In(ZoneState::ExplicitlyOpened),
            4 => Self::In(ZoneState::Closed),
            5 => Self::In(ZoneState::Full),
            6 => Self::In(ZoneState::ReadOnly),
            7 => Self::In(ZoneState::Offline),
            _ => return None,
        })
    }
}

impl ZoneAction {
    /// Set Zone Descriptor Extension and Flush Explicit ZRWA are for what no zone of ours has.
    fn from_wire(zsa: u8) -> Option<Self> {
        Some(match zsa {
            1 => Self::Close,
            2 => Self::Finish,
            3 => Self::Open,
            4 => Self::Reset,
            5 => Self::Offline,
            _ => return None,
        })
    }
}

impl ZoneCommand {
    /// `None`: the opcode is none of these, or the namespace is not zoned.
    pub(crate) fn parse(command: &Command, view: &NamespaceView) -> Option<Result<Self, Status>> {
        let zone_shift = view.zone_shift?;
        Some(match command.opcode {
            opcode::ZONE_APPEND => append(command, view, zone_shift),
            opcode::ZONE_MANAGEMENT_SEND => send(command, view, zone_shift),
            opcode::ZONE_MANAGEMENT_RECEIVE => receive(command, view),
            _ => return None,
        })
    }

    /// Bytes that it transfers.
    pub(crate) fn data_len(&self, view: &NamespaceView) -> u32 {
        match *self {
            Self::Append { blocks, .. } => blocks << view.block_shift,
            Self::Send { .. } => 0,
            Self::Receive { len, .. } => len,
        }
    }

    /// Which way its data go.
    pub(crate) fn direction(&self) -> Transfer {
        match self {
            Self::Append { .. } => Transfer::FromHost,
            Self::Send { .. } => Transfer::None,
            Self::Receive { .. } => Transfer::ToHost,
        }
    }

    /// Whether it can change what the namespace holds; reservations and write protection take it for a write then.
    #[must_use]
    pub fn changes_media(&self) -> bool {
        !matches!(self, Self::Receive { .. })
    }

    /// The LBA that it names.
    #[must_use]
    pub fn slba(&self) -> u64 {
        match *self {
            Self::Append { zslba, .. } => zslba,
            Self::Send { zslba, .. } => zslba.unwrap_or(0),
            Self::Receive { slba, .. } => slba,
        }
    }
}

fn append(command: &Command, view: &NamespaceView, zone_shift: u8) -> Result<ZoneCommand, Status> {
    writable(view)?;
    let zslba = first_of_zone(command, view, zone_shift)?;
    let blocks = (command.cdw12 & NLB) + 1;
    Ok(ZoneCommand::Append { zslba, blocks, fua: command.cdw12 & FUA != 0 })
}

fn send(command: &Command, view: &NamespaceView, zone_shift: u8) -> Result<ZoneCommand, Status> {
    writable(view)?;
    let [zsa, zsaso, ..] = command.cdw13.to_le_bytes();
    let action = ZoneAction::from_wire(zsa).ok_or(Status::INVALID_FIELD.dnr())?;
    if zsaso & ZRWA_ALLOCATION != 0 {
        return Err(Status::INVALID_FIELD.dnr());
    }
    let all = zsaso & SELECT_ALL != 0;
    let zslba = if all { None } else { Some(first_of_zone(command, view, zone_shift)?) };
    Ok(ZoneCommand::Send { action, zslba })
}

fn receive(command: &Command, view: &NamespaceView) -> Result<ZoneCommand, Status> {
    let [zra, zras, specific, _] = command.cdw13.to_le_bytes();
    // An extended report is of descriptor extensions, which are zero bytes long here: that is refused.
    let filter = ZoneFilter::from_wire(zras).filter(|_| zra == REPORT_ZONES).ok_or(Status::INVALID_FIELD.dnr())?;
    let len = u64::from(command.cdw12).saturating_add(1).saturating_mul(4);
    let len = u32::try_from(len).map_err(|_| Status::INVALID_FIELD.dnr())?;
    if len < super::report::HEADER_LEN {
        return Err(Status::INVALID_FIELD.dnr());
    }
    let slba = slba(command);
    if slba >= view.blocks {
        return Err(Status::LBA_OUT_OF_RANGE.dnr());
    }
    Ok(ZoneCommand::Receive { slba, len, filter, partial: specific & PARTIAL_REPORT != 0 })
}

fn slba(command: &Command) -> u64 {
    u64::from(command.cdw10) | u64::from(command.cdw11) << 32
}

/// The SLBA field, which has to be the first LBA of a zone.
fn first_of_zone(command: &Command, view: &NamespaceView, zone_shift: u8) -> Result<u64, Status> {
    let zslba = slba(command);
    if zslba >= view.blocks {
        return Err(Status::LBA_OUT_OF_RANGE.dnr());
    }
    if zslba.trailing_zeros() < u32::from(zone_shift) {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(zslba)
}

fn writable(view: &NamespaceView) -> Result<(), Status> {
    if view.read_only { Err(Status::NAMESPACE_WRITE_PROTECTED.dnr()) } else { Ok(()) }
}

// Dword 12 of Zone Append.
const NLB: u32 = 0xffff;
const FUA: u32 = 1 << 30;

// Second byte of Dword 13 of Zone Management Send.
const SELECT_ALL: u8 = 1;
const ZRWA_ALLOCATION: u8 = 1 << 1;

// Dword 13 of Zone Management Receive: ZRA, and the lowest bit of its third byte.
const REPORT_ZONES: u8 = 0;
const PARTIAL_REPORT: u8 = 1;
