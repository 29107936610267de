//! UDP sockets as RoCEv2 needs them, and the system calls that move many packets at once.
//!
//! A socket is bound to an address, never to the wildcard. Path MTU discovery is on and never fragments, so that the
//! kernel sends IPv4 identification 0 (or 0, 1, 2.. in a segmented batch) and the ICRC can be computed here.

use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::roce::{TxBatch, UDP_PORT};

/// A bound socket.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    local: IpAddr,
    scope: u32,
    /// Bytes of the receive buffer, as the kernel accounts them.
    pub(super) receive_buffer: usize,
    #[cfg(test)]
    simulated: Option<crate::sim::Port>,
    /// What went through it, for tests to look at.
    #[cfg(test)]
    pub(super) seen: std::sync::Mutex<Seen>,
}

/// What went through a socket.
#[cfg(test)]
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// System calls that sent, or received, something.
    pub(super) calls: u64,
    /// Datagrams that these sent, segmented ones once.
    pub(super) sent: u64,
    /// Datagrams that these received, those that the kernel delivered together once.
    pub(super) received: u64,
    /// First bytes of datagrams that were received, their opcodes, with the type of service of their IP headers.
    pub(super) marks: std::collections::BTreeSet<(u8, u8)>,
}

/// Received packets.
pub(super) struct RxBatch {
    buffers: Box<[u8]>,
    names: Box<[libc::sockaddr_storage]>,
    controls: Box<[Control]>,
    _iovecs: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
    /// Headers that the last call changed.
    used: usize,
    /// Datagrams that the next call asks for.
    want: usize,
    /// Bytes for each.
    room: usize,
    #[cfg(test)]
    simulated: Vec<crate::sim::Datagram>,
}

// SAFETY: the raw pointers inside `headers` and `_iovecs` point to the other boxes of the same value, which move with it.
unsafe impl Send for RxBatch {}

/// One received datagram, or several of one size that the kernel delivered together.
pub(super) struct Received<'a> {
    pub(super) from: IpAddr,
    pub(super) from_port: u16,
    /// IP type of service, or IPv6 traffic class.
    tos: u8,
    /// Bytes of each but the last.
    pub(super) segment: usize,
    pub(super) bytes: &'a [u8],
    /// Datagrams that the socket dropped so far for want of room, when the kernel said.
    pub(super) dropped: Option<u32>,
}

impl Received<'_> {
    /// Congestion experienced.
    pub(super) const fn congested(&self) -> bool {
        self.tos & ECN == ECN
    }
}

/// What became of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SendResult {
    /// All runs are sent.
    Done,
    /// The socket is full; runs from this one on are not sent.
    Full(usize),
    /// Segmentation does not work here; the run with this number was not sent.
    NoSegmentation(usize),
}

#[repr(align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_LEN]);

impl Socket {
    /// Binds the RoCEv2 port of `local`, as one of a group.
    pub(super) fn bind(local: IpAddr, scope: u32) -> io::Result<Self> {
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // SAFETY: no pointers.
        let raw = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let mut socket = Self {
            fd,
            local,
            scope,
            receive_buffer: 0,
            #[cfg(test)]
            simulated: None,
            #[cfg(test)]
            seen: std::sync::Mutex::default(),
        };
        socket.configure()?;
        let (address, len) = sockaddr(local, scope, UDP_PORT);
        // SAFETY: `address` is initialized and `len` bytes of it are a socket address.
        let bound = unsafe { libc::bind(socket.fd.as_raw_fd(), (&raw const address).cast(), len) };
        if bound != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(socket)
    }

    /// A socket on a simulated network. Its descriptor is never readable: a simulation does not sleep.
    #[cfg(test)]
    pub(super) fn simulated(local: IpAddr, port: crate::sim::Port) -> io::Result<Self> {
        let fd = nix::sys::eventfd::EventFd::new()?.into();
        let receive_buffer = port.receive_buffer();
        Ok(Self { fd, local, scope: 0, receive_buffer, simulated: Some(port), seen: std::sync::Mutex::default() })
    }

