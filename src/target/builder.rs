//! Building a target and holding it.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nvme::auth::HostAuth;
use nvme::registry::{
    Admission, AnaState, ConfigError, Listener, NamespaceConfig, NamespaceLimits, NamespaceState, RdmaProvider,
    Referral, Registry, RegistryConfig, ZonedNamespace,
};
use tracing::{error, info};
use uuid::Uuid;

use super::authenticate::random;
use super::control::ControlThread;
use super::counters::{Counters, IoTotals, count};
use super::keeper::Keeper;
use super::limits::Limits;
use super::live::{ListenerMap, Live, Wildcards, subsystem_config};
use super::namespace::Published;
use super::operate::Running;
use super::options::Options;
use super::reactor::{Reactor, open_ring};
use super::shared::{Control, ControlMessage, Shared};
use crate::backend::{Backend, BackendInfo};
use crate::config::derive_uuid;
use crate::rdma::soft::SoftOptions;
use crate::rdma::{DeviceInfo, Provider};

/// Submission queue entries of a reactor's ring.
const RING_ENTRIES: u32 = 1024;

/// What to do where a thread cannot be started.
const THREADS: &str = "raise the limit of threads (ulimit -u, or TasksMax of its unit)";

/// A target could not be started: what, why, and what to try. Nothing was left half started.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{object}: {reason}{}{remedy}", if .remedy.is_empty() { "" } else { "; " })]
pub struct TargetError {
    /// What it is about.
    pub object: String,
    /// Why.
    pub reason: String,
    /// What to do about it; may be empty.
    pub remedy: String,
}

impl TargetError {
    pub(super) fn new(object: impl Into<String>, reason: impl fmt::Display, remedy: impl Into<String>) -> Self {
        Self { object: object.into(), reason: reason.to_string(), remedy: remedy.into() }
    }

    /// The registry refused.
    pub(super) fn config(object: impl Into<String>, error: ConfigError) -> Self {
        let remedy = match &error {
            ConfigError::Limit(_) => "choose a value within that",
            ConfigError::Nqn(..) | ConfigError::HostNqn(..) => {
                "write it as nqn.yyyy-mm.reversed.domain:name, or nqn.2014-08.org.nvmexpress:uuid: and a UUID"
            }
            ConfigError::DuplicateNqn(_) => "choose another NQN",
            ConfigError::Serial(_) | ConfigError::Model(_) => "choose another one, or leave it out",
            ConfigError::NoSuchSubsystem
            | ConfigError::NoSuchNamespace(_)
            | ConfigError::NoSuchListener(_)
            | ConfigError::NoSuchReferral(_) => "list what there is: status",
            ConfigError::NsidOutOfRange(_) => "choose one of 1 to 1024",
            ConfigError::DuplicateNsid(_) => "choose another nsid",
            ConfigError::DuplicateUuid(_) => "give one of them another uuid, nguid and eui64",
            ConfigError::ZeroUuid => "leave it out, or choose another",
            ConfigError::BlockSize(_) => "choose one of them",
            ConfigError::Size(_) => "look at what is behind it",
            ConfigError::ZoneSize(_) => "choose a power of two that divides the size",
            ConfigError::AnaGroup(_) => "choose one of them",
            ConfigError::DuplicateListener(_) | ConfigError::DuplicateReferral(_) => "name it once",
            ConfigError::ReferralAddress(_) => "name an address and a port of the other service",
        };
        Self::new(object, error, remedy)
    }
}

/// A namespace to serve.
#[derive(Clone, Debug)]
pub struct NamespaceSpec {
    /// Namespace ID (NSID), 1 and up.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: Arc<dyn Backend>,
    /// LBA size in bytes, 512 or 4096; `None` = the smallest that the backend takes.
    pub block_size: Option<u32>,
    /// UUID; `None` = derived from the subsystem's NQN and the backend's identity, the same at every start.
    pub uuid: Option<Uuid>,
    /// NGUID; all zero = the UUID's bytes.
    pub nguid: [u8; 16],
    /// EUI64; all zero = none.
    pub eui64: [u8; 8],
    /// Refuse writes.
    pub read_only: bool,
    /// ANA group, 1 to 128.
    pub ana_group: u32,
    /// NQNs of the hosts that see it; `None` = all hosts of the subsystem.
    pub hosts: Option<Vec<String>>,
    /// What all hosts together may do with it.
    pub limits: Limits,
}

