//! A reactor's namespaces: the view that commands are checked against, and this reactor's queue of the backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme::gate::{Gate, Sender};
use nvme::io::{IoCommand, NamespaceView};
use nvme::registry::SubsystemId;
use nvme::status::Status;

use super::latency::Stages;
use super::limits::Limiter;
use super::locks::{LockId, NamespaceKey, RangeLock};
use super::request::RequestId;
use super::tally::{Tally, Traffic};
use super::zones::ZoneTurns;
use crate::backend::{Backend, BackendError, Io, IoDone, IoError, IoQueue, QueueContext, Submit};

/// What a host did with a namespace through one reactor; written by that reactor alone, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct IoCounters {
    pub(crate) tally: Tally,
    /// How long I/O commands that succeeded took.
    pub(crate) stages: Stages,
}

impl IoCounters {
    /// Sum over the reactors, as the registry takes it.
    pub(crate) fn total<'a>(all: impl Iterator<Item = &'a Self>) -> nvme::registry::IoCounters {
        let mut media_errors = 0;
        let sum: Traffic = all
            .map(|counters| {
                media_errors += counters.tally.media_errors();
                counters.tally.traffic()
            })
            .sum();
        nvme::registry::IoCounters {
            read_commands: sum.reads,
            bytes_read: sum.bytes_read,
            write_commands: sum.writes,
            bytes_written: sum.bytes_written,
            media_errors,
            ..nvme::registry::IoCounters::default()
        }
    }
}

/// A namespace as it is published to the reactors.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) instance: Instance,
    pub(crate) subsystem: SubsystemId,
    pub(crate) nqn: Arc<str>,
    pub(crate) view: NamespaceView,
    pub(crate) gate: Option<Arc<Gate>>,
    /// What all hosts together may do with it.
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) backend: Arc<dyn Backend>,
    /// Of a zoned one: who works on which zone.
    pub(crate) zones: Option<Arc<ZoneTurns>>,
    /// One per reactor.
    pub(crate) counters: Arc<[IoCounters]>,
}

impl Published {
    pub(crate) fn key(&self) -> NamespaceKey {
        (self.subsystem, self.view.nsid)
    }
}

/// Tells a namespace from those that have its identifier before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instance(u64);

impl Instance {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

pub(crate) struct Namespace {
    pub(crate) instance: Instance,
    pub(crate) key: NamespaceKey,
    pub(crate) view: NamespaceView,
    /// What keeps commands of some hosts out.
    pub(crate) gate: Option<Arc<Gate>>,
    pub(crate) limiter: Arc<Limiter>,
    /// Counts the views that were published.
    pub(crate) epoch: u32,
    /// The epoch at which a command may go to the backend without another look: none while there are locks, and none where
    /// there are zones.
    pub(crate) start_epoch: u32,
    locks: Vec<RangeLock>,
    /// Requests that wait for a lock to go, by index and generation.
    pub(crate) locked: Vec<(RequestId, u32)>,
    removed: bool,
    pub(crate) zones: Option<Arc<ZoneTurns>>,
    pub(crate) queue: Box<dyn IoQueue>,
    /// Operations in the backend.
    pub(crate) pending: u32,
    /// It has to be polled while operations are pending.
    pub(crate) polled: bool,
    pub(crate) counters: Arc<[IoCounters]>,
    /// Held while the queue is open; `None` once the namespace was removed and drained.
    backend: Option<Arc<dyn Backend>>,
}

/// In the place of a removed namespace's queue.
struct Vacant;

impl IoQueue for Vacant {
    fn submit(&mut self, io: Io) -> Submit {
        Submit::Done(IoDone { token: io.token, result: Err(IoError::Gone), data: io.data })
    }

    fn completes_on_ring(&self) -> bool {
        true
    }
}

/// No view has this number.
const NEVER: u32 = u32::MAX;

impl Namespace {
    pub(crate) fn set_view(&mut self, view: NamespaceView, gate: Option<Arc<Gate>>) {
        self.view = view;
        self.gate = gate;
        self.changed();
    }

    fn changed(&mut self) {
        self.epoch = (self.epoch + 1) % NEVER;
        self.set_start_epoch();
    }

    fn set_start_epoch(&mut self) {
        self.start_epoch = if self.locks.is_empty() && self.zones.is_none() { self.epoch } else { NEVER };
    }

    /// A lock that is known already is the same one.
    pub(crate) fn add_lock(&mut self, lock: RangeLock) {
        self.remove_lock(lock.id);
        self.locks.push(lock);
        self.set_start_epoch();
    }

    pub(crate) fn remove_lock(&mut self, id: LockId) {
        self.locks.retain(|lock| lock.id != id);
        self.set_start_epoch();
    }

