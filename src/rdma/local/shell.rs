//! The half of an endpoint that its peers touch too, under one lock: registrations, receives, completions, and the state of
//! its queue pairs. Send queues belong to the endpoint's own thread alone and are not here.
//!
//! Lock order: of two shells the one with the lower id first ([`lock_pair`]); nothing else is locked while a shell is, apart
//! from the fault plan.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::sys::eventfd::EventFd;

use super::cm::event_fd;
use super::fabric::LocalCounters;
use super::memory::{self, MAX_SGE, Regions, Span, Use};
use crate::rdma::{Completion, EndpointEvent, QpId, RdmaError, Sge, WcStatus};

/// A posted receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recv {
    pub(super) tag: u64,
    pub(super) sges: [Sge; MAX_SGE],
    pub(super) count: u8,
}

impl Recv {
    pub(super) fn new(tag: u64, sges: &[Sge]) -> Option<Self> {
        let mut all = [Sge { addr: 0, len: 0, lkey: 0 }; MAX_SGE];
        all.get_mut(..sges.len())?.copy_from_slice(sges);
        Some(Self { tag, sges: all, count: sges.len() as u8 })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Made, not connected.
    Idle,
    /// Peers may send to it.
    Ready,
    Error,
}

#[derive(Debug)]
pub(super) struct QpShared {
    pub(super) phase: Phase,
    /// The link that it belongs to; 0 before there is one.
    pub(super) link: u64,
    pub(super) receives: VecDeque<Recv>,
    pub(super) takes_shared: bool,
}

/// What a polled completion gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// So many slots of the send queue; whether it was an RDMA READ.
    Send {
        slots: u32,
        read: bool,
    },
    OwnReceive,
    SharedReceive,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    No,
    Any,
    Solicited,
}

pub(super) struct State {
    pub(super) regions: Regions,
    pub(super) qps: Vec<Option<QpShared>>,
    pub(super) shared: VecDeque<Recv>,
    pub(super) cq: VecDeque<Entry>,
    pub(super) events: VecDeque<EndpointEvent>,
    /// Queue pairs that others put into the error state: their send queues are to be flushed by their owner.
    pub(super) errored: Vec<QpId>,
    /// Who waits for a receive here.
    pub(super) waiters: Vec<Weak<Shell>>,
    pub(super) counters: LocalCounters,
    /// The endpoint is gone; peers may still hold this.
    pub(super) closed: bool,
    arm: Arm,
    signalled: bool,
    wake: bool,
}

pub(super) struct Shell {
    pub(super) id: u64,
    state: Mutex<State>,
    event: EventFd,
    /// Completions to poll.
    ready: AtomicUsize,
    /// Something else for the owner to look at.
    attention: AtomicBool,
    solicited_only: bool,
    lost_events: bool,
}

/// The lock of a shell. Giving it back publishes the number of completions and wakes a sleeper.
pub(super) struct Guard<'a> {
    shell: &'a Shell,
    state: MutexGuard<'a, State>,
}

impl Deref for Guard<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.shell.ready.store(self.state.cq.len(), Ordering::Release);
        if !self.state.errored.is_empty() {
            self.shell.attention.store(true, Ordering::Release);
        }
        if std::mem::take(&mut self.state.wake) {
            self.state.arm = Arm::No;
            self.state.signalled = true;
            self.state.counters.wakeups += 1;
            let _ = self.shell.event.write(1);
        }
    }
}

/// Locks two different shells in the one order.
pub(super) fn lock_pair<'a>(own: &'a Shell, peer: &'a Shell) -> (Guard<'a>, Guard<'a>) {
    debug_assert!(own.id != peer.id, "a link within one endpoint");
    if own.id < peer.id {
        let own = own.lock();
        (own, peer.lock())
    } else {
        let peer = peer.lock();
        (own.lock(), peer)
    }
}

