//! One queue: a connected queue pair, its place in a controller, and what it has under way.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme::gate::Sender;
use nvme::registry::{ControllerId, KillReason, SubsystemId};

use super::fused::Detour;
use super::limits::Limiter;
use super::private_data::QueueRequest;
use super::request::RequestId;
use super::share::ShareId;
use super::shared::{Activity, Fence, QueueKey};
use crate::rdma::{ConnId, QpId, WcStatus};

/// Why a queue ends. Logged once per queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    HostDisconnected,
    ConnectionLost,
    DeviceRemoved,
    /// A work request failed: which kind, and how.
    WorkFailed(&'static str, WcStatus),
    /// The host broke the transport's rules.
    Protocol(&'static str),
    ControllerReset,
    ControllerShutdown,
    Killed(KillReason),
    QueueDisconnect,
    TargetStops,
    AcceptFailed,
    /// No Connect command came, or none that succeeded.
    NeverConnected,
    /// Data for or from the host are not moved on, and others wait for their buffers.
    KeepsBuffers,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostDisconnected => f.write_str("the host disconnected"),
            Self::ConnectionLost => f.write_str("the connection was lost"),
            Self::DeviceRemoved => f.write_str("the RDMA device was removed"),
            Self::WorkFailed(what, status) => write!(f, "{what} failed: {status}"),
            Self::Protocol(what) => write!(f, "the host broke the protocol: {what}"),
            Self::ControllerReset => f.write_str("the host reset the controller"),
            Self::ControllerShutdown => f.write_str("the host shut the controller down"),
            Self::Killed(reason) => write!(f, "the controller ended: {reason}"),
            Self::QueueDisconnect => f.write_str("the host sent a Disconnect command"),
            Self::TargetStops => f.write_str("the target stops"),
            Self::AcceptFailed => f.write_str("the connection could not be accepted"),
            Self::KeepsBuffers => f.write_str(
                "the host takes no answers, or gives no data, and others wait for the buffers of its commands",
            ),
            Self::NeverConnected => f.write_str("the host sent no Connect command that succeeded in time"),
        }
    }
}

/// Where a queue is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Accepted; commands may arrive before the handshake is seen to be complete.
    Live,
    /// The queue pair is in the error state; its work requests are being flushed.
    Closing { since: Duration },
    /// The queue pair is destroyed; commands of it are still in a backend.
    Draining,
}

/// A queue's place in a controller, from its Connect command on.
#[derive(Clone, Debug)]
pub(crate) struct Association {
    pub(crate) ctrl: ControllerId,
    pub(crate) subsystem: SubsystemId,
    /// Its place among this reactor's namespaces.
    pub(crate) place: u32,
    /// Who its commands come from, for gates.
    pub(crate) sender: Sender,
    /// Its host chose all command sets: it can use zones.
    pub(crate) knows_zones: bool,
    /// What its host may do.
    pub(crate) limiter: Arc<Limiter>,
    /// Writes of the same host's earlier life.
    pub(crate) fence: Arc<Fence>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) key: QueueKey,
    pub(crate) device: usize,
    pub(crate) qp: QpId,
    pub(crate) conn: ConnId,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) request: QueueRequest,
    pub(crate) life: Life,
    pub(crate) reason: Option<CloseReason>,
    pub(crate) association: Option<Association>,
    pub(crate) activity: Arc<Activity>,
    /// Receives come from the device's shared queue.
    pub(crate) shared_receives: bool,
    /// Where the buffers of its commands are counted.
    pub(crate) share: ShareId,
    /// In-capsule bytes that a command of it may carry.
    pub(crate) in_capsule: u32,
    /// Submission queue entries.
    pub(crate) sq_entries: u32,
    pub(crate) sqhd: u16,
    /// The host asked for no flow control: SQHD is FFFFh.
    pub(crate) no_sqhd: bool,
    /// Commands received and not answered.
    pub(crate) outstanding: u32,
    /// Free send queue entries.
    pub(crate) send_credits: u32,
    /// RDMA READs that may still be posted.
    pub(crate) read_credits: u32,
    /// Requests that wait for send queue entries, oldest first.
    pub(crate) wait_credits: VecDeque<RequestId>,
    /// Requests that wait to post more RDMA READs, oldest first.
    pub(crate) wait_reads: VecDeque<RequestId>,
    /// Requests that wait for the fence, oldest first.
    pub(crate) fenced: VecDeque<RequestId>,
    /// Responses that left and RDMA READs that arrived, modulo 2^32.
    pub(crate) progress: u32,
    /// Requests of it that a backend holds.
    pub(crate) executing: u32,
    /// The first half of a fused pair, whose second has to come next.
    pub(crate) detour: Detour,
}

impl Queue {
    pub(crate) fn is_admin(&self) -> bool {
        self.request.qid == 0
    }

    /// Advances the submission queue head for a command that is answered now; the value for its completion.
    pub(crate) fn next_sqhd(&mut self) -> u16 {
        if self.no_sqhd {
            return u16::MAX;
        }
        self.sqhd = if u32::from(self.sqhd) + 1 >= self.sq_entries { 0 } else { self.sqhd + 1 };
        self.sqhd
    }
}
