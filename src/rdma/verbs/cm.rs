//! Connection management through librdmacm: listeners, resolves, and what their events and those of connections mean.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use rdma_sys as ib;
use rdma_sys::rdma_cm_event_type as kind;
use tracing::{debug, info, warn};

use super::device::{Device, Registry};
use super::event::Event;
use super::ids::{Channel, Id, RawId, Tag, check};
use super::sys;
use crate::rdma::{CmEvent, ConnId, DeviceId, ListenOptions, ListenerId, Listening, RdmaError, RejectReason};

static NEXT_CONN: AtomicU64 = AtomicU64::new(1);
static NEXT_LISTENER: AtomicU32 = AtomicU32::new(1);

/// See [`crate::rdma::Incoming`].
pub struct Incoming {
    pub(super) id: Id,
    pub(super) conn: ConnId,
    listener: ListenerId,
    pub(super) device: Arc<Device>,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    private_data: Vec<u8>,
    initiator_depth: u8,
    responder_resources: u8,
    pub(super) tos: Option<u8>,
}

impl crate::rdma::Incoming for Incoming {
    fn conn(&self) -> ConnId {
        self.conn
    }

    fn listener(&self) -> ListenerId {
        self.listener
    }

    fn device(&self) -> DeviceId {
        self.device.id()
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

    fn reject(self, private_data: &[u8]) {
        if let Err(errno) = self.id.reject(private_data) {
            debug!(peer = %self.peer, errno, "reject: the peer is gone");
        }
    }
}

/// See [`crate::rdma::Outgoing`].
pub struct Outgoing {
    pub(super) id: Id,
    pub(super) conn: ConnId,
    pub(super) device: Arc<Device>,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
}

impl crate::rdma::Outgoing for Outgoing {
    fn conn(&self) -> ConnId {
        self.conn
    }

