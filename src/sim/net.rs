//! The simulated world: a clock, and a network of machines whose packets are lost, doubled, delayed, broken and marked.
//!
//! A [`Port`] stands in for a UDP socket of the software provider. Packets go to the port of a machine that the queue pair
//! number names, as the steering program of real sockets does it; an inbox that is full drops them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::rng::Rng;
use crate::roce::{Mtu, TxBatch};

/// What the network does to packets, in parts of 10,000 where nothing else is said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    pub(crate) loss: u64,
    /// Loss of connection management's packets.
    pub(crate) cm_loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
    pub(crate) corrupt: u64,
    pub(crate) mark: u64,
    /// The time of every packet, and the most that is added to some.
    pub(crate) delay: Duration,
    pub(crate) jitter: Duration,
    /// Bytes of an inbox, counted as the kernel does.
    pub(crate) inbox: usize,
    /// Deliver the packets of a segmented batch together.
    pub(crate) merge: bool,
}

/// What the network did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) lost: u64,
    pub(crate) cm_lost: u64,
    pub(crate) duplicated: u64,
    pub(crate) reordered: u64,
    pub(crate) corrupted: u64,
    pub(crate) marked: u64,
    pub(crate) delayed: u64,
    pub(crate) cut_off: u64,
    pub(crate) overflowed: u64,
    pub(crate) merged: u64,
    pub(crate) refused_sends: u64,
}

/// A datagram as a port receives it: one packet, or several of one size that were delivered together.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) from: IpAddr,
    pub(crate) congested: bool,
    pub(crate) segment: usize,
    pub(crate) bytes: Vec<u8>,
    /// Datagrams that its port dropped so far.
    pub(crate) dropped: Option<u32>,
}

#[derive(Debug)]
struct Flight {
    at: Duration,
    order: u64,
    to: usize,
    datagram: Datagram,
}

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Flight {}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Flight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

#[derive(Debug, Default)]
struct Inbox {
    open: bool,
    queue: VecDeque<Datagram>,
    bytes: usize,
    dropped: u32,
}

#[derive(Debug, Default)]
struct Node {
    /// Counts power cycles: what an earlier life sends goes nowhere.
    life: u32,
    /// Nothing leaves and nothing arrives.
    cut_off: bool,
    index_bits: u32,
    /// Connection management's, then one per reactor.
    inboxes: Vec<Inbox>,
    /// Something arrived.
    rung: bool,
}

#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) conditions: Conditions,
    pub(crate) tally: Tally,
    rng: Rng,
    nodes: Vec<Node>,
    flying: BinaryHeap<Reverse<Flight>>,
    order: u64,
}

/// The clock and the network.
#[derive(Debug)]
pub(crate) struct World {
    nanos: AtomicU64,
    net: Mutex<Net>,
}

impl World {
    pub(crate) fn new(seed: u64, nodes: usize, conditions: Conditions) -> Arc<Self> {
        let net = Net {
            conditions,
            tally: Tally::default(),
            rng: Rng::new(seed),
            nodes: (0..nodes).map(|_| Node::default()).collect(),
            flying: BinaryHeap::new(),
            order: 0,
        };
        // Zero means "never" in places.
        Arc::new(Self { nanos: AtomicU64::new(1_000_000_000), net: Mutex::new(net) })
    }

    pub(crate) fn now(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    pub(crate) fn set_now(&self, now: Duration) {
        assert!(now >= self.now(), "time goes back");
        self.nanos.store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().expect("a panic ends the run")
    }
}

pub(crate) fn address_of(node: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, node as u8 + 1).into()
}

fn node_of(address: IpAddr) -> Option<usize> {
    match address {
        IpAddr::V4(v4) if v4.octets()[..3] == [10, 0, 0] => usize::from(v4.octets()[3]).checked_sub(1),
        _ => None,
    }
}

impl Net {
    /// When the next packet arrives.
    pub(crate) fn next_arrival(&self) -> Option<Duration> {
        self.flying.peek().map(|Reverse(flight)| flight.at)
    }

    /// Moves what has arrived into the inboxes.
    pub(crate) fn deliver(&mut self, now: Duration) {
        while self.next_arrival().is_some_and(|at| at <= now) {
            let Some(Reverse(flight)) = self.flying.pop() else { break };
            self.arrive(flight);
        }
    }

