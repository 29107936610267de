//! I/O commands: checked against a published view of their namespace, with no registry, no lock, no allocation and no
//! division.
//!
//! [`check`] turns a [`Command`] into an [`IoCommand`] that cannot reach outside the namespace, is within MDTS, and
//! whose SGL covers its data. What remains for the transport: resolve a last-segment SGL and compare its sum with
//! [`IoCommand::data_len`], and give the data of a Dataset Management command to [`parse_ranges`], those of a Copy to
//! [`parse_copy`]. (NVM Command Set 1.x.)

mod limits;
mod ranges;
#[cfg(test)]
mod tests;

pub use limits::IoLimits;
pub use ranges::{BlockRange, Ranges, parse_copy, parse_ranges};

use crate::command::{Command, Fuse, Opcode, Transfer};
use crate::reservation::ReservationCommand;
use crate::status::Status;
use crate::zns::ZoneCommand;

/// Command set identifier (CSI) of the NVM command set.
pub(crate) const CSI: u8 = 0;

/// Opcodes of the NVM command set that a namespace can support.
pub mod opcode {
    use crate::command::Opcode;

    /// Flush.
    pub const FLUSH: Opcode = Opcode(0x00);
    /// Write.
    pub const WRITE: Opcode = Opcode(0x01);
    /// Read.
    pub const READ: Opcode = Opcode(0x02);
    /// Compare.
    pub const COMPARE: Opcode = Opcode(0x05);
    /// Write Zeroes.
    pub const WRITE_ZEROES: Opcode = Opcode(0x08);
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: Opcode = Opcode(0x09);
    /// Verify.
    pub const VERIFY: Opcode = Opcode(0x0c);
    /// Copy.
    pub const COPY: Opcode = Opcode(0x19);
}

/// What I/O needs to know of a namespace. Built by the registry, published to whoever checks commands; a change is a
/// new view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceView {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Binary logarithm of the logical block size: 9 or 12.
    pub block_shift: u8,
    /// Writes of any kind are refused.
    pub read_only: bool,
    /// Compare is supported, alone and fused with a Write.
    pub compare: bool,
    /// Write Zeroes is supported.
    pub write_zeroes: bool,
    /// Dataset Management with Attribute Deallocate is supported.
    pub deallocate: bool,
    /// Verify is supported.
    pub verify: bool,
    /// Copy is supported.
    pub copy: bool,
    /// Reservations are supported.
    pub reservations: bool,
    /// State of it can be kept through power loss.
    pub persistent: bool,
    /// Binary logarithm of the zone size in blocks; `None`: it is not zoned.
    pub zone_shift: Option<u8>,
}

/// An I/O command that passed every check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoCommand {
    /// Read `blocks` from `slba`.
    Read {
        /// Starting LBA.
        slba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
        /// Force unit access: from the medium.
        fua: bool,
    },
    /// Write `blocks` to `slba`.
    Write {
        /// Starting LBA.
        slba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
        /// Force unit access: stable when answered.
        fua: bool,
    },
    /// Compare the host's data with the medium.
    Compare {
        /// Starting LBA.
        slba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
    },
    /// Make the blocks read as zeroes.
    WriteZeroes {
        /// Starting LBA.
        slba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
        /// The host would like them deallocated (DEAC).
        deallocate: bool,
        /// Force unit access: stable when answered.
        fua: bool,
    },
    /// Commit the volatile write cache.
    Flush,
    /// Deallocate ranges; the data are `ranges` descriptors of 16 bytes, for [`parse_ranges`].
    Deallocate {
        /// Number of ranges, 1 to 256.
        ranges: u16,
    },
    /// Dataset Management without Deallocate: hints that we do not use. Answer success without fetching the data.
    DsmHint,
    /// Read the blocks and tell whether that works.
    Verify {
        /// Starting LBA.
        slba: u64,
        /// Number of logical blocks, a real count.
        blocks: u32,
    },
    /// Copy ranges within the namespace; the data are `ranges` entries of 32 bytes, for [`parse_copy`].
    Copy {
        /// Starting LBA of the destination.
        slba: u64,
        /// Number of source ranges, 1 to 256.
        ranges: u16,
        /// Force unit access: stable when answered.
        fua: bool,
    },
    /// A reservation command, for [`crate::Registry::reserve`].
    Reservation(ReservationCommand),
    /// A command that only zoned namespaces have.
    Zone(ZoneCommand),
}

