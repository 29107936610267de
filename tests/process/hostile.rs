//! Random bytes to UDP port 4791, and well-formed packets with hostile fields, at full rate. `FARSIDE_HOSTILE_SECONDS` says
//! for how long.
//!
//! The attacker sends from an address of its own, on which a host is connected, so that packets reach a queue pair that the
//! target has: numbers are guessed until they hit. Another host goes on with verified I/O meanwhile.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::host::raw::{RawHost, RawQueue};
use farside::host::{Host, HostOptions, Reconnect};
use farside::rdma::soft::Soft;
use farside::roce::cm::{self, CmaHeader, Ids, Message, Mra, Rej, Rep, Req};
use farside::roce::icrc::{self, Flow};
use farside::roce::packet::{Aeth, AtomicEth, Deth, Ext, Header, Nak, Reth, Syndrome};
use farside::roce::{Opcode, Psn, Qpn, Rkey, UDP_PORT};

use crate::served::{ENDPOINTS, NQN, Served, own_address};

fn seconds() -> u64 {
    std::env::var("FARSIDE_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

/// xorshift64*
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 8) % n
    }

    fn word(&mut self) -> u32 {
        (self.next() >> 16) as u32
    }

    /// A length or an address from the edges of the possible.
    fn edge(&mut self) -> u64 {
        let near = [0, 1, 1 << 12, 1 << 20, 1 << 31, 1 << 32, 1 << 47, 1 << 63, u64::MAX][self.below(9) as usize];
        near.wrapping_add(self.below(5)).wrapping_sub(2)
    }
}

