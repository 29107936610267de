//! Zoned namespaces on storage that takes zones that lie side by side at once: what an action on all zones asks of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside::backend::{
    Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, Memory, QueueContext, Submit, ZoneWork,
};
use farside::host::wire::Sqe;
use farside::host::zones;
use nvme::Status;
use nvme::zns::{Geometry, Zone, ZoneState, Zones};

use crate::raw_zoned::{
    CAPACITY, CLOSE, CLOSED, EMPTY, FINISH, FULL, Host, IMPLICITLY_OPENED, OPEN, RESET, ZONE, ZONES, Zoned, is, ok,
    pattern,
};
use crate::rig::{BLOCK, LIMIT, Rig};

/// Zones at a time.
const RUN: u32 = 8;

/// What the storage says when it is asked how a zone is.
#[derive(Clone, Copy, Debug, Default)]
enum Says {
    /// That it is as it is known.
    #[default]
    AsKnown,
    /// This.
    State(Zone),
    Nothing,
}

/// What the storage was asked, and how it behaves.
#[derive(Debug, Default)]
struct Habits {
    /// What it did to zones: the first, and how many.
    asked: Vec<(u64, u64)>,
    says: Says,
    /// It fails at this zone, when those before are done.
    bad: Option<u32>,
}

type Asked = Arc<Mutex<Habits>>;

fn habits(asked: &Asked) -> MutexGuard<'_, Habits> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory, with zones beside.
#[derive(Debug)]
struct Runs {
    memory: Memory,
    zoned: Arc<farside::backend::Zoned>,
    asked: Asked,
}

struct RunsQueue {
    memory: Box<dyn IoQueue>,
    zoned: Arc<farside::backend::Zoned>,
    asked: Asked,
}

impl Backend for Runs {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    fn zoned(&self) -> Option<Arc<farside::backend::Zoned>> {
        Some(Arc::clone(&self.zoned))
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let (zoned, asked) = (Arc::clone(&self.zoned), Arc::clone(&self.asked));
        Ok(Box::new(RunsQueue { memory: self.memory.open_queue(context)?, zoned, asked }))
    }
}

impl IoQueue for RunsQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let IoOp::Zone { offset, len, work } = io.op else { return self.memory.submit(io) };
        let zone_size = self.zoned.zone_size();
        let (first, count) = (self.zoned.zone_at(offset), len / zone_size);
        let (mut zones, mut habits) = (self.zoned.zones(), habits(&self.asked));
        let mut result = Ok(());
        for zone in (first..).take(count as usize) {
            let mark = zones.mark();
            match (work, habits.says) {
                (ZoneWork::Act(action), _) if habits.bad == Some(zone) => {
                    result = Err(IoError::Write);
                    let left = zone..first + count as u32;
                    for zone in left.clone() {
                        zones.end_action(zone, action, false);
                    }
                    left.for_each(|zone| zones.trust(zone));
                    break;
                }
                (ZoneWork::Act(action), _) => zones.end_action(zone, action, true),
                (ZoneWork::Look, Says::AsKnown) => zones.trust(zone),
                (ZoneWork::Look, Says::State(said)) => zones.learn(mark, zone, [Some(said)]),
                (ZoneWork::Look, Says::Nothing) => {}
            }
        }
        if matches!(work, ZoneWork::Act(_)) {
            habits.asked.push((first.into(), count));
        }
        Submit::Done(IoDone { token: io.token, result, data: io.data })
    }
}

fn of<R: Rig>(zone_blocks: u64, zones: Vec<Zone>, run: u32, max_active: u32) -> (Zoned<R>, Asked) {
    let memory = Memory::new(zones.len() as u64 * zone_blocks * BLOCK as u64);
    let geometry = Geometry { zone_blocks, max_open: 0, max_active };
    let zones = Zones::new(geometry, zones).expect("zones");
    let zoned = Arc::new(farside::backend::Zoned::new(zones, BLOCK as u32).in_runs_of(run));
    let asked = Asked::default();
    (Zoned::on(Arc::new(Runs { memory, zoned, asked: Arc::clone(&asked) })), asked)
}

const ALL_EMPTY: [Zone; ZONES as usize] =
    [Zone { state: ZoneState::Empty, capacity: CAPACITY, written: 0 }; ZONES as usize];

/// Zones 0 to 19 but 7 have a block.
fn start<R: Rig>() -> (Zoned<R>, Asked) {
    let (zoned, asked) = of::<R>(ZONE, ALL_EMPTY.to_vec(), RUN, 0);
    let mut host = zoned.host(9);
    (0..20)
        .filter(|zone| *zone != 7)
        .for_each(|zone| assert_eq!(host.append(zone, &pattern(zone, 1)), Ok(zone * ZONE)));
    (zoned, asked)
}

