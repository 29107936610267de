//! The provider's own rules, driven by one thread.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Local, LocalEndpoint, LocalIncoming, LocalOptions, LocalOutgoing, WorkKind};
use crate::mem::Arena;
use crate::rdma::{
    Access, Cm, CmEvent, Completion, ConnId, ConnParams, DeviceId, Endpoint, EndpointEvent, EndpointOptions, Incoming,
    ListenOptions, Mr, Outgoing, Provider, QpId, QpOptions, RecvQueue, RejectReason, SendOp, SendWr, Sge, WcStatus,
};

const NOW: Duration = Duration::ZERO;
const QP: QpOptions = QpOptions { send_wr: 8, recv_wr: 4, recv_sge: 2, inline: 16 };

/// One end of a connection with its memory.
struct End {
    endpoint: LocalEndpoint,
    qp: QpId,
    conn: ConnId,
    mr: Mr,
    arena: Arena,
}

struct Pair {
    local: Local,
    host: End,
    target: End,
    host_cm: super::LocalCm,
    target_cm: super::LocalCm,
}

fn address() -> SocketAddr {
    "192.0.2.1:4420".parse().unwrap()
}

type Event = CmEvent<LocalIncoming, LocalOutgoing>;

fn event(cm: &mut super::LocalCm) -> Event {
    cm.poll_event(NOW).expect("an event")
}

fn endpoint(local: &Local, srq: u32) -> LocalEndpoint {
    let options = EndpointOptions { srq_depth: srq, srq_sge: 2, comp_vector: 0 };
    local.open_endpoint(DeviceId(1), 0, &options).unwrap()
}

fn pair_with(local: Local, target_options: LocalOptions, srq: u32, reads: u8) -> Pair {
    let mut target_cm = local.with(target_options.clone()).open_cm().unwrap();
    let mut host_cm = local.open_cm().unwrap();
    target_cm.listen(address(), &ListenOptions::default()).unwrap();
    host_cm.resolve(address(), None, NOW).unwrap();
    let Event::Resolved(outgoing) = event(&mut host_cm) else { panic!() };
    let (conn, mut host) = (outgoing.conn(), endpoint(&local, 0));
    let host_qp = host.create_outgoing(outgoing, &QP).unwrap();
    let params = ConnParams { private_data: b"hello", initiator_depth: 0, responder_resources: reads };
    host.connect(host_qp, &params).unwrap();
    let Event::Request(incoming) = event(&mut target_cm) else { panic!() };
    assert_eq!((incoming.private_data(), incoming.initiator_depth()), (&b"hello"[..], reads));
    let target_conn = incoming.conn();
    let mut target = endpoint(&local.with(target_options), srq);
    let options = QpOptions { recv_wr: if srq > 0 { 0 } else { 4 }, ..QP };
    let target_qp = target.create_incoming(incoming, &options).unwrap();
    let params = ConnParams { private_data: b"welcome", initiator_depth: reads, responder_resources: 0 };
    target.accept(target_qp, &params).unwrap();
    let Event::Established { private_data, .. } = event(&mut host_cm) else { panic!() };
    assert_eq!(private_data, b"welcome");
    host.established(host_qp).unwrap();
    let Event::Established { .. } = event(&mut target_cm) else { panic!() };
    let end = |mut endpoint: LocalEndpoint, qp, conn, access| {
        let arena = Arena::new(1).unwrap();
        let mr = arena.register(&mut endpoint, access).unwrap();
        End { endpoint, qp, conn, mr, arena }
    };
    let sink = target_access(&target);
    Pair {
        host: end(host, host_qp, conn, Access::Remote),
        target: end(target, target_qp, target_conn, sink),
        host_cm,
        target_cm,
        local,
    }
}

fn target_access(target: &LocalEndpoint) -> Access {
    if target.caps().read_sink_needs_remote_write { Access::ReadSink } else { Access::Local }
}

fn pair() -> Pair {
    pair_with(Local::new(), LocalOptions::default(), 0, 4)
}

