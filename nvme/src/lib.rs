//! The NVMe over Fabrics protocol and controller, pure: no sockets, files, clocks, threads or queue pairs.
#![forbid(unsafe_code)]
#![warn(
    clippy::as_conversions,
    clippy::cast_lossless,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
#![cfg_attr(test, allow(clippy::as_conversions, clippy::indexing_slicing, clippy::unwrap_used))]

pub mod completion;
pub mod nqn;
pub mod sgl;
pub mod status;

pub use completion::Completion;
pub use nqn::{DISCOVERY_NQN, Nqn, NqnError};
pub use sgl::{KeyedSgl, Sgl};
pub use status::Status;
