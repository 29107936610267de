//! Messages of an authentication exchange, which travel as data of Authentication Send and Receive.
//! (NVMe Base 2.x, Authentication Send and Receive commands, DH-HMAC-CHAP messages.)

use super::{Group, Hash};

/// AUTH_TYPE of messages that all protocols share, and of DH-HMAC-CHAP.
const COMMON: u8 = 0;
const DHCHAP: u8 = 1;

/// Bytes before the responses and values of every DH-HMAC-CHAP message.
const HEADER: usize = 16;

/// A message of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostMessage {
    /// Protocols, hash functions and groups that it has.
    Negotiate(Negotiate),
    /// Its response, and a challenge for the controller if it wants one answered.
    Reply(Reply),
    /// The controller's response was right.
    Success2 { tid: u16 },
    /// Something was not.
    Failure2 { tid: u16 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Negotiate {
    pub(crate) tid: u16,
    /// Secure channel concatenation (SC_C): TLS is to be set up with the result.
    pub(crate) concatenate: u8,
    pub(crate) hashes: Vec<Hash>,
    pub(crate) groups: Vec<Group>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) tid: u16,
    pub(crate) response: Vec<u8>,
    /// The controller is challenged.
    pub(crate) challenge: Option<Vec<u8>>,
    pub(crate) sequence: u32,
    /// The host's public value; empty in the null group.
    pub(crate) public: Vec<u8>,
}

/// Why an exchange failed (reason code explanation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The response is wrong, or there is no secret to check it with.
    Failed = 1,
    /// No protocol that we have.
    Protocol = 2,
    /// Secure channel concatenation is not for this transport.
    Concatenation = 3,
    /// No hash function that we accept.
    Hash = 4,
    /// No group that we accept.
    Group = 5,
    /// The message does not hold together.
    Payload = 6,
    /// Not the message whose turn it is.
    Message = 7,
}

impl Failure {
    const fn to_wire(self) -> u8 {
        match self {
            Self::Failed => 1,
            Self::Protocol => 2,
            Self::Concatenation => 3,
            Self::Hash => 4,
            Self::Group => 5,
            Self::Payload => 6,
            Self::Message => 7,
        }
    }
}

impl HostMessage {
    /// Parses what a host sent. `hash` is the function that was chosen, once one was.
    pub(crate) fn parse(bytes: &[u8], hash: Option<Hash>) -> Result<Self, Failure> {
        let (&[kind, id, _, _, t0, t1], _) = bytes.split_first_chunk::<6>().ok_or(Failure::Payload)?;
        let tid = u16::from_le_bytes([t0, t1]);
        match (kind, id) {
            (COMMON, 0x00) => Negotiate::parse(bytes, tid).map(Self::Negotiate),
            (DHCHAP, 0x02) => {
                let hash = hash.ok_or(Failure::Message)?;
                Reply::parse(bytes, tid, hash).map(Self::Reply)
            }
            (DHCHAP, 0x04) => Ok(Self::Success2 { tid }),
            (COMMON | DHCHAP, 0xf0) => Ok(Self::Failure2 { tid }),
            _ => Err(Failure::Message),
        }
    }
}

impl Negotiate {
    /// T_ID, SC_C, the number of protocol descriptors (NAPD), and those: 64 bytes each, of which ours holds the identifiers of
    /// hash functions from byte 4 and of groups from byte 34.
    fn parse(bytes: &[u8], tid: u16) -> Result<Self, Failure> {
        let (&[.., concatenate, count], rest) = bytes.split_first_chunk::<8>().ok_or(Failure::Payload)?;
        let (descriptors, _) = rest.as_chunks::<64>();
        let descriptors = descriptors.get(..usize::from(count)).ok_or(Failure::Payload)?;
        let ours = descriptors.iter().find(|descriptor| matches!(descriptor, [DHCHAP, ..])).ok_or(Failure::Protocol)?;
        let (&[_, _, hashes, groups], ids) = ours.split_first_chunk::<4>().ok_or(Failure::Payload)?;
        let list = |ids: Option<&[u8]>| ids.map(<[u8]>::to_vec).ok_or(Failure::Payload);
        let (first, second) = ids.split_at_checked(30).ok_or(Failure::Payload)?;
        let hashes = list(first.get(..usize::from(hashes)))?;
        let groups = list(second.get(..usize::from(groups)))?;
        Ok(Self {
            tid,
            concatenate,
            hashes: hashes.into_iter().filter_map(Hash::from_wire).collect(),
            groups: groups.into_iter().filter_map(Group::from_wire).collect(),
        })
    }
}

impl Reply {
    /// HL at byte 6, CVALID at 8, DHVLEN at 10, SEQNUM at 12; then the response, room for a challenge of the same length, and
    /// the public value.
    fn parse(bytes: &[u8], tid: u16, hash: Hash) -> Result<Self, Failure> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(Failure::Payload)?;
        let [_, _, _, _, _, _, len, _, challenged, _, d0, d1, s0, s1, s2, s3] = *header;
        let len = usize::from(len);
        if len != hash.output_len() {
            return Err(Failure::Payload);
        }
        let (response, rest) = rest.split_at_checked(len).ok_or(Failure::Payload)?;
        let (challenge, rest) = rest.split_at_checked(len).ok_or(Failure::Payload)?;
        let public = rest.get(..usize::from(u16::from_le_bytes([d0, d1]))).ok_or(Failure::Payload)?;
        Ok(Self {
            tid,
            response: response.to_vec(),
            challenge: (challenged & 1 != 0).then(|| challenge.to_vec()),
            sequence: u32::from_le_bytes([s0, s1, s2, s3]),
            public: public.to_vec(),
        })
    }
}

