//! The table at start-up: what is served, where, over what, how much memory, and the line to type on the host. And the
//! figures that SIGUSR1 and the end print.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use farside::target::{Counters, IoTotals, Served};

/// The table's text.
pub(crate) fn table(served: &Served) -> String {
    let mut text = String::new();
    for (nqn, namespaces) in &served.subsystems {
        let _ = writeln!(text, "subsystem  {nqn}");
        for namespace in namespaces {
            let info = &namespace.backend;
            let _ = writeln!(
                text,
                "namespace  {}  {}  {} ({} B blocks)  uuid {}",
                namespace.nsid,
                info.name,
                human(info.size),
                namespace.block_size,
                namespace.uuid
            );
            for remark in &info.remarks {
                let _ = writeln!(text, "           {remark}");
            }
        }
    }
    for (address, device) in &served.listeners {
        match device {
            Some(device) => {
                let _ = writeln!(
                    text,
                    "listener   {address}  {}  GID {}  path MTU {}",
                    device.name, device.gid, device.mtu
                );
            }
            None => {
                let _ = writeln!(text, "listener   {address}  every RDMA device");
            }
        }
    }
    let _ = writeln!(
        text,
        "memory     {} registered, {} reactor{}, provider {}",
        human(served.memory as u64),
        served.reactors,
        if served.reactors == 1 { "" } else { "s" },
        served.provider
    );
    for remark in &served.remarks {
        let _ = writeln!(text, "           {remark}");
    }
    for (address, _) in &served.listeners {
        for (nqn, _) in &served.subsystems {
            let _ = writeln!(text, "connect    {}", connect_line(*address, nqn));
        }
    }
    text
}

/// What the target holds and has done, one line for itself and one for each namespace.
pub(crate) fn figures(held: &Counters, totals: &[IoTotals]) -> String {
    let mut text = format!(
        "connected  {} controllers, {} queues, {} commands under way; connections: {} accepted, {} rejected\n",
        held.controllers, held.queues, held.requests, held.connections_accepted, held.connections_rejected
    );
    for one in totals {
        let _ = writeln!(
            text,
            "traffic    {} namespace {}: {} reads of {} bytes, {} writes of {} bytes, {} errors",
            one.nqn, one.nsid, one.reads, one.bytes_read, one.writes, one.bytes_written, one.errors
        );
    }
    text
}

/// What to type on the host.
fn connect_line(address: SocketAddr, nqn: &str) -> String {
    let host = match address.ip() {
        ip if ip.is_unspecified() => "ADDRESS-OF-THIS-MACHINE".to_string(),
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => ip.to_string(),
    };
    format!("nvme connect -t rdma -a {host} -s {} -n {nqn}", address.port())
}

fn human(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if bytes >= 1 << shift {
            let whole = bytes as f64 / (1u64 << shift) as f64;
            return if bytes.is_multiple_of(1 << shift) {
                format!("{whole:.0} {unit}")
            } else {
                format!("{whole:.2} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use farside::rdma::{Caps, DeviceId, DeviceInfo};

    use super::*;

    #[test]
    fn sizes_are_read_at_a_glance() {
        assert_eq!(human(1 << 30), "1 GiB");
        assert_eq!(human(1536 << 20), "1.50 GiB");
        assert_eq!(human(100), "100 B");
    }

    #[test]
    fn table_names_device_gid_and_memory_of_each_listener() {
        let caps = Caps {
            max_qp_wr: 1,
            max_cqe: 1,
            max_qp: 1,
            max_srq_wr: 1,
            max_recv_sge: 1,
            max_inline: 0,
            max_initiator_depth: 1,
            max_responder_resources: 1,
            send_with_invalidate: true,
            read_sink_needs_remote_write: false,
        };
        let gid = "fd00::2 (RoCE v2)".into();
        let device = DeviceInfo { id: DeviceId(7), name: "mlx5_0".into(), gid, mtu: 4096, caps };
        let served = Served {
            provider: "verbs",
            listeners: vec![("[fd00::2]:4420".parse().unwrap(), Some(device)), ("0.0.0.0:4421".parse().unwrap(), None)],
            subsystems: vec![("nqn.x".into(), Vec::new())],
            memory: 172 << 20,
            reactors: 2,
            remarks: vec!["a remark".into()],
        };
        assert_eq!(
            table(&served),
            "subsystem  nqn.x\n\
             listener   [fd00::2]:4420  mlx5_0  GID fd00::2 (RoCE v2)  path MTU 4096\n\
             listener   0.0.0.0:4421  every RDMA device\n\
             memory     172 MiB registered, 2 reactors, provider verbs\n\
             \u{20}          a remark\n\
             connect    nvme connect -t rdma -a fd00::2 -s 4420 -n nqn.x\n\
             connect    nvme connect -t rdma -a ADDRESS-OF-THIS-MACHINE -s 4421 -n nqn.x\n"
        );
    }

    #[test]
    fn figures_name_each_namespace_with_both_directions() {
        let held = Counters { controllers: 2, queues: 6, connections_accepted: 9, ..Counters::default() };
        let one = IoTotals { nqn: "nqn.x".into(), nsid: 3, reads: 1, bytes_read: 512, ..IoTotals::default() };
        assert_eq!(
            figures(&held, &[one]),
            "connected  2 controllers, 6 queues, 0 commands under way; connections: 9 accepted, 0 rejected\n\
             traffic    nqn.x namespace 3: 1 reads of 512 bytes, 0 writes of 0 bytes, 0 errors\n"
        );
    }

    #[test]
    fn connect_line_is_what_nvme_cli_takes() {
        assert_eq!(
            connect_line("[fd00::2]:4420".parse().unwrap(), "nqn.2026-11.io.farside:disk"),
            "nvme connect -t rdma -a fd00::2 -s 4420 -n nqn.2026-11.io.farside:disk"
        );
    }
}
