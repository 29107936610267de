//! Connection management: how two queue pairs learn of each other.
//!
//! An [`Agent`] speaks the CM protocol (IBTA chapter 12) over unreliable datagrams between the QP1s of two addresses, as the
//! listening and as the connecting side. It holds no queue pair: it tells what the peer said, and is told what to answer.
//!
//! # Contract
//!
//! As for the engine: [`Agent::handle_datagram`] for what arrived, [`Agent::handle_timeout`] when
//! [`Agent::next_timeout`] has passed, then [`Agent::poll_transmit`] until it yields nothing, and [`Agent::poll_event`].
//! A connection that was reported as a request is answered by [`Agent::accept`] or [`Agent::reject`]; until then a peer
//! that asks again is told to wait. Messages are repeated until they are answered or the peer is taken for dead.

mod agent;
mod mad;
#[cfg(test)]
mod tests;

pub use agent::{Accept, Agent, CmId, Connect, Event, Reply, Request};
pub use mad::{
    CmaHeader, Ids, MAD_LEN, Mad, Message, Mra, NotCm, REJ_PRIVATE, REP_PRIVATE, REQ_APPLICATION, REQ_PRIVATE, Rej,
    Rep, Req, gid, reason, service_id, service_port,
};

use super::packet::{Deth, Ext, Header, Packet};
use super::{Opcode, Psn, Qpn};

/// Bytes of the UDP payload that carries a datagram, ICRC included.
pub const DATAGRAM_LEN: usize = Header::packet_len(Opcode::UdSend, MAD_LEN);

/// The UDP payload that carries a datagram from QP1 to QP1, without its ICRC.
#[must_use]
pub fn emit_datagram(psn: Psn, mad: &Mad) -> [u8; DATAGRAM_LEN] {
    let mut out = [0; DATAGRAM_LEN];
    let mut header = Header::new(Opcode::UdSend, Qpn::GSI, psn);
    header.ext = Ext::Deth(Deth { q_key: Q_KEY, src: Qpn::GSI }, None);
    if let Some(place) = header.emit(MAD_LEN, &mut out) {
        place.copy_from_slice(mad);
    }
    out
}

/// The datagram in a UDP payload; none when it is not one for QP1.
#[must_use]
pub fn parse_datagram(bytes: &[u8]) -> Option<&[u8]> {
    let packet = Packet::parse(bytes).ok()?;
    match packet.header.ext {
        Ext::Deth(deth, None) if packet.header.dest == Qpn::GSI && deth.q_key == Q_KEY => Some(packet.payload),
        _ => None,
    }
}

/// The queue key of QP1 (IBTA 3.5.3).
const Q_KEY: u32 = 0x8001_0000;
