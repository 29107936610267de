//! The null NIC: a provider whose device does at once whatever it is asked, and whose hosts never tire.
//!
//! What it is for: the cost of everything above the provider boundary. Capsules appear in posted receives as a device would put
//! them there; RDMA READs and WRITEs complete without moving a byte; responses free the host's place for its next command.
//! What it checks costs little: that elements lie in registered memory, that receives stand, that each response is the right one.
//! What it is not: a model of time, or of a NIC's own cost. Its functions are kept apart (never inlined) so that a profile can
//! tell them from the target's.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use farside::rdma::{
    Access, Caps, Completion, ConnParams, DeviceId, DeviceInfo, Endpoint, EndpointEvent, EndpointOptions, Mr,
    PostError, Provider, QpId, QpOptions, RdmaError, RecvQueue, SendOp, SendWr, Sge, WcStatus,
};

use crate::cm::{DEVICE, NullCm, NullIncoming, NullOutgoing, Wire};
use crate::load::Load;
use crate::memory::Memory;
use crate::script::{Script, Step};

pub(crate) struct NullNic(pub(crate) Arc<Wire>);

fn caps() -> Caps {
    Caps {
        max_qp_wr: 32_768,
        max_cqe: 4 << 20,
        max_qp: 65_536,
        max_srq_wr: 65_536,
        max_recv_sge: 2,
        max_inline: 16,
        max_initiator_depth: 16,
        max_responder_resources: 16,
        send_with_invalidate: true,
        read_sink_needs_remote_write: false,
    }
}

impl Provider for NullNic {
    const NAME: &'static str = "null";
    type Cm = NullCm;
    type Incoming = NullIncoming;
    type Outgoing = NullOutgoing;
    type Endpoint = NullEndpoint;

    fn open_cm(&self) -> Result<NullCm, RdmaError> {
        Ok(NullCm(Arc::clone(&self.0)))
    }

    fn open_endpoint(&self, _: DeviceId, _: usize, _: &EndpointOptions) -> Result<NullEndpoint, RdmaError> {
        Ok(NullEndpoint::new(&self.0))
    }

    fn device_info(&self, _: DeviceId) -> Option<DeviceInfo> {
        let (name, gid) = ("null".into(), "nowhere".into());
        Some(DeviceInfo { id: DEVICE, name, gid, mtu: 4096, caps: caps() })
    }
}

#[derive(Clone, Copy, Debug)]
struct Receive {
    tag: u64,
    command: Sge,
    page: Option<Sge>,
}

/// A queue pair, and which queue of which host it is.
struct Qp {
    script: Script,
    /// Its number among the load's queues, from the end of its script on.
    load: Option<u32>,
    receives: VecDeque<Receive>,
    takes_shared: bool,
}

pub(crate) struct NullEndpoint {
    wire: Arc<Wire>,
    caps: Caps,
    memory: Memory,
    qps: Vec<Qp>,
    shared: VecDeque<Receive>,
    posted: Vec<(QpId, SendWr)>,
    completions: VecDeque<Completion>,
    /// Queue pairs by the load's numbers.
    by_load: Vec<QpId>,
    load: Load,
    running: bool,
    /// Bytes asked for by RDMA WRITE and RDMA READ.
    moved: (u64, u64),
}

impl NullEndpoint {
    fn new(wire: &Arc<Wire>) -> Self {
        let geometry = wire.geometry;
        Self {
            caps: caps(),
            memory: Memory::new(std::ptr::null_mut(), 0),
            qps: Vec::new(),
            shared: VecDeque::with_capacity(65_536),
            posted: Vec::with_capacity(4096),
            completions: VecDeque::with_capacity(4096),
            by_load: Vec::new(),
            load: Load::new(wire.plan.clone(), geometry.blocks, geometry.block_shift),
            running: false,
            moved: (0, 0),
            wire: Arc::clone(wire),
        }
    }

    /// Puts a capsule into a receive.
    fn deliver(&mut self, qp: QpId, sqe: &[u8; 64], data_len: u32, data: &[u8]) -> Completion {
        let own = &mut self.qps[qp.0 as usize];
        let queue = if own.takes_shared { &mut self.shared } else { &mut own.receives };
        let receive = queue.pop_front().expect("a receive for each command that a host may send");
        self.memory.write(&receive.command, sqe);
        if data_len > 0 {
            let page = receive.page.expect("a page for in-capsule data");
            assert!(data_len <= page.len, "{data_len} bytes of data in a capsule");
            self.memory.write(&page, data);
        }
        Completion { tag: receive.tag, status: WcStatus::Success, byte_len: 64 + data_len, qp, invalidated: None }
    }

    fn send_script(&mut self, qp: QpId, step: Step) {
        match step {
            Step::Send { sqe, data } => {
                let completion = self.deliver(qp, &sqe, data.len() as u32, &data);
                self.completions.push_back(completion);
            }
            Step::OpenQueues { host, first, count } => {
                for qid in first..first + count {
                    self.wire.request(host, qid, self.wire.plan.entries());
                }
            }
            Step::Ready => {
                self.qps[qp.0 as usize].load = Some(self.by_load.len() as u32);
                self.by_load.push(qp);
                self.running = self.by_load.len() == self.wire.plan.queues;
            }
            Step::Failed(why) => self.wire.fail(why),
        }
    }

