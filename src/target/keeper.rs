//! What namespaces remember through power loss: one small file each, in a folder that the operator names.
//!
//! A thread of its own writes them, in the order in which states came; a state counts as kept when it is on stable storage
//! under its own name. A state file that cannot be read keeps the target from starting: to go on without it would let hosts
//! write that were shut out.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};
use nvme::registry::NamespaceState;
use nvme::reservation::{Held, HostId, ReservationState, ReservationType};
use serde_json::{Value, json};
use tracing::error;
use uuid::Uuid;

use super::builder::TargetError;

/// Says whether a state was kept.
type Then = Box<dyn FnOnce(bool) + Send>;

struct Job {
    uuid: Uuid,
    state: NamespaceState,
    then: Then,
}

/// Keeps states in a folder.
#[derive(Debug)]
pub(crate) struct Keeper {
    folder: PathBuf,
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Keeper {
    /// Starts the thread.
    pub(crate) fn start(folder: &Path) -> io::Result<Self> {
        let (jobs, work) = unbounded();
        let folder = folder.to_owned();
        let place = folder.clone();
        let thread = std::thread::Builder::new().name("farside-keeper".into()).spawn(move || run(&place, &work))?;
        Ok(Self { folder, jobs: Mutex::new(Some(jobs)), thread: Mutex::new(Some(thread)) })
    }

    /// The state that was kept of a namespace, if any.
    pub(crate) fn load(&self, uuid: Uuid) -> Result<NamespaceState, TargetError> {
        load(&self.folder, uuid)
    }

    /// Keeps a state, and says so.
    pub(crate) fn keep(&self, uuid: Uuid, state: NamespaceState, then: impl FnOnce(bool) + Send + 'static) {
        let job = Job { uuid, state, then: Box::new(then) };
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = match &*jobs {
            Some(jobs) => jobs.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        if let Some(job) = refused {
            (job.then)(false);
        }
    }

    /// Finishes what it has, and ends.
    pub(crate) fn stop(&self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

fn run(folder: &Path, work: &Receiver<Job>) {
    for Job { uuid, state, then } in work {
        let kept = write(folder, uuid, &state);
        if let Err(reason) = &kept {
            error!(
                namespace = %uuid,
                folder = %folder.display(),
                "state that has to survive a power loss could not be kept: {reason}; make room, or repair the folder"
            );
        }
        then(kept.is_ok());
    }
}

fn path(folder: &Path, uuid: Uuid) -> PathBuf {
    folder.join(format!("{uuid}.json"))
}

/// Replaces a state as a whole: a new file under another name, on stable storage before it takes the name.
fn write(folder: &Path, uuid: Uuid, state: &NamespaceState) -> io::Result<()> {
    let path = path(folder, uuid);
    if *state == NamespaceState::default() {
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
    } else {
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(encode(state).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
    }
    File::open(folder)?.sync_all()
}

fn load(folder: &Path, uuid: Uuid) -> Result<NamespaceState, TargetError> {
    let path = path(folder, uuid);
    let refuse = |reason: String| {
        let remedy = "repair it, or remove it to forget the reservations in it";
        Err(TargetError::new(format!("state file {}", path.display()), reason, remedy))
    };
    match fs::read_to_string(&path) {
        Ok(text) => decode(&text).or_else(refuse),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(NamespaceState::default()),
        Err(error) => refuse(error.to_string()),
    }
}

const VERSION: u64 = 1;

fn encode(state: &NamespaceState) -> String {
    let host = |host: &HostId| Uuid::from_bytes(*host).to_string();
    let reservations = state.reservations.as_ref().map(|kept| {
        let registrants: Vec<Value> = kept
            .registrants
            .iter()
            .map(|(id, key)| json!({ "host": host(id), "key": format!("{key:016x}") }))
            .collect();
        let held = kept.held.map(|held| json!({ "type": held.rtype.to_wire(), "holder": host(&held.holder) }));
        json!({ "registrants": registrants, "held": held })
    });
    let all = json!({
        "version": VERSION,
        "write_protected": state.write_protected,
        "reservations": reservations,
    });
    format!("{all:#}\n")
}

fn decode(text: &str) -> Result<NamespaceState, String> {
    let all: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
    if all["version"].as_u64() != Some(VERSION) {
        return Err(format!("its version is not {VERSION}"));
    }
    let write_protected = all["write_protected"].as_bool().ok_or("write_protected is missing")?;
    let reservations = match &all["reservations"] {
        Value::Null => None,
        kept => Some(decode_reservations(kept)?),
    };
    Ok(NamespaceState { reservations, write_protected })
}

fn decode_reservations(kept: &Value) -> Result<ReservationState, String> {
    let host = |value: &Value| -> Result<HostId, String> {
        let text = value.as_str().ok_or("a host is missing")?;
        Ok(Uuid::try_parse(text).map_err(|_| format!("{text:?} is no host identifier"))?.into_bytes())
    };
    let mut registrants = BTreeMap::new();
    for registrant in kept["registrants"].as_array().ok_or("registrants are missing")? {
        let key = registrant["key"].as_str().and_then(|key| u64::from_str_radix(key, 16).ok());
        registrants.insert(host(&registrant["host"])?, key.ok_or("a key is missing")?);
    }
    let held = match &kept["held"] {
        Value::Null => None,
        held => {
            let rtype = held["type"].as_u64().and_then(|rtype| u8::try_from(rtype).ok());
            let rtype = rtype.and_then(ReservationType::from_wire).ok_or("the reservation has no type")?;
            let holder = host(&held["holder"])?;
            if !registrants.contains_key(&holder) {
                return Err("the holder is not registered".into());
            }
            Some(Held { rtype, holder })
        }
    };
    Ok(ReservationState { registrants, held })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(keys: &[(u8, u64)], holder: Option<u8>) -> NamespaceState {
        let registrants = keys.iter().map(|(host, key)| ([*host; 16], *key)).collect();
        let held = holder.map(|host| Held { rtype: ReservationType::ExclusiveAccess, holder: [host; 16] });
        NamespaceState { reservations: Some(ReservationState { registrants, held }), write_protected: false }
    }

    #[test]
    fn states_come_back_as_they_were() {
        let all = [
            NamespaceState::default(),
            NamespaceState { write_protected: true, ..NamespaceState::default() },
            state(&[], None),
            state(&[(1, 0), (2, u64::MAX)], None),
            state(&(1..=100).map(|host| (host, u64::from(host) << 40)).collect::<Vec<_>>(), Some(77)),
        ];
        for state in all {
            assert_eq!(decode(&encode(&state)), Ok(state));
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let good = encode(&state(&[(1, 5)], Some(1)));
        assert!(decode(&good).is_ok());
        for (old, new) in [
            ("\"version\": 1", "\"version\": 2"),
            ("\"write_protected\": false", "\"write_protected\": 0"),
            ("\"type\": 2", "\"type\": 7"),
            ("\"holder\": \"01", "\"holder\": \"02"),
            ("\"key\": \"0000", "\"key\": \"xyz0"),
            ("\"host\": \"0101", "\"host\": \"zz01"),
            ("}\n", ""),
        ] {
            let bad = good.replace(old, new);
            assert!(bad != good && decode(&bad).is_err(), "{new}");
        }
        assert!(decode("").is_err());
    }

    #[test]
    fn a_state_is_replaced_and_forgotten_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let keeper = Keeper::start(folder.path()).unwrap();
        let uuid = Uuid::from_bytes([7; 16]);
        let keep = |state: &NamespaceState| {
            let (done, kept) = std::sync::mpsc::channel();
            keeper.keep(uuid, state.clone(), move |ok| done.send(ok).unwrap());
            assert!(kept.recv().unwrap());
            assert_eq!(load(folder.path(), uuid).unwrap(), *state);
        };
        keep(&state(&[(1, 5)], Some(1)));
        keep(&state(&[(1, 6), (2, 7)], None));
        keep(&NamespaceState::default());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left of a state that is nothing");
        keep(&state(&[(9, 9)], None));
        fs::write(path(folder.path(), uuid), "{").unwrap();
        let refused = load(folder.path(), uuid).unwrap_err();
        assert!(refused.remedy.contains("remove it"), "{refused}");
        fs::remove_dir_all(folder.path()).unwrap();
        let (done, kept) = std::sync::mpsc::channel();
        keeper.keep(uuid, state(&[(1, 5)], None), move |ok| done.send(ok).unwrap());
        assert!(!kept.recv().unwrap(), "a folder that is gone keeps nothing");
        keeper.stop();
    }
}
