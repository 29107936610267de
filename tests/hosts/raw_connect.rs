//! Connection requests and the Connect command.

use std::time::{Duration, Instant};

use farside::host::HostErrorKind;
use farside::host::raw::RawQueue;
use farside::host::wire;
use nvme::Status;

use crate::rig::{HOST_NQN, LIMIT, NQN, OTHER_NQN, Rig, SHORT_KATO, Setup, Silence, assert_status, within_short_kato};

fn private(bytes: &[u8]) -> RawQueue {
    RawQueue { private_data: bytes.to_vec(), ..RawQueue::new(0, 32) }
}

pub(crate) fn malformed_private_data_are_rejected_with_the_status_that_says_why<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let mut raw = setup.raw();
    let good = wire::private_data(0, 32, 31, 0);
    if !R::PADS {
        for len in [0, 4, 8, 10, 31] {
            assert_eq!(raw.rejected(private(&good[..len])), Some(1), "{len} bytes");
        }
    }
    let mut format = good;
    format[0] = 1;
    assert_eq!(raw.rejected(private(&format)), Some(2));
    format[..2].copy_from_slice(&[0, 1]);
    assert_eq!(raw.rejected(private(&format)), Some(2));
    for qid in [129, 65_535] {
        assert_eq!(raw.rejected(private(&wire::private_data(qid, 32, 31, 0))), Some(3), "qid {qid}");
    }
    for hsqsize in [0, 128, 1023, 65_534, 65_535] {
        assert_eq!(raw.rejected(private(&wire::private_data(0, 65_535, hsqsize, 0))), Some(4), "hsqsize {hsqsize}");
    }
    for hsqsize in [0, 1024, 65_534, 65_535] {
        assert_eq!(raw.rejected(private(&wire::private_data(1, 65_535, hsqsize, 0))), Some(4), "hsqsize {hsqsize}");
    }
    for hrqsize in [0, 1, 31] {
        assert_eq!(raw.rejected(private(&wire::private_data(0, hrqsize, 31, 0))), Some(5), "hrqsize {hrqsize}");
    }
    bystander.check();
}

pub(crate) fn sizes_have_both_sides_and_reserved_bytes_are_ignored<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    for (qid, hrqsize, hsqsize) in
        [(0, 2, 1), (0, 32, 31), (0, 128, 127), (128, 32, 31), (1, 1024, 1023), (1, 65_535, 31)]
    {
        let bytes = wire::private_data(qid, hrqsize, hsqsize, 0xbeef);
        let (id, reply) = raw.host.connect(raw.address, private(&bytes), LIMIT).expect("accepted");
        assert_eq!(wire_u16(&reply, 0), 0, "RECFMT");
        assert_eq!(wire_u16(&reply, 2), hsqsize + 1, "CRQSIZE");
        raw.host.close(id);
    }
    let mut padded = wire::private_data(0, 32, 31, 7).to_vec();
    padded[10..].fill(0xff);
    padded.resize(56, 0xff);
    assert_eq!(raw.rejected(private(&padded)), None);
}

fn wire_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn read_depth_zero_is_rejected_and_nobody_listening_is_told<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    let queue = RawQueue { responder_resources: 0, ..RawQueue::new(0, 32) };
    assert_eq!(raw.rejected(queue), Some(7));
    raw.address.set_port(4421);
    let error = raw.queue(RawQueue::new(0, 32)).expect_err("nobody listens");
    assert_eq!(error.kind, HostErrorKind::Refused { reason: 8, status: None });
}

/// What a failed Connect answers: IPO in the low half of Dword 0, IATTR above.
const IN_DATA: u32 = 1 << 16;

