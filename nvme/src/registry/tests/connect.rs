//! Connect: every parameter, on both sides of what is allowed.

use super::*;

/// The refusal as hosts print it: status code and Dword 0.
fn refused(bench: &mut Bench, dial: Dial<'_>) -> (u16, u64) {
    let refusal = bench.dial(dial).unwrap_err();
    assert_eq!(refusal.cid, dial.command().cid);
    let passing = refusal.status.code() == 0x00c || dial.qid != 0 && refusal.result == IN_DATA | 16;
    assert_eq!(refusal.status.is_dnr(), !passing, "{}", refusal.status);
    assert_eq!(bench.registry.controllers().filter(|c| c.io_queues > 1).count(), 0);
    (refusal.status.code(), refusal.result)
}

const IN_DATA: u64 = 1 << 16;

#[test]
fn admin_connect_gives_a_controller() {
    let mut bench = Bench::new();
    let connected = bench.dial(Dial { cattr: 4, ..Dial::admin() }).unwrap();
    assert_eq!(connected.cntlid, 1);
    assert_eq!(connected.completion.result, 1);
    assert_eq!((connected.qid, connected.sqsize), (0, 31));
    assert_eq!(connected.subsystem, bench.subsystem);
    assert!(connected.sq_flow_control_disabled);
    let info = bench.registry.controller(connected.ctrl).unwrap();
    assert_eq!(info.hostnqn.to_string(), HOST);
    assert_eq!(info.kato, Some(5 * SECOND));
    assert!(!bench.dial(Dial::admin()).unwrap().sq_flow_control_disabled);
}

#[test]
fn record_format_other_than_zero_is_incompatible() {
    let mut bench = Bench::new();
    assert_eq!(refused(&mut bench, Dial { recfmt: 1, ..Dial::admin() }), (0x180, 0));
}

#[test]
fn admin_parameters_are_refused_by_offset() {
    let mut bench = Bench::new();
    let admin = Dial::admin();
    for (dial, dword0) in [
        (Dial { qid: 1, ..admin }, 42),
        (Dial { sqsize: 0, ..admin }, 44),
        (Dial { sqsize: 32, ..admin }, 44),
        (Dial { hostid: [0; 16], ..admin }, IN_DATA),
        (Dial { cntlid: 0, ..admin }, IN_DATA | 16),
        (Dial { cntlid: 0xfffe, ..admin }, IN_DATA | 16),
        (Dial { subnqn: "", ..admin }, IN_DATA | 256),
        (Dial { subnqn: "nqn.2026-01.io.farside:other", ..admin }, IN_DATA | 256),
        (Dial { hostnqn: "", ..admin }, IN_DATA | 512),
    ] {
        assert_eq!(refused(&mut bench, dial), (0x182, dword0));
    }
    let (long, unterminated) = ("a".repeat(224), "a".repeat(256));
    for name in [&long, &unterminated] {
        assert_eq!(refused(&mut bench, Dial { hostnqn: name, ..admin }), (0x182, IN_DATA | 512));
        assert_eq!(refused(&mut bench, Dial { subnqn: name, ..admin }), (0x182, IN_DATA | 256));
    }
    assert_eq!(bench.registry.controllers().count(), 0, "nothing was made");
}

#[test]
fn odd_host_names_are_welcome() {
    let mut bench = Bench::new();
    let longest = "a".repeat(223);
    let no_dashes = "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5";
    for hostnqn in [longest.as_str(), "x", no_dashes] {
        assert!(bench.dial(Dial { hostnqn, ..Dial::admin() }).is_ok());
    }
}

#[test]
fn data_shorter_than_1024_bytes_are_refused() {
    let mut bench = Bench::new();
    let dial = Dial::admin();
    let refusal = bench.registry.connect(&dial.cm, &dial.command(), &dial.data()[..1023], SECOND);
    assert_eq!(refusal.unwrap_err().status, Status::DATA_SGL_LENGTH_INVALID.dnr());
}

#[test]
fn only_connect_is_taken_on_an_unconnected_queue() {
    let mut bench = Bench::new();
    let dial = Dial::admin();
    for other in [command(0x7f, 4, 0, [0; 6]), command(0x18, 0, 0, [0; 6])] {
        let refusal = bench.registry.connect(&dial.cm, &other, &dial.data(), SECOND);
        assert_eq!(refusal.unwrap_err().status, Status::COMMAND_SEQUENCE_ERROR.dnr());
    }
}

#[test]
fn only_allowed_hosts_connect() {
    let mut bench = Bench::new();
    bench.registry.set_allow_any_host(bench.subsystem, false).unwrap();
    assert_eq!(refused(&mut bench, Dial::admin()), (0x184, 0));
    bench.registry.allow_host(bench.subsystem, HOST).unwrap();
    assert!(bench.dial(Dial::admin()).is_ok());
    assert_eq!(refused(&mut bench, Dial { hostnqn: "other", ..Dial::admin() }), (0x184, 0));
    assert!(bench.dial(Dial { hostnqn: "other", ..Dial::discovery(0) }).is_ok(), "discovery is for all");
}

#[test]
fn same_host_id_under_two_names_and_two_ids_under_one_name_connect() {
    let mut bench = Bench::new();
    assert!(bench.dial(Dial::admin()).is_ok());
    assert!(bench.dial(Dial { hostnqn: "other", ..Dial::admin() }).is_ok());
    assert!(bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).is_ok());
}

#[test]
fn io_queues_join_their_controller() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let connected = bench.io_queue(ctrl, 1).unwrap();
    assert_eq!((connected.ctrl, connected.qid, connected.sqsize), (ctrl, 1, 127));
    assert!(bench.io_queue(ctrl, 128).is_ok());
    assert_eq!(bench.registry.controller(ctrl).unwrap().io_queues, 2);
}

