//! The well-mannered host: what it learns, and data that are right under any load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::backend::{self, BackendSpec, Null, Source};
use farside::host::bench::{self, BenchOptions, Pattern, Progress};
use farside::host::{
    Command, Done, Host, HostError, HostErrorKind, HostOptions, IoFailure, Op, Reconnect, discover, wire,
};
use farside::mem::Buffer;
use farside::target::{NamespaceSpec, Options, SubsystemSpec, Target};
use nvme::Status;

use farside::rdma::soft::Soft;

use crate::rig::{BLOCK, BLOCKS, LIMIT, NQN, OTHER_NQN, Rig, Setup, SoftRig, small};
use crate::skipped::skipped;

fn host<R: Rig>(setup: &Setup<R>, options: HostOptions) -> Host<R::P> {
    connect(&setup.rig, NQN, options).expect("a connection")
}

fn connect<R: Rig>(rig: &R, nqn: &str, options: HostOptions) -> Result<Host<R::P>, HostError> {
    let (provider, source) = rig.host();
    Host::connect(provider, rig.address(), nqn, HostOptions { source, ..options })
}

fn log<R: Rig>(rig: &R) -> Vec<wire::DiscoveryEntry> {
    let (provider, source) = rig.host();
    discover(provider, rig.address(), HostOptions { source, ..HostOptions::default() }).expect("a log")
}

pub(crate) fn discovery_lists_what_is_served_and_identify_tells_it<R: Rig>() {
    let setup = Setup::<R>::start();
    let entries = log(&setup.rig);
    for nqn in [NQN, OTHER_NQN] {
        let entry = entries.iter().find(|entry| entry.subnqn == nqn).expect("listed");
        assert_eq!(entry.address(), Some(setup.rig.address()));
    }
    let mut host = host(&setup, HostOptions::default());
    assert_eq!(host.controller().subnqn, NQN);
    assert_eq!((host.controller().kind, host.max_transfer()), (1, 1 << 20));
    assert_eq!(host.active_namespaces().expect("a list"), [1, 2, 3]);
    let disk = host.namespace(1).expect("a namespace");
    assert_eq!((disk.blocks, disk.block_size), (BLOCKS, BLOCK as u32));
    let uuid = host.namespace_uuid(1).expect("descriptors").expect("a UUID");
    assert_eq!(uuid, disk.nguid);
    assert!(host.namespace(4).is_err());
    let error =
        connect(&setup.rig, "nqn.2026-11.io.farside:nothing", HostOptions::default()).expect_err("no such subsystem");
    assert_eq!(error.status().map(Status::code), Some(Status::CONNECT_INVALID_PARAMETERS.code()));
    assert!(error.to_string().contains("subsystem NQN"), "{error}");
}

pub(crate) fn hundred_subsystems_are_discovered_in_pieces<R: Rig>() {
    let rig = R::new();
    let mut builder = Target::builder().options(small()).listen(rig.address());
    for at in 0..100 {
        let namespace = NamespaceSpec::new(1, Arc::new(Null::new(1 << 30)));
        builder =
            builder.subsystem(SubsystemSpec::new(format!("nqn.2026-11.io.farside:many-{at}")).namespace(namespace));
    }
    let _target = builder.start(rig.target()).expect("the target starts");
    let entries = log(&rig);
    for at in 0..100 {
        let nqn = format!("nqn.2026-11.io.farside:many-{at}");
        assert_eq!(entries.iter().filter(|entry| entry.subnqn == nqn).count(), 1, "{nqn}");
    }
}

pub(crate) fn blocking_calls_store_and_fetch<R: Rig>() {
    let setup = Setup::<R>::start();
    let mut host = host(&setup, HostOptions::default());
    let disk = host.namespace(1).expect("a namespace");
    let bytes: Vec<u8> = (0..(3 << 20) + 512u32).map(|at| (at / 5) as u8).collect();
    host.write_at(&disk, 512, &bytes).expect("written");
    host.flush(&disk).expect("flushed");
    let mut back = vec![0; bytes.len()];
    host.read_at(&disk, 512, &mut back).expect("read");
    assert!(back == bytes);
    let error = host.read_at(&disk, disk.bytes(), &mut [0; 512]).expect_err("past the end");
    assert_eq!(error.status().map(Status::code), Some(Status::LBA_OUT_OF_RANGE.code()));
    let error = host.write_at(&disk, 100, &[0; 512]).expect_err("unaligned");
    assert!(matches!(error.kind, HostErrorKind::Usage(_)));
}