pub(crate) fn connect_command_names_the_field_that_is_wrong<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let mut raw = setup.raw();
    let admin = raw.good_queue(0, 32);
    let good = raw.connect_data(0xffff);
    let edit = |at: usize, bytes: &[u8]| {
        let mut data = good;
        data[at..at + bytes.len()].copy_from_slice(bytes);
        data
    };
    let connect = wire::connect(0, 31, 0);
    let cases = [
        ("empty host NQN", connect, edit(512, &[0; 256]), 512 | IN_DATA),
        ("host NQN without end", connect, edit(512, &[b'a'; 256]), 512 | IN_DATA),
        ("host NQN of 224 bytes", connect, edit(512, &[b'a'; 224]), 512 | IN_DATA),
        ("host ID of zeroes", connect, edit(0, &[0; 16]), IN_DATA),
        ("empty subsystem NQN", connect, edit(256, &[0; 256]), 256 | IN_DATA),
        ("subsystem NQN without end", connect, edit(256, &[b'n'; 256]), 256 | IN_DATA),
        ("unknown subsystem NQN", connect, edit(256, b"nqn.2026-11.io.farside:tesT"), 256 | IN_DATA),
        ("one byte", connect, edit(256, &[&b"n"[..], &[0; 255]].concat()), 256 | IN_DATA),
        ("controller ID that is not dynamic", connect, edit(16, &[5, 0]), 16 | IN_DATA),
        ("controller ID FFFEh", connect, edit(16, &[0xfe, 0xff]), 16 | IN_DATA),
        ("QID other than the private data's", wire::connect(1, 31, 0), good, 42),
        ("SQSIZE 0", wire::connect(0, 0, 0), good, 44),
        ("SQSIZE above HSQSIZE", wire::connect(0, 32, 0), good, 44),
        ("SQSIZE 65535", wire::connect(0, 65_535, 0), good, 44),
    ];
    for (what, sqe, data, field) in cases {
        let response = raw.call_with(admin, sqe, &data);
        assert_status(&response, Status::CONNECT_INVALID_PARAMETERS, what);
        assert_eq!(response.dword0(), field, "{what}");
        assert!(response.status().is_dnr(), "{what}: the same command can never succeed");
    }
    let response = raw.call_with(admin, connect.cdw(10, 1), &good);
    assert_status(&response, Status::CONNECT_INCOMPATIBLE_FORMAT, "record format 1");
    for len in [0usize, 16, 512, 1023] {
        let buffer = raw.host.take(1024).expect("memory");
        let sgl = raw.keyed(&buffer, len);
        let response = raw.call(admin, connect.sgl(sgl));
        assert_status(&response, Status::DATA_SGL_LENGTH_INVALID, "short data");
        raw.host.give(buffer);
    }
    // After all that the queue is as good as new.
    let response = raw.connect_admin(admin);
    assert!(response.status().is_success(), "{}", response.status());
    bystander.check();
}

pub(crate) fn io_connect_must_agree_with_its_admin_queue<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.admin_up();
    let mut other = setup.raw_as(2);
    other.subnqn = OTHER_NQN.into();
    other.admin_up();
    let io = raw.good_queue(1, 32);
    let good = raw.connect_data(raw.cntlid);
    let edit = |at: usize, bytes: &[u8]| {
        let mut data = good;
        data[at..at + bytes.len()].copy_from_slice(bytes);
        data
    };
    let cases = [
        ("controller ID FFFEh", edit(16, &[0xfe, 0xff]), 16 | IN_DATA),
        ("controller ID FFFFh", edit(16, &[0xff, 0xff]), 16 | IN_DATA),
        ("a controller of another subsystem", edit(16, &other.cntlid.to_le_bytes()), 16 | IN_DATA),
        ("other host NQN", edit(512, b"nqn.2014-08.org.nvmexpress:uuid:99"), 512 | IN_DATA),
        ("other host ID", edit(0, &[7; 16]), IN_DATA),
    ];
    for (what, data, field) in cases {
        let response = raw.call_with(io, wire::connect(1, 31, 0), &data);
        assert_status(&response, Status::CONNECT_INVALID_PARAMETERS, what);
        assert_eq!(response.dword0(), field, "{what}");
    }
    let response = raw.connect_io(io, 1, 31);
    assert!(response.status().is_success(), "{}", response.status());
    raw.alive(io);
    // The same queue once more, on another queue pair.
    let twin = raw.good_queue(1, 32);
    // It passes: the old queue may be about to close.
    assert_eq!(raw.connect_io(twin, 1, 31).status(), Status::COMMAND_SEQUENCE_ERROR, "queue 1 exists");
    raw.alive(io);
}

/// Queues that come one by one keep their association alive, and what comes when it is gone after all is told so.
pub(crate) fn io_connect_to_a_controller_that_is_gone_names_its_id<R: Rig>() {
    within_short_kato(comes_late::<R>);
}

fn comes_late<R: Rig>(silence: &mut Silence) {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.kato_ms = SHORT_KATO;
    let admin = silence.broken_by(|| raw.admin_up());
    let mut queues = Vec::new();
    // Three times the timeout, and nothing but Connect commands.
    for qid in 1..=6 {
        std::thread::sleep(Duration::from_millis(500));
        queues.push(silence.broken_by(|| raw.io_up(qid, 16)));
    }
    assert!(raw.host.down(admin).is_none(), "it was taken for dead while it made its queues");
    silence.begins();
    let late = raw.good_queue(7, 16);
    assert!(raw.host.end_of(admin, LIMIT).is_some(), "a silent host keeps its controller");
    let response = raw.connect_io(late, 7, 15);
    // Without Do Not Retry: the host may come back with a new association.
    assert_eq!((response.status(), response.dword0()), (Status::CONNECT_INVALID_PARAMETERS, 16 | IN_DATA));
}

