//! Connections of one host: connection management, the endpoint, the memory that it registers, and channels.
//!
//! A [`Channel`](ChannelId) is one queue pair with its capsules: as many send slots as the submission queue has entries, as
//! many receives as responses may be under way. What is in a capsule is not known here. [`Link::poll`] never blocks;
//! [`Link::wait`] sleeps on the provider's descriptors. One thread.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use slab::Slab;

use super::error::HostError;
use super::queue::send_entries;
use crate::mem::{Arena, Buffer, Pool};
use crate::rdma::{
    Access, Cm, CmEvent, Completion, ConnId, ConnParams, Endpoint, EndpointEvent, EndpointOptions, Mr, Outgoing,
    Provider, QpId, QpOptions, RecvQueue, SendOp, SendWr, Sge, WcStatus,
};

/// Names a channel of a [`Link`]. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChannelId {
    index: u16,
    generation: u32,
}

/// How a channel is made.
#[derive(Clone, Debug)]
pub(crate) struct ChannelOptions {
    /// Send slots.
    pub(crate) entries: u32,
    /// Receives.
    pub(crate) receives: u32,
    /// Bytes of a capsule.
    pub(crate) capsule: u32,
    pub(crate) private_data: Vec<u8>,
    /// RDMA READs that the target may have under way.
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
}

/// Bytes that a receive takes: a response has 16, more is seen instead of failing the queue pair.
pub(crate) const RESPONSE: usize = 64;

/// What happened on a link.
#[derive(Clone, Debug)]
pub(crate) enum LinkEvent {
    Up {
        channel: ChannelId,
        private_data: Vec<u8>,
    },
    /// It could not be made, or it ended; the channel is gone.
    Down {
        channel: ChannelId,
        error: HostError,
    },
    Response {
        channel: ChannelId,
        bytes: [u8; 16],
        len: u32,
        invalidated: Option<u32>,
    },
    /// A signaled capsule was sent, and all before it; its slot's memory is ours again.
    Sent {
        channel: ChannelId,
        slot: u32,
    },
}

impl ChannelId {
    #[cfg(test)]
    pub(crate) fn test() -> Self {
        Self { index: 0, generation: 1 }
    }
}

/// Fixed-size records carved out of pool buffers.
#[derive(Debug)]
pub(crate) struct Slots {
    chunks: Vec<Buffer>,
    stride: usize,
    per_chunk: usize,
}

impl Slots {
    /// Pool memory that `take` of the same uses.
    pub(crate) fn pool_bytes(count: u32, len: usize) -> usize {
        let stride = len.next_multiple_of(64);
        let per_chunk = (Pool::MAX_BUFFER / stride).min((count as usize).max(1));
        (count as usize).div_ceil(per_chunk) * (per_chunk * stride).next_power_of_two().max(4096)
    }

    fn take(pool: &mut Pool, count: u32, len: usize) -> Option<Self> {
        let stride = len.next_multiple_of(64);
        let per_chunk = (Pool::MAX_BUFFER / stride).min((count as usize).max(1));
        let mut slots = Self { chunks: Vec::new(), stride, per_chunk };
        for _ in 0..(count as usize).div_ceil(per_chunk) {
            match pool.take(per_chunk * stride) {
                Some(chunk) => slots.chunks.push(chunk),
                None => {
                    slots.give(pool);
                    return None;
                }
            }
        }
        Some(slots)
    }

    fn give(self, pool: &mut Pool) {
        for chunk in self.chunks {
            pool.give(chunk);
        }
    }

    fn addr(&self, slot: u32) -> u64 {
        let (chunk, at) = (slot as usize / self.per_chunk, slot as usize % self.per_chunk);
        self.chunks[chunk].addr() + (at * self.stride) as u64
    }

    fn bytes(&mut self, slot: u32) -> &mut [u8] {
        let (chunk, at) = (slot as usize / self.per_chunk, slot as usize % self.per_chunk);
        &mut self.chunks[chunk].as_mut_slice()[at * self.stride..][..self.stride]
    }
}

#[derive(Debug)]
struct Channel {
    generation: u32,
    conn: ConnId,
    qp: Option<QpId>,
    peer: SocketAddr,
    options: ChannelOptions,
    /// Entries of its send queue.
    send_wr: u32,
    capsules: Slots,
    responses: Slots,
    up: bool,
    deadline: Duration,
}

