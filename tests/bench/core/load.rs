//! The load: capsules with random blocks, command identifiers and keys, and what came of them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use farside::host::wire::{Sqe, block_command, by_offset, dsm_range, keyed};
use hdrhistogram::Histogram;

use crate::plan::{End, Kind, Order, Plan};

/// A command to be delivered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capsule {
    pub(crate) queue: u32,
    pub(crate) sqe: [u8; 64],
    /// Data behind the command. Only their length matters unless `range` says what they are.
    pub(crate) data_len: u32,
    pub(crate) range: Option<[u8; 16]>,
}

/// What a run measured.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) operations: u64,
    pub(crate) elapsed: Duration,
    /// CPU time of the reactor's thread.
    pub(crate) cpu: Duration,
    pub(crate) latency: Option<Histogram<u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    kind: Kind,
    since: Option<Instant>,
}

pub(crate) struct Load {
    plan: Plan,
    blocks: u64,
    block_shift: u8,
    random: u64,
    /// Places in queues with no command under way: queue and slot.
    idle: VecDeque<(u32, u16)>,
    slots: Vec<Slot>,
    issued: u64,
    answered: u64,
    next_block: u64,
    started: Option<(Instant, Duration)>,
    latency: Option<Histogram<u64>>,
    /// Bytes that are to be moved by RDMA WRITE and RDMA READ for what was issued.
    pub(crate) expected: (u64, u64),
}

impl Load {
    pub(crate) fn new(plan: Plan, blocks: u64, block_shift: u8) -> Self {
        let slots = plan.queues * usize::from(plan.depth);
        // All queues in turn, so that neighbours in a poll are of different queues where there are several.
        let idle = (0..plan.depth).flat_map(|slot| (0..plan.queues as u32).map(move |queue| (queue, slot))).collect();
        let latency =
            plan.latency.then(|| Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds that make sense"));
        Self {
            blocks,
            block_shift,
            random: 0x9e37_79b9_7f4a_7c15,
            idle,
            slots: vec![Slot { kind: Kind::Flush, since: None }; slots],
            issued: 0,
            answered: 0,
            next_block: 0,
            started: None,
            latency,
            expected: (0, 0),
            plan,
        }
    }

    /// The next command that arrives, if there is a place for one.
    pub(crate) fn next(&mut self) -> Option<Capsule> {
        if self.over() {
            return None;
        }
        let (queue, slot) = self.idle.pop_front()?;
        let random = self.random();
        let kinds = &self.plan.kinds;
        let kind = match self.plan.in_turn {
            false => kinds[scale(random & 0xffff_ffff, kinds.len() as u64) as usize],
            true => kinds[(self.issued % kinds.len() as u64) as usize],
        };
        self.issued += 1;
        let at = queue as usize * usize::from(self.plan.depth) + usize::from(slot);
        self.slots[at] = Slot { kind, since: self.plan.latency.then(Instant::now) };
        // The low half of the identifier is the slot, the rest chance: a host may use any.
        let cid = (random >> 48) as u16 & !SLOT_MASK | slot;
        Some(self.capsule(kind, queue, cid))
    }

    fn capsule(&mut self, kind: Kind, queue: u32, cid: u16) -> Capsule {
        let random = self.random();
        let nsid = 1 + scale(random & 0xffff_ffff, self.plan.namespaces.into()) as u32;
        let (remote, rkey, invalidate) = (random & !0xfff, (random >> 16) as u32, random & 1 != 0);
        let with = |sqe: Sqe, data_len: u32, range| Capsule { queue, sqe: sqe.cid(cid).0, data_len, range };
        match kind {
            Kind::Read(bytes) => {
                let blocks = bytes >> self.block_shift;
                let sgl = keyed(remote, bytes, rkey, invalidate);
                self.expected.0 += u64::from(bytes);
                with(block_command(0x02, nsid, self.block(blocks), blocks).sgl(sgl), 0, None)
            }
            Kind::WriteInCapsule(bytes) => {
                let blocks = bytes >> self.block_shift;
                let sgl = by_offset(0, bytes, 0x01);
                with(block_command(0x01, nsid, self.block(blocks), blocks).sgl(sgl), bytes, None)
            }
            Kind::WriteKeyed(bytes) => {
                let blocks = bytes >> self.block_shift;
                let sgl = keyed(remote, bytes, rkey, invalidate);
                self.expected.1 += u64::from(bytes);
                with(block_command(0x01, nsid, self.block(blocks), blocks).sgl(sgl), 0, None)
            }
            Kind::Flush => with(Sqe::new(0x00).nsid(nsid), 0, None),
            Kind::WriteZeroes => with(block_command(0x08, nsid, self.block(8), 8), 0, None),
            Kind::Deallocate => {
                let range = dsm_range(self.block(8), 8);
                // One range (zero's based), Attribute Deallocate.
                let sqe = Sqe::new(0x09).nsid(nsid).cdw(11, 4).sgl(by_offset(0, 16, 0x01));
                with(sqe, 16, Some(range))
            }
            Kind::Refused => {
                let sgl = keyed(remote, 4096, rkey, invalidate);
                with(block_command(0x02, nsid, self.blocks, 1).sgl(sgl), 0, None)
            }
        }
    }

    /// A response on an I/O queue.
    pub(crate) fn answered(&mut self, queue: u32, cid: u16, status: u16) {
        let slot = cid & SLOT_MASK;
        let Slot { kind, since } = self.slots[queue as usize * usize::from(self.plan.depth) + usize::from(slot)];
        assert!((status == 0) != (kind == Kind::Refused), "{kind:?} was answered with status {status:#x}");
        self.idle.push_back((queue, slot));
        self.answered += 1;
        if let (Some(since), Some(latency), Some(_)) = (since, &mut self.latency, self.started) {
            latency.saturating_record(since.elapsed().as_nanos() as u64);
        }
        if self.answered == self.plan.warmup {
            self.started = Some((Instant::now(), thread_cpu()));
        }
    }

    /// What was measured, once the run is over and every command answered.
    pub(crate) fn outcome(&mut self) -> Option<Outcome> {
        if !self.over() || self.answered < self.issued {
            return None;
        }
        let (start, cpu) = self.started?;
        Some(Outcome {
            operations: self.answered - self.plan.warmup,
            elapsed: start.elapsed(),
            cpu: thread_cpu().saturating_sub(cpu),
            latency: self.latency.take(),
        })
    }

    fn over(&self) -> bool {
        match self.plan.end {
            End::Operations(count) => self.issued >= count + self.plan.warmup,
            End::Time(limit) => self.started.is_some_and(|(start, _)| start.elapsed() >= limit),
        }
    }

    fn block(&mut self, blocks: u32) -> u64 {
        let unit = u64::from(blocks.max(1));
        match self.plan.order {
            // Aligned to its size, as fio does it.
            Order::Random => scale(self.random() >> 32, self.blocks / unit) * unit,
            Order::Sequential => {
                let block = self.next_block;
                self.next_block = if block + 2 * unit > self.blocks { 0 } else { block + unit };
                block
            }
        }
    }

    /// xorshift64.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// Command identifiers carry their slot in these bits.
const SLOT_MASK: u16 = 0x3ff;

/// 32 random bits, scaled to below `count`.
fn scale(random: u64, count: u64) -> u64 {
    ((u128::from(random) * u128::from(count)) >> 32) as u64
}

fn thread_cpu() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
