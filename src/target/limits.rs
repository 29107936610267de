//! Limits on commands and bytes per second: of a namespace, and of a host in a subsystem.
//!
//! A limit is a line that commands stand in: each takes the next free moment, and waits for it where it takes nothing that
//! others need, no buffer and no credit. So the rate is kept to the command, a host that is held back delays nobody, and moments
//! that nobody took are lost but for a short while. A command first stands in its host's line, then in its namespace's.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nvme::io::IoCommand;
use nvme::zns::ZoneCommand;

use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use crate::rdma::Provider;

/// What may be done per second; 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// I/O commands.
    pub iops: u64,
    /// Bytes read and written.
    pub bandwidth: u64,
    /// Bytes read.
    pub read_bandwidth: u64,
    /// Bytes written.
    pub write_bandwidth: u64,
}

/// How long a moment that nobody took may be made up for.
const BURST: u64 = 10_000_000;

/// The lines of one namespace or host, shared by all reactors.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    /// Whether there is any limit.
    on: AtomicBool,
    commands: Lane,
    bytes: Lane,
    read: Lane,
    written: Lane,
}

/// One limit: its rate, and the nanosecond at which the next unit may begin.
#[derive(Debug, Default)]
struct Lane {
    per_second: AtomicU64,
    next: AtomicU64,
}

impl Lane {
    fn set(&self, per_second: u64) {
        self.per_second.store(per_second, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
    }

    /// Takes a place in line; when its turn comes. A turn that is not after `now` has come.
    fn take(&self, amount: u64, now: u64) -> u64 {
        let lasts = self.lasts(amount);
        if lasts == 0 {
            return 0;
        }
        let earliest = now.saturating_sub(BURST);
        let advance = |next: u64| Some(next.max(earliest).saturating_add(lasts));
        let turn = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, advance);
        turn.unwrap_or_else(|next| next).max(earliest)
    }

    /// A turn is not used.
    fn give_back(&self, amount: u64) {
        let lasts = self.lasts(amount);
        let _ = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| Some(next.saturating_sub(lasts)));
    }

    /// How long so much takes, in nanoseconds; 0 without a limit.
    fn lasts(&self, amount: u64) -> u64 {
        let rate = self.per_second.load(Ordering::Relaxed);
        if rate == 0 {
            return 0;
        }
        u64::try_from(u128::from(amount) * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX)
    }
}

impl Limiter {
    pub(crate) fn new(limits: Limits) -> Self {
        let limiter = Self::default();
        limiter.set(limits);
        limiter
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, limits: Limits) {
        let Limits { iops, bandwidth, read_bandwidth, write_bandwidth } = limits;
        self.commands.set(iops);
        self.bytes.set(bandwidth);
        self.read.set(read_bandwidth);
        self.written.set(write_bandwidth);
        self.on.store(limits != Limits::default(), Ordering::Relaxed);
    }

    /// When a command may begin.
    fn turn(&self, work: Work, now: Duration) -> Duration {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let turns = [
            self.commands.take(work.commands, now),
            self.bytes.take(work.read.saturating_add(work.written), now),
            self.read.take(work.read, now),
            self.written.take(work.written, now),
        ];
        Duration::from_nanos(turns.into_iter().max().unwrap_or_default())
    }

    /// A command that waited will not begin: those after it need not wait for its turn.
    fn give_back(&self, work: Work) {
        self.commands.give_back(work.commands);
        self.bytes.give_back(work.read.saturating_add(work.written));
        self.read.give_back(work.read);
        self.written.give_back(work.written);
    }
}

/// What a command costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Work {
    commands: u64,
    read: u64,
    written: u64,
}

impl Work {
    fn of(command: &IoCommand, block_shift: u8) -> Self {
        let bytes = |blocks: u32| u64::from(blocks) << block_shift;
        let (read, written) = match *command {
            IoCommand::Read { blocks, .. } | IoCommand::Compare { blocks, .. } | IoCommand::Verify { blocks, .. } => {
                (bytes(blocks), 0)
            }
            IoCommand::Write { blocks, .. } | IoCommand::Zone(ZoneCommand::Append { blocks, .. }) => (0, bytes(blocks)),
            _ => (0, 0),
        };
        Self { commands: 1, read, written }
    }
}

