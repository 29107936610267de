//! What was done, in commands and bytes: counted by the one reactor that does it, added up by whoever asks.

use std::collections::VecDeque;
use std::iter::Sum;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme::io::IoCommand;
use nvme::zns::ZoneCommand;

use crate::backend::IoError;

/// What hosts did with something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read and Compare commands whose data were read; also those of a Compare that found others.
    pub reads: u64,
    /// Bytes of those.
    pub bytes_read: u64,
    /// Write and Zone Append commands that succeeded.
    pub writes: u64,
    /// Bytes of those.
    pub bytes_written: u64,
    /// Commands of any kind that the backend failed; those that hosts had cancelled are none of them.
    pub errors: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.bytes_read += other.bytes_read;
        self.writes += other.writes;
        self.bytes_written += other.bytes_written;
        self.errors += other.errors;
    }
}

impl Sum for Traffic {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// Counters with one writer, the reactor that does the work.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    reads: AtomicU64,
    writes: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    errors: AtomicU64,
    /// Those of the errors that the medium is to blame for.
    media_errors: AtomicU64,
}

impl Tally {
    /// A command of `bytes` ended in the backend: counts for its namespace and for its queue.
    #[inline]
    pub(crate) fn count(both: [&Self; 2], command: &IoCommand, bytes: u32, result: Result<(), IoError>) {
        if let Err(error) = result {
            return both.into_iter().for_each(|one| one.count_error(error));
        }
        match command {
            IoCommand::Read { .. } | IoCommand::Compare { .. } => both.into_iter().for_each(|one| {
                add(&one.reads, 1);
                add(&one.bytes_read, bytes.into());
            }),
            IoCommand::Write { .. } | IoCommand::Zone(ZoneCommand::Append { .. }) => {
                both.into_iter().for_each(|one| {
                    add(&one.writes, 1);
                    add(&one.bytes_written, bytes.into());
                });
            }
            _ => {}
        }
    }

    #[cold]
    fn count_error(&self, error: IoError) {
        let media = match error {
            IoError::Read | IoError::Write | IoError::Other(_) => 1,
            // Its host had it ended.
            IoError::Cancelled => return,
            IoError::NoSpace
            | IoError::OutOfRange
            | IoError::ReadOnly
            | IoError::Unsupported
            | IoError::Gone
            | IoError::OpenZones
            | IoError::ActiveZones
            | IoError::Reservation => 0,
        };
        add(&self.errors, 1);
        add(&self.media_errors, media);
    }

    /// Commands so far that the medium failed.
    pub(crate) fn media_errors(&self) -> u64 {
        self.media_errors.load(Ordering::Relaxed)
    }

    /// What was counted so far.
    pub(crate) fn traffic(&self) -> Traffic {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            reads: get(&self.reads),
            bytes_read: get(&self.bytes_read),
            writes: get(&self.writes),
            bytes_written: get(&self.bytes_written),
            errors: get(&self.errors),
        }
    }
}

/// Adds without a locked instruction: one writer.
#[inline]
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// How many hosts are remembered; more only where that many are connected.
const REMEMBERED: usize = 256;

/// What was done on queues that ended, by host. Of hosts that have no queue any more, those that came last: one that invents names
/// for itself, and does something under each, pushes out the past of others that are gone, and takes no more memory.
#[derive(Debug, Default)]
pub(crate) struct Past(VecDeque<(String, Traffic)>);

impl Past {
    /// A queue of this host ended. One that was never heard of and did nothing is not remembered, and one that is connected is not
    /// forgotten, as its figures would fall.
    pub(crate) fn note(&mut self, host: &str, traffic: Traffic, is_connected: impl Fn(&str) -> bool) {
        let known = self.0.iter().position(|(known, _)| known == host).and_then(|at| self.0.remove(at));
        if known.is_none() && traffic == Traffic::default() {
            return;
        }
        let (name, mut sum) = known.unwrap_or_else(|| (host.to_owned(), Traffic::default()));
        sum += traffic;
        if self.0.len() >= REMEMBERED
            && let Some(gone) = self.0.iter().position(|(host, _)| !is_connected(host))
        {
            self.0.remove(gone);
        }
        self.0.push_back((name, sum));
    }

