//! The verbs provider: libibverbs and librdmacm, for NICs, rdma_rxe and siw.
//!
//! * `cm`, `event`: listeners and connection events. One thread.
//! * `ids`: the owners of `rdma_cm_id`s.
//! * `device`: devices as they come and go.
//! * `endpoint`: what a reactor holds of a device, and its data path. One thread each. `qp`: its queue pairs.
//!   `async_events`: what the device tells it.
//! * `objects`: verbs objects with an owner. `chain`, `queue`, `placement`, `status`, `sys`: what can be tested without
//!   a device.
//!
//! Untested on iWARP: the kernels at hand have none.
#![allow(unsafe_code)]

mod async_events;
mod chain;
mod cm;
mod device;
mod endpoint;
mod event;
mod ids;
mod objects;
mod placement;
mod qp;
mod queue;
mod status;
mod sys;

use std::sync::Arc;

pub use cm::{Cm, Incoming, Outgoing};
pub use endpoint::Endpoint;

use super::{DeviceId, DeviceInfo, EndpointOptions, Provider, RdmaError};
use device::{NO_DEVICE_REMEDY, Registry};

/// The provider. Devices are found when connections and listeners meet them.
pub struct Verbs {
    registry: Arc<Registry>,
}

impl Verbs {
    /// Opens the provider, if this machine has an RDMA device.
    pub fn open() -> Result<Self, RdmaError> {
        if Self::device_names()?.is_empty() {
            return Err(RdmaError::new("verbs provider", "no RDMA device", NO_DEVICE_REMEDY));
        }
        Ok(Self { registry: Arc::default() })
    }

    /// The RDMA devices of this machine, in use or not.
    pub fn device_names() -> Result<Vec<String>, RdmaError> {
        device::names()
    }

    /// The devices in use.
    pub fn devices(&self) -> Vec<DeviceId> {
        self.registry.ids()
    }
}

impl Provider for Verbs {
    const NAME: &'static str = "verbs";
    type Cm = Cm;
    type Incoming = Incoming;
    type Outgoing = Outgoing;
    type Endpoint = Endpoint;

    fn open_cm(&self) -> Result<Cm, RdmaError> {
        Cm::open(Arc::clone(&self.registry))
    }

    fn open_endpoint(
        &self,
        device: DeviceId,
        reactor: usize,
        options: &EndpointOptions,
    ) -> Result<Endpoint, RdmaError> {
        let device = self.registry.get(device).ok_or_else(|| RdmaError::new("RDMA device", "it was removed", ""))?;
        Endpoint::open(device, reactor, options)
    }

    fn device_info(&self, device: DeviceId) -> Option<DeviceInfo> {
        self.registry.get(device).map(|device| device.info())
    }
}