/// The line that a command stands in next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Line {
    #[default]
    None,
    Host,
    Namespace,
}

/// A command that waits for its turn: when that is, and the command by index and generation.
pub(crate) type Turn = Reverse<(Duration, RequestId, u32)>;

impl<P: Provider> Reactor<P> {
    /// Whether a command that limits concern may go on; if not, it waits for its turn.
    pub(crate) fn has_its_turn(&mut self, id: RequestId, now: Duration) -> bool {
        let request = &self.requests[id];
        let Job::Io { namespace, command } = request.job else { return true };
        let (generation, queue, mut line) = (request.generation, request.queue, request.line);
        let namespace = &self.namespaces[namespace];
        let work = Work::of(&command, namespace.view.block_shift);
        let association = self.queues[queue as usize].association.as_ref();
        let host = association.map(|association| &association.limiter);
        let mut turn = Duration::ZERO;
        while turn <= now {
            let limiter = match line {
                Line::None => break,
                Line::Host => host,
                Line::Namespace => Some(&namespace.limiter),
            };
            line = if line == Line::Host { Line::Namespace } else { Line::None };
            if let Some(limiter) = limiter.filter(|limiter| limiter.is_on()) {
                turn = limiter.turn(work, now);
            }
        }
        let request = &mut self.requests[id];
        request.line = line;
        if turn <= now {
            return true;
        }
        request.state = State::Throttled;
        self.throttled.push(Reverse((turn, id, generation)));
        false
    }

    /// A command that may wait for its turn ends without it.
    pub(crate) fn leave_line(&self, id: RequestId) {
        let request = &self.requests[id];
        let Job::Io { namespace, command } = request.job else { return };
        if request.state != State::Throttled {
            return;
        }
        let namespace = &self.namespaces[namespace];
        let association = self.queues[request.queue as usize].association.as_ref();
        // The line after the one that it stands in is noted.
        let limiter = match request.line {
            Line::Namespace => association.map(|association| &association.limiter),
            _ => Some(&namespace.limiter),
        };
        if let Some(limiter) = limiter {
            limiter.give_back(Work::of(&command, namespace.view.block_shift));
        }
    }

    /// Commands whose turn came go on; whether there were any.
    pub(crate) fn serve_turns(&mut self, now: Duration) -> bool {
        let mut any = false;
        while let Some(Reverse((turn, id, generation))) = self.throttled.peek().copied()
            && turn <= now
        {
            any = true;
            self.throttled.pop();
            if self.waits_for_turn(id, generation) {
                self.acquire(id, now);
            }
        }
        any
    }

    /// Limits changed: commands that wait stand in line anew.
    pub(crate) fn line_up_again(&mut self, now: Duration) {
        let mut waiting = std::mem::take(&mut self.throttled).into_sorted_vec();
        // The sort is by what is reversed: who came first is last.
        while let Some(Reverse((_, id, generation))) = waiting.pop() {
            if self.waits_for_turn(id, generation) {
                self.requests[id].line = Line::Host;
                self.acquire(id, now);
            }
        }
    }

    /// A namespace is gone: nothing on it waits for a turn.
    pub(crate) fn end_turns(&mut self, at: u32, now: Duration) {
        let waiting: Vec<_> =
            self.requests.of_namespace(at).filter(|id| self.requests[*id].state == State::Throttled).collect();
        for id in waiting {
            self.requests[id].line = Line::None;
            self.acquire(id, now);
        }
    }

    fn waits_for_turn(&self, id: RequestId, generation: u32) -> bool {
        self.requests.find(id, generation).is_some_and(|request| request.state == State::Throttled)
    }

