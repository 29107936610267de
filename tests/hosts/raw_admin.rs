//! Admin commands: log pages, features, identify, events, aborts, properties, the discovery controller.

use std::time::{Duration, Instant};

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use nvme::Status;

use crate::rig::{DISCOVERY_NQN, LIMIT, NQN, OTHER_NQN, Raw, Rig, Setup, assert_status, until};

pub(crate) fn log_pages_serve_any_window_and_refuse_bad_offsets<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.subnqn = DISCOVERY_NQN.into();
    let admin = raw.admin_up();
    let (response, head) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, 1024, false), 1024);
    assert!(response.status().is_success(), "{}", response.status());
    let count = u64::from_le_bytes(head[8..16].try_into().expect("8 bytes")) as usize;
    assert!(count >= 2, "{count} entries");
    let total = (count + 1) * 1024;
    let (response, whole) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, total as u32, false), total);
    assert!(response.status().is_success(), "{}", response.status());
    let entries: Vec<_> =
        whole[1024..].chunks(1024).map(|bytes| wire::DiscoveryEntry::read(bytes).expect("an entry")).collect();
    for nqn in [NQN, OTHER_NQN] {
        let entry = entries.iter().find(|entry| entry.subnqn == nqn).expect("listed");
        assert_eq!((entry.trtype, entry.subtype, entry.cntlid), (1, 2, 0xffff));
        assert_eq!(entry.address(), Some(setup.rig.address()));
    }
    let end = total as u64;
    for (offset, len) in
        [(0, 16), (0, 1024), (1024, 1024), (512, 1024), (1020, 8), (end - 4, 4), (4, 4), (end - 1024, 1024)]
    {
        let (response, bytes) = raw.call_for(admin, wire::get_log_page(0x70, 0, offset, len, true), len as usize);
        assert!(response.status().is_success(), "{len} at {offset}: {}", response.status());
        assert_eq!(bytes, whole[offset as usize..offset as usize + len as usize], "{len} at {offset}");
    }
    for offset in [1, 2, 3, 1023, end + 4, u64::MAX - 3, u64::MAX] {
        let (response, _) = raw.call_for(admin, wire::get_log_page(0x70, 0, offset, 16, true), 16);
        assert_status(&response, Status::INVALID_FIELD, &format!("offset {offset:x}"));
    }
    // The last bytes of the log, and more asked for than there is.
    let (response, bytes) = raw.call_for(admin, wire::get_log_page(0x70, 0, end - 4, 8, true), 8);
    assert!(response.status().is_success(), "{}", response.status());
    assert_eq!(bytes, [&whole[total - 4..], &[0; 4]].concat(), "what lies past the end is zero");
    // A length of 16 GiB, beyond MDTS, and one that the descriptor does not hold.
    let (response, _) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, 0, true), 4096);
    assert_eq!(response.status(), Status::INVALID_FIELD.dnr(), "beyond MDTS");
    let (response, _) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, 4096, true), 4092);
    assert_eq!(response.status(), Status::DATA_SGL_LENGTH_INVALID.dnr(), "beyond its descriptor");
}

