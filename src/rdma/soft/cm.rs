//! Connection management of the software provider: one agent per address, all of them behind one descriptor.
//!
//! The agent of an address is shared: its socket is read by the connection-management thread, while a reactor that accepts,
//! rejects or disconnects does so at once, under the address's lock. Both are rare.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::device::{Device, choose_source, local_addresses};
use super::headers::Headers;
use super::ids::{PeerIds, SharedIds};
use super::inbox::Inbox;
use super::socket::RxBatch;
use super::watch::Watch;
use super::{Event, Inner, Soft};
use crate::rdma::{
    Cm, CmEvent, ConnId, DeviceId, Incoming, ListenOptions, ListenerId, Listening, Outgoing, RdmaError, RejectReason,
};
use crate::roce::cm::{self, Agent, CmId, Reply, Request, reason};
use crate::roce::icrc::{self, Checker, Flow, Verdict};
use crate::roce::{Psn, UDP_PORT};

/// What an address knows of its connections.
#[derive(Debug)]
pub(super) struct CmState {
    pub(super) agent: Agent,
    psn: Psn,
    ids: PeerIds,
    headers: Option<Headers>,
    /// By port: the listener, its manager, and the traffic class.
    listeners: HashMap<u16, (ListenerId, Arc<Inbox>, Option<u8>)>,
    pub(super) conns: HashMap<CmId, ConnId>,
    /// Answers to our requests, until the endpoint takes them.
    pub(super) replies: HashMap<ConnId, Reply>,
}

impl CmState {
    pub(super) fn new(local: IpAddr, seed: u64, ids: &Arc<SharedIds>, headers: Option<Headers>) -> Self {
        Self {
            agent: Agent::new(local, seed),
            psn: Psn::default(),
            ids: PeerIds::new(ids),
            headers,
            listeners: HashMap::new(),
            conns: HashMap::new(),
            replies: HashMap::new(),
        }
    }
}

impl Device {
    /// Does something with the agent, sends what it has to say, and queues what it reports.
    pub(super) fn with_cm<T>(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        work: impl FnOnce(&mut CmState, Duration) -> T,
    ) -> T {
        let mut state = self.cm();
        let result = work(&mut state, inner.world.now());
        self.pump(inner, &mut state);
        drop(state);
        inner.wake();
        result
    }

    fn pump(self: &Arc<Self>, inner: &Arc<Inner>, state: &mut CmState) {
        loop {
            while let Some((to, mad)) = state.agent.poll_transmit() {
                let mut packet = cm::emit_datagram(state.psn, &mad);
                state.psn = state.psn.plus(1);
                icrc::seal(&Flow { src: self.address, dst: to, src_port: UDP_PORT }, 0, &mut packet);
                self.cm_socket.send_one(to, &packet);
            }
            let Some(event) = state.agent.poll_event() else {
                return;
            };
            self.report(inner, state, event);
        }
    }

    fn report(self: &Arc<Self>, inner: &Arc<Inner>, state: &mut CmState, event: cm::Event) {
        let (conn, event) = match event {
            cm::Event::Request(id, request) => match self.incoming(inner, state, id, request) {
                Some(incoming) => (incoming.conn, CmEvent::Request(incoming)),
                None => return,
            },
            cm::Event::Reply(id, reply) => {
                let Some(conn) = state.conns.get(&id).copied() else { return };
                let private_data = reply.private_data.clone();
                state.replies.insert(conn, *reply);
                (conn, CmEvent::Established { conn, private_data })
            }
            cm::Event::Established(id) => {
                let Some(conn) = state.conns.get(&id).copied() else { return };
                (conn, CmEvent::Established { conn, private_data: Vec::new() })
            }
            cm::Event::Rejected(id, reason, private_data) => {
                let Some(conn) = state.conns.remove(&id) else { return };
                (conn, CmEvent::Refused { conn, reason: RejectReason(reason), private_data })
            }
            cm::Event::Disconnected(id) => {
                let Some(conn) = state.conns.remove(&id) else { return };
                state.replies.remove(&conn);
                (conn, CmEvent::Disconnected { conn })
            }
            cm::Event::TimedOut(id) => {
                let Some(conn) = state.conns.remove(&id) else { return };
                let error = RdmaError::new(
                    format!("connection from {}", self.address),
                    "the peer does not answer connection requests",
                    "is it up, does it speak RoCEv2, and does UDP port 4791 pass in both directions?",
                );
                (conn, CmEvent::Failed { conn, error })
            }
        };
        inner.inboxes.put(conn, event, &inner.world);
    }

