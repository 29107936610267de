//! Limits on the fake clock: hosts that always want more get what they are held to, to the command, and delay nobody.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::net::{Conditions, Machine, World, address_of};
use super::{NQN, TARGET};
use crate::backend::Null;
use crate::clock::Clock;
use crate::host::{Command, Host, HostOptions, Op};
use crate::rdma::soft::Soft;
use crate::roce::Mtu;
use crate::target::{Limits, NamespaceSpec, Options, SimTarget, SubsystemSpec, Target};

/// A host with so many reads under way at all times.
struct Hungry {
    node: usize,
    machine: Machine,
    host: Host<Soft>,
    nsid: u32,
    blocks: u32,
    depth: u64,
    begun: u64,
    /// When each was answered, and how long it took.
    answered: Vec<(Duration, Duration)>,
}

impl Hungry {
    fn new(world: &Arc<World>, node: usize, nsid: u32, depth: u64, blocks: u32) -> Self {
        let machine = Machine::new(world, node, 1, Mtu::B4096, (node as u64, node as u64));
        let options = HostOptions {
            hostnqn: hostnqn(node),
            hostid: [node as u8; 16],
            io_queues: 1,
            queue_depth: 64,
            memory: 4 << 20,
            source: Some(address_of(node)),
            // A command that waits for its turn is not lost.
            io_timeout: Duration::from_secs(60),
            ..HostOptions::default()
        };
        let provider = Soft::simulated(machine.clone(), 1).expect("a provider");
        let address = SocketAddr::new(address_of(TARGET), 4420);
        let clock = Clock::Simulated(Arc::clone(world));
        let host = Host::start_by(Arc::new(provider), address, NQN, options, clock).expect("a host");
        Self { node, machine, host, nsid, blocks, depth, begun: 0, answered: Vec::new() }
    }

    fn turn(&mut self, world: &World) {
        loop {
            let mut worked = self.host.simulate();
            while self.host.next_event().is_some() {}
            while let Some(done) = self.host.next_done() {
                assert_eq!(done.result, Ok(()), "host {}", self.node);
                self.answered.push((world.now(), done.latency));
                if let Some(buffer) = done.data {
                    self.host.give_buffer(buffer);
                }
                worked = true;
            }
            assert!(self.host.failure().is_none(), "host {}: {:?}", self.node, self.host.failure());
            while self.host.is_ready() && self.begun - (self.answered.len() as u64) < self.depth {
                let data = self.host.take_buffer(self.blocks as usize * 512);
                let slba = self.begun * 8 % 1024;
                let command =
                    Command { token: self.begun, op: Op::Read, nsid: self.nsid, slba, blocks: self.blocks, data };
                assert!(self.host.submit(0, command).is_ok(), "room for its depth");
                self.begun += 1;
                worked = true;
            }
            if !worked && !world.net().has_mail(self.node) && !self.machine.take_wake() {
                return;
            }
        }
    }

    /// Answers within a time.
    fn count(&self, from: Duration, until: Duration) -> usize {
        self.answered.iter().filter(|(at, _)| (from..until).contains(at)).count()
    }

    fn median_latency(&self) -> Duration {
        let mut latencies: Vec<Duration> = self.answered.iter().map(|(_, latency)| *latency).collect();
        latencies.sort_unstable();
        latencies[latencies.len() / 2]
    }
}

fn hostnqn(node: usize) -> String {
    format!("nqn.2026-11.io.example:host{node}")
}

