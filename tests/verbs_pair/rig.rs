//! Two endpoints on one device, and one CM for both.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use farside::rdma::verbs::{Cm, Endpoint, Incoming, Outgoing, Verbs};
use farside::rdma::{
    Access, Cm as _, CmEvent, Completion, ConnId, ConnParams, DeviceId, Endpoint as _, EndpointOptions, Incoming as _,
    ListenOptions, ListenerId, Mr, Outgoing as _, PostError, Provider, QpId, QpOptions, RecvQueue, SendOp, SendWr, Sge,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub(crate) type Event = CmEvent<Incoming, Outgoing>;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const NOW: Duration = Duration::ZERO;
const MEMORY: usize = 1 << 20;

/// Addresses of RDMA devices: the GIDs of RoCE devices are their interfaces' addresses.
pub(crate) fn rdma_addresses() -> Vec<IpAddr> {
    let mut found = Vec::new();
    for name in Verbs::device_names().unwrap_or_default() {
        let Ok(gids) = std::fs::read_dir(format!("/sys/class/infiniband/{name}/ports/1/gids")) else { continue };
        for gid in gids.flatten() {
            let Ok(text) = std::fs::read_to_string(gid.path()) else { continue };
            let Ok(gid) = text.trim().parse::<Ipv6Addr>() else { continue };
            match gid.to_ipv4_mapped() {
                Some(v4) => found.push(IpAddr::V4(v4)),
                None if gid.is_unspecified() || gid.segments()[0] == 0xfe80 => (),
                None => found.push(IpAddr::V6(gid)),
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

pub(crate) fn wait_readable(fds: &[BorrowedFd<'_>], limit: Duration) -> bool {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    poll(&mut fds, PollTimeout::from(limit.as_millis() as u16)).unwrap() > 0
}

pub(crate) struct Side {
    pub(crate) ep: Endpoint,
    pub(crate) mr: Mr,
    pub(crate) memory: Vec<u8>,
}

impl Side {
    pub(crate) fn new(verbs: &Verbs, device: DeviceId, srq_depth: u32) -> Self {
        let options = EndpointOptions { srq_depth, srq_sge: 2, comp_vector: 0 };
        let mut ep = verbs.open_endpoint(device, 0, &options).unwrap();
        let mut memory = vec![0; MEMORY];
        // SAFETY: the memory lives as long as the endpoint, which is dropped first; tests touch it between transfers.
        let mr = unsafe { ep.register(memory.as_mut_ptr(), memory.len(), Access::Remote) }.unwrap();
        Self { ep, mr, memory }
    }

    pub(crate) fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.memory.as_ptr() as u64 + offset as u64, len, lkey: self.mr.lkey }
    }

    pub(crate) fn send(&mut self, qp: QpId, tag: u64, op: SendOp, offset: usize, len: u32) -> Result<(), PostError> {
        let sge = self.sge(offset, len);
        self.ep.post_send(qp, &SendWr { tag, op, sge, signaled: true, solicited: true, inline: false })
    }

    /// Receive number `slot`: 64 bytes and the rest of its 4 KiB.
    pub(crate) fn recv(&mut self, queue: RecvQueue, tag: u64, slot: usize) {
        let sges = [self.sge(slot * 0x1000, 64), self.sge(slot * 0x1000 + 64, 0x1000 - 64)];
        self.ep.post_recv(queue, tag, &sges).unwrap();
    }

    pub(crate) fn remote(&self, offset: usize) -> (u64, u32) {
        (self.memory.as_ptr() as u64 + offset as u64, self.mr.rkey)
    }

    /// Polls until `count` completions came.
    pub(crate) fn complete(&mut self, count: usize) -> Vec<Completion> {
        let start = Instant::now();
        let mut all = Vec::new();
        while all.len() < count {
            assert!(start.elapsed() < LIMIT, "{} of {count} completions: {all:?}", all.len());
            let mut out = [Completion::EMPTY; 7];
            let got = self.ep.poll(NOW, &mut out);
            all.extend_from_slice(&out[..got]);
            if got == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }

    pub(crate) fn complete_one(&mut self) -> Completion {
        self.complete(1)[0]
    }
}

pub(crate) struct Rig {
    pub(crate) client: Side,
    pub(crate) server: Side,
    pub(crate) cm: Cm,
    pub(crate) verbs: Verbs,
    pub(crate) address: SocketAddr,
    pub(crate) listener: ListenerId,
    pub(crate) device: DeviceId,
}

/// A connection, both ends of it.
#[derive(Clone, Copy)]
pub(crate) struct Link {
    pub(crate) client: QpId,
    pub(crate) server: QpId,
    pub(crate) client_conn: ConnId,
    pub(crate) server_conn: ConnId,
}

pub(crate) fn qp_options(recv_wr: u32) -> QpOptions {
    QpOptions { send_wr: 16, recv_wr, recv_sge: 2, inline: 32 }
}

pub(crate) fn next_event(cm: &mut Cm) -> Event {
    let start = Instant::now();
    loop {
        if let Some(event) = cm.poll_event(NOW) {
            return event;
        }
        assert!(start.elapsed() < LIMIT, "no connection event");
        wait_readable(&[cm.fd().unwrap()], Duration::from_millis(200));
    }
}

pub(crate) fn name(event: &Event) -> String {
    match event {
        CmEvent::Request(incoming) => format!("request from {}", incoming.peer()),
        CmEvent::Resolved(outgoing) => format!("resolved {:?}", outgoing.conn()),
        CmEvent::Established { conn, .. } => format!("established {conn:?}"),
        CmEvent::Disconnected { conn } => format!("disconnected {conn:?}"),
        CmEvent::Refused { conn, reason, .. } => format!("refused {conn:?} {reason:?}"),
        CmEvent::Failed { conn, error } => format!("failed {conn:?} {error}"),
        CmEvent::DeviceRemoved(device) => format!("removed {device:?}"),
        CmEvent::ListenerLost(listener) => format!("lost {listener:?}"),
    }
}

impl Rig {
    /// `None`, and says so, on a machine without an RDMA device.
    pub(crate) fn new(port: u16, srq_depth: u32) -> Option<Self> {
        let Some(ip) = rdma_addresses().into_iter().find(IpAddr::is_ipv4) else {
            eprintln!("SKIPPED: no RDMA device with an IPv4 address: rdma link add rxe0 type rxe netdev eth0");
            return None;
        };
        let verbs = Verbs::open().unwrap();
        let mut cm = verbs.open_cm().unwrap();
        let address = SocketAddr::new(ip, port);
        let listening = cm.listen(address, &ListenOptions { backlog: 64, tos: Some(0x20) }).unwrap();
        let device = listening.device.expect("bound to a device");
        let client = Side::new(&verbs, device, 0);
        let server = Side::new(&verbs, device, srq_depth);
        Some(Self { client, server, cm, verbs, address, listener: listening.id, device })
    }

    pub(crate) fn resolve(&mut self) -> Outgoing {
        let conn = self.cm.resolve(self.address, None, Duration::from_secs(5)).unwrap();
        match next_event(&mut self.cm) {
            CmEvent::Resolved(outgoing) => {
                assert_eq!((outgoing.conn(), outgoing.device()), (conn, self.device));
                outgoing
            }
            other => panic!("{}", name(&other)),
        }
    }

    /// Sends a connection request; the client's queue pair and the request come back.
    pub(crate) fn request(&mut self, private_data: &[u8]) -> (QpId, ConnId, Incoming) {
        let outgoing = self.resolve();
        let conn = outgoing.conn();
        let qp = self.client.ep.create_outgoing(outgoing, &qp_options(8)).unwrap();
        for slot in 0..4 {
            self.client.recv(RecvQueue::Qp(qp), 100 + slot as u64, slot);
        }
        self.client.ep.flush(NOW);
        let params = ConnParams { private_data, initiator_depth: 0, responder_resources: 16 };
        self.client.ep.connect(qp, &params).unwrap();
        match next_event(&mut self.cm) {
            CmEvent::Request(incoming) => (qp, conn, incoming),
            other => panic!("{}", name(&other)),
        }
    }

    /// A connection; `recv_wr` = receives of the server's queue pair, 0 = the shared ones.
    pub(crate) fn connect(&mut self, recv_wr: u32) -> Link {
        let (client, client_conn, incoming) = self.request(b"hello");
        assert_eq!(&incoming.private_data()[..5], b"hello");
        assert_eq!(incoming.private_data().len(), 56);
        assert_eq!(incoming.listener(), self.listener);
        assert_eq!((incoming.initiator_depth(), incoming.responder_resources()), (16, 0));
        assert_eq!(incoming.local(), self.address);
        assert_eq!(incoming.peer().ip(), self.address.ip());
        let server_conn = incoming.conn();
        let server = self.server.ep.create_incoming(incoming, &qp_options(recv_wr)).map_err(|(_, e)| e).unwrap();
        for slot in 0..recv_wr as usize {
            self.server.recv(RecvQueue::Qp(server), 200 + slot as u64, slot);
        }
        self.server.ep.flush(NOW);
        let params = ConnParams { private_data: b"welcome", initiator_depth: 16, responder_resources: 0 };
        self.server.ep.accept(server, &params).unwrap();
        match next_event(&mut self.cm) {
            CmEvent::Established { conn, private_data } => {
                assert_eq!(conn, client_conn);
                assert_eq!(&private_data[..7], b"welcome");
            }
            other => panic!("{}", name(&other)),
        }
        self.client.ep.established(client).unwrap();
        match next_event(&mut self.cm) {
            CmEvent::Established { conn, .. } => assert_eq!(conn, server_conn),
            other => panic!("{}", name(&other)),
        }
        Link { client, server, client_conn, server_conn }
    }

    /// Waits until the CM says that a connection ended.
    pub(crate) fn wait_ended(&mut self, ended: ConnId) {
        loop {
            match next_event(&mut self.cm) {
                CmEvent::Disconnected { conn } if conn == ended => return,
                CmEvent::Disconnected { .. } => (),
                other => panic!("{}", name(&other)),
            }
        }
    }

    /// The client leaves, the server notices.
    pub(crate) fn disconnect(&mut self, link: Link) {
        self.client.ep.disconnect(link.client);
        self.client.ep.disconnect(link.client);
        self.wait_ended(link.server_conn);
        self.server.ep.disconnect(link.server);
        self.client.ep.destroy(link.client);
        self.server.ep.destroy(link.server);
    }

    /// Both ends go without a word.
    pub(crate) fn destroy(&mut self, link: Link) {
        self.server.ep.destroy(link.server);
        self.client.ep.destroy(link.client);
    }

    /// Lets the CM do what is left to do.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20 {
            while self.cm.poll_event(NOW).is_some() {}
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Waits until nothing is held that was not before: the kernel takes its time to let go.
pub(crate) fn held_again(before: &(usize, String)) {
    let start = Instant::now();
    while held() != *before && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(held(), *before);
}

/// What this process and the kernel hold: file descriptors, and each device's objects.
pub(crate) fn held() -> (usize, String) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let output = Command::new("rdma").args(["resource", "show"]).output().expect("the rdma tool");
    assert!(output.status.success());
    (fds, String::from_utf8(output.stdout).unwrap())
}