/// xorshift64*: the seed alone decides.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }
}

/// What a namespace should hold, and the ranges that commands under way use.
struct Model {
    blocks: Vec<u64>,
    busy: Vec<bool>,
}

/// The bytes of a block that was written as number `version`; 0 = zeroes.
fn block(slba: u64, version: u64) -> impl Iterator<Item = u8> {
    let mut state = Random(version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ slba | 1);
    (0..BLOCK / 8).flat_map(move |_| if version == 0 { [0; 8] } else { state.next().to_le_bytes() })
}

struct Load<'a, P: farside::rdma::Provider> {
    host: &'a mut Host<P>,
    model: Model,
    random: Random,
    nsid: u32,
    versions: u64,
    /// By token: operation, first block, blocks, version.
    under_way: Vec<Option<(Op, u64, u64, u64)>>,
    most_blocks: u64,
    counts: [u64; 6],
}

impl<P: farside::rdma::Provider> Load<'_, P> {
    /// Submits until every queue is full or no range is free.
    fn fill(&mut self, left: &mut u64) {
        for queue in 0..self.host.queues() {
            while *left > 0 && self.host.room(queue) > 0 {
                let Some(token) = self.under_way.iter().position(Option::is_none) else { return };
                let Some(command) = self.command(token as u64) else { return };
                self.host.submit(queue, command).map_err(|_| ()).expect("there is room");
                *left -= 1;
            }
        }
    }

    fn command(&mut self, token: u64) -> Option<Command> {
        let total = self.model.blocks.len() as u64;
        let blocks = match self.random.below(4) {
            0 => 1,
            1 => 8.min(self.most_blocks),
            _ => 1 + self.random.below(self.most_blocks),
        };
        let slba = self.random.below(total - blocks);
        let range = slba as usize..(slba + blocks) as usize;
        if self.model.busy[range.clone()].iter().any(|busy| *busy) {
            return None;
        }
        let op = match self.random.below(20) {
            0..8 => Op::Read,
            8..15 => Op::Write { fua: self.random.below(4) == 0 },
            15 => Op::WriteZeroes { deallocate: self.random.below(2) == 0 },
            16 => Op::Deallocate,
            17 | 18 => Op::Compare,
            _ => Op::Flush,
        };
        self.versions += 1;
        let data = match op {
            Op::Flush | Op::WriteZeroes { .. } => None,
            Op::Deallocate => {
                let mut buffer = self.host.take_buffer(16)?;
                buffer.as_mut_slice().copy_from_slice(&wire::dsm_range(slba, blocks as u32));
                Some(buffer)
            }
            _ => Some(self.host.take_buffer(blocks as usize * BLOCK)?),
        };
        let mut command = Command { token, op, nsid: self.nsid, slba, blocks: blocks as u32, data };
        match (op, &mut command.data) {
            (Op::Write { .. }, Some(buffer)) => fill(buffer, slba, |_| self.versions),
            (Op::Compare, Some(buffer)) => fill(buffer, slba, |at| self.model.blocks[at as usize]),
            (Op::Read, Some(buffer)) => buffer.as_mut_slice().fill(0xee),
            (Op::Deallocate, _) => command.blocks = 1,
            _ => {}
        }
        if op != Op::Flush {
            self.model.busy[range].fill(true);
        }
        self.under_way[token as usize] = Some((op, slba, blocks, self.versions));
        Some(command)
    }

    /// Takes what is done and holds it against the model.
    fn take(&mut self) -> usize {
        let mut count = 0;
        while let Some(Done { token, result, data, .. }) = self.host.next_done() {
            count += 1;
            let (op, slba, blocks, version) = self.under_way[token as usize].take().expect("answered once");
            result.unwrap_or_else(|failure| panic!("{op:?} of {blocks} at {slba}: {failure}"));
            let range = slba as usize..(slba + blocks) as usize;
            let kind = match op {
                Op::Read => {
                    let bytes = data.as_ref().expect("a buffer").as_slice();
                    for (at, chunk) in (slba..).zip(bytes.chunks(BLOCK)) {
                        let expected: Vec<u8> = block(at, self.model.blocks[at as usize]).collect();
                        assert!(chunk == expected, "block {at} of a read of {blocks} at {slba}");
                    }
                    0
                }
                Op::Write { .. } => {
                    self.model.blocks[range.clone()].fill(version);
                    1
                }
                Op::WriteZeroes { .. } => {
                    self.model.blocks[range.clone()].fill(0);
                    2
                }
                Op::Deallocate => {
                    self.model.blocks[range.clone()].fill(0);
                    3
                }
                Op::Compare => 4,
                Op::Flush => 5,
            };
            self.counts[kind] += 1;
            if op != Op::Flush {
                self.model.busy[range].fill(false);
            }
            if let Some(buffer) = data {
                self.host.give_buffer(buffer);
            }
        }
        count
    }
}

