//! Tests of the registry as a transport sees it: a registry with one subsystem, hosts that send commands, and what
//! comes back.

mod access;
mod any_commands;
mod authenticate;
mod connect;
mod control;
mod events;
mod features;
mod identify;
mod keepalive;
mod lifecycle;
mod logs;
mod namespace_features;
mod paths;
mod reserve;
mod zoned;

use core::net::SocketAddr;
use core::time::Duration;

use super::*;
use crate::command::Command;
use crate::command::tests::{command, sqe};
use crate::nqn::DISCOVERY_NQN;
use crate::sgl::tests::keyed;

pub(super) const NQN: &str = "nqn.2026-01.io.farside:disk";
pub(super) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
pub(super) const ENABLE: u32 = 0x0046_0061;

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// A registry and the time that its owner tells it.
pub(super) struct Bench {
    pub(super) registry: Registry,
    pub(super) subsystem: SubsystemId,
    pub(super) now: Duration,
}

pub(super) fn namespace(nsid: u32) -> NamespaceConfig {
    NamespaceConfig {
        nsid,
        uuid: u128::from(nsid).to_be_bytes(),
        nguid: (u128::from(nsid) << 64).to_be_bytes(),
        blocks: 2048,
        block_size: 512,
        volatile_write_cache: true,
        deallocate: true,
        deallocated_reads_zero: true,
        write_zeroes: true,
        compare: true,
        verify: true,
        copy: true,
        reservations: true,
        ..NamespaceConfig::default()
    }
}

pub(super) fn subsystem(nqn: &str) -> SubsystemConfig {
    SubsystemConfig {
        nqn: nqn.into(),
        serial: "0123456789".into(),
        model: None,
        allow_any_host: true,
        ..SubsystemConfig::default()
    }
}

/// Who connects, and how: the parts of a Connect that tests vary.
#[derive(Clone, Copy)]
pub(super) struct Dial<'a> {
    pub(super) qid: u16,
    pub(super) sqsize: u16,
    pub(super) cattr: u8,
    pub(super) kato: u32,
    pub(super) recfmt: u16,
    pub(super) cntlid: u16,
    pub(super) subnqn: &'a str,
    pub(super) hostnqn: &'a str,
    pub(super) hostid: [u8; 16],
    /// What the connection manager's private data said.
    pub(super) cm: QueueContext,
}

pub(super) const LOCAL: &str = "10.0.0.1:4420";

impl Dial<'_> {
    pub(super) fn admin() -> Self {
        Self {
            qid: 0,
            sqsize: 31,
            cattr: 0,
            kato: 5000,
            recfmt: 0,
            cntlid: 0xffff,
            subnqn: NQN,
            hostnqn: HOST,
            hostid: [9; 16],
            cm: QueueContext { qid: 0, hsqsize: 31, hrqsize: 32, local: LOCAL.parse().unwrap() },
        }
    }

    pub(super) fn io(qid: u16, cntlid: u16) -> Self {
        let admin = Self::admin();
        Self {
            qid,
            cntlid,
            sqsize: 127,
            kato: 0,
            cm: QueueContext { qid, hsqsize: 127, hrqsize: 128, ..admin.cm },
            ..admin
        }
    }

    pub(super) fn discovery(kato: u32) -> Self {
        Self { subnqn: DISCOVERY_NQN, kato, ..Self::admin() }
    }

    pub(super) fn from(self, local: &str) -> Self {
        let local: SocketAddr = local.parse().unwrap();
        Self { cm: QueueContext { local, ..self.cm }, ..self }
    }

    pub(super) fn command(&self) -> Command {
        let cdws = [
            u32::from(self.recfmt) | u32::from(self.qid) << 16,
            u32::from(self.sqsize) | u32::from(self.cattr) << 16,
            self.kato,
            0,
            0,
            0,
        ];
        Command::parse(&sqe(0x7f, 1, keyed(0x1000, 1024, 1, 0x40), cdws)).unwrap()
    }

    pub(super) fn data(&self) -> Vec<u8> {
        let mut data = vec![0; 1024];
        data[..16].copy_from_slice(&self.hostid);
        data[16..18].copy_from_slice(&self.cntlid.to_le_bytes());
        data[256..256 + self.subnqn.len()].copy_from_slice(self.subnqn.as_bytes());
        data[512..512 + self.hostnqn.len()].copy_from_slice(self.hostnqn.as_bytes());
        data
    }
}

impl Bench {
    /// One subsystem with namespaces 1 and 3.
    pub(super) fn new() -> Self {
        Self::with(RegistryConfig::default())
    }

