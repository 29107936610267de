//! Changes of a running target, and what it looks like at a moment.
//!
//! A change happens in an order that no host can see through: the registry refuses or takes it, every reactor acts on it, and
//! only then are hosts told (what the registry has for them is held back meanwhile). A refused change leaves everything as it
//! was. One change at a time. How things go is in [`super::removal`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam::channel::{Sender, bounded, unbounded};
use nvme::gate::Gate;
use nvme::io::NamespaceView;
use nvme::nqn::Nqn;
use nvme::registry::{ConfigError, Drain, Listener, RdmaProvider, SubsystemConfig, SubsystemId};
use uuid::Uuid;

use super::builder::{
    NamespaceSpec, SubsystemSpec, Target, TargetError, expand_states, keep, limit_hosts, namespace_config,
    set_first_states,
};
use super::limits::Limiter;
use super::namespace::{Instance, IoCounters, Published};
use super::reactor::Reactor;
use super::removal::{DrainBook, Draining};
use super::shared::{Control, ControlMessage};
use super::tally::{Past, Traffic};
use super::zones::ZoneTurns;
use crate::config::derive_serial;
use crate::rdma::{Provider, RdmaError};

/// How long reactors have to acknowledge a change: they never block, so this is a machine that stands still.
const ACKNOWLEDGED: Duration = Duration::from_secs(5);

/// One more namespace for a reactor to open.
#[derive(Clone, Debug)]
pub(crate) struct OpenNamespace {
    published: Published,
    answer: Sender<Result<(), TargetError>>,
}

impl<P: Provider> Reactor<P> {
    /// Opens a namespace while the target runs, or has one back that was taken away and is not closed yet.
    pub(crate) fn open_live(&mut self, order: OpenNamespace) {
        let OpenNamespace { published, answer } = order;
        let opened = if self.revive(&published) { Ok(()) } else { self.open_namespace(published) };
        // Nobody may be waiting any more.
        let _ = answer.send(opened.map_err(TargetError::from));
    }
}

/// Replaces a wildcard address by those that stand for it.
pub(crate) type ListenerMap = Arc<dyn Fn(SocketAddr) -> Vec<SocketAddr> + Send + Sync>;

/// What wildcard listeners stand for, each as it was when it came: interfaces come and go.
pub(crate) type Wildcards = BTreeMap<SocketAddr, Vec<SocketAddr>>;

/// What changes of a target need besides its inside.
pub(crate) struct Live {
    listener_map: Option<ListenerMap>,
    wildcards: Mutex<Wildcards>,
    /// Held during a change.
    one_at_a_time: Mutex<()>,
    /// Removed namespaces whose storage is open.
    pub(super) draining: Arc<DrainBook>,
}

impl Live {
    pub(crate) fn new(listener_map: Option<ListenerMap>, wildcards: Wildcards) -> Self {
        Self { listener_map, wildcards: Mutex::new(wildcards), one_at_a_time: Mutex::new(()), draining: Arc::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The addresses that stand for one that is configured.
    pub(super) fn addresses(&self, address: SocketAddr) -> Vec<SocketAddr> {
        let known = self.wildcards().get(&address).cloned();
        known.unwrap_or_else(|| self.listener_map.as_ref().map_or_else(|| vec![address], |map| map(address)))
    }

    fn wildcards(&self) -> MutexGuard<'_, Wildcards> {
        self.wildcards.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Hosts are told what changed when this is dropped.
pub(super) struct HeldEvents<'a>(&'a Target);

impl Drop for HeldEvents<'_> {
    fn drop(&mut self) {
        self.0.control(|control| control.changes -= 1);
    }
}

fn stopped(object: &str) -> TargetError {
    TargetError::new(object, "the target does not answer: it is stopping", "try again when it runs anew")
}

pub(super) fn refused(object: String, error: ConfigError) -> TargetError {
    TargetError::config(object, error)
}

/// What a target looks like at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Subsystems, in the order of their creation; the discovery subsystem is not among them.
    pub subsystems: Vec<SubsystemStatus>,
    /// Addresses that hosts may connect to.
    pub listeners: Vec<SocketAddr>,
    /// Controllers, those of the discovery subsystem included.
    pub controllers: Vec<ControllerStatus>,
    /// Hosts that have a queue, or had one lately and did something, by NQN: all of their queues together.
    pub hosts: Vec<HostStatus>,
    /// Namespaces that were removed and whose storage is not closed yet.
    pub draining: Vec<Draining>,
}

