//! Which completion queue takes a queue pair.
//!
//! A completion queue that overruns is lost with everything on it, and resizing one is not safe on every device (rxe).
//! So a queue pair is placed where its worst case fits: one completion for every work request that its queues can hold,
//! as flushed requests complete even when they were posted unsignaled. Receives of the shared queue belong to no queue
//! pair, and any of them may complete on any completion queue: that many entries are set aside on each.

/// The books of one completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ledger {
    capacity: u32,
    used: u32,
    queue_pairs: u32,
}

impl Ledger {
    /// A queue of `capacity` entries, of which `reserve` stay free for shared receives.
    pub(super) fn new(capacity: u32, reserve: u32) -> Self {
        Self { capacity, used: reserve, queue_pairs: 0 }
    }

    /// Takes `need` entries, if they fit.
    pub(super) fn take(&mut self, need: u32) -> bool {
        let fits = need <= self.capacity - self.used.min(self.capacity);
        if fits {
            self.used += need;
            self.queue_pairs += 1;
        }
        fits
    }

    /// Gives back what [`Ledger::take`] took.
    pub(super) fn give(&mut self, need: u32) {
        self.used -= need;
        self.queue_pairs -= 1;
    }

    /// No queue pair is placed here.
    pub(super) fn is_empty(&self) -> bool {
        self.queue_pairs == 0
    }
}

/// How many entries a new completion queue gets, so that `need` fits beside `reserve`; `None` if no queue of the device
/// is large enough. Some slack lets more queue pairs share it: one armed queue is cheaper than many.
pub(super) fn new_capacity(need: u32, reserve: u32, max_cqe: u32) -> Option<u32> {
    /// Queue pairs of this size that should share one completion queue.
    const SHARE: u32 = 16;
    let least = need.checked_add(reserve).filter(|least| *least <= max_cqe)?;
    Some(need.saturating_mul(SHARE).saturating_add(reserve).clamp(least, max_cqe))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_placed_up_to_the_last_entry_and_not_beyond() {
        let mut ledger = Ledger::new(100, 10);
        assert!(ledger.take(60));
        assert!(!ledger.take(31));
        assert!(ledger.take(30));
        assert!(!ledger.take(1));
        ledger.give(60);
        assert!(!ledger.is_empty());
        ledger.give(30);
        assert!(ledger.is_empty());
        assert!(ledger.take(90));
    }

    #[test]
    fn a_reserve_beyond_the_capacity_leaves_nothing() {
        assert!(!Ledger::new(10, 11).take(1));
        assert!(Ledger::new(10, 11).take(0));
    }

    #[test]
    fn capacity_is_between_need_and_device_limit() {
        assert_eq!(new_capacity(100, 50, 32_767), Some(1_650));
        assert_eq!(new_capacity(20_000, 0, 32_767), Some(32_767));
        assert_eq!(new_capacity(100, 32_667, 32_767), Some(32_767));
        assert_eq!(new_capacity(101, 32_667, 32_767), None);
        assert_eq!(new_capacity(u32::MAX, 1, u32::MAX), None);
    }
}
