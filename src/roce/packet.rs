//! The transport headers of a packet: what lies between the UDP header and the invariant CRC.
//!
//! [`Packet::parse`] turns bytes into a [`Header`] that cannot hold nonsense, and the payload without its padding.
//! [`Header::emit`] is the way back; the payload, the padding and the ICRC are then filled in by the caller. A parsed
//! packet has whole headers and a payload, and nothing is said yet about whether its lengths make sense to a queue pair.
use super::{Opcode, Psn, Qpn, Rkey};

/// A received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Everything before the payload.
    pub header: Header,
    /// The payload, without padding.
    pub payload: &'a [u8],
}

/// The headers of one packet. An extended header is present when the opcode has it, see [`Opcode::header_len`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is.
    pub opcode: Opcode,
    /// Solicited event: the receiver's completion wakes its consumer.
    pub solicited: bool,
    /// The sender asks for an acknowledgement.
    pub ack_req: bool,
    /// Backward explicit congestion notification, set in a CNP.
    pub becn: bool,
    /// The destination queue pair.
    pub dest: Qpn,
    /// The packet sequence number.
    pub psn: Psn,
    /// What follows the base transport header (BTH).
    pub ext: Ext,
}

/// The extended transport headers, by the shape that an opcode gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ext {
    /// None.
    None,
    /// RDMA extended transport header (RETH), with the immediate data of an RDMA WRITE of one packet.
    Reth(Reth, Option<u32>),
    /// Immediate data.
    Imm(u32),
    /// The key that a SEND invalidates (IETH).
    Inv(Rkey),
    /// ACK extended transport header (AETH).
    Aeth(Aeth),
    /// AETH and the old value of an atomic operation.
    AtomicAeth(Aeth, u64),
    /// Atomic extended transport header.
    Atomic(AtomicEth),
    /// Datagram extended transport header (DETH), with immediate data.
    Deth(Deth, Option<u32>),
}

/// RDMA extended transport header: where in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: Rkey,
    /// Length of the whole operation.
    pub len: u32,
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// What the responder says.
    pub syndrome: Syndrome,
    /// Message sequence number (MSN): how many messages the responder has completed, 24 bits.
    pub msn: u32,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: Rkey,
    /// What to swap in, or to add.
    pub swap_add: u64,
    /// What to compare with.
    pub compare: u64,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub q_key: u32,
    /// The sender's queue pair.
    pub src: Qpn,
}

/// The syndrome of an AETH (IBTA 9.7.5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Acknowledged; the low five bits are the end-to-end credit, 31 for "not counted".
    Ack(u8),
    /// Receiver not ready; the low five bits are the code of the timer.
    RnrNak(u8),
    /// Refused.
    Nak(Nak),
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nak {
    /// A packet is missing before this one.
    PsnSequence,
    /// The request is malformed or not allowed.
    InvalidRequest,
    /// The key, its access or its bounds do not allow it.
    RemoteAccess,
    /// The responder failed.
    RemoteOperational,
    /// Codes that reliable connections do not use.
    Other(u8),
}

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// Shorter than its headers, padding and ICRC.
    Truncated,
    /// A transport header version other than 0.
    Version,
    /// An opcode of another transport, or reserved.
    Opcode(u8),
    /// A partition that is not the default one.
    Partition,
}

