//! Asymmetric Namespace Access (ANA): groups of namespaces, and how well each listener reaches them.
//!
//! A state belongs to a listener (port) and a group; what is not said is optimized. [`AnaStates`] keeps them for one subsystem,
//! counts changes, and knows since when a group is in transition: a transition that lasts longer than hosts were told (ANATT)
//! ends in "inaccessible", so that hosts go elsewhere instead of resetting the controller. (NVMe Base 2.x, Asymmetric Namespace
//! Access Reporting; Asymmetric Namespace Access log page.)

use core::time::Duration;
use std::collections::BTreeMap;

use crate::status::Status;

/// Groups that there can be (ANAGRPMAX, NANAGRPID).
pub const MAX_GROUPS: u32 = 128;

/// ANA state of a group through a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnaState {
    /// The best way.
    #[default]
    Optimized,
    /// It works, others are better.
    NonOptimized,
    /// Not this way, for now.
    Inaccessible,
    /// Not this way, ever again.
    PersistentLoss,
    /// Between two states.
    Change,
}

impl AnaState {
    const fn to_wire(self) -> u8 {
        match self {
            Self::Optimized => 0x01,
            Self::NonOptimized => 0x02,
            Self::Inaccessible => 0x03,
            Self::PersistentLoss => 0x04,
            Self::Change => 0x0f,
        }
    }

    /// The answer to an I/O command; `None` where it is executed. Never with Do Not Retry: hosts go another way.
    pub(crate) const fn refusal(self) -> Option<Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Some(Status::ANA_TRANSITION),
        }
    }
}

/// A state that was set.
#[derive(Clone, Copy, Debug)]
struct Entry {
    state: AnaState,
    /// When a transition is over, whatever the operator says.
    until: Option<Duration>,
    /// Change count when it was set.
    changed: u64,
}

/// All states of one subsystem, by port and group.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnaStates {
    entries: BTreeMap<(u16, u32), Entry>,
    /// States of groups that were set through all ports: those of ports to come.
    everywhere: BTreeMap<u32, AnaState>,
    /// Groups of namespaces.
    groups: BTreeMap<u32, u32>,
    /// Changes of anything in the log page (CHGCNT).
    changes: u64,
}

impl AnaStates {
    /// Sets a state; whether that is a change. `until` ends a transition.
    pub(crate) fn set(&mut self, port: u16, group: u32, state: AnaState, until: Duration) -> bool {
        if self.state(port, group) == state {
            return false;
        }
        self.changes = self.changes.wrapping_add(1);
        let until = (state == AnaState::Change).then_some(until);
        self.entries.insert((port, group), Entry { state, until, changed: self.changes });
        true
    }

    /// Ports to come have this state too.
    pub(crate) fn set_everywhere(&mut self, group: u32, state: AnaState) {
        self.everywhere.insert(group, state);
    }

    /// A port came; the groups whose state there is not what it would be otherwise. What was set for it before stays. A
    /// transition does not begin anew: what is in one is not reached there.
    pub(crate) fn arrive(&mut self, port: u16) -> Vec<u32> {
        let settled = |state| if state == AnaState::Change { AnaState::Inaccessible } else { state };
        let states: Vec<_> = self.everywhere.iter().map(|(group, state)| (*group, settled(*state))).collect();
        let new = states.into_iter().filter(|(group, state)| {
            !self.entries.contains_key(&(port, *group)) && self.set(port, *group, *state, Duration::ZERO)
        });
        new.map(|(group, _)| group).collect()
    }

    pub(crate) fn state(&self, port: u16, group: u32) -> AnaState {
        self.entries.get(&(port, group)).map_or(AnaState::Optimized, |entry| entry.state)
    }

    /// A namespace is in this group now, or gone; whether it moved. Of those that come and go hosts are told otherwise.
    pub(crate) fn place(&mut self, nsid: u32, group: Option<u32>) -> bool {
        let before = match group {
            Some(group) => self.groups.insert(nsid, group),
            None => self.groups.remove(&nsid),
        };
        self.changes = self.changes.wrapping_add((before != group).into());
        before.is_some() && group.is_some() && before != group
    }

    /// Ports through which a group is not reached, with the answer there.
    pub(crate) fn refusals(&self, group: u32) -> Box<[(u16, Status)]> {
        let of_group = self.entries.iter().filter(|((_, other), _)| *other == group);
        of_group.filter_map(|((port, _), entry)| Some((*port, entry.state.refusal()?))).collect()
    }