/// One host of a [`Status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStatus {
    /// Its NQN.
    pub hostnqn: String,
    /// Its connected queues, admin queues included.
    pub queues: usize,
    /// What it did on these and on those that ended. It begins anew when the host was gone, and 256 others that did something were
    /// after it.
    pub io: Traffic,
}

/// One subsystem of a [`Status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemStatus {
    /// Its NQN.
    pub nqn: String,
    /// Any host may connect.
    pub allow_any_host: bool,
    /// Hosts that may.
    pub hosts: Vec<String>,
    /// Its namespaces by NSID.
    pub namespaces: Vec<NamespaceStatus>,
}

/// The zones of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonesStatus {
    /// How many.
    pub count: u32,
    /// Bytes from one to the next.
    pub size: u64,
    /// Open ones.
    pub open: u32,
    /// Open and closed ones.
    pub active: u32,
}

/// One namespace of a [`SubsystemStatus`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceStatus {
    /// Namespace ID.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: String,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Its zones, if it has zones.
    pub zones: Option<ZonesStatus>,
    /// What hosts did with it since the start.
    pub io: super::IoTotals,
}

/// One controller of a [`Status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerStatus {
    /// NQN of its subsystem.
    pub subnqn: String,
    /// Controller ID, unique within the subsystem.
    pub cntlid: u16,
    /// NQN of its host.
    pub hostnqn: String,
    /// Identifier of its host.
    pub hostid: Uuid,
    /// Keep alive timeout; `None` = off.
    pub kato: Option<Duration>,
    /// Its queues are being closed.
    pub dying: bool,
    /// Queues, the admin queue (QID 0) included.
    pub queues: Vec<QueueStatus>,
}

/// One queue of a [`ControllerStatus`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueStatus {
    /// Queue ID.
    pub qid: u16,
    /// The reactor that it lives on.
    pub reactor: u32,
    /// Time since its last command.
    pub idle: Duration,
    /// What was done on it.
    pub io: Traffic,
}

impl Target {
    /// What it looks like right now.
    pub fn status(&self) -> Status {
        let now = self.running.now();
        Status { draining: self.draining(), ..self.control(|control| status(control, now)) }
    }

