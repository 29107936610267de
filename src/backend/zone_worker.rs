//! The thread of a zoned device: what is asked about zones, one thing at a time.
//!
//! What is about a few zones goes first. Reports may be about all of them, and hosts can ask for many at once: the device is asked
//! once for all that wait, a piece at a time, and the others have their turn between the pieces.

use std::iter;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, select, unbounded};

use super::open_file::OpenFile;
use super::{IoDone, IoError, Waker, ZoneWork};

/// What the thread is to do. It keeps the device open until that is done.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) file: Arc<OpenFile>,
    pub(super) token: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) work: ZoneWork,
    pub(super) answer: Sender<IoDone>,
    pub(super) waker: Waker,
}

impl Job {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    fn answer(self, result: Result<(), IoError>) {
        let Self { file, token, answer, waker, .. } = self;
        drop(file);
        let _ = answer.send(IoDone { token, result, data: None });
        waker.wake();
    }
}

/// Where jobs are brought.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    single: Sender<Job>,
    reports: Sender<Job>,
    zone_size: u64,
}

/// Where the thread takes them from.
#[derive(Debug)]
pub(super) struct Todo {
    single: Receiver<Job>,
    reports: Receiver<Job>,
    piece: u64,
}

/// Both ends, for zones of so many bytes, which are looked at so many at a time.
pub(super) fn jobs(zone_size: u64, piece: u64) -> (Jobs, Todo) {
    let ((single, ones), (reports, several)) = (unbounded(), unbounded());
    (Jobs { single, reports, zone_size }, Todo { single: ones, reports: several, piece: piece * zone_size })
}

impl Jobs {
    /// Whether there is a thread that will do it.
    pub(super) fn send(&self, job: Job) -> bool {
        let is_report = job.work == ZoneWork::Look && job.len > self.zone_size;
        let line = if is_report { &self.reports } else { &self.single };
        line.send(job).is_ok()
    }
}

impl Todo {
    /// Has `run` do what is asked, until nobody can ask any more.
    pub(super) fn work(&self, mut run: impl FnMut(&OpenFile, u64, u64, ZoneWork) -> Result<(), IoError>) {
        loop {
            self.run_single(&mut run);
            if let Ok(job) = self.reports.try_recv() {
                self.report(job, &mut run);
                continue;
            }
            select! {
                recv(self.single) -> job => match job {
                    Ok(job) => run_one(job, &mut run),
                    Err(_) => return,
                },
                recv(self.reports) -> job => if let Ok(job) = job {
                    self.report(job, &mut run);
                },
            }
        }
    }

    /// All that waits now; not what comes meanwhile, or reports could wait for ever.
    fn run_single(&self, run: &mut impl FnMut(&OpenFile, u64, u64, ZoneWork) -> Result<(), IoError>) {
        let count = self.single.len();
        self.single.try_iter().take(count).for_each(|job| run_one(job, run));
    }

    /// This report, and all others that were asked for by now.
    fn report(&self, first: Job, run: &mut impl FnMut(&OpenFile, u64, u64, ZoneWork) -> Result<(), IoError>) {
        let mut waiting: Vec<Report> = iter::once(first).chain(self.reports.try_iter()).map(Report::new).collect();
        while let Some(at) = waiting.iter().map(|report| report.next).min() {
            let here = waiting.iter().filter(|report| report.next == at);
            let end = here.map(|report| report.job.end()).max().unwrap_or(at).min(at.saturating_add(self.piece));
            let file = Arc::clone(&waiting[0].job.file);
            let result = run(&file, at, end - at, ZoneWork::Look);
            drop(file);
            for report in waiting.iter_mut().filter(|report| report.next < end) {
                (report.next, report.outcome) = (end, report.outcome.and(result));
            }
            let over = waiting.extract_if(.., |report| report.next >= report.job.end());
            over.for_each(|Report { job, outcome, .. }| job.answer(outcome));
            self.run_single(run);
        }
    }
}

