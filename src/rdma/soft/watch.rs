//! Tells when addresses or network devices of this machine change: the kernel's messages, which are counted, not read. What
//! changed is then looked up.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

/// A subscription to the kernel's messages about links and addresses.
#[derive(Debug)]
pub(super) struct Watch(OwnedFd);

impl Watch {
    pub(super) fn open() -> nix::Result<Self> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups.unsigned_abs()))?;
        Ok(Self(fd))
    }

    /// Whether anything changed since the last time.
    pub(super) fn changed(&self) -> bool {
        let (mut buffer, mut changed) = ([0; 8192], false);
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(_) => changed = true,
                // More changes than the buffer held: something did.
                Err(nix::Error::ENOBUFS) => changed = true,
                Err(nix::Error::EINTR) => {}
                Err(_) => return changed,
            }
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
