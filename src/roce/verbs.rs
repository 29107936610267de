//! Work requests and completions, with the words of the verbs.
use core::time::Duration;

use super::{Lkey, Mtu, Psn, Qpn, Rkey};

/// Scatter/gather element (SGE): registered memory of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sge {
    /// Virtual address.
    pub va: u64,
    /// Length.
    pub len: u32,
    /// Local key.
    pub lkey: Lkey,
}

/// The most elements in one work request.
pub const MAX_SGE: usize = 16;
/// The most bytes of a SEND that are copied when it is posted: an NVMe completion.
pub const MAX_INLINE: usize = 16;

/// What to post to a send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
    pub tag: u64,
    /// What to do.
    pub op: SendOp,
    /// The source of a SEND or RDMA WRITE, the sink of an RDMA READ.
    pub sges: &'a [Sge],
    /// Whether success is reported. Failure always is.
    pub signaled: bool,
    /// Whether the peer's receive completion is a solicited one.
    pub solicited: bool,
    /// Copy the source now, up to [`MAX_INLINE`] bytes of it: it may change as soon as this is posted.
    pub inline: bool,
}

/// The operation of a send work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendImm(u32),
    /// SEND with invalidate.
    SendInv(Rkey),
    /// RDMA WRITE.
    RdmaWrite(RemoteAddr),
    /// RDMA WRITE with immediate data.
    RdmaWriteImm(RemoteAddr, u32),
    /// RDMA READ.
    RdmaRead(RemoteAddr),
}

/// Where in the peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteAddr {
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: Rkey,
}

/// What to post to a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Comes back in the completion.
    pub tag: u64,
    /// Where the message goes.
    pub sges: &'a [Sge],
}

/// Why a work request was not taken. Nothing was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// No such queue pair or shared receive queue.
    Unknown,
    /// The queue is full.
    Full,
    /// More elements than [`MAX_SGE`], or more than 2^31 bytes.
    TooLong,
    /// The queue pair is not in a state that takes it.
    State,
}

/// A finished work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The tag of the work request.
    pub tag: u64,
    /// The result. When it is not a success, only the tag and the queue pair mean anything besides.
    pub status: Status,
    /// The queue pair.
    pub qpn: Qpn,
    /// Received or read bytes.
    pub byte_len: u32,
    /// Immediate data that came with a message.
    pub imm: Option<u32>,
    /// The key that the peer invalidated.
    pub invalidated: Option<Rkey>,
    /// Whether the peer asked to wake the consumer.
    pub solicited: bool,
}

/// The result of a work request, named as in the verbs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Done.
    Success,
    /// A message longer than the receive, or a response of the wrong length.
    LocLenErr,
    /// A local key that does not name those bytes.
    LocProtErr,
    /// Not executed, or not known to be: the queue pair failed before.
    WrFlushErr,
    /// The peer calls the request invalid.
    RemInvReqErr,
    /// The peer's key does not allow it.
    RemAccessErr,
    /// The peer failed.
    RemOpErr,
    /// The peer did not answer.
    RetryExcErr,
    /// The peer had no receive posted for too long.
    RnrRetryExcErr,
}

/// The state of a queue pair (IBTA 10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpState {
    /// Takes nothing. After [`super::Engine::create_qp`].
    Reset,
    /// Takes receives.
    Init,
    /// Ready to receive and to send.
    Rts,
    /// Flushes everything.
    Err,
}

/// What a queue pair knows of its peer: the result of connection management.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// The peer's address.
    pub remote: core::net::IpAddr,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// Path MTU, the smaller of both ends'.
    pub mtu: Mtu,
    /// Our first PSN.
    pub send_psn: Psn,
    /// The peer's first PSN.
    pub recv_psn: Psn,
    /// RDMA READs that we may have outstanding: the peer's responder resources.
    pub initiator_depth: u8,
    /// RDMA READs that the peer may have outstanding.
    pub responder_resources: u8,
    /// Local ACK timeout: 4.096 us times two to this power, or none for 0; see [`Connection::ack_timeout`].
    pub ack_timeout: u8,
    /// How often silence is answered by a retransmission before the queue pair fails, 0 to 7.
    pub retry_count: u8,
    /// How often "receiver not ready" is tolerated, 7 for ever.
    pub rnr_retry_count: u8,
    /// The code of the time for which we ask a peer to wait that finds no receive.
    pub min_rnr_timer: u8,
    /// IP type of service: the DSCP and the ECN bits of every packet.
    pub tos: u8,
    /// Whether the peer may RDMA READ.
    pub remote_read: bool,
    /// Whether the peer may RDMA WRITE.
    pub remote_write: bool,
}

impl Connection {
    /// The ACK timeout as a time (IBTA 9.7.6.1.3), from 17 ms to 2.1 s whatever was proposed, so that a queue pair whose peer
    /// is gone ends within 35 s: an owner waits for that before it lets go of memory.
    #[must_use]
    pub fn ack_timeout(&self) -> Duration {
        let code = if self.ack_timeout == 0 { LONGEST_ACK_TIMEOUT } else { self.ack_timeout };
        Duration::from_nanos(4096) * (1 << code.clamp(SHORTEST_ACK_TIMEOUT, LONGEST_ACK_TIMEOUT))
    }
}

const SHORTEST_ACK_TIMEOUT: u8 = 12;
/// Linux proposes 17, and 19 where the peer says that it may be late.
const LONGEST_ACK_TIMEOUT: u8 = 19;

/// The time of an RNR NAK timer code (IBTA 9.7.5.2.8).
#[must_use]
pub fn rnr_time(code: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    let units = HUNDREDTHS_OF_MS.get(usize::from(code & 31)).copied().unwrap_or(1);
    Duration::from_micros(10) * units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_peer_makes_us_wait_for_hours() {
        let time = |ack_timeout| Connection { ack_timeout, ..tests_support::connection() }.ack_timeout();
        assert_eq!(time(1), Duration::from_nanos(4096 << 12));
        assert_eq!(time(12), Duration::from_nanos(4096 << 12));
        assert_eq!(time(13), Duration::from_nanos(4096 << 13));
        for code in [0, 19, 20, 31, 255] {
            assert_eq!(time(code), Duration::from_nanos(4096 << 19), "{code}");
        }
        assert!(time(0) * 2 * 8 < Duration::from_secs(35), "with all retries");
    }

    #[test]
    fn rnr_times() {
        assert_eq!(rnr_time(0), Duration::from_micros(655_360));
        assert_eq!(rnr_time(1), Duration::from_micros(10));
        assert_eq!(rnr_time(14), Duration::from_millis(1) + Duration::from_micros(280));
        assert_eq!(rnr_time(31), Duration::from_micros(491_520));
    }
}

/// What the tests of several modules start from.
#[cfg(test)]
pub(super) mod tests_support {
    use super::*;

    pub(crate) fn connection() -> Connection {
        Connection {
            remote: core::net::IpAddr::from([10, 0, 0, 2]),
            remote_qpn: Qpn::new(0x11),
            mtu: Mtu::B1024,
            send_psn: Psn::new(0xff_fff0),
            recv_psn: Psn::new(0xff_ff00),
            initiator_depth: 4,
            responder_resources: 4,
            ack_timeout: 17,
            retry_count: 7,
            rnr_retry_count: 7,
            min_rnr_timer: 1,
            tos: 2,
            remote_read: true,
            remote_write: true,
        }
    }
}
