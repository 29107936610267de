//! Authentication through the registry: who has to, what is refused until then, both kinds of queue, and its end.

use super::*;
use crate::auth::exchange::tests::{host, negotiate, secret};
use crate::auth::{Group, HostAuth};

fn random(bytes: &mut [u8]) {
    bytes.fill(3);
}

const REQUIRED: Status = Status::AUTHENTICATION_REQUIRED.dnr();

fn bench() -> Bench {
    let mut bench = Bench::with(RegistryConfig { random: Some(random), ..RegistryConfig::default() });
    bench.ask(Some(HostAuth::new(secret(1))));
    bench
}

fn authentication(fctype: u32, len: u32) -> Command {
    command(0x7f, fctype, len, [0xe901_0100, len, 0, 0, 0, 0])
}

impl Bench {
    fn ask(&mut self, auth: Option<HostAuth>) {
        self.registry.set_host_auth(self.subsystem, HOST, auth).unwrap();
    }

    fn fabrics(&mut self, ctrl: ControllerId, qid: u16, command: &Command, data: Option<&[u8]>) -> Action {
        match qid {
            0 => self.registry.admin(ctrl, command, data, self.now),
            _ => self.registry.io_fabrics(ctrl, qid, command, data, self.now),
        }
    }

    fn message_in(&mut self, ctrl: ControllerId, qid: u16, message: &[u8]) -> Action {
        let send = authentication(5, u32::try_from(message.len()).unwrap());
        let fetch = self.fabrics(ctrl, qid, &send, None);
        assert_eq!(fetch, Action::FetchData { len: u32::try_from(message.len()).unwrap() });
        match self.fabrics(ctrl, qid, &send, Some(message)) {
            Action::Compute { job } => self.registry.computed(ctrl, qid, send.cid, &job.run()),
            other => other,
        }
    }

    fn message_out(&mut self, ctrl: ControllerId, qid: u16) -> Action {
        self.fabrics(ctrl, qid, &authentication(6, 4096), None)
    }

    /// A whole exchange; whether it ended well.
    fn authenticate(&mut self, ctrl: ControllerId, qid: u16, group: u8, key: u8) -> bool {
        let taken = Action::Complete(Completion::success(0x1234));
        assert_eq!(self.message_in(ctrl, qid, &negotiate(&[1], &[group])), taken);
        let Action::SendData { data, .. } = self.message_out(ctrl, qid) else { panic!("no challenge") };
        assert_eq!(data.len(), 4096, "padded to what was asked for");
        let group = Group::from_wire(group).unwrap();
        let reply = host(key, None, [HOST, NQN]).reply(&data[..16 + 32 + group.len()]).unwrap();
        assert_eq!(self.message_in(ctrl, qid, &reply), taken);
        matches!(self.message_out(ctrl, qid), Action::SendData { .. })
    }
}

#[test]
fn nothing_is_taken_before_the_host_proved_itself() {
    let mut bench = bench();
    let connected = bench.dial(Dial::admin()).unwrap();
    let ctrl = connected.ctrl;
    assert!(connected.authenticate);
    assert_eq!(connected.completion.result, 1 << 17 | 1, "AUTHREQ and the controller identifier");
    let property = command(0x7f, 4, 0, [0, 0x1c, 0, 0, 0, 0]);
    for refused in [property, command(0x06, 0, 4096, [1, 0, 0, 0, 0, 0]), command(0x18, 0, 0, [0; 6])] {
        assert_eq!(bench.completed(ctrl, &refused), Err(REQUIRED));
    }
    assert!(!bench.registry.is_authenticated(ctrl, 0));
    assert!(bench.authenticate(ctrl, 0, 1, 1));
    bench.enable(ctrl);
    let io = bench.io_queue(ctrl, 1).unwrap();
    assert!(io.authenticate && !bench.registry.is_authenticated(ctrl, 1), "each queue for itself");
    assert!(bench.authenticate(ctrl, 1, 0, 1));
    assert!(bench.registry.is_authenticated(ctrl, 1));
    assert_eq!(bench.registry.authentications(), 2);
    bench.close(ctrl, 1);
    assert!(bench.io_queue(ctrl, 1).unwrap().authenticate, "and each connection for itself");
}

