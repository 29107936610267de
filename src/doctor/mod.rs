//! What keeps RDMA from working on this machine, and what to do about it; and what a Linux host's messages mean.
//!
//! The checks read `/sys` and `/proc` below a root of the caller's choice, so that each fault can be made in a folder; what
//! has to be tried (a port, a route, io_uring) is tried for real.

mod checks;
mod decode;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

pub use decode::{Meaning, decode};

/// A seccomp profile for container engines (`--security-opt seccomp=FILE`): what farside calls, io_uring among it, and nothing
/// else.
pub const SECCOMP_PROFILE: &str = include_str!("seccomp.json");

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Good,
    /// It works, and could work better.
    Hint,
    /// It does not work.
    Fault,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at.
    pub object: String,
    /// How it is.
    pub reason: String,
    /// What to do about it; empty when nothing.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.severity {
            Severity::Good => "ok   ",
            Severity::Hint => "hint ",
            Severity::Fault => "FAULT",
        };
        write!(f, "{mark} {}: {}", self.object, self.reason)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Doctor {
    /// Where `/sys` and `/proc` are looked for: `/`.
    pub root: PathBuf,
    /// The address that a target is to listen on.
    pub address: Option<IpAddr>,
    /// The address of a host.
    pub peer: Option<IpAddr>,
    /// Bytes of memory that will be registered with a device.
    pub memory: u64,
    /// Whether the verbs provider is to be used: its missing pieces are faults then, not hints.
    pub verbs: bool,
}

impl Doctor {
    /// Looks at everything, in the order in which things depend on each other.
    pub fn examine(&self) -> Vec<Finding> {
        let mut findings = vec![self.io_uring()];
        findings.extend(self.devices());
        if self.verbs || self.has_devices() {
            findings.extend(self.nodes());
        }
        findings.push(self.memlock());
        findings.push(self.huge_pages());
        if let Some(address) = self.address {
            findings.extend(self.listen_address(address));
        }
        if let Some(peer) = self.peer {
            findings.extend(self.route(peer));
        }
        findings
    }
}