impl End {
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.arena.base().as_ptr() as u64 + offset, len, lkey: self.mr.lkey }
    }

    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: inside the arena's 2 MiB, and the tests are one thread that posts nothing meanwhile.
        unsafe { std::slice::from_raw_parts(self.arena.base().as_ptr().add(offset), len) }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        // SAFETY: as in `bytes`; `&mut self` makes it the only view.
        let to = unsafe { std::slice::from_raw_parts_mut(self.arena.base().as_ptr().add(offset), bytes.len()) };
        to.copy_from_slice(bytes);
    }

    fn send(&mut self, tag: u64, op: SendOp, sge: Sge) {
        let wr = SendWr { tag, op, sge, signaled: true, solicited: true, inline: false };
        self.endpoint.post_send(self.qp, &wr).unwrap();
    }

    fn recv(&mut self, tag: u64, offset: u64, len: u32) {
        let sge = self.sge(offset, len);
        self.endpoint.post_recv(RecvQueue::Qp(self.qp), tag, &[sge]).unwrap();
    }

    fn flush(&mut self) {
        self.endpoint.flush(NOW);
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut out = [Completion::EMPTY; 32];
        let count = self.endpoint.poll(NOW, &mut out);
        out[..count].to_vec()
    }

    /// Tags and statuses.
    fn polled(&mut self) -> Vec<(u64, WcStatus)> {
        self.poll().iter().map(|completion| (completion.tag, completion.status)).collect()
    }
}

#[test]
fn send_takes_the_receive_and_carries_its_bytes_over_two_elements() {
    let mut pair = pair();
    let (first, second) = (pair.target.sge(0, 3), pair.target.sge(100, 10));
    pair.target.endpoint.post_recv(RecvQueue::Qp(pair.target.qp), 7, &[first, second]).unwrap();
    pair.target.flush();
    pair.host.put(0, b"abcdefgh");
    let sge = pair.host.sge(0, 8);
    pair.host.send(1, SendOp::Send, sge);
    assert!(pair.target.poll().is_empty(), "nothing happens before the doorbell");
    pair.host.flush();
    assert_eq!(pair.host.polled(), [(1, WcStatus::Success)]);
    let received = pair.target.poll();
    assert_eq!((received[0].tag, received[0].byte_len, received[0].invalidated), (7, 8, None));
    assert_eq!(pair.target.bytes(0, 3), b"abc");
    assert_eq!(pair.target.bytes(100, 5), b"defgh");
}

#[test]
fn rdma_moves_bytes_and_an_unsignaled_request_gives_its_slot_back_with_the_next_signaled_one() {
    let mut pair = pair();
    pair.host.put(0x1000, b"data");
    let (remote, rkey) = (pair.host.sge(0x1000, 0).addr, pair.host.mr.rkey);
    let sge = pair.target.sge(0, 4);
    pair.target.send(1, SendOp::RdmaRead { remote, rkey }, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(1, WcStatus::Success)]);
    assert_eq!(pair.target.bytes(0, 4), b"data");
    let wr = SendWr {
        tag: 2,
        op: SendOp::RdmaWrite { remote: remote + 8, rkey },
        sge,
        signaled: false,
        solicited: false,
        inline: false,
    };
    for _ in 0..7 {
        pair.target.endpoint.post_send(pair.target.qp, &wr).unwrap();
    }
    pair.target.flush();
    assert!(pair.target.poll().is_empty());
    assert_eq!(pair.host.bytes(0x1008, 4), b"data");
    pair.target.send(3, wr.op, sge);
    assert!(pair.target.endpoint.post_send(pair.target.qp, &wr).is_err(), "eight slots are in use");
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(3, WcStatus::Success)]);
    assert!(pair.target.endpoint.post_send(pair.target.qp, &wr).is_ok());
}

#[test]
fn send_without_receive_waits_for_one_or_fails_if_so_ordered() {
    let mut pair = pair();
    let mut record = pair.host.sge(0, 2);
    pair.host.put(0, b"hi");
    record.len = 2;
    let wr = SendWr { tag: 1, op: SendOp::Send, sge: record, signaled: true, solicited: false, inline: true };
    pair.host.endpoint.post_send(pair.host.qp, &wr).unwrap();
    pair.host.flush();
    // Inline bytes were copied out at the doorbell.
    pair.host.put(0, b"no");
    assert!(pair.host.poll().is_empty());
    pair.target.recv(9, 0, 64);
    pair.target.flush();
    assert_eq!(pair.host.polled(), [(1, WcStatus::Success)]);
    assert_eq!(pair.target.polled(), [(9, WcStatus::Success)]);
    assert_eq!(pair.target.bytes(0, 2), b"hi");
    assert_eq!(pair.local.counters().rnr_waits, 1);

    pair.local.faults().fatal_rnr(true);
    pair.host.send(2, SendOp::Send, record);
    pair.host.send(3, SendOp::Send, record);
    pair.host.flush();
    assert_eq!(pair.host.polled(), [(2, WcStatus::RnrRetryExceeded), (3, WcStatus::Flushed)]);
}

