//! Many hosts that come, go and die at any moment, on the threads that a target has: one for the CM, two reactors.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use farside::rdma::verbs::{Endpoint, Incoming, Verbs};
use farside::rdma::{
    Cm as _, CmEvent, Completion, ConnId, ConnParams, Endpoint as _, EndpointOptions, Incoming as _, ListenOptions,
    Outgoing as _, Provider, QpId, RecvQueue, SendOp, WcStatus,
};

use crate::rig::{LIMIT, NOW, Rig, Side, held, held_again, name, next_event, qp_options, wait_readable};

const CLIENTS: usize = 4;
const ROUNDS: usize = 25;

enum Mail {
    Request(Incoming),
    Ended(ConnId),
}

#[test]
fn a_storm_of_hosts_leaves_nothing_behind() {
    let Some(rig) = Rig::new(18_520, 0) else { return };
    let address = rig.address;
    drop(rig);
    let before = held();
    let (stop, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    let start = Instant::now();
    let server = Verbs::open().unwrap();
    std::thread::scope(|scope| {
        let mail: Vec<Sender<Mail>> = (0..2)
            .map(|reactor| {
                let (to, from) = mpsc::channel();
                let (server, stop, served) = (&server, &stop, &served);
                scope.spawn(move || serve(server, reactor, from, stop, served));
                to
            })
            .collect();
        let (server, stopping) = (&server, &stop);
        let cm = scope.spawn(move || {
            let mut cm = server.open_cm().unwrap();
            cm.listen(address, &ListenOptions { backlog: 64, tos: None }).unwrap();
            let mut owner = HashMap::new();
            while !stopping.load(Ordering::Relaxed) {
                wait_readable(&[cm.fd().unwrap()], Duration::from_millis(20));
                while let Some(event) = cm.poll_event(NOW) {
                    match event {
                        CmEvent::Request(incoming) => {
                            let reactor = owner.len() % 2;
                            owner.insert(incoming.conn(), reactor);
                            mail[reactor].send(Mail::Request(incoming)).unwrap();
                        }
                        CmEvent::Disconnected { conn } | CmEvent::Failed { conn, .. } => {
                            mail[owner[&conn]].send(Mail::Ended(conn)).unwrap();
                        }
                        CmEvent::Established { .. } => (),
                        other => panic!("{}", name(&other)),
                    }
                }
            }
            // The endpoints close while the CM is at work, and after.
            while cm.poll_event(NOW).is_some() {}
        });
        std::thread::sleep(Duration::from_millis(200));
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || visit(address, number))).collect();
        let ends: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        stop.store(true, Ordering::Relaxed);
        cm.join().unwrap();
        assert!(ends.iter().all(Result::is_ok));
    });
    drop(server);
    eprintln!("{} messages served in {:?}", served.load(Ordering::Relaxed), start.elapsed());
    held_again(&before);
}

/// A reactor: accepts what it gets and answers each message.
fn serve(verbs: &Verbs, reactor: usize, mail: Receiver<Mail>, stop: &AtomicBool, served: &AtomicUsize) {
    let mut side: Option<Side> = None;
    let mut qps: HashMap<ConnId, QpId> = HashMap::new();
    while !stop.load(Ordering::Relaxed) {
        match mail.recv_timeout(Duration::from_millis(1)) {
            Ok(Mail::Request(incoming)) => {
                let side = side.get_or_insert_with(|| Side::new(verbs, incoming.device(), 0));
                let conn = incoming.conn();
                let qp = match side.ep.create_incoming(incoming, &qp_options(8)) {
                    Ok(qp) => qp,
                    Err((incoming, error)) => {
                        // Gone by now.
                        eprintln!("reactor {reactor}: {error}");
                        incoming.reject(&[0, 0, 6, 0]);
                        continue;
                    }
                };
                for slot in 0..8 {
                    side.recv(RecvQueue::Qp(qp), slot as u64, slot);
                }
                side.ep.flush(NOW);
                let params = ConnParams { private_data: b"welcome", initiator_depth: 16, responder_resources: 0 };
                match side.ep.accept(qp, &params) {
                    Ok(()) => drop(qps.insert(conn, qp)),
                    Err(error) => {
                        eprintln!("reactor {reactor}: {error}");
                        side.ep.destroy(qp);
                    }
                }
            }
            Ok(Mail::Ended(conn)) => {
                if let (Some(side), Some(qp)) = (side.as_mut(), qps.remove(&conn)) {
                    side.ep.disconnect(qp);
                    side.ep.destroy(qp);
                }
            }
            Err(_) => (),
        }
        let Some(side) = side.as_mut() else { continue };
        let mut done = [Completion::EMPTY; 16];
        let got = side.ep.poll(NOW, &mut done);
        for done in &done[..got] {
            if done.status == WcStatus::Success && done.byte_len == 64 {
                served.fetch_add(1, Ordering::Relaxed);
                // The queue pair may be dead by now: then this is flushed.
                side.send(done.qp, 99, SendOp::Send, 0x9000, 16).unwrap();
            }
        }
        side.ep.flush(NOW);
    }
}

