//! Reservations as the transport sees them: commands, notifications, persistence, features.

use super::*;
use crate::reservation::{AcquireAction, RegisterAction, ReleaseAction, ReservationCommand, ReservationType};

const REGISTER: ReservationCommand =
    ReservationCommand::Register { action: RegisterAction::Register, ignore_key: false, persist: None };
const ACQUIRE: ReservationCommand =
    ReservationCommand::Acquire { action: AcquireAction::Acquire, rtype: ReservationType::WriteExclusive };

fn acquire(action: AcquireAction) -> ReservationCommand {
    ReservationCommand::Acquire { action, rtype: ReservationType::WriteExclusive }
}

/// A host with an identifier and a controller of its own.
fn host(bench: &mut Bench, id: u8) -> ControllerId {
    let ctrl = bench.dial(Dial { hostid: [id; 16], ..Dial::admin() }).unwrap().ctrl;
    bench.enable(ctrl);
    ctrl
}

fn keys(current: u64, new: u64) -> Vec<u8> {
    [current.to_le_bytes(), new.to_le_bytes()].concat()
}

impl Bench {
    fn reserve(&mut self, ctrl: ControllerId, command: ReservationCommand, data: &[u8]) -> Action {
        self.registry.reserve(ctrl, 1, 5, command, data)
    }

    /// The settling of a command that succeeded with a change.
    fn reserved(&mut self, ctrl: ControllerId, command: ReservationCommand, data: &[u8]) -> Settle {
        match self.reserve(ctrl, command, data) {
            Action::Settle { settle, completion } => {
                assert_eq!(completion, Completion::success(5));
                settle
            }
            other => panic!("no settling: {other:?}"),
        }
    }
}

fn fires(ctrl: ControllerId, cid: u16) -> Event {
    Event::CompleteHeld { ctrl, completion: Completion::with_result(cid, 0x0080_0006) }
}

