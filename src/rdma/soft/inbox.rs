//! Where events of connections wait for the connection manager that they belong to. A provider may have several managers, one
//! for each thread of a benchmark, and any of them may read the packet that makes another's event.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Event;
use super::world::World;
use crate::rdma::{ConnId, DeviceId, RdmaError};

/// Connection IDs carry their manager's number above this many bits.
const SEQUENCE_BITS: u32 = 48;

/// The events of one connection manager.
#[derive(Debug)]
pub(super) struct Inbox {
    number: u16,
    events: Mutex<VecDeque<Event>>,
    /// Readable when an event was queued, or a deadline of connection management changed.
    wakeup: EventFd,
}

impl Inbox {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// The ID of its connection number `sequence`.
    pub(super) fn conn(&self, sequence: u64) -> ConnId {
        ConnId(u64::from(self.number) << SEQUENCE_BITS | sequence & ((1 << SEQUENCE_BITS) - 1))
    }

    pub(super) fn next(&self) -> Option<Event> {
        held(&self.events).pop_front()
    }

    pub(super) fn put(&self, event: Event) {
        held(&self.events).push_back(event);
    }

    pub(super) fn clear(&self, world: &World) {
        world.clear(&self.wakeup);
    }
}

/// Those of all connection managers of a provider.
#[derive(Debug, Default)]
pub(super) struct Inboxes(Mutex<Vec<Arc<Inbox>>>);

impl Inboxes {
    /// That of a new connection manager.
    pub(super) fn open(&self) -> Result<Arc<Inbox>, RdmaError> {
        let refused = |errno| RdmaError::os("connection management", errno, "");
        let wakeup = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|errno| refused(errno as i32))?;
        let mut all = held(&self.0);
        let taken = |number: &u16| !all.iter().any(|inbox| inbox.number == *number);
        let number = (0..=u16::MAX).find(taken).ok_or_else(|| refused(nix::libc::ENFILE))?;
        let inbox = Arc::new(Inbox { number, events: Mutex::default(), wakeup });
        all.push(Arc::clone(&inbox));
        Ok(inbox)
    }

    /// A connection manager is gone; so are its connections' events.
    pub(super) fn close(&self, inbox: &Arc<Inbox>) {
        held(&self.0).retain(|known| !Arc::ptr_eq(known, inbox));
    }

    /// An event of a connection, for its manager, which is woken: another one may have read the packet.
    pub(super) fn put(&self, conn: ConnId, event: Event, world: &World) {
        let owner = conn.0 >> SEQUENCE_BITS;
        if let Some(inbox) = held(&self.0).iter().find(|inbox| u64::from(inbox.number) == owner) {
            inbox.put(event);
            world.wake(&inbox.wakeup);
        }
    }

    /// A device is gone: everybody is told.
    pub(super) fn tell_removed(&self, device: DeviceId) {
        held(&self.0).iter().for_each(|inbox| inbox.put(Event::DeviceRemoved(device)));
    }

    pub(super) fn wake(&self, world: &World) {
        held(&self.0).iter().for_each(|inbox| world.wake(&inbox.wakeup));
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
