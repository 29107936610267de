//! The messages of connection management: a management datagram (MAD) of 256 bytes with a message of class 7 in it (IBTA
//! 13.4 and 12.6), and the header that librdmacm puts in front of an application's private data (annex A11).
use core::net::{IpAddr, Ipv6Addr};

use crate::roce::{Psn, Qpn};

/// A management datagram.
pub type Mad = [u8; MAD_LEN];

/// A connection management message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Request for communication.
    Req(Box<Req>),
    /// Message receipt acknowledgement: wait longer.
    Mra(Mra),
    /// Reject.
    Rej(Box<Rej>),
    /// Reply to a request.
    Rep(Box<Rep>),
    /// Ready to use.
    Rtu(Ids),
    /// Disconnect request.
    Dreq(Ids, Qpn),
    /// Disconnect reply.
    Drep(Ids),
}

/// The communication IDs of both ends: the sender's first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// The sender's.
    pub local: u32,
    /// The receiver's.
    pub remote: u32,
}

/// Request for communication, without what RoCE has no use for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Req {
    /// The sender's communication ID.
    pub local: u32,
    /// What is asked for, see [`service_id`].
    pub service_id: u64,
    /// The sender's channel adapter.
    pub ca_guid: u64,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// RDMA READs that the sender lets the receiver have outstanding.
    pub responder_resources: u8,
    /// RDMA READs that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// How long the receiver may take to answer, as 4.096 us times a power of two.
    pub remote_response_timeout: u8,
    /// How long the sender may take to answer.
    pub local_response_timeout: u8,
    /// The first PSN that the sender wants to receive (IBTA 12.7.31: what the other end starts with).
    pub psn: Psn,
    /// How often silence is answered by a retransmission.
    pub retry_count: u8,
    /// How often "receiver not ready" is tolerated.
    pub rnr_retry_count: u8,
    /// The code of the path MTU.
    pub mtu: u8,
    /// How often a CM message is sent again.
    pub max_cm_retries: u8,
    /// Receives come from a shared queue.
    pub srq: bool,
    /// The sender's address.
    pub local_gid: [u8; 16],
    /// The receiver's address.
    pub remote_gid: [u8; 16],
    /// IP type of service.
    pub traffic_class: u8,
    /// IP time to live.
    pub hop_limit: u8,
    /// The ACK timeout of the connection.
    pub ack_timeout: u8,
    /// Private data: the header of librdmacm and the application's.
    pub private_data: [u8; REQ_PRIVATE],
}

/// Message receipt acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// Communication IDs.
    pub ids: Ids,
    /// Which message came: 0 REQ, 1 REP.
    pub message: u8,
    /// How much longer to wait, as 4.096 us times a power of two.
    pub timeout: u8,
}

/// Reject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rej {
    /// Communication IDs.
    pub ids: Ids,
    /// Which message is refused: 0 REQ, 1 REP, 2 none in particular.
    pub message: u8,
    /// Why, see [`reason`].
    pub reason: u16,
    /// Private data.
    pub private_data: [u8; REJ_PRIVATE],
}

/// Reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rep {
    /// Communication IDs.
    pub ids: Ids,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// The first PSN that the sender wants to receive (IBTA 12.7.31: what the other end starts with).
    pub psn: Psn,
    /// RDMA READs that the sender lets the receiver have outstanding.
    pub responder_resources: u8,
    /// RDMA READs that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// How long an acknowledgement may take the sender, as 4.096 us times a power of two.
    pub target_ack_delay: u8,
    /// How often "receiver not ready" is tolerated.
    pub rnr_retry_count: u8,
    /// Receives come from a shared queue.
    pub srq: bool,
    /// The sender's channel adapter.
    pub ca_guid: u64,
    /// Private data.
    pub private_data: [u8; REP_PRIVATE],
}

/// The header of librdmacm in the private data of a REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmaHeader {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source port.
    pub port: u16,
}

/// Why bytes are not a connection management message that this stack knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotCm;

