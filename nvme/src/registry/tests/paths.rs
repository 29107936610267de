//! Ports, ANA groups and states: what is published, what hosts are told, what they read.

use super::*;
use crate::gate::Sender;
use crate::io::IoCommand;

const PORTS: [&str; 2] = ["10.0.0.1:4420", "10.0.0.2:4420"];

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Two listeners and a host on each.
fn two_paths() -> (Bench, [ControllerId; 2]) {
    let mut bench = Bench::new();
    for port in PORTS {
        let listener = Listener { addr: addr(port), portid: 0, provider: RdmaProvider::RoceV2 };
        bench.registry.add_listener(listener).unwrap();
    }
    let hosts = PORTS.map(|port| {
        let ctrl = bench.dial(Dial::admin().from(port)).unwrap().ctrl;
        bench.enable(ctrl);
        ctrl
    });
    bench.all_events();
    (bench, hosts)
}

impl Bench {
    fn set(&mut self, group: u32, port: Option<&str>, state: AnaState) -> Result<(), ConfigError> {
        self.registry.set_ana_state(self.subsystem, group, port.map(addr), state, self.now)
    }

    /// What a Flush is answered with through a port.
    fn through(&self, nsid: u32, portid: u16) -> Result<(), Status> {
        let gate = self.registry.namespace_gate(self.subsystem, nsid);
        gate.map_or(Ok(()), |gate| gate.check(&Sender { hostid: [9; 16], portid, host: 0 }, &IoCommand::Flush))
    }

    /// Group, namespaces and state of each group in the ANA log.
    fn ana(&mut self, ctrl: ControllerId) -> Vec<(u32, Vec<u32>, u8)> {
        let page = self.log(ctrl, 0x0c, false, 0, 1024).unwrap();
        let word = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
        let mut at = 16;
        (0..page[8])
            .map(|_| {
                let nsids = (0..word(at + 4) as usize).map(|n| word(at + 32 + n * 4)).collect::<Vec<_>>();
                let group = (word(at), nsids.clone(), page[at + 16]);
                at += 32 + nsids.len() * 4;
                group
            })
            .collect()
    }
}

#[test]
fn states_through_all_listeners_hold_for_those_to_come() {
    let (mut bench, _) = two_paths();
    bench.set(1, None, AnaState::Inaccessible).unwrap();
    let late = "10.0.0.3:4420";
    bench.registry.add_listener(Listener { addr: addr(late), portid: 0, provider: RdmaProvider::RoceV2 }).unwrap();
    let ctrl = bench.dial(Dial::admin().from(late)).unwrap().ctrl;
    bench.enable(ctrl);
    assert_eq!(bench.ana(ctrl), [(1, vec![1, 3], 3)]);
    let portid = bench.registry.port_of(addr(late));
    assert_eq!(bench.through(1, portid), Err(Status::ANA_INACCESSIBLE));
    // One of its own does not go to others.
    bench.set(1, None, AnaState::Optimized).unwrap();
    bench.set(1, Some(late), AnaState::NonOptimized).unwrap();
    let other = "10.0.0.4:4420";
    bench.registry.add_listener(Listener { addr: addr(other), portid: 0, provider: RdmaProvider::RoceV2 }).unwrap();
    let ctrl = bench.dial(Dial::admin().from(other)).unwrap().ctrl;
    bench.enable(ctrl);
    assert_eq!(bench.ana(ctrl), [(1, vec![1, 3], 1)]);
}

#[test]
fn every_state_is_published_for_its_port_and_told_to_all() {
    let (mut bench, [first, second]) = two_paths();
    assert_eq!(bench.ana(first), [(1, vec![1, 3], 1)]);
    let states = [
        (AnaState::Inaccessible, 3, Err(Status::ANA_INACCESSIBLE)),
        (AnaState::Change, 0xf, Err(Status::ANA_TRANSITION)),
        (AnaState::NonOptimized, 2, Ok(())),
        (AnaState::PersistentLoss, 4, Err(Status::ANA_PERSISTENT_LOSS)),
        (AnaState::Optimized, 1, Ok(())),
    ];
    for (state, wire, answer) in states {
        for ctrl in [first, second] {
            bench.admin(ctrl, &aer(1));
        }
        bench.set(1, Some(PORTS[1]), state).unwrap();
        let publish = |nsid| Event::Publish { subsystem: bench.subsystem, nsid };
        let told = |ctrl| Event::CompleteHeld { ctrl, completion: Completion::with_result(1, 0x000c_0302) };
        let expected = [publish(1), publish(3), told(first), told(second)];
        assert_eq!(bench.all_events(), expected, "{state:?}");
        assert_eq!((bench.ana(first), bench.ana(second)), (vec![(1, vec![1, 3], 1)], vec![(1, vec![1, 3], wire)]));
        assert_eq!((bench.through(1, 1), bench.through(1, 2)), (Ok(()), answer));
        bench.set(1, Some(PORTS[1]), state).unwrap();
        assert_eq!(bench.all_events(), [], "no change");
    }
    bench.set(1, None, AnaState::Inaccessible).unwrap();
    assert!(bench.through(3, 1).is_err() && bench.through(3, 2).is_err(), "all listeners");
}

