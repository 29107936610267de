//! RDMA without RDMA hardware: the provider that drives [`crate::roce`] over UDP port 4791.
//!
//! Each local address is a device. It has one UDP socket for connection management and one per reactor, in a group that a
//! small BPF program steers by destination queue pair number, so that a packet is read by the thread that owns its queue
//! pair. No privileges are needed, no kernel module, and no RDMA device; peers are `rdma_rxe`, hardware RoCEv2 NICs, or
//! another farside.
//!
//! What it needs for itself: UDP port 4791 of the address. `rdma_rxe` in the same network namespace holds it, as does a
//! second farside process on the same address; both are told apart in the error.
//!
//! Unsafe code: the socket calls, and the copies to and from registered memory.

mod cm;
mod device;
mod endpoint;
mod headers;
mod hold;
mod ids;
mod inbox;
mod memory;
mod socket;
mod steer;
#[cfg(test)]
mod tests;
mod watch;
mod world;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use cm::{SoftCm, SoftIncoming, SoftOutgoing};
use device::Device;
pub use endpoint::{Drops, SoftEndpoint};
use inbox::{Inbox, Inboxes};
#[cfg(test)]
pub(crate) use steer::index_bits;
use world::World;

use crate::roce::Dcqcn;

use super::{CmEvent, ConnId, DeviceId, DeviceInfo, EndpointOptions, Provider, RdmaError};

type Event = CmEvent<SoftIncoming, SoftOutgoing>;

/// How the software provider is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftOptions {
    /// Reactors that an address has room for.
    pub reactors: usize,
    /// Congestion control.
    pub dcqcn: Dcqcn,
    /// See the IPv4 headers of what arrives, so that no corrupt packet is taken for a good one. Needs CAP_NET_RAW, and costs a
    /// system call per batch.
    pub raw_headers: bool,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self { reactors: 1, dcqcn: Dcqcn::default(), raw_headers: false }
    }
}

/// The software provider.
#[derive(Debug, Clone)]
pub struct Soft {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Its `reactors` is at least 1.
    options: SoftOptions,
    devices: Mutex<Vec<Arc<Device>>>,
    inboxes: Inboxes,
    next_device: AtomicU32,
    next_conn: AtomicU64,
    next_listener: AtomicU32,
    world: World,
}

impl Soft {
    /// A provider with room for as many reactors as this machine has processors, or 16.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn open() -> Result<Self, RdmaError> {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from).max(16))
    }

    /// A provider with room for `reactors` reactors.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new(reactors: usize) -> Result<Self, RdmaError> {
        Self::with(&SoftOptions { reactors, ..SoftOptions::default() })
    }

    /// A provider with these options.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn with(options: &SoftOptions) -> Result<Self, RdmaError> {
        Self::within(World::machine(), options)
    }

    /// A provider on a simulated machine.
    #[cfg(test)]
    pub(crate) fn simulated(machine: crate::sim::Machine, reactors: usize) -> Result<Self, RdmaError> {
        Self::within(World::Simulated(machine), &SoftOptions { reactors, ..SoftOptions::default() })
    }

    fn within(world: World, options: &SoftOptions) -> Result<Self, RdmaError> {
        let inner = Inner {
            options: SoftOptions { reactors: options.reactors.max(1), ..*options },
            devices: Mutex::default(),
            inboxes: Inboxes::default(),
            next_device: AtomicU32::new(0),
            next_conn: AtomicU64::new(1),
            next_listener: AtomicU32::new(1),
            world,
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// Whether a farside process serves RoCE on an address, this one included.
pub(crate) fn is_served(address: IpAddr) -> bool {
    device::is_served(address)
}

/// The process that serves an address of this machine over the software provider, as far as this user may see.
#[must_use]
pub fn owner(address: IpAddr) -> Option<u32> {
    device::owner(address)
}

impl Provider for Soft {
    const NAME: &'static str = "soft";
    type Cm = SoftCm;
    type Incoming = SoftIncoming;
    type Outgoing = SoftOutgoing;
    type Endpoint = SoftEndpoint;

    fn open_cm(&self) -> Result<SoftCm, RdmaError> {
        self.cm()
    }

    fn open_endpoint(
        &self,
        device: DeviceId,
        reactor: usize,
        options: &EndpointOptions,
    ) -> Result<SoftEndpoint, RdmaError> {
        let found = self.inner.devices().into_iter().find(|known| known.id == device);
        let device = found.ok_or_else(|| RdmaError::new(format!("device {}", device.0), "no such device", ""))?;
        SoftEndpoint::new(Arc::clone(&self.inner), device, reactor, options)
    }

    fn device_info(&self, device: DeviceId) -> Option<DeviceInfo> {
        let device = self.inner.devices().into_iter().find(|known| known.id == device)?;
        Some(DeviceInfo {
            id: device.id,
            name: format!("udp/{}", device.interface),
            gid: format!("{} (RoCE v2)", device.address),
            mtu: device.mtu().bytes(),
            caps: endpoint::caps(),
        })
    }
}

impl Inner {
    fn devices(&self) -> Vec<Arc<Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The device of a local address, opened if need be.
    fn device_for(self: &Arc<Self>, address: IpAddr, scope: u32) -> Result<Arc<Device>, RdmaError> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.address == address) {
            return Ok(Arc::clone(device));
        }
        let id = DeviceId(self.next_device.fetch_add(1, Ordering::Relaxed));
        let device = Arc::new(Device::open(id, address, scope, &self.options, &self.world)?);
        devices.push(Arc::clone(&device));
        Ok(device)
    }

    /// Looks whether every address is still there, and as it was: lets go of those that are not, and says so.
    fn check_devices(&self) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| {
            let there = device.look_again();
            if !there {
                tracing::warn!(address = %device.address, "the address is gone");
                self.inboxes.tell_removed(device.id);
            }
            there
        });
    }

    /// A new connection of this manager.
    fn new_conn(&self, owner: &Inbox) -> ConnId {
        owner.conn(self.next_conn.fetch_add(1, Ordering::Relaxed))
    }

    fn wake(&self) {
        self.inboxes.wake(&self.world);
    }
}