    fn incoming(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        state: &mut CmState,
        id: CmId,
        request: Box<Request>,
    ) -> Option<SoftIncoming> {
        if request.mtu > self.mtu() {
            // A reliable connection cannot use a smaller MTU than its peer, and REP cannot say so.
            state.agent.reject(id, reason::INVALID_MTU, &[self.mtu().code()]);
            return None;
        }
        let Some((listener, owner, tos)) = state.listeners.get(&request.port) else {
            state.agent.reject(id, reason::INVALID_SERVICE_ID, &[]);
            return None;
        };
        let (conn, listener, tos) = (inner.new_conn(owner), *listener, *tos);
        state.conns.insert(id, conn);
        Some(SoftIncoming {
            inner: Arc::clone(inner),
            device: Arc::clone(self),
            id,
            conn,
            listener,
            tos,
            request,
            open: true,
        })
    }
}

/// A connection request. Rejected when it is dropped unanswered.
#[derive(Debug)]
pub struct SoftIncoming {
    inner: Arc<Inner>,
    pub(super) device: Arc<Device>,
    pub(super) id: CmId,
    conn: ConnId,
    listener: ListenerId,
    pub(super) tos: Option<u8>,
    pub(super) request: Box<Request>,
    open: bool,
}

impl SoftIncoming {
    fn close(&mut self, private_data: &[u8]) {
        if std::mem::take(&mut self.open) {
            let id = self.id;
            self.device.with_cm(&self.inner, |state, _| {
                state.conns.remove(&id);
                state.agent.reject(id, reason::CONSUMER, private_data);
            });
        }
    }

    /// It was accepted.
    pub(super) const fn answered(&mut self) {
        self.open = false;
    }
}

impl Drop for SoftIncoming {
    fn drop(&mut self) {
        self.close(&[]);
    }
}

impl Incoming for SoftIncoming {
    fn conn(&self) -> ConnId {
        self.conn
    }

    fn listener(&self) -> ListenerId {
        self.listener
    }

    fn device(&self) -> DeviceId {
        self.device.id
    }

    fn peer(&self) -> SocketAddr {
        SocketAddr::new(self.request.remote, self.request.remote_port)
    }

    fn local(&self) -> SocketAddr {
        SocketAddr::new(self.device.address, self.request.port)
    }

    fn private_data(&self) -> &[u8] {
        &self.request.private_data
    }

    fn initiator_depth(&self) -> u8 {
        self.request.initiator_depth
    }

    fn responder_resources(&self) -> u8 {
        self.request.responder_resources
    }

    fn reject(mut self, private_data: &[u8]) {
        self.close(private_data);
    }
}

/// A peer that can be asked.
#[derive(Debug)]
pub struct SoftOutgoing {
    pub(super) device: Arc<Device>,
    conn: ConnId,
    pub(super) peer: SocketAddr,
}

impl Outgoing for SoftOutgoing {
    fn conn(&self) -> ConnId {
        self.conn
    }

    fn device(&self) -> DeviceId {
        self.device.id
    }
}

/// Connection management of all addresses of a provider.
pub struct SoftCm {
    inner: Arc<Inner>,
    inbox: Arc<Inbox>,
    /// Readable when the socket of an address is, or when an event was queued.
    epoll: Epoll,
    watched: Vec<DeviceId>,
    /// None where the kernel does not tell.
    watch: Option<Watch>,
    look_at: Duration,
    /// Listeners on every address of a family, true for IPv4, and the addresses that they found.
    wildcards: HashMap<ListenerId, (bool, Vec<(IpAddr, u32)>)>,
    rx: RxBatch,
    checker: Checker,
    listeners: HashMap<ListenerId, Vec<(Arc<Device>, u16)>>,
    /// The caller's clock and ours, read together.
    clocks: (Duration, Duration),
}

