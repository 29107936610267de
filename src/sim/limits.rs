//! Limits on the fake clock: hosts that always want more get what they are held to, to the command, and delay nobody.

use std::sync::Arc;
use std::time::Duration;

use super::NQN;
use super::hungry::{Hungry, Want, hostnqn};
use crate::backend::Null;
use crate::host::Op;
use crate::target::{Limits, NamespaceSpec, SubsystemSpec};

/// Reading hosts by namespace, depth and blocks, for so long.
fn run(subsystem: SubsystemSpec, hosts: &[(u32, u64, u32)], lasting: Duration) -> Vec<Hungry> {
    let want = |(nsid, depth, blocks)| Want { op: Op::Read, nsid, depth, blocks };
    let wants: Vec<Want> = hosts.iter().copied().map(want).collect();
    super::hungry::run(subsystem, &wants, 4 << 20, lasting).hosts
}

fn subsystem() -> SubsystemSpec {
    let namespace = |nsid| NamespaceSpec::new(nsid, Arc::new(Null::new(1 << 30)));
    SubsystemSpec::new(NQN).namespace(namespace(1)).namespace(namespace(2))
}

/// Answers of a second, once everything goes its way.
fn per_second(host: &Hungry) -> usize {
    let from = host.answered.first().expect("an answer").0 + Duration::from_secs(1);
    host.count(from, from + Duration::from_secs(2)).div_ceil(2)
}

const LASTING: Duration = Duration::from_secs(4);

#[test]
fn a_host_gets_what_it_is_held_to_and_no_other_is_delayed() {
    let alone = run(subsystem(), &[(1, 2, 8)], LASTING);
    let mut limited = subsystem();
    limited.limits = vec![(hostnqn(2), Limits { iops: 1000, ..Limits::default() })];
    let both = run(limited, &[(1, 2, 8), (1, 32, 8)], LASTING);
    assert_eq!(per_second(&both[1]), 1000);
    assert!(per_second(&alone[0]) > 5000, "{}", per_second(&alone[0]));
    // A microsecond, where both are answered in one round.
    let (before, after) = (alone[0].median_latency(), both[0].median_latency());
    assert!(after <= before + Duration::from_micros(1), "{before:?}, {after:?}");
    assert!(per_second(&both[0]) >= per_second(&alone[0]) * 99 / 100);
}

#[test]
fn hosts_share_what_their_namespace_is_held_to_and_others_go_on() {
    let mut limited = subsystem();
    limited.namespaces[0].limits = Limits { iops: 2000, ..Limits::default() };
    let hosts = run(limited, &[(1, 16, 8), (1, 16, 8), (2, 2, 8)], LASTING);
    let shares = [per_second(&hosts[0]), per_second(&hosts[1])];
    assert!((1999..=2001).contains(&(shares[0] + shares[1])), "{shares:?}");
    assert!(shares.iter().all(|share| *share >= 900), "{shares:?}");
    assert!(per_second(&hosts[2]) > 5000);
}

#[test]
fn bytes_are_limited_whatever_their_commands_are() {
    for blocks in [8, 256] {
        let mut limited = subsystem();
        limited.limits = vec![(hostnqn(1), Limits { read_bandwidth: 8 << 20, ..Limits::default() })];
        let hosts = run(limited, &[(1, 16, blocks)], LASTING);
        let bytes = per_second(&hosts[0]) * blocks as usize * 512;
        assert!(((8 << 20) - (128 << 10)..=(8 << 20) + (128 << 10)).contains(&bytes), "{blocks}: {bytes}");
    }
}

#[test]
fn a_host_held_back_twice_stands_in_one_line_after_the_other() {
    // Its own limit is the lower one, so the other host gets all the rest.
    let mut limited = subsystem();
    limited.limits = vec![(hostnqn(1), Limits { iops: 500, ..Limits::default() })];
    limited.namespaces[0].limits = Limits { iops: 2000, ..Limits::default() };
    let hosts = run(limited, &[(1, 32, 8), (1, 32, 8)], LASTING);
    assert_eq!(per_second(&hosts[0]), 500);
    assert!((1499..=1501).contains(&per_second(&hosts[1])), "{}", per_second(&hosts[1]));
}
