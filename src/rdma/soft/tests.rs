//! Two providers of one process over the loopback interface, each with an address of its own, driven by one thread.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::*;
use crate::mem::Arena;
use crate::rdma::{
    Access, Cm, Completion, ConnParams, Endpoint, Incoming, ListenOptions, Mr, Outgoing, QpId, QpOptions, RecvQueue,
    RejectReason, SendOp, SendWr, Sge, WcStatus,
};
use crate::skipped::skipped;

/// Addresses of 127.0.0.0/8 that no other test uses.
fn address(test: u8, side: u8) -> IpAddr {
    IpAddr::from([127, 77, test, side])
}

struct Side {
    soft: Soft,
    cm: SoftCm,
    endpoint: Option<SoftEndpoint>,
    arena: Arena,
    mr: Option<Mr>,
    done: Vec<Completion>,
}

struct Pair {
    start: Instant,
    target: Side,
    host: Side,
    listen: SocketAddr,
}

const ENDPOINT: EndpointOptions = EndpointOptions { srq_depth: 64, srq_sge: 2, comp_vector: 0 };
const QP: QpOptions = QpOptions { send_wr: 64, recv_wr: 64, recv_sge: 2, inline: 0 };
const ARENA: usize = 8 << 20;

impl Side {
    fn new() -> Self {
        let soft = Soft::new(2).expect("provider");
        let cm = soft.open_cm().expect("connection management");
        Self { soft, cm, endpoint: None, arena: Arena::new(ARENA).expect("memory"), mr: None, done: Vec::new() }
    }

    fn open(&mut self, device: DeviceId, reactor: usize, access: Access) -> &mut SoftEndpoint {
        let mut endpoint = self.soft.open_endpoint(device, reactor, &ENDPOINT).expect("endpoint");
        self.mr = Some(self.arena.register(&mut endpoint, access).expect("registration"));
        self.endpoint.insert(endpoint)
    }

    fn ep(&mut self) -> &mut SoftEndpoint {
        self.endpoint.as_mut().expect("open")
    }

    fn sge(&self, offset: usize, len: u32) -> Sge {
        let addr = self.arena.base().as_ptr() as u64 + offset as u64;
        Sge { addr, len, lkey: self.mr.expect("registered").lkey }
    }

    fn bytes(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= ARENA);
        // SAFETY: inside the arena, and the test is the only one to touch it between work requests.
        unsafe { std::slice::from_raw_parts_mut(self.arena.base().as_ptr().add(offset), len) }
    }

    fn turn(&mut self, now: Duration) {
        let Some(endpoint) = &mut self.endpoint else { return };
        endpoint.flush(now);
        let mut out = [Completion::EMPTY; 16];
        let count = endpoint.poll(now, &mut out);
        self.done.extend(&out[..count]);
        endpoint.flush(now);
    }
}

impl Pair {
    fn new(test: u8) -> Self {
        Self::with(test, &ListenOptions::default())
    }

    fn with(test: u8, options: &ListenOptions) -> Self {
        let mut target = Side::new();
        let listen = SocketAddr::new(address(test, 1), 4420);
        let listening = target.cm.listen(listen, options).expect("listener");
        target.open(listening.device.expect("an address"), 1, Access::Local);
        Self { start: Instant::now(), target, host: Side::new(), listen }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Drives both sides until `done` says so; returns the events of connection management, the target's first.
    fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) -> (Vec<Event>, Vec<Event>) {
        let mut events = (Vec::new(), Vec::new());
        let deadline = self.now() + Duration::from_secs(20);
        while !done(self) {
            self.turn(&mut events);
            assert!(self.now() < deadline, "stuck: {events:?}");
        }
        events
    }

    fn turn(&mut self, events: &mut (Vec<Event>, Vec<Event>)) {
        let now = self.now();
        self.target.turn(now);
        self.host.turn(now);
        events.0.extend(std::iter::from_fn(|| self.target.cm.poll_event(now)));
        events.1.extend(std::iter::from_fn(|| self.host.cm.poll_event(now)));
    }

    fn wait_event(&mut self) -> (Option<Event>, Option<Event>) {
        let mut events = (Vec::new(), Vec::new());
        let deadline = self.now() + Duration::from_secs(20);
        while events.0.is_empty() && events.1.is_empty() {
            self.turn(&mut events);
            assert!(self.now() < deadline, "no event");
        }
        (events.0.pop(), events.1.pop())
    }

