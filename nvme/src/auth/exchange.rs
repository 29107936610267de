//! The exchange of one queue: negotiate, challenge, reply, success; and again whenever the host likes.
//!
//! ```text
//! host: Negotiate -> Challenge :ours   host: Reply -> Success1 :ours   (host: Success2, if it challenged us)
//! ```
//! Host messages come by Authentication Send, ours are fetched by Authentication Receive. What is wrong is not the failure of a
//! command: the next Receive brings Failure1, and then the queue ends. While a host authenticates again, what it proved before
//! holds.

use core::time::Duration;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::dh::{Computed, EXPONENT_LEN, Job};
use super::wire::{self, Failure, HostMessage, Negotiate, Reply};
use super::{Group, Hash, HostAuth, response};

/// Whose names are proven.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names<'a> {
    pub(crate) host: &'a [u8],
    pub(crate) subsystem: &'a [u8],
}

/// What became of a message of the host.
#[derive(Debug)]
pub(crate) enum Sent {
    /// It was taken; the command succeeds.
    Taken,
    /// The command is answered when this is done and [`Exchange::computed`] was called.
    Compute(Job),
    /// The host gave up; the command succeeds and the queue ends.
    GivenUp,
}

/// What the host fetches.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    /// A message of ours.
    Message(Vec<u8>),
    /// A message after which the queue ends.
    Last(Vec<u8>),
}

#[derive(Debug)]
enum Step {
    /// The host's turn to negotiate.
    Negotiate,
    /// Our public value is being computed.
    Generating,
    /// The host may fetch the challenge.
    Challenge { public: Vec<u8> },
    /// The host's turn to reply.
    Reply,
    /// The shared secret is being computed.
    Verifying(Reply),
    /// The host may fetch our success, with a response if it challenged us.
    Success1 { response: Option<Zeroizing<Vec<u8>>> },
    /// The host's turn to say that our response is right.
    Success2,
    /// The host may fetch why it failed.
    Failed(Failure),
}

/// The exchange of one queue.
pub(crate) struct Exchange {
    step: Step,
    tid: u16,
    hash: Hash,
    group: Group,
    sequence: u32,
    challenge: Zeroizing<Vec<u8>>,
    exponent: Zeroizing<[u8; EXPONENT_LEN]>,
    /// Exchanges in which the host proved itself.
    completed: u64,
    /// When the first exchange has to be over; `None`: it was not.
    deadline: Option<Duration>,
}

impl core::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Exchange").field("completed", &self.completed).finish_non_exhaustive()
    }
}

impl Exchange {
    pub(crate) fn new(deadline: Duration) -> Self {
        Self {
            step: Step::Negotiate,
            tid: 0,
            hash: Hash::Sha256,
            group: Group::Null,
            sequence: 0,
            challenge: Zeroizing::default(),
            exponent: Zeroizing::new([0; EXPONENT_LEN]),
            completed: 0,
            deadline: Some(deadline),
        }
    }

