//! Which hosts see what, how many of their controllers there are, and what a host may do to all of them.

use super::*;
use crate::gate::Sender;
use crate::io::IoCommand;

const OTHER: &str = "other";

/// A host of another name and identifier.
fn other() -> Dial<'static> {
    Dial { hostnqn: OTHER, hostid: [7; 16], ..Dial::admin() }
}

fn enabled(bench: &mut Bench, dial: Dial<'_>) -> Connected {
    let connected = bench.dial(dial).unwrap();
    bench.enable(connected.ctrl);
    connected
}

fn active(bench: &mut Bench, ctrl: ControllerId) -> Vec<u32> {
    let list = bench.identify(ctrl, 2, 0).unwrap();
    let (nsids, _) = list.as_chunks::<4>();
    nsids.iter().map(|nsid| u32::from_le_bytes(*nsid)).take_while(|nsid| *nsid != 0).collect()
}

/// What the gate of a namespace says to a host's Flush.
fn passes(bench: &Bench, nsid: u32, connected: &Connected) -> Result<(), Status> {
    let sender = Sender { hostid: [0; 16], portid: 1, host: connected.host };
    let gate = bench.registry.namespace_gate(bench.subsystem, nsid);
    gate.map_or(Ok(()), |gate| gate.check(&sender, &IoCommand::Flush))
}

#[test]
fn a_namespace_is_not_there_for_hosts_that_may_not_see_it() {
    let mut bench = Bench::new();
    let (one, two) = (enabled(&mut bench, Dial::admin()), enabled(&mut bench, other()));
    assert_ne!(one.host, two.host);
    let id = bench.subsystem;
    let hosts = [HOST.to_owned(), "later".to_owned()];
    bench.registry.add_namespace(id, NamespaceConfig { hosts: Some(hosts.to_vec()), ..namespace(5) }).unwrap();
    assert_eq!((active(&mut bench, one.ctrl), active(&mut bench, two.ctrl)), (vec![1, 3, 5], vec![1, 3]));
    assert_eq!((passes(&bench, 5, &one), passes(&bench, 5, &two)), (Ok(()), Err(crate::io::no_namespace())));
    assert_eq!((passes(&bench, 3, &one), passes(&bench, 3, &two)), (Ok(()), Ok(())));
    // To the other host it looks like a namespace that does not exist: number 7.
    for cns in [0u32, 3, 5, 8] {
        let answers = [5, 7].map(|nsid| bench.identify(two.ctrl, cns, nsid));
        assert!(answers[0] == answers[1], "CNS {cns}");
        // Of CNS 05h nothing is told at all.
        assert!(cns == 5 || bench.identify(one.ctrl, cns, 5) != answers[0], "CNS {cns}");
    }
    let get = |nsid| command(0x0a, nsid, 0, [0x84, 0, 0, 0, 0, 0]);
    assert_eq!(bench.completed(one.ctrl, &get(5)), Ok(0));
    assert_eq!(bench.completed(two.ctrl, &get(5)), bench.completed(two.ctrl, &get(7)));
    let ana = bench.log(two.ctrl, 0x0c, false, 0, 4096).unwrap();
    assert_eq!(ana[16 + 4], 2, "two namespaces in the group");
    assert_eq!(bench.log(two.ctrl, 4, false, 0, 4096).unwrap()[..4], [0; 4], "it hears nothing of it");
    assert_eq!(bench.log(one.ctrl, 4, false, 0, 4096).unwrap()[..4], [5, 0, 0, 0]);
    // A host that comes later has the number that the list has.
    let later = enabled(&mut bench, Dial { hostnqn: "later", hostid: [8; 16], ..Dial::admin() });
    assert_eq!(passes(&bench, 5, &later), Ok(()));
    let again = bench.dial(Dial { hostid: [6; 16], ..other() }).unwrap();
    assert_eq!(again.host, two.host);
}