/// See the module's doc.
pub(crate) struct Link<P: Provider> {
    provider: Arc<P>,
    // Dropped in this order: queue pairs and registrations, then the manager, then the memory they named.
    endpoint: Option<P::Endpoint>,
    cm: P::Cm,
    local: Option<Mr>,
    remote: Option<Mr>,
    channels: Slab<Channel>,
    by_conn: HashMap<ConnId, ChannelId>,
    next_generation: u32,
    /// Channels that are not up yet: only while there are any are deadlines looked at.
    connecting: u32,
    /// When connection management is looked at again while nothing connects and nobody sleeps.
    next_cm: Duration,
    source: Option<IpAddr>,
    thread: usize,
    completions: Box<[Completion; BATCH]>,
    pool: Pool,
    arena: Arena,
}

/// Completions that one round takes in: the owner submits after that many, so that the target has work while the rest is
/// looked at.
const BATCH: usize = 64;

/// A busy host looks at connection management this often: each look is system calls.
const CM_INTERVAL: Duration = Duration::from_millis(1);

const SEND: u64 = 1;
const RECEIVE: u64 = 2;

fn tag(kind: u64, channel: ChannelId, slot: u32) -> u64 {
    kind << 60 | u64::from(channel.generation & 0xf_ffff) << 40 | u64::from(channel.index) << 24 | u64::from(slot)
}

impl<P: Provider> Link<P> {
    pub(crate) fn open(
        provider: Arc<P>,
        memory: usize,
        source: Option<IpAddr>,
        thread: usize,
    ) -> Result<Self, HostError> {
        let arena = Arena::new(memory).map_err(|error| HostError::usage("host memory", error.to_string(), ""))?;
        let pool = Pool::new(&arena, 0, arena.len());
        Ok(Self {
            cm: provider.open_cm()?,
            provider,
            endpoint: None,
            local: None,
            remote: None,
            channels: Slab::new(),
            by_conn: HashMap::new(),
            next_generation: 1,
            connecting: 0,
            next_cm: Duration::ZERO,
            source,
            thread,
            completions: Box::new([Completion::EMPTY; BATCH]),
            pool,
            arena,
        })
    }

    pub(crate) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The key by which the target reaches our memory; 0 before there is a connection.
    pub(crate) fn rkey(&self) -> u32 {
        self.remote.map_or(0, |mr| mr.rkey)
    }

    /// Registers all of our memory once more, for the target, under a key of its own.
    pub(crate) fn register(&mut self, access: Access) -> Result<Mr, HostError> {
        let endpoint =
            self.endpoint.as_mut().ok_or_else(|| HostError::usage("registration", "nothing is connected yet", ""))?;
        Ok(self.arena.register(endpoint, access)?)
    }

    pub(crate) fn deregister(&mut self, mr: Mr) {
        if let Some(endpoint) = &mut self.endpoint {
            endpoint.deregister(mr);
        }
    }

    /// Starts a connection; [`LinkEvent::Up`] or [`LinkEvent::Down`] follows.
    pub(crate) fn connect(
        &mut self,
        peer: SocketAddr,
        options: ChannelOptions,
        now: Duration,
        timeout: Duration,
    ) -> Result<ChannelId, HostError> {
        let short = || HostError::usage(format!("queue to {peer}"), "no memory for its capsules", "give the host more");
        let capsules = Slots::take(&mut self.pool, options.entries, options.capsule as usize).ok_or_else(short)?;
        let Some(responses) = Slots::take(&mut self.pool, options.receives, RESPONSE) else {
            capsules.give(&mut self.pool);
            return Err(short());
        };
        let conn = match self.cm.resolve(peer, self.source, timeout) {
            Ok(conn) => conn,
            Err(error) => {
                capsules.give(&mut self.pool);
                responses.give(&mut self.pool);
                return Err(error.into());
            }
        };
        let generation = self.next_generation;
        self.next_generation = self.next_generation.wrapping_add(1).max(1);
        let deadline = now + timeout;
        let (qp, send_wr, up) = (None, 0, false);
        let channel = Channel { generation, conn, qp, peer, options, send_wr, capsules, responses, up, deadline };
        let index = self.channels.insert(channel) as u16;
        let id = ChannelId { index, generation };
        self.by_conn.insert(conn, id);
        self.connecting += 1;
        Ok(id)
    }

