//! A disk with a volatile cache, errors, delays, stalls, and a plug that can be pulled.
//!
//! It outlives the target that uses it. What was written lies in the cache until a flush, a FUA write, or chance brings it to
//! the medium; a power cut takes each cached block or leaves it. A write that fails may have changed some of its blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::net::World;
use super::rng::Rng;
use crate::backend::{
    Abilities, Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit,
};

/// Bytes of a block, which is written whole or not at all.
pub(crate) const BLOCK: usize = 512;

/// What the disk does beside its work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habits {
    /// Answered writes may be lost at a power cut until flushed.
    pub(crate) volatile: bool,
    /// Operations that fail, in parts of 10,000.
    pub(crate) errors: u64,
    /// The longest that an operation takes, in microseconds; 0 = some are answered at once.
    pub(crate) latency: u64,
}

/// What the disk did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskTally {
    pub(crate) operations: u64,
    pub(crate) failed: u64,
    pub(crate) flushes: u64,
    pub(crate) cuts: u64,
    pub(crate) blocks_lost: u64,
    pub(crate) stalls: u64,
}

#[derive(Debug)]
struct Pending {
    queue: u64,
    due: Duration,
    order: u64,
    io: Io,
}

#[derive(Debug)]
struct State {
    habits: Habits,
    rng: Rng,
    medium: Vec<u8>,
    cache: BTreeMap<u64, [u8; BLOCK]>,
    pending: Vec<Pending>,
    order: u64,
    queues: u64,
    stalled_until: Duration,
    tally: DiskTally,
}

/// See the module's documentation. Clones are the same disk.
#[derive(Clone, Debug)]
pub(crate) struct SimDisk {
    world: Arc<World>,
    size: u64,
    state: Arc<Mutex<State>>,
}

impl SimDisk {
    pub(crate) fn new(world: &Arc<World>, seed: u64, blocks: u64, habits: Habits) -> Self {
        let size = blocks * BLOCK as u64;
        let state = State {
            habits,
            rng: Rng::new(seed),
            medium: vec![0; size as usize],
            cache: BTreeMap::new(),
            pending: Vec::new(),
            order: 0,
            queues: 0,
            stalled_until: Duration::ZERO,
            tally: DiskTally::default(),
        };
        Self { world: Arc::clone(world), size, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a panic ends the run")
    }

    pub(crate) fn tally(&self) -> DiskTally {
        self.state().tally
    }

    pub(crate) fn set_errors(&self, errors: u64) {
        self.state().habits.errors = errors;
    }

    /// Nothing is answered before that.
    pub(crate) fn stall(&self, until: Duration) {
        let mut state = self.state();
        state.stalled_until = until;
        state.tally.stalls += 1;
        for pending in &mut state.pending {
            pending.due = pending.due.max(until);
        }
    }

    /// When the next operation is done.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.state().pending.iter().map(|pending| pending.due).min()
    }

    /// The target is gone: what it had under way was done, or not. With `power`, the cache is gone too.
    pub(crate) fn abandon(&self, power: bool) {
        let mut state = self.state();
        for pending in std::mem::take(&mut state.pending) {
            let done = state.rng.one_in(2);
            tracing::trace!(op = ?pending.io.op, len = pending.io.data.as_ref().map(|d| d.len), done, "abandoned");
            if done {
                let most = state.rng.below(200);
                state.change(&pending.io, most);
            }
        }
        if power {
            state.tally.cuts += 1;
            for (block, bytes) in std::mem::take(&mut state.cache) {
                if state.rng.one_in(2) {
                    state.store(block, &bytes);
                } else {
                    state.tally.blocks_lost += 1;
                }
            }
        }
    }
}

impl State {
    fn store(&mut self, block: u64, bytes: &[u8; BLOCK]) {
        let at = block as usize * BLOCK;
        self.medium[at..at + BLOCK].copy_from_slice(bytes);
    }

    fn put(&mut self, block: u64, bytes: [u8; BLOCK], stable: bool) {
        if stable {
            self.cache.remove(&block);
            self.store(block, &bytes);
            return;
        }
        self.cache.insert(block, bytes);
        // A cache writes back when it likes.
        if self.rng.one_in(8) {
            self.store(block, &bytes);
        }
    }

    fn flush(&mut self) {
        for (block, bytes) in std::mem::take(&mut self.cache) {
            self.store(block, &bytes);
        }
    }

