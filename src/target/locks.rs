//! Range locks: a command that has to be alone on blocks of a namespace, against all reactors.
//!
//! The table says who may start; the reactors know a lock only while it exists. A lock is granted to its asker when it overlaps
//! no lock before it and every reactor has let its commands on those blocks end (the reactors hold the tickets). Locks wait in
//! the order in which they were asked for.

use std::sync::Arc;

use nvme::io::BlockRange;
use nvme::registry::SubsystemId;

use super::namespace::Instance;
use super::shared::RequestRef;

/// A namespace, anywhere in the target.
pub(crate) type NamespaceKey = (SubsystemId, u32);

/// Names a lock; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockId(u64);

/// A lock as it is published.
#[derive(Clone, Debug)]
pub(crate) struct RangeLock {
    pub(crate) id: LockId,
    /// What it is on, wherever that is listed: a namespace may be taken away and put back under it.
    pub(crate) on: Instance,
    pub(crate) ranges: Arc<[BlockRange]>,
    /// The request that asked for it.
    pub(crate) owner: RequestRef,
}

impl RangeLock {
    /// Whether it is about one of these blocks; `None` is all of the namespace.
    pub(crate) fn covers(&self, blocks: Option<BlockRange>) -> bool {
        blocks.is_none_or(|blocks| self.ranges.iter().any(|range| range.overlaps(&blocks)))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.on == other.on && other.ranges.iter().any(|range| self.covers(Some(*range)))
    }
}

/// All locks, those that are held and those that wait.
#[derive(Debug, Default)]
pub(crate) struct LockTable {
    next: u64,
    held: Vec<RangeLock>,
    waiting: Vec<RangeLock>,
}

impl LockTable {
    /// Asks for a lock: its name, and the lock if it can be published at once.
    pub(crate) fn ask(
        &mut self,
        on: Instance,
        ranges: Arc<[BlockRange]>,
        owner: RequestRef,
    ) -> (LockId, Option<RangeLock>) {
        let id = LockId(self.next);
        self.next += 1;
        let lock = RangeLock { id, on, ranges, owner };
        if self.held.iter().chain(&self.waiting).any(|other| other.overlaps(&lock)) {
            self.waiting.push(lock);
            return (id, None);
        }
        self.held.push(lock.clone());
        (id, Some(lock))
    }

    /// Gives a lock up, held or not: whether it was published, and the locks that can be published now.
    pub(crate) fn release(&mut self, id: LockId) -> (Option<RangeLock>, Vec<RangeLock>) {
        self.waiting.retain(|lock| lock.id != id);
        let held = self.held.iter().position(|lock| lock.id == id).map(|at| self.held.swap_remove(at));
        let mut granted = Vec::new();
        let mut at = 0;
        while let Some(lock) = self.waiting.get(at) {
            let before = self.held.iter().chain(&self.waiting[..at]);
            if before.into_iter().any(|other| other.overlaps(lock)) {
                at += 1;
            } else {
                let lock = self.waiting.remove(at);
                self.held.push(lock.clone());
                granted.push(lock);
            }
        }
        (held, granted)
    }

    /// The locks that are held on a namespace.
    pub(crate) fn held_on(&self, on: Instance) -> Vec<RangeLock> {
        self.held.iter().filter(|lock| lock.on == on).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(table: &mut LockTable, on: Instance, ranges: &[(u64, u32)]) -> (LockId, bool) {
        let ranges = ranges.iter().map(|(slba, blocks)| BlockRange { slba: *slba, blocks: *blocks }).collect();
        let owner = RequestRef { reactor: 0, request: 0, generation: 0 };
        let (id, lock) = table.ask(on, ranges, owner);
        (id, lock.is_some())
    }

    fn release(table: &mut LockTable, id: LockId) -> (bool, Vec<LockId>) {
        let (held, granted) = table.release(id);
        (held.is_some(), granted.iter().map(|lock| lock.id).collect())
    }

    #[test]
    fn what_does_not_overlap_is_held_at_once() {
        let (mut table, one) = (LockTable::default(), Instance::next());
        let (first, held) = ask(&mut table, one, &[(0, 8)]);
        assert!(held);
        assert!(ask(&mut table, one, &[(8, 8)]).1 && ask(&mut table, Instance::next(), &[(0, 8)]).1);
        let (waiting, held) = ask(&mut table, one, &[(100, 1), (7, 1)]);
        assert!(!held);
        assert_eq!(release(&mut table, first), (true, vec![waiting]));
    }

    #[test]
    fn locks_that_wait_are_granted_in_order_and_not_overtaken() {
        let (mut table, one) = (LockTable::default(), Instance::next());
        let (a, _) = ask(&mut table, one, &[(0, 10)]);
        let (b, _) = ask(&mut table, one, &[(5, 10)]);
        // It overlaps nothing that is held, but what waits before it.
        let (c, held) = ask(&mut table, one, &[(12, 10)]);
        assert!(!held);
        let (d, _) = ask(&mut table, one, &[(0, 1)]);
        assert_eq!(release(&mut table, a), (true, vec![b, d]));
        assert_eq!(release(&mut table, b), (true, vec![c]));
        assert_eq!(release(&mut table, b), (false, vec![]), "twice");
    }

    #[test]
    fn one_that_gives_up_waiting_lets_others_pass() {
        let (mut table, one) = (LockTable::default(), Instance::next());
        let (a, _) = ask(&mut table, one, &[(0, 10)]);
        let (b, _) = ask(&mut table, one, &[(5, 10)]);
        let (c, _) = ask(&mut table, one, &[(12, 10)]);
        assert_eq!(release(&mut table, b), (false, vec![c]));
        assert_eq!(release(&mut table, a), (true, vec![]));
    }

    #[test]
    fn lock_covers_its_ranges_and_commands_on_everything() {
        let mut table = LockTable::default();
        let ranges = [BlockRange { slba: 10, blocks: 2 }, BlockRange { slba: 20, blocks: 1 }];
        let owner = RequestRef { reactor: 0, request: 0, generation: 0 };
        let lock = table.ask(Instance::next(), Arc::new(ranges), owner).1.unwrap();
        for (slba, covered) in [(8, false), (9, true), (11, true), (12, false), (19, true), (20, true), (21, false)] {
            assert_eq!(lock.covers(Some(BlockRange { slba, blocks: 2 })), covered, "{slba}");
        }
        assert!(lock.covers(None));
    }
}