    /// The host has proven itself on this queue.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.completed > 0
    }

    /// How often it has.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// When the host has to have proven itself; `None` once it has, or was too late.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline.filter(|_| !self.is_authenticated())
    }

    /// The host was too late.
    pub(crate) fn expire(&mut self) {
        self.deadline = None;
        self.step = Step::Failed(Failure::Failed);
    }

    /// A message of the host. `auth` is what is asked of it now; `None` when that was taken away.
    pub(crate) fn send(
        &mut self,
        bytes: &[u8],
        auth: Option<&HostAuth>,
        names: Names<'_>,
        random: fn(&mut [u8]),
    ) -> Sent {
        let hash = matches!(self.step, Step::Reply).then_some(self.hash);
        let outcome = match (HostMessage::parse(bytes, hash), &self.step) {
            (Ok(HostMessage::Failure2 { .. }), _) => return Sent::GivenUp,
            // The queue ends with the next Receive: nobody has us begin, and compute, over and over.
            (_, Step::Failed(_)) => return Sent::Taken,
            // Work in progress is not to be disturbed.
            (_, Step::Generating | Step::Verifying(_)) => Err(Failure::Message),
            (Ok(HostMessage::Negotiate(negotiate)), _) => {
                self.tid = negotiate.tid;
                self.begin(&negotiate, auth, random)
            }
            (Ok(HostMessage::Reply(reply)), Step::Reply) => self.take_reply(reply, auth, names),
            (Ok(HostMessage::Success2 { tid }), Step::Success2) if tid == self.tid => {
                self.completed += 1;
                self.step = Step::Negotiate;
                Ok(Sent::Taken)
            }
            (Ok(_), _) => Err(Failure::Message),
            (Err(failure), _) => Err(failure),
        };
        outcome.unwrap_or_else(|failure| {
            self.step = Step::Failed(failure);
            Sent::Taken
        })
    }

    /// The strongest hash function and group that both sides have.
    fn begin(
        &mut self,
        negotiate: &Negotiate,
        auth: Option<&HostAuth>,
        random: fn(&mut [u8]),
    ) -> Result<Sent, Failure> {
        let auth = auth.ok_or(Failure::Failed)?;
        if negotiate.concatenate != 0 {
            return Err(Failure::Concatenation);
        }
        let common = negotiate.hashes.iter().filter(|hash| auth.hashes.contains(hash)).max();
        self.hash = *common.ok_or(Failure::Hash)?;
        let common = negotiate.groups.iter().filter(|group| auth.groups.contains(group)).max();
        self.group = *common.ok_or(Failure::Group)?;
        self.challenge = Zeroizing::new(vec![0; self.hash.output_len()]);
        random(&mut self.challenge);
        random(self.exponent.as_mut_slice());
        let mut sequence = [0; 4];
        random(&mut sequence);
        self.sequence = u32::from_le_bytes(sequence).max(1);
        if self.group == Group::Null {
            self.step = Step::Challenge { public: Vec::new() };
            return Ok(Sent::Taken);
        }
        self.step = Step::Generating;
        Ok(Sent::Compute(Job::public(self.group, self.exponent.clone())))
    }

    fn take_reply(&mut self, reply: Reply, auth: Option<&HostAuth>, names: Names<'_>) -> Result<Sent, Failure> {
        if reply.tid != self.tid || reply.public.len() != self.group.len() {
            return Err(Failure::Payload);
        }
        if self.group == Group::Null {
            self.verify(&reply, None, auth, names)?;
            return Ok(Sent::Taken);
        }
        let job = Job::shared(self.group, &reply.public, self.exponent.clone()).ok_or(Failure::Payload)?;
        self.step = Step::Verifying(reply);
        Ok(Sent::Compute(job))
    }

    /// What [`Sent::Compute`] asked for is done.
    pub(crate) fn computed(&mut self, result: &Computed, auth: Option<&HostAuth>, names: Names<'_>) {
        match core::mem::replace(&mut self.step, Step::Failed(Failure::Failed)) {
            Step::Generating => self.step = Step::Challenge { public: result.bytes().to_vec() },
            Step::Verifying(reply) => {
                if let Err(failure) = self.verify(&reply, Some(result.bytes()), auth, names) {
                    self.step = Step::Failed(failure);
                }
            }
            // An exchange that failed meanwhile stays failed.
            other => self.step = other,
        }
    }

    /// Checks the host's response, and makes ours if it challenged us.
    fn verify(
        &mut self,
        reply: &Reply,
        shared: Option<&[u8]>,
        auth: Option<&HostAuth>,
        names: Names<'_>,
    ) -> Result<(), Failure> {
        let auth = auth.ok_or(Failure::Failed)?;
        let key = auth.key.key_of(names.host);
        let parts: [&[u8]; 3] = [b"HostHost", names.host, names.subsystem];
        let expected = self.response(&key, shared, &self.challenge, self.sequence, parts);
        if !bool::from(expected.as_slice().ct_eq(&reply.response)) {
            return Err(Failure::Failed);
        }
        let response = match &reply.challenge {
            None => None,
            // Our own challenge sent back would have us answer it.
            Some(challenge) if bool::from(challenge.as_slice().ct_eq(&self.challenge)) => return Err(Failure::Failed),
            Some(challenge) => {
                let key = auth.controller_key.as_ref().ok_or(Failure::Failed)?.key_of(names.subsystem);
                let parts: [&[u8]; 3] = [b"Controller", names.subsystem, names.host];
                Some(self.response(&key, shared, challenge, reply.sequence, parts))
            }
        };
        self.step = Step::Success1 { response };
        Ok(())
    }

    fn response(
        &self,
        key: &[u8],
        shared: Option<&[u8]>,
        challenge: &[u8],
        sequence: u32,
        parts: [&[u8]; 3],
    ) -> Zeroizing<Vec<u8>> {
        response(self.hash, key, shared, challenge, sequence, self.tid, parts)
    }

    /// The host fetches a message.
    pub(crate) fn receive(&mut self) -> Fetched {
        match core::mem::replace(&mut self.step, Step::Failed(Failure::Message)) {
            Step::Challenge { public } => {
                self.step = Step::Reply;
                let Self { tid, hash, group, sequence, challenge, .. } = self;
                Fetched::Message(wire::challenge(*tid, *hash, *group, *sequence, challenge, &public))
            }
            Step::Success1 { response } => {
                if response.is_some() {
                    self.step = Step::Success2;
                } else {
                    self.completed += 1;
                    self.step = Step::Negotiate;
                }
                let response = response.as_ref().map(|response| response.as_slice());
                Fetched::Message(wire::success1(self.tid, self.hash, response))
            }
            Step::Failed(failure) => Fetched::Last(wire::failure1(self.tid, failure)),
            // Nothing is there to be fetched.
            _ => Fetched::Last(wire::failure1(self.tid, Failure::Message)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::secret::tests::written;
    use super::*;
    use crate::auth::{AuthError, Initiator, Secret};
    use proptest::prelude::*;

    const NAMES: Names<'_> = Names { host: b"nqn.host", subsystem: b"nqn.subsystem" };

    pub(crate) fn secret(byte: u8) -> Secret {
        written(1, &[byte; 32]).parse().unwrap()
    }

    fn auth() -> HostAuth {
        HostAuth { controller_key: Some(secret(2)), ..HostAuth::new(secret(1)) }
    }

    fn random(bytes: &mut [u8]) {
        bytes.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
    }

    /// A host with this secret, that wants the controllers' proven or not.
    pub(crate) fn host(key: u8, controller_key: Option<u8>, names: [&str; 2]) -> Initiator {
        Initiator::new(names[0], names[1], secret(key), controller_key.map(secret), 7, |bytes| bytes.fill(9))
    }

    fn initiator(key: u8, controller_key: Option<u8>) -> Initiator {
        host(key, controller_key, ["nqn.host", "nqn.subsystem"])
    }

    /// AUTH_Negotiate with any identifiers.
    pub(crate) fn negotiate(hashes: &[u8], groups: &[u8]) -> Vec<u8> {
        let mut bytes = initiator(1, None).negotiate(&[], &[]);
        (bytes[10], bytes[11]) = (hashes.len().try_into().unwrap(), groups.len().try_into().unwrap());
        bytes[12..12 + hashes.len()].copy_from_slice(hashes);
        bytes[42..42 + groups.len()].copy_from_slice(groups);
        bytes
    }

    fn send(exchange: &mut Exchange, bytes: &[u8], auth: &HostAuth) {
        match exchange.send(bytes, Some(auth), NAMES, random) {
            Sent::Taken => {}
            Sent::Compute(job) => exchange.computed(&job.run(), Some(auth), NAMES),
            Sent::GivenUp => panic!("the host did not give up"),
        }
    }

    fn message(exchange: &mut Exchange) -> Vec<u8> {
        match exchange.receive() {
            Fetched::Message(message) => message,
            Fetched::Last(message) => panic!("failed: {message:?}"),
        }
    }

    fn failure(exchange: &mut Exchange) -> u8 {
        match exchange.receive() {
            Fetched::Last(message) => message[7],
            Fetched::Message(message) => panic!("no failure: {message:?}"),
        }
    }

    #[test]
    fn every_hash_and_group_proves_both_sides() {
        let auth = auth();
        for hash in Hash::ALL {
            for group in [Group::Null, Group::Ffdhe2048, Group::Ffdhe3072] {
                for mutual in [false, true] {
                    let mut exchange = Exchange::new(Duration::MAX);
                    let mut host = initiator(1, mutual.then_some(2));
                    send(&mut exchange, &host.negotiate(&[hash], &[group]), &auth);
                    let challenge = message(&mut exchange);
                    assert_eq!((challenge[8], challenge[9]), (hash.to_wire(), group.to_wire()));
                    send(&mut exchange, &host.reply(&challenge).unwrap(), &auth);
                    let success = message(&mut exchange);
                    let last = host.finish(&success).unwrap();
                    assert_eq!((exchange.is_authenticated(), last.is_some()), (!mutual, mutual), "{hash:?} {group:?}");
                    if let Some(last) = last {
                        send(&mut exchange, &last, &auth);
                    }
                    assert!(exchange.is_authenticated());
                    assert_eq!(exchange.deadline(), None);
                }
            }
        }
    }

    #[test]
    fn a_target_with_another_controller_secret_is_found_out() {
        let auth = auth();
        let mut exchange = Exchange::new(Duration::MAX);
        let mut host = initiator(1, Some(3));
        send(&mut exchange, &negotiate(&[1], &[0]), &auth);
        let reply = host.reply(&message(&mut exchange)).unwrap();
        send(&mut exchange, &reply, &auth);
        assert_eq!(host.finish(&message(&mut exchange)), Err(AuthError::Controller));
        assert!(!exchange.is_authenticated(), "the host has not said that it is content");
    }

    #[test]
    fn the_strongest_common_pair_is_chosen() {
        let auth = HostAuth {
            hashes: vec![Hash::Sha384, Hash::Sha256],
            groups: vec![Group::Null, Group::Ffdhe3072],
            ..auth()
        };
        let mut exchange = Exchange::new(Duration::MAX);
        send(&mut exchange, &negotiate(&[1, 2, 3], &[0, 1, 2, 3, 4, 5]), &auth);
        let challenge = message(&mut exchange);
        assert_eq!((challenge[8], challenge[9]), (2, 2));
        for (hashes, groups, why) in [(&[3][..], &[0][..], 4), (&[9], &[0], 4), (&[1], &[1], 5), (&[1], &[], 5)] {
            let mut exchange = Exchange::new(Duration::MAX);
            send(&mut exchange, &negotiate(hashes, groups), &auth);
            assert_eq!(failure(&mut exchange), why);
        }
        let mut concatenated = negotiate(&[1], &[0]);
        concatenated[6] = 1;
        let mut exchange = Exchange::new(Duration::MAX);
        send(&mut exchange, &concatenated, &auth);
        assert_eq!(failure(&mut exchange), 3);
    }

    #[test]
    fn wrong_secrets_names_and_transactions_fail() {
        let auth = auth();
        let attempt = |mut host: Initiator, change: fn(&mut Vec<u8>)| {
            let mut exchange = Exchange::new(Duration::MAX);
            send(&mut exchange, &negotiate(&[1], &[0]), &auth);
            let challenge = message(&mut exchange);
            let mut reply = host.reply(&challenge).unwrap();
            change(&mut reply);
            send(&mut exchange, &reply, &auth);
            assert!(!exchange.is_authenticated());
            matches!(exchange.receive(), Fetched::Message(_))
        };
        let good = || initiator(1, None);
        assert!(attempt(good(), |_| {}));
        assert!(!attempt(initiator(3, None), |_| {}), "another secret");
        assert!(!attempt(host(1, None, ["nqn.other", "nqn.subsystem"]), |_| {}), "another host");
        assert!(!attempt(host(1, None, ["nqn.host", "nqn.other"]), |_| {}), "another subsystem");
        assert!(!attempt(good(), |reply| reply[4] = 8), "another transaction");
        assert!(!attempt(good(), |reply| reply[16] ^= 1), "one bit");
        assert!(!attempt(good(), |reply| reply[10] = 1), "a public value in the null group");
    }

    #[test]
    fn controller_without_a_secret_cannot_be_proven() {
        let auth = HostAuth { controller_key: None, ..auth() };
        let mut exchange = Exchange::new(Duration::MAX);
        send(&mut exchange, &negotiate(&[1], &[0]), &auth);
        let challenge = message(&mut exchange);
        send(&mut exchange, &initiator(1, Some(2)).reply(&challenge).unwrap(), &auth);
        assert_eq!(failure(&mut exchange), 1);
    }

    #[test]
    fn our_own_challenge_is_not_answered() {
        let auth = auth();
        let mut exchange = Exchange::new(Duration::MAX);
        send(&mut exchange, &negotiate(&[1], &[0]), &auth);
        let challenge = message(&mut exchange);
        let mut reply = initiator(1, Some(2)).reply(&challenge).unwrap();
        reply[48..80].copy_from_slice(&challenge[16..48]);
        send(&mut exchange, &reply, &auth);
        assert_eq!(failure(&mut exchange), 1);
    }

    #[test]
    fn messages_out_of_turn_fail_and_giving_up_ends() {
        let auth = auth();
        let new = || Exchange::new(Duration::from_secs(5));
        let mut exchange = new();
        assert_eq!(exchange.deadline(), Some(Duration::from_secs(5)));
        assert_eq!(failure(&mut exchange), 7, "nothing to fetch");
        for (message, why) in [(&[1, 4, 0, 0, 7, 0][..], 7), (&[1, 2, 0, 0, 7, 0], 7), (&[], 6)] {
            exchange = new();
            send(&mut exchange, message, &auth);
            assert_eq!(failure(&mut exchange), why, "{message:?} at the beginning");
        }
        assert!(matches!(exchange.send(&[0, 0xf0, 0, 0, 7, 0, 1, 1], Some(&auth), NAMES, random), Sent::GivenUp));
        exchange = new();
        exchange.send(&negotiate(&[1], &[0]), None, NAMES, random);
        assert_eq!(failure(&mut exchange), 1, "the secret was taken away");
    }

    #[test]
    fn nobody_has_more_than_one_power_computed_at_a_time_or_goes_on_after_a_failure() {
        let auth = auth();
        let mut exchange = Exchange::new(Duration::MAX);
        let mut begin = || exchange.send(&negotiate(&[1], &[1]), Some(&auth), NAMES, random);
        let Sent::Compute(job) = begin() else { panic!("a public value") };
        for _ in 0..3 {
            assert!(matches!(begin(), Sent::Taken));
        }
        exchange.computed(&job.run(), Some(&auth), NAMES);
        assert_eq!(failure(&mut exchange), 7);
        assert!(matches!(exchange.send(&negotiate(&[1], &[1]), Some(&auth), NAMES, random), Sent::Taken));
        assert_eq!(failure(&mut exchange), 7);
    }

    /// What a host does that has everything but the secret.
    #[derive(Clone, Debug)]
    enum Deed {
        Fetch,
        Negotiate { hashes: Vec<u8>, groups: Vec<u8> },
        Reply { mutual: bool, flip: usize },
        Success2,
        Bytes(Vec<u8>),
    }

    fn deeds() -> impl Strategy<Value = Vec<Deed>> {
        let ids = |max: u8| proptest::collection::vec(0..=max, 0..4);
        proptest::collection::vec(
            prop_oneof![
                4 => Just(Deed::Fetch),
                2 => (ids(4), ids(1)).prop_map(|(hashes, groups)| Deed::Negotiate { hashes, groups }),
                2 => Just(Deed::Negotiate { hashes: vec![1], groups: vec![0] }),
                4 => (any::<bool>(), 0..700usize).prop_map(|(mutual, flip)| Deed::Reply { mutual, flip }),
                1 => Just(Deed::Success2),
                1 => proptest::collection::vec(any::<u8>(), 0..100).prop_map(Deed::Bytes),
            ],
            1..24,
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
        #[test]
        fn nothing_but_the_secret_opens_a_queue(deeds in deeds()) {
            let auth = auth();
            let mut exchange = Exchange::new(Duration::MAX);
            let mut fetched = Vec::new();
            for deed in deeds {
                let bytes = match deed {
                    Deed::Fetch => {
                        let (Fetched::Message(message) | Fetched::Last(message)) = exchange.receive();
                        fetched = message;
                        continue;
                    }
                    Deed::Negotiate { hashes, groups } => negotiate(&hashes, &groups),
                    Deed::Reply { mutual, flip } => {
                        let mut reply = initiator(3, mutual.then_some(2)).reply(&fetched).unwrap_or_default();
                        if let Some(byte) = reply.get_mut(flip) {
                            *byte ^= 0x10;
                        }
                        reply
                    }
                    Deed::Success2 => vec![1, 4, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                    Deed::Bytes(bytes) => bytes,
                };
                if let Sent::Compute(job) = exchange.send(&bytes, Some(&auth), NAMES, random) {
                    exchange.computed(&job.run(), Some(&auth), NAMES);
                }
            }
            prop_assert!(!exchange.is_authenticated());
        }
    }

    #[test]
    fn what_was_proven_holds_while_a_host_authenticates_again() {
        let auth = auth();
        let mut exchange = Exchange::new(Duration::MAX);
        let round = |exchange: &mut Exchange, auth: &HostAuth, key: u8| {
            send(exchange, &negotiate(&[1], &[0]), auth);
            let challenge = message(exchange);
            send(exchange, &initiator(key, None).reply(&challenge).unwrap(), auth);
            matches!(exchange.receive(), Fetched::Message(_))
        };
        assert!(round(&mut exchange, &auth, 1));
        send(&mut exchange, &negotiate(&[1], &[0]), &auth);
        assert!(exchange.is_authenticated());
        let rotated = HostAuth { key: secret(5), ..auth };
        assert!(round(&mut exchange, &rotated, 5), "the new secret");
        assert!(!round(&mut exchange, &rotated, 1), "the old one");
    }
}