    pub(super) fn with(config: RegistryConfig) -> Self {
        let mut registry = Registry::new(config);
        let id = registry.add_subsystem(&subsystem(NQN)).unwrap();
        registry.add_namespace(id, namespace(1)).unwrap();
        registry.add_namespace(id, namespace(3)).unwrap();
        Self { registry, subsystem: id, now: SECOND }
    }

    pub(super) fn dial(&mut self, dial: Dial<'_>) -> Result<Connected, Completion> {
        self.registry.connect(&dial.cm, &dial.command(), &dial.data(), self.now)
    }

    /// An association that is connected and enabled.
    pub(super) fn host(&mut self) -> ControllerId {
        let ctrl = self.dial(Dial::admin()).unwrap().ctrl;
        self.enable(ctrl);
        ctrl
    }

    pub(super) fn discovery_host(&mut self) -> ControllerId {
        let ctrl = self.dial(Dial::discovery(5000)).unwrap().ctrl;
        self.enable(ctrl);
        ctrl
    }

    pub(super) fn io_queue(&mut self, ctrl: ControllerId, qid: u16) -> Result<Connected, Completion> {
        let cntlid = self.registry.controller(ctrl).unwrap().cntlid;
        self.dial(Dial::io(qid, cntlid))
    }

    pub(super) fn enable(&mut self, ctrl: ControllerId) {
        self.property_set(ctrl, 0x14, ENABLE);
        assert_eq!(self.csts(ctrl) & 3, 1);
    }

    pub(super) fn admin(&mut self, ctrl: ControllerId, command: &Command) -> Action {
        self.registry.admin(ctrl, command, None, self.now)
    }

    pub(super) fn property_set(&mut self, ctrl: ControllerId, offset: u32, value: u32) {
        let set = command(0x7f, 0, 0, [0, offset, value, 0, 0, 0]);
        assert_eq!(self.completed(ctrl, &set), Ok(0));
    }

    pub(super) fn csts(&mut self, ctrl: ControllerId) -> u64 {
        self.completed(ctrl, &command(0x7f, 4, 0, [0, 0x1c, 0, 0, 0, 0])).unwrap()
    }

    /// Dword 0 and 1 of a command that completes, or its status with DNR.
    pub(super) fn completed(&mut self, ctrl: ControllerId, command: &Command) -> Result<u64, Status> {
        match self.admin(ctrl, command) {
            Action::Complete(completion) => {
                assert_eq!(completion.cid, command.cid);
                if completion.status.is_success() { Ok(completion.result) } else { Err(completion.status) }
            }
            other => panic!("not completed: {other:?}"),
        }
    }

    /// The data that a command is answered with, or its status.
    pub(super) fn data(&mut self, ctrl: ControllerId, command: &Command) -> Result<Vec<u8>, Status> {
        match self.admin(ctrl, command) {
            Action::SendData { data, completion } => {
                assert_eq!(completion, Completion::success(command.cid));
                Ok(data)
            }
            Action::Complete(completion) => Err(completion.status),
            other => panic!("no data: {other:?}"),
        }
    }

    pub(super) fn identify(&mut self, ctrl: ControllerId, cns: u32, nsid: u32) -> Result<Vec<u8>, Status> {
        self.data(ctrl, &command(0x06, nsid, 4096, [cns, 0, 0, 0, 0, 0]))
    }

    /// Get Log Page of `len` bytes at `offset`.
    pub(super) fn log(
        &mut self,
        ctrl: ControllerId,
        lid: u32,
        retain: bool,
        offset: u32,
        len: u32,
    ) -> Result<Vec<u8>, Status> {
        let numd = len / 4 - 1;
        let cdw10 = lid | u32::from(retain) << 15 | (numd & 0xffff) << 16;
        self.data(ctrl, &command(0x02, 0xffff_ffff, len, [cdw10, numd >> 16, offset, 0, 0, 0]))
    }

    /// What there is to do for hosts.
    pub(super) fn events(&mut self) -> Vec<Event> {
        self.all_events().into_iter().filter(|event| !matches!(event, Event::Publish { .. })).collect()
    }

    /// What there is to do, publications included.
    pub(super) fn all_events(&mut self) -> Vec<Event> {
        core::iter::from_fn(|| self.registry.poll_event()).collect()
    }

    pub(super) fn close(&mut self, ctrl: ControllerId, qid: u16) {
        self.registry.queue_closed(ctrl, qid, self.now);
    }
}

/// An Asynchronous Event Request with this command identifier.
pub(super) fn aer(cid: u16) -> Command {
    Command { cid, ..command(0x0c, 0, 0, [0; 6]) }
}