pub(crate) fn only_connect_may_come_first_and_only_once<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    let admin = raw.good_queue(0, 32);
    for sqe in [wire::identify(1, 0, 0), wire::property_get(0, true), wire::block_command(1, 1, 0, 1)] {
        let buffer = raw.host.take(4096).expect("memory");
        let sgl = raw.keyed(&buffer, 4096);
        assert_status(&raw.call(admin, sqe.sgl(sgl)), Status::COMMAND_SEQUENCE_ERROR, "before Connect");
        raw.host.give(buffer);
    }
    assert!(raw.connect_admin(admin).status().is_success());
    let cntlid = raw.cntlid;
    assert_status(&raw.connect_admin(admin), Status::COMMAND_SEQUENCE_ERROR, "a second Connect");
    raw.cntlid = cntlid;
    // Before it is enabled the controller takes no I/O queue's commands and no admin command but a few.
    let (response, _) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert_eq!(response.status(), Status::COMMAND_SEQUENCE_ERROR.dnr(), "Identify while CC.EN is 0");
    raw.enable(admin);
    let (response, _) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert!(response.status().is_success(), "{}", response.status());
}

/// Both find no association when they arrive, and their data are fetched.
pub(crate) fn of_two_connect_commands_at_once_one_counts<R: Rig>() {
    let setup = Setup::<R>::start();
    for round in 0..4u16 {
        let mut raw = setup.raw();
        let admin = raw.good_queue(0, 32);
        let data = raw.connect_data(0xffff);
        let mut buffer = raw.host.take(data.len()).expect("memory");
        buffer.as_mut_slice().copy_from_slice(&data);
        let sgl = raw.keyed(&buffer, data.len());
        for cid in [1, 2] {
            raw.host.post(admin, &wire::connect(0, 31, 0).cid(cid).sgl(sgl).0).expect("posted");
        }
        let answers = [(); 2].map(|()| raw.host.response(admin, LIMIT).expect("an answer"));
        let good = answers.iter().filter(|answer| answer.status().is_success()).count();
        assert_eq!(good, 1, "round {round}");
        let refused = answers.iter().find(|answer| !answer.status().is_success()).expect("one");
        assert_status(refused, Status::COMMAND_SEQUENCE_ERROR.dnr(), "the second Connect");
        raw.host.give(buffer);
        drop(raw);
        let target = setup.target.as_ref().expect("running");
        crate::rig::until("controllers gone", || target.counters().controllers == 0);
    }
}

pub(crate) fn odd_host_names_may_connect<R: Rig>() {
    let setup = Setup::<R>::start();
    let names = [
        "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5".to_string(),
        "h".to_string(),
        "a".repeat(223),
        "not an nqn at all \u{e9}".to_string(),
    ];
    for (at, name) in names.into_iter().enumerate() {
        let mut raw = setup.raw_as(at as u8 + 1);
        raw.hostnqn = name;
        let (_, io) = raw.bring_up();
        raw.alive(io);
    }
    // Bytes after the NUL mean nothing.
    let mut raw = setup.raw_as(9);
    raw.subnqn = format!("{NQN}\0junk");
    raw.hostnqn = format!("{HOST_NQN}\0junk");
    raw.bring_up();
}

pub(crate) fn connect_data_in_the_capsule_work<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    let admin = raw.good_queue(0, 32);
    let sqe = wire::connect(0, 31, 0).cid(9).sgl(wire::by_offset(0, 1024, 0x01));
    let capsule = [&sqe.0[..], &raw.connect_data(0xffff)].concat();
    let response = raw.host.call(admin, &capsule[..1087], LIMIT).expect("an answer");
    assert_eq!(response.status(), Status::DATA_SGL_LENGTH_INVALID.dnr(), "one byte short");
    let response = raw.host.call(admin, &capsule, LIMIT).expect("an answer");
    assert!(response.status().is_success(), "{}", response.status());
}

pub(crate) fn two_hundred_connections_at_once_and_nothing_is_left<R: Rig>() {
    let mut options = crate::rig::small();
    options.receive_slots = 8192;
    let setup = Setup::<R>::with(R::new(), options);
    let bystander = setup.bystander();
    let mut raw = setup.raw();
    for round in 0..3 {
        let started = Instant::now();
        let ids: Vec<_> = (0..200)
            .map(|_| {
                let queue = RawQueue { capsule: 64, entries: 4, ..RawQueue::new(0, 32) };
                raw.host.start_connect(raw.address, queue, LIMIT).expect("asked for")
            })
            .collect();
        for id in &ids {
            raw.host.finish_connect(*id, LIMIT).unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        for (at, id) in ids.iter().enumerate() {
            raw.hostid = [at as u8 + 1; 16];
            let response = raw.connect_admin(*id);
            assert!(response.status().is_success(), "round {round}, host {at}: {}", response.status());
        }
        for id in ids {
            raw.host.close(id);
        }
        assert!(started.elapsed() < Duration::from_secs(30), "round {round} took {:?}", started.elapsed());
    }
    // All of it is free again: a queue of the largest size still fits.
    let deadline = Instant::now() + LIMIT;
    while raw.rejected(RawQueue { capsule: 64, ..RawQueue::new(1, 1024) }).is_some() {
        assert!(Instant::now() < deadline, "the receives of closed connections never came back");
        std::thread::sleep(Duration::from_millis(10));
    }
    bystander.check();
}
