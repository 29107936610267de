//! Changes of a running target: what a connected host sees of them, and what a refused change leaves behind.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use farside::backend::{self, BackendSpec, Memory, Null, Source};
use farside::host::raw::{RawQueue, RawQueueId};
use farside::host::wire::{self, Sqe};
use farside::target::{NamespaceSpec, Status as TargetStatus, SubsystemSpec, Traffic};
use nvme::Status;

use crate::rig::{BLOCK, DISCOVERY_NQN, HOST_NQN, LIMIT, NQN, OTHER_NQN, Raw, Rig, Setup, assert_status, until};

const ADDED: u32 = 9;
const SIZE: u64 = 1 << 20;

fn listed<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Vec<u32> {
    let (response, list) = raw.call_for(admin, wire::identify(2, 0, 0), 4096);
    assert!(response.status().is_success(), "{}", response.status());
    let ids = list.chunks(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")));
    ids.take_while(|nsid| *nsid != 0).collect()
}

fn blocks_of<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId, nsid: u32) -> u64 {
    let (response, identify) = raw.call_for(admin, wire::identify(0, nsid, 0), 4096);
    assert!(response.status().is_success(), "{}", response.status());
    u64::from_le_bytes(identify[..8].try_into().expect("8 bytes"))
}

/// Parks an Asynchronous Event Request.
fn park<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) {
    let cid = raw.cid();
    raw.host.send(admin, &Sqe::new(0x0c).cid(cid).0).expect("sent");
}

/// The event that answers the parked request is a notice of this kind; the log page that it names is read.
fn expect_notice<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId, information: u8, log: u8) {
    let event = raw.host.response(admin, LIMIT).expect("an event").dword0();
    assert_eq!((event as u8 & 7, (event >> 8) as u8, (event >> 16) as u8), (2, information, log), "{event:08x}");
    assert!(raw.call_for(admin, wire::get_log_page(log, 0, 0, 4096, false), 4096).0.status().is_success());
}

pub(crate) fn namespaces_come_and_go_under_load<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let bystander = setup.bystander();
    let (mut raw, admin, io) = setup.ready();
    let before = target.status();
    for round in 0..40u8 {
        park(&mut raw, admin);
        let disk = Arc::new(Memory::new(SIZE));
        target.add_namespace(NQN, &NamespaceSpec::new(ADDED, Arc::clone(&disk) as _)).expect("added");
        expect_notice(&mut raw, admin, 0, 4);
        assert_eq!(listed(&mut raw, admin), [1, 2, 3, ADDED]);
        assert!(raw.write(io, ADDED, 8, &[round; BLOCK]).is_success());
        assert_eq!(raw.read(io, ADDED, 8, 1).as_deref(), Ok(&[round; BLOCK][..]));
        park(&mut raw, admin);
        target.remove_namespace(NQN, ADDED).expect("removed");
        assert_eq!(Arc::strong_count(&disk), 1, "somebody still holds the storage");
        expect_notice(&mut raw, admin, 0, 4);
        assert_eq!(raw.read(io, ADDED, 8, 1), Err(Status::INVALID_NAMESPACE.dnr()));
        assert_eq!(listed(&mut raw, admin), [1, 2, 3]);
    }
    let after = target.status();
    assert_eq!(after.subsystems.len(), before.subsystems.len());
    assert_eq!(after.subsystems[0].namespaces.len(), 3);
    bystander.check();
}

pub(crate) fn removal_waits_for_commands_under_way<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, _admin, io) = setup.ready();
    // What came before is over, so that the one command that shows is this one.
    until("nothing is under way", || target.counters().requests == 0);
    setup.faults.stall();
    raw.host.send(io, &Sqe::new(0).nsid(1).cid(77).0).expect("sent");
    until("the command is in the backend", || target.counters().requests == 1);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| target.remove_namespace(NQN, 1));
        until("the namespace is not listed any more", || {
            let status = target.status();
            status.subsystems.iter().any(|one| one.nqn == NQN && one.namespaces.len() == 2)
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!removal.is_finished(), "removed with a command in its backend");
        raw.alive(io);
        setup.faults.release();
        let response = raw.host.response(io, LIMIT).expect("an answer");
        assert_eq!(response.cid(), 77);
        assert!(response.status().is_success(), "{}", response.status());
        removal.join().expect("no panic").expect("removed");
    });
    let status = raw.call(io, Sqe::new(0).nsid(1)).status();
    assert_eq!(status.code(), Status::INVALID_NAMESPACE.code());
}

