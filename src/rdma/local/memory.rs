//! Registered memory of one endpoint, and the copies between two of them: the unsafe island of this provider.
//!
//! Why the copies are sound: a region's registration promised (the contract of [`Endpoint::register`](crate::rdma::Endpoint))
//! that its bytes are mapped, readable and writable until it is withdrawn, and that nothing but posted work requests and
//! their owner touches them meanwhile. Withdrawing takes the lock of the endpoint that the region belongs to, and every copy
//! is made while the locks of both endpoints are held: so no copy runs on memory whose registration has ended. Every address is
//! derived from the pointer that was registered, after key, permission and bounds were checked.

use crate::rdma::{Access, Mr, Sge};

/// Elements of a receive.
pub(super) const MAX_SGE: usize = 4;

/// Bytes that a SEND may carry inline.
pub(super) const MAX_INLINE: usize = 64;

const INDEX_SHIFT: u32 = 8;
/// Set in remote keys only, so that one is never taken for the other.
const REMOTE: u32 = 0x8000_0000;

#[derive(Debug)]
struct Region {
    /// Local key; the remote key is the same with [`REMOTE`].
    key: u32,
    base: *mut u8,
    len: usize,
    access: Access,
    /// A peer's SEND with invalidate ended its remote key.
    invalidated: bool,
}

/// The registrations of one endpoint.
#[derive(Debug)]
pub(super) struct Regions {
    slots: Vec<Option<Region>>,
    /// Low byte of the next key: a withdrawn key is not the next one's.
    generation: u8,
}

// SAFETY: the base pointers are used only in `copy` and its kin below, under the lock that holds these regions; the memory
// behind them has no thread affinity (contract of registration).
unsafe impl Send for Regions {}

/// What an access is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Our own work request.
    Local,
    /// Our own RDMA READ, where the device wants its sink open to remote writes.
    RemoteWriteSink,
}

impl Regions {
    pub(super) fn new(seed: u64) -> Self {
        Self { slots: Vec::new(), generation: (seed.wrapping_mul(37) & 0xff) as u8 }
    }

    /// Whoever calls this upholds the contract of registration until `remove`.
    pub(super) fn insert(&mut self, base: *mut u8, len: usize, access: Access) -> Mr {
        self.generation = self.generation.wrapping_add(1);
        let index = match self.slots.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let key = (index as u32 + 1) << INDEX_SHIFT | u32::from(self.generation);
        self.slots[index] = Some(Region { key, base, len, access, invalidated: false });
        Mr { id: key, lkey: key, rkey: key | REMOTE }
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, key: u32) -> bool {
        match self.slot(key) {
            Some(slot) => slot.take().is_some(),
            None => false,
        }
    }

    /// Ends a remote key; `false` if there is none such.
    pub(super) fn invalidate(&mut self, rkey: u32) -> bool {
        match self.slot(rkey & !REMOTE) {
            Some(Some(region)) if rkey & REMOTE != 0 && region.access == Access::Remote && !region.invalidated => {
                region.invalidated = true;
                true
            }
            _ => false,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    fn slot(&mut self, key: u32) -> Option<&mut Option<Region>> {
        let index = (key >> INDEX_SHIFT).checked_sub(1)? as usize;
        self.slots.get_mut(index).filter(|slot| slot.as_ref().is_some_and(|region| region.key == key))
    }

    fn region(&self, key: u32) -> Option<&Region> {
        let index = (key >> INDEX_SHIFT).checked_sub(1)? as usize;
        self.slots.get(index)?.as_ref().filter(|region| region.key == key)
    }

    /// Our own memory for a work request.
    pub(super) fn local(&self, sge: &Sge, purpose: Use) -> Option<Span> {
        if sge.len == 0 {
            return Some(Span::EMPTY);
        }
        let region = self.region(sge.lkey)?;
        if purpose == Use::RemoteWriteSink && region.access == Access::Local {
            return None;
        }
        region.span(sge.addr, sge.len)
    }

    /// Our memory for a peer.
    pub(super) fn remote(&self, addr: u64, len: u32, rkey: u32) -> Option<Span> {
        if len == 0 {
            return Some(Span::EMPTY);
        }
        let region = self.region(rkey & !REMOTE)?;
        let open = rkey & REMOTE != 0 && region.access == Access::Remote && !region.invalidated;
        if open { region.span(addr, len) } else { None }
    }
}

impl Region {
    fn span(&self, addr: u64, len: u32) -> Option<Span> {
        let offset = usize::try_from(addr.checked_sub(self.base as u64)?).ok()?;
        let len = len as usize;
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: offset <= len of the region, which is one allocation by the contract of registration.
        Some(Span { base: unsafe { self.base.add(offset) }, len })
    }
}

/// A checked range of registered memory. Only valid while the lock of its endpoint is held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    base: *mut u8,
    len: usize,
}

impl Span {
    const EMPTY: Self = Self { base: std::ptr::dangling_mut(), len: 0 };

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The first `len` bytes of it.
    pub(super) fn head(self, len: usize) -> Self {
        Self { base: self.base, len: len.min(self.len) }
    }

    /// What follows the first `len` bytes.
    pub(super) fn tail(self, len: usize) -> Self {
        let len = len.min(self.len);
        // SAFETY: len <= self.len, so this stays inside the span or one past its end.
        Self { base: unsafe { self.base.add(len) }, len: self.len - len }
    }
}

/// Copies as many bytes as both have; how many. The locks of both endpoints are held.
pub(super) fn copy(from: Span, to: Span) -> usize {
    let len = from.len.min(to.len);
    // SAFETY: both spans lie in registered memory, checked under the locks that are still held (see the module's doc); `copy`
    // allows that they overlap, which two work requests on one region may ask for.
    unsafe { std::ptr::copy(from.base, to.base, len) };
    len
}

/// Copies out what a work request carries inline.
pub(super) fn read(from: Span, to: &mut [u8]) -> usize {
    let len = from.len.min(to.len());
    // SAFETY: as in `copy`; `to` is a plain exclusive slice.
    unsafe { std::ptr::copy_nonoverlapping(from.base, to.as_mut_ptr(), len) };
    len
}

/// Copies inline bytes in; how many.
pub(super) fn write(from: &[u8], to: Span) -> usize {
    let len = from.len().min(to.len);
    // SAFETY: as in `copy`; `from` is a plain slice.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.base, len) };
    len
}
