//! RoCEv2 reliable connections, pure.
//!
//! What an RDMA NIC does for a reliable connection (RC) queue pair, as a state machine without input or output of its
//! own: packets, the invariant CRC, sequence numbers, requester, responder, completer, retransmission, memory keys,
//! connection management and congestion notification. It is wire-compatible with Linux `rdma_rxe` and with hardware
//! RoCEv2. Clause numbers are those of the InfiniBand Architecture Specification (IBTA), volume 1.
//!
//! What it is not: it opens no socket, reads no clock, starts no thread and knows nothing of NVMe.
//!
//! # Contract
//!
//! One [`Engine`] owns all queue pairs of one local address and one thread. The driver calls, in any order,
//! [`Engine::handle_packet`] for what arrived, [`Engine::handle_timeout`] when [`Engine::next_timeout`] has passed, and
//! then [`Engine::poll_transmit`] until it yields nothing, and [`Engine::poll_cq`] for completions. Time is a
//! [`core::time::Duration`] since any fixed start and never goes backwards. Registered memory is reached through the
//! [`Memory`] trait, after the key was checked here. Connections are set up by the [`cm`] agent, which is a machine of
//! its own and may live on another thread.
//!
//! Nothing that a peer sends can panic, allocate without bound, or log.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation, clippy::cast_sign_loss)
)]

pub mod cm;
pub mod icrc;
pub mod packet;

mod batch;
mod completer;
mod engine;
mod keys;
mod opcode;
mod psn;
mod qp;
mod rate;
mod recv;
mod requester;
mod responder;
mod shared;
#[cfg(test)]
mod tests;
mod types;
mod verbs;
mod window;

pub use batch::{Run, TxBatch};
pub use engine::{Config, Engine, QpConfig, QpEvent};

pub use keys::{Access, KeyError, Keys, Memory, RegionId, Registration, Span};
pub use opcode::{Opcode, Place};
pub use psn::Psn;
pub use rate::Dcqcn;
pub use shared::{Counters, CqId, SrqId};
pub use types::{Lkey, Mtu, Qpn, Rkey};
pub use verbs::{
    Completion, Connection, MAX_INLINE, MAX_SGE, PostError, QpState, RecvWr, RemoteAddr, SendOp, SendWr, Sge, Status,
    rnr_time,
};

/// The UDP port of RoCEv2, at both ends.
pub const UDP_PORT: u16 = 4791;