/// So that the kernel sends identification 0 and "don't fragment", as the ICRC says.
fn never_fragment(socket: &UdpSocket) {
    let value: libc::c_int = libc::IP_PMTUDISC_DO;
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` lives until the call returns, and `len` is its size.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, (&raw const value).cast(), len)
    };
    assert_eq!(result, 0, "path MTU discovery");
}

struct Attacker {
    socket: UdpSocket,
    flow: Flow,
    to: SocketAddr,
    rng: Rng,
    bytes: Vec<u8>,
}

impl Attacker {
    fn new(from: IpAddr, to: IpAddr, seed: u64) -> Self {
        let socket = UdpSocket::bind((from, 0)).expect("a socket");
        let src_port = socket.local_addr().expect("bound").port();
        never_fragment(&socket);
        Self {
            socket,
            flow: Flow { src: from, dst: to, src_port },
            to: SocketAddr::new(to, UDP_PORT),
            rng: Rng(seed | 1),
            bytes: vec![0; 5000],
        }
    }

    fn send(&mut self, len: usize) {
        let _ = self.socket.send_to(&self.bytes[..len], self.to);
    }

    fn random_bytes(&mut self) {
        let len = self.rng.below(1500) as usize;
        for word in self.bytes[..len].chunks_mut(8) {
            let random = self.rng.next().to_le_bytes();
            word.copy_from_slice(&random[..word.len()]);
        }
        if self.rng.below(2) == 0 && len > 16 {
            icrc::seal(&self.flow, 0, &mut self.bytes[..len]);
        }
        self.send(len);
    }

    /// A number that a queue pair of a target with two reactors may have: one bit for the reactor, twelve for the slot, of which
    /// a small target uses the first ones, and above them a count that starts anywhere.
    fn qpn(&mut self) -> Qpn {
        let (count, slot, reactor) = (self.rng.below(1 << 11), self.rng.below(8), self.rng.below(2));
        Qpn::new((count << 13 | slot << 1 | reactor) as u32)
    }

    fn syndrome(&mut self) -> Syndrome {
        match self.rng.below(5) {
            0 => Syndrome::Ack(self.rng.below(32) as u8),
            1 => Syndrome::RnrNak(self.rng.below(32) as u8),
            2 => Syndrome::Nak(Nak::PsnSequence),
            3 => Syndrome::Nak(Nak::RemoteAccess),
            _ => Syndrome::Nak(Nak::Other(self.rng.below(32) as u8)),
        }
    }

    /// A sealed packet of a known kind whose fields make no sense, or just not enough.
    fn transport(&mut self) {
        let opcode = loop {
            if let Some(opcode) = Opcode::from_wire(self.rng.below(0x100) as u8) {
                break opcode;
            }
        };
        let mut header = Header::new(opcode, self.qpn(), Psn::new(self.rng.word()));
        let reth = Reth { va: self.rng.edge(), rkey: Rkey(self.rng.word() >> 20), len: self.rng.edge() as u32 };
        let aeth = Aeth { syndrome: self.syndrome(), msn: self.rng.word() & 0xff_ffff };
        let word = self.rng.word();
        // One of them is the opcode's.
        let shapes = [
            Ext::None,
            Ext::Reth(reth, None),
            Ext::Reth(reth, Some(word)),
            Ext::Imm(word),
            Ext::Inv(Rkey(word >> 20)),
            Ext::Aeth(aeth),
            Ext::AtomicAeth(aeth, self.rng.edge()),
            Ext::Atomic(AtomicEth { va: reth.va, rkey: reth.rkey, swap_add: 1, compare: 0 }),
            Ext::Deth(Deth { q_key: word, src: Qpn::new(word) }, None),
        ];
        (header.ack_req, header.solicited) = (word & 1 != 0, word & 2 != 0);
        let payload = [0, 1, 16, 64, 1024, 4096][self.rng.below(6) as usize];
        let len = Header::packet_len(opcode, payload);
        let fits = |ext: &&Ext| Header { ext: **ext, ..header }.emit(payload, &mut self.bytes[..len]).is_some();
        if shapes.iter().find(fits).is_none() {
            return self.random_bytes();
        }
        icrc::seal(&self.flow, 0, &mut self.bytes[..len]);
        self.send(len);
    }

    /// A message of connection management with IDs, numbers and sizes that nobody gave out.
    fn management(&mut self) {
        let ids = Ids { local: self.rng.word(), remote: if self.rng.below(2) == 0 { self.rng.word() } else { 1 } };
        let (word, small) = (self.rng.word(), self.rng.below(256) as u8);
        let message = match self.rng.below(10) {
            0 => Message::Mra(Mra { ids, message: small & 3, timeout: small & 31 }),
            1 => Message::Rej(Box::new(Rej {
                ids,
                message: small & 3,
                reason: word as u16,
                private_data: [small; cm::REJ_PRIVATE],
            })),
            2 => Message::Rep(Box::new(Rep {
                ids,
                qpn: Qpn::new(word),
                psn: Psn::new(word),
                responder_resources: small,
                initiator_depth: small,
                target_ack_delay: small & 31,
                rnr_retry_count: small & 7,
                srq: false,
                ca_guid: self.rng.next(),
                private_data: [small; cm::REP_PRIVATE],
            })),
            3 => Message::Rtu(ids),
            4 => Message::Dreq(ids, Qpn::new(word)),
            5 => Message::Drep(ids),
            kind => Message::Req(Box::new(self.req(kind, word, small))),
        };
        let packet = cm::emit_datagram(Psn::new(word), &message.emit(self.rng.next()));
        self.bytes[..packet.len()].copy_from_slice(&packet);
        icrc::seal(&self.flow, 0, &mut self.bytes[..packet.len()]);
        self.send(packet.len());
    }

    /// A request for a queue: now and then one that a host could send, else one with nonsense in it.
    fn req(&mut self, kind: u64, word: u32, small: u8) -> Req {
        let sane = kind == 9;
        let (src, dst) = (self.flow.src, self.flow.dst);
        let mut private = [0; 32];
        if sane {
            // An admin queue of 32 entries.
            private[4..8].copy_from_slice(&[32, 0, 31, 0]);
        } else {
            for byte in &mut private {
                *byte = self.rng.below(256) as u8;
            }
        }
        Req {
            local: self.rng.word(),
            service_id: if kind == 6 { self.rng.next() } else { cm::service_id(4420) },
            ca_guid: self.rng.next(),
            qpn: Qpn::new(word),
            responder_resources: if sane { 16 } else { small },
            initiator_depth: small,
            remote_response_timeout: small & 31,
            local_response_timeout: small & 31,
            psn: Psn::new(word),
            retry_count: small & 7,
            rnr_retry_count: small & 7,
            mtu: if sane { 3 } else { small & 15 },
            max_cm_retries: small & 15,
            srq: false,
            local_gid: cm::gid(src),
            remote_gid: cm::gid(dst),
            traffic_class: small,
            hop_limit: small,
            ack_timeout: small & 31,
            private_data: CmaHeader { src, dst, port: word as u16 }.emit(&private),
        }
    }
}

fn options(keep_alive: Duration) -> HostOptions {
    HostOptions {
        source: Some(own_address()),
        hostnqn: format!("nqn.2026-11.io.example:{}", own_address()),
        hostid: [own_address().to_string().len() as u8; 16],
        keep_alive,
        timeout: Duration::from_secs(60),
        reconnect: Some(Reconnect::default()),
        ..HostOptions::default()
    }
}

/// Connects and disconnects queues until each slot of a queue pair has been used. The attack does too, as fast as the machine is.
fn fill_tables(target: SocketAddr) {
    const AT_ONCE: usize = 8;
    let (begun, mut made) = (Instant::now(), 0);
    let limit = Duration::from_secs(60);
    let queue = || RawQueue { receives: 1, capsule: 64, ..RawQueue::new(0, 32) };
    while made < SLOTS {
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        let mut host = RawHost::new(provider, 1 << 20, Some(own_address())).expect("a host");
        for _ in 0..32 {
            let asked: Vec<_> = (0..AT_ONCE).filter_map(|_| host.start_connect(target, queue(), limit).ok()).collect();
            for queue in asked {
                // Refused while the receives of those before are not yet given back.
                made += usize::from(host.finish_connect(queue, limit).is_ok());
                host.close(queue);
            }
        }
        assert!(begun.elapsed() < limit * 2, "{made} connections in {:?}", begun.elapsed());
    }
    println!("{made} connections in {:?}", begun.elapsed());
}

#[test]
fn hostile_packets_harm_nobody_else() {
    let options_of_target = "reactors = 2\nreceive_slots = 1024\npool_size = \"16M\"";
    let mut served = Served::start_with(options_of_target, "memory = \"64M\"", |command| {
        command.args(["--log", ENDPOINTS]);
    });
    let provider = || Arc::new(Soft::new(1).expect("the software provider"));
    let victim_options = options(Duration::from_secs(15));
    let mut victim = Host::connect(provider(), served.address, NQN, victim_options).expect("a host");
    let attacker_options =
        HostOptions { hostid: [0xee; 16], io_queues: 7, queue_depth: 16, ..options(Duration::from_secs(120)) };
    let from = attacker_options.source.expect("given");
    let mut cover = Host::connect(provider(), served.address, NQN, attacker_options).expect("the attacker's host");
    let disk = victim.namespace(1).expect("a namespace");
    let length = Duration::from_secs(seconds());
    let at_rest = served.resident();
    if length >= LONG {
        fill_tables(served.address);
    }
    let (stop, sent, guessed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let begun = Instant::now();
    let (mut rounds, mut slowest, lines_before) = (0_u64, Duration::ZERO, served.lines());
    let mut memory = vec![(Duration::ZERO, served.resident())];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut attacker = Attacker::new(from, served.address.ip(), 7);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..100 {
                    match attacker.rng.below(10) {
                        0..3 => attacker.random_bytes(),
                        3..8 => {
                            attacker.transport();
                            guessed.fetch_add(1, Ordering::Relaxed);
                        }
                        _ => attacker.management(),
                    }
                }
                sent.fetch_add(100, Ordering::Relaxed);
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // On a machine that has little time for this, for longer: until some guesses were right.
            while begun.elapsed() < length || guessed.load(Ordering::Relaxed) < GUESSES {
                let (round, at) = (Instant::now(), rounds % 100 * 16_384);
                let bytes: Vec<u8> = (0..16_384).map(|i| (i as u64 ^ rounds) as u8).collect();
                victim.write_at(&disk, at, &bytes).expect("a write");
                let mut back = vec![0; bytes.len()];
                victim.read_at(&disk, at, &mut back).expect("a read");
                assert!(back == bytes, "wrong data under attack");
                slowest = slowest.max(round.elapsed());
                rounds += 1;
                cover.poll();
                if memory.last().is_none_or(|(at, _)| begun.elapsed() > *at + Duration::from_millis(100)) {
                    memory.push((begun.elapsed(), served.resident()));
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    served.check_alive();
    let (sent, length) = (sent.into_inner(), begun.elapsed());
    let last_third = memory.iter().find(|(at, _)| *at >= length * 2 / 3).map_or(0, |(_, bytes)| *bytes);
    let (lost, grown) = (victim.next_event(), served.resident().saturating_sub(last_third));
    let lines = served.lines() - lines_before;
    println!(
        "{sent} hostile packets in {length:?} ({} a second): {rounds} verified rounds, the slowest {slowest:?}; memory grew by \
         {grown} bytes, {lines} log lines",
        sent / length.as_secs().max(1)
    );
    assert!(lost.is_none(), "the other host: {lost:?}");
    assert!(rounds > length.as_secs(), "{rounds} rounds of I/O in {length:?}");
    let whole = served.resident().saturating_sub(at_rest);
    assert!(whole <= MOST_GROWTH, "memory grew by {whole} bytes: {memory:?}");
    assert!(length < LONG || grown <= 512 << 10, "memory grew by {grown} bytes in the last third: {memory:?}");
    // Ten a second of each source (control thread, two reactors), and what a rejected flood is summed up in.
    assert!(lines as u64 <= 40 * (length.as_secs() + 2), "{lines} log lines in {length:?}:\n{}", served.log());
    // Half-open connections of the attack time out; then there is room again.
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = Host::connect(provider(), served.address, NQN, options(Duration::from_secs(5))) {
        assert!(Instant::now() < deadline, "no new connection after the attack: {error}\n{}", served.log());
        std::thread::sleep(Duration::from_millis(500));
    }
    drop((victim, cover));
    assert!(served.terminate(), "{}", served.log());
    let count = |name| served.counted(name).iter().sum::<u64>();
    let (received, strays) = (count("received"), count("unknown_qp") + count("malformed"));
    // What a queue pair does that is told of packets it cannot have asked for. Hosts of ours on a network without loss bring
    // none of it about.
    let struck = ["sequence_naks_sent", "ghosts", "cnps_received", "qp_errors"].map(|name| (name, count(name)));
    println!("{received} packets, {strays} for nobody; of live queue pairs: {struck:?}");
    assert!(strays > 0 && strays < received, "{strays} of {received}");
    assert!(struck.iter().map(|(_, count)| count).sum::<u64>() >= 3, "no queue pair was hit: {struck:?}");
}

/// All growth together: packet buffers that are used for the first time, as many queue pairs as there are receives for, and the
/// tables below. A byte for each hostile packet of a minute would be more.
const MOST_GROWTH: usize = 8 << 20;
/// An attack of this length finds the tables full, and memory stands still in its last third.
const LONG: Duration = Duration::from_secs(60);
/// Queue pair slots of two reactors. Each is given out once before one is used again, and the tables of them grow until then.
const SLOTS: usize = 2 << 12;
/// Packets with guessed numbers that are sent at least. The attacker's host has eight queue pairs among 2^15 numbers.
const GUESSES: u64 = 100_000;
