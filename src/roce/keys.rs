//! Memory keys: which bytes a local or remote key names, for what, and whether it still does.
//!
//! Every access to registered memory is checked here, in [`Keys::local`] and [`Keys::remote`], and becomes a [`Span`]:
//! bytes of one registered region. The [`Memory`] behind it only copies.
use super::{Lkey, Rkey};

/// A region that the driver registered: its index in the driver's own table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionId(pub u32);

/// Checked bytes of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The region.
    pub region: RegionId,
    /// The first byte, counted from the start of the region.
    pub offset: u64,
}

/// Registered memory. The driver copies, and checks bounds of its own against the region.
pub trait Memory {
    /// Copies `out.len()` bytes out of the region. False when they are not there any more.
    fn read(&self, span: Span, out: &mut [u8]) -> bool;

    /// Copies `data` into the region. False when the bytes are not there any more.
    fn write(&mut self, span: Span, data: &[u8]) -> bool;
}

/// What a key allows, as a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access(u8);

impl Access {
    /// Local reads only, which every key allows.
    pub const LOCAL_READ: Self = Self(0);
    /// Receives and the sinks of our own RDMA READs.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer's RDMA READ.
    pub const REMOTE_READ: Self = Self(2);
    /// The peer's RDMA WRITE.
    pub const REMOTE_WRITE: Self = Self(4);
    /// The peer may invalidate the key by a SEND.
    pub const REMOTE_INVALIDATE: Self = Self(8);

    /// Both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is in this set.
    #[must_use]
    pub const fn allows(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Why a key does not name those bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyError {
    /// No such key, or not any more.
    Unknown,
    /// The key does not allow this.
    Access,
    /// Outside of what was registered.
    Bounds,
}

/// All keys of one engine.
#[derive(Debug, Default)]
pub struct Keys {
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// The tag of a slot's first key.
    seed: u8,
}

#[derive(Debug)]
struct Slot {
    /// The low byte of the key, changed whenever the slot names something else, so that a stale key is refused.
    tag: u8,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Free,
    /// Allocated, names nothing.
    Invalid,
    Valid(Registration),
}

/// What a key names.
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    /// The region.
    pub region: RegionId,
    /// Where in the region it starts.
    pub offset: u64,
    /// The virtual address of its first byte.
    pub va: u64,
    /// Its length.
    pub len: u64,
    /// What it allows.
    pub access: Access,
}

impl Keys {
    /// An empty table. Tags of keys start at `seed`, so that keys from before a restart do not fit.
    #[must_use]
    pub fn new(seed: u8) -> Self {
        Self { seed, ..Self::default() }
    }

    /// A key that names `registration`: the same number as local and as remote key. None when 2^24 keys exist.
    pub fn register(&mut self, registration: Registration) -> Option<(Lkey, Rkey)> {
        let state = State::Valid(registration);
        let index = if let Some(index) = self.free.pop() {
            let slot = self.slots.get_mut(index)?;
            slot.state = state;
            index
        } else {
            if self.slots.len() >= 1 << 24 {
                return None;
            }
            self.slots.push(Slot { tag: self.seed, state });
            self.slots.len() - 1
        };
        let key = self.key(index)?;
        Some((Lkey(key), Rkey(key)))
    }

    /// Lets a key that was registered, and perhaps invalidated since, name something else: a new key in the same slot, as a
    /// fast registration makes it. None when the slot is free.
    pub fn rebind(&mut self, old: Rkey, registration: Registration) -> Option<(Lkey, Rkey)> {
        let index = usize::try_from(old.0 >> 8).ok()?;
        let slot = self.slots.get_mut(index)?;
        if matches!(slot.state, State::Free) {
            return None;
        }
        slot.tag = slot.tag.wrapping_add(1);
        slot.state = State::Valid(registration);
        let key = self.key(index)?;
        Some((Lkey(key), Rkey(key)))
    }

    /// Ends a key for good.
    pub fn deregister(&mut self, key: Lkey) -> bool {
        let Some(index) = self.index(key.0) else {
            return false;
        };
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        slot.tag = slot.tag.wrapping_add(1);
        slot.state = State::Free;
        self.free.push(index);
        true
    }

    /// Ends what a key names, by ourselves. The slot stays for [`Keys::rebind`].
    pub fn invalidate(&mut self, key: Rkey) -> Result<(), KeyError> {
        let index = self.index(key.0).ok_or(KeyError::Unknown)?;
        let slot = self.slots.get_mut(index).ok_or(KeyError::Unknown)?;
        slot.state = State::Invalid;
        Ok(())
    }

    /// Ends what a key names, on a peer's SEND with invalidate.
    pub fn invalidate_remotely(&mut self, key: Rkey) -> Result<(), KeyError> {
        let registration = self.registration(key.0)?;
        if !registration.access.allows(Access::REMOTE_INVALIDATE) {
            return Err(KeyError::Access);
        }
        self.invalidate(key)
    }

