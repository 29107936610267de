//! Four hosts that write 1 MiB at a time, 32 at once each, to a target whose sockets hold what the kernel's stock limit allows.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::served::{ENDPOINTS, NQN, Served, counted, own_address};

const HOSTS: usize = 4;
const LIMIT: &str = "/proc/sys/net/core/rmem_max";
const STOCK: &str = "212992";
const CAP_NET_ADMIN: libc::c_int = 12;

/// Without it no socket gets more than the limit (SO_RCVBUFFORCE), whoever runs this.
fn without_net_admin(command: &mut Command) {
    // SAFETY: the closure only makes a system call between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_CAPBSET_DROP, CAP_NET_ADMIN, 0, 0, 0) {
            0 => Ok(()),
            // Who may not give it up does not have it; see `has_net_admin`.
            _ if io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
}

fn has_net_admin(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("its capabilities");
    u64::from_str_radix(set.trim(), 16).expect("a number") >> CAP_NET_ADMIN & 1 != 0
}

/// Datagrams that the RoCE sockets of an address dropped for want of room; None when there are none.
fn drops(address: IpAddr) -> Option<u64> {
    let IpAddr::V4(v4) = address else { return None };
    let local = format!("{:08X}:{:04X}", u32::from_le_bytes(v4.octets()), farside::roce::UDP_PORT);
    let table = fs::read_to_string("/proc/net/udp").expect("the kernel's table");
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_address = rows.filter(|row| row.get(1) == Some(&local.as_str()));
    let counts: Vec<u64> = of_address.filter_map(|row| row.last()?.parse().ok()).collect();
    (!counts.is_empty()).then(|| counts.iter().sum())
}

fn host(served: &Served, source: IpAddr) -> Child {
    let arguments = format!(
        "--log {ENDPOINTS} bench {} --provider soft --source {source} --nqn {NQN} --hostnqn nqn.2026-11.io.example:{source} \
         --rw randwrite --bs 1M --iodepth 32 --runtime 4 --json",
        served.address
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command.args(arguments.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    without_net_admin(&mut command);
    command.spawn().expect("the program")
}

#[test]
#[ignore = "needs the stock limit: a guest runs it (tests/vm/cases/cases_programs.py)"]
fn four_hosts_of_large_writes_overflow_no_socket_at_the_stock_limit() {
    assert_eq!(
        fs::read_to_string(LIMIT).expect("the kernel's limit").trim(),
        STOCK,
        "{LIMIT} is to be the stock limit"
    );
    let options = "reactors = 1\nreceive_slots = 1024\npool_size = \"64M\"";
    let mut served = Served::start_with(options, "memory = \"256M\"", |command| {
        command.args(["--log", ENDPOINTS]);
        without_net_admin(command);
    });
    assert!(!has_net_admin(served.pid()), "it can go beyond the limit");
    let sources: Vec<IpAddr> = (0..HOSTS).map(|_| own_address()).collect();
    let mut hosts: Vec<Child> = sources.iter().map(|source| host(&served, *source)).collect();
    let addresses: Vec<IpAddr> = sources.into_iter().chain([served.address.ip()]).collect();
    let mut dropped = vec![None; addresses.len()];
    let deadline = Instant::now() + Duration::from_secs(60);
    // The sockets go with their processes: looked at while these run.
    while hosts.iter_mut().any(|host| host.try_wait().expect("a child").is_none()) {
        for (count, address) in dropped.iter_mut().zip(&addresses) {
            *count = drops(*address).or(*count);
        }
        assert!(Instant::now() < deadline, "the hosts do not end\n{}", served.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut logs = Vec::new();
    for host in hosts {
        let output = host.wait_with_output().expect("its output");
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{log}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(report["write"]["operations"].as_u64().is_some_and(|writes| writes > 32), "{report:#}");
        logs.push(log);
    }
    assert!(served.terminate(), "{}", served.log());
    logs.push(served.log());
    println!("drops: {dropped:?}\n{}", logs.join("\n"));
    assert_eq!(dropped, vec![Some(0); addresses.len()], "drops of the hosts' sockets and the target's");
    // All of them poll while there is work. One that waits for a processor is a silent peer, which is asked again: without one
    // for each, repetitions say nothing of the sockets. (On a fake clock there are none: `sim::crowd`.)
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let all_run_at_once = processors > HOSTS + 1;
    let mut repeated = 0;
    for log in &logs {
        assert!(counted(log, "received").iter().sum::<u64>() > 100, "{log}");
        // No packet was missing anywhere.
        for name in ["overflow", "read_gaps", "sequence_naks_sent", "sequence_naks_received"] {
            assert_eq!(counted(log, name).iter().sum::<u64>(), 0, "{name}:\n{log}");
        }
        for name in ["retransmitted", "timeouts"] {
            let count: u64 = counted(log, name).iter().sum();
            assert!(count == 0 || !all_run_at_once, "{name}: {count}\n{log}");
            repeated += count;
        }
    }
    println!("{repeated} repetitions and time-outs, with {processors} processors for {} processes", HOSTS + 1);
}
