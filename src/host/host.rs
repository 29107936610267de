//! The well-mannered host: one association with a controller, from the first connection to the last command.
//!
//! ```text
//! Admin connection -> Connect -> CAP -> CC.EN -> CSTS.RDY -> Identify -> Number of Queues -> I/O connections -> Ready
//!        ^                                  a failure or a loss anywhere                                        |
//!        +---------------- Waiting (backoff) <----------------------------------------------------------------+
//! ```
//! [`Host::poll`] moves it and never blocks; [`Host::wait`] sleeps until there is something to do. The calls that block are in
//! `blocking`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme::Completion;

use super::error::{HostError, HostErrorKind, setup_remedy};
use super::io::{Command, Done};
use super::link::{ChannelId, ChannelOptions, Link, LinkEvent, RESPONSE, Slots};
use super::options::HostOptions;
use super::queue::{Finished, Purpose, Queue, Taken};
use super::wire::{self, IdentifyController, Sqe};
use crate::clock::Clock;
use crate::mem::Buffer;
use crate::rdma::Provider;

/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 32;

/// CAP.CSS, bit 6: one or more I/O command sets can be chosen.
const CAP_CSS_ALL: u64 = 1 << 43;

/// How often the age of commands is looked at.
const AGE_CHECK: Duration = Duration::from_millis(100);

/// Asynchronous event requests kept at the target.
const EVENT_REQUESTS: u16 = 4;

/// Something that happened beside commands.
#[derive(Clone, Debug)]
pub enum HostEvent {
    /// The target sent an asynchronous event: Dword 0 of its completion.
    Async(u32),
    /// The connection was lost; the host tries to come back.
    Lost(HostError),
    /// It is back.
    Reconnected,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    AdminConnection,
    Connect,
    ReadCap,
    Enable,
    WaitReady,
    Identify,
    QueueCount,
    IoConnections,
    Ready,
    Waiting { until: Duration },
    Failed,
}

/// See the module's doc.
pub struct Host<P: Provider> {
    pub(crate) link: Link<P>,
    pub(crate) options: HostOptions,
    address: SocketAddr,
    subnqn: String,
    phase: Phase,
    /// The current step of bringing up has to be done by then.
    deadline: Duration,
    admin: Option<Queue>,
    pub(crate) io: Vec<Queue>,
    /// Holds Connect's data and what Identify answers.
    setup: Option<Buffer>,
    identify: IdentifyController,
    cap: u64,
    cntlid: u16,
    lost_since: Option<Duration>,
    attempts: u32,
    failure: Option<HostError>,
    next_keep_alive: Duration,
    next_age_check: Duration,
    pub(crate) requeue: VecDeque<Command>,
    pub(crate) done: VecDeque<Done>,
    admin_done: VecDeque<Completion>,
    events: VecDeque<HostEvent>,
    link_events: Vec<LinkEvent>,
    clock: Clock,
    missed_invalidates: u64,
}

