//! What all handles of one fabric share: listeners, links, endpoints, faults.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::cm::CmBox;
use super::faults::FaultState;
use super::shell::Shell;
use crate::rdma::{CmEvent, ConnId, DeviceId, ListenerId, QpId, RdmaError};

/// What happened on a fabric since it was made, and what exists on it now. Traffic of endpoints that are gone is included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalCounters {
    /// SENDs carried out.
    pub sends: u64,
    /// Of these, with invalidate.
    pub send_invalidates: u64,
    /// RDMA WRITEs carried out.
    pub writes: u64,
    /// RDMA READs carried out.
    pub reads: u64,
    /// Bytes that RDMA READ and WRITE moved.
    pub rdma_bytes: u64,
    /// Work queue hand-overs that had at least one send request.
    pub doorbells: u64,
    /// Completions polled.
    pub completions: u64,
    /// SENDs that had to wait for a receive.
    pub rnr_waits: u64,
    /// RDMA READs under way beyond the depth that the poster itself had asked for.
    pub reads_over_depth: u64,
    /// The most RDMA READs that were under way on one queue pair.
    pub peak_reads: u64,
    /// Wake-ups written to a sleeping endpoint's descriptor.
    pub wakeups: u64,
    /// Completion vectors that endpoints asked for, by bits.
    pub vectors: u64,
    /// Endpoints that exist.
    pub endpoints: u64,
    /// Queue pairs that exist.
    pub queue_pairs: u64,
    /// Memory registrations that exist.
    pub regions: u64,
    /// Receives posted and not consumed.
    pub receives: u64,
}

impl LocalCounters {
    pub(super) fn add(&mut self, other: &Self) {
        self.sends += other.sends;
        self.send_invalidates += other.send_invalidates;
        self.writes += other.writes;
        self.reads += other.reads;
        self.rdma_bytes += other.rdma_bytes;
        self.doorbells += other.doorbells;
        self.completions += other.completions;
        self.rnr_waits += other.rnr_waits;
        self.reads_over_depth += other.reads_over_depth;
        self.peak_reads = self.peak_reads.max(other.peak_reads);
        self.wakeups += other.wakeups;
        self.vectors |= other.vectors;
        self.endpoints += other.endpoints;
        self.queue_pairs += other.queue_pairs;
        self.regions += other.regions;
        self.receives += other.receives;
    }
}

/// The two ends of a connection, made when it is asked for.
pub(super) struct Link {
    /// Never reused; a queue pair belongs to at most one link.
    pub(super) id: u64,
    pub(super) active: (ConnId, Arc<CmBox>),
    pub(super) passive: (ConnId, Arc<CmBox>),
    /// What the passive side answered, for the active side's `established`.
    pub(super) answer: Mutex<Option<Answer>>,
    pub(super) paused: AtomicBool,
    pub(super) lost: AtomicBool,
    ended: AtomicBool,
}

/// The accepting queue pair.
pub(super) struct Answer {
    pub(super) shell: Arc<Shell>,
    pub(super) qp: QpId,
    pub(super) responder_resources: u8,
}

impl Link {
    pub(super) fn answer(&self) -> MutexGuard<'_, Option<Answer>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells both ends, once, that the connection is over. Nobody is told of a cut link.
    pub(super) fn end(&self) {
        if self.lost.load(Ordering::Acquire) || self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        for (conn, cm) in [&self.active, &self.passive] {
            cm.push(CmEvent::Disconnected { conn: *conn });
        }
    }
}

struct Listener {
    id: ListenerId,
    address: SocketAddr,
    cm: Arc<CmBox>,
}

pub(super) struct Fabric {
    pub(super) faults: FaultState,
    listeners: Mutex<Vec<Listener>>,
    links: Mutex<HashMap<ConnId, Weak<Link>>>,
    shells: Mutex<Vec<Weak<Shell>>>,
    cms: Mutex<Vec<Weak<CmBox>>>,
    /// Traffic of endpoints that are gone.
    past: Mutex<LocalCounters>,
    /// 0 while there is no device.
    device: AtomicU32,
    last_device: AtomicU32,
    next_id: AtomicU64,
}

