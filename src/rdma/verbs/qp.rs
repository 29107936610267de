//! A queue pair of an endpoint: its books, and its way from state to state.

use std::ffi::c_int;
use std::net::SocketAddr;

use rdma_sys as ib;
use tracing::debug;

use super::chain::Chain;
use super::device::Device;
use super::ids::Id;
use super::objects::{QueuePair, empty_attr};
use super::queue::Ring;
use super::sys;
use crate::rdma::QpOptions;

/// How long a peer waits before it sends again when we had no receive posted: code 12 is 0.64 ms (IBTA, RNR NAK timer
/// field). The CM's own value is 0, which is 655 ms.
const MIN_RNR_TIMER: u8 = 12;

/// Bits 21 to 23 of the attribute mask, which old kernels fill with what is for RoCE only.
const ROCE_MASK_BITS: c_int = 0x00e0_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Made; receives may be posted.
    Made,
    /// The connect request is out.
    Connecting,
    Ready,
    /// What is posted completes flushed.
    Error,
    /// The same, and the peer was told.
    Ended,
}

pub(super) struct Qp {
    // The queue pair before the id: the peer learns of the end when the id goes.
    pub(super) qp: QueuePair,
    pub(super) id: Id,
    pub(super) conn: u64,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    pub(super) active: bool,
    pub(super) tos: Option<u8>,
    pub(super) state: State,
    pub(super) number: u32,
    pub(super) max_inline: u32,
    pub(super) cq: usize,
    /// Entries that it may need there.
    pub(super) entries: u32,
    pub(super) shared: bool,
    pub(super) send: Ring,
    pub(super) sends: Chain,
    pub(super) recv: Ring,
    pub(super) recvs: Chain,
    pub(super) recv_sge: u32,
    pub(super) in_refusals: bool,
}

impl Qp {
    /// Through ready-to-receive to ready-to-send. `None` leaves the depths as the CM negotiated them.
    pub(super) fn make_ready(&self, device: &Device, depths: Option<(u8, u8)>) -> Result<(), i32> {
        // Once more the initial state: the access that a peer has was not known before the handshake.
        change(device, &self.id, &self.qp, ib::ibv_qp_state::IBV_QPS_INIT, |_| ())?;
        change(device, &self.id, &self.qp, ib::ibv_qp_state::IBV_QPS_RTR, |attr| {
            attr.min_rnr_timer = MIN_RNR_TIMER;
            if let Some(tos) = self.tos {
                attr.ah_attr.grh.traffic_class = tos;
            }
            if let Some((_, responder_resources)) = depths {
                attr.max_dest_rd_atomic = responder_resources;
            }
        })?;
        change(device, &self.id, &self.qp, ib::ibv_qp_state::IBV_QPS_RTS, |attr| {
            if let Some((initiator_depth, _)) = depths {
                attr.max_rd_atomic = initiator_depth;
            }
        })
    }

    /// In the error state by our doing.
    pub(super) fn is_dead(&self) -> bool {
        matches!(self.state, State::Error | State::Ended)
    }

    /// Moves it to the error state. May be called again.
    pub(super) fn fail(&mut self) {
        if self.is_dead() {
            return;
        }
        self.state = State::Error;
        if let Err(errno) = self.qp.to_error() {
            debug!(qpn = self.number, errno, "queue pair to the error state");
        }
    }
}

/// Moves a queue pair to a state with the attributes that the CM has for it.
pub(super) fn change(
    device: &Device,
    id: &Id,
    qp: &QueuePair,
    state: ib::ibv_qp_state::Type,
    adjust: impl FnOnce(&mut ib::ibv_qp_attr),
) -> Result<(), i32> {
    let mut attr = empty_attr();
    attr.qp_state = state;
    let mut mask = 0;
    // SAFETY: the id is ours and bound to a device; both are written by the call.
    if unsafe { ib::rdma_init_qp_attr(id.raw(), &mut attr, &mut mask) } != 0 {
        return Err(sys::errno());
    }
    if !device.is_iwarp() && !device.is_ethernet() {
        mask &= !ROCE_MASK_BITS;
    }
    adjust(&mut attr);
    qp.modify(&mut attr, mask)
}

/// What a new queue pair is put together from.
pub(super) struct Parts {
    pub(super) qp: QueuePair,
    pub(super) cq: usize,
    pub(super) entries: u32,
    pub(super) active: bool,
    pub(super) tos: Option<u8>,
}

impl Parts {
    pub(super) fn assemble(
        self,
        id: Id,
        conn: u64,
        (local, peer): (SocketAddr, SocketAddr),
        options: &QpOptions,
    ) -> Qp {
        Qp {
            number: self.qp.number(),
            qp: self.qp,
            id,
            conn,
            peer,
            local,
            active: self.active,
            tos: self.tos,
            state: State::Made,
            max_inline: options.inline,
            cq: self.cq,
            entries: self.entries,
            shared: options.recv_wr == 0,
            send: Ring::new(options.send_wr),
            sends: Chain::EMPTY,
            recv: Ring::new(options.recv_wr),
            recvs: Chain::EMPTY,
            recv_sge: options.recv_sge,
            in_refusals: false,
        }
    }
}
