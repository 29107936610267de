//! The host's side of an exchange, for our own hosts.

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::dh::{EXPONENT_LEN, Job};
use super::{Group, Hash, Secret, response};

/// The host's side of one exchange on one queue.
pub struct Initiator {
    hostnqn: Vec<u8>,
    subnqn: Vec<u8>,
    key: Secret,
    controller_key: Option<Secret>,
    tid: u16,
    exponent: Zeroizing<[u8; EXPONENT_LEN]>,
    challenge: Zeroizing<Vec<u8>>,
    /// What the controller has to answer.
    expected: Option<Zeroizing<Vec<u8>>>,
}

impl core::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Initiator").field("tid", &self.tid).finish_non_exhaustive()
    }
}

/// Why an exchange went no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthError {
    /// The target says that authentication failed, with its reason code explanation.
    Refused(u8),
    /// What it sent makes no sense.
    Message,
    /// It does not know the controllers' secret.
    Controller,
}

impl core::fmt::Display for AuthError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Refused(why) => write!(f, "the target refuses the authentication (reason {why})"),
            Self::Message => f.write_str("the target's message makes no sense"),
            Self::Controller => f.write_str("the target does not know the controllers' secret"),
        }
    }
}

impl core::error::Error for AuthError {}

impl Initiator {
    /// With the host's secret, the controllers' if that is to be proven, and a number for the exchange (T_ID).
    #[must_use]
    pub fn new(
        hostnqn: &str,
        subnqn: &str,
        key: Secret,
        controller_key: Option<Secret>,
        tid: u16,
        random: fn(&mut [u8]),
    ) -> Self {
        let mut exponent = Zeroizing::new([0; EXPONENT_LEN]);
        random(exponent.as_mut_slice());
        // As long as the longest hash function asks for.
        let mut challenge = Zeroizing::new(vec![0; Hash::Sha512.output_len()]);
        random(&mut challenge);
        let (hostnqn, subnqn) = (hostnqn.as_bytes().to_vec(), subnqn.as_bytes().to_vec());
        Self { hostnqn, subnqn, key, controller_key, tid, exponent, challenge, expected: None }
    }

    /// AUTH_Negotiate with these hash functions and groups.
    #[must_use]
    pub fn negotiate(&self, hashes: &[Hash], groups: &[Group]) -> Vec<u8> {
        let mut message = vec![0, 0, 0, 0];
        message.extend_from_slice(&self.tid.to_le_bytes());
        // No secure channel; one protocol.
        message.extend_from_slice(&[0, 1]);
        let count = |len: usize| u8::try_from(len).unwrap_or(u8::MAX);
        message.extend_from_slice(&[1, 0, count(hashes.len()), count(groups.len())]);
        message.extend(hashes.iter().map(|hash| hash.to_wire()));
        message.resize(8 + 4 + 30, 0);
        message.extend(groups.iter().map(|group| group.to_wire()));
        message.resize(8 + 64, 0);
        message
    }

    /// DH-HMAC-CHAP_Reply to what the target sent. Takes as long as powers in the group take.
    ///
    /// # Errors
    /// It was no challenge.
    pub fn reply(&mut self, message: &[u8]) -> Result<Vec<u8>, AuthError> {
        let (header, rest) = self.header(message, 0x01)?;
        let [len, _, hash, group, d0, d1, s0, s1, s2, s3] = header;
        let hash =
            Hash::from_wire(hash).filter(|hash| hash.output_len() == usize::from(len)).ok_or(AuthError::Message)?;
        let group = Group::from_wire(group).ok_or(AuthError::Message)?;
        let sequence = u32::from_le_bytes([s0, s1, s2, s3]);
        let (challenge, rest) = rest.split_at_checked(hash.output_len()).ok_or(AuthError::Message)?;
        let peer = rest.get(..usize::from(u16::from_le_bytes([d0, d1]))).ok_or(AuthError::Message)?;
        let (mut public, mut shared) = (Vec::new(), None);
        if group != Group::Null {
            let job = Job::shared(group, peer, self.exponent.clone()).ok_or(AuthError::Message)?;
            public = Job::public(group, self.exponent.clone()).run().bytes().to_vec();
            shared = Some(job.run());
        }
        let shared = shared.as_ref().map(super::Computed::bytes);
        let (host, subsystem) = (&self.hostnqn, &self.subnqn);
        let key = self.key.key_of(host);
        let proof = response(hash, &key, shared, challenge, sequence, self.tid, [b"HostHost", host, subsystem]);
        let own = self.challenge.get(..hash.output_len()).unwrap_or_default();
        self.expected = self.controller_key.as_ref().map(|key| {
            let key = key.key_of(subsystem);
            response(hash, &key, shared, own, sequence, self.tid, [b"Controller", subsystem, host])
        });
        let [t0, t1] = self.tid.to_le_bytes();
        let [p0, p1] = u16::try_from(public.len()).unwrap_or_default().to_le_bytes();
        let mut reply = vec![1, 2, 0, 0, t0, t1, len, 0, self.controller_key.is_some().into(), 0, p0, p1];
        reply.extend_from_slice(&sequence.to_le_bytes());
        reply.extend_from_slice(&proof);
        reply.extend_from_slice(own);
        reply.extend_from_slice(&public);
        Ok(reply)
    }

    /// Success1: the target accepts, and proves itself if that was asked for. What is to be sent then, if anything.
    ///
    /// # Errors
    /// It does not accept, or did not prove itself.
    pub fn finish(&self, message: &[u8]) -> Result<Option<Vec<u8>>, AuthError> {
        let (header, rest) = self.header(message, 0x03)?;
        let [len, _, proves, ..] = header;
        let Some(expected) = &self.expected else { return Ok(None) };
        let proof = rest.get(..usize::from(len)).filter(|_| proves & 1 != 0).ok_or(AuthError::Controller)?;
        if !bool::from(expected.as_slice().ct_eq(proof)) {
            return Err(AuthError::Controller);
        }
        let [t0, t1] = self.tid.to_le_bytes();
        Ok(Some(vec![1, 4, 0, 0, t0, t1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    }

    /// Bytes 6 to 15 of a message of this kind, and what follows.
    fn header<'a>(&self, message: &'a [u8], id: u8) -> Result<([u8; 10], &'a [u8]), AuthError> {
        if let [0, 0xf1, _, _, _, _, _, why, ..] = message {
            return Err(AuthError::Refused(*why));
        }
        let (start, rest) = message.split_first_chunk::<6>().ok_or(AuthError::Message)?;
        let (header, rest) = rest.split_first_chunk::<10>().ok_or(AuthError::Message)?;
        let [t0, t1] = self.tid.to_le_bytes();
        if *start != [1, id, 0, 0, t0, t1] {
            return Err(AuthError::Message);
        }
        Ok((*header, rest))
    }
}