#[test]
fn preempt_and_abort_publishes_tells_and_waits_for_the_hosts() {
    let mut bench = Bench::new();
    let [a, b] = [1, 2].map(|id| host(&mut bench, id));
    for (ctrl, key) in [(a, 10), (b, 20)] {
        bench.reserved(ctrl, REGISTER, &keys(0, key));
    }
    bench.reserved(a, ACQUIRE, &keys(10, 0));
    bench.admin(a, &aer(1));
    bench.all_events();
    let subsystem = bench.subsystem;
    assert!(bench.registry.namespace_gate(subsystem, 1).is_some());
    assert!(bench.registry.namespace_gate(subsystem, 3).is_none());
    let settle = bench.reserved(b, acquire(AcquireAction::PreemptAndAbort), &keys(20, 10));
    let drain = Drain::Hosts([[1; 16]].into());
    assert_eq!(settle, Settle { subsystem, nsid: 1, drain, flush: false, keep: false });
    assert_eq!(bench.all_events(), [Event::Publish { subsystem, nsid: 1 }, fires(a, 1)]);
    let page = bench.log(a, 0x80, false, 0, 64).unwrap();
    assert_eq!(page[..16], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(bench.log(a, 0x80, false, 0, 64).unwrap(), [0; 64]);
    // A refused one changes nothing and tells nobody.
    let refused = bench.reserve(b, acquire(AcquireAction::PreemptAndAbort), &keys(20, 10));
    assert_eq!(refused, Action::Complete(Completion::failed(5, Status::RESERVATION_CONFLICT.dnr())));
    assert_eq!(bench.all_events(), []);
}

#[test]
fn a_host_that_reads_one_notification_is_told_of_the_next() {
    let mut bench = Bench::new();
    let [a, b] = [1, 2].map(|id| host(&mut bench, id));
    bench.admin(a, &aer(1));
    bench.admin(a, &aer(2));
    for round in 0..2 {
        bench.reserved(a, REGISTER, &keys(0, 10));
        bench.reserved(b, REGISTER, &keys(0, 20));
        bench.reserved(b, acquire(AcquireAction::Preempt), &keys(20, 10));
        assert_eq!(bench.events().len(), 1 - round, "masked until the page is read");
    }
    bench.log(a, 0x80, true, 0, 64).unwrap();
    assert_eq!(bench.events(), [], "retained");
    assert_eq!(bench.log(a, 0x80, false, 0, 64).unwrap()[9], 1, "one more");
    assert_eq!(bench.events(), [fires(a, 2)]);
}

#[test]
fn notifications_can_be_masked_for_a_namespace() {
    let mut bench = Bench::new();
    let [a, b] = [1, 2].map(|id| host(&mut bench, id));
    let set = |nsid, mask| command(0x09, nsid, 0, [0x82, mask, 0, 0, 0, 0]);
    let get = |nsid| command(0x0a, nsid, 0, [0x82, 0, 0, 0, 0, 0]);
    assert_eq!(bench.completed(b, &set(1, 2)), Ok(0));
    assert_eq!((bench.completed(a, &get(1)), bench.completed(a, &get(3))), (Ok(2), Ok(0)));
    bench.reserved(a, REGISTER, &keys(0, 10));
    bench.reserved(b, REGISTER, &keys(0, 20));
    bench.reserved(b, acquire(AcquireAction::Preempt), &keys(20, 10));
    assert_eq!(bench.log(a, 0x80, false, 0, 64).unwrap(), [0; 64], "masked");
    assert_eq!(bench.completed(a, &set(0xffff_ffff, 0xe)), Ok(0));
    assert_eq!((bench.completed(a, &get(1)), bench.completed(a, &get(3))), (Ok(0xe), Ok(0xe)));
    for (nsid, mask, status) in
        [(1, 1, Status::INVALID_FIELD), (1, 16, Status::INVALID_FIELD), (9, 2, Status::INVALID_NAMESPACE)]
    {
        assert_eq!(bench.completed(a, &set(nsid, mask)), Err(status.dnr()));
    }
}

#[test]
fn persistence_is_kept_only_where_it_can_be_and_comes_back() {
    let mut bench = Bench::new();
    let kept = NamespaceConfig { persistent: true, ..namespace(5) };
    bench.registry.add_namespace(bench.subsystem, kept.clone()).unwrap();
    let a = host(&mut bench, 1);
    let set = |nsid, ptpl| command(0x09, nsid, 0, [0x83, ptpl, 0, 0, 0, 0]);
    assert_eq!(bench.completed(a, &set(1, 1)), Err(Status::INVALID_FIELD.dnr()), "nowhere to keep it");
    assert_eq!(bench.completed(a, &set(1, 0)), Ok(0));
    for (nsid, rescap) in [(1, 0xfe), (5, 0xff)] {
        assert_eq!([0, 8].map(|cns| bench.identify(a, cns, nsid).unwrap()[if cns == 0 { 31 } else { 2 }]), [rescap; 2]);
    }
    let persist =
        ReservationCommand::Register { action: RegisterAction::Register, ignore_key: false, persist: Some(true) };
    let Action::Settle { settle, .. } = bench.registry.reserve(a, 5, 5, persist, &keys(0, 10)) else {
        panic!("no settling");
    };
    assert!(settle.keep);
    bench.registry.reserve(a, 5, 5, ACQUIRE, &keys(10, 0));
    let state = bench.registry.kept_state(bench.subsystem, 5).unwrap();
    assert_eq!(bench.completed(a, &command(0x0a, 5, 0, [0x83, 0, 0, 0, 0, 0])), Ok(1));
    // A new start of the target.
    let mut again = Bench::new();
    again.registry.add_namespace(again.subsystem, NamespaceConfig { kept: state.clone(), ..kept }).unwrap();
    assert_eq!(again.registry.kept_state(again.subsystem, 5), Some(state));
    let gate = |bench: &Bench| bench.registry.namespace_gate(bench.subsystem, 5);
    assert!(gate(&again).is_some());
    assert_eq!(gate(&again), gate(&bench));
    // Off again: what was kept has to be forgotten.
    let b = host(&mut again, 1);
    assert!(matches!(again.admin(b, &set(5, 0)), Action::Settle { settle: Settle { keep: true, .. }, .. }));
    // And asked for again: the one before may have been cut off before it was.
    assert!(matches!(again.admin(b, &set(5, 0)), Action::Settle { settle: Settle { keep: true, .. }, .. }));
    assert_eq!(again.registry.kept_state(again.subsystem, 5), Some(NamespaceState::default()));
}

#[test]
fn reports_name_controllers_that_are_connected() {
    let mut bench = Bench::new();
    let a = host(&mut bench, 1);
    let second = host(&mut bench, 1);
    bench.reserved(a, REGISTER, &keys(0, 10));
    let report = |bench: &mut Bench| match bench.reserve(a, ReservationCommand::Report { len: 4096 }, &[]) {
        Action::SendData { data, completion } => {
            assert_eq!((completion, data.len()), (Completion::success(5), 4096));
            data
        }
        other => panic!("no data: {other:?}"),
    };
    let cntlids = |data: &[u8]| [64, 128].map(|at| u16::from_le_bytes([data[at], data[at + 1]]));
    let data = report(&mut bench);
    assert_eq!((data[5], cntlids(&data)), (2, [1, 2]));
    bench.close(second, 0);
    assert_eq!(report(&mut bench)[5], 1);
    let release = ReservationCommand::Release { action: ReleaseAction::Clear, rtype: None };
    bench.reserved(a, release, &10u64.to_le_bytes());
    assert_eq!(report(&mut bench)[5], 0);
    assert_eq!(
        bench.reserve(a, REGISTER, &[0; 7]),
        Action::Complete(Completion::failed(5, Status::DATA_SGL_LENGTH_INVALID.dnr()))
    );
}
