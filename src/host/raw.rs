//! A host without manners, for tests: any private data, any capsule bytes, any descriptor, keys altered at any time.
//!
//! It sends what it is told and shows what comes back; nothing is checked, nothing is retried. Calls that wait take a limit
//! and drive the host meanwhile.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::Status;

use super::error::{HostError, HostErrorKind};
use super::link::{ChannelId, ChannelOptions, Link, LinkEvent};
use super::wire;
use crate::mem::Buffer;
use crate::rdma::{Access, ConnId, Mr, Provider};

/// A queue of a [`RawHost`], as it is asked for.
#[derive(Clone, Debug)]
pub struct RawQueue {
    /// Sent as it is.
    pub private_data: Vec<u8>,
    /// Capsules that can be under way.
    pub entries: u32,
    /// Receives posted.
    pub receives: u32,
    /// The longest capsule.
    pub capsule: u32,
    /// RDMA READs that the target may have under way.
    pub responder_resources: u8,
}

impl RawQueue {
    /// What a well-mannered host asks for.
    pub fn new(qid: u16, entries: u16) -> Self {
        Self {
            private_data: wire::private_data(qid, entries, entries.wrapping_sub(1), 0).to_vec(),
            entries: u32::from(entries),
            receives: u32::from(entries),
            capsule: 64 + 16_384,
            responder_resources: 16,
        }
    }
}

/// A response as it arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawResponse {
    /// Its 16 bytes.
    pub bytes: [u8; 16],
    /// Bytes that arrived.
    pub len: u32,
    /// The key of ours that came invalidated with it.
    pub invalidated: Option<u32>,
}

impl RawResponse {
    /// Dword 0.
    pub fn dword0(&self) -> u32 {
        wire::u32_at(&self.bytes, 0)
    }

    /// Dwords 0 and 1.
    pub fn result(&self) -> u64 {
        wire::u64_at(&self.bytes, 0)
    }

    /// Submission queue head pointer.
    pub fn sqhd(&self) -> u16 {
        wire::u16_at(&self.bytes, 8)
    }

    /// Command identifier.
    pub fn cid(&self) -> u16 {
        wire::u16_at(&self.bytes, 12)
    }

    /// Status.
    pub fn status(&self) -> Status {
        Status::from_wire(wire::u16_at(&self.bytes, 14) >> 1)
    }
}

#[derive(Debug)]
struct Queue {
    channel: ChannelId,
    up: Option<Vec<u8>>,
    down: Option<HostError>,
    free: Vec<u32>,
    responses: VecDeque<RawResponse>,
}

/// Names a queue of a [`RawHost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawQueueId(usize);

/// See the module's doc.
pub struct RawHost<P: Provider> {
    link: Link<P>,
    queues: Vec<Queue>,
    events: Vec<LinkEvent>,
    start: Instant,
}

impl<P: Provider> std::fmt::Debug for RawHost<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawHost").field("queues", &self.queues).finish_non_exhaustive()
    }
}

impl<P: Provider> RawHost<P> {
    /// A host with so many bytes of memory for capsules and data, that connects from `source`.
    pub fn new(provider: Arc<P>, memory: usize, source: Option<IpAddr>) -> Result<Self, HostError> {
        let link = Link::open(provider, memory, source, 0)?;
        Ok(Self { link, queues: Vec::new(), events: Vec::new(), start: Instant::now() })
    }

    /// Asks for a connection and waits for the answer: the queue with the accept's private data, or why not.
    pub fn connect(
        &mut self,
        address: SocketAddr,
        queue: RawQueue,
        limit: Duration,
    ) -> Result<(RawQueueId, Vec<u8>), HostError> {
        let id = self.start_connect(address, queue, limit)?;
        self.finish_connect(id, limit).map(|private_data| (id, private_data))
    }

    /// Asks for a connection and does not wait.
    pub fn start_connect(
        &mut self,
        address: SocketAddr,
        queue: RawQueue,
        limit: Duration,
    ) -> Result<RawQueueId, HostError> {
        let options = ChannelOptions {
            entries: queue.entries,
            receives: queue.receives,
            capsule: queue.capsule,
            private_data: queue.private_data,
            responder_resources: queue.responder_resources,
            initiator_depth: 0,
        };
        let channel = self.link.connect(address, options, self.start.elapsed(), limit)?;
        let free = (0..queue.entries).rev().collect();
        self.queues.push(Queue { channel, up: None, down: None, free, responses: VecDeque::new() });
        Ok(RawQueueId(self.queues.len() - 1))
    }

    /// Waits for the answer to a connection request.
    pub fn finish_connect(&mut self, id: RawQueueId, limit: Duration) -> Result<Vec<u8>, HostError> {
        self.run("connection", limit, |host| {
            let queue = &mut host.queues[id.0];
            match (queue.down.take(), queue.up.take()) {
                (Some(error), _) => {
                    queue.down = Some(error.clone());
                    Some(Err(error))
                }
                (None, Some(private_data)) => Some(Ok(private_data)),
                (None, None) => None,
            }
        })?
    }

