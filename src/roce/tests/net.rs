//! A network of engines. Nothing here waits: time jumps to the next event.
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use crate::roce::icrc::{Checker, Flow, Verdict};
use crate::roce::*;
pub(super) use crate::sim::Rng;

/// Registered memory of one engine: a region per registration.
#[derive(Default)]
pub(super) struct Arena {
    pub(super) regions: Vec<Vec<u8>>,
    /// Bytes that were written, for counting.
    pub(super) written: u64,
}

impl Memory for Arena {
    fn read(&self, span: Span, out: &mut [u8]) -> bool {
        let start = usize::try_from(span.offset).expect("64 bit");
        match self.regions.get(span.region.0 as usize).and_then(|r| r.get(start..start + out.len())) {
            Some(bytes) => {
                out.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }

    fn write(&mut self, span: Span, data: &[u8]) -> bool {
        let start = usize::try_from(span.offset).expect("64 bit");
        match self.regions.get_mut(span.region.0 as usize).and_then(|r| r.get_mut(start..start + data.len())) {
            Some(bytes) => {
                bytes.copy_from_slice(data);
                self.written += data.len() as u64;
                true
            }
            None => false,
        }
    }
}

/// What the network does to packets, in parts of 10,000.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Faults {
    pub(super) loss: u64,
    pub(super) duplicate: u64,
    pub(super) reorder: u64,
    pub(super) corrupt: u64,
    pub(super) mark: u64,
}

/// What one packet takes of its sender's link, which is one queue: as long as a processor takes to send or to receive it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Service {
    pub(super) packet: Duration,
    pub(super) kib: Duration,
}

impl Service {
    fn of(&self, bytes: usize) -> Duration {
        self.packet + self.kib * u32::try_from(bytes).expect("a packet") / 1024
    }
}

pub(super) struct Node {
    pub(super) addr: IpAddr,
    pub(super) engine: Engine,
    pub(super) arena: Arena,
    pub(super) cq: CqId,
    pub(super) done: VecDeque<Completion>,
    batch: TxBatch,
    next_va: u64,
    /// When the link has sent all that it was given.
    link_free: Duration,
}

pub(super) struct Net {
    pub(super) now: Duration,
    pub(super) nodes: Vec<Node>,
    pub(super) faults: Faults,
    pub(super) rng: Rng,
    pub(super) delay: Duration,
    /// None for links without a limit.
    pub(super) service: Option<Service>,
    /// The running numbers of packets that get lost.
    pub(super) lose: Vec<u64>,
    /// Packets of this opcode get lost, all of them.
    pub(super) lose_opcode: Option<Opcode>,
    /// Nothing arrives any more.
    pub(super) blackhole: bool,
    /// A node that vanished: it sends and gets nothing any more.
    pub(super) vanished: Option<usize>,
    pub(super) sent: u64,
    pub(super) dropped: u64,
    checker: Checker,
    flying: BTreeMap<(Duration, u64), Flying>,
    order: u64,
    steps: u64,
}

/// Destination, source, mark of congestion and bytes of a packet under way.
type Flying = (usize, IpAddr, bool, Vec<u8>);

/// A registered buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buf {
    pub(super) region: u32,
    pub(super) va: u64,
    pub(super) len: u32,
    pub(super) lkey: Lkey,
    pub(super) rkey: Rkey,
}

impl Buf {
    pub(super) fn sge(&self) -> Sge {
        Sge { va: self.va, len: self.len, lkey: self.lkey }
    }

    pub(super) fn remote(&self) -> RemoteAddr {
        RemoteAddr { va: self.va, rkey: self.rkey }
    }
}

pub(super) const OPEN: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE).union(Access::REMOTE_INVALIDATE);

impl Net {
    pub(super) fn new(seed: u64, nodes: u8) -> Self {
        Self::with(seed, nodes, Dcqcn::default())
    }

