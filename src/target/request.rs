//! One command from its receive to its answer.
//!
//! ```text
//! Received -> WaitBuffer -> WaitCredits -> ReadingFromHost -> Executing -> Responding -> Free
//!                 |              |                                ^
//!                 +--- Fenced, Throttled ---+          FusedReady, LockWait, Locked
//!                      AwaitsSecond (of a fused pair), Held (a parked Asynchronous Event Request), Orphan (its queue is gone, the backend is not done)
//! ```
//! The WRITEs to the host and the response are posted together, so `Responding` covers both. A failed command joins at
//! `WaitCredits` with nothing left to do but to respond. Waiting is a state and a place in a FIFO. Slots are allocated once;
//! a slot's generation tells a late completion from its successor's.

use nvme::command::Command;
use nvme::completion::Completion;
use nvme::io::IoCommand;
use nvme::registry::{AbortReply, Settle};
use nvme::sgl::KeyedSgl;
use nvme::status::Status;

use super::authenticate::Wanted;
use super::copy::CopyProgress;
use super::limits::Line;
use super::locks::LockId;
use super::options::REQUEST_RESERVE;
use super::share::{STRANGERS, ShareId};
use super::zones::OnZone;
use crate::backend::IoData;
use crate::mem::Buffer;

/// Index of a request in its reactor's table.
pub(crate) type RequestId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    Received,
    WaitBuffer,
    WaitCredits,
    Fenced,
    /// It waits for its turn under a limit.
    Throttled,
    /// First half of a fused pair.
    AwaitsSecond,
    ReadingFromHost,
    /// Half of a fused pair that has its data.
    FusedReady,
    /// It asked for a range lock.
    LockWait,
    /// It waits for another's range lock to go.
    Locked,
    Executing,
    Responding,
    Held,
    /// An Abort that waits for the answer of the reactor that has the command.
    Aborting,
    /// An admin command whose change is being made everywhere.
    Settling,
    Orphan,
}

#[cfg(test)]
impl State {
    /// Those that last beyond a round, and that a host of ours brings about.
    pub(crate) const LASTING: [Self; 9] = [
        Self::WaitBuffer,
        Self::WaitCredits,
        Self::Fenced,
        Self::ReadingFromHost,
        Self::Executing,
        Self::Responding,
        Self::Held,
        Self::Aborting,
        Self::Orphan,
    ];
}

/// What is to be done for the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// Only to be answered.
    Respond,
    /// An I/O command on a namespace of this reactor.
    Io { namespace: u32, command: IoCommand },
    /// A Connect command whose data come from the host.
    Connect,
    /// An admin command whose data come from the host.
    Admin,
    /// Data for the host lie ready in the buffer or in `payload`.
    SendData,
}

/// What a failed command is remembered by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) lba: u64,
}

/// Which way the data go, in the host's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    None,
    FromHost,
    ToHost,
}

/// Where the host's data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostData {
    None,
    /// In the capsule: the buffer holds them already.
    InCapsule,
    One(KeyedSgl),
    /// In the table of descriptor lists, this many.
    List(u8),
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) state: State,
    pub(crate) generation: u32,
    pub(crate) queue: u32,
    pub(crate) cid: u16,
    pub(crate) job: Job,
    pub(crate) direction: Direction,
    pub(crate) host: HostData,
    /// Bytes that move between host and buffer.
    pub(crate) data_len: u32,
    /// First data byte in the buffer.
    pub(crate) data_start: u32,
    pub(crate) buffer: Option<Buffer>,
    /// Compare, Verify: what the namespace holds. Copy: what is on its way.
    pub(crate) second: Option<Buffer>,
    /// Bytes of `second`; 0 for commands without.
    pub(crate) scratch_len: u32,
    /// The host's share that its buffers are from, or are to be from.
    pub(crate) share: ShareId,
    /// The limit whose line it stands in next.
    pub(crate) line: Line,
    /// When it arrived and when its last stage ended, in nanoseconds; 0 while no histograms are kept.
    pub(crate) born: u64,
    pub(crate) stamp: u64,
    /// The namespace's epoch that the command was checked at.
    pub(crate) epoch: u32,
    pub(crate) completion: Completion,
    /// The host's key that the response invalidates.
    pub(crate) invalidate: Option<u32>,
    /// Send queue entries reserved and not given back.
    pub(crate) credits: u8,
    /// RDMA READs: next descriptor to post, and how many are under way.
    pub(crate) next_desc: u8,
    pub(crate) reads_pending: u8,
    /// Bytes already asked for by RDMA READ.
    pub(crate) read_posted: u32,
    /// Dataset Management: next range.
    pub(crate) next_range: u16,
    /// The command changes the namespace: a successor association waits for it.
    pub(crate) changes_media: bool,
    /// It is to end early, with this status.
    pub(crate) abort: Option<Status>,
    pub(crate) subject: Subject,
    /// The queue ends when the response is sent.
    pub(crate) close_after: bool,
    /// An Abort's own answer, once its outcome is known.
    pub(crate) abort_reply: Option<AbortReply>,
    /// Kept for commands that are looked at again when their data arrived.
    pub(crate) command: Option<Command>,
    /// Data for the host that wait for a buffer.
    pub(crate) payload: Vec<u8>,
    /// iWARP: the registration of the READ's sink.
    pub(crate) sink: Option<crate::rdma::Mr>,
    /// What few commands have.
    pub(crate) extra: Option<Box<Extra>>,
}