impl IoCommand {
    /// Bytes that this command transfers.
    #[inline]
    #[must_use]
    pub fn data_len(&self, view: &NamespaceView) -> u32 {
        match *self {
            Self::Read { blocks, .. } | Self::Write { blocks, .. } | Self::Compare { blocks, .. } => {
                blocks << view.block_shift
            }
            Self::Deallocate { ranges } => u32::from(ranges) * ranges::DSM_RANGE_LEN,
            Self::Copy { ranges, .. } => u32::from(ranges) * ranges::COPY_RANGE_LEN,
            Self::WriteZeroes { .. } | Self::Flush | Self::DsmHint | Self::Verify { .. } => 0,
            Self::Reservation(command) => command.data_len(),
            Self::Zone(command) => command.data_len(view),
        }
    }

    /// Which way the data go: never [`Transfer::Both`].
    #[inline]
    #[must_use]
    pub fn direction(&self) -> Transfer {
        match self {
            Self::Read { .. } => Transfer::ToHost,
            Self::Write { .. } | Self::Compare { .. } | Self::Deallocate { .. } | Self::Copy { .. } => {
                Transfer::FromHost
            }
            Self::WriteZeroes { .. } | Self::Flush | Self::DsmHint | Self::Verify { .. } => Transfer::None,
            Self::Reservation(command) => command.direction(),
            Self::Zone(command) => command.direction(),
        }
    }

    /// The blocks that it is about, where the command itself says so; a Dataset Management or a Copy command says it in its
    /// data.
    #[inline]
    #[must_use]
    pub fn blocks(&self) -> Option<BlockRange> {
        match *self {
            Self::Read { slba, blocks, .. }
            | Self::Write { slba, blocks, .. }
            | Self::Compare { slba, blocks }
            | Self::Verify { slba, blocks }
            | Self::WriteZeroes { slba, blocks, .. } => Some(BlockRange { slba, blocks }),
            Self::Flush
            | Self::DsmHint
            | Self::Deallocate { .. }
            | Self::Copy { .. }
            | Self::Reservation(_)
            | Self::Zone(_) => None,
        }
    }

    /// Whether it can change what the namespace holds.
    #[inline]
    #[must_use]
    pub fn changes_media(&self) -> bool {
        match self {
            Self::Zone(command) => command.changes_media(),
            Self::Write { .. } | Self::WriteZeroes { .. } | Self::Deallocate { .. } | Self::Copy { .. } => true,
            Self::Read { .. }
            | Self::Compare { .. }
            | Self::Verify { .. }
            | Self::Flush
            | Self::DsmHint
            | Self::Reservation(_) => false,
        }
    }
}

/// Checks an I/O command against its namespace. `view` is the one that `command.nsid` names; where there is none, the
/// answer is [`no_namespace`].
///
/// # Errors
/// The status to answer with; nothing was done.
#[inline(always)]
pub fn check(command: &Command, view: &NamespaceView, limits: &IoLimits) -> Result<IoCommand, Status> {
    if command.fuse != Fuse::Normal {
        fusible(command, view)?;
    }
    if command.nsid != view.nsid {
        return Err(no_namespace());
    }
    // Nearly all commands are these two.
    match command.opcode {
        opcode::READ => {
            let (slba, blocks) = block_range(command, view)?;
            transferable(command, blocks << view.block_shift, true, limits)?;
            Ok(IoCommand::Read { slba, blocks, fua: command.cdw12 & FUA != 0 })
        }
        opcode::WRITE => {
            writable(view)?;
            if command.cdw12 & DTYPE != 0 {
                // No directive is supported (OACS bit 5 is clear).
                return Err(Status::INVALID_FIELD.dnr());
            }
            let (slba, blocks) = block_range(command, view)?;
            transferable(command, blocks << view.block_shift, false, limits)?;
            Ok(IoCommand::Write { slba, blocks, fua: command.cdw12 & FUA != 0 })
        }
        _ => check_other(command, view, limits),
    }
}

