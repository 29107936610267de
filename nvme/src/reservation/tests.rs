use super::*;
use proptest::prelude::*;

const A: HostId = [1; 16];
const B: HostId = [2; 16];
const C: HostId = [3; 16];

const TYPES: [ReservationType; 6] = [
    ReservationType::WriteExclusive,
    ReservationType::ExclusiveAccess,
    ReservationType::WriteExclusiveRegistrants,
    ReservationType::ExclusiveAccessRegistrants,
    ReservationType::WriteExclusiveAll,
    ReservationType::ExclusiveAccessAll,
];

fn keys(current: u64, new: u64) -> Keys {
    Keys { current, new }
}

/// Hosts with keys 10, 20, 30.
fn registered(hosts: &[HostId]) -> Reservations {
    let mut all = Reservations::default();
    for host in hosts {
        all.register(*host, RegisterAction::Register, false, keys(0, key(host))).unwrap();
    }
    all
}

fn key(host: &HostId) -> u64 {
    u64::from(host[0]) * 10
}

fn held_by(hosts: &[HostId], holder: HostId, rtype: ReservationType) -> Reservations {
    let mut all = registered(hosts);
    all.acquire(holder, AcquireAction::Acquire, rtype, keys(key(&holder), 0)).unwrap();
    all
}

fn conflict<T>(result: Result<T, Status>) -> bool {
    result.err() == Some(Status::RESERVATION_CONFLICT.dnr())
}

#[test]
fn a_key_is_registered_replaced_and_given_up_with_the_right_key_only() {
    let mut r = registered(&[A]);
    assert!(r.register(A, RegisterAction::Register, false, keys(0, 10)).is_ok(), "the same key again");
    assert!(conflict(r.register(A, RegisterAction::Register, false, keys(0, 11))), "another key");
    assert!(conflict(r.register(A, RegisterAction::Replace, false, keys(9, 11))));
    assert!(r.register(A, RegisterAction::Replace, false, keys(10, 11)).is_ok());
    assert!(r.register(A, RegisterAction::Replace, true, keys(0, 12)).is_ok(), "IEKEY");
    assert!(conflict(r.register(B, RegisterAction::Replace, true, keys(0, 12))), "not registered");
    assert!(conflict(r.register(A, RegisterAction::Unregister, false, keys(11, 0))));
    assert!(r.register(A, RegisterAction::Unregister, false, keys(12, 0)).is_ok());
    assert!(conflict(r.register(A, RegisterAction::Unregister, true, keys(12, 0))));
    assert_eq!(r.generation, 5, "successful registers alone count");
}

#[test]
fn acquire_needs_a_registration_and_a_free_reservation() {
    for rtype in TYPES {
        let mut r = registered(&[A, B]);
        let mut acquire = |host, rtype, current| r.acquire(host, AcquireAction::Acquire, rtype, keys(current, 0));
        assert!(conflict(acquire(C, rtype, 0)));
        assert!(conflict(acquire(A, rtype, 11)));
        assert!(acquire(A, rtype, 10).unwrap().changed);
        assert_eq!(acquire(A, rtype, 10), Ok(Outcome::default()), "again");
        for other in TYPES {
            let again = acquire(B, other, 20);
            // All registrants hold such a one: taking it is no change.
            assert_eq!(again.is_ok(), rtype.held_by_all() && other == rtype, "{rtype:?} {other:?}");
            assert!(other == rtype || conflict(acquire(A, other, 10)), "another type");
        }
    }
}

/// Rows: holder, another registrant, a stranger; columns: read, write.
#[test]
fn every_type_keeps_out_whom_it_should() {
    let expected = |rtype| match rtype {
        ReservationType::WriteExclusive => [[true, true], [true, false], [true, false]],
        ReservationType::ExclusiveAccess => [[true, true], [false, false], [false, false]],
        ReservationType::WriteExclusiveRegistrants | ReservationType::WriteExclusiveAll => {
            [[true, true], [true, true], [true, false]]
        }
        ReservationType::ExclusiveAccessRegistrants | ReservationType::ExclusiveAccessAll => {
            [[true, true], [true, true], [false, false]]
        }
    };
    assert_eq!(registered(&[A]).guard(), None, "registrations alone keep nobody out");
    for rtype in TYPES {
        let guard = held_by(&[A, B], A, rtype).guard().unwrap();
        let found = [A, B, C].map(|host| [false, true].map(|writes| guard.admits(&host, writes)));
        assert_eq!(found, expected(rtype), "{rtype:?}");
        assert_eq!(ReservationType::from_wire(rtype.to_wire()), Some(rtype));
    }
    assert_eq!((ReservationType::from_wire(0), ReservationType::from_wire(7)), (None, None));
}