    fn configure(&mut self) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        self.set(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
        // Beyond the system's limit where we may, else up to it.
        for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
            if self.set(libc::SOL_SOCKET, force, BUFFER).is_err() {
                self.set(libc::SOL_SOCKET, plain, BUFFER)?;
            }
        }
        self.receive_buffer = usize::try_from(self.get(libc::SOL_SOCKET, libc::SO_RCVBUF)?).unwrap_or(0);
        if self.local.is_ipv4() {
            self.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
            self.set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        } else {
            self.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
            self.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
            self.set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
            // NICs and rdma_rxe send UDP checksum 0.
            self.set(libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
        }
        // Old kernels cannot; then every datagram comes by itself.
        let _ = self.set(libc::IPPROTO_UDP, libc::UDP_GRO, 1);
        Ok(())
    }

    /// Gives the DSCP of `tos` to what [`Socket::send_one`] sends; the ECN bits are for those who slow down.
    pub(super) fn set_dscp(&self, tos: u8) -> io::Result<()> {
        let dscp = i32::from(tos & !ECN);
        match self.local {
            IpAddr::V4(_) => self.set(libc::IPPROTO_IP, libc::IP_TOS, dscp),
            IpAddr::V6(_) => self.set(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, dscp),
        }
    }

    pub(super) fn set(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        let len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: `value` lives until the call returns.
        let result = unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, option, (&raw const value).cast(), len) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn get(&self, level: i32, option: i32) -> io::Result<i32> {
        let mut value = 0_i32;
        let mut len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: `value` and `len` live until the call returns, and `len` is the size of `value`.
        let result =
            unsafe { libc::getsockopt(self.fd.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len) };
        if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
    }

    /// Sends the runs of a batch from number `first` on.
    pub(super) fn send(&self, batch: &TxBatch, first: usize, scratch: &mut TxScratch) -> SendResult {
        #[cfg(test)]
        if let Some(port) = &self.simulated {
            return port.send(batch, first).map_or(SendResult::Done, SendResult::Full);
        }
        scratch.fill(self, batch, first);
        let mut sent = 0;
        while sent < scratch.headers.len() {
            let rest = &mut scratch.headers[sent..];
            // SAFETY: every header points to an address, an iovec and a control buffer in `scratch`, and these to the bytes of
            // `batch`; all live until the call returns.
            let count = unsafe {
                libc::sendmmsg(self.fd.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, libc::MSG_DONTWAIT)
            };
            if count >= 0 {
                #[cfg(test)]
                self.note(|seen| seen.sent += u64::from(count.unsigned_abs()));
                sent += count.unsigned_abs() as usize;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                libc::EAGAIN | libc::ENOBUFS => return SendResult::Full(first + sent),
                libc::EIO | libc::EINVAL | libc::ENOPROTOOPT if scratch.segmented.get(sent) == Some(&true) => {
                    return SendResult::NoSegmentation(first + sent);
                }
                // A route that is gone, a firewall, a lower MTU: the packet is lost, as on any network.
                _ => sent += 1,
            }
        }
        SendResult::Done
    }

    /// Sends one packet. That it may be lost is in the nature of datagrams.
    pub(super) fn send_one(&self, to: IpAddr, packet: &[u8]) {
        #[cfg(test)]
        if let Some(port) = &self.simulated {
            return port.send_one(to, packet);
        }
        let (name, len) = sockaddr(to, self.scope, UDP_PORT);
        // SAFETY: `packet` and `name` live until the call returns.
        let _ = unsafe {
            libc::sendto(
                self.fd.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                libc::MSG_DONTWAIT,
                (&raw const name).cast(),
                len,
            )
        };
    }

    /// Notes a system call that sent or received something.
    #[cfg(test)]
    fn note(&self, note: impl FnOnce(&mut Seen)) {
        let mut seen = self.seen.lock().expect("a panic ends the test");
        seen.calls += 1;
        note(&mut seen);
    }