impl NamespaceSpec {
    /// A namespace with derived identifiers and the smallest LBA size.
    pub fn new(nsid: u32, backend: Arc<dyn Backend>) -> Self {
        Self {
            nsid,
            backend,
            block_size: None,
            uuid: None,
            nguid: [0; 16],
            eui64: [0; 8],
            read_only: false,
            ana_group: 1,
            hosts: None,
            limits: Limits::default(),
        }
    }
}

/// A subsystem to serve.
#[derive(Clone, Debug)]
pub struct SubsystemSpec {
    /// NVMe Qualified Name.
    pub nqn: String,
    /// Serial number, up to 20 ASCII characters; `None` = derived from the NQN.
    pub serial: Option<String>,
    /// Model number, up to 40 ASCII characters.
    pub model: Option<String>,
    /// Whether hosts need not be listed.
    pub allow_any_host: bool,
    /// Host NQNs that may connect.
    pub hosts: Vec<String>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceSpec>,
    /// How well groups of its namespaces are reached at first, where not optimally.
    pub ana: Vec<AnaSpec>,
    /// Hosts that have to authenticate, and how.
    pub auth: Vec<(String, HostAuth)>,
    /// What hosts may do with its namespaces.
    pub limits: Vec<(String, Limits)>,
    /// How many controllers it has at a time.
    pub admission: Admission,
}

/// How well a group of namespaces is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnaSpec {
    /// The group, 1 to 128.
    pub group: u32,
    /// Through which listener; `None` = all that are there.
    pub listener: Option<SocketAddr>,
    /// How well.
    pub state: AnaState,
}

impl SubsystemSpec {
    /// A subsystem that any host may use.
    pub fn new(nqn: impl Into<String>) -> Self {
        Self {
            nqn: nqn.into(),
            serial: None,
            model: None,
            allow_any_host: true,
            hosts: Vec::new(),
            namespaces: Vec::new(),
            ana: Vec::new(),
            auth: Vec::new(),
            limits: Vec::new(),
            admission: Admission::default(),
        }
    }

    /// Adds a namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: NamespaceSpec) -> Self {
        self.namespaces.push(namespace);
        self
    }
}

/// What a running target serves, for tables and logs.
#[derive(Clone, Debug)]
pub struct Served {
    /// The provider's word.
    pub provider: &'static str,
    /// Addresses listened on, and the device behind each unless it is a wildcard.
    pub listeners: Vec<(SocketAddr, Option<DeviceInfo>)>,
    /// Subsystems with their namespaces: NSID, LBA size, what stands behind it, UUID.
    pub subsystems: Vec<(String, Vec<ServedNamespace>)>,
    /// Bytes of buffer memory, all reactors together.
    pub memory: usize,
    /// Reactor threads.
    pub reactors: usize,
    /// What works less well than it could, and why.
    pub remarks: Vec<String>,
}

/// One namespace of [`Served`].
#[derive(Clone, Debug)]
pub struct ServedNamespace {
    /// Namespace ID.
    pub nsid: u32,
    /// LBA size in bytes.
    pub block_size: u32,
    /// What stands behind it.
    pub backend: BackendInfo,
    /// Its UUID.
    pub uuid: Uuid,
}

/// Collects what a target is to serve; see [`Target::builder`].
#[derive(Default)]
pub struct TargetBuilder {
    options: Options,
    subsystems: Vec<SubsystemSpec>,
    listeners: Vec<(SocketAddr, Option<u8>)>,
    referrals: Vec<Referral>,
    identify_overrides: Vec<nvme::registry::IdentifyOverride>,
    state_dir: Option<PathBuf>,
    soft: SoftOptions,
    /// What stands for a wildcard, for listeners that come later too.
    listener_map: Option<ListenerMap>,
    wildcards: Wildcards,
}

