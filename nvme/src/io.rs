//! I/O commands: checked against a published view of their namespace, with no registry, no lock, no allocation and no
//! division.
//!
//! [`check`] turns a [`Command`] into an [`IoCommand`] that cannot reach outside the namespace, is within MDTS, and
//! whose SGL covers its data. What remains for the transport: resolve a last-segment SGL and compare its sum with
//! [`IoCommand::data_len`], and give the data of a Dataset Management command to [`parse_ranges`]. (NVM Command Set
//! 1.x.)

use crate::command::{Command, Fuse, Opcode, Transfer};
use crate::status::Status;

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
    /// Compare is supported.
    pub compare: bool,
    /// Write Zeroes is supported.
    pub write_zeroes: bool,
    /// Dataset Management with Attribute Deallocate is supported.
    pub deallocate: bool,
}

/// Limits of the controller that apply to each I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLimits {
    /// Maximum data transfer size (MDTS) in bytes.
    pub mdts_bytes: u32,
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
}

impl IoCommand {
    /// Bytes that this command transfers.
    #[must_use]
    pub fn data_len(&self, view: &NamespaceView) -> u32 {
        match *self {
            Self::Read { blocks, .. } | Self::Write { blocks, .. } | Self::Compare { blocks, .. } => {
                blocks << view.block_shift
            }
            Self::Deallocate { ranges } => u32::from(ranges) * RANGE_LEN,
            Self::WriteZeroes { .. } | Self::Flush | Self::DsmHint => 0,
        }
    }

    /// Which way the data go: never [`Transfer::Both`].
    #[must_use]
    pub fn direction(&self) -> Transfer {
        match self {
            Self::Read { .. } => Transfer::ToHost,
            Self::Write { .. } | Self::Compare { .. } | Self::Deallocate { .. } => Transfer::FromHost,
            Self::WriteZeroes { .. } | Self::Flush | Self::DsmHint => Transfer::None,
        }
    }
}

/// Checks an I/O command against its namespace. `view` is the one that `command.nsid` names; where there is none, the
/// answer is [`no_namespace`].
///
/// # Errors
/// The status to answer with; nothing was done.
pub fn check(command: &Command, view: &NamespaceView, limits: &IoLimits) -> Result<IoCommand, Status> {
    if command.fuse != Fuse::Normal {
        // FUSES is zero: no fused pair is supported, and each half is refused on its own.
        return Err(Status::INVALID_FIELD.dnr());
    }
    if command.nsid != view.nsid {
        return Err(no_namespace());
    }
    let io = match command.opcode {
        opcode::READ => {
            let (slba, blocks) = block_range(command, view)?;
            let fua = command.cdw12 & FUA != 0;
            IoCommand::Read { slba, blocks, fua }
        }
        opcode::WRITE => {
            writable(view)?;
            if command.cdw12 & DTYPE != 0 {
                // No directive is supported (OACS bit 5 is clear).
                return Err(Status::INVALID_FIELD.dnr());
            }
            let (slba, blocks) = block_range(command, view)?;
            let fua = command.cdw12 & FUA != 0;
            IoCommand::Write { slba, blocks, fua }
        }
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
        _ => return Err(Status::INVALID_OPCODE.dnr()),
    };
    let len = io.data_len(view);
    if len > limits.mdts_bytes {
        return Err(Status::INVALID_FIELD.dnr());
    }
    command.sgl.check_transfer(len, io.direction() == Transfer::ToHost)?;
    Ok(io)
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
        code if code == Status::INVALID_FIELD.code() => 48,
        _ => 0xffff,
    }
}

/// One range of a Dataset Management command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsmRange {
    /// Starting LBA.
    pub slba: u64,
    /// Length in logical blocks; zero is legal and means nothing to do.
    pub blocks: u32,
}

/// The ranges of a Dataset Management command, all checked; an iterator over the bytes, so that nothing is copied.
#[derive(Clone, Debug)]
pub struct Ranges<'a> {
    descriptors: core::slice::Iter<'a, [u8; 16]>,
}