/// DH-HMAC_CHAP_Challenge.
pub(crate) fn challenge(tid: u16, hash: Hash, group: Group, sequence: u32, challenge: &[u8], public: &[u8]) -> Vec<u8> {
    let mut message = header(DHCHAP, 0x01, tid);
    message.extend_from_slice(&[len_byte(hash), 0, hash.to_wire(), group.to_wire()]);
    message.extend_from_slice(&u16::try_from(public.len()).unwrap_or_default().to_le_bytes());
    message.extend_from_slice(&sequence.to_le_bytes());
    message.extend_from_slice(challenge);
    message.extend_from_slice(public);
    message
}

/// DH-HMAC_CHAP_Success1, with the controller's response if the host challenged it.
pub(crate) fn success1(tid: u16, hash: Hash, response: Option<&[u8]>) -> Vec<u8> {
    let mut message = header(DHCHAP, 0x03, tid);
    message.extend_from_slice(&[len_byte(hash), 0, response.is_some().into()]);
    message.resize(HEADER, 0);
    message.extend_from_slice(response.unwrap_or_default());
    message
}

/// AUTH_Failure1.
pub(crate) fn failure1(tid: u16, why: Failure) -> Vec<u8> {
    let mut message = header(COMMON, 0xf1, tid);
    // Reason code 1: authentication failure.
    message.extend_from_slice(&[1, why.to_wire()]);
    message
}

fn header(kind: u8, id: u8, tid: u16) -> Vec<u8> {
    let [t0, t1] = tid.to_le_bytes();
    vec![kind, id, 0, 0, t0, t1]
}

fn len_byte(hash: Hash) -> u8 {
    u8::try_from(hash.output_len()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the Linux host sends first: three hash functions, six groups.
    pub(crate) fn linux_negotiate() -> Vec<u8> {
        let mut bytes = vec![0; 72];
        bytes[4..8].copy_from_slice(&[0x34, 0x12, 0, 1]);
        bytes[8..15].copy_from_slice(&[1, 0, 3, 6, 1, 2, 3]);
        bytes[42..48].copy_from_slice(&[0, 1, 2, 3, 4, 5]);
        bytes
    }

    #[test]
    fn negotiate_of_the_linux_host_is_parsed() {
        let expected =
            Negotiate { tid: 0x1234, concatenate: 0, hashes: Hash::ALL.to_vec(), groups: Group::ALL.to_vec() };
        assert_eq!(HostMessage::parse(&linux_negotiate(), None), Ok(HostMessage::Negotiate(expected)));
        let with = |at: usize, byte: u8| {
            let mut bytes = linux_negotiate();
            bytes[at] = byte;
            HostMessage::parse(&bytes, None)
        };
        assert_eq!(with(7, 2), Err(Failure::Payload), "more descriptors than bytes");
        assert_eq!(with(7, 0), Err(Failure::Protocol));
        assert_eq!(with(8, 2), Err(Failure::Protocol));
        assert_eq!(with(10, 31), Err(Failure::Payload), "more hash functions than fit");
        assert_eq!(with(11, 31), Err(Failure::Payload), "more groups than fit");
        assert_eq!(with(1, 9), Err(Failure::Message));
        for len in 0..72 {
            assert_eq!(HostMessage::parse(&linux_negotiate()[..len], None), Err(Failure::Payload), "{len} bytes");
        }
    }

    #[test]
    fn reply_is_parsed_with_and_without_a_challenge() {
        let mut bytes = vec![1, 2, 0, 0, 7, 0, 32, 0, 1, 0, 4, 0, 9, 0, 0, 0];
        bytes.extend([0x11; 32]);
        bytes.extend([0x22; 32]);
        bytes.extend([1, 2, 3, 4]);
        let mut expected = Reply {
            tid: 7,
            response: vec![0x11; 32],
            challenge: Some(vec![0x22; 32]),
            sequence: 9,
            public: vec![1, 2, 3, 4],
        };
        let parse = |bytes: &[u8]| HostMessage::parse(bytes, Some(Hash::Sha256));
        assert_eq!(parse(&bytes), Ok(HostMessage::Reply(expected.clone())));
        assert_eq!(HostMessage::parse(&bytes, Some(Hash::Sha384)), Err(Failure::Payload), "another hash function");
        assert_eq!(HostMessage::parse(&bytes, None), Err(Failure::Message), "before a challenge");
        for len in 6..bytes.len() {
            assert_eq!(parse(&bytes[..len]), Err(Failure::Payload), "{len} bytes");
        }
        bytes[8] = 0;
        expected.challenge = None;
        assert_eq!(parse(&bytes), Ok(HostMessage::Reply(expected)));
    }

    #[test]
    fn messages_match_golden_bytes() {
        let message = challenge(0x1234, Hash::Sha384, Group::Ffdhe2048, 0x0403_0201, &[5; 48], &[6; 256]);
        assert_eq!(message[..16], [1, 1, 0, 0, 0x34, 0x12, 48, 0, 2, 1, 0, 1, 1, 2, 3, 4]);
        assert_eq!((message.len(), message[63], message[64]), (16 + 48 + 256, 5, 6));
        let golden = [1, 3, 0, 0, 0x34, 0x12, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(success1(0x1234, Hash::Sha256, Some(&[9; 32]))[..17], golden);
        assert_eq!(success1(1, Hash::Sha512, None), [1, 3, 0, 0, 1, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(failure1(0x1234, Failure::Group), [0, 0xf1, 0, 0, 0x34, 0x12, 1, 5]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), known: bool) {
            let mut bytes = bytes;
            if let [kind, id, ..] = &mut bytes[..] {
                *kind &= 1;
                *id &= 0xf7;
            }
            let _ = HostMessage::parse(&bytes, known.then_some(Hash::Sha256));
        }
    }
}
