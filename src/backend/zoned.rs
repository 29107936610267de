//! The zones of a backend, as it and who serves it see them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme::zns::Zones;

/// Zones of a backend. Who submits asks [`Zones`] before each write, or change of a zone's state, and sees to it that a zone has one such
/// operation at a time. A write's end is told to them by who submitted it. A backend that has done what [`super::ZoneWork`] asks
/// has told them itself when it answers success: [`Zones::end_action`], or [`Zones::learn`] (or [`Zones::trust`], where there is
/// nobody to ask). Of an action that failed it may have told them too, and what it learnt since.
#[derive(Debug)]
pub struct Zoned {
    zones: Mutex<Zones>,
    block_size: u32,
    zone_bytes_shift: u32,
    run: u32,
}

impl Zoned {
    /// In blocks of this many bytes (a power of two).
    pub fn new(zones: Zones, block_size: u32) -> Self {
        let zone_bytes_shift = u32::from(zones.zone_shift()) + block_size.trailing_zeros();
        Self { zones: Mutex::new(zones), block_size, zone_bytes_shift, run: 1 }
    }

    /// For a backend that is quicker with zones that lie side by side: it takes so many at a time.
    #[must_use]
    pub fn in_runs_of(self, run: u32) -> Self {
        Self { run: run.max(1), ..self }
    }

    /// Most zones that one [`super::ZoneWork::Act`] may be about.
    pub fn run(&self) -> u32 {
        self.run
    }

    /// Bytes from one zone to the next.
    pub fn zone_size(&self) -> u64 {
        1 << self.zone_bytes_shift
    }

    /// Bytes of the blocks that zones are counted in: a namespace's LBA.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// The zone that a byte lies in.
    pub fn zone_at(&self, offset: u64) -> u32 {
        u32::try_from(offset >> self.zone_bytes_shift).unwrap_or(u32::MAX)
    }

    /// The zones, for as long as it takes to look or to note something.
    pub fn zones(&self) -> MutexGuard<'_, Zones> {
        self.zones.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
