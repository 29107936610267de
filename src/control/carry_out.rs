//! Changes of a running target: all of a plan, or nothing of it.
//!
//! What can be opened is opened before anything changes. What goes is kept as it was until the whole plan has succeeded, and put
//! back when it fails: the same storage, reservations, write protection and controllers. Hosts hear of it only at the end.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::{info, warn};

use super::plan::{Change, take_back_states};
use super::protocol::Failure;
use crate::backend::{self, Backend};
use crate::config::NamespaceSpec;
use crate::target::{self, Draining, HostAuth, Taken, Target, TargetError};

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
                return Err(failure.with_left(&work.take_back()));
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
    /// Steps in their order, each with what takes it back.
    done: Vec<(&'a Change, Undo)>,
}

/// What a step leaves for whoever takes it back.
enum Undo {
    /// What it took away.
    Taken(Taken),
    /// What was asked of a host: the files of its secrets may have other contents by now.
    Auth(Option<HostAuth>),
    /// Its inverse takes it back.
    Inverse,
}

impl<'a> Work<'a> {
    fn step(&mut self, change: &'a Change) -> Result<(), Failure> {
        let target = self.target;
        let undo = match change {
            Change::RemoveNamespace(nqn, spec) => Undo::Taken(target.take_namespace(nqn, spec.nsid)?),
            Change::RemoveSubsystem(spec) => Undo::Taken(target.take_subsystem(&spec.nqn)?),
            Change::AddNamespace(nqn, spec) => {
                let opened = self.open(nqn, spec)?;
                target.insert_namespace(nqn, &opened)?;
                Undo::Inverse
            }
            Change::AddSubsystem(spec) => {
                let opened = spec.open_with(|namespace| self.open(&spec.nqn, namespace))?;
                target.add_subsystem(&opened)?;
                Undo::Inverse
            }
            Change::Host(nqn, _, to) => {
                let before = target.host_auth(nqn, &to.nqn)?;
                change.carry_out(target)?;
                Undo::Auth(before)
            }
            change => {
                change.carry_out(target)?;
                Undo::Inverse
            }
        };
        self.done.push((change, undo));
        Ok(())
    }

    /// What was opened, or is opened now that its storage was let go.
    fn open(&mut self, nqn: &str, spec: &NamespaceSpec) -> Result<target::NamespaceSpec, Failure> {
        if let Some(opened) = self.opened.remove(&(nqn.to_owned(), spec.nsid)) {
            return Ok(opened);
        }
        for (change, undo) in &mut self.done {
            let Undo::Taken(taken) = undo else { continue };
            let same = |one: &&NamespaceSpec| one.backend.source.is_same(&spec.backend.source);
            for old in change.namespaces().1.iter().filter(same) {
                self.target.close_taken(taken, old.nsid)?;
            }
        }
        Ok(spec.open(nqn)?)
    }

    /// Everything is what it was. Returns what could not be taken back, and why.
    fn take_back(self) -> Vec<String> {
        let Self { target, opened, done } = self;
        drop(opened);
        let mut left = Vec::new();
        for (change, undo) in done.into_iter().rev() {
            let taken_back = match (change, undo) {
                (change, Undo::Taken(taken)) => {
                    target.put_back(taken, |nsid| reopen(change, nsid)).map_err(Failure::from)
                }
                (Change::Host(nqn, from, _), Undo::Auth(before)) => {
                    let auth = target.set_host_auth(nqn, &from.nqn, before);
                    let limits = target.set_host_limits(nqn, &from.nqn, from.limits);
                    auth.and(limits).map_err(Failure::from)
                }
                (Change::Ana(nqn, from, to), _) => take_back_states(target, nqn, from, to),
                (Change::AddNamespace(nqn, spec), _) => {
                    target.withdraw_namespace(nqn, spec.nsid).map_err(Failure::from)
                }
                (Change::AddSubsystem(spec), _) => target.remove_subsystem(&spec.nqn).map(drop).map_err(Failure::from),
                (change, _) => change.inverse().carry_out(target),
            };
            match taken_back {
                Ok(()) => info!("taken back: {change}"),
                Err(failure) => {
                    warn!("could not be taken back: {change}: {failure}");
                    left.push(format!("{change}: {failure}"));
                }
            }
        }
        left
    }