    fn ask(&mut self, test: u8) -> (QpId, ConnId) {
        let conn = self.host.cm.resolve(self.listen, Some(address(test, 2)), Duration::from_secs(1)).expect("resolve");
        let (_, Some(CmEvent::Resolved(outgoing))) = self.wait_event() else { panic!("not resolved") };
        assert_eq!(outgoing.conn(), conn);
        let device = outgoing.device();
        let endpoint = self.host.open(device, 0, Access::Remote);
        let qp = endpoint.create_outgoing(outgoing, &QP).expect("queue pair");
        let params = ConnParams { private_data: &[7; 32], initiator_depth: 0, responder_resources: 16 };
        endpoint.connect(qp, &params).expect("connect");
        (qp, conn)
    }

    /// A connected pair of queue pairs: the target's and the host's.
    fn connect(&mut self, test: u8) -> (QpId, QpId) {
        let (host_qp, _) = self.ask(test);
        let (Some(CmEvent::Request(incoming)), _) = self.wait_event() else { panic!("no request") };
        assert_eq!(incoming.private_data()[..33], [[7; 32].as_slice(), &[0]].concat());
        assert_eq!(incoming.private_data().len(), 56);
        assert_eq!((incoming.peer().ip(), incoming.local()), (address(test, 2), self.listen));
        assert_eq!(incoming.initiator_depth(), 16);
        let qp = self.target.ep().create_incoming(incoming, &QP).map_err(|(_, error)| error).expect("queue pair");
        let params = ConnParams { private_data: &[9; 32], initiator_depth: 16, responder_resources: 0 };
        self.target.ep().accept(qp, &params).expect("accept");
        let (_, Some(CmEvent::Established { private_data, .. })) = self.wait_event() else { panic!("not established") };
        assert_eq!((private_data.len(), private_data[31], private_data[32]), (196, 9, 0));
        self.host.ep().established(host_qp).expect("established");
        let (Some(CmEvent::Established { .. }), _) = self.wait_event() else { panic!("not established") };
        (qp, host_qp)
    }
}

fn send(tag: u64, op: SendOp, sge: Sge) -> SendWr {
    SendWr { tag, op, sge, signaled: true, solicited: false, inline: false }
}

/// A processor that is taken away for a while makes an end time out or ask; nothing else makes it repeat where nothing is lost.
fn repeats_for_time_alone(counters: &crate::roce::Counters) -> bool {
    counters.retransmitted == 0 || counters.timeouts + counters.probes > 0
}

/// Polls endpoints until `done` says so: the kernel hands packets over when it has a processor for it.
#[track_caller]
fn poll_until(ends: &mut [SoftEndpoint], start: Instant, done: impl Fn(&[SoftEndpoint]) -> bool) {
    let deadline = start.elapsed() + Duration::from_secs(20);
    while !done(ends) {
        for end in &mut *ends {
            end.poll(start.elapsed(), &mut [Completion::EMPTY; 4]);
            end.flush(start.elapsed());
        }
        let counters: Vec<_> = ends.iter().map(|end| *end.counters()).collect();
        assert!(start.elapsed() < deadline, "stuck: {counters:?}");
    }
}

