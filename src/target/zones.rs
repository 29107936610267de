//! Zoned namespaces: writes to a zone, and changes of its state, take turns.
//!
//! The kernel has no append for programs, and writes of one zone that run side by side could overtake each other. So a zone has one
//! write, or change, in progress at a time, on whatever reactor, and others wait in the order in which they came; an append is a write
//! to where the write pointer is when its turn comes. Reads and reports take no turns. The turn is held until the command is
//! over (also that of a queue that ended meanwhile: its write may still land) and then handed on by message. After a write that
//! failed, the next whose turn it is has the storage asked first where the write pointer is.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme::completion::Completion;
use nvme::io::IoCommand;
use nvme::status::Status;
use nvme::zns::{ZoneAction, ZoneCommand, ZoneFilter, Zones, report};

use super::execute::status_of;
use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use super::shared::{Message, RequestRef};
use crate::backend::{IoError, IoOp, ZoneWork, Zoned};
use crate::rdma::Provider;

/// Who works on which zone of a namespace, and who waits for that.
#[derive(Debug)]
pub(crate) struct ZoneTurns {
    zoned: Arc<Zoned>,
    /// Zones that are worked on, with those that wait.
    turns: Mutex<HashMap<u32, VecDeque<RequestRef>>>,
}

impl ZoneTurns {
    pub(crate) fn new(zoned: Arc<Zoned>) -> Self {
        Self { zoned, turns: Mutex::default() }
    }

    pub(crate) fn zones(&self) -> MutexGuard<'_, Zones> {
        self.zoned.zones()
    }

    pub(crate) fn zoned(&self) -> &Zoned {
        &self.zoned
    }

    /// Asks for a zone: whether it is free. If not, the asker stands in line.
    fn take(&self, zone: u32, asker: RequestRef) -> bool {
        match self.turns().entry(zone) {
            Entry::Vacant(free) => {
                free.insert(VecDeque::new());
                true
            }
            Entry::Occupied(mut taken) => {
                taken.get_mut().push_back(asker);
                false
            }
        }
    }

    /// Who stands in line stands there no more.
    fn leave_line(&self, zone: u32, asker: RequestRef) {
        if let Some(line) = self.turns().get_mut(&zone) {
            line.retain(|other| *other != asker);
        }
    }

    /// Gives a zone up: whose turn it is now.
    fn give(&self, zone: u32) -> Option<RequestRef> {
        let mut turns = self.turns();
        let next = turns.get_mut(&zone)?.pop_front();
        if next.is_none() {
            turns.remove(&zone);
        }
        next
    }

    /// For an action on all zones: begins it on those from `first` on that lie side by side, are meant, known and free, as many as
    /// the storage takes beside one before them. How many these are.
    fn begin_run(&self, action: ZoneAction, first: u32) -> u32 {
        let end = first.saturating_add(self.zoned.run() - 1);
        let (mut turns, mut zones) = (self.turns(), self.zones());
        let mut begins = |zone: &u32| {
            let free = !turns.contains_key(zone) && zones.is_meant(action, *zone);
            let begun = free && zones.begin_action(*zone, action) == Ok(true);
            begun && turns.insert(*zone, VecDeque::new()).is_none()
        };
        u32::try_from((first..end).take_while(|zone| begins(zone)).count()).unwrap_or(0)
    }

    fn turns(&self) -> MutexGuard<'_, HashMap<u32, VecDeque<RequestRef>>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a command does on zones.
#[derive(Debug)]
pub(crate) struct OnZone {
    turns: Arc<ZoneTurns>,
    /// The zone that it works on, or that comes next.
    zone: u32,
    /// So many from there, of an action on all zones.
    count: u32,
    turn: Turn,
    /// First block that it writes.
    lba: u64,
    /// The command itself, while the storage is asked for the zone's state.
    asks_for: Option<IoCommand>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It has not asked.
    None,
    /// It stands in line.
    Awaited,
    /// The zone is its own; of several, all are.
    Held,
}

/// How a command that comes to zones goes on.
enum Step {
    Run,
    Waits,
    Done,
}