    /// Sends these bytes as a capsule. Waits for a free slot of the queue if need be.
    pub fn send(&mut self, id: RawQueueId, capsule: &[u8]) -> Result<(), HostError> {
        let slot = self.run("free capsule", Duration::from_secs(5), |host| {
            let queue = &mut host.queues[id.0];
            if let Some(error) = &queue.down {
                return Some(Err(error.clone()));
            }
            queue.free.pop().map(Ok)
        })??;
        let channel = self.queues[id.0].channel;
        let bytes = self.link.capsule(channel, slot).and_then(|bytes| bytes.get_mut(..capsule.len()));
        let bytes = bytes.ok_or_else(|| HostError::usage("capsule", "it is longer than this queue's", ""))?;
        bytes.copy_from_slice(capsule);
        self.link.send(channel, slot, capsule.len() as u32, true)?;
        self.turn();
        Ok(())
    }

    /// Puts a capsule into the send queue and does not ring its doorbell: the next call that turns the host does.
    pub fn post(&mut self, id: RawQueueId, capsule: &[u8]) -> Result<(), HostError> {
        let full = || HostError::usage("capsule", "all are under way", "");
        let slot = self.queues[id.0].free.pop().ok_or_else(full)?;
        let channel = self.queues[id.0].channel;
        let bytes = self.link.capsule(channel, slot).and_then(|bytes| bytes.get_mut(..capsule.len()));
        let bytes = bytes.ok_or_else(|| HostError::usage("capsule", "it is longer than this queue's", ""))?;
        bytes.copy_from_slice(capsule);
        self.link.send(channel, slot, capsule.len() as u32, true)
    }

    /// The next response of a queue.
    pub fn response(&mut self, id: RawQueueId, limit: Duration) -> Result<RawResponse, HostError> {
        self.run("response", limit, |host| {
            let queue = &mut host.queues[id.0];
            match (queue.responses.pop_front(), &queue.down) {
                (Some(response), _) => Some(Ok(response)),
                (None, Some(error)) => Some(Err(error.clone())),
                (None, None) => None,
            }
        })?
    }

    /// Sends a capsule and waits for a response.
    pub fn call(&mut self, id: RawQueueId, capsule: &[u8], limit: Duration) -> Result<RawResponse, HostError> {
        self.send(id, capsule)?;
        self.response(id, limit)
    }

    /// Waits for the end of a queue: why it ended, or `None` when it did not within `limit`.
    pub fn end_of(&mut self, id: RawQueueId, limit: Duration) -> Option<HostError> {
        self.run("end of a queue", limit, |host| host.queues[id.0].down.clone()).ok()
    }

    /// Why a queue ended, if it did.
    pub fn down(&self, id: RawQueueId) -> Option<&HostError> {
        self.queues[id.0].down.as_ref()
    }

    /// Responses that arrived and were not taken.
    pub fn waiting(&self, id: RawQueueId) -> usize {
        self.queues[id.0].responses.len()
    }

    /// Destroys a queue pair.
    pub fn close(&mut self, id: RawQueueId) {
        let channel = self.queues[id.0].channel;
        self.link.close(channel);
        self.queues[id.0].down = Some(HostError::usage("queue", "it was closed by its owner", ""));
    }

    /// Disconnects a queue pair; its end is then reported like one that the target began.
    pub fn disconnect(&mut self, id: RawQueueId) {
        self.link.disconnect(self.queues[id.0].channel);
    }

    /// The connection, for a provider's fault injection.
    pub fn conn(&mut self, id: RawQueueId) -> Option<ConnId> {
        self.link.conn(self.queues[id.0].channel)
    }

    /// A buffer, reachable by the target under [`RawHost::rkey`].
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        self.link.pool().take(len)
    }

    /// Gives a buffer back. The target has no command that names it.
    pub fn give(&mut self, buffer: Buffer) {
        self.link.pool().give(buffer);
    }

    /// The key of all of this host's memory, once something is connected.
    pub fn rkey(&self) -> u32 {
        self.link.rkey()
    }

    /// Registers all of this host's memory once more, under another key.
    pub fn register(&mut self, access: Access) -> Result<Mr, HostError> {
        self.link.register(access)
    }

    /// Ends a registration.
    pub fn deregister(&mut self, mr: Mr) {
        self.link.deregister(mr);
    }

    /// One round; never blocks.
    pub fn turn(&mut self) {
        let now = self.start.elapsed();
        self.link.poll(now, &mut self.events);
        self.link.flush(now);
        self.sort();
    }

    fn sort(&mut self) {
        for event in self.events.drain(..) {
            let (LinkEvent::Up { channel, .. }
            | LinkEvent::Down { channel, .. }
            | LinkEvent::Response { channel, .. }
            | LinkEvent::Sent { channel, .. }) = &event;
            let Some(queue) = self.queues.iter_mut().find(|queue| queue.channel == *channel) else { continue };
            match event {
                LinkEvent::Up { private_data, .. } => queue.up = Some(private_data),
                LinkEvent::Down { error, .. } => queue.down = Some(error),
                LinkEvent::Response { bytes, len, invalidated, .. } => {
                    queue.responses.push_back(RawResponse { bytes, len, invalidated });
                }
                LinkEvent::Sent { slot, .. } => queue.free.push(slot),
            }
        }
    }

    fn run<T>(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, HostError> {
        let deadline = self.start.elapsed() + limit;
        loop {
            self.turn();
            if let Some(value) = done(self) {
                return Ok(value);
            }
            let now = self.start.elapsed();
            if now >= deadline {
                return Err(HostError::new(what, HostErrorKind::TimedOut(limit), ""));
            }
            self.link.wait(now, (deadline - now).min(Duration::from_millis(100)), &mut self.events);
            self.sort();
        }
    }
}
