//! The checks.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};

use nix::ifaddrs::getifaddrs;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{getsockopt, sockopt};

use super::{Doctor, Finding, Severity};
use crate::config::{Bytes, may_lock_anything};
use crate::rdma::soft::is_served;

/// The registered port of RoCEv2.
const ROCE_PORT: u16 = 4791;

/// Bytes of headers in a RoCEv2 packet over IPv6 with a 4096 byte payload, rounded up as people set it.
const MTU_FOR_4096: u32 = 4200;

fn good(object: impl Into<String>, reason: impl Into<String>) -> Finding {
    Finding { severity: Severity::Good, object: object.into(), reason: reason.into(), remedy: String::new() }
}

fn hint(object: impl Into<String>, reason: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { severity: Severity::Hint, object: object.into(), reason: reason.into(), remedy: remedy.into() }
}

fn fault(object: impl Into<String>, reason: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { severity: Severity::Fault, object: object.into(), reason: reason.into(), remedy: remedy.into() }
}

impl Doctor {
    fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Names of a folder's entries, in order.
    fn entries(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }

    pub(super) fn io_uring(&self) -> Finding {
        const OBJECT: &str = "io_uring";
        let switch = self.read("proc/sys/kernel/io_uring_disabled");
        if let Some(refused) = switched_off(switch.as_deref(), nix::unistd::geteuid().is_root()) {
            return refused;
        }
        match io_uring::IoUring::new(4) {
            Ok(_) => good(OBJECT, "works"),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                let remedy = "run the container with the profile that `farside doctor --seccomp-profile` prints";
                fault(OBJECT, "is refused, as container engines' default seccomp profile does", remedy)
            }
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOMEM) => fault(
                OBJECT,
                "has no memory that may be locked",
                "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit",
            ),
            Err(error) => fault(OBJECT, error.to_string(), "use Linux 6.1 or newer"),
        }
    }

    fn device_names(&self) -> Vec<String> {
        self.entries("sys/class/infiniband")
    }

    pub(super) fn has_devices(&self) -> bool {
        !self.device_names().is_empty()
    }

    pub(super) fn devices(&self) -> Vec<Finding> {
        let names = self.device_names();
        if names.is_empty() {
            let remedy = "rdma link add rxe0 type rxe netdev eth0, or load the NIC's driver; \
                          the software provider (--provider soft) needs none";
            let reason = "there is none";
            return vec![if self.verbs {
                fault("RDMA device", reason, remedy)
            } else {
                hint("RDMA device", reason, remedy)
            }];
        }
        names.iter().flat_map(|name| self.ports(name)).collect()
    }

    fn ports(&self, device: &str) -> Vec<Finding> {
        let folder = PathBuf::from("sys/class/infiniband").join(device).join("ports");
        self.entries(&folder).iter().map(|port| self.port(device, port, &folder.join(port))).collect()
    }

    fn port(&self, device: &str, port: &str, folder: &Path) -> Finding {
        let object = format!("{device} port {port}");
        let state = self.read(folder.join("state")).unwrap_or_default();
        let netdev = self.entries(folder.join("gid_attrs/ndevs"));
        let netdev = netdev.iter().find_map(|index| self.read(folder.join("gid_attrs/ndevs").join(index)));
        if !state.contains("ACTIVE") {
            let of = netdev.map(|netdev| format!(" ({netdev})")).unwrap_or_default();
            let state = state.split_once(": ").map_or(state.as_str(), |(_, word)| word).to_owned();
            return fault(object, format!("is {state}{of}"), "plug the cable in, and `ip link set .. up`");
        }
        let ethernet = self.read(folder.join("link_layer")).as_deref() == Some("Ethernet");
        if !ethernet {
            return good(object, "is active, InfiniBand");
        }
        let gids = self.gids(folder);
        let with_address = gids.iter().filter(|(gid, kind)| *kind == "RoCE v2" && !is_link_local(gid)).count();
        if with_address > 0 {
            return good(object, format!("is active, with {with_address} RoCE v2 GIDs of IP addresses"));
        }
        if gids.iter().any(|(_, kind)| kind == "RoCE v2") {
            let of = netdev.unwrap_or_else(|| "its interface".into());
            return fault(
                object,
                "has no GID of an IP address",
                format!("give {of} an address: ip address add .. dev {of}"),
            );
        }
        fault(
            object,
            "has no RoCE v2 GID",
            "switch RoCE v2 on in the NIC, or use another device: version 1 is not routed",
        )
    }

    /// GIDs that are there, with their kind.
    fn gids(&self, port: &Path) -> Vec<(Ipv6Addr, String)> {
        let indices = self.entries(port.join("gids"));
        let gid = |index: &String| {
            let gid: Ipv6Addr = self.read(port.join("gids").join(index))?.parse().ok()?;
            let kind = self.read(port.join("gid_attrs/types").join(index))?;
            (!gid.is_unspecified()).then_some((gid, kind))
        };
        indices.iter().filter_map(gid).collect()
    }

    pub(super) fn nodes(&self) -> Vec<Finding> {
        let node = |path: &str, what: &str, module: &str| {
            let object = format!("/{path}");
            match fs::File::options().read(true).write(true).open(self.root.join(path)) {
                Ok(_) => good(object, what),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    fault(object, "is not there", format!("modprobe {module}"))
                }
                Err(error) => {
                    fault(object, error.to_string(), "let this user read and write it (a udev rule, or root)")
                }
            }
        };
        let mut findings = vec![node("dev/infiniband/rdma_cm", "connections can be managed", "rdma_ucm")];
        let verbs = self.entries("dev/infiniband").into_iter().filter(|name| name.starts_with("uverbs"));
        let verbs: Vec<_> =
            verbs.map(|name| node(&format!("dev/infiniband/{name}"), "can be used", "ib_uverbs")).collect();
        if verbs.is_empty() {
            findings.push(node("dev/infiniband/uverbs0", "can be used", "ib_uverbs"));
        }
        findings.extend(verbs);
        findings
    }

    pub(super) fn memlock(&self) -> Finding {
        const OBJECT: &str = "memlock limit";
        let status = self.read("proc/self/status").unwrap_or_default();
        let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(u64::MAX, |(soft, _)| soft);
        if may_lock_anything(&status) || limit >= self.memory {
            return good(OBJECT, format!("{} of registered memory fit", Bytes(self.memory)));
        }
        let reason = format!("is {}, and {} are to be registered", Bytes(limit), Bytes(self.memory));
        if self.verbs || self.has_devices() {
            return fault(
                OBJECT,
                reason,
                "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or a smaller pool_size",
            );
        }
        let reason = format!("{reason} with io_uring: farside does without, a little slower");
        hint(OBJECT, reason, "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit")
    }

    pub(super) fn huge_pages(&self) -> Finding {
        const OBJECT: &str = "huge pages";
        let meminfo = self.read("proc/meminfo").unwrap_or_default();
        let number = |key: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|line| line.split_whitespace().next())
                .and_then(|number| number.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let free = number("HugePages_Free:") * number("Hugepagesize:") * 1024;
        if free >= self.memory {
            return good(OBJECT, format!("{} are free", Bytes(free)));
        }
        let reason = format!("{} are free, {} would be used", Bytes(free), Bytes(self.memory));
        hint(OBJECT, reason, "optional: sysctl vm.nr_hugepages=.. before the start; plain pages serve as well")
    }

    pub(super) fn listen_address(&self, address: IpAddr) -> Vec<Finding> {
        let object = format!("address {address}");
        if let Err(error) = UdpSocket::bind((address, 0)) {
            let reason = match error.kind() {
                ErrorKind::AddrNotAvailable => "is no address of this machine".to_owned(),
                _ => error.to_string(),
            };
            return vec![fault(object, reason, "see `ip address`, or add the address first")];
        }
        let mut findings = Vec::new();
        let netdev = interface_of(address);
        findings
            .push(good(object, netdev.as_ref().map_or_else(|| "is ours".to_owned(), |name| format!("is {name}'s"))));
        if let Some(name) = &netdev {
            findings.extend(self.mtu(name));
            findings.extend(self.congestion(name));
            if self.has_devices() {
                findings.extend(self.priorities(name));
            }
        }
        findings.extend(self.device_of(address, netdev.as_deref()));
        findings.push(self.roce_port(address));
        findings
    }

    fn mtu(&self, netdev: &str) -> Option<Finding> {
        let mtu: u32 = self.read(format!("sys/class/net/{netdev}/mtu"))?.parse().ok()?;
        let object = format!("MTU of {netdev}");
        Some(if mtu >= MTU_FOR_4096 {
            good(object, format!("{mtu}: packets carry 4096 bytes if the other end's does too"))
        } else {
            let remedy = format!("ip link set {netdev} mtu {MTU_FOR_4096} or more on both ends and on the switch");
            hint(object, format!("{mtu}: packets carry {} bytes", carried(mtu)), remedy)
        })
    }

    /// Priority flow control and the trust in DSCP, where the driver has files for them (mlx5 of the vendor's package has); the
    /// kernel itself tells them over netlink alone (DCB), which `dcb` of iproute2 asks.
    fn priorities(&self, netdev: &str) -> Vec<Finding> {
        let folder = format!("sys/class/net/{netdev}/qos");
        let pfc = format!("PFC of {netdev}");
        let mut findings = vec![match self.read(format!("{folder}/pfc")) {
            None => {
                let remedy = format!("ask with `dcb pfc show dev {netdev}`; it has to be the same on the switch");
                hint(pfc, "its driver does not tell which priorities pause", remedy)
            }
            Some(text) => match text.split(',').filter(|priority| priority.trim() == "1").count() {
                0 => {
                    let remedy = "switch it on for RoCE's priority, on the switch too, or rely on ECN alone";
                    hint(pfc, "is off on every priority: full buffers drop packets", remedy)
                }
                count => good(pfc, format!("pauses {count} priorities")),
            },
        }];
        let dscp = format!("DSCP of {netdev}");
        findings.push(match self.read(format!("{folder}/trust")).as_deref() {
            None => {
                let remedy =
                    format!("ask with `dcb app show dev {netdev}` (dscp-prio); the switch has to map it alike");
                hint(dscp, "its driver does not tell whether it chooses the priority", remedy)
            }
            Some("dscp") => good(dscp, "is trusted: it chooses the priority"),
            Some(other) => hint(
                dscp,
                format!("chooses no priority: the port trusts {other}"),
                "trust dscp on NIC and switch, or tag with a VLAN",
            ),
        });
        findings
    }

    /// What a NIC's driver tells of congestion control. Most tell nothing, and nothing else of the kernel does: that is only
    /// said when there are devices.
    fn congestion(&self, netdev: &str) -> Option<Finding> {
        let object = format!("ECN of {netdev}");
        let enabled = self.entries(format!("sys/class/net/{netdev}/ecn/roce_np/enable"));
        if enabled.is_empty() {
            let remedy = "ask with the NIC vendor's tool; the switch has to mark packets of the same DSCP";
            let reason = "its driver does not tell whether congestion notifications are answered";
            return self.has_devices().then(|| hint(object, reason, remedy));
        }
        let on = |index: &&String| {
            self.read(format!("sys/class/net/{netdev}/ecn/roce_np/enable/{index}")).as_deref() == Some("1")
        };
        let count = enabled.iter().filter(on).count();
        Some(if count > 0 {
            good(object, format!("congestion notifications are answered on {count} priorities"))
        } else {
            hint(
                object,
                "congestion notifications are off on every priority",
                "switch RoCE ECN on, with the same DSCP on NIC and switch",
            )
        })
    }

    /// Whether an RDMA device serves the address; only said when there are devices.
    fn device_of(&self, address: IpAddr, netdev: Option<&str>) -> Option<Finding> {
        let devices = self.device_names();
        if devices.is_empty() {
            return None;
        }
        let wanted = match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let has = |device: &&String| {
            let ports = PathBuf::from("sys/class/infiniband").join(device).join("ports");
            self.entries(&ports).iter().any(|port| self.gids(&ports.join(port)).iter().any(|(gid, _)| *gid == wanted))
        };
        let object = format!("RDMA device of {address}");
        Some(match devices.iter().find(has) {
            Some(device) => good(object, format!("is {device}")),
            None => {
                let netdev = netdev.unwrap_or("the interface");
                let remedy = format!(
                    "rdma link add rxe0 type rxe netdev {netdev}, or listen on the address of {}",
                    devices.join(", ")
                );
                let reason = "there is none: no device has its GID";
                if self.verbs { fault(object, reason, remedy) } else { hint(object, reason, remedy) }
            }
        })
    }

    fn roce_port(&self, address: IpAddr) -> Finding {
        let object = format!("UDP port {ROCE_PORT} of {address}");
        match UdpSocket::bind((address, ROCE_PORT)) {
            Ok(_) => good(object, "is free for the software provider"),
            Err(error) if error.kind() == ErrorKind::AddrInUse && is_served(address) => {
                good(object, "is held by a farside process, which serves there")
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let kernel = self.device_names().iter().any(|name| name.starts_with("rxe") || name.starts_with("siw"));
                let who = if kernel {
                    "rdma_rxe of this network namespace"
                } else {
                    "another program, or a software RDMA device"
                };
                let remedy = "use --provider verbs, or `rdma link delete` that device";
                hint(object, format!("is held by {who}: the software provider cannot serve here"), remedy)
            }
            Err(error) => hint(object, error.to_string(), ""),
        }
    }

    pub(super) fn route(&self, peer: IpAddr) -> Vec<Finding> {
        let object = format!("route to {peer}");
        let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let from = self.address.unwrap_or(any);
        let socket = UdpSocket::bind((from, 0));
        let connected = socket.and_then(|socket| {
            socket.connect(SocketAddr::new(peer, ROCE_PORT))?;
            Ok((socket.local_addr()?, way_mtu(&socket, peer)))
        });
        match connected {
            Ok((local, mtu)) => {
                let leaves = good(object, format!("leaves from {}", local.ip()));
                std::iter::once(leaves).chain(mtu.map(|mtu| mtu_towards(peer, mtu))).collect()
            }
            Err(error) => {
                let remedy = format!("see `ip route get {peer}` on this end, and the same there");
                vec![fault(object, error.to_string(), remedy)]
            }
        }
    }
}