/// A host: connects, and leaves at a stage that its number and round name.
fn visit(address: std::net::SocketAddr, number: usize) {
    let verbs = Verbs::open().unwrap();
    let mut cm = verbs.open_cm().unwrap();
    let mut kept: Option<Endpoint> = None;
    for round in 0..ROUNDS {
        cm.resolve(address, None, Duration::from_secs(5)).unwrap();
        let outgoing = loop {
            match next_event(&mut cm) {
                CmEvent::Resolved(outgoing) => break outgoing,
                // Of the round before.
                CmEvent::Disconnected { .. } | CmEvent::Failed { .. } => (),
                other => panic!("{}", name(&other)),
            }
        };
        let conn = outgoing.conn();
        let options = EndpointOptions { srq_depth: 0, srq_sge: 0, comp_vector: 0 };
        let ep = kept.get_or_insert_with(|| verbs.open_endpoint(outgoing.device(), 0, &options).unwrap());
        let mut memory = vec![0u8; 0x1000];
        // SAFETY: the memory outlives its registration and the queue pair, both of which end before it below.
        let mr = unsafe { ep.register(memory.as_mut_ptr(), memory.len(), farside::rdma::Access::Local) }.unwrap();
        let sge = |len| farside::rdma::Sge { addr: memory.as_ptr() as u64, len, lkey: mr.lkey };
        let qp = ep.create_outgoing(outgoing, &qp_options(8)).unwrap();
        ep.post_recv(RecvQueue::Qp(qp), 1, &[sge(64)]).unwrap();
        ep.flush(NOW);
        let params = ConnParams { private_data: &[], initiator_depth: 0, responder_resources: 16 };
        ep.connect(qp, &params).unwrap();
        let stage = (number + round) % 4;
        if stage > 0 {
            loop {
                match next_event(&mut cm) {
                    CmEvent::Established { conn: other, .. } if other == conn => break,
                    CmEvent::Disconnected { conn: other } if other != conn => (),
                    other => panic!("{}", name(&other)),
                }
            }
        }
        if stage > 1 {
            ep.established(qp).unwrap();
            let wr = farside::rdma::SendWr {
                tag: 2,
                op: SendOp::Send,
                sge: sge(64),
                signaled: true,
                solicited: true,
                inline: false,
            };
            ep.post_send(qp, &wr).unwrap();
            ep.flush(NOW);
        }
        if stage > 2 {
            let (start, mut left) = (Instant::now(), 2);
            while left > 0 {
                assert!(start.elapsed() < LIMIT, "client {number}, round {round}");
                let mut done = [Completion::EMPTY; 4];
                let got = ep.poll(NOW, &mut done);
                assert!(done[..got].iter().all(|done| done.status == WcStatus::Success), "{:?}", &done[..got]);
                left -= got;
            }
            ep.disconnect(qp);
        }
        ep.destroy(qp);
        ep.deregister(mr);
        while ep.poll_event().is_some() {}
        if round % 5 == 4 {
            kept = None;
        }
    }
}
