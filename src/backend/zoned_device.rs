//! A zoned block device: data go through the ring, what is done to zones through ioctls, on a thread that may wait for them.
//!
//! Zones that hosts cannot be shown are refused: conventional ones, a smaller last one, write pointers that are no multiple of a
//! block. (The kernel's target refuses the same.)

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Receiver, Sender, unbounded};
use nvme::zns::{Geometry, Zone, ZoneAction, ZoneState, Zones};

use super::ioctl::{self, ZoneReport};
use super::open_file::OpenFile;
use super::ring::io_error;
use super::storage::Storage;
use super::zone_worker::{self, Job, Jobs};
use super::{
    Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit, Waker, ZoneWork,
    Zoned,
};

/// What the device's queue limits say of its zones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Most open zones; 0 is no limit.
    pub(super) max_open: u32,
    /// Most active zones; 0 is no limit.
    pub(super) max_active: u32,
    /// Bytes of the smallest write.
    pub(super) granularity: u32,
}

/// Why zones are refused, and what to do about it.
type Refused = (String, &'static str);

const OTHER_DEVICE: &str = "serve another device";

/// Whether zones of this kind can be shown to hosts: those that can be written anywhere are for hosts that know it.
pub(super) fn check_model(model: &str) -> Result<(), Refused> {
    if model == "host-managed" {
        Ok(())
    } else {
        Err((format!("has {model} zones, which namespaces have not"), OTHER_DEVICE))
    }
}

/// The zones of a device, if hosts can be shown them.
pub(super) fn read(file: &File, size: u64, model: &str, limits: Limits) -> Result<Zoned, Refused> {
    check_model(model)?;
    let failed =
        |error: io::Error| (format!("does not report its zones: {error}"), "see whether the device works (dmesg)");
    let zone_size = u64::from(ioctl::zone_sectors(file).map_err(failed)?) << SECTOR_SHIFT;
    let block = limits.granularity;
    if !matches!(block, 512 | 4096) {
        return Err((format!("is written in units of {block} bytes, which no namespace has"), OTHER_DEVICE));
    }
    if zone_size == 0 || !size.is_multiple_of(zone_size) {
        return Err((format!("has {size} bytes, which is no multiple of its zones of {zone_size}"), OTHER_DEVICE));
    }
    let reports = report(file, 0, size / zone_size).map_err(failed)?;
    let zones = reports.iter().map(|report| zone_of(report, block)).collect::<Result<Vec<_>, _>>()?;
    let Limits { max_open, max_active, .. } = limits;
    let geometry = Geometry { zone_blocks: zone_size / u64::from(block), max_open, max_active };
    let zones = Zones::new(geometry, zones).map_err(|error| (error.to_string(), OTHER_DEVICE))?;
    if zones.blocks() != size / u64::from(block) {
        return Err((format!("reports {} zones, which are not all of it", zones.count()), OTHER_DEVICE));
    }
    Ok(Zoned::new(zones, block).in_runs_of(RUN))
}

/// Zones from one on, a piece at a time.
fn report(file: &File, first_sector: u64, count: u64) -> io::Result<Vec<ZoneReport>> {
    let mut all = Vec::new();
    let mut sector = first_sector;
    while (all.len() as u64) < count {
        let want = (count - all.len() as u64).min(PIECE);
        let piece = ioctl::report_zones(file, sector, want as u32)?;
        let Some(last) = piece.last() else { break };
        sector = last.start + last.len;
        all.extend(piece);
    }
    Ok(all)
}

/// A zone in blocks.
fn zone_of(report: &ZoneReport, block: u32) -> Result<Zone, Refused> {
    if report.kind != SEQUENTIAL_WRITE_REQUIRED {
        let reason = format!("has a zone that is not written in sequence, at sector {}", report.start);
        return Err((reason, "serve a device, or a part of it, without conventional zones"));
    }
    let state = match report.condition {
        0x1 => ZoneState::Empty,
        0x2 => ZoneState::ImplicitlyOpened,
        0x3 => ZoneState::ExplicitlyOpened,
        0x4 => ZoneState::Closed,
        0xd => ZoneState::ReadOnly,
        0xe => ZoneState::Full,
        0xf => ZoneState::Offline,
        other => return Err((format!("has a zone in a state {other:#x} that is not known"), OTHER_DEVICE)),
    };
    let per_block = u64::from(block >> SECTOR_SHIFT);
    let written = match state {
        ZoneState::Empty => 0,
        ZoneState::ImplicitlyOpened | ZoneState::ExplicitlyOpened | ZoneState::Closed => {
            report.write_pointer.saturating_sub(report.start)
        }
        ZoneState::Full | ZoneState::ReadOnly | ZoneState::Offline => report.capacity,
    };
    if !written.is_multiple_of(per_block) || !report.capacity.is_multiple_of(per_block) {
        let reason =
            format!("has a zone, at sector {}, that ends or was written at no multiple of {block} bytes", report.start);
        return Err((reason, "reset the zone (blkzone reset)"));
    }
    Ok(Zone { state, capacity: report.capacity / per_block, written: written / per_block })
}

/// A zone in blocks, once hosts use it, and what is to be said about it. One that somebody wrote a part of a block to takes no
/// more until it is reset, and of one that makes no sense there is nothing to be known.
fn zone_now(report: &ZoneReport, block: u32) -> (Option<Zone>, Option<String>) {
    match zone_of(report, block) {
        Ok(zone) => (Some(zone), None),
        Err((reason, _)) => {
            let full = matches!(report.condition, 0x2..=0x4).then_some(ZoneReport { condition: 0xe, ..*report });
            (full.and_then(|report| zone_of(&report, block).ok()), Some(reason))
        }
    }
}

const SECTOR_SHIFT: u32 = 9;
/// Zones that are asked for at once.
const PIECE: u64 = 4096;
/// Zones whose state is changed at once: others have their turn on the thread between.
const RUN: u32 = 64;
const SEQUENTIAL_WRITE_REQUIRED: u8 = 2;

/// See the module's doc.
#[derive(Debug)]
pub(super) struct ZonedDevice {
    storage: Storage,
    zoned: Arc<Zoned>,
    jobs: Jobs,
}

impl ZonedDevice {
    /// Takes over an open device. Its thread ends with it and its queues.
    pub(super) fn new(storage: Storage, zoned: Zoned) -> Result<Self, BackendError> {
        let zoned = Arc::new(zoned);
        let (jobs, todo) = zone_worker::jobs(zoned.zone_size(), PIECE);
        let mut worker = Worker { zoned: Arc::clone(&zoned), calls: Calls::DEVICE, complained: false };
        let work = move || todo.work(|file, offset, len, work| worker.work(file, offset, len, work));
        let spawned = thread::Builder::new().name("farside-zones".into()).spawn(work);
        spawned
            .map_err(|error| BackendError::new(storage.info().name, error, "raise the limit of threads (ulimit -u)"))?;
        Ok(Self { storage, zoned, jobs })
    }
}

impl Backend for ZonedDevice {
    fn info(&self) -> BackendInfo {
        self.storage.info()
    }

    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        let before = self.info().size;
        let info = self.storage.refresh()?;
        if info.size != before {
            let reason = format!("had {before} bytes and has {}: its zones are others", info.size);
            return Err(BackendError::new(info.name, reason, "remove the namespace, and add it again"));
        }
        Ok(info)
    }

    fn keep(&self) {
        self.storage.keep();
    }

    fn zoned(&self) -> Option<Arc<Zoned>> {
        Some(Arc::clone(&self.zoned))
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let (answer, answers) = unbounded();
        Ok(Box::new(ZonedQueue {
            ring: self.storage.open_queue(context)?,
            file: Arc::clone(self.storage.file()),
            jobs: self.jobs.clone(),
            answer,
            answers,
            waker: context.waker.clone(),
        }))
    }
}

