//! Features of a namespace, write protection first of all: what hosts may set, what they are told, what is published.

use super::*;

fn set(nsid: u32, wps: u32) -> Command {
    command(0x09, nsid, 0, [0x84, wps, 0, 0, 0, 0])
}

fn get(nsid: u32, select: u32) -> Command {
    command(0x0a, nsid, 0, [0x84 | select << 8, 0, 0, 0, 0, 0])
}

fn settles(bench: &mut Bench, ctrl: ControllerId, command: &Command) -> Settle {
    match bench.admin(ctrl, command) {
        Action::Settle { settle, completion } => {
            assert_eq!(completion, Completion::success(command.cid));
            settle
        }
        other => panic!("no settling: {other:?}"),
    }
}

#[test]
fn protection_is_published_settled_and_told_to_the_hosts() {
    let mut bench = Bench::new();
    let (first, second) = (bench.host(), bench.host());
    bench.admin(first, &aer(1));
    bench.admin(second, &aer(2));
    bench.all_events();
    let settle = settles(&mut bench, first, &set(1, 1));
    let subsystem = bench.subsystem;
    assert_eq!(settle, Settle { subsystem, nsid: 1, drain: Drain::Writes, flush: true, keep: false });
    let told = |ctrl, cid| Event::CompleteHeld { ctrl, completion: Completion::with_result(cid, 0x0004_0002) };
    let expected = [Event::Publish { subsystem, nsid: 1 }, told(first, 1), told(second, 2)];
    assert_eq!(bench.all_events(), expected, "published first");
    assert!(bench.registry.namespace_view(subsystem, 1).unwrap().read_only);
    assert!(!bench.registry.namespace_view(subsystem, 3).unwrap().read_only);
    for (cns, at) in [(0, 99), (8, 8)] {
        assert_eq!(bench.identify(second, cns, 1).unwrap()[at], 1, "NSATTR of CNS {cns}");
    }
    assert_eq!(bench.completed(second, &get(1, 0)), Ok(1));
    let again = settles(&mut bench, second, &set(1, 1));
    assert_eq!(again, settle, "no change, but what the first one waits for may not be over");
    assert_eq!(bench.all_events(), [], "nothing to tell");
    let settle = settles(&mut bench, second, &set(1, 0));
    assert_eq!((settle.drain, settle.flush), (Drain::Nothing, false));
    assert!(!bench.registry.namespace_view(subsystem, 1).unwrap().read_only);
}

#[test]
fn until_power_cycle_stays_and_the_rest_is_refused() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for (select, value) in [(0, 0), (1, 0), (2, 0), (3, 6)] {
        assert_eq!(bench.completed(ctrl, &get(1, select)), Ok(value));
    }
    settles(&mut bench, ctrl, &set(1, 2));
    assert_eq!(bench.completed(ctrl, &get(1, 0)), Ok(2));
    for wps in [0, 1] {
        assert_eq!(bench.completed(ctrl, &set(1, wps)), Err(Status::FEATURE_NOT_CHANGEABLE.dnr()));
    }
    for wps in 3..8 {
        assert_eq!(bench.completed(ctrl, &set(3, wps)), Err(Status::INVALID_FIELD.dnr()));
    }
    for nsid in [0, 2, 0xffff_ffff] {
        assert_eq!(bench.completed(ctrl, &set(nsid, 1)), Err(Status::INVALID_NAMESPACE.dnr()));
        assert_eq!(bench.completed(ctrl, &get(nsid, 0)), Err(Status::INVALID_NAMESPACE.dnr()));
    }
    let save = command(0x09, 1, 0, [0x84 | 1 << 31, 1, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &save), Err(Status::FEATURE_NOT_SAVEABLE.dnr()));
    let discovery = bench.discovery_host();
    assert_eq!(bench.completed(discovery, &get(1, 0)), Err(Status::INVALID_FIELD.dnr()));
}

#[test]
fn storage_that_cannot_be_written_is_told_as_protected_for_good() {
    let mut bench = Bench::new();
    let config = NamespaceConfig { read_only: true, ..namespace(5) };
    bench.registry.add_namespace(bench.subsystem, config).unwrap();
    let ctrl = bench.host();
    assert_eq!(bench.completed(ctrl, &get(5, 0)), Ok(1));
    assert_eq!(bench.completed(ctrl, &set(5, 0)), Err(Status::FEATURE_NOT_CHANGEABLE.dnr()));
}

#[test]
fn failed_flush_takes_the_protection_back() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let settle = settles(&mut bench, ctrl, &set(1, 1));
    bench.events();
    bench.registry.settle_failed(&settle);
    assert_eq!(bench.all_events(), [Event::Publish { subsystem: bench.subsystem, nsid: 1 }]);
    assert_eq!(bench.completed(ctrl, &get(1, 0)), Ok(0));
}
