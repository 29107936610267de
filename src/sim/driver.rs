//! One host of a run: the real host code, what it is told to do, and what it must get back.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::disk::BLOCK;
use super::model::{self, FlushPromise, Model, Span};
use super::net::{Machine, World, address_of};
use super::plan::HostPlan;
use super::rng::Rng;
use super::{NQN, TARGET};
use crate::clock::Clock;
use crate::host::{Command, Done, Host, HostErrorKind, HostEvent, HostOptions, IoFailure, Op, Reconnect};
use crate::rdma::soft::{Soft, SoftEndpoint};

/// A command that has no answer yet.
#[derive(Debug)]
struct Issued {
    what: Kind,
    span: Span,
}

#[derive(Debug)]
enum Kind {
    Read,
    /// A Compare, and whether it has to find what it says, if that is known.
    Compare {
        equal: Option<bool>,
    },
    Write {
        stamp: u64,
        fua: bool,
    },
    Zero {
        stable: bool,
    },
    Flush(FlushPromise),
}

/// What one host did and saw.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostTally {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Commands that died with their host.
    pub(crate) orphaned: u64,
    pub(crate) lost: u64,
    pub(crate) reconnected: u64,
    pub(crate) refused: u64,
    pub(crate) full: u64,
    pub(crate) aborts: u64,
    pub(crate) aborted: u64,
}

pub(crate) struct Driver {
    pub(crate) node: usize,
    plan: HostPlan,
    world: Arc<World>,
    machine: Machine,
    pub(crate) host: Option<Host<Soft>>,
    lives: u64,
    seed: u64,
    rng: Rng,
    pub(crate) model: Model,
    left: u64,
    next_token: u64,
    issued: BTreeMap<u64, Issued>,
    /// Nothing is submitted, or no host is started, before that.
    wait_until: Duration,
    /// Losing a connection is nobody's fault until then.
    pub(crate) excused_until: Duration,
    pub(crate) disk_fails: bool,
    verifying: Option<usize>,
    /// The disk lost power, and what is answered now may be older than that.
    cut: bool,
    pub(crate) tally: HostTally,
    last_progress: Duration,
}

/// Fills a buffer with the content of blocks from an LBA on.
type Shape<'a> = &'a dyn Fn(&mut [u8], u64);

/// Something that must not be.
pub(crate) type Violation = String;

impl Driver {
    pub(crate) fn new(node: usize, plan: HostPlan, world: &Arc<World>, seed: u64, model: Model) -> Self {
        let mut driver = Self {
            node,
            plan,
            world: Arc::clone(world),
            machine: Machine::new(world, node, 1, plan.mtu, (seed, seed)),
            host: None,
            lives: 1,
            seed,
            rng: Rng::new(seed),
            model,
            left: plan.commands,
            next_token: 1,
            issued: BTreeMap::new(),
            wait_until: Duration::ZERO,
            excused_until: Duration::ZERO,
            disk_fails: false,
            verifying: None,
            cut: false,
            tally: HostTally::default(),
            last_progress: world.now(),
        };
        driver.wait_until = world.now() + driver.rng.micros(0, 5000);
        driver
    }

    fn start(&mut self) -> Result<(), Violation> {
        let plan = &self.plan;
        let options = HostOptions {
            hostnqn: format!("nqn.2026-11.io.example:host{}", self.node),
            hostid: [self.node as u8; 16],
            io_queues: plan.io_queues,
            queue_depth: plan.queue_depth,
            keep_alive: plan.keep_alive,
            in_capsule: plan.in_capsule,
            descriptors: plan.descriptors,
            invalidate: plan.invalidate,
            read_depth: plan.read_depth,
            events: plan.events,
            memory: 1 << 20,
            source: Some(address_of(self.node)),
            thread: 0,
            timeout: Duration::from_secs(10),
            io_timeout: Duration::from_secs(30),
            reconnect: Some(Reconnect { most: Duration::from_secs(1), ..Reconnect::default() }),
        };
        let provider = Soft::simulated(self.machine.clone(), 1).map_err(|error| error.to_string())?;
        let address = SocketAddr::new(address_of(TARGET), 4420);
        let clock = Clock::Simulated(Arc::clone(&self.world));
        let host = Host::start_by(Arc::new(provider), address, NQN, options, clock);
        self.host = Some(host.map_err(|error| format!("host {} cannot start: {error}", self.node))?);
        Ok(())
    }