#[test]
fn wrong_key_bound_or_permission_fails_both_ends_and_moves_nothing() {
    for case in 0..6 {
        let mut pair = pair();
        pair.host.recv(50, 0x8000, 16);
        pair.host.flush();
        pair.host.put(0x1000, b"data");
        let (mut remote, mut rkey) = (pair.host.sge(0x1000, 0).addr, pair.host.mr.rkey);
        let mut len = 4;
        match case {
            0 => rkey ^= 1,
            1 => remote = pair.host.sge(0, 0).addr - 1,
            2 => remote = pair.host.sge(pair.host.arena.len() as u64 - 3, 0).addr,
            3 => rkey = pair.host.mr.lkey,
            4 => pair.host.endpoint.deregister(pair.host.mr),
            _ => {
                remote = u64::MAX - 1;
                len = 8;
            }
        }
        let sge = pair.target.sge(0, len);
        pair.target.send(1, SendOp::RdmaRead { remote, rkey }, sge);
        pair.target.send(2, SendOp::Send, sge);
        pair.target.flush();
        let failed = pair.target.poll();
        assert_eq!((failed[0].tag, failed[0].status), (1, WcStatus::RemoteAccess), "case {case}");
        assert_ne!(failed[0].byte_len, 0, "a failed completion's other fields are garbage");
        assert_eq!((failed[1].tag, failed[1].status), (2, WcStatus::Flushed));
        assert_eq!(pair.host.polled(), [(50, WcStatus::Flushed)]);
        assert_eq!(pair.host.endpoint.poll_event(), Some(EndpointEvent::QpError(pair.host.qp)));
        assert_eq!(pair.target.bytes(0, 4), [0; 4]);
        // A marker posted later comes back flushed, in order.
        pair.target.send(3, SendOp::Send, sge);
        pair.target.flush();
        assert_eq!(pair.target.polled(), [(3, WcStatus::Flushed)]);
    }
}

#[test]
fn receive_too_short_fails_both_ends() {
    let mut pair = pair();
    pair.target.recv(9, 0, 7);
    pair.target.flush();
    let sge = pair.host.sge(0, 8);
    pair.host.send(1, SendOp::Send, sge);
    pair.host.flush();
    assert_eq!(pair.host.polled(), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(pair.target.polled(), [(9, WcStatus::LocalLength)]);
}

#[test]
fn invalidate_ends_the_key_and_a_foreign_key_fails_both_ends() {
    let mut pair = pair();
    pair.host.recv(1, 0x8000, 16);
    pair.host.recv(2, 0x8000, 16);
    pair.host.flush();
    let rkey = pair.host.mr.rkey;
    let sge = pair.target.sge(0, 16);
    pair.target.send(1, SendOp::SendInvalidate { rkey }, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(1, WcStatus::Success)]);
    assert_eq!(pair.host.poll()[0].invalidated, Some(rkey));
    // The host's own use of the region goes on; its key is dead, also for a second invalidation.
    pair.target.send(2, SendOp::SendInvalidate { rkey }, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(2, WcStatus::RemoteAccess)]);
    assert_eq!(pair.host.polled(), [(2, WcStatus::LocalProtection)]);
}

#[test]
fn device_that_only_claims_invalidate_fails_the_send_at_its_own_end() {
    let mut pair = pair();
    pair.host.recv(1, 0x8000, 16);
    pair.host.flush();
    pair.local.faults().fail_send_invalidate(1);
    let (rkey, sge) = (pair.host.mr.rkey, pair.target.sge(0, 16));
    pair.target.send(1, SendOp::SendInvalidate { rkey }, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(1, WcStatus::Other(2))]);
    assert!(pair.host.poll().is_empty());
}

#[test]
fn read_sink_needs_its_access_where_the_device_says_so() {
    let mut options = LocalOptions::default();
    options.caps.read_sink_needs_remote_write = true;
    let mut pair = pair_with(Local::new(), options, 0, 4);
    let (remote, rkey) = (pair.host.sge(0, 0).addr, pair.host.mr.rkey);
    let sge = pair.target.sge(0, 4);
    pair.target.send(1, SendOp::RdmaRead { remote, rkey }, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(1, WcStatus::Success)]);
    let plain = pair.target.arena.register(&mut pair.target.endpoint, Access::Local).unwrap();
    pair.target.send(2, SendOp::RdmaRead { remote, rkey }, Sge { lkey: plain.lkey, ..sge });
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(2, WcStatus::LocalProtection)]);
}