#[test]
fn those_whose_view_changes_are_told_and_no_others() {
    let mut bench = Bench::new();
    let (one, two) = (enabled(&mut bench, Dial::admin()), enabled(&mut bench, other()));
    let id = bench.subsystem;
    let changed = |bench: &mut Bench, ctrl| bench.log(ctrl, 4, false, 0, 4096).unwrap()[0];
    bench.all_events();
    bench.registry.set_namespace_hosts(id, 1, Some(&[OTHER.to_owned()])).unwrap();
    assert!(bench.all_events().contains(&Event::Publish { subsystem: id, nsid: 1 }));
    assert_eq!((changed(&mut bench, one.ctrl), changed(&mut bench, two.ctrl)), (1, 0));
    assert_eq!(passes(&bench, 1, &one), Err(crate::io::no_namespace()));
    bench.registry.resize_namespace(id, 1, 99).unwrap();
    assert_eq!((changed(&mut bench, one.ctrl), changed(&mut bench, two.ctrl)), (0, 1));
    bench.registry.set_namespace_hosts(id, 1, None).unwrap();
    assert_eq!((changed(&mut bench, one.ctrl), changed(&mut bench, two.ctrl)), (1, 0));
    assert_eq!(bench.registry.namespace_gate(id, 1), None);
    bench.registry.set_namespace_hosts(id, 3, Some(&[])).unwrap();
    assert_eq!((active(&mut bench, one.ctrl), active(&mut bench, two.ctrl)), (vec![1], vec![1]));
    bench.registry.remove_namespace(id, 3).unwrap();
    assert_eq!(bench.registry.set_namespace_hosts(id, 3, None), Err(ConfigError::NoSuchNamespace(3)));
    let bad = bench.registry.set_namespace_hosts(id, 1, Some(&[String::new()]));
    assert!(matches!(bad, Err(ConfigError::HostNqn(..))));
}

#[test]
fn controllers_have_limits_per_subsystem_and_per_host() {
    let mut bench = Bench::new();
    let id = bench.subsystem;
    let admission = Admission { controllers: Some(3), controllers_per_host: Some(2), ..Admission::default() };
    bench.registry.set_admission(id, admission).unwrap();
    let busy = |refused: Result<Connected, Completion>| {
        // Without Do Not Retry: the host comes back.
        assert_eq!(refused.unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY);
    };
    let first = bench.dial(Dial::admin()).unwrap();
    bench.dial(Dial::admin()).unwrap();
    busy(bench.dial(Dial::admin()));
    bench.dial(other()).unwrap();
    busy(bench.dial(Dial { hostnqn: "third", ..Dial::admin() }));
    bench.close(first.ctrl, 0);
    bench.dial(Dial { hostnqn: "third", ..Dial::admin() }).unwrap();
    bench.dial(Dial::discovery(0)).unwrap();
    bench.registry.set_admission(id, Admission::default()).unwrap();
    bench.dial(Dial::admin()).unwrap();
}

#[test]
fn a_host_that_comes_twice_is_taken_refused_or_takes_its_own_place() {
    let mut bench = Bench::new();
    let id = bench.subsystem;
    for addr in ["10.0.0.1:4420", "10.0.0.2:4420"] {
        let listener = Listener { addr: addr.parse().unwrap(), portid: 0, provider: RdmaProvider::RoceV2 };
        bench.registry.add_listener(listener).unwrap();
    }
    bench.all_events();
    let duplicates = |bench: &mut Bench, duplicates| {
        bench.registry.set_admission(id, Admission { duplicates, ..Admission::default() }).unwrap();
    };
    duplicates(&mut bench, Duplicates::Refuse);
    let first = bench.dial(Dial::admin()).unwrap();
    let second_path = bench.dial(Dial::admin().from("10.0.0.2:4420")).unwrap();
    assert!(!first.replaces && !second_path.replaces, "another path of the same host is welcome");
    for twice in [Dial::admin(), Dial { hostid: [8; 16], ..Dial::admin() }.from("10.0.0.3:4420")] {
        assert_eq!(bench.dial(twice).unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY);
    }
    let stranger = bench.dial(other()).unwrap();
    duplicates(&mut bench, Duplicates::Replace);
    let restarted = bench.dial(Dial::admin()).unwrap();
    assert!(restarted.replaces);
    assert_eq!(bench.events(), [Event::Kill { ctrl: first.ctrl, reason: KillReason::Replaced }]);
    assert!(bench.registry.controller(first.ctrl).unwrap().dying);
    // Another machine of that name takes over all its paths.
    let elsewhere = bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).unwrap();
    assert!(elsewhere.replaces);
    let killed = |connected: &Connected| Event::Kill { ctrl: connected.ctrl, reason: KillReason::Replaced };
    let events = bench.events();
    assert!(events.len() == 2 && events.contains(&killed(&second_path)) && events.contains(&killed(&restarted)));
    assert!(!bench.registry.controller(stranger.ctrl).unwrap().dying);
    duplicates(&mut bench, Duplicates::Allow);
    assert!(!bench.dial(Dial { hostid: [8; 16], ..Dial::admin() }).unwrap().replaces);
    assert_eq!(bench.events(), []);
}

