//! One thread of a benchmark: a host, and the jobs on its queues.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::report::Report;
use super::{BenchOptions, Progress};
use crate::host::error::HostError;
use crate::host::host::Host;
use crate::host::io::{Command, Done, Op};
use crate::host::options::HostOptions;
use crate::mem::Buffer;
use crate::rdma::Provider;

/// How long a thread looks for completions before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// How often the clock is looked at, in rounds.
const CLOCK_ROUNDS: u32 = 64;

/// A command's place: its buffer while it is not under way, and what it does while it is.
struct Slot {
    job: usize,
    buffer: Option<Buffer>,
    read: bool,
    /// Block of the job's part.
    block: u64,
    version: u32,
}

/// One queue's part of the namespace.
struct Part {
    /// First block, in units of the operation size.
    first: u64,
    blocks: u64,
    next: u64,
    random: u64,
    /// With verification: what each block was written as (0 = not by us), and which are under way.
    versions: Vec<u32>,
    busy: Vec<bool>,
}

pub(super) struct Job<P: Provider> {
    host: Host<P>,
    bench: BenchOptions,
    per_block: u32,
    parts: Vec<Part>,
    slots: Vec<Slot>,
    report: Report,
    versions: u32,
    /// Operations that this thread may start.
    budget: u64,
    /// Between two starts; zero: none.
    interval: Duration,
}

impl<P: Provider> Job<P> {
    pub(super) fn connect(
        provider: Arc<P>,
        address: SocketAddr,
        subnqn: &str,
        mut options: HostOptions,
        bench: &BenchOptions,
        jobs: &[u16],
    ) -> Result<Self, HostError> {
        options.io_queues = jobs.len() as u16;
        options.queue_depth = (bench.iodepth + 1).max(2);
        let depth = usize::from(bench.iodepth);
        let size = (bench.block_size as usize).next_power_of_two().max(4096);
        options.memory = options.memory.max(jobs.len() * depth * size + (4 << 20));
        let mut host = Host::connect(provider, address, subnqn, options)?;
        if host.queues() < jobs.len() {
            let why = format!("the target gives {} I/O queues, {} jobs want one each", host.queues(), jobs.len());
            return Err(HostError::usage("bench", why, "use fewer jobs"));
        }
        let disk = host.namespace(bench.nsid)?;
        if !bench.block_size.is_multiple_of(disk.block_size) || bench.block_size as usize > host.max_transfer() {
            let why = format!(
                "{} bytes are not whole blocks of {}, up to {}",
                bench.block_size,
                disk.block_size,
                host.max_transfer()
            );
            return Err(HostError::usage("bench", why, "choose another block size"));
        }
        let whole = bench.size.unwrap_or(u64::MAX).min(disk.bytes()) / u64::from(bench.block_size);
        let each = whole / u64::from(bench.jobs);
        if each < u64::from(bench.iodepth) {
            let why = format!("{whole} blocks are too few for {} jobs of depth {}", bench.jobs, bench.iodepth);
            return Err(HostError::usage("bench", why, "use a larger size"));
        }
        let parts = jobs.iter().map(|job| Part::new(u64::from(*job), each, bench)).collect::<Vec<_>>();
        let mut slots = Vec::with_capacity(jobs.len() * depth);
        for job in 0..jobs.len() {
            for _ in 0..depth {
                let buffer = host.take_buffer(bench.block_size as usize);
                slots.push(Slot { job, buffer, read: false, block: 0, version: 0 });
            }
        }
        let share = |operations: u64| operations * jobs.len() as u64 / u64::from(bench.jobs);
        Ok(Self {
            host,
            per_block: bench.block_size / disk.block_size,
            parts,
            slots,
            report: Report::default(),
            versions: 0,
            budget: bench.operations.map_or(u64::MAX, share),
            interval: bench.rate.map_or(Duration::ZERO, |rate| {
                Duration::from_secs_f64(f64::from(bench.jobs) / jobs.len() as f64 / rate.max(1) as f64)
            }),
            bench: bench.clone(),
        })
    }

    pub(super) fn run(&mut self, progress: &Progress) -> Result<Report, HostError> {
        let started = Instant::now();
        let mut under_way = 0;
        let mut free: VecDeque<usize> = (0..self.slots.len()).collect();
        let mut due = started;
        let mut stopping = false;
        let mut rounds = 0;
        let mut last_work = started;
        while under_way > 0 || (!stopping && !free.is_empty()) {
            while let Some(token) = free.front().copied()
                && (self.interval.is_zero() || due <= Instant::now())
                && !stopping
            {
                free.pop_front();
                due += self.interval;
                under_way += usize::from(self.start(token));
            }
            self.host.poll();
            let mut worked = false;
            while let Some(done) = self.host.next_done() {
                worked = true;
                free.push_back(self.take(done, progress)?);
                under_way -= 1;
            }
            rounds += 1;
            if worked && rounds % CLOCK_ROUNDS != 0 {
                continue;
            }
            if let Some(error) = self.host.failure() {
                return Err(error.clone());
            }
            let now = Instant::now();
            stopping |= now - started >= self.bench.runtime || progress.stop.load(Ordering::Acquire);
            if worked {
                last_work = now;
            } else if now - last_work > SPIN && self.interval.is_zero() {
                self.host.wait(Duration::from_millis(100));
                last_work = Instant::now();
            }
        }
        self.report.elapsed = started.elapsed();
        if self.bench.verify {
            progress.verifying.store(true, Ordering::Release);
            self.read_back()?;
        }
        Ok(std::mem::take(&mut self.report))
    }

