//! Misbehaviour on demand.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use super::fabric::Fabric;
use crate::rdma::ConnId;

/// A kind of work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// SEND, with or without invalidate.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
}

#[derive(Debug, Default)]
pub(super) struct FaultState {
    pub(super) fail_send_invalidate: AtomicU32,
    pub(super) fail_accept: AtomicU32,
    pub(super) fail_create: AtomicU32,
    pub(super) fail_register: AtomicU32,
    pub(super) fatal_rnr: AtomicBool,
    /// Whether `break_at` holds anything: looked at per work request.
    breaks: AtomicBool,
    break_at: Mutex<Option<(WorkKind, u32)>>,
}

impl FaultState {
    /// Takes one of the failures that were ordered.
    pub(super) fn take(count: &AtomicU32) -> bool {
        count.load(Ordering::Relaxed) != 0
            && count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok()
    }

    /// Whether this work request is the one in whose middle the link breaks.
    pub(super) fn breaks_now(&self, kind: WorkKind) -> bool {
        if !self.breaks.load(Ordering::Acquire) {
            return false;
        }
        let mut plan = self.break_at.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *plan {
            Some((planned, left)) if *planned == kind => {
                *left = left.saturating_sub(1);
                let now = *left == 0;
                if now {
                    *plan = None;
                    self.breaks.store(false, Ordering::Release);
                }
                now
            }
            _ => false,
        }
    }
}

/// Orders misbehaviour of a fabric. It applies to every handle on it.
#[derive(Clone, Copy)]
pub struct Faults<'a> {
    fabric: &'a Fabric,
}

impl std::fmt::Debug for Faults<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.fabric.faults.fmt(f)
    }
}

impl<'a> Faults<'a> {
    pub(super) fn new(fabric: &'a Fabric) -> Self {
        Self { fabric }
    }

    /// The next `count` SENDs with invalidate fail at their own device ("local QP operation error"), as on devices that claim the
    /// ability and lack it.
    pub fn fail_send_invalidate(&self, count: u32) {
        self.fabric.faults.fail_send_invalidate.store(count, Ordering::Release);
    }

    /// The next `count` accepts fail.
    pub fn fail_accept(&self, count: u32) {
        self.fabric.faults.fail_accept.store(count, Ordering::Release);
    }

    /// The next `count` queue pairs for connection requests cannot be made.
    pub fn fail_create(&self, count: u32) {
        self.fabric.faults.fail_create.store(count, Ordering::Release);
    }

    /// The next `count` registrations of memory fail.
    pub fn fail_register(&self, count: u32) {
        self.fabric.faults.fail_register.store(count, Ordering::Release);
    }

    /// A SEND that finds no receive fails instead of waiting.
    pub fn fatal_rnr(&self, fatal: bool) {
        self.fabric.faults.fatal_rnr.store(fatal, Ordering::Release);
    }

    /// The link of the `nth` work request of this kind from now breaks in its middle: half of the bytes moved, nobody is told,
    /// and everything sent on it later exceeds its retries.
    pub fn break_link_at(&self, kind: WorkKind, nth: u32) {
        let faults = &self.fabric.faults;
        let mut plan = faults.break_at.lock().unwrap_or_else(PoisonError::into_inner);
        *plan = (nth > 0).then_some((kind, nth));
        faults.breaks.store(nth > 0, Ordering::Release);
    }

    /// What the two ends of a connection (named by either) send stays where it is, until [`Faults::resume`].
    pub fn pause(&self, conn: ConnId) {
        self.fabric.set_paused(conn, true);
    }

    /// Ends [`Faults::pause`].
    pub fn resume(&self, conn: ConnId) {
        self.fabric.set_paused(conn, false);
    }

    /// The link of a connection is cut: neither end is told; what is sent on it exceeds its retries.
    pub fn cut(&self, conn: ConnId) {
        self.fabric.cut(conn);
    }

    /// The device goes away: its queue pairs fail, its listeners are lost, nothing can be opened on it.
    pub fn remove_device(&self) {
        self.fabric.remove_device();
    }

    /// A device is there again, under a new id.
    pub fn restore_device(&self) {
        self.fabric.restore_device();
    }
}
