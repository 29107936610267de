//! Which states and faults were reached, and how often.

use std::collections::BTreeMap;
use std::fmt;

use super::disk::DiskTally;
use super::driver::HostTally;
use super::net::Tally;
use super::plan::{Fault, What};
use crate::rdma::soft::SoftEndpoint;

/// Counts by area and name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage(BTreeMap<(&'static str, String), u64>);

impl Coverage {
    pub(crate) fn add(&mut self, area: &'static str, what: &str, count: u64) {
        *self.0.entry((area, what.to_string())).or_default() += count;
    }

    pub(crate) fn hit(&mut self, area: &'static str, what: &str) {
        self.add(area, what, 1);
    }

    pub(crate) fn get(&self, area: &'static str, what: &str) -> u64 {
        self.0.get(&(area, what.to_string())).copied().unwrap_or(0)
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for ((area, what), count) in &other.0 {
            self.add(area, what, *count);
        }
    }

    /// With every fault and event, reached or not, so that one that no run reaches is seen. What is counted below is counted in
    /// every run, also when it is none.
    pub(crate) fn of_everything() -> Self {
        let mut all = Self::default();
        for fault in Fault::ALL {
            all.add("fault", &format!("{fault:?}"), 0);
        }
        for event in What::NAMES {
            all.add("event", event, 0);
        }
        all
    }

    /// What was never reached.
    pub(crate) fn missing(&self) -> Vec<String> {
        self.0.iter().filter(|(_, count)| **count == 0).map(|((area, what), _)| format!("{area}: {what}")).collect()
    }

    pub(crate) fn digest(&self) -> u64 {
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        for ((_, what), count) in &self.0 {
            for byte in what.bytes().chain(count.to_le_bytes()) {
                digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        digest
    }

    pub(crate) fn add_net(&mut self, tally: &Tally) {
        for (what, count) in [
            ("packets sent", tally.sent),
            ("lost", tally.lost),
            ("of connection management lost", tally.cm_lost),
            ("duplicated", tally.duplicated),
            ("reordered", tally.reordered),
            ("corrupted", tally.corrupted),
            ("marked", tally.marked),
            ("delayed", tally.delayed),
            ("cut off", tally.cut_off),
            ("dropped by a full inbox", tally.overflowed),
            ("merged runs", tally.merged),
            ("refused by a full send buffer", tally.refused_sends),
        ] {
            self.add("network", what, count);
        }
    }

    pub(crate) fn add_disk(&mut self, tally: &DiskTally) {
        for (what, count) in [
            ("operations", tally.operations),
            ("failed", tally.failed),
            ("flushes", tally.flushes),
            ("power cuts", tally.cuts),
            ("blocks lost", tally.blocks_lost),
            ("stalls", tally.stalls),
        ] {
            self.add("disk", what, count);
        }
    }

    pub(crate) fn add_host(&mut self, tally: &HostTally) {
        for (what, count) in [
            ("commands done", tally.done),
            ("commands failed", tally.failed),
            ("commands that died with it", tally.orphaned),
            ("connections lost", tally.lost),
            ("reconnected", tally.reconnected),
            ("not brought up", tally.refused),
            ("queues full", tally.full),
            ("aborts sent", tally.aborts),
            ("commands aborted", tally.aborted),
        ] {
            self.add("hosts", what, count);
        }
    }

    pub(crate) fn add_engine(&mut self, area: &'static str, endpoint: &SoftEndpoint) {
        let (counters, drops) = (endpoint.counters(), endpoint.drops());
        for (what, count) in [
            ("received", counters.received),
            ("for unknown queue pairs", counters.unknown_qp),
            ("duplicates", counters.duplicates),
            ("ghosts", counters.ghosts),
            ("retransmitted", counters.retransmitted),
            ("timeouts", counters.timeouts),
            ("sequence NAKs sent", counters.sequence_naks_sent),
            ("sequence NAKs received", counters.sequence_naks_received),
            ("RNR NAKs sent", counters.rnr_naks_sent),
            ("RNR NAKs received", counters.rnr_naks_received),
            ("CNPs sent", counters.cnps_sent),
            ("CNPs received", counters.cnps_received),
            ("queue pair errors", counters.qp_errors),
            ("corrupt", drops.corrupt),
            ("overflow", drops.overflow),
        ] {
            self.add(area, what, count);
        }
        // Only a target reads from its peer.
        if area == "target's engine" {
            self.add(area, "READ gaps", counters.read_gaps);
        }
    }

    /// Whether a kind of fault made a difference in this run.
    pub(crate) fn has_acted(&self, fault: Fault) -> bool {
        let net = |what| self.get("network", what) > 0;
        let event = |what: &str| self.get("event", what) > 0;
        match fault {
            Fault::Loss => net("lost"),
            Fault::Reorder => net("reordered"),
            Fault::Duplication => net("duplicated"),
            Fault::Delay => net("delayed"),
            Fault::DeadPeer => net("cut off"),
            Fault::Rnr => self.get("target's engine", "RNR NAKs sent") + self.get("host's engine", "RNR NAKs sent") > 0,
            Fault::FullQueues => net("dropped by a full inbox") || self.get("target", "request WaitBuffer") > 0,
            Fault::CmLoss => net("of connection management lost"),
            Fault::HostReboot => event("host reboot"),
            Fault::TargetReboot => event("target reboot"),
            Fault::DiskErrors => self.get("disk", "failed") > 0,
            Fault::DiskStall => self.get("disk", "stalls") > 0,
            Fault::PowerCut => self.get("disk", "power cuts") > 0,
            Fault::Corruption => net("corrupted"),
            Fault::Congestion => net("marked"),
        }
    }
}

impl What {
    pub(crate) const NAMES: [&str; 7] =
        ["cut off", "receives held", "buffers hogged", "host reboot", "target reboot", "power cut", "disk stall"];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::CutOff { .. } => "cut off",
            Self::HoldReceives { .. } => "receives held",
            Self::HogBuffers { .. } => "buffers hogged",
            Self::RebootHost { .. } => "host reboot",
            Self::RebootTarget { power: false, .. } => "target reboot",
            Self::RebootTarget { power: true, .. } => "power cut",
            Self::StallDisk { .. } => "disk stall",
        }
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = "";
        for ((area, what), count) in &self.0 {
            if *area != last {
                writeln!(f, "{area}")?;
                last = area;
            }
            writeln!(f, "  {what:<40} {count:>14}")?;
        }
        Ok(())
    }
}