/// Reject reasons (IBTA 12.6.7.2).
pub mod reason {
    /// No room for another connection.
    pub const NO_RESOURCES: u16 = 3;
    /// The answer did not come in time.
    pub const TIMEOUT: u16 = 4;
    /// Nobody listens.
    pub const INVALID_SERVICE_ID: u16 = 8;
    /// The queue pair is connected already.
    pub const STALE_CONNECTION: u16 = 10;
    /// The path MTU is reserved or unsupported.
    pub const INVALID_MTU: u16 = 26;
    /// The application refuses.
    pub const CONSUMER: u16 = 28;
}

/// The service ID of a TCP-like port, as librdmacm makes it.
#[must_use]
pub const fn service_id(port: u16) -> u64 {
    SERVICE_TCP | port as u64
}

/// The port of a service ID that librdmacm made.
#[must_use]
pub fn service_port(service_id: u64) -> Option<u16> {
    if service_id & !0xffff == SERVICE_TCP { u16::try_from(service_id & 0xffff).ok() } else { None }
}

/// The GID of an address: IPv4 is mapped into IPv6.
#[must_use]
pub const fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Message {
    /// Reads a datagram: its transaction ID and the message.
    ///
    /// # Errors
    /// When it is shorter than 256 bytes, of another class, or of a kind that this stack does not use.
    pub fn parse(bytes: &[u8]) -> Result<(u64, Self), NotCm> {
        let mad: &Mad = bytes.first_chunk().ok_or(NotCm)?;
        let header = Fields(mad.get(..HEADER_LEN).ok_or(NotCm)?);
        let body = Fields(mad.get(HEADER_LEN..).ok_or(NotCm)?);
        if header.u32(0)? != CM_SEND {
            return Err(NotCm);
        }
        let tid = header.u64(8)?;
        let ids = Ids { local: body.u32(0)?, remote: body.u32(4)? };
        let message = match header.u16(16)? {
            0x10 => Self::Req(Box::new(Req::parse(&body)?)),
            0x11 => Self::Mra(Mra { ids, message: body.u8(8)? >> 6, timeout: body.u8(9)? >> 3 }),
            0x12 => Self::Rej(Box::new(Rej {
                ids,
                message: body.u8(8)? >> 6,
                reason: body.u16(10)?,
                private_data: body.bytes(84)?,
            })),
            0x13 => Self::Rep(Box::new(Rep::parse(ids, &body)?)),
            0x14 => Self::Rtu(ids),
            0x15 => Self::Dreq(ids, Qpn::new(body.u24(8)?)),
            0x16 => Self::Drep(ids),
            _ => return Err(NotCm),
        };
        Ok((tid, message))
    }

    /// The datagram of a message.
    #[must_use]
    pub fn emit(&self, tid: u64) -> Mad {
        let mut mad = [0; MAD_LEN];
        let attribute: u16 = match self {
            Self::Req(_) => 0x10,
            Self::Mra(_) => 0x11,
            Self::Rej(_) => 0x12,
            Self::Rep(_) => 0x13,
            Self::Rtu(_) => 0x14,
            Self::Dreq(..) => 0x15,
            Self::Drep(_) => 0x16,
        };
        put(&mut mad, 0, CM_SEND.to_be_bytes());
        put(&mut mad, 8, tid.to_be_bytes());
        put(&mut mad, 16, attribute.to_be_bytes());
        let Some(body) = mad.get_mut(HEADER_LEN..) else {
            return mad;
        };
        match self {
            Self::Req(req) => req.emit(body),
            Self::Rep(rep) => rep.emit(body),
            Self::Mra(mra) => {
                mra.ids.emit(body);
                put(body, 8, [mra.message << 6, mra.timeout << 3]);
            }
            Self::Rej(rej) => {
                rej.ids.emit(body);
                put(body, 8, [rej.message << 6]);
                put(body, 10, rej.reason.to_be_bytes());
                put(body, 84, rej.private_data);
            }
            Self::Rtu(ids) | Self::Drep(ids) => ids.emit(body),
            Self::Dreq(ids, qpn) => {
                ids.emit(body);
                put24(body, 8, qpn.get());
            }
        }
        mad
    }
}

impl Ids {
    fn emit(self, body: &mut [u8]) {
        put(body, 0, self.local.to_be_bytes());
        put(body, 4, self.remote.to_be_bytes());
    }
}