    /// Everything that can be done now.
    pub(crate) fn turn(&mut self, now: Duration) -> Result<(), Violation> {
        if self.host.is_none() {
            if now < self.wait_until || self.is_done() {
                return Ok(());
            }
            self.start()?;
        }
        for round in 0.. {
            if round > 100_000 {
                return Err(format!("host {} never comes to rest", self.node));
            }
            let Some(host) = &mut self.host else { return Ok(()) };
            let mut worked = host.simulate();
            worked |= self.take_events(now)?;
            worked |= self.take_done(now)?;
            worked |= self.submit(now);
            if let Some(host) = &self.host
                && let Some(failure) = host.failure()
            {
                // It could not be brought up: its administrator tries again.
                let kind = failure.kind.clone();
                if matches!(kind, HostErrorKind::Protocol(_)) {
                    return Err(format!("host {}: {failure}", self.node));
                }
                self.tally.refused += 1;
                self.host = None;
                self.wait_until = now + self.rng.micros(50_000, 500_000);
                return Ok(());
            }
            if !worked && !self.world.net().has_mail(self.node) && !self.machine.take_wake() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn take_events(&mut self, now: Duration) -> Result<bool, Violation> {
        let mut any = false;
        while let Some(event) = self.host.as_mut().and_then(Host::next_event) {
            any = true;
            match event {
                HostEvent::Async(_) => {}
                HostEvent::Reconnected => {
                    self.tally.reconnected += 1;
                    self.cut = false;
                }
                HostEvent::Lost(error) => {
                    tracing::info!(?now, host = self.node, "lost: {error}");
                    self.tally.lost += 1;
                    if matches!(error.kind, HostErrorKind::Protocol(_)) || now > self.excused_until {
                        return Err(format!("host {} lost its connection without a cause: {error}", self.node));
                    }
                }
            }
        }
        Ok(any)
    }

    fn take_done(&mut self, now: Duration) -> Result<bool, Violation> {
        let mut any = false;
        while let Some(done) = self.host.as_mut().and_then(Host::next_done) {
            any = true;
            self.last_progress = now;
            self.finish(done)?;
            if self.rng.one_in(100)
                && let Some(host) = &mut self.host
            {
                self.tally.aborts += u64::from(host.abort_some(self.rng.next() as usize));
                while host.next_admin_done().is_some() {}
            }
            if self.rng.one_in(100) && self.verifying.is_none() {
                self.wait_until = now + self.rng.micros(0, 4_000_000);
            }
        }
        if let Some(host) = &self.host
            && host.missed_invalidates() > 0
        {
            return Err(format!("host {}: an answer left a key valid that it was to invalidate", self.node));
        }
        Ok(any)
    }

    fn finish(&mut self, done: Done) -> Result<(), Violation> {
        let Done { token, result, data, .. } = done;
        let node = self.node;
        let Some(Issued { what, span }) = self.issued.remove(&token) else {
            return Err(format!("host {node}: command {token} was answered twice"));
        };
        let about = |what: &Kind| format!("host {node}: command {token} ({what:?} of {span:?})");
        let failed = match &result {
            Ok(()) => None,
            Err(IoFailure::Status(status)) => Some(*status),
            Err(other) => return Err(format!("{}: {other}", about(&what))),
        };
        tracing::trace!(node, token, ?what, ?span, ?failed, "done");
        self.tally.done += 1;
        self.tally.failed += u64::from(failed.is_some());
        let compare_says_no =
            matches!(what, Kind::Compare { .. }) && failed == Some(nvme::Status::COMPARE_FAILURE.dnr());
        let aborted = failed == Some(nvme::Status::ABORT_REQUESTED) && self.tally.aborts > 0;
        self.tally.aborted += u64::from(aborted);
        if let Some(status) = failed
            && !self.disk_fails
            && !compare_says_no
            && !aborted
        {
            return Err(format!("{} failed: {status}", about(&what)));
        }
        match what {
            Kind::Read => {
                self.model.end_read(span);
                if let (None, Some(buffer)) = (failed, &data) {
                    self.model
                        .check(span, buffer.as_slice(), !self.cut)
                        .map_err(|wrong| format!("host {node}: wrong data in read {token}: {wrong}"))?;
                }
            }
            Kind::Compare { equal } => {
                self.model.end_read(span);
                let found = failed.is_none();
                if equal.is_some_and(|equal| equal != found) && (found || compare_says_no) && !self.cut {
                    return Err(format!("host {node}: Compare {token} of {span:?}: {result:?}, equal is {equal:?}"));
                }
            }
            Kind::Write { stamp, fua } => match failed {
                None if fua || !self.cut => self.model.end_write(span, stamp, fua),
                _ => self.model.fail_write(span, stamp),
            },
            Kind::Zero { stable } => match failed {
                None if stable || !self.cut => self.model.end_write(span, 0, stable),
                _ => self.model.fail_write(span, 0),
            },
            Kind::Flush(promise) => {
                if failed.is_none() {
                    self.model.end_flush(promise);
                }
            }
        }
        if let (Some(buffer), Some(host)) = (data, &mut self.host) {
            host.give_buffer(buffer);
        }
        Ok(())
    }

    fn submit(&mut self, now: Duration) -> bool {
        let mut any = false;
        while now >= self.wait_until
            && self.issued.len() < self.plan.concurrency
            && self.host.as_ref().is_some_and(Host::is_ready)
        {
            let submitted = match self.verifying {
                None if self.left == 0 => return any,
                None => self.submit_one(),
                Some(at) => self.submit_verification(at),
            };
            if !submitted {
                return any;
            }
            any = true;
        }
        any
    }

    fn submit_one(&mut self) -> bool {
        let count = if self.rng.one_in(4) { self.plan.max_blocks } else { 8.min(self.plan.max_blocks) };
        let count = self.rng.within(1, count as u64) as usize;
        let span = Span { start: self.rng.below((self.model.len() - count) as u64 + 1) as usize, count };
        let token = self.next_token;
        let kind = self.rng.below(100);
        let sent = match kind {
            0..40 => self.model.is_free(span, false) && self.send_read(token, span),
            40..80 => self.model.is_free(span, true) && self.send_write(token, span, kind >= 70),
            80..86 => self.model.is_free(span, true) && self.send_zeroes(token, span, kind >= 83),
            86..92 => self.model.is_free(span, false) && self.send_compare(token, span, kind >= 88),
            _ => self.send_flush(token),
        };
        if sent {
            self.next_token += 1;
            self.left -= 1;
        }
        // A span that was busy: others may be free, but not for ever.
        let patience = if self.issued.is_empty() { 64 } else { 4 };
        sent || (self.rng.below(patience) != 0 && self.room())
    }

    fn room(&mut self) -> bool {
        let room = self.queue().is_some();
        self.tally.full += u64::from(!room);
        room
    }

    /// The queue with the most room.
    fn queue(&self) -> Option<usize> {
        let host = self.host.as_ref()?;
        (0..host.queues()).max_by_key(|queue| host.room(*queue)).filter(|queue| host.room(*queue) > 0)
    }

    /// Submits a command whose buffer `shape` fills.
    fn send(&mut self, token: u64, op: Op, span: Span, shape: Option<Shape<'_>>) -> bool {
        let (Some(queue), lba) = (self.queue(), self.model.lba(span)) else { return false };
        let Some(host) = &mut self.host else { return false };
        let mut data = None;
        if let Some(shape) = shape {
            let Some(mut buffer) = host.take_buffer(span.count * BLOCK) else { return false };
            shape(buffer.as_mut_slice(), lba);
            data = Some(buffer);
        }
        tracing::trace!(host = self.node, token, ?op, lba, blocks = span.count, "submit");
        let command = Command { token, op, nsid: 1, slba: lba, blocks: span.count as u32, data };
        host.submit(queue, command).is_ok()
    }

    fn send_read(&mut self, token: u64, span: Span) -> bool {
        let dirty = |bytes: &mut [u8], _| bytes.fill(0xa5);
        let sent = self.send(token, Op::Read, span, Some(&dirty));
        if sent {
            self.model.begin_read(span);
            self.issued.insert(token, Issued { what: Kind::Read, span });
        }
        sent
    }

    fn send_write(&mut self, token: u64, span: Span, fua: bool) -> bool {
        let stamp = self.model.new_stamp();
        let content = |bytes: &mut [u8], lba| model::fill(bytes, stamp, lba);
        let sent = self.send(token, Op::Write { fua }, span, Some(&content));
        if sent {
            self.model.begin_write(span, stamp);
            self.issued.insert(token, Issued { what: Kind::Write { stamp, fua }, span });
        }
        sent
    }

    fn send_zeroes(&mut self, token: u64, span: Span, deallocate: bool) -> bool {
        let sent = self.send(token, Op::WriteZeroes { deallocate }, span, None);
        if sent {
            self.model.begin_write(span, 0);
            self.issued.insert(token, Issued { what: Kind::Zero { stable: false }, span });
        }
        sent
    }

    fn send_compare(&mut self, token: u64, span: Span, equal: bool) -> bool {
        let Some(known) = self.model.known(span) else { return false };
        let content = |bytes: &mut [u8], lba: u64| {
            for ((block, stamp), lba) in bytes.chunks_mut(BLOCK).zip(&known).zip(lba..) {
                model::fill_block(block, *stamp, lba);
            }
            if !equal && let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
        };
        let sent = self.send(token, Op::Compare, span, Some(&content));
        if sent {
            self.model.begin_read(span);
            self.issued.insert(token, Issued { what: Kind::Compare { equal: Some(equal) }, span });
        }
        sent
    }

    fn send_flush(&mut self, token: u64) -> bool {
        let span = Span { start: 0, count: 0 };
        let promise = self.model.begin_flush();
        let sent = self.send(token, Op::Flush, span, None);
        if sent {
            self.issued.insert(token, Issued { what: Kind::Flush(promise), span });
        }
        sent
    }

    /// From now on everything is read once.
    pub(crate) fn verify(&mut self, now: Duration) {
        self.verifying = Some(0);
        // Others may have gone on for long since it had nothing to do.
        self.last_progress = now;
        self.disk_fails = false;
    }

    fn submit_verification(&mut self, at: usize) -> bool {
        let count = (self.model.len() - at).min(self.plan.max_blocks.max(64));
        if count == 0 {
            return false;
        }
        let token = self.next_token;
        let sent = self.send_read(token, Span { start: at, count });
        if sent {
            self.next_token += 1;
            self.verifying = Some(at + count);
        }
        sent
    }

    /// Whether it has nothing left to do, and nothing under way.
    pub(crate) fn is_done(&self) -> bool {
        let verified = self.verifying.is_none_or(|at| at == self.model.len());
        self.left == 0 && self.issued.is_empty() && verified
    }

    pub(crate) fn next_due(&self, now: Duration) -> Option<Duration> {
        let Some(host) = &self.host else {
            return (!self.is_done()).then_some(self.wait_until);
        };
        let think = (self.wait_until > now && self.left > 0).then_some(self.wait_until);
        host.next_due().into_iter().chain(think).min()
    }

    /// When a command was last answered, if any is to be.
    pub(crate) fn waits_since(&self) -> Option<Duration> {
        (!self.is_done()).then_some(self.last_progress.max(self.wait_until))
    }

    /// The disk lost power.
    pub(crate) fn power_cut(&mut self) {
        self.model.power_cut();
        for issued in self.issued.values_mut() {
            if let Kind::Compare { equal } = &mut issued.what {
                *equal = None;
            }
        }
        self.cut = self.host.as_ref().is_some_and(Host::is_ready);
    }

    /// The power goes: nobody hears of it.
    pub(crate) fn power_off(&mut self, now: Duration, away: Duration) {
        self.world.net().power_off(self.node);
        self.host = None;
        self.cut = false;
        for (_, Issued { what, span }) in std::mem::take(&mut self.issued) {
            self.tally.orphaned += 1;
            match what {
                Kind::Read | Kind::Compare { .. } => self.model.end_read(span),
                Kind::Write { stamp, .. } => self.model.fail_write(span, stamp),
                Kind::Zero { .. } => self.model.fail_write(span, 0),
                Kind::Flush(_) => {}
            }
        }
        self.lives += 1;
        // Other communication IDs, but the same queue pair numbers and keys.
        self.machine =
            Machine::new(&self.world, self.node, 1, self.plan.mtu, (self.seed ^ self.lives << 32, self.seed));
        self.wait_until = now + away;
        self.last_progress = now;
    }

    pub(crate) fn endpoint(&mut self) -> Option<&mut SoftEndpoint> {
        self.host.as_mut()?.link.endpoint()
    }

    /// Ends its connections, and finds what is not back where it belongs.
    pub(crate) fn disconnect(&mut self) -> Vec<String> {
        let node = self.node;
        let mut leaks = Vec::new();
        let mut note = |what: &str, have: usize, want: usize| {
            if have != want {
                leaks.push(format!("host {node}: {what}: {have}, should be {want}"));
            }
        };
        if let Some(host) = &mut self.host {
            host.drop_connections();
            note("commands under way", host.outstanding(), 0);
            let pool = host.link.pool().stats();
            note("buffers beside the one for setup", pool.total - pool.free, 4096);
            if let Some(endpoint) = host.link.endpoint() {
                note("queue pairs", endpoint.in_use().0, 0);
                let engine = endpoint.engine();
                note("keys", engine.keys().len(), 2);
                note("RDMA READ credit", engine.read_credit_used() as usize, 0);
            }
        }
        leaks
    }
}