    #[inline(never)]
    fn respond(&mut self, qp: QpId, wr: &SendWr) {
        let cqe = self.memory.response(&wr.sge);
        let [.., c0, c1, s0, s1] = cqe;
        let (cid, status) = (u16::from_le_bytes([c0, c1]), u16::from_le_bytes([s0, s1]) >> 1);
        match self.qps[qp.0 as usize].load {
            Some(queue) => {
                self.load.answered(queue, cid, status);
                if let Some(outcome) = self.load.outcome() {
                    self.finish(outcome);
                }
            }
            None => {
                let step = self.qps[qp.0 as usize].script.answered(&cqe, status, &self.wire.plan);
                self.send_script(qp, step);
            }
        }
    }

    fn finish(&mut self, outcome: crate::load::Outcome) {
        self.running = false;
        let answer = match self.moved == self.load.expected {
            true => Ok(outcome),
            false => Err(format!("bytes moved: {:?}, expected: {:?}", self.moved, self.load.expected)),
        };
        let _ = self.wire.outcome.send(answer);
    }
}

impl Endpoint for NullEndpoint {
    type Incoming = NullIncoming;
    type Outgoing = NullOutgoing;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    // SAFETY: of the caller's: the trait's contract, which `Memory` relies on.
    unsafe fn register(&mut self, addr: *mut u8, len: usize, _: Access) -> Result<Mr, RdmaError> {
        self.memory = Memory::new(addr, len);
        Ok(Mr { id: 1, lkey: 1, rkey: 0 })
    }

    fn deregister(&mut self, _: Mr) {}

    fn create_incoming(
        &mut self,
        incoming: NullIncoming,
        options: &QpOptions,
    ) -> Result<QpId, (NullIncoming, RdmaError)> {
        self.qps.push(Qp {
            script: Script::new(incoming.host, incoming.qid),
            load: None,
            receives: VecDeque::with_capacity(options.recv_wr as usize),
            takes_shared: options.recv_wr == 0,
        });
        Ok(QpId(self.qps.len() as u32 - 1))
    }

    fn accept(&mut self, qp: QpId, _: &ConnParams<'_>) -> Result<(), RdmaError> {
        let step = self.qps[qp.0 as usize].script.start(&self.wire.plan);
        self.send_script(qp, step);
        Ok(())
    }

    fn reject(&mut self, _: QpId, private_data: &[u8]) {
        self.wire.fail(format!("a queue was rejected: {private_data:?}"));
    }

    fn create_outgoing(&mut self, outgoing: NullOutgoing, _: &QpOptions) -> Result<QpId, RdmaError> {
        match outgoing {}
    }

    fn connect(&mut self, _: QpId, _: &ConnParams<'_>) -> Result<(), RdmaError> {
        Err(RdmaError::new("connect", "the null NIC only takes connections", ""))
    }

    fn established(&mut self, _: QpId) -> Result<(), RdmaError> {
        Ok(())
    }

    #[inline(never)]
    fn post_recv(&mut self, queue: RecvQueue, tag: u64, sges: &[Sge]) -> Result<(), PostError> {
        let receive = Receive { tag, command: sges[0], page: sges.get(1).copied() };
        match queue {
            RecvQueue::Shared => self.shared.push_back(receive),
            RecvQueue::Qp(qp) => self.qps[qp.0 as usize].receives.push_back(receive),
        }
        Ok(())
    }

    #[inline(never)]
    fn post_send(&mut self, qp: QpId, wr: &SendWr) -> Result<(), PostError> {
        self.posted.push((qp, *wr));
        Ok(())
    }

    #[inline(never)]
    fn flush(&mut self, _: Duration) {
        let mut posted = std::mem::take(&mut self.posted);
        for (qp, wr) in posted.drain(..) {
            match wr.op {
                SendOp::Send | SendOp::SendInvalidate { .. } => self.respond(qp, &wr),
                SendOp::RdmaWrite { .. } => self.moved.0 += u64::from(wr.sge.len),
                SendOp::RdmaRead { .. } => self.moved.1 += u64::from(wr.sge.len),
            }
            assert!(self.memory.holds(&wr.sge), "{wr:?} names memory that is not registered");
            if wr.signaled {
                let status = WcStatus::Success;
                self.completions.push_back(Completion { tag: wr.tag, status, byte_len: 0, qp, invalidated: None });
            }
        }
        self.posted = posted;
    }

    #[inline(never)]
    fn poll(&mut self, _: Duration, out: &mut [Completion]) -> usize {
        let mut count = 0;
        while count < out.len()
            && let Some(completion) = self.completions.pop_front()
        {
            out[count] = completion;
            count += 1;
        }
        if self.running {
            let end = out.len().min(count + self.wire.plan.batch);
            while count < end
                && let Some(capsule) = self.load.next()
            {
                let qp = self.by_load[capsule.queue as usize];
                let data = capsule.range.as_ref().map_or(&[][..], |range| &range[..]);
                out[count] = self.deliver(qp, &capsule.sqe, capsule.data_len, data);
                count += 1;
            }
        }
        if count == 0 && self.wire.plan.rests {
            std::thread::sleep(Duration::from_millis(1));
        }
        count
    }

    fn arm(&mut self) -> Result<(), RdmaError> {
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn next_timeout(&self) -> Option<Duration> {
        None
    }

    fn poll_event(&mut self) -> Option<EndpointEvent> {
        None
    }

    fn disconnect(&mut self, _: QpId) {
        self.running = false;
    }

    fn destroy(&mut self, _: QpId) {}
}