fn taken(asked: &Asked) -> Vec<(u64, u64)> {
    std::mem::take(&mut habits(asked).asked)
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
    eventually(|| habits(&asked).asked.len() > 1);
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

pub(crate) fn runs_that_fail_half_way_give_back_what_the_storage_did<R: Rig>() {
    let (zoned, asked) = of::<R>(ZONE, ALL_EMPTY.to_vec(), RUN, 4);
    let mut host = zoned.host(1);
    let fill = |host: &mut Host<R>, zone| assert_eq!(host.append(zone, &pattern(zone, 1)), Ok(zone * ZONE));
    (0..4).for_each(|zone| fill(&mut host, zone));
    is(host.append(8, &pattern(8, 1)).unwrap_err(), Status::TOO_MANY_ACTIVE_ZONES);
    habits(&asked).bad = Some(2);
    is(host.all(RESET), Status::WRITE_FAULT);
    assert_eq!(taken(&asked), [(0, 4)]);
    // Two were reset, and the storage said so of them and of the others: there is room for two, without a look at them.
    (8..10).for_each(|zone| fill(&mut host, zone));
    is(host.append(10, &pattern(10, 1)).unwrap_err(), Status::TOO_MANY_ACTIVE_ZONES);
    habits(&asked).says = Says::Nothing;
    assert_eq!(host.append(3, &pattern(3, 1)), Ok(3 * ZONE + 1), "known too");
}

pub(crate) fn actions_on_all_zones_ask_of_those_that_are_not_known<R: Rig>() {
    let (zoned, asked) = of::<R>(ZONE, ALL_EMPTY.to_vec(), RUN, 0);
    let mut host = zoned.host(1);
    for (zone, action, state) in [(3, CLOSE, CLOSED), (4, FINISH, FULL)] {
        zoned.faults.fail_next(1);
        is(host.append(zone, &pattern(zone, 4)).unwrap_err(), Status::WRITE_FAULT);
        // A part of it landed.
        habits(&asked).says = Says::State(Zone { state: ZoneState::ImplicitlyOpened, capacity: CAPACITY, written: 2 });
        ok(host.all(action));
        habits(&asked).says = Says::AsKnown;
        assert_eq!((taken(&asked), host.zone(zone).0), (vec![(zone, 1)], state));
        ok(host.act(zone, RESET));
        taken(&asked);
    }
    // Nothing of it did: then the zone is none of those that are meant.
    zoned.faults.fail_next(1);
    is(host.append(5, &pattern(5, 4)).unwrap_err(), Status::WRITE_FAULT);
    ok(host.all(FINISH));
    assert_eq!((taken(&asked), host.zone(5)), (vec![], (EMPTY, 0)));
}

pub(crate) fn zones_that_the_storage_says_nothing_of_take_resets_alone<R: Rig>() {
    let (zoned, asked) = of::<R>(ZONE, ALL_EMPTY.to_vec(), RUN, 0);
    let mut host = zoned.host(1);
    assert_eq!(host.append(3, &pattern(3, 1)), Ok(3 * ZONE));
    zoned.faults.fail_next(1);
    is(host.append(3, &pattern(3, 4)).unwrap_err(), Status::WRITE_FAULT);
    habits(&asked).says = Says::Nothing;
    for _ in 0..2 {
        is(host.append(3, &pattern(3, 4)).unwrap_err(), Status::WRITE_FAULT);
        is(host.write(3 * ZONE + 1, &pattern(3, 4)), Status::WRITE_FAULT);
        is(host.act(3, FINISH), Status::WRITE_FAULT);
        is(host.all(FINISH), Status::WRITE_FAULT);
    }
    assert_eq!(taken(&asked), []);
    assert_eq!(host.append(4, &pattern(4, 1)), Ok(4 * ZONE), "another");
    ok(host.act(3, RESET));
    assert_eq!(host.append(3, &pattern(3, 1)), Ok(3 * ZONE));
}

pub(crate) fn commands_are_answered_in_the_middle_of_an_action_on_all_zones<R: Rig>() {
    let (zoned, _) = of::<R>(8, vec![Zone { state: ZoneState::Closed, capacity: 8, written: 1 }; 50_000], 1, 0);
    let mut host = zoned.host(1);
    // One may come together with the action. Others come when that is answered: then the action is under way. On a busy machine
    // this host may not have its turn while it is, so there is a try until it has.
    let deadline = Instant::now() + 3 * LIMIT;
    for action in [OPEN, CLOSE].into_iter().cycle() {
        let answered = answered_before(&mut host, action);
        if answered > 2 {
            break;
        }
        assert!(Instant::now() < deadline, "{answered} answers");
    }
}

/// Flushes that are answered, one after the other, before an action on all zones is.
fn answered_before<R: Rig>(host: &mut Host<R>, action: u8) -> usize {
    let all = host.raw.cid();
    host.raw.host.send(host.io, &zones::send(1, None, action).cid(all).0).expect("sent");
    let (mut answers, mut over) = (0, false);
    loop {
        let flush = host.raw.cid();
        host.raw.host.send(host.io, &Sqe::new(0).nsid(1).cid(flush).0).expect("sent");
        loop {
            let response = host.raw.host.response(host.io, LIMIT).expect("an answer");
            ok(response.status());
            over |= response.cid() == all;
            if response.cid() == flush {
                break;
            }
        }
        if over {
            return answers;
        }
        answers += 1;
    }
}