fn fill(buffer: &mut Buffer, slba: u64, version: impl Fn(u64) -> u64) {
    for (at, chunk) in (slba..).zip(buffer.as_mut_slice().chunks_mut(BLOCK)) {
        chunk.iter_mut().zip(block(at, version(at))).for_each(|(to, from)| *to = from);
    }
}

/// A random mixed load against a model, all of it read back at the end.
pub(crate) fn mixed<P: farside::rdma::Provider>(
    host: &mut Host<P>,
    seed: u64,
    commands: u64,
    most_blocks: u64,
    mut disturb: impl FnMut(&mut Host<P>, u64),
) {
    println!("seed {seed}");
    let blocks = 16_384;
    let model = Model { blocks: vec![0; blocks], busy: vec![false; blocks] };
    let slots = host.queues() * host.depth();
    let mut load = Load {
        host,
        model,
        random: Random(seed | 1),
        nsid: 1,
        versions: 0,
        under_way: vec![None; slots],
        most_blocks,
        counts: [0; 6],
    };
    let mut left = commands;
    let mut answered = 0;
    let mut progress = Instant::now();
    while answered < commands {
        load.fill(&mut left);
        load.host.poll();
        let count = load.take() as u64;
        answered += count;
        if count > 0 {
            progress = Instant::now();
            disturb(load.host, answered);
        } else {
            if let Some(error) = load.host.failure() {
                panic!("after {answered} commands: {error}");
            }
            assert!(progress.elapsed() < LIMIT, "stuck after {answered} of {commands} commands, {left} not submitted");
            load.host.wait(Duration::from_millis(100));
        }
    }
    assert!(load.counts.iter().all(|count| *count > 0) || commands < 500, "{:?}", load.counts);
    // Everything once more, in order.
    load.most_blocks = 1;
    let expected = std::mem::take(&mut load.model.blocks);
    let disk = load.host.namespace(1).expect("a namespace");
    let mut bytes = vec![0; blocks * BLOCK];
    load.host.read_at(&disk, 0, &mut bytes).expect("a read");
    for (at, chunk) in (0u64..).zip(bytes.chunks(BLOCK)) {
        assert!(chunk == block(at, expected[at as usize]).collect::<Vec<u8>>(), "block {at} at the end");
    }
}

pub(crate) fn data_are_right_under_a_random_mixed_load<R: Rig>() {
    let base = HostOptions { io_queues: 2, queue_depth: 64, memory: 32 << 20, ..HostOptions::default() };
    let variants = [
        base.clone(),
        HostOptions { in_capsule: 0, ..base.clone() },
        HostOptions { descriptors: 16, ..base.clone() },
        HostOptions { invalidate: true, ..base.clone() },
        HostOptions { read_depth: 1, ..base.clone() },
        HostOptions { read_depth: 2, descriptors: 7, in_capsule: 0, ..base },
    ];
    for (seed, options) in (0x5eed..).zip(variants) {
        let setup = Setup::<R>::start();
        mixed(&mut host(&setup, options), seed, 4000, 128, |_, _| {});
    }
}