impl Req {
    fn parse(body: &Fields<'_>) -> Result<Self, NotCm> {
        Ok(Self {
            local: body.u32(0)?,
            service_id: body.u64(8)?,
            ca_guid: body.u64(16)?,
            qpn: Qpn::new(body.u24(32)?),
            responder_resources: body.u8(35)?,
            initiator_depth: body.u8(39)?,
            remote_response_timeout: body.u8(43)? >> 3,
            psn: Psn::new(body.u24(44)?),
            local_response_timeout: body.u8(47)? >> 3,
            retry_count: body.u8(47)? & 7,
            mtu: body.u8(50)? >> 4,
            rnr_retry_count: body.u8(50)? & 7,
            max_cm_retries: body.u8(51)? >> 4,
            srq: body.u8(51)? & 8 != 0,
            local_gid: body.bytes(56)?,
            remote_gid: body.bytes(72)?,
            traffic_class: body.u8(92)?,
            hop_limit: body.u8(93)?,
            ack_timeout: body.u8(95)? >> 3,
            private_data: body.bytes(140)?,
        })
    }

    fn emit(&self, body: &mut [u8]) {
        put(body, 0, self.local.to_be_bytes());
        put(body, 8, self.service_id.to_be_bytes());
        put(body, 16, self.ca_guid.to_be_bytes());
        put24(body, 32, self.qpn.get());
        put(body, 35, [self.responder_resources]);
        put(body, 39, [self.initiator_depth]);
        // Transport service type 0: reliable connection.
        put(body, 43, [self.remote_response_timeout << 3]);
        put24(body, 44, self.psn.get());
        put(body, 47, [self.local_response_timeout << 3 | self.retry_count & 7]);
        put(body, 48, [0xff, 0xff]); // default partition
        put(body, 50, [self.mtu << 4 | self.rnr_retry_count & 7]);
        put(body, 51, [self.max_cm_retries << 4 | u8::from(self.srq) << 3]);
        put(body, 52, [0xff; 4]); // permissive LIDs: there are none
        put(body, 56, self.local_gid);
        put(body, 72, self.remote_gid);
        put(body, 91, [PACKET_RATE, self.traffic_class, self.hop_limit]);
        put(body, 95, [self.ack_timeout << 3]);
        put(body, 140, self.private_data);
    }
}

impl Rep {
    fn parse(ids: Ids, body: &Fields<'_>) -> Result<Self, NotCm> {
        Ok(Self {
            ids,
            qpn: Qpn::new(body.u24(12)?),
            psn: Psn::new(body.u24(20)?),
            responder_resources: body.u8(24)?,
            initiator_depth: body.u8(25)?,
            target_ack_delay: body.u8(26)? >> 3,
            rnr_retry_count: body.u8(27)? >> 5,
            srq: body.u8(27)? & 0x10 != 0,
            ca_guid: body.u64(28)?,
            private_data: body.bytes(36)?,
        })
    }

    fn emit(&self, body: &mut [u8]) {
        self.ids.emit(body);
        put24(body, 12, self.qpn.get());
        put24(body, 20, self.psn.get());
        put(body, 24, [self.responder_resources, self.initiator_depth]);
        put(body, 26, [self.target_ack_delay << 3, self.rnr_retry_count << 5 | u8::from(self.srq) << 4]);
        put(body, 28, self.ca_guid.to_be_bytes());
        put(body, 36, self.private_data);
    }
}

impl CmaHeader {
    /// Splits the private data of a REQ into this header and the application's part.
    #[must_use]
    pub fn parse(private_data: &[u8; REQ_PRIVATE]) -> Option<(Self, [u8; REQ_APPLICATION])> {
        let fields = Fields(private_data);
        if fields.u8(0).ok()? != 0 {
            return None;
        }
        let address = |at| -> Option<IpAddr> {
            let octets: [u8; 16] = fields.bytes(at).ok()?;
            match fields.u8(1).ok()? >> 4 {
                4 => Some(IpAddr::from(*octets.last_chunk::<4>()?)),
                6 => Some(IpAddr::V6(Ipv6Addr::from(octets))),
                _ => None,
            }
        };
        let header = Self { src: address(4)?, dst: address(20)?, port: fields.u16(2).ok()? };
        Some((header, fields.bytes(CMA_LEN).ok()?))
    }

