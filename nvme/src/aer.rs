//! Asynchronous events: requests that are parked, notices that wait, and the mask between a notice and the reading of
//! its log.
//!
//! A notice is reported once; it stays masked until the host reads the log page with Retain Asynchronous Event clear.
//! What changes after the host took its copy of the page is reported again after that read, so no change is lost and a
//! storm of changes is one event. (NVMe Base 2.x, Asynchronous Event Request command, and Asynchronous Event
//! Configuration.)

use std::collections::VecDeque;

use crate::logs::lid;

/// Asynchronous event request limit (AERL), zero's based.
pub(crate) const AERL: u8 = 3;

const LIMIT: usize = 4;

/// Bit of Asynchronous Event Configuration, and of OAES, for a notice.
pub(crate) const NAMESPACE_ATTRIBUTE_NOTICES: u32 = 1 << 8;
pub(crate) const ANA_CHANGE_NOTICES: u32 = 1 << 11;
pub(crate) const DISCOVERY_LOG_NOTICES: u32 = 1 << 31;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A namespace came, went or changed.
    NamespaceAttribute,
    /// The discovery log page changed.
    DiscoveryLog,
    /// A reservation notification waits in its log page.
    Reservation,
    /// The ANA log page changed.
    AsymmetricAccess,
}

const ALL: [Notice; 4] =
    [Notice::NamespaceAttribute, Notice::DiscoveryLog, Notice::Reservation, Notice::AsymmetricAccess];

impl Notice {
    /// The bit of Asynchronous Event Configuration that enables it; `None` for what has a mask of its own.
    pub(crate) const fn enable_bit(self) -> Option<u32> {
        match self {
            Self::NamespaceAttribute => Some(NAMESPACE_ATTRIBUTE_NOTICES),
            Self::DiscoveryLog => Some(DISCOVERY_LOG_NOTICES),
            Self::AsymmetricAccess => Some(ANA_CHANGE_NOTICES),
            Self::Reservation => None,
        }
    }

    const fn log(self) -> u8 {
        match self {
            Self::NamespaceAttribute => lid::CHANGED_NAMESPACES,
            Self::DiscoveryLog => lid::DISCOVERY,
            Self::Reservation => lid::RESERVATION,
            Self::AsymmetricAccess => lid::ANA,
        }
    }

    /// Dword 0 of the completion: type (2 is a notice, 6 is of the I/O command set), information, log page.
    fn dword0(self) -> u32 {
        let (kind, information) = match self {
            Self::NamespaceAttribute => (2, 0x00),
            Self::DiscoveryLog => (2, 0xf0),
            Self::AsymmetricAccess => (2, 0x03),
            Self::Reservation => (6, 0x00),
        };
        u32::from_le_bytes([kind, information, self.log(), 0])
    }
}

/// Between a notice and the reading of its log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    /// Happened; no request was parked.
    Waiting,
    /// Reported; masked until the log is read. `again`: it changed since the host last read the page from its start.
    Reported { again: bool },
}

/// A parked request that is to be completed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fired {
    pub(crate) cid: u16,
    pub(crate) dword0: u32,
}

/// What becomes of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requested {
    Parked,
    Fired(Fired),
    LimitExceeded,
}

/// Requests and notices of one controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct AsyncEvents {
    parked: VecDeque<u16>,
    namespace: State,
    discovery: State,
    reservation: State,
    asymmetric_access: State,
}

impl AsyncEvents {
    /// An Asynchronous Event Request arrived.
    pub(crate) fn request(&mut self, cid: u16) -> Requested {
        if self.parked.len() >= LIMIT {
            return Requested::LimitExceeded;
        }
        self.parked.push_back(cid);
        match self.fire() {
            Some(fired) => Requested::Fired(fired),
            None => Requested::Parked,
        }
    }

    /// A notice that the host has enabled.
    pub(crate) fn raise(&mut self, notice: Notice) -> Option<Fired> {
        let state = self.state(notice);
        *state = match *state {
            State::Idle | State::Waiting => State::Waiting,
            State::Reported { .. } => State::Reported { again: true },
        };
        self.fire()
    }

    /// The host read the page of `notice` from `offset`.
    pub(crate) fn log_read(&mut self, notice: Notice, offset: u64, retain: bool) -> Option<Fired> {
        let from_start = offset == 0;
        let state = self.state(notice);
        *state = match *state {
            State::Reported { again } if retain => State::Reported { again: again && !from_start },
            State::Reported { again: true } if !from_start => State::Waiting,
            State::Waiting if retain || !from_start => State::Waiting,
            _ => State::Idle,
        };
        self.fire()
    }

    /// Abort named a parked request: whether it was one.
    pub(crate) fn abort(&mut self, cid: u16) -> bool {
        let Some(index) = self.parked.iter().position(|&parked| parked == cid) else {
            return false;
        };
        self.parked.remove(index).is_some()
    }

    /// A controller reset: all requests come back to be answered, and all notices are forgotten.
    pub(crate) fn reset(&mut self) -> VecDeque<u16> {
        core::mem::take(self).parked
    }

    fn state(&mut self, notice: Notice) -> &mut State {
        match notice {
            Notice::NamespaceAttribute => &mut self.namespace,
            Notice::DiscoveryLog => &mut self.discovery,
            Notice::Reservation => &mut self.reservation,
            Notice::AsymmetricAccess => &mut self.asymmetric_access,
        }
    }

