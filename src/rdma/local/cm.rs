//! Connection management: a box of events per manager, and the requests that travel between two of them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::fabric::{Fabric, Link};
use super::shell::Shell;
use crate::rdma::{
    Cm, CmEvent, ConnId, DeviceId, Incoming, ListenOptions, ListenerId, Listening, Outgoing, QpId, RdmaError,
    RejectReason,
};

type Event = CmEvent<LocalIncoming, LocalOutgoing>;

/// The events of one connection manager, and the descriptor that is readable while there are any.
pub(super) struct CmBox {
    events: Mutex<Option<VecDeque<Event>>>,
    ready: EventFd,
}

impl CmBox {
    pub(super) fn push(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // A manager that is gone has no box any more; the event is dropped after the lock.
        if let Some(queue) = events.as_mut() {
            queue.push_back(event);
            let _ = self.ready.write(1);
        } else {
            drop(events);
            drop(event);
        }
    }

    fn pop(&self) -> Option<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = events.as_mut()?;
        let event = queue.pop_front();
        if queue.is_empty() {
            let _ = self.ready.read();
        }
        event
    }

    fn close(&self) {
        let left = self.events.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Dropping a request rejects it, which pushes into another box: not under this one's lock.
        drop(left);
    }
}

/// Connection management of a [`Local`](super::Local).
pub struct LocalCm {
    fabric: Arc<Fabric>,
    events: Arc<CmBox>,
    listeners: Vec<ListenerId>,
}

impl std::fmt::Debug for LocalCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalCm").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}

impl LocalCm {
    pub(super) fn open(fabric: &Arc<Fabric>) -> Result<Self, RdmaError> {
        fabric.device()?;
        let events = Arc::new(CmBox { events: Mutex::new(Some(VecDeque::new())), ready: event_fd()? });
        fabric.add_cm(&events);
        Ok(Self { fabric: Arc::clone(fabric), events, listeners: Vec::new() })
    }
}

pub(super) fn event_fd() -> Result<EventFd, RdmaError> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| RdmaError::os("eventfd", errno as i32, "raise the limit of open files (ulimit -n)"))
}

impl Cm for LocalCm {
    type Incoming = LocalIncoming;
    type Outgoing = LocalOutgoing;

    fn listen(&mut self, address: SocketAddr, _options: &ListenOptions) -> Result<Listening, RdmaError> {
        if address.port() == 0 {
            return Err(RdmaError::new(format!("listen on {address}"), "port 0", "name a port"));
        }
        let device = self.fabric.device()?;
        let id = self.fabric.listen(address, &self.events)?;
        self.listeners.push(id);
        let device = (!address.ip().is_unspecified()).then_some(device);
        Ok(Listening { id, local: address, device })
    }

    fn unlisten(&mut self, listener: ListenerId) {
        self.fabric.unlisten(listener);
        self.listeners.retain(|id| *id != listener);
    }

    fn resolve(&mut self, peer: SocketAddr, source: Option<IpAddr>, _timeout: Duration) -> Result<ConnId, RdmaError> {
        let device = self.fabric.device()?;
        let conn = ConnId(self.fabric.next_id());
        let port = 49_152 + (conn.0 % 16_384) as u16;
        let local = SocketAddr::new(source.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), port);
        let cm = Arc::clone(&self.events);
        self.events.push(CmEvent::Resolved(LocalOutgoing { conn, device, peer, local, cm }));
        Ok(conn)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.ready.as_fd())
    }

    fn next_timeout(&self) -> Option<Duration> {
        None
    }

    fn poll_event(&mut self, _now: Duration) -> Option<Event> {
        self.events.pop()
    }
}

impl Drop for LocalCm {
    fn drop(&mut self) {
        for listener in self.listeners.drain(..) {
            self.fabric.unlisten(listener);
        }
        self.events.close();
    }
}

/// A resolved peer of a [`Local`](super::Local).
pub struct LocalOutgoing {
    pub(super) conn: ConnId,
    pub(super) device: DeviceId,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    pub(super) cm: Arc<CmBox>,
}

impl std::fmt::Debug for LocalOutgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalOutgoing").field("conn", &self.conn).field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Outgoing for LocalOutgoing {
    fn conn(&self) -> ConnId {
        self.conn
    }

    fn device(&self) -> DeviceId {
        self.device
    }
}

/// A connection request over a [`Local`](super::Local). Dropped without an answer it rejects.
pub struct LocalIncoming {
    pub(super) link: Arc<Link>,
    pub(super) shell: Arc<Shell>,
    pub(super) qp: QpId,
    pub(super) listener: ListenerId,
    pub(super) device: DeviceId,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    pub(super) private_data: Vec<u8>,
    pub(super) initiator_depth: u8,
    pub(super) responder_resources: u8,
    pub(super) answered: bool,
}

impl std::fmt::Debug for LocalIncoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalIncoming").field("peer", &self.peer).field("local", &self.local).finish_non_exhaustive()
    }
}

impl LocalIncoming {
    pub(super) fn refuse(&mut self, private_data: &[u8]) {
        if std::mem::replace(&mut self.answered, true) {
            return;
        }
        let (conn, cm) = &self.link.active;
        cm.push(CmEvent::Refused { conn: *conn, reason: RejectReason::CONSUMER, private_data: private_data.to_vec() });
    }
}

impl Incoming for LocalIncoming {
    fn conn(&self) -> ConnId {
        self.link.passive.0
    }

    fn listener(&self) -> ListenerId {
        self.listener
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn initiator_depth(&self) -> u8 {
        self.initiator_depth
    }

    fn responder_resources(&self) -> u8 {
        self.responder_resources
    }

    fn reject(mut self, private_data: &[u8]) {
        self.refuse(private_data);
    }
}

impl Drop for LocalIncoming {
    fn drop(&mut self) {
        self.refuse(&[]);
    }
}