    fn arrive(&mut self, flight: Flight) {
        let Flight { to, mut datagram, .. } = flight;
        let Some(node) = self.nodes.get_mut(to) else { return };
        if node.cut_off {
            self.tally.cut_off += 1;
            return;
        }
        let Some(slot) = slot_of(node.index_bits, &datagram.bytes) else { return };
        let Some(inbox) = node.inboxes.get_mut(slot).filter(|inbox| inbox.open) else { return };
        let cost = footprint(&datagram);
        if inbox.bytes + cost > self.conditions.inbox {
            inbox.dropped += 1;
            self.tally.overflowed += 1;
            return;
        }
        inbox.bytes += cost;
        datagram.dropped = (inbox.dropped > 0).then_some(inbox.dropped);
        inbox.queue.push_back(datagram);
        node.rung = true;
    }

    /// Whether something arrived at a machine since the last time.
    pub(crate) fn take_ring(&mut self, node: usize) -> bool {
        std::mem::take(&mut self.nodes[node].rung)
    }

    /// Whether packets wait in the inboxes of a machine.
    pub(crate) fn has_mail(&self, node: usize) -> bool {
        self.nodes[node].inboxes.iter().any(|inbox| !inbox.queue.is_empty())
    }

    pub(crate) fn cut_off(&mut self, node: usize, cut_off: bool) {
        self.nodes[node].cut_off = cut_off;
    }

    /// Ends a machine's life: its ports close without a word.
    pub(crate) fn power_off(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        node.life += 1;
        node.inboxes.clear();
        node.rung = false;
    }

    fn launch(&mut self, now: Duration, from: usize, to: IpAddr, marked: bool, segment: usize, bytes: &[u8]) {
        let Some(to) = node_of(to) else { return };
        self.tally.sent += 1;
        if self.nodes[from].cut_off {
            self.tally.cut_off += 1;
            return;
        }
        let conditions = self.conditions;
        let management = slot_of(0, bytes) == Some(0);
        if management && self.rng.chance(conditions.cm_loss) {
            self.tally.cm_lost += 1;
            return;
        }
        if self.rng.chance(conditions.loss) {
            self.tally.lost += 1;
            return;
        }
        let mut bytes = bytes.to_vec();
        if self.rng.chance(conditions.corrupt) {
            let bit = self.rng.below(bytes.len() as u64 * 8) as usize;
            // What routers may change is not covered by the CRC.
            if bit / 8 != 4 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                self.tally.corrupted += 1;
            }
        }
        let congested = marked && self.rng.chance(conditions.mark);
        self.tally.marked += u64::from(congested);
        let copies = 1 + u64::from(self.rng.chance(conditions.duplicate));
        self.tally.duplicated += copies - 1;
        let datagram = Datagram { from: address_of(from), congested, segment, bytes, dropped: None };
        for _ in 1..copies {
            self.fly(now, to, datagram.clone());
        }
        self.fly(now, to, datagram);
    }

    fn fly(&mut self, now: Duration, to: usize, datagram: Datagram) {
        let conditions = self.conditions;
        let mut at = now + conditions.delay;
        if self.rng.chance(conditions.reorder) {
            // Past what was sent just after it.
            at += conditions.delay * self.rng.within(1, 20) as u32;
            self.tally.reordered += 1;
        }
        if !conditions.jitter.is_zero() && self.rng.one_in(50) {
            at += self.rng.micros(0, conditions.jitter.as_micros() as u64);
            self.tally.delayed += 1;
        }
        self.order += 1;
        self.flying.push(Reverse(Flight { at, order: self.order, to, datagram }));
    }
}

/// The inbox that a packet is for, by its destination queue pair.
fn slot_of(index_bits: u32, bytes: &[u8]) -> Option<usize> {
    let [_, _, _, _, _, a, b, c, ..] = *bytes else { return None };
    let qpn = u32::from_be_bytes([0, a, b, c]);
    Some(if qpn == 1 { 0 } else { (qpn & ((1 << index_bits) - 1)) as usize + 1 })
}

/// What the kernel charges a receive buffer for a datagram, about.
fn footprint(datagram: &Datagram) -> usize {
    2 * datagram.bytes.len() + 768
}

/// One life of a machine, as the software provider sees it.
#[derive(Clone, Debug)]
pub(crate) struct Machine(Arc<Life>);

#[derive(Debug)]
struct Life {
    world: Arc<World>,
    node: usize,
    life: u32,
    engine_seed: u64,
    rng: Mutex<Rng>,
    mtu: Mtu,
    woken: AtomicBool,
}

