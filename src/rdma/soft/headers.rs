//! The IPv4 headers of what arrives, for those who may see them (CAP_NET_RAW): a raw socket that is given the first bytes of
//! each packet, beside the UDP socket that is given its payload.
//!
//! With the identification known, the check of the invariant CRC is whole. Each packet is put into the raw socket's queue
//! before it is put into the UDP socket's, so when a payload was read its header is there, unless the raw socket's buffer was
//! full: then the identification is solved as without. Where the kernel delivers several packets as one, there is one header
//! for all of them, that of the first.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::steer;

/// The raw socket of one reactor, or of connection management, and the headers that it brought.
#[derive(Debug)]
pub(super) struct Headers {
    fd: OwnedFd,
    buffers: Box<[[u8; SEEN]; BATCH]>,
    heads: VecDeque<Head>,
}

/// What is kept of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    from: Ipv4Addr,
    id: u16,
    dont_fragment: bool,
    bth: [u8; BTH],
}

impl Headers {
    /// A raw socket for the packets to `local` that the steering program gives to this reactor; `None` is connection
    /// management. None over IPv6, which has no identification.
    pub(super) fn open(local: IpAddr, reactor: Option<usize>, index_bits: u32) -> io::Result<Option<Self>> {
        let IpAddr::V4(local) = local else { return Ok(None) };
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers.
        let raw = unsafe { libc::socket(libc::AF_INET, kind, libc::IPPROTO_UDP) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        steer::only_headers(&fd, reactor, index_bits, SEEN as u32)?;
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) },
            sin_zero: [0; 8],
        };
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: `address` lives until the call returns, and `len` is its size.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Some(Self { fd, buffers: Box::new([[0; SEEN]; BATCH]), heads: VecDeque::with_capacity(MOST) }))
    }

    /// Reads the headers that are there.
    pub(super) fn receive(&mut self) {
        loop {
            let count = self.receive_batch();
            if count < BATCH {
                return;
            }
        }
    }

    fn receive_batch(&mut self) -> usize {
        let mut iovecs =
            self.buffers.each_mut().map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: SEEN });
        let mut headers = iovecs.each_mut().map(|iovec| {
            // SAFETY: a message header of zeros is valid.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            header
        });
        // SAFETY: there are `BATCH` headers, each with one iovec over a buffer of `self`; all live until the call returns.
        let count = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                headers.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).unwrap_or(0);
        for (bytes, header) in self.buffers.iter().zip(&headers).take(count) {
            if let Some(head) = bytes.get(..header.msg_len as usize).and_then(Head::read) {
                if self.heads.len() == MOST {
                    self.heads.pop_front();
                }
                self.heads.push_back(head);
            }
        }
        count
    }

    /// The header of a datagram that was received, by its sender and its first bytes.
    pub(super) fn take(&mut self, from: IpAddr, packet: &[u8]) -> Option<Identified> {
        let bth = packet.first_chunk::<BTH>()?;
        let at = self.heads.iter().position(|head| IpAddr::V4(head.from) == from && head.bth == *bth)?;
        self.heads.remove(at).map(|head| Identified { id: head.id, dont_fragment: head.dont_fragment })
    }
}

/// What the header of a datagram says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identified {
    id: u16,
    dont_fragment: bool,
}

impl Identified {
    /// Whether these are the identification and the flag that a packet's ICRC was made for: the packet at `place` of those
    /// that were delivered with this header. The kernel counts up where it cuts a batch, and delivers equal ones together too.
    pub(super) const fn explains(self, place: u16, id: u16, dont_fragment: bool) -> bool {
        dont_fragment == self.dont_fragment && (id == self.id || id == self.id.wrapping_add(place))
    }
}

impl Head {
    fn read(bytes: &[u8]) -> Option<Self> {
        let ip = bytes.first_chunk::<20>()?;
        let ihl = usize::from(ip[0] & 15) * 4;
        let bth = bytes.get(ihl + UDP..)?.first_chunk()?;
        let [.., a, b, c, d, _, _, _, _] = *ip;
        Some(Self {
            from: Ipv4Addr::new(a, b, c, d),
            id: u16::from_be_bytes([ip[4], ip[5]]),
            dont_fragment: ip[6] & 0x40 != 0,
            bth: *bth,
        })
    }
}

/// Bytes of the base transport header.
const BTH: usize = 12;
/// Bytes of the UDP header.
const UDP: usize = 8;
/// What is seen of each packet: the longest IPv4 header, UDP, and the base transport header.
const SEEN: usize = 60 + UDP + BTH;
/// Headers that one system call takes in.
const BATCH: usize = 64;
/// Headers kept of payloads that were never read: those that the UDP socket had no room for.
const MOST: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_with_and_without_options() {
        for words in [5_u8, 8, 15] {
            let ihl = usize::from(words) * 4;
            let mut bytes = vec![0; ihl + UDP];
            bytes[..20].copy_from_slice(&[
                0x40 | words,
                2,
                0,
                0,
                0xbe,
                0xef,
                0x40,
                0,
                64,
                17,
                0,
                0,
                10,
                0,
                0,
                7,
                10,
                0,
                0,
                8,
            ]);
            bytes.extend(1..=12);
            let head = Head::read(&bytes).expect("a whole header");
            assert_eq!((head.from, head.id, head.dont_fragment), (Ipv4Addr::new(10, 0, 0, 7), 0xbeef, true));
            assert_eq!(head.bth, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
            for len in 0..bytes.len() {
                assert_eq!(Head::read(&bytes[..len]), None);
            }
        }
    }
}
