//! A local address: its lock, its sockets, its connection management.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket};

use super::SoftOptions;
use super::cm::CmState;
use super::headers::Headers;
use super::ids::SharedIds;
use super::socket::Socket;
use super::steer;
use super::world::World;
use crate::rdma::{DeviceId, RdmaError};
use crate::roce::{Mtu, UDP_PORT};

/// One local address. Everything of it closes when the last user is gone.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) id: DeviceId,
    pub(super) address: IpAddr,
    /// The network device that has the address.
    pub(super) interface: String,
    /// The path MTU's code: that of the network device may change.
    mtu: AtomicU8,
    /// Counts those changes.
    changes: AtomicU32,
    pub(super) cm_socket: Socket,
    /// One for each reactor, opened when it is first used. Their order is what the steering program counts by.
    sockets: Mutex<Vec<Arc<Socket>>>,
    scope: u32,
    world: World,
    pub(super) index_bits: u32,
    raw_headers: bool,
    cm: Mutex<CmState>,
    /// What all sockets together know of the peers' IPv4 identifications.
    pub(super) ids: Arc<SharedIds>,
    _lock: Option<OwnedFd>,
}

impl Device {
    /// Takes the address for this process.
    pub(super) fn open(
        id: DeviceId,
        address: IpAddr,
        scope: u32,
        options: &SoftOptions,
        world: &World,
    ) -> Result<Self, RdmaError> {
        let reactors = options.reactors;
        #[cfg(test)]
        if let World::Simulated(machine) = world {
            return Self::simulated(id, address, reactors, world, machine.mtu());
        }
        let lock = lock(address)?;
        let cm_socket = world.bind(address, scope, None).map_err(|error| bind_error(address, &error))?;
        steer::attach(&cm_socket.fd, reactors).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(0);
            RdmaError::os(format!("steering packets of {address}"), errno, "a kernel of 4.5 or later is needed")
        })?;
        let (interface, mtu) = interface_of(address)?;
        let path_mtu = Mtu::for_device(mtu).ok_or_else(|| {
            RdmaError::new(
                format!("network device {interface}"),
                format!("its MTU of {mtu} is too small for RoCE"),
                "set it to 1500 or more, 4200 for full speed",
            )
        })?;
        let ids = SharedIds::new(world);
        let index_bits = steer::index_bits(reactors);
        let headers = if options.raw_headers { open_headers(address, None, index_bits)? } else { None };
        Ok(Self {
            id,
            address,
            interface,
            mtu: AtomicU8::new(path_mtu.code()),
            changes: AtomicU32::new(0),
            cm_socket,
            sockets: Mutex::default(),
            scope,
            world: world.clone(),
            index_bits,
            raw_headers: options.raw_headers,
            cm: Mutex::new(CmState::new(address, world.agent_seed(), &ids, headers)),
            ids,
            _lock: Some(lock),
        })
    }

    /// An address of a simulated machine.
    #[cfg(test)]
    fn simulated(id: DeviceId, address: IpAddr, reactors: usize, world: &World, mtu: Mtu) -> Result<Self, RdmaError> {
        let ids = SharedIds::new(world);
        Ok(Self {
            id,
            address,
            interface: "simulated".into(),
            mtu: AtomicU8::new(mtu.code()),
            changes: AtomicU32::new(0),
            cm_socket: world.bind(address, 0, None).map_err(|error| bind_error(address, &error))?,
            sockets: Mutex::default(),
            scope: 0,
            world: world.clone(),
            index_bits: steer::index_bits(reactors),
            raw_headers: false,
            cm: Mutex::new(CmState::new(address, world.agent_seed(), &ids, None)),
            ids,
            _lock: None,
        })
    }

    /// The path MTU of connections that are made now.
    pub(super) fn mtu(&self) -> Mtu {
        Mtu::from_code(self.mtu.load(Ordering::Relaxed)).unwrap_or(Mtu::B256)
    }

    /// How often the network device changed.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Whether this machine still has the address. Notes a change of its MTU.
    pub(super) fn look_again(&self) -> bool {
        let Ok((_, mtu)) = interface_of(self.address) else { return false };
        let code = Mtu::for_device(mtu).unwrap_or(Mtu::B256).code();
        if self.mtu.swap(code, Ordering::Relaxed) != code {
            tracing::info!(address = %self.address, mtu, "the MTU changed; new connections go by it");
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// The socket of a reactor.
    pub(super) fn socket(&self, reactor: usize) -> Result<Arc<Socket>, RdmaError> {
        if reactor >= 1 << self.index_bits {
            let reason = format!("the software provider has room for {}", 1 << self.index_bits);
            return Err(RdmaError::new(format!("reactor {reactor} of {}", self.address), reason, "use fewer reactors"));
        }
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        while sockets.len() <= reactor {
            let socket = self
                .world
                .bind(self.address, self.scope, Some(sockets.len()))
                .map_err(|error| bind_error(self.address, &error))?;
            sockets.push(Arc::new(socket));
        }
        Ok(Arc::clone(&sockets[reactor]))
    }

    /// Where a reactor sees the headers of its packets, if that was asked for.
    pub(super) fn headers(&self, reactor: usize) -> Result<Option<Headers>, RdmaError> {
        if self.raw_headers { open_headers(self.address, Some(reactor), self.index_bits) } else { Ok(None) }
    }

    /// Connection management of this address.
    pub(super) fn cm(&self) -> MutexGuard<'_, CmState> {
        self.cm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_headers(address: IpAddr, reactor: Option<usize>, index_bits: u32) -> Result<Option<Headers>, RdmaError> {
    Headers::open(address, reactor, index_bits).map_err(|error| {
        let remedy =
            "raw_headers needs CAP_NET_RAW: run as root, or `setcap cap_net_raw+ep` on the program, or turn it off";
        RdmaError::os(format!("IPv4 headers of {address}"), error.raw_os_error().unwrap_or(0), remedy)
    })
}

/// Whether a farside process serves RoCE on the address, this one included.
pub(super) fn is_served(address: IpAddr) -> bool {
    let name = UnixAddr::new_abstract(lock_name(address).as_bytes());
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
    matches!(
        (name, socket),
        (Ok(name), Ok(fd)) if bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &name) == Err(nix::Error::EADDRINUSE)
    )
}

/// The process that serves RoCE on an address of this machine, this one included, as far as this user may see: it holds the
/// lock of the address.
pub(super) fn owner(address: IpAddr) -> Option<u32> {
    let name = format!("@{}", lock_name(address));
    let table = std::fs::read_to_string("/proc/net/unix").ok()?;
    let of = |line: &str| {
        let mut fields = line.split_whitespace().skip(6);
        let inode = fields.next()?.to_owned();
        (fields.next()? == name).then_some(inode)
    };
    let inode = table.lines().find_map(of)?;
    let socket = std::path::PathBuf::from(format!("socket:[{inode}]"));
    let holds = |process: &std::fs::DirEntry| {
        let open = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        open.into_iter().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| link == socket))
    };
    let mut processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.find_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        holds(&process).then_some(pid)
    })
}