    fn device(&self) -> DeviceId {
        self.device.id()
    }
}

struct Listener {
    id: Id,
    address: SocketAddr,
    tos: Option<u8>,
}

struct Resolving {
    id: Id,
    peer: SocketAddr,
    timeout: Duration,
}

/// How often to look whether devices are still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often a refused request is worth a line.
const COMPLAIN_EVERY: Duration = Duration::from_secs(1);

type Said = CmEvent<Incoming, Outgoing>;

/// See [`crate::rdma::Cm`].
pub struct Cm {
    // Ids before the channel: dropped in this order. The channel itself is shared and goes with the last id.
    listeners: HashMap<ListenerId, Listener>,
    resolving: HashMap<ConnId, Resolving>,
    ready: VecDeque<Said>,
    channel: Arc<Channel>,
    registry: Arc<Registry>,
    /// Joins the channel's descriptor, the wake-up for dropped ids, and the timer.
    epoll: Epoll,
    /// When to look whether devices are still there (see `device.rs`).
    look: TimerFd,
    /// When a refused request was last worth a line.
    complained: Option<Instant>,
}

impl Cm {
    pub(super) fn open(registry: Arc<Registry>) -> Result<Self, RdmaError> {
        let channel = Arc::new(Channel::open()?);
        let fault = |errno: nix::Error| RdmaError::os("epoll", errno as i32, "");
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(fault)?;
        epoll.add(&channel.wake, EpollEvent::new(EpollFlags::EPOLLIN, 0)).map_err(fault)?;
        // SAFETY: the descriptor belongs to the channel, which outlives the borrow.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(channel.fd()) };
        epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 1)).map_err(fault)?;
        let look = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC);
        let look = look.map_err(fault)?;
        look.set(Expiration::Interval(LOOK_EVERY.into()), TimerSetTimeFlags::empty()).map_err(fault)?;
        epoll.add(&look, EpollEvent::new(EpollFlags::EPOLLIN, 2)).map_err(fault)?;
        Ok(Self {
            look,
            complained: None,
            listeners: HashMap::new(),
            resolving: HashMap::new(),
            ready: VecDeque::new(),
            channel,
            registry,
            epoll,
        })
    }

    fn handle(&mut self, event: Event) {
        match event.tag {
            Tag::Listener(listener) => self.handle_listener(listener, event),
            Tag::Watch(device) => {
                debug!(device = device.0, event = event.kind, "device watch");
                if event.kind == kind::RDMA_CM_EVENT_DEVICE_REMOVAL {
                    self.device_removed(event.verbs);
                }
            }
            Tag::Conn { id, active } => self.handle_conn(id, active, event),
        }
    }

    fn handle_listener(&mut self, listener: ListenerId, event: Event) {
        match event.kind {
            kind::RDMA_CM_EVENT_CONNECT_REQUEST => self.request(listener, event),
            kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                self.device_removed(event.verbs);
                self.lose_listener(listener, "its device was removed");
            }
            kind::RDMA_CM_EVENT_ADDR_CHANGE => self.lose_listener(listener, "its address changed"),
            other => debug!(listener = listener.0, event = other, status = event.status, "listener event"),
        }
    }

    fn lose_listener(&mut self, id: ListenerId, why: &str) {
        if let Some(listener) = self.listeners.remove(&id) {
            warn!(address = %listener.address, why, "listener lost");
            listener.id.destroy_now();
            self.ready.push_back(CmEvent::ListenerLost(id));
        }
    }

    fn device_removed(&mut self, verbs: *mut ib::ibv_context) {
        let Some(device) = self.registry.remove(verbs) else { return };
        info!(device = device.name(), id = device.id().0, "RDMA device removed");
        self.ready.push_back(CmEvent::DeviceRemoved(device.id()));
        let on_it = |id: &Id| ptr::eq(id.get().verbs(), verbs);
        let listeners: Vec<_> = self.listeners.iter().filter(|(_, l)| on_it(&l.id)).map(|(id, _)| *id).collect();
        for listener in listeners {
            self.lose_listener(listener, "its device was removed");
        }
        let resolving: Vec<_> = self.resolving.iter().filter(|(_, r)| on_it(&r.id)).map(|(id, _)| *id).collect();
        for conn in resolving {
            self.resolve_failed(conn, libc::ENODEV);
        }
    }

    fn request(&mut self, listener: ListenerId, event: Event) {
        let Some(mut id) = event.request else { return };
        let Some(listening) = self.listeners.get(&listener) else { return };
        let raw = id.get();
        let local = raw.local().unwrap_or(listening.address);
        let peer = raw.peer().unwrap_or_else(|| sys::unspecified(Some(local.ip())));
        let device = match self.registry.of(raw, local, &self.channel) {
            Ok(device) => device,
            Err(error) => {
                // A peer may cause any number of these.
                if self.complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
                    self.complained = Some(Instant::now());
                    warn!(%peer, %local, %error, "connection request refused");
                }
                if let Err(errno) = id.reject(&[]) {
                    debug!(%peer, errno, "reject");
                }
                return id.destroy_now();
            }
        };
        if let Some(tos) = listening.tos
            && let Err(errno) = raw.set_option(sys::OPTION_ID_TOS, &mut [tos])
        {
            debug!(%peer, tos, errno, "type of service of a request");
        }
        let conn = ConnId(NEXT_CONN.fetch_add(1, Ordering::Relaxed));
        // SAFETY: the id is ours, and the event that brought it is acknowledged: nobody else looks at it now. Events
        // about it start after its accept.
        unsafe { (*id.raw()).context = Tag::Conn { id: conn, active: false }.to_word() as *mut c_void };
        id.device = Some(Arc::clone(&device));
        debug!(conn = conn.0, %peer, %local, device = device.name(), "connection request");
        self.ready.push_back(CmEvent::Request(Incoming {
            conn,
            listener,
            device,
            peer,
            local,
            private_data: event.private_data,
            initiator_depth: event.initiator_depth,
            responder_resources: event.responder_resources,
            tos: listening.tos,
            id,
        }));
    }

    fn handle_conn(&mut self, conn: ConnId, active: bool, event: Event) {
        let failed =
            |what: &str| CmEvent::Failed { conn, error: RdmaError::os(what, sys::event_errno(event.status), "") };
        match event.kind {
            kind::RDMA_CM_EVENT_ADDR_RESOLVED => self.resolve_route(conn),
            kind::RDMA_CM_EVENT_ROUTE_RESOLVED => self.resolved(conn),
            kind::RDMA_CM_EVENT_ADDR_ERROR | kind::RDMA_CM_EVENT_ROUTE_ERROR => {
                self.resolve_failed(conn, sys::event_errno(event.status));
            }
            kind::RDMA_CM_EVENT_CONNECT_RESPONSE => {
                self.ready.push_back(CmEvent::Established { conn, private_data: event.private_data });
            }
            kind::RDMA_CM_EVENT_ESTABLISHED => {
                let private_data = if active { event.private_data } else { Vec::new() };
                self.ready.push_back(CmEvent::Established { conn, private_data });
            }
            kind::RDMA_CM_EVENT_CONNECT_ERROR => self.ready.push_back(failed("RDMA connect")),
            kind::RDMA_CM_EVENT_UNREACHABLE => self.ready.push_back(failed("RDMA peer unreachable")),
            kind::RDMA_CM_EVENT_REJECTED if active => self.ready.push_back(CmEvent::Refused {
                conn,
                reason: RejectReason(u16::try_from(event.status).unwrap_or(0)),
                private_data: event.private_data,
            }),
            kind::RDMA_CM_EVENT_REJECTED => self.ready.push_back(CmEvent::Failed {
                conn,
                error: RdmaError::new("RDMA accept", format!("the peer gave it up, reason {}", event.status), ""),
            }),
            kind::RDMA_CM_EVENT_DISCONNECTED => self.ready.push_back(CmEvent::Disconnected { conn }),
            kind::RDMA_CM_EVENT_ADDR_CHANGE => {
                if self.resolving.contains_key(&conn) {
                    self.resolve_failed(conn, libc::EADDRNOTAVAIL);
                } else {
                    info!(conn = conn.0, "address of a connection changed");
                    self.ready.push_back(CmEvent::Disconnected { conn });
                }
            }
            kind::RDMA_CM_EVENT_DEVICE_REMOVAL => self.device_removed(event.verbs),
            // The end of the time in which stray packets may arrive; also what newer libraries may add.
            other => debug!(conn = conn.0, event = other, status = event.status, "connection event"),
        }
    }

    fn resolve_route(&mut self, conn: ConnId) {
        let Some(pending) = self.resolving.get(&conn) else { return };
        // SAFETY: the id is ours and its address is resolved.
        let result = check(unsafe { ib::rdma_resolve_route(pending.id.raw(), millis(pending.timeout)) });
        if let Err(errno) = result {
            self.resolve_failed(conn, errno);
        }
    }

    fn resolved(&mut self, conn: ConnId) {
        let Some(Resolving { mut id, peer, .. }) = self.resolving.remove(&conn) else { return };
        let raw = id.get();
        let local = raw.local().unwrap_or_else(|| sys::unspecified(Some(peer.ip())));
        match self.registry.of(raw, local, &self.channel) {
            Ok(device) => {
                id.device = Some(Arc::clone(&device));
                self.ready.push_back(CmEvent::Resolved(Outgoing { id, conn, device, peer, local }));
            }
            Err(error) => {
                id.destroy_now();
                self.ready.push_back(CmEvent::Failed { conn, error });
            }
        }
    }

    fn resolve_failed(&mut self, conn: ConnId, errno: i32) {
        if let Some(Resolving { id, peer, .. }) = self.resolving.remove(&conn) {
            id.destroy_now();
            let error = RdmaError::os(format!("RDMA route to {peer}"), errno, bind_remedy(errno));
            self.ready.push_back(CmEvent::Failed { conn, error });
        }
    }
}