    /// Receives what is there, as far as `batch` has room for it now. True when there is no more.
    pub(super) fn receive(&self, batch: &mut RxBatch) -> bool {
        #[cfg(test)]
        if let Some(port) = &self.simulated {
            batch.used = port.receive(&mut batch.simulated, batch.headers.len());
            return batch.used < batch.headers.len();
        }
        let want = batch.rearm();
        // SAFETY: every header points to buffers in `batch`, which live until the call returns, and there are `want` of them.
        let count = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                batch.headers.as_mut_ptr(),
                want as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        batch.used = usize::try_from(count).unwrap_or(0);
        batch.want = next_want(want, batch.used).min(batch.headers.len());
        #[cfg(test)]
        if batch.used > 0 {
            self.note(|seen| {
                seen.received += batch.used as u64;
                let received = (0..batch.used).filter_map(|index| batch.get(index));
                seen.marks.extend(received.filter_map(|received| Some((*received.bytes.first()?, received.tos))));
            });
        }
        batch.used < want
    }
}

/// How many datagrams to ask for after `count` came of `want`: the kernel's search for one that is not there costs as much as a
/// system call of its own.
const fn next_want(want: usize, count: usize) -> usize {
    match count {
        _ if count == want => want * 2,
        _ if count < want / 2 => want / 2,
        _ => want,
    }
}

/// What a sending system call points to.
#[derive(Default)]
pub(super) struct TxScratch {
    names: Vec<libc::sockaddr_storage>,
    iovecs: Vec<libc::iovec>,
    controls: Vec<Control>,
    headers: Vec<libc::mmsghdr>,
    segmented: Vec<bool>,
    lens: Vec<(libc::socklen_t, usize)>,
}

// SAFETY: the raw pointers are only followed during `Socket::send`, which fills them in first.
unsafe impl Send for TxScratch {}

impl TxScratch {
    fn fill(&mut self, socket: &Socket, batch: &TxBatch, first: usize) {
        self.names.clear();
        self.iovecs.clear();
        self.controls.clear();
        self.headers.clear();
        self.segmented.clear();
        self.lens.clear();
        for (run, bytes) in batch.runs().skip(first) {
            let (name, name_len) = sockaddr(run.remote, socket.scope, UDP_PORT);
            self.names.push(name);
            self.iovecs.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
            let mut control = Control([0; CONTROL_LEN]);
            let control_len = control.for_run(socket.local.is_ipv4(), run.tos, run.segment, run.count);
            self.controls.push(control);
            self.segmented.push(run.count > 1);
            self.lens.push((name_len, control_len));
        }
        // The vectors do not grow any more: their addresses hold until the next call.
        for (i, (name_len, control_len)) in self.lens.iter().copied().enumerate() {
            // SAFETY: a message header of zeros is valid.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = (&raw mut self.names[i]).cast();
            header.msg_hdr.msg_namelen = name_len;
            header.msg_hdr.msg_iov = &raw mut self.iovecs[i];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = self.controls[i].0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = control_len;
            self.headers.push(header);
        }
    }
}

impl Control {
    /// Control messages for a run: its type of service and the size of its segments. Returns how many bytes they take.
    fn for_run(&mut self, v4: bool, tos: u8, segment: usize, count: usize) -> usize {
        let (level, kind) = if v4 { (libc::IPPROTO_IP, libc::IP_TOS) } else { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) };
        let mut len = self.put(0, level, kind, &i32::from(tos).to_ne_bytes());
        if count > 1 {
            let segment = u16::try_from(segment).unwrap_or(u16::MAX);
            len = self.put(len, libc::SOL_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
        }
        len
    }

