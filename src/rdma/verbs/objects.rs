//! Verbs objects with an owner: each is destroyed once, when its owner drops it.
//!
//! Who drops what in which order is written down where they are held (`endpoint.rs`): libibverbs refuses to destroy what
//! others still stand on. None of these is shared between threads; all may move from one to another, as libibverbs
//! keeps no thread-local state.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;

use rdma_sys as ib;
use tracing::warn;

use super::device::Device;
use super::sys;
use crate::rdma::{Access, QpOptions, RdmaError};

/// Makes a descriptor of libibverbs' non-blocking.
pub(super) fn set_nonblocking(fd: RawFd) -> Result<(), RdmaError> {
    // SAFETY: fcntl on a descriptor number touches no memory of ours.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(RdmaError::os("RDMA event descriptor", sys::errno(), ""));
    }
    Ok(())
}

fn complain(what: &str, result: i32) {
    // EIO is what a removed device answers; its objects are gone already.
    if result != 0 && result != libc::EIO {
        warn!(object = what, errno = result, "could not be destroyed");
    }
}

/// An opened device of our own, apart from librdmacm's: its asynchronous events are those of this context's objects, so
/// no two reactors compete for them, and it can be closed.
pub(super) struct Context(ptr::NonNull<ib::ibv_context>);

// SAFETY: see the module documentation: owned by one thread at a time, and libibverbs has no thread affinity.
unsafe impl Send for Context {}

impl Context {
    pub(super) fn open(device: &Device) -> Result<Self, RdmaError> {
        // SAFETY: `ibv_device` is held by librdmacm's context, which the device's watch keeps open.
        let raw = unsafe { ib::ibv_open_device(device.ibv_device()) };
        let context = ptr::NonNull::new(raw).map(Self).ok_or_else(|| {
            RdmaError::os(format!("RDMA device {}", device.name()), sys::errno(), "is it still there?")
        })?;
        set_nonblocking(context.async_fd())?;
        Ok(context)
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_context {
        self.0.as_ptr()
    }

    pub(super) fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open as long as `self` lives.
        unsafe { (*self.raw()).async_fd }
    }

    /// Interrupt vectors for completions, at least one.
    pub(super) fn comp_vectors(&self) -> u32 {
        // SAFETY: the context is open as long as `self` lives.
        unsafe { (*self.raw()).num_comp_vectors }.max(1) as u32
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by us and closed once; all objects of it are gone (order of fields in `Endpoint`).
        complain("device context", unsafe { ib::ibv_close_device(self.raw()) });
    }
}

/// A protection domain.
pub(super) struct Domain(ptr::NonNull<ib::ibv_pd>);

// SAFETY: see the module documentation.
unsafe impl Send for Domain {}

impl Domain {
    pub(super) fn new(context: &Context) -> Result<Self, RdmaError> {
        // SAFETY: the context is open.
        let raw = unsafe { ib::ibv_alloc_pd(context.raw()) };
        ptr::NonNull::new(raw).map(Self).ok_or_else(|| RdmaError::os("protection domain", sys::errno(), ""))
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_pd {
        self.0.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated by us and freed once, after what stands on it.
        complain("protection domain", unsafe { ib::ibv_dealloc_pd(self.raw()) });
    }
}

/// A completion channel: the descriptor by which armed completion queues wake a reactor.
pub(super) struct CompChannel(ptr::NonNull<ib::ibv_comp_channel>);

// SAFETY: see the module documentation.
unsafe impl Send for CompChannel {}

impl CompChannel {
    pub(super) fn new(context: &Context) -> Result<Self, RdmaError> {
        // SAFETY: the context is open.
        let raw = unsafe { ib::ibv_create_comp_channel(context.raw()) };
        let channel =
            ptr::NonNull::new(raw).map(Self).ok_or_else(|| RdmaError::os("completion channel", sys::errno(), ""))?;
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: the channel lives as long as `self`.
        unsafe { (*self.0.as_ptr()).fd }
    }

