//! A host and a target with NVMe's traffic between two engines: commands, data, responses. Every block is checked.
use core::time::Duration;

use super::net::{Buf, Net, OPEN, Service};
use crate::roce::*;

/// What a host asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Bytes of a command's data.
    pub(super) size: u32,
    /// Commands at a time.
    pub(super) depth: usize,
}

/// Node 0 is the host, node 1 the target. Half of the commands read, the others write.
pub(super) struct Load {
    pub(super) net: Net,
    host: Qpn,
    target: Qpn,
    slots: Vec<Slot>,
    pub(super) commands: u64,
    /// The longest that a command took.
    pub(super) longest: Duration,
}

/// A command and its buffers at both ends.
struct Slot {
    command: Buf,
    response: Buf,
    received: Buf,
    answered: Buf,
    near: Buf,
    far: Buf,
    /// What marks the data of the command at hand.
    stamp: u64,
    begun: Duration,
}

impl Load {
    /// A link as between two processes of one machine: 0.33 million packets of 4 KiB each second in each direction, and
    /// 80 us for the shortest round trip.
    pub(super) fn new(seed: u64, shape: Shape) -> Self {
        let (mut net, host, target) = Net::pair(seed, |conn| {
            conn.mtu = Mtu::B4096;
            (conn.initiator_depth, conn.responder_resources) = (64, 64);
        });
        net.delay = Duration::from_micros(40);
        net.service = Some(Service { packet: Duration::from_micros(1), kib: Duration::from_nanos(500) });
        let mut buffer = |node, len| net.buffer(node, len, OPEN);
        let slots = (0..shape.depth).map(|_| Slot {
            command: buffer(0, 64),
            response: buffer(0, 16),
            received: buffer(1, 64),
            answered: buffer(1, 16),
            near: buffer(0, shape.size),
            far: buffer(1, shape.size),
            stamp: 0,
            begun: Duration::ZERO,
        });
        let slots = slots.collect();
        let mut load = Self { net, host, target, slots, commands: 0, longest: Duration::ZERO };
        for slot in 0..shape.depth {
            let (received, response) = (load.slots[slot].received, load.slots[slot].response);
            load.net.recv(1, target, tag(RECEIVED, slot), &[received.sge()]);
            load.net.recv(0, host, tag(RECEIVED, slot), &[response.sge()]);
        }
        for slot in 0..shape.depth {
            load.begin(slot);
        }
        load
    }

    /// Commands that end within `time`.
    pub(super) fn run(&mut self, time: Duration) -> u64 {
        let (before, until) = (self.commands, self.net.now + time);
        while self.net.now < until {
            self.net.step(until);
            self.turn();
        }
        self.commands - before
    }

    /// Does what completions ask for.
    fn turn(&mut self) {
        while let Some(done) = self.net.done(1) {
            assert_eq!(done.status, Status::Success, "target, {:?}", self.net.nodes[1].engine.counters());
            match split(done.tag) {
                (RECEIVED, receive) => self.serve(receive),
                (DATA, slot) => {
                    let stamp = self.slots[slot].stamp;
                    assert!(self.stamped(1, self.slots[slot].far, stamp), "what was written");
                    self.answer(slot);
                }
                _ => {}
            }
        }
        while let Some(done) = self.net.done(0) {
            assert_eq!(done.status, Status::Success, "host, {:?}", self.net.nodes[0].engine.counters());
            if let (RECEIVED, receive) = split(done.tag) {
                let slot = self.slot_in(0, self.slots[receive].response);
                let response = self.slots[receive].response;
                self.net.recv(0, self.host, tag(RECEIVED, receive), &[response.sge()]);
                self.end(slot);
            }
        }
    }

    fn begin(&mut self, slot: usize) {
        self.slots[slot].stamp = self.net.rng.next();
        self.slots[slot].begun = self.net.now;
        let Slot { command, near, far, stamp, .. } = self.slots[slot];
        self.stamp(if reads(stamp) { 1 } else { 0 }, if reads(stamp) { far } else { near }, stamp);
        self.net.bytes_mut(0, command)[..8].copy_from_slice(&(slot as u64).to_le_bytes());
        self.net.send(0, self.host, tag(SENT, slot), SendOp::Send, &[command.sge()]);
    }

    fn serve(&mut self, receive: usize) {
        let received = self.slots[receive].received;
        let slot = self.slot_in(1, received);
        self.net.recv(1, self.target, tag(RECEIVED, receive), &[received.sge()]);
        let Slot { near, far, stamp, .. } = self.slots[slot];
        if reads(stamp) {
            self.net.send(1, self.target, tag(SENT, slot), SendOp::RdmaWrite(near.remote()), &[far.sge()]);
            self.answer(slot);
        } else {
            self.net.send(1, self.target, tag(DATA, slot), SendOp::RdmaRead(near.remote()), &[far.sge()]);
        }
    }

    fn answer(&mut self, slot: usize) {
        let answered = self.slots[slot].answered;
        self.net.bytes_mut(1, answered)[..8].copy_from_slice(&(slot as u64).to_le_bytes());
        self.net.send(1, self.target, tag(SENT, slot), SendOp::Send, &[answered.sge()]);
    }

    fn end(&mut self, slot: usize) {
        let Slot { near, far, stamp, begun, .. } = self.slots[slot];
        assert!(self.stamped(0, near, stamp) && self.stamped(1, far, stamp), "data of command {}", self.commands);
        self.commands += 1;
        self.longest = self.longest.max(self.net.now - begun);
        self.begin(slot);
    }

    fn slot_in(&self, node: usize, message: Buf) -> usize {
        let number = self.net.bytes(node, message).first_chunk().expect("a number");
        usize::try_from(u64::from_le_bytes(*number)).expect("a slot")
    }

    /// Marks the start of each packet's worth of data.
    fn stamp(&mut self, node: usize, buf: Buf, stamp: u64) {
        let bytes = self.net.bytes_mut(node, buf);
        for (block, at) in bytes.chunks_mut(4096).zip(0..) {
            block[..8].copy_from_slice(&(stamp ^ at).to_le_bytes());
        }
    }

    fn stamped(&self, node: usize, buf: Buf, stamp: u64) -> bool {
        let bytes = self.net.bytes(node, buf);
        bytes.chunks(4096).zip(0..).all(|(block, at)| block.starts_with(&(stamp ^ at).to_le_bytes()))
    }
}

const fn reads(stamp: u64) -> bool {
    stamp & 1 == 0
}

const fn tag(kind: u64, slot: usize) -> u64 {
    kind << 32 | slot as u64
}

const fn split(tag: u64) -> (u64, usize) {
    (tag >> 32, (tag & 0xffff_ffff) as usize)
}

const RECEIVED: u64 = 0;
const SENT: u64 = 1;
const DATA: u64 = 2;