impl Iterator for Ranges<'_> {
    type Item = DsmRange;

    fn next(&mut self) -> Option<DsmRange> {
        self.descriptors.next().map(parse_range)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.descriptors.size_hint()
    }
}

impl ExactSizeIterator for Ranges<'_> {}

/// Checks the first `count` range descriptors in `bytes` against the namespace.
///
/// # Errors
/// Data SGL Length Invalid when the bytes are too few, LBA Out of Range when any range reaches outside (then none is
/// done).
pub fn parse_ranges<'a>(bytes: &'a [u8], count: u16, view: &NamespaceView) -> Result<Ranges<'a>, Status> {
    let (descriptors, _) = bytes.as_chunks::<16>();
    let descriptors = descriptors.get(..usize::from(count)).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
    for range in descriptors.iter().map(parse_range) {
        within(range.slba, u64::from(range.blocks), view)?;
    }
    Ok(Ranges { descriptors: descriptors.iter() })
}

fn parse_range(bytes: &[u8; 16]) -> DsmRange {
    let [_, _, _, _, l0, l1, l2, l3, s0, s1, s2, s3, s4, s5, s6, s7] = *bytes;
    DsmRange {
        slba: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        blocks: u32::from_le_bytes([l0, l1, l2, l3]),
    }
}

/// SLBA and NLB of a Read, Write, Compare or Write Zeroes, inside the namespace.
fn block_range(command: &Command, view: &NamespaceView) -> Result<(u64, u32), Status> {
    let slba = u64::from(command.cdw10) | u64::from(command.cdw11) << 32;
    let blocks = (command.cdw12 & NLB) + 1;
    within(slba, u64::from(blocks), view)?;
    Ok((slba, blocks))
}

fn within(slba: u64, blocks: u64, view: &NamespaceView) -> Result<(), Status> {
    if blocks <= view.blocks && slba <= view.blocks - blocks { Ok(()) } else { Err(Status::LBA_OUT_OF_RANGE.dnr()) }
}

fn writable(view: &NamespaceView) -> Result<(), Status> {
    if view.read_only {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.dnr());
    }
    Ok(())
}

fn supported(flag: bool) -> Result<(), Status> {
    if !flag {
        return Err(Status::INVALID_OPCODE.dnr());
    }
    Ok(())
}

const RANGE_LEN: u32 = 16;

// Dword 12 of Read, Write, Compare, Write Zeroes.
const NLB: u32 = 0xffff;
const DTYPE: u32 = 0xf << 20;
const NSZ: u32 = 1 << 23;
const DEAC: u32 = 1 << 25;
const FUA: u32 = 1 << 30;

// Dword 11 of Dataset Management.
const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;