impl Machine {
    /// Switches a machine on. With the same second seed as before it uses the same queue pair numbers and keys again.
    pub(crate) fn new(world: &Arc<World>, node: usize, reactors: usize, mtu: Mtu, seeds: (u64, u64)) -> Self {
        let (seed, engine_seed) = seeds;
        let mut net = world.net();
        let state = &mut net.nodes[node];
        state.index_bits = crate::rdma::soft::index_bits(reactors);
        let life = state.life;
        drop(net);
        let rng = Mutex::new(Rng::new(seed));
        Self(Arc::new(Life {
            world: Arc::clone(world),
            node,
            life,
            engine_seed,
            rng,
            mtu,
            woken: AtomicBool::new(false),
        }))
    }

    pub(crate) fn now(&self) -> Duration {
        self.0.world.now()
    }

    pub(crate) fn mtu(&self) -> Mtu {
        self.0.mtu
    }

    pub(crate) fn agent_seed(&self) -> u64 {
        self.random()
    }

    pub(crate) fn engine_seed(&self) -> u64 {
        self.0.engine_seed
    }

    /// A first PSN; every other one is about to wrap.
    pub(crate) fn psn(&self) -> u32 {
        let number = self.random() as u32 & 0xff_ffff;
        if number & 1 == 0 { number } else { 0xff_ffff - (number >> 1 & 0x7f) }
    }

    fn random(&self) -> u64 {
        self.0.rng.lock().expect("a panic ends the run").next()
    }

    /// Something was queued for connection management.
    pub(crate) fn wake(&self) {
        self.0.woken.store(true, Ordering::Relaxed);
    }

    pub(crate) fn take_wake(&self) -> bool {
        self.0.woken.swap(false, Ordering::Relaxed)
    }

    /// Opens the port of a reactor, or of connection management.
    pub(crate) fn bind(&self, reactor: Option<usize>) -> Port {
        let slot = reactor.map_or(0, |reactor| reactor + 1);
        let mut net = self.0.world.net();
        let node = &mut net.nodes[self.0.node];
        if node.life == self.0.life {
            if node.inboxes.len() <= slot {
                node.inboxes.resize_with(slot + 1, Inbox::default);
            }
            node.inboxes[slot].open = true;
        }
        drop(net);
        Port { life: Arc::clone(&self.0), slot }
    }
}

/// Stands in for a socket.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    life: Arc<Life>,
    slot: usize,
}

impl Port {
    /// Bytes of the receive buffer.
    pub(crate) fn receive_buffer(&self) -> usize {
        self.life.world.net().conditions.inbox
    }

    /// Sends the runs of a batch from number `first` on. The number of the first run that was not taken, if any.
    pub(crate) fn send(&self, batch: &TxBatch, first: usize) -> Option<usize> {
        let now = self.life.world.now();
        let mut net = self.life.world.net();
        if net.nodes[self.life.node].life != self.life.life {
            return None;
        }
        for (at, (run, bytes)) in batch.runs().enumerate().skip(first) {
            // Now and then a send buffer is full.
            if net.rng.one_in(20_000) {
                net.tally.refused_sends += 1;
                return Some(at);
            }
            let marked = run.tos & 3 != 0;
            if net.conditions.merge && run.count > 1 && net.rng.one_in(2) {
                net.tally.merged += 1;
                net.launch(now, self.life.node, run.remote, marked, run.segment, bytes);
                continue;
            }
            for packet in bytes.chunks(run.segment) {
                net.launch(now, self.life.node, run.remote, marked, packet.len(), packet);
            }
        }
        None
    }

    pub(crate) fn send_one(&self, to: IpAddr, packet: &[u8]) {
        let now = self.life.world.now();
        let mut net = self.life.world.net();
        if net.nodes[self.life.node].life == self.life.life {
            net.launch(now, self.life.node, to, false, packet.len(), packet);
        }
    }

    /// Moves up to `most` datagrams to `out`; how many there are now.
    pub(crate) fn receive(&self, out: &mut Vec<Datagram>, most: usize) -> usize {
        out.clear();
        let mut net = self.life.world.net();
        let node = &mut net.nodes[self.life.node];
        if node.life != self.life.life {
            return 0;
        }
        if let Some(inbox) = node.inboxes.get_mut(self.slot) {
            let count = most.min(inbox.queue.len());
            out.extend(inbox.queue.drain(..count));
            let taken: usize = out.iter().map(footprint).sum();
            inbox.bytes = inbox.bytes.saturating_sub(taken);
        }
        out.len()
    }
}
