//! The provider boundary: RDMA as verbs have it, without saying whose.
//!
//! Everything above this module (`target`, `host`) is written against these traits and is the same program on a NIC
//! (`verbs`) and on the software RoCEv2 stack (`soft`). The shape is that of verbs, not of sockets: work requests go
//! into a queue pair's list, [`Endpoint::flush`] rings one doorbell per queue pair, completions are polled in batches
//! and carry our own tag, and [`Endpoint::arm`] plus a file descriptor lets a reactor sleep.
//!
//! Two kinds of object live on two kinds of thread:
//!
//! * A [`Cm`] belongs to one connection-management thread. It listens, resolves, and reports [`CmEvent`]s.
//! * An [`Endpoint`] belongs to one reactor thread: all that this reactor holds of one device (protection domain,
//!   completion queues, shared receive queue, memory regions, queue pairs). A connection request ([`Incoming`]) travels
//!   from the first to the second once and is accepted there.
//!
//! Contract:
//! * On a failed completion only `tag`, `status` and `qp` mean anything.
//! * Memory named by a posted work request stays valid and, for receives and reads, unread until its completion; after a
//!   queue pair error until [`Endpoint::destroy`] returned.
//! * After [`Endpoint::disconnect`] every posted work request still completes (flushed); new ones complete flushed too,
//!   in order, so a marker posted last tells that the send queue is empty. Receives of a shared queue stay with it.
//! * Time is passed in: the monotonic clock as a [`Duration`] since an arbitrary start. Providers with clocks of their
//!   own (a NIC) ignore it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub mod local;
pub mod soft;
mod types;
pub use types::*;

#[cfg(feature = "verbs")]
pub mod verbs;

/// A way to reach hosts by RDMA. Shared by all threads.
pub trait Provider: Send + Sync + Sized + 'static {
    /// The word for it on the command line and in logs.
    const NAME: &'static str;
    /// Connection management, for one thread.
    type Cm: Cm<Incoming = Self::Incoming, Outgoing = Self::Outgoing>;
    /// A connection request that arrived and is neither accepted nor rejected.
    type Incoming: Incoming;
    /// A peer whose address and route are resolved, to be connected.
    type Outgoing: Outgoing;
    /// What one reactor holds of one device.
    type Endpoint: Endpoint<Incoming = Self::Incoming, Outgoing = Self::Outgoing>;

    /// Opens connection management.
    fn open_cm(&self) -> Result<Self::Cm, RdmaError>;

    /// Opens the objects of `device` that reactor number `reactor` needs. `device` comes from [`Incoming::device`],
    /// [`Outgoing::device`] or [`Listening::device`].
    fn open_endpoint(
        &self,
        device: DeviceId,
        reactor: usize,
        options: &EndpointOptions,
    ) -> Result<Self::Endpoint, RdmaError>;

    /// What is known of a device: name, GID, MTU, limits.
    fn device_info(&self, device: DeviceId) -> Option<DeviceInfo>;
}

/// Connection management: listeners and the events of every connection. Owned by one thread.
pub trait Cm: Send {
    /// See [`Provider::Incoming`].
    type Incoming;
    /// See [`Provider::Outgoing`].
    type Outgoing;