impl<P: Provider> Reactor<P> {
    /// Whether a command on a zoned namespace may go to the backend now. If not, it is answered, or it waits.
    pub(crate) fn enter_zones(&mut self, id: RequestId, at: u32, command: &IoCommand, now: Duration) -> bool {
        let Some(turns) = self.namespaces[at].zones.clone() else { return true };
        let step = match *command {
            IoCommand::Read { slba, blocks, .. }
            | IoCommand::Compare { slba, blocks }
            | IoCommand::Verify { slba, blocks } => turns.zones().may_read(slba, blocks).map(|()| Step::Run),
            IoCommand::Write { slba, blocks, .. } | IoCommand::WriteZeroes { slba, blocks, .. } => {
                self.enter_write(id, at, &turns, slba, Some(slba), blocks, now)
            }
            IoCommand::Zone(ZoneCommand::Append { zslba, blocks, .. }) => {
                self.enter_write(id, at, &turns, zslba, None, blocks, now)
            }
            IoCommand::Zone(ZoneCommand::Send { action, zslba }) => {
                self.enter_action(id, at, &turns, action, zslba, now)
            }
            IoCommand::Zone(ZoneCommand::Receive { slba, .. }) => {
                let first = turns.zones().zone_of(slba);
                self.on_zone(id, &turns, first);
                Ok(Step::Run)
            }
            _ => Ok(Step::Run),
        };
        let cid = self.requests[id].cid;
        let completion = match step {
            Ok(Step::Run) => return true,
            Ok(Step::Waits) => return false,
            Ok(Step::Done) => Completion::success(cid),
            Err(status) => Completion::failed(cid, self.record_failure(id, status, now)),
        };
        self.finish(id, completion, now);
        false
    }

    #[expect(clippy::too_many_arguments, reason = "a write's place, in order")]
    fn enter_write(
        &mut self,
        id: RequestId,
        at: u32,
        turns: &Arc<ZoneTurns>,
        slba: u64,
        place: Option<u64>,
        blocks: u32,
        now: Duration,
    ) -> Result<Step, Status> {
        let zone = turns.zones().zone_of(slba);
        if !self.has_zone(id, at, turns, zone, true, now) {
            return Ok(Step::Waits);
        }
        let lba = turns.zones().begin_write(zone, place, blocks)?;
        self.on_zone(id, turns, zone).lba = lba;
        Ok(Step::Run)
    }

    fn enter_action(
        &mut self,
        id: RequestId,
        at: u32,
        turns: &Arc<ZoneTurns>,
        action: ZoneAction,
        zslba: Option<u64>,
        now: Duration,
    ) -> Result<Step, Status> {
        let zone = match zslba {
            Some(zslba) => Some(turns.zones().zone_of(zslba)),
            None => self.next_of_all(id, turns, action)?,
        };
        let Some(zone) = zone else { return Ok(Step::Done) };
        // What is in a zone that is reset need not be known; and a reset helps where it cannot be.
        let asks = action != ZoneAction::Reset;
        if !self.has_zone(id, at, turns, zone, asks, now) {
            return Ok(Step::Waits);
        }
        let begun = {
            let mut zones = turns.zones();
            // Of all zones those are meant that are in a state for it now: others may have had their turn before.
            let meant = zslba.is_some() || zones.is_meant(action, zone);
            if meant { zones.begin_action(zone, action) } else { Ok(false) }
        };
        match begun {
            Ok(true) if zslba.is_some() => Ok(Step::Run),
            Ok(true) => {
                self.on_zone(id, turns, zone).count = 1 + turns.begin_run(action, zone + 1);
                Ok(Step::Run)
            }
            Ok(false) if zslba.is_some() => Ok(Step::Done),
            Err(status) if zslba.is_some() || status.code() == Status::TOO_MANY_OPEN_ZONES.code() => Err(status),
            Ok(false) | Err(_) => {
                self.go_on_with(id, zone + 1);
                Ok(Step::Waits)
            }
        }
    }

    /// Of an action on all zones, the one that comes next. Whether all can be opened is looked at before the first.
    fn next_of_all(&self, id: RequestId, turns: &Arc<ZoneTurns>, action: ZoneAction) -> Result<Option<u32>, Status> {
        let begun = self.requests[id].extra.as_ref().and_then(|extra| extra.zone.as_ref());
        if let Some(OnZone { zone, turn: Turn::Held, .. }) = begun {
            return Ok(Some(*zone));
        }
        let from = begun.map(|on| on.zone);
        let zones = turns.zones();
        if from.is_none() && action == ZoneAction::Open {
            zones.may_open_all()?;
        }
        Ok(zones.next_for(action, from.unwrap_or(0)))
    }