    /// Serves one more subsystem, with its namespaces.
    ///
    /// # Errors
    /// The NQN exists, something in the description breaks a rule, or a namespace could not be added: then nothing is left of it.
    pub fn add_subsystem(&self, spec: &SubsystemSpec) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        let config = subsystem_config(spec);
        // Hosts hear of it when its namespaces are there.
        let (added, _held) = self.control_held(|control| {
            let id = control.registry.add_subsystem(&config)?;
            let mut hosts = spec.auth.iter();
            let asked = hosts.try_for_each(|(host, auth)| control.registry.set_host_auth(id, host, Some(auth.clone())));
            if asked.is_err() {
                // Without them it would be open to hosts that have to prove themselves.
                let _ = control.registry.remove_subsystem(id);
            }
            limit_hosts(control, spec);
            asked.map(|()| id)
        });
        let id = added.map_err(|error| refused(format!("subsystem {}", spec.nqn), error))?;
        let mut namespaces = spec.namespaces.iter();
        let added = namespaces.try_for_each(|namespace| self.open_and_tell(id, &spec.nqn, namespace));
        let added = added.and_then(|()| {
            let states = expand_states(&spec.ana, |address| self.live.addresses(address));
            self.control(|control| set_first_states(&mut control.registry, &spec.nqn, &states))
        });
        match &added {
            Ok(()) => keep(spec),
            Err(_) => drop(self.end_subsystem(id, &spec.nqn).map(|storage| self.close(vec![storage]))),
        }
        added
    }

    /// Serves one more namespace; connected hosts are told.
    ///
    /// # Errors
    /// The subsystem is not served, the NSID or the UUID exists, or the backend does not fit: nothing changed.
    pub fn add_namespace(&self, nqn: &str, spec: &NamespaceSpec) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        self.open_and_tell(self.find(nqn)?, nqn, spec)?;
        spec.backend.keep();
        Ok(())
    }

    /// Serves one more namespace. Hosts that ask see it, and are not told: [`Self::decide`] does that.
    pub(crate) fn insert_namespace(&self, nqn: &str, spec: &NamespaceSpec) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        self.open_namespace(self.find(nqn)?, nqn, spec)
    }

    fn open_and_tell(&self, id: SubsystemId, nqn: &str, spec: &NamespaceSpec) -> Result<(), TargetError> {
        self.open_namespace(id, nqn, spec)?;
        self.control(|control| control.registry.namespace_came(id, spec.nsid));
        Ok(())
    }

    /// Looks at the size of a namespace's storage and has hosts see it. Returns it, in logical blocks.
    ///
    /// # Errors
    /// It is not served, its storage cannot be looked at, or its size is no multiple of the block size.
    pub fn resize_namespace(&self, nqn: &str, nsid: u32) -> Result<u64, TargetError> {
        let _guard = self.live.lock();
        let id = self.find(nqn)?;
        let object = || format!("namespace {nsid} of {nqn}");
        let found = self.control(|control| control.published.get(&(id, nsid)).cloned());
        let published = found.ok_or_else(|| TargetError::new(object(), "is not served", "list what is: status"))?;
        let size = published.backend.refresh()?.size;
        let blocks = size >> published.view.block_shift;
        if blocks == published.view.blocks {
            return Ok(blocks);
        }
        let (resized, _held) = self.control_held(|control| {
            control.registry.resize_namespace(id, nsid, blocks)?;
            if let Some(published) = control.published.get_mut(&(id, nsid)) {
                published.view.blocks = blocks;
            }
            Ok(())
        });
        resized.map_err(|error| refused(object(), error))?;
        self.running.settle((id, nsid), Drain::Nothing);
        Ok(blocks)
    }

    /// Lets a host connect to a subsystem.
    ///
    /// # Errors
    /// The subsystem is not served, or the host's NQN breaks a rule.
    pub fn allow_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        self.change_hosts(nqn, host, |control, id| control.registry.allow_host(id, host))
    }

    /// Lets a host connect no more; it is disconnected unless any host may connect.
    ///
    /// # Errors
    /// The subsystem is not served, or the host's NQN breaks a rule.
    pub fn remove_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        self.change_hosts(nqn, host, |control, id| control.registry.remove_host(id, host))
    }

    /// Says whether hosts need not be listed. Turned off, hosts that are not listed are disconnected.
    ///
    /// # Errors
    /// The subsystem is not served.
    pub fn set_allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), TargetError> {
        self.change_hosts(nqn, "any", |control, id| control.registry.set_allow_any_host(id, allow))
    }

    fn change_hosts(
        &self,
        nqn: &str,
        host: &str,
        change: impl FnOnce(&mut Control, SubsystemId) -> Result<(), ConfigError>,
    ) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        let id = self.find(nqn)?;
        self.control(|control| change(control, id)).map_err(|error| refused(format!("host {host} of {nqn}"), error))
    }

    /// Listens on one more address. Hosts with a discovery controller are told.
    ///
    /// # Errors
    /// It cannot be listened on, or is already.
    pub fn add_listener(&self, address: SocketAddr, tos: Option<u8>) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        let addresses = self.live.addresses(address);
        for (done, address) in addresses.iter().enumerate() {
            if let Err(error) = self.listen(*address, tos) {
                for address in &addresses[..done] {
                    let _ = self.unlisten(*address);
                }
                return Err(error);
            }
        }
        if addresses != [address] {
            self.live.wildcards().insert(address, addresses);
        }
        Ok(())
    }

    /// Stops to listen on an address. Connections made there stay.
    ///
    /// # Errors
    /// It is not listened on.
    pub fn remove_listener(&self, address: SocketAddr) -> Result<(), TargetError> {
        let _guard = self.live.lock();
        let addresses = self.live.addresses(address);
        let removed = self.control(|control| {
            let registry = &mut control.registry;
            // All of those that a wildcard stands for, or none.
            let known = |address: &&SocketAddr| registry.listeners().iter().any(|listener| listener.addr == **address);
            if let Some(unknown) = addresses.iter().find(|address| !known(address)) {
                return Err(ConfigError::NoSuchListener(*unknown));
            }
            addresses.iter().try_for_each(|address| registry.remove_listener(*address))
        });
        removed.map_err(|error| refused(format!("listener {address}"), error))?;
        self.live.wildcards().remove(&address);
        addresses.into_iter().try_for_each(|address| self.stop_listening(address))
    }

    /// Disconnects a host's controllers, of one subsystem or of all; it may connect again. Returns how many there were.
    pub fn disconnect(&self, host: &str, nqn: Option<&str>) -> usize {
        self.control(|control| {
            let matches = |name: &Nqn, text: &str| name.to_string() == text;
            let found: Vec<_> = control
                .registry
                .controllers()
                .filter(|one| matches(&one.hostnqn, host) && nqn.is_none_or(|nqn| matches(&one.subnqn, nqn)))
                .map(|one| one.ctrl)
                .collect();
            found.into_iter().filter(|ctrl| control.registry.disconnect(*ctrl)).count()
        })
    }
}

