//! Asynchronous events and Abort.

use super::*;

fn fires(ctrl: ControllerId, cid: u16, dword0: u64) -> Event {
    Event::CompleteHeld { ctrl, completion: Completion::with_result(cid, dword0) }
}

fn abort(sqid: u16, cid: u16) -> Command {
    command(0x08, 0, 0, [u32::from(sqid) | u32::from(cid) << 16, 0, 0, 0, 0, 0])
}

const NS_CHANGED: u64 = 0x0004_0002;
const DISCOVERY_CHANGED: u64 = 0x0070_f002;

#[test]
fn four_requests_are_held_and_the_fifth_refused() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cid in 0..4 {
        assert_eq!(bench.admin(ctrl, &aer(cid)), Action::Hold);
    }
    assert_eq!(bench.completed(ctrl, &aer(4)), Err(Status::AER_LIMIT_EXCEEDED.dnr()));
}

#[test]
fn namespace_changes_fire_once_until_the_list_is_read() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cid in 0..2 {
        bench.admin(ctrl, &aer(cid));
    }
    bench.registry.add_namespace(bench.subsystem, namespace(5)).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 0, NS_CHANGED)]);
    bench.registry.resize_namespace(bench.subsystem, 1, 4096).unwrap();
    bench.registry.remove_namespace(bench.subsystem, 3).unwrap();
    assert_eq!(bench.events(), []);
    let list = |bench: &mut Bench, retain| bench.log(ctrl, 4, retain, 0, 4096).unwrap()[..16].to_vec();
    let all = [1u32, 3, 5, 0].map(u32::to_le_bytes).concat();
    assert_eq!(list(&mut bench, true), all);
    assert_eq!(list(&mut bench, false), all, "retained");
    assert_eq!(list(&mut bench, false), [0; 16], "cleared by the read");
    bench.registry.resize_namespace(bench.subsystem, 1, 8192).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 1, NS_CHANGED)]);
}

#[test]
fn an_event_waits_for_a_request_and_a_storm_is_one_event() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for blocks in 1..100 {
        bench.registry.resize_namespace(bench.subsystem, 1, blocks).unwrap();
    }
    assert_eq!(bench.events(), []);
    assert_eq!(bench.completed(ctrl, &aer(9)), Ok(NS_CHANGED));
    assert_eq!(bench.admin(ctrl, &aer(10)), Action::Hold);
}

#[test]
fn notices_that_the_host_turned_off_are_not_sent() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let set = command(0x09, 0, 0, [0x0b, 0, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Ok(0));
    bench.admin(ctrl, &aer(1));
    bench.registry.resize_namespace(bench.subsystem, 1, 7).unwrap();
    assert_eq!(bench.events(), []);
    let list = bench.log(ctrl, 4, false, 0, 4).unwrap();
    assert_eq!(list, [1, 0, 0, 0], "the list is kept all the same");
}

#[test]
fn other_subsystems_changes_are_none_of_the_hosts_business() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.admin(ctrl, &aer(1));
    let other = bench.registry.add_subsystem(&subsystem("nqn.2026-01.io.farside:other")).unwrap();
    bench.registry.add_namespace(other, namespace(2)).unwrap();
    assert_eq!(bench.events(), []);
}

#[test]
fn discovery_changes_fire_and_rearm_by_reading_the_log() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    let listener = |addr: &str| Listener { addr: addr.parse().unwrap(), portid: 1, provider: RdmaProvider::RoceV2 };
    for cid in 0..3 {
        bench.admin(ctrl, &aer(cid));
    }
    bench.registry.add_listener(listener("10.0.0.1:4420")).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 0, DISCOVERY_CHANGED)]);
    bench.registry.add_listener(listener("10.0.0.1:4421")).unwrap();
    assert_eq!(bench.events(), []);
    bench.log(ctrl, 0x70, true, 0, 1024).unwrap();
    bench.registry.remove_listener("10.0.0.1:4421".parse().unwrap()).unwrap();
    assert_eq!(bench.events(), [], "retained: still masked");
    bench.log(ctrl, 0x70, false, 1024, 1024).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 1, DISCOVERY_CHANGED)], "it changed after the copy");
    bench.log(ctrl, 0x70, false, 0, 4096).unwrap();
    bench.registry.remove_subsystem(bench.subsystem).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 2, DISCOVERY_CHANGED)]);
}

#[test]
fn abort_of_a_held_request_answers_both() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cid in 1..=3 {
        bench.admin(ctrl, &aer(cid));
    }
    assert_eq!(bench.completed(ctrl, &abort(0, 2)), Ok(0));
    let aborted = Completion::failed(2, Status::ABORT_REQUESTED);
    assert_eq!(bench.events(), [Event::CompleteHeld { ctrl, completion: aborted }]);
    bench.registry.resize_namespace(bench.subsystem, 1, 7).unwrap();
    assert_eq!(bench.events(), [fires(ctrl, 1, NS_CHANGED)]);
}

#[test]
fn abort_of_an_io_command_is_the_transports_and_limited() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    let mut reply = None;
    for cid in 0..4 {
        let Action::Abort { sqid: 1, cid: target, reply: r } = bench.admin(ctrl, &abort(1, cid)) else {
            panic!("not the transport's");
        };
        assert_eq!(target, cid);
        reply = Some(r);
    }
    let reply = reply.unwrap();
    assert_eq!(reply.completion(true), Completion::with_result(0x1234, 0));
    assert_eq!(reply.completion(false), Completion::with_result(0x1234, 1));
    assert_eq!(bench.completed(ctrl, &abort(1, 4)), Err(Status::ABORT_LIMIT_EXCEEDED));
    bench.registry.abort_finished(ctrl);
    assert!(matches!(bench.admin(ctrl, &abort(1, 4)), Action::Abort { .. }));
}

#[test]
fn abort_of_itself_of_another_admin_command_or_on_no_queue_aborts_nothing() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let itself = abort(0, 0x1234);
    assert_eq!(itself.cid, 0x1234);
    assert_eq!(bench.completed(ctrl, &itself), Ok(1));
    assert_eq!(bench.completed(ctrl, &abort(0, 7)), Ok(1));
    for _ in 0..300 {
        assert_eq!(bench.completed(ctrl, &abort(7, 1)), Ok(1));
    }
}

#[test]
fn discovery_controllers_have_no_abort() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    assert_eq!(bench.completed(ctrl, &abort(0, 1)), Err(Status::INVALID_OPCODE.dnr()));
}
