//! Zoned namespaces on storage that takes zones that lie side by side at once: what an action on all zones asks of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use farside::backend::{
    Backend, BackendError, BackendInfo, Io, IoDone, IoOp, IoQueue, Memory, QueueContext, Submit, ZoneWork,
};
use farside::host::wire::Sqe;
use farside::host::zones;
use nvme::Status;
use nvme::zns::{Geometry, Zone, ZoneState, Zones};

use crate::raw_zoned::{CAPACITY, CLOSE, Host, IMPLICITLY_OPENED, OPEN, RESET, ZONE, ZONES, Zoned, is, ok, pattern};
use crate::rig::{BLOCK, LIMIT, Rig};

/// Zones at a time.
const RUN: u32 = 8;

/// What the storage was asked to do to zones: the first, and how many.
type Asked = Arc<Mutex<Vec<(u64, u64)>>>;

/// Where the storage holds the thread that brings it an action on this zone, until it is let go.
#[derive(Debug)]
struct Gate {
    zone: AtomicU64,
    held: AtomicBool,
}

impl Gate {
    const OPEN: u64 = u64::MAX;

    fn close(&self, zone: u64) {
        self.held.store(false, Ordering::Release);
        self.zone.store(zone, Ordering::Release);
    }

    fn open(&self) {
        self.zone.store(Self::OPEN, Ordering::Release);
    }

    fn pass(&self, zone: u64) {
        // Not for ever: a test that failed lets its target end.
        let end = Instant::now() + LIMIT;
        while self.zone.load(Ordering::Acquire) == zone && Instant::now() < end {
            self.held.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self { zone: AtomicU64::new(Self::OPEN), held: AtomicBool::new(false) }
    }
}

/// Memory, with zones beside.
#[derive(Debug)]
struct Runs {
    memory: Memory,
    zoned: Arc<farside::backend::Zoned>,
    asked: Asked,
    gate: Arc<Gate>,
}

struct RunsQueue {
    memory: Box<dyn IoQueue>,
    zoned: Arc<farside::backend::Zoned>,
    asked: Asked,
    gate: Arc<Gate>,
}

impl Backend for Runs {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    fn zoned(&self) -> Option<Arc<farside::backend::Zoned>> {
        Some(Arc::clone(&self.zoned))
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let (zoned, asked, gate) = (Arc::clone(&self.zoned), Arc::clone(&self.asked), Arc::clone(&self.gate));
        Ok(Box::new(RunsQueue { memory: self.memory.open_queue(context)?, zoned, asked, gate }))
    }
}

impl IoQueue for RunsQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let IoOp::Zone { offset, len, work } = io.op else { return self.memory.submit(io) };
        let zone_size = self.zoned.zone_size();
        let (first, count) = (self.zoned.zone_at(offset), len / zone_size);
        self.gate.pass(first.into());
        let mut zones = self.zoned.zones();
        for zone in (first..).take(count as usize) {
            match work {
                ZoneWork::Act(action) => zones.end_action(zone, action, true),
                ZoneWork::Look => zones.trust(zone),
            }
        }
        if matches!(work, ZoneWork::Act(_)) {
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push((first.into(), count));
        }
        Submit::Done(IoDone { token: io.token, result: Ok(()), data: io.data })
    }
}

fn of<R: Rig>(zone_blocks: u64, zones: Vec<Zone>, run: u32) -> (Zoned<R>, Asked, Arc<Gate>) {
    let memory = Memory::new(zones.len() as u64 * zone_blocks * BLOCK as u64);
    let geometry = Geometry { zone_blocks, max_open: 0, max_active: 0 };
    let zones = Zones::new(geometry, zones).expect("zones");
    let zoned = Arc::new(farside::backend::Zoned::new(zones, BLOCK as u32).in_runs_of(run));
    let (asked, gate) = (Asked::default(), Arc::<Gate>::default());
    let runs = Runs { memory, zoned, asked: Arc::clone(&asked), gate: Arc::clone(&gate) };
    (Zoned::on(Arc::new(runs)), asked, gate)
}

/// Zones 0 to 19 but 7 have a block.
fn start<R: Rig>() -> (Zoned<R>, Asked) {
    let empty = Zone { state: ZoneState::Empty, capacity: CAPACITY, written: 0 };
    let (zoned, asked, _) = of::<R>(ZONE, vec![empty; ZONES as usize], RUN);
    let mut host = zoned.host(9);
    (0..20)
        .filter(|zone| *zone != 7)
        .for_each(|zone| assert_eq!(host.append(zone, &pattern(zone, 1)), Ok(zone * ZONE)));
    (zoned, asked)
}

fn taken(asked: &Asked) -> Vec<(u64, u64)> {
    std::mem::take(&mut *asked.lock().unwrap_or_else(PoisonError::into_inner))
}

