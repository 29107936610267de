//! The end of a normal shutdown (CC.SHN): when a controller's I/O queues are gone, what hosts wrote to its subsystem is flushed,
//! and only then does CSTS.SHST say that the shutdown is complete. (NVMe Base 2.x, Controller Shutdown.)
//!
//! The reactor of the admin queue does it, through its own queues of the backends: a Flush covers every write that was
//! answered before it, whoever submitted it. A flush that fails leaves the shutdown incomplete, and the host is not told that
//! its data are safe.

use nvme::registry::{ControllerId, SubsystemId};
use tracing::{debug, warn};

use super::reactor::Reactor;
use super::shared::Control;
use crate::backend::{Io, IoDone, IoOp, Submit};
use crate::rdma::Provider;

/// In a backend's token: it belongs to a shutdown, not to a request. Generations of requests stay below.
const TOKEN: u64 = 1 << 63;

/// One controller's shutdown in a reactor.
#[derive(Debug)]
pub(crate) struct ShutdownFlush {
    ctrl: ControllerId,
    /// Flushes that were not answered.
    left: u32,
    failed: bool,
}

impl Control {
    /// The subsystem to flush, once the last I/O queue of a controller that shuts down is gone.
    pub(crate) fn shutdown_to_flush(&mut self, ctrl: ControllerId) -> Option<SubsystemId> {
        let at = self.shutting_down.iter().position(|other| *other == ctrl)?;
        if self.queues.get(&ctrl).is_some_and(|queues| queues.iter().any(|queue| queue.qid != 0)) {
            return None;
        }
        self.shutting_down.swap_remove(at);
        self.registry.controller(ctrl).map(|controller| controller.subsystem)
    }
}

/// Whether a token is one of this module's.
pub(crate) fn is_shutdown(token: u64) -> bool {
    token & TOKEN != 0
}

impl<P: Provider> Reactor<P> {
    /// Flushes every namespace of a subsystem for a controller that shuts down.
    pub(crate) fn flush_for_shutdown(&mut self, ctrl: ControllerId, subsystem: SubsystemId) {
        let place = self.namespaces.place(subsystem);
        let namespaces = self.namespaces.at_place(place);
        let left = namespaces.len() as u32 + 1;
        let key = self.shutdowns.insert(ShutdownFlush { ctrl, left, failed: false });
        for at in namespaces {
            let token = TOKEN | u64::from(at) << 32 | key as u64;
            let namespace = &mut self.namespaces[at];
            namespace.pending += 1;
            self.polled_pending += u32::from(namespace.polled);
            if let Submit::Done(done) = namespace.queue.submit(Io { token, op: IoOp::Flush, data: None }) {
                self.on_shutdown_flushed(&done);
            }
        }
        self.shutdown_step(key);
    }

    /// A backend answered a Flush of a shutdown.
    pub(crate) fn on_shutdown_flushed(&mut self, done: &IoDone) {
        let (at, key) = ((done.token & !TOKEN) >> 32, done.token as u32 as usize);
        let namespace = &mut self.namespaces[at as u32];
        namespace.pending = namespace.pending.saturating_sub(1);
        if namespace.polled {
            self.polled_pending = self.polled_pending.saturating_sub(1);
        }
        if let Err(error) = &done.result {
            warn!(
                reactor = self.index,
                nsid = namespace.view.nsid,
                ?error,
                "the flush of a shutdown failed: what the host wrote may not be on stable storage"
            );
            if let Some(shutdown) = self.shutdowns.get_mut(key) {
                shutdown.failed = true;
            }
        }
        self.shutdown_step(key);
    }

    /// One of a shutdown's flushes, or the submission of all of them, is done.
    fn shutdown_step(&mut self, key: usize) {
        let Some(shutdown) = self.shutdowns.get_mut(key) else { return };
        shutdown.left = shutdown.left.saturating_sub(1);
        if shutdown.left > 0 {
            return;
        }
        let ShutdownFlush { ctrl, failed, .. } = self.shutdowns.remove(key);
        if !failed {
            debug!(reactor = self.index, "a controller's shutdown is complete");
            self.shared.with_control(|control| control.registry.shutdown_done(ctrl));
        }
    }
}
