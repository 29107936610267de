//! A userspace host (initiator) over the same provider boundary as the target.
//!
//! What it is for: `farside discover`, `identify` and `bench`, tests, and programs that want NVMe over RDMA without a kernel
//! host. What it is not: a block device of this machine.
//!
//! [`Host`] connects to a subsystem, submits commands and takes their answers: without blocking ([`Host::submit`],
//! [`Host::poll`], [`Host::next_done`]), or with ([`Host::read_at`], [`Host::write_at`], [`Host::flush`]). [`discover`] lists what
//! an address serves. [`raw::RawHost`] is for tests: it sends any bytes. A host belongs to one thread and has none of its own.
//! No bytes of a target make it panic: what makes no sense ends the association with an error that says so.
//!
//! ```no_run
//! use farside::host::{Host, HostOptions};
//! # fn main() -> Result<(), farside::host::HostError> {
//! let provider = std::sync::Arc::new(farside::rdma::local::Local::new());
//! let address = "192.0.2.1:4420".parse().unwrap();
//! let mut host = Host::connect(provider, address, "nqn.2026-11.io.farside:disk", HostOptions::default())?;
//! let disk = host.namespace(1)?;
//! host.write_at(&disk, 0, &[7; 4096])?;
//! host.flush(&disk)?;
//! # Ok(())
//! # }
//! ```

pub mod bench;
mod blocking;
mod error;
#[expect(clippy::module_inception, reason = "the host of the module of hosts")]
mod host;
mod io;
mod link;
mod options;
mod queue;
pub mod raw;
pub mod wire;
pub mod zones;

pub use blocking::discover;
pub use error::{HostError, HostErrorKind, IoFailure};
pub use host::{Host, HostEvent};
pub use io::{Command, Done, Op};
pub use options::{HostOptions, Reconnect};
