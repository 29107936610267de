//! Registered memory: the arenas themselves. Payloads are copied between them and packets, once.

use crate::roce::{Memory, RegionId, Span};

/// All regions of one endpoint.
#[derive(Debug, Default)]
pub(super) struct Regions {
    slots: Vec<Option<Region>>,
    /// Bytes copied out of and into regions, for tests to look at.
    #[cfg(test)]
    pub(super) copied: [std::sync::atomic::AtomicU64; 2],
}

#[derive(Debug)]
struct Region {
    base: *mut u8,
    len: usize,
}

// SAFETY: a region is plain memory without thread affinity; who registered it promised exclusive use by its owner and
// posted work requests, whichever thread the endpoint is on.
unsafe impl Send for Region {}

impl Regions {
    /// Adds a region.
    ///
    /// # Safety
    /// `base..base + len` is mapped, readable and writable until [`Regions::remove`] or the drop of `self`, and nothing but
    /// posted work requests and their owner touches it.
    pub(super) unsafe fn add(&mut self, base: *mut u8, len: usize) -> RegionId {
        let region = Some(Region { base, len });
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or(self.slots.len());
        match self.slots.get_mut(index) {
            Some(slot) => *slot = region,
            None => self.slots.push(region),
        }
        RegionId(index as u32)
    }

    pub(super) fn remove(&mut self, id: RegionId) {
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            *slot = None;
        }
    }

    /// The first byte of a span that holds `len` bytes. None when it does not lie within its region.
    fn place(&self, span: Span, len: usize) -> Option<*mut u8> {
        let region = self.slots.get(span.region.0 as usize)?.as_ref()?;
        let offset = usize::try_from(span.offset).ok()?;
        if len > region.len || offset > region.len - len {
            return None;
        }
        // SAFETY: `offset` is within the region, which is one mapping.
        Some(unsafe { region.base.add(offset) })
    }
}

impl Memory for Regions {
    fn read(&self, span: Span, out: &mut [u8]) -> bool {
        let Some(place) = self.place(span, out.len()) else {
            return false;
        };
        #[cfg(test)]
        self.copied[0].fetch_add(out.len() as u64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: `place` gave `out.len()` bytes that are mapped (promise of `add`); `out` is a packet buffer of this
        // endpoint and no part of a region.
        unsafe { std::ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) };
        true
    }

    fn write(&mut self, span: Span, data: &[u8]) -> bool {
        let Some(place) = self.place(span, data.len()) else {
            return false;
        };
        #[cfg(test)]
        self.copied[1].fetch_add(data.len() as u64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: as in `read`; a work request or a key names these bytes, so nobody else reads or writes them now.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place, data.len()) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_within_the_region() {
        let mut bytes = vec![0_u8; 16];
        let mut regions = Regions::default();
        // SAFETY: `bytes` outlives `regions` and is not touched while it is registered.
        let region = unsafe { regions.add(bytes.as_mut_ptr(), 16) };
        assert!(regions.write(Span { region, offset: 12 }, &[1, 2, 3, 4]));
        assert!(!regions.write(Span { region, offset: 13 }, &[1, 2, 3, 4]));
        assert!(!regions.write(Span { region, offset: u64::MAX }, &[1]));
        assert!(!regions.write(Span { region, offset: 0 }, &[0; 17]));
        let mut out = [0; 2];
        assert!(regions.read(Span { region, offset: 14 }, &mut out));
        assert_eq!(out, [3, 4]);
        assert!(!regions.read(Span { region: RegionId(1), offset: 0 }, &mut out));
        regions.remove(region);
        assert!(!regions.read(Span { region, offset: 14 }, &mut out));
    }
}
