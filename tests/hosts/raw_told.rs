//! What hosts are told of a target's nature: atomicity, rotation, flow control, numbers of things, addresses.

use std::sync::Arc;

use farside::backend::{Backend, BackendError, BackendInfo, IoQueue, Memory, Null, QueueContext};
use farside::host::wire::{self, DISCOVERY_ENTRY, DiscoveryEntry};
use farside::target::{NamespaceSpec, SubsystemSpec};

use crate::rig::{BLOCK, DISCOVERY_NQN, LocalRig, Rig, Setup, small};

const LARGE_NQN: &str = "nqn.2026-11.io.farside:large";

fn number(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Nothing of ours makes more than a block atomic: zero's based, AWUN and AWUPF say one, and no namespace says otherwise.
pub(crate) fn atomic_write_units_are_one_block<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin, _) = setup.ready();
    let (response, controller) = raw.call_for(admin, wire::identify(1, 0, 0), 4096);
    assert!(response.status().is_success());
    assert_eq!((number(&controller, 526), number(&controller, 528)), (0, 0), "AWUN, AWUPF");
    for nsid in 1..=3 {
        let (response, namespace) = raw.call_for(admin, wire::identify(0, nsid, 0), 4096);
        assert!(response.status().is_success());
        // NSFEAT.NSABP says whether NAWUN, NAWUPF and NACWU hold.
        assert_eq!(namespace[24] >> 1 & 1, 0, "namespace {nsid}: NSFEAT.NSABP");
        assert_eq!([34, 36, 38].map(|at| number(&namespace, at)), [0; 3], "namespace {nsid}");
    }
}

/// Memory that says that it turns.
#[derive(Debug)]
struct Turning(Memory);

impl Backend for Turning {
    fn info(&self) -> BackendInfo {
        BackendInfo { rotational: true, ..self.0.info() }
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        self.0.open_queue(context)
    }
}

pub(crate) fn rotational_storage_is_told<R: Rig>() {
    let rig = R::new();
    let provider = rig.target();
    let turning = NamespaceSpec::new(1, Arc::new(Turning(Memory::new(1 << 20))));
    let large =
        SubsystemSpec::new(LARGE_NQN).namespace(turning).namespace(NamespaceSpec::new(2, Arc::new(Null::new(1 << 20))));
    let setup = Setup::<R>::built(rig, small(), provider, |builder| builder.subsystem(large));
    let mut raw = setup.raw();
    raw.subnqn = LARGE_NQN.into();
    let admin = raw.admin_up();
    for (nsid, expected) in [(1, 1), (2, 0)] {
        // CNS 08h, NSFEAT bit 4.
        let (response, bytes) = raw.call_for(admin, wire::identify(8, nsid, 0), 4096);
        assert!(response.status().is_success());
        assert_eq!(bytes[0] >> 4 & 1, expected, "namespace {nsid}");
    }
}

/// CATTR bit 2 of Connect: the host does without SQHD, and is told FFFFh (NVMe over Fabrics, Connect command).
pub(crate) fn queues_without_flow_control_are_told_no_head<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, _, with) = setup.ready();
    let io = raw.good_queue(2, 32);
    let mut connect = wire::connect(2, 31, 0);
    connect.0[46] |= 1 << 2;
    let data = raw.connect_data(raw.cntlid);
    let response = raw.call_with(io, connect, &data);
    assert!(response.status().is_success(), "{}", response.status());
    assert_eq!(response.sqhd(), 0xffff, "the answer to Connect says that it is off");
    for round in 0..40 {
        let (without, head) = (wire::block_command(2, 3, 0, 1), wire::block_command(2, 3, 0, 1));
        let (answer, _) = raw.call_for(io, without, BLOCK);
        assert!(answer.status().is_success());
        assert_eq!(answer.sqhd(), 0xffff, "round {round}");
        let (answer, _) = raw.call_for(with, head, BLOCK);
        assert!(answer.sqhd() < 32, "round {round}: {}", answer.sqhd());
    }
}

pub(crate) fn thousand_and_twenty_four_namespaces_are_served<R: Rig>() {
    let rig = R::new();
    let provider = rig.target();
    let all = (1..=1024).map(|nsid| NamespaceSpec::new(nsid, Arc::new(Null::new(u64::from(nsid) << 20))));
    let large = all.fold(SubsystemSpec::new(LARGE_NQN), SubsystemSpec::namespace);
    let setup = Setup::<R>::built(rig, small(), provider, |builder| builder.subsystem(large));
    let mut raw = setup.raw();
    raw.subnqn = LARGE_NQN.into();
    let (admin, io) = raw.bring_up();
    // CNS 02h: 1,024 NSIDs of four bytes each.
    let (response, list) = raw.call_for(admin, wire::identify(2, 0, 0), 4096);
    assert!(response.status().is_success());
    let nsids: Vec<u32> = list.chunks(4).map(|nsid| u32::from_le_bytes(nsid.try_into().expect("4 bytes"))).collect();
    assert_eq!(nsids, (1..=1024).collect::<Vec<u32>>());
    for nsid in 1..=1024u32 {
        // The last block of each: a namespace of another's size would refuse it, or take the one behind it.
        let last = (u64::from(nsid) << 11) - 1;
        assert!(raw.write(io, nsid, last, &[1; BLOCK]).is_success(), "namespace {nsid}");
        assert!(raw.read(io, nsid, last + 1, 1).is_err(), "namespace {nsid}: behind its end");
    }
}

/// On the in-process fabric: on real addresses a wildcard would take port 4791 of every other test.
pub(crate) fn wildcard_listener_is_told_as_the_address_that_was_reached() {
    let setup = Setup::<LocalRig>::start();
    let target = setup.target.as_ref().expect("running");
    target.add_listener("0.0.0.0:4421".parse().expect("an address"), None).expect("listening");
    for reached in ["198.51.100.7:4421", "198.51.100.8:4421"] {
        let mut raw = setup.raw();
        raw.address = reached.parse().expect("an address");
        raw.subnqn = DISCOVERY_NQN.into();
        raw.kato_ms = 120_000;
        let admin = raw.admin_up();
        let (response, bytes) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, 32 << 10, false), 32 << 10);
        assert!(response.status().is_success(), "{}", response.status());
        let count = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes")) as usize;
        let entries = bytes[DISCOVERY_ENTRY..].chunks(DISCOVERY_ENTRY).take(count);
        let mut told: Vec<String> = entries
            .filter_map(|entry| DiscoveryEntry::read(entry)?.address().map(|address| address.to_string()))
            .collect();
        told.sort_unstable();
        told.dedup();
        assert_eq!(told, [setup.rig.address().to_string(), reached.to_owned()]);
        raw.host.close(admin);
    }
}
