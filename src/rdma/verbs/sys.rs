//! What the bindings leave out: error numbers, socket addresses, and the option numbers of `rdma/rdma_cma.h`, which are
//! anonymous enums there and so unknown to the bindings.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// `RDMA_OPTION_ID`: options of an id, as against those of its InfiniBand path.
pub(super) const OPTION_ID: i32 = 0;
/// `RDMA_OPTION_ID_TOS`: one byte, the type of service.
pub(super) const OPTION_ID_TOS: i32 = 0;
/// `RDMA_OPTION_ID_AFONLY`: an int; an IPv6 wildcard listener leaves IPv4 alone.
pub(super) const OPTION_ID_AFONLY: i32 = 2;

/// Link layer of a port, from `infiniband/verbs.h`: 2 = Ethernet.
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;

/// The error number that the last C call left behind.
pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// CM events carry either a negative error number, or -1 when the number is in `errno`.
pub(super) fn event_errno(status: i32) -> i32 {
    match status {
        0 => libc::EIO,
        -1 => errno(),
        negative if negative < 0 => -negative,
        positive => positive,
    }
}

/// A socket address in the form that C wants.
pub(super) fn to_storage(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: all zeros is a valid sockaddr_storage (family AF_UNSPEC).
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(v4) => {
            let sin = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is larger than and aligned for every socket address.
            unsafe { std::ptr::from_mut(&mut storage).cast::<libc::sockaddr_in>().write(sin) };
        }
        SocketAddr::V6(v6) => {
            let sin6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { std::ptr::from_mut(&mut storage).cast::<libc::sockaddr_in6>().write(sin6) };
        }
    }
    storage
}

/// The reverse of [`to_storage`]; `None` for other families (an AF_IB address, or none yet).
pub(super) fn from_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that a sockaddr_in lies there, and the storage is large enough for it.
            let sin = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(sin.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that a sockaddr_in6 lies there, and the storage is large enough for it.
            let sin6 = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
            let port = u16::from_be(sin6.sin6_port);
            Some(SocketAddr::V6(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id)))
        }
        _ => None,
    }
}

/// A wildcard of the same family as `like`, for addresses that are not known.
pub(super) fn unspecified(like: Option<IpAddr>) -> SocketAddr {
    match like {
        Some(IpAddr::V6(_)) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        _ => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["192.168.77.1:4420", "0.0.0.0:1", "[fd00::2]:4420", "[fe80::1%7]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_storage(&to_storage(address)), Some(address), "{text}");
        }
    }

    #[test]
    fn ports_and_addresses_lie_in_network_order() {
        let storage = to_storage("192.168.77.1:4420".parse().unwrap());
        // SAFETY: a sockaddr_storage is plain bytes, longer than 8.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&storage).cast::<u8>(), 8) };
        assert_eq!(&bytes[2..], &[0x11, 0x44, 192, 168, 77, 1]);
    }

    #[test]
    fn other_families_are_no_address() {
        let mut storage = to_storage("1.2.3.4:5".parse().unwrap());
        storage.ss_family = 27;
        assert_eq!(from_storage(&storage), None);
    }

    #[test]
    fn event_status_is_an_error_number() {
        assert_eq!(event_errno(-110), 110);
        assert_eq!(event_errno(0), libc::EIO);
        assert_eq!(event_errno(19), 19);
    }
}