    fn fire(&mut self) -> Option<Fired> {
        let notice = ALL.into_iter().find(|&notice| *self.state(notice) == State::Waiting)?;
        let cid = self.parked.pop_front()?;
        *self.state(notice) = State::Reported { again: false };
        Some(Fired { cid, dword0: notice.dword0() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NS: Notice = Notice::NamespaceAttribute;
    const DISCOVERY: Notice = Notice::DiscoveryLog;

    fn fired(cid: u16, dword0: u32) -> Option<Fired> {
        Some(Fired { cid, dword0 })
    }

    #[test]
    fn four_requests_are_parked_and_the_fifth_refused() {
        let mut events = AsyncEvents::default();
        for cid in 0..4 {
            assert_eq!(events.request(cid), Requested::Parked);
        }
        assert_eq!(events.request(4), Requested::LimitExceeded);
        assert_eq!(usize::from(AERL) + 1, LIMIT);
    }

    #[test]
    fn notices_carry_their_type_information_and_log() {
        let mut events = AsyncEvents::default();
        events.request(1);
        events.request(2);
        assert_eq!(events.raise(NS), fired(1, 0x0004_0002));
        assert_eq!(events.raise(DISCOVERY), fired(2, 0x0070_f002));
        events.request(3);
        assert_eq!(events.raise(Notice::Reservation), fired(3, 0x0080_0006));
        events.request(4);
        assert_eq!(events.raise(Notice::AsymmetricAccess), fired(4, 0x000c_0302));
    }

    #[test]
    fn a_storm_without_a_request_is_one_event() {
        let mut events = AsyncEvents::default();
        for _ in 0..100 {
            assert_eq!(events.raise(NS), None);
        }
        assert_eq!(events.request(1), Requested::Fired(Fired { cid: 1, dword0: 0x0004_0002 }));
        assert_eq!(events.request(2), Requested::Parked);
    }

    #[test]
    fn a_reported_notice_is_masked_until_the_log_is_read_without_retain() {
        let mut events = AsyncEvents::default();
        events.request(1);
        events.request(2);
        assert!(events.raise(DISCOVERY).is_some());
        assert_eq!(events.raise(DISCOVERY), None);
        assert_eq!(events.log_read(DISCOVERY, 0, true), None);
        assert_eq!(events.raise(DISCOVERY), None, "still masked");
        assert_eq!(events.log_read(DISCOVERY, 0, false), None, "that read saw it");
        assert!(events.raise(DISCOVERY).is_some());
    }

    #[test]
    fn a_change_between_the_pieces_of_one_reading_is_reported_again() {
        let mut events = AsyncEvents::default();
        events.request(1);
        events.request(2);
        events.raise(DISCOVERY);
        assert_eq!(events.log_read(DISCOVERY, 0, true), None);
        events.raise(DISCOVERY);
        assert_eq!(events.log_read(DISCOVERY, 1024, false), fired(2, 0x0070_f002));
    }

    #[test]
    fn a_change_before_the_first_piece_is_in_the_copy() {
        let mut events = AsyncEvents::default();
        events.request(1);
        events.request(2);
        events.raise(DISCOVERY);
        events.raise(DISCOVERY);
        assert_eq!(events.log_read(DISCOVERY, 0, true), None);
        assert_eq!(events.log_read(DISCOVERY, 1024, false), None);
        assert!(events.raise(DISCOVERY).is_some());
    }

    #[test]
    fn reading_one_log_does_not_unmask_the_other() {
        let mut events = AsyncEvents::default();
        for cid in 1..4 {
            events.request(cid);
        }
        events.raise(NS);
        events.log_read(DISCOVERY, 0, false);
        assert_eq!(events.raise(NS), None);
    }

    #[test]
    fn abort_of_the_middle_one_leaves_the_others() {
        let mut events = AsyncEvents::default();
        for cid in 1..4 {
            events.request(cid);
        }
        assert!(events.abort(2));
        assert!(!events.abort(2));
        assert_eq!(events.reset(), [1, 3]);
        assert_eq!(events.request(9), Requested::Parked);
    }

    proptest! {
        #[test]
        fn every_request_is_fired_parked_or_refused(
            steps in proptest::collection::vec((0u8..5, any::<bool>(), any::<bool>()), 0..200),
        ) {
            let mut events = AsyncEvents::default();
            let (mut taken, mut answered) = (0usize, 0usize);
            for (cid, (step, flag, start)) in steps.into_iter().enumerate() {
                let notice = if flag { NS } else { DISCOVERY };
                let cid = u16::try_from(cid).unwrap();
                match step {
                    0 | 1 => match events.request(cid) {
                        Requested::Parked => taken += 1,
                        Requested::Fired(_) => { taken += 1; answered += 1; }
                        Requested::LimitExceeded => {}
                    },
                    2 => answered += usize::from(events.raise(notice).is_some()),
                    3 => answered += usize::from(events.log_read(notice, u64::from(!start), flag).is_some()),
                    _ => answered += usize::from(events.abort(cid / 2)),
                }
                prop_assert!(events.parked.len() <= LIMIT);
            }
            prop_assert_eq!(events.reset().len(), taken - answered);
        }
    }
}