/// A report that is being looked for.
struct Report {
    job: Job,
    /// Where it goes on.
    next: u64,
    outcome: Result<(), IoError>,
}

impl Report {
    fn new(job: Job) -> Self {
        Self { next: job.offset, job, outcome: Ok(()) }
    }
}

fn run_one(job: Job, run: &mut impl FnMut(&OpenFile, u64, u64, ZoneWork) -> Result<(), IoError>) {
    let result = run(&job.file, job.offset, job.len, job.work);
    job.answer(result);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::open_file::Kind;
    use nvme::zns::ZoneAction;

    const ZONE: u64 = 1 << 20;
    const LOOK: ZoneWork = ZoneWork::Look;
    const RESET: ZoneWork = ZoneWork::Act(ZoneAction::Reset);

    /// Tokens, and whether what they are of was done.
    type Answers = Vec<(u64, bool)>;

    /// What the thread did, in zones, and what was answered, in order; `error` at one zone. With `late`, that comes in the middle.
    fn done(
        asked: &[(u64, u64, ZoneWork)],
        late: Option<(u64, u64, ZoneWork)>,
        bad: u64,
    ) -> (Vec<(u64, u64)>, Answers) {
        let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap(), Kind::File, false, None, 0));
        let (jobs, todo) = jobs(ZONE, 8);
        let (answer, answers) = unbounded();
        let job = |token: u64, (zone, count, work): (u64, u64, ZoneWork)| Job {
            file: Arc::clone(&file),
            token,
            offset: zone * ZONE,
            len: count * ZONE,
            work,
            answer: answer.clone(),
            waker: Waker::new(|| {}),
        };
        assert!((0u64..).zip(asked).all(|(token, asked)| jobs.send(job(token, *asked))));
        let mut late = late.map(|asked| (job(99, asked), jobs.clone()));
        drop(jobs);
        let mut ran = Vec::new();
        todo.work(|_, offset, len, _| {
            if let Some((job, jobs)) = late.take() {
                assert!(jobs.send(job));
            }
            let (zone, count) = (offset / ZONE, len / ZONE);
            ran.push((zone, count));
            if (zone..zone + count).contains(&bad) { Err(IoError::Read) } else { Ok(()) }
        });
        (ran, answers.try_iter().map(|done| (done.token, done.result.is_ok())).collect())
    }

    #[test]
    fn reports_share_one_look_and_single_zones_go_before_them() {
        let asked = [(0, 20, LOOK), (0, 20, LOOK), (4, 10, LOOK), (5, 1, LOOK), (6, 2, RESET), (0, 20, LOOK)];
        let (ran, answered) = done(&asked, Some((7, 1, RESET)), u64::MAX);
        assert_eq!(ran, [(5, 1), (6, 2), (0, 8), (7, 1), (8, 8), (16, 4)]);
        let tokens: Vec<u64> = answered.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [3, 4, 99, 2, 0, 1, 5]);
    }

    #[test]
    fn single_zones_have_their_turn_in_the_middle_of_a_report() {
        let (ran, answered) = done(&[(0, 20, LOOK)], Some((7, 1, RESET)), u64::MAX);
        assert_eq!(ran, [(0, 8), (7, 1), (8, 8), (16, 4)]);
        assert_eq!(answered, [(99, true), (0, true)]);
    }

    #[test]
    fn reports_that_lie_apart_are_not_joined_and_fail_each_for_itself() {
        let asked = [(30, 2, LOOK), (0, 2, LOOK), (29, 2, LOOK), (50, 9, LOOK)];
        let (ran, answered) = done(&asked, None, 31);
        assert_eq!(ran, [(0, 2), (29, 2), (31, 1), (50, 8), (58, 1)]);
        assert_eq!(answered, [(1, true), (2, true), (0, false), (3, true)]);
    }
}