    /// Puts a control message at `at`; returns where the next one goes.
    fn put(&mut self, at: usize, level: i32, kind: i32, data: &[u8]) -> usize {
        const HEADER: usize = size_of::<libc::cmsghdr>();
        let len = HEADER + data.len();
        self.0[at..at + size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
        self.0[at + 8..at + 12].copy_from_slice(&level.to_ne_bytes());
        self.0[at + 12..at + 16].copy_from_slice(&kind.to_ne_bytes());
        self.0[at + HEADER..at + len].copy_from_slice(data);
        at + len.next_multiple_of(size_of::<usize>())
    }

    /// Every control message of the first `len` bytes.
    fn messages(&self, len: usize) -> impl Iterator<Item = (i32, i32, &[u8])> {
        const HEADER: usize = size_of::<libc::cmsghdr>();
        let mut rest = &self.0[..len.min(CONTROL_LEN)];
        std::iter::from_fn(move || {
            let size = usize::from_ne_bytes(*rest.first_chunk()?);
            let message = rest.get(..size)?;
            let data = message.get(HEADER..)?;
            let level = i32::from_ne_bytes(message.get(8..12)?.try_into().ok()?);
            let kind = i32::from_ne_bytes(message.get(12..16)?.try_into().ok()?);
            rest = rest.get(size.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
            Some((level, kind, data))
        })
    }
}

impl RxBatch {
    /// Room for `count` datagrams.
    pub(super) fn new(count: usize) -> Self {
        Self::with(count, DATAGRAM)
    }

    /// For simulated sockets, which bring memory of their own.
    #[cfg(test)]
    pub(super) fn simulated(count: usize) -> Self {
        Self::with(count, 1)
    }

    fn with(count: usize, room: usize) -> Self {
        // Not zeroes: pages are taken now, and no packet waits for the one that it goes to.
        let mut buffers = vec![1; count * room].into_boxed_slice();
        // SAFETY: an address of zeros is valid: of no family.
        let mut names = vec![unsafe { MaybeUninit::zeroed().assume_init() }; count].into_boxed_slice();
        let mut controls = vec![Control([0; CONTROL_LEN]); count].into_boxed_slice();
        let mut iovecs: Box<[_]> = buffers
            .chunks_mut(room)
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: room })
            .collect();
        let headers = (0..count)
            .map(|i| {
                // SAFETY: a message header of zeros is valid.
                let mut header: libc::mmsghdr = unsafe { zeroed() };
                let name: &mut libc::sockaddr_storage = &mut names[i];
                header.msg_hdr.msg_name = std::ptr::from_mut(name).cast();
                header.msg_hdr.msg_iov = &raw mut iovecs[i];
                header.msg_hdr.msg_iovlen = 1;
                header.msg_hdr.msg_control = controls[i].0.as_mut_ptr().cast();
                header
            })
            .collect();
        Self {
            buffers,
            names,
            controls,
            _iovecs: iovecs,
            headers,
            used: count,
            want: 1,
            room,
            #[cfg(test)]
            simulated: Vec::new(),
        }
    }

    /// Makes the headers that the last call changed fit for the next one. Returns how many datagrams that asks for.
    fn rearm(&mut self) -> usize {
        for header in &mut self.headers[..self.used] {
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_controllen = CONTROL_LEN;
        }
        self.used = 0;
        self.want
    }

    /// Datagrams that came.
    pub(super) const fn len(&self) -> usize {
        self.used
    }

    /// Datagram number `index` of those that came. None when its sender has no address.
    pub(super) fn get(&self, index: usize) -> Option<Received<'_>> {
        #[cfg(test)]
        if let Some(datagram) = self.simulated.get(index) {
            return Some(Received {
                from: datagram.from,
                from_port: UDP_PORT,
                tos: if datagram.congested { ECN } else { 0 },
                segment: datagram.segment,
                bytes: &datagram.bytes,
                dropped: datagram.dropped,
            });
        }
        let header = self.headers.get(index)?;
        let len = header.msg_len as usize;
        let bytes = self.buffers.get(index * self.room..)?.get(..len)?;
        let SocketSource { address, port } = SocketSource::read(&self.names[index])?;
        let mut received =
            Received { from: address, from_port: port, tos: 0, segment: len.max(1), bytes, dropped: None };
        for (level, kind, data) in self.controls[index].messages(header.msg_hdr.msg_controllen) {
            match (level, kind) {
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    received.tos = data.first().copied().unwrap_or(0);
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let size = data.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
                    received.segment = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(len).max(1);
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                    received.dropped = data.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
                }
                _ => {}
            }
        }
        Some(received)
    }
}

