//! Devices: what is known of each, and how one that was removed is let go.
//!
//! A device is met when an id of librdmacm is bound to it, and then gets an id of its own bound to the same address: the
//! *watch*. It holds librdmacm's context of the device open, and it is told when the device is removed even if no
//! connection and no listener is bound to it at that time.
//!
//! Removal: drivers that cannot take a device away from its users (rxe, siw) make the kernel wait until each descriptor
//! of it is closed. Whether the ids are told before that wait depends on which module was loaded first, rdma_cm or
//! ib_uverbs; the device's node is gone in either case, so the CM also looks for that. Our descriptors are closed with the
//! endpoints; librdmacm never closes its own, and offers no call for it. So when the last user of a removed device is gone, [`Device`]'s drop puts /dev/null in the place
//! of both descriptors, which lets the kernel finish, and then destroys the watch. The order matters: until then the
//! watch keeps librdmacm from freeing the context under us, and what librdmacm still does with it later (freeing its
//! protection domain, closing the context once a new device is met) works on /dev/null just as well.

use std::ffi::CStr;
use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_sys as ib;
use tracing::{debug, info, warn};

use super::chain::MAX_RECV_SGE;
use super::ids::{Channel, RawId};
use super::objects::{Context, Cq, Domain, QueuePair};
use super::sys;
use crate::rdma::{Caps, DeviceId, DeviceInfo, QpOptions, RdmaError};

/// What an operator does about a machine without RDMA.
pub(super) const NO_DEVICE_REMEDY: &str = "rdma link add rxe0 type rxe netdev eth0, or use --provider soft";

/// A device in use.
pub(super) struct Device {
    id: DeviceId,
    name: String,
    /// Goes at the start of a removal; `None` where sysfs does not show it.
    node: Option<PathBuf>,
    /// librdmacm's context. Open as long as the watch lives.
    verbs: *mut ib::ibv_context,
    port: u8,
    gid: [u8; 16],
    /// The same, with its kind, for people.
    gid_text: String,
    gid_is_there: AtomicBool,
    caps: Caps,
    iwarp: bool,
    ethernet: bool,
    channel: Arc<Channel>,
    watch: Option<RawId>,
    removed: AtomicBool,
}

// SAFETY: the pointers name objects of librdmacm that live as long as `watch`; what is read through them (names, ports,
// descriptors) does not change, and libibverbs' calls on a context may be made from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn caps(&self) -> &Caps {
        &self.caps
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.iwarp
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    pub(super) fn gid(&self) -> &str {
        &self.gid_text
    }

    /// Says so, once, when the GID that connections stand on goes or comes: it does with its interface's address, and
    /// every symptom of that looks like something else.
    pub(super) fn look_for_gid(&self) {
        let there = gid_kind(&self.name, self.port, self.gid).is_some();
        if self.gid_is_there.swap(there, Ordering::Relaxed) == there {
            return;
        }
        if there {
            info!(device = self.name, gid = self.gid_text, "GID is back");
        } else {
            warn!(device = self.name, gid = self.gid_text, "GID vanished, connections over it fail: see ip addr");
        }
    }

    pub(super) fn ibv_device(&self) -> *mut ib::ibv_device {
        // SAFETY: the watch keeps the context open.
        unsafe { (*self.verbs).device }
    }

    /// RoCE, as against InfiniBand.
    pub(super) fn is_ethernet(&self) -> bool {
        self.ethernet
    }

    /// The port's active MTU in bytes, as it is now.
    pub(super) fn mtu(&self) -> u32 {
        port(self.verbs, self.port).0
    }

    pub(super) fn info(&self) -> DeviceInfo {
        DeviceInfo {
            id: self.id,
            name: self.name.clone(),
            gid: self.gid_text.clone(),
            mtu: self.mtu(),
            caps: self.caps.clone(),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let Some(watch) = self.watch.take() else {
            if self.is_removed() {
                warn!(device = self.name, "removed, but its removal may wait until this process ends");
            }
            return;
        };
        if self.is_removed() {
            // SAFETY: the watch still keeps the context open.
            let fds = unsafe { [(*self.verbs).cmd_fd, (*self.verbs).async_fd] };
            release(&self.name, fds);
        }
        watch.destroy(&self.channel);
        debug!(device = self.name, id = self.id.0, "device let go");
    }
}

/// Puts /dev/null in the place of descriptors.
fn release(name: &str, fds: [RawFd; 2]) {
    let null = match fs::File::options().read(true).write(true).open("/dev/null") {
        Ok(null) => null,
        Err(error) => {
            warn!(device = name, %error, "/dev/null: the device's removal waits until this process ends");
            return;
        }
    };
    for fd in fds {
        // SAFETY: `fd` is a descriptor of the removed device that nobody uses any more (see the module documentation);
        // replacing it is atomic, so its number cannot be taken by another file in between.
        if unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) } < 0 {
            warn!(device = name, fd, errno = sys::errno(), "the device's removal waits until this process ends");
        }
    }
    info!(device = name, "removed device let go");
}