    /// Reads and acknowledges every event: a queue with unacknowledged events cannot be destroyed.
    pub(super) fn drain(&self) {
        let mut cq = ptr::null_mut();
        let mut context = ptr::null_mut();
        loop {
            // SAFETY: the channel lives; both pointers are written by the call before they are read.
            if unsafe { ib::ibv_get_cq_event(self.0.as_ptr(), &mut cq, &mut context) } != 0 {
                return;
            }
            // SAFETY: `cq` was just named by libibverbs; it is of this endpoint and lives, as destroying a queue takes
            // its events off the channel.
            unsafe { ib::ibv_ack_cq_events(cq, 1) };
        }
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once, after its completion queues.
        complain("completion channel", unsafe { ib::ibv_destroy_comp_channel(self.0.as_ptr()) });
    }
}

/// A completion queue.
pub(super) struct Cq(ptr::NonNull<ib::ibv_cq>);

// SAFETY: see the module documentation.
unsafe impl Send for Cq {}

impl Cq {
    pub(super) fn new(
        context: &Context,
        entries: u32,
        channel: Option<&CompChannel>,
        vector: u32,
    ) -> Result<Self, RdmaError> {
        let what = format!("completion queue of {entries} entries");
        let count = i32::try_from(entries).map_err(|_| RdmaError::os(what.clone(), libc::EINVAL, ""))?;
        let channel = channel.map_or(ptr::null_mut(), |channel| channel.0.as_ptr());
        let vector = (vector % context.comp_vectors()) as i32;
        // SAFETY: context and channel live, and outlive the queue (order of fields in `Endpoint`).
        let raw = unsafe { ib::ibv_create_cq(context.raw(), count, ptr::null_mut(), channel, vector) };
        ptr::NonNull::new(raw).map(Self).ok_or_else(|| RdmaError::os(what, sys::errno(), ""))
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_cq {
        self.0.as_ptr()
    }

    /// Entries that it really has.
    pub(super) fn capacity(&self) -> u32 {
        // SAFETY: the queue lives as long as `self`.
        unsafe { (*self.raw()).cqe }.max(0) as u32
    }

    /// Takes completions off the queue. 0 also when the queue is broken; the asynchronous event tells.
    pub(super) fn poll(&self, out: &mut [ib::ibv_wc]) -> usize {
        // SAFETY: the queue lives, and `out` has room for that many.
        let got = unsafe { ib::ibv_poll_cq(self.raw(), out.len() as i32, out.as_mut_ptr()) };
        usize::try_from(got).unwrap_or(0).min(out.len())
    }

    /// Asks for an event at the next completion, solicited or not.
    pub(super) fn arm(&self) -> Result<(), RdmaError> {
        // SAFETY: the queue lives.
        match unsafe { ib::ibv_req_notify_cq(self.raw(), 0) } {
            0 => Ok(()),
            errno => Err(RdmaError::os("arming a completion queue", errno, "")),
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once, after its queue pairs; all events read were acknowledged at once.
        complain("completion queue", unsafe { ib::ibv_destroy_cq(self.raw()) });
    }
}

/// A shared receive queue.
pub(super) struct Srq(ptr::NonNull<ib::ibv_srq>);

// SAFETY: see the module documentation.
unsafe impl Send for Srq {}

impl Srq {
    pub(super) fn new(domain: &Domain, depth: u32, sge: u32) -> Result<Self, RdmaError> {
        let mut init = ib::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ib::ibv_srq_attr { max_wr: depth, max_sge: sge, srq_limit: 0 },
        };
        // SAFETY: the domain lives and outlives the queue; `init` is written and read during the call only.
        let raw = unsafe { ib::ibv_create_srq(domain.raw(), &mut init) };
        ptr::NonNull::new(raw).map(Self).ok_or_else(|| {
            let what = format!("shared receive queue of {depth} receives");
            RdmaError::os(what, sys::errno(), "choose a smaller depth, or none")
        })
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_srq {
        self.0.as_ptr()
    }

    /// Asks for one event when fewer than `limit` receives are left.
    pub(super) fn arm_limit(&self, limit: u32) -> bool {
        let mut attr = ib::ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        // SAFETY: the queue lives; `attr` is read during the call.
        unsafe { ib::ibv_modify_srq(self.raw(), &mut attr, ib::ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32) == 0 }
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once, after its queue pairs.
        complain("shared receive queue", unsafe { ib::ibv_destroy_srq(self.raw()) });
    }
}

/// A registered region.
pub(super) struct Region(ptr::NonNull<ib::ibv_mr>);

// SAFETY: see the module documentation.
unsafe impl Send for Region {}

impl Region {
    /// # Safety
    /// As for [`Endpoint::register`](crate::rdma::Endpoint::register).
    pub(super) unsafe fn new(
        domain: &Domain,
        addr: *mut u8,
        len: usize,
        access: Access,
        iwarp: bool,
    ) -> Result<Self, RdmaError> {
        use ib::ibv_access_flags as flag;
        let flags = match access {
            Access::Local => flag::IBV_ACCESS_LOCAL_WRITE,
            Access::ReadSink if !iwarp => flag::IBV_ACCESS_LOCAL_WRITE,
            Access::ReadSink => flag::IBV_ACCESS_LOCAL_WRITE | flag::IBV_ACCESS_REMOTE_WRITE,
            Access::Remote => {
                flag::IBV_ACCESS_LOCAL_WRITE | flag::IBV_ACCESS_REMOTE_WRITE | flag::IBV_ACCESS_REMOTE_READ
            }
        };
        // SAFETY: the caller vouches for the memory; the domain lives and outlives the region.
        let raw = unsafe { ib::ibv_reg_mr(domain.raw(), addr.cast::<c_void>(), len, flags.0 as i32) };
        ptr::NonNull::new(raw).map(Self).ok_or_else(|| {
            let errno = sys::errno();
            let remedy = match errno {
                libc::ENOMEM | libc::EAGAIN => memlock_remedy(len),
                _ => String::new(),
            };
            RdmaError::os(format!("registering {len} bytes of memory"), errno, remedy)
        })
    }

    pub(super) fn keys(&self) -> (u32, u32) {
        // SAFETY: the region lives as long as `self`.
        unsafe { ((*self.0.as_ptr()).lkey, (*self.0.as_ptr()).rkey) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered by us and withdrawn once.
        complain("memory region", unsafe { ib::ibv_dereg_mr(self.0.as_ptr()) });
    }
}

fn memlock_remedy(len: usize) -> String {
    match nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if soft != nix::sys::resource::RLIM_INFINITY => format!(
            "{len} bytes are to be locked and the limit is {soft} for all: raise it (ulimit -l, LimitMEMLOCK=), or use less"
        ),
        _ => "use less memory".to_owned(),
    }
}

/// A queue pair. Not bound to its `rdma_cm_id` but known to it by number: so librdmacm's event reader, on another thread,
/// never touches it.
pub(super) struct QueuePair(ptr::NonNull<ib::ibv_qp>);

// SAFETY: see the module documentation.
unsafe impl Send for QueuePair {}

impl QueuePair {
    pub(super) fn new(domain: &Domain, cq: &Cq, srq: Option<&Srq>, options: &QpOptions) -> Result<Self, RdmaError> {
        let mut init = ib::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            srq: srq.map_or(ptr::null_mut(), Srq::raw),
            cap: ib::ibv_qp_cap {
                max_send_wr: options.send_wr,
                max_recv_wr: options.recv_wr,
                max_send_sge: 1,
                max_recv_sge: if options.recv_wr == 0 { 0 } else { options.recv_sge },
                max_inline_data: options.inline,
            },
            qp_type: ib::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues live and outlive the queue pair; `init` is used during the call only.
        let raw = unsafe { ib::ibv_create_qp(domain.raw(), &mut init) };
        ptr::NonNull::new(raw).map(Self).ok_or_else(|| {
            let what = format!("queue pair of {} sends and {} receives", options.send_wr, options.recv_wr);
            RdmaError::os(what, sys::errno(), "smaller queues may fit the device")
        })
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_qp {
        self.0.as_ptr()
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives as long as `self`.
        unsafe { (*self.raw()).qp_num }
    }

    pub(super) fn modify(&self, attr: &mut ib::ibv_qp_attr, mask: i32) -> Result<(), i32> {
        // SAFETY: the queue pair lives; `attr` is read during the call.
        match unsafe { ib::ibv_modify_qp(self.raw(), attr, mask) } {
            0 => Ok(()),
            errno => Err(errno),
        }
    }

    /// Moves it to the error state: all that is posted completes flushed.
    pub(super) fn to_error(&self) -> Result<(), i32> {
        let mut attr = empty_attr();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_ERR;
        self.modify(&mut attr, ib::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once; all asynchronous events read were acknowledged at once.
        complain("queue pair", unsafe { ib::ibv_destroy_qp(self.raw()) });
    }
}

/// Queue pair attributes, nothing set.
pub(super) fn empty_attr() -> ib::ibv_qp_attr {
    // SAFETY: a C struct of integers and unions of those: all zeros is a value of it.
    unsafe { std::mem::zeroed() }
}