#[test]
fn a_namespace_moves_between_groups_and_a_new_one_brings_its_own() {
    let (mut bench, [first, _]) = two_paths();
    bench.set(5, Some(PORTS[0]), AnaState::Inaccessible).unwrap();
    bench.ana(first);
    bench.events();
    bench.admin(first, &aer(1));
    bench.admin(first, &aer(2));
    bench.registry.set_ana_group(bench.subsystem, 3, 5).unwrap();
    let fired: Vec<u64> = bench
        .events()
        .iter()
        .map(|event| if let Event::CompleteHeld { completion, .. } = event { completion.result } else { 0 })
        .collect();
    assert_eq!(fired, [0x0004_0002, 0x000c_0302]);
    assert_eq!(bench.ana(first), [(1, vec![1], 1), (5, vec![3], 3)]);
    assert_eq!((bench.through(1, 1), bench.through(3, 1)), (Ok(()), Err(Status::ANA_INACCESSIBLE)));
    for (cns, at) in [(0, 92), (8, 4)] {
        assert_eq!(bench.identify(first, cns, 3).unwrap()[at], 5, "ANAGRPID of CNS {cns}");
    }
    bench.registry.add_namespace(bench.subsystem, NamespaceConfig { ana_group: 9, ..namespace(7) }).unwrap();
    assert_eq!(bench.ana(first).last(), Some(&(9, vec![7], 1)));
    bench.registry.remove_namespace(bench.subsystem, 7).unwrap();
    assert_eq!(bench.ana(first).len(), 2);
}

#[test]
fn what_does_not_exist_is_refused() {
    let (mut bench, _) = two_paths();
    for group in [0, 129] {
        assert_eq!(bench.set(group, None, AnaState::Inaccessible), Err(ConfigError::AnaGroup(group)));
        assert_eq!(bench.registry.set_ana_group(bench.subsystem, 1, group), Err(ConfigError::AnaGroup(group)));
        let config = NamespaceConfig { ana_group: group, ..namespace(5) };
        assert_eq!(bench.registry.add_namespace(bench.subsystem, config).is_err(), group != 0, "0 is the default");
    }
    assert!(bench.set(128, None, AnaState::Inaccessible).is_ok());
    assert!(matches!(bench.set(1, Some("10.9.9.9:1"), AnaState::Optimized), Err(ConfigError::NoSuchListener(_))));
    assert_eq!(bench.registry.set_ana_group(bench.subsystem, 99, 1), Err(ConfigError::NoSuchNamespace(99)));
}

#[test]
fn a_transition_ends_after_the_time_that_hosts_were_told() {
    let (mut bench, [first, _]) = two_paths();
    bench.set(1, Some(PORTS[0]), AnaState::Change).unwrap();
    let due = bench.now + 10 * SECOND;
    assert!(bench.registry.next_deadline().is_some_and(|deadline| deadline <= due));
    bench.events();
    bench.registry.handle_timeout(due - SECOND, &|_| Some(due));
    assert_eq!(bench.through(1, 1), Err(Status::ANA_TRANSITION));
    bench.registry.handle_timeout(due, &|_| Some(due));
    assert_eq!(bench.through(1, 1), Err(Status::ANA_INACCESSIBLE));
    assert!(bench.all_events().contains(&Event::Publish { subsystem: bench.subsystem, nsid: 1 }));
    assert_eq!(bench.ana(first), [(1, vec![1, 3], 3)]);
}

#[test]
fn a_listener_that_comes_back_is_the_same_port() {
    let (mut bench, [_, second]) = two_paths();
    bench.set(1, Some(PORTS[1]), AnaState::NonOptimized).unwrap();
    let listener = Listener { addr: addr(PORTS[1]), portid: 0, provider: RdmaProvider::RoceV2 };
    bench.registry.remove_listener(listener.addr).unwrap();
    let other = Listener { addr: addr("10.0.0.3:4420"), ..listener };
    bench.registry.add_listener(other).unwrap();
    bench.registry.add_listener(listener).unwrap();
    let ports: Vec<u16> = bench.registry.listeners().iter().map(|listener| listener.portid).collect();
    assert_eq!(ports, [1, 3, 2]);
    assert_eq!(bench.ana(second), [(1, vec![1, 3], 2)], "and so is its state");
}

#[test]
fn the_port_is_that_of_the_listener_that_a_host_reached() {
    let mut registry = Registry::new(RegistryConfig::default());
    for (port, text) in (1..).zip(["0.0.0.0:4420", "10.0.0.1:4420", "10.0.0.1:4421", "[::]:4422"]) {
        registry.add_listener(Listener { addr: addr(text), portid: port, provider: RdmaProvider::RoceV2 }).unwrap();
    }
    for (local, port) in [
        ("10.0.0.1:4420", 2),
        ("10.0.0.9:4420", 1),
        ("10.0.0.1:4421", 3),
        ("10.0.0.9:4421", 0),
        ("[::ffff:10.0.0.1]:4420", 2),
        ("[fd00::1]:4420", 0),
        ("[fd00::1]:4422", 4),
        ("10.0.0.1:4422", 4),
    ] {
        assert_eq!(registry.port_of(addr(local)), port, "{local}");
    }
}
