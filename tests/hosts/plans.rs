//! Plans of several changes, carried out by the manager as the control socket has it: all of a plan or nothing, and what is said
//! of a disk that keeps it waiting.

use std::fs::{self, OpenOptions};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use farside::backend::{FaultControl, FaultPlan, Faulty};
use farside::config::Config;
use farside::control::{Failure, Manager, Request};
use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use nix::fcntl::{FcntlArg, fcntl};
use nvme::Status;
use serde_json::{Value, json};

use crate::rig::{BLOCK, LIMIT, NQN, OTHER_NQN, Raw, Rig, until};

const WRITE_PROTECTION: u32 = 0x84;

/// A target and its configuration, as the control socket has them.
pub(crate) struct Managed<R: Rig> {
    pub(crate) rig: R,
    pub(crate) manager: Manager,
    /// Of the backends, in the order of the configuration.
    pub(crate) faults: Vec<FaultControl>,
}

impl<R: Rig> Managed<R> {
    pub(crate) fn start(text: impl Fn(SocketAddr) -> String) -> Self {
        let rig = R::new();
        let config = Config::parse(&text(rig.address()), "test").expect("a configuration");
        let faults = Mutex::new(Vec::new());
        let builder = config.open().expect("opened").map_backends(|backend| {
            let faulty = Faulty::new(backend, FaultPlan::default());
            faults.lock().expect("one thread").push(faulty.control());
            Arc::new(faulty)
        });
        let target = builder.start(rig.target()).expect("the target starts");
        Self { rig, manager: Manager::new(target, config, None), faults: faults.into_inner().expect("one thread") }
    }

    pub(crate) fn ask(&self, request: Value) -> Result<Value, Failure> {
        let request: Request = serde_json::from_value(request).expect("a request");
        self.manager.handle(&request)
    }

    pub(crate) fn config(&self) -> String {
        self.ask(json!({"op": "config"})).expect("told").as_str().expect("text").to_owned()
    }

    pub(crate) fn host(&self, identity: u8, nqn: &str) -> Raw<R> {
        let mut raw = Raw::open(self.rig.host(), self.rig.address(), identity);
        raw.subnqn = nqn.into();
        raw
    }
}

pub(crate) fn options() -> &'static str {
    "[options]\nreactors = 2\npool_size = \"8M\"\nreceive_slots = 512\n"
}

pub(crate) fn file(path: &Path) -> String {
    fs::write(path, vec![0; 1 << 20]).expect("a file");
    format!("file = \"{}\"\nblock_size = 512\nbuffered = true", path.display())
}

/// Everything that a host can ask about reservations, protection and ANA of what it has.
fn asked<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId, io: RawQueueId) -> Vec<Vec<u8>> {
    let protection = raw.call(admin, Sqe::new(0x0a).nsid(1).cdw(10, WRITE_PROTECTION));
    assert!(protection.status().is_success(), "{}", protection.status());
    let mut answers = vec![protection.dword0().to_le_bytes().to_vec()];
    let all = [
        (io, wire::reservation_report(3, 4096)),
        (admin, wire::get_log_page(0x0c, 0, 0, 4096, true)),
        (admin, wire::identify(0, 3, 0)),
        (admin, wire::identify(2, 0, 0)),
    ];
    for (queue, sqe) in all {
        let (response, bytes) = raw.call_for(queue, sqe, 4096);
        assert!(response.status().is_success(), "{}", response.status());
        answers.push(bytes);
    }
    answers
}