    /// Bytes of our own work request. Sinks need `access` [`Access::LOCAL_WRITE`].
    pub fn local(&self, key: Lkey, va: u64, len: u32, access: Access) -> Result<Span, KeyError> {
        self.registration(key.0)?.span(va, len, access)
    }

    /// Bytes that a peer's request names.
    pub fn remote(&self, key: Rkey, va: u64, len: u32, access: Access) -> Result<Span, KeyError> {
        self.registration(key.0)?.span(va, len, access)
    }

    /// How many keys are registered or await a rebind.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn registration(&self, key: u32) -> Result<&Registration, KeyError> {
        let index = self.index(key).ok_or(KeyError::Unknown)?;
        match self.slots.get(index) {
            Some(Slot { state: State::Valid(registration), .. }) => Ok(registration),
            _ => Err(KeyError::Unknown),
        }
    }

    /// The slot of a key that is not stale.
    fn index(&self, key: u32) -> Option<usize> {
        let index = usize::try_from(key >> 8).ok()?;
        let slot = self.slots.get(index)?;
        (u32::from(slot.tag) == key & 0xff && !matches!(slot.state, State::Free)).then_some(index)
    }

    fn key(&self, index: usize) -> Option<u32> {
        Some(u32::try_from(index).ok()? << 8 | u32::from(self.slots.get(index)?.tag))
    }
}

impl Registration {
    /// The one range check for registered memory.
    fn span(&self, va: u64, len: u32, access: Access) -> Result<Span, KeyError> {
        if !self.access.allows(access) {
            return Err(KeyError::Access);
        }
        let at = va.checked_sub(self.va).ok_or(KeyError::Bounds)?;
        let len = u64::from(len);
        if len > self.len || at > self.len - len {
            return Err(KeyError::Bounds);
        }
        let offset = self.offset.checked_add(at).ok_or(KeyError::Bounds)?;
        Ok(Span { region: self.region, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(access: Access) -> Registration {
        Registration { region: RegionId(3), offset: 100, va: 0x1000, len: 64, access }
    }

    #[test]
    fn bounds_on_both_sides() {
        let mut keys = Keys::new(9);
        let (_, rkey) = keys.register(registration(Access::REMOTE_READ)).expect("room");
        let read = |va, len| keys.remote(rkey, va, len, Access::REMOTE_READ);
        assert_eq!(read(0x1000, 64), Ok(Span { region: RegionId(3), offset: 100 }));
        assert_eq!(read(0x103f, 1), Ok(Span { region: RegionId(3), offset: 163 }));
        assert_eq!(read(0x1040, 0), Ok(Span { region: RegionId(3), offset: 164 }));
        assert_eq!(read(0x1000, 65), Err(KeyError::Bounds));
        assert_eq!(read(0x1040, 1), Err(KeyError::Bounds));
        assert_eq!(read(0xfff, 1), Err(KeyError::Bounds));
        assert_eq!(read(u64::MAX, u32::MAX), Err(KeyError::Bounds));
        assert_eq!(read(0, u32::MAX), Err(KeyError::Bounds));
        assert_eq!(keys.remote(rkey, 0x1000, 1, Access::REMOTE_WRITE), Err(KeyError::Access));
        assert_eq!(keys.remote(Rkey(rkey.0 ^ 1), 0x1000, 1, Access::REMOTE_READ), Err(KeyError::Unknown));
        assert_eq!(keys.remote(Rkey(rkey.0 ^ 0x100), 0x1000, 1, Access::REMOTE_READ), Err(KeyError::Unknown));
    }

    #[test]
    fn a_stale_key_is_refused() {
        let mut keys = Keys::new(255);
        let access = Access::REMOTE_WRITE.union(Access::REMOTE_INVALIDATE);
        let (_, first) = keys.register(registration(access)).expect("room");
        assert_eq!(keys.invalidate_remotely(first), Ok(()));
        assert_eq!(keys.remote(first, 0x1000, 1, Access::REMOTE_WRITE), Err(KeyError::Unknown));
        assert_eq!(keys.invalidate_remotely(first), Err(KeyError::Unknown));
        let (lkey, second) = keys.rebind(first, registration(access)).expect("slot");
        assert_ne!(first, second);
        assert_eq!(keys.remote(first, 0x1000, 1, Access::REMOTE_WRITE), Err(KeyError::Unknown));
        assert!(keys.remote(second, 0x1000, 1, Access::REMOTE_WRITE).is_ok());
        assert!(keys.deregister(lkey));
        assert!(!keys.deregister(lkey));
        assert!(keys.rebind(second, registration(access)).is_none());
        assert!(keys.is_empty());
        let (_, third) = keys.register(registration(access)).expect("room");
        assert_ne!(third, second);
    }

    #[test]
    fn a_key_without_the_right_is_not_invalidated_by_a_peer() {
        let mut keys = Keys::new(0);
        let (_, rkey) = keys.register(registration(Access::REMOTE_READ)).expect("room");
        assert_eq!(keys.invalidate_remotely(rkey), Err(KeyError::Access));
        assert!(keys.remote(rkey, 0x1000, 64, Access::REMOTE_READ).is_ok());
    }
}
