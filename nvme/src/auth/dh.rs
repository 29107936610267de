//! Powers in the finite field groups of RFC 7919: the one part of authentication that takes long, so it is a [`Job`] that can be
//! done on any thread.
//!
//! The primes are computed from their definition, 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1, once per group.

use std::sync::OnceLock;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::Zeroizing;

use super::Group;

/// Bytes of a private exponent: more than twice the strength of the largest group, and short enough to be quick.
pub(crate) const EXPONENT_LEN: usize = 64;

/// Work that takes long: a power in a group, for one queue.
pub struct Job {
    group: Group,
    /// The peer's public value; `None` raises the generator.
    base: Option<Vec<u8>>,
    exponent: Zeroizing<[u8; EXPONENT_LEN]>,
}

impl core::fmt::Debug for Job {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Job").field("group", &self.group).finish_non_exhaustive()
    }
}

impl PartialEq for Job {
    /// Jobs are compared by tests alone, as what is to be done and not as what it is done with.
    fn eq(&self, other: &Self) -> bool {
        (self.group, &self.base) == (other.group, &other.base)
    }
}

impl Eq for Job {}

impl Clone for Job {
    fn clone(&self) -> Self {
        Self { group: self.group, base: self.base.clone(), exponent: self.exponent.clone() }
    }
}

impl Job {
    /// The public value of a private exponent.
    pub(crate) fn public(group: Group, exponent: Zeroizing<[u8; EXPONENT_LEN]>) -> Self {
        Self { group, base: None, exponent }
    }

    /// The secret shared with a peer. `None` when the peer's value is none that a peer could have: 0, 1, p - 1, or p and above.
    pub(crate) fn shared(group: Group, peer: &[u8], exponent: Zeroizing<[u8; EXPONENT_LEN]>) -> Option<Self> {
        let prime = prime(group)?;
        let largest = decremented(prime);
        // Values of one length are in the order of their bytes. What is public need not be compared in constant time.
        let sound = peer.len() == prime.len() && peer < &largest[..] && peer > &one(prime.len())[..];
        sound.then(|| Self { group, base: Some(peer.to_vec()), exponent })
    }

    /// Does it. The result has the length of the prime.
    #[must_use]
    pub fn run(&self) -> Computed {
        Computed(self.power().unwrap_or_default())
    }

    fn power(&self) -> Option<Zeroizing<Vec<u8>>> {
        let bits = self.group.bits();
        let modulus = BoxedUint::from_be_slice(prime(self.group)?, bits).ok()?;
        let params = BoxedMontyParams::new(Odd::new(modulus).into_option()?);
        let base = match &self.base {
            Some(peer) => BoxedUint::from_be_slice(peer, bits).ok()?,
            None => BoxedUint::from_be_slice(&two(self.group.len()), bits).ok()?,
        };
        let exponent_bits = u32::try_from(EXPONENT_LEN * 8).ok()?;
        let exponent = Zeroizing::new(BoxedUint::from_be_slice(self.exponent.as_slice(), exponent_bits).ok()?);
        let power = BoxedMontyForm::new(base, &params).pow_bounded_exp(&exponent, exponent_bits);
        let power = Zeroizing::new(power);
        Some(Zeroizing::new(Zeroizing::new(power.retrieve()).to_be_bytes().to_vec()))
    }
}

/// What a [`Job`] came to.
#[derive(Clone)]
pub struct Computed(Zeroizing<Vec<u8>>);

impl Computed {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl core::fmt::Debug for Computed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Computed(..)")
    }
}

/// The prime of a group, big-endian; `None` of the null group.
fn prime(group: Group) -> Option<&'static [u8]> {
    static PRIMES: [OnceLock<Vec<u8>>; 5] = [const { OnceLock::new() }; 5];
    let offset = match group {
        Group::Null => return None,
        Group::Ffdhe2048 => 560_316,
        Group::Ffdhe3072 => 2_625_351,
        Group::Ffdhe4096 => 5_736_041,
        Group::Ffdhe6144 => 15_705_020,
        Group::Ffdhe8192 => 10_965_728,
    };
    let at = usize::from(group.to_wire()).checked_sub(1)?;
    Some(PRIMES.get(at)?.get_or_init(|| make_prime(group.len(), offset)))
}

/// A prime of `len` bytes from its definition. The middle part has 128 bits less than the whole.
fn make_prime(len: usize, offset: u64) -> Vec<u8> {
    // e has two bits before its point: floor(2^(b-130) e) fills b - 128 bits.
    let mut middle = e(len - 16);
    // The one that is taken away at the end is borrowed from here.
    let mut carry = offset - 1;
    for byte in middle.iter_mut().rev() {
        let sum = u64::from(*byte) + (carry & 0xff);
        let [low, ..] = sum.to_le_bytes();
        *byte = low;
        carry = (carry >> 8) + (sum >> 8);
    }
    [&[0xff; 8][..], &middle, &[0xff; 8]].concat()
}

