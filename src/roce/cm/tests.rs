//! Two agents over a network that loses and repeats what it is told to.
use super::*;
use crate::roce::Mtu;
use core::net::IpAddr;
use core::time::Duration;
use proptest::prelude::*;

const A: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2));

struct Pair {
    now: Duration,
    a: Agent,
    b: Agent,
    /// What the network drops: the numbers of the messages, in order of sending.
    drop: Vec<usize>,
    sent: usize,
    /// "Wait" messages that were delivered.
    mras: usize,
    repeat: bool,
}

impl Pair {
    fn new() -> Self {
        let (mut b, a) = (Agent::new(B, 2), Agent::new(A, 1));
        assert!(b.listen(4420));
        assert!(!b.listen(4420));
        Self { now: Duration::from_secs(1), a, b, drop: Vec::new(), sent: 0, mras: 0, repeat: false }
    }

    fn connect(&mut self, port: u16) -> CmId {
        self.connect_qp(port, 0x100)
    }

    fn connect_qp(&mut self, port: u16, qpn: u32) -> CmId {
        let ask = Connect {
            remote: B,
            port,
            qpn: Qpn::new(qpn),
            psn: Psn::new(0x1000),
            mtu: Mtu::B4096,
            responder_resources: 16,
            initiator_depth: 2,
            ack_timeout: 17,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            tos: 2,
            private_data: &[1, 2, 3],
        };
        self.a.connect(self.now, &ask)
    }

    /// Delivers everything that is on the way.
    fn exchange(&mut self) {
        loop {
            let (from_a, from_b) = (self.a.poll_transmit(), self.b.poll_transmit());
            if from_a.is_none() && from_b.is_none() {
                return;
            }
            for (from, message) in [(A, from_a), (B, from_b)] {
                let Some((to, mad)) = message else { continue };
                self.sent += 1;
                if self.drop.contains(&self.sent) {
                    continue;
                }
                let packet = emit_datagram(Psn::new(0), &mad);
                let mad = parse_datagram(&packet).expect("a datagram");
                self.mras += usize::from(matches!(Message::parse(mad), Ok((_, Message::Mra(_)))));
                let agent = if to == A { &mut self.a } else { &mut self.b };
                for _ in 0..1 + usize::from(self.repeat) {
                    agent.handle_datagram(self.now, from, mad);
                }
            }
        }
    }

    fn step(&mut self) -> bool {
        self.exchange();
        let Some(at) = [self.a.next_timeout(), self.b.next_timeout()].into_iter().flatten().min() else {
            return false;
        };
        self.now = at;
        self.a.handle_timeout(at);
        self.b.handle_timeout(at);
        self.exchange();
        true
    }

    /// Both ends as applications would have them. Returns what each saw.
    fn run(&mut self) -> (Vec<Event>, Vec<Event>) {
        let mut seen = (Vec::new(), Vec::new());
        for _ in 0..100 {
            self.exchange();
            let mut quiet = true;
            while let Some(event) = self.b.poll_event() {
                quiet = false;
                if let Event::Request(id, request) = &event {
                    assert_eq!(request.private_data[..4], [1, 2, 3, 0]);
                    let accept = Accept {
                        qpn: Qpn::new(0x200),
                        psn: Psn::new(0x2000),
                        responder_resources: request.responder_resources,
                        initiator_depth: request.initiator_depth,
                        rnr_retry_count: 7,
                        srq: true,
                        private_data: &[9],
                    };
                    assert!(self.b.accept(self.now, *id, &accept));
                    assert!(!self.b.accept(self.now, *id, &accept));
                }
                seen.1.push(event);
            }
            while let Some(event) = self.a.poll_event() {
                quiet = false;
                if let Event::Reply(id, reply) = &event {
                    assert_eq!((reply.initiator_depth, reply.responder_resources), (2, 16));
                    assert_eq!((reply.qpn, reply.psn, reply.private_data[0]), (Qpn::new(0x200), Psn::new(0x2000), 9));
                    assert!(self.a.ready(*id));
                }
                seen.0.push(event);
            }
            if quiet && !self.step() {
                break;
            }
        }
        seen
    }
}

fn established(seen: &(Vec<Event>, Vec<Event>)) -> bool {
    matches!(seen.0[..], [Event::Reply(..)]) && matches!(seen.1[..], [Event::Request(..), Event::Established(_)])
}

#[test]
fn connects_and_disconnects() {
    for repeat in [false, true] {
        let mut pair = Pair::new();
        pair.repeat = repeat;
        let id = pair.connect(4420);
        let seen = pair.run();
        assert!(established(&seen), "{seen:?}");
        let Event::Request(_, request) = &seen.1[0] else { panic!() };
        assert_eq!((request.port, request.remote, request.qpn), (4420, A, Qpn::new(0x100)));
        assert_eq!((request.initiator_depth, request.responder_resources, request.mtu), (16, 2, Mtu::B4096));
        assert_eq!((request.ack_timeout, request.retry_count, request.rnr_retry_count), (17, 7, 7));
        pair.a.disconnect(pair.now, id);
        let seen = pair.run();
        assert!(matches!(seen.0[..], [Event::Disconnected(gone)] if gone == id));
        assert!(matches!(seen.1[..], [Event::Disconnected(_)]));
        assert_eq!(pair.a.connections() + pair.b.connections(), 0);
    }
}