impl SoftCm {
    pub(super) fn new(inner: Arc<Inner>) -> Result<Self, RdmaError> {
        let os = |errno: nix::Error| RdmaError::os("connection management", errno as i32, "");
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(os)?;
        let inbox = inner.inboxes.open()?;
        epoll.add(inbox.fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0)).map_err(os)?;
        let watch = inner.world.watch();
        if let Some(watch) = &watch {
            epoll.add(watch.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0)).map_err(os)?;
        }
        let rx = inner.world.receive_batch(BATCH);
        let mut cm = Self {
            inner,
            inbox,
            epoll,
            watched: Vec::new(),
            watch,
            look_at: Duration::ZERO,
            wildcards: HashMap::new(),
            rx,
            checker: Checker::new(cm::DATAGRAM_LEN),
            listeners: HashMap::new(),
            clocks: (Duration::ZERO, Duration::ZERO),
        };
        cm.watch()?;
        Ok(cm)
    }

    /// Watches the sockets of addresses that were opened since.
    fn watch(&mut self) -> Result<(), RdmaError> {
        let devices = self.inner.devices();
        for device in devices.iter().filter(|device| !self.watched.contains(&device.id)) {
            self.epoll
                .add(device.cm_socket.fd.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0))
                .map_err(|errno| RdmaError::os("connection management", errno as i32, ""))?;
        }
        self.watched = devices.iter().map(|device| device.id).collect();
        Ok(())
    }

    /// Addresses or network devices changed.
    fn on_change(&mut self) {
        self.inner.check_devices();
        // Where a wildcard listens is settled when it begins to: it begins again.
        for (id, (v4, before)) in &mut self.wildcards {
            let now = local_addresses(*v4);
            if now != *before {
                *before = now;
                self.inbox.put(CmEvent::ListenerLost(*id));
            }
        }
    }

    fn receive(&mut self, device: &Arc<Device>) {
        let now = self.inner.world.now();
        for _ in 0..RX_ROUNDS {
            let drained = device.cm_socket.receive(&mut self.rx);
            let mut state = device.cm();
            let CmState { agent, ids, headers, .. } = &mut *state;
            headers.iter_mut().for_each(Headers::receive);
            for received in (0..self.rx.len()).filter_map(|index| self.rx.get(index)) {
                let flow = Flow { src: received.from, dst: device.address, src_port: received.from_port };
                let header = headers.as_mut().and_then(|headers| headers.take(received.from, received.bytes));
                for (place, packet) in (0..).zip(received.bytes.chunks(received.segment)) {
                    let good = match self.checker.check(&flow, packet) {
                        Verdict::Valid => true,
                        Verdict::ValidWithId { id, dont_fragment } => match header {
                            Some(header) => header.explains(place, id, dont_fragment),
                            None => ids.accept(now, received.from, (id, dont_fragment), packet),
                        },
                        Verdict::Corrupt => false,
                    };
                    if good && let Some(datagram) = cm::parse_datagram(packet) {
                        agent.handle_datagram(now, received.from, datagram);
                    }
                }
            }
            if agent.next_timeout().is_some_and(|at| at <= now) {
                agent.handle_timeout(now);
            }
            device.pump(&self.inner, &mut state);
            drop(state);
            if drained {
                return;
            }
        }
    }

    fn listen_on(&mut self, device: &Arc<Device>, port: u16, id: ListenerId, tos: Option<u8>) -> Result<(), RdmaError> {
        let mut state = device.cm();
        if !state.agent.listen(port) {
            return Err(RdmaError::os(format!("listener on {}:{port}", device.address), libc::EADDRINUSE, ""));
        }
        // Connection management of an address has one socket: the last listener with a DSCP decides.
        if let Some(tos) = tos
            && let Err(error) = device.cm_socket.set_dscp(tos)
        {
            tracing::warn!(address = %device.address, tos, %error, "packets of connection management have no DSCP");
        }
        state.listeners.insert(port, (id, Arc::clone(&self.inbox), tos));
        self.listeners.entry(id).or_default().push((Arc::clone(device), port));
        Ok(())
    }
}

impl Cm for SoftCm {
    type Incoming = SoftIncoming;
    type Outgoing = SoftOutgoing;

