//! What scenarios stand on: a provider, a target with two namespaces behind faults, raw hosts, and a bystander whose I/O must go
//! on whatever the others do.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside::backend::{FaultControl, FaultPlan, Faulty, Memory, Null};
use farside::host::raw::{RawHost, RawQueue, RawQueueId, RawResponse};
use farside::host::wire::{self, Sqe};
use farside::host::{HostError, HostErrorKind};
use farside::mem::Buffer;
use farside::rdma::Provider;
use farside::rdma::local::{Local, LocalCounters, LocalOptions};
use farside::rdma::soft::Soft;
use farside::target::{NamespaceSpec, Options, SubsystemSpec, Target, TargetBuilder};
use nvme::Status;

pub(crate) const NQN: &str = "nqn.2026-11.io.farside:test";
pub(crate) const OTHER_NQN: &str = "nqn.2026-11.io.farside:other";
pub(crate) const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
pub(crate) const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// How long anything may take before a test gives up.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Namespace 1: memory behind faults, 512 B blocks. Namespace 2: the same without faults, for bystanders. Namespace 3: null.
pub(crate) const BLOCK: usize = 512;
pub(crate) const BLOCKS: u64 = (64 << 20) / BLOCK as u64;

/// A provider for target and hosts.
pub(crate) trait Rig: 'static {
    type P: Provider;
    /// Private data arrive padded.
    const PADS: bool;
    fn new() -> Self;
    fn target(&self) -> Self::P;
    /// For one host: what it uses, and where it connects from.
    fn host(&self) -> (Arc<Self::P>, Option<IpAddr>);
    fn address(&self) -> SocketAddr;
    /// One more address for the target, at each call.
    fn another(&self) -> SocketAddr;
}

pub(crate) struct LocalRig {
    pub(crate) local: Local,
}

impl Rig for LocalRig {
    type P = Local;
    const PADS: bool = false;

    fn new() -> Self {
        Self { local: Local::new() }
    }

    fn target(&self) -> Local {
        self.local.clone()
    }

    fn host(&self) -> (Arc<Local>, Option<IpAddr>) {
        // As the Linux host does: a response that is not solicited wakes nobody.
        (Arc::new(self.local.with(LocalOptions { solicited_only: true, ..LocalOptions::default() })), None)
    }

    fn address(&self) -> SocketAddr {
        "192.0.2.1:4420".parse().expect("an address")
    }

    fn another(&self) -> SocketAddr {
        static NEXT: AtomicU64 = AtomicU64::new(2);
        SocketAddr::from(([192, 0, 2, NEXT.fetch_add(1, Ordering::Relaxed) as u8], 4420))
    }
}

/// The software stack over loopback: each target and each host on an address of its own.
pub(crate) struct SoftRig {
    address: Ipv4Addr,
}

/// An address in 127/8 that nobody else in this process has, and no other process at this time.
fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU64 = AtomicU64::new(2);
    let at = NEXT.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id() % 120;
    Ipv4Addr::new(127, 8 + process as u8, (at / 250) as u8, (at % 250 + 2) as u8)
}

impl Rig for SoftRig {
    type P = Soft;
    const PADS: bool = true;

    fn new() -> Self {
        Self { address: own_address() }
    }

    fn target(&self) -> Soft {
        Soft::new(2).expect("the software provider")
    }

    fn host(&self) -> (Arc<Soft>, Option<IpAddr>) {
        (Arc::new(Soft::new(1).expect("the software provider")), Some(own_address().into()))
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.address.into(), 4420)
    }

    fn another(&self) -> SocketAddr {
        SocketAddr::new(own_address().into(), 4420)
    }
}

/// Sizes that keep a target small.
pub(crate) fn small() -> Options {
    Options { reactors: 2, pool_size: 16 << 20, receive_slots: 2048, ..Options::default() }
}

pub(crate) struct Setup<R: Rig> {
    pub(crate) target: Option<Target>,
    pub(crate) faults: FaultControl,
    pub(crate) rig: R,
}

impl<R: Rig> Setup<R> {
    pub(crate) fn start() -> Self {
        Self::with(R::new(), small())
    }

    pub(crate) fn with(rig: R, options: Options) -> Self {
        let provider = rig.target();
        Self::over(rig, options, provider)
    }

    pub(crate) fn over(rig: R, options: Options, provider: R::P) -> Self {
        Self::built(rig, options, provider, |builder| builder)
    }