/// What fused pairs, Copy, work on zones, and changes by admin commands have besides.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    /// The other half of a fused pair.
    pub(crate) partner: Option<RequestId>,
    /// The other half did not go through.
    pub(crate) failed: bool,
    /// Half of a pair: it had its turn under the limits, and waits for buffers together with the other half.
    pub(crate) arrived: bool,
    /// A range lock that it asked for.
    pub(crate) lock: Option<LockId>,
    pub(crate) copy: Option<CopyProgress>,
    pub(crate) settle: Option<Settle>,
    /// What it does on zones.
    pub(crate) zone: Option<OnZone>,
    /// A computation that it waits for.
    pub(crate) computing: Option<Wanted>,
}

impl Request {
    fn empty() -> Self {
        Self {
            state: State::Free,
            generation: 0,
            queue: 0,
            cid: 0,
            job: Job::Respond,
            direction: Direction::None,
            host: HostData::None,
            data_len: 0,
            data_start: 0,
            buffer: None,
            second: None,
            scratch_len: 0,
            share: STRANGERS,
            line: Line::None,
            born: 0,
            stamp: 0,
            epoch: 0,
            completion: Completion::success(0),
            invalidate: None,
            credits: 0,
            next_desc: 0,
            reads_pending: 0,
            read_posted: 0,
            next_range: 0,
            changes_media: false,
            abort: None,
            subject: Subject::default(),
            close_after: false,
            abort_reply: None,
            command: None,
            payload: Vec::new(),
            sink: None,
            extra: None,
        }
    }

    /// It is over: the slot waits for its next command.
    #[inline(always)]
    pub(crate) fn clear(&mut self) {
        debug_assert!(self.buffer.is_none() && self.second.is_none(), "a request is freed with its buffer");
        debug_assert!(self.state != State::Free, "a request is freed twice");
        self.state = State::Free;
        self.generation = self.generation.wrapping_add(1) & GENERATION_MASK;
        self.command = None;
        self.abort_reply = None;
        self.extra = None;
        if self.payload.capacity() > 0 {
            self.payload = Vec::new();
        }
    }

    pub(crate) fn is_compare(&self) -> bool {
        matches!(self.job, Job::Io { command: IoCommand::Compare { .. }, .. })
    }

    /// Names it to a backend.
    pub(crate) fn token(&self, id: RequestId) -> u64 {
        u64::from(self.generation) << 32 | u64::from(id)
    }

    /// Whether it has to wait for a buffer before it can go on.
    #[inline]
    pub(crate) fn needs_buffer(&self) -> bool {
        match self.direction {
            Direction::None => self.scratch_len > 0,
            // A Compare of in-capsule data still needs room for what the namespace holds.
            Direction::FromHost => self.buffer.is_none() || self.scratch_len > 0,
            Direction::ToHost => true,
        }
    }

    /// The host's memory, piece by piece; `list` is the request's place in the table of lists.
    #[inline(always)]
    pub(crate) fn descriptors<'a>(&'a self, list: &'a [KeyedSgl]) -> &'a [KeyedSgl] {
        match &self.host {
            HostData::One(keyed) => std::slice::from_ref(keyed),
            HostData::List(count) => list.get(..usize::from(*count)).unwrap_or_default(),
            HostData::None | HostData::InCapsule => &[],
        }
    }

    /// Takes back what a backend was lent.
    #[inline]
    pub(crate) fn take_data_back(&mut self, data: Option<IoData>) {
        let Some(data) = data else { return };
        if self.scratch_len > 0 {
            self.second = Some(data.buffer);
        } else {
            self.data_start = data.start;
            self.buffer = Some(data.buffer);
        }
    }

