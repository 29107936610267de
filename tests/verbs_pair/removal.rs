//! A device is removed under a running process and comes back; an address changes.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use farside::rdma::{Cm as _, CmEvent, Endpoint as _, ListenOptions, Listening, Provider, SendOp};

use crate::rig::{LIMIT, NOW, Rig, Side, name, next_event};

#[test]
fn a_removed_device_is_let_go_and_met_again() {
    let Ok(device) = std::env::var("FARSIDE_TEST_REMOVE") else {
        eprintln!("SKIPPED: FARSIDE_TEST_REMOVE=rxe0/eth0 would allow to remove and add a device");
        return;
    };
    let (link_name, netdev) = device.split_once('/').unwrap();
    for round in 0..3 {
        let Some(mut rig) = Rig::new(18_518, 64) else { return };
        rig.connect(8);
        let (_, _, incoming) = rig.request(&[]);
        let mut delete = Command::new("rdma").args(["link", "delete", link_name]).spawn().unwrap();
        let (mut removed, mut lost) = (false, false);
        while !(removed && lost) {
            match next_event(&mut rig.cm) {
                CmEvent::DeviceRemoved(id) => removed |= id == rig.device,
                CmEvent::ListenerLost(id) => lost |= id == rig.listener,
                other => eprintln!("round {round}: {}", name(&other)),
            }
        }
        assert!(rig.verbs.device_info(rig.device).is_none());
        let (old, Rig { client, server, mut cm, verbs, address, .. }) = (rig.device, rig);
        let start = Instant::now();
        drop((client, server, incoming));
        while delete.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(5), "round {round}: the deleter is stuck");
            while cm.poll_event(NOW).is_some() {}
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("round {round}: let go in {:?}", start.elapsed());
        let add = ["link", "add", link_name, "type", "rxe", "netdev", netdev];
        assert!(Command::new("rdma").args(add).status().unwrap().success());
        // The same process, the same CM: it listens again and serves.
        let listening = listen_again(&mut cm, address);
        let device = listening.device.unwrap();
        assert_ne!(device, old);
        let (client, server) = (Side::new(&verbs, device, 0), Side::new(&verbs, device, 0));
        let mut rig = Rig { client, server, cm, verbs, address, listener: listening.id, device };
        let link = rig.connect(8);
        rig.client.send(link.client, 1, SendOp::Send, 0x8000, 64).unwrap();
        rig.client.ep.flush(NOW);
        assert_eq!(rig.server.complete_one().byte_len, 64);
        rig.client.complete_one();
        rig.disconnect(link);
    }
}

fn listen_again(cm: &mut farside::rdma::verbs::Cm, address: SocketAddr) -> Listening {
    let start = Instant::now();
    loop {
        match cm.listen(address, &ListenOptions { backlog: 64, tos: None }) {
            Ok(listening) => return listening,
            Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A bond whose MAC address follows its active slave changes its address when it fails over.
#[test]
fn a_changed_address_ends_listeners_and_connections() {
    let Ok(failover) = std::env::var("FARSIDE_TEST_FAILOVER") else {
        eprintln!("SKIPPED: FARSIDE_TEST_FAILOVER=bond0/veth3 would allow to make a bond's other slave the active one");
        return;
    };
    let (bond, slave) = failover.split_once('/').unwrap();
    let Some(mut rig) = Rig::new(18_519, 0) else { return };
    let link = rig.connect(8);
    std::fs::write(format!("/sys/class/net/{bond}/bonding/active_slave"), slave).unwrap();
    let (mut lost, mut ended) = (false, 0);
    while !lost || ended < 2 {
        match next_event(&mut rig.cm) {
            CmEvent::ListenerLost(id) => lost |= id == rig.listener,
            CmEvent::Disconnected { conn } => {
                assert!([link.client_conn, link.server_conn].contains(&conn));
                ended += 1;
            }
            other => panic!("{}", name(&other)),
        }
    }
    rig.destroy(link);
    rig.listener = listen_again(&mut rig.cm, rig.address).id;
    let link = rig.connect(8);
    rig.disconnect(link);
}