    /// Starts a slot's next operation; `false` when there is none to start.
    fn start(&mut self, token: usize) -> bool {
        if self.budget == 0 {
            return false;
        }
        let slot = &mut self.slots[token];
        let part = &mut self.parts[slot.job];
        let Some(mut buffer) = slot.buffer.take() else { return false };
        let Some((block, read)) = part.pick(&self.bench) else {
            slot.buffer = Some(buffer);
            return false;
        };
        slot.block = block;
        slot.read = read;
        if self.bench.verify {
            part.busy[block as usize] = true;
            slot.version = if read {
                part.versions[block as usize]
            } else {
                self.versions = self.versions.wrapping_add(1).max(1);
                fill(buffer.as_mut_slice(), self.bench.seed, part.first + block, self.versions);
                self.versions
            };
        }
        let slba = (part.first + block) * u64::from(self.per_block);
        let op = if read { Op::Read } else { Op::Write { fua: false } };
        let command = Command {
            token: token as u64,
            op,
            nsid: self.bench.nsid,
            slba,
            blocks: self.per_block,
            data: Some(buffer),
        };
        let queue = slot.job;
        match self.host.submit(queue, command) {
            Ok(()) => {
                self.budget = self.budget.saturating_sub(1);
                true
            }
            Err(command) => {
                self.slots[token].buffer = command.data;
                false
            }
        }
    }

    fn take(&mut self, done: Done, progress: &Progress) -> Result<usize, HostError> {
        let token = done.token as usize;
        let slot = &mut self.slots[token];
        slot.buffer = done.data;
        let side = if slot.read { &mut self.report.reads } else { &mut self.report.writes };
        let bytes = u64::from(self.bench.block_size);
        match done.result {
            Ok(()) => {
                side.operations += 1;
                side.bytes += bytes;
                side.latency.record(done.latency);
                let counter = if slot.read { &progress.reads } else { &progress.writes };
                counter.fetch_add(1, Ordering::Relaxed);
                progress.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(failure) => {
                side.errors += 1;
                if self.bench.verify {
                    // A connection that was lost tells why better than the commands that went with it.
                    let why = self.host.failure().cloned();
                    return Err(why.unwrap_or_else(|| HostError::lost("bench", failure)));
                }
            }
        }
        if self.bench.verify {
            let part = &mut self.parts[slot.job];
            part.busy[slot.block as usize] = false;
            if !slot.read {
                part.versions[slot.block as usize] = slot.version;
            } else if slot.version != 0 {
                self.report.verified += 1;
                let bytes = slot.buffer.as_ref().map(Buffer::as_slice).unwrap_or_default();
                hold(bytes, self.bench.seed, part.first + slot.block, slot.version, bytes.len())?;
            }
        }
        Ok(token)
    }

    /// Reads every block that was written, and checks it.
    fn read_back(&mut self) -> Result<(), HostError> {
        let disk = self.host.namespace(self.bench.nsid)?;
        let size = self.bench.block_size as usize;
        let mut bytes = vec![0; size];
        for at in 0..self.parts.len() {
            let (first, blocks) = (self.parts[at].first, self.parts[at].versions.len());
            for block in 0..blocks {
                let version = self.parts[at].versions[block];
                if version == 0 {
                    continue;
                }
                let place = first + block as u64;
                self.host.read_at(&disk, place * size as u64, &mut bytes)?;
                hold(&bytes, self.bench.seed, place, version, size)?;
                self.report.verified += 1;
            }
        }
        Ok(())
    }
}

impl Part {
    fn new(job: u64, blocks: u64, bench: &BenchOptions) -> Self {
        let tracked = if bench.verify { blocks as usize } else { 0 };
        Self {
            first: job * blocks,
            blocks,
            next: 0,
            random: (bench.seed ^ (job + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1,
            versions: vec![0; tracked],
            busy: vec![false; tracked],
        }
    }

    /// The next block and whether to read it; one that is under way is passed over when contents are checked.
    fn pick(&mut self, bench: &BenchOptions) -> Option<(u64, bool)> {
        for _ in 0..=self.blocks.min(10_000) {
            let block = if bench.pattern.random {
                // The high half of a product instead of a remainder: no division.
                ((u128::from(xorshift(&mut self.random)) * u128::from(self.blocks)) >> 64) as u64
            } else {
                let block = self.next;
                self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            };
            let read = match bench.pattern.reads {
                0 => false,
                100 => true,
                share => xorshift(&mut self.random) >> 32 < (1 << 32) / 100 * u64::from(share),
            };
            if self.busy.get(block as usize) != Some(&true) {
                return Some((block, read));
            }
        }
        None
    }
}

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn words(seed: u64, block: u64, version: u32) -> impl Iterator<Item = u64> {
    let mut state = (seed ^ block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(version) << 40) | 1;
    std::iter::repeat_with(move || xorshift(&mut state))
}

/// Content that tells where and when it was written.
fn fill(bytes: &mut [u8], seed: u64, block: u64, version: u32) {
    for (chunk, word) in bytes.chunks_mut(8).zip(words(seed, block, version)) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

fn hold(bytes: &[u8], seed: u64, block: u64, version: u32, size: usize) -> Result<(), HostError> {
    let wrong = bytes
        .chunks(8)
        .zip(words(seed, block, version))
        .position(|(chunk, word)| *chunk != word.to_le_bytes()[..chunk.len()]);
    match wrong {
        None => Ok(()),
        Some(at) => {
            let why = format!("block {block} of {size} B (write {version}) differs at byte {}", at * 8);
            Err(HostError::protocol("verify", why))
        }
    }
}