#[test]
fn messages_and_data_over_loopback() {
    let mut pair = Pair::new(1);
    let (qp, host_qp) = pair.connect(1);
    let (receive, command) = (pair.target.sge(0, 4096), pair.host.sge(0, 64));
    pair.target.ep().post_recv(RecvQueue::Qp(qp), 1, &[receive]).expect("receive");
    pair.host.bytes(0, 64).copy_from_slice(&[0x5a; 64]);
    pair.host.ep().post_send(host_qp, &send(2, SendOp::Send, command)).expect("send");
    pair.until(|pair| !pair.target.done.is_empty() && !pair.host.done.is_empty());
    let got = pair.target.done.remove(0);
    assert_eq!((got.tag, got.status, got.byte_len, got.qp), (1, WcStatus::Success, 64, qp));
    assert_eq!(pair.host.done.remove(0).tag, 2);
    assert_eq!(pair.target.bytes(0, 64), [0x5a; 64]);

    // A host write: the target reads 1 MiB of it, then answers; and the way back.
    let big = 1 << 20;
    for (i, byte) in pair.host.bytes(big, big).iter_mut().enumerate() {
        *byte = (i * 7 / 3) as u8;
    }
    let remote = pair.host.sge(big, 0).addr;
    let rkey = pair.host.mr.expect("registered").rkey;
    let (sink, answer) = (pair.target.sge(big, 1 << 20), pair.host.sge(4096, 16));
    pair.target.ep().post_send(qp, &send(3, SendOp::RdmaRead { remote, rkey }, sink)).expect("read");
    pair.until(|pair| !pair.target.done.is_empty());
    assert_eq!(pair.target.done.remove(0).status, WcStatus::Success);
    let expected = pair.host.bytes(big, big).to_vec();
    assert!(pair.target.bytes(big, big) == expected);
    pair.host.ep().post_recv(RecvQueue::Qp(host_qp), 4, &[answer]).expect("receive");
    let back = remote + (2 << 20);
    let response = pair.target.sge(0, 16);
    let mut write = send(5, SendOp::RdmaWrite { remote: back, rkey }, sink);
    write.signaled = false;
    pair.target.ep().post_send(qp, &write).expect("write");
    pair.target.ep().post_send(qp, &send(6, SendOp::Send, response)).expect("send");
    pair.until(|pair| !pair.target.done.is_empty() && !pair.host.done.is_empty());
    assert_eq!(pair.target.done.remove(0).tag, 6);
    assert_eq!(pair.host.done.remove(0).byte_len, 16);
    assert!(pair.host.bytes(3 * big, big) == expected);
    let counters = *pair.target.ep().counters();
    assert!(repeats_for_time_alone(&counters), "{counters:?}");
    assert_eq!((counters.malformed, counters.unknown_qp, counters.sequence_naks_received), (0, 0, 0), "{counters:?}");
    assert_eq!((pair.target.ep().drops(), pair.host.ep().drops()), (Drops::default(), Drops::default()));

    // The end: what is posted is flushed, and the peer learns of it.
    pair.target.ep().post_recv(RecvQueue::Qp(qp), 7, &[receive]).expect("receive");
    pair.target.ep().disconnect(qp);
    pair.target.ep().disconnect(qp);
    pair.target.ep().post_send(qp, &send(8, SendOp::Send, response)).expect("a marker");
    let (target, host) = pair.until(|pair| pair.target.done.len() == 2);
    assert_eq!(
        pair.target.done.iter().map(|c| (c.tag, c.status)).collect::<Vec<_>>(),
        [(7, WcStatus::Flushed), (8, WcStatus::Flushed)]
    );
    let mut gone = (target, host);
    while gone.0.is_empty() || gone.1.is_empty() {
        pair.turn(&mut gone);
    }
    assert!(matches!(gone.0[0], CmEvent::Disconnected { .. }) && matches!(gone.1[0], CmEvent::Disconnected { .. }));
    pair.target.ep().destroy(qp);
    pair.host.ep().destroy(host_qp);
}

#[test]
fn refusals_reach_the_host_with_their_data() {
    let mut pair = Pair::new(2);
    let (qp, conn) = pair.ask(2);
    let (Some(CmEvent::Request(incoming)), _) = pair.wait_event() else { panic!("no request") };
    incoming.reject(&[0, 0, 6, 0]);
    let (_, Some(CmEvent::Refused { conn: refused, reason, private_data })) = pair.wait_event() else {
        panic!("not refused")
    };
    assert_eq!((refused, reason, &private_data[..4]), (conn, RejectReason::CONSUMER, &[0, 0, 6, 0][..]));
    pair.host.ep().destroy(qp);
    // Dropped unanswered.
    pair.ask(2);
    let (Some(CmEvent::Request(incoming)), _) = pair.wait_event() else { panic!("no request") };
    drop(incoming);
    let (_, Some(CmEvent::Refused { .. })) = pair.wait_event() else { panic!("not refused") };
    // Nobody listens.
    pair.listen.set_port(4421);
    pair.ask(2);
    let (_, Some(CmEvent::Refused { reason, .. })) = pair.wait_event() else { panic!("not refused") };
    assert_eq!(reason, RejectReason::INVALID_SERVICE_ID);
}

#[test]
fn an_address_serves_one_process_and_errors_name_the_remedy() {
    let mut first = Side::new();
    let listen = SocketAddr::new(address(3, 1), 4420);
    first.cm.listen(listen, &ListenOptions::default()).expect("free");
    assert!(first.cm.listen(listen, &ListenOptions::default()).is_err(), "the port is taken");
    let second = Side::new().cm.listen(listen, &ListenOptions::default()).expect_err("taken");
    assert!(second.to_string().contains("another farside process"), "{second}");
    let foreign = SocketAddr::new(IpAddr::from([192, 0, 2, 1]), 4420);
    let error = Side::new().cm.listen(foreign, &ListenOptions::default()).expect_err("not ours");
    assert!(error.to_string().contains("not one of this machine"), "{error}");
    let held = address(3, 2);
    let _holder = std::net::UdpSocket::bind((held, crate::roce::UDP_PORT)).expect("free");
    let error = Side::new().cm.listen(SocketAddr::new(held, 4420), &ListenOptions::default()).expect_err("held");
    assert!(error.to_string().contains("rdma_rxe"), "{error}");
}