    pub(crate) fn extra_mut(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// Whether it asks for a range lock of its own before it runs.
    pub(crate) fn locks(&self) -> bool {
        matches!(self.job, Job::Io { command: IoCommand::Copy { .. }, .. })
            || self.extra.as_ref().is_some_and(|extra| extra.partner.is_some())
    }

    /// Send queue entries that the data need: one per descriptor that carries some of them.
    #[inline]
    pub(crate) fn data_wrs(&self) -> u8 {
        match (self.direction, self.host) {
            (Direction::None, _) | (_, HostData::None | HostData::InCapsule) => 0,
            (_, HostData::One(_)) => 1,
            (_, HostData::List(count)) => count,
        }
    }
}

/// All requests of a reactor, and the descriptor lists of those that have one.
#[derive(Debug)]
pub(crate) struct Requests {
    slots: Vec<Request>,
    free: Vec<RequestId>,
    lists: Vec<[KeyedSgl; MAX_DESCRIPTORS]>,
}

/// Keyed descriptors in a last-segment list.
pub(crate) const MAX_DESCRIPTORS: usize = 16;

impl Requests {
    pub(crate) fn new(count: usize) -> Self {
        let count_id = u32::try_from(count).expect("requests below 2^32");
        Self {
            slots: (0..count).map(|_| Request::empty()).collect(),
            free: (0..count_id).rev().collect(),
            lists: vec![[KeyedSgl { addr: 0, len: 0, rkey: 0, invalidate: false }; MAX_DESCRIPTORS]; count],
        }
    }

    /// A free slot for a command of `queue`.
    #[inline(always)]
    pub(crate) fn take(&mut self, queue: u32, cid: u16) -> Option<(RequestId, &mut Request)> {
        let id = self.free.pop()?;
        let slot = self.slots.get_mut(id as usize)?;
        slot.state = State::Received;
        slot.queue = queue;
        slot.cid = cid;
        slot.job = Job::Respond;
        slot.direction = Direction::None;
        slot.host = HostData::None;
        slot.data_len = 0;
        slot.data_start = 0;
        slot.scratch_len = 0;
        slot.share = STRANGERS;
        slot.line = Line::None;
        slot.born = 0;
        slot.completion = Completion::success(cid);
        slot.invalidate = None;
        slot.credits = 0;
        slot.next_desc = 0;
        slot.reads_pending = 0;
        slot.read_posted = 0;
        slot.next_range = 0;
        slot.changes_media = false;
        slot.abort = None;
        slot.subject = Subject::default();
        slot.close_after = false;
        Some((id, slot))
    }

    /// Gives a slot back. Its buffers were taken out before.
    #[inline(always)]
    pub(crate) fn release(&mut self, id: RequestId) {
        self.slots[id as usize].clear();
        self.free.push(id);
    }

    /// As `find_mut`, and the list that the request goes to when it is cleared.
    #[inline(always)]
    pub(crate) fn find_ending(
        &mut self,
        id: RequestId,
        generation: u32,
    ) -> Option<(&mut Request, &mut Vec<RequestId>)> {
        let slot = self.slots.get_mut(id as usize)?;
        (slot.generation == generation && slot.state != State::Free).then_some((slot, &mut self.free))
    }

    /// Whether what is left is the reserve.
    #[inline]
    pub(crate) fn is_scarce(&self) -> bool {
        self.free.len() <= REQUEST_RESERVE
    }

    /// The queue of each request in use.
    pub(crate) fn holders(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().filter(|slot| slot.state != State::Free).map(|slot| slot.queue)
    }

    pub(crate) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The states of requests in use.
    #[cfg(test)]
    pub(crate) fn states(&self) -> impl Iterator<Item = State> + '_ {
        self.slots.iter().map(|slot| slot.state).filter(|state| *state != State::Free).take(self.in_use())
    }

    pub(crate) fn list(&self, id: RequestId) -> &[KeyedSgl; MAX_DESCRIPTORS] {
        &self.lists[id as usize]
    }

    pub(crate) fn list_mut(&mut self, id: RequestId) -> &mut [KeyedSgl; MAX_DESCRIPTORS] {
        &mut self.lists[id as usize]
    }

    /// The other half of a fused pair.
    pub(crate) fn partner(&self, id: RequestId) -> Option<RequestId> {
        self[id].extra.as_ref()?.partner
    }

    /// Two different requests.
    ///
    /// # Panics
    /// If they are one.
    pub(crate) fn two(&mut self, one: RequestId, other: RequestId) -> [&mut Request; 2] {
        self.slots.get_disjoint_mut([one as usize, other as usize]).expect("two requests")
    }

    /// A request, and its place in the table of descriptor lists.
    #[inline]
    pub(crate) fn with_list(&mut self, id: RequestId) -> (&mut Request, &[KeyedSgl; MAX_DESCRIPTORS]) {
        (&mut self.slots[id as usize], &self.lists[id as usize])
    }

