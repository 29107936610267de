//! Why queues ended, as the target tells it.

use std::time::Duration;

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use farside::target::{Admission, Cause, Disconnect, Duplicates, Options};

use crate::rig::{HOST_NQN, LIMIT, NQN, OTHER_NQN, Raw, Rig, Setup, small, until};

/// Waits until a cause was counted this often; the latest ends.
pub(crate) fn counted<R: Rig>(setup: &Setup<R>, cause: Cause, count: u64) -> Vec<Disconnect> {
    let target = setup.target.as_ref().expect("running");
    until(&format!("{count} of {cause:?}"), || target.counters().ends.of(cause) >= count);
    assert_eq!(target.counters().ends.of(cause), count, "{cause:?}");
    target.disconnects()
}

fn total<R: Rig>(setup: &Setup<R>) -> u64 {
    let ends = setup.target.as_ref().expect("running").counters().ends;
    Cause::ALL.iter().map(|cause| ends.of(*cause)).sum()
}

pub(crate) fn queues_tell_why_they_ended<R: Rig>() {
    let setup = Setup::<R>::start();
    // The host closes its only queue: it asked.
    let mut raw = setup.raw();
    let admin = raw.admin_up();
    raw.host.close(admin);
    let ends = counted(&setup, Cause::HostDisconnected, 1);
    assert_eq!(ends[0].hostnqn.as_deref(), Some(HOST_NQN));
    assert_eq!(ends[0].controller, Some((NQN.into(), raw.cntlid)));
    assert_eq!((ends[0].cause, ends[0].queues), (Cause::HostDisconnected, 1));
    // Its I/O queue broke the rules: a capsule of 16 bytes. The admin queue stays.
    let (mut raw, admin, io) = setup.ready();
    raw.host.send(io, &[0; 16]).expect("sent");
    let ends = counted(&setup, Cause::RefusedCapsule, 1);
    assert_eq!(ends[0].controller, Some((NQN.into(), raw.cntlid)));
    assert!(ends[0].detail.contains("shorter than 64 bytes"), "{}", ends[0].detail);
    // A reset of the controller ends its other I/O queue.
    let _io = raw.io_up(2, 32);
    assert!(raw.call(admin, wire::property_set(0x14, 0x0046_0000)).status().is_success());
    counted(&setup, Cause::ControllerReset, 1);
    // A key that the host never gave: what its device said of it is told.
    raw.enable(admin);
    let io = raw.io_up(3, 32);
    let (cid, before) = (raw.cid(), total(&setup));
    let buffer = raw.host.take(4096).expect("host memory");
    let sgl = wire::keyed(buffer.addr(), 4096, raw.host.rkey() ^ 0x0055_0000, false);
    raw.host.send(io, &wire::block_command(1, 1, 0, 8).cid(cid).sgl(sgl).0).expect("sent");
    let target = setup.target.as_ref().expect("running");
    assert!(raw.host.end_of(io, LIMIT).is_some(), "the host's device refuses the key");
    until("the end of that queue", || total(&setup) > before);
    let ends = target.disconnects();
    // Over a network the host, which refused it, may say goodbye before its refusal is seen here.
    let goodbye = R::PADS && ends[0].cause == Cause::HostDisconnected;
    if !goodbye {
        assert_eq!(ends[0].cause, Cause::RemoteAccess, "{ends:?}");
    }
    // The operator disconnects the host: the admin queue is what is left of it.
    let before = total(&setup);
    assert_eq!(target.disconnect(HOST_NQN, None), 1);
    counted(&setup, Cause::Operator, 1);
    assert_eq!(total(&setup), before + 1);
    assert_eq!(target.disconnects()[0].cause, Cause::Operator);
    raw.host.give(buffer);
}

pub(crate) fn keep_alive_shutdown_and_stop_are_told_apart<R: Rig>() {
    let mut setup = Setup::<R>::with(R::new(), small());
    let mut silent = setup.raw_as(1);
    silent.kato_ms = 1000;
    let _admin = silent.admin_up();
    let mut other = setup.raw_as(2);
    let (admin, _io) = other.bring_up();
    // Both of the host's queues would end with its controller; the admin queue is the only one.
    let ends = counted(&setup, Cause::KeepAliveExpired, 1);
    assert_eq!(ends[0].cause, Cause::KeepAliveExpired);
    // A normal shutdown (CC.SHN = 01b) ends the I/O queue alone.
    assert!(other.call(admin, wire::property_set(0x14, 0x0046_4001)).status().is_success());
    counted(&setup, Cause::ControllerShutdown, 1);
    let target = setup.target.take().expect("running");
    assert_eq!(target.counters().ends.of(Cause::TargetStops), 0);
    drop(target);
}

/// A queue of this host ends, and that is counted for this cause, once.
fn ends<R: Rig>(setup: &Setup<R>, raw: &mut Raw<R>, queue: RawQueueId, cause: Cause) {
    assert!(raw.host.end_of(queue, LIMIT).is_some(), "{cause:?}: it does not end");
    counted(setup, cause, 1);
}

pub(crate) fn commands_replacements_and_operators_are_told_apart<R: Rig>() {
    // A target of its own: a second is short for those below, wherever they have to wait for a processor.
    let impatient = Setup::<R>::with(R::new(), Options { connect_timeout: Duration::from_secs(1), ..small() });
    let mut silent = impatient.raw_as(9);
    let queue = silent.good_queue(0, 32);
    ends(&impatient, &mut silent, queue, Cause::NeverConnected);
    drop((silent, impatient));
    let setup = Setup::<R>::with(R::new(), Options { subsystem_reset: true, ..small() });
    let target = setup.target.as_ref().expect("running");
    // The Disconnect command of an I/O queue; then the admin queue goes and takes the other one along.
    let (mut raw, admin, io) = setup.ready();
    raw.host.send(io, &Sqe::fabrics(0x08).cid(1).0).expect("sent");
    ends(&setup, &mut raw, io, Cause::DisconnectCommand);
    let io = raw.io_up(2, 32);
    raw.host.close(admin);
    ends(&setup, &mut raw, io, Cause::AdminQueueClosed);
    // The same host once more takes its own place.
    let admission = Admission { duplicates: Duplicates::Replace, ..Admission::default() };
    target.set_admission(NQN, admission).expect("set");
    let mut old = setup.raw();
    let replaced = old.admin_up();
    let mut new = setup.raw();
    let admin = new.admin_up();
    ends(&setup, &mut old, replaced, Cause::Replaced);
    // NSSR ends the queues of others; its own is answered and disconnected.
    let mut other = setup.raw_as(3);
    other.hostnqn = "nqn.2014-08.org.example:other".into();
    let reset = other.admin_up();
    assert!(new.call(admin, wire::property_set(0x20, 0x4e56_4d65)).status().is_success());
    ends(&setup, &mut other, reset, Cause::SubsystemReset);
    assert!(new.host.end_of(admin, LIMIT).is_some(), "who reset it stays connected");
    target.allow_host(NQN, HOST_NQN).expect("allowed");
    target.set_allow_any_host(NQN, false).expect("only listed hosts");
    let mut raw = setup.raw();
    let admin = raw.admin_up();
    target.remove_host(NQN, HOST_NQN).expect("removed");
    ends(&setup, &mut raw, admin, Cause::HostRemoved);
    let mut raw = setup.raw();
    raw.subnqn = OTHER_NQN.into();
    let admin = raw.admin_up();
    target.remove_subsystem(OTHER_NQN).expect("removed");
    ends(&setup, &mut raw, admin, Cause::SubsystemRemoved);
}