pub(crate) fn every_feature_and_identify_is_answered<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, io) = setup.ready();
    for fid in 0..=255u8 {
        for sel in 0..8u32 {
            let (response, _) = raw.call_for(admin, Sqe::new(0x0a).cdw(10, u32::from(fid) | sel << 8), 4096);
            assert_eq!(response.status(), feature_answer(fid, sel), "feature {fid:02x} select {sel}");
        }
    }
    for fid in [7u32, 0x0b, 0x0f, 6] {
        let (response, _) = raw.call_for(admin, Sqe::new(0x09).cdw(10, fid | 1 << 31).cdw(11, 0x0001_0001), 4096);
        assert_status(&response, Status::FEATURE_NOT_SAVEABLE, &format!("feature {fid:02x} saved"));
    }
    for cns in 0..=255u8 {
        for nsid in [0, 1, 3, 4, 0xffff_fffe, 0xffff_ffff] {
            let (response, _) = raw.call_for(admin, wire::identify(cns, nsid, 0xffff), 4096);
            assert_eq!(response.status(), identify_answer(cns, nsid), "CNS {cns:02x} namespace {nsid:x}");
        }
    }
    // Which command sets a controller has is told of this one: FFFFh, or its own identifier.
    for (cntid, expected) in [(raw.cntlid, Status::SUCCESS), (raw.cntlid ^ 0x8000, Status::INVALID_FIELD.dnr())] {
        let (response, _) = raw.call_for(admin, wire::identify(0x1c, 0, cntid), 4096);
        assert_eq!(response.status(), expected, "command sets of controller {cntid:x}");
    }
    for lid in 0..=255u8 {
        let (response, _) = raw.call_for(admin, wire::get_log_page(lid, 0xffff_ffff, 0, 512, false), 4096);
        let known = matches!(lid, 0..=5 | 0x0c | 0x12 | 0x13 | 0x80);
        let expected = if known { Status::SUCCESS } else { Status::INVALID_LOG_PAGE.dnr() };
        assert_eq!(response.status(), expected, "log {lid:02x}");
    }
    raw.alive(io);
    bystander.check();
}

/// What Get Features without a namespace and with Dword 11 of 0 is answered with (NVMe Base 2.x, Get Features command).
fn feature_answer(fid: u8, select: u32) -> Status {
    let ours = matches!(fid, 0x01 | 0x02 | 0x04..=0x07 | 0x0a | 0x0b | 0x0f | 0x16 | 0x19 | 0x81..=0x83);
    match (fid, select) {
        // Reserved selects, and features that are not there.
        (_, 4..) => Status::INVALID_FIELD.dnr(),
        _ if !ours => Status::INVALID_FIELD.dnr(),
        // Of a namespace, and none is named.
        (0x82 | 0x83, _) => Status::INVALID_NAMESPACE.dnr(),
        // Capabilities of any; the host identifier has 128 bits on fabrics, and 64 were asked for.
        (0x81, 0..=2) => Status::INVALID_FIELD.dnr(),
        _ => Status::SUCCESS,
    }
}

/// What Identify is answered with where namespaces 1 to 3 are active and 1024 can be (NVMe Base 2.x, Identify command).
fn identify_answer(cns: u8, nsid: u32) -> Status {
    let (valid, active) = ((1..=1024).contains(&nsid), (1..=3).contains(&nsid));
    let needs = |so: bool| if so { Status::SUCCESS } else { Status::INVALID_NAMESPACE.dnr() };
    match cns {
        // A namespace; zeroes for one that is not active.
        0x00 | 0x05 | 0x08 => needs(valid),
        // The controller.
        0x01 | 0x06 | 0x1c => Status::SUCCESS,
        // Active namespaces above the one that is named.
        0x02 | 0x07 => needs(nsid < 0xffff_fffe),
        // Descriptors of an active namespace.
        0x03 => needs(active),
        _ => Status::INVALID_FIELD.dnr(),
    }
}

