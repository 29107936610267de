//! The target: listeners, queues, the request machine and the reactors that run them, over any provider and any backend.
//!
//! ```text
//! control   connection requests -> private data -> a reactor with room       (one thread; also the controllers' timers)
//! accept    queue pair, receives posted, accepted
//! capsule   receive -> Command -> checks -> job, host memory mapped, receive posted again
//! data      buffer (by the host's share) and credits reserved -> RDMA READs
//! execute   backend, registry
//! data      RDMA WRITEs and the response behind them
//! live      changes of a running target: namespaces, subsystems, hosts, listeners come
//! removal   and go
//! shutdown  flushes before a shutdown is called complete
//! teardown  error state -> flushed -> destroyed -> forgotten
//! ```
//! [`Target`] is the public face: built with [`Target::builder`], it serves until [`Target::shutdown`] or drop.

mod abort;
mod accept;
mod authenticate;
mod builder;
mod capsule;
mod causes;
mod control;
mod copy;
mod counters;
mod data;
mod execute;
mod fused;
mod keeper;
mod latency;
mod limits;
mod live;
mod locks;
mod mailbox;
mod memory;
mod namespace;
mod operate;
mod options;
mod pace;
mod private_data;
mod publish;
mod queue;
mod reactor;
mod removal;
mod request;
mod reserve;
mod share;
mod shared;
mod shutdown;
#[cfg(test)]
mod simulated;
mod stall;
mod straight;
mod tally;
mod teardown;
mod ticket;
mod zones;

pub use builder::{AnaSpec, NamespaceSpec, Served, ServedNamespace, SubsystemSpec, Target, TargetBuilder, TargetError};
pub use causes::{Cause, Disconnect, Ends};
pub use counters::{Counters, IoTotals};
pub use latency::{Latencies, Latency, LatencyReport, QueueLatency, Stage};
pub use limits::Limits;
pub use live::{ControllerStatus, HostStatus, NamespaceStatus, QueueStatus, Status, SubsystemStatus, ZonesStatus};
pub use nvme::auth::{Group, Hash, HostAuth, Secret};
pub use nvme::registry::{Admission, AnaState, Duplicates, RdmaProvider, Referral, WriteProtection};
pub use options::{MemoryPlan, Options};
pub use removal::Draining;
pub(crate) use removal::Taken;
#[cfg(test)]
pub(crate) use simulated::SimTarget;
pub use tally::Traffic;