#[test]
fn a_shared_queue_takes_receives_and_the_socket_wakes_a_sleeper() {
    let mut pair = Pair::new(4);
    let (host_qp, _) = pair.ask(4);
    let (Some(CmEvent::Request(incoming)), _) = pair.wait_event() else { panic!("no request") };
    let shared = QpOptions { recv_wr: 0, ..QP };
    let qp = pair.target.ep().create_incoming(incoming, &shared).map_err(|(_, error)| error).expect("queue pair");
    let receive = pair.target.sge(0, 4096);
    for tag in 0..4 {
        pair.target.ep().post_recv(RecvQueue::Shared, tag, &[receive]).expect("receive");
    }
    let params = ConnParams { private_data: &[], initiator_depth: 16, responder_resources: 0 };
    pair.target.ep().accept(qp, &params).expect("accept");
    let (_, Some(CmEvent::Established { .. })) = pair.wait_event() else { panic!("not established") };
    pair.host.ep().established(host_qp).expect("established");
    pair.wait_event();
    pair.target.ep().arm().expect("armed");
    let sge = pair.host.sge(0, 64);
    pair.host.ep().post_send(host_qp, &send(1, SendOp::Send, sge)).expect("send");
    let now = pair.now();
    pair.host.ep().flush(now);
    let fds = pair.target.ep().fds();
    let mut polled: Vec<_> = fds.iter().map(|fd| nix::poll::PollFd::new(*fd, nix::poll::PollFlags::POLLIN)).collect();
    assert_eq!(nix::poll::poll(&mut polled, 5000_u16), Ok(1));
    pair.until(|pair| !pair.target.done.is_empty());
    assert_eq!((pair.target.done[0].tag, pair.target.done[0].qp), (0, qp));
}

/// A packet whose ICRC is right for another identification than its own: as good as any to a UDP socket, corrupt to one that
/// sees the header.
#[test]
fn with_raw_headers_the_identification_has_to_be_the_right_one() {
    use crate::roce::{Opcode, Place, Psn, Qpn, UDP_PORT, icrc, packet::Header};
    let (target, peer) = (address(6, 1), address(6, 2));
    let options = SoftOptions { reactors: 2, raw_headers: true, ..SoftOptions::default() };
    let soft = Soft::with(&options).expect("provider");
    let mut cm = soft.open_cm().expect("connection management");
    let device = match cm.listen(SocketAddr::new(target, 4420), &ListenOptions::default()) {
        Ok(listening) => listening.device.expect("an address"),
        Err(error) if error.errno == libc::EPERM => {
            assert!(error.to_string().contains("CAP_NET_RAW"), "{error}");
            skipped("this user has no CAP_NET_RAW");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let mut ends: Vec<SoftEndpoint> =
        (0..2).map(|reactor| soft.open_endpoint(device, reactor, &ENDPOINT).expect("endpoint")).collect();
    // A socket of the peer's that sends identification 0 with "don't fragment", as all of ours do.
    let sender = super::socket::Socket::bind(peer, 0).expect("a socket");
    let flow = icrc::Flow { src: peer, dst: target, src_port: UDP_PORT };
    let mut sent = (0, 0);
    for at in 0..40_u32 {
        let (right, reactor) = (at % 4 < 2, at % 2);
        let header = Header::new(Opcode::Send(Place::Only), Qpn::new(0x700 | reactor), Psn::new(at));
        let mut packet = vec![0; Header::packet_len(header.opcode, 100)];
        header.emit(100, &mut packet).expect("fits").fill(at as u8);
        icrc::seal(&flow, if right { 0 } else { 20 }, &mut packet);
        sender.send_one(target, &packet);
        sent = if right { (sent.0 + 1, sent.1) } else { (sent.0, sent.1 + 1) };
    }
    let count = |end: &SoftEndpoint| end.counters().unknown_qp + end.drops().corrupt;
    poll_until(&mut ends, Instant::now(), |ends| ends.iter().map(count).sum::<u64>() >= 40);
    let sum = |of: fn(&SoftEndpoint) -> u64| ends.iter().map(of).sum::<u64>();
    assert_eq!(sum(SoftEndpoint::identified), 40);
    assert_eq!((sum(|end| end.counters().unknown_qp), sum(|end| end.drops().corrupt)), sent);
}

/// Every packet of an accepted connection has its listener's traffic class in its IPv4 header, as the peer gets it.
#[test]
fn packets_of_an_accepted_connection_carry_the_tos_of_their_listener() {
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, recv, socket,
    };
    // DSCP 26, ECN-capable.
    const TOS: u8 = 26 << 2 | 2;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let Ok(seen) = socket(AddressFamily::Inet, SockType::Raw, flags, SockProtocol::Udp) else {
        return skipped("this user has no CAP_NET_RAW");
    };
    bind(seen.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(address(21, 2), 0))).expect("the peer's address");
    let mut pair = Pair::with(21, &ListenOptions { tos: Some(TOS), ..ListenOptions::default() });
    let (qp, host_qp) = pair.connect(21);
    let (from, to) = (pair.target.sge(0, 16 << 10), pair.host.sge(0, 16 << 10));
    pair.host.ep().post_recv(RecvQueue::Qp(host_qp), 1, &[to]).expect("receive");
    pair.target.ep().post_send(qp, &send(2, SendOp::Send, from)).expect("send");
    // The target acknowledges too.
    let (from, to) = (pair.host.sge(0, 64), pair.target.sge(0, 64));
    pair.target.ep().post_recv(RecvQueue::Qp(qp), 3, &[to]).expect("receive");
    pair.host.ep().post_send(host_qp, &send(4, SendOp::Send, from)).expect("send");
    pair.until(|pair| pair.target.done.len() == 2 && pair.host.done.len() == 2);
    let (mut opcodes, mut packet) = (Vec::new(), [0; 9216]);
    while let Ok(len) = recv(seen.as_raw_fd(), &mut packet, MsgFlags::empty()) {
        let header = usize::from(packet[0] & 0xf) * 4;
        assert!(len >= header + 20, "{len} bytes");
        // Behind the UDP header the base transport header begins with the opcode; those of management are datagrams.
        let opcode = packet[header + 8];
        if IpAddr::from([packet[12], packet[13], packet[14], packet[15]]) == address(21, 1) && opcode >> 5 == 0 {
            assert_eq!(packet[1], TOS, "opcode {opcode:02x}");
            opcodes.push(opcode);
        }
    }
    assert!(opcodes.iter().any(|opcode| *opcode <= 4), "no SEND was seen: {opcodes:02x?}");
    assert!(opcodes.contains(&0x11), "no acknowledgement was seen: {opcodes:02x?}");
}