impl<'a> Packet<'a> {
    /// Reads a whole UDP payload, ICRC included; the ICRC is not looked at.
    ///
    /// # Errors
    /// When the bytes cannot be a packet that this stack serves.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let (bytes, _icrc) = bytes.split_last_chunk::<ICRC_LEN>().ok_or(ParseError::Truncated)?;
        let (bth, rest) = bytes.split_first_chunk::<BTH_LEN>().ok_or(ParseError::Truncated)?;
        let [op, flags, pkey_hi, pkey_lo, ecn, d0, d1, d2, ack, p0, p1, p2] = *bth;
        if flags & 0x0f != 0 {
            return Err(ParseError::Version);
        }
        let opcode = Opcode::from_wire(op).ok_or(ParseError::Opcode(op))?;
        // IBTA 10.9.3: the membership bit does not take part in the comparison.
        if u16::from_be_bytes([pkey_hi, pkey_lo]) & 0x7fff != DEFAULT_PKEY & 0x7fff {
            return Err(ParseError::Partition);
        }
        let (ext, rest) = Ext::parse(opcode, rest)?;
        let pad = usize::from(flags >> 4 & 3);
        let len = rest.len().checked_sub(pad).ok_or(ParseError::Truncated)?;
        let (payload, _padding) = rest.split_at_checked(len).ok_or(ParseError::Truncated)?;
        let header = Header {
            opcode,
            solicited: flags & 0x80 != 0,
            ack_req: ack & 0x80 != 0,
            becn: ecn & 0x40 != 0,
            dest: Qpn::new(u32::from_be_bytes([0, d0, d1, d2])),
            psn: Psn::new(u32::from_be_bytes([0, p0, p1, p2])),
            ext,
        };
        Ok(Self { header, payload })
    }
}

impl Header {
    /// A header without flags and extended headers.
    #[must_use]
    pub const fn new(opcode: Opcode, dest: Qpn, psn: Psn) -> Self {
        Self { opcode, solicited: false, ack_req: false, becn: false, dest, psn, ext: Ext::None }
    }

    /// Bytes of a packet with this header and `payload` bytes: headers, payload, padding, ICRC.
    #[must_use]
    pub const fn packet_len(opcode: Opcode, payload: usize) -> usize {
        opcode.header_len() + payload.next_multiple_of(4) + ICRC_LEN
    }

    /// Writes the headers of a packet that carries `payload` bytes to the start of `out`, and zeroes the padding. Returns
    /// the place of the payload in `out`, or none when `out` is not [`Header::packet_len`] bytes long or the extended
    /// header is not the opcode's.
    #[must_use]
    pub fn emit<'o>(&self, payload: usize, out: &'o mut [u8]) -> Option<&'o mut [u8]> {
        if out.len() != Self::packet_len(self.opcode, payload) {
            return None;
        }
        let pad = payload.next_multiple_of(4) - payload;
        let (bth, rest) = out.split_first_chunk_mut::<BTH_LEN>()?;
        let [_, d0, d1, d2] = self.dest.get().to_be_bytes();
        let [_, p0, p1, p2] = self.psn.get().to_be_bytes();
        let [k0, k1] = DEFAULT_PKEY.to_be_bytes();
        let flags = u8::from(self.solicited) << 7 | u8::try_from(pad).ok()? << 4;
        let ecn = u8::from(self.becn) << 6;
        let ack = u8::from(self.ack_req) << 7;
        *bth = [self.opcode.to_wire(), flags, k0, k1, ecn, d0, d1, d2, ack, p0, p1, p2];
        let rest = self.ext.emit(self.opcode, rest)?;
        let (payload, tail) = rest.split_at_mut_checked(payload)?;
        tail.get_mut(..pad)?.fill(0);
        Some(payload)
    }
}

