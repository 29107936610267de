//! Hosts that want more than the sockets hold: no packet is dropped for want of room.

use std::sync::Arc;
use std::time::Duration;

use super::NQN;
use super::hungry::{Outcome, Want, run};
use crate::backend::Null;
use crate::host::Op;
use crate::target::{NamespaceSpec, SubsystemSpec};

/// What an unprivileged process gets with the kernel's stock limit: twice net.core.rmem_max.
const STOCK: usize = 2 * 212_992;

#[test]
fn four_hosts_that_write_1_mib_at_depth_32_overflow_no_socket() {
    let subsystem = SubsystemSpec::new(NQN).namespace(NamespaceSpec::new(1, Arc::new(Null::new(1 << 30))));
    let want = Want { op: Op::Write { fua: false }, nsid: 1, depth: 32, blocks: 2048 };
    let Outcome { world, mut target, mut hosts } = run(subsystem, &[want; 4], STOCK, Duration::from_millis(1000));
    // A capsule that asked for no acknowledgement is sent again to ask, when no other one did it in time.
    let (mut again, mut asked) = (0, 0);
    for endpoint in target.endpoints() {
        let counters = endpoint.counters();
        assert!(counters.received > 4 * 64 * 256, "{counters:?}");
        let repairs = (counters.retransmitted, counters.timeouts, counters.read_gaps);
        assert_eq!(repairs, (0, 0, 0), "{counters:?}");
        again += counters.duplicates;
    }
    for host in &mut hosts {
        assert!(host.answered.len() >= 64, "{} writes", host.answered.len());
        let counters = host.host.link.endpoint().expect("connected").counters();
        assert_eq!((counters.retransmitted, counters.timeouts, counters.duplicates), (0, 0, 0), "{counters:?}");
        asked += counters.probes;
    }
    assert!(again <= asked, "{again} of {asked}");
    let tally = world.net().tally;
    assert_eq!(tally.overflowed, 0, "{tally:?}");
}