impl Target {
    /// Runs `work` on the registry and carries out what follows.
    pub(crate) fn control<R>(&self, work: impl FnOnce(&mut Control) -> R) -> R {
        let (mut work, mut result) = (Some(work), None);
        self.running.control(&mut |control| result = work.take().map(|work| work(control)));
        result.expect("the work is run once")
    }

    /// As `control`, but hosts are told nothing before the guard is dropped.
    pub(super) fn control_held<R>(&self, work: impl FnOnce(&mut Control) -> R) -> (R, HeldEvents<'_>) {
        let result = self.control(|control| {
            control.changes += 1;
            work(control)
        });
        (result, HeldEvents(self))
    }

    pub(super) fn find(&self, nqn: &str) -> Result<SubsystemId, TargetError> {
        let found =
            Nqn::lenient(nqn).ok().and_then(|name| self.control(|control| control.registry.find_subsystem(&name)));
        found.ok_or_else(|| refused(format!("subsystem {nqn}"), ConfigError::NoSuchSubsystem))
    }

    fn ask_control(
        &self,
        address: SocketAddr,
        message: impl FnOnce(Sender<Result<(), RdmaError>>) -> ControlMessage,
    ) -> Result<(), TargetError> {
        let (answer, answers) = bounded(1);
        self.running.tell(message(answer));
        match answers.recv_timeout(ACKNOWLEDGED) {
            Ok(done) => done.map_err(TargetError::from),
            Err(_) => Err(stopped(&format!("listener {address}"))),
        }
    }

    fn open_namespace(&self, id: SubsystemId, nqn: &str, spec: &NamespaceSpec) -> Result<(), TargetError> {
        let config = namespace_config(nqn, spec, &spec.backend.info(), self.running.keeper())?;
        let key = (id, spec.nsid);
        let object = || format!("namespace {} of {nqn}", spec.nsid);
        let reactors = self.served().reactors;
        let added = self.control(|control| {
            control.registry.insert_namespace(id, config)?;
            let view = control.registry.namespace_view(id, spec.nsid);
            let gate = control.registry.namespace_gate(id, spec.nsid).map(Arc::new);
            let published = view.map(|view| Published::new(id, nqn, view, gate, spec, reactors));
            control.published.extend(published.clone().map(|published| (key, published)));
            Ok(published)
        });
        let Some(published) = added.map_err(|error| refused(object(), error))? else { return Ok(()) };
        let opened = self.open_everywhere(published, &object());
        if opened.is_err() {
            // Some reactor could not open it: none keeps it.
            let _ = self.withdraw(key, nqn);
        }
        opened
    }

    pub(super) fn open_everywhere(&self, published: Published, object: &str) -> Result<(), TargetError> {
        let (answer, answers) = unbounded();
        let told = self.running.open(&OpenNamespace { published, answer });
        let mut outcome = Ok(());
        for _ in 0..told {
            // All answers are waited for: a reactor that is late must not find the namespace taken back before it opened it.
            let opened = answers.recv_timeout(ACKNOWLEDGED).unwrap_or_else(|_| Err(stopped(object)));
            outcome = outcome.and(opened);
        }
        outcome
    }

    /// The listener first: what the discovery log names can be connected to.
    fn listen(&self, address: SocketAddr, tos: Option<u8>) -> Result<(), TargetError> {
        let refused = |error| refused(format!("listener {address}"), error);
        if self.control(|control| control.registry.listeners().iter().any(|listener| listener.addr == address)) {
            return Err(refused(ConfigError::DuplicateListener(address)));
        }
        self.ask_control(address, |answer| ControlMessage::Listen { address, tos, answer })?;
        let added = self.control(|control| {
            control.registry.add_listener(Listener { addr: address, portid: 0, provider: RdmaProvider::RoceV2 })
        });
        added.map_err(refused)
    }