/// What IPv6 has on every machine is `::1` alone, so both ends of a test are on it, and one test at a time.
static IPV6_LOOPBACK: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// 1 MiB by SEND from one reactor of `::1` to another; both ends, the listener's first. None when there is no IPv6.
fn send_over_ipv6(options: &ListenOptions) -> Option<(Soft, Vec<SoftEndpoint>)> {
    let start = Instant::now();
    let soft = Soft::new(2).expect("provider");
    let mut cm = soft.open_cm().expect("connection management");
    let listen: SocketAddr = "[::1]:4420".parse().expect("address");
    let listening = match cm.listen(listen, options) {
        Ok(listening) => listening,
        Err(error) if [libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT].contains(&error.errno) => {
            skipped(&format!("this machine has no IPv6 loopback: {error}"));
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let device = listening.device.expect("an address");
    assert!(soft.device_info(device).expect("known").gid.starts_with("::1 "));
    let arenas = [Arena::new(1 << 21).expect("memory"), Arena::new(1 << 21).expect("memory")];
    let mut ends: Vec<SoftEndpoint> =
        (0..2).map(|reactor| soft.open_endpoint(device, reactor, &ENDPOINT).expect("endpoint")).collect();
    let mrs: Vec<Mr> = ends
        .iter_mut()
        .zip(&arenas)
        .map(|(end, arena)| arena.register(end, Access::Remote).expect("registered"))
        .collect();
    let base = |side: usize| arenas[side].base().as_ptr() as u64;
    cm.resolve(listen, Some(listen.ip()), Duration::from_secs(1)).expect("resolve");
    let (mut qps, mut done) = ([None, None], Vec::new());
    while done.len() < 2 && start.elapsed() < Duration::from_secs(20) {
        let now = start.elapsed();
        match cm.poll_event(now) {
            Some(CmEvent::Resolved(outgoing)) => {
                let qp = ends[1].create_outgoing(outgoing, &QP).expect("queue pair");
                let params = ConnParams { private_data: &[], initiator_depth: 8, responder_resources: 8 };
                ends[1].connect(qp, &params).expect("connect");
                qps[1] = Some(qp);
            }
            Some(CmEvent::Request(incoming)) => {
                assert_eq!(incoming.peer().ip(), listen.ip());
                let qp = ends[0].create_incoming(incoming, &QP).map_err(|(_, error)| error).expect("queue pair");
                let sge = Sge { addr: base(0), len: 1 << 20, lkey: mrs[0].lkey };
                ends[0].post_recv(RecvQueue::Qp(qp), 1, &[sge]).expect("receive");
                let params = ConnParams { private_data: &[], initiator_depth: 8, responder_resources: 8 };
                ends[0].accept(qp, &params).expect("accept");
                qps[0] = Some(qp);
            }
            Some(CmEvent::Established { .. })
                if qps[0].is_some() && ends[1].established(qps[1].expect("made")).is_ok() =>
            {
                let sge = Sge { addr: base(1), len: 1 << 20, lkey: mrs[1].lkey };
                ends[1].post_send(qps[1].expect("made"), &send(2, SendOp::Send, sge)).expect("send");
            }
            _ => {}
        }
        for end in &mut ends {
            end.flush(now);
            let mut out = [Completion::EMPTY; 4];
            let count = end.poll(now, &mut out);
            done.extend_from_slice(&out[..count]);
        }
    }
    let mut tags: Vec<_> = done.iter().map(|c| (c.tag, c.status)).collect();
    tags.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(tags, [(1, WcStatus::Success), (2, WcStatus::Success)]);
    // The last acknowledgements and notifications: what was received has been answered, and the notifications have come.
    for end in &mut ends {
        end.flush(start.elapsed());
    }
    poll_until(&mut ends, start, |ends| ends[0].counters().cnps_received >= ends[1].counters().cnps_sent);
    Some((soft, ends))
}

#[test]
fn ipv6_and_an_address_that_talks_to_itself() {
    let _one = IPV6_LOOPBACK.lock();
    let Some((_, ends)) = send_over_ipv6(&ListenOptions::default()) else { return };
    for end in &ends {
        assert_eq!(end.drops(), Drops::default());
        let counters = end.counters();
        assert!(repeats_for_time_alone(counters), "{counters:?}");
    }
}

/// What the packets that a socket received had in their IP headers, by opcode.
fn marks(socket: &super::socket::Socket) -> Vec<(u8, u8)> {
    socket.seen.lock().expect("sound").marks.iter().copied().collect()
}

/// Acknowledgement, CNP and datagram of management.
const ACKNOWLEDGE: u8 = 0x11;
const CNP: u8 = 0x81;
const UD_SEND: u8 = 0x64;
/// Network control (DSCP 48), which CNPs have whatever the connection has, as those of NICs.
const CNP_TOS: u8 = 48 << 2;

/// The DSCP of the listener is on what it answers over IPv6 and on connection management, as the peer gets them.
#[test]
fn ipv6_and_connection_management_carry_the_dscp_of_the_listener() {
    // DSCP 26, ECN-capable.
    const TOS: u8 = 26 << 2 | 2;
    let options = ListenOptions { tos: Some(TOS), ..ListenOptions::default() };
    let one = IPV6_LOOPBACK.lock();
    if let Some((soft, ends)) = send_over_ipv6(&options) {
        let seen = marks(ends[1].socket());
        assert!(seen.contains(&(ACKNOWLEDGE, TOS)), "{seen:02x?}");
        assert!(seen.iter().all(|(_, tos)| *tos == TOS), "{seen:02x?}");
        let devices = soft.inner.devices();
        assert_eq!(marks(&devices[0].cm_socket), [(UD_SEND, TOS & !3)]);
    }
    drop(one);
    let mut pair = Pair::with(22, &options);
    pair.connect(22);
    let host = pair.host.soft.inner.devices();
    assert_eq!(marks(&host[0].cm_socket), [(UD_SEND, TOS & !3)], "REP and what else the target says");
}

/// A listener that marks all of its packets itself stands in for a switch: what the kernel tells of the mark leads to a
/// notification, over both families, and a packet without it to none.
#[test]
fn a_mark_of_congestion_is_answered_by_a_notification() {
    for (tos, marked) in [(2, false), (3, true)] {
        let options = ListenOptions { tos: Some(tos), ..ListenOptions::default() };
        let one = IPV6_LOOPBACK.lock();
        if let Some((_, ends)) = send_over_ipv6(&options) {
            // The listener only acknowledges.
            assert_eq!(ends[1].counters().cnps_sent > 0, marked, "IPv6, {:?}", ends[1].counters());
            assert_eq!(ends[0].counters().cnps_received, ends[1].counters().cnps_sent);
            assert_eq!(marks(ends[0].socket()).contains(&(CNP, CNP_TOS)), marked);
        }
        drop(one);
        let test = 23 + u8::from(marked);
        let mut pair = Pair::with(test, &options);
        let (qp, host_qp) = pair.connect(test);
        let (from, to) = (pair.target.sge(0, 16 << 10), pair.host.sge(0, 16 << 10));
        pair.host.ep().post_recv(RecvQueue::Qp(host_qp), 1, &[to]).expect("receive");
        pair.target.ep().post_send(qp, &send(2, SendOp::Send, from)).expect("send");
        pair.until(|pair| {
            let told = pair.target.ep().counters().cnps_received > 0;
            pair.target.done.len() == 1 && pair.host.done.len() == 1 && told == marked
        });
        assert_eq!(pair.host.ep().counters().cnps_sent > 0, marked);
        assert_eq!(marks(pair.target.ep().socket()).contains(&(CNP, CNP_TOS)), marked);
    }
}

/// Packets for the queue pairs of a reactor come to its socket, whichever of them sent; those of connection management to none.
#[test]
fn packets_are_steered_by_their_queue_pair_number() {
    use crate::roce::{Opcode, Place, Psn, Qpn, UDP_PORT, icrc, packet::Header};
    let (target, peer) = (address(25, 1), address(25, 2));
    let soft = Soft::new(3).expect("provider");
    let mut cm = soft.open_cm().expect("connection management");
    let device = cm.listen(SocketAddr::new(target, 4420), &ListenOptions::default()).expect("listener").device;
    let device = device.expect("an address");
    let mut ends: Vec<SoftEndpoint> =
        (0..3).map(|reactor| soft.open_endpoint(device, reactor, &ENDPOINT).expect("endpoint")).collect();
    let sender = super::socket::Socket::bind(peer, 0).expect("a socket");
    let flow = icrc::Flow { src: peer, dst: target, src_port: UDP_PORT };
    // Two low bits are the reactor; number 1 would be reactor 1's.
    let send_to = |qpn: u32, count: u32| {
        for at in 0..count {
            let header = Header::new(Opcode::Send(Place::Only), Qpn::new(qpn), Psn::new(at));
            let mut packet = vec![0; Header::packet_len(header.opcode, 100)];
            header.emit(100, &mut packet).expect("fits").fill(at as u8);
            icrc::seal(&flow, 0, &mut packet);
            sender.send_one(target, &packet);
        }
    };
    for (qpn, count) in [(0x12_3450, 5), (0x12_3451, 7), (0x12_3456, 11), (0xff_ff7e, 2), (1, 13)] {
        send_to(qpn, count);
    }
    let unknown = |ends: &[SoftEndpoint]| -> Vec<u64> { ends.iter().map(|end| end.counters().unknown_qp).collect() };
    // Each socket gets its packets in the order in which they were sent: one more for each is behind all that may be there.
    for reactor in 0..3 {
        send_to(0x12_3450 | reactor, 1);
    }
    poll_until(&mut ends, Instant::now(), |ends| unknown(ends).iter().sum::<u64>() >= 5 + 7 + 13 + 3);
    assert_eq!(unknown(&ends), [5 + 1, 7 + 1, 13 + 1]);
}

/// Reads 1 MiB from the host into the target, until it did so without a loss; what the sockets of both ends did, packets of
/// both, and bytes that were copied: out of the host's memory, into the target's.
fn read_a_mebibyte(pair: &mut Pair, qp: QpId) -> ([super::socket::Seen; 2], u64, [u64; 2]) {
    use std::sync::atomic::Ordering::Relaxed;
    const LEN: usize = 1 << 20;
    for round in 0..20_u8 {
        pair.host.bytes(0, LEN).iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 / 3) as u8 ^ round);
        for side in [&mut pair.target, &mut pair.host] {
            *side.ep().socket().seen.lock().expect("sound") = super::socket::Seen::default();
            side.ep().regions().copied.iter().for_each(|count| count.store(0, Relaxed));
        }
        let before = [*pair.target.ep().counters(), *pair.host.ep().counters()];
        let (remote, rkey) = (pair.host.sge(0, 0).addr, pair.host.mr.expect("registered").rkey);
        let sink = pair.target.sge(0, LEN as u32);
        pair.target.ep().post_send(qp, &send(1, SendOp::RdmaRead { remote, rkey }, sink)).expect("read");
        pair.until(|pair| !pair.target.done.is_empty());
        assert_eq!(pair.target.done.remove(0).status, WcStatus::Success);
        let expected = pair.host.bytes(0, LEN).to_vec();
        assert!(pair.target.bytes(0, LEN) == expected, "wrong data");
        let after = [*pair.target.ep().counters(), *pair.host.ep().counters()];
        let lost = |at: usize| {
            after[at].retransmitted + after[at].duplicates - before[at].retransmitted - before[at].duplicates
        };
        if lost(0) + lost(1) == 0 {
            let packets = (0..2).map(|at| after[at].received - before[at].received).sum();
            let copied = [pair.host.ep(), pair.target.ep()]
                .map(|end| end.regions().copied.each_ref().map(|count| count.load(Relaxed)));
            assert_eq!((copied[0][1], copied[1][0]), (0, 0), "the other way");
            let seen = [pair.target.ep(), pair.host.ep()].map(|end| end.socket().seen.lock().expect("sound").clone());
            return (seen, packets, [copied[0][0], copied[1][1]]);
        }
    }
    panic!("no READ without a loss");
}