struct ZonedQueue {
    ring: Box<dyn IoQueue>,
    file: Arc<OpenFile>,
    jobs: Jobs,
    answer: Sender<IoDone>,
    answers: Receiver<IoDone>,
    waker: Waker,
}

impl IoQueue for ZonedQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let IoOp::Zone { offset, len, work } = io.op else { return self.ring.submit(io) };
        let Self { file, jobs, answer, waker, .. } = self;
        let (file, answer, waker) = (Arc::clone(file), answer.clone(), waker.clone());
        if jobs.send(Job { file, token: io.token, offset, len, work, answer, waker }) {
            Submit::Pending
        } else {
            Submit::Done(IoDone { token: io.token, result: Err(IoError::Gone), data: io.data })
        }
    }

    fn poll(&mut self, done: &mut Vec<IoDone>) {
        done.extend(self.answers.try_iter());
    }

    /// What is done to zones takes as long as it takes.
    fn cancel(&mut self, token: u64) {
        self.ring.cancel(token);
    }
}

/// How a device is asked.
#[derive(Clone, Copy)]
struct Calls {
    /// Changes zones: from a sector on, so many sectors.
    change: fn(&File, ioctl::ZoneCall, u64, u64) -> io::Result<()>,
    /// So many zones from a sector on.
    report: fn(&File, u64, u64) -> io::Result<Vec<ZoneReport>>,
}