    fn unlisten(&self, address: SocketAddr) -> Result<(), TargetError> {
        self.control(|control| control.registry.remove_listener(address))
            .map_err(|error| refused(format!("listener {address}"), error))?;
        self.stop_listening(address)
    }

    fn stop_listening(&self, address: SocketAddr) -> Result<(), TargetError> {
        self.ask_control(address, |answer| ControlMessage::Unlisten { address, answer })
    }
}

/// A subsystem in the registry's words.
pub(crate) fn subsystem_config(spec: &SubsystemSpec) -> SubsystemConfig {
    SubsystemConfig {
        nqn: spec.nqn.clone(),
        serial: spec.serial.clone().unwrap_or_else(|| derive_serial(&spec.nqn)),
        model: spec.model.clone(),
        allow_any_host: spec.allow_any_host,
        hosts: spec.hosts.clone(),
        admission: spec.admission,
    }
}

fn status(control: &Control, now: Duration) -> Status {
    let registry = &control.registry;
    let subsystems = registry.subsystems().map(|info| SubsystemStatus {
        nqn: info.nqn.to_string(),
        allow_any_host: info.allow_any_host,
        hosts: info.hosts.iter().map(Nqn::to_string).collect(),
        namespaces: control
            .published_of(info.id)
            .map(|(nsid, published)| NamespaceStatus {
                nsid,
                backend: published.backend.info().name,
                blocks: published.view.blocks,
                block_size: 1 << published.view.block_shift,
                read_only: published.view.read_only,
                zones: published.zones.as_ref().map(|turns| {
                    let zones = turns.zones();
                    let (open, active) = zones.in_use();
                    let size = zones.geometry().zone_blocks << published.view.block_shift;
                    ZonesStatus { count: zones.count(), size, open, active }
                }),
                io: published.totals(),
            })
            .collect(),
    });
    let controllers = registry.controllers().map(|info| ControllerStatus {
        subnqn: info.subnqn.to_string(),
        cntlid: info.cntlid,
        hostnqn: info.hostnqn.to_string(),
        hostid: Uuid::from_bytes(info.hostid),
        kato: info.kato,
        dying: info.dying,
        queues: control
            .queues
            .get(&info.ctrl)
            .into_iter()
            .flatten()
            .map(|queue| QueueStatus {
                qid: queue.qid,
                reactor: queue.key.reactor,
                idle: now.saturating_sub(queue.activity.last()),
                io: queue.activity.tally.traffic(),
            })
            .collect(),
    });
    let controllers: Vec<ControllerStatus> = controllers.collect();
    Status {
        subsystems: subsystems.collect(),
        listeners: registry.listeners().iter().map(|listener| listener.addr).collect(),
        hosts: hosts(&controllers, &control.past),
        controllers,
        draining: Vec::new(),
    }
}

/// Sums by host.
fn hosts(controllers: &[ControllerStatus], past: &Past) -> Vec<HostStatus> {
    let mut sums: BTreeMap<&str, (usize, Traffic)> = past.iter().map(|(host, io)| (host, (0, io))).collect();
    for controller in controllers {
        let (queues, io) = sums.entry(&controller.hostnqn).or_default();
        *queues += controller.queues.len();
        controller.queues.iter().for_each(|queue| *io += queue.io);
    }
    let host = |(host, (queues, io)): (&str, _)| HostStatus { hostnqn: host.to_owned(), queues, io };
    sums.into_iter().map(host).collect()
}

impl Published {
    pub(crate) fn new(
        subsystem: SubsystemId,
        nqn: &str,
        view: NamespaceView,
        gate: Option<Arc<Gate>>,
        spec: &NamespaceSpec,
        reactors: usize,
    ) -> Self {
        let counters = (0..reactors).map(|_| IoCounters::default()).collect();
        let limiter = Arc::new(Limiter::new(spec.limits));
        let (instance, backend) = (Instance::next(), Arc::clone(&spec.backend));
        let zones = backend.zoned().map(|zoned| Arc::new(ZoneTurns::new(zoned)));
        Self { instance, subsystem, nqn: nqn.into(), view, gate, limiter, backend, zones, counters }
    }
}
