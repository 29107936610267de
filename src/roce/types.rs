//! Small types that must not be mixed up: numbers, keys, path MTU.
use core::fmt;

/// A queue pair number (QPN), 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The general service interface: management datagrams of connection management.
    pub const GSI: Self = Self(1);

    /// The low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number, always below 2^24.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qpn {:#08x}", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// A local key (L_Key): names registered memory in a work request of our own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lkey(pub u32);

/// A remote key (R_Key): names registered memory in a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rkey(pub u32);

/// A path MTU: the payload of a full packet (IBTA 5.2, table "packet payload MTU").
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// Payload bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B256 => 256,
            Self::B512 => 512,
            Self::B1024 => 1024,
            Self::B2048 => 2048,
            Self::B4096 => 4096,
        }
    }

    /// The value in a CM REQ.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::B256 => 1,
            Self::B512 => 2,
            Self::B1024 => 3,
            Self::B2048 => 4,
            Self::B4096 => 5,
        }
    }

    /// The MTU of a value in a CM REQ; none for reserved values.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::B256,
            2 => Self::B512,
            3 => Self::B1024,
            4 => Self::B2048,
            5 => Self::B4096,
            _ => return None,
        })
    }

    /// The next smaller one.
    #[must_use]
    pub const fn smaller(self) -> Option<Self> {
        match self {
            Self::B256 => None,
            Self::B512 => Some(Self::B256),
            Self::B1024 => Some(Self::B512),
            Self::B2048 => Some(Self::B1024),
            Self::B4096 => Some(Self::B2048),
        }
    }

    /// The largest path MTU whose packets fit a network device of `device_mtu` bytes
    /// with all headers. None when not even 256 bytes fit.
    #[must_use]
    pub fn for_device(device_mtu: u32) -> Option<Self> {
        let room = device_mtu.checked_sub(MAX_HEADERS)?;
        [Self::B4096, Self::B2048, Self::B1024, Self::B512, Self::B256].into_iter().find(|mtu| mtu.bytes() <= room)
    }
}

/// The most that is sent around a payload: IPv6 (40), UDP (8), BTH, RETH and immediate data (32), ICRC (4).
const MAX_HEADERS: u32 = 84;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_of_a_device_leaves_room_for_headers() {
        assert_eq!(Mtu::for_device(1500), Some(Mtu::B1024));
        assert_eq!(Mtu::for_device(4200), Some(Mtu::B4096));
        assert_eq!(Mtu::for_device(65536), Some(Mtu::B4096));
        assert_eq!(Mtu::for_device(4096 + MAX_HEADERS), Some(Mtu::B4096));
        assert_eq!(Mtu::for_device(4096 + MAX_HEADERS - 1), Some(Mtu::B2048));
        assert_eq!(Mtu::for_device(256 + MAX_HEADERS - 1), None);
        assert_eq!(Mtu::for_device(10), None);
    }

    #[test]
    fn mtu_codes_round_trip() {
        for code in 0..=255 {
            if let Some(mtu) = Mtu::from_code(code) {
                assert_eq!(mtu.code(), code);
            } else {
                assert!(code == 0 || code > 5);
            }
        }
    }
}