impl<P: Provider> std::fmt::Debug for Host<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("address", &self.address)
            .field("subnqn", &self.subnqn)
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl<P: Provider> Host<P> {
    /// Starts to connect. [`Host::poll`] brings it on; [`Host::is_ready`] and [`Host::failure`] tell where it is.
    pub fn start(
        provider: Arc<P>,
        address: SocketAddr,
        subnqn: impl Into<String>,
        options: HostOptions,
    ) -> Result<Self, HostError> {
        Self::start_by(provider, address, subnqn, options, Clock::start())
    }

    /// As [`Host::start`], by a clock of the caller's.
    pub(crate) fn start_by(
        provider: Arc<P>,
        address: SocketAddr,
        subnqn: impl Into<String>,
        options: HostOptions,
        clock: Clock,
    ) -> Result<Self, HostError> {
        let depth = u32::from(options.queue_depth);
        if !(2..=1024).contains(&depth) || options.io_queues > 128 {
            let why = "queues have 2 to 1024 entries, and a controller at most 128 of them";
            return Err(HostError::usage("host options", why, ""));
        }
        let capsule = io_capsule(&options) as usize;
        let queue = Slots::pool_bytes(depth, capsule) + Slots::pool_bytes(depth, RESPONSE);
        let memory = options.memory + usize::from(options.io_queues) * queue + (2 << 20);
        let mut link = Link::open(provider, memory, options.source, options.thread)?;
        let setup = link.pool().take(4096);
        let mut host = Self {
            link,
            options,
            address,
            subnqn: subnqn.into(),
            phase: Phase::Failed,
            deadline: Duration::ZERO,
            admin: None,
            io: Vec::new(),
            setup,
            identify: IdentifyController::default(),
            cap: 0,
            cntlid: 0xffff,
            lost_since: None,
            attempts: 0,
            failure: None,
            next_keep_alive: Duration::ZERO,
            next_age_check: Duration::ZERO,
            requeue: VecDeque::new(),
            done: VecDeque::new(),
            admin_done: VecDeque::new(),
            events: VecDeque::new(),
            link_events: Vec::new(),
            clock,
            missed_invalidates: 0,
        };
        host.begin();
        Ok(host)
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Whether commands can be submitted.
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// Why it gave up, if it did.
    pub fn failure(&self) -> Option<&HostError> {
        self.failure.as_ref().filter(|_| self.phase == Phase::Failed)
    }

    /// What the controller said of itself.
    pub fn controller(&self) -> &IdentifyController {
        &self.identify
    }

    /// Controller capabilities (CAP).
    pub fn capabilities(&self) -> u64 {
        self.cap
    }

    /// I/O queues that it has.
    pub fn queues(&self) -> usize {
        self.io.len()
    }

    /// Commands that one queue can have under way.
    pub fn depth(&self) -> usize {
        usize::from(self.options.queue_depth) - 1
    }

    /// The largest transfer of one command, in bytes.
    pub fn max_transfer(&self) -> usize {
        let mdts = self.identify.mdts.unwrap_or(1 << 20) as usize;
        mdts.min(crate::mem::Pool::MAX_BUFFER)
    }

    /// A buffer for a command's data; `None` when all are out.
    pub fn take_buffer(&mut self, len: usize) -> Option<Buffer> {
        self.link.pool().take(len)
    }

    /// Gives a buffer back.
    pub fn give_buffer(&mut self, buffer: Buffer) {
        self.link.pool().give(buffer);
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// Ends the association's connections without a word to its controller, as a cable would; with a policy the host then comes
    /// back.
    pub fn drop_connections(&mut self) {
        self.lose(HostError::lost("connection", "its owner dropped it"));
    }

    /// Commands under way or waiting for a reconnect.
    pub fn outstanding(&self) -> usize {
        let busy: usize = self.io.iter().map(|queue| self.depth().saturating_sub(queue.room())).sum();
        busy + self.requeue.len()
    }

    /// Answers that left a key valid which their command asked to invalidate.
    pub fn missed_invalidates(&self) -> u64 {
        self.missed_invalidates
    }

    pub(crate) fn note_missed_invalidate(&mut self) {
        self.missed_invalidates += 1;
    }

    pub(crate) fn in_capsule_limit(&self) -> usize {
        self.identify.in_capsule().min(self.options.in_capsule) as usize
    }

    fn begin(&mut self) {
        let now = self.now();
        self.deadline = now + self.options.timeout;
        let private_data = wire::private_data(0, ADMIN_ENTRIES, ADMIN_ENTRIES - 1, 0).to_vec();
        self.phase = Phase::AdminConnection;
        match self.open(private_data, ADMIN_ENTRIES, wire::SQE_LEN as u32) {
            Ok(channel) => self.admin = Some(Queue::new(channel, 0, ADMIN_ENTRIES - 1)),
            Err(error) => self.lose(error),
        }
    }

    fn open(&mut self, private_data: Vec<u8>, entries: u16, capsule: u32) -> Result<ChannelId, HostError> {
        let options = ChannelOptions {
            entries: entries.into(),
            receives: entries.into(),
            capsule,
            private_data,
            responder_resources: self.options.read_depth,
            initiator_depth: 0,
        };
        let now = self.now();
        self.link.connect(self.address, options, now, self.options.timeout)
    }

    /// The association is over: try again later, or give up.
    pub(crate) fn lose(&mut self, error: HostError) {
        if matches!(self.phase, Phase::Failed | Phase::Waiting { .. }) {
            return;
        }
        let was_ready = self.phase == Phase::Ready;
        let now = self.now();
        self.phase = Phase::Failed;
        for queue in self.admin.take().into_iter().chain(std::mem::take(&mut self.io)) {
            self.link.close(queue.channel);
            for (command, mr, since) in queue.abandon() {
                if let Some(mr) = mr {
                    self.link.deregister(mr);
                }
                self.orphan(command, since);
            }
        }
        let since = *self.lost_since.get_or_insert(now);
        if was_ready {
            self.events.push_back(HostEvent::Lost(error.clone()));
        }
        // The first connection is not tried twice: its owner waits for it.
        let ever = self.cntlid != 0xffff;
        match self.options.reconnect.filter(|_| ever) {
            Some(policy) if now.saturating_sub(since) < policy.give_up => {
                let wait = policy.first.saturating_mul(1 << self.attempts.min(16)).min(policy.most);
                self.attempts += 1;
                self.phase = Phase::Waiting { until: now + wait };
            }
            _ => {
                self.failure = Some(error);
                for command in std::mem::take(&mut self.requeue) {
                    let result = Err(super::IoFailure::Lost(crate::rdma::WcStatus::Flushed));
                    let latency = Duration::ZERO;
                    self.done.push_back(Done { token: command.token, result, data: command.data, latency });
                }
            }
        }
    }

    /// One round: what was submitted goes out, what arrived comes in, timers run. Whether anything happened. While there is
    /// something for [`Host::next_done`], acknowledgements wait for the next round (or `wait`), to travel with what is
    /// submitted next.
    pub fn poll(&mut self) -> bool {
        let now = self.now();
        self.poll_at(now)
    }

    fn poll_at(&mut self, now: Duration) -> bool {
        let mut events = std::mem::take(&mut self.link_events);
        let mut worked = self.link.poll(now, &mut events);
        for event in events.drain(..) {
            self.on_link(event);
        }
        self.link_events = events;
        worked |= self.run_timers(now);
        if self.done.is_empty() {
            self.link.flush(now);
        }
        worked
    }

    /// Sends what waits for the next round.
    pub(crate) fn send_waiting(&mut self) {
        let now = self.now();
        self.link.flush(now);
    }

    /// Sleeps until something may have happened, at most for `limit`.
    pub fn wait(&mut self, limit: Duration) {
        let now = self.now();
        let limit = self.next_step(now).map_or(limit, |due| due.saturating_sub(now).min(limit));
        let mut events = std::mem::take(&mut self.link_events);
        self.link.wait(now, limit, &mut events);
        for event in events.drain(..) {
            self.on_link(event);
        }
        self.link_events = events;
        if self.done.is_empty() {
            self.link.flush(now);
        }
    }

    /// When the next step of the association is due.
    fn next_step(&self, now: Duration) -> Option<Duration> {
        match &self.phase {
            Phase::Waiting { until } => Some(*until),
            Phase::Ready if !self.options.keep_alive.is_zero() => Some(self.next_keep_alive),
            Phase::WaitReady => Some(now),
            Phase::Ready | Phase::Failed => None,
            _ => Some(self.deadline),
        }
    }

    /// What [`Host::poll`] does, and what [`Host::wait`] would find when it woke.
    #[cfg(test)]
    pub(crate) fn simulate(&mut self) -> bool {
        self.link.woke();
        let worked = self.poll();
        let mut events = std::mem::take(&mut self.link_events);
        self.link.read_endpoint_events(&mut events);
        let lost = !events.is_empty();
        for event in events.drain(..) {
            self.on_link(event);
        }
        self.link_events = events;
        worked || lost
    }

    /// Asks for the end of some command that is under way. Whether one was.
    #[cfg(test)]
    pub(crate) fn abort_some(&mut self, chance: usize) -> bool {
        let queue = (!self.io.is_empty()).then(|| &self.io[chance % self.io.len()]);
        let found = queue.and_then(|queue| Some((queue.qid, queue.unanswered(chance)?)));
        if let Some((qid, cid)) = found.filter(|_| self.is_ready()) {
            let sqe = Sqe::new(0x08).cdw(10, u32::from(cid) << 16 | u32::from(qid));
            self.send_admin(Purpose::Admin, sqe);
            return true;
        }
        false
    }

    /// When a simulation has to look again even if nothing arrives.
    #[cfg(test)]
    pub(crate) fn next_due(&self) -> Option<Duration> {
        let step = match &self.phase {
            Phase::WaitReady => Some(self.deadline),
            _ => self.next_step(self.now()),
        };
        let age = (self.is_ready() && self.outstanding() > 0).then_some(self.next_age_check);
        step.into_iter().chain(age).chain(self.link.next_timeout()).min()
    }

    fn run_timers(&mut self, now: Duration) -> bool {
        match self.phase {
            Phase::Waiting { until } if now >= until => {
                self.begin();
                true
            }
            Phase::Ready => {
                if !self.options.keep_alive.is_zero() && now >= self.next_keep_alive {
                    self.next_keep_alive = now + self.options.keep_alive / 2;
                    self.keep_alive(now);
                    return true;
                }
                if now >= self.next_age_check {
                    self.next_age_check = now + AGE_CHECK;
                    self.check_age(now);
                }
                if !self.requeue.is_empty() {
                    self.resubmit();
                }
                false
            }
            Phase::Waiting { .. } | Phase::Failed => false,
            _ if now >= self.deadline => {
                let what = format!("{} at {}: {:?}", self.subnqn, self.address, self.phase);
                self.lose(HostError::new(what, HostErrorKind::TimedOut(self.options.timeout), ""));
                true
            }
            _ => false,
        }
    }

    fn check_age(&mut self, now: Duration) {
        let limit = self.options.io_timeout;
        if limit.is_zero() {
            return;
        }
        let oldest = self.io.iter().filter_map(|queue| queue.oldest(Purpose::Io)).min();
        if oldest.is_some_and(|since| now.saturating_sub(since) > limit) {
            self.lose(HostError::new("I/O command", HostErrorKind::TimedOut(limit), "is the target's disk stuck?"));
        }
    }

    fn keep_alive(&mut self, now: Duration) {
        let oldest = self.admin.as_ref().and_then(|admin| admin.oldest(Purpose::KeepAlive));
        match oldest {
            Some(since) if now.saturating_sub(since) > self.options.keep_alive => {
                let kind = HostErrorKind::TimedOut(self.options.keep_alive);
                self.lose(HostError::new("Keep Alive", kind, "is the target alive?"));
            }
            Some(_) => {}
            None => self.send_admin(Purpose::KeepAlive, Sqe::new(0x18)),
        }
    }

    /// Sends an admin command. Without room it is dropped: what matters is sent again.
    pub(crate) fn send_admin(&mut self, purpose: Purpose, sqe: Sqe) {
        let now = self.now();
        let Some(admin) = &mut self.admin else { return };
        let channel = admin.channel;
        let Some(taken) = admin.take(purpose, now) else { return };
        self.send_sqe(channel, taken, sqe);
    }

    fn send_sqe(&mut self, channel: ChannelId, taken: Taken, sqe: Sqe) {
        let slot = u32::from(taken.slot);
        if let Some(capsule) = self.link.capsule(channel, slot) {
            capsule[..wire::SQE_LEN].copy_from_slice(&sqe.cid(taken.cid).0);
        }
        if let Err(error) = self.link.send(channel, slot, wire::SQE_LEN as u32, taken.signaled) {
            self.lose(error);
        }
    }

    fn on_link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Up { channel, .. } => self.on_up(channel),
            LinkEvent::Down { channel, error } => {
                if self.queue_of(channel).is_some() {
                    self.lose(error);
                }
            }
            LinkEvent::Sent { channel, .. } => {
                if let Some(queue) = self.queue_of(channel) {
                    queue.on_sent();
                }
            }
            LinkEvent::Response { channel, bytes, len, invalidated } => {
                let Some(queue) = self.queue_of(channel) else { return };
                if len < 16 {
                    let why = format!("a response of {len} bytes");
                    return self.lose(HostError::protocol("response", why));
                }
                let (completion, _, _) = Completion::decode(&bytes);
                match queue.on_answer(completion, invalidated) {
                    Ok(finished) => self.on_finished(channel, finished),
                    Err(cid) => {
                        let why = format!("an answer to command {cid:#x}, which is not under way");
                        self.lose(HostError::protocol("response", why));
                    }
                }
            }
        }
    }

    fn queue_of(&mut self, channel: ChannelId) -> Option<&mut Queue> {
        self.io.iter_mut().chain(&mut self.admin).find(|queue| queue.channel == channel)
    }

    /// A connection stands: the Connect command goes out on it.
    fn on_up(&mut self, channel: ChannelId) {
        let Some(qid) = self.queue_of(channel).map(|queue| queue.qid) else { return };
        let cntlid = if qid == 0 { 0xffff } else { self.cntlid };
        let data = wire::connect_data(&self.options.hostid, cntlid, &self.subnqn, &self.options.hostnqn);
        let sqsize = if qid == 0 { ADMIN_ENTRIES } else { self.options.queue_depth } - 1;
        let kato = u32::try_from(self.options.keep_alive.as_millis()).unwrap_or(u32::MAX);
        let Some(sgl) = self.setup_data(&data) else { return };
        let now = self.now();
        if qid == 0 {
            self.phase = Phase::Connect;
        }
        let send_wr = self.link.send_wr(channel);
        let Some(queue) = self.queue_of(channel) else { return };
        queue.limit_send(send_wr);
        if let Some(taken) = queue.take(Purpose::Setup, now) {
            self.send_sqe(channel, taken, wire::connect(qid, sqsize, kato).sgl(sgl));
        }
    }

    /// Puts bytes into the setup buffer and describes it.
    fn setup_data(&mut self, bytes: &[u8]) -> Option<[u8; 16]> {
        let rkey = self.link.rkey();
        let buffer = self.setup.as_mut()?;
        buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let len = if bytes.is_empty() { buffer.len() } else { bytes.len() };
        Some(wire::keyed(buffer.addr(), len as u32, rkey, false))
    }

    fn on_finished(&mut self, channel: ChannelId, finished: Finished) {
        match finished.purpose {
            Purpose::Io => self.on_io(finished),
            Purpose::Setup => self.on_setup(channel, finished.completion),
            Purpose::Event => {
                if finished.completion.status.is_success() {
                    self.events.push_back(HostEvent::Async(finished.completion.result as u32));
                    self.send_admin(Purpose::Event, Sqe::new(0x0c));
                }
            }
            Purpose::Admin => self.admin_done.push_back(finished.completion),
            Purpose::KeepAlive | Purpose::Free => {}
        }
    }

    fn on_setup(&mut self, channel: ChannelId, completion: Completion) {
        if !completion.status.is_success() {
            let kind = HostErrorKind::Status { status: completion.status, result: completion.result };
            let what = format!("{} at {}: {:?}", self.subnqn, self.address, self.phase);
            let remedy = setup_remedy(&completion.status, completion.result);
            return self.lose(HostError::new(what, kind, remedy));
        }
        let result = completion.result;
        match self.phase {
            Phase::Connect => {
                self.cntlid = result as u16;
                self.step(Phase::ReadCap, wire::property_get(0x00, true));
            }
            Phase::ReadCap => {
                self.cap = result;
                // EN, 4 KiB pages, 64-byte commands, 16-byte completions.
                // All command sets that there are, if that can be said.
                let css = if self.cap & CAP_CSS_ALL == 0 { 0 } else { 6 << 4 };
                self.step(Phase::Enable, wire::property_set(0x14, 6 << 16 | 4 << 20 | css | 1));
            }
            Phase::Enable => self.step(Phase::WaitReady, wire::property_get(0x1c, false)),
            Phase::WaitReady if result & 2 != 0 => {
                self.lose(HostError::protocol("controller", "it reports a fatal status"));
            }
            Phase::WaitReady if result & 1 == 0 => self.step(Phase::WaitReady, wire::property_get(0x1c, false)),
            Phase::WaitReady => {
                if let Some(sgl) = self.setup_data(&[]) {
                    self.step(Phase::Identify, wire::identify(0x01, 0, 0).sgl(sgl));
                }
            }
            Phase::Identify => self.on_identified(),
            Phase::QueueCount => self.on_queue_count(result as u32),
            Phase::IoConnections => {
                if let Some(queue) = self.queue_of(channel) {
                    queue.ready = true;
                }
                if self.io.iter().all(|queue| queue.ready) {
                    self.on_ready();
                }
            }
            _ => {}
        }
    }

    fn step(&mut self, phase: Phase, sqe: Sqe) {
        self.phase = phase;
        self.send_admin(Purpose::Setup, sqe);
    }

    fn on_identified(&mut self) {
        let page = 4096u32 << (self.cap >> 48 & 0xf);
        if let Some(buffer) = &self.setup {
            self.identify = IdentifyController::read(buffer.as_slice(), page);
        }
        if self.identify.cntlid != self.cntlid {
            let why = format!("Connect gave controller {}, Identify says {}", self.cntlid, self.identify.cntlid);
            return self.lose(HostError::protocol("controller", why));
        }
        let wanted = self.options.io_queues;
        // CAP.MQES, zeros-based.
        let (entries, most) = (u64::from(self.options.queue_depth), (self.cap & 0xffff) + 1);
        if wanted == 0 || self.identify.kind == 2 {
            self.on_ready();
        } else if entries > most {
            let why = format!("the target's have up to {most} entries, {entries} are asked for");
            self.lose(HostError::usage("I/O queues", why, "use a smaller depth"));
        } else {
            self.step(Phase::QueueCount, wire::set_queue_count(wanted));
        }
    }

    fn on_queue_count(&mut self, result: u32) {
        let given = ((result & 0xffff).min(result >> 16) + 1).min(self.options.io_queues.into()) as u16;
        self.phase = Phase::IoConnections;
        let (depth, cntlid) = (self.options.queue_depth, self.cntlid);
        for qid in 1..=given {
            let private_data = wire::private_data(qid, depth, depth - 1, cntlid).to_vec();
            match self.open(private_data, depth, io_capsule(&self.options)) {
                Ok(channel) => self.io.push(Queue::new(channel, qid, depth - 1)),
                Err(error) => return self.lose(error),
            }
        }
    }

    fn on_ready(&mut self) {
        self.phase = Phase::Ready;
        self.next_keep_alive = self.now() + self.options.keep_alive / 2;
        if self.lost_since.take().is_some() {
            self.events.push_back(HostEvent::Reconnected);
        }
        self.attempts = 0;
        if self.options.events {
            for _ in 0..self.identify.aer_limit.min(EVENT_REQUESTS) {
                self.send_admin(Purpose::Event, Sqe::new(0x0c));
            }
        }
        self.resubmit();
    }

    pub(crate) fn next_admin_done(&mut self) -> Option<Completion> {
        self.admin_done.pop_front()
    }

    /// The key of all host memory.
    pub(crate) fn rkey(&self) -> u32 {
        self.link.rkey()
    }

    /// The connection of a queue (0 = admin), for a provider's fault injection.
    pub fn conn(&mut self, qid: usize) -> Option<crate::rdma::ConnId> {
        let channel = match qid.checked_sub(1) {
            None => self.admin.as_ref()?.channel,
            Some(io) => self.io.get(io)?.channel,
        };
        self.link.conn(channel)
    }
}

/// Bytes of an I/O queue's capsule.
fn io_capsule(options: &HostOptions) -> u32 {
    let list = if options.descriptors > 1 { 16 * u32::from(options.descriptors) } else { 0 };
    wire::SQE_LEN as u32 + options.in_capsule.max(list)
}
