//! A provider within one process: queue pairs whose two ends are both here, no NIC, no socket, no packet.
//!
//! What it is for: tests of the target and of the host, where it is strict about everything a device may be strict about
//! (keys, bounds, access, receive lengths, send queue space, READ depth) and can be told to misbehave ([`Faults`]); and
//! benchmarks of what stands above the boundary, where it is the "null NIC": a work request takes effect while it is handed
//! over, so what remains is the cost of the code above ([`LocalOptions::copied_transfers`] takes the copying out too). What it
//! is not: a model of time. Nothing is lost, reordered or late unless a test asks for it.
//!
//! Addresses are names: `listen` and `resolve` meet when IP and port agree, or when the listener's IP is the wildcard.
//!
//! Semantics, where verbs leave room:
//! * A work request takes effect on the thread of its poster, in [`flush`](super::Endpoint::flush) or, when it had to wait, in
//!   [`poll`](super::Endpoint::poll). With both ends driven by one thread a run is deterministic.
//! * A SEND that finds no receive waits (receiver not ready, retried for ever) and counts in [`LocalCounters::rnr_waits`];
//!   [`Faults::fatal_rnr`] makes it an error.
//! * A wrong key, bound or permission at the peer puts both queue pairs into the error state, as on a device.
//! * A failed completion carries garbage in every field that means nothing, always.
//! * A send queue slot is free again when the completion of a signaled request at or behind it was polled.
//! * Private data arrive at the length they were sent, as on iWARP, or padded ([`LocalOptions::pad_private_data`]).

mod cm;
mod endpoint;
mod fabric;
mod faults;
mod memory;
mod shell;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;
use std::sync::Arc;

pub use cm::{LocalCm, LocalIncoming, LocalOutgoing};
pub use endpoint::LocalEndpoint;
pub use fabric::LocalCounters;
pub use faults::{Faults, WorkKind};

use super::{Caps, DeviceId, DeviceInfo, EndpointOptions, Provider, RdmaError};
use fabric::Fabric;

/// A handle on one in-process fabric. Clones and [`Local::with`] share the fabric; [`Local::new`] makes another one.
#[derive(Clone)]
pub struct Local {
    fabric: Arc<Fabric>,
    options: LocalOptions,
}

/// How what is opened through a handle behaves.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Limits and abilities that the device claims and enforces.
    pub caps: Caps,
    /// Pad private data with zeros to this length, as InfiniBand and RoCE do (56 in a request).
    pub pad_private_data: Option<usize>,
    /// `arm` asks for solicited completions only, as the Linux host does: what the peer did not mark, wakes nobody.
    pub solicited_only: bool,
    /// So many RDMA READs and WRITEs of each queue pair copy their bytes; those after them only pass all checks. For benchmarks:
    /// 64 are enough for a host to connect and identify.
    pub copied_transfers: u64,
    /// Completions wake nobody, as where an event is lost: who sleeps has to look again by himself.
    pub lost_events: bool,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self {
            caps: Caps {
                max_qp_wr: 32_768,
                max_cqe: 4 << 20,
                max_qp: 65_536,
                max_srq_wr: 65_536,
                max_recv_sge: memory::MAX_SGE as u32,
                max_inline: memory::MAX_INLINE as u32,
                max_initiator_depth: 16,
                max_responder_resources: 16,
                send_with_invalidate: true,
                read_sink_needs_remote_write: false,
            },
            pad_private_data: None,
            solicited_only: false,
            copied_transfers: u64::MAX,
            lost_events: false,
        }
    }
}

impl Default for Local {
    fn default() -> Self {
        Self::new()
    }
}

impl Local {
    /// A fabric of its own.
    pub fn new() -> Self {
        Self { fabric: Arc::new(Fabric::default()), options: LocalOptions::default() }
    }

    /// Another handle on the same fabric whose endpoints behave as `options` say.
    #[must_use]
    pub fn with(&self, options: LocalOptions) -> Self {
        Self { fabric: Arc::clone(&self.fabric), options }
    }

    /// What this handle's endpoints behave like.
    pub fn options(&self) -> &LocalOptions {
        &self.options
    }

    /// The fabric's misbehaviour.
    pub fn faults(&self) -> Faults<'_> {
        Faults::new(&self.fabric)
    }

    /// What happened on the fabric so far, and what exists on it now.
    pub fn counters(&self) -> LocalCounters {
        self.fabric.counters()
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Provider for Local {
    const NAME: &'static str = "local";
    type Cm = LocalCm;
    type Incoming = LocalIncoming;
    type Outgoing = LocalOutgoing;
    type Endpoint = LocalEndpoint;

    fn open_cm(&self) -> Result<LocalCm, RdmaError> {
        LocalCm::open(&self.fabric)
    }

    fn open_endpoint(
        &self,
        device: DeviceId,
        _reactor: usize,
        options: &EndpointOptions,
    ) -> Result<LocalEndpoint, RdmaError> {
        LocalEndpoint::open(&self.fabric, device, options, self.options.clone())
    }

    fn device_info(&self, device: DeviceId) -> Option<DeviceInfo> {
        self.fabric.device_is(device).then(|| DeviceInfo {
            id: device,
            name: "local".into(),
            gid: "in this process".into(),
            mtu: 4096,
            caps: self.options.caps.clone(),
        })
    }
}