/// Opcodes whose support does not depend on the namespace.
pub(crate) const ALWAYS: [Opcode; 3] = [opcode::FLUSH, opcode::WRITE, opcode::READ];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::{command, sqe};
    use proptest::prelude::*;

    const VIEW: NamespaceView = NamespaceView {
        nsid: 1,
        blocks: 1000,
        block_shift: 9,
        read_only: false,
        compare: true,
        write_zeroes: true,
        deallocate: true,
    };
    const LIMITS: IoLimits = IoLimits { mdts_bytes: 128 * 512 };

    fn run(opcode: u8, data: u32, cdws: [u32; 6]) -> Result<IoCommand, u16> {
        check(&command(opcode, 1, data, cdws), &VIEW, &LIMITS).map_err(|status| {
            assert!(status.is_dnr());
            status.code()
        })
    }

    #[test]
    fn read_and_write_carry_real_counts_and_fua() {
        assert_eq!(run(2, 4096, [16, 0, 7, 0, 0, 0]), Ok(IoCommand::Read { slba: 16, blocks: 8, fua: false }));
        assert_eq!(run(1, 512, [999, 0, 1 << 30, 0, 0, 0]), Ok(IoCommand::Write { slba: 999, blocks: 1, fua: true }));
    }

    #[test]
    fn range_is_checked_on_both_sides_of_the_end() {
        assert!(run(2, 512, [999, 0, 0, 0, 0, 0]).is_ok());
        assert_eq!(run(2, 512, [1000, 0, 0, 0, 0, 0]), Err(0x80));
        assert_eq!(run(2, 1024, [999, 0, 1, 0, 0, 0]), Err(0x80));
        assert_eq!(run(2, 512, [u32::MAX, u32::MAX, 0, 0, 0, 0]), Err(0x80), "slba + nlb wraps");
        assert_eq!(run(8, 0, [0, 0, 1000, 0, 0, 0]), Err(0x80));
    }

    #[test]
    fn mdts_is_checked_on_both_sides() {
        assert!(run(2, 128 * 512, [0, 0, 127, 0, 0, 0]).is_ok());
        assert_eq!(run(2, 129 * 512, [0, 0, 128, 0, 0, 0]), Err(0x02));
        // Write Zeroes transfers nothing, so MDTS does not bound it.
        assert!(run(8, 0, [0, 0, 999, 0, 0, 0]).is_ok());
    }

    #[test]
    fn largest_nlb_of_4k_blocks_does_not_overflow() {
        let view = NamespaceView { blocks: 1 << 40, block_shift: 12, ..VIEW };
        let limits = IoLimits { mdts_bytes: u32::MAX };
        let read = command(2, 1, 0xff_ffff, [0, 0, 0xffff, 0, 0, 0]);
        // 256 MiB cannot be described by one keyed descriptor of 24 bits.
        assert_eq!(check(&read, &view, &limits), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
        assert_eq!(check(&read, &view, &LIMITS), Err(Status::INVALID_FIELD.dnr()));
    }

    #[test]
    fn sgl_shorter_than_the_data_is_refused() {
        assert_eq!(run(1, 4095, [0, 0, 7, 0, 0, 0]), Err(0x0f));
        assert!(run(1, 4096, [0, 0, 7, 0, 0, 0]).is_ok());
        assert!(run(1, 8192, [0, 0, 7, 0, 0, 0]).is_ok());
        assert_eq!(run(9, 15, [0, 4, 0, 0, 0, 0]), Err(0x0f));
    }

    #[test]
    fn in_capsule_read_is_refused() {
        let mut sgl = [0; 16];
        sgl[9] = 2;
        sgl[15] = 1;
        let read = Command::parse(&sqe(2, 1, sgl, [0; 6])).unwrap();
        assert_eq!(check(&read, &VIEW, &LIMITS), Err(Status::SGL_TYPE_INVALID.dnr()));
        let write = Command::parse(&sqe(1, 1, sgl, [0; 6])).unwrap();
        assert!(check(&write, &VIEW, &LIMITS).is_ok());
    }

    #[test]
    fn fused_halves_are_refused() {
        for flags in [0x41, 0x42] {
            let mut bytes = sqe(5, 1, [0; 16], [0; 6]);
            bytes[1] = flags;
            let half = Command::parse(&bytes).unwrap();
            assert_eq!(check(&half, &VIEW, &LIMITS), Err(Status::INVALID_FIELD.dnr()));
        }
    }

    #[test]
    fn read_only_refuses_all_writes_and_lets_flush_and_hints_through() {
        let view = NamespaceView { read_only: true, ..VIEW };
        let code = |opcode, data, cdw11| {
            check(&command(opcode, 1, data, [0, cdw11, 0, 0, 0, 0]), &view, &LIMITS).map_err(Status::code)
        };
        assert_eq!(code(1, 512, 0), Err(0x20));
        assert_eq!(code(8, 0, 0), Err(0x20));
        assert_eq!(code(9, 16, 4), Err(0x20));
        assert_eq!(code(9, 16, 3), Ok(IoCommand::DsmHint));
        assert_eq!(code(0, 0, 0), Ok(IoCommand::Flush));
        assert!(code(2, 512, 0).is_ok());
        assert!(code(5, 512, 0).is_ok());
    }

    #[test]
    fn what_the_namespace_lacks_is_an_invalid_opcode() {
        let view = NamespaceView { compare: false, write_zeroes: false, deallocate: false, ..VIEW };
        for opcode in [4, 5, 8, 9, 0x0c, 0x0d, 0x11, 0x19, 0x80] {
            let refused = check(&command(opcode, 1, 512, [0, 4, 0, 0, 0, 0]), &view, &LIMITS);
            assert_eq!(refused, Err(Status::INVALID_OPCODE.dnr()), "{opcode:x}");
        }
    }

    #[test]
    fn broadcast_and_foreign_nsids_are_refused() {
        for nsid in [0, 2, 0xffff_ffff] {
            assert_eq!(check(&command(0, nsid, 0, [0; 6]), &VIEW, &LIMITS), Err(Status::INVALID_NAMESPACE.dnr()));
        }
    }

    #[test]
    fn write_zeroes_carries_its_wish_and_refuses_the_whole_namespace() {
        assert_eq!(
            run(8, 0, [4, 0, 1 << 30 | 1 << 25 | 1, 0, 0, 0]),
            Ok(IoCommand::WriteZeroes { slba: 4, blocks: 2, deallocate: true, fua: true })
        );
        assert_eq!(run(8, 0, [0, 0, 1 << 23, 0, 0, 0]), Err(0x02));
    }

    #[test]
    fn directives_are_refused() {
        assert_eq!(run(1, 512, [0, 0, 1 << 20, 0, 0, 0]), Err(0x02));
    }

    #[test]
    fn ranges_are_all_checked_before_any_is_given() {
        let mut bytes = [0u8; 48];
        bytes[4] = 8;
        bytes[8] = 10;
        bytes[20..24].copy_from_slice(&1000u32.to_le_bytes());
        let ranges: Vec<_> = parse_ranges(&bytes, 3, &VIEW).unwrap().collect();
        let expect = |slba, blocks| DsmRange { slba, blocks };
        assert_eq!(ranges, [expect(10, 8), expect(0, 1000), expect(0, 0)]);
        bytes[24] = 1;
        let code = |r: Result<Ranges<'_>, Status>| r.map(|_| ()).map_err(Status::code);
        assert_eq!(code(parse_ranges(&bytes, 3, &VIEW)), Err(0x80));
        assert_eq!(code(parse_ranges(&bytes, 1, &VIEW)), Ok(()));
        assert_eq!(code(parse_ranges(&bytes[..47], 3, &VIEW)), Err(0x0f));
        assert_eq!(code(parse_ranges(&bytes, 4, &VIEW)), Err(0x0f));
    }

    proptest! {
        #[test]
        fn what_passes_lies_inside_the_namespace(
            bytes in proptest::collection::vec(any::<u8>(), 64),
            opcode in prop_oneof![Just(0u8), Just(1), Just(2), Just(5), Just(8), Just(9), any::<u8>()],
            low in any::<bool>(),
        ) {
            let mut bytes: [u8; 64] = bytes.try_into().unwrap();
            bytes[0] = opcode;
            bytes[1] = 0x40;
            bytes[39] = 0x40;
            bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
            if low {
                bytes[42..48].fill(0);
                bytes[50] = 0;
            }
            if let Ok(command) = Command::parse(&bytes)
                && let Ok(io) = check(&command, &VIEW, &LIMITS)
            {
                prop_assert!(io.data_len(&VIEW) <= LIMITS.mdts_bytes);
                if let IoCommand::Read { slba, blocks, .. } | IoCommand::Write { slba, blocks, .. } = io {
                    prop_assert!(slba.checked_add(u64::from(blocks)).unwrap() <= VIEW.blocks);
                }
            }
        }
    }
}