pub(crate) fn grown_and_shrunk_storage_is_seen<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    let spec = BackendSpec::new(Source::File { path: path.clone(), size: Some(SIZE) });
    let backend = backend::open(&spec).expect("a backend");
    target.add_namespace(NQN, &NamespaceSpec::new(ADDED, backend)).expect("added");
    let (mut raw, admin, io) = setup.ready();
    let blocks = blocks_of(&mut raw, admin, ADDED);
    let block = SIZE / blocks;
    let at_end = |raw: &mut Raw<R>, slba: u64| {
        let sqe = wire::block_command(1, ADDED, slba, 1);
        raw.call_with(io, sqe, &vec![0x5a; block as usize]).status()
    };
    assert_eq!(at_end(&mut raw, blocks).code(), Status::LBA_OUT_OF_RANGE.code());
    let file = OpenOptions::new().write(true).open(&path).expect("the file");
    file.set_len(2 * SIZE).expect("grown");
    park(&mut raw, admin);
    assert_eq!(target.resize_namespace(NQN, ADDED).expect("resized"), 2 * blocks);
    expect_notice(&mut raw, admin, 0, 4);
    assert_eq!(blocks_of(&mut raw, admin, ADDED), 2 * blocks);
    assert!(at_end(&mut raw, 2 * blocks - 1).is_success());
    let mut stored = [0; 16];
    OpenOptions::new()
        .read(true)
        .open(&path)
        .expect("the file")
        .read_exact_at(&mut stored, 2 * SIZE - 16)
        .expect("read");
    assert_eq!(stored, [0x5a; 16]);
    file.set_len(SIZE / 2).expect("shrunk");
    park(&mut raw, admin);
    assert_eq!(target.resize_namespace(NQN, ADDED).expect("resized"), blocks / 2);
    expect_notice(&mut raw, admin, 0, 4);
    assert_eq!(at_end(&mut raw, blocks / 2).code(), Status::LBA_OUT_OF_RANGE.code());
    assert!(at_end(&mut raw, blocks / 2 - 1).is_success());
    // Nothing changed: nobody is told, nothing is done.
    assert_eq!(target.resize_namespace(NQN, ADDED).expect("the same"), blocks / 2);
    assert_eq!(raw.host.waiting(admin), 0);
}

pub(crate) fn subsystems_come_and_go_whole<R: Rig>() {
    const NEW: &str = "nqn.2026-11.io.farside:new";
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let bystander = setup.bystander();
    let mut watcher = setup.raw_as(3);
    watcher.subnqn = DISCOVERY_NQN.into();
    watcher.kato_ms = 120_000;
    let discovery = watcher.admin_up();
    assert!(watcher.call(discovery, Sqe::new(0x09).cdw(10, 0x0b).cdw(11, 1 << 31)).status().is_success());
    for _ in 0..10 {
        park(&mut watcher, discovery);
        let disk = Arc::new(Memory::new(SIZE));
        let spec = SubsystemSpec::new(NEW).namespace(NamespaceSpec::new(1, Arc::clone(&disk) as _));
        target.add_subsystem(&spec).expect("added");
        expect_notice(&mut watcher, discovery, 0xf0, 0x70);
        let mut raw = setup.raw_as(4);
        raw.subnqn = NEW.into();
        let (_, io) = raw.bring_up();
        assert!(raw.write(io, 1, 0, &[7; BLOCK]).is_success());
        park(&mut watcher, discovery);
        target.remove_subsystem(NEW).expect("removed");
        assert!(raw.host.end_of(io, LIMIT).is_some(), "its host stays connected");
        drop(spec);
        assert_eq!(Arc::strong_count(&disk), 1, "somebody still holds the storage");
        expect_notice(&mut watcher, discovery, 0xf0, 0x70);
    }
    bystander.check();
}