    /// Whether the zone is the command's own, and, where the command asks for that, its state is known. If not, the command waits.
    fn has_zone(
        &mut self,
        id: RequestId,
        at: u32,
        turns: &Arc<ZoneTurns>,
        zone: u32,
        asks: bool,
        now: Duration,
    ) -> bool {
        let me = self.reference(id);
        let on = self.on_zone(id, turns, zone);
        if on.turn == Turn::None {
            on.zone = zone;
            on.turn = if turns.take(zone, me) { Turn::Held } else { Turn::Awaited };
        }
        if on.turn == Turn::Awaited {
            self.requests[id].state = State::Locked;
            return false;
        }
        let unknown = asks && turns.zones().is_unknown(zone);
        if unknown {
            self.ask_storage(id, at, zone, now);
        }
        !unknown
    }

    fn on_zone(&mut self, id: RequestId, turns: &Arc<ZoneTurns>, zone: u32) -> &mut OnZone {
        let fresh = || OnZone { turns: Arc::clone(turns), zone, count: 1, turn: Turn::None, lba: 0, asks_for: None };
        self.requests[id].extra_mut().zone.get_or_insert_with(fresh)
    }

    /// Has the storage say how a zone is; then the command is looked at again.
    fn ask_storage(&mut self, id: RequestId, at: u32, zone: u32, now: Duration) {
        let request = &mut self.requests[id];
        if let (Job::Io { command, .. }, Some(on)) = (request.job, &mut request.extra_mut().zone) {
            on.asks_for = Some(command);
        }
        request.job = Job::Io { namespace: at, command: IoCommand::Flush };
        let op = self.zone_op(at, zone, 1, ZoneWork::Look);
        self.hand_over(id, at, op, None, now);
    }

    fn zone_op(&self, at: u32, zone: u32, count: u64, work: ZoneWork) -> IoOp {
        let namespace = &self.namespaces[at];
        let shift = u32::from(namespace.view.block_shift) + u32::from(namespace.view.zone_shift.unwrap_or(0));
        IoOp::Zone { offset: u64::from(zone) << shift, len: count << shift, work }
    }

    /// The operation of a command that only zoned namespaces have, and the bytes that it moves.
    pub(crate) fn zone_command(&self, id: RequestId, at: u32, command: ZoneCommand) -> Option<(IoOp, u32)> {
        let on = self.requests[id].extra.as_ref()?.zone.as_ref()?;
        let shift = self.namespaces[at].view.block_shift;
        Some(match command {
            ZoneCommand::Append { blocks, fua, .. } => (IoOp::Write { offset: on.lba << shift, fua }, blocks << shift),
            ZoneCommand::Send { action, .. } => (self.zone_op(at, on.zone, on.count.into(), ZoneWork::Act(action)), 0),
            ZoneCommand::Receive { len, filter, partial, .. } => {
                let left = u64::from(on.turns.zones().count() - on.zone);
                // What does not fit is not even counted then.
                let enough = if partial && filter == ZoneFilter::All { u64::from(len / 64) } else { left };
                (self.zone_op(at, on.zone, enough.clamp(1, left), ZoneWork::Look), 0)
            }
        })
    }

    /// Whether what the backend is done with was the question how a zone is, and not the command that waited for the answer.
    pub(crate) fn storage_answered(
        &mut self,
        id: RequestId,
        at: u32,
        result: Result<(), IoError>,
        now: Duration,
    ) -> bool {
        let request = &mut self.requests[id];
        let (cid, abort, queue) = (request.cid, request.abort, request.queue);
        let Some(on) = request.extra.as_mut().and_then(|extra| extra.zone.as_mut()) else { return false };
        let Some(command) = on.asks_for.take() else { return false };
        // It may have had nothing to say of this zone; what is known is out of date then.
        let unknown = on.turns.zones().is_unknown(on.zone);
        let result = if unknown { result.and(Err(IoError::Write)) } else { result };
        if let Err(error) = result {
            self.tally(queue, at, &command, 0, Err(error));
        }
        let request = &mut self.requests[id];
        request.job = Job::Io { namespace: at, command };
        let failed = abort.or_else(|| result.err().map(status_of)).map(|status| status_for(&command, status));
        // Who waits for what is in progress now need not wait for what is looked at anew.
        self.ended(id, failed);
        match failed {
            None => self.execute(id, now),
            Some(status) => {
                let status = self.record_failure(id, status, now);
                self.finish(id, Completion::failed(cid, status), now);
            }
        }
        true
    }

