//! The packet sequence number (PSN): 24 bits that wrap.
use core::fmt;

use crate::mutation::{self, Mutation};

/// A packet sequence number (PSN). It has no order of its own: two PSNs are compared by their distance round the ring,
/// which is meaningful while they are less than 2^23 apart (IBTA 9.7.2 keeps requests within that window).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// The number, always below 2^24.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The PSN `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n) & MASK)
    }

    /// The PSN one packet earlier.
    #[must_use]
    pub const fn before(self) -> Self {
        Self(self.0.wrapping_sub(1) & MASK)
    }

    /// How many packets `self` is ahead of `other`: negative when it is behind.
    #[must_use]
    pub fn ahead_of(self, other: Self) -> i32 {
        if mutation::is_on(Mutation::PsnWrap) {
            return self.0.cast_signed() - other.0.cast_signed();
        }
        // Shifting the 24-bit difference to the top of an i32 and back extends its sign.
        (self.0.wrapping_sub(other.0) << 8).cast_signed() >> 8
    }

    /// How many packets lie from `start` up to `self`, for a `self` known not to be behind `start`.
    #[must_use]
    pub const fn since(self, start: Self) -> u32 {
        self.0.wrapping_sub(start.0) & MASK
    }

    /// Whether `self` comes before `other`.
    #[must_use]
    pub fn precedes(self, other: Self) -> bool {
        self.ahead_of(other) < 0
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psn {:#08x}", self.0)
    }
}

const MASK: u32 = 0xff_ffff;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_wraps_at_24_bits() {
        let last = Psn::new(0xff_ffff);
        let zero = Psn::new(0x0100_0000);
        assert_eq!(zero.get(), 0);
        assert_eq!(last.plus(1), zero);
        assert_eq!(zero.before(), last);
        assert_eq!(zero.ahead_of(last), 1);
        assert_eq!(last.ahead_of(zero), -1);
        assert!(last.precedes(zero));
        assert!(!zero.precedes(last));
        assert_eq!(zero.since(last), 1);
    }

    #[test]
    fn the_window_is_half_the_ring() {
        let a = Psn::new(5);
        assert_eq!(a.plus(0x7f_ffff).ahead_of(a), 0x7f_ffff);
        assert_eq!(a.plus(0x80_0000).ahead_of(a), -0x80_0000);
    }
}
