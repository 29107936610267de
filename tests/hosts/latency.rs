//! Latency histograms against what hosts measure themselves.

use std::time::{Duration, Instant};

use farside::target::{Latencies, LatencyReport, Stage};

use crate::rig::{BLOCK, LIMIT, Rig, Setup, until};

/// How long the storage stands still for a slow command: far beyond what a busy machine adds to a fast one.
const STALL: Duration = Duration::from_millis(300);
const COMMANDS: usize = 40;

fn report<R: Rig>(setup: &Setup<R>) -> LatencyReport {
    setup.target.as_ref().expect("running").latency()
}

fn of_namespace(report: &LatencyReport, nsid: u32) -> Latencies {
    let found = report.namespaces.iter().find(|(nqn, known, _)| nqn == crate::rig::NQN && *known == nsid);
    found.expect("the namespace").2.clone()
}

/// The response may be in the host's hands before the target knows that it was sent.
fn settled<R: Rig>(setup: &Setup<R>, count: u64) -> LatencyReport {
    let total = || of_namespace(&report(setup), 1).stage(Stage::Total).count();
    until(&format!("{count} commands, not {}", total()), || total() >= count);
    report(setup)
}

pub(crate) fn latencies_are_what_the_host_measures<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, _admin, io) = setup.ready();
    target.set_histograms(true);
    assert!(target.turns(LIMIT), "the reactors know");
    let before = report(&setup);
    let mut measured = Vec::new();
    for at in 0..COMMANDS {
        // Of ten commands three are slow.
        let slow = at % 10 >= 7;
        let faults = setup.faults.clone();
        if slow {
            faults.stall();
        }
        let release = std::thread::spawn(move || {
            std::thread::sleep(if slow { STALL } else { Duration::ZERO });
            faults.release();
        });
        let begun = Instant::now();
        raw.read(io, 1, 8 * at as u64, 8).expect("read");
        measured.push(begun.elapsed());
        release.join().expect("released");
    }
    let all = settled(&setup, COMMANDS as u64);
    let read = of_namespace(&all, 1);
    let counts = Stage::ALL.map(|stage| read.stage(stage).count());
    let all_of = COMMANDS as u64;
    assert_eq!(counts, [all_of, 0, all_of, all_of, 0, all_of], "receive, backend, write to host, total");
    // The parts are the whole.
    let parts: Duration = Stage::ALL[..5].iter().map(|stage| read.stage(*stage).sum()).sum();
    assert_eq!(parts, read.stage(Stage::Total).sum());
    // The slow ones were slow in the storage; where a quantile falls they are all alike.
    measured.sort_unstable();
    let total = read.stage(Stage::Total);
    let (fast, slow) = (measured[COMMANDS / 2 - 1], measured[COMMANDS * 9 / 10 - 1]);
    let slack = Duration::from_millis(100);
    assert!(total.quantile(0.5) <= fast + fast / 4 + slack, "{:?}, and the host {fast:?}", total.quantile(0.5));
    let found = total.quantile(0.9);
    assert!(found >= slow - slow / 4 - slack && found <= slow + slow / 4 + slack, "{found:?}, and the host {slow:?}");
    assert!(read.stage(Stage::Backend).quantile(0.9) >= STALL / 2, "{:?}", read.stage(Stage::Backend).quantile(0.9));
    assert!(read.stage(Stage::Receive).quantile(0.9) < STALL / 2, "{:?}", read.stage(Stage::Receive).quantile(0.9));
    let host: Duration = measured.iter().sum();
    let (mean, theirs) = (total.mean(), host / COMMANDS as u32);
    // Three of ten were slow.
    assert!(mean <= theirs + slack && mean >= STALL * 3 / 20, "a mean of {mean:?}, and the host {theirs:?}");
    // Writes of more than the capsule holds: fetched from the host, answered without data.
    for at in 0..5 {
        assert!(raw.write(io, 1, 64 * at, &[7; 16 * BLOCK]).is_success());
    }
    let all = settled(&setup, all_of + 5);
    let both = of_namespace(&all, 1);
    assert_eq!((both.stage(Stage::ReadFromHost).count(), both.stage(Stage::Send).count()), (5, 5));
    // The same by queue and by host; nothing where nobody was.
    assert!(of_namespace(&all, 2).is_empty() && of_namespace(&before, 1).is_empty());
    let queue = all.queues.iter().find(|queue| queue.qid == 1).expect("the queue");
    assert_eq!(queue.latencies.stage(Stage::Total).count(), all_of + 5);
    let hosts = all.hosts();
    assert_eq!((hosts.len(), hosts[0].0), (1, crate::rig::HOST_NQN));
    assert_eq!(hosts[0].1, queue.latencies);
}

pub(crate) fn histograms_are_off_until_asked_for<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, _admin, io) = setup.ready();
    let counted = || of_namespace(&report(&setup), 1).stage(Stage::Total).count();
    raw.read(io, 1, 0, 8).expect("read");
    assert!(!report(&setup).on && counted() == 0);
    target.set_histograms(true);
    assert!(target.turns(LIMIT), "the reactors know");
    raw.read(io, 1, 0, 8).expect("read");
    settled(&setup, 1);
    target.set_histograms(false);
    assert!(target.turns(LIMIT), "the reactors know");
    raw.read(io, 1, 0, 8).expect("read");
    raw.alive(io);
    assert_eq!(counted(), 1, "off means off");
    assert!(!report(&setup).on);
}
