//! Namespaces and subsystems go: away from new commands at once, from their hosts when that holds, from their storage when the
//! last command on it has ended.
//!
//! What a plan of several changes takes away is a [`Taken`] until the plan has succeeded. Hosts are not told before, and what is
//! put back is what was there: the same storage, reservations, write protection, counters and controllers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};
use nvme::registry::{ConfigError, Drain, Registry, SubsystemId, TakenNamespace, TakenSubsystem};

use super::builder::{Target, TargetError};
use super::live::refused;
use super::locks::NamespaceKey;
use super::namespace::{Instance, Published};
use super::reactor::Reactor;
use super::shared::Control;
use super::ticket::Ticket;
use super::zones::ZoneTurns;
use crate::backend::{Backend, Null, Zoned};
use crate::rdma::Provider;

/// How long a removed namespace's commands have to end before the caller is told that they have not.
const DRAINED: Duration = Duration::from_secs(10);

/// A namespace that hosts do not have any more, and whose storage is not closed: commands on it have not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draining {
    /// NQN of the subsystem that it was of.
    pub nqn: String,
    /// The NSID that it had; another one may have it by now.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: String,
}

/// All that drain.
#[derive(Debug, Default)]
pub(crate) struct DrainBook(Mutex<BTreeMap<Instance, Draining>>);

impl DrainBook {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Instance, Draining>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn all(&self) -> Vec<Draining> {
        self.lock().values().cloned().collect()
    }
}

/// A removed namespace whose commands have not all ended, on one reactor.
#[derive(Debug)]
pub(crate) struct Retiring {
    instance: Instance,
    index: u32,
    /// Held for their drop by those who wait for the end.
    tickets: Vec<Ticket>,
}

impl<P: Provider> Reactor<P> {
    /// Takes a namespace away from new commands; its storage is closed when nothing is in progress on it.
    pub(crate) fn retire(&mut self, key: NamespaceKey) {
        if let Some(index) = self.namespaces.remove(key) {
            let instance = self.namespaces[index].instance;
            self.retiring.push(Retiring { instance, index, tickets: Vec::new() });
        }
    }

    /// Lets go of the ticket when the storage of a removed namespace is closed.
    pub(crate) fn retired(&mut self, instance: Instance, ticket: Ticket) {
        if let Some(retiring) = self.retiring.iter_mut().find(|one| one.instance == instance) {
            retiring.tickets.push(ticket);
        }
        self.retire_drained();
    }

    /// Closes the storage of removed namespaces that no command refers to any more.
    pub(crate) fn retire_drained(&mut self) {
        let Self { retiring, namespaces, requests, .. } = self;
        retiring.retain(|one| {
            let used = namespaces[one.index].pending > 0 || requests.on_namespace(one.index);
            if !used {
                namespaces.vacate(one.index);
            }
            used
        });
    }

    /// The namespace of this key that was removed last, if commands are in progress on it.
    pub(crate) fn last_retiring(&self, key: NamespaceKey) -> Option<u32> {
        let mut indices = self.retiring.iter().rev().map(|one| one.index);
        indices.find(|at| self.namespaces[*at].key == key)
    }

    /// Has a removed namespace back whose storage is still open here; whether there is one.
    pub(crate) fn revive(&mut self, published: &Published) -> bool {
        let same = |one: &Retiring| one.instance == published.instance;
        let Some(at) = self.retiring.iter().position(same) else { return false };
        let index = self.retiring.remove(at).index;
        self.namespaces.revive(index, published);
        true
    }
}

/// A namespace or a subsystem that was taken away. It has to be given to [`Target::put_back`] or [`Target::decide`]; until then
/// its hosts are told that it is not ready.
#[derive(Debug)]
#[must_use]
pub(crate) struct Taken {
    id: SubsystemId,
    what: What,
    storage: Storage,
}

/// The namespaces behind it.
#[derive(Debug)]
pub(super) struct Storage {
    nqn: String,
    parts: Vec<Part>,
}

#[derive(Debug)]
enum What {
    Namespace(TakenNamespace),
    Subsystem(TakenSubsystem),
}

/// A namespace of it.
#[derive(Debug)]
struct Part {
    nsid: u32,
    published: Published,
    closed: bool,
}

impl Target {
    /// Serves a subsystem no more: its controllers are disconnected, its storage is let go. Returns the namespaces that have
    /// not let go of theirs within 10 s; see [`Self::draining`].
    ///
    /// # Errors
    /// It is not served.
    pub fn remove_subsystem(&self, nqn: &str) -> Result<Vec<Draining>, TargetError> {
        let guard = self.live.lock();
        let id = self.find(nqn)?;
        let storage = self.end_subsystem(id, nqn)?;
        drop(guard);
        Ok(self.close(vec![storage]))
    }

