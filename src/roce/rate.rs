//! Congestion control: the reaction point of DCQCN ("Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015),
//! with the paper's names. A queue pair without congestion sends at line rate and pays nothing for it.
use core::time::Duration;

/// The parameters, named as in the paper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dcqcn {
    /// Line rate in bytes per second: where a queue pair starts, and the rate at which it forgets congestion.
    pub line_rate: u64,
    /// The least rate, in bytes per second.
    pub min_rate: u64,
    /// g: the weight of a new observation in alpha is one over two to this power.
    pub g_shift: u32,
    /// K: alpha decays each time this passes without a congestion notification.
    pub alpha_timer: Duration,
    /// T: the rate rises each time this passes.
    pub rate_timer: Duration,
    /// B: the rate rises each time these bytes were sent.
    pub byte_counter: u64,
    /// F: rises of fast recovery before additive increase.
    pub fast_recovery: u32,
    /// R_AI: additive increase, in bytes per second.
    pub r_ai: u64,
    /// R_HAI: hyper increase, in bytes per second.
    pub r_hai: u64,
    /// N: the least time between two notifications that a queue pair sends.
    pub cnp_interval: Duration,
}

impl Default for Dcqcn {
    fn default() -> Self {
        Self {
            line_rate: 12_500_000_000,
            min_rate: 1_250_000,
            g_shift: 8,
            alpha_timer: Duration::from_micros(55),
            rate_timer: Duration::from_micros(55),
            byte_counter: 10_000_000,
            fast_recovery: 5,
            r_ai: 5_000_000,
            r_hai: 50_000_000,
            cnp_interval: Duration::from_micros(50),
        }
    }
}

/// The sending rate of one queue pair.
#[derive(Debug, Default)]
pub(super) struct Rate {
    limit: Option<Limit>,
    /// The next packet waits for its time.
    waiting: bool,
}

#[derive(Debug)]
struct Limit {
    params: Dcqcn,
    /// R_C, the current rate.
    current: u64,
    /// R_T, the target rate.
    target: u64,
    /// Alpha, in 2^-20.
    alpha: u64,
    alpha_at: Duration,
    rate_at: Duration,
    bytes: u64,
    timer_stage: u32,
    byte_stage: u32,
    /// When the packets so far have left at the current rate.
    next_at: Duration,
}

impl Rate {
    /// A congestion notification packet came.
    pub(super) fn notified(&mut self, now: Duration, params: &Dcqcn) {
        let limit = self.limit.get_or_insert_with(|| Limit::new(now, params));
        limit.advance(now);
        limit.cut(now);
    }

    /// Whether the next packet has to wait.
    pub(super) fn waits(&mut self, now: Duration) -> bool {
        self.waiting = false;
        let Some(limit) = &mut self.limit else {
            return false;
        };
        limit.advance(now);
        if limit.current >= limit.params.line_rate {
            self.limit = None;
            return false;
        }
        self.waiting = limit.next_at > now + BURST;
        self.waiting
    }

    /// There is nothing to send.
    pub(super) const fn rest(&mut self) {
        self.waiting = false;
    }

    /// When to try again, for a packet that waits.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.limit.as_ref().filter(|_| self.waiting).map(|limit| limit.next_at.saturating_sub(BURST))
    }

    /// Bytes were sent.
    pub(super) fn sent(&mut self, now: Duration, bytes: usize) {
        if let Some(limit) = &mut self.limit {
            limit.sent(now, bytes as u64);
        }
    }

    /// The current rate in bytes per second; none at line rate.
    #[cfg(test)]
    pub(super) fn current(&self) -> Option<u64> {
        self.limit.as_ref().map(|limit| limit.current)
    }
}

impl Limit {
    fn new(now: Duration, params: &Dcqcn) -> Self {
        Self {
            params: *params,
            current: params.line_rate,
            target: params.line_rate,
            alpha: ALPHA_ONE,
            alpha_at: now,
            rate_at: now,
            bytes: 0,
            timer_stage: 0,
            byte_stage: 0,
            next_at: now,
        }
    }