#[test]
fn a_queue_that_comes_while_its_subsystem_is_taken_away_has_to_prove_itself() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    assert!(bench.authenticate(ctrl, 0, 1, 1));
    bench.enable(ctrl);
    let taken = bench.registry.take_subsystem(bench.subsystem).unwrap();
    assert!(bench.io_queue(ctrl, 1).unwrap().authenticate);
    assert!(bench.authenticate(ctrl, 1, 1, 1));
    bench.registry.put_subsystem_back(&taken).unwrap();
    bench.registry.subsystem_is_back(taken);
    assert!(bench.registry.is_authenticated(ctrl, 1));
}

#[test]
fn hosts_of_whom_nothing_is_asked_need_not_and_cannot() {
    let mut bench = bench();
    let other = Dial { hostnqn: "nqn.other", ..Dial::admin() };
    for dial in [other, Dial::discovery(5000)] {
        let connected = bench.dial(dial).unwrap();
        assert!(!connected.authenticate && connected.completion.result >> 16 == 0);
        bench.enable(connected.ctrl);
        for fctype in [5, 6] {
            let refused = bench.completed(connected.ctrl, &authentication(fctype, 72));
            assert_eq!(refused, Err(Status::INVALID_OPCODE.dnr()));
        }
    }
}

#[test]
fn wrong_secret_is_told_and_ends_the_queue() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    bench.message_in(ctrl, 0, &negotiate(&[1], &[0]));
    let Action::SendData { data, .. } = bench.message_out(ctrl, 0) else { panic!("no challenge") };
    bench.message_in(ctrl, 0, &host(9, None, [HOST, NQN]).reply(&data[..48]).unwrap());
    let Action::SendLast { data, completion } = bench.message_out(ctrl, 0) else { panic!("no failure") };
    assert_eq!((&data[..8], data.len()), (&[0, 0xf1, 0, 0, 7, 0, 1, 1][..], 4096));
    assert!(completion.status.is_success(), "the command itself succeeds");
    assert!(!bench.registry.is_authenticated(ctrl, 0));
    let gave_up = bench.message_in(ctrl, 0, &[0, 0xf0, 0, 0, 7, 0, 1, 1]);
    assert!(matches!(gave_up, Action::DisconnectQueue { .. }));
}

#[test]
fn a_host_takes_its_own_place_once_it_has_proven_itself() {
    let mut bench = bench();
    let id = bench.subsystem;
    let duplicates = |bench: &mut Bench, duplicates| {
        bench.registry.set_admission(id, Admission { duplicates, ..Admission::default() }).unwrap();
    };
    duplicates(&mut bench, Duplicates::Replace);
    let first = bench.dial(Dial::admin()).unwrap();
    assert!(bench.authenticate(first.ctrl, 0, 0, 1));
    let spoofed = bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).unwrap();
    assert!(!spoofed.replaces && !bench.authenticate(spoofed.ctrl, 0, 0, 2));
    assert_eq!(bench.events(), [], "whoever says that he is the host");
    let again = bench.dial(Dial::admin()).unwrap();
    assert!(bench.authenticate(again.ctrl, 0, 0, 1));
    let killed = |connected: &Connected| Event::Kill { ctrl: connected.ctrl, reason: KillReason::Replaced };
    let events = bench.events();
    assert!(events.len() == 2 && events.contains(&killed(&first)) && events.contains(&killed(&spoofed)));
    bench.enable(again.ctrl);
    assert!(bench.io_queue(again.ctrl, 1).unwrap().replaces, "its I/O waits for what was in progress");
    duplicates(&mut bench, Duplicates::Refuse);
    assert_eq!(bench.dial(Dial::admin()).unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY);
    bench.close(again.ctrl, 1);
    bench.close(again.ctrl, 0);
    let unproven = bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).unwrap();
    assert!(bench.dial(Dial::admin()).is_ok(), "nor does {unproven:?} keep it out");
}