    /// The backend is done with a command, or a part of a command, on zones; whether it did it.
    pub(crate) fn end_on_zones(&mut self, id: RequestId, success: bool, mut status: Status, now: Duration) {
        let request = &mut self.requests[id];
        let (cid, generation) = (request.cid, request.generation);
        let Some(on) = request.extra.as_mut().and_then(|extra| extra.zone.as_mut()) else { return };
        let Job::Io { command, .. } = request.job else { return };
        let (lba, behind) = (on.lba, on.zone.saturating_add(on.count));
        on.settle(&command, success);
        status = status_for(&command, status);
        let mut result = 0;
        match command {
            IoCommand::Zone(ZoneCommand::Append { .. }) if status.is_success() => result = lba,
            IoCommand::Zone(ZoneCommand::Send { zslba: None, .. }) if status.is_success() => {
                debug_assert_eq!(generation, self.requests[id].generation, "it is not over");
                return self.go_on_with(id, behind);
            }
            IoCommand::Zone(ZoneCommand::Receive { slba, len, filter, partial }) if status.is_success() => {
                let turns = Arc::clone(&on.turns);
                let into = request.buffer.as_mut().map(|buffer| &mut buffer.as_mut_slice()[..len as usize]);
                match into {
                    Some(into) => report(&turns.zones(), slba, filter, partial, into),
                    None => status = Status::INTERNAL_ERROR,
                }
            }
            _ => {}
        }
        if !status.is_success() {
            status = self.record_failure(id, status, now);
        }
        self.finish(id, Completion { result, cid, status }, now);
    }

    /// The backend is done with a command on zones whose queue is gone.
    pub(crate) fn orphan_on_zones(&mut self, id: RequestId, success: bool) {
        let request = &mut self.requests[id];
        if let (Job::Io { command, .. }, Some(on)) =
            (request.job, request.extra.as_ref().and_then(|extra| extra.zone.as_ref()))
            && on.asks_for.is_none()
        {
            on.settle(&command, success);
        }
    }

    /// An action on all zones goes on behind one, in the next round: others have their turns between.
    fn go_on_with(&mut self, id: RequestId, zone: u32) {
        let owner = self.reference(id);
        let request = &mut self.requests[id];
        request.state = State::Locked;
        if let Some(on) = request.extra.as_mut().and_then(|extra| extra.zone.as_mut()) {
            let turns = Arc::clone(&on.turns);
            let given = on.zone..on.zone + on.count;
            (on.zone, on.count, on.turn) = (zone, 1, Turn::None);
            given.for_each(|zone| self.hand_on(&turns, zone));
        }
        self.shared.reactors[self.index as usize].mailbox.send(Message::ZoneTurn { owner, turn: None });
    }

    /// A command on zones is over.
    pub(crate) fn leave_zones(&self, id: RequestId, on: &OnZone) {
        match on.turn {
            Turn::None => {}
            Turn::Awaited => on.turns.leave_line(on.zone, self.reference(id)),
            Turn::Held => (on.zone..on.zone + on.count).for_each(|zone| self.hand_on(&on.turns, zone)),
        }
    }

    fn hand_on(&self, turns: &Arc<ZoneTurns>, zone: u32) {
        if let Some(owner) = turns.give(zone) {
            let turn = Some((Arc::clone(turns), zone));
            self.shared.reactors[owner.reactor as usize].mailbox.send(Message::ZoneTurn { owner, turn });
        }
    }

    /// A zone is the command's own now; without one, an action on all zones goes on.
    pub(crate) fn zone_turn(&mut self, owner: RequestRef, turn: Option<(Arc<ZoneTurns>, u32)>, now: Duration) {
        let id = owner.request;
        let waits = self.requests.find_mut(id, owner.generation).filter(|request| request.state == State::Locked);
        let on = waits.and_then(|request| request.extra.as_mut()).and_then(|extra| extra.zone.as_mut());
        match (on, turn) {
            (Some(on), Some((_, zone))) if on.turn == Turn::Awaited && on.zone == zone => on.turn = Turn::Held,
            (Some(_), None) => {}
            // It was aborted, or its queue ended.
            (_, Some((turns, zone))) => return self.hand_on(&turns, zone),
            (None, None) => return,
        }
        self.execute(id, now);
    }
}