impl fmt::Debug for TargetBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, subsystems, listeners, .. } = self;
        let mut debug = f.debug_struct("TargetBuilder");
        debug.field("options", options).field("subsystems", subsystems).field("listeners", listeners);
        debug.finish_non_exhaustive()
    }
}

/// A running target. Dropping it shuts it down.
pub struct Target {
    served: Served,
    counters: Box<dyn Fn() -> Counters + Send + Sync>,
    pub(super) running: Box<dyn Running>,
    pub(super) live: Live,
    stop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("served", &self.served).finish_non_exhaustive()
    }
}

impl Target {
    /// Starts to describe a target.
    pub fn builder() -> TargetBuilder {
        TargetBuilder::default()
    }

    /// What it serves.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// What it holds right now.
    pub fn counters(&self) -> Counters {
        (self.counters)()
    }

    /// What hosts did with each namespace since the start.
    pub fn io_totals(&self) -> Vec<IoTotals> {
        self.status().subsystems.into_iter().flat_map(|one| one.namespaces).map(|one| one.io).collect()
    }

    /// Stops listening, lets commands finish (up to 1.5 s), disconnects every host, ends the threads. Returns what hosts
    /// did in all.
    pub fn shutdown(mut self) -> Vec<IoTotals> {
        self.stop();
        self.io_totals()
    }

    fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop();
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.stop();
    }
}

