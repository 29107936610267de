//! Two listeners of one target: ANA states of each, what hosts are told, where I/O goes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, Sqe};
use farside::target::{AnaState, Target};
use nvme::Status;

use crate::rig::{BLOCK, LIMIT, NQN, Raw, Rig, Setup, assert_status, small};

/// A target on two addresses, and where they are.
fn two_paths<R: Rig>() -> (Setup<R>, [SocketAddr; 2]) {
    let rig = R::new();
    let (provider, first, second) = (rig.target(), rig.address(), rig.another());
    (Setup::built(rig, small(), provider, |builder| builder.listen(second)), [first, second])
}

/// A host on each address, of one identity.
fn host<R: Rig>(setup: &Setup<R>, address: SocketAddr) -> (Raw<R>, RawQueueId, RawQueueId) {
    let mut raw = Raw::<R>::open(setup.rig.host(), address, 1);
    let (admin, io) = raw.bring_up();
    (raw, admin, io)
}

fn target<R: Rig>(setup: &Setup<R>) -> &Target {
    setup.target.as_ref().expect("a target")
}

/// Group and state of each group in the ANA log, with its namespaces.
fn ana<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Vec<(u32, u8, Vec<u32>)> {
    let (response, page) = raw.call_for(admin, wire::get_log_page(0x0c, 0xffff_ffff, 0, 4096, false), 4096);
    assert!(response.status().is_success(), "{}", response.status());
    let word = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("4 bytes"));
    let mut at = 16;
    (0..page[8])
        .map(|_| {
            let nsids: Vec<u32> = (0..word(at + 4) as usize).map(|n| word(at + 32 + n * 4)).collect();
            let group = (word(at), page[at + 16], nsids);
            at += 32 + group.2.len() * 4;
            group
        })
        .collect()
}

pub(crate) fn ana_states_hold_for_their_listener_and_are_told<R: Rig>() {
    let (setup, addresses) = two_paths::<R>();
    let bystander = setup.bystander();
    let [(mut first, admin1, io1), (mut second, admin2, io2)] = addresses.map(|address| host(&setup, address));
    let (_, identify) = first.call_for(admin1, wire::identify(1, 0, 0), 4096);
    assert_eq!(identify[76] & 8, 8, "CMIC: ANA");
    // The bystander uses namespace 2.
    target(&setup).set_ana_group(NQN, 1, 7).expect("a group");
    let (_, changed) = second.call_for(admin2, wire::get_log_page(4, 0xffff_ffff, 0, 4096, false), 4096);
    assert_eq!(changed[..8], [1, 0, 0, 0, 0, 0, 0, 0], "namespace 1 changed");
    assert_eq!(ana(&mut second, admin2), [(1, 1, vec![2, 3]), (7, 1, vec![1])]);
    for (state, wire, answer) in [
        (AnaState::NonOptimized, 2, Status::SUCCESS),
        (AnaState::Inaccessible, 3, Status::ANA_INACCESSIBLE),
        (AnaState::Change, 0xf, Status::ANA_TRANSITION),
        (AnaState::PersistentLoss, 4, Status::ANA_PERSISTENT_LOSS),
        (AnaState::Optimized, 1, Status::SUCCESS),
    ] {
        second.host.send(admin2, &Sqe::new(0x0c).cid(0x900).0).expect("sent");
        target(&setup).set_ana_state(NQN, 7, Some(addresses[1]), state).expect("a state");
        let event = second.host.response(admin2, LIMIT).expect("an event");
        assert_eq!((event.cid(), event.dword0()), (0x900, 0x000c_0302), "{state:?}");
        assert_eq!(ana(&mut second, admin2)[1], (7, wire, vec![1]));
        assert_eq!(ana(&mut first, admin1)[1], (7, 1, vec![1]), "the other listener");
        let bytes = [wire; BLOCK];
        assert_eq!(second.write(io2, 1, 0, &bytes).code(), answer.code(), "{state:?}: write");
        for sqe in [Sqe::new(0), wire::block_command(0x0c, 1, 0, 1)] {
            assert_status(&second.call(io2, sqe.nsid(1)), answer, &format!("{state:?}"));
        }
        assert!(second.write(io2, 3, 0, &bytes).is_success(), "a namespace of another group");
        assert!(first.write(io1, 1, 0, &bytes).is_success());
        assert_eq!(first.read(io1, 1, 0, 1).expect("a read"), bytes);
    }
    assert!(target(&setup).set_ana_state(NQN, 129, None, AnaState::Optimized).is_err(), "no such group");
    let nowhere = Some("203.0.113.1:1".parse().expect("an address"));
    assert!(target(&setup).set_ana_state(NQN, 1, nowhere, AnaState::Optimized).is_err(), "no such listener");
    bystander.check();
}