/// 256 packets of 4 KiB leave and arrive in far fewer datagrams, as the kernel segments and merges them, and each byte is copied
/// once at each end.
#[test]
fn packets_share_system_calls_and_bytes_are_copied_once() {
    let mut pair = Pair::new(26);
    let (qp, _) = pair.connect(26);
    let (seen, packets, copied) = read_a_mebibyte(&mut pair, qp);
    println!("{packets} packets: {seen:?}; {copied:?} bytes copied");
    assert!((256 + 16..600).contains(&packets), "{packets} packets, of which 256 are responses");
    let [target, host] = seen;
    assert!(host.sent * 4 < packets, "{} datagrams for {packets} packets", host.sent);
    assert!(target.received * 4 < packets, "{} datagrams received for {packets} packets", target.received);
    assert!(target.calls + host.calls < packets, "{} system calls for {packets} packets", target.calls + host.calls);
    assert_eq!(copied, [1 << 20; 2]);
}

/// A socket without checksums gets no segmentation from the kernel: it is done without after the first refusal.
#[test]
fn without_segmentation_every_packet_is_a_datagram() {
    let mut pair = Pair::new(27);
    let (qp, _) = pair.connect(27);
    pair.host.ep().socket().set(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).expect("an option of every kernel");
    let (seen, packets, copied) = read_a_mebibyte(&mut pair, qp);
    println!("{packets} packets: {seen:?}");
    assert!(seen[1].sent >= 256, "{} datagrams for {packets} packets", seen[1].sent);
    assert_eq!(copied, [1 << 20; 2]);
}