    /// What came stays, and what goes does not come back: hosts are told.
    fn finish(self) -> Vec<Draining> {
        let (mut came, mut gone) = (Vec::new(), Vec::new());
        for (change, undo) in self.done {
            if let Change::AddNamespace(nqn, spec) = change {
                came.push((nqn.as_str(), spec.nsid));
            }
            if let Undo::Taken(taken) = undo {
                gone.push(taken);
            }
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
            remedy: "apply the whole configuration again".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use nvme::gate::Sender;
    use nvme::io::IoCommand;

    use crate::config::{AnaSpec, Config, ListenAddress};
    use crate::rdma::local::Local;

    const NQN: &str = "nqn.2026-11.io.farside:test";
    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
    const SECRET: &str = "DHHC-1:00:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:";

    /// Namespaces 1 and 2, in ANA groups 1 and 2; listeners .3 and a wildcard.
    fn config(more: &str) -> Config {
        let text = format!(
            "[[subsystem]]\nnqn = \"{NQN}\"\n{more}\n[[subsystem.namespace]]\nnull = \"1M\"\n             [[subsystem.namespace]]\nnsid = 2\nnull = \"1M\"\nana_group = 2\n             [[listener]]\naddress = \"192.0.2.3\"\n[[listener]]\naddress = \"0.0.0.0\"\n             [options]\nreactors = 1\npool_size = \"4M\"\nreceive_slots = 128\n"
        );
        Config::parse(&text, "test").unwrap()
    }

    fn state(group: u32, listener: &str) -> String {
        format!("[[subsystem.ana]]\ngroup = {group}\nlistener = \"{listener}\"\nstate = \"inaccessible\"\n")
    }

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, last], 4420))
    }

    fn listener(text: &str) -> ListenAddress {
        text.parse().unwrap()
    }

    /// The wildcard stands for .1 and .2, and for .5 too when `more` is set.
    fn start(config: &Config, more: &Arc<AtomicBool>) -> Target {
        let more = Arc::clone(more);
        let stands = move |one: SocketAddr| match (one.ip().is_unspecified(), more.load(Ordering::Acquire)) {
            (false, _) => vec![one],
            (true, false) => vec![address(1), address(2)],
            (true, true) => vec![address(1), address(2), address(5)],
        };
        config.open().unwrap().map_listeners(stands).start(Local::new()).unwrap()
    }

    /// The listeners through which a namespace is reached.
    fn reached(target: &Target, nsid: u32) -> Vec<u8> {
        target.control(|control| {
            let id = control.registry.subsystems().next().unwrap().id;
            let gate = control.registry.namespace_gate(id, nsid);
            let passes = |last: &u8| {
                let sender = Sender { hostid: [1; 16], portid: control.registry.port_of(address(*last)), host: 1 };
                sender.portid != 0 && gate.as_ref().is_none_or(|gate| gate.check(&sender, &IoCommand::Flush).is_ok())
            };
            [1, 2, 3].into_iter().filter(passes).collect()
        })
    }

    fn ana(config: &Config) -> Vec<AnaSpec> {
        config.subsystems[0].ana.clone()
    }

    /// It is there already, so that this refuses and does nothing.
    fn refused_step() -> Change {
        Change::AddListener(listener("192.0.2.3"))
    }

    #[test]
    fn lists_of_ana_states_are_set_whole_and_taken_back_whole() {
        let before = config(&(state(1, "192.0.2.3") + &state(2, "0.0.0.0")));
        let target = start(&before, &Arc::default());
        let is_as_before = || (reached(&target, 1), reached(&target, 2)) == (vec![1, 2], vec![3]);
        assert!(is_as_before(), "a wildcard is each that stands for it, from the start");
        // The second of the list cannot be set.
        let mut wanted = ana(&config(&(state(1, "0.0.0.0") + &state(2, "192.0.2.3"))));
        let step = |to: &[AnaSpec]| Change::Ana(NQN.into(), ana(&before), to.to_vec());
        wanted[1].listener = Some(listener("192.0.2.9"));
        assert!(carry_out(&target, &[step(&wanted)]).unwrap_err().to_string().contains("192.0.2.9"));
        assert!(is_as_before(), "{:?} {:?}", reached(&target, 1), reached(&target, 2));
        // It is set, and then another step refuses; one of the listeners that had a state goes before that.
        wanted[1].listener = Some(listener("192.0.2.3"));
        carry_out(&target, &[step(&wanted), refused_step()]).unwrap_err();
        assert!(is_as_before(), "{:?} {:?}", reached(&target, 1), reached(&target, 2));
        let gone = Change::RemoveListener(listener("192.0.2.3"));
        let refused = Change::AddListener(listener("0.0.0.0"));
        carry_out(&target, &[gone, step(&[]), refused]).unwrap_err();
        assert!(is_as_before(), "{:?} {:?}", reached(&target, 1), reached(&target, 2));
        carry_out(&target, &[step(&wanted)]).unwrap();
        assert_eq!((reached(&target, 1), reached(&target, 2)), (vec![3], vec![1, 2]));
    }

    #[test]
    fn a_wildcard_listener_goes_whole_or_stays_whole() {
        let more = Arc::new(AtomicBool::new(false));
        let target = start(&config(""), &more);
        let before = target.status().listeners;
        assert_eq!(before, [address(3), address(1), address(2)]);
        // An interface came: nobody listens there.
        more.store(true, Ordering::Release);
        target.remove_listener("0.0.0.0:4420".parse().unwrap()).unwrap();
        assert_eq!(target.status().listeners, [address(3)], "what it stood for when it came");
        target.add_listener("0.0.0.0:4420".parse().unwrap(), None).unwrap();
        assert_eq!(target.status().listeners.len(), 4);
        target.remove_listener(address(5)).unwrap();
        let error = carry_out(&target, &[Change::RemoveListener(listener("0.0.0.0"))]).unwrap_err();
        assert!(error.reason.contains("192.0.2.5") && !error.remedy.is_empty(), "{error}");
        assert_eq!(target.status().listeners, [address(3), address(1), address(2)]);
    }

    #[test]
    fn a_host_is_asked_again_what_it_was_asked_though_the_file_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, SECRET).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        let guarded = format!("[[subsystem.host]]\nnqn = \"{HOST}\"\ndhchap_key = \"{}\"\n", key.display());
        let open = format!("[[subsystem.host]]\nnqn = \"{HOST}\"\nlimits = {{ iops = 9 }}\n");
        let (before, after) = (config(&guarded), config(&open));
        let target = start(&before, &Arc::default());
        std::fs::remove_file(&key).unwrap();
        let spec = |config: &Config| config.subsystems[0].host_specs[0].clone();
        let step = Change::Host(NQN.into(), spec(&before), spec(&after));
        let error = carry_out(&target, &[step, refused_step()]).unwrap_err();
        assert!(!error.to_string().contains("could not be taken back"), "{error}");
        assert!(target.host_auth(NQN, HOST).unwrap().is_some(), "it need not prove itself any more");
    }
}
