//! Any list of operations on a registry: no panic, every command answered or held, no identifier given twice, handles
//! unique.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// One step of a host, of the transport or of the operator.
#[derive(Clone, Debug)]
enum Step {
    Connect { discovery: bool, kato: u32 },
    ConnectIo { of: usize, qid: u16 },
    Enable { of: usize, cc: u32 },
    Admin { of: usize, opcode: u8, cdws: [u32; 6], data: bool },
    AnyBytes { of: usize, bytes: Vec<u8> },
    Aer { of: usize },
    CloseAdmin { of: usize },
    CloseIo { of: usize },
    Wait { seconds: u16 },
    Resize { blocks: u64 },
    Namespace { nsid: u32 },
    ShutdownDone { of: usize },
    AbortFinished { of: usize },
    Fail { of: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let of = 0usize..6;
    let opcode = prop_oneof![Just(2u8), Just(6), Just(8), Just(9), Just(10), Just(0x18), any::<u8>()];
    let small = prop_oneof![0u32..0x20, any::<u32>()];
    let cdws = proptest::array::uniform6(small);
    let cc = prop_oneof![Just(ENABLE), Just(0), Just(ENABLE | 1 << 14), any::<u32>()];
    let step = prop_oneof![
        3 => (any::<bool>(), 0u32..9000).prop_map(|(discovery, kato)| Step::Connect { discovery, kato }),
        3 => (of.clone(), 0u16..5).prop_map(|(of, qid)| Step::ConnectIo { of, qid }),
        4 => (of.clone(), cc).prop_map(|(of, cc)| Step::Enable { of, cc }),
        8 => (of.clone(), opcode, cdws, any::<bool>())
            .prop_map(|(of, opcode, cdws, data)| Step::Admin { of, opcode, cdws, data }),
        2 => (of.clone(), proptest::collection::vec(any::<u8>(), 64))
            .prop_map(|(of, bytes)| Step::AnyBytes { of, bytes }),
        5 => of.clone().prop_map(|of| Step::Aer { of }),
        1 => of.clone().prop_map(|of| Step::CloseAdmin { of }),
        2 => of.clone().prop_map(|of| Step::CloseIo { of }),
        1 => (0u16..15).prop_map(|seconds| Step::Wait { seconds }),
        2 => (0u64..9).prop_map(|blocks| Step::Resize { blocks }),
        2 => (0u32..9).prop_map(|nsid| Step::Namespace { nsid }),
        1 => of.clone().prop_map(|of| Step::ShutdownDone { of }),
        1 => of.clone().prop_map(|of| Step::AbortFinished { of }),
        1 => of.prop_map(|of| Step::Fail { of }),
    ];
    proptest::collection::vec(step, 0..150)
}

/// What a transport knows of one association.
#[derive(Default)]
struct Live {
    cntlid: u16,
    subnqn: Option<Nqn>,
    admin: bool,
    io: BTreeSet<u16>,
    held: Vec<u16>,
}

struct Model {
    bench: Bench,
    order: Vec<ControllerId>,
    live: BTreeMap<ControllerId, Live>,
    next_cid: u16,
}

impl Model {
    fn pick(&self, of: usize) -> Option<ControllerId> {
        let open: Vec<_> = self.order.iter().filter(|ctrl| self.live[ctrl].admin).collect();
        (!open.is_empty()).then(|| *open[of % open.len()])
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Connect { discovery, kato } => self.connect(discovery, kato),
            Step::ConnectIo { of, qid } => {
                let Some(ctrl) = self.pick(of) else { return };
                let live = &self.live[&ctrl];
                let subnqn = live.subnqn.as_ref().unwrap().to_string();
                let dial = Dial { subnqn: &subnqn, ..Dial::io(qid, live.cntlid) };
                if qid != 0
                    && let Ok(connected) = self.bench.dial(dial)
                {
                    assert_eq!(connected.ctrl, ctrl);
                    assert!(self.live.get_mut(&ctrl).unwrap().io.insert(qid), "queue twice");
                }
            }
            Step::Enable { of, cc } => self.send(of, &command(0x7f, 0, 0, [0, 0x14, cc, 0, 0, 0]), None),
            Step::Admin { of, opcode, cdws, data } => {
                let bytes = vec![0; 4096];
                self.send(of, &command(opcode, 1, 0x10_0000, cdws), data.then_some(&bytes));
            }
            Step::AnyBytes { of, bytes } => {
                let mut bytes: [u8; 64] = bytes.try_into().unwrap();
                bytes[1] = 0x40;
                if let Ok(command) = Command::parse(&bytes) {
                    self.send(of, &command, None);
                }
            }
            Step::Aer { of } => self.send(of, &aer(0), None),
            Step::CloseAdmin { of } => {
                if let Some(ctrl) = self.pick(of) {
                    self.bench.close(ctrl, 0);
                    let live = self.live.get_mut(&ctrl).unwrap();
                    live.admin = false;
                    live.held.clear();
                }
            }
            Step::CloseIo { of } => {
                if let Some(&ctrl) = self.order.get(of)
                    && let Some(qid) = self.live.get_mut(&ctrl).unwrap().io.pop_first()
                {
                    self.bench.close(ctrl, qid);
                }
            }
            Step::Wait { seconds } => {
                self.bench.now += Duration::from_secs(seconds.into());
                self.bench.registry.handle_timeout(self.bench.now, &|_| None);
            }
            Step::Resize { blocks } => drop(self.bench.registry.resize_namespace(self.bench.subsystem, 1, blocks)),
            Step::Namespace { nsid } => {
                let id = self.bench.subsystem;
                if self.bench.registry.remove_namespace(id, nsid).is_err() {
                    drop(self.bench.registry.add_namespace(id, namespace(nsid)));
                }
            }
            Step::ShutdownDone { of } => self.pick(of).map_or((), |ctrl| self.bench.registry.shutdown_done(ctrl)),
            Step::AbortFinished { of } => self.pick(of).map_or((), |ctrl| self.bench.registry.abort_finished(ctrl)),
            Step::Fail { of } => self.pick(of).map_or((), |ctrl| self.bench.registry.fail_controller(ctrl)),
        }
    }

