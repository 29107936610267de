//! How a host comes up: Connect, enable, more queues.

use farside::host::wire;

use crate::plan::{Plan, QUEUES_PER_HOST};

/// What a host's queue does next.
pub(crate) enum Step {
    /// A capsule.
    Send {
        sqe: [u8; 64],
        data: Vec<u8>,
    },
    /// Its host opens I/O queues `first..first + count`.
    OpenQueues {
        host: u16,
        first: u16,
        count: u16,
    },
    /// The queue takes load.
    Ready,
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Connecting,
    Enabling,
    WaitingForReady,
    Done,
}

pub(crate) struct Script {
    host: u16,
    qid: u16,
    at: At,
}

const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
/// Enable, I/O submission queue entries of 64 bytes, completions of 16.
const CC_ENABLE: u32 = 4 << 20 | 6 << 16 | 1;

impl Script {
    pub(crate) fn new(host: u16, qid: u16) -> Self {
        Self { host, qid, at: At::Connecting }
    }

    pub(crate) fn start(&self, plan: &Plan) -> Step {
        let mut hostid = [0; 16];
        hostid[..2].copy_from_slice(&(self.host + 1).to_le_bytes());
        let hostnqn = format!("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-{:012x}", self.host + 1);
        // Controller IDs are given out from 1 on, one per admin queue, in the order of the hosts' numbers.
        let cntlid = if self.qid == 0 { 0xffff } else { self.host + 1 };
        let data = wire::connect_data(&hostid, cntlid, crate::NQN, &hostnqn).to_vec();
        let entries = if self.qid == 0 { 32 } else { plan.entries() };
        let sqe = wire::connect(self.qid, entries - 1, 0).sgl(wire::by_offset(0, data.len() as u32, 0x01)).0;
        Step::Send { sqe, data }
    }

    /// The answer to the last capsule.
    pub(crate) fn answered(&mut self, cqe: &[u8; 16], status: u16, plan: &Plan) -> Step {
        if status != 0 {
            return Step::Failed(format!(
                "host {}, queue {}: {:?} failed with {status:#x}",
                self.host, self.qid, self.at
            ));
        }
        let send = |sqe: wire::Sqe| Step::Send { sqe: sqe.0, data: Vec::new() };
        match self.at {
            At::Connecting if self.qid > 0 => {
                self.at = At::Done;
                Step::Ready
            }
            At::Connecting => {
                let cntlid = u16::from_le_bytes([cqe[0], cqe[1]]);
                if cntlid != self.host + 1 {
                    return Step::Failed(format!("host {} became controller {cntlid}", self.host));
                }
                self.at = At::Enabling;
                send(wire::property_set(CC, CC_ENABLE))
            }
            At::Enabling => {
                self.at = At::WaitingForReady;
                send(wire::property_get(CSTS, false))
            }
            At::WaitingForReady if cqe[0] & 1 == 0 => send(wire::property_get(CSTS, false)),
            At::WaitingForReady => {
                self.at = At::Done;
                let before = usize::from(self.host) * QUEUES_PER_HOST;
                let count = (plan.queues - before).min(QUEUES_PER_HOST) as u16;
                Step::OpenQueues { host: self.host, first: 1, count }
            }
            At::Done => Step::Failed(format!("host {}, queue {}: a response to nothing", self.host, self.qid)),
        }
    }
}