    fn get(&self, block: u64, out: &mut [u8]) {
        match self.cache.get(&block) {
            Some(bytes) => out.copy_from_slice(bytes),
            None => out.copy_from_slice(&self.medium[block as usize * BLOCK..][..BLOCK]),
        }
    }

    /// The first `most` blocks of what an operation writes.
    fn change(&mut self, io: &Io, most: u64) {
        let (offset, len, fua) = match io.op {
            IoOp::Write { offset, fua } => (offset, io.data.as_ref().map_or(0, |data| u64::from(data.len)), fua),
            IoOp::WriteZeroes { offset, len, fua, .. } => (offset, len, fua),
            IoOp::Deallocate { offset, len } => (offset, len, false),
            IoOp::Flush => return self.flush(),
            IoOp::Read { .. } | IoOp::Zone { .. } => return,
        };
        let stable = fua || !self.habits.volatile;
        let first = offset / BLOCK as u64;
        for at in 0..(len / BLOCK as u64).min(most) {
            let bytes = match (&io.op, &io.data) {
                (IoOp::Write { .. }, Some(data)) => {
                    let start = at as usize * BLOCK;
                    data.bytes()[start..start + BLOCK].try_into().expect("a block")
                }
                _ => [0; BLOCK],
            };
            self.put(first + at, bytes, stable);
        }
    }

    fn carry_out(&mut self, mut io: Io) -> IoDone {
        self.tally.operations += 1;
        tracing::trace!(op = ?io.op, len = io.data.as_ref().map(|d| d.len), "disk");
        let (errors, read) = (self.habits.errors, matches!(io.op, IoOp::Read { .. }));
        if errors > 0 && io.op != IoOp::Flush && self.rng.chance(errors) {
            self.tally.failed += 1;
            let most = self.rng.below(20);
            self.change(&io, most);
            let error = if read { IoError::Read } else { IoError::Write };
            return IoDone { token: io.token, result: Err(error), data: io.data };
        }
        self.tally.flushes += u64::from(io.op == IoOp::Flush);
        if let (IoOp::Read { offset }, Some(data)) = (io.op, &mut io.data) {
            for (block, out) in (offset / BLOCK as u64..).zip(data.bytes_mut().chunks_mut(BLOCK)) {
                self.get(block, out);
            }
        } else {
            self.change(&io, u64::MAX);
        }
        IoDone { token: io.token, result: Ok(()), data: io.data }
    }
}

impl Backend for SimDisk {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "simulated".into(),
            size: self.size,
            block_size: BLOCK as u32,
            preferred_write: 0,
            preferred_deallocate: 0,
            optimal_write: 0,
            write_cache: self.state().habits.volatile,
            read_only: false,
            rotational: false,
            abilities: Abilities { deallocate: true, write_zeroes: true, deallocated_reads_zero: true },
            max_transfer: u32::MAX,
            remarks: Vec::new(),
            identity: b"simulated".to_vec(),
        }
    }

    fn open_queue(&self, _: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let mut state = self.state();
        state.queues += 1;
        Ok(Box::new(SimQueue { number: state.queues, disk: self.clone() }))
    }
}

struct SimQueue {
    number: u64,
    disk: SimDisk,
}

impl IoQueue for SimQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let now = self.disk.world.now();
        let mut state = self.disk.state();
        let latency = state.habits.latency;
        if now >= state.stalled_until && (latency == 0 || state.rng.one_in(8)) {
            return Submit::Done(state.carry_out(io));
        }
        let due = (now + state.rng.micros(1, latency.max(1))).max(state.stalled_until);
        state.order += 1;
        let order = state.order;
        state.pending.push(Pending { queue: self.number, due, order, io });
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<IoDone>) {
        let now = self.disk.world.now();
        let mut state = self.disk.state();
        let mut due: Vec<(Duration, u64)> = state
            .pending
            .iter()
            .filter(|pending| pending.queue == self.number && pending.due <= now)
            .map(|pending| (pending.due, pending.order))
            .collect();
        due.sort_unstable();
        for (_, order) in due {
            let at = state.pending.iter().position(|pending| pending.order == order).expect("still there");
            let io = state.pending.swap_remove(at).io;
            done.push(state.carry_out(io));
        }
    }

    fn cancel(&mut self, token: u64) {
        let mut state = self.disk.state();
        let number = self.number;
        if let Some(pending) =
            state.pending.iter_mut().find(|pending| pending.queue == number && pending.io.token == token)
        {
            pending.due = Duration::ZERO;
        }
    }
}