    fn connect(&mut self, discovery: bool, kato: u32) {
        let dial = if discovery { Dial::discovery(kato) } else { Dial { kato, ..Dial::admin() } };
        let Ok(connected) = self.bench.dial(dial) else { return };
        let subnqn = Nqn::lenient(dial.subnqn).ok();
        let cntlid = connected.cntlid;
        for live in self.live.values().filter(|live| live.admin || !live.io.is_empty()) {
            assert!(live.cntlid != cntlid || live.subnqn != subnqn, "live identifier given again");
        }
        let live = Live { cntlid, subnqn, admin: true, ..Live::default() };
        assert!(self.live.insert(connected.ctrl, live).is_none(), "handle used twice");
        self.order.push(connected.ctrl);
    }

    fn send(&mut self, of: usize, command: &Command, data: Option<&Vec<u8>>) {
        let Some(ctrl) = self.pick(of) else { return };
        self.next_cid = self.next_cid.wrapping_add(1);
        let command = Command { cid: self.next_cid, ..*command };
        let action = self.bench.registry.admin(ctrl, &command, data.map(Vec::as_slice), self.bench.now);
        let live = self.live.get_mut(&ctrl).unwrap();
        match action {
            Action::Complete(completion)
            | Action::SendData { completion, .. }
            | Action::SendLast { completion, .. }
            | Action::Settle { completion, .. } => {
                assert_eq!(completion.cid, command.cid);
            }
            Action::Hold => live.held.push(command.cid),
            Action::FetchData { len } => assert!(data.is_none() && len <= 4096),
            Action::Compute { .. } => panic!("nobody has to authenticate"),
            Action::Abort { sqid, .. } => assert!(live.io.contains(&sqid)),
            Action::DisconnectQueue { .. } => panic!("an admin queue has no Disconnect"),
        }
    }

