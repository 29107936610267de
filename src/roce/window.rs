//! How much a requester has under way, and how long it waits.
use core::time::Duration;

use super::Psn;
use super::verbs::Connection;

/// SEND and RDMA WRITE packets that may be under way: additive increase, multiplicative decrease, as receivers in software
/// have a bounded buffer and no way to say how large it is.
#[derive(Debug)]
pub(super) struct Window {
    packets: u32,
    /// Below this the window doubles each round trip, above it grows by one.
    threshold: u32,
    acked: u32,
}

impl Default for Window {
    fn default() -> Self {
        Self { packets: INITIAL, threshold: INITIAL, acked: 0 }
    }
}

impl Window {
    pub(super) const fn packets(&self) -> u32 {
        self.packets
    }

    pub(super) fn acked(&mut self, packets: u32) {
        if self.packets < self.threshold {
            self.packets = (self.packets + packets).min(self.threshold);
            return;
        }
        self.acked += packets;
        if self.acked >= self.packets {
            self.acked = 0;
            self.packets = (self.packets + 1).min(MAX);
        }
    }

    /// The peer says that something was lost.
    pub(super) fn lost(&mut self) {
        self.packets = (self.packets / 2).max(MIN);
        self.threshold = self.packets;
        self.acked = 0;
    }

    /// The peer says nothing.
    pub(super) fn silent(&mut self) {
        self.threshold = (self.packets / 2).max(MIN);
        self.packets = AFTER_SILENCE;
        self.acked = 0;
    }
}

/// When to retransmit, and when to give up.
///
/// The connection's ACK timeout T bounds both: nothing is retransmitted later than T after the last sign of life, and the
/// queue pair fails when `retry_count + 1` times 2T passed without one (IBTA 9.7.6.1.3 lets a timeout last from T to
/// 4T). In between, retransmissions come as early as the measured round-trip time allows, since a receiver may be sent a
/// duplicate at any time: first probes of one packet, which find out what was lost at the end of a burst where no later
/// packet makes the peer complain, and only after a silence that is long for any machine everything.
#[derive(Debug, Default)]
pub(super) struct RetryTimer {
    /// The ACK timeout.
    timeout: Duration,
    give_up_after: Duration,
    srtt: Option<Duration>,
    variance: Duration,
    /// A packet whose answer is timed.
    timed: Option<(Psn, Duration)>,
    /// The shortest round trip of late.
    shortest: Option<Duration>,
    progress_at: Duration,
    retry_at: Option<Duration>,
    /// Probes without an answer.
    probes: u32,
    backoff: u32,
}

/// What a timer that went off asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expiry {
    /// Send one packet again, to learn what the peer has.
    Probe,
    /// Send everything again.
    Retry,
    /// The peer is gone.
    GiveUp,
}

impl RetryTimer {
    pub(super) fn new(conn: &Connection) -> Self {
        let timeout = conn.ack_timeout();
        let retries = u32::from(conn.retry_count.min(7)) + 1;
        Self { timeout, give_up_after: timeout * 2 * retries, ..Self::default() }
    }

    pub(super) const fn deadline(&self) -> Option<Duration> {
        self.retry_at
    }

    /// Something was sent.
    pub(super) fn arm(&mut self, now: Duration) {
        if self.retry_at.is_none() {
            self.progress_at = now;
            self.retry_at = Some(self.next_at(now));
        }
    }

    /// The peer gave a sign of life; `waiting` says whether more is due.
    pub(super) fn progress(&mut self, now: Duration, waiting: bool) {
        self.progress_at = now;
        self.retry_at = waiting.then(|| self.next_at(now));
    }

    pub(super) fn stop(&mut self) {
        self.retry_at = None;
        self.timed = None;
    }

    pub(super) fn is_due(&self, now: Duration) -> bool {
        self.retry_at.is_some_and(|at| at <= now)
    }

    pub(super) fn expired(&mut self, now: Duration) -> Option<Expiry> {
        if !self.is_due(now) {
            return None;
        }
        let silence = now.saturating_sub(self.progress_at);
        if silence >= self.give_up_after {
            self.retry_at = None;
            return Some(Expiry::GiveUp);
        }
        if silence < self.wait() {
            self.probes = (self.probes + 1).min(16);
            self.retry_at = Some(self.next_at(now));
            return Some(Expiry::Probe);
        }
        self.timed = None;
        self.backoff = (self.backoff + 1).min(16);
        // The last wait ends when it is time to give up, not later.
        let last = self.progress_at.checked_add(self.give_up_after).unwrap_or(Duration::MAX);
        self.retry_at = Some((now + self.wait()).min(last.max(now)));
        Some(Expiry::Retry)
    }

    /// When to probe next, or to send everything again.
    fn next_at(&self, now: Duration) -> Duration {
        (now + self.probe_wait()).min(self.progress_at + self.wait())
    }

    /// Times the answer to a packet, if none is timed yet.
    pub(super) fn sample(&mut self, psn: Psn, now: Duration) {
        self.timed.get_or_insert((psn, now));
    }

    /// Everything before `una` was answered.
    pub(super) fn answered(&mut self, una: Psn, now: Duration) {
        let Some((_, sent)) = self.timed.take_if(|(psn, _)| psn.precedes(una)) else {
            return;
        };
        let rtt = now.saturating_sub(sent);
        // Karn's algorithm: the longer wait stays until a packet that was sent once was answered. Else a peer that is
        // slower than the wait is never measured, and everything to it is sent twice.
        (self.backoff, self.probes) = (0, 0);
        let shortest = self.shortest.map_or(rtt, |shortest| shortest + shortest / 64);
        self.shortest = Some(shortest.min(rtt));
        // RFC 6298, section 2.
        if let Some(srtt) = self.srtt {
            self.variance = (self.variance * 3 + srtt.abs_diff(rtt)) / 4;
            self.srtt = Some((srtt * 7 + rtt) / 8);
        } else {
            self.srtt = Some(rtt);
            self.variance = rtt / 2;
        }
    }