#[test]
fn io_parameters_are_refused_by_offset() {
    let mut bench = Bench::new();
    bench.registry.add_subsystem(&subsystem("nqn.2026-01.io.farside:other")).unwrap();
    bench.host();
    let io = Dial::io(1, 1);
    for (dial, dword0) in [
        (Dial { qid: 2, ..io }, 42),
        (Dial::io(129, 1), 42),
        (Dial { sqsize: 0, ..io }, 44),
        (Dial { sqsize: 128, ..io }, 44),
        (Dial { cntlid: 0xfffe, ..io }, IN_DATA | 16),
        (Dial { cntlid: 0xffff, ..io }, IN_DATA | 16),
        (Dial { cntlid: 2, ..io }, IN_DATA | 16),
        (Dial { subnqn: "nqn.2026-01.io.farside:other", ..io }, IN_DATA | 16),
        (Dial { hostnqn: "other", ..io }, IN_DATA | 512),
        (Dial { hostid: [8; 16], ..io }, IN_DATA),
    ] {
        assert_eq!(refused(&mut bench, dial), (0x182, dword0));
    }
}

#[test]
fn io_queue_depth_is_bounded_by_mqes() {
    let mut bench = Bench::new();
    bench.host();
    let deep = |sqsize| {
        let io = Dial::io(1, 1);
        Dial { sqsize, cm: QueueContext { hsqsize: 0xffff, ..io.cm }, ..io }
    };
    assert_eq!(refused(&mut bench, deep(1024)), (0x182, 44));
    assert!(bench.dial(deep(1023)).is_ok());
}

#[test]
fn a_queue_identifier_is_connected_once() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    assert_eq!(refused(&mut bench, Dial::io(1, 1)), (0x00c, 0));
    bench.close(ctrl, 1);
    assert!(bench.io_queue(ctrl, 1).is_ok());
}

#[test]
fn io_queues_wait_for_an_enabled_controller() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    assert_eq!(refused(&mut bench, Dial::io(1, 1)), (0x00c, 0));
    // Entry sizes that are not those of an I/O queue.
    bench.property_set(ctrl, 0x14, 0x61);
    assert_eq!(refused(&mut bench, Dial::io(1, 1)), (0x182, 42));
    bench.property_set(ctrl, 0x14, ENABLE);
    assert!(bench.io_queue(ctrl, 1).is_ok());
}

#[test]
fn io_queues_do_not_exceed_the_number_that_was_granted() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let set = command(0x09, 0, 0, [7, 0x0001_0001, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Ok(0x0001_0001));
    assert!(bench.io_queue(ctrl, 2).is_ok());
    assert_eq!(refused(&mut bench, Dial::io(3, 1)), (0x182, 42));
}

#[test]
fn discovery_controllers_have_no_io_queues() {
    let mut bench = Bench::new();
    bench.discovery_host();
    let dial = Dial { subnqn: DISCOVERY_NQN, ..Dial::io(1, 1) };
    assert_eq!(refused(&mut bench, dial), (0x182, 42));
}

#[test]
fn io_connect_to_a_dead_controller_is_a_wrong_controller() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.registry.fail_controller(ctrl);
    assert_eq!(refused(&mut bench, Dial::io(1, 1)), (0x182, IN_DATA | 16));
    bench.close(ctrl, 0);
    assert_eq!(refused(&mut bench, Dial::io(1, 1)), (0x182, IN_DATA | 16));
}

#[test]
fn connecting_a_connected_queue_again_is_out_of_sequence() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let again = Dial::admin().command();
    assert_eq!(bench.completed(ctrl, &again), Err(Status::COMMAND_SEQUENCE_ERROR.dnr()));
    let action = bench.registry.io_fabrics(ctrl, 1, &again, None, SECOND);
    let refusal = Completion::failed(again.cid, Status::COMMAND_SEQUENCE_ERROR.dnr());
    assert_eq!(action, Action::Complete(refusal));
}

#[test]
fn identifiers_come_from_the_range_and_a_live_one_is_never_given_again() {
    let mut bench = Bench::with(RegistryConfig { cntlids: 10..=12, ..RegistryConfig::default() });
    let first = bench.dial(Dial::admin()).unwrap();
    let others = [bench.dial(Dial::admin()).unwrap(), bench.dial(Dial::admin()).unwrap()];
    assert_eq!([first.cntlid, others[0].cntlid, others[1].cntlid], [10, 11, 12]);
    let busy = bench.dial(Dial::admin()).unwrap_err();
    assert_eq!(busy.status, Status::CONNECT_CONTROLLER_BUSY, "may be retried");
    // Another subsystem has identifiers of its own.
    bench.registry.add_subsystem(&subsystem("nqn.2026-01.io.farside:other")).unwrap();
    assert!(bench.dial(Dial { subnqn: "nqn.2026-01.io.farside:other", ..Dial::admin() }).is_ok());
    bench.registry.fail_controller(first.ctrl);
    assert!(bench.dial(Dial::admin()).is_err(), "a dying controller still has its identifier");
    bench.close(first.ctrl, 0);
    assert_eq!(bench.dial(Dial::admin()).unwrap().cntlid, 10);
}

#[test]
fn an_identifier_that_was_just_freed_comes_last() {
    let mut bench = Bench::with(RegistryConfig { cntlids: 1..=3, ..RegistryConfig::default() });
    let first = bench.dial(Dial::admin()).unwrap();
    bench.close(first.ctrl, 0);
    let next: Vec<u16> = (0..3).map(|_| bench.dial(Dial::admin()).unwrap().cntlid).collect();
    assert_eq!(next, [2, 3, 1]);
}