    fn listen(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<Listening, RdmaError> {
        let port = address.port();
        if port == 0 {
            return Err(RdmaError::new(format!("listener on {address}"), "port 0", "name a port: 4420 is NVMe's"));
        }
        let id = ListenerId(self.inner.next_listener.fetch_add(1, Ordering::Relaxed));
        if !address.ip().is_unspecified() {
            let scope = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
            let device = self.inner.device_for(address.ip(), scope)?;
            self.listen_on(&device, port, id, options.tos)?;
            self.watch()?;
            return Ok(Listening { id, local: address, device: Some(device.id) });
        }
        // Sockets are bound to addresses, so a wildcard is each of them that can be had.
        let mut refused = None;
        let found = local_addresses(address.is_ipv4());
        for (ip, scope) in found.iter().copied() {
            let opened =
                self.inner.device_for(ip, scope).and_then(|device| self.listen_on(&device, port, id, options.tos));
            if let Err(error) = opened {
                refused = Some(error);
            }
        }
        self.watch()?;
        if self.listeners.contains_key(&id) {
            self.wildcards.insert(id, (address.is_ipv4(), found));
            return Ok(Listening { id, local: address, device: None });
        }
        Err(refused.unwrap_or_else(|| RdmaError::new(format!("listener on {address}"), "no address", "")))
    }

    fn unlisten(&mut self, listener: ListenerId) {
        self.wildcards.remove(&listener);
        for (device, port) in self.listeners.remove(&listener).unwrap_or_default() {
            let mut state = device.cm();
            state.agent.unlisten(port);
            state.listeners.remove(&port);
        }
    }

    fn resolve(&mut self, peer: SocketAddr, source: Option<IpAddr>, _timeout: Duration) -> Result<ConnId, RdmaError> {
        let scope = if let SocketAddr::V6(v6) = peer { v6.scope_id() } else { 0 };
        let device = match source {
            Some(source) => self.inner.device_for(source, scope)?,
            None => self.inner.device_towards(peer, scope)?,
        };
        self.watch()?;
        let conn = self.inner.new_conn(&self.inbox);
        self.inbox.put(CmEvent::Resolved(SoftOutgoing { device, conn, peer }));
        self.inner.wake();
        Ok(conn)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.0.as_fd())
    }

    fn next_timeout(&self) -> Option<Duration> {
        let devices = self.inner.devices();
        let due = devices.iter().filter_map(|device| device.cm().agent.next_timeout()).min()?;
        let (theirs, ours) = self.clocks;
        Some(theirs + due.saturating_sub(ours))
    }

    fn poll_event(&mut self, now: Duration) -> Option<Event> {
        if let Some(event) = self.inbox.next() {
            return Some(event);
        }
        self.clocks = (now, self.inner.world.now());
        self.inbox.clear(&self.inner.world);
        // Not at every turn of a host that spins: it costs a system call.
        if now >= self.look_at {
            self.look_at = now + LOOK_EVERY;
            if self.watch.as_ref().is_some_and(Watch::changed) {
                self.on_change();
            }
        }
        let devices = self.inner.devices();
        for device in devices.iter() {
            self.receive(device);
        }
        self.inbox.next()
    }
}

impl Drop for SoftCm {
    fn drop(&mut self) {
        // Before the inbox goes: a request for a listener without one would be rejected under its address's lock.
        let listeners: Vec<ListenerId> = self.listeners.keys().copied().collect();
        listeners.into_iter().for_each(|listener| self.unlisten(listener));
        self.inner.inboxes.close(&self.inbox);
    }
}

impl Inner {
    /// The address from which `peer` is reached, opened if need be.
    fn device_towards(self: &Arc<Self>, peer: SocketAddr, scope: u32) -> Result<Arc<Device>, RdmaError> {
        let mut tried = Vec::new();
        loop {
            let source = choose_source(peer, |address| tried.contains(&address)).map_err(|error| {
                RdmaError::os(format!("route to {peer}"), error.raw_os_error().unwrap_or(0), "see `ip route get`")
            })?;
            match self.device_for(source, scope) {
                // Another process may have this one of the loopback addresses: there are more.
                Err(_) if source.is_loopback() && source.is_ipv4() => tried.push(source),
                result => return result,
            }
        }
    }
}

impl Soft {
    pub(super) fn cm(&self) -> Result<SoftCm, RdmaError> {
        SoftCm::new(Arc::clone(&self.inner))
    }
}

/// How often news of addresses are read.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Datagrams that one system call takes in.
const BATCH: usize = 16;
/// System calls of one turn, so that a flood on one address does not keep the others waiting.
const RX_ROUNDS: usize = 8;