    /// The packet that is timed was sent again: its answer says nothing about time.
    pub(super) fn forget_sample(&mut self) {
        self.timed = None;
    }

    /// What comes sooner after something was sent cannot be an answer to it.
    pub(super) fn shortest_round_trip(&self) -> Duration {
        self.shortest.unwrap_or(MIN_ROUND_TRIP)
    }

    /// How long one loss takes to be repaired, so that it is not answered twice.
    pub(super) fn round_trip(&self) -> Duration {
        self.srtt.map_or(MIN_ROUND_TRIP, |srtt| (srtt + srtt / 2).clamp(MIN_ROUND_TRIP, MIN_WAIT))
    }

    /// How long the peer may be silent before one packet is sent again.
    fn probe_wait(&self) -> Duration {
        let base = self.srtt.map_or(FIRST_PROBE, |srtt| srtt + (self.variance * 4).max(srtt));
        base.max(MIN_PROBE).saturating_mul(1 << self.probes)
    }

    /// How long the peer may be silent before everything is sent again.
    fn wait(&self) -> Duration {
        self.first_wait().saturating_mul(1 << self.backoff).min(self.longest_wait())
    }

    /// As [`RetryTimer::wait`], the first time.
    fn first_wait(&self) -> Duration {
        let base = self.srtt.map_or(FIRST_WAIT, |srtt| srtt + self.variance * 4);
        base.clamp(MIN_WAIT, self.longest_wait())
    }

    /// How long an answer of a peer that was silent may take.
    pub(super) fn answer_wait(&self) -> Duration {
        if self.srtt.is_some() { self.first_wait() } else { ANSWER_WAIT }
    }

    fn longest_wait(&self) -> Duration {
        self.timeout.max(MIN_WAIT)
    }
}

const INITIAL: u32 = 64;
const MAX: u32 = 128;
const MIN: u32 = 8;
const AFTER_SILENCE: u32 = 4;
/// Everything is sent again no earlier than this: a busy machine leaves a process waiting for as long.
const MIN_WAIT: Duration = Duration::from_millis(8);
/// Before a round trip was measured.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// As long, and the peer was silent.
const ANSWER_WAIT: Duration = Duration::from_millis(16);
/// A probe after silence, before a round trip was measured.
const FIRST_PROBE: Duration = Duration::from_millis(2);
/// As long as a busy process takes to get to its packets, often enough.
const MIN_PROBE: Duration = Duration::from_micros(500);
const MIN_ROUND_TRIP: Duration = Duration::from_micros(200);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::verbs::tests_support::connection;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn gives_up_within_the_retry_budget_and_not_before() {
        let mut conn = connection();
        (conn.ack_timeout, conn.retry_count) = (14, 2); // 67.1 ms
        let budget = conn.ack_timeout() * 6;
        let mut timer = RetryTimer::new(&conn);
        timer.arm(MS);
        let mut now;
        let mut retries = 0;
        loop {
            now = timer.deadline().expect("armed");
            match timer.expired(now).expect("due") {
                Expiry::Probe => {}
                Expiry::Retry => retries += 1,
                Expiry::GiveUp => break,
            }
        }
        assert_eq!(now, MS + budget);
        assert!(retries >= 3, "{retries}");
        assert_eq!(timer.deadline(), None);
    }

    #[test]
    fn waits_as_long_as_the_round_trip_asks() {
        let mut timer = RetryTimer::new(&connection());
        timer.sample(Psn::new(1), Duration::ZERO);
        timer.answered(Psn::new(1), 40 * MS);
        assert_eq!(timer.wait(), FIRST_WAIT, "psn 1 itself is not answered");
        timer.answered(Psn::new(2), 40 * MS);
        assert_eq!(timer.wait(), 120 * MS);
        for _ in 0..50 {
            timer.sample(Psn::new(1), Duration::ZERO);
            timer.answered(Psn::new(2), MS);
        }
        assert_eq!(timer.wait(), MIN_WAIT);
    }

    #[test]
    fn a_slow_peer_is_found_out() {
        let mut timer = RetryTimer::new(&connection());
        let rtt = 30 * MS;
        timer.srtt = Some(MS);
        let mut now = Duration::ZERO;
        let mut retries = 0;
        for n in 0..50 {
            timer.sample(Psn::new(n), now);
            timer.arm(now);
            let answer = now + rtt;
            while timer.deadline().is_some_and(|at| at < answer) {
                now = timer.deadline().expect("armed");
                retries += u32::from(timer.expired(now) == Some(Expiry::Retry));
            }
            now = answer;
            timer.answered(Psn::new(n + 1), now);
            timer.progress(now, false);
        }
        assert!(retries < 5, "{retries} retransmissions of 50 packets that were never lost");
    }

    #[test]
    fn the_window_halves_and_grows() {
        let mut window = Window::default();
        window.lost();
        assert_eq!(window.packets(), 32);
        window.acked(31);
        assert_eq!(window.packets(), 32);
        window.acked(1);
        assert_eq!(window.packets(), 33);
        window.silent();
        assert_eq!(window.packets(), 4);
        for _ in 0..10_000 {
            window.acked(64);
        }
        assert_eq!(window.packets(), 128);
        for _ in 0..10 {
            window.lost();
        }
        assert_eq!(window.packets(), 8);
    }
}