/// Every device in use. Shared by all threads; touched at connection set-up only.
#[derive(Default)]
pub(super) struct Registry {
    devices: Mutex<Vec<Arc<Device>>>,
    next: AtomicU32,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, id: DeviceId) -> Option<Arc<Device>> {
        self.lock().iter().find(|device| device.id == id).cloned()
    }

    pub(super) fn ids(&self) -> Vec<DeviceId> {
        self.lock().iter().map(|device| device.id).collect()
    }

    fn find(&self, verbs: *mut ib::ibv_context) -> Option<Arc<Device>> {
        self.lock().iter().find(|device| std::ptr::eq(device.verbs, verbs)).cloned()
    }

    /// The device that `id` is bound to, met now or before.
    pub(super) fn of(&self, id: &RawId, local: SocketAddr, channel: &Arc<Channel>) -> Result<Arc<Device>, RdmaError> {
        let verbs = id.verbs();
        if verbs.is_null() {
            return Err(RdmaError::new("RDMA connection", "it is bound to no device", NO_DEVICE_REMEDY));
        }
        if let Some(known) = self.find(verbs) {
            return Ok(known);
        }
        let device = Arc::new(self.meet(id, local, channel)?);
        info!(
            device = device.name,
            id = device.id.0,
            gid = device.gid_text,
            mtu = device.mtu(),
            iwarp = device.iwarp,
            "RDMA device in use"
        );
        self.lock().push(Arc::clone(&device));
        Ok(device)
    }

    fn meet(&self, id: &RawId, local: SocketAddr, channel: &Arc<Channel>) -> Result<Device, RdmaError> {
        let verbs = id.verbs();
        // SAFETY: `id` is bound, so librdmacm holds its context and that its device.
        let (name, node, transport) = unsafe {
            let device = (*verbs).device;
            let name = CStr::from_ptr(ib::ibv_get_device_name(device)).to_string_lossy().into_owned();
            let node = CStr::from_ptr((*device).dev_name.as_ptr()).to_string_lossy().into_owned();
            (name, Path::new("/sys/class/infiniband_verbs").join(node), (*device).transport_type)
        };
        let number = DeviceId(self.next.fetch_add(1, Ordering::Relaxed));
        let watch = match RawId::watch(channel, number, local) {
            Ok(watch) if std::ptr::eq(watch.verbs(), verbs) => Some(watch),
            Ok(elsewhere) => {
                // Two RDMA devices on one network interface.
                elsewhere.destroy(channel);
                None
            }
            Err(errno) => {
                debug!(device = name, %local, errno, "no watch");
                None
            }
        };
        let iwarp = transport == ib::ibv_transport_type::IBV_TRANSPORT_IWARP;
        let (port, gid) = (id.port(), id.sgid());
        let mut device = Device {
            id: number,
            gid,
            gid_text: gid_text(&name, port, gid),
            gid_is_there: AtomicBool::new(true),
            name,
            node: node.exists().then_some(node),
            verbs,
            port,
            caps: caps(verbs, iwarp)?,
            iwarp,
            ethernet: self::port(verbs, port).1,
            channel: Arc::clone(channel),
            watch,
            removed: AtomicBool::new(false),
        };
        device.caps.max_inline = probe_inline(&device);
        Ok(device)
    }

    /// librdmacm's contexts of devices whose removal has begun.
    pub(super) fn vanished(&self) -> Vec<*mut ib::ibv_context> {
        let gone = |device: &&Arc<Device>| device.node.as_ref().is_some_and(|node| !node.exists());
        self.lock().iter().filter(gone).map(|device| device.verbs).collect()
    }

    /// The device of `verbs` was removed: forget it, so that it is let go with its last user.
    pub(super) fn remove(&self, verbs: *mut ib::ibv_context) -> Option<Arc<Device>> {
        let mut devices = self.lock();
        let at = devices.iter().position(|device| std::ptr::eq(device.verbs, verbs))?;
        let device = devices.swap_remove(at);
        device.removed.store(true, Ordering::Release);
        Some(device)
    }

    /// Connection management ends: forget its devices.
    pub(super) fn forget(&self, channel: &Arc<Channel>) {
        let gone: Vec<_> = {
            let mut devices = self.lock();
            let (gone, kept) = devices.drain(..).partition(|device| Arc::ptr_eq(&device.channel, channel));
            *devices = kept;
            gone
        };
        drop(gone);
    }
}