#[test]
fn reads_beyond_what_the_peer_lets_us_have_are_refused() {
    let mut pair = pair_with(Local::new(), LocalOptions::default(), 0, 2);
    let (remote, rkey) = (pair.host.sge(0, 0).addr, pair.host.mr.rkey);
    let sge = pair.target.sge(0, 4);
    for tag in 0..2 {
        pair.target.send(tag, SendOp::RdmaRead { remote, rkey }, sge);
    }
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(0, WcStatus::Success), (1, WcStatus::Success)]);
    for tag in 0..3 {
        pair.target.send(tag, SendOp::RdmaRead { remote, rkey }, sge);
    }
    pair.target.flush();
    assert_eq!(pair.target.polled()[0], (0, WcStatus::RemoteInvalidRequest));
    assert!(pair.local.counters().reads_over_depth > 0);
}

#[test]
fn disconnect_tells_both_managers_once_and_flushes() {
    let mut pair = pair();
    pair.target.recv(1, 0, 64);
    pair.target.flush();
    pair.host.endpoint.disconnect(pair.host.qp);
    pair.host.endpoint.disconnect(pair.host.qp);
    assert!(matches!(event(&mut pair.host_cm), Event::Disconnected { conn } if conn == pair.host.conn));
    assert!(matches!(event(&mut pair.target_cm), Event::Disconnected { conn } if conn == pair.target.conn));
    assert!(pair.host_cm.poll_event(NOW).is_none());
    // What is sent towards it finds nobody.
    let sge = pair.target.sge(0, 4);
    pair.target.send(2, SendOp::Send, sge);
    pair.target.flush();
    assert_eq!(pair.target.polled(), [(2, WcStatus::RetryExceeded), (1, WcStatus::Flushed)]);
    pair.target.endpoint.destroy(pair.target.qp);
    assert!(pair.target_cm.poll_event(NOW).is_none());
    assert_eq!(pair.local.counters().queue_pairs, 1);
}

#[test]
fn shared_receives_survive_the_queue_pair() {
    let mut pair = pair_with(Local::new(), LocalOptions::default(), 4, 4);
    let sge = pair.target.sge(0, 64);
    pair.target.endpoint.post_recv(RecvQueue::Shared, 5, &[sge]).unwrap();
    pair.target.flush();
    pair.target.endpoint.disconnect(pair.target.qp);
    assert!(pair.target.poll().is_empty());
    assert_eq!(pair.target.endpoint.poll_event(), Some(EndpointEvent::LastReceive(pair.target.qp)));
    assert_eq!(pair.local.counters().receives, 1);
}

#[test]
fn paused_link_holds_work_and_a_cut_one_exceeds_its_retries() {
    let mut pair = pair();
    let (remote, rkey) = (pair.host.sge(0, 0).addr, pair.host.mr.rkey);
    pair.local.faults().pause(pair.host.conn);
    let sge = pair.target.sge(0, 4);
    pair.target.send(1, SendOp::RdmaRead { remote, rkey }, sge);
    pair.target.flush();
    assert!(pair.target.poll().is_empty());
    pair.local.faults().resume(pair.target.conn);
    assert_eq!(pair.target.polled(), [(1, WcStatus::Success)]);
    pair.local.faults().pause(pair.host.conn);
    pair.target.send(2, SendOp::RdmaRead { remote, rkey }, sge);
    pair.target.flush();
    pair.local.faults().cut(pair.host.conn);
    assert_eq!(pair.target.polled(), [(2, WcStatus::RetryExceeded)]);
    assert!(pair.host_cm.poll_event(NOW).is_none(), "nobody is told of a cut");
}

#[test]
fn link_breaks_in_the_middle_of_the_chosen_request() {
    let mut pair = pair();
    pair.host.put(0, &[7; 8]);
    let (remote, rkey) = (pair.host.sge(0, 0).addr, pair.host.mr.rkey);
    pair.local.faults().break_link_at(WorkKind::Read, 2);
    for tag in 0..3 {
        let sge = pair.target.sge(tag * 8, 8);
        pair.target.send(tag, SendOp::RdmaRead { remote, rkey }, sge);
    }
    pair.target.flush();
    let polled = pair.target.polled();
    assert_eq!(polled, [(0, WcStatus::Success), (1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)]);
    assert_eq!(pair.target.bytes(8, 8), [7, 7, 7, 7, 0, 0, 0, 0]);
}