struct SocketSource {
    address: IpAddr,
    port: u16,
}

impl SocketSource {
    fn read(name: &libc::sockaddr_storage) -> Option<Self> {
        match i32::from(name.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that this is an IPv4 address, and the storage is large enough and aligned for any.
                let name: &libc::sockaddr_in = unsafe { &*std::ptr::from_ref(name).cast() };
                let address = IpAddr::V4(Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr)));
                Some(Self { address, port: u16::from_be(name.sin_port) })
            }
            libc::AF_INET6 => {
                // SAFETY: as above, for IPv6.
                let name: &libc::sockaddr_in6 = unsafe { &*std::ptr::from_ref(name).cast() };
                let address = IpAddr::V6(Ipv6Addr::from(name.sin6_addr.s6_addr));
                Some(Self { address, port: u16::from_be(name.sin6_port) })
            }
            _ => None,
        }
    }
}

fn sockaddr(address: IpAddr, scope: u32, port: u16) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: an address of zeros is valid.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let len = match address {
        IpAddr::V4(v4) => {
            // SAFETY: the storage is large enough and aligned for an IPv4 address.
            let name: &mut libc::sockaddr_in = unsafe { &mut *(&raw mut storage).cast() };
            name.sin_family = libc::AF_INET as libc::sa_family_t;
            name.sin_port = port.to_be();
            name.sin_addr.s_addr = u32::from(v4).to_be();
            size_of::<libc::sockaddr_in>()
        }
        IpAddr::V6(v6) => {
            // SAFETY: the storage is large enough and aligned for an IPv6 address.
            let name: &mut libc::sockaddr_in6 = unsafe { &mut *(&raw mut storage).cast() };
            name.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            name.sin6_port = port.to_be();
            name.sin6_addr.s6_addr = v6.octets();
            name.sin6_scope_id = if v6.is_unicast_link_local() { scope } else { 0 };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}

/// The address from which the kernel would reach `peer`.
pub(super) fn source_for(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr =
        if peer.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = std::net::UdpSocket::bind(any)?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

/// What is asked for; the kernel gives what the system's limit allows.
const BUFFER: i32 = 8 << 20;
/// The largest that the kernel delivers together.
const DATAGRAM: usize = 1 << 16;
const CONTROL_LEN: usize = 128;
/// The ECN bits of a type of service; both of them say that the packet met congestion (RFC 3168).
const ECN: u8 = 3;
/// Not in libc: linux/udp.h.
const UDP_NO_CHECK6_RX: i32 = 102;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_round_trip() {
        let mut control = Control([0; CONTROL_LEN]);
        let len = control.for_run(true, 0x62, 4128, 3);
        let read: Vec<_> = control.messages(len).map(|(level, kind, data)| (level, kind, data.to_vec())).collect();
        assert_eq!(
            read,
            [
                (libc::IPPROTO_IP, libc::IP_TOS, 0x62_i32.to_ne_bytes().to_vec()),
                (libc::SOL_UDP, libc::UDP_SEGMENT, 4128_u16.to_ne_bytes().to_vec()),
            ]
        );
        assert_eq!(control.for_run(false, 0, 100, 1), 24);
    }

    #[test]
    fn asks_for_as_many_datagrams_as_come() {
        let mut want = 1;
        for (count, next) in [(0, 1), (1, 2), (0, 1), (1, 2), (2, 4), (4, 8), (5, 8), (4, 8), (3, 4), (1, 2), (1, 2)] {
            want = next_want(want, count);
            assert_eq!(want, next);
        }
    }

    #[test]
    fn addresses_round_trip() {
        for address in ["127.0.0.1", "fd00::1"] {
            let address: IpAddr = address.parse().expect("ip");
            let (name, _) = sockaddr(address, 0, 4791);
            let source = SocketSource::read(&name).expect("known family");
            assert_eq!((source.address, source.port), (address, 4791));
        }
    }
}
