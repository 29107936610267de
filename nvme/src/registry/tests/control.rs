//! The control plane: what may be configured, and what running controllers see of a change.

use super::*;
use crate::gate::Sender;
use crate::io::IoCommand;
use crate::reservation::ReservationCommand;

#[test]
fn limits_are_checked_on_both_sides() {
    let check = |change: fn(&mut RegistryConfig)| {
        let mut config = RegistryConfig::default();
        change(&mut config);
        config.check().is_ok()
    };
    assert!(check(|_| {}));
    assert!(check(|c| c.io_limits.mdts_bytes = 4096) && !check(|c| c.io_limits.mdts_bytes = 2048));
    assert!(!check(|c| c.io_limits.mdts_bytes = 12288) && !check(|c| c.io_limits.mdts_bytes = 0));
    assert!(check(|c| c.io_limits.write_zeroes_bytes = 0) && !check(|c| c.io_limits.write_zeroes_bytes = 2048));
    assert!(check(|c| c.io_limits.verify_bytes = 4096) && !check(|c| c.io_limits.verify_bytes = 12288));
    assert!(check(|c| c.io_limits.copy_ranges = 256) && !check(|c| c.io_limits.copy_ranges = 257));
    assert!(check(|c| c.io_limits.copy_ranges = 1) && !check(|c| c.io_limits.copy_ranges = 0));
    assert!(check(|c| c.in_capsule_data_size = 16384) && !check(|c| c.in_capsule_data_size = 16400));
    assert!(check(|c| c.in_capsule_data_size = 0) && !check(|c| c.in_capsule_data_size = 8));
    assert!(check(|c| c.cntlids = 1..=0xffef) && !check(|c| c.cntlids = 1..=0xfff0));
    assert!(!check(|c| c.cntlids = 0..=9) && check(|c| c.cntlids = 9..=9));
    assert!(check(|c| c.keep_alive_granularity = Duration::from_millis(100)));
    assert!(!check(|c| c.keep_alive_granularity = Duration::from_millis(50)));
    assert!(!check(|c| c.keep_alive_granularity = Duration::ZERO));
    assert!(check(|c| c.max_io_queues = 1) && !check(|c| c.max_io_queues = 0));
    assert!(check(|c| c.max_io_queue_entries = 2) && !check(|c| c.max_io_queue_entries = 1));
    assert!(check(|c| c.admin_queue_entries = 32) && !check(|c| c.admin_queue_entries = 31));
    assert!(check(|c| c.max_namespaces = 0xffff_fffd) && !check(|c| c.max_namespaces = 0xffff_fffe));
    assert!(check(|c| c.firmware = "12345678".into()) && !check(|c| c.firmware = "123456789".into()));
    assert!(!check(|c| c.model = String::new()));
}

#[test]
fn subsystems_are_checked() {
    let mut bench = Bench::new();
    let good = subsystem("nqn.2026-01.io.farside:other");
    let mut add = |config: SubsystemConfig| bench.registry.add_subsystem(&config);
    assert!(matches!(add(subsystem("testnqn")), Err(ConfigError::Nqn(..))));
    assert!(matches!(add(subsystem(DISCOVERY_NQN)), Err(ConfigError::Nqn(..))));
    assert_eq!(add(subsystem(NQN)), Err(ConfigError::DuplicateNqn(NQN.into())));
    for serial in ["", "123456789012345678901", "tab\t"] {
        let refused = add(SubsystemConfig { serial: serial.into(), ..good.clone() });
        assert_eq!(refused, Err(ConfigError::Serial(serial.into())));
    }
    let long = "m".repeat(41);
    let refused = add(SubsystemConfig { model: Some(long.clone()), ..good.clone() });
    assert_eq!(refused, Err(ConfigError::Model(long)));
    let refused = add(SubsystemConfig { hosts: vec!["a b".into()], ..good.clone() });
    assert!(matches!(refused, Err(ConfigError::HostNqn(..))));
    assert!(add(good).is_ok());
}