pub(crate) fn event_requests_have_a_limit_and_aborts_are_answered<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    let limit = raw.identify_controller(admin).aer_limit;
    for at in 0..limit {
        raw.host.send(admin, &Sqe::new(0x0c).cid(0x1000 + at).0).expect("sent");
    }
    raw.alive(io);
    assert_eq!(raw.host.waiting(admin), 0, "an event request was answered");
    for at in 0..2 {
        let response = raw.host.call(admin, &Sqe::new(0x0c).cid(0x2000 + at).0, LIMIT).expect("an answer");
        assert_eq!(response.cid(), 0x2000 + at);
        assert_status(&response, Status::AER_LIMIT_EXCEEDED, "one too many");
    }
    // The middle one is aborted: it ends, and its place is free again.
    let abort = |sqid: u32, cid: u32| Sqe::new(0x08).cdw(10, sqid | cid << 16);
    let middle = 0x1000 + limit / 2;
    raw.host.send(admin, &abort(0, middle.into()).cid(7).0).expect("sent");
    let mut answers =
        [raw.host.response(admin, LIMIT).expect("an answer"), raw.host.response(admin, LIMIT).expect("an answer")];
    answers.sort_by_key(|response| response.cid());
    assert_eq!((answers[0].cid(), answers[1].cid()), (7, middle));
    assert_eq!(answers[0].dword0() & 1, 0, "it was aborted");
    assert_status(&answers[1], Status::ABORT_REQUESTED, "the aborted request");
    raw.host.send(admin, &Sqe::new(0x0c).cid(0x3000).0).expect("sent");
    // Nothing to abort: success, and Dword 0 bit 0 says "not aborted".
    for (sqid, cid) in [(0, 9u32), (0, 0xffff), (1, 3), (2, 3), (65_535, 1)] {
        let response = raw.call(admin, abort(sqid, cid));
        assert!(response.status().is_success(), "queue {sqid}: {}", response.status());
        assert_eq!(response.dword0() & 1, 1, "queue {sqid} command {cid}");
    }
    let own = raw.host.call(admin, &abort(0, 0x77).cid(0x77).0, LIMIT).expect("an answer");
    assert!(own.status().is_success() && own.dword0() & 1 == 1, "an Abort of itself");
    for _ in 0..300 {
        let response = raw.call(admin, abort(1, 0xabc));
        assert!(response.status().is_success(), "{}", response.status());
    }
    raw.alive(io);
}

pub(crate) fn properties_are_readable_and_a_reset_aborts_nothing_twice<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    assert!(raw.call(admin, wire::property_get(0, true)).status().is_success(), "CAP");
    for offset in [8, 0x14, 0x1c] {
        assert!(raw.call(admin, wire::property_get(offset, false)).status().is_success(), "{offset:x}");
    }
    for (offset, wide) in [(0, false), (0x14, true), (1, false), (0x1000, false), (u32::MAX, true), (0x24, false)] {
        let response = raw.call(admin, wire::property_get(offset, wide));
        assert_eq!(response.status(), Status::INVALID_FIELD.dnr(), "property {offset:x}, wide {wide}");
    }
    for offset in [0, 8, 0x1c, 0x24, u32::MAX] {
        let response = raw.call(admin, wire::property_set(offset, 1));
        assert_eq!(response.status(), Status::INVALID_FIELD.dnr(), "property {offset:x} was set");
    }
    for at in 0..3 {
        raw.host.send(admin, &Sqe::new(0x0c).cid(0x4000 + at).0).expect("sent");
    }
    // CC.EN to 0: the I/O queue ends, the admin queue goes on, and it can be enabled again.
    raw.host.send(admin, &wire::property_set(0x14, 0x0046_0000).cid(0x5000).0).expect("sent");
    assert!(raw.host.end_of(io, LIMIT).is_some(), "the I/O queue survived a reset");
    let mut seen = Vec::new();
    while seen.last() != Some(&0x5000) {
        let response = raw.host.response(admin, LIMIT).expect("an answer");
        assert!(!seen.contains(&response.cid()), "{:x} was answered twice", response.cid());
        seen.push(response.cid());
    }
    std::thread::sleep(Duration::from_millis(20));
    while let Ok(response) = raw.host.response(admin, Duration::from_millis(50)) {
        assert!(!seen.contains(&response.cid()), "{:x} was answered twice", response.cid());
        seen.push(response.cid());
    }
    raw.enable(admin);
    let io = raw.io_up(1, 32);
    raw.alive(io);
    // Shutdown: CSTS.SHST says complete.
    assert!(raw.call(admin, wire::property_set(0x14, SHUT_DOWN)).status().is_success());
    shuts_down(&mut raw, admin);
}

/// Controller Configuration with a normal shutdown asked for.
const SHUT_DOWN: u32 = 0x0046_4001;

/// CSTS.SHST: 0 none, 1 in progress, 2 complete.
fn shutdown_status<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> u32 {
    raw.call(admin, wire::property_get(0x1c, false)).dword0() >> 2 & 3
}