impl TargetBuilder {
    /// Sizes and switches.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// A folder for what namespaces remember through power loss: reservations whose hosts asked for it, and write
    /// protection. Without one hosts are told that nothing is kept, and cannot write protect namespaces.
    #[must_use]
    pub fn state_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.state_dir = Some(folder.into());
        self
    }

    /// How the software provider is set up, if it is the one; its reactors are the target's.
    #[must_use]
    pub fn soft(mut self, options: SoftOptions) -> Self {
        self.soft = options;
        self
    }

    /// Options of the software provider.
    pub(crate) fn soft_options(&self) -> SoftOptions {
        SoftOptions { reactors: self.options.reactors, ..self.soft }
    }

    /// Adds a subsystem.
    #[must_use]
    pub fn subsystem(mut self, subsystem: SubsystemSpec) -> Self {
        self.subsystems.push(subsystem);
        self
    }

    /// Adds a listener.
    #[must_use]
    pub fn listen(self, address: SocketAddr) -> Self {
        self.listen_with(address, None)
    }

    /// Adds a listener whose connections carry a type of service (DSCP and ECN bits).
    #[must_use]
    pub fn listen_with(mut self, address: SocketAddr, tos: Option<u8>) -> Self {
        self.listeners.push((address, tos));
        self
    }

    /// Tells hosts of another discovery service.
    #[must_use]
    pub fn referral(mut self, referral: Referral) -> Self {
        self.referrals.push(referral);
        self
    }

    /// A test's hook: makes fields of Identify data wrong on purpose, to see what a host does.
    #[must_use]
    pub fn identify_override(mut self, cns: u8, offset: usize, bytes: Vec<u8>) -> Self {
        self.identify_overrides.push(nvme::registry::IdentifyOverride { cns, offset, bytes });
        self
    }

    /// The registry with everything in it, and the namespaces to publish.
    fn build_registry(&self, keeper: Option<&Keeper>) -> Result<Built, TargetError> {
        let options = &self.options;
        options.check()?;
        let mut registry = Registry::new(RegistryConfig {
            max_io_queues: options.io_queues,
            max_io_queue_entries: options.queue_depth as u16,
            admin_queue_entries: options.admin_queue_depth as u16,
            in_capsule_data_size: options.in_capsule_data as u16,
            io_limits: options.io_limits(),
            keep_alive_granularity: options.keep_alive_granularity,
            cntlids: options.cntlid.0..=options.cntlid.1,
            identify_overrides: self.identify_overrides.clone(),
            discovery_nqn: options.discovery_nqn.clone(),
            subsystem_reset: options.subsystem_reset,
            retry_delay: options.retry_delay,
            random: Some(random),
            write_protection: keeper.is_some(),
            ..RegistryConfig::default()
        });
        let (mut published, mut served) = (Vec::new(), Vec::new());
        for subsystem in &self.subsystems {
            let refuse = |error| TargetError::config(format!("subsystem {}", subsystem.nqn), error);
            let id = registry.add_subsystem(&subsystem_config(subsystem)).map_err(refuse)?;
            for (host, auth) in &subsystem.auth {
                registry.set_host_auth(id, host, Some(auth.clone())).map_err(refuse)?;
            }
            let mut namespaces = Vec::new();
            for spec in &subsystem.namespaces {
                let info = spec.backend.info();
                let config = namespace_config(&subsystem.nqn, spec, &info, keeper)?;
                namespaces.push(ServedNamespace {
                    nsid: spec.nsid,
                    block_size: config.block_size,
                    backend: info,
                    uuid: Uuid::from_bytes(config.uuid),
                });
                registry.add_namespace(id, config).map_err(refuse)?;
            }
            for view in registry.namespace_views(id) {
                let Some(spec) = subsystem.namespaces.iter().find(|spec| spec.nsid == view.nsid) else { continue };
                let gate = registry.namespace_gate(id, view.nsid).map(Arc::new);
                published.push(Published::new(id, &subsystem.nqn, view, gate, spec, options.reactors));
            }
            served.push((subsystem.nqn.clone(), namespaces));
        }
        for (address, _) in &self.listeners {
            let listener = Listener { addr: *address, portid: 0, provider: RdmaProvider::RoceV2 };
            registry
                .add_listener(listener)
                .map_err(|error| TargetError::config(format!("listener {address}"), error))?;
        }
        for referral in &self.referrals {
            let refuse = |error| TargetError::config(format!("referral to {}", referral.addr), error);
            registry.add_referral(referral.clone()).map_err(refuse)?;
        }
        for subsystem in &self.subsystems {
            set_first_states(&mut registry, &subsystem.nqn, &subsystem.ana)?;
        }
        // Reactors are made with all of this: there is nothing to tell them.
        while registry.poll_event().is_some() {}
        Ok(Built { registry, published, served })
    }

    /// Replaces each listener by those that stand for it.
    pub(crate) fn map_listeners(
        mut self,
        replace: impl Fn(SocketAddr) -> Vec<SocketAddr> + Send + Sync + 'static,
    ) -> Self {
        for (address, tos) in std::mem::take(&mut self.listeners) {
            let addresses = replace(address);
            self.listeners.extend(addresses.iter().map(|address| (*address, tos)));
            if addresses != [address] {
                self.wildcards.insert(address, addresses);
            }
        }
        for subsystem in &mut self.subsystems {
            let wildcards = &self.wildcards;
            let stands = |address| wildcards.get(&address).cloned().unwrap_or_else(|| replace(address));
            subsystem.ana = expand_states(&subsystem.ana, stands);
        }
        self.listener_map = Some(Arc::new(replace));
        self
    }

    /// Puts something before every backend added so far: a cache, a counter, a test's faults.
    #[must_use]
    pub fn map_backends(mut self, wrap: impl Fn(Arc<dyn Backend>) -> Arc<dyn Backend>) -> Self {
        for namespace in self.subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces) {
            namespace.backend = wrap(Arc::clone(&namespace.backend));
        }
        self
    }

    /// Everything but the threads, and what reactors are to serve.
    pub(crate) fn prepare<P: Provider>(&self, provider: &P) -> Result<Prepared<P>, TargetError> {
        let keeper = self.state_dir.as_deref().map(open_keeper).transpose()?;
        let Built { registry, published, served } = self.build_registry(keeper.as_ref())?;
        let shared = Shared::<P>::new(registry, self.options.clone(), keeper)
            .map_err(|error| TargetError::new("eventfd", error, "raise the limit of open files (ulimit -n)"))?;
        shared.with_control(|control| {
            for namespace in &published {
                control.published.insert((namespace.subsystem, namespace.view.nsid), namespace.clone());
            }
            self.subsystems.iter().for_each(|subsystem| limit_hosts(control, subsystem));
        });
        let shared = Arc::new(shared);
        let cm = provider.open_cm().map_err(|error| TargetError::new(error.what, error.reason, error.remedy))?;
        let mut control = ControlThread::new(Arc::clone(&shared), cm);
        // Listeners first: what fails there fails before anything runs. Requests wait until the control thread does.
        let mut listeners = Vec::new();
        for (address, tos) in &self.listeners {
            let device = control
                .listen(*address, *tos)
                .map_err(|error| TargetError::new(error.what, error.reason, error.remedy))?;
            listeners.push((*address, device.and_then(|device| provider.device_info(device))));
        }
        Ok(Prepared { shared, control, published, listeners, served })
    }

    /// Starts everything, or nothing.
    pub fn start<P: Provider>(self, provider: P) -> Result<Target, TargetError> {
        let provider = Arc::new(provider);
        let options = self.options.clone();
        let Prepared { shared, control, published, listeners, served: subsystems } = self.prepare(&*provider)?;
        let (reactors, remarks) = start_reactors(&shared, &provider, &published)?;
        let mut threads = Threads { shared: Arc::clone(&shared), control: None, reactors };
        let spawned = std::thread::Builder::new().name("farside-control".into()).spawn(move || control.run());
        threads.control = Some(spawned.map_err(|error| TargetError::new("control thread", error, THREADS))?);
        self.subsystems.iter().for_each(keep);

        let served = Served {
            provider: P::NAME,
            listeners,
            subsystems,
            memory: options.memory_plan().arena * options.reactors,
            reactors: options.reactors,
            remarks,
        };
        let running = Box::new(Arc::clone(&shared));
        let live = Live::new(self.listener_map, self.wildcards);
        let counters = Box::new(move || count(&shared));
        Ok(Target { served, counters, running, live, stop: Some(Box::new(move || threads.stop())) })
    }
}