impl Default for Fabric {
    fn default() -> Self {
        Self {
            faults: FaultState::default(),
            listeners: Mutex::default(),
            links: Mutex::default(),
            shells: Mutex::default(),
            cms: Mutex::default(),
            past: Mutex::default(),
            device: AtomicU32::new(1),
            last_device: AtomicU32::new(1),
            next_id: AtomicU64::new(1),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fabric {
    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn device(&self) -> Result<DeviceId, RdmaError> {
        match self.device.load(Ordering::Acquire) {
            0 => Err(RdmaError::new("local device", "it was removed", "restore it")),
            id => Ok(DeviceId(id)),
        }
    }

    pub(super) fn device_is(&self, device: DeviceId) -> bool {
        self.device.load(Ordering::Acquire) == device.0
    }

    pub(super) fn add_cm(&self, cm: &Arc<CmBox>) {
        let mut cms = lock(&self.cms);
        cms.retain(|cm| cm.strong_count() > 0);
        cms.push(Arc::downgrade(cm));
    }

    pub(super) fn add_shell(&self, shell: &Arc<Shell>) {
        let mut shells = lock(&self.shells);
        shells.retain(|shell| shell.strong_count() > 0);
        shells.push(Arc::downgrade(shell));
    }

    /// Keeps the traffic counters of an endpoint that goes.
    pub(super) fn retire(&self, counters: &LocalCounters) {
        lock(&self.past).add(counters);
    }

    pub(super) fn listen(&self, address: SocketAddr, cm: &Arc<CmBox>) -> Result<ListenerId, RdmaError> {
        let mut listeners = lock(&self.listeners);
        if listeners.iter().any(|listener| listener.address == address) {
            return Err(RdmaError::os(format!("listen on {address}"), libc::EADDRINUSE, "choose another port"));
        }
        let id = ListenerId(u32::try_from(self.next_id()).unwrap_or(u32::MAX));
        listeners.push(Listener { id, address, cm: Arc::clone(cm) });
        Ok(id)
    }

    pub(super) fn unlisten(&self, id: ListenerId) {
        lock(&self.listeners).retain(|listener| listener.id != id);
    }

    /// Who listens on an address: by its name first, then by the wildcard.
    pub(super) fn find_listener(&self, address: SocketAddr) -> Option<(ListenerId, Arc<CmBox>)> {
        let listeners = lock(&self.listeners);
        let exact = listeners.iter().find(|listener| listener.address == address);
        let wildcard = || {
            listeners
                .iter()
                .find(|listener| listener.address.ip().is_unspecified() && listener.address.port() == address.port())
        };
        exact.or_else(wildcard).map(|listener| (listener.id, Arc::clone(&listener.cm)))
    }

    pub(super) fn link(&self, active: (ConnId, Arc<CmBox>), passive: (ConnId, Arc<CmBox>)) -> Arc<Link> {
        let ids = [active.0, passive.0];
        let link = Arc::new(Link {
            id: self.next_id(),
            active,
            passive,
            answer: Mutex::new(None),
            paused: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let mut links = lock(&self.links);
        links.retain(|_, link| link.strong_count() > 0);
        for id in ids {
            links.insert(id, Arc::downgrade(&link));
        }
        link
    }

    fn find_link(&self, conn: ConnId) -> Option<Arc<Link>> {
        lock(&self.links).get(&conn).and_then(Weak::upgrade)
    }

    pub(super) fn set_paused(&self, conn: ConnId, paused: bool) {
        if let Some(link) = self.find_link(conn) {
            link.paused.store(paused, Ordering::Release);
        }
        self.kick_all();
    }

    pub(super) fn cut(&self, conn: ConnId) {
        if let Some(link) = self.find_link(conn) {
            link.lost.store(true, Ordering::Release);
        }
        self.kick_all();
    }

    fn kick_all(&self) {
        for shell in self.shells() {
            shell.kick();
        }
    }

    fn shells(&self) -> Vec<Arc<Shell>> {
        lock(&self.shells).iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn remove_device(&self) {
        let device = DeviceId(self.device.swap(0, Ordering::AcqRel));
        lock(&self.listeners).clear();
        for shell in self.shells() {
            shell.fail_device();
        }
        let cms: Vec<_> = lock(&self.cms).iter().filter_map(Weak::upgrade).collect();
        for cm in cms {
            cm.push(CmEvent::DeviceRemoved(device));
        }
    }

    pub(super) fn restore_device(&self) {
        let id = self.last_device.fetch_add(1, Ordering::AcqRel) + 1;
        self.device.store(id, Ordering::Release);
    }

    pub(super) fn counters(&self) -> LocalCounters {
        let mut total = *lock(&self.past);
        for shell in self.shells() {
            total.add(&shell.counters());
        }
        total
    }
}