    /// Whether a lock keeps a command out.
    pub(crate) fn is_locked(&self, command: &IoCommand) -> bool {
        let blocks = command.blocks();
        let concerned = blocks.is_some() || command.changes_media();
        concerned && self.locks.iter().any(|lock| lock.covers(blocks))
    }

    /// Nothing but its view speaks against a command: no gate, no limit, no lock.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.gate.is_none() && self.start_epoch == self.epoch && !self.limiter.is_on()
    }

    /// Checks a command again that was checked against an earlier view.
    pub(crate) fn recheck(&self, command: &IoCommand, sender: &Sender) -> Result<(), Status> {
        if self.removed {
            return Err(nvme::io::no_namespace());
        }
        nvme::io::recheck(command, &self.view)?;
        self.gate.as_ref().map_or(Ok(()), |gate| gate.check(sender, command))
    }
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

    pub(crate) fn add(&mut self, published: Published, context: &QueueContext) -> Result<u32, BackendError> {
        let queue = published.backend.open_queue(context)?;
        let polled = !queue.completes_on_ring();
        let key = published.key();
        let namespace = Namespace {
            instance: published.instance,
            key,
            view: published.view,
            gate: published.gate,
            limiter: published.limiter,
            epoch: 0,
            start_epoch: if published.zones.is_some() { NEVER } else { 0 },
            locks: Vec::new(),
            locked: Vec::new(),
            removed: false,
            zones: published.zones,
            queue,
            pending: 0,
            polled,
            counters: published.counters,
            backend: Some(published.backend),
        };
        let at = self.list.iter().position(|namespace| namespace.backend.is_none()).unwrap_or(self.list.len());
        if at == self.list.len() {
            self.list.push(namespace);
        } else {
            self.list[at] = namespace;
        }
        self.list_at(key, at as u32);
        Ok(at as u32)
    }

    /// Closes the queue of a removed namespace that no command refers to any more. Its index may be given to another.
    pub(crate) fn vacate(&mut self, at: u32) {
        let namespace = &mut self.list[at as usize];
        (namespace.queue, namespace.polled) = (Box::new(Vacant), false);
        namespace.backend = None;
    }

    /// Index of a namespace, by the place of its subsystem and its NSID.
    #[inline(always)]
    pub(crate) fn find(&self, place: u32, nsid: u32) -> Option<u32> {
        self.subsystems.get(place as usize)?.1.get(nsid as usize)?.checked_sub(1)
    }

    /// Index of a namespace that other threads name.
    pub(crate) fn find_key(&self, (subsystem, nsid): NamespaceKey) -> Option<u32> {
        let place = self.subsystems.iter().position(|(id, _)| *id == subsystem)?;
        self.find(place as u32, nsid)
    }

    /// Index of a namespace whose queue is open, listed or not.
    pub(crate) fn find_instance(&self, instance: Instance) -> Option<u32> {
        let open = |namespace: &Namespace| namespace.instance == instance && namespace.backend.is_some();
        self.list.iter().position(open).map(|at| at as u32)
    }

    /// New commands do not find it any more; those in progress go on, at the index that comes back.
    pub(crate) fn remove(&mut self, key: NamespaceKey) -> Option<u32> {
        let at = self.find_key(key)?;
        let namespace = &mut self[at];
        namespace.removed = true;
        namespace.changed();
        if let Some((_, ids)) = self.subsystems.iter_mut().find(|(id, _)| *id == key.0)
            && let Some(entry) = ids.get_mut(key.1 as usize)
        {
            *entry = 0;
        }
        Some(at)
    }

    /// Commands find a removed namespace again that was not vacated.
    pub(crate) fn revive(&mut self, at: u32, published: &Published) {
        let namespace = &mut self[at];
        namespace.removed = false;
        namespace.set_view(published.view, published.gate.clone());
        self.list_at(published.key(), at);
    }

    /// Has commands find a namespace.
    fn list_at(&mut self, (subsystem, nsid): NamespaceKey, at: u32) {
        let place = self.place(subsystem) as usize;
        let (ids, nsid) = (&mut self.subsystems[place].1, nsid as usize);
        if ids.len() <= nsid {
            ids.resize(nsid + 1, 0);
        }
        ids[nsid] = at + 1;
    }

    /// Indices of the namespaces of a subsystem, by its place.
    pub(crate) fn at_place(&self, place: u32) -> Vec<u32> {
        let ids = self.subsystems.get(place as usize).map(|(_, ids)| ids.iter());
        ids.into_iter().flatten().filter_map(|at| at.checked_sub(1)).collect()
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