    fn drain(&mut self) {
        for event in self.bench.events() {
            match event {
                Event::CompleteHeld { ctrl, completion } => {
                    let held = &mut self.live.get_mut(&ctrl).unwrap().held;
                    let at = held.iter().position(|&cid| cid == completion.cid);
                    held.remove(at.expect("answered a request that was not held"));
                }
                // Its queue goes, and with it what is held there.
                Event::Kill { ctrl, .. } => self.live.get_mut(&ctrl).unwrap().held.clear(),
                Event::CloseIoQueues { ctrl } => assert!(!self.live[&ctrl].io.is_empty()),
                Event::CloseQueue { ctrl, qid } => assert!(self.live[&ctrl].io.contains(&qid)),
                Event::ShutDown { ctrl } => assert!(self.live[&ctrl].admin),
                Event::Publish { .. } => {}
            }
        }
    }
}

proptest! {
    #[test]
    fn any_connect_is_taken_or_refused(
        cdws in proptest::array::uniform6(prop_oneof![0u32..0x80, any::<u32>()]),
        noise in proptest::collection::vec((0usize..1024, any::<u8>()), 0..20),
        len in prop_oneof![4 => Just(1024usize), 1 => 0usize..2000],
        qid in 0u16..4,
    ) {
        let mut bench = Bench::new();
        bench.host();
        let dial = Dial { cntlid: if qid == 0 { 0xffff } else { 1 }, ..Dial::admin() };
        let mut data = dial.data();
        for (at, byte) in noise {
            data[at] = byte;
        }
        data.resize(len, 0xee);
        let connect = Command::parse(&sqe(0x7f, 1, keyed(0, 1024, 1, 0x4f), cdws)).unwrap();
        let queue = QueueContext { qid, hsqsize: 127, ..dial.cm };
        match bench.registry.connect(&queue, &connect, &data, SECOND) {
            Ok(connected) => {
                prop_assert_eq!((connected.qid, connected.completion.cid), (qid, connect.cid));
                prop_assert!((1..=127).contains(&connected.sqsize) && len >= 1024);
            }
            Err(refusal) => {
                prop_assert_eq!(refusal.cid, connect.cid);
                prop_assert!(refusal.status.is_dnr() || qid != 0);
                let invalid_parameters = refusal.status.code() == 0x182;
                prop_assert_eq!(refusal.result != 0, invalid_parameters, "IPO and IATTR belong to 182h alone");
            }
        }
    }

    #[test]
    fn numrec_is_always_what_follows(subsystems in 0usize..12, ports in proptest::collection::vec(1u16.., 0..6)) {
        let mut bench = Bench::new();
        for n in 0..subsystems {
            bench.registry.add_subsystem(&subsystem(&format!("nqn.2026-01.io.farside:{n}"))).unwrap();
        }
        for port in ports {
            let addr = SocketAddr::from(([0, 0, 0, 0], port));
            let provider = RdmaProvider::NotSpecified;
            drop(bench.registry.add_listener(Listener { addr, portid: 1, provider }));
        }
        let ctrl = bench.discovery_host();
        let log = bench.log(ctrl, 0x70, false, 0, 1 << 20).unwrap();
        let numrec = usize::try_from(u64::from_le_bytes(log[8..16].try_into().unwrap())).unwrap();
        let (entries, rest) = log[1024..].split_at(numrec * 1024);
        prop_assert!(entries.chunks(1024).all(|entry| entry[0] == 1 && entry[32] != b' '));
        prop_assert!(rest.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn any_list_of_steps_keeps_the_promises(steps in steps()) {
        let config = RegistryConfig { cntlids: 1..=4, ..RegistryConfig::default() };
        let mut model =
            Model { bench: Bench::with(config), order: Vec::new(), live: BTreeMap::new(), next_cid: 0 };
        for step in steps {
            model.run(step);
            model.drain();
            for (ctrl, live) in &model.live {
                prop_assert!(live.held.len() <= 4);
                prop_assert_eq!(model.bench.registry.controller(*ctrl).is_some(), live.admin || !live.io.is_empty());
            }
        }
        // Close everything: nothing of any association is left.
        for (ctrl, live) in &model.live {
            for qid in live.io.iter().copied().chain(live.admin.then_some(0)) {
                model.bench.registry.queue_closed(*ctrl, qid, model.bench.now);
            }
        }
        prop_assert_eq!(model.bench.registry.controllers().count(), 0);
    }
}