    fn cut(&mut self, now: Duration) {
        self.target = self.current;
        let cut = u128::from(self.current) * u128::from(self.alpha) / u128::from(2 * ALPHA_ONE);
        self.current = self.current.saturating_sub(u64::try_from(cut).unwrap_or(u64::MAX)).max(self.params.min_rate);
        self.alpha += (ALPHA_ONE - self.alpha) >> self.params.g_shift;
        (self.alpha_at, self.rate_at) = (now, now);
        (self.bytes, self.timer_stage, self.byte_stage) = (0, 0, 0);
    }

    /// What the timers did until `now`.
    fn advance(&mut self, now: Duration) {
        let decays = periods(&mut self.alpha_at, self.params.alpha_timer, now);
        for _ in 0..decays {
            self.alpha -= self.alpha >> self.params.g_shift;
        }
        let rises = periods(&mut self.rate_at, self.params.rate_timer, now);
        for _ in 0..rises {
            self.timer_stage = self.timer_stage.saturating_add(1);
            self.rise();
        }
    }

    fn sent(&mut self, now: Duration, bytes: u64) {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.current.max(1));
        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.next_at = self.next_at.max(now).saturating_add(time);
        self.bytes += bytes;
        if self.bytes >= self.params.byte_counter {
            self.bytes = 0;
            self.byte_stage = self.byte_stage.saturating_add(1);
            self.rise();
        }
    }

    fn rise(&mut self) {
        let f = self.params.fast_recovery;
        if self.timer_stage.max(self.byte_stage) > f {
            let hyper = self.timer_stage.min(self.byte_stage) > f;
            self.target += if hyper { self.params.r_hai } else { self.params.r_ai };
        }
        self.target = self.target.min(self.params.line_rate);
        self.current = u64::midpoint(self.current, self.target);
        // Halving the distance never arrives.
        if self.target - self.current <= self.target / 1024 {
            self.current = self.target;
        }
    }
}

/// How many whole periods passed, few enough to loop over; a long pause counts as the last ones of it.
fn periods(last: &mut Duration, period: Duration, now: Duration) -> u32 {
    const MOST: u32 = 4096;
    let passed = now.saturating_sub(*last).as_nanos() / period.as_nanos().max(1);
    let count = u32::try_from(passed).unwrap_or(u32::MAX).min(MOST);
    if count == MOST {
        *last = now;
    } else {
        *last += period * count;
    }
    count
}