    /// Listens on an address. Port 0 is refused: NVMe hosts must know the port.
    fn listen(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<Listening, RdmaError>;

    /// Stops listening. Requests already reported stay valid.
    fn unlisten(&mut self, listener: ListenerId);

    /// Starts to resolve a peer; [`CmEvent::Resolved`] or [`CmEvent::Failed`] follows with the returned id.
    fn resolve(&mut self, peer: SocketAddr, source: Option<IpAddr>, timeout: Duration) -> Result<ConnId, RdmaError>;

    /// Becomes readable when [`Cm::poll_event`] may have something; `None` for providers driven by time alone.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// When [`Cm::poll_event`] has to be called even if nothing became readable.
    fn next_timeout(&self) -> Option<Duration>;

    /// The next event, if there is one. Never blocks.
    fn poll_event(&mut self, now: Duration) -> Option<CmEvent<Self::Incoming, Self::Outgoing>>;
}

/// A connection request from a peer.
pub trait Incoming: Send {
    /// The id that later events of this connection carry.
    fn conn(&self) -> ConnId;
    /// The listener that received it.
    fn listener(&self) -> ListenerId;
    /// The device it came over.
    fn device(&self) -> DeviceId;
    /// The peer's address.
    fn peer(&self) -> SocketAddr;
    /// The address that the peer reached, never a wildcard.
    fn local(&self) -> SocketAddr;
    /// Private data as it arrived; InfiniBand and RoCE pad it with zeros.
    fn private_data(&self) -> &[u8];
    /// RDMA READs that the peer lets us have outstanding (the peer's responder resources).
    fn initiator_depth(&self) -> u8;
    /// RDMA READs that the peer wants to have outstanding towards us.
    fn responder_resources(&self) -> u8;
    /// Rejects it with private data, as "consumer defined".
    fn reject(self, private_data: &[u8]);
}

/// A resolved peer.
pub trait Outgoing: Send {
    /// The id that later events of this connection carry.
    fn conn(&self) -> ConnId;
    /// The device by which the peer is reached.
    fn device(&self) -> DeviceId;
}

/// What one reactor holds of one device.
///
/// Teardown order inside: queue pairs, completion queues, shared receive queue, memory regions, domain.
pub trait Endpoint: Sized {
    /// See [`Provider::Incoming`].
    type Incoming;
    /// See [`Provider::Outgoing`].
    type Outgoing;

    /// The device's limits, as they bind this endpoint.
    fn caps(&self) -> &Caps;

    /// Registers memory for local use, or as a read sink where the device wants that (see [`Access`]).
    ///
    /// # Safety
    /// `addr..addr + len` is mapped, readable and writable, and stays so until [`Endpoint::deregister`] or the endpoint's
    /// drop; nothing but posted work requests and their owner touches it while they are outstanding.
    unsafe fn register(&mut self, addr: *mut u8, len: usize, access: Access) -> Result<Mr, RdmaError>;

    /// Withdraws a registration.
    fn deregister(&mut self, mr: Mr);

    /// Makes the queue pair that will answer a request. On failure the request comes back, to be rejected.
    fn create_incoming(
        &mut self,
        incoming: Self::Incoming,
        options: &QpOptions,
    ) -> Result<QpId, (Self::Incoming, RdmaError)>;

    /// Accepts: after this the peer may send. Receives were posted before.
    fn accept(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError>;

    /// Rejects a request whose queue pair was already made, and destroys that.
    fn reject(&mut self, qp: QpId, private_data: &[u8]);

    /// Makes the queue pair for a resolved peer.
    fn create_outgoing(&mut self, outgoing: Self::Outgoing, options: &QpOptions) -> Result<QpId, RdmaError>;

    /// Sends the connection request; [`CmEvent::Established`], [`CmEvent::Refused`] or [`CmEvent::Failed`] follows.
    fn connect(&mut self, qp: QpId, params: &ConnParams<'_>) -> Result<(), RdmaError>;

    /// On the connecting side: the answer arrived ([`CmEvent::Established`]); providers that complete the handshake in
    /// user space do it here.
    fn established(&mut self, qp: QpId) -> Result<(), RdmaError>;

    /// Puts a receive into a list; it is given to the device at the next [`Endpoint::flush`].
    fn post_recv(&mut self, queue: RecvQueue, tag: u64, sges: &[Sge]) -> Result<(), PostError>;

    /// Puts a work request into its queue pair's list; it is given to the device at the next [`Endpoint::flush`].
    fn post_send(&mut self, qp: QpId, wr: &SendWr) -> Result<(), PostError>;

    /// Hands every list to the device: one doorbell per queue.
    fn flush(&mut self, now: Duration);

    /// Fills `out` with completions; returns how many. Never blocks.
    fn poll(&mut self, now: Duration, out: &mut [Completion]) -> usize;

    /// Arms the wake-up: the next completion makes one of [`Endpoint::fds`] readable. Poll once more after arming.
    fn arm(&mut self) -> Result<(), RdmaError>;

    /// The descriptors to sleep on: completions, and asynchronous events.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// When [`Endpoint::poll`] has to be called even if nothing became readable.
    fn next_timeout(&self) -> Option<Duration>;

    /// The next asynchronous event. Never blocks.
    fn poll_event(&mut self) -> Option<EndpointEvent>;

    /// Moves the queue pair to the error state and tells the peer. May be called again.
    fn disconnect(&mut self, qp: QpId);

    /// Destroys the queue pair. After this nobody touches memory named by its work requests.
    fn destroy(&mut self, qp: QpId);
}
