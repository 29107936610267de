//! The life of a controller: properties, reset, shutdown, disconnect, the end.

use super::*;

fn held_aborted(ctrl: ControllerId, cid: u16) -> Event {
    Event::CompleteHeld { ctrl, completion: Completion::failed(cid, Status::ABORT_REQUESTED) }
}

#[test]
fn properties_of_the_kernel_host_are_answered() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    let get = |size, offset| command(0x7f, 4, 0, [size, offset, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &get(1, 0)), Ok(0x0800_0820_1e01_03ff));
    assert_eq!(bench.completed(ctrl, &get(0, 8)), Ok(0x2_0000));
    assert_eq!(bench.completed(ctrl, &get(0, 0x14)), Ok(0));
    assert_eq!(bench.completed(ctrl, &get(0, 0x20)), Err(Status::INVALID_FIELD.dnr()), "NSSR is absent");
    let set = |offset| command(0x7f, 0, 0, [0, offset, 0x4e56_4d65, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set(0x20)), Err(Status::INVALID_FIELD.dnr()));
    assert_eq!(bench.completed(ctrl, &set(0x1c)), Err(Status::INVALID_FIELD.dnr()));
}

#[test]
fn admin_commands_wait_for_enable_but_keep_alive_does_not() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    let sequence = Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
    assert_eq!(bench.identify(ctrl, 1, 0), sequence);
    assert_eq!(bench.completed(ctrl, &aer(1)).map(|_| vec![]), sequence);
    assert_eq!(bench.completed(ctrl, &command(0x18, 0, 0, [0; 6])), Ok(0));
    bench.enable(ctrl);
    assert!(bench.identify(ctrl, 1, 0).is_ok());
}

#[test]
fn reset_closes_io_queues_and_ready_falls_when_the_last_is_closed() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    bench.io_queue(ctrl, 2).unwrap();
    assert!(bench.registry.io_allowed(ctrl));
    assert_eq!(bench.admin(ctrl, &aer(31)), Action::Hold);
    bench.property_set(ctrl, 0x14, ENABLE & !1);
    assert_eq!(bench.events(), [held_aborted(ctrl, 31), Event::CloseIoQueues { ctrl }]);
    assert!(!bench.registry.io_allowed(ctrl));
    assert_eq!(bench.csts(ctrl), 1);
    bench.close(ctrl, 1);
    assert_eq!(bench.csts(ctrl), 1);
    assert!(bench.io_queue(ctrl, 3).is_err(), "no queue joins a draining controller");
    bench.close(ctrl, 2);
    assert_eq!(bench.csts(ctrl), 0);
    bench.enable(ctrl);
    assert!(bench.registry.io_allowed(ctrl));
    assert!(bench.io_queue(ctrl, 1).is_ok());
}

#[test]
fn reset_without_io_queues_is_done_at_once() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.property_set(ctrl, 0x14, 0);
    assert_eq!(bench.csts(ctrl), 0);
    assert_eq!(bench.events(), []);
}

#[test]
fn shutdown_is_complete_when_the_transport_says_so() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    bench.property_set(ctrl, 0x14, ENABLE | 1 << 14);
    assert_eq!(bench.events(), [Event::ShutDown { ctrl }]);
    assert!(!bench.registry.io_allowed(ctrl));
    assert_eq!(bench.csts(ctrl), 0b0101);
    bench.registry.shutdown_done(ctrl);
    assert_eq!(bench.csts(ctrl), 0b1001);
}

#[test]
fn shutdown_of_a_discovery_controller_needs_nobody() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    bench.property_set(ctrl, 0x14, ENABLE & !0x70 | 1 << 14);
    assert_eq!(bench.events(), []);
    assert_eq!(bench.csts(ctrl), 0b1001);
}

#[test]
fn fatal_configuration_takes_no_io_and_says_so() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
    bench.property_set(ctrl, 0x14, ENABLE | 5 << 7);
    assert_eq!(bench.csts(ctrl), 2);
    assert!(!bench.registry.io_allowed(ctrl));
    assert!(bench.io_queue(ctrl, 1).is_err());
}

#[test]
fn closing_the_admin_queue_ends_the_association() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    assert_eq!(bench.admin(ctrl, &aer(1)), Action::Hold);
    bench.close(ctrl, 0);
    let kill = Event::Kill { ctrl, reason: KillReason::AdminQueueClosed };
    assert_eq!(bench.events(), [kill], "parked requests are dropped with their queue");
    assert!(bench.registry.controller(ctrl).unwrap().dying);
    assert!(!bench.registry.io_allowed(ctrl));
    bench.close(ctrl, 1);
    assert_eq!(bench.registry.controller(ctrl), None);
    assert_eq!(bench.events(), []);
}

#[test]
fn an_association_of_an_admin_queue_alone_ends_quietly() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.close(ctrl, 0);
    assert_eq!(bench.registry.controller(ctrl), None);
    assert_eq!(bench.events(), []);
}

#[test]
fn closing_an_io_queue_alone_leaves_the_controller() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    bench.close(ctrl, 1);
    assert!(bench.registry.io_allowed(ctrl));
    assert_eq!(bench.events(), []);
}

#[test]
fn a_stale_handle_names_nobody() {
    let mut bench = Bench::new();
    let old = bench.host();
    bench.close(old, 0);
    let new = bench.host();
    let gone = Action::Complete(Completion::failed(0x1234, Status::ABORTED_SQ_DELETION));
    assert_eq!(bench.admin(old, &command(0x18, 0, 0, [0; 6])), gone);
    bench.close(old, 0);
    bench.registry.fail_controller(old);
    bench.registry.shutdown_done(old);
    bench.registry.abort_finished(old);
    assert!(!bench.registry.io_allowed(old));
    assert!(bench.registry.io_allowed(new));
    assert_eq!(bench.events(), []);
}

#[test]
fn a_dying_controller_answers_nothing_more() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.registry.fail_controller(ctrl);
    bench.registry.fail_controller(ctrl);
    let kill = Event::Kill { ctrl, reason: KillReason::Transport };
    assert_eq!(bench.events(), [kill], "told once");
    let gone = Action::Complete(Completion::failed(7, Status::ABORTED_SQ_DELETION));
    assert_eq!(bench.admin(ctrl, &aer(7)), gone);
}

#[test]
fn disconnect_closes_an_io_queue_and_is_no_admin_command() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    let disconnect = |recfmt| command(0x7f, 8, 0, [recfmt, 0, 0, 0, 0, 0]);
    let action = bench.registry.io_fabrics(ctrl, 1, &disconnect(0), None, SECOND);
    assert_eq!(action, Action::DisconnectQueue { completion: Completion::success(0x1234) });
    let action = bench.registry.io_fabrics(ctrl, 1, &disconnect(1), None, SECOND);
    let refused = |status: Status| Action::Complete(Completion::failed(0x1234, status.dnr()));
    assert_eq!(action, refused(Status::CONNECT_INCOMPATIBLE_FORMAT));
    assert_eq!(bench.admin(ctrl, &disconnect(0)), refused(Status::INVALID_QUEUE_TYPE));
    let property_get = command(0x7f, 4, 0, [0; 6]);
    let action = bench.registry.io_fabrics(ctrl, 1, &property_get, None, SECOND);
    assert_eq!(action, refused(Status::INVALID_QUEUE_TYPE));
    let unknown = command(0x7f, 0x0c, 0, [0; 6]);
    let action = bench.registry.io_fabrics(ctrl, 1, &unknown, None, SECOND);
    assert_eq!(action, refused(Status::INVALID_OPCODE));
}