impl Calls {
    const DEVICE: Self = Self { change: ioctl::change_zones, report };
}

/// What the thread does.
struct Worker {
    zoned: Arc<Zoned>,
    calls: Calls,
    /// A zone that makes no sense was told of.
    complained: bool,
}

impl Worker {
    fn work(&mut self, file: &OpenFile, offset: u64, len: u64, work: ZoneWork) -> Result<(), IoError> {
        match work {
            ZoneWork::Act(action) => self.act(file, offset, len, action),
            ZoneWork::Look => self.look(file.file(), offset, len),
        }
    }

    fn act(&mut self, file: &OpenFile, offset: u64, len: u64, action: ZoneAction) -> Result<(), IoError> {
        let changed = self.change(file, offset, len, action);
        let zoned = Arc::clone(&self.zoned);
        let tell = |success| {
            let mut zones = zoned.zones();
            let (first, behind) = (zoned.zone_at(offset), zoned.zone_at(offset + len));
            (first..behind).for_each(|zone| zones.end_action(zone, action, success));
        };
        tell(changed.is_ok());
        // The device may have its own mind about the outcome: an open zone without data is empty when it is closed. And where it
        // could not change all zones, it may have changed some.
        let seen = self.look(file.file(), offset, len);
        if changed.is_ok() && seen.is_err() {
            tell(false);
        }
        changed.and(seen)
    }

    fn change(&self, file: &OpenFile, offset: u64, len: u64, action: ZoneAction) -> Result<(), IoError> {
        let Some(call) = call_of(action) else { return Ok(()) };
        if file.read_only() {
            return Err(IoError::ReadOnly);
        }
        let changed = (self.calls.change)(file.file(), call, offset >> SECTOR_SHIFT, len >> SECTOR_SHIFT);
        changed.map_err(|error| error_of(&error, false))
    }

    fn look(&mut self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        let (mark, count) = (self.zoned.zones().mark(), len / self.zoned.zone_size());
        let reports =
            (self.calls.report)(file, offset >> SECTOR_SHIFT, count).map_err(|error| error_of(&error, true))?;
        let said = reports.iter().map(|report| {
            let (zone, complaint) = zone_now(report, self.zoned.block_size());
            if let Some(reason) = complaint.filter(|_| !std::mem::replace(&mut self.complained, true)) {
                tracing::warn!("a zoned device {reason}; of more such zones nothing will be said");
            }
            zone
        });
        self.zoned.zones().learn(mark, self.zoned.zone_at(offset), said);
        Ok(())
    }
}

/// A zone that a host gives up is given up here: block layers have no word for it.
fn call_of(action: ZoneAction) -> Option<ioctl::ZoneCall> {
    Some(match action {
        ZoneAction::Open => ioctl::ZoneCall::Open,
        ZoneAction::Close => ioctl::ZoneCall::Close,
        ZoneAction::Finish => ioctl::ZoneCall::Finish,
        ZoneAction::Reset => ioctl::ZoneCall::Reset,
        ZoneAction::Offline => return None,
    })
}