    pub(super) fn with(seed: u64, nodes: u8, dcqcn: Dcqcn) -> Self {
        let node = |i: u8| {
            let addr = IpAddr::from([10, 0, 0, i + 1]);
            let config = Config { seed: seed ^ u64::from(i) << 20, dcqcn, ..Config::new(addr) };
            let mut engine = Engine::new(config);
            let cq = engine.create_cq(64);
            Node {
                addr,
                engine,
                arena: Arena::default(),
                cq,
                done: VecDeque::new(),
                batch: TxBatch::new(1 << 17, 64),
                next_va: 0x1000_0000,
                link_free: Duration::ZERO,
            }
        };
        Self {
            now: Duration::from_secs(1),
            nodes: (0..nodes).map(node).collect(),
            faults: Faults::default(),
            rng: Rng::new(seed),
            delay: Duration::from_micros(10),
            service: None,
            lose: Vec::new(),
            lose_opcode: None,
            blackhole: false,
            vanished: None,
            sent: 0,
            dropped: 0,
            checker: Checker::new(4400),
            flying: BTreeMap::new(),
            order: 0,
            steps: 0,
        }
    }

    /// A connected pair between nodes 0 and 1.
    pub(super) fn pair(seed: u64, shape: impl Fn(&mut Connection)) -> (Self, Qpn, Qpn) {
        let mut net = Self::new(seed, 2);
        let (a, b) = net.connect(0, 1, shape);
        (net, a, b)
    }

    pub(super) fn create_qp(&mut self, node: usize) -> Qpn {
        let node = &mut self.nodes[node];
        let config = QpConfig { send_cq: node.cq, recv_cq: node.cq, srq: None, max_send: 256, max_recv: 256 };
        node.engine.create_qp(&config).expect("a free number")
    }

    pub(super) fn connect(&mut self, a: usize, b: usize, shape: impl Fn(&mut Connection)) -> (Qpn, Qpn) {
        let (qa, qb) = (self.create_qp(a), self.create_qp(b));
        let (psn_a, psn_b) = (Psn::new(self.rng.next() as u32), Psn::new(0xff_fff8));
        let mut conn = verbs::tests_support::connection();
        shape(&mut conn);
        let to = |remote, remote_qpn, send_psn, recv_psn| Connection { remote, remote_qpn, send_psn, recv_psn, ..conn };
        let (addr_a, addr_b) = (self.nodes[a].addr, self.nodes[b].addr);
        assert!(self.nodes[a].engine.connect(qa, to(addr_b, qb, psn_a, psn_b)));
        assert!(self.nodes[b].engine.connect(qb, to(addr_a, qa, psn_b, psn_a)));
        (qa, qb)
    }

    pub(super) fn buffer(&mut self, node: usize, len: u32, access: Access) -> Buf {
        let node = &mut self.nodes[node];
        let region = u32::try_from(node.arena.regions.len()).expect("few");
        node.arena.regions.push(vec![0; len as usize]);
        let va = node.next_va;
        node.next_va += u64::from(len) + 0x1_0000;
        let registration = Registration { region: RegionId(region), offset: 0, va, len: u64::from(len), access };
        let (lkey, rkey) = node.engine.keys().register(registration).expect("room");
        Buf { region, va, len, lkey, rkey }
    }

    pub(super) fn fill(&mut self, node: usize, buf: Buf, seed: u64) {
        let mut rng = Rng::new(seed);
        self.bytes_mut(node, buf).iter_mut().for_each(|byte| *byte = rng.next() as u8);
    }

    pub(super) fn bytes(&self, node: usize, buf: Buf) -> &[u8] {
        &self.nodes[node].arena.regions[buf.region as usize]
    }

    pub(super) fn bytes_mut(&mut self, node: usize, buf: Buf) -> &mut Vec<u8> {
        &mut self.nodes[node].arena.regions[buf.region as usize]
    }

    pub(super) fn send(&mut self, node: usize, qpn: Qpn, tag: u64, op: SendOp, sges: &[Sge]) {
        let wr = SendWr { tag, op, sges, signaled: true, solicited: false, inline: false };
        self.post(node, qpn, &wr);
    }

    pub(super) fn post(&mut self, node: usize, qpn: Qpn, wr: &SendWr<'_>) {
        let Node { engine, arena, .. } = &mut self.nodes[node];
        engine.post_send(qpn, wr, arena).expect("room");
    }

    pub(super) fn recv(&mut self, node: usize, qpn: Qpn, tag: u64, sges: &[Sge]) {
        self.nodes[node].engine.post_recv(qpn, &RecvWr { tag, sges }).expect("room");
    }

    /// The next completion of a node.
    pub(super) fn done(&mut self, node: usize) -> Option<Completion> {
        self.nodes[node].done.pop_front()
    }