impl Ext {
    fn parse(opcode: Opcode, bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let mut r = Reader(bytes);
        let ext = match opcode {
            Opcode::RdmaReadRequest | Opcode::RdmaWrite(_) if opcode.has_reth() => {
                Self::Reth(Reth::parse(&mut r)?, None)
            }
            Opcode::RdmaWriteImm(_) if opcode.has_reth() => {
                let reth = Reth::parse(&mut r)?;
                Self::Reth(reth, Some(r.u32()?))
            }
            Opcode::SendImm(_) | Opcode::RdmaWriteImm(_) => Self::Imm(r.u32()?),
            Opcode::SendInv(_) => Self::Inv(Rkey(r.u32()?)),
            Opcode::AtomicAcknowledge => {
                let aeth = Aeth::parse(&mut r)?;
                Self::AtomicAeth(aeth, r.u64()?)
            }
            Opcode::CompareSwap | Opcode::FetchAdd => {
                let (va, rkey) = (r.u64()?, Rkey(r.u32()?));
                let (swap_add, compare) = (r.u64()?, r.u64()?);
                Self::Atomic(AtomicEth { va, rkey, swap_add, compare })
            }
            Opcode::UdSend => Self::Deth(Deth::parse(&mut r)?, None),
            Opcode::UdSendImm => {
                let deth = Deth::parse(&mut r)?;
                Self::Deth(deth, Some(r.u32()?))
            }
            Opcode::Cnp => {
                let _reserved: [u8; 16] = r.take()?;
                Self::None
            }
            _ if opcode.has_aeth() => Self::Aeth(Aeth::parse(&mut r)?),
            _ => Self::None,
        };
        Ok((ext, r.0))
    }

    fn emit<'o>(&self, opcode: Opcode, out: &'o mut [u8]) -> Option<&'o mut [u8]> {
        let len = opcode.header_len() - BTH_LEN;
        let (ext, rest) = out.split_at_mut_checked(len)?;
        let mut w = Writer(ext);
        match *self {
            Self::None if opcode == Opcode::Cnp => w.put(&[0; 16])?,
            Self::None => {}
            Self::Reth(reth, imm) => {
                w.put(&reth.va.to_be_bytes())?;
                w.put(&reth.rkey.0.to_be_bytes())?;
                w.put(&reth.len.to_be_bytes())?;
                if let Some(imm) = imm {
                    w.put(&imm.to_be_bytes())?;
                }
            }
            Self::Imm(value) | Self::Inv(Rkey(value)) => w.put(&value.to_be_bytes())?,
            Self::Aeth(aeth) => w.put(&aeth.to_wire())?,
            Self::AtomicAeth(aeth, old) => {
                w.put(&aeth.to_wire())?;
                w.put(&old.to_be_bytes())?;
            }
            Self::Atomic(a) => {
                w.put(&a.va.to_be_bytes())?;
                w.put(&a.rkey.0.to_be_bytes())?;
                w.put(&a.swap_add.to_be_bytes())?;
                w.put(&a.compare.to_be_bytes())?;
            }
            Self::Deth(deth, imm) => {
                w.put(&deth.q_key.to_be_bytes())?;
                w.put(&deth.src.get().to_be_bytes())?;
                if let Some(imm) = imm {
                    w.put(&imm.to_be_bytes())?;
                }
            }
        }
        w.0.is_empty().then_some(rest)
    }
}

impl Reth {
    fn parse(r: &mut Reader<'_>) -> Result<Self, ParseError> {
        Ok(Self { va: r.u64()?, rkey: Rkey(r.u32()?), len: r.u32()? })
    }
}

impl Aeth {
    fn parse(r: &mut Reader<'_>) -> Result<Self, ParseError> {
        let [syndrome, m0, m1, m2] = r.u32()?.to_be_bytes();
        Ok(Self { syndrome: Syndrome::from_wire(syndrome), msn: u32::from_be_bytes([0, m0, m1, m2]) })
    }

    fn to_wire(self) -> [u8; 4] {
        let [_, m0, m1, m2] = self.msn.to_be_bytes();
        [self.syndrome.to_wire(), m0, m1, m2]
    }
}

impl Deth {
    fn parse(r: &mut Reader<'_>) -> Result<Self, ParseError> {
        Ok(Self { q_key: r.u32()?, src: Qpn::new(r.u32()?) })
    }
}

impl Syndrome {
    /// An ACK that counts no credits: send queues are bounded by the upper layer.
    pub const ACK: Self = Self::Ack(31);