#[test]
fn any_lost_message_is_made_up_for() {
    // REQ, REP, RTU, and the repetitions of each.
    for drop in [vec![1], vec![2], vec![3], vec![1, 2], vec![2, 3], vec![3, 4], vec![1, 3, 5, 7], vec![2, 4, 5]] {
        let mut pair = Pair::new();
        pair.drop = drop.clone();
        let id = pair.connect(4420);
        assert!(established(&pair.run()), "{drop:?}");
        let next = pair.sent + 1;
        pair.drop = vec![next, next + 2, next + 3];
        pair.a.disconnect(pair.now, id);
        let seen = pair.run();
        assert!(matches!(seen.0[..], [Event::Disconnected(_)]), "{seen:?}");
        assert_eq!(pair.a.connections() + pair.b.connections(), 0);
    }
}

#[test]
fn traffic_stands_in_for_a_lost_rtu() {
    let mut pair = Pair::new();
    pair.drop = (3..100).collect();
    pair.connect(4420);
    pair.exchange();
    let Some(Event::Request(id, _)) = pair.b.poll_event() else { panic!() };
    let accept = Accept {
        qpn: Qpn::new(0x200),
        psn: Psn::new(0),
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 7,
        srq: false,
        private_data: &[],
    };
    assert!(pair.b.accept(pair.now, id, &accept));
    pair.exchange();
    pair.b.established_by_traffic(Qpn::new(0x201));
    assert_eq!(pair.b.poll_event(), None);
    pair.b.established_by_traffic(Qpn::new(0x200));
    assert_eq!(pair.b.poll_event(), Some(Event::Established(id)));
    assert_eq!(pair.b.next_timeout(), None);
}

#[test]
fn refusals_carry_their_reason_and_data() {
    let mut pair = Pair::new();
    let id = pair.connect(4421);
    pair.exchange();
    assert!(matches!(pair.a.poll_event(), Some(Event::Rejected(gone, reason::INVALID_SERVICE_ID, _)) if gone == id));
    let id = pair.connect(4420);
    pair.exchange();
    let Some(Event::Request(asked, _)) = pair.b.poll_event() else { panic!() };
    assert!(pair.b.reject(asked, reason::CONSUMER, &[0, 0, 6, 0]));
    assert!(!pair.b.reject(asked, reason::CONSUMER, &[]));
    pair.exchange();
    let Some(Event::Rejected(gone, reason::CONSUMER, data)) = pair.a.poll_event() else { panic!() };
    assert_eq!((gone, data.len(), &data[..4]), (id, REJ_PRIVATE, &[0, 0, 6, 0][..]));
    assert_eq!(pair.a.connections() + pair.b.connections(), 0);
}

#[test]
fn a_peer_that_asks_again_is_told_to_wait() {
    let mut pair = Pair::new();
    pair.connect(4420);
    pair.exchange();
    let Some(Event::Request(id, _)) = pair.b.poll_event() else { panic!() };
    // The application takes its time: a minute, in which the peer asks now and then and does not give up, as it would after
    // half of that without being told to wait (see `a_silent_peer_is_given_up`).
    let until = pair.now + Duration::from_secs(60);
    while pair.now < until {
        assert!(pair.step());
    }
    assert_eq!((pair.a.poll_event(), pair.b.poll_event()), (None, None));
    // Each of them is for 4.3 s, and the peer asks again after that.
    assert!((10..=20).contains(&pair.mras), "told {} times", pair.mras);
    assert!(pair.b.reject(id, reason::CONSUMER, &[]));
    pair.exchange();
    assert!(matches!(pair.a.poll_event(), Some(Event::Rejected(..))));
}

/// The same minute with every "wait" lost: it is those that keep the peer.
#[test]
fn a_peer_that_is_not_told_to_wait_gives_up() {
    let mut pair = Pair::new();
    let id = pair.connect(4420);
    pair.exchange();
    assert!(matches!(pair.b.poll_event(), Some(Event::Request(..))));
    pair.drop = (pair.sent + 1..100).filter(|sent| sent % 2 == 1).collect();
    let until = pair.now + Duration::from_secs(60);
    while pair.now < until && pair.step() {}
    assert_eq!((pair.mras, pair.a.poll_event()), (0, Some(Event::TimedOut(id))));
}

#[test]
fn a_silent_peer_is_given_up() {
    let mut pair = Pair::new();
    pair.drop = (1..100).collect();
    let id = pair.connect(4420);
    let start = pair.now;
    let seen = pair.run();
    assert_eq!(seen.0, [Event::TimedOut(id)]);
    assert!(pair.now - start > Duration::from_secs(20) && pair.now - start < Duration::from_secs(45));
    assert_eq!(pair.a.connections(), 0);
}

