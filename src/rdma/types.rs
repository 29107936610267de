//! Values that cross the provider boundary.

use std::fmt;
use std::net::SocketAddr;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);
    };
}

id! {
    /// A device of a provider: a NIC, an rxe link, or an address of the software stack. Never reused.
    DeviceId(u32)
}
id! {
    /// A listener of a [`Cm`](super::Cm). Never reused.
    ListenerId(u32)
}
id! {
    /// A connection, from request or resolve to its end. Never reused in a process.
    ConnId(u64)
}
id! {
    /// A queue pair of one endpoint. Reused after `destroy`.
    QpId(u32)
}

/// Limits and abilities of a device. Code above the boundary asks these, never which provider it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Work requests a send or receive queue may hold.
    pub max_qp_wr: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// Queue pairs of the device.
    pub max_qp: u32,
    /// Receives a shared receive queue may hold; 0 = the device has none.
    pub max_srq_wr: u32,
    /// Scatter/gather elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes that a SEND may carry inline.
    pub max_inline: u32,
    /// RDMA READs that we may have outstanding on one queue pair.
    pub max_initiator_depth: u8,
    /// RDMA READs that a peer may have outstanding towards us.
    pub max_responder_resources: u8,
    /// SEND with invalidate works.
    pub send_with_invalidate: bool,
    /// The sink of an RDMA READ needs remote write access (iWARP).
    pub read_sink_needs_remote_write: bool,
}

/// What is known of a device, for the start-up table and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device.
    pub id: DeviceId,
    /// `rxe0`, `mlx5_0`, `udp`.
    pub name: String,
    /// The GID in use, in its text form, with its kind ("RoCE v2").
    pub gid: String,
    /// The link's active path MTU, in bytes.
    pub mtu: u32,
    /// Its limits.
    pub caps: Caps,
}

/// How an endpoint is sized.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Depth of the shared receive queue, in receives; 0 = none.
    pub srq_depth: u32,
    /// Elements per receive of the shared receive queue.
    pub srq_sge: u32,
    /// Completion vector to use where the device has several (spreads interrupts).
    pub comp_vector: u32,
}

/// How a queue pair is sized.
#[derive(Clone, Debug)]
pub struct QpOptions {
    /// Work requests in the send queue.
    pub send_wr: u32,
    /// Receives of its own; 0 = it takes from the shared receive queue.
    pub recv_wr: u32,
    /// Elements per receive of its own.
    pub recv_sge: u32,
    /// Bytes inline per send.
    pub inline: u32,
}

/// How a listener behaves.
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    /// Connection requests that may wait.
    pub backlog: u32,
    /// Type of service (DSCP and ECN bits) of what leaves on its connections.
    pub tos: Option<u8>,
}

/// A listener that stands.
#[derive(Clone, Debug)]
pub struct Listening {
    /// Its id.
    pub id: ListenerId,
    /// The address it is bound to.
    pub local: SocketAddr,
    /// The device, unless it listens on a wildcard address.
    pub device: Option<DeviceId>,
}

/// Parameters of an accept or a connect.
#[derive(Clone, Debug)]
pub struct ConnParams<'a> {
    /// Private data for the peer.
    pub private_data: &'a [u8],
    /// RDMA READs that we will have outstanding.
    pub initiator_depth: u8,
    /// RDMA READs that we let the peer have outstanding.
    pub responder_resources: u8,
}

/// A registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mr {
    /// Names it to the endpoint.
    pub id: u32,
    /// For our own work requests.
    pub lkey: u32,
    /// For a peer, where access allows.
    pub rkey: u32,
}

/// Who may touch registered memory. The target uses `Local` only, and `ReadSink` on iWARP for the length of a transfer;
/// the host registers its data buffers with `Remote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only our own work requests.
    Local,
    /// Also the answer to our RDMA READ, where the device counts that as a remote write.
    ReadSink,
    /// The peer may read and write.
    Remote,
}

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address in this process.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the region that holds it.
    pub lkey: u32,
}

/// Where a receive is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvQueue {
    /// The endpoint's shared receive queue.
    Shared,
    /// A queue pair's own.
    Qp(QpId),
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with invalidate of one of the peer's keys.
    SendInvalidate {
        /// The peer's key.
        rkey: u32,
    },
    /// RDMA WRITE into the peer's memory.
    RdmaWrite {
        /// Address at the peer.
        remote: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// RDMA READ from the peer's memory.
    RdmaRead {
        /// Address at the peer.
        remote: u64,
        /// The peer's key.
        rkey: u32,
    },
}