#[test]
fn release_is_for_holders_and_of_the_right_type() {
    for rtype in TYPES {
        let release =
            |r: &mut Reservations, host, rtype| r.release(host, ReleaseAction::Release, Some(rtype), key(&host));
        let mut r = held_by(&[A, B], A, rtype);
        assert!(conflict(r.release(A, ReleaseAction::Release, Some(rtype), 99)));
        assert!(conflict(release(&mut r, C, rtype)));
        if !rtype.held_by_all() {
            assert_eq!(release(&mut r, B, rtype), Ok(Outcome::default()), "somebody else's");
            assert!(r.guard().is_some());
        }
        for other in TYPES.into_iter().filter(|other| *other != rtype) {
            assert_eq!(release(&mut r, A, other), Err(Status::INVALID_FIELD.dnr()));
        }
        let outcome = release(&mut r, A, rtype).unwrap();
        let told = if rtype.for_one() { vec![] } else { vec![(B, Notified::ReservationReleased)] };
        assert_eq!((outcome.notices, outcome.changed), (told, true), "{rtype:?}");
        assert_eq!(release(&mut r, A, rtype), Ok(Outcome::default()), "nothing is held");
        assert_eq!(r.state.registrants.len(), 2);
    }
}

#[test]
fn clear_ends_everything_and_tells_the_others() {
    let mut r = held_by(&[A, B, C], A, ReservationType::WriteExclusive);
    assert!(conflict(r.release(B, ReleaseAction::Clear, None, 99)));
    let outcome = r.release(B, ReleaseAction::Clear, None, 20).unwrap();
    assert_eq!(outcome.notices, [(A, Notified::ReservationPreempted), (C, Notified::ReservationPreempted)]);
    assert_eq!(r.state, ReservationState::default());
}

#[test]
fn unregistering_the_holder_releases_unless_all_hold() {
    for rtype in TYPES {
        let mut r = held_by(&[A, B], A, rtype);
        let outcome = r.register(A, RegisterAction::Unregister, false, keys(10, 0)).unwrap();
        assert_eq!(r.state.held.is_some(), rtype.held_by_all(), "{rtype:?}");
        let released = !rtype.for_one() && !rtype.held_by_all();
        assert_eq!(outcome.notices.len(), usize::from(released), "{rtype:?}");
        r.register(B, RegisterAction::Unregister, false, keys(20, 0)).unwrap();
        assert_eq!(r.state, ReservationState::default(), "{rtype:?}: it ends with the last registrant");
    }
}

#[test]
fn preempting_the_holders_key_takes_the_reservation() {
    for (rtype, abort) in TYPES[..4].iter().flat_map(|rtype| [(*rtype, false), (*rtype, true)]) {
        let action = if abort { AcquireAction::PreemptAndAbort } else { AcquireAction::Preempt };
        let mut r = held_by(&[A, B, C], A, rtype);
        let new = ReservationType::ExclusiveAccess;
        let outcome = r.acquire(B, action, new, keys(20, 10)).unwrap();
        assert_eq!(outcome.preempted, [A]);
        let mut told = vec![(A, Notified::RegistrationPreempted)];
        if rtype != new {
            told.push((C, Notified::ReservationReleased));
        }
        assert_eq!(outcome.notices, told, "{rtype:?}");
        assert_eq!(r.state.held, Some(Held { rtype: new, holder: B }));
        assert_eq!(r.state.registrants.keys().collect::<Vec<_>>(), [&B, &C]);
        assert_eq!(r.generation, 4);
    }
}

#[test]
fn preempting_another_key_unregisters_and_leaves_the_reservation() {
    let rtype = ReservationType::WriteExclusive;
    let mut r = held_by(&[A, B, C], A, rtype);
    let outcome = r.acquire(B, AcquireAction::Preempt, ReservationType::ExclusiveAccess, keys(20, 30)).unwrap();
    assert_eq!(outcome.preempted, [C]);
    assert_eq!(r.state.held, Some(Held { rtype, holder: A }));
    let mut preempt = |key| r.acquire(B, AcquireAction::Preempt, rtype, keys(20, key));
    assert!(conflict(preempt(99)), "nobody has this key");
    assert_eq!(preempt(0), Err(Status::INVALID_FIELD.dnr()));
    assert!(conflict(r.acquire(C, AcquireAction::Preempt, rtype, keys(30, 10))), "no longer registered");
    // Its own key, while another host holds: it unregisters itself.
    assert!(r.acquire(B, AcquireAction::Preempt, rtype, keys(20, 20)).unwrap().preempted.is_empty());
    assert_eq!(r.state.registrants.keys().collect::<Vec<_>>(), [&A]);
}

#[test]
fn the_holder_changes_the_type_by_preempting_itself() {
    let mut r = held_by(&[A, B], A, ReservationType::WriteExclusive);
    let new = ReservationType::ExclusiveAccessRegistrants;
    let outcome = r.acquire(A, AcquireAction::Preempt, new, keys(10, 10)).unwrap();
    assert_eq!(outcome.notices, [(B, Notified::ReservationReleased)]);
    assert_eq!(r.state.held, Some(Held { rtype: new, holder: A }));
    assert_eq!(r.state.registrants.len(), 2);
}

