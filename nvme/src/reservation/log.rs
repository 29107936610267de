//! Reservation notifications of one controller: a queue that Get Log Page takes from, one at a time.
//! (NVMe Base 2.x, Reservation Notification log page.)

use std::collections::VecDeque;

/// What a host is told of a namespace that it is, or was, registered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notified {
    /// Another host ended its registration.
    RegistrationPreempted,
    /// The reservation is free, or of another type.
    ReservationReleased,
    /// Another host cleared reservation and registrations.
    ReservationPreempted,
}

impl Notified {
    /// Type in the log page.
    const fn to_wire(self) -> u8 {
        match self {
            Self::RegistrationPreempted => 1,
            Self::ReservationReleased => 2,
            Self::ReservationPreempted => 3,
        }
    }

    /// Bit of Reservation Notification Mask (feature 82h).
    pub(crate) const fn mask_bit(self) -> u32 {
        1 << self.to_wire()
    }
}

/// All bits of the mask.
pub(crate) const MASK: u32 = 0b1110;

/// Notifications kept; older ones are lost, which the count tells.
const KEPT: usize = 64;

/// Bytes of a page.
const PAGE: usize = 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct NotificationLog {
    count: u64,
    entries: VecDeque<(u64, Notified, u32)>,
}

impl NotificationLog {
    pub(crate) fn push(&mut self, what: Notified, nsid: u32) {
        self.count = self.count.checked_add(1).unwrap_or(1);
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back((self.count, what, nsid));
    }

    /// The host took the oldest one: whether there are more.
    pub(crate) fn pop(&mut self) -> bool {
        self.entries.pop_front();
        !self.entries.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Log Page Count, type, number of further pages, NSID; zeroes when there is nothing.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE);
        if let Some((count, what, nsid)) = self.entries.front() {
            let more = u8::try_from(self.entries.len() - 1).unwrap_or(u8::MAX);
            page.extend_from_slice(&count.to_le_bytes());
            page.extend_from_slice(&[what.to_wire(), more, 0, 0]);
            page.extend_from_slice(&nsid.to_le_bytes());
        }
        page.resize(PAGE, 0);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_oldest_first_and_count_what_was_lost() {
        let mut log = NotificationLog::default();
        assert_eq!(log.page(), [0; 64]);
        log.push(Notified::RegistrationPreempted, 7);
        log.push(Notified::ReservationReleased, 8);
        assert_eq!(log.page()[..16], [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 7, 0, 0, 0]);
        assert!(log.pop());
        assert_eq!(log.page()[..16], [2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 8, 0, 0, 0]);
        assert!(!log.pop());
        assert_eq!(log.page(), [0; 64]);
        (0..100).for_each(|nsid| log.push(Notified::ReservationPreempted, nsid));
        assert_eq!(log.page()[..16], [39, 0, 0, 0, 0, 0, 0, 0, 3, 63, 0, 0, 36, 0, 0, 0], "38 of 102 are gone");
    }
}