pub(crate) fn refused_changes_leave_everything_as_it_was<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let before = target.status();
    let null = || Arc::new(Null::new(SIZE)) as Arc<dyn backend::Backend>;
    let odd = Arc::new(Null::new(SIZE + 512)) as Arc<dyn backend::Backend>;
    let four_k = |backend| NamespaceSpec { block_size: Some(4096), ..NamespaceSpec::new(ADDED, backend) };
    let namespaces = [
        (NamespaceSpec::new(1, null()), "1"),
        (NamespaceSpec::new(0, null()), ""),
        (NamespaceSpec::new(5000, null()), "5000"),
        (four_k(odd), "multiple"),
    ];
    for (spec, says) in namespaces {
        let error = target.add_namespace(NQN, &spec).expect_err("refused").to_string();
        assert!(error.contains(says) && error.contains(NQN), "{error}");
    }
    assert!(target.add_namespace("nqn.2026-11.io.farside:none", &NamespaceSpec::new(1, null())).is_err());
    assert!(target.remove_namespace(NQN, 77).is_err());
    assert!(target.resize_namespace(NQN, 77).is_err());
    assert!(target.remove_subsystem("nqn.2026-11.io.farside:none").is_err());
    assert!(target.add_subsystem(&SubsystemSpec::new(OTHER_NQN)).is_err());
    assert!(target.add_subsystem(&SubsystemSpec::new("not a name")).is_err());
    let half = SubsystemSpec::new("nqn.2026-11.io.farside:half")
        .namespace(NamespaceSpec::new(1, null()))
        .namespace(NamespaceSpec::new(1, null()));
    assert!(target.add_subsystem(&half).is_err(), "two namespaces of one NSID");
    assert!(target.allow_host(NQN, "").is_err());
    assert!(target.add_listener(setup.rig.address(), None).is_err(), "listened on twice");
    assert!(target.remove_listener("192.0.2.77:4420".parse().expect("an address")).is_err());
    assert_eq!(target.status(), before);
    let (mut raw, _, io) = setup.ready();
    raw.alive(io);
}

pub(crate) fn hosts_are_let_in_and_put_out<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, admin, io) = setup.ready();
    target.allow_host(NQN, HOST_NQN).expect("allowed");
    target.set_allow_any_host(NQN, false).expect("only listed hosts");
    raw.alive(io);
    target.remove_host(NQN, HOST_NQN).expect("removed");
    assert!(raw.host.end_of(io, LIMIT).is_some() && raw.host.end_of(admin, LIMIT).is_some(), "it stays connected");
    let again = raw.good_queue(0, 32);
    let response = raw.connect_admin(again);
    assert_status(&response, Status::CONNECT_INVALID_HOST, "a host that is not listed");
    target.allow_host(NQN, HOST_NQN).expect("allowed");
    let _connected = setup.ready();
    // The operator's disconnect ends the association and nothing else.
    until("one controller", || target.status().controllers.len() == 1);
    assert_eq!(target.disconnect(HOST_NQN, Some(OTHER_NQN)), 0);
    assert_eq!(target.disconnect(HOST_NQN, Some(NQN)), 1);
    until("it is gone", || target.status().controllers.is_empty());
    let (mut raw, _, io) = setup.ready();
    raw.alive(io);
}

pub(crate) fn listeners_come_and_go<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let mut second = setup.rig.address();
    second.set_port(4421);
    target.add_listener(second, None).expect("listening");
    assert_eq!(target.status().listeners, [setup.rig.address(), second]);
    let mut raw = setup.raw();
    raw.address = second;
    let (_, io) = raw.bring_up();
    target.remove_listener(second).expect("closed");
    raw.alive(io);
    let mut late = setup.raw_as(5);
    late.address = second;
    assert!(late.queue(RawQueue::new(0, 32)).is_err(), "connected to a closed listener");
    target.add_listener(second, None).expect("listening again");
    let (_, io) = late.bring_up();
    late.alive(io);
}