/// Names of the RDMA devices of this machine.
pub(super) fn names() -> Result<Vec<String>, RdmaError> {
    let mut count = 0;
    // SAFETY: returns an array that ends with a null, or null.
    let list = unsafe { ib::ibv_get_device_list(&mut count) };
    if list.is_null() {
        return Err(RdmaError::os("list of RDMA devices", sys::errno(), NO_DEVICE_REMEDY));
    }
    let mut names = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the array has `count` devices, each valid until it is freed, with a name that ends with a null.
        let name = unsafe { CStr::from_ptr(ib::ibv_get_device_name(*list.add(index))) };
        names.push(name.to_string_lossy().into_owned());
    }
    // SAFETY: from ibv_get_device_list, freed once.
    unsafe { ib::ibv_free_device_list(list) };
    Ok(names)
}

fn caps(verbs: *mut ib::ibv_context, iwarp: bool) -> Result<Caps, RdmaError> {
    // SAFETY: a C struct of integers and arrays: all zeros is a value of it.
    let mut attr: ib::ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open; `attr` is written by the call.
    let errno = unsafe { ib::ibv_query_device(verbs, &mut attr) };
    if errno != 0 {
        return Err(RdmaError::os("limits of the RDMA device", errno, ""));
    }
    let number = |value: i32| u32::try_from(value).unwrap_or(0);
    let depth = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
    let sges = if attr.max_srq > 0 { attr.max_sge.min(attr.max_srq_sge) } else { attr.max_sge };
    let invalidate = attr.device_cap_flags & ib::ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0;
    Ok(Caps {
        max_qp_wr: number(attr.max_qp_wr),
        max_cqe: number(attr.max_cqe),
        max_qp: number(attr.max_qp),
        max_srq_wr: if attr.max_srq > 0 { number(attr.max_srq_wr) } else { 0 },
        max_recv_sge: number(sges).min(MAX_RECV_SGE as u32),
        max_inline: 0,
        max_initiator_depth: depth(attr.max_qp_init_rd_atom),
        max_responder_resources: depth(attr.max_qp_rd_atom),
        send_with_invalidate: invalidate != 0,
        read_sink_needs_remote_write: iwarp,
    })
}

/// Bytes that a send may carry inline. No device attribute tells, so a queue pair is made and thrown away.
fn probe_inline(device: &Device) -> u32 {
    const SIZES: [u32; 4] = [256, 128, 64, 32];
    let probe = |inline: u32| -> Result<(), RdmaError> {
        let context = Context::open(device)?;
        let domain = Domain::new(&context)?;
        let cq = Cq::new(&context, 4, None, 0)?;
        QueuePair::new(&domain, &cq, None, &QpOptions { send_wr: 1, recv_wr: 1, recv_sge: 1, inline }).map(drop)
    };
    SIZES.into_iter().find(|size| probe(*size).is_ok()).unwrap_or(0)
}

/// A port's active MTU in bytes, and whether its link is Ethernet.
fn port(verbs: *mut ib::ibv_context, number: u8) -> (u32, bool) {
    // SAFETY: a C struct of integers: all zeros is a value of it.
    let mut attr: ib::ibv_port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open; `attr` is written by the call.
    if unsafe { ib::___ibv_query_port(verbs, number, &mut attr) } != 0 {
        return (0, false);
    }
    (mtu_bytes(attr.active_mtu), attr.link_layer == sys::LINK_LAYER_ETHERNET)
}

/// `enum ibv_mtu`: 1 = 256 bytes, and twice as much for each step up to 4096.
fn mtu_bytes(mtu: ib::ibv_mtu::Type) -> u32 {
    if (1..=5).contains(&mtu) { 128 << mtu } else { 0 }
}

/// A GID as text, with its kind.
fn gid_text(device: &str, port: u8, gid: [u8; 16]) -> String {
    let text = Ipv6Addr::from(gid).to_string();
    match gid_kind(device, port, gid) {
        Some(kind) => format!("{text} ({kind})"),
        None => text,
    }
}

/// The kind that the kernel's table gives a GID, the newest if it is there more than once; `None` if it is not there.
fn gid_kind(device: &str, port: u8, gid: [u8; 16]) -> Option<String> {
    let table = format!("/sys/class/infiniband/{device}/ports/{port}");
    let kinds = fs::read_dir(format!("{table}/gids")).ok()?.flatten().filter_map(|entry| {
        let value = fs::read_to_string(entry.path()).ok()?;
        let same = value.trim().parse::<Ipv6Addr>().ok()?.octets() == gid;
        let index = entry.file_name().into_string().ok()?;
        let kind = fs::read_to_string(format!("{table}/gid_attrs/types/{index}")).ok()?;
        same.then(|| kind.trim().to_owned())
    });
    // "IB/RoCE v1" before "RoCE v2".
    kinds.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_numbers_are_the_headers() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(mtu_bytes), [0, 256, 512, 1024, 2048, 4096, 0]);
    }

    #[test]
    fn released_descriptors_are_dev_null() {
        let (a, b) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        release("test", [a.as_raw_fd(), b.as_raw_fd()]);
        for file in [a, b] {
            let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
            assert_eq!(link.to_str(), Some("/dev/null"));
        }
    }
}