fn eventually(mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !happened() {
        assert!(Instant::now() < end, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn all_zones_are_changed_side_by_side<R: Rig>() {
    let (zoned, asked) = start::<R>();
    let [mut host, mut other] = [1, 2].map(|identity| zoned.host(identity));
    ok(host.all(CLOSE));
    assert_eq!(taken(&asked), [(0, 7), (8, 8), (16, 4)]);
    assert_eq!(host.report(0, 64, 4, false).0, 19, "closed");
    ok(host.all(OPEN));
    assert_eq!(taken(&asked), [(0, 7), (8, 8), (16, 4)]);
    assert_eq!(host.report(0, 64, 3, false).0, 19, "opened");
    ok(host.all(CLOSE));
    taken(&asked);
    // Somebody is at work on a zone in the middle.
    zoned.faults.stall_writes();
    let bytes = pattern(1, 2);
    let mut buffer = other.raw.host.take(bytes.len()).expect("memory");
    buffer.as_mut_slice().copy_from_slice(&bytes);
    let (append, reset) = (other.raw.cid(), host.raw.cid());
    let sqe = zones::append(1, 10 * ZONE, 2).sgl(other.raw.keyed(&buffer, bytes.len()));
    other.raw.host.send(other.io, &sqe.cid(append).0).expect("sent");
    // Who asks also gives the data that the append is of.
    eventually(|| other.report(10 * ZONE, 128, 0, true).1[0].state == IMPLICITLY_OPENED);
    host.raw.host.send(host.io, &zones::send(1, None, RESET).cid(reset).0).expect("sent");
    eventually(|| asked.lock().unwrap_or_else(PoisonError::into_inner).len() > 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(taken(&asked), [(0, 7), (8, 2)], "up to there");
    zoned.faults.release();
    ok(other.raw.host.response(other.io, LIMIT).expect("an answer").status());
    ok(host.raw.host.response(host.io, LIMIT).expect("an answer").status());
    other.raw.host.give(buffer);
    assert_eq!(taken(&asked), [(10, 8), (18, 2)]);
    assert_eq!(host.report(0, 64, 1, false).0, ZONES, "empty");
    (0..ZONES).for_each(|zone| assert_eq!(other.append(zone, &pattern(zone, 1)), Ok(zone * ZONE)));
}

pub(crate) fn runs_that_fail_leave_every_zone_usable<R: Rig>() {
    let (zoned, asked) = start::<R>();
    let mut host = zoned.host(1);
    zoned.faults.fail_next(1);
    is(host.all(RESET), Status::WRITE_FAULT);
    assert_eq!(taken(&asked), []);
    for zone in 0..ZONES {
        let before = u64::from(zone < 20 && zone != 7);
        assert_eq!(host.append(zone, &pattern(zone, 1)), Ok(zone * ZONE + before));
    }
    zoned.faults.fail_next(1);
    is(host.all(RESET), Status::WRITE_FAULT);
    // Of the first eight it is not known how they are; for a reset that need not be.
    ok(host.all(RESET));
    assert_eq!(host.report(0, 64, 1, false).0, ZONES, "empty");
    assert_eq!(taken(&asked), [(0, 8), (8, 8), (16, 8), (24, 8)]);
}

pub(crate) fn commands_are_answered_in_the_middle_of_an_action_on_all_zones<R: Rig>() {
    let closed = Zone { state: ZoneState::Closed, capacity: 8, written: 1 };
    let (zoned, _, gate) = of::<R>(8, vec![closed; 50_000], 1);
    let mut host = zoned.host(1);
    // The network may take longer to bring the flush than the action takes when its time has come.
    let mut actions = [OPEN, CLOSE].into_iter().cycle();
    eventually(|| actions.next().is_some_and(|action| is_overtaken(&mut host, &gate, action)));
}

/// Whether a flush that is sent when an action on all zones is at its thousandth is answered before it.
fn is_overtaken<R: Rig>(host: &mut Host<R>, gate: &Gate, action: u8) -> bool {
    let (all, flush) = (host.raw.cid(), host.raw.cid());
    gate.close(1000);
    host.raw.host.send(host.io, &zones::send(1, None, action).cid(all).0).expect("sent");
    eventually(|| {
        host.raw.host.turn();
        gate.held.load(Ordering::Acquire)
    });
    host.raw.host.send(host.io, &Sqe::new(0).nsid(1).cid(flush).0).expect("sent");
    gate.open();
    let answers = [(); 2].map(|()| {
        let response = host.raw.host.response(host.io, LIMIT).expect("an answer");
        ok(response.status());
        response.cid()
    });
    assert!(answers.contains(&all) && answers.contains(&flush), "{answers:?} of {all} and {flush}");
    answers[0] == flush
}
