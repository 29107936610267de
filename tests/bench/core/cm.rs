//! Connection management of the null NIC: its hosts' requests, and nothing else ever happens.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use farside::host::wire;
use farside::rdma::{
    Cm, CmEvent, ConnId, DeviceId, Incoming, ListenOptions, ListenerId, Listening, Outgoing, RdmaError,
};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::load::Outcome;
use crate::plan::Plan;

pub(crate) const DEVICE: DeviceId = DeviceId(0);

/// What the threads of the provider share.
pub(crate) struct Wire {
    pub(crate) plan: Plan,
    /// Of the namespaces.
    pub(crate) geometry: Geometry,
    requests: Mutex<VecDeque<NullIncoming>>,
    ready: EventFd,
    pub(crate) outcome: Sender<Result<Outcome, String>>,
}

/// Size of each namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) blocks: u64,
    pub(crate) block_shift: u8,
}

impl Wire {
    pub(crate) fn new(plan: Plan, geometry: Geometry, outcome: Sender<Result<Outcome, String>>) -> Self {
        let ready = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).expect("an eventfd");
        Self { plan, geometry, requests: Mutex::default(), ready, outcome }
    }

    /// A host asks for a connection.
    pub(crate) fn request(self: &Arc<Self>, host: u16, qid: u16, entries: u16) {
        let private_data = wire::private_data(qid, entries, entries - 1, 0);
        let incoming = NullIncoming { wire: Arc::clone(self), host, qid, private_data };
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push_back(incoming);
        let _ = self.ready.write(1);
    }

    pub(crate) fn fail(&self, why: String) {
        let _ = self.outcome.send(Err(why));
    }
}

pub(crate) struct NullCm(pub(crate) Arc<Wire>);

impl Cm for NullCm {
    type Incoming = NullIncoming;
    type Outgoing = NullOutgoing;

    fn listen(&mut self, address: SocketAddr, _: &ListenOptions) -> Result<Listening, RdmaError> {
        for host in 0..self.0.plan.hosts() as u16 {
            self.0.request(host, 0, 32);
        }
        Ok(Listening { id: ListenerId(0), local: address, device: Some(DEVICE) })
    }

    fn unlisten(&mut self, _: ListenerId) {}

    fn resolve(&mut self, peer: SocketAddr, _: Option<IpAddr>, _: Duration) -> Result<ConnId, RdmaError> {
        Err(RdmaError::new(format!("resolve {peer}"), "the null NIC has hosts of its own only", ""))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.ready.as_fd())
    }

    fn next_timeout(&self) -> Option<Duration> {
        None
    }

    fn poll_event(&mut self, _: Duration) -> Option<CmEvent<NullIncoming, NullOutgoing>> {
        let mut requests = self.0.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let request = requests.pop_front();
        if requests.is_empty() {
            let _ = self.0.ready.read();
        }
        request.map(CmEvent::Request)
    }
}

pub(crate) struct NullIncoming {
    wire: Arc<Wire>,
    pub(crate) host: u16,
    pub(crate) qid: u16,
    private_data: [u8; 32],
}

impl Incoming for NullIncoming {
    fn conn(&self) -> ConnId {
        ConnId(u64::from(self.host) << 16 | u64::from(self.qid))
    }
    fn listener(&self) -> ListenerId {
        ListenerId(0)
    }
    fn device(&self) -> DeviceId {
        DEVICE
    }
    fn peer(&self) -> SocketAddr {
        let [high, low] = self.host.to_be_bytes();
        SocketAddr::from(([198, 51, 100 ^ high, low], 49_152 + self.qid))
    }
    fn local(&self) -> SocketAddr {
        crate::ADDRESS
    }
    fn private_data(&self) -> &[u8] {
        &self.private_data
    }
    fn initiator_depth(&self) -> u8 {
        16
    }
    fn responder_resources(&self) -> u8 {
        0
    }
    fn reject(self, private_data: &[u8]) {
        self.wire.fail(format!("queue {} of host {} was rejected: {private_data:?}", self.qid, self.host));
    }
}

/// There are none.
pub(crate) enum NullOutgoing {}

impl Outgoing for NullOutgoing {
    fn conn(&self) -> ConnId {
        match *self {}
    }
    fn device(&self) -> DeviceId {
        match *self {}
    }
}