const ALPHA_ONE: u64 = 1 << 20;
/// Packets may leave this much early, as timers are coarse.
const BURST: Duration = Duration::from_micros(100);

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn a_notification_halves_the_rate_and_time_brings_it_back() {
        let params = Dcqcn::default();
        let mut rate = Rate::default();
        assert!(!rate.waits(US));
        rate.notified(US, &params);
        assert_eq!(rate.current(), Some(params.line_rate / 2), "alpha starts at one");
        rate.sent(US, 10_000_000);
        assert!(rate.waits(US), "10 MB at half the line rate");
        let before = rate.current();
        assert!(!rate.waits(2000 * US));
        assert!(rate.current() > before || rate.current().is_none());
        assert!(!rate.waits(Duration::from_secs(2)));
        assert_eq!(rate.current(), None, "forgotten");
    }

    /// Rates, targets and alpha of a trace that was computed by hand from the paper's equations 1 to 4, rounded down where the
    /// code counts whole bytes: g = 1/4, F = 2, K = T = 100 us, B = 10,000 bytes, R_AI = 1,000 and R_HAI = 5,000 bytes a second.
    #[test]
    fn rates_follow_the_reaction_point_of_the_paper() {
        let params = Dcqcn {
            line_rate: 1_000_000,
            min_rate: 1000,
            g_shift: 2,
            alpha_timer: 100 * US,
            rate_timer: 100 * US,
            byte_counter: 10_000,
            fast_recovery: 2,
            r_ai: 1000,
            r_hai: 5000,
            ..Dcqcn::default()
        };
        let mut rate = Rate::default();
        let state = |rate: &Rate| {
            let limit = rate.limit.as_ref().expect("limited");
            (limit.current, limit.target, limit.alpha as f64 / ALPHA_ONE as f64)
        };
        rate.notified(Duration::ZERO, &params);
        assert_eq!(state(&rate), (500_000, 1_000_000, 1.0), "cut by alpha / 2, which stays at one");
        let at = |rate: &mut Rate, micros: u32, expected, why| {
            rate.waits(US * micros - Duration::from_nanos(1));
            assert_ne!(state(rate), expected, "{why}: too early");
            rate.waits(US * micros);
            assert_eq!(state(rate), expected, "{why}, at {micros} us");
        };
        at(&mut rate, 100, (750_000, 1_000_000, 0.75), "fast recovery, alpha decays");
        at(&mut rate, 200, (875_000, 1_000_000, 0.5625), "fast recovery");
        // 875,000 (1 - 0.5625 / 2); alpha = 3/4 of 0.5625 and 1/4. All counting starts anew.
        rate.notified(US * 250, &params);
        assert_eq!(state(&rate), (628_907, 875_000, 0.671_875), "the second cut");
        at(&mut rate, 350, (751_953, 875_000, 0.503_906_25), "fast recovery");
        at(&mut rate, 450, (813_476, 875_000, 0.377_929_687_5), "fast recovery, for the last time");
        at(&mut rate, 550, (844_738, 876_000, 0.283_447_265_625), "additive increase after F rises");
        at(&mut rate, 650, (860_869, 877_000, 0.212_585_449_218_75), "additive increase");
        let sent = |rate: &mut Rate, bytes, expected: (u64, u64), why| {
            rate.sent(US * 650, bytes);
            assert_eq!((state(rate).0, state(rate).1), expected, "{why}");
        };
        sent(&mut rate, 9999, (860_869, 877_000), "a byte less than B");
        sent(&mut rate, 1, (869_434, 878_000), "additive: one of the counters is past F");
        sent(&mut rate, 10_000, (874_217, 879_000), "additive");
        sent(&mut rate, 10_000, (879_108, 884_000), "hyper increase: both are past F");
        sent(&mut rate, 10_000, (884_054, 889_000), "hyper increase");
        at(&mut rate, 750, (889_027, 894_000, 0.159_439_086_914_062_5), "hyper increase by the timer");
        // The byte counter alone makes the first F rises as well, and no rise leads beyond the line rate.
        let mut rate = Rate::default();
        rate.notified(Duration::ZERO, &params);
        for expected in [750_000, 875_000, 937_500] {
            rate.sent(Duration::ZERO, 10_000);
            assert_eq!((state(&rate).0, state(&rate).1), (expected, 1_000_000));
        }
    }

    #[test]
    fn repeated_notifications_stop_at_the_least_rate() {
        let params = Dcqcn::default();
        let mut rate = Rate::default();
        for i in 0..1000 {
            rate.notified(US * i, &params);
        }
        assert_eq!(rate.current(), Some(params.min_rate));
    }

    #[test]
    fn pacing_follows_the_rate() {
        let params = Dcqcn { line_rate: 2_000_000, ..Dcqcn::default() };
        let mut rate = Rate::default();
        rate.notified(Duration::ZERO, &params);
        // At 1 MB/s, 1000 bytes take a millisecond.
        rate.sent(Duration::ZERO, 1000);
        assert_eq!(rate.deadline(), None);
        assert!(rate.waits(US));
        let at = rate.deadline().expect("waits");
        assert!(at > 500 * US, "{at:?}");
        assert!(!rate.waits(at));
    }
}
