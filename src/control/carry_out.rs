//! Changes of a running target: all of a plan, or nothing of it.
//!
//! What can be opened is opened before anything changes. What goes is kept as it was until the whole plan has succeeded, and put
//! back when it fails: the same storage, reservations, write protection and controllers. Hosts hear of it only at the end.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::{info, warn};

use super::plan::Change;
use super::protocol::Failure;
use crate::backend::{self, Backend};
use crate::config::NamespaceSpec;
use crate::target::{self, Draining, Taken, Target, TargetError};

/// Carries out all of the steps. Returns the namespaces that are gone and whose storage is not closed yet.
///
/// # Errors
/// One of them failed: nothing has changed.
pub(super) fn carry_out(target: &Target, changes: &[Change]) -> Result<Vec<Draining>, Failure> {
    let opened = open_all(changes)?;
    let mut work = Work { target, opened, done: Vec::new() };
    for change in changes {
        match work.step(change) {
            Ok(()) => info!("changed: {change}"),
            Err(failure) => {
                warn!("refused: {change}: {failure}");
                work.take_back();
                return Err(failure);
            }
        }
    }
    Ok(work.finish())
}

/// A namespace's place: NQN of its subsystem, and NSID.
type Place = (String, u32);

/// Opens what comes, but for what stands on storage that something else has to let go first.
fn open_all(changes: &[Change]) -> Result<HashMap<Place, target::NamespaceSpec>, Failure> {
    let leaves: Vec<&NamespaceSpec> =
        changes.iter().filter(|change| change.removes()).flat_map(|change| change.namespaces().1).collect();
    let mut opened = HashMap::new();
    for change in changes.iter().filter(|change| change.adds()) {
        let (nqn, namespaces) = change.namespaces();
        for spec in namespaces {
            if !leaves.iter().any(|one| one.backend.source.is_same(&spec.backend.source)) {
                opened.insert((nqn.to_owned(), spec.nsid), spec.open(nqn)?);
            }
        }
    }
    Ok(opened)
}

struct Work<'a> {
    target: &'a Target,
    opened: HashMap<Place, target::NamespaceSpec>,
    /// Steps in their order, each with what it took away.
    done: Vec<(&'a Change, Option<Taken>)>,
}

impl<'a> Work<'a> {
    fn step(&mut self, change: &'a Change) -> Result<(), Failure> {
        let target = self.target;
        let taken = match change {
            Change::RemoveNamespace(nqn, spec) => Some(target.take_namespace(nqn, spec.nsid)?),
            Change::RemoveSubsystem(spec) => Some(target.take_subsystem(&spec.nqn)?),
            Change::AddNamespace(nqn, spec) => {
                let opened = self.open(nqn, spec)?;
                target.insert_namespace(nqn, &opened)?;
                None
            }
            Change::AddSubsystem(spec) => {
                let opened = spec.open_with(|namespace| self.open(&spec.nqn, namespace))?;
                target.add_subsystem(&opened)?;
                None
            }
            change => {
                change.carry_out(target)?;
                None
            }
        };
        self.done.push((change, taken));
        Ok(())
    }

    /// What was opened, or is opened now that its storage was let go.
    fn open(&mut self, nqn: &str, spec: &NamespaceSpec) -> Result<target::NamespaceSpec, Failure> {
        if let Some(opened) = self.opened.remove(&(nqn.to_owned(), spec.nsid)) {
            return Ok(opened);
        }
        for (change, taken) in &mut self.done {
            let Some(taken) = taken else { continue };
            let same = |one: &&NamespaceSpec| one.backend.source.is_same(&spec.backend.source);
            for old in change.namespaces().1.iter().filter(same) {
                self.target.close_taken(taken, old.nsid)?;
            }
        }
        Ok(spec.open(nqn)?)
    }

    /// Everything is what it was.
    fn take_back(self) {
        let Self { target, opened, done } = self;
        drop(opened);
        for (change, taken) in done.into_iter().rev() {
            let taken_back = match (change, taken) {
                (change, Some(taken)) => target.put_back(taken, |nsid| reopen(change, nsid)).map_err(Failure::from),
                (Change::AddNamespace(nqn, spec), _) => {
                    target.withdraw_namespace(nqn, spec.nsid).map_err(Failure::from)
                }
                (Change::AddSubsystem(spec), _) => target.remove_subsystem(&spec.nqn).map(drop).map_err(Failure::from),
                (change, None) => change.inverse().carry_out(target),
            };
            match taken_back {
                Ok(()) => info!("taken back: {change}"),
                Err(failure) => warn!("could not be taken back: {change}: {failure}"),
            }
        }
    }

    /// What came stays, and what goes does not come back: hosts are told.
    fn finish(self) -> Vec<Draining> {
        let (mut came, mut gone) = (Vec::new(), Vec::new());
        for (change, taken) in self.done {
            if let Change::AddNamespace(nqn, spec) = change {
                came.push((nqn.as_str(), spec.nsid));
            }
            gone.extend(taken);
        }
        let draining = self.target.decide(&came, gone);
        for Draining { nqn, nsid, backend } in &draining {
            warn!(
                "namespace {nsid} of {nqn} is gone, but commands on it have not ended: {backend} is closed when they do"
            );
        }
        draining
    }
}

/// Opens the storage of a namespace again that was closed for another.
fn reopen(change: &Change, nsid: u32) -> Result<Arc<dyn Backend>, TargetError> {
    let (nqn, namespaces) = change.namespaces();
    match namespaces.iter().find(|one| one.nsid == nsid) {
        Some(spec) => Ok(backend::open(&spec.backend)?),
        None => Err(TargetError {
            object: format!("namespace {nsid} of {nqn}"),
            reason: "was not configured".into(),
            remedy: String::new(),
        }),
    }
}
