//! A reactor's namespaces: the view that commands are checked against, and this reactor's queue of the backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme::io::NamespaceView;
use nvme::registry::SubsystemId;

use crate::backend::{Backend, BackendError, IoQueue, QueueContext};

/// What a host did with a namespace through one reactor; written by that reactor alone.
#[derive(Debug, Default)]
pub(crate) struct IoCounters {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) media_errors: AtomicU64,
}

impl IoCounters {
    /// Sum over the reactors, as the registry takes it.
    pub(crate) fn total<'a>(all: impl Iterator<Item = &'a Self>) -> nvme::registry::IoCounters {
        let mut total = nvme::registry::IoCounters::default();
        for counters in all {
            total.read_commands += counters.reads.load(Ordering::Relaxed);
            total.write_commands += counters.writes.load(Ordering::Relaxed);
            total.bytes_read += counters.bytes_read.load(Ordering::Relaxed);
            total.bytes_written += counters.bytes_written.load(Ordering::Relaxed);
            total.media_errors += counters.media_errors.load(Ordering::Relaxed);
        }
        total
    }

    /// Adds without a locked instruction: one writer.
    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }
}

/// A namespace as it is published to the reactors.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) subsystem: SubsystemId,
    pub(crate) view: NamespaceView,
    pub(crate) backend: Arc<dyn Backend>,
    /// One per reactor.
    pub(crate) counters: Arc<[IoCounters]>,
}

pub(crate) struct Namespace {
    pub(crate) view: NamespaceView,
    pub(crate) queue: Box<dyn IoQueue>,
    /// Operations in the backend.
    pub(crate) pending: u32,
    /// It has to be polled while operations are pending.
    pub(crate) polled: bool,
    pub(crate) counters: Arc<[IoCounters]>,
    _backend: Arc<dyn Backend>,
}

/// All namespaces of a reactor. A queue keeps the place of its subsystem, so a command finds its namespace by two indexed loads.
#[derive(Default)]
pub(crate) struct Namespaces {
    list: Vec<Namespace>,
    subsystems: Vec<(SubsystemId, Vec<u32>)>,
}

impl Namespaces {
    /// The place of a subsystem, made on first use.
    pub(crate) fn place(&mut self, subsystem: SubsystemId) -> u32 {
        let found = self.subsystems.iter().position(|(id, _)| *id == subsystem);
        found.unwrap_or_else(|| {
            self.subsystems.push((subsystem, Vec::new()));
            self.subsystems.len() - 1
        }) as u32
    }

    pub(crate) fn add(&mut self, published: Published, context: &QueueContext) -> Result<(), BackendError> {
        let queue = published.backend.open_queue(context)?;
        let polled = !queue.completes_on_ring();
        let place = self.place(published.subsystem);
        let nsid = published.view.nsid as usize;
        let ids = &mut self.subsystems[place as usize].1;
        if ids.len() <= nsid {
            ids.resize(nsid + 1, 0);
        }
        self.list.push(Namespace {
            view: published.view,
            queue,
            pending: 0,
            polled,
            counters: published.counters,
            _backend: published.backend,
        });
        ids[nsid] = self.list.len() as u32;
        Ok(())
    }

    /// Index of a namespace, by the place of its subsystem and its NSID.
    pub(crate) fn find(&self, place: u32, nsid: u32) -> Option<u32> {
        self.subsystems.get(place as usize)?.1.get(nsid as usize)?.checked_sub(1)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Namespace> {
        self.list.iter_mut()
    }
}

impl std::ops::Index<u32> for Namespaces {
    type Output = Namespace;
    fn index(&self, at: u32) -> &Namespace {
        &self.list[at as usize]
    }
}

impl std::ops::IndexMut<u32> for Namespaces {
    fn index_mut(&mut self, at: u32) -> &mut Namespace {
        &mut self.list[at as usize]
    }
}