    /// Each host with what it did.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Traffic)> {
        self.0.iter().map(|(host, traffic)| (host.as_str(), *traffic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Traffic = Traffic { reads: 1, bytes_read: 512, writes: 0, bytes_written: 0, errors: 0 };

    #[test]
    fn past_adds_up_by_host_and_keeps_the_latest() {
        let mut past = Past::default();
        let mut note = |host: &str, traffic| past.note(host, traffic, |_| false);
        note("old", ONE);
        (0..REMEMBERED).for_each(|at| note(&format!("host {at}"), ONE));
        note("host 0", ONE);
        note("new", Traffic { errors: 3, ..Traffic::default() });
        let all: Vec<_> = past.iter().collect();
        assert_eq!(all.len(), REMEMBERED);
        let of = |host: &str| all.iter().find(|(known, _)| *known == host).map(|(_, traffic)| *traffic);
        assert_eq!(of("host 0"), Some(Traffic { reads: 2, bytes_read: 1024, ..Traffic::default() }));
        assert_eq!((of("old"), of("host 1")), (None, None), "the longest gone make room");
        assert_eq!(of("new").map(|traffic| traffic.errors), Some(3));
    }

    #[test]
    fn past_of_connected_hosts_outlives_that_of_those_who_are_gone() {
        let mut past = Past::default();
        let mut note = |host: &str, traffic| past.note(host, traffic, |host| host.starts_with("connected"));
        note("connected", ONE);
        (0..2 * REMEMBERED).for_each(|at| note(&format!("host {at}"), ONE));
        note("connected", ONE);
        note("connected too", ONE);
        let all: Vec<_> = past.iter().collect();
        assert_eq!(all.len(), REMEMBERED);
        assert_eq!(
            all[REMEMBERED - 2..],
            [("connected", Traffic { reads: 2, bytes_read: 1024, ..ONE }), ("connected too", ONE)]
        );
        // Nobody is gone: all are kept.
        let mut past = Past::default();
        (0..=REMEMBERED).for_each(|at| past.note(&format!("host {at}"), ONE, |_| true));
        assert_eq!(past.iter().count(), REMEMBERED + 1);
    }

    #[test]
    fn who_did_nothing_pushes_nobody_out() {
        let mut past = Past::default();
        let mut note = |host: &str, traffic| past.note(host, traffic, |_| false);
        note("old", ONE);
        (0..REMEMBERED).for_each(|at| note(&format!("host {at}"), Traffic::default()));
        note("old", Traffic::default());
        assert_eq!(past.iter().collect::<Vec<_>>(), [("old", ONE)]);
    }

    #[test]
    fn both_sides_of_a_command_are_counted() {
        let (namespace, queue) = (Tally::default(), Tally::default());
        let write = IoCommand::Write { slba: 0, blocks: 8, fua: false };
        Tally::count([&namespace, &queue], &write, 4096, Ok(()));
        Tally::count([&namespace, &queue], &write, 4096, Err(IoError::Write));
        let expected = Traffic { writes: 1, bytes_written: 4096, errors: 1, ..Traffic::default() };
        assert_eq!((namespace.traffic(), queue.traffic()), (expected, expected));
    }

    #[test]
    fn what_hosts_cancel_is_no_error_and_what_they_may_not_none_of_the_medium() {
        let counted = |error| {
            let (namespace, queue) = (Tally::default(), Tally::default());
            Tally::count([&namespace, &queue], &IoCommand::Flush, 0, Err(error));
            assert_eq!(namespace.traffic(), queue.traffic());
            (namespace.traffic().errors, namespace.media_errors())
        };
        use IoError as E;
        assert_eq!(counted(E::Cancelled), (0, 0));
        assert_eq!([E::Read, E::Write, E::Other(5)].map(counted), [(1, 1); 3]);
        let others = [E::NoSpace, E::OutOfRange, E::ReadOnly, E::Unsupported, E::Gone, E::OpenZones, E::ActiveZones];
        assert_eq!(others.map(counted), [(1, 0); 7]);
        assert_eq!(counted(E::Reservation), (1, 0));
    }
}