impl crate::rdma::Cm for Cm {
    type Incoming = Incoming;
    type Outgoing = Outgoing;

    fn listen(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<Listening, RdmaError> {
        let what = || format!("listening on {address}");
        if address.port() == 0 {
            return Err(RdmaError::new(what(), "port 0 is no port that a host can know", "name one, such as 4420"));
        }
        if address.ip().is_loopback() {
            // The kernel takes a loopback address for a wildcard here, and would answer on every address.
            let reason = "RDMA has no loopback interface";
            return Err(RdmaError::new(what(), reason, "name an address of an RDMA device, or use --provider soft"));
        }
        let number = ListenerId(NEXT_LISTENER.fetch_add(1, Ordering::Relaxed));
        let fault = |errno: i32| RdmaError::os(what(), errno, bind_remedy(errno));
        let raw = RawId::create(&self.channel, Tag::Listener(number)).map_err(fault)?;
        let mut id = Id::new(raw, &self.channel);
        if address.is_ipv6() {
            // As nvmet does: IPv4 and IPv6 wildcards may share a port.
            id.get().set_option(sys::OPTION_ID_AFONLY, &mut 1i32.to_ne_bytes()).map_err(fault)?;
        }
        if let Some(tos) = options.tos {
            id.get().set_option(sys::OPTION_ID_TOS, &mut [tos]).map_err(fault)?;
        }
        let bound = id.get().bind(address).and_then(|()| {
            let backlog = i32::try_from(options.backlog).unwrap_or(i32::MAX);
            // SAFETY: the id is ours and bound.
            check(unsafe { ib::rdma_listen(id.raw(), backlog) })
        });
        if let Err(errno) = bound {
            // Now, not by and by: the port must be free when the caller tries again.
            id.destroy_now();
            return Err(fault(errno));
        }
        let local = id.get().local().unwrap_or(address);
        if !id.get().verbs().is_null() {
            match self.registry.of(id.get(), local, &self.channel) {
                Ok(device) => id.device = Some(device),
                Err(error) => {
                    id.destroy_now();
                    return Err(error);
                }
            }
        }
        let device = id.device.as_ref().map(|device| device.id());
        info!(address = %local, device = id.device.as_ref().map(|device| device.name()), "listening");
        self.listeners.insert(number, Listener { id, address: local, tos: options.tos });
        Ok(Listening { id: number, local, device })
    }

    fn unlisten(&mut self, listener: ListenerId) {
        if let Some(listener) = self.listeners.remove(&listener) {
            info!(address = %listener.address, "no longer listening");
            listener.id.destroy_now();
        }
    }

    fn resolve(&mut self, peer: SocketAddr, source: Option<IpAddr>, timeout: Duration) -> Result<ConnId, RdmaError> {
        let conn = ConnId(NEXT_CONN.fetch_add(1, Ordering::Relaxed));
        let fault = |errno: i32| RdmaError::os(format!("RDMA route to {peer}"), errno, bind_remedy(errno));
        let raw = RawId::create(&self.channel, Tag::Conn { id: conn, active: true }).map_err(fault)?;
        let id = Id::new(raw, &self.channel);
        let mut to = sys::to_storage(peer);
        let mut from = source.map(|ip| sys::to_storage(SocketAddr::new(ip, 0)));
        let from = from.as_mut().map_or(ptr::null_mut(), |from| ptr::from_mut(from).cast());
        // SAFETY: the id is ours; the addresses are read during the call.
        let result = unsafe { ib::rdma_resolve_addr(id.raw(), from, ptr::from_mut(&mut to).cast(), millis(timeout)) };
        check(result).map_err(fault)?;
        self.resolving.insert(conn, Resolving { id, peer, timeout });
        Ok(conn)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.0.as_fd())
    }