fn error_of(error: &io::Error, read: bool) -> IoError {
    match error.raw_os_error() {
        Some(libc::ETOOMANYREFS) => IoError::OpenZones,
        Some(libc::EOVERFLOW) => IoError::ActiveZones,
        Some(errno) => io_error(errno, read),
        None if read => IoError::Read,
        None => IoError::Write,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: ZoneReport =
        ZoneReport { start: 1024, len: 512, write_pointer: 1032, kind: 2, condition: 4, capacity: 400 };

    #[test]
    fn zones_are_counted_in_blocks() {
        let closed = Zone { state: ZoneState::Closed, capacity: 50, written: 1 };
        assert_eq!(zone_of(&REPORT, 4096), Ok(closed));
        assert_eq!(zone_of(&REPORT, 512), Ok(Zone { capacity: 400, written: 8, ..closed }));
        let full = ZoneReport { condition: 0xe, write_pointer: u64::MAX, ..REPORT };
        assert_eq!(zone_of(&full, 4096), Ok(Zone { state: ZoneState::Full, capacity: 50, written: 50 }));
    }

    #[test]
    fn zones_that_hosts_cannot_be_shown_are_refused() {
        let reason = |report: ZoneReport| zone_of(&report, 4096).unwrap_err().0;
        assert!(reason(ZoneReport { kind: 1, ..REPORT }).contains("not written in sequence"));
        assert!(reason(ZoneReport { kind: 3, ..REPORT }).contains("not written in sequence"));
        assert!(reason(ZoneReport { condition: 0, ..REPORT }).contains("state 0x0"));
        assert!(reason(ZoneReport { write_pointer: 1033, ..REPORT }).contains("no multiple of 4096"));
        assert!(reason(ZoneReport { capacity: 401, ..REPORT }).contains("no multiple of 4096"));
    }

    #[test]
    fn zones_in_use_are_never_a_reason_to_know_nothing_of_others() {
        let full = Zone { state: ZoneState::Full, capacity: 50, written: 50 };
        let now = |report: ZoneReport| {
            let (zone, complaint) = zone_now(&report, 4096);
            (zone, complaint.is_some())
        };
        assert_eq!(now(ZoneReport { write_pointer: 1033, ..REPORT }), (Some(full), true), "until it is reset");
        assert_eq!(now(ZoneReport { capacity: 401, ..REPORT }), (None, true));
        assert_eq!(now(ZoneReport { condition: 0, ..REPORT }), (None, true));
        assert_eq!(now(REPORT), (zone_of(&REPORT, 4096).ok(), false));
    }

    /// Four closed zones are to be reset; four may be active. What came of it, and the zones.
    fn reset_of_four(calls: Calls) -> (Result<(), IoError>, Arc<Zoned>) {
        let geometry = Geometry { zone_blocks: 64, max_open: 0, max_active: 4 };
        let zone = |at: u64| {
            let (state, written) = if at < 4 { (ZoneState::Closed, 1) } else { (ZoneState::Empty, 0) };
            Zone { state, capacity: 50, written }
        };
        let zoned = Arc::new(Zoned::new(Zones::new(geometry, (0..6).map(zone)).unwrap(), 4096).in_runs_of(RUN));
        let file = OpenFile::new(tempfile::tempfile().unwrap(), super::super::open_file::Kind::Device, false, None, 0);
        let mut worker = Worker { zoned: Arc::clone(&zoned), calls, complained: false };
        (0..4).for_each(|zone| assert_eq!(zoned.zones().begin_action(zone, ZoneAction::Reset), Ok(true)));
        let result = worker.work(&file, 0, 4 * zoned.zone_size(), ZoneWork::Act(ZoneAction::Reset));
        assert!((0..4).all(|zone| !zoned.zones().is_busy(zone)), "it is over");
        (result, zoned)
    }

    /// The first two zones are empty, the others closed.
    fn two_of_them(_: &File, sector: u64, count: u64) -> io::Result<Vec<ZoneReport>> {
        let zone = |start| ZoneReport { start, write_pointer: start + 8, ..REPORT };
        let all = (sector / 512..).take(count as usize).map(|at| match at {
            0 | 1 => ZoneReport { condition: 1, ..zone(at * 512) },
            _ => zone(at * 512),
        });
        Ok(all.collect())
    }

    #[test]
    fn of_a_run_that_fails_half_way_the_device_is_asked() {
        let bad: fn(&File, ioctl::ZoneCall, u64, u64) -> io::Result<()> =
            |_, _, _, _| Err(io::Error::from_raw_os_error(libc::EIO));
        let (result, zoned) = reset_of_four(Calls { change: bad, report: two_of_them });
        assert_eq!(result, Err(IoError::Write));
        let mut zones = zoned.zones();
        assert_eq!(zones.in_use(), (0, 2), "what the device gave back can be used");
        assert!((0..4).all(|zone| !zones.is_unknown(zone)));
        assert_eq!(zones.begin_write(4, None, 1), Ok(256));
        drop(zones);
        // It cannot be asked.
        let mute: fn(&File, u64, u64) -> io::Result<Vec<ZoneReport>> =
            |_, _, _| Err(io::Error::from_raw_os_error(libc::EIO));
        let (result, zoned) = reset_of_four(Calls { change: bad, report: mute });
        assert_eq!(result, Err(IoError::Write));
        assert!((0..4).all(|zone| zoned.zones().is_unknown(zone)));
        assert_eq!(zoned.zones().in_use(), (0, 4));
        let (result, zoned) = reset_of_four(Calls { change: |_, _, _, _| Ok(()), report: mute });
        assert_eq!((result, zoned.zones().is_unknown(0)), (Err(IoError::Read), true));
    }

    #[test]
    fn reports_that_fail_are_reads_that_fail() {
        let error = io::Error::from_raw_os_error(libc::EIO);
        assert_eq!((error_of(&error, true), error_of(&error, false)), (IoError::Read, IoError::Write));
    }
}
