//! What the provider takes from around it: time, random numbers, sockets. A simulation gives its own.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nix::sys::eventfd::EventFd;

use super::socket::{RxBatch, Socket};
use super::watch::Watch;

/// See the module's documentation. Clones share it.
#[derive(Clone, Debug)]
pub(super) enum World {
    /// This machine, since a moment.
    Machine(Instant),
    #[cfg(test)]
    Simulated(crate::sim::Machine),
}

impl World {
    pub(super) fn machine() -> Self {
        Self::Machine(Instant::now())
    }

    /// The clock of connection management, which several threads drive.
    pub(super) fn now(&self) -> Duration {
        match self {
            Self::Machine(start) => start.elapsed(),
            #[cfg(test)]
            Self::Simulated(machine) => machine.now(),
        }
    }

    /// Where the communication IDs of an address start.
    pub(super) fn agent_seed(&self) -> u64 {
        match self {
            Self::Machine(_) => random(),
            #[cfg(test)]
            Self::Simulated(machine) => machine.agent_seed(),
        }
    }

    /// Where the queue pair numbers and keys of an engine start.
    pub(super) fn engine_seed(&self) -> u64 {
        match self {
            Self::Machine(_) => random(),
            #[cfg(test)]
            Self::Simulated(machine) => machine.engine_seed(),
        }
    }

    /// The first packet sequence number of a connection.
    pub(super) fn psn(&self) -> u32 {
        match self {
            Self::Machine(_) => u32::try_from(random() >> 40).unwrap_or(0),
            #[cfg(test)]
            Self::Simulated(machine) => machine.psn(),
        }
    }

    /// What tells of changes of addresses, where there is any.
    pub(super) fn watch(&self) -> Option<Watch> {
        match self {
            Self::Machine(_) => Watch::open().map_err(|errno| tracing::debug!("no news of addresses: {errno}")).ok(),
            #[cfg(test)]
            Self::Simulated(_) => None,
        }
    }

    /// Room for datagrams that are received.
    pub(super) fn receive_batch(&self, count: usize) -> RxBatch {
        match self {
            Self::Machine(_) => RxBatch::new(count),
            #[cfg(test)]
            Self::Simulated(_) => RxBatch::simulated(count),
        }
    }

    /// Makes the descriptor of connection management readable.
    pub(super) fn wake(&self, event: &EventFd) {
        match self {
            // It can only fail by being full, and is then readable.
            Self::Machine(_) => drop(event.write(1)),
            #[cfg(test)]
            Self::Simulated(machine) => machine.wake(),
        }
    }

    /// Undoes [`World::wake`].
    pub(super) fn clear(&self, event: &EventFd) {
        match self {
            Self::Machine(_) => drop(event.read()),
            #[cfg(test)]
            Self::Simulated(_) => {}
        }
    }

    /// The socket of a reactor, or of connection management.
    pub(super) fn bind(&self, address: IpAddr, scope: u32, _reactor: Option<usize>) -> io::Result<Socket> {
        match self {
            Self::Machine(_) => Socket::bind(address, scope),
            #[cfg(test)]
            Self::Simulated(machine) => Socket::simulated(address, machine.bind(_reactor)),
        }
    }
}

/// A random number.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}