/// A target whose threads do not run yet.
pub(crate) struct Prepared<P: Provider> {
    pub(crate) shared: Arc<Shared<P>>,
    pub(crate) control: ControlThread<P>,
    pub(crate) published: Vec<Published>,
    listeners: Vec<(SocketAddr, Option<DeviceInfo>)>,
    served: Vec<(String, Vec<ServedNamespace>)>,
}

/// Starts to keep states in a folder, which is made if need be.
fn open_keeper(folder: &Path) -> Result<Keeper, TargetError> {
    std::fs::create_dir_all(folder).and_then(|()| Keeper::start(folder)).map_err(|error| {
        let remedy = "name a folder that the user that farside runs as can write to";
        TargetError::new(format!("state_dir {}", folder.display()), error, remedy)
    })
}

/// Nothing can fail any more: what was made for its namespaces stays.
pub(super) fn keep(subsystem: &SubsystemSpec) {
    subsystem.namespaces.iter().for_each(|namespace| namespace.backend.keep());
}

/// The ANA states that a subsystem starts with; listeners are there.
pub(super) fn set_first_states(registry: &mut Registry, nqn: &str, states: &[AnaSpec]) -> Result<(), TargetError> {
    let id = nvme::Nqn::lenient(nqn).ok().and_then(|nqn| registry.find_subsystem(&nqn));
    let Some(id) = id else { return Ok(()) };
    for AnaSpec { group, listener, state } in states {
        registry.set_ana_state(id, *group, *listener, *state, Duration::ZERO).map_err(|error| {
            let remedy = "name a group that there is, and a listener as it is configured";
            TargetError::new(format!("ANA group {group} of {nqn}"), error, remedy)
        })?;
    }
    Ok(())
}

