//! What one I/O command may ask for at most: what Identify tells hosts, and what [`super::check`] enforces.

use super::NamespaceView;

/// Limits of a controller that apply to each I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLimits {
    /// Maximum data transfer size (MDTS) in bytes: a power of two, at least 4096.
    pub mdts_bytes: u32,
    /// Bytes of one Verify (VSL): a power of two, at least 4096; 0 is no limit.
    pub verify_bytes: u32,
    /// Bytes of one Write Zeroes (WZSL): a power of two, at least 4096; 0 is no limit.
    pub write_zeroes_bytes: u32,
    /// Ranges of one Dataset Management command (DMRL); 0 is the format's own limit of 256.
    pub dsm_ranges: u8,
    /// Blocks of one Dataset Management range (DMRSL); 0 is no limit.
    pub dsm_range_blocks: u32,
    /// Blocks of all ranges of one Dataset Management command (DMSL); 0 is no limit.
    pub dsm_blocks: u64,
    /// Bytes of one source range of Copy (MSSRL is that in blocks, at most 65535).
    pub copy_range_bytes: u32,
    /// Bytes of all source ranges of one Copy (MCL is that in blocks).
    pub copy_bytes: u32,
    /// Source ranges of one Copy, 1 to 256, a real count (MSRC is one less).
    pub copy_ranges: u16,
}

impl Default for IoLimits {
    /// A command works on no more than 64 MiB, so that none keeps the others waiting for long; ranges that are given back
    /// move no data and are not limited.
    fn default() -> Self {
        Self {
            mdts_bytes: 1 << 20,
            verify_bytes: 1 << 20,
            write_zeroes_bytes: 64 << 20,
            dsm_ranges: 0,
            dsm_range_blocks: 0,
            dsm_blocks: 0,
            copy_range_bytes: 16 << 20,
            copy_bytes: 64 << 20,
            copy_ranges: 128,
        }
    }
}

impl IoLimits {
    /// The rule that a limit breaks, if one does.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let unit = |bytes: u32| bytes == 0 || (bytes.is_power_of_two() && bytes >= 4096);
        let rules = [
            (self.mdts_bytes != 0 && unit(self.mdts_bytes), "mdts_bytes: a power of two, at least 4096"),
            (unit(self.verify_bytes), "verify_bytes: 0, or a power of two from 4096"),
            (unit(self.write_zeroes_bytes), "write_zeroes_bytes: 0, or a power of two from 4096"),
            (self.copy_range_bytes >= 4096, "copy_range_bytes: at least 4096"),
            (self.copy_bytes >= self.copy_range_bytes, "copy_bytes: at least copy_range_bytes"),
            ((1..=256).contains(&self.copy_ranges), "copy_ranges: 1 to 256"),
        ];
        rules.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err(rule))
    }

    /// MSSRL of a namespace.
    pub(crate) fn copy_range_blocks(&self, view: &NamespaceView) -> u16 {
        u16::try_from(self.copy_range_bytes >> view.block_shift).unwrap_or(u16::MAX)
    }

    /// MCL of a namespace.
    pub(crate) fn copy_blocks(&self, view: &NamespaceView) -> u32 {
        self.copy_bytes >> view.block_shift
    }
}
