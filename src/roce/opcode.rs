//! BTH opcodes (IBTA 9.2, table "OpCode field"): the ones of reliable connections, the two unreliable datagrams that
//! carry management, and the congestion notification packet of RoCEv2 (annex A17).

/// Where a packet stands in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

impl Place {
    /// The place of packet `index` of `count`.
    #[must_use]
    pub const fn of(index: u32, count: u32) -> Self {
        match (index == 0, index + 1 >= count) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, false) => Self::Middle,
            (false, true) => Self::Last,
        }
    }

    /// Whether a message starts here.
    #[must_use]
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends here.
    #[must_use]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// What a packet is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opcode {
    /// SEND, without anything extra.
    Send(Place),
    /// The end of a SEND with immediate data; never `First` or `Middle`.
    SendImm(Place),
    /// The end of a SEND with invalidate; never `First` or `Middle`.
    SendInv(Place),
    /// RDMA WRITE.
    RdmaWrite(Place),
    /// The end of an RDMA WRITE with immediate data; never `First` or `Middle`.
    RdmaWriteImm(Place),
    /// RDMA READ request.
    RdmaReadRequest,
    /// RDMA READ response.
    RdmaReadResponse(Place),
    /// ACK, NAK or RNR NAK.
    Acknowledge,
    /// The answer to an atomic operation.
    AtomicAcknowledge,
    /// Atomic compare and swap.
    CompareSwap,
    /// Atomic fetch and add.
    FetchAdd,
    /// An unreliable datagram: management on QP1.
    UdSend,
    /// An unreliable datagram with immediate data.
    UdSendImm,
    /// Congestion notification packet (CNP).
    Cnp,
}

impl Opcode {
    /// The wire value.
    #[must_use]
    pub const fn to_wire(self) -> u8 {
        use Place::{First, Last, Middle, Only};
        match self {
            Self::Send(First) => 0x00,
            Self::Send(Middle) => 0x01,
            Self::Send(Last) => 0x02,
            Self::SendImm(Last | First | Middle) => 0x03,
            Self::Send(Only) => 0x04,
            Self::SendImm(Only) => 0x05,
            Self::RdmaWrite(First) => 0x06,
            Self::RdmaWrite(Middle) => 0x07,
            Self::RdmaWrite(Last) => 0x08,
            Self::RdmaWriteImm(Last | First | Middle) => 0x09,
            Self::RdmaWrite(Only) => 0x0a,
            Self::RdmaWriteImm(Only) => 0x0b,
            Self::RdmaReadRequest => 0x0c,
            Self::RdmaReadResponse(First) => 0x0d,
            Self::RdmaReadResponse(Middle) => 0x0e,
            Self::RdmaReadResponse(Last) => 0x0f,
            Self::RdmaReadResponse(Only) => 0x10,
            Self::Acknowledge => 0x11,
            Self::AtomicAcknowledge => 0x12,
            Self::CompareSwap => 0x13,
            Self::FetchAdd => 0x14,
            Self::SendInv(Last | First | Middle) => 0x16,
            Self::SendInv(Only) => 0x17,
            Self::UdSend => 0x64,
            Self::UdSendImm => 0x65,
            Self::Cnp => 0x81,
        }
    }

    /// The opcode of a wire value; none for what is reserved or belongs to transports that are not served.
    #[must_use]
    pub const fn from_wire(value: u8) -> Option<Self> {
        use Place::{First, Last, Middle, Only};
        Some(match value {
            0x00 => Self::Send(First),
            0x01 => Self::Send(Middle),
            0x02 => Self::Send(Last),
            0x03 => Self::SendImm(Last),
            0x04 => Self::Send(Only),
            0x05 => Self::SendImm(Only),
            0x06 => Self::RdmaWrite(First),
            0x07 => Self::RdmaWrite(Middle),
            0x08 => Self::RdmaWrite(Last),
            0x09 => Self::RdmaWriteImm(Last),
            0x0a => Self::RdmaWrite(Only),
            0x0b => Self::RdmaWriteImm(Only),
            0x0c => Self::RdmaReadRequest,
            0x0d => Self::RdmaReadResponse(First),
            0x0e => Self::RdmaReadResponse(Middle),
            0x0f => Self::RdmaReadResponse(Last),
            0x10 => Self::RdmaReadResponse(Only),
            0x11 => Self::Acknowledge,
            0x12 => Self::AtomicAcknowledge,
            0x13 => Self::CompareSwap,
            0x14 => Self::FetchAdd,
            0x16 => Self::SendInv(Last),
            0x17 => Self::SendInv(Only),
            0x64 => Self::UdSend,
            0x65 => Self::UdSendImm,
            0x81 => Self::Cnp,
            _ => return None,
        })
    }