    /// The syndrome of a wire value. The reserved class 40h to 5Fh reads as a NAK with a reserved code.
    #[must_use]
    pub const fn from_wire(value: u8) -> Self {
        let code = value & 0x1f;
        match value >> 5 {
            0 | 4 => Self::Ack(code),
            1 | 5 => Self::RnrNak(code),
            3 | 7 => Self::Nak(match code {
                0 => Nak::PsnSequence,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperational,
                _ => Nak::Other(code),
            }),
            _ => Self::Nak(Nak::Other(31)),
        }
    }

    /// The wire value.
    #[must_use]
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::Ack(credit) => credit & 0x1f,
            Self::RnrNak(timer) => 0x20 | timer & 0x1f,
            Self::Nak(nak) => {
                0x60 | match nak {
                    Nak::PsnSequence => 0,
                    Nak::InvalidRequest => 1,
                    Nak::RemoteAccess => 2,
                    Nak::RemoteOperational => 3,
                    Nak::Other(code) => code & 0x1f,
                }
            }
        }
    }
}

/// Takes fixed-size fields off the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(ParseError::Truncated)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, ParseError> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, ParseError> {
        self.take().map(u64::from_be_bytes)
    }
}

/// Puts fields to the front.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put(&mut self, field: &[u8]) -> Option<()> {
        let (place, rest) = core::mem::take(&mut self.0).split_at_mut_checked(field.len())?;
        place.copy_from_slice(field);
        self.0 = rest;
        Some(())
    }
}