    /// With whatever else is to be said of the target.
    pub(crate) fn built(
        rig: R,
        options: Options,
        provider: R::P,
        more: impl FnOnce(TargetBuilder) -> TargetBuilder,
    ) -> Self {
        let faulty = Faulty::new(Arc::new(Memory::new(BLOCKS * BLOCK as u64)), FaultPlan::default());
        let faults = faulty.control();
        let subsystem = SubsystemSpec::new(NQN)
            .namespace(NamespaceSpec::new(1, Arc::new(faulty)))
            .namespace(NamespaceSpec::new(2, Arc::new(Memory::new(BLOCKS * BLOCK as u64))))
            .namespace(NamespaceSpec::new(3, Arc::new(Null::new(1 << 40))));
        let other = SubsystemSpec::new(OTHER_NQN).namespace(NamespaceSpec::new(1, Arc::new(Null::new(1 << 30))));
        let builder = Target::builder().options(options).subsystem(subsystem).subsystem(other).listen(rig.address());
        let target = more(builder).start(provider).expect("the target starts");
        Self { target: Some(target), faults, rig }
    }

    /// Waits until the stalled disk has so many operations; this host serves the target's READs meanwhile.
    pub(crate) fn until_held(&self, raw: &mut Raw<R>, operations: usize) {
        until_held(&self.faults, raw, operations);
    }

    /// A raw host with nothing connected.
    pub(crate) fn raw(&self) -> Raw<R> {
        self.raw_as(1)
    }

    /// A raw host with an identity of its own.
    pub(crate) fn raw_as(&self, identity: u8) -> Raw<R> {
        Raw::open(self.rig.host(), self.rig.address(), identity)
    }

    /// A raw host with an enabled controller and one I/O queue of 32 entries.
    pub(crate) fn ready(&self) -> (Raw<R>, RawQueueId, RawQueueId) {
        let mut raw = self.raw();
        let (admin, io) = raw.bring_up();
        (raw, admin, io)
    }

