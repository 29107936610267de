//! Time since a start.

use std::time::{Duration, Instant};

/// Where the time comes from.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// This machine's monotonic clock.
    Machine(Instant),
    #[cfg(test)]
    Simulated(std::sync::Arc<crate::sim::World>),
}

impl Clock {
    /// A clock that starts now.
    pub(crate) fn start() -> Self {
        Self::Machine(Instant::now())
    }

    /// Time since the start.
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::Machine(start) => start.elapsed(),
            #[cfg(test)]
            Self::Simulated(world) => world.now(),
        }
    }
}