/// ANA states with those addresses that stand for the listeners that they name.
pub(super) fn expand_states(states: &[AnaSpec], addresses: impl Fn(SocketAddr) -> Vec<SocketAddr>) -> Vec<AnaSpec> {
    let expand = |one: &AnaSpec| {
        let listeners = one.listener.map_or_else(|| vec![None], |one| addresses(one).into_iter().map(Some).collect());
        let AnaSpec { group, state, .. } = *one;
        listeners.into_iter().map(move |listener| AnaSpec { group, listener, state })
    };
    states.iter().flat_map(expand).collect()
}

/// Hosts of a subsystem get the limits that it starts with.
pub(super) fn limit_hosts(control: &mut Control, subsystem: &SubsystemSpec) {
    let name = |text: &str| nvme::Nqn::lenient(text).ok();
    let Some(id) = name(&subsystem.nqn).and_then(|nqn| control.registry.find_subsystem(&nqn)) else { return };
    for (host, limits) in &subsystem.limits {
        if let Some(host) = name(host) {
            control.limiter(id, host).set(*limits);
        }
    }
}

/// A checked description.
struct Built {
    registry: Registry,
    published: Vec<Published>,
    served: Vec<(String, Vec<ServedNamespace>)>,
}

/// The threads of a target; stopped in order when dropped.
struct Threads<P: Provider> {
    shared: Arc<Shared<P>>,
    control: Option<JoinHandle<()>>,
    reactors: Vec<JoinHandle<()>>,
}

impl<P: Provider> Threads<P> {
    fn stop(mut self) {
        self.stop_all();
    }

    fn stop_all(&mut self) {
        if self.control.is_none() {
            // The control thread never ran: nobody else tells the reactors.
            for reactor in &self.shared.reactors {
                reactor.mailbox.send(super::shared::Message::Drain);
            }
        } else {
            self.shared.control_mail.send(ControlMessage::Stop);
        }
        for reactor in self.reactors.drain(..) {
            if reactor.join().is_err() {
                error!("a reactor thread had panicked");
            }
        }
        self.shared.control_mail.send(ControlMessage::End);
        if let Some(control) = self.control.take()
            && control.join().is_err()
        {
            error!("the control thread had panicked");
        }
        self.shared.calculator.stop();
        if let Some(keeper) = &self.shared.keeper {
            keeper.stop();
        }
        info!("target stopped");
    }
}

impl<P: Provider> Drop for Threads<P> {
    fn drop(&mut self) {
        if self.control.is_some() || !self.reactors.is_empty() {
            self.stop_all();
        }
    }
}

