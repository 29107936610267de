//! DH-HMAC-CHAP: hosts prove that they know a secret, and controllers too where a host asks.
//!
//! What it is for: secrets in their written form ([`Secret`]), what a subsystem asks of a host ([`HostAuth`]), and the exchange
//! of one queue ([`exchange::Exchange`]). What it is not: it sends nothing, and it computes nothing that takes long: powers in
//! large groups come out as a [`Job`] that its owner runs where it holds up nobody, and hands back.
//!
//! Secrets, challenges and private values are overwritten when they are dropped, print nothing of themselves, and are compared
//! in constant time. (NVMe Base 2.x, DH-HMAC-CHAP Protocol.)

pub(crate) mod dh;
pub(crate) mod exchange;
mod initiator;
mod secret;
pub(crate) mod wire;

pub use dh::{Computed, Job};
pub use initiator::{AuthError, Initiator};
pub use secret::{Secret, SecretError};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

/// Hash function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// All of them, the strongest last.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    pub(crate) const fn from_wire(id: u8) -> Option<Self> {
        match id {
            1 => Some(Self::Sha256),
            2 => Some(Self::Sha384),
            3 => Some(Self::Sha512),
            _ => None,
        }
    }

    pub(crate) const fn to_wire(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }

    /// Bytes of its output.
    #[must_use]
    pub const fn output_len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    fn digest(self, data: &[u8]) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(match self {
            Self::Sha256 => Sha256::digest(data).to_vec(),
            Self::Sha384 => Sha384::digest(data).to_vec(),
            Self::Sha512 => Sha512::digest(data).to_vec(),
        })
    }

    fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
        fn run<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
            // HMAC takes keys of any length.
            let Ok(mut mac) = <M as KeyInit>::new_from_slice(key) else { return Vec::new() };
            parts.iter().for_each(|part| mac.update(part));
            mac.finalize().into_bytes().to_vec()
        }
        Zeroizing::new(match self {
            Self::Sha256 => run::<Hmac<Sha256>>(key, parts),
            Self::Sha384 => run::<Hmac<Sha384>>(key, parts),
            Self::Sha512 => run::<Hmac<Sha512>>(key, parts),
        })
    }
}

/// Diffie-Hellman group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// None: the challenge alone.
    Null,
    /// ffdhe2048 of RFC 7919.
    Ffdhe2048,
    /// ffdhe3072.
    Ffdhe3072,
    /// ffdhe4096.
    Ffdhe4096,
    /// ffdhe6144.
    Ffdhe6144,
    /// ffdhe8192.
    Ffdhe8192,
}

impl Group {
    /// All of them, the strongest last.
    pub const ALL: [Self; 6] =
        [Self::Null, Self::Ffdhe2048, Self::Ffdhe3072, Self::Ffdhe4096, Self::Ffdhe6144, Self::Ffdhe8192];

    pub(crate) fn from_wire(id: u8) -> Option<Self> {
        Self::ALL.get(usize::from(id)).copied()
    }

    pub(crate) const fn to_wire(self) -> u8 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 1,
            Self::Ffdhe3072 => 2,
            Self::Ffdhe4096 => 3,
            Self::Ffdhe6144 => 4,
            Self::Ffdhe8192 => 5,
        }
    }

    /// Bits of its prime; 0 of none.
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 2048,
            Self::Ffdhe3072 => 3072,
            Self::Ffdhe4096 => 4096,
            Self::Ffdhe6144 => 6144,
            Self::Ffdhe8192 => 8192,
        }
    }

    /// Bytes of a public value (DHVLEN).
    pub(crate) fn len(self) -> usize {
        usize::try_from(self.bits() / 8).unwrap_or_default()
    }
}

/// What a subsystem asks of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAuth {
    /// The host's secret.
    pub key: Secret,
    /// The controllers' secret, for hosts that want it proven.
    pub controller_key: Option<Secret>,
    /// Hash functions that are accepted; the strongest that the host has too is used.
    pub hashes: Vec<Hash>,
    /// Groups that are accepted; the strongest that the host has too is used.
    pub groups: Vec<Group>,
}

impl HostAuth {
    /// With everything that there is.
    #[must_use]
    pub fn new(key: Secret) -> Self {
        Self { key, controller_key: None, hashes: Hash::ALL.to_vec(), groups: Group::ALL.to_vec() }
    }
}

/// A response: what proves that the sender knows the key. `parts` are the sender's role and name, and the name of who asked.
fn response(
    hash: Hash,
    key: &[u8],
    shared: Option<&[u8]>,
    challenge: &[u8],
    sequence: u32,
    tid: u16,
    [role, from, to]: [&[u8]; 3],
) -> Zeroizing<Vec<u8>> {
    // With a shared secret the challenge is augmented by it.
    let challenge = match shared {
        Some(shared) => hash.hmac(&hash.digest(shared), &[challenge]),
        None => Zeroizing::new(challenge.to_vec()),
    };
    // Between the transaction and the role stands secure channel concatenation, which is none here.
    hash.hmac(key, &[&challenge, &sequence.to_le_bytes(), &tid.to_le_bytes(), &[0], role, from, &[0], to])
}