#[test]
fn who_has_not_proven_itself_takes_no_place_from_those_who_have() {
    let mut bench = bench();
    let id = bench.subsystem;
    let admission = Admission { controllers: Some(2), controllers_per_host: Some(1), ..Admission::default() };
    bench.registry.set_admission(id, admission).unwrap();
    let (first, second) = (bench.dial(Dial::admin()).unwrap(), bench.dial(Dial::admin()).unwrap());
    let other = Dial { hostnqn: "nqn.other", ..Dial::admin() };
    let free = bench.dial(other).expect("two that prove nothing leave both places free");
    // Both have their secret, and one place is theirs: whoever is first has it.
    assert!(bench.authenticate(second.ctrl, 0, 0, 1));
    assert_eq!(bench.events(), []);
    assert!(bench.authenticate(first.ctrl, 0, 0, 1));
    assert_eq!(bench.events(), [Event::Kill { ctrl: first.ctrl, reason: KillReason::TooMany }]);
    bench.close(first.ctrl, 0);
    assert_eq!(bench.dial(Dial::admin()).unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY, "told at once");
    bench.close(second.ctrl, 0);
    let again = bench.dial(Dial::admin()).unwrap();
    assert!(bench.authenticate(again.ctrl, 0, 0, 1));
    assert_eq!(bench.events(), []);
    // One that came before the other had proven itself, where a host may not come twice.
    bench.close(free.ctrl, 0);
    bench.close(again.ctrl, 0);
    bench.registry.set_admission(id, Admission { duplicates: Duplicates::Refuse, ..Admission::default() }).unwrap();
    let (first, second) = (bench.dial(Dial::admin()).unwrap(), bench.dial(Dial::admin()).unwrap());
    assert!(bench.authenticate(first.ctrl, 0, 0, 1));
    assert!(bench.authenticate(second.ctrl, 0, 0, 1));
    assert_eq!(bench.events(), [Event::Kill { ctrl: second.ctrl, reason: KillReason::TooMany }]);
}

#[test]
fn those_that_prove_nothing_make_room_for_each_other() {
    let mut bench = bench();
    let proven = bench.dial(Dial::admin()).unwrap().ctrl;
    assert!(bench.authenticate(proven, 0, 0, 1));
    let mut unproven = Vec::new();
    for _ in 0..crate::registry::connect::MAX_UNPROVEN {
        bench.now += SECOND / 1000;
        unproven.push(bench.dial(Dial::admin()).unwrap().ctrl);
    }
    assert_eq!(bench.events(), []);
    let late = bench.dial(Dial::admin()).unwrap().ctrl;
    assert_eq!(bench.events(), [Event::Kill { ctrl: unproven[0], reason: KillReason::AuthenticationTimedOut }]);
    assert!(bench.authenticate(late, 0, 0, 1));
    assert_eq!(bench.events(), [], "it counts as one of those who have");
    bench.dial(Dial::admin()).unwrap();
    assert_eq!(bench.events(), [], "so there is room for one more");
}

#[test]
fn protocols_and_lengths_are_checked() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    let invalid = Err(Status::INVALID_FIELD.dnr());
    for (fctype, dword) in [(5, 0xe901_0000), (6, 0xe800_0101), (5, 0)] {
        assert_eq!(bench.completed(ctrl, &command(0x7f, fctype, 72, [dword, 72, 0, 0, 0, 0])), invalid);
    }
    for (fctype, len) in [(5, 0), (5, 4097), (6, 0), (6, 4097)] {
        assert_eq!(bench.completed(ctrl, &authentication(fctype, len)), invalid, "{len}");
    }
    let short = command(0x7f, 5, 71, [0xe901_0100, 72, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &short), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
    bench.message_in(ctrl, 0, &negotiate(&[1], &[0]));
    assert_eq!(bench.completed(ctrl, &authentication(6, 47)), invalid, "the challenge has 48 bytes");
}

