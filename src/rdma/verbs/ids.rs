//! Ids of librdmacm and the channel that their events come over.
//!
//! Every `rdma_cm_id` has exactly one owner, an [`Id`], and is destroyed exactly once, by that owner's drop. An `Id` moves
//! from the CM thread (listeners, requests, resolves) to a reactor (with its queue pair) and is dropped there; the drop
//! only puts it on the channel's list, and the CM thread destroys it: destroying waits for events that were read but not
//! acknowledged, and for the kernel's CM, and neither may hold up a reactor. When the CM is gone, nobody reads events any
//! more, and ids are destroyed on the spot.
//!
//! The context word of an id names what it is and its number ([`Tag`]), so an event never leads to memory of ours.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use rdma_sys as ib;
use tracing::{debug, warn};

use super::device::{Device, NO_DEVICE_REMEDY};
use super::objects::set_nonblocking;
use super::sys;
use crate::rdma::{ConnId, DeviceId, ListenerId, RdmaError};

/// What an id is, in its context word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Listener(ListenerId),
    /// A connection; `active` = we connect.
    Conn {
        id: ConnId,
        active: bool,
    },
    /// See `device.rs`.
    Watch(DeviceId),
}

impl Tag {
    const KIND: u32 = 62;

    pub(super) fn to_word(self) -> u64 {
        match self {
            Self::Listener(id) => u64::from(id.0),
            Self::Watch(id) => 1 << Self::KIND | u64::from(id.0),
            Self::Conn { id, active } => (2 + u64::from(active)) << Self::KIND | id.0,
        }
    }

    pub(super) fn from_word(word: u64) -> Self {
        let number = word & ((1 << Self::KIND) - 1);
        match word >> Self::KIND {
            0 => Self::Listener(ListenerId(number as u32)),
            1 => Self::Watch(DeviceId(number as u32)),
            kind => Self::Conn { id: ConnId(number), active: kind == 3 },
        }
    }
}

/// librdmacm's event channel. Lives until the last id on it is destroyed.
pub(super) struct Channel {
    pub(super) raw: ptr::NonNull<ib::rdma_event_channel>,
    pub(super) wake: EventFd,
    /// Ids to destroy; `None` once the CM is gone.
    dropped: Mutex<Option<Vec<DroppedId>>>,
}

struct DroppedId {
    raw: RawId,
    /// Outlives the id on it.
    device: Option<Arc<Device>>,
}

