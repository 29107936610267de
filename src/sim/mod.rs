//! Simulation of whole targets and hosts: the real target, the real host and the real software provider with its engines, one
//! thread, a fake clock, and a network, a disk and machines that fail as a seed says.
//!
//! What is real: everything above the socket calls. [`SimTarget`] turns the target's reactors and control thread;
//! [`Driver`] turns a [`Host`](crate::host::Host); both use [`Soft`], whose sockets are [`Port`]s of a simulated network and
//! whose clock is the [`World`]'s. What is not: the kernel, threads, io_uring ([`SimDisk`] is the backend).
//!
//! A run ([`run`]) has three hosts, 1,000 commands in all and three kinds of faults or more ([`Plan`]), and counts as one when
//! three of them made a difference. Time jumps from event to event. What must hold, or the run fails with its seed:
//! * every command is answered once, or dies with its host; none fails unless the disk does;
//! * what is read is what was written: see [`Model`], also for power cuts and failed writes;
//! * no connection is lost without a cause: loss, delay and the like are for the transport to heal;
//! * nothing is stuck: there is progress within [`PATIENCE`], whatever happened;
//! * in the end everything is back: buffers, credits, receives, keys, queue pairs, connections, on both sides.
//!
//! A write whose answer was under way when the power failed counts as one that failed: nobody can tell.
//!
//! Same seed, same run: nothing depends on the machine's clock, on addresses, or on the order of a hash map.

mod coverage;
#[cfg(test)]
mod crowd;
mod disk;
mod driver;
#[cfg(test)]
mod hungry;
#[cfg(test)]
mod limits;
mod model;
mod net;
mod plan;
mod rng;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use coverage::Coverage;
use disk::SimDisk;
use driver::{Driver, Violation};
use model::Model;
use net::address_of;
pub(crate) use net::{Datagram, Machine, Port, World};
use plan::{Event, Fault, HOSTS, Plan, What};
pub(crate) use rng::Rng;

use crate::rdma::soft::Soft;
use crate::target::{NamespaceSpec, Options, SimTarget, SubsystemSpec, Target};

/// The target's machine; the hosts' follow.
const TARGET: usize = 0;
const NQN: &str = "nqn.2026-11.io.example:simulated";
/// Blocks that each host has to itself.
const BLOCKS_PER_HOST: usize = 768;
/// Without an answer for so long something is stuck: longer than any retry budget, keep alive and reconnect together.
const PATIENCE: Duration = Duration::from_secs(150);
/// After a fault that may cost connections: until all of them were noticed, by whatever timer.
const EXCUSE: Duration = Duration::from_secs(60);
/// A quiet time before the end, in which half-open connections come to light.
const QUIET: Duration = Duration::from_secs(45);

/// A run that went well.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) coverage: Coverage,
    /// Simulated time.
    pub(crate) took: Duration,
    /// Differs when anything that happened does.
    pub(crate) digest: u64,
}

struct Sim {
    world: Arc<World>,
    plan: Plan,
    rng: Rng,
    disk: SimDisk,
    target: Option<SimTarget>,
    target_lives: u64,
    target_back_at: Duration,
    seed: u64,
    hosts: Vec<Driver>,
    events: std::vec::IntoIter<Event>,
    next_event: Option<Event>,
    /// What ends at a time.
    endings: Vec<(Duration, Ending)>,
    coverage: Coverage,
    steps: u64,
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    CutOff(usize),
    HoldReceives(usize),
    Hog,
}

/// One run.
pub(crate) fn run(seed: u64) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::new(&mut rng);
    run_plan(seed, plan, rng)
}

/// A run with these kinds of faults.
pub(crate) fn run_with(seed: u64, faults: &[Fault]) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::with(faults.to_vec(), &mut rng);
    run_plan(seed, plan, rng)
}