#[test]
fn namespaces_are_checked() {
    let mut bench = Bench::new();
    let id = bench.subsystem;
    let other = bench.registry.add_subsystem(&subsystem("nqn.2026-01.io.farside:other")).unwrap();
    let mut add = |id, config| bench.registry.add_namespace(id, config).unwrap_err();
    let good = namespace(2);
    for nsid in [0, 1025, 0xffff_fffe, 0xffff_ffff] {
        assert_eq!(add(id, namespace(nsid)), ConfigError::NsidOutOfRange(nsid));
    }
    assert_eq!(add(id, namespace(1)), ConfigError::DuplicateNsid(1));
    let same_uuid = NamespaceConfig { uuid: namespace(1).uuid, ..good.clone() };
    assert_eq!(add(id, same_uuid.clone()), ConfigError::DuplicateUuid(namespace(1).uuid));
    assert_eq!(add(other, same_uuid), ConfigError::DuplicateUuid(namespace(1).uuid));
    let same_nguid = NamespaceConfig { nguid: namespace(1).nguid, ..good.clone() };
    assert_eq!(add(id, same_nguid), ConfigError::DuplicateUuid(good.uuid));
    assert_eq!(add(id, NamespaceConfig { uuid: [0; 16], ..good.clone() }), ConfigError::ZeroUuid);
    for block_size in [0, 1, 520, 1024, 8192] {
        let refused = add(id, NamespaceConfig { block_size, ..good.clone() });
        assert_eq!(refused, ConfigError::BlockSize(block_size));
    }
    for blocks in [0, u64::MAX, (u64::MAX >> 9) + 1] {
        assert_eq!(add(id, NamespaceConfig { blocks, ..good.clone() }), ConfigError::Size(blocks));
    }
    assert_eq!(add(SubsystemId::DISCOVERY, good), ConfigError::NoSuchSubsystem);
}

#[test]
fn views_follow_the_namespaces() {
    let mut bench = Bench::new();
    let id = bench.subsystem;
    let sizes = |bench: &Bench| -> Vec<(u32, u64)> {
        bench.registry.namespace_views(id).iter().map(|view| (view.nsid, view.blocks)).collect()
    };
    assert_eq!(sizes(&bench), [(1, 2048), (3, 2048)]);
    bench.registry.resize_namespace(id, 1, 10).unwrap();
    bench.registry.remove_namespace(id, 3).unwrap();
    assert_eq!(sizes(&bench), [(1, 10)]);
    assert_eq!(bench.registry.resize_namespace(id, 3, 1), Err(ConfigError::NoSuchNamespace(3)));
    assert_eq!(bench.registry.resize_namespace(id, 1, 0), Err(ConfigError::Size(0)));
    assert_eq!(bench.registry.remove_namespace(id, 3), Err(ConfigError::NoSuchNamespace(3)));
    bench.registry.remove_subsystem(id).unwrap();
    assert_eq!(sizes(&bench), []);
    assert_eq!(bench.registry.remove_subsystem(id), Err(ConfigError::NoSuchSubsystem));
    assert_eq!(bench.registry.remove_subsystem(SubsystemId::DISCOVERY), Err(ConfigError::NoSuchSubsystem));
}

#[test]
fn listeners_are_unique() {
    let mut bench = Bench::new();
    let addr: SocketAddr = LOCAL.parse().unwrap();
    let listener = Listener { addr, portid: 1, provider: RdmaProvider::Iwarp };
    bench.registry.add_listener(listener).unwrap();
    assert_eq!(bench.registry.add_listener(listener), Err(ConfigError::DuplicateListener(addr)));
    bench.registry.remove_listener(addr).unwrap();
    assert_eq!(bench.registry.remove_listener(addr), Err(ConfigError::NoSuchListener(addr)));
}