#[test]
fn a_rebooted_peer_is_told_that_its_old_connection_is_stale() {
    let mut pair = Pair::new();
    pair.connect(4420);
    assert!(established(&pair.run()));
    // The same adapter and queue pair number, from a machine that knows nothing of the connection.
    pair.a = Agent::new(A, 77);
    pair.connect(4420);
    let seen = pair.run();
    assert!(matches!(seen.0[..], [Event::Rejected(_, reason::STALE_CONNECTION, _)]), "{seen:?}");
    assert!(matches!(seen.1[..], [Event::Disconnected(_)]));
    pair.connect(4420);
    assert!(established(&pair.run()));
    // Another queue pair of it is no matter.
    pair.connect_qp(4420, 0x101);
    assert!(established(&pair.run()));
    assert_eq!(pair.b.connections(), 2);
}

#[test]
fn a_disconnect_that_nobody_knows_is_confirmed() {
    let mut pair = Pair::new();
    let ids = Ids { local: 5, remote: 6 };
    pair.b.handle_datagram(pair.now, A, &Message::Dreq(ids, Qpn::new(3)).emit(1));
    let (to, mad) = pair.b.poll_transmit().expect("an answer");
    assert_eq!((to, Message::parse(&mad)), (A, Ok((1, Message::Drep(Ids { local: 6, remote: 5 })))));
}

#[test]
fn a_stranger_cannot_end_a_connection() {
    let mut pair = Pair::new();
    pair.connect(4420);
    let seen = pair.run();
    let Event::Request(id, _) = &seen.1[0] else { panic!() };
    let (local, remote) = (1, id.number());
    let stranger = IpAddr::from([10, 0, 0, 9]);
    pair.b.handle_datagram(pair.now, stranger, &Message::Dreq(Ids { local, remote }, Qpn::new(0x200)).emit(1));
    assert_eq!(pair.b.connections(), 1);
}

proptest! {
    #[test]
    fn any_messages(messages in proptest::collection::vec((0u16..8, any::<[u32; 4]>(), any::<u8>()), 1..40)) {
        let mut pair = Pair::new();
        pair.connect(4420);
        pair.run();
        for (kind, n, fill) in messages {
            let mut mad = [fill; MAD_LEN];
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&(0x10 + kind).to_be_bytes());
            mad[24..28].copy_from_slice(&(n[0] % 4).to_be_bytes());
            mad[28..32].copy_from_slice(&(n[1] % 4).to_be_bytes());
            pair.b.handle_datagram(pair.now, A, &mad);
            pair.a.handle_datagram(pair.now, B, &mad);
            pair.exchange();
        }
        prop_assert!(pair.b.connections() <= 41);
    }
}

/// A peer whose packets are smaller refuses, with or without saying what it can have, and is asked again.
#[test]
fn a_refused_mtu_is_asked_for_again_until_it_fits() {
    for (most, says, repeat) in [
        (Mtu::B1024, false, false),
        (Mtu::B1024, true, false),
        (Mtu::B1024, false, true),
        (Mtu::B256, false, true),
        (Mtu::B256, true, true),
    ] {
        let mut pair = Pair::new();
        pair.repeat = repeat;
        let id = pair.connect(4420);
        let mut requests = 0;
        let reply = loop {
            pair.exchange();
            while let Some(event) = pair.b.poll_event() {
                let Event::Request(theirs, request) = event else { panic!("{event:?}") };
                requests += 1;
                if request.mtu > most {
                    let hint = if says { vec![most.code()] } else { Vec::new() };
                    assert!(pair.b.reject(theirs, reason::INVALID_MTU, &hint));
                    continue;
                }
                let accept = Accept {
                    qpn: Qpn::new(0x200),
                    psn: Psn::new(0x2000),
                    responder_resources: 1,
                    initiator_depth: 1,
                    rnr_retry_count: 7,
                    srq: false,
                    private_data: &[],
                };
                assert!(pair.b.accept(pair.now, theirs, &accept));
            }
            match pair.a.poll_event() {
                None => {}
                Some(Event::Reply(ours, reply)) => break (ours, reply.mtu),
                Some(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(reply, (id, most));
        let steps = [Mtu::B4096, Mtu::B2048, Mtu::B1024, Mtu::B512, Mtu::B256];
        let tried = 1 + steps.iter().position(|step| *step == most).expect("one of them");
        assert_eq!(requests, if says { 2 } else { tried });
    }
}

#[test]
fn a_peer_that_refuses_every_mtu_is_given_up() {
    let mut pair = Pair::new();
    let id = pair.connect(4420);
    let mut asked = 0;
    loop {
        pair.exchange();
        while let Some(Event::Request(theirs, _)) = pair.b.poll_event() {
            asked += 1;
            assert!(pair.b.reject(theirs, reason::INVALID_MTU, &[]));
        }
        match pair.a.poll_event() {
            None => {}
            Some(event) => {
                assert!(matches!(event, Event::Rejected(ours, reason::INVALID_MTU, _) if ours == id), "{event:?}");
                break;
            }
        }
    }
    assert_eq!((asked, pair.a.connections()), (5, 0));
}