    /// When the next transition has lasted too long.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.entries.values().filter_map(|entry| entry.until).min()
    }

    /// Ends transitions that lasted too long; the groups concerned.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<u32> {
        let over = |entry: &Entry| entry.until.is_some_and(|until| until <= now);
        let late: Vec<(u16, u32)> = self.entries.iter().filter(|(_, entry)| over(entry)).map(|(key, _)| *key).collect();
        for (port, group) in &late {
            self.set(*port, *group, AnaState::Inaccessible, now);
        }
        late.into_iter().map(|(_, group)| group).collect()
    }

    /// The log page (LID 0Ch) of one port: each group that has namespaces, or a state of its own. `groups_only` leaves the NSIDs
    /// out, as do namespaces that are not `visible`.
    pub(crate) fn page(&self, port: u16, groups_only: bool, visible: impl Fn(u32) -> bool) -> Vec<u8> {
        let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (nsid, group) in self.groups.iter().filter(|(nsid, _)| visible(**nsid)) {
            groups.entry(*group).or_default().push(*nsid);
        }
        for (_, group) in self.entries.keys().filter(|(other, _)| *other == port) {
            groups.entry(*group).or_default();
        }
        let mut page = Vec::new();
        page.extend_from_slice(&self.changes.to_le_bytes());
        page.extend_from_slice(&u16::try_from(groups.len()).unwrap_or(u16::MAX).to_le_bytes());
        page.extend_from_slice(&[0; 6]);
        for (group, nsids) in groups {
            let nsids = if groups_only { &[][..] } else { &nsids };
            let changed = self.entries.get(&(port, group)).map_or(0, |entry| entry.changed);
            page.extend_from_slice(&group.to_le_bytes());
            page.extend_from_slice(&u32::try_from(nsids.len()).unwrap_or(u32::MAX).to_le_bytes());
            page.extend_from_slice(&changed.to_le_bytes());
            page.push(self.state(port, group).to_wire());
            page.extend_from_slice(&[0; 15]);
            page.extend(nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn page_lists_groups_with_their_namespaces_as_one_port_sees_them() {
        let mut ana = AnaStates::default();
        assert_eq!(ana.page(1, false, |_| true), [0; 16]);
        for (nsid, group) in [(1, 2), (3, 1), (5, 2), (6, 2)] {
            assert!(!ana.place(nsid, Some(group)), "it came");
        }
        assert!(!ana.place(6, Some(2)), "no change");
        assert!(ana.place(6, Some(3)), "it moved");
        assert!(!ana.place(6, None), "it went");
        assert!(ana.set(1, 2, AnaState::Inaccessible, SECOND));
        assert!(!ana.set(1, 2, AnaState::Inaccessible, SECOND), "no change");
        assert!(ana.set(7, 9, AnaState::NonOptimized, SECOND));
        let page = ana.page(1, false, |_| true);
        assert_eq!(page[..16], [8, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], "changes, groups");
        let first = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        assert_eq!((&page[16..33], &page[48..52]), (&first[..], &[3, 0, 0, 0][..]));
        let second = [2, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 3];
        assert_eq!((&page[52..69], &page[84..92]), (&second[..], &[1, 0, 0, 0, 5, 0, 0, 0][..]));
        assert_eq!(page.len(), 92);
        assert_eq!(ana.page(1, true, |_| true).len(), 16 + 2 * 32, "groups only");
        let other = ana.page(7, false, |nsid| nsid == 1);
        assert_eq!((other[8], other[32], other[68]), (2, 1, 2), "another port: optimized, and its own group 9");
    }

    #[test]
    fn states_that_refuse_are_those_of_their_port() {
        let mut ana = AnaStates::default();
        ana.set(1, 2, AnaState::Inaccessible, SECOND);
        ana.set(2, 2, AnaState::NonOptimized, SECOND);
        ana.set(3, 2, AnaState::PersistentLoss, SECOND);
        ana.set(4, 2, AnaState::Change, SECOND);
        ana.set(1, 3, AnaState::Change, SECOND);
        let expected = [(1, Status::ANA_INACCESSIBLE), (3, Status::ANA_PERSISTENT_LOSS), (4, Status::ANA_TRANSITION)];
        assert_eq!(*ana.refusals(2), expected);
        assert!(ana.refusals(1).is_empty());
        assert!(expected.iter().all(|(_, status)| !status.is_dnr()));
    }

    #[test]
    fn a_transition_that_lasts_too_long_ends_in_inaccessible() {
        let mut ana = AnaStates::default();
        assert_eq!(ana.deadline(), None);
        ana.set(1, 2, AnaState::Change, 5 * SECOND);
        ana.set(1, 3, AnaState::Change, 9 * SECOND);
        assert_eq!(ana.deadline(), Some(5 * SECOND));
        assert_eq!(ana.expire(4 * SECOND), [] as [u32; 0]);
        assert_eq!(ana.expire(5 * SECOND), [2]);
        assert_eq!((ana.state(1, 2), ana.state(1, 3)), (AnaState::Inaccessible, AnaState::Change));
        ana.set(1, 3, AnaState::Optimized, SECOND);
        assert_eq!(ana.deadline(), None);
    }
}