// SAFETY: librdmacm's calls on a channel and its ids may be made from any thread; events are read by the CM thread only.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn open() -> Result<Self, RdmaError> {
        // SAFETY: returns a channel or null.
        let raw = ptr::NonNull::new(unsafe { ib::rdma_create_event_channel() }).ok_or_else(|| {
            let errno = sys::errno();
            let remedy = match errno {
                libc::ENODEV if super::device::names().is_ok_and(|names| !names.is_empty()) => "modprobe rdma_ucm",
                libc::ENODEV => NO_DEVICE_REMEDY,
                libc::ENOENT => "modprobe rdma_ucm",
                libc::EACCES | libc::EPERM => "allow this user to open /dev/infiniband/rdma_cm",
                _ => "",
            };
            RdmaError::os("RDMA connection management (/dev/infiniband/rdma_cm)", errno, remedy)
        })?;
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let wake = wake.map_err(|errno| RdmaError::os("eventfd", errno as i32, ""));
        // From here on the drop closes it.
        let channel = wake.map(|wake| Self { raw, wake, dropped: Mutex::new(Some(Vec::new())) }).inspect_err(|_| {
            // SAFETY: just opened, no ids on it.
            unsafe { ib::rdma_destroy_event_channel(raw.as_ptr()) };
        })?;
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: the channel is open as long as `self`.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Hands an id over to be destroyed; gives it back if nobody is there to do it.
    fn bury(&self, id: DroppedId) -> Option<DroppedId> {
        let mut list = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        match list.as_mut() {
            Some(list) => list.push(id),
            None => return Some(id),
        }
        drop(list);
        if let Err(errno) = self.wake.write(1) {
            debug!(%errno, "CM wake-up");
        }
        None
    }

    /// Destroys what was handed over.
    pub(super) fn destroy_dropped(self: &Arc<Self>) {
        let dropped = match self.dropped.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(list) if !list.is_empty() => std::mem::take(list),
            _ => return,
        };
        let _ = self.wake.read();
        for id in dropped {
            id.raw.destroy(self);
            drop(id.device);
        }
    }

    pub(super) fn close(self: &Arc<Self>) {
        let rest = self.dropped.lock().unwrap_or_else(PoisonError::into_inner).take();
        for id in rest.into_iter().flatten() {
            id.raw.destroy(self);
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once; every id holds the channel, so none is left.
        unsafe { ib::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// A pointer to an id that someone owns. Not dropped but destroyed, once, by that owner.
pub(super) struct RawId(pub(super) ptr::NonNull<ib::rdma_cm_id>);

// SAFETY: librdmacm's calls on an id may be made from any thread; its owner makes them one at a time, and what the event
// reader does beside them is guarded by librdmacm, as no queue pair is bound to the id.
unsafe impl Send for RawId {}
// SAFETY: only the owner of a `RawId` calls what changes it; the rest reads words that do not change once it is bound.
unsafe impl Sync for RawId {}

impl RawId {
    pub(super) fn create(channel: &Channel, tag: Tag) -> Result<Self, i32> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open; `raw` is written by the call.
        let result = unsafe {
            ib::rdma_create_id(
                channel.raw.as_ptr(),
                &mut raw,
                tag.to_word() as *mut c_void,
                ib::rdma_port_space::RDMA_PS_TCP,
            )
        };
        match ptr::NonNull::new(raw) {
            Some(raw) if result == 0 => Ok(Self(raw)),
            _ => Err(sys::errno()),
        }
    }

    /// An id bound to an address of a device and an arbitrary port, to be told of the device's removal.
    pub(super) fn watch(channel: &Channel, device: DeviceId, mut local: SocketAddr) -> Result<Self, i32> {
        local.set_port(0);
        let id = Self::create(channel, Tag::Watch(device))?;
        match id.bind(local) {
            Ok(()) => Ok(id),
            Err(errno) => {
                id.destroy(channel);
                Err(errno)
            }
        }
    }

    pub(super) fn bind(&self, address: SocketAddr) -> Result<(), i32> {
        let mut storage = sys::to_storage(address);
        // SAFETY: the id lives; the address is read during the call.
        check(unsafe { ib::rdma_bind_addr(self.raw(), ptr::from_mut(&mut storage).cast()) })
    }

    pub(super) fn set_option(&self, option: i32, value: &mut [u8]) -> Result<(), i32> {
        // SAFETY: the id lives; the value is read during the call.
        check(unsafe {
            ib::rdma_set_option(self.raw(), sys::OPTION_ID, option, value.as_mut_ptr().cast(), value.len())
        })
    }

    pub(super) fn raw(&self) -> *mut ib::rdma_cm_id {
        self.0.as_ptr()
    }

    pub(super) fn verbs(&self) -> *mut ib::ibv_context {
        // SAFETY: an id lives until it is destroyed, which takes it.
        unsafe { (*self.raw()).verbs }
    }

    pub(super) fn port(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.raw()).port_num }
    }

    /// The GID that the CM chose for our side.
    pub(super) fn sgid(&self) -> [u8; 16] {
        // SAFETY: as above; both members of the unions are plain bytes.
        unsafe { (*self.raw()).route.addr.addr.ibaddr.sgid.raw }
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: as above; the storage is the largest member of the union and plain bytes.
        sys::from_storage(unsafe { &(*self.raw()).route.addr.src_addr_union.src_storage })
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        sys::from_storage(unsafe { &(*self.raw()).route.addr.dst_addr_union.dst_storage })
    }

    /// Destroys it. Waits for events that were read and not acknowledged, of which the CM thread leaves none.
    pub(super) fn destroy(self, _on: &Channel) {
        // SAFETY: the owner gives it up here, once. The channel is open: `_on` lives.
        if unsafe { ib::rdma_destroy_id(self.raw()) } != 0 {
            warn!(errno = sys::errno(), "RDMA connection id could not be destroyed");
        }
    }
}

pub(super) fn check(result: i32) -> Result<(), i32> {
    if result == 0 { Ok(()) } else { Err(sys::errno()) }
}

/// The owner of an id.
pub(super) struct Id {
    /// `None` only while dropping.
    raw: Option<RawId>,
    channel: Arc<Channel>,
    pub(super) device: Option<Arc<Device>>,
}

impl Id {
    pub(super) fn new(raw: RawId, channel: &Arc<Channel>) -> Self {
        Self { raw: Some(raw), channel: Arc::clone(channel), device: None }
    }

    pub(super) fn get(&self) -> &RawId {
        self.raw.as_ref().expect("taken by drop only")
    }

    pub(super) fn raw(&self) -> *mut ib::rdma_cm_id {
        self.get().raw()
    }

    /// Destroys it now. For the CM thread only.
    pub(super) fn destroy_now(mut self) {
        if let Some(raw) = self.raw.take() {
            raw.destroy(&self.channel);
        }
    }

    /// Rejects the request that this id stands for.
    pub(super) fn reject(&self, private_data: &[u8]) -> Result<(), i32> {
        let len = private_data_len(private_data).ok_or(libc::EINVAL)?;
        // SAFETY: the id lives; the data are read during the call.
        check(unsafe { ib::rdma_reject(self.raw(), private_data.as_ptr().cast(), len) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        if let Some(left) = self.channel.bury(DroppedId { raw, device: self.device.take() }) {
            left.raw.destroy(&self.channel);
            drop(left.device);
        }
    }
}

/// Private data are at most 255 bytes to librdmacm; the wire takes fewer, which the kernel checks.
pub(super) fn private_data_len(data: &[u8]) -> Option<u8> {
    u8::try_from(data.len()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_words_round_trip() {
        let conn = ConnId((1 << 62) - 1);
        for tag in [
            Tag::Listener(ListenerId(u32::MAX)),
            Tag::Watch(DeviceId(0)),
            Tag::Conn { id: conn, active: false },
            Tag::Conn { id: conn, active: true },
        ] {
            assert_eq!(Tag::from_word(tag.to_word()), tag);
        }
    }

    #[test]
    fn private_data_fit_one_byte_of_length() {
        assert_eq!(private_data_len(&[0; 255]), Some(255));
        assert_eq!(private_data_len(&[0; 256]), None);
        assert_eq!(private_data_len(&[]), Some(0));
    }
}