fn run_plan(seed: u64, plan: Plan, rng: Rng) -> Result<Report, Violation> {
    let mut sim = Sim::new(seed, plan, rng)?;
    sim.work()?;
    sim.wind_down()
}

impl Sim {
    fn new(seed: u64, plan: Plan, mut rng: Rng) -> Result<Self, Violation> {
        let world = World::new(rng.next(), HOSTS + 1, plan.conditions);
        let blocks = (BLOCKS_PER_HOST * HOSTS) as u64;
        let disk = SimDisk::new(&world, rng.next(), blocks, plan.disk);
        let hosts = plan
            .hosts
            .iter()
            .enumerate()
            .map(|(at, host)| {
                let model = Model::new((at * BLOCKS_PER_HOST) as u64, BLOCKS_PER_HOST, !plan.disk.volatile, at as u64);
                let mut driver = Driver::new(at + 1, *host, &world, rng.next(), model);
                driver.disk_fails = plan.disk.errors > 0;
                driver
            })
            .collect();
        let mut events = plan.events.clone().into_iter();
        let mut sim = Self {
            next_event: events.next(),
            events,
            world,
            rng,
            disk,
            target: None,
            target_lives: 0,
            target_back_at: Duration::ZERO,
            seed,
            hosts,
            endings: Vec::new(),
            coverage: Coverage::of_everything(),
            steps: 0,
            plan,
        };
        sim.start_target()?;
        Ok(sim)
    }