fn shuts_down<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) {
    let deadline = Instant::now() + LIMIT;
    while shutdown_status(raw, admin) != 2 {
        assert!(Instant::now() < deadline, "shutdown never completes");
    }
}

/// CC.SHN: the volatile write caches of the subsystem's namespaces are flushed before CSTS.SHST says complete.
pub(crate) fn shutdown_is_complete_when_the_caches_are_flushed<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let (mut raw, admin, io) = setup.ready();
    assert!(raw.write(io, 1, 0, &[0x5a; 4096]).is_success());
    // Flushes are counted where they are dropped.
    setup.faults.drop_flush(true);
    setup.faults.stall();
    assert!(raw.call(admin, wire::property_set(0x14, SHUT_DOWN)).status().is_success());
    assert!(raw.host.end_of(io, LIMIT).is_some(), "the I/O queue survived a shutdown");
    for _ in 0..20 {
        assert_eq!(shutdown_status(&mut raw, admin), 1, "complete while the flush waits for the disk");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(setup.faults.dropped(), 0);
    setup.faults.release();
    shuts_down(&mut raw, admin);
    assert_eq!(setup.faults.dropped(), 1, "flushes of the namespace behind the faults");
    // A controller that was shut down and enabled again works.
    assert!(raw.call(admin, wire::property_set(0x14, 0x0046_0000)).status().is_success());
    raw.enable(admin);
    let io = raw.io_up(1, 32);
    assert!(raw.write(io, 1, 8, &[0xa5; 4096]).is_success());
    bystander.check();
}

/// The host is not told that its data are safe when they may not be.
pub(crate) fn shutdown_stays_incomplete_when_the_flush_fails<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, io) = setup.ready();
    setup.faults.fail_next(1);
    assert!(raw.call(admin, wire::property_set(0x14, SHUT_DOWN)).status().is_success());
    assert!(raw.host.end_of(io, LIMIT).is_some(), "the I/O queue survived a shutdown");
    let failed = || setup.faults.failed() == 1;
    until("the flush fails", failed);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(shutdown_status(&mut raw, admin), 1);
    // A reset leads out, and the next shutdown succeeds.
    assert!(raw.call(admin, wire::property_set(0x14, 0x0046_0000)).status().is_success());
    raw.enable(admin);
    assert!(raw.call(admin, wire::property_set(0x14, SHUT_DOWN)).status().is_success());
    shuts_down(&mut raw, admin);
}

pub(crate) fn discovery_controller_refuses_quietly<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut raw = setup.raw();
    raw.subnqn = DISCOVERY_NQN.into();
    // A keep alive timeout is fine, none too.
    for kato_ms in [0, 5000, 120_000] {
        raw.kato_ms = kato_ms;
        let admin = raw.admin_up();
        let (response, bytes) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
        assert!(response.status().is_success(), "{}", response.status());
        let identify = wire::IdentifyController::read(&bytes, 4096);
        assert_eq!((identify.kind, identify.subnqn.as_str()), (2, DISCOVERY_NQN));
        for (at, len) in [(4, 20), (24, 40), (64, 8)] {
            assert!(
                bytes[at..at + len].iter().all(|byte| (0x20..0x7f).contains(byte)),
                "SN, MN and FR are padded text"
            );
        }
        let (response, _) = raw.call_for(admin, wire::get_log_page(2, 0xffff_ffff, 0, 512, false), 512);
        assert_eq!(response.status(), Status::INVALID_LOG_PAGE.dnr(), "SMART of a discovery controller");
        // No I/O queue here.
        let io = raw.good_queue(1, 32);
        let response = raw.connect_io(io, 1, 31);
        assert_eq!(
            response.status(),
            Status::CONNECT_INVALID_PARAMETERS.dnr(),
            "an I/O queue of a discovery controller"
        );
        assert_eq!(response.dword0(), 42, "QID is at fault");
        raw.host.close(io);
        raw.host.close(admin);
    }
}
