//! Reservation commands, given types. (NVM Command Set 1.x, Reservation Acquire, Register, Release, Report.)

use super::ReservationType;
use crate::command::{Command, Opcode, Transfer};
use crate::status::Status;

/// A reservation command, its Dwords checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationCommand {
    /// Registers, changes a key, or unregisters.
    Register {
        /// Which of them (RREGA).
        action: RegisterAction,
        /// The current key need not be right (IEKEY).
        ignore_key: bool,
        /// Change of persistence through power loss (CPTPL).
        persist: Option<bool>,
    },
    /// Takes the reservation.
    Acquire {
        /// How (RACQA).
        action: AcquireAction,
        /// The type it is to have.
        rtype: ReservationType,
    },
    /// Gives the reservation up.
    Release {
        /// How (RRELA).
        action: ReleaseAction,
        /// The type it has; `None` is none that exists.
        rtype: Option<ReservationType>,
    },
    /// Tells registrants and holder.
    Report {
        /// Bytes to transfer.
        len: u32,
    },
}

/// Reservation Register Action (RREGA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterAction {
    /// Registers a key.
    Register,
    /// Unregisters.
    Unregister,
    /// Replaces the key.
    Replace,
}

/// Reservation Acquire Action (RACQA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireAction {
    /// If nobody has it.
    Acquire,
    /// From whom the key says.
    Preempt,
    /// The same, and their commands in progress end.
    PreemptAndAbort,
}

/// Reservation Release Action (RRELA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseAction {
    /// The host's own reservation.
    Release,
    /// The reservation and all registrations.
    Clear,
}

/// Opcodes.
pub(crate) mod opcode {
    use crate::command::Opcode;

    pub(crate) const REGISTER: Opcode = Opcode(0x0d);
    pub(crate) const REPORT: Opcode = Opcode(0x0e);
    pub(crate) const ACQUIRE: Opcode = Opcode(0x11);
    pub(crate) const RELEASE: Opcode = Opcode(0x15);

    pub(crate) const ALL: [Opcode; 4] = [REGISTER, REPORT, ACQUIRE, RELEASE];
}

impl ReservationCommand {
    /// Whether an opcode is one of them.
    pub(crate) fn is(opcode: Opcode) -> bool {
        opcode::ALL.contains(&opcode)
    }

    /// Checks the Dwords. `persistent`: state of this namespace can be kept through power loss.
    pub(crate) fn parse(command: &Command, persistent: bool) -> Result<Self, Status> {
        let invalid = Status::INVALID_FIELD.dnr();
        let dword = command.cdw10;
        let [action, rtype, ..] = dword.to_le_bytes();
        let ignore_key = dword & IGNORE_KEY != 0;
        let rtype = ReservationType::from_wire(rtype);
        Ok(match command.opcode {
            opcode::REGISTER => {
                let persist = match dword >> 30 {
                    0 => None,
                    2 => Some(false),
                    3 if persistent => Some(true),
                    _ => return Err(invalid),
                };
                let action = match action & 7 {
                    0 => RegisterAction::Register,
                    1 => RegisterAction::Unregister,
                    2 => RegisterAction::Replace,
                    _ => return Err(invalid),
                };
                Self::Register { action, ignore_key, persist }
            }
            opcode::ACQUIRE => {
                let action = match action & 7 {
                    0 => AcquireAction::Acquire,
                    1 => AcquireAction::Preempt,
                    2 => AcquireAction::PreemptAndAbort,
                    _ => return Err(invalid),
                };
                let rtype = rtype.filter(|_| !ignore_key).ok_or(invalid)?;
                Self::Acquire { action, rtype }
            }
            opcode::RELEASE => {
                let action = match action & 7 {
                    0 => ReleaseAction::Release,
                    1 => ReleaseAction::Clear,
                    _ => return Err(invalid),
                };
                if ignore_key {
                    return Err(invalid);
                }
                Self::Release { action, rtype }
            }
            opcode::REPORT => {
                // Host identifiers are of 128 bits: the extended data structure alone has room for them.
                if command.cdw11 & EXTENDED == 0 {
                    return Err(Status::HOST_ID_INCONSISTENT.dnr());
                }
                let len = dword.checked_add(1).and_then(|dwords| dwords.checked_mul(4)).ok_or(invalid)?;
                Self::Report { len }
            }
            _ => return Err(Status::INVALID_OPCODE.dnr()),
        })
    }

    /// Bytes that it transfers.
    pub(crate) fn data_len(&self) -> u32 {
        match *self {
            Self::Register { .. } | Self::Acquire { .. } => 16,
            Self::Release { .. } => 8,
            Self::Report { len } => len,
        }
    }

    pub(crate) fn direction(&self) -> Transfer {
        match self {
            Self::Report { .. } => Transfer::ToHost,
            _ => Transfer::FromHost,
        }
    }
}

const IGNORE_KEY: u32 = 1 << 3;
const EXTENDED: u32 = 1;