pub(crate) fn data_are_right_on_a_file<R: Rig>() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    let rig = R::new();
    let backend = backend::open(&BackendSpec::new(Source::File { path: path.clone(), size: Some(64 << 20) }));
    let namespace = NamespaceSpec { block_size: Some(512), ..NamespaceSpec::new(1, backend.expect("a file")) };
    let target = Target::builder()
        .options(small())
        .subsystem(SubsystemSpec::new(NQN).namespace(namespace))
        .listen(rig.address())
        .start(rig.target());
    let target = match target {
        Ok(target) => target,
        Err(error) => {
            skipped(&format!("this file system needs larger blocks: {error}"));
            return;
        }
    };
    let options = HostOptions { io_queues: 2, queue_depth: 64, memory: 32 << 20, ..HostOptions::default() };
    let mut host = connect(&rig, NQN, options).expect("a connection");
    mixed(&mut host, 0xf11e, 4000, 128, |_, _| {});
    let disk = host.namespace(1).expect("a namespace");
    let mut bytes = vec![0; 8 << 20];
    host.read_at(&disk, 0, &mut bytes).expect("a read");
    drop(host);
    target.shutdown();
    // The file itself holds the same bytes.
    let file = std::fs::read(path).expect("the file");
    assert!(file[..8 << 20] == bytes);
}

pub(crate) fn deepest_queue_is_served<R: Rig>() {
    let setup = Setup::<R>::start();
    let options = HostOptions { queue_depth: 1024, memory: 64 << 20, ..HostOptions::default() };
    mixed(&mut host(&setup, options), 0xdee9, 8000, 8, |_, _| {});
}

pub(crate) fn hundred_and_twenty_eight_queues_are_served<R: Rig>() {
    let options = Options { receive_slots: 128 * 16 + 256, ..small() };
    let setup = Setup::<R>::with(R::new(), options);
    let options =
        HostOptions { io_queues: 128, queue_depth: 16, in_capsule: 512, memory: 32 << 20, ..HostOptions::default() };
    let mut host = host(&setup, options);
    assert_eq!(host.queues(), 128);
    mixed(&mut host, 0x128, 8000, 8, |_, _| {});
}

pub(crate) fn tiny_pool_is_back_pressure_and_not_an_error<R: Rig>() {
    let options = Options { pool_size: 4 << 20, receive_slots: 128, reactors: 1, ..small() };
    let setup = Setup::<R>::with(R::new(), options);
    // Far more data at a time than the target has buffers.
    let options = HostOptions { queue_depth: 64, memory: 80 << 20, ..HostOptions::default() };
    mixed(&mut host(&setup, options), 0x7001, 600, 2048, |_, _| {});
}

pub(crate) fn lost_connections_heal_and_no_write_is_lost<R: Rig>() {
    let setup = Setup::<R>::start();
    let reconnect = Reconnect { first: Duration::from_millis(10), ..Reconnect::default() };
    let options = HostOptions {
        io_queues: 2,
        queue_depth: 32,
        memory: 32 << 20,
        reconnect: Some(reconnect),
        ..HostOptions::default()
    };
    let mut host = host(&setup, options);
    let mut next = 500;
    mixed(&mut host, 0x1057, 3000, 128, |host, answered| {
        if answered >= next {
            next += 500;
            host.drop_connections();
        }
    });
    let mut lost = 0;
    let mut back = 0;
    while let Some(event) = host.next_event() {
        match event {
            farside::host::HostEvent::Lost(_) => lost += 1,
            farside::host::HostEvent::Reconnected => back += 1,
            farside::host::HostEvent::Async(_) => {}
        }
    }
    assert!(lost >= 3 && lost == back, "lost {lost} times, back {back} times");
}

pub(crate) fn host_without_a_policy_tells_of_the_loss<R: Rig>() {
    let mut setup = Setup::<R>::start();
    let mut host = host(&setup, HostOptions::default());
    setup.faults.stall();
    let buffer = host.take_buffer(512).expect("a buffer");
    let command = Command { token: 5, op: Op::Read, nsid: 1, slba: 0, blocks: 1, data: Some(buffer) };
    host.submit(0, command).map_err(|_| ()).expect("there is room");
    host.poll();
    setup.faults.release();
    drop(setup.target.take());
    let done = host.run("the loss", LIMIT, |host| host.next_done()).expect("it is told");
    assert_eq!(done.token, 5);
    assert!(matches!(done.result, Ok(()) | Err(IoFailure::Lost(_))), "{:?}", done.result);
    host.run("the end", LIMIT, |host| host.failure().cloned()).expect("it gave up");
    assert!(host.submit(0, Command { token: 6, op: Op::Flush, nsid: 1, slba: 0, blocks: 0, data: None }).is_err());
}