    fn next_timeout(&self) -> Option<Duration> {
        (!self.ready.is_empty()).then_some(Duration::ZERO)
    }

    fn poll_event(&mut self, _now: Duration) -> Option<Said> {
        self.channel.destroy_dropped();
        if self.look.wait().is_ok() {
            for verbs in self.registry.vanished() {
                self.device_removed(verbs);
            }
        }
        while self.ready.is_empty() {
            let event = Event::next(&self.channel)?;
            self.handle(event);
        }
        self.ready.pop_front()
    }
}

impl Drop for Cm {
    fn drop(&mut self) {
        self.ready.clear();
        for (_, listener) in self.listeners.drain() {
            listener.id.destroy_now();
        }
        for (_, pending) in self.resolving.drain() {
            pending.id.destroy_now();
        }
        self.channel.close();
        self.registry.forget(&self.channel);
    }
}

fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}

/// What to do about an address that cannot be bound or reached.
fn bind_remedy(errno: i32) -> &'static str {
    match errno {
        libc::EADDRNOTAVAIL => "no interface of this machine has that address: see ip addr",
        libc::EADDRINUSE => "another RDMA listener has this port: see rdma resource show cm_id",
        libc::ENODEV => {
            "no RDMA device has that address: rdma link add rxe0 type rxe netdev NAME, and add the address after the link"
        }
        libc::EACCES => "ports below 1024 need CAP_NET_BIND_SERVICE",
        libc::ENETUNREACH | libc::EHOSTUNREACH => "see ip route get ADDRESS",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_errors_have_a_remedy() {
        for errno in [libc::EADDRNOTAVAIL, libc::EADDRINUSE, libc::ENODEV, libc::EACCES] {
            assert!(!bind_remedy(errno).is_empty(), "{errno}");
        }
    }
}