    /// Whether an RDMA extended transport header (RETH) follows the BTH.
    #[must_use]
    pub const fn has_reth(self) -> bool {
        match self {
            Self::RdmaReadRequest => true,
            Self::RdmaWrite(place) | Self::RdmaWriteImm(place) => place.starts(),
            _ => false,
        }
    }

    /// Whether an ACK extended transport header (AETH) follows the BTH.
    #[must_use]
    pub const fn has_aeth(self) -> bool {
        matches!(
            self,
            Self::Acknowledge
                | Self::AtomicAcknowledge
                | Self::RdmaReadResponse(Place::First | Place::Last | Place::Only)
        )
    }

    /// Whether this is something that a requester sends, in a reliable connection.
    #[must_use]
    pub const fn is_request(self) -> bool {
        !self.is_response() && !matches!(self, Self::UdSend | Self::UdSendImm | Self::Cnp)
    }

    /// Whether this is something that a responder sends, in a reliable connection.
    #[must_use]
    pub const fn is_response(self) -> bool {
        matches!(self, Self::RdmaReadResponse(_) | Self::Acknowledge | Self::AtomicAcknowledge)
    }

    /// Bytes of all headers from the BTH to the last extended one.
    #[must_use]
    pub const fn header_len(self) -> usize {
        const BTH: usize = 12;
        let imm_or_inv = match self {
            Self::SendImm(_) | Self::SendInv(_) | Self::RdmaWriteImm(_) | Self::UdSendImm => 4,
            _ => 0,
        };
        let reth = if self.has_reth() { 16 } else { 0 };
        let aeth = if self.has_aeth() { 4 } else { 0 };
        let rest = match self {
            Self::AtomicAcknowledge | Self::UdSend | Self::UdSendImm => 8,
            Self::CompareSwap | Self::FetchAdd => 28,
            Self::Cnp => 16,
            _ => 0,
        };
        BTH + reth + aeth + imm_or_inv + rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_values_round_trip() {
        let known = (0..=255).filter_map(Opcode::from_wire).count();
        assert_eq!(known, 26);
        for value in 0..=255 {
            if let Some(opcode) = Opcode::from_wire(value) {
                assert_eq!(opcode.to_wire(), value);
            }
        }
    }

    #[test]
    fn header_lengths_are_those_of_the_specification() {
        let len = |v| Opcode::from_wire(v).map(Opcode::header_len);
        assert_eq!(len(0x04), Some(12), "SEND only");
        assert_eq!(len(0x05), Some(16), "SEND only with immediate");
        assert_eq!(len(0x17), Some(16), "SEND only with invalidate");
        assert_eq!(len(0x06), Some(28), "WRITE first");
        assert_eq!(len(0x07), Some(12), "WRITE middle");
        assert_eq!(len(0x0b), Some(32), "WRITE only with immediate");
        assert_eq!(len(0x0c), Some(28), "READ request");
        assert_eq!(len(0x0d), Some(16), "READ response first");
        assert_eq!(len(0x0e), Some(12), "READ response middle");
        assert_eq!(len(0x11), Some(16), "ACK");
        assert_eq!(len(0x12), Some(24), "atomic ACK");
        assert_eq!(len(0x13), Some(40), "compare and swap");
        assert_eq!(len(0x64), Some(20), "UD SEND");
        assert_eq!(len(0x81), Some(28), "CNP");
    }

    #[test]
    fn place_of_each_packet() {
        assert_eq!(Place::of(0, 1), Place::Only);
        assert_eq!(Place::of(0, 2), Place::First);
        assert_eq!(Place::of(1, 3), Place::Middle);
        assert_eq!(Place::of(2, 3), Place::Last);
    }
}