    fn channel(&mut self, id: ChannelId) -> Option<&mut Channel> {
        self.channels.get_mut(usize::from(id.index)).filter(|channel| channel.generation == id.generation)
    }

    /// The connection, for a provider's fault injection.
    pub(crate) fn conn(&mut self, id: ChannelId) -> Option<ConnId> {
        self.channel(id).map(|channel| channel.conn)
    }

    /// Entries of the send queue of a channel that stands.
    pub(crate) fn send_wr(&mut self, id: ChannelId) -> u32 {
        self.channel(id).map_or(0, |channel| channel.send_wr)
    }

    /// The memory of a capsule. Its slot is not being sent.
    pub(crate) fn capsule(&mut self, id: ChannelId, slot: u32) -> Option<&mut [u8]> {
        let channel = self.channel(id)?;
        let len = channel.options.capsule as usize;
        (slot < channel.options.entries).then(|| &mut channel.capsules.bytes(slot)[..len])
    }

    /// Sends the first `len` bytes of a capsule; [`LinkEvent::Sent`] follows if it is `signaled`.
    pub(crate) fn send(&mut self, id: ChannelId, slot: u32, len: u32, signaled: bool) -> Result<(), HostError> {
        let lkey = self.local.map_or(0, |mr| mr.lkey);
        let gone = || HostError::lost("capsule", "there is no such queue");
        let channel = self.channel(id).ok_or_else(gone)?;
        let (qp, addr) = (channel.qp.ok_or_else(gone)?, channel.capsules.addr(slot));
        let sge = Sge { addr, len, lkey };
        let wr = SendWr { tag: tag(SEND, id, slot), op: SendOp::Send, sge, signaled, solicited: false, inline: false };
        let endpoint = self.endpoint.as_mut().ok_or_else(gone)?;
        endpoint.post_send(qp, &wr).map_err(|error| HostError::lost("capsule", error))
    }

    /// Ends a channel. Nobody touches its memory afterwards; no event follows.
    pub(crate) fn close(&mut self, id: ChannelId) {
        if self.channel(id).is_none() {
            return;
        }
        let channel = self.channels.remove(usize::from(id.index));
        self.by_conn.remove(&channel.conn);
        self.connecting -= u32::from(!channel.up);
        if let (Some(endpoint), Some(qp)) = (&mut self.endpoint, channel.qp) {
            endpoint.disconnect(qp);
            endpoint.destroy(qp);
        }
        channel.capsules.give(&mut self.pool);
        channel.responses.give(&mut self.pool);
    }

    /// Disconnects without destroying: what is under way is flushed, and the end is reported.
    pub(crate) fn disconnect(&mut self, id: ChannelId) {
        let qp = self.channel(id).and_then(|channel| channel.qp);
        if let (Some(endpoint), Some(qp)) = (&mut self.endpoint, qp) {
            endpoint.disconnect(qp);
        }
    }

    /// Hands over what was posted, takes in what happened. Whether anything did. What that leads to, acknowledgements
    /// included, leaves with [`Link::flush`].
    pub(crate) fn poll(&mut self, now: Duration, events: &mut Vec<LinkEvent>) -> bool {
        let before = events.len();
        if self.connecting > 0 || now >= self.next_cm {
            self.next_cm = now + CM_INTERVAL;
            while let Some(event) = self.cm.poll_event(now) {
                self.on_cm(event, now, events);
            }
        }
        self.flush(now);
        self.poll_endpoint(now, events);
        if self.connecting > 0 {
            self.give_up_late(now, events);
        }
        events.len() > before
    }

    /// Hands over what was posted.
    pub(crate) fn flush(&mut self, now: Duration) {
        if let Some(endpoint) = &mut self.endpoint {
            endpoint.flush(now);
        }
    }

    fn give_up_late(&mut self, now: Duration, events: &mut Vec<LinkEvent>) {
        let late: Vec<ChannelId> = self
            .channels
            .iter()
            .filter(|(_, channel)| !channel.up && now >= channel.deadline)
            .map(|(index, channel)| ChannelId { index: index as u16, generation: channel.generation })
            .collect();
        for id in late {
            let Some(peer) = self.channel(id).map(|channel| channel.peer) else { continue };
            let mut error = HostError::lost(format!("connect to {peer}"), "it was not answered in time");
            error.remedy = "is a target listening there, and does UDP port 4791 pass both ways?".into();
            self.down(id, error, events);
        }
    }