/// Hosts by namespace, depth and blocks, for so long.
fn run(subsystem: SubsystemSpec, hosts: &[(u32, u64, u32)], lasting: Duration) -> Vec<Hungry> {
    let conditions = Conditions {
        loss: 0,
        cm_loss: 0,
        duplicate: 0,
        reorder: 0,
        corrupt: 0,
        mark: 0,
        delay: Duration::from_micros(100),
        jitter: Duration::ZERO,
        inbox: 4 << 20,
        merge: false,
    };
    let world = World::new(1, hosts.len() + 1, conditions);
    let machine = Machine::new(&world, TARGET, 1, Mtu::B4096, (77, 77));
    let provider = Soft::simulated(machine, 1).expect("a provider");
    let options = Options { reactors: 1, pool_size: 4 << 20, receive_slots: 1024, ..Options::default() };
    let builder =
        Target::builder().options(options).subsystem(subsystem).listen(SocketAddr::new(address_of(TARGET), 4420));
    let mut target = SimTarget::start(builder, provider).expect("a target");
    let mut hosts: Vec<Hungry> = (1..)
        .zip(hosts)
        .map(|(node, (nsid, depth, blocks))| Hungry::new(&world, node, *nsid, *depth, *blocks))
        .collect();
    let until = world.now() + lasting;
    hosts.iter_mut().for_each(|host| host.turn(&world));
    while world.now() < until {
        let now = world.now();
        world.net().deliver(now);
        let rung = world.net().take_ring(TARGET);
        if rung || target.next_timeout(now).is_some_and(|due| due <= now) {
            target.turn(now);
        }
        for host in &mut hosts {
            let rung = world.net().take_ring(host.node);
            if rung || host.host.next_due().is_some_and(|due| due <= now) {
                host.turn(&world);
            }
        }
        let dues = hosts.iter().filter_map(|host| host.host.next_due());
        let next = dues.chain(target.next_timeout(now)).chain(world.net().next_arrival()).min();
        world.set_now(next.expect("something to happen").max(now));
    }
    hosts
}

fn subsystem() -> SubsystemSpec {
    let namespace = |nsid| NamespaceSpec::new(nsid, Arc::new(Null::new(1 << 30)));
    SubsystemSpec::new(NQN).namespace(namespace(1)).namespace(namespace(2))
}

/// Answers of a second, once everything goes its way.
fn per_second(host: &Hungry) -> usize {
    let from = host.answered.first().expect("an answer").0 + Duration::from_secs(1);
    host.count(from, from + Duration::from_secs(2)).div_ceil(2)
}

const LASTING: Duration = Duration::from_secs(4);

#[test]
fn a_host_gets_what_it_is_held_to_and_no_other_is_delayed() {
    let alone = run(subsystem(), &[(1, 2, 8)], LASTING);
    let mut limited = subsystem();
    limited.limits = vec![(hostnqn(2), Limits { iops: 1000, ..Limits::default() })];
    let both = run(limited, &[(1, 2, 8), (1, 32, 8)], LASTING);
    assert_eq!(per_second(&both[1]), 1000);
    assert!(per_second(&alone[0]) > 5000, "{}", per_second(&alone[0]));
    // A microsecond, where both are answered in one round.
    let (before, after) = (alone[0].median_latency(), both[0].median_latency());
    assert!(after <= before + Duration::from_micros(1), "{before:?}, {after:?}");
    assert!(per_second(&both[0]) >= per_second(&alone[0]) * 99 / 100);
}

#[test]
fn hosts_share_what_their_namespace_is_held_to_and_others_go_on() {
    let mut limited = subsystem();
    limited.namespaces[0].limits = Limits { iops: 2000, ..Limits::default() };
    let hosts = run(limited, &[(1, 16, 8), (1, 16, 8), (2, 2, 8)], LASTING);
    let shares = [per_second(&hosts[0]), per_second(&hosts[1])];
    assert!((1999..=2001).contains(&(shares[0] + shares[1])), "{shares:?}");
    assert!(shares.iter().all(|share| *share >= 900), "{shares:?}");
    assert!(per_second(&hosts[2]) > 5000);
}

#[test]
fn bytes_are_limited_whatever_their_commands_are() {
    for blocks in [8, 256] {
        let mut limited = subsystem();
        limited.limits = vec![(hostnqn(1), Limits { read_bandwidth: 8 << 20, ..Limits::default() })];
        let hosts = run(limited, &[(1, 16, blocks)], LASTING);
        let bytes = per_second(&hosts[0]) * blocks as usize * 512;
        assert!(((8 << 20) - (128 << 10)..=(8 << 20) + (128 << 10)).contains(&bytes), "{blocks}: {bytes}");
    }
}

#[test]
fn a_host_held_back_twice_stands_in_one_line_after_the_other() {
    // Its own limit is the lower one, so the other host gets all the rest.
    let mut limited = subsystem();
    limited.limits = vec![(hostnqn(1), Limits { iops: 500, ..Limits::default() })];
    limited.namespaces[0].limits = Limits { iops: 2000, ..Limits::default() };
    let hosts = run(limited, &[(1, 32, 8), (1, 32, 8)], LASTING);
    assert_eq!(per_second(&hosts[0]), 500);
    assert!((1499..=1501).contains(&per_second(&hosts[1])), "{}", per_second(&hosts[1]));
}