    /// As `find`, to change it.
    #[inline(always)]
    pub(crate) fn find_mut(&mut self, id: RequestId, generation: u32) -> Option<&mut Request> {
        self.slots.get_mut(id as usize).filter(|slot| slot.generation == generation && slot.state != State::Free)
    }

    /// The request that a completion's tag or token names, unless the slot has moved on.
    pub(crate) fn find(&self, id: RequestId, generation: u32) -> Option<&Request> {
        self.slots.get(id as usize).filter(|slot| slot.generation == generation && slot.state != State::Free)
    }

    /// Whether any request is about a namespace of this reactor.
    pub(crate) fn on_namespace(&self, at: u32) -> bool {
        self.of_namespace(at).next().is_some()
    }

    /// Requests of one namespace that are in progress in its backend.
    pub(crate) fn in_backend(&self, at: u32, matches: impl Fn(&IoCommand) -> bool) -> impl Iterator<Item = RequestId> {
        let in_progress = move |slot: &Request| match slot.job {
            Job::Io { namespace, ref command } => {
                namespace == at && matches!(slot.state, State::Executing | State::Orphan) && matches(command)
            }
            _ => false,
        };
        (0u32..).zip(&self.slots).filter(move |(_, slot)| in_progress(slot)).map(|(id, _)| id)
    }

    /// Requests of one namespace.
    pub(crate) fn of_namespace(&self, at: u32) -> impl Iterator<Item = RequestId> + '_ {
        let concerned = move |slot: &Request| {
            slot.state != State::Free && matches!(slot.job, Job::Io { namespace, .. } if namespace == at)
        };
        (0u32..).zip(&self.slots).filter(move |(_, slot)| concerned(slot)).map(|(id, _)| id)
    }

    /// Requests of one queue.
    pub(crate) fn of_queue(&self, queue: u32) -> impl Iterator<Item = RequestId> + '_ {
        (0u32..)
            .zip(&self.slots)
            .filter(move |(_, slot)| slot.state != State::Free && slot.queue == queue)
            .map(|(id, _)| id)
    }
}

impl std::ops::Index<RequestId> for Requests {
    type Output = Request;
    fn index(&self, id: RequestId) -> &Request {
        &self.slots[id as usize]
    }
}

impl std::ops::IndexMut<RequestId> for Requests {
    fn index_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.slots[id as usize]
    }
}

/// Tags carry 24 bits of generation.
pub(crate) const GENERATION_MASK: u32 = (1 << 24) - 1;

/// What a work request was for. Completions are dispatched on this, never on their opcode, which a failed one does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum TagKind {
    Receive = 1,
    Read = 2,
    Write = 3,
    Send = 4,
    Drain = 5,
}

/// The 64 bits that travel with a work request: kind, generation, index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) kind: TagKind,
    pub(crate) generation: u32,
    pub(crate) index: u32,
}

impl Tag {
    #[inline(always)]
    pub(crate) fn encode(self) -> u64 {
        (self.kind as u64) << 56 | u64::from(self.generation & GENERATION_MASK) << 32 | u64::from(self.index)
    }

    #[inline(always)]
    pub(crate) fn decode(tag: u64) -> Option<Self> {
        let kind = match tag >> 56 {
            1 => TagKind::Receive,
            2 => TagKind::Read,
            3 => TagKind::Write,
            4 => TagKind::Send,
            5 => TagKind::Drain,
            _ => return None,
        };
        Some(Self { kind, generation: (tag >> 32) as u32 & GENERATION_MASK, index: tag as u32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_survive_the_round_trip() {
        for kind in [TagKind::Receive, TagKind::Read, TagKind::Write, TagKind::Send, TagKind::Drain] {
            let tag = Tag { kind, generation: 0xab_cdef, index: 0x89ab_cdef };
            assert_eq!(Tag::decode(tag.encode()), Some(tag));
        }
        assert_eq!(Tag::decode(0), None);
        assert_eq!(Tag::decode(u64::MAX), None);
    }

    #[test]
    fn a_late_completion_does_not_find_the_slots_next_user() {
        let mut requests = Requests::new(1);
        let (id, _) = requests.take(0, 7).unwrap();
        let generation = requests[id].generation;
        assert!(requests.find(id, generation).is_some());
        assert!(requests.take(0, 8).is_none());
        requests.release(id);
        assert!(requests.find(id, generation).is_none());
        let (again, _) = requests.take(0, 8).unwrap();
        assert_eq!(again, id);
        assert!(requests.find(id, generation).is_none());
        assert!(requests.find(5, 0).is_none());
    }
}