fn lock_name(address: IpAddr) -> String {
    format!("farside/roce/{address}")
}

/// Keeps a second process off the address: two of them would take each other's packets. The name lives in the network
/// namespace, as the address does, and goes with the process.
fn lock(address: IpAddr) -> Result<OwnedFd, RdmaError> {
    let what = || format!("address {address}");
    let os = |errno: nix::Error| RdmaError::os(what(), errno as i32, "");
    let fd = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).map_err(os)?;
    let name = UnixAddr::new_abstract(lock_name(address).as_bytes()).map_err(os)?;
    match bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &name) {
        Ok(()) => Ok(fd),
        Err(nix::Error::EADDRINUSE) => Err(RdmaError::new(
            what(),
            "another farside process serves RoCE on it",
            "use another address (127.0.0.2, or a second one of the network device; as a host: --source 127.0.0.2), or stop that one",
        )),
        Err(errno) => Err(os(errno)),
    }
}

fn bind_error(address: IpAddr, error: &io::Error) -> RdmaError {
    let what = format!("UDP port {UDP_PORT} of {address}");
    let errno = error.raw_os_error().unwrap_or(0);
    match errno {
        libc::EADDRINUSE => RdmaError {
            what,
            reason: "in use: RoCEv2 has this one port, and rdma_rxe or another RoCE stack of this network namespace holds it"
                .into(),
            remedy: "use the verbs provider over rdma_rxe, remove it (rdma link delete rxe0; rmmod rdma_rxe), or run farside \
                     in a network namespace of its own"
                .into(),
            errno,
        },
        libc::EADDRNOTAVAIL => RdmaError::os(what, errno, "the address is not one of this machine; see `ip address`"),
        _ => RdmaError::os(what, errno, ""),
    }
}

/// The network device that has an address, and its MTU.
fn interface_of(address: IpAddr) -> Result<(String, u32), RdmaError> {
    let addresses = nix::ifaddrs::getifaddrs()
        .map_err(|errno| RdmaError::os("network devices of this machine", errno as i32, ""))?;
    let name = addresses
        .filter(|entry| entry.address.as_ref().and_then(ip_of) == Some(address))
        .map(|entry| entry.interface_name)
        .next();
    let name = match (name, address) {
        (Some(name), _) => name,
        // The whole of 127.0.0.0/8 is local, though only one address is listed.
        (None, IpAddr::V4(v4)) if v4.is_loopback() => "lo".into(),
        (None, _) => return Err(RdmaError::new(format!("address {address}"), "no network device has it", "")),
    };
    let mtu = mtu_of(&name)
        .map_err(|error| RdmaError::os(format!("MTU of {name}"), error.raw_os_error().unwrap_or(0), ""))?;
    Ok((name, mtu))
}

/// Addresses of this machine, of one family, that packets can be sent from.
pub(super) fn local_addresses(v4: bool) -> Vec<(IpAddr, u32)> {
    let Ok(addresses) = nix::ifaddrs::getifaddrs() else {
        return Vec::new();
    };
    let mut found: Vec<(IpAddr, u32)> = addresses
        .filter_map(|entry| {
            let address = entry.address.as_ref()?;
            let scope = address.as_sockaddr_in6().map_or(0, nix::sys::socket::SockaddrIn6::scope_id);
            Some((ip_of(address)?, scope))
        })
        .filter(|(ip, _)| ip.is_ipv4() == v4)
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn ip_of(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

fn mtu_of(interface: &str) -> io::Result<u32> {
    let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: an interface request of zeros is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from as libc::c_char;
    }
    // SAFETY: `request` lives until the call returns, and has room for the answer.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&fd), libc::SIOCGIFMTU as _, &raw mut request) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFMTU filled in this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// The address from which to reach `peer`: on loopback one of its own, as both ends use the same port.
pub(super) fn choose_source(peer: SocketAddr, taken: impl Fn(IpAddr) -> bool) -> io::Result<IpAddr> {
    let IpAddr::V4(v4) = peer.ip() else {
        return super::socket::source_for(peer);
    };
    if !v4.is_loopback() {
        return super::socket::source_for(peer);
    }
    (2..=254)
        .map(|last| IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)))
        .find(|address| *address != peer.ip() && !taken(*address))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))
}