pub(crate) fn status_tells_who_is_connected<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, _, io) = setup.ready();
    assert!(raw.write(io, 2, 0, &[1; 8 * BLOCK]).is_success());
    let status = target.status();
    let [controller] = &status.controllers[..] else { panic!("{:?}", status.controllers) };
    assert_eq!((controller.subnqn.as_str(), controller.hostnqn.as_str()), (NQN, HOST_NQN));
    assert_eq!((controller.cntlid, controller.hostid.into_bytes()), (raw.cntlid, [1; 16]));
    let mut qids: Vec<u16> = controller.queues.iter().map(|queue| queue.qid).collect();
    qids.sort_unstable();
    assert_eq!(qids, [0, 1]);
    assert!(controller.queues.iter().all(|queue| queue.idle < LIMIT));
    let subsystem = status.subsystems.iter().find(|one| one.nqn == NQN).expect("served");
    let two = &subsystem.namespaces[1];
    assert_eq!((two.nsid, two.blocks * u64::from(two.block_size)), (2, 64 << 20));
    assert_eq!((two.io.writes, two.io.bytes_written), (1, 8 * BLOCK as u64));
    // What failed counts too, for its queue and its host; and stays when the queue is gone.
    setup.faults.fail_next(1);
    assert!(raw.read(io, 1, 0, 1).is_err(), "a disk that fails");
    let mut expected = Traffic { writes: 1, bytes_written: 8 * BLOCK as u64, errors: 1, ..Traffic::default() };
    let host = |status: &TargetStatus| match &status.hosts[..] {
        [host] => (host.hostnqn.clone(), host.queues, host.io),
        others => panic!("{others:?}"),
    };
    let status = target.status();
    let one = status.controllers[0].queues.iter().find(|queue| queue.qid == 1).expect("connected");
    assert_eq!((one.io, host(&status)), (expected, (HOST_NQN.to_owned(), 2, expected)));
    raw.host.close(io);
    until("its queue is gone", || host(&target.status()).1 == 1);
    let io = raw.io_up(2, 16);
    assert_eq!(raw.read(io, 2, 0, 8).expect("a read").len(), 8 * BLOCK);
    (expected.reads, expected.bytes_read) = (1, 8 * BLOCK as u64);
    assert_eq!(host(&target.status()), (HOST_NQN.to_owned(), 2, expected));
}

/// What a host did is not forgotten while it is connected, whoever else comes and goes; and who did nothing leaves nothing behind.
pub(crate) fn figures_of_a_connected_host_outlive_those_of_others<R: Rig>() {
    let setup = Setup::<R>::start();
    let target = setup.target.as_ref().expect("running");
    let (mut raw, _, io) = setup.ready();
    assert!(raw.read(io, 2, 0, 1).is_ok());
    raw.host.close(io);
    let mut other = setup.raw_as(2);
    for number in 0..260u16 {
        other.hostnqn = format!("nqn.2014-08.org.example:host{number}");
        (other.hostid[0], other.hostid[1]) = (number as u8, 1 + (number >> 8) as u8);
        // The first three look around and go.
        let queues = if number < 3 {
            vec![other.admin_up()]
        } else {
            let (admin, io) = other.bring_up();
            assert!(other.read(io, 2, 0, 1).is_ok());
            vec![io, admin]
        };
        queues.into_iter().for_each(|queue| other.host.close(queue));
        until("all but the first host are gone", || target.counters().queues == 1);
    }
    let hosts = target.status().hosts;
    let read = Traffic { reads: 1, bytes_read: BLOCK as u64, ..Traffic::default() };
    let first = hosts.iter().find(|host| host.hostnqn == HOST_NQN).expect("connected");
    assert_eq!((first.queues, first.io), (1, read));
    assert!(hosts.iter().all(|host| host.io == read), "{hosts:?}");
    assert_eq!(hosts.len(), 256);
}
