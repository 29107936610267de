//! A target without threads: a simulation turns its reactors and its control thread, and looks into them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::builder::{Prepared, TargetBuilder, TargetError};
use super::control::ControlThread;
use super::reactor::Reactor;
use super::request::State;
use super::shared::{ControlMessage, Shared};
use crate::mem::{Buffer, Pool};
use crate::rdma::soft::{Soft, SoftEndpoint};

pub(crate) struct SimTarget {
    // Buffers are dropped before the arenas that they lie in.
    hogged: Vec<(usize, Buffer)>,
    shared: Arc<Shared<Soft>>,
    control: ControlThread<Soft>,
    reactors: Vec<Reactor<Soft>>,
    turns: u64,
    /// Requests seen in each state, and reasons for which queues ended.
    seen: Vec<(State, u64)>,
    reasons: BTreeMap<String, u64>,
}

impl SimTarget {
    pub(crate) fn start(builder: TargetBuilder, provider: Soft) -> Result<Self, TargetError> {
        let provider = Arc::new(provider);
        let Prepared { shared, control, published, .. } = builder.prepare(&*provider)?;
        let mut reactors = Vec::new();
        for index in 0..shared.reactors.len() as u32 {
            let mut reactor =
                Reactor::new(index, Arc::clone(&shared), Arc::clone(&provider), None).map_err(|error| TargetError {
                    object: "memory".into(),
                    reason: error.to_string(),
                    remedy: String::new(),
                })?;
            for namespace in published.clone() {
                reactor.open_namespace(namespace)?;
            }
            reactors.push(reactor);
        }
        let seen = State::LASTING.map(|state| (state, 0)).to_vec();
        Ok(Self { hogged: Vec::new(), shared, control, reactors, turns: 0, seen, reasons: BTreeMap::new() })
    }

    /// Everything that can be done now.
    pub(crate) fn turn(&mut self, now: Duration) {
        for round in 0.. {
            assert!(round < 100_000, "the target never comes to rest");
            let mut worked = false;
            for reactor in &mut self.reactors {
                worked |= reactor.turn(now);
            }
            self.control.turn(now);
            self.look();
            if !worked && self.shared.reactors.iter().all(|port| port.mailbox.is_empty()) {
                return;
            }
        }
    }

    /// When something is due by time alone.
    pub(crate) fn next_timeout(&self, now: Duration) -> Option<Duration> {
        let reactors = self.reactors.iter().filter_map(|reactor| reactor.next_timeout(now)).map(|left| now + left);
        reactors.chain(self.control.next_timeout()).min()
    }

    /// Notes the states of requests and queues, now and then.
    fn look(&mut self) {
        self.turns += 1;
        for reactor in &self.reactors {
            for (_, queue) in &reactor.queues {
                if let Some(reason) = queue.reason {
                    *self.reasons.entry(format!("{reason}")).or_default() += 1;
                }
            }
            if self.turns.is_multiple_of(4) {
                for state in reactor.requests.states() {
                    match self.seen.iter_mut().find(|(seen, _)| *seen == state) {
                        Some((_, count)) => *count += 1,
                        None => self.seen.push((state, 1)),
                    }
                }
            }
        }
    }

    /// States of requests that were seen, and why queues ended.
    pub(crate) fn coverage(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let states = self.seen.iter().map(|(state, count)| (format!("request {state:?}"), *count));
        states.chain(self.reasons.iter().map(|(reason, count)| (format!("queue end: {reason}"), *count)))
    }

    pub(crate) fn endpoints(&mut self) -> impl Iterator<Item = &mut SoftEndpoint> {
        self.reactors.iter_mut().flat_map(|reactor| &mut reactor.devices).flatten().map(|device| &mut device.endpoint)
    }

    /// Takes buffers out of the data pools until `left` bytes are free.
    pub(crate) fn hog(&mut self, left: usize) {
        for (at, reactor) in self.reactors.iter_mut().enumerate() {
            let pool = &mut reactor.memory.pool;
            while pool.stats().free > left
                && let Some(buffer) =
                    pool.take(Pool::MAX_BUFFER).or_else(|| pool.take(64 << 10)).or_else(|| pool.take(1))
            {
                self.hogged.push((at, buffer));
            }
        }
    }

    pub(crate) fn give_back(&mut self) {
        for (at, buffer) in self.hogged.drain(..) {
            self.reactors[at].memory.give(buffer);
            self.reactors[at].buffers_returned = true;
        }
    }

    /// Stops listening and drains.
    pub(crate) fn stop(&mut self) {
        self.shared.control_mail.send(ControlMessage::Stop);
    }

    /// Queues, and controllers.
    pub(crate) fn in_use(&self) -> (usize, usize) {
        let queues = self.reactors.iter().map(|reactor| reactor.queues.len()).sum();
        (queues, self.shared.with_control(|control| control.registry.controllers().count()))
    }

    /// Connections that connection management knows, those included whose other end has yet to say, or never will, that it knows
    /// of their end.
    pub(crate) fn connections(&mut self) -> usize {
        self.endpoints().map(|endpoint| endpoint.in_use().1).sum()
    }

    /// What is not back where it belongs, now that no host is connected.
    pub(crate) fn leaks(&mut self) -> Vec<String> {
        let mut leaks = Vec::new();
        let mut note = |what: String, have: usize, want: usize| {
            if have != want {
                leaks.push(format!("{what}: {have}, should be {want}"));
            }
        };
        let (queues, controllers) = self.in_use();
        note("queues".into(), queues, 0);
        note("controllers".into(), controllers, 0);
        let directory = self.shared.with_control(|control| control.queues.len());
        note("controllers in the directory".into(), directory, 0);
        for (at, reactor) in self.reactors.iter_mut().enumerate() {
            let port = &self.shared.reactors[at];
            let slots = reactor.memory.slots.len();
            note(format!("requests of reactor {at}"), reactor.requests.in_use(), 0);
            note("free receives".into(), port.free_slots.load(Ordering::Relaxed) as usize, slots);
            note("queues placed".into(), port.queues.load(Ordering::Relaxed) as usize, 0);
            let admin = reactor.memory.admin_pool.stats();
            note("admin buffers".into(), admin.free, admin.total);
            let posted: usize = reactor.devices.iter().flatten().map(|device| device.posted as usize).sum();
            note("receive slots".into(), slots - reactor.memory.free_slots.len(), posted);
            let pages = reactor.memory.pages.stats();
            let page = Pool::footprint(self.shared.options.receive_page());
            note("receive pages".into(), pages.total - pages.free, posted * page);
            let pool = reactor.memory.pool.stats();
            note("data buffers".into(), pool.total - pool.free, 0);
            note("bytes in hosts' shares".into(), reactor.shares.held(), 0);
            note("operations in backends".into(), reactor.polled_pending as usize, 0);
            for device in reactor.devices.iter_mut().flatten() {
                let endpoint = &mut device.endpoint;
                let (qps, connections) = endpoint.in_use();
                note("queue pairs".into(), qps, 0);
                note("connections".into(), connections, 0);
                let engine = endpoint.engine();
                note("keys".into(), engine.keys().len(), 1);
                note("RDMA READ credit".into(), engine.read_credit_used() as usize, 0);
            }
        }
        leaks
    }
}