#[test]
fn nobody_listens_rejects_and_drops_are_told_to_the_connecting_side() {
    let local = Local::new();
    let (mut host_cm, mut target_cm) = (local.open_cm().unwrap(), local.open_cm().unwrap());
    let mut host = endpoint(&local, 0);
    let mut connect = |host_cm: &mut super::LocalCm| {
        host_cm.resolve(address(), None, NOW).unwrap();
        let Event::Resolved(outgoing) = event(host_cm) else { panic!() };
        let qp = host.create_outgoing(outgoing, &QP).unwrap();
        let params = ConnParams { private_data: &[], initiator_depth: 0, responder_resources: 1 };
        host.connect(qp, &params).unwrap();
    };
    connect(&mut host_cm);
    assert!(
        matches!(event(&mut host_cm), Event::Refused { reason: RejectReason::INVALID_SERVICE_ID, .. }),
        "nobody listens"
    );
    target_cm.listen("0.0.0.0:4420".parse().unwrap(), &ListenOptions::default()).unwrap();
    connect(&mut host_cm);
    let Event::Request(incoming) = event(&mut target_cm) else { panic!() };
    assert_eq!(incoming.local(), address(), "never a wildcard");
    incoming.reject(&[0, 0, 6, 0]);
    let Event::Refused { reason: RejectReason::CONSUMER, private_data, .. } = event(&mut host_cm) else { panic!() };
    assert_eq!(private_data, [0, 0, 6, 0]);
    connect(&mut host_cm);
    drop(target_cm);
    assert!(matches!(event(&mut host_cm), Event::Refused { reason: RejectReason::CONSUMER, .. }));
}

#[test]
fn descriptor_wakes_once_armed_and_only_for_solicited_completions_if_so_chosen() {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let readable = |endpoint: &LocalEndpoint| {
        let fd = endpoint.fds()[0];
        poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1
    };
    for solicited_only in [false, true] {
        let options = LocalOptions { solicited_only, ..LocalOptions::default() };
        let mut pair = pair_with(Local::new(), options, 0, 4);
        for tag in 0..4 {
            pair.target.recv(tag, 0, 64);
        }
        pair.target.flush();
        let sge = pair.host.sge(0, 4);
        let mut wr = SendWr { tag: 0, op: SendOp::Send, sge, signaled: false, solicited: true, inline: false };
        pair.host.endpoint.post_send(pair.host.qp, &wr).unwrap();
        pair.host.flush();
        assert!(!readable(&pair.target.endpoint), "not armed");
        pair.target.endpoint.arm().unwrap();
        assert!(!readable(&pair.target.endpoint), "what completed before is to be polled");
        wr.solicited = false;
        pair.host.endpoint.post_send(pair.host.qp, &wr).unwrap();
        pair.host.flush();
        assert_eq!(readable(&pair.target.endpoint), !solicited_only);
        wr.solicited = true;
        pair.host.endpoint.post_send(pair.host.qp, &wr).unwrap();
        pair.host.flush();
        assert!(readable(&pair.target.endpoint));
        assert_eq!(pair.target.poll().len(), 3);
        pair.target.endpoint.arm().unwrap();
        assert!(!readable(&pair.target.endpoint));
    }
}

#[test]
fn removed_device_fails_everything_on_it_and_a_restored_one_has_a_new_id() {
    let mut pair = pair();
    pair.target.recv(1, 0, 64);
    pair.target.flush();
    pair.local.faults().remove_device();
    assert_eq!(pair.target.polled(), [(1, WcStatus::Flushed)]);
    assert!(matches!(event(&mut pair.target_cm), Event::DeviceRemoved(DeviceId(1))));
    assert!(pair.target_cm.listen(address(), &ListenOptions::default()).is_err());
    pair.local.faults().restore_device();
    let listening = pair.target_cm.listen(address(), &ListenOptions::default()).unwrap();
    assert_eq!(listening.device, Some(DeviceId(2)));
}

#[test]
fn nothing_is_left_when_both_ends_are_dropped() {
    let pair = pair();
    let Pair { local, host, target, host_cm, target_cm } = pair;
    drop((host.endpoint, target.endpoint, host_cm, target_cm));
    let counters = local.counters();
    assert_eq!(
        (counters.endpoints, counters.queue_pairs, counters.regions, counters.receives),
        (0, 0, 0, 0),
        "{counters:?}"
    );
}
