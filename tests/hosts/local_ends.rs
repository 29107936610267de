//! Ends that meet a beginning: what fails in the middle of connecting, and a target that stops while hosts come or are gone.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farside::host::raw::RawQueue;
use farside::host::wire;
use farside::rdma::local::WorkKind;
use farside::target::Cause;

use crate::raw_ends::counted;
use crate::rig::{LIMIT, LocalRig, Raw, Rig, Setup, settles, until};

type LocalSetup = Setup<LocalRig>;

#[test]
fn shutdown_amid_connecting_hosts_leaves_nothing_behind() {
    for round in 0..8 {
        let mut setup = LocalSetup::start();
        let stop = AtomicBool::new(false);
        let (accepted, took) = std::thread::scope(|scope| {
            for identity in 1..=6 {
                let ((provider, source), address, stop) = (setup.rig.host(), setup.rig.address(), &stop);
                scope.spawn(move || {
                    let mut raw = Raw::<LocalRig>::open((provider, source), address, identity);
                    while !stop.load(Ordering::Acquire) {
                        let limit = Duration::from_millis(200);
                        let Ok((queue, _)) = raw.host.connect(address, RawQueue::new(0, 32), limit) else { continue };
                        // The Connect command too may meet the end.
                        let sqe = wire::connect(0, 31, 0).cid(1).sgl(wire::by_offset(0, 1024, 0x01));
                        let _ = raw.host.call(queue, &[&sqe.0[..], &raw.connect_data(0xffff)].concat(), limit);
                        raw.host.close(queue);
                    }
                });
            }
            let target = setup.target.take().expect("running");
            // Nothing may fail in here while the others do not know that they are to end.
            let begun = Instant::now();
            while target.counters().connections_accepted < 3 && begun.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_millis(1));
            }
            let accepted = target.counters().connections_accepted;
            std::thread::sleep(Duration::from_millis(3 * round));
            let started = Instant::now();
            target.shutdown();
            let took = started.elapsed();
            stop.store(true, Ordering::Release);
            (accepted, took)
        });
        assert!(accepted >= 3, "round {round}: {accepted} connections");
        assert!(took < Duration::from_secs(4), "round {round}: shutdown took {took:?}");
        settles(&setup.rig.local, "the target gone", |counters| {
            (counters.queue_pairs, counters.regions, counters.endpoints) == (0, 0, 0)
        });
    }
}

/// Each reactor takes a completion vector of its own, so that their interrupts are spread.
#[test]
fn reactors_take_completion_vectors_of_their_own() {
    let setup = LocalSetup::start();
    let (mut raw, _, _) = setup.ready();
    // Queues go to the reactors by turns: both have some by now.
    for qid in 2..=4 {
        raw.io_up(qid, 16);
    }
    assert_eq!(setup.rig.local.counters().vectors, 0b11, "the host's endpoint has the first, too");
}

#[test]
fn shutdown_does_not_wait_for_hosts_that_are_gone() {
    let mut setup = LocalSetup::start();
    let mut hosts = Vec::new();
    for identity in 1..=3 {
        let mut raw = setup.raw_as(identity);
        let (admin, io) = raw.bring_up();
        for queue in [admin, io] {
            let conn = raw.host.conn(queue).expect("connected");
            setup.rig.local.faults().cut(conn);
        }
        hosts.push(raw);
    }
    let started = Instant::now();
    setup.target.take().expect("running").shutdown();
    assert!(started.elapsed() < Duration::from_secs(6), "shutdown took {:?}", started.elapsed());
    drop(hosts);
    settles(&setup.rig.local, "the target gone", |counters| (counters.queue_pairs, counters.endpoints) == (0, 0));
}

#[test]
fn connect_whose_answer_is_lost_leaves_no_controller() {
    let setup = LocalSetup::start();
    let target = setup.target.as_ref().expect("running");
    for round in 0..10 {
        let mut raw = setup.raw();
        let admin = raw.good_queue(0, 32);
        let sqe = wire::connect(0, 31, 0).cid(1).sgl(wire::by_offset(0, 1024, 0x01));
        let capsule = [&sqe.0[..], &raw.connect_data(0xffff)].concat();
        // The second SEND from now is the response; the controller is there by then.
        setup.rig.local.faults().break_link_at(WorkKind::Send, 2);
        assert!(raw.host.call(admin, &capsule, Duration::from_millis(200)).is_err(), "round {round}: answered");
        until("the controller is forgotten", || {
            let counters = target.counters();
            (counters.controllers, counters.queues, counters.requests) == (0, 0, 0)
        });
    }
    let (mut raw, _, io) = setup.ready();
    raw.alive(io);
    assert_eq!(target.counters().controllers, 1);
}

/// What this process logs, from the one test that looks.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("sound").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn connection_that_could_not_be_made_is_one_line_with_its_ends_and_the_reason() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::WARN);
    subscriber.with_writer(move || writer.clone()).init();
    // On an address that no other test's lines have.
    let setup = LocalSetup::start();
    let address = setup.rig.another();
    setup.target.as_ref().expect("running").add_listener(address, None).expect("one more listener");
    let mut raw = setup.raw();
    raw.address = address;
    for (fail, reason) in [(true, "accept failed: "), (false, "connection rejected: ")] {
        match fail {
            true => setup.rig.local.faults().fail_accept(1),
            false => setup.rig.local.faults().fail_create(1),
        }
        let _ = raw.queue(RawQueue::new(0, 32));
        let local = format!("local={address}");
        until(&format!("{reason:?} is logged"), || {
            let text = String::from_utf8_lossy(&lines.0.lock().expect("sound")).into_owned();
            let ours: Vec<&str> = text.lines().filter(|line| line.contains(reason) && line.contains(&local)).collect();
            ours.len() == 1 && ours[0].contains("peer=") && ours[0].contains("qid=0")
        });
        counted(&setup, Cause::AcceptFailed, 1);
    }
}
