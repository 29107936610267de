use super::*;
use std::net::SocketAddr;

use crate::rdma::soft::Soft;
use crate::rdma::{Cm, ListenOptions, Provider};

/// A machine in a folder.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new(files: &[(&str, &str)]) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        for (path, content) in files {
            let path = machine.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        machine
    }

    fn doctor(&self) -> Doctor {
        Doctor { root: self.0.path().to_owned(), address: None, peer: None, memory: 85 << 20, verbs: true }
    }

    fn says(&self, parts: &[&str]) {
        says(&self.doctor(), parts);
    }
}

#[track_caller]
fn says(doctor: &Doctor, parts: &[&str]) {
    let lines: Vec<String> = doctor.examine().iter().map(ToString::to_string).collect();
    let found = lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(found, "{parts:?} is not among\n{}", lines.join("\n"));
}

const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";

/// A sound NIC, and the changes that make it unsound.
fn nic(changes: &[(&str, &str)]) -> Machine {
    let at = |path: &str| format!("{PORT}/{path}");
    let sound = [
        (at("state"), "4: ACTIVE\n"),
        (at("link_layer"), "Ethernet\n"),
        (at("gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
        (at("gids/1"), "0000:0000:0000:0000:0000:ffff:7f00:0001\n"),
        (at("gids/2"), "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        (at("gid_attrs/types/0"), "RoCE v2\n"),
        (at("gid_attrs/types/1"), "RoCE v2\n"),
        (at("gid_attrs/ndevs/0"), "eth7\n"),
        ("dev/infiniband/rdma_cm".into(), ""),
        ("dev/infiniband/uverbs0".into(), ""),
        ("proc/self/status".into(), "CapEff:\t000001ffffffffff\n"),
        ("proc/meminfo".into(), "HugePages_Free:      64\nHugepagesize:       2048 kB\n"),
    ];
    let mut files: Vec<(&str, &str)> = sound.iter().map(|(path, content)| (path.as_str(), *content)).collect();
    for (path, content) in changes {
        files.retain(|(known, _)| known != path);
        if *content != "-" {
            files.push((path, content));
        }
    }
    Machine::new(&files)
}

#[test]
fn sound_machine_has_no_fault() {
    let machine = nic(&[]);
    let mut doctor = machine.doctor();
    doctor.address = Some("127.0.0.1".parse().unwrap());
    doctor.peer = Some("127.0.0.1".parse().unwrap());
    let findings = doctor.examine();
    let faults: Vec<_> = findings.iter().filter(|one| one.severity == Severity::Fault).collect();
    assert!(faults.is_empty(), "{faults:?}");
    machine.says(&["ok", "mlx5_0 port 1", "1 RoCE v2 GIDs"]);
    says(&doctor, &["ok", "RDMA device of 127.0.0.1", "mlx5_0"]);
    says(&doctor, &["ok", "route to 127.0.0.1"]);
    says(&doctor, &["ok", "MTU towards 127.0.0.1", "packets carry 4096 bytes"]);
    says(&doctor, &["ok", "huge pages", "128M"]);
}

#[test]
fn each_fault_has_its_sentence() {
    let port = |path: &str| format!("{PORT}/{path}");
    Machine::new(&[]).says(&["FAULT", "RDMA device", "there is none", "rdma link add"]);
    nic(&[(&port("state"), "1: DOWN\n")]).says(&["FAULT", "mlx5_0 port 1", "DOWN (eth7)", "ip link set"]);
    nic(&[(&port("gids/1"), "-"), (&port("gid_attrs/types/1"), "-")]).says(&[
        "FAULT",
        "no GID of an IP address",
        "address add .. dev eth7",
    ]);
    nic(&[(&port("gid_attrs/types/0"), "IB/RoCE v1\n"), (&port("gid_attrs/types/1"), "IB/RoCE v1\n")])
        .says(&["FAULT", "no RoCE v2 GID"]);
    nic(&[("dev/infiniband/rdma_cm", "-")]).says(&["FAULT", "/dev/infiniband/rdma_cm", "modprobe rdma_ucm"]);
    nic(&[("dev/infiniband/uverbs0", "-")]).says(&["FAULT", "/dev/infiniband/uverbs0", "modprobe ib_uverbs"]);
    nic(&[("proc/meminfo", "HugePages_Free: 0\nHugepagesize: 2048 kB\n")]).says(&[
        "hint",
        "huge pages",
        "nr_hugepages",
    ]);
    nic(&[("proc/sys/kernel/io_uring_disabled", "2\n")]).says(&["FAULT", "io_uring", "io_uring_disabled=0"]);
    nic(&[("dev/infiniband/rdma_cm", "-"), ("dev/infiniband/rdma_cm/folder", "")]).says(&[
        "FAULT",
        "/dev/infiniband/rdma_cm",
        "let this user read and write it",
    ]);
}

#[test]
fn what_is_missing_for_verbs_is_a_hint_where_software_will_do() {
    let machine = Machine::new(&[]);
    let soft = Doctor { verbs: false, ..machine.doctor() };
    says(&soft, &["hint", "RDMA device", "there is none", "--provider soft"]);
    let lines = soft.examine();
    assert!(!lines.iter().any(|one| one.object.starts_with("/dev/")), "{lines:?}");
    assert!(lines.iter().any(|one| one.object == "memlock limit"), "{lines:?}");
    let stranger = nic(&[]);
    let soft = Doctor { verbs: false, address: Some("127.77.0.8".parse().unwrap()), ..stranger.doctor() };
    says(&soft, &["hint", "RDMA device of 127.77.0.8", "no device has its GID"]);
    let ethernet = format!("{PORT}/link_layer");
    nic(&[(&ethernet, "InfiniBand\n")]).says(&["ok", "mlx5_0 port 1", "is active, InfiniBand"]);
}

#[test]
fn io_uring_for_privileged_users_is_a_fault_of_the_others() {
    let sentence = checks::switched_off(Some("1"), false).unwrap().to_string();
    assert!(sentence.contains("only for privileged users") && sentence.contains("io_uring_group"), "{sentence}");
    assert_eq!(checks::switched_off(Some("1"), true), None);
    assert_eq!((checks::switched_off(Some("0"), false), checks::switched_off(None, false)), (None, None));
    assert!(checks::switched_off(Some("2"), true).is_some());
}

#[test]
fn no_known_message_hides_another() {
    for (parts, meaning, remedy) in decode::KNOWN {
        let found = decode(&parts.join(" .. ")).unwrap();
        assert_eq!((found.meaning, found.remedy), (*meaning, *remedy), "{parts:?}");
        assert!(!meaning.is_empty() && !remedy.is_empty());
    }
}

#[test]
fn mtu_of_a_way_is_told_with_what_packets_carry() {
    let peer = "192.0.2.1".parse().unwrap();
    for (mtu, carries) in [(9000, 4096), (4200, 4096), (4199, 2048), (1500, 1024), (1280, 1024), (576, 256)] {
        let finding = checks::mtu_towards(peer, mtu);
        assert_eq!(finding.severity == Severity::Good, carries == 4096, "{finding}");
        let says = format!("MTU towards 192.0.2.1: {mtu}: packets carry {carries} bytes");
        assert!(finding.to_string().contains(&says), "{finding}");
    }
}

#[test]
fn priorities_of_flow_control_are_told_where_the_device_does() {
    let pause = |text: &str| nic(&[("sys/class/net/lo/qos/pfc", text)]);
    let with = |machine: &Machine| Doctor { address: Some("127.0.0.1".parse().unwrap()), ..machine.doctor() };
    says(&with(&pause("0,0,0,1,0,0,0,0\n")), &["ok", "PFC of lo", "1 priorities"]);
    says(&with(&pause("0,0,0,0,0,0,0,0\n")), &["hint", "PFC of lo", "off on every priority", "ECN"]);
    says(&with(&nic(&[])), &["hint", "PFC of lo", "does not tell", "dcb pfc show dev lo"]);
    says(&with(&nic(&[])), &["hint", "DSCP of lo", "does not tell", "dcb app show dev lo"]);
    says(&with(&nic(&[])), &["hint", "ECN of lo", "does not tell", "NIC vendor's tool"]);
    // Without RDMA devices there is no NIC to ask.
    let bare = Machine::new(&[]);
    let lines = with(&bare).examine();
    let asks = |one: &Finding| ["PFC", "DSCP", "ECN"].iter().any(|kind| one.object.starts_with(kind));
    assert!(!lines.iter().any(asks), "{lines:?}");
    let trust = nic(&[("sys/class/net/lo/qos/trust", "pcp\n")]);
    says(&with(&trust), &["hint", "DSCP of lo", "pcp", "trust dscp"]);
    let trust = nic(&[("sys/class/net/lo/qos/trust", "dscp\n")]);
    says(&with(&trust), &["ok", "DSCP of lo", "is trusted"]);
}

#[test]
fn addresses_ports_and_routes_are_tried() {
    let machine = nic(&[("sys/class/net/lo/mtu", "1500\n"), ("sys/class/net/lo/ecn/roce_np/enable/3", "0\n")]);
    let with = |address: &str| Doctor { address: Some(address.parse().unwrap()), ..machine.doctor() };
    says(&with("192.0.2.1"), &["FAULT", "address 192.0.2.1", "no address of this machine"]);
    says(&with("127.0.0.1"), &["hint", "MTU of lo", "1500: packets carry 1024 bytes", "mtu 4200"]);
    says(&with("127.0.0.1"), &["hint", "ECN of lo", "off on every priority"]);
    says(&with("127.77.0.9"), &["FAULT", "RDMA device of 127.77.0.9", "no device has its GID"]);
    let held = std::net::UdpSocket::bind("127.77.0.9:4791").unwrap();
    says(&with("127.77.0.9"), &["hint", "UDP port 4791 of 127.77.0.9", "is held by", "rdma link delete"]);
    drop(held);
    let address: SocketAddr = "127.77.0.9:4420".parse().unwrap();
    let mut served = Soft::open().unwrap().open_cm().unwrap();
    let listening = served.listen(address, &ListenOptions::default()).unwrap();
    says(&with("127.77.0.9"), &["ok", "UDP port 4791 of 127.77.0.9", "held by a farside process"]);
    served.unlisten(listening.id);
    drop(served);
    says(&with("127.77.0.9"), &["ok", "UDP port 4791 of 127.77.0.9", "is free"]);
    let peer = Doctor {
        address: Some("127.0.0.1".parse().unwrap()),
        peer: Some("192.0.2.9".parse().unwrap()),
        ..machine.doctor()
    };
    says(&peer, &["FAULT", "route to 192.0.2.9", "ip route get"]);
}

#[test]
fn messages_of_the_host_are_decoded() {
    for (line, says) in [
        ("nvme nvme0: Connect rejected: status 8 (invalid service ID).", "nobody listens"),
        ("nvme nvme0: Connect rejected: status 28 (consumer defined).", "refused the queue"),
        ("nvme nvme0: Connect rejected: status 10 (stale conn).", "still knows an earlier connection"),
        ("nvme nvme0: Connect command failed, error wo/DNR bit: 386", "a parameter (status 182h)"),
        ("nvme nvme0: Connect command failed, error wo/DNR bit: 7", "was aborted (status 07h)"),
        ("nvme nvme0: rdma connection establishment failed (-104)", "refused"),
        ("nvme nvme1: Connect Invalid Data Parameter, subsysnqn \"nqn.x\"", "no subsystem of this name"),
        ("nvme nvme1: Connect for subsystem nqn.x is not allowed, hostnqn: nqn.h", "not on the subsystem's list"),
        ("nvme nvme0: Connect command failed, error wo/DNR bit: 881", "never answered"),
        ("nvme nvme0: Connect command failed, error wo/DNR bit: 16386", "field of the Connect command"),
        ("nvme nvme0: starting error recovery", "lost the connection"),
        ("nvme nvme0: failed nvme_keep_alive_end_io error=10", "Keep Alive"),
        ("nvme nvme0: I/O tag 12 (300c) opcode 0x1 (Write) QID 3 timeout", "not answered"),
        ("nvme nvme0: Duplicate cntlid 1 with nvme1, subsys nqn.x, rejecting", "same controller ID"),
        ("nvme nvme0: RECV for CQE 0x00000000 failed with status WR flushed (5)", "flushed"),
        ("no handler found for transport rdma.", "nvme-rdma is not loaded"),
    ] {
        let meaning = decode(line).unwrap_or_else(|| panic!("not known: {line}"));
        assert!(meaning.meaning.contains(says), "{line}: {meaning:?}");
        assert!(!meaning.remedy.is_empty());
    }
    assert_eq!(decode("eth0: renamed from veth1"), None);
    // Numbers that begin like known ones (302h is of ANA), and a time.
    for other in ["770", "3861", "2", "71"] {
        let line = format!("[  386.000001] nvme nvme0: Connect command failed, error wo/DNR bit: {other}");
        assert_eq!(decode(&line), None, "{line}");
    }
    assert_eq!(decode("nvme nvme0: Connect rejected: status 80 (unknown)."), None);
}