fn start_reactors<P: Provider>(
    shared: &Arc<Shared<P>>,
    provider: &Arc<P>,
    published: &[Published],
) -> Result<(Vec<JoinHandle<()>>, Vec<String>), TargetError> {
    let mut remarks = Vec::new();
    let mut threads = Threads { shared: Arc::clone(shared), control: None, reactors: Vec::new() };
    for index in 0..shared.reactors.len() as u32 {
        let (shared, provider, published) = (Arc::clone(shared), Arc::clone(provider), published.to_vec());
        let (started, outcome) = std::sync::mpsc::channel();
        let body = move || {
            // Rings and endpoints belong to the thread that uses them, so everything is made here.
            let built = open_ring(RING_ENTRIES)
                .map_err(|error| TargetError::new("io_uring", error, "see what `farside doctor` says of it"))
                .and_then(|ring| {
                    Reactor::new(index, shared, provider, Some(ring)).map_err(|error| {
                        TargetError::new(format!("reactor {index}"), error, "see what `farside doctor` says")
                    })
                });
            match built {
                Ok(mut reactor) => {
                    for namespace in published {
                        if let Err(error) = reactor.open_namespace(namespace) {
                            let _ = started.send(Err(TargetError::new(error.object, error.reason, error.remedy)));
                            return;
                        }
                    }
                    let _ = started.send(Ok(reactor.remarks()));
                    drop(started);
                    reactor.run();
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            }
        };
        let spawned = std::thread::Builder::new().name(format!("farside-{index}")).spawn(body);
        threads.reactors.push(spawned.map_err(|error| TargetError::new(format!("reactor {index}"), error, THREADS))?);
        match outcome.recv() {
            Ok(Ok(said)) => {
                // Every reactor has the same to say.
                if index == 0 {
                    remarks = said;
                }
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                return Err(TargetError::new(
                    format!("reactor {index}"),
                    "its thread ended at once",
                    "see the log for why",
                ));
            }
        }
    }
    Ok((std::mem::take(&mut threads.reactors), remarks))
}

impl From<crate::backend::BackendError> for TargetError {
    fn from(error: crate::backend::BackendError) -> Self {
        Self { object: error.object, reason: error.reason, remedy: error.remedy }
    }
}

impl From<crate::rdma::RdmaError> for TargetError {
    fn from(error: crate::rdma::RdmaError) -> Self {
        Self { object: error.what, reason: error.reason, remedy: error.remedy }
    }
}

/// A namespace in the registry's words: sizes in logical blocks, identifiers filled in.
pub(super) fn namespace_config(
    nqn: &str,
    spec: &NamespaceSpec,
    info: &BackendInfo,
    keeper: Option<&Keeper>,
) -> Result<NamespaceConfig, TargetError> {
    let object = || format!("namespace {} of {nqn} ({})", spec.nsid, info.name);
    let block_size = spec.block_size.unwrap_or_else(|| info.block_size.max(512));
    if block_size < info.block_size {
        return Err(TargetError::new(
            object(),
            format!("a block size of {block_size} is smaller than the {} that it needs", info.block_size),
            format!("use block_size = {}", info.block_size),
        ));
    }
    if !info.size.is_multiple_of(u64::from(block_size)) {
        return Err(TargetError::new(
            object(),
            format!("its size of {} bytes is not a multiple of the block size {block_size}", info.size),
            "change its size, or use a smaller block_size",
        ));
    }
    let zoned = spec.backend.zoned();
    if let Some(zoned) = zoned.as_ref().filter(|zoned| zoned.block_size() != block_size) {
        return Err(TargetError::new(
            object(),
            format!("its zones are counted in blocks of {}, not {block_size}", zoned.block_size()),
            format!("use block_size = {}", zoned.block_size()),
        ));
    }
    let zones = zoned.map(|zoned| ZonedNamespace::of(&zoned.zones()));
    let in_blocks = |bytes: u32| u16::try_from(bytes / block_size).unwrap_or(u16::MAX);
    let (npwg, npdg) = (in_blocks(info.preferred_write), in_blocks(info.preferred_deallocate));
    let uuid = spec.uuid.unwrap_or_else(|| derive_uuid(nqn, spec.nsid, &info.identity));
    let kept = keeper.map_or_else(|| Ok(NamespaceState::default()), |keeper| keeper.load(uuid))?;
    Ok(NamespaceConfig {
        nsid: spec.nsid,
        uuid: uuid.into_bytes(),
        nguid: if spec.nguid == [0; 16] { uuid.into_bytes() } else { spec.nguid },
        eui64: spec.eui64,
        blocks: info.size / u64::from(block_size),
        block_size,
        limits: NamespaceLimits { npwg, npwa: npwg, npdg, npda: npdg, nows: in_blocks(info.optimal_write), noiob: 0 },
        volatile_write_cache: info.write_cache,
        rotational: info.rotational,
        deallocate: info.abilities.deallocate && zones.is_none(),
        deallocated_reads_zero: info.abilities.deallocated_reads_zero,
        write_zeroes: info.abilities.write_zeroes,
        compare: true,
        verify: true,
        copy: zones.is_none(),
        hosts: spec.hosts.clone(),
        ana_group: spec.ana_group,
        reservations: true,
        persistent: keeper.is_some(),
        kept,
        read_only: spec.read_only || info.read_only,
        zones,
    })
}