/// The MTU that the kernel knows of the way to whom the socket is connected: its route's, or what a router on the way said.
fn way_mtu(socket: &UdpSocket, peer: IpAddr) -> Option<u32> {
    let mtu = match peer {
        IpAddr::V4(_) => getsockopt(socket, sockopt::IpMtu).ok()?,
        // Linux tells it for IPv6 sockets by another option, which `nix` has no name for: the route is the interface's.
        IpAddr::V6(_) => return None,
    };
    u32::try_from(mtu).ok()
}

/// What packets carry on a way. The other end's MTU and the switches' are not known here: connections settle on the smaller.
pub(super) fn mtu_towards(peer: IpAddr, mtu: u32) -> Finding {
    let object = format!("MTU towards {peer}");
    if mtu >= MTU_FOR_4096 {
        return good(object, format!("{mtu}: packets carry 4096 bytes if the other end's does too"));
    }
    let remedy =
        format!("mtu {MTU_FOR_4096} or more on both ends, and on switches and routes between (ip route get {peer})");
    hint(object, format!("{mtu}: packets carry {} bytes", carried(mtu)), remedy)
}

/// Bytes of data in a RoCE packet: the path MTU that fits.
fn carried(mtu: u32) -> u32 {
    [2048, 1024, 512, 256].into_iter().find(|size| size + 100 <= mtu).unwrap_or(0)
}

/// What the kernel's switch for io_uring says.
pub(super) fn switched_off(switch: Option<&str>, root: bool) -> Option<Finding> {
    const OBJECT: &str = "io_uring";
    match switch {
        Some("2") => Some(fault(OBJECT, "is switched off on this machine", "sysctl kernel.io_uring_disabled=0")),
        Some("1") if !root => {
            let remedy = "sysctl kernel.io_uring_disabled=0, or join the group of kernel.io_uring_group";
            Some(fault(OBJECT, "is only for privileged users on this machine", remedy))
        }
        _ => None,
    }
}

fn is_link_local(gid: &Ipv6Addr) -> bool {
    gid.is_unicast_link_local()
}

fn interface_of(address: IpAddr) -> Option<String> {
    getifaddrs().ok()?.find_map(|interface| {
        let own = interface.address.as_ref()?;
        let v4 = own.as_sockaddr_in().map(|own| IpAddr::V4(own.ip()));
        let v6 = own.as_sockaddr_in6().map(|own| IpAddr::V6(own.ip()));
        (v4.or(v6) == Some(address)).then_some(interface.interface_name)
    })
}
