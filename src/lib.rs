//! farside: a userspace NVMe-oF target for RDMA.

pub mod backend;
pub mod config;
pub mod control;
pub mod doctor;
pub mod host;
pub mod mem;
pub mod rdma;
pub mod roce;
pub mod target;

mod clock;
mod mutation;
mod provider;
#[cfg(test)]
mod sim;
#[cfg(test)]
#[path = "../tests/hosts/skipped.rs"]
mod skipped;

pub use config::ProviderChoice;
pub use target::TargetError;