/// The commands other than Read and Write.
#[inline(never)]
fn check_other(command: &Command, view: &NamespaceView, limits: &IoLimits) -> Result<IoCommand, Status> {
    let io = match command.opcode {
        opcode::COMPARE => {
            supported(view.compare)?;
            let (slba, blocks) = block_range(command, view)?;
            IoCommand::Compare { slba, blocks }
        }
        opcode::WRITE_ZEROES => {
            supported(view.write_zeroes)?;
            writable(view)?;
            if command.cdw12 & NSZ != 0 {
                // The whole namespace is meant; zeroing the range alone would answer something else than was asked.
                return Err(Status::INVALID_FIELD.dnr());
            }
            let (slba, blocks) = block_range(command, view)?;
            bounded(blocks, limits.write_zeroes_bytes, view)?;
            IoCommand::WriteZeroes {
                slba,
                blocks,
                deallocate: command.cdw12 & DEAC != 0,
                fua: command.cdw12 & FUA != 0,
            }
        }
        opcode::DATASET_MANAGEMENT => {
            supported(view.deallocate)?;
            if command.cdw11 & ATTRIBUTE_DEALLOCATE == 0 {
                IoCommand::DsmHint
            } else {
                writable(view)?;
                let [nr, ..] = command.cdw10.to_le_bytes();
                IoCommand::Deallocate { ranges: u16::from(nr) + 1 }
            }
        }
        opcode::FLUSH => IoCommand::Flush,
        opcode::VERIFY => {
            supported(view.verify)?;
            let (slba, blocks) = block_range(command, view)?;
            bounded(blocks, limits.verify_bytes, view)?;
            IoCommand::Verify { slba, blocks }
        }
        opcode::COPY => {
            supported(view.copy)?;
            writable(view)?;
            copy(command, limits)?
        }
        opcode if ReservationCommand::is(opcode) => {
            supported(view.reservations)?;
            IoCommand::Reservation(ReservationCommand::parse(command, view.persistent)?)
        }
        _ => match ZoneCommand::parse(command, view) {
            Some(parsed) => IoCommand::Zone(parsed?),
            None => return Err(Status::INVALID_OPCODE.dnr()),
        },
    };
    transferable(command, io.data_len(view), io.direction() == Transfer::ToHost, limits)?;
    Ok(io)
}

/// The data are within MDTS, and the SGL covers them.
#[inline(always)]
fn transferable(command: &Command, len: u32, to_host: bool, limits: &IoLimits) -> Result<(), Status> {
    if len > limits.mdts_bytes {
        return Err(Status::INVALID_FIELD.dnr());
    }
    command.sgl.check_transfer(len, to_host)
}

/// Checks a command again whose namespace changed after [`check`].
///
/// # Errors
/// As [`check`]; nothing was done.
pub fn recheck(io: &IoCommand, view: &NamespaceView) -> Result<(), Status> {
    if io.changes_media() {
        writable(view)?;
    }
    io.blocks().map_or(Ok(()), |range| within(range.slba, range.blocks.into(), view))
}

/// A half of a fused pair: Compare and Write is the one pair that there is (FUSES). Where a zone can be written there is nothing yet
/// to compare with.
fn fusible(command: &Command, view: &NamespaceView) -> Result<(), Status> {
    match (command.fuse, command.opcode) {
        (Fuse::First, opcode::COMPARE) | (Fuse::Second, opcode::WRITE) if view.compare && view.zone_shift.is_none() => {
            Ok(())
        }
        _ => Err(Status::INVALID_FIELD.dnr()),
    }
}

/// Whether the checked halves of a fused pair belong together.
///
/// # Errors
/// Invalid Field, for both, when they are not about the same blocks.
pub fn check_pair(first: &IoCommand, second: &IoCommand) -> Result<(), Status> {
    if first.blocks() == second.blocks() { Ok(()) } else { Err(Status::INVALID_FIELD.dnr()) }
}