#[test]
fn removing_a_subsystem_kills_its_controllers_and_no_others() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.discovery_host();
    bench.registry.remove_subsystem(bench.subsystem).unwrap();
    assert_eq!(bench.events(), [Event::Kill { ctrl, reason: KillReason::SubsystemRemoved }]);
    assert!(bench.dial(Dial::admin()).is_err());
    // The same name again, while the old controller is still being closed: no identifier twice.
    bench.registry.add_subsystem(&subsystem(NQN)).unwrap();
    assert_ne!(bench.dial(Dial::admin()).unwrap().cntlid, 1);
}

#[test]
fn removing_a_host_kills_its_controllers_where_not_all_are_allowed() {
    let mut bench = Bench::new();
    let id = bench.subsystem;
    let ctrl = bench.host();
    bench.registry.remove_host(id, HOST).unwrap();
    assert_eq!(bench.events(), [], "any host is allowed");
    bench.registry.allow_host(id, HOST).unwrap();
    bench.registry.set_allow_any_host(id, false).unwrap();
    assert_eq!(bench.events(), [], "it is listed");
    bench.registry.remove_host(id, HOST).unwrap();
    assert_eq!(bench.events(), [Event::Kill { ctrl, reason: KillReason::HostRemoved }]);
}

#[test]
fn allowing_any_host_no_longer_kills_those_that_are_not_listed() {
    let mut bench = Bench::new();
    let listed = bench.host();
    let stranger = bench.dial(Dial { hostnqn: "stranger", ..Dial::admin() }).unwrap().ctrl;
    bench.registry.allow_host(bench.subsystem, HOST).unwrap();
    bench.registry.set_allow_any_host(bench.subsystem, false).unwrap();
    let kill = Event::Kill { ctrl: stranger, reason: KillReason::HostRemoved };
    assert_eq!(bench.events(), [kill]);
    assert!(bench.registry.io_allowed(listed));
}