    /// Another host whose verified I/O goes on until [`Bystander::check`].
    pub(crate) fn bystander(&self) -> Bystander {
        let (provider, address) = (self.rig.host(), self.rig.address());
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut raw = Raw::<R>::open(provider, address, 0xbb);
            let (_, io) = raw.bring_up();
            let mut round = 0u64;
            while !stopped.load(Ordering::Acquire) {
                let slba = round * 7 % (BLOCKS - 8);
                let bytes: Vec<u8> = (0..4096u64).map(|at| (at * 31 + round) as u8).collect();
                assert!(raw.write(io, 2, slba, &bytes).is_success(), "the bystander's write in round {round}");
                assert_eq!(raw.read(io, 2, slba, 8).expect("the bystander's read"), bytes, "round {round}");
                round += 1;
                counted.store(round, Ordering::Release);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Bystander { stop, rounds, thread: Some(thread) }
    }
}

pub(crate) struct Bystander {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Bystander {
    /// Its I/O went on to this moment, and a little further.
    pub(crate) fn check(mut self) {
        let before = self.rounds.load(Ordering::Acquire);
        let deadline = Instant::now() + LIMIT;
        while self.rounds.load(Ordering::Acquire) < before + 3 {
            let alive = self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
            assert!(alive && Instant::now() < deadline, "the bystander's I/O stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop.store(true, Ordering::Release);
        self.thread.take().expect("checked once").join().expect("the bystander's data");
    }
}

/// A raw host that knows how to speak properly, until told otherwise.
pub(crate) struct Raw<R: Rig> {
    pub(crate) host: RawHost<R::P>,
    pub(crate) address: SocketAddr,
    pub(crate) hostid: [u8; 16],
    pub(crate) hostnqn: String,
    pub(crate) subnqn: String,
    pub(crate) kato_ms: u32,
    pub(crate) cntlid: u16,
    next_cid: u16,
}

impl<R: Rig> Raw<R> {
    pub(crate) fn open((provider, source): (Arc<R::P>, Option<IpAddr>), address: SocketAddr, identity: u8) -> Self {
        Self {
            host: RawHost::new(provider, 8 << 20, source).expect("a host"),
            address,
            hostid: [identity; 16],
            hostnqn: HOST_NQN.into(),
            subnqn: NQN.into(),
            kato_ms: 0,
            cntlid: 0xffff,
            next_cid: 0,
        }
    }

    pub(crate) fn cid(&mut self) -> u16 {
        self.next_cid = (self.next_cid + 1) % 0xfff0;
        self.next_cid
    }

    pub(crate) fn queue(&mut self, queue: RawQueue) -> Result<RawQueueId, HostError> {
        self.host.connect(self.address, queue, LIMIT).map(|(id, _)| id)
    }

    pub(crate) fn good_queue(&mut self, qid: u16, entries: u16) -> RawQueueId {
        self.queue(RawQueue::new(qid, entries)).expect("a connection")
    }

    /// The NVMe status of a rejected connection.
    pub(crate) fn rejected(&mut self, queue: RawQueue) -> Option<u16> {
        match self.queue(queue) {
            Ok(id) => {
                self.host.close(id);
                None
            }
            Err(HostError { kind: HostErrorKind::Refused { status, .. }, .. }) => {
                Some(status.expect("a reject says its NVMe status"))
            }
            Err(error) => panic!("neither accepted nor rejected: {error}"),
        }
    }

    /// Sends a command with data from or for a buffer, and waits for its answer.
    pub(crate) fn call(&mut self, queue: RawQueueId, sqe: Sqe) -> RawResponse {
        let cid = self.cid();
        let response = self.host.call(queue, &sqe.cid(cid).0, LIMIT).expect("an answer");
        assert_eq!((response.cid(), response.len), (cid, 16));
        response
    }

    pub(crate) fn keyed(&self, buffer: &Buffer, len: usize) -> [u8; 16] {
        wire::keyed(buffer.addr(), len as u32, self.host.rkey(), false)
    }

    /// A command whose data the target fetches.
    pub(crate) fn call_with(&mut self, queue: RawQueueId, sqe: Sqe, data: &[u8]) -> RawResponse {
        let mut buffer = self.host.take(data.len()).expect("host memory");
        buffer.as_mut_slice().copy_from_slice(data);
        let sgl = self.keyed(&buffer, data.len());
        let response = self.call(queue, sqe.sgl(sgl));
        self.host.give(buffer);
        response
    }

    /// A command whose data the target sends.
    pub(crate) fn call_for(&mut self, queue: RawQueueId, sqe: Sqe, len: usize) -> (RawResponse, Vec<u8>) {
        let mut buffer = self.host.take(len).expect("host memory");
        buffer.as_mut_slice().fill(0xee);
        let sgl = self.keyed(&buffer, len);
        let response = self.call(queue, sqe.sgl(sgl));
        let bytes = buffer.as_slice().to_vec();
        self.host.give(buffer);
        (response, bytes)
    }

    /// What the controller says of itself (Identify, CNS 01h).
    pub(crate) fn identify_controller(&mut self, admin: RawQueueId) -> wire::IdentifyController {
        let (response, bytes) = self.call_for(admin, wire::identify(1, 0, 0), 4096);
        assert!(response.status().is_success(), "Identify: {}", response.status());
        wire::IdentifyController::read(&bytes, 4096)
    }

    pub(crate) fn connect_data(&self, cntlid: u16) -> [u8; 1024] {
        wire::connect_data(&self.hostid, cntlid, &self.subnqn, &self.hostnqn)
    }

    /// The Connect command on an admin queue.
    pub(crate) fn connect_admin(&mut self, queue: RawQueueId) -> RawResponse {
        let (data, sqe) = (self.connect_data(0xffff), wire::connect(0, 31, self.kato_ms));
        let response = self.call_with(queue, sqe, &data);
        if response.status().is_success() {
            self.cntlid = response.dword0() as u16;
        }
        response
    }

    /// The Connect command on an I/O queue.
    pub(crate) fn connect_io(&mut self, queue: RawQueueId, qid: u16, sqsize: u16) -> RawResponse {
        let data = self.connect_data(self.cntlid);
        self.call_with(queue, wire::connect(qid, sqsize, 0), &data)
    }

    pub(crate) fn enable(&mut self, admin: RawQueueId) {
        assert!(self.call(admin, wire::property_set(0x14, 0x0046_0001)).status().is_success());
        let deadline = Instant::now() + LIMIT;
        while self.call(admin, wire::property_get(0x1c, false)).dword0() & 1 == 0 {
            assert!(Instant::now() < deadline, "the controller does not become ready");
        }
    }

    pub(crate) fn admin_up(&mut self) -> RawQueueId {
        let admin = self.good_queue(0, 32);
        let response = self.connect_admin(admin);
        assert!(response.status().is_success(), "{}", response.status());
        self.enable(admin);
        admin
    }

    pub(crate) fn io_up(&mut self, qid: u16, entries: u16) -> RawQueueId {
        let io = self.good_queue(qid, entries);
        let response = self.connect_io(io, qid, entries - 1);
        assert!(response.status().is_success(), "{}", response.status());
        io
    }

    pub(crate) fn bring_up(&mut self) -> (RawQueueId, RawQueueId) {
        let admin = self.admin_up();
        (admin, self.io_up(1, 32))
    }

    pub(crate) fn write(&mut self, io: RawQueueId, nsid: u32, slba: u64, bytes: &[u8]) -> Status {
        let sqe = wire::block_command(1, nsid, slba, (bytes.len() / BLOCK) as u32);
        self.call_with(io, sqe, bytes).status()
    }

    pub(crate) fn read(&mut self, io: RawQueueId, nsid: u32, slba: u64, blocks: u32) -> Result<Vec<u8>, Status> {
        let sqe = wire::block_command(2, nsid, slba, blocks);
        let (response, bytes) = self.call_for(io, sqe, blocks as usize * BLOCK);
        if response.status().is_success() { Ok(bytes) } else { Err(response.status()) }
    }

    /// The queue answers a harmless command.
    pub(crate) fn alive(&mut self, io: RawQueueId) {
        let status = self.call(io, Sqe::new(0).nsid(2)).status();
        assert!(status.is_success(), "flush: {status}");
    }
}

/// A Keep Alive Timeout that a starved machine can exceed, in milliseconds.
pub(crate) const SHORT_KATO: u32 = 1000;

/// How long a host that had to say something within [`SHORT_KATO`] said nothing.
pub(crate) struct Silence {
    /// The latest command was sent after this.
    since: Instant,
    longest: Duration,
    on_purpose: bool,
}

impl Silence {
    /// A command of the host, from before it is sent until it is answered.
    pub(crate) fn broken_by<T>(&mut self, command: impl FnOnce() -> T) -> T {
        let sent = Instant::now();
        let answer = command();
        self.longest = self.longest();
        self.since = sent;
        answer
    }

    /// From now on the host is silent because the test wants it to be; when its latest command was sent.
    pub(crate) fn begins(&mut self) -> Instant {
        self.longest = self.longest();
        self.on_purpose = true;
        self.since
    }

    /// The longest that the test did not want.
    fn longest(&self) -> Duration {
        if self.on_purpose { self.longest } else { self.longest.max(self.since.elapsed()) }
    }
}

/// Runs what a host with [`SHORT_KATO`] does and is not to lose its association over. Where a starved machine has kept the host
/// itself silent for longer than that, a failure says nothing about the target: then it runs anew, three times at most.
pub(crate) fn within_short_kato(mut body: impl FnMut(&mut Silence)) {
    for left in (0..3).rev() {
        let mut silence = Silence { since: Instant::now(), longest: Duration::ZERO, on_purpose: false };
        let Err(failure) = catch_unwind(AssertUnwindSafe(|| body(&mut silence))) else { return };
        let longest = silence.longest();
        if left == 0 || longest <= Duration::from_millis(SHORT_KATO.into()) {
            resume_unwind(failure);
        }
        eprintln!("anew: the host itself was silent for {longest:?}");
    }
}

/// Waits until what exists on an in-process fabric is what it was.
pub(crate) fn settles(local: &Local, what: &str, expected: impl Fn(&LocalCounters) -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !expected(&local.counters()) {
        assert!(Instant::now() < deadline, "{what}: {:?}", local.counters());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until stalled storage has so many operations; this host serves the target's READs meanwhile.
pub(crate) fn until_held<R: Rig>(faults: &FaultControl, raw: &mut Raw<R>, operations: usize) {
    until(&format!("the storage has {operations} operations"), || {
        raw.host.turn();
        faults.held() == operations
    });
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Both codes compared without Do Not Retry.
#[track_caller]
pub(crate) fn assert_status(response: &RawResponse, expected: Status, what: &str) {
    assert_eq!(response.status().code(), expected.code(), "{what}: {}", response.status());
}