#[test]
fn preempting_key_zero_takes_what_all_registrants_hold() {
    for rtype in [ReservationType::WriteExclusiveAll, ReservationType::ExclusiveAccessAll] {
        let mut r = held_by(&[A, B, C], A, rtype);
        let outcome = r.acquire(B, AcquireAction::PreemptAndAbort, rtype, keys(20, 30)).unwrap();
        assert_eq!(outcome.preempted, [C]);
        assert_eq!(r.state.held.map(|held| held.rtype), Some(rtype));
        let outcome = r.acquire(B, AcquireAction::Preempt, ReservationType::WriteExclusive, keys(20, 0)).unwrap();
        assert_eq!(outcome.preempted, [A]);
        assert_eq!(r.state.held, Some(Held { rtype: ReservationType::WriteExclusive, holder: B }));
        assert_eq!(r.state.registrants.len(), 1);
    }
}

#[test]
fn without_a_reservation_preempt_unregisters_by_key() {
    let mut r = registered(&[A, B, C]);
    let rtype = ReservationType::WriteExclusive;
    assert_eq!(r.acquire(A, AcquireAction::Preempt, rtype, keys(10, 20)).unwrap().preempted, [B]);
    assert!(conflict(r.acquire(A, AcquireAction::Preempt, rtype, keys(10, 20))));
    assert_eq!(r.guard(), None);
}

#[test]
fn more_than_sixteen_hosts_register_and_are_all_reported() {
    let hosts: Vec<HostId> = (1..=200).map(|n| [n; 16]).collect();
    let mut r = registered(&hosts);
    r.acquire(hosts[7], AcquireAction::Acquire, ReservationType::ExclusiveAccess, keys(80, 0)).unwrap();
    let report = r.report(|host| if host[0] == 8 { vec![5, 9] } else { vec![] });
    assert_eq!(report.len(), 64 + 201 * 64, "one entry a controller, or a host without any");
    assert_eq!(report[..10], [200, 0, 0, 0, 2, 201, 0, 0, 0, 0]);
    let entry = |at: usize| &report[64 + at * 64..128 + at * 64];
    assert_eq!(entry(0)[..17], [0xff, 0xff, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(entry(7)[..3], [5, 0, 1], "the holder");
    assert_eq!(entry(8)[..3], [9, 0, 1], "its other controller");
    assert_eq!(entry(9)[..3], [0xff, 0xff, 0]);
}

#[test]
fn what_is_kept_comes_back() {
    let mut r = held_by(&[A, B], A, ReservationType::ExclusiveAccess);
    assert_eq!(r.kept(), None, "nobody asked for persistence");
    r.set_persist(true);
    let restored = Reservations::restored(r.kept().unwrap().clone());
    assert!(restored.persists());
    assert_eq!(restored.guard(), r.guard());
}

/// Any commands of three hosts: the holder is always registered, a guard is there exactly while something is held, and who was
/// preempted is registered no more.
fn step() -> impl Strategy<Value = (u8, u8, u8, u8, u64, u64, bool)> {
    (0u8..3, 0u8..3, 0u8..3, 0u8..8, 0u64..4, 0u64..4, any::<bool>())
}

proptest! {
    #[test]
    fn any_commands_leave_a_sound_state(steps in proptest::collection::vec(step(), 0..100)) {
        let mut r = Reservations::default();
        for (host, what, action, rtype, current, new, ignore) in steps {
            let host = [host; 16];
            let keys = keys(current, new);
            let before = r.clone();
            let outcome = match (what, action, ReservationType::from_wire(rtype)) {
                (0, 0, _) => r.register(host, RegisterAction::Register, ignore, keys),
                (0, 1, _) => r.register(host, RegisterAction::Unregister, ignore, keys),
                (0, _, _) => r.register(host, RegisterAction::Replace, ignore, keys),
                (1, 0, Some(rtype)) => r.acquire(host, AcquireAction::Acquire, rtype, keys),
                (1, 1, Some(rtype)) => r.acquire(host, AcquireAction::Preempt, rtype, keys),
                (1, _, Some(rtype)) => r.acquire(host, AcquireAction::PreemptAndAbort, rtype, keys),
                (2, 0, rtype) => r.release(host, ReleaseAction::Release, rtype, current),
                (2, _, _) => r.release(host, ReleaseAction::Clear, None, current),
                _ => continue,
            };
            match outcome {
                Ok(outcome) => {
                    for gone in &outcome.preempted {
                        prop_assert!(*gone != host && !r.state.registrants.contains_key(gone));
                    }
                    prop_assert!(outcome.changed || r.state == before.state);
                    prop_assert!(outcome.notices.iter().all(|(told, _)| *told != host));
                }
                Err(_) => prop_assert_eq!(&r.state, &before.state),
            }
            if let Some(held) = r.state.held {
                prop_assert!(r.state.registrants.contains_key(&held.holder));
            }
            prop_assert_eq!(r.guard().is_some(), r.state.held.is_some());
        }
    }
}
