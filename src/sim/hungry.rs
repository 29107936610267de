//! Hosts that always want more, on a network without faults.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::net::{Conditions, Machine, World, address_of};
use super::{NQN, TARGET};
use crate::clock::Clock;
use crate::host::{Command, Host, HostOptions, Op};
use crate::rdma::soft::Soft;
use crate::roce::Mtu;
use crate::target::{Options, SimTarget, SubsystemSpec, Target};

/// What a host wants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) op: Op,
    pub(super) nsid: u32,
    /// Commands at a time.
    pub(super) depth: u64,
    pub(super) blocks: u32,
}

/// A host with so many commands under way at all times.
pub(super) struct Hungry {
    node: usize,
    machine: Machine,
    pub(super) host: Host<Soft>,
    want: Want,
    begun: u64,
    /// When each was answered, and how long it took.
    pub(super) answered: Vec<(Duration, Duration)>,
}

impl Hungry {
    fn new(world: &Arc<World>, node: usize, want: Want) -> Self {
        let machine = Machine::new(world, node, 1, Mtu::B4096, (node as u64, node as u64));
        let options = HostOptions {
            hostnqn: hostnqn(node),
            hostid: [node as u8; 16],
            io_queues: 1,
            queue_depth: 64,
            memory: (4 << 20).max(want.depth as usize * want.blocks as usize * 512 + (1 << 20)),
            source: Some(address_of(node)),
            // A command that waits for its turn is not lost.
            io_timeout: Duration::from_secs(60),
            ..HostOptions::default()
        };
        let provider = Soft::simulated(machine.clone(), 1).expect("a provider");
        let address = SocketAddr::new(address_of(TARGET), 4420);
        let clock = Clock::Simulated(Arc::clone(world));
        let host = Host::start_by(Arc::new(provider), address, NQN, options, clock).expect("a host");
        Self { node, machine, host, want, begun: 0, answered: Vec::new() }
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
            while self.host.is_ready() && self.begun - (self.answered.len() as u64) < self.want.depth {
                let Want { op, nsid, blocks, .. } = self.want;
                let data = self.host.take_buffer(blocks as usize * 512);
                let command = Command { token: self.begun, op, nsid, slba: self.begun * 8 % 1024, blocks, data };
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
    pub(super) fn count(&self, from: Duration, until: Duration) -> usize {
        self.answered.iter().filter(|(at, _)| (from..until).contains(at)).count()
    }

    pub(super) fn median_latency(&self) -> Duration {
        let mut latencies: Vec<Duration> = self.answered.iter().map(|(_, latency)| *latency).collect();
        latencies.sort_unstable();
        latencies[latencies.len() / 2]
    }
}

pub(super) fn hostnqn(node: usize) -> String {
    format!("nqn.2026-11.io.example:host{node}")
}

/// What was left when the time was over.
pub(super) struct Outcome {
    pub(super) world: Arc<World>,
    pub(super) target: SimTarget,
    pub(super) hosts: Vec<Hungry>,
}

/// Lets hosts want for so long, whose sockets hold `inbox` bytes as the kernel counts them.
pub(super) fn run(subsystem: SubsystemSpec, wants: &[Want], inbox: usize, lasting: Duration) -> Outcome {
    let conditions = Conditions {
        loss: 0,
        cm_loss: 0,
        duplicate: 0,
        reorder: 0,
        corrupt: 0,
        mark: 0,
        delay: Duration::from_micros(100),
        jitter: Duration::ZERO,
        inbox,
        merge: false,
    };
    let world = World::new(1, wants.len() + 1, conditions);
    let machine = Machine::new(&world, TARGET, 1, Mtu::B4096, (77, 77));
    let provider = Soft::simulated(machine, 1).expect("a provider");
    let options = Options { reactors: 1, pool_size: 4 << 20, receive_slots: 1024, ..Options::default() };
    let builder =
        Target::builder().options(options).subsystem(subsystem).listen(SocketAddr::new(address_of(TARGET), 4420));
    let mut target = SimTarget::start(builder, provider).expect("a target");
    let mut hosts: Vec<Hungry> = (1..).zip(wants).map(|(node, want)| Hungry::new(&world, node, *want)).collect();
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
    Outcome { world, target, hosts }
}