#[test]
fn errors_name_the_object_and_the_rule() {
    let uuid = 0xabcd_u128.to_be_bytes();
    for (error, words) in [
        (ConfigError::Nqn("x".into(), crate::NqnError::Prefix), "\"x\": the NQN does not start with \"nqn.\""),
        (ConfigError::DuplicateUuid(uuid), "0000000000000000000000000000abcd"),
        (ConfigError::BlockSize(520), "520"),
        (ConfigError::NsidOutOfRange(0), "identifier 0"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn what_was_taken_away_comes_back_as_it_was_and_hosts_hear_only_of_what_stays_away() {
    let mut bench = Bench::new();
    let (id, ctrl) = (bench.subsystem, bench.host());
    bench.admin(ctrl, &aer(1));
    bench.registry.set_write_protection(id, 3, WriteProtection::Protected).unwrap();
    bench.all_events();
    bench.log(ctrl, 4, false, 0, 4096).unwrap();
    bench.admin(ctrl, &aer(2));
    let publish = |nsid| Event::Publish { subsystem: id, nsid };
    let taken = bench.registry.take_namespace(id, 3).unwrap();
    assert_eq!(bench.all_events(), [publish(3)]);
    assert_eq!(bench.registry.namespace_view(id, 3), None);
    // Another one has its place: it cannot come back before that is gone.
    bench.registry.insert_namespace(id, NamespaceConfig { uuid: [9; 16], nguid: [9; 16], ..namespace(3) }).unwrap();
    assert_eq!(bench.registry.put_namespace_back(&taken), Err(ConfigError::DuplicateNsid(3)));
    bench.registry.withdraw_namespace(id, 3).unwrap();
    assert_eq!(bench.all_events(), [publish(3), publish(3)], "nobody is told");
    bench.registry.put_namespace_back(&taken).unwrap();
    assert!(bench.registry.namespace_view(id, 3).unwrap().read_only, "its protection is not what it was");
    assert_eq!(bench.all_events(), []);
    bench.registry.namespace_is_back(taken);
    assert_eq!(bench.all_events(), [publish(3)]);

    let taken = bench.registry.take_subsystem(id).unwrap();
    assert_eq!(bench.all_events(), [publish(1), publish(3)]);
    assert!(bench.dial(Dial::admin()).is_err());
    bench.registry.put_subsystem_back(&taken).unwrap();
    bench.registry.subsystem_is_back(taken);
    assert_eq!(bench.all_events(), [publish(1), publish(3)], "its controllers live");
    assert!(bench.dial(Dial::admin()).is_ok());
    let taken = bench.registry.take_namespace(id, 3).unwrap();
    bench.registry.namespace_gone(taken);
    let told = Event::CompleteHeld { ctrl, completion: Completion::with_result(2, 0x0004_0002) };
    assert!(bench.all_events().contains(&told), "what stays away is told");
}

const NOT_READY: Status = Status::NAMESPACE_NOT_READY;

/// The answer to a command on a namespace that was not found where commands are checked.
fn not_found(bench: &mut Bench, ctrl: ControllerId, nsid: u32) -> Status {
    let status = Status::INVALID_NAMESPACE.dnr();
    let error = CommandError { sqid: 1, cid: 5, opcode: 2, nsid, lba: 0, status, location: 4 };
    bench.registry.record_error(ctrl, &error)
}

fn protect(bench: &mut Bench, ctrl: ControllerId, nsid: u32) -> Action {
    bench.admin(ctrl, &command(0x09, nsid, 0, [0x84, 1, 0, 0, 0, 0]))
}

#[test]
fn hosts_of_a_namespace_that_was_taken_away_are_told_to_come_again() {
    let mut bench = Bench::new();
    let (id, ctrl) = (bench.subsystem, bench.host());
    let only = NamespaceConfig { hosts: Some(vec!["nqn.2026-01.io.farside:h".into()]), ..namespace(4) };
    bench.registry.add_namespace(id, only).unwrap();
    bench.all_events();
    let look = |bench: &mut Bench| [(0, 3), (2, 0), (3, 3), (8, 3)].map(|(cns, nsid)| bench.identify(ctrl, cns, nsid));
    let before = look(&mut bench);
    let mut away = vec![bench.registry.take_namespace(id, 3).unwrap(), bench.registry.take_namespace(id, 4).unwrap()];
    assert_eq!(not_found(&mut bench, ctrl, 3), NOT_READY);
    assert_eq!(not_found(&mut bench, ctrl, 2), Status::INVALID_NAMESPACE.dnr());
    assert_eq!(not_found(&mut bench, ctrl, 4), Status::INVALID_NAMESPACE.dnr(), "it never saw that one");
    assert_eq!(look(&mut bench), before, "hosts see what may come back");
    let refused = |cid| Action::Complete(Completion::failed(cid, NOT_READY));
    assert_eq!(protect(&mut bench, ctrl, 3), refused(command(0x09, 3, 0, [0; 6]).cid));
    let report = ReservationCommand::Report { len: 64 };
    assert_eq!(bench.registry.reserve(ctrl, 3, 1, report, &[]), refused(1));
    // What comes in its place shows itself when the other is gone for good.
    let larger = NamespaceConfig { uuid: [9; 16], nguid: [9; 16], blocks: 4096, ..namespace(3) };
    bench.registry.insert_namespace(id, larger).unwrap();
    let gate = bench.registry.namespace_gate(id, 3).unwrap();
    let sender = Sender { hostid: [9; 16], portid: 0, host: 1 };
    assert_eq!(gate.check(&sender, &IoCommand::Flush), Err(NOT_READY));
    assert_eq!(gate.refusal(Status::LBA_OUT_OF_RANGE.dnr()), NOT_READY);
    assert_eq!(look(&mut bench), before);
    away.into_iter().for_each(|taken| bench.registry.namespace_gone(taken));
    assert_eq!(bench.registry.namespace_gate(id, 3), None);
    assert_eq!(bench.identify(ctrl, 0, 3).unwrap()[..8], 4096u64.to_le_bytes());
    assert!(matches!(protect(&mut bench, ctrl, 3), Action::Settle { .. }));
    // The same, and back.
    away = vec![bench.registry.take_namespace(id, 3).unwrap()];
    bench.registry.put_namespace_back(&away[0]).unwrap();
    assert!(bench.registry.namespace_view(id, 3).is_some());
    let gate = bench.registry.namespace_gate(id, 3).unwrap();
    assert_eq!(gate.check(&sender, &IoCommand::Flush), Err(NOT_READY), "it is not open everywhere");
    assert_eq!(not_found(&mut bench, ctrl, 3), NOT_READY);
    away.into_iter().for_each(|taken| bench.registry.namespace_is_back(taken));
    assert_eq!(bench.registry.namespace_gate(id, 3), None);
    assert_eq!(not_found(&mut bench, ctrl, 3), Status::INVALID_NAMESPACE.dnr());
}

#[test]
fn hosts_of_a_subsystem_that_was_taken_away_are_told_to_come_again() {
    let mut bench = Bench::new();
    let (id, ctrl) = (bench.subsystem, bench.host());
    let addr = "10.0.0.1:4420".parse().unwrap();
    bench.registry.add_listener(Listener { addr, portid: 1, provider: RdmaProvider::RoceV2 }).unwrap();
    let discovery = bench.discovery_host();
    let listed = |bench: &mut Bench| bench.log(discovery, 0x70, true, 1024, 4096).unwrap();
    let look = |bench: &mut Bench| [(1, 0), (2, 0), (0, 3)].map(|(cns, nsid)| bench.identify(ctrl, cns, nsid));
    let name = Nqn::strict(NQN).unwrap();
    let (before, log) = (look(&mut bench), listed(&mut bench));
    bench.all_events();
    let taken = bench.registry.take_subsystem(id).unwrap();
    assert!(bench.registry.take_subsystem(id).is_err() && bench.registry.find_subsystem(&name).is_none());
    assert!(bench.registry.namespace_view(id, 1).is_none() && bench.registry.namespace_views(id).is_empty());
    assert_eq!(look(&mut bench), before, "no discovery controller's data");
    assert_eq!(not_found(&mut bench, ctrl, 1), NOT_READY);
    assert_eq!(bench.dial(Dial::admin()).unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY);
    // Another one of its name, which may have other hosts, changes nothing of that.
    let other = SubsystemConfig { allow_any_host: false, serial: "other".into(), ..subsystem(NQN) };
    let new = bench.registry.add_subsystem(&other).unwrap();
    assert_eq!(bench.registry.add_namespace(new, namespace(1)), Ok(()), "the identifiers of what goes are free");
    assert_eq!(bench.dial(Dial::admin()).unwrap_err().status, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(listed(&mut bench), log);
    assert_eq!(bench.registry.put_subsystem_back(&taken), Err(ConfigError::DuplicateNqn(NQN.into())));
    bench.registry.remove_subsystem(new).unwrap();
    bench.registry.put_subsystem_back(&taken).unwrap();
    assert!(bench.registry.namespace_gate(id, 1).unwrap().is_held() && bench.registry.namespace_view(id, 1).is_some());
    bench.registry.subsystem_is_back(taken);
    assert_eq!((bench.registry.namespace_gate(id, 1), look(&mut bench)), (None, before));
    assert!(bench.dial(Dial::admin()).is_ok());
    let taken = bench.registry.take_subsystem(id).unwrap();
    bench.registry.subsystem_gone(taken);
    assert!(bench.events().contains(&Event::Kill { ctrl, reason: KillReason::SubsystemRemoved }));
}