#[test]
fn a_subsystem_reset_ends_all_its_associations() {
    let config = RegistryConfig { subsystem_reset: true, ..RegistryConfig::default() };
    let mut bench = Bench::with(config);
    let (one, two) = (enabled(&mut bench, Dial::admin()), enabled(&mut bench, other()));
    let discovery = bench.discovery_host();
    let reset = |offset, value| command(0x7f, 0, 0, [0, offset, value, 0, 0, 0]);
    assert_eq!(bench.completed(one.ctrl, &reset(0x20, 1)), Ok(0), "not the word that it takes");
    assert_eq!(bench.events(), []);
    let Action::DisconnectQueue { completion } = bench.admin(one.ctrl, &reset(0x20, 0x4e56_4d65)) else {
        panic!("answered, then closed");
    };
    assert!(completion.status.is_success());
    assert_eq!(bench.events(), [Event::Kill { ctrl: two.ctrl, reason: KillReason::SubsystemReset }]);
    bench.close(one.ctrl, 0);
    let back = enabled(&mut bench, Dial { hostid: [5; 16], ..Dial::admin() });
    assert_eq!(bench.csts(back.ctrl), 1 | 1 << 4, "it tells of the reset");
    assert_eq!(bench.completed(back.ctrl, &reset(0x1c, 1 << 4)), Ok(0));
    assert_eq!(bench.csts(back.ctrl), 1);
    assert!(bench.completed(discovery, &reset(0x20, 0x4e56_4d65)).is_err());
    let mut without = Bench::new();
    let host = without.host();
    assert!(without.completed(host, &reset(0x20, 0x4e56_4d65)).is_err());
}

#[test]
fn what_passes_is_to_be_retried_after_a_while() {
    let config = RegistryConfig { retry_delay: Duration::from_millis(700), ..RegistryConfig::default() };
    config.check().unwrap();
    let odd = RegistryConfig { retry_delay: Duration::from_millis(50), ..RegistryConfig::default() };
    assert!(matches!(odd.check(), Err(ConfigError::Limit(_))));
    let mut bench = Bench::with(config);
    let ctrl = bench.host();
    let identify = bench.identify(ctrl, 1, 0).unwrap();
    assert_eq!(identify[128..134], [7, 0, 0, 0, 0, 0], "CRDT1 to 3");
    let failed = |bench: &mut Bench, status| {
        let error = CommandError { sqid: 1, cid: 1, opcode: 2, nsid: 1, lba: 0, status, location: 0xffff };
        bench.registry.record_error(ctrl, &error)
    };
    let passing = Status::ANA_TRANSITION;
    assert_eq!(failed(&mut bench, passing), passing, "the host did not say that it looks at it");
    let behavior = command(0x09, 0, 512, [0x16, 0, 0, 0, 0, 0]);
    let mut data = vec![0; 512];
    data[0] = 1;
    bench.registry.admin(ctrl, &behavior, Some(&data), bench.now);
    assert_eq!(failed(&mut bench, passing).to_wire(), passing.to_wire() | 1 << 11);
    for lasting in [Status::UNRECOVERED_READ_ERROR, Status::NAMESPACE_NOT_READY.dnr()] {
        assert_eq!(failed(&mut bench, lasting), lasting);
    }
}