fn ip(arguments: &str) {
    let done = std::process::Command::new("ip").args(arguments.split(' ')).output().expect("ran before");
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}

/// In a network of its own: a device's MTU changes, its address goes and comes back, and another one comes.
#[test]
fn changes_of_addresses_are_told() {
    if let Err(errno) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET) {
        skipped(&format!("this user can make no network namespace: {errno}"));
        return;
    }
    if std::process::Command::new("ip").arg("-V").output().is_err() {
        skipped("there is no ip program (iproute2)");
        return;
    }
    ip("link set lo up mtu 4200");
    ip("address add 10.99.0.1/24 dev lo");
    let soft = Soft::new(1).expect("provider");
    let mut cm = soft.open_cm().expect("connection management");
    let listen: SocketAddr = "10.99.0.1:4420".parse().expect("an address");
    let listening = cm.listen(listen, &ListenOptions::default()).expect("a listener");
    let device = listening.device.expect("an address");
    let wildcard = cm.listen("0.0.0.0:4421".parse().expect("an address"), &ListenOptions::default()).expect("another");
    let mut end = soft.open_endpoint(device, 0, &ENDPOINT).expect("an endpoint");
    let mtu = |soft: &Soft| soft.device_info(device).map(|info| info.mtu);
    let start = Instant::now();
    // Sleeps as the thread of connection management does, until something is told or `done`.
    let next = |cm: &mut SoftCm, done: &dyn Fn() -> bool| loop {
        let mut polled = [nix::poll::PollFd::new(cm.fd().expect("one"), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut polled, 5000_u16), Ok(1), "nothing wakes its thread");
        let event = cm.poll_event(start.elapsed());
        if event.is_some() || done() {
            return event;
        }
    };
    let settle = |cm: &mut SoftCm| {
        let until = start.elapsed() + Duration::from_millis(60);
        while start.elapsed() < until {
            cm.poll_event(start.elapsed());
        }
    };
    // What was made before is old news.
    settle(&mut cm);
    assert_eq!((mtu(&soft), end.poll_event()), (Some(4096), None));

    ip("link set lo mtu 1500");
    assert!(next(&mut cm, &|| mtu(&soft) == Some(1024)).is_none());
    assert_eq!((mtu(&soft), end.poll_event()), (Some(1024), Some(crate::rdma::EndpointEvent::PortChanged)));
    assert_eq!(end.poll_event(), None);

    ip("address delete 10.99.0.1/24 dev lo");
    assert!(matches!(next(&mut cm, &|| false), Some(CmEvent::DeviceRemoved(gone)) if gone == device));
    assert!(matches!(cm.poll_event(start.elapsed()), Some(CmEvent::ListenerLost(lost)) if lost == wildcard.id));
    assert!(cm.poll_event(start.elapsed()).is_none());
    assert_eq!(mtu(&soft), None);
    cm.unlisten(listening.id);
    cm.unlisten(wildcard.id);
    drop(end);
    assert!(cm.listen(listen, &ListenOptions::default()).is_err(), "the address is not there");

    ip("address add 10.99.0.1/24 dev lo");
    let again = cm.listen(listen, &ListenOptions::default()).expect("the address is back");
    assert_ne!(again.device, Some(device), "numbers of devices are not used again");
    settle(&mut cm);
    let wildcard = cm.listen("0.0.0.0:4421".parse().expect("an address"), &ListenOptions::default()).expect("another");
    ip("address add 10.99.0.2/24 dev lo");
    assert!(
        matches!(next(&mut cm, &|| false), Some(CmEvent::ListenerLost(lost)) if lost == wildcard.id),
        "a new address"
    );
}