    /// Takes in a batch of completions. True when there may be more.
    fn poll_endpoint(&mut self, now: Duration, events: &mut Vec<LinkEvent>) -> bool {
        let Some(endpoint) = &mut self.endpoint else { return false };
        let count = endpoint.poll(now, &mut self.completions[..]);
        for at in 0..count {
            let completion = self.completions[at];
            self.on_completion(&completion, events);
        }
        count == self.completions.len()
    }

    fn on_completion(&mut self, completion: &Completion, events: &mut Vec<LinkEvent>) {
        let (kind, slot) = (completion.tag >> 60, (completion.tag & 0xff_ffff) as u32);
        let (index, low) = ((completion.tag >> 24) as u16, (completion.tag >> 40) as u32 & 0xf_ffff);
        let Some(channel) =
            self.channels.get_mut(usize::from(index)).filter(|channel| channel.generation & 0xf_ffff == low)
        else {
            return;
        };
        let id = ChannelId { index, generation: channel.generation };
        if completion.status != WcStatus::Success {
            let what = format!("{} queue to {}", if kind == SEND { "send" } else { "receive" }, channel.peer);
            return self.down(id, HostError::lost(what, completion.status), events);
        }
        if kind == SEND {
            events.push(LinkEvent::Sent { channel: id, slot });
            return;
        }
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&channel.responses.bytes(slot)[..16]);
        events.push(LinkEvent::Response {
            channel: id,
            bytes,
            len: completion.byte_len,
            invalidated: completion.invalidated,
        });
        self.post_receive(id, slot);
    }

    fn post_receive(&mut self, id: ChannelId, slot: u32) {
        let lkey = self.local.map_or(0, |mr| mr.lkey);
        let Some(channel) = self.channel(id) else { return };
        let Some(qp) = channel.qp else { return };
        let sge = Sge { addr: channel.responses.addr(slot), len: RESPONSE as u32, lkey };
        if let Some(endpoint) = &mut self.endpoint {
            // A refusal means that the queue pair is dying; its completions tell.
            let _ = endpoint.post_recv(RecvQueue::Qp(qp), tag(RECEIVE, id, slot), &[sge]);
        }
    }

    fn on_cm(&mut self, event: CmEvent<P::Incoming, P::Outgoing>, now: Duration, events: &mut Vec<LinkEvent>) {
        match event {
            CmEvent::Resolved(outgoing) => {
                if let Some(id) = self.by_conn.get(&outgoing.conn()).copied()
                    && let Err(error) = self.ask(id, outgoing, now)
                {
                    self.down(id, error, events);
                }
            }
            CmEvent::Established { conn, private_data } => {
                let Some(id) = self.by_conn.get(&conn).copied() else { return };
                let Some(channel) = self.channel(id) else { return };
                let before = std::mem::replace(&mut channel.up, true);
                let qp = channel.qp;
                self.connecting -= u32::from(!before);
                let Some(qp) = qp else { return };
                match self.endpoint.as_mut().map(|endpoint| endpoint.established(qp)) {
                    Some(Err(error)) => self.down(id, error.into(), events),
                    _ => events.push(LinkEvent::Up { channel: id, private_data }),
                }
            }
            CmEvent::Refused { conn, reason, private_data } => {
                let Some(id) = self.by_conn.get(&conn).copied() else { return };
                let Some(peer) = self.channel(id).map(|channel| channel.peer) else { return };
                self.down(id, HostError::refused(format!("connect to {peer}"), reason, &private_data), events);
            }
            CmEvent::Disconnected { conn } => {
                let Some(id) = self.by_conn.get(&conn).copied() else { return };
                // What arrived before the end counts.
                while self.poll_endpoint(now, events) {}
                self.down(id, HostError::lost("connection", "the target disconnected"), events);
            }
            CmEvent::Failed { conn, error } => {
                if let Some(id) = self.by_conn.get(&conn).copied() {
                    self.down(id, error.into(), events);
                }
            }
            CmEvent::DeviceRemoved(_) => {
                for id in self.by_conn.values().copied().collect::<Vec<_>>() {
                    self.down(id, HostError::lost("device", "it was removed"), events);
                }
                self.endpoint = None;
                self.local = None;
                self.remote = None;
            }
            CmEvent::Request(_) | CmEvent::ListenerLost(_) => {}
        }
    }

    /// Makes the queue pair, posts its receives, sends the request.
    fn ask(&mut self, id: ChannelId, outgoing: P::Outgoing, now: Duration) -> Result<(), HostError> {
        if self.endpoint.is_none() {
            let options = EndpointOptions { srq_depth: 0, srq_sge: 1, comp_vector: 0 };
            let mut endpoint = self.provider.open_endpoint(outgoing.device(), self.thread, &options)?;
            self.local = Some(self.arena.register(&mut endpoint, Access::Local)?);
            self.remote = Some(self.arena.register(&mut endpoint, Access::Remote)?);
            self.endpoint = Some(endpoint);
        }
        let Some(channel) = self.channels.get_mut(usize::from(id.index)) else { return Ok(()) };
        let options = channel.options.clone();
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        let sizes = QpOptions {
            send_wr: send_entries(options.entries).min(endpoint.caps().max_qp_wr),
            recv_wr: options.receives.min(endpoint.caps().max_qp_wr),
            recv_sge: 1,
            inline: 0,
        };
        let qp = endpoint.create_outgoing(outgoing, &sizes)?;
        (channel.qp, channel.send_wr) = (Some(qp), sizes.send_wr);
        let most = endpoint.caps().max_responder_resources;
        for slot in 0..sizes.recv_wr {
            self.post_receive(id, slot);
        }
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        endpoint.flush(now);
        let params = ConnParams {
            private_data: &options.private_data,
            initiator_depth: options.initiator_depth,
            responder_resources: options.responder_resources.min(most),
        };
        Ok(endpoint.connect(qp, &params)?)
    }

    fn down(&mut self, id: ChannelId, error: HostError, events: &mut Vec<LinkEvent>) {
        if self.channel(id).is_some() {
            self.close(id);
            events.push(LinkEvent::Down { channel: id, error });
        }
    }

    /// Sleeps until something may have happened, at most for `timeout`.
    pub(crate) fn wait(&mut self, now: Duration, timeout: Duration, events: &mut Vec<LinkEvent>) {
        if let Some(endpoint) = &mut self.endpoint {
            let _ = endpoint.arm();
        }
        // What completed before the queue was armed makes no event: look once more.
        if self.poll(now, events) {
            return;
        }
        let timeout = self.next_timeout().map_or(timeout, |due| due.saturating_sub(now).min(timeout));
        let fds: Vec<BorrowedFd<'_>> = self.endpoint.iter().flat_map(Endpoint::fds).chain(self.cm.fd()).collect();
        let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        // Rounded up: a timer that is not due yet must not make the caller spin.
        let millis = timeout.as_micros().div_ceil(1000).min(60_000);
        let _ = poll(&mut polled, PollTimeout::try_from(millis as i32).unwrap_or(PollTimeout::MAX));
        self.woke();
        self.read_endpoint_events(events);
    }

    /// A descriptor of connection management may have been what ended a sleep.
    pub(crate) const fn woke(&mut self) {
        self.next_cm = Duration::ZERO;
    }

    /// When the provider has to be looked at even if nothing arrives.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.endpoint.as_ref().and_then(Endpoint::next_timeout).into_iter().chain(self.cm.next_timeout()).min()
    }

    #[cfg(test)]
    pub(crate) fn endpoint(&mut self) -> Option<&mut P::Endpoint> {
        self.endpoint.as_mut()
    }

    pub(crate) fn read_endpoint_events(&mut self, events: &mut Vec<LinkEvent>) {
        while let Some(event) = self.endpoint.as_mut().and_then(Endpoint::poll_event) {
            if let EndpointEvent::QpError(qp) = event
                && let Some(id) = self.by_qp(qp)
            {
                self.down(id, HostError::lost("queue pair", "the device reports an error of it"), events);
            }
        }
    }

    fn by_qp(&self, qp: QpId) -> Option<ChannelId> {
        let (index, channel) = self.channels.iter().find(|(_, channel)| channel.qp == Some(qp))?;
        Some(ChannelId { index: index as u16, generation: channel.generation })
    }
}