/// Euler's number as a big-endian binary fraction of `len` bytes, two bits of which stand before the point: the sum of 1/k!.
fn e(len: usize) -> Vec<u8> {
    // Guard words take what each division cuts off.
    let words = len.div_ceil(4) + 4;
    let mut sum = vec![0u32; words];
    let mut term = vec![0u32; words];
    if let Some(first) = term.first_mut() {
        *first = 1 << 30;
    }
    for divisor in 1u64.. {
        let mut carry = 0u64;
        for (sum, term) in sum.iter_mut().zip(&term).rev() {
            let total = u64::from(*sum) + u64::from(*term) + carry;
            *sum = low_word(total);
            carry = total >> 32;
        }
        let mut rest = 0u64;
        for word in &mut term {
            let value = rest << 32 | u64::from(*word);
            *word = low_word(value / divisor);
            rest = value % divisor;
        }
        if term.iter().all(|word| *word == 0) {
            break;
        }
    }
    let mut bytes: Vec<u8> = sum.iter().flat_map(|word| word.to_be_bytes()).collect();
    bytes.truncate(len);
    bytes
}

fn low_word(value: u64) -> u32 {
    let [b0, b1, b2, b3, ..] = value.to_le_bytes();
    u32::from_le_bytes([b0, b1, b2, b3])
}

fn one(len: usize) -> Vec<u8> {
    small(len, 1)
}

fn two(len: usize) -> Vec<u8> {
    small(len, 2)
}

fn small(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if let Some(last) = bytes.last_mut() {
        *last = value;
    }
    bytes
}

/// An odd number less one.
fn decremented(odd: &[u8]) -> Vec<u8> {
    let mut bytes = odd.to_vec();
    if let Some(last) = bytes.last_mut() {
        *last &= !1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02X}")).collect()
    }

    #[test]
    fn primes_are_those_of_the_rfc() {
        let ends = [
            (Group::Ffdhe2048, "886B423861285C97FFFFFFFFFFFFFFFF"),
            (Group::Ffdhe3072, "25E41D2B66C62E37FFFFFFFFFFFFFFFF"),
            (Group::Ffdhe4096, "C68A007E5E655F6AFFFFFFFFFFFFFFFF"),
            (Group::Ffdhe6144, "A40E329CD0E40E65FFFFFFFFFFFFFFFF"),
            (Group::Ffdhe8192, "D68C8BB7C5C6424CFFFFFFFFFFFFFFFF"),
        ];
        for (group, end) in ends {
            let prime = prime(group).unwrap();
            assert_eq!(prime.len() * 8, usize::try_from(group.bits()).unwrap());
            assert_eq!(hex(&prime[..24]), "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1");
            assert_eq!(hex(&prime[prime.len() - 16..]), end, "{group:?}");
        }
        assert_eq!(prime(Group::Null), None);
    }

    #[test]
    fn both_sides_compute_the_same_secret() {
        for group in [Group::Ffdhe2048, Group::Ffdhe3072] {
            let [ours, theirs] = [3u8, 5].map(|byte| Zeroizing::new([byte; EXPONENT_LEN]));
            let public =
                |exponent: &Zeroizing<[u8; EXPONENT_LEN]>| Job::public(group, exponent.clone()).run().bytes().to_vec();
            let (our_public, their_public) = (public(&ours), public(&theirs));
            assert_eq!(our_public.len(), group.len());
            let one = Job::shared(group, &their_public, ours).unwrap().run();
            let other = Job::shared(group, &our_public, theirs).unwrap().run();
            assert_eq!(one.bytes(), other.bytes());
            assert_ne!(one.bytes(), our_public);
        }
    }

    #[test]
    fn small_powers_are_right() {
        let mut exponent = Zeroizing::new([0; EXPONENT_LEN]);
        exponent[EXPONENT_LEN - 1] = 10;
        let power = Job::public(Group::Ffdhe2048, exponent).run();
        let mut expected = vec![0; 256];
        expected[254..].copy_from_slice(&1024u16.to_be_bytes());
        assert_eq!(power.bytes(), expected);
    }

    #[test]
    fn values_that_no_peer_can_have_are_refused() {
        let group = Group::Ffdhe2048;
        let prime = prime(group).unwrap();
        let accepted = |peer: &[u8]| Job::shared(group, peer, Zeroizing::new([1; EXPONENT_LEN])).is_some();
        let mut below = decremented(prime);
        for refused in [&small(256, 0)[..], &one(256), &below, prime, &[0xff; 256], &two(255), &two(257), &[]] {
            assert!(!accepted(refused), "{refused:x?}");
        }
        *below.last_mut().unwrap() -= 1;
        assert!(accepted(&two(256)) && accepted(&below));
    }
}
