//! The control socket: what `farside ctl` and other programs say to a running target, and what comes back.
//!
//! A Unix stream socket, readable and writable by its owner alone. One JSON object a line: a [`Request`] in, `{"ok": ..}` or
//! `{"error": {"object": .., "reason": .., "remedy": ..}}` out, in order. [`Client`] speaks it.
//!
//! Every change is a change of the configuration: the running one is edited, the result is checked as a file would be, the
//! difference ([`plan`]) is carried out step by step, and if a step fails everything is put back as it was. So what runs, what
//! `config` shows and what `save` writes are always one and the same.

mod carry_out;
mod client;
mod edit;
mod manager;
mod metrics;
mod plan;
mod protocol;
mod report;
mod server;

pub use client::{Client, ClientError};
pub use manager::Manager;
pub use metrics::{MetricsAddress, MetricsServer};
pub use plan::{Change, plan};
pub use protocol::{Failure, Request};
pub use server::{ControlPath, ControlServer, default_path};