    /// When the next command has its turn.
    pub(crate) fn next_turn(&self) -> Option<Duration> {
        self.throttled.peek().map(|Reverse((turn, ..))| *turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const ONE: Work = Work { commands: 1, read: 0, written: 0 };

    /// Commands that begin within a time when there are always more.
    fn begun(limiter: &Limiter, work: Work, from: Duration, lasting: Duration) -> u64 {
        let mut count = 0;
        loop {
            let turn = limiter.turn(work, from);
            if turn >= from + lasting {
                return count;
            }
            count += 1;
        }
    }

    #[test]
    fn rates_are_kept_to_the_command_but_for_the_burst() {
        for iops in [1, 10, 1000, 33_333, 1_000_000] {
            let limiter = Limiter::new(Limits { iops, ..Limits::default() });
            let count = begun(&limiter, ONE, SECOND, SECOND);
            let burst = iops / 100;
            assert!((iops..=iops + iops / 1000 + burst + 1).contains(&count), "{iops}: {count}");
        }
    }

    #[test]
    fn who_asks_late_gets_no_more_than_the_burst_back() {
        let limiter = Limiter::new(Limits { iops: 1000, ..Limits::default() });
        // One at a time, asked for half a millisecond late each: nothing is lost.
        let mut now = SECOND;
        let begin = now;
        for _ in 0..1000 {
            let turn = limiter.turn(ONE, now).max(now);
            now = turn + Duration::from_micros(500);
        }
        let lasted = now - begin;
        assert!((980..=1000).contains(&lasted.as_millis()), "{lasted:?}");
        // A pause of a second is made up for by ten commands.
        now += SECOND;
        let at_once = (0..100).filter(|_| limiter.turn(ONE, now) <= now).count();
        assert_eq!(at_once, 11);
    }

    #[test]
    fn bytes_are_counted_by_their_direction() {
        let read = Work { commands: 1, read: 1 << 20, written: 0 };
        let write = Work { commands: 1, read: 0, written: 1 << 20 };
        let rate = 10 << 20;
        let one = |limits: Limits, work| begun(&Limiter::new(limits), work, SECOND, SECOND);
        for work in [read, write] {
            assert_eq!(one(Limits { bandwidth: rate, ..Limits::default() }, work), 11);
        }
        let reads = Limits { read_bandwidth: rate, iops: 1000, ..Limits::default() };
        assert_eq!(one(reads, read), 11);
        assert!(one(reads, write) >= 1000);
        let writes = Limits { write_bandwidth: rate, iops: 1000, ..Limits::default() };
        assert!(one(writes, read) >= 1000);
        assert_eq!(one(writes, write), 11);
    }

    #[test]
    fn what_moves_data_counts_by_its_bytes() {
        let work = |command| {
            let Work { commands, read, written } = Work::of(&command, 12);
            (commands, read, written)
        };
        assert_eq!(work(IoCommand::Write { slba: 0, blocks: 8, fua: false }), (1, 0, 32768));
        let append = ZoneCommand::Append { zslba: 0, blocks: 8, fua: false };
        assert_eq!(work(IoCommand::Zone(append)), (1, 0, 32768));
        assert_eq!(work(IoCommand::Verify { slba: 0, blocks: 8 }), (1, 32768, 0));
        assert_eq!(work(IoCommand::Flush), (1, 0, 0));
    }

    #[test]
    fn turns_of_commands_that_ended_are_for_others() {
        let limiter = Limiter::new(Limits { iops: 10, bandwidth: 1 << 20, ..Limits::default() });
        let large = Work { commands: 1, read: 0, written: 128 << 10 };
        let first = limiter.turn(large, SECOND);
        for _ in 0..1000 {
            limiter.turn(large, SECOND);
        }
        for _ in 0..1000 {
            limiter.give_back(large);
        }
        let next = limiter.turn(large, SECOND);
        assert!(next > first && next - first <= Duration::from_millis(126), "{:?}", next - first);
    }

    #[test]
    fn limits_come_and_go() {
        let limiter = Limiter::default();
        assert!(!limiter.is_on());
        assert!(limiter.turn(ONE, SECOND) <= SECOND);
        limiter.set(Limits { iops: 1, ..Limits::default() });
        assert!(limiter.is_on());
        assert!(limiter.turn(ONE, SECOND) <= SECOND);
        assert!(limiter.turn(ONE, SECOND) > SECOND);
        limiter.set(Limits::default());
        assert!(!limiter.is_on() && limiter.turn(ONE, SECOND) <= SECOND);
    }
}