    fn start_target(&mut self) -> Result<(), Violation> {
        self.target_lives += 1;
        let plan = &self.plan;
        let options = Options {
            reactors: plan.reactors,
            io_queues: 8,
            queue_depth: 64,
            admin_queue_depth: 32,
            in_capsule_data: plan.in_capsule_data,
            mdts: plan.mdts,
            pool_size: 4 << 20,
            receive_slots: plan.receive_slots,
            ..Options::default()
        };
        let seed = self.seed ^ self.target_lives << 40;
        let machine = Machine::new(&self.world, TARGET, plan.reactors, plan.mtu, (seed, self.seed));
        let provider = Soft::simulated(machine, plan.reactors).map_err(|error| error.to_string())?;
        let namespace = NamespaceSpec::new(1, Arc::new(self.disk.clone()));
        let builder = Target::builder()
            .options(options)
            .subsystem(SubsystemSpec::new(NQN).namespace(namespace))
            .listen(SocketAddr::new(address_of(TARGET), 4420));
        self.target = Some(SimTarget::start(builder, provider).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// The commands with their faults, until all are answered.
    fn work(&mut self) -> Result<(), Violation> {
        while !self.hosts.iter().all(Driver::is_done) {
            self.step()?;
        }
        Ok(())
    }

    /// The network heals; everything is read once; everything is given back.
    fn wind_down(mut self) -> Result<Report, Violation> {
        let calm = net::Conditions {
            loss: 0,
            cm_loss: 0,
            duplicate: 0,
            reorder: 0,
            corrupt: 0,
            mark: 0,
            inbox: 4 << 20,
            ..self.plan.conditions
        };
        self.world.net().conditions = calm;
        self.disk.set_errors(0);
        let quiet_until = self.world.now() + QUIET;
        self.until(quiet_until, |sim| sim.endings.is_empty() && sim.target.is_some())?;
        let now = self.world.now();
        for host in &mut self.hosts {
            host.verify(now);
        }
        self.work()?;
        let mut leaks = Vec::new();
        for host in &mut self.hosts {
            leaks.extend(host.disconnect());
        }
        self.collect();
        for host in &mut self.hosts {
            host.host = None;
        }
        let patience = self.world.now() + PATIENCE;
        self.until(self.world.now() + Duration::from_secs(1), |_| true)?;
        while self.target.as_mut().is_some_and(|target| target.in_use() != (0, 0) || target.connections() > 0) {
            self.step()?;
            if self.world.now() > patience {
                leaks.extend(self.target.as_mut().map(SimTarget::leaks).unwrap_or_default());
                return Err(format!("the target is not done with its hosts: {}", leaks.join("; ")));
            }
        }
        leaks.extend(self.target.as_mut().map(SimTarget::leaks).unwrap_or_default());
        if !leaks.is_empty() {
            return Err(format!("not given back: {}", leaks.join("; ")));
        }
        if let Some(target) = &mut self.target {
            target.stop();
            target.turn(self.world.now());
        }
        self.drop_target();
        self.check_faults()?;
        let took = self.world.now();
        let digest = self.digest();
        Ok(Report { coverage: self.coverage, took, digest })
    }

    /// Steps until a time, and until `done` says so.
    fn until(&mut self, until: Duration, mut done: impl FnMut(&Self) -> bool) -> Result<(), Violation> {
        while self.world.now() < until || !done(self) {
            match self.next_time() {
                Some(next) if next <= until || !done(self) => self.step()?,
                _ => self.world.set_now(until),
            }
        }
        Ok(())
    }

    /// Lets everything happen that can now, then moves the time to what comes next.
    fn step(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        let now = self.world.now();
        self.happen(now)?;
        self.world.net().deliver(now);
        if self.target.is_none() && now >= self.target_back_at {
            self.start_target()?;
        }
        if let Some(target) = &mut self.target {
            let rung = self.world.net().take_ring(TARGET);
            let due = target.next_timeout(now).into_iter().chain(self.disk.next_due()).min();
            if rung || due.is_none_or(|due| due <= now) {
                target.turn(now);
            }
        }
        for host in &mut self.hosts {
            let rung = self.world.net().take_ring(host.node);
            if rung || host.next_due(now).is_some_and(|due| due <= now) {
                host.turn(now)?;
            }
            if let Some(since) = host.waits_since()
                && now.saturating_sub(since) > PATIENCE
            {
                return Err(format!("host {} is stuck since {since:?}, at {now:?}", host.node));
            }
        }
        match self.next_time() {
            Some(next) => self.world.set_now(next.max(now)),
            None if self.hosts.iter().all(Driver::is_done) => {}
            None => return Err("nothing is left to happen, and commands are not done".into()),
        }
        if self.steps > MOST_STEPS {
            return Err(format!("{MOST_STEPS} steps, and at {now:?} it goes on"));
        }
        Ok(())
    }

    fn next_time(&self) -> Option<Duration> {
        let now = self.world.now();
        let target = self.target.as_ref().map_or(Some(self.target_back_at), |target| target.next_timeout(now));
        let hosts = self.hosts.iter().filter_map(|host| host.next_due(now));
        let endings = self.endings.iter().map(|(at, _)| *at);
        hosts.chain(endings).chain(target).chain(self.disk.next_due()).chain(self.world.net().next_arrival()).min()
    }

    /// Faults that begin or end now.
    fn happen(&mut self, now: Duration) -> Result<(), Violation> {
        let done: u64 = self.hosts.iter().map(|host| host.tally.done + host.tally.orphaned).sum();
        while let Some(event) = self.next_event.take_if(|event| event.after <= done) {
            self.next_event = self.events.next();
            self.begin(event.what, now);
        }
        let (over, left) = self.endings.drain(..).partition(|(at, _)| *at <= now);
        self.endings = left;
        for (_, ending) in over {
            tracing::info!(?now, ?ending, "event ends");
            self.end(ending);
        }
        Ok(())
    }

    fn begin(&mut self, what: What, now: Duration) {
        self.coverage.hit("event", what.name());
        tracing::info!(?now, ?what, "event");
        match what {
            What::CutOff { node, span } => {
                self.world.net().cut_off(node, true);
                self.endings.push((now + span, Ending::CutOff(node)));
                // What heals within a second is nobody's loss.
                if span >= Duration::from_secs(1) {
                    self.excuse(node, now + span + EXCUSE);
                }
            }
            What::HoldReceives { node, span } => {
                self.hold_receives(node, true);
                self.endings.push((now + span, Ending::HoldReceives(node)));
            }
            What::HogBuffers { span } => {
                if let Some(target) = &mut self.target {
                    target.hog(256 << 10);
                }
                self.endings.push((now + span, Ending::Hog));
            }
            What::RebootHost { host, away } => {
                self.hosts[host].power_off(now, away);
                self.hosts[host].excused_until = now + away + EXCUSE;
            }
            What::RebootTarget { away, power } => {
                self.disk.abandon(power);
                self.world.net().power_off(TARGET);
                self.drop_target();
                self.target_back_at = now + away;
                for host in &mut self.hosts {
                    if power {
                        host.power_cut();
                    }
                    host.excused_until = now + away + EXCUSE;
                }
            }
            What::StallDisk { span } => self.disk.stall(now + span),
        }
    }

    fn end(&mut self, ending: Ending) {
        match ending {
            Ending::CutOff(node) => self.world.net().cut_off(node, false),
            Ending::HoldReceives(node) => self.hold_receives(node, false),
            Ending::Hog => {
                if let Some(target) = &mut self.target {
                    target.give_back();
                    // Its reactor does not know that it has something to do.
                    target.turn(self.world.now());
                }
            }
        }
    }

    fn hold_receives(&mut self, node: usize, hold: bool) {
        match node.checked_sub(1) {
            Some(host) => {
                if let Some(endpoint) = self.hosts[host].endpoint() {
                    endpoint.engine().hold_receives(hold);
                }
            }
            None => {
                for endpoint in self.target.iter_mut().flat_map(SimTarget::endpoints) {
                    endpoint.engine().hold_receives(hold);
                }
            }
        }
    }

    fn excuse(&mut self, node: usize, until: Duration) {
        for host in &mut self.hosts {
            if node == TARGET || node == host.node {
                host.excused_until = host.excused_until.max(until);
            }
        }
    }

    fn drop_target(&mut self) {
        if let Some(target) = &mut self.target {
            for (what, count) in target.coverage() {
                self.coverage.add("target", &what, count);
            }
            for endpoint in target.endpoints() {
                self.coverage.add_engine("target's engine", endpoint);
            }
        }
        self.target = None;
    }

    /// What the hosts and the network did.
    fn collect(&mut self) {
        for host in &mut self.hosts {
            self.coverage.add_host(&host.tally);
            if let Some(endpoint) = host.endpoint() {
                self.coverage.add_engine("host's engine", endpoint);
            }
        }
        self.coverage.add_net(&self.world.net().tally);
        self.coverage.add_disk(&self.disk.tally());
    }

    /// A fault that never acted is none.
    fn check_faults(&mut self) -> Result<(), Violation> {
        let acted: Vec<Fault> =
            self.plan.faults.iter().copied().filter(|fault| self.coverage.has_acted(*fault)).collect();
        for fault in &acted {
            self.coverage.hit("fault", &format!("{fault:?}"));
        }
        self.coverage.add("run", "kinds of faults that acted", acted.len() as u64);
        let enough = Fault::listed_kinds(&acted) >= LEAST_FAULTS;
        self.coverage.hit("run", "runs");
        self.coverage.add("run", ENOUGH_FAULTS, enough.into());
        Ok(())
    }

    fn digest(&mut self) -> u64 {
        let mut digest = self.coverage.digest() ^ self.world.now().as_nanos() as u64 ^ self.steps << 40;
        digest = digest.wrapping_mul(31).wrapping_add(self.rng.next());
        digest
    }
}

/// Listed kinds of faults that have to act in a run for it to count ([`Fault::LISTED`]).
const LEAST_FAULTS: usize = 3;
/// The name of the count of those runs.
const ENOUGH_FAULTS: &str = "three listed kinds of faults acted";
/// Far more than any run takes.
const MOST_STEPS: u64 = 3_000_000;
