//! Whether a reactor with nothing to do looks again at once, or sleeps.
//!
//! Spinning pays when the next work comes sooner than falling asleep and waking up would take; else it burns a core that others
//! could use. So the reactor remembers how often, of late, work came within a short window after it ran dry: while that is
//! the rule it spins through the window, and sleeps at once when it is the exception. Under load it is polled, between the
//! commands of a slow host it sleeps, and an idle target uses no CPU.

use std::time::Duration;

/// See the module's doc.
#[derive(Debug)]
pub(crate) struct Pace {
    window: Duration,
    /// Of the last idle spells, how many ended within the window, in 256ths.
    quick: u32,
    /// When it ran dry; `None` while there is work.
    dry_since: Option<Duration>,
}

/// One spell in this many is what the memory forgets of the past.
const MEMORY: u32 = 8;

/// Spells that have to end within the window for spinning to pay: three in four.
const ENOUGH: u32 = 192;

impl Pace {
    pub(crate) fn new(window: Duration) -> Self {
        Self { window, quick: 0, dry_since: None }
    }

    /// There was work in the round that began at `now`.
    pub(crate) fn worked(&mut self, now: Duration) {
        if let Some(since) = self.dry_since.take() {
            let quick = if now.saturating_sub(since) <= self.window { 256 } else { 0 };
            self.quick = self.quick - self.quick / MEMORY + quick / MEMORY;
        }
    }

    /// There was none: whether to look again at once.
    pub(crate) fn spins(&mut self, now: Duration) -> bool {
        let since = *self.dry_since.get_or_insert(now);
        self.quick >= ENOUGH && now.saturating_sub(since) <= self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(20);

    /// Work comes every `gap` microseconds; of 100 spells, how many began with spinning.
    fn spinning(pace: &mut Pace, clock: &mut Duration, gap: u64) -> usize {
        let mut spins = 0;
        for _ in 0..100 {
            spins += usize::from(pace.spins(*clock));
            *clock += Duration::from_micros(gap);
            pace.worked(*clock);
            *clock += Duration::from_micros(1);
        }
        spins
    }

    #[test]
    fn dense_work_is_polled_for_and_sparse_work_slept_for() {
        let (mut pace, mut clock) = (Pace::new(WINDOW), Duration::ZERO);
        assert!(spinning(&mut pace, &mut clock, 20) >= 80, "on the window's edge");
        assert!(spinning(&mut pace, &mut clock, 21) <= 5, "beyond it");
        assert!(spinning(&mut pace, &mut clock, 1000) == 0);
        assert!(spinning(&mut pace, &mut clock, 5) >= 80, "it learns again");
    }

    #[test]
    fn spinning_ends_with_the_window() {
        let (mut pace, mut clock) = (Pace::new(WINDOW), Duration::ZERO);
        spinning(&mut pace, &mut clock, 5);
        assert!(pace.spins(clock));
        assert!(pace.spins(clock + WINDOW));
        assert!(!pace.spins(clock + WINDOW + Duration::from_nanos(1)));
    }
}