impl OnZone {
    /// Tells the zones how an operation ended that they were asked about.
    fn settle(&self, command: &IoCommand, success: bool) {
        let mut zones = self.turns.zones();
        match *command {
            IoCommand::Write { blocks, .. }
            | IoCommand::WriteZeroes { blocks, .. }
            | IoCommand::Zone(ZoneCommand::Append { blocks, .. }) => zones.end_write(self.zone, blocks, success),
            // The backend told them of success itself; of failure, where it knows more of it.
            IoCommand::Zone(ZoneCommand::Send { action, .. }) if !success => {
                for zone in self.zone..self.zone + self.count {
                    if zones.is_busy(zone) {
                        zones.end_action(zone, action, false);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A failure in the words of the command that it came to.
fn status_for(command: &IoCommand, status: Status) -> Status {
    let is = |other: Status| status.code() == other.code();
    match command {
        // The storage cannot do that to zones, and says so of no other command.
        IoCommand::Zone(ZoneCommand::Send { .. }) if is(Status::INVALID_OPCODE) => Status::INVALID_FIELD.dnr(),
        // It was asked where the write pointer is.
        _ if command.changes_media() && is(Status::UNRECOVERED_READ_ERROR) => Status::WRITE_FAULT,
        _ => status,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme::zns::{Geometry, Zone, ZoneState};

    /// Zones in these states, in runs of three.
    fn zones_in(states: &[ZoneState]) -> ZoneTurns {
        let geometry = Geometry { zone_blocks: 64, max_open: 0, max_active: 0 };
        let zone = |state: &ZoneState| Zone { state: *state, capacity: 64, written: 1 };
        let zones = Zones::new(geometry, states.iter().map(zone)).unwrap();
        ZoneTurns::new(Arc::new(Zoned::new(zones, 512).in_runs_of(3)))
    }

    fn asker(request: u32) -> RequestRef {
        RequestRef { reactor: 0, request, generation: 0 }
    }

    #[test]
    fn who_gave_up_waiting_stands_in_no_line() {
        let turns = zones_in(&[ZoneState::Closed]);
        assert!(turns.take(0, asker(1)));
        assert!((2..1000).all(|request| !turns.take(0, asker(request))));
        (2..1000).filter(|request| *request != 500).for_each(|request| turns.leave_line(0, asker(request)));
        assert_eq!(turns.turns().get(&0).map(VecDeque::len), Some(1));
        assert_eq!((turns.give(0), turns.give(0)), (Some(asker(500)), None));
        assert!(turns.turns().is_empty());
    }

    #[test]
    fn a_run_ends_where_a_zone_is_not_meant_or_not_free() {
        use ZoneState::{Closed, Empty, Full};
        let run = |turns: &ZoneTurns| turns.begin_run(ZoneAction::Reset, 1);
        let all = zones_in(&[Closed, Full, Closed, Full, Full]);
        assert_eq!(run(&all), 2, "three with the first");
        assert_eq!([1, 2, 3].map(|zone| all.take(zone, asker(1))), [false, false, true]);
        assert_eq!(run(&zones_in(&[Closed, Empty, Closed])), 0);
        assert_eq!(run(&zones_in(&[Closed])), 0, "the last");
        let taken = zones_in(&[Closed, Closed, Closed]);
        assert!(taken.take(2, asker(1)));
        assert_eq!(run(&taken), 1);
        assert!(!taken.take(2, asker(2)), "it is still the other's");
        let unknown = zones_in(&[Closed, Closed, Closed]);
        unknown.zones().begin_write(2, None, 1).unwrap();
        unknown.zones().end_write(2, 1, false);
        assert_eq!(unknown.begin_run(ZoneAction::Finish, 1), 1, "it would have to be asked about");
    }

    #[test]
    fn failures_are_told_in_the_words_of_the_command() {
        let told = |command: IoCommand, status: Status| status_for(&command, status).code();
        let send = IoCommand::Zone(ZoneCommand::Send { action: ZoneAction::Open, zslba: Some(0) });
        assert_eq!(told(send, Status::INVALID_OPCODE.dnr()), Status::INVALID_FIELD.code());
        assert_eq!(told(send, Status::UNRECOVERED_READ_ERROR), Status::WRITE_FAULT.code());
        let append = IoCommand::Zone(ZoneCommand::Append { zslba: 0, blocks: 1, fua: false });
        assert_eq!(told(append, Status::UNRECOVERED_READ_ERROR), Status::WRITE_FAULT.code());
        let receive =
            IoCommand::Zone(ZoneCommand::Receive { slba: 0, len: 64, filter: ZoneFilter::All, partial: true });
        assert_eq!(told(receive, Status::UNRECOVERED_READ_ERROR), Status::UNRECOVERED_READ_ERROR.code());
        assert_eq!(told(IoCommand::Flush, Status::INVALID_OPCODE), Status::INVALID_OPCODE.code());
    }
}
