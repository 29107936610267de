//! The NVMe over Fabrics protocol and controller, pure.
//!
//! What it is for: bytes of a host become typed commands ([`Command`], [`io::IoCommand`]), and commands become
//! decisions ([`Action`], [`Status`]). What it is not: it knows no socket, file, clock, thread or queue pair. Time is a
//! [`core::time::Duration`] since an arbitrary start that the caller passes in, and must never go backwards.
//!
//! # How a transport uses it
//!
//! 1. [`Command::parse`] on the 64 bytes that arrived. A refusal carries the CID and the status to answer with.
//! 2. On an unconnected queue only Connect may come: [`Command::is_connect`], check its SGL for [`CONNECT_DATA_LEN`]
//!    bytes ([`Sgl::check_transfer`]), fetch them, then [`Registry::connect`].
//! 3. On the admin queue [`Registry::admin`], and for each [`Action`] what its documentation says.
//!    [`Action::FetchData`] means: fetch, and call again with the bytes.
//! 4. On an I/O queue [`Command::is_fabrics`] goes to [`Registry::io_fabrics`]; the rest is [`io::check`] against the
//!    namespace view that was published, with no registry and no lock.
//! 5. After any call on the registry, drain [`Registry::poll_event`] and look at [`Registry::next_deadline`].
//!
//! Every command is answered exactly once, by the action, by [`Event::CompleteHeld`], or (a held Asynchronous Event
//! Request at the end of the association) not at all, because its queue is gone.
#![forbid(unsafe_code)]
#![warn(
    clippy::as_conversions,
    clippy::cast_lossless,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
#![cfg_attr(test, allow(clippy::as_conversions, clippy::indexing_slicing, clippy::unwrap_used))]

pub mod ana;
pub mod auth;
pub mod command;
pub mod completion;
pub mod gate;
pub mod io;
pub mod nqn;
pub mod registry;
pub mod reservation;
pub mod sgl;
pub mod status;
pub mod zns;

mod admin;
mod aer;
mod fabrics;
mod features;
mod logs;
mod properties;
mod wire;

pub use command::{BadCommand, Command, Fuse, Opcode};
pub use completion::Completion;
pub use fabrics::CONNECT_DATA_LEN;
pub use nqn::{DISCOVERY_NQN, Nqn, NqnError};
pub use registry::{Action, ControllerId, Event, Registry, RegistryConfig, SubsystemId};
pub use sgl::{KeyedSgl, Sgl};
pub use status::Status;
