//! What leaves an engine, byte by byte, and what hostile packets do.
use super::net::{Net, OPEN};
use crate::roce::packet::{Aeth, Ext, Header, Nak, Packet, Syndrome};
use crate::roce::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Packets with good headers and hostile fields neither panic nor break the promise of memory.
    #[test]
    fn hostile_packets(fields in proptest::collection::vec(any::<(u8, u32, u64, u32, u8)>(), 1..60), seed: u64) {
        let (mut net, a, b) = Net::pair(seed, |_| ());
        let buf = net.buffer(1, 5000, OPEN);
        let near = net.buffer(0, 5000, OPEN);
        for tag in 0..8 {
            net.recv(1, b, tag, &[buf.sge()]);
        }
        net.send(0, a, 1, SendOp::RdmaRead(buf.remote()), &[near.sge()]);
        net.run_until(net.now + core::time::Duration::from_micros(25));
        for (op, n, va, len, payload) in fields {
            let Some(opcode) = Opcode::from_wire(op % 0x18) else { continue };
            let to = usize::from(n & 1 == 0);
            let dest = if to == 1 { b } else { a };
            let mut bytes = vec![0; Header::packet_len(opcode, usize::from(payload))];
            let near_psn = Psn::new(0xff_fff0).plus(n % 64);
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = (va >> (at % 8)) as u8;
            }
            bytes[0] = opcode.to_wire();
            let [_, d0, d1, d2] = dest.get().to_be_bytes();
            let [_, p0, p1, p2] = near_psn.get().to_be_bytes();
            bytes[1..12].copy_from_slice(&[0, 0xff, 0xff, 0, d0, d1, d2, 0x80, p0, p1, p2]);
            if opcode.has_reth() && n & 2 == 0 {
                bytes[12..20].copy_from_slice(&buf.va.wrapping_add(va % 9000).to_be_bytes());
                bytes[20..24].copy_from_slice(&buf.rkey.0.to_be_bytes());
                bytes[24..28].copy_from_slice(&len.to_be_bytes());
            }
            let flow = icrc::Flow { src: net.nodes[1 - to].addr, dst: net.nodes[to].addr, src_port: UDP_PORT };
            icrc::seal(&flow, 0, &mut bytes);
            net.inject(to, flow.src, bytes);
        }
        net.run();
        prop_assert_eq!(net.nodes[0].engine.read_credit_used(), 0);
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let (mut net, ..) = Net::pair(1, |_| ());
        let from = net.nodes[1].addr;
        let node = &mut net.nodes[0];
        node.engine.handle_packet(net.now, from, false, &bytes, &mut node.arena);
    }
}

/// Takes what node 1 answers to one request.
fn answer(request: &Header, payload: &[u8], shape: impl Fn(&mut Connection)) -> (Net, Vec<Header>) {
    let (mut net, _, b) = Net::pair(1, shape);
    let from = net.nodes[0].addr;
    let mut header = *request;
    header.dest = b;
    // The peer's first PSN is chosen by the seed; ask the engine by failing first.
    let mut bytes = vec![0; Header::packet_len(header.opcode, payload.len())];
    header.emit(payload.len(), &mut bytes).expect("fits").copy_from_slice(payload);
    let node = &mut net.nodes[1];
    node.engine.handle_packet(net.now, from, false, &bytes, &mut node.arena);
    let mut batch = TxBatch::new(1 << 16, 1);
    node.engine.poll_transmit(net.now, &mut batch, &node.arena);
    let headers = batch.packets().filter_map(|(_, bytes)| Packet::parse(bytes).ok()).map(|p| p.header).collect();
    (net, headers)
}

#[test]
fn an_atomic_is_refused_as_invalid() {
    // Learn the expected PSN from the NAK that a packet far ahead gets.
    let far = Header::new(Opcode::Send(Place::Only), Qpn::new(0), Psn::new(0));
    let (_, headers) = answer(&far, &[], |_| ());
    let expected = match headers.first() {
        Some(Header { psn, ext: Ext::Aeth(Aeth { syndrome: Syndrome::Nak(Nak::PsnSequence), .. }), .. }) => *psn,
        Some(Header { psn, .. }) => psn.plus(1),
        None => panic!("no answer"),
    };
    for opcode in [Opcode::FetchAdd, Opcode::CompareSwap] {
        let mut atomic = Header::new(opcode, Qpn::new(0), expected);
        atomic.ext = Ext::Atomic(packet::AtomicEth { va: 0, rkey: Rkey(0), swap_add: 1, compare: 0 });
        let (net, headers) = answer(&atomic, &[], |_| ());
        let Some(Header { psn, ext: Ext::Aeth(aeth), .. }) = headers.first() else {
            panic!("no answer to {opcode:?}");
        };
        assert_eq!((*psn, aeth.syndrome), (expected, Syndrome::Nak(Nak::InvalidRequest)), "{opcode:?}");
        assert_eq!(net.nodes[1].engine.counters().qp_errors, 1, "{opcode:?}");
    }
}