pub(crate) fn a_plan_that_fails_half_way_loses_nothing<R: Rig>() {
    let folder = tempfile::tempdir().expect("a folder");
    let (moved, locked) = (folder.path().join("moved.img"), folder.path().join("locked.img"));
    let states = folder.path().join("states");
    let (moved_keys, locked_keys) = (file(&moved), file(&locked));
    let text = |address: SocketAddr, memory: &str, uuid: &str, read_only: bool, serial: &str| {
        format!(
            "[[subsystem]]\nnqn = \"{NQN}\"\n\
             [[subsystem.namespace]]\nnsid = 1\nmemory = \"{memory}\"\n\
             [[subsystem.namespace]]\nnsid = 3\n{moved_keys}\nana_group = 2\n{uuid}\n\
             [[subsystem.namespace]]\nnsid = 4\n{locked_keys}\nread_only = {read_only}\n\
             [[subsystem.ana]]\ngroup = 2\nstate = \"non-optimized\"\n\
             [[subsystem]]\nnqn = \"{OTHER_NQN}\"\nserial = \"{serial}\"\n\
             [[subsystem.namespace]]\nmemory = \"1M\"\n\
             [[listener]]\naddress = \"{address}\"\n{}state_dir = \"{}\"\n",
            options(),
            states.display()
        )
    };
    let managed = Managed::<R>::start(|address| text(address, "8M", "", true, "one"));
    let target = managed.manager.target();
    let (mut raw, mut other) = (managed.host(1, NQN), managed.host(2, OTHER_NQN));
    let ((admin, io), (_, other_io)) = (raw.bring_up(), other.bring_up());
    assert!(raw.write(io, 1, 8, &[0x51; BLOCK]).is_success());
    assert!(other.write(other_io, 1, 8, &[0x52; BLOCK]).is_success());
    let protect = Sqe::new(0x09).nsid(1).cdw(10, WRITE_PROTECTION).cdw(11, 1);
    assert!(raw.call(admin, protect).status().is_success());
    let keys = wire::reservation_keys(0, 7);
    assert!(raw.call_with(io, wire::reservation_register(3, 0, false, 0), &keys).status().is_success());
    let keys = wire::reservation_keys(7, 0);
    assert!(raw.call_with(io, wire::reservation_acquire(3, 0, 1), &keys).status().is_success());

    let (config, before, answers) = (managed.config(), target.status(), asked(&mut raw, admin, io));
    // Setting the protection was told: that is read, and from here on nothing is.
    assert!(raw.call_for(admin, wire::get_log_page(4, 0, 0, 4096, false), 4096).0.status().is_success());
    let cid = raw.cid();
    raw.host.send(admin, &Sqe::new(0x0c).cid(cid).0).expect("sent");
    let holder = OpenOptions::new().read(true).write(true).open(&locked).expect("the file");
    let range =
        libc::flock { l_type: libc::F_RDLCK as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 1, l_pid: 0 };
    fcntl(&holder, FcntlArg::F_OFD_SETLK(&range)).expect("locked");
    // Memory and a subsystem make room, a file is closed and opened anew, and then the other file cannot be written to.
    let uuid = "uuid = \"5f0c3b4e-8d6b-4b43-9d9d-0a4f6a1c7e11\"";
    let wanted = text(managed.rig.address(), "16M", uuid, false, "two");
    let apply = json!({"op": "apply", "config": wanted});
    let error = managed.ask(apply.clone()).expect_err("refused").to_string();
    assert!(error.contains("locked.img") && error.contains("in use"), "{error}");

    let after = target.status();
    assert_eq!((after.subsystems, after.listeners), (before.subsystems, before.listeners));
    let ids = |all: &[farside::target::ControllerStatus]| all.iter().map(|one| one.cntlid).collect::<Vec<_>>();
    assert_eq!((ids(&after.controllers), after.draining), (ids(&before.controllers), vec![]));
    assert_eq!(managed.config(), config);
    assert!(asked(&mut raw, admin, io) == answers, "reservations, protection or ANA states are not what they were");
    assert_eq!(raw.host.waiting(admin), 0, "hosts were told of what did not happen");
    assert_eq!(raw.read(io, 1, 8, 1).as_deref(), Ok(&[0x51; BLOCK][..]), "the memory is another one");
    assert_eq!(other.read(other_io, 1, 8, 1).as_deref(), Ok(&[0x52; BLOCK][..]));
    let mut stranger = managed.host(9, NQN);
    let (_, stranger_io) = stranger.bring_up();
    let conflict = stranger.write(stranger_io, 3, 0, &[1; BLOCK]);
    assert_eq!(conflict.code(), Status::RESERVATION_CONFLICT.code());
    assert!(raw.write(io, 3, 0, &[0x53; BLOCK]).is_success());

    drop(holder);
    managed.ask(apply).expect("nothing is in the way any more");
    let event = raw.host.response(admin, LIMIT).expect("an event");
    assert_eq!((event.cid(), event.dword0() & 0xff_ffff), (cid, 0x04_0002), "namespaces changed");
    let (_, identify) = raw.call_for(admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(identify[..8], (32_768u64).to_le_bytes());
    assert_eq!(raw.read(io, 3, 0, 1).as_deref(), Ok(&[0x53; BLOCK][..]));
    assert!(raw.write(io, 4, 0, &[4; BLOCK]).is_success(), "it is served for writing now");
    assert!(other.host.end_of(other_io, LIMIT).is_some(), "the subsystem is another one");
}

pub(crate) fn a_removal_that_waits_for_a_disk_is_no_refusal<R: Rig>() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    let keys = file(&path);
    let managed = Managed::<R>::start(|address| {
        format!(
            "[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nnsid = 1\n{keys}\n\
             [[subsystem.namespace]]\nnsid = 2\nmemory = \"1M\"\n[[listener]]\naddress = \"{address}\"\n{}",
            options()
        )
    });
    let target = managed.manager.target();
    let mut raw = managed.host(1, NQN);
    let (_, io) = raw.bring_up();
    assert!(raw.write(io, 1, 8, &[0x61; BLOCK]).is_success());
    until("nothing is under way", || target.counters().requests == 0);
    managed.faults[0].stall();
    raw.host.send(io, &Sqe::new(0).nsid(1).cid(77).0).expect("sent");
    until("the command is in the backend", || target.counters().requests == 1);

    let remove = json!({"op": "remove_namespace", "nqn": NQN, "nsid": 1});
    let name = path.display().to_string();
    let expected = json!([{"nqn": NQN, "nsid": 1, "backend": name}]);
    let answer = managed.ask(remove.clone()).expect("removed");
    assert_eq!(answer["draining"], expected, "{answer}");
    assert_eq!(managed.ask(json!({"op": "status"})).expect("told")["draining"], expected);
    assert!(!managed.config().contains(&name), "what is gone would be saved");
    raw.alive(io);
    // The file cannot come back yet, the identifier can.
    let add = |keys: Value| json!({"op": "add_namespace", "nqn": NQN, "namespace": keys});
    let again = add(json!({"nsid": 1, "file": path, "block_size": 512, "buffered": true}));
    let error = managed.ask(again.clone()).expect_err("it drains").to_string();
    assert!(error.contains("not closed yet") && error.contains(&name), "{error}");
    managed.ask(add(json!({"nsid": 1, "null": "1M"}))).expect("the identifier is free");
    assert_eq!(raw.read(io, 1, 8, 1).as_deref(), Ok(&[0; BLOCK][..]));
    let answer = managed.ask(remove).expect("removed");
    assert_eq!(answer.get("draining"), None, "this one had nothing under way: {answer}");

    managed.faults[0].release();
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert_eq!((response.cid(), response.status().is_success()), (77, true));
    until("nothing drains", || target.draining().is_empty());
    managed.ask(again).expect("the file is free");
    assert_eq!(raw.read(io, 1, 8, 1).as_deref(), Ok(&[0x61; BLOCK][..]));
}