    /// Serves a namespace no more; connected hosts are told. When it returns, the storage is let go, unless the namespace is
    /// what is returned: commands on it have not ended within 10 s; see [`Self::draining`].
    ///
    /// # Errors
    /// It is not served.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<Vec<Draining>, TargetError> {
        let guard = self.live.lock();
        let id = self.find(nqn)?;
        let ((), storage) = self.detach((id, nsid), nqn, |registry| registry.remove_namespace(id, nsid))?;
        drop(guard);
        Ok(self.close(vec![storage]))
    }

    /// Namespaces that were removed and whose commands have not ended. The storage of each is closed, and can be served again,
    /// when they do.
    pub fn draining(&self) -> Vec<Draining> {
        self.live.draining.all()
    }

    /// Takes a namespace away from new commands, on every reactor. Hosts are not told.
    pub(crate) fn take_namespace(&self, nqn: &str, nsid: u32) -> Result<Taken, TargetError> {
        let _guard = self.live.lock();
        let id = self.find(nqn)?;
        let (taken, storage) = self.detach((id, nsid), nqn, |registry| registry.take_namespace(id, nsid))?;
        Ok(Taken { id, what: What::Namespace(taken), storage })
    }

    /// Has a namespace again that hosts were not told of. What is behind it is closed when this returns, or drains.
    pub(crate) fn withdraw_namespace(&self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        self.withdraw((self.find(nqn)?, nsid), nqn)
    }

    pub(super) fn withdraw(&self, key: NamespaceKey, nqn: &str) -> Result<(), TargetError> {
        let ((), storage) = self.detach(key, nqn, |registry| registry.withdraw_namespace(key.0, key.1))?;
        self.close(vec![storage]);
        Ok(())
    }

    fn detach<T>(
        &self,
        key: NamespaceKey,
        nqn: &str,
        work: impl FnOnce(&mut Registry) -> Result<T, ConfigError>,
    ) -> Result<(T, Storage), TargetError> {
        let (taken, _held) =
            self.control_held(|control| Ok((work(&mut control.registry)?, control.published.remove(&key))));
        let (taken, published) = taken.map_err(|error| refused(format!("namespace {} of {nqn}", key.1), error))?;
        let parts = published.map(|published| Part { nsid: key.1, published, closed: false });
        self.running.settle(key, Drain::Nothing);
        Ok((taken, Storage { nqn: nqn.to_owned(), parts: parts.into_iter().collect() }))
    }

    /// Takes a subsystem away: no host connects to it, and its namespaces take no new commands. Hosts are not told.
    pub(crate) fn take_subsystem(&self, nqn: &str) -> Result<Taken, TargetError> {
        let _guard = self.live.lock();
        let id = self.find(nqn)?;
        let (taken, storage) = self.detach_subsystem(id, nqn, |control| control.registry.take_subsystem(id))?;
        Ok(Taken { id, what: What::Subsystem(taken), storage })
    }

    /// Serves a subsystem no more. Its storage is to be closed.
    pub(super) fn end_subsystem(&self, id: SubsystemId, nqn: &str) -> Result<Storage, TargetError> {
        let ended = self.detach_subsystem(id, nqn, |control| {
            control.forget_limits(id);
            control.registry.remove_subsystem(id)
        });
        ended.map(|((), storage)| storage)
    }

    fn detach_subsystem<T>(
        &self,
        id: SubsystemId,
        nqn: &str,
        work: impl FnOnce(&mut Control) -> Result<T, ConfigError>,
    ) -> Result<(T, Storage), TargetError> {
        let (taken, _held) = self.control_held(|control| {
            let taken = work(control)?;
            let all = std::mem::take(&mut control.published);
            let (parts, others) = all.into_iter().partition(|((subsystem, _), _)| *subsystem == id);
            control.published = others;
            Ok((taken, parts))
        });
        let (taken, parts): (_, BTreeMap<NamespaceKey, Published>) =
            taken.map_err(|error| refused(format!("subsystem {nqn}"), error))?;
        if let Some((last, _)) = parts.last_key_value() {
            // Reactors read their mail in order: who knows of the last one knows of all.
            self.running.settle(*last, Drain::Nothing);
        }
        let part = |((_, nsid), published)| Part { nsid, published, closed: false };
        let storage = Storage { nqn: nqn.to_owned(), parts: parts.into_iter().map(part).collect() };
        Ok((taken, storage))
    }

    /// Closes the storage of one namespace of what was taken away, for something else to open it.
    ///
    /// # Errors
    /// Commands on it have not ended within 10 s.
    pub(crate) fn close_taken(&self, taken: &mut Taken, nsid: u32) -> Result<(), TargetError> {
        let Storage { nqn, parts } = &mut taken.storage;
        let Some(part) = parts.iter_mut().find(|part| part.nsid == nsid && !part.closed) else { return Ok(()) };
        let (done, closed) = bounded(1);
        self.running.retire(part.published.instance, &Ticket::new(move || drop(done)));
        if !has_closed(&closed, Instant::now() + DRAINED) {
            return Err(TargetError::new(
                format!("namespace {nsid} of {nqn}"),
                format!(
                    "commands on it have not ended within {} s, so that its storage cannot move",
                    DRAINED.as_secs()
                ),
                "look at the disk behind it",
            ));
        }
        part.closed = true;
        part.published.backend = Arc::new(Null::new(0));
        Ok(())
    }

    /// Makes what was taken away what it was. `reopen` opens the storage of a namespace where it was closed.
    ///
    /// # Errors
    /// Storage could not be opened again, or something else took the place: what could be put back was.
    pub(crate) fn put_back(
        &self,
        taken: Taken,
        reopen: impl Fn(u32) -> Result<Arc<dyn Backend>, TargetError>,
    ) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        let Taken { id, what, storage } = taken;
        let put = self.control(|control| match &what {
            What::Namespace(namespace) => control.registry.put_namespace_back(namespace),
            What::Subsystem(subsystem) => control.registry.put_subsystem_back(subsystem),
        });
        if let Err(error) = put {
            let nqn = storage.nqn.clone();
            self.decide(&[], vec![Taken { id, what, storage }]);
            return Err(refused(nqn, error));
        }
        let Storage { nqn, parts } = storage;
        let last = parts.last().map(|part| (id, part.nsid));
        let (mut outcome, mut lost) = (Ok(()), Vec::new());
        for part in parts {
            let nsid = part.nsid;
            let opened = self.open_again(id, &nqn, part, &reopen);
            lost.extend(opened.is_err().then_some(nsid));
            outcome = outcome.and(opened);
        }
        // Commands are taken when every reactor has it.
        self.control(|control| {
            match what {
                What::Namespace(namespace) => control.registry.namespace_is_back(namespace),
                What::Subsystem(subsystem) => control.registry.subsystem_is_back(subsystem),
            }
            for nsid in lost {
                control.published.remove(&(id, nsid));
                let _ = control.registry.remove_namespace(id, nsid);
            }
        });
        last.into_iter().for_each(|key| self.running.settle(key, Drain::Nothing));
        outcome
    }

    fn open_again(
        &self,
        id: SubsystemId,
        nqn: &str,
        part: Part,
        reopen: impl Fn(u32) -> Result<Arc<dyn Backend>, TargetError>,
    ) -> Result<(), TargetError> {
        let Part { nsid, published, closed } = part;
        let (backend, zones) = if closed {
            let backend = reopen(nsid)?;
            let zones = backend.zoned();
            // Hosts and the registry know the zones as they were.
            let shape = |zoned: &Zoned| {
                let zones = zoned.zones();
                (zoned.block_size(), zones.geometry(), zones.count())
            };
            if zones.as_deref().map(shape) != published.zones.as_ref().map(|turns| shape(turns.zoned())) {
                return Err(TargetError::new(
                    format!("namespace {nsid} of {nqn}"),
                    "the zones of its storage are not what they were",
                    "add it again, as another namespace",
                ));
            }
            (backend, zones.map(|zoned| Arc::new(ZoneTurns::new(zoned))))
        } else {
            (Arc::clone(&published.backend), published.zones.clone())
        };
        let published = self.control(|control| {
            let view = control.registry.namespace_view(id, nsid).unwrap_or(published.view);
            let gate = control.registry.namespace_gate(id, nsid).map(Arc::new);
            let published = Published { view, gate, backend, zones, ..published };
            control.published.insert((id, nsid), published.clone());
            published
        });
        self.open_everywhere(published, &format!("namespace {nsid} of {nqn}"))
    }

    /// What came stays, by NQN and NSID, and what was taken away does not come back: hosts are told, and storage is closed.
    /// Returns the namespaces that have not closed theirs within 10 s.
    pub(crate) fn decide(&self, came: &[(&str, u32)], gone: Vec<Taken>) -> Vec<Draining> {
        let came: Vec<NamespaceKey> =
            came.iter().filter_map(|(nqn, nsid)| Some((self.find(nqn).ok()?, *nsid))).collect();
        let mut storage = Vec::new();
        let (stays, held) = self.control_held(|control| {
            for taken in gone {
                match taken.what {
                    What::Namespace(namespace) => control.registry.namespace_gone(namespace),
                    What::Subsystem(subsystem) => {
                        control.forget_limits(taken.id);
                        control.registry.subsystem_gone(subsystem);
                    }
                }
                storage.push(taken.storage);
            }
            came.iter().for_each(|(id, nsid)| control.registry.namespace_came(*id, *nsid));
            let stays = came.iter().filter_map(|key| Some(Arc::clone(&control.published.get(key)?.backend)));
            stays.collect::<Vec<_>>()
        });
        // Reactors read their mail in order: who knows of the last one knows of all.
        came.last().into_iter().for_each(|key| self.running.settle(*key, Drain::Nothing));
        drop(held);
        stays.iter().for_each(|backend| backend.keep());
        self.close(storage)
    }

    /// Closes storage of what hosts know no more, or never knew.
    pub(super) fn close(&self, all: Vec<Storage>) -> Vec<Draining> {
        let waits: Vec<_> = all.into_iter().flat_map(|storage| self.begin_close(storage)).collect();
        let end = Instant::now() + DRAINED;
        let open = waits.into_iter().filter(|(_, closed)| !has_closed(closed, end));
        open.map(|(draining, _)| draining).collect()
    }

    fn begin_close(&self, storage: Storage) -> Vec<(Draining, Receiver<()>)> {
        let Storage { nqn, parts } = storage;
        let open = parts.into_iter().filter(|part| !part.closed);
        open.map(|Part { nsid, published, .. }| {
            let draining = Draining { nqn: nqn.clone(), nsid, backend: published.backend.info().name };
            let instance = published.instance;
            drop(published);
            (draining.clone(), self.wait_closed(instance, draining))
        })
        .collect()
    }

    /// Ends when every reactor has closed a removed namespace's storage.
    fn wait_closed(&self, instance: Instance, draining: Draining) -> Receiver<()> {
        let (done, closed) = bounded(1);
        let book = Arc::clone(&self.live.draining);
        book.lock().insert(instance, draining);
        let ticket = Ticket::new(move || {
            book.lock().remove(&instance);
            drop(done);
        });
        self.running.retire(instance, &ticket);
        closed
    }
}