    /// The private data of a REQ: this header and the application's part, of which at most 56 bytes fit.
    #[must_use]
    pub fn emit(&self, application: &[u8]) -> [u8; REQ_PRIVATE] {
        let mut out = [0; REQ_PRIVATE];
        put(&mut out, 1, [if self.src.is_ipv4() { 0x40 } else { 0x60 }]);
        put(&mut out, 2, self.port.to_be_bytes());
        for (at, address) in [(4, self.src), (20, self.dst)] {
            match address {
                IpAddr::V4(v4) => put(&mut out, at + 12, v4.octets()),
                IpAddr::V6(v6) => put(&mut out, at, v6.octets()),
            }
        }
        if let Some(rest) = out.get_mut(CMA_LEN..) {
            rest.iter_mut().zip(application).for_each(|(to, from)| *to = *from);
        }
        out
    }
}

/// Reads big-endian fields by their offset.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N], NotCm> {
        self.0.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or(NotCm)
    }

    fn u8(&self, at: usize) -> Result<u8, NotCm> {
        self.0.get(at).copied().ok_or(NotCm)
    }

    fn u16(&self, at: usize) -> Result<u16, NotCm> {
        self.bytes(at).map(u16::from_be_bytes)
    }

    fn u24(&self, at: usize) -> Result<u32, NotCm> {
        self.bytes(at).map(|[a, b, c]| u32::from_be_bytes([0, a, b, c]))
    }

    fn u32(&self, at: usize) -> Result<u32, NotCm> {
        self.bytes(at).map(u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64, NotCm> {
        self.bytes(at).map(u64::from_be_bytes)
    }
}

fn put<const N: usize>(out: &mut [u8], at: usize, field: [u8; N]) {
    if let Some(place) = out.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *place = field;
    }
}

fn put24(out: &mut [u8], at: usize, value: u32) {
    let [_, a, b, c] = value.to_be_bytes();
    put(out, at, [a, b, c]);
}

/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;
/// Private data of a REQ.
pub const REQ_PRIVATE: usize = 92;
/// Private data of a REQ that are the application's.
pub const REQ_APPLICATION: usize = REQ_PRIVATE - CMA_LEN;
/// Private data of a REP.
pub const REP_PRIVATE: usize = 196;
/// Private data of a REJ.
pub const REJ_PRIVATE: usize = 148;
const CMA_LEN: usize = 36;
const HEADER_LEN: usize = 24;
/// Base version 1, class 7 (connection management), class version 2, method 3 (send).
const CM_SEND: u32 = 0x0107_0203;
/// 40 Gb/s; nobody looks.
const PACKET_RATE: u8 = 7;
const SERVICE_TCP: u64 = 0x0106_0000;