pub(crate) fn bench_measures_and_verifies<R: Rig>() {
    let setup = Setup::<R>::start();
    for (word, mix, jobs, in_capsule) in [("randrw", 40, 2, 4096), ("write", 0, 1, 0), ("randread", 100, 1, 4096)] {
        let (provider, source) = setup.rig.host();
        let bench = BenchOptions {
            pattern: Pattern::parse(word, mix).expect("a word of fio's"),
            iodepth: 8,
            jobs,
            runtime: Duration::from_secs(20),
            operations: Some(2000),
            size: Some(4 << 20),
            verify: word != "randread",
            ..BenchOptions::default()
        };
        let options = HostOptions { source, in_capsule, ..HostOptions::default() };
        let progress = Progress::default();
        let report = bench::run(provider, setup.rig.address(), NQN, &options, &bench, &progress).expect("a report");
        assert_eq!(report.reads.operations + report.writes.operations, 2000, "{word}");
        assert_eq!(report.reads.errors + report.writes.errors, 0);
        assert_eq!(report.reads.bytes + report.writes.bytes, 2000 * 4096);
        assert_eq!(progress.done().2, 2000 * 4096);
        let expected = f64::from(mix) / 100.0;
        assert!(
            (report.reads.operations as f64 / 2000.0 - expected).abs() < 0.1,
            "{word}: {}",
            report.reads.operations
        );
        assert_eq!(report.verified > 0, bench.verify);
        let latency = if report.reads.operations > 0 { &report.reads.latency } else { &report.writes.latency };
        assert!(latency.min() > Duration::ZERO && latency.percentile(50.0) <= latency.max());
        println!("{word}: {:.0} IOPS", report.iops());
    }
    // What another one wrote is not what this one expects: the check does look.
    let (provider, source) = setup.rig.host();
    let bench = BenchOptions { block_size: 100, ..BenchOptions::default() };
    let options = HostOptions { source, ..HostOptions::default() };
    let error = bench::run(provider, setup.rig.address(), NQN, &options, &bench, &Progress::default());
    assert!(error.expect_err("not whole blocks").to_string().contains("block size"));
}

/// Several threads, each a host with connection management of its own, on one provider: each gets its own events.
pub(crate) fn threads_of_one_provider_connect_at_once() {
    let setup = Setup::<SoftRig>::start();
    for round in 0..5 {
        let (_, source) = setup.rig.host();
        let provider = Arc::new(Soft::new(8).expect("the software provider"));
        let bench = BenchOptions { jobs: 8, threads: 8, operations: Some(800), ..BenchOptions::default() };
        let options = HostOptions { source, ..HostOptions::default() };
        let report = bench::run(provider, setup.rig.address(), NQN, &options, &bench, &Progress::default());
        let report = report.unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(report.reads.operations >= 800 && report.reads.errors == 0, "{report:?}");
    }
}

pub(crate) fn errors_of_the_disk_reach_the_host_that_asked<R: Rig>() {
    let setup = Setup::<R>::start();
    let bystander = setup.bystander();
    let mut host = host(&setup, HostOptions::default());
    let disk = host.namespace(1).expect("a namespace");
    for _ in 0..10 {
        setup.faults.fail_next(1);
        let error = host.write_at(&disk, 0, &[1; 512]).expect_err("the disk fails");
        assert_eq!(error.status().map(Status::code), Some(Status::WRITE_FAULT.code()));
        setup.faults.fail_next(1);
        let error = host.read_at(&disk, 0, &mut [0; 512]).expect_err("the disk fails");
        assert_eq!(error.status().map(Status::code), Some(Status::UNRECOVERED_READ_ERROR.code()));
    }
    host.write_at(&disk, 0, &[1; 512]).expect("the disk is well again");
    bystander.check();
}