    /// Puts a packet on the network that no engine sent.
    pub(super) fn inject(&mut self, to: usize, from: IpAddr, bytes: Vec<u8>) {
        self.order += 1;
        self.flying.insert((self.now, self.order), (to, from, false, bytes));
    }

    /// Lets everything happen until nothing is left to do, or `until`.
    pub(super) fn run_until(&mut self, until: Duration) {
        while self.step(until) {}
    }

    /// Jumps to the next event, or to `until` when there is none before it: then false.
    pub(super) fn step(&mut self, until: Duration) -> bool {
        self.transmit();
        let arrival = self.flying.keys().next().map(|(at, _)| *at);
        let timers = self.nodes.iter().filter_map(|node| node.engine.next_timeout()).min();
        let Some(next) = [arrival, timers].into_iter().flatten().min().filter(|at| *at <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(next);
        self.steps += 1;
        assert!(
            self.steps < 3_000_000,
            "no progress at {:?}: {:?}",
            self.now,
            self.nodes.iter().map(|n| *n.engine.counters()).collect::<Vec<_>>()
        );
        for node in &mut self.nodes {
            node.engine.handle_timeout(self.now);
        }
        while let Some((&key, _)) = self.flying.first_key_value()
            && key.0 <= self.now
        {
            let (to, from, mark, bytes) = self.flying.remove(&key).expect("there");
            self.deliver(to, from, mark, &bytes);
        }
        self.collect();
        true
    }

    /// Moves completions to where tests look for them.
    fn collect(&mut self) {
        for node in &mut self.nodes {
            let mut done = Vec::new();
            node.engine.poll_cq(node.cq, &mut done, usize::MAX);
            node.done.extend(done);
        }
    }

    pub(super) fn run(&mut self) {
        self.run_until(self.now + Duration::from_secs(60));
    }

    fn deliver(&mut self, to: usize, from: IpAddr, mark: bool, bytes: &[u8]) {
        let node = &mut self.nodes[to];
        let flow = Flow { src: from, dst: node.addr, src_port: UDP_PORT };
        let good = matches!(self.checker.check(&flow, bytes), Verdict::ValidWithId { id: 0..64, dont_fragment: true });
        if !good {
            self.dropped += 1;
            return;
        }
        node.engine.handle_packet(self.now, from, mark, bytes, &mut node.arena);
    }

    fn transmit(&mut self) {
        for i in 0..self.nodes.len() {
            loop {
                let node = &mut self.nodes[i];
                let more = node.engine.poll_transmit(self.now, &mut node.batch, &node.arena);
                let packets: Vec<_> = node.batch.packets().map(|(run, bytes)| (run.remote, bytes.to_vec())).collect();
                node.batch.clear();
                for (remote, bytes) in packets {
                    self.launch(i, remote, bytes);
                }
                if !more {
                    break;
                }
            }
        }
        self.collect();
    }

    fn launch(&mut self, from: usize, remote: IpAddr, mut bytes: Vec<u8>) {
        self.sent += 1;
        let mut leaves = self.now;
        if let Some(service) = self.service {
            leaves = self.nodes[from].link_free.max(self.now) + service.of(bytes.len());
            self.nodes[from].link_free = leaves;
        }
        let Some(to) = self.nodes.iter().position(|node| node.addr == remote) else {
            return;
        };
        let cut_off = self.vanished == Some(from) || self.vanished == Some(to);
        let from = self.nodes[from].addr;
        let faults = self.faults;
        let chosen = self.lose.iter().position(|packet| *packet + 1 == self.sent);
        if let Some(at) = chosen {
            self.lose.remove(at);
        }
        let unwanted = self.lose_opcode.is_some_and(|opcode| bytes.first() == Some(&opcode.to_wire()));
        if chosen.is_some() || unwanted || self.blackhole || cut_off || self.rng.chance(faults.loss) {
            self.dropped += 1;
            return;
        }
        if self.rng.chance(faults.corrupt) {
            let bit = self.rng.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let copies = 1 + usize::from(self.rng.chance(faults.duplicate));
        for _ in 0..copies {
            let late = if self.rng.chance(faults.reorder) {
                self.delay * (1 + self.rng.below(20) as u32)
            } else {
                Duration::ZERO
            };
            let mark = self.rng.chance(faults.mark);
            self.order += 1;
            self.flying.insert((leaves + self.delay + late, self.order), (to, from, mark, bytes.clone()));
        }
    }
}