#[test]
fn host_that_takes_too_long_loses_its_controller() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial { kato: 0, ..Dial::admin() }).unwrap().ctrl;
    let due = bench.now + 120 * SECOND;
    assert_eq!(bench.registry.next_deadline(), Some(due));
    bench.registry.handle_timeout(due - SECOND, &|_| Some(due));
    assert_eq!(bench.events(), []);
    bench.registry.handle_timeout(due, &|_| Some(due));
    assert_eq!(bench.events(), [Event::Kill { ctrl, reason: KillReason::AuthenticationTimedOut }]);
    let ctrl = bench.dial(Dial { kato: 0, hostid: [8; 16], ..Dial::admin() }).unwrap().ctrl;
    assert!(bench.authenticate(ctrl, 0, 0, 1));
    assert_eq!(bench.registry.next_deadline(), None);
}

#[test]
fn io_queue_whose_host_proves_nothing_ends_alone() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial { kato: 0, ..Dial::admin() }).unwrap().ctrl;
    assert!(bench.authenticate(ctrl, 0, 0, 1));
    bench.enable(ctrl);
    bench.io_queue(ctrl, 1).unwrap();
    // Whoever it is knows the host's names and its controller's number, and has no secret.
    bench.io_queue(ctrl, 2).unwrap();
    assert!(bench.authenticate(ctrl, 1, 0, 1));
    let due = bench.now + 120 * SECOND;
    assert_eq!(bench.registry.next_deadline(), Some(due));
    for _ in 0..2 {
        bench.registry.handle_timeout(due - SECOND, &|_| None);
        assert_eq!(bench.events(), []);
    }
    bench.registry.handle_timeout(due, &|_| None);
    assert_eq!(bench.events(), [Event::CloseQueue { ctrl, qid: 2 }]);
    bench.registry.handle_timeout(due + SECOND, &|_| None);
    assert_eq!((bench.events(), bench.registry.next_deadline()), (vec![], None), "told once");
    assert!(!bench.registry.is_authenticated(ctrl, 2) && bench.registry.is_authenticated(ctrl, 1));
    bench.close(ctrl, 2);
    assert!(bench.io_queue(ctrl, 2).is_ok(), "its place is free");
}

#[test]
fn keep_alive_waits_while_a_host_computes() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial { kato: 5000, ..Dial::admin() }).unwrap().ctrl;
    let connected = bench.now;
    bench.message_in(ctrl, 0, &negotiate(&[1], &[0]));
    let silent = |bench: &mut Bench, lasting| {
        bench.now = connected + lasting;
        let now = bench.now;
        bench.registry.handle_timeout(now, &|_| None);
        bench.events()
    };
    assert_eq!(silent(&mut bench, 60 * SECOND), []);
    assert!(bench.authenticate(ctrl, 0, 0, 1));
    bench.enable(ctrl);
    let io = bench.io_queue(ctrl, 1).unwrap();
    assert!(io.authenticate);
    assert_eq!(silent(&mut bench, 150 * SECOND), [], "nor on an I/O queue");
    assert!(bench.authenticate(ctrl, 1, 0, 1));
    assert_eq!(silent(&mut bench, 159 * SECOND), []);
    let expired = Event::Kill { ctrl, reason: KillReason::KeepAliveExpired };
    assert_eq!(silent(&mut bench, 161 * SECOND), [expired]);
}

#[test]
fn secrets_change_while_hosts_are_connected() {
    let mut bench = bench();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    assert!(bench.authenticate(ctrl, 0, 0, 1));
    bench.enable(ctrl);
    bench.ask(Some(HostAuth::new(secret(2))));
    assert!(bench.identify(ctrl, 1, 0).is_ok(), "connections stay");
    assert!(bench.authenticate(ctrl, 0, 0, 2), "the new secret, again on the same queue");
    let late = bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).unwrap().ctrl;
    assert!(!bench.authenticate(late, 0, 0, 1), "the old one");
    bench.ask(None);
    assert!(!bench.dial(Dial { hostid: [7; 16], ..Dial::admin() }).unwrap().authenticate);
    let mut without = Bench::new();
    let refused = without.registry.set_host_auth(without.subsystem, HOST, Some(HostAuth::new(secret(1))));
    assert!(refused.is_err(), "nothing random to ask with");
}
