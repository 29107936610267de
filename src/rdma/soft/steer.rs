//! Which socket of an address gets a packet: a classic BPF program on the group of sockets (SO_REUSEPORT) reads the
//! destination queue pair number. Number 1 is connection management, on the group's first socket; of any other the low
//! bits are the reactor.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Low bits of a queue pair number that name its reactor.
pub(crate) fn index_bits(reactors: usize) -> u32 {
    reactors.next_power_of_two().trailing_zeros().max(1)
}

/// Attaches the program to the group that `socket` is the first of.
pub(super) fn attach(socket: &OwnedFd, reactors: usize) -> io::Result<()> {
    let mut program = program(index_bits(reactors));
    let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: `fprog` and the program it points to live until the call returns; the kernel copies them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const fprog).cast(),
            size_of_val(&fprog) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a filter to a raw socket: of the packets that the steering program gives to `reactor` (`None`: to connection
/// management) the first `seen` bytes, of others nothing.
pub(super) fn only_headers(socket: &OwnedFd, reactor: Option<usize>, bits: u32, seen: u32) -> io::Result<()> {
    let mut program = header_program(reactor, bits, seen);
    let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: as in `attach`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const fprog).cast(),
            size_of_val(&fprog) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Offsets count from the IPv4 header; X is its length. Fragments are none of ours.
fn header_program(reactor: Option<usize>, bits: u32, seen: u32) -> [libc::sock_filter; 13] {
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let port = u32::from(crate::roce::UDP_PORT);
    // Number 1 is connection management, which the low bits alone do not tell from a queue pair of reactor 1.
    let (management, index) = match reactor {
        None => (true, 0),
        Some(reactor) => (false, reactor as u32),
    };
    [
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 6),
        op(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 10, 0, 0x3fff),
        op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 0),
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 2),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 7, port),
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_IND, 0, 0, 12),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, 0xff_ffff),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, if management { 3 } else { 4 }, 0, 1),
        op(libc::BPF_JMP | libc::BPF_JA, 0, 0, if management { 3 } else { 0 }),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, (1 << bits) - 1),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, index),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, seen),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
}

/// Offsets count from the UDP payload: the base transport header, whose bytes 5 to 7 are the destination.
fn program(bits: u32) -> [libc::sock_filter; 7] {
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 4),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, 0xff_ffff),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 1),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, (1 << bits) - 1),
        op(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_K, 0, 0, 1),
        op(libc::BPF_RET | libc::BPF_A, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_for_reactors() {
        assert_eq!([1, 2, 3, 4, 5, 16, 17].map(index_bits), [1, 1, 2, 2, 3, 4, 5]);
    }
}