/// A send work request. One element only: every buffer above is contiguous, and rdma-core's rxe provider sums multi-element
/// lengths wrongly through its newer interface (up to rdma-core 61).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// Comes back in the completion.
    pub tag: u64,
    /// What to do.
    pub op: SendOp,
    /// Local memory; length 0 is allowed.
    pub sge: Sge,
    /// Completes visibly when it succeeds. A failed one always does.
    pub signaled: bool,
    /// Wakes a peer that armed its queue for solicited events only.
    pub solicited: bool,
    /// Copied out when handed to the device, at most [`Caps::max_inline`] bytes.
    pub inline: bool,
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcStatus {
    /// As asked.
    Success,
    /// A local buffer was too short.
    LocalLength,
    /// A local key or bound was wrong.
    LocalProtection,
    /// The queue pair was in or entered the error state before it ran.
    Flushed,
    /// The peer found the request invalid.
    RemoteInvalidRequest,
    /// The peer's key, bound or permission refused it.
    RemoteAccess,
    /// The peer could not carry it out.
    RemoteOperation,
    /// The peer did not answer.
    RetryExceeded,
    /// The peer had no receive posted for too long.
    RnrRetryExceeded,
    /// Any other status of the device, by its number.
    Other(u32),
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "flushed",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry counter exceeded",
            Self::RnrRetryExceeded => "receiver-not-ready retry counter exceeded",
            Self::Other(number) => return write!(f, "device status {number}"),
        };
        f.write_str(text)
    }
}

/// A work completion. If `status` is not success only `tag`, `status` and `qp` mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The work request's tag.
    pub tag: u64,
    /// How it ended.
    pub status: WcStatus,
    /// Bytes received (receives only).
    pub byte_len: u32,
    /// The queue pair; for a shared receive the one that took it. [`Completion::NO_QP`] when it is gone already.
    pub qp: QpId,
    /// The key of ours that the peer invalidated (receives only).
    pub invalidated: Option<u32>,
}

impl Completion {
    /// A queue pair that no longer exists.
    pub const NO_QP: QpId = QpId(u32::MAX);
    /// A value to fill arrays with.
    pub const EMPTY: Self = Self { tag: 0, status: WcStatus::Success, byte_len: 0, qp: Self::NO_QP, invalidated: None };
}

/// Why a work request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The queue holds as many as it can.
    #[error("the work queue is full")]
    Full,
    /// The queue pair does not exist.
    #[error("no such queue pair")]
    NoQp,
    /// The device refused it.
    #[error("the device refused the work request: errno {0}")]
    Device(i32),
}

/// Why a peer refused a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// Nobody listens on that service.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The peer still holds a connection of ours that we forgot.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The peer's application refused it; its private data say why.
    pub const CONSUMER: Self = Self(28);
}

/// What happened to a connection, a listener or a device.
#[derive(Debug)]
pub enum CmEvent<I, O> {
    /// A peer wants to connect.
    Request(I),
    /// A peer that we want to connect to is resolved.
    Resolved(O),
    /// The handshake is complete.
    Established {
        /// The connection.
        conn: ConnId,
        /// The accepting side's private data (connecting side only).
        private_data: Vec<u8>,
    },
    /// The connection ended, by either side.
    Disconnected {
        /// The connection.
        conn: ConnId,
    },
    /// The peer refused.
    Refused {
        /// The connection.
        conn: ConnId,
        /// Its reason.
        reason: RejectReason,
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// The connection could not be made or was lost for another reason.
    Failed {
        /// The connection.
        conn: ConnId,
        /// What went wrong.
        error: RdmaError,
    },
    /// A device goes away: destroy all that stands on it.
    DeviceRemoved(DeviceId),
    /// A listener no longer listens (its address or device changed); listen again, now and then.
    ListenerLost(ListenerId),
}

/// Asynchronous events of a device that touch one reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointEvent {
    /// The queue pair is in the error state.
    QpError(QpId),
    /// The queue pair took its last receive from the shared queue.
    LastReceive(QpId),
    /// The device failed as a whole.
    DeviceFailed,
    /// The shared receive queue fell below its limit.
    ReceivesLow,
    /// The port or its addresses changed.
    PortChanged,
}

/// An error of a provider that an operator can read: what, which object, what to try.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what}: {reason}{}{remedy}", if .remedy.is_empty() { "" } else { "; " })]
pub struct RdmaError {
    /// The object and what was tried with it.
    pub what: String,
    /// Why it failed.
    pub reason: String,
    /// What to do about it; may be empty.
    pub remedy: String,
    /// The system's error number, 0 if none.
    pub errno: i32,
}

impl RdmaError {
    /// From a system error number.
    pub fn os(what: impl Into<String>, errno: i32, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            reason: std::io::Error::from_raw_os_error(errno).to_string(),
            remedy: remedy.into(),
            errno,
        }
    }

    /// From words.
    pub fn new(what: impl Into<String>, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), reason: reason.into(), remedy: remedy.into(), errno: 0 }
    }
}