/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
/// Bytes of the invariant CRC.
pub const ICRC_LEN: usize = 4;
/// The default partition, full member.
const DEFAULT_PKEY: u16 = 0xffff;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::Place;
    use proptest::prelude::*;

    /// Emits into a dirty buffer, so that unwritten bytes show.
    fn emit(header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut out = vec![0xa5; Header::packet_len(header.opcode, payload.len())];
        header.emit(payload.len(), &mut out).expect("fits").copy_from_slice(payload);
        out
    }

    fn hdr(opcode: Opcode, ext: Ext) -> Header {
        let mut header = Header::new(opcode, Qpn::new(0x12_3456), Psn::new(0xfe_dcba));
        header.ext = ext;
        header
    }

    #[test]
    fn golden_write_only() {
        let mut header = hdr(
            Opcode::RdmaWrite(Place::Only),
            Ext::Reth(Reth { va: 0x0102_0304_0506_0708, rkey: Rkey(0xaabb_ccdd), len: 5 }, None),
        );
        header.ack_req = true;
        #[rustfmt::skip]
        let golden = [
            0x0a, 0x30, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x80, 0xfe, 0xdc, 0xba, // BTH, pad count 3
            0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0xaa, 0xbb, 0xcc, 0xdd, 0x00, 0x00, 0x00, 0x05, // RETH
            b'h', b'e', b'l', b'l', b'o', 0, 0, 0, // payload and padding
            0xa5, 0xa5, 0xa5, 0xa5, // ICRC, not ours to write
        ];
        assert_eq!(emit(&header, b"hello"), golden);
        assert_eq!(Packet::parse(&golden), Ok(Packet { header, payload: b"hello" }));
    }

    #[test]
    fn golden_send_with_invalidate_and_ack() {
        let mut header = hdr(Opcode::SendInv(Place::Only), Ext::Inv(Rkey(0x0102_0304)));
        header.solicited = true;
        let bytes = emit(&header, &[7; 16]);
        let golden = [0x17, 0x80, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x00, 0xfe, 0xdc, 0xba, 1, 2, 3, 4];
        assert_eq!(bytes.get(..16), Some(&golden[..]));
        let ack = hdr(Opcode::Acknowledge, Ext::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 0x00_0102 }));
        let golden =
            [0x11, 0, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0, 0xfe, 0xdc, 0xba, 0x1f, 0, 1, 2, 0xa5, 0xa5, 0xa5, 0xa5];
        assert_eq!(emit(&ack, &[]), golden);
    }

    #[test]
    fn syndromes_round_trip() {
        for value in 0..=0x7f_u8 {
            let syndrome = Syndrome::from_wire(value);
            if value >> 5 != 2 {
                assert_eq!(syndrome.to_wire(), value);
            }
        }
        assert_eq!(Syndrome::from_wire(0x60), Syndrome::Nak(Nak::PsnSequence));
        assert_eq!(Syndrome::from_wire(0x2e), Syndrome::RnrNak(14));
    }

    #[test]
    fn refuses_version_and_partition() {
        let good = emit(&hdr(Opcode::Send(Place::Only), Ext::None), b"");
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Packet::parse(&bytes).map(|_| ())
        };
        assert_eq!(with(1, 0x01), Err(ParseError::Version));
        assert_eq!(with(2, 0x7f), Ok(()), "limited membership");
        assert_eq!(with(2, 0x12), Err(ParseError::Partition));
        assert_eq!(with(0, 0x1f), Err(ParseError::Opcode(0x1f)));
        assert_eq!(with(1, 0x10), Err(ParseError::Truncated), "padding without payload");
    }

    fn any_header() -> impl Strategy<Value = Header> {
        let ops: Vec<Opcode> = (0..=255).filter_map(Opcode::from_wire).collect();
        (proptest::sample::select(ops), any::<[u64; 4]>(), any::<[bool; 3]>()).prop_map(|(opcode, n, flags)| {
            let low = |n: u64| u32::try_from(n & 0xffff_ffff).expect("masked");
            let aeth = Aeth { syndrome: Syndrome::Ack(3), msn: low(n[0]) & 0xff_ffff };
            let imm = Some(low(n[3]));
            let ext = match opcode {
                Opcode::RdmaWriteImm(Place::Only) => {
                    Ext::Reth(Reth { va: n[0], rkey: Rkey(low(n[1])), len: low(n[2]) }, imm)
                }
                _ if opcode.has_reth() => Ext::Reth(Reth { va: n[0], rkey: Rkey(low(n[1])), len: low(n[2]) }, None),
                Opcode::SendImm(_) | Opcode::RdmaWriteImm(_) => Ext::Imm(low(n[0])),
                Opcode::SendInv(_) => Ext::Inv(Rkey(low(n[0]))),
                Opcode::AtomicAcknowledge => Ext::AtomicAeth(aeth, n[1]),
                _ if opcode.has_aeth() => Ext::Aeth(aeth),
                Opcode::CompareSwap | Opcode::FetchAdd => {
                    Ext::Atomic(AtomicEth { va: n[0], rkey: Rkey(low(n[1])), swap_add: n[2], compare: n[3] })
                }
                Opcode::UdSend => Ext::Deth(Deth { q_key: low(n[0]), src: Qpn::new(low(n[1])) }, None),
                Opcode::UdSendImm => Ext::Deth(Deth { q_key: low(n[0]), src: Qpn::new(low(n[1])) }, imm),
                _ => Ext::None,
            };
            let (dest, psn) = (Qpn::new(low(n[2])), Psn::new(low(n[1])));
            Header { opcode, solicited: flags[0], ack_req: flags[1], becn: flags[2], dest, psn, ext }
        })
    }

    proptest! {
        #[test]
        fn round_trip_and_every_truncation(header in any_header(), payload in proptest::collection::vec(any::<u8>(), 0..70)) {
            let bytes = emit(&header, &payload);
            prop_assert_eq!(Packet::parse(&bytes), Ok(Packet { header, payload: &payload }));
            for len in 0..header.opcode.header_len() + ICRC_LEN {
                prop_assert_eq!(Packet::parse(&bytes[..len]), Err(ParseError::Truncated));
            }
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = Packet::parse(&bytes);
        }

        #[test]
        fn emit_refuses_a_buffer_of_another_size(header in any_header(), len in 0_usize..100) {
            let mut out = vec![0; len];
            let fits = len == Header::packet_len(header.opcode, 8);
            prop_assert_eq!(header.emit(8, &mut out).is_some(), fits);
        }
    }
}
