//! One run: a target of one reactor over the null NIC, on a CPU of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use farside::backend::{Backend, BackendSpec, Null, Source, open};
use farside::target::{NamespaceSpec, Options, SubsystemSpec, Target};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::cm::{Geometry, Wire};
use crate::load::Outcome;
use crate::nic::NullNic;
use crate::plan::Plan;

/// What stands behind the namespaces.
#[derive(Clone, Debug)]
pub(crate) enum Storage {
    Null,
    /// A file or block device; there is one namespace.
    Path(PathBuf),
}

/// Bytes of a namespace on the null backend.
const NULL_SIZE: u64 = 1 << 40;

/// Carries out a plan on CPU `cpu`. `spin`: the reactor never sleeps.
pub(crate) fn run(plan: &Plan, storage: &Storage, cpu: usize, spin: bool) -> Result<Outcome, String> {
    pin(cpu)?;
    let backends = backends(plan, storage)?;
    let info = backends.first().ok_or("no namespace")?.info();
    let block_shift = info.block_size.trailing_zeros() as u8;
    let geometry = Geometry { blocks: info.size >> block_shift, block_shift };
    let options = Options {
        reactors: 1,
        poll: spin,
        receive_slots: (plan.queues * usize::from(plan.entries()) + plan.hosts() * 32).max(1024) as u32,
        ..Options::default()
    };
    let namespaces = (1..).zip(backends).map(|(nsid, backend)| NamespaceSpec::new(nsid, backend));
    let subsystem = namespaces.fold(SubsystemSpec::new(crate::NQN), SubsystemSpec::namespace);
    let (sender, outcome) = mpsc::channel();
    let wire = Arc::new(Wire::new(plan.clone(), geometry, sender));
    let target = Target::builder().options(options).subsystem(subsystem).listen(crate::ADDRESS);
    let target = target.start(NullNic(wire)).map_err(|error| error.to_string())?;
    let outcome = outcome.recv().map_err(|_| "the target ended before the run did".to_string())?;
    // Its hosts do not disconnect; there is nothing to wait for.
    std::mem::forget(target);
    outcome
}

fn backends(plan: &Plan, storage: &Storage) -> Result<Vec<Arc<dyn Backend>>, String> {
    match storage {
        Storage::Null => Ok((0..plan.namespaces).map(|_| Arc::new(Null::new(NULL_SIZE)) as Arc<dyn Backend>).collect()),
        Storage::Path(path) => {
            let is_file = path.metadata().map_err(|error| format!("{}: {error}", path.display()))?.is_file();
            let path = path.clone();
            let source = if is_file { Source::File { path, size: None } } else { Source::Device { path } };
            let backend = open(&BackendSpec::new(source)).map_err(|error| error.to_string())?;
            Ok(vec![backend])
        }
    }
}

/// Every thread from now on runs on this CPU.
pub(crate) fn pin(cpu: usize) -> Result<(), String> {
    let mut set = CpuSet::new();
    set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set)).map_err(|errno| format!("CPU {cpu}: {errno}"))
}