/// Copy, apart from its ranges. Descriptor format 0 within one namespace is all there is; directives, tag checks and
/// protection information are not.
fn copy(command: &Command, limits: &IoLimits) -> Result<IoCommand, Status> {
    let [nr, ..] = command.cdw12.to_le_bytes();
    if command.cdw12 & (COPY_DESFMT | COPY_PRINFOR | DTYPE | COPY_PRINFOW) != 0 {
        return Err(Status::INVALID_FIELD.dnr());
    }
    let ranges = u16::from(nr) + 1;
    if ranges > limits.copy_ranges {
        return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr());
    }
    let slba = u64::from(command.cdw10) | u64::from(command.cdw11) << 32;
    Ok(IoCommand::Copy { slba, ranges, fua: command.cdw12 & FUA != 0 })
}

/// A command that moves no data has a limit of its own; 0 is none.
fn bounded(blocks: u32, limit: u32, view: &NamespaceView) -> Result<(), Status> {
    if limit != 0 && blocks > limit >> view.block_shift {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(())
}

/// The answer to a command whose NSID names no namespace of this controller, the broadcast value included (VWC says
/// that Flush does not take it).
#[must_use]
pub const fn no_namespace() -> Status {
    Status::INVALID_NAMESPACE.dnr()
}

/// Byte of the command that an error log entry should point at, from what [`check`] answered.
#[must_use]
pub fn error_location(status: Status) -> u16 {
    match status.code() {
        code if code == Status::INVALID_OPCODE.code() => 0,
        code if code == Status::INVALID_NAMESPACE.code() => 4,
        code if code == Status::NAMESPACE_WRITE_PROTECTED.code() => 4,
        code if code == Status::SGL_TYPE_INVALID.code() => 39,
        code if code == Status::SGL_OFFSET_INVALID.code() => 24,
        code if code == Status::DATA_SGL_LENGTH_INVALID.code() => 32,
        code if code == Status::LBA_OUT_OF_RANGE.code() => 40,
        code if (Status::ZONE_BOUNDARY_ERROR.code()..=Status::INVALID_ZONE_STATE_TRANSITION.code()).contains(&code) => {
            40
        }
        code if code == Status::INVALID_FIELD.code() => 48,
        _ => 0xffff,
    }
}

/// SLBA and NLB of a Read, Write, Compare, Verify or Write Zeroes, inside the namespace.
#[inline(always)]
fn block_range(command: &Command, view: &NamespaceView) -> Result<(u64, u32), Status> {
    let slba = u64::from(command.cdw10) | u64::from(command.cdw11) << 32;
    let blocks = (command.cdw12 & NLB) + 1;
    within(slba, u64::from(blocks), view)?;
    Ok((slba, blocks))
}

#[inline(always)]
fn within(slba: u64, blocks: u64, view: &NamespaceView) -> Result<(), Status> {
    if blocks <= view.blocks && slba <= view.blocks - blocks { Ok(()) } else { Err(Status::LBA_OUT_OF_RANGE.dnr()) }
}

#[inline(always)]
fn writable(view: &NamespaceView) -> Result<(), Status> {
    if view.read_only {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.dnr());
    }
    Ok(())
}

#[inline]
fn supported(flag: bool) -> Result<(), Status> {
    if !flag {
        return Err(Status::INVALID_OPCODE.dnr());
    }
    Ok(())
}

// Dword 12 of Read, Write, Compare, Verify, Write Zeroes.
const NLB: u32 = 0xffff;
const DTYPE: u32 = 0xf << 20;
const NSZ: u32 = 1 << 23;
const DEAC: u32 = 1 << 25;
const FUA: u32 = 1 << 30;

// Dword 12 of Copy.
const COPY_DESFMT: u32 = 0xf << 8;
const COPY_PRINFOR: u32 = 0xf << 12;
const COPY_PRINFOW: u32 = 0xf << 26;

// Dword 11 of Dataset Management.
const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;

/// Opcodes whose support does not depend on the namespace.
pub(crate) const ALWAYS: [Opcode; 3] = [opcode::FLUSH, opcode::WRITE, opcode::READ];