impl Shell {
    pub(super) fn new(id: u64, solicited_only: bool, lost_events: bool) -> Result<Arc<Self>, RdmaError> {
        let state = State {
            regions: Regions::new(id),
            qps: Vec::new(),
            shared: VecDeque::new(),
            cq: VecDeque::new(),
            events: VecDeque::new(),
            errored: Vec::new(),
            waiters: Vec::new(),
            counters: LocalCounters::default(),
            closed: false,
            arm: Arm::No,
            signalled: false,
            wake: false,
        };
        Ok(Arc::new(Self {
            id,
            state: Mutex::new(state),
            event: event_fd()?,
            ready: AtomicUsize::new(0),
            attention: AtomicBool::new(false),
            solicited_only,
            lost_events,
        }))
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        Guard { shell: self, state: self.state.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Whether there may be completions; no lock.
    pub(super) fn has_completions(&self) -> bool {
        self.ready.load(Ordering::Acquire) > 0
    }

    /// Takes the owner's note that something waits for it.
    pub(super) fn take_attention(&self) -> bool {
        self.attention.load(Ordering::Acquire) && self.attention.swap(false, Ordering::AcqRel)
    }

    /// Makes the owner look at its waiting work requests.
    pub(super) fn kick(&self) {
        let mut state = self.lock();
        self.attention.store(true, Ordering::Release);
        state.wake |= state.arm != Arm::No;
    }

    pub(super) fn arm(&self) {
        let mut state = self.lock();
        self.drain(&mut state);
        state.arm = match (self.lost_events, self.solicited_only) {
            (true, _) => Arm::No,
            (false, true) => Arm::Solicited,
            (false, false) => Arm::Any,
        };
        if self.attention.load(Ordering::Acquire) || !state.events.is_empty() {
            state.wake = true;
        }
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn drain(&self, state: &mut State) {
        if std::mem::take(&mut state.signalled) {
            let _ = self.event.read();
        }
    }

    pub(super) fn fail_device(&self) {
        let mut state = self.lock();
        for index in 0..state.qps.len() {
            state.fail(QpId(index as u32), false);
        }
        state.push_event(EndpointEvent::DeviceFailed);
    }

    pub(super) fn counters(&self) -> LocalCounters {
        let state = self.lock();
        if state.closed {
            return LocalCounters::default();
        }
        let receives: usize = state.qps.iter().flatten().map(|qp| qp.receives.len()).sum();
        LocalCounters {
            endpoints: 1,
            queue_pairs: state.qps.iter().flatten().count() as u64,
            regions: state.regions.len() as u64,
            receives: (receives + state.shared.len()) as u64,
            ..state.counters
        }
    }
}

impl State {
    pub(super) fn qp(&mut self, qp: QpId) -> Option<&mut QpShared> {
        self.qps.get_mut(qp.0 as usize)?.as_mut()
    }

    pub(super) fn phase(&self, qp: QpId) -> Phase {
        self.qps.get(qp.0 as usize).and_then(Option::as_ref).map_or(Phase::Error, |qp| qp.phase)
    }

    /// The state of the queue pair at the other end of `link`; `Error` when it is gone, whoever has its number now.
    pub(super) fn peer_phase(&self, qp: QpId, link: u64) -> Phase {
        match self.qps.get(qp.0 as usize).and_then(Option::as_ref) {
            Some(qp) if qp.link == link => qp.phase,
            _ => Phase::Error,
        }
    }

    pub(super) fn complete(&mut self, completion: Completion, origin: Origin, solicited: bool) {
        let failed = completion.status != WcStatus::Success;
        self.wake |= match self.arm {
            Arm::No => false,
            Arm::Any => true,
            Arm::Solicited => failed || (solicited && !matches!(origin, Origin::Send { .. })),
        };
        self.cq.push_back(Entry { completion, origin });
    }

    /// A failure, with garbage where nothing means anything.
    pub(super) fn complete_failed(&mut self, qp: QpId, tag: u64, status: WcStatus, origin: Origin) {
        let completion = Completion { tag, status, byte_len: 0xdead_beef, qp, invalidated: Some(0xdead_0001) };
        self.complete(completion, origin, true);
    }

    /// Notes who is to be woken when receives are posted here.
    pub(super) fn add_waiter(&mut self, shell: &Arc<Shell>) {
        if !self.waiters.iter().any(|waiter| waiter.as_ptr() == Arc::as_ptr(shell)) {
            self.waiters.push(Arc::downgrade(shell));
        }
    }

    pub(super) fn push_event(&mut self, event: EndpointEvent) {
        self.events.push_back(event);
        // Asynchronous events wake whoever sleeps on the descriptors, armed or not.
        self.wake = true;
    }

    /// Puts a queue pair into the error state: its own receives are flushed here, its sends by its owner. `event`: tell the
    /// owner by an asynchronous event, as a device does when a peer's request was what failed.
    pub(super) fn fail(&mut self, qp: QpId, event: bool) {
        let Some(shared) = self.qp(qp).filter(|shared| shared.phase != Phase::Error) else { return };
        shared.phase = Phase::Error;
        let receives = std::mem::take(&mut shared.receives);
        let takes_shared = shared.takes_shared;
        for receive in receives {
            self.complete_failed(qp, receive.tag, WcStatus::Flushed, Origin::OwnReceive);
        }
        self.errored.push(qp);
        if event {
            self.push_event(EndpointEvent::QpError(qp));
        }
        if takes_shared {
            self.push_event(EndpointEvent::LastReceive(qp));
        }
        self.wake |= self.arm != Arm::No;
    }

    /// The receive that an arriving SEND takes.
    pub(super) fn take_receive(&mut self, qp: QpId) -> Option<(Recv, Origin)> {
        let shared = self.qp(qp)?;
        if shared.takes_shared {
            self.shared.pop_front().map(|receive| (receive, Origin::SharedReceive))
        } else {
            shared.receives.pop_front().map(|receive| (receive, Origin::OwnReceive))
        }
    }

    /// Scatters what a SEND carries over a receive: the length, or how the receive failed.
    pub(super) fn place(&self, receive: &Recv, source: &Source<'_>) -> Result<u32, WcStatus> {
        let sges = &receive.sges[..receive.count as usize];
        let room: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
        let total = source.len();
        if total as u64 > room {
            return Err(WcStatus::LocalLength);
        }
        let mut done = 0;
        for sge in sges {
            if done == total {
                break;
            }
            let span = self.regions.local(sge, Use::Local).ok_or(WcStatus::LocalProtection)?;
            done += source.copy_from(done, span);
        }
        Ok(done as u32)
    }
}

/// The bytes of a SEND: in registered memory, or carried inline.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    Memory(Span),
    Inline(&'a [u8]),
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Memory(span) => span.len(),
            Self::Inline(bytes) => bytes.len(),
        }
    }

    fn copy_from(&self, offset: usize, to: Span) -> usize {
        match self {
            Self::Memory(span) => memory::copy(span.tail(offset), to),
            Self::Inline(bytes) => memory::write(bytes.get(offset..).unwrap_or_default(), to),
        }
    }
}