/// Whether the other end was let go before this moment. Nothing is ever sent.
fn has_closed(closed: &Receiver<()>, end: Instant) -> bool {
    matches!(closed.recv_deadline(end), Err(crossbeam::channel::RecvTimeoutError::Disconnected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Memory, MemoryZones};
    use crate::rdma::local::Local;
    use crate::target::{NamespaceSpec, Options, SubsystemSpec};
    use nvme::zns::ZoneAction;

    const NQN: &str = "nqn.2026-11.io.farside:zoned";

    fn zoned(zone_size: u64) -> Arc<dyn Backend> {
        let zones = MemoryZones { zone_size, zone_capacity: None, max_open: 4, max_active: 4 };
        Arc::new(Memory::zoned(16 << 20, &zones, 512).unwrap())
    }

    /// A zoned namespace, taken away and closed.
    fn closed() -> (Target, Taken) {
        let subsystem = SubsystemSpec::new(NQN).namespace(NamespaceSpec::new(1, zoned(1 << 20)));
        let options = Options { reactors: 1, pool_size: 4 << 20, receive_slots: 128, ..Options::default() };
        let builder = Target::builder().options(options).subsystem(subsystem);
        let target = builder.listen("192.0.2.1:4420".parse().unwrap()).start(Local::new()).unwrap();
        let mut taken = target.take_namespace(NQN, 1).unwrap();
        target.close_taken(&mut taken, 1).unwrap();
        (target, taken)
    }

    fn open_zones(target: &Target) -> Vec<Option<u32>> {
        let all = &target.status().subsystems[0].namespaces;
        all.iter().map(|namespace| namespace.zones.as_ref().map(|zones| zones.open)).collect()
    }

    #[test]
    fn zones_of_storage_that_was_opened_again_are_its_own() {
        let (target, taken) = closed();
        let again = zoned(1 << 20);
        target.put_back(taken, |_| Ok(Arc::clone(&again))).unwrap();
        assert_eq!(open_zones(&target), [Some(0)]);
        again.zoned().unwrap().zones().begin_action(3, ZoneAction::Open).unwrap();
        assert_eq!(open_zones(&target), [Some(1)]);
    }

    #[test]
    fn storage_whose_zones_are_others_is_not_put_back() {
        for other in [zoned(2 << 20), Arc::new(Memory::new(16 << 20))] {
            let (target, taken) = closed();
            let error = target.put_back(taken, |_| Ok(Arc::clone(&other))).unwrap_err();
            assert!(error.to_string().contains("not what they were"), "{error}");
            assert_eq!(open_zones(&target), []);
        }
    }
}