pub(crate) fn ana_state_waits_for_commands_in_progress<R: Rig>() {
    let (setup, addresses) = two_paths::<R>();
    let (mut raw, _, io) = host(&setup, addresses[1]);
    setup.faults.stall();
    raw.host.send(io, &wire::block_command(8, 1, 0, 1).cid(0x100).0).expect("sent");
    setup.until_held(&mut raw, 1);
    let target = target(&setup);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| {
            target.set_ana_state(NQN, 1, Some(addresses[1]), AnaState::Inaccessible).expect("a state");
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!change.is_finished(), "a write that could still land was not waited for");
        setup.faults.release();
        change.join().expect("the change");
    });
    let response = raw.host.response(io, LIMIT).expect("an answer");
    assert!(response.status().is_success(), "what was in progress goes through: {}", response.status());
    assert_status(&raw.call(io, wire::block_command(8, 1, 0, 1)), Status::ANA_INACCESSIBLE, "what comes later");
}

/// Dataset Management, whose end is not that of an operation of the disk.
pub(crate) fn ana_state_waits_for_deallocation_and_no_longer<R: Rig>() {
    let (setup, addresses) = two_paths::<R>();
    let (mut raw, _, io) = host(&setup, addresses[1]);
    setup.faults.stall();
    let ranges = [wire::dsm_range(0, 8), wire::dsm_range(16, 8)].concat();
    let mut buffer = raw.host.take(ranges.len()).expect("memory");
    buffer.as_mut_slice()[..ranges.len()].copy_from_slice(&ranges);
    let sgl = raw.keyed(&buffer, ranges.len());
    raw.host.send(io, &Sqe::new(9).nsid(1).cid(0x100).cdw(10, 1).cdw(11, 4).sgl(sgl).0).expect("sent");
    // It serves the target's READ meanwhile.
    assert!(raw.host.response(io, Duration::from_millis(300)).is_err(), "the disk did not stall");
    let target = target(&setup);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| {
            target.set_ana_state(NQN, 1, Some(addresses[1]), AnaState::Inaccessible).expect("a state");
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!change.is_finished(), "a deallocation that could still take place was not waited for");
        setup.faults.release();
        let begun = Instant::now();
        while !change.is_finished() && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !change.is_finished() {
            // Nothing would end this test otherwise.
            eprintln!("the change waits for a command that is over");
            std::process::abort();
        }
    });
    assert!(raw.host.response(io, LIMIT).expect("an answer").status().is_success());
    raw.host.give(buffer);
}

pub(crate) fn namespaces_move_between_ana_groups<R: Rig>() {
    let (setup, addresses) = two_paths::<R>();
    let (mut raw, admin, io) = host(&setup, addresses[1]);
    target(&setup).set_ana_state(NQN, 5, None, AnaState::Inaccessible).expect("a state");
    raw.alive(io);
    ana(&mut raw, admin);
    for cid in [0x901, 0x902] {
        raw.host.send(admin, &Sqe::new(0x0c).cid(cid).0).expect("sent");
    }
    target(&setup).set_ana_group(NQN, 1, 5).expect("a group");
    let mut events: Vec<u32> = (0..2).map(|_| raw.host.response(admin, LIMIT).expect("an event").dword0()).collect();
    events.sort_unstable();
    assert_eq!(events, [0x0004_0002, 0x000c_0302], "namespace attributes and ANA");
    let (_, identify) = raw.call_for(admin, wire::identify(0, 1, 0), 4096);
    assert_eq!(identify[92], 5, "ANAGRPID");
    assert_eq!(ana(&mut raw, admin), [(1, 1, vec![2, 3]), (5, 3, vec![1])]);
    assert_status(&raw.call(io, Sqe::new(0).nsid(1)), Status::ANA_INACCESSIBLE, "in its new group");
    target(&setup).set_ana_group(NQN, 1, 1).expect("a group");
    assert!(raw.call(io, Sqe::new(0).nsid(1)).status().is_success());
}

/// A host that goes where the states say: verified writes, 60 changes, not one lost.
pub(crate) fn io_follows_the_ana_states_without_an_error<R: Rig>() {
    let (setup, addresses) = two_paths::<R>();
    let mut hosts = addresses.map(|address| host(&setup, address));
    let mut used = [0u32; 2];
    let mut round = 0u64;
    for change in 0..60 {
        let (open, shut) = (change % 2, 1 - change % 2);
        let target = target(&setup);
        target.set_ana_state(NQN, 1, Some(addresses[open]), AnaState::Optimized).expect("a state");
        target.set_ana_state(NQN, 1, Some(addresses[shut]), AnaState::Inaccessible).expect("a state");
        for _ in 0..10 {
            round += 1;
            let bytes: Vec<u8> = (0..8 * BLOCK as u64).map(|at| (at * 13 + round) as u8).collect();
            let slba = round * 8;
            let mut tried = Vec::new();
            for at in [shut, open] {
                let (raw, _, io) = &mut hosts[at];
                let status = raw.write(*io, 1, slba, &bytes);
                tried.push(status.code());
                if status.is_success() {
                    used[at] += 1;
                    assert!(raw.read(*io, 1, slba, 8).expect("a read") == bytes, "round {round}");
                    break;
                }
            }
            assert_eq!(tried, [Status::ANA_INACCESSIBLE.code(), 0], "round {round}");
        }
    }
    assert_eq!(used, [300, 300], "I/O went where it should");
}
