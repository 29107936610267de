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

use super::reactor::Reactor;
use super::request::{Job, RequestId, State};
use super::shared::{Message, RequestRef};
use crate::backend::{IoOp, ZoneWork, Zoned};
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

    /// Gives a zone up: whose turn it is now.
    fn give(&self, zone: u32) -> Option<RequestRef> {
        let mut turns = self.turns();
        let next = turns.get_mut(&zone)?.pop_front();
        if next.is_none() {
            turns.remove(&zone);
        }
        next
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
    /// The zone is its own.
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
        if !self.has_zone(id, at, turns, zone, now) {
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
        if !self.has_zone(id, at, turns, zone, now) {
            return Ok(Step::Waits);
        }
        let begun = turns.zones().begin_action(zone, action);
        match begun {
            Ok(true) => Ok(Step::Run),
            Ok(false) if zslba.is_some() => Ok(Step::Done),
            // Of all zones those are meant that are in a state for it.
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

    /// Whether the zone is the command's own, and its state is known. If not, the command waits for that.
    fn has_zone(&mut self, id: RequestId, at: u32, turns: &Arc<ZoneTurns>, zone: u32, now: Duration) -> bool {
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
        let unknown = turns.zones().is_unknown(zone);
        if unknown {
            self.ask_storage(id, at, zone, now);
        }
        !unknown
    }

    fn on_zone(&mut self, id: RequestId, turns: &Arc<ZoneTurns>, zone: u32) -> &mut OnZone {
        let fresh = || OnZone { turns: Arc::clone(turns), zone, turn: Turn::None, lba: 0, asks_for: None };
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
            ZoneCommand::Send { action, .. } => (self.zone_op(at, on.zone, 1, ZoneWork::Act(action)), 0),
            ZoneCommand::Receive { len, filter, partial, .. } => {
                let left = u64::from(on.turns.zones().count() - on.zone);
                // What does not fit is not even counted then.
                let enough = if partial && filter == ZoneFilter::All { u64::from(len / 64) } else { left };
                (self.zone_op(at, on.zone, enough.clamp(1, left), ZoneWork::Look), 0)
            }
        })
    }

    /// The backend is done with a command, or a part of a command, on zones.
    pub(crate) fn end_on_zones(&mut self, id: RequestId, at: u32, mut status: Status, now: Duration) {
        let request = &mut self.requests[id];
        let (cid, generation) = (request.cid, request.generation);
        let Some(on) = request.extra.as_mut().and_then(|extra| extra.zone.as_mut()) else { return };
        if let Some(command) = on.asks_for.take() {
            request.job = Job::Io { namespace: at, command };
            if status.is_success() {
                on.turns.zones().trust(on.zone);
                return self.execute(id, now);
            }
            let status = self.record_failure(id, status, now);
            return self.finish(id, Completion::failed(cid, status), now);
        }
        let Job::Io { command, .. } = request.job else { return };
        let (lba, zone) = (on.lba, on.zone);
        on.settle(&command, status.is_success());
        let mut result = 0;
        match command {
            IoCommand::Zone(ZoneCommand::Append { .. }) if status.is_success() => result = lba,
            IoCommand::Zone(ZoneCommand::Send { zslba: None, .. }) if status.is_success() => {
                debug_assert_eq!(generation, self.requests[id].generation, "it is not over");
                return self.go_on_with(id, zone + 1);
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
            let given = std::mem::replace(&mut on.zone, zone);
            on.turn = Turn::None;
            self.hand_on(&turns, given);
        }
        self.shared.reactors[self.index as usize].mailbox.send(Message::ZoneTurn { owner, turn: None });
    }

    /// A command on zones is over.
    pub(crate) fn leave_zones(&self, on: &OnZone) {
        if on.turn == Turn::Held {
            self.hand_on(&on.turns, on.zone);
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
            // The backend told them of success itself.
            IoCommand::Zone(ZoneCommand::Send { action, .. }) if !success => zones.end_action(self.zone, action, false),
            _ => {}
        }
    }
}