const _: () = assert!(HEADER_LEN + 140 + REQ_PRIVATE == MAD_LEN);
const _: () = assert!(HEADER_LEN + 36 + REP_PRIVATE == MAD_LEN);
const _: () = assert!(HEADER_LEN + 84 + REJ_PRIVATE == MAD_LEN);

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn req() -> Req {
        let (src, dst) = (IpAddr::from([192, 168, 77, 1]), IpAddr::from([192, 168, 77, 2]));
        Req {
            local: 0x1122_3344,
            service_id: service_id(4420),
            ca_guid: 0x0102_0304_0506_0708,
            qpn: Qpn::new(0x12_3456),
            responder_resources: 128,
            initiator_depth: 3,
            remote_response_timeout: 20,
            local_response_timeout: 21,
            psn: Psn::new(0xab_cdef),
            retry_count: 7,
            rnr_retry_count: 6,
            mtu: 5,
            max_cm_retries: 15,
            srq: true,
            local_gid: gid(src),
            remote_gid: gid(dst),
            traffic_class: 0x68,
            hop_limit: 64,
            ack_timeout: 17,
            private_data: CmaHeader { src, dst, port: 0x8001 }.emit(&[0, 0, 0, 0, 32, 0, 31, 0]),
        }
    }

    #[test]
    fn golden_req() {
        let mad = Message::Req(Box::new(req())).emit(0x0123_4567_89ab_cdef);
        let golden = |at: usize, bytes: &[u8]| assert_eq!(&mad[at..at + bytes.len()], bytes, "offset {at}");
        golden(0, &[1, 7, 2, 3, 0, 0, 0, 0, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0, 0x10, 0, 0, 0, 0, 0, 0]);
        golden(24, &[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0, 0, 0, 0, 0, 0x01, 0x06, 0x11, 0x44]);
        golden(24 + 16, &[1, 2, 3, 4, 5, 6, 7, 8]);
        golden(24 + 32, &[0x12, 0x34, 0x56, 128, 0, 0, 0, 3, 0, 0, 0, 20 << 3]);
        golden(24 + 44, &[0xab, 0xcd, 0xef, 21 << 3 | 7, 0xff, 0xff, 0x56, 0xf8]);
        golden(24 + 56 + 10, &[0xff, 0xff, 192, 168, 77, 1]);
        golden(24 + 72 + 10, &[0xff, 0xff, 192, 168, 77, 2]);
        golden(24 + 92, &[0x68, 64, 0, 17 << 3]);
        golden(24 + 140, &[0, 0x40, 0x80, 0x01]);
        golden(24 + 140 + 16, &[192, 168, 77, 1]);
        golden(24 + 140 + 32, &[192, 168, 77, 2, 0, 0, 0, 0, 32, 0, 31, 0]);
        assert_eq!(Message::parse(&mad), Ok((0x0123_4567_89ab_cdef, Message::Req(Box::new(req())))));
    }

    #[test]
    fn golden_rep_and_rej() {
        let ids = Ids { local: 1, remote: 2 };
        let rep = Rep {
            ids,
            qpn: Qpn::new(0x01_0203),
            psn: Psn::new(0x04_0506),
            responder_resources: 9,
            initiator_depth: 16,
            target_ack_delay: 15,
            rnr_retry_count: 7,
            srq: true,
            ca_guid: 5,
            private_data: [0xaa; REP_PRIVATE],
        };
        let mad = Message::Rep(Box::new(rep)).emit(0);
        assert_eq!(mad[24..36], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0]);
        assert_eq!(mad[36..40], [1, 2, 3, 0]);
        assert_eq!(mad[44..52], [4, 5, 6, 0, 9, 16, 15 << 3, 0xf0]);
        assert_eq!(mad[60..], [0xaa; REP_PRIVATE]);
        let rej = Rej { ids, message: 1, reason: reason::CONSUMER, private_data: [0xbb; REJ_PRIVATE] };
        let mad = Message::Rej(Box::new(rej)).emit(0);
        assert_eq!(mad[32..36], [0x40, 0, 0, 28]);
        assert_eq!(mad[108..], [0xbb; REJ_PRIVATE]);
    }

    #[test]
    fn every_message_round_trips_and_no_truncation_passes() {
        let ids = Ids { local: 7, remote: 9 };
        for message in [
            Message::Req(Box::new(req())),
            Message::Mra(Mra { ids, message: 1, timeout: 20 }),
            Message::Rtu(ids),
            Message::Dreq(ids, Qpn::new(0x12_3456)),
            Message::Drep(ids),
        ] {
            let mad = message.emit(5);
            assert_eq!(Message::parse(&mad), Ok((5, message)));
            assert!((0..MAD_LEN).all(|len| Message::parse(&mad[..len]) == Err(NotCm)));
        }
    }

    #[test]
    fn the_cma_header_carries_both_families() {
        for (src, dst) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fe80::2")] {
            let header = CmaHeader { src: src.parse().expect("ip"), dst: dst.parse().expect("ip"), port: 5 };
            let (parsed, application) = CmaHeader::parse(&header.emit(&[3; 56])).expect("valid");
            assert_eq!((parsed, application), (header, [3; 56]));
        }
        let good = CmaHeader { src: [1; 4].into(), dst: [2; 4].into(), port: 5 }.emit(&[]);
        for (at, value) in [(0, 1), (1, 0x50), (1, 0)] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(CmaHeader::parse(&bad), None);
        }
    }

    #[test]
    fn service_ids() {
        assert_eq!(service_id(4420), 0x0106_1144);
        assert_eq!(service_port(0x0106_1144), Some(4420));
        assert_eq!(service_port(0x0111_1144), None, "the UDP port space");
    }

    proptest! {
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 230..300)) {
            let mut bytes = bytes;
            let _ = Message::parse(&bytes);
            bytes[..4].copy_from_slice(&CM_SEND.to_be_bytes());
            bytes[16] = 0;
            let _ = Message::parse(&bytes);
        }
    }
}
