//! Send queues, and what each kind of work request does to the memory and the receives of the two ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::LocalOptions;
use super::cm::{LocalIncoming, LocalOutgoing};
use super::fabric::{Fabric, Link};
use super::faults::{FaultState, WorkKind};
use super::memory::{self, Use};
use super::shell::{Origin, Shell, Source, State};
use crate::rdma::{Completion, QpId, SendOp, SendWr, WcStatus};

/// A send request in its queue.
pub(super) struct Work {
    pub(super) wr: SendWr,
    /// The inline bytes of a request that was handed over and has to wait: its memory is its poster's again.
    pub(super) saved: Option<Box<[u8]>>,
    /// It found no receive once.
    pub(super) waited: bool,
}

/// The other end, as the owner of this end knows it.
pub(super) struct Peer {
    pub(super) shell: Arc<Shell>,
    pub(super) qp: QpId,
    pub(super) link: Arc<Link>,
    /// RDMA READs that the other end lets us have under way.
    pub(super) read_limit: u32,
}

/// The owner's half of a queue pair.
pub(super) struct OwnQp {
    pub(super) queue: VecDeque<Work>,
    /// Of these, handed over by `flush`.
    pub(super) flushed: usize,
    pub(super) capacity: u32,
    pub(super) used: u32,
    /// Slots of unsignaled requests done since the last completion.
    pub(super) silent: u32,
    pub(super) receive_capacity: u32,
    pub(super) receives: u32,
    pub(super) reads: u32,
    /// RDMA READs that we asked for.
    pub(super) depth: u32,
    /// RDMA READs and WRITEs done.
    pub(super) transfers: u64,
    pub(super) dirty: bool,
    pub(super) peer: Option<Peer>,
    pub(super) link: Option<Arc<Link>>,
    pub(super) incoming: Option<LocalIncoming>,
    pub(super) outgoing: Option<LocalOutgoing>,
}

impl OwnQp {
    /// Completes everything handed over as flushed.
    pub(super) fn flush_all(&mut self, qp: QpId, state: &mut State) {
        while self.flushed > 0 {
            self.flushed -= 1;
            let Some(work) = self.queue.pop_front() else { break };
            let slots = std::mem::take(&mut self.silent) + 1;
            let read = matches!(work.wr.op, SendOp::RdmaRead { .. });
            state.complete_failed(qp, work.wr.tag, WcStatus::Flushed, Origin::Send { slots, read });
        }
    }

    /// Counts what was posted since the last time as handed over.
    pub(super) fn take_over(&mut self) {
        let fresh = self.queue.range(self.flushed..);
        let reads = fresh.filter(|work| matches!(work.wr.op, SendOp::RdmaRead { .. })).count();
        self.reads += reads as u32;
        self.flushed = self.queue.len();
    }

    /// Copies out the inline bytes of what was handed over and waits.
    pub(super) fn save_inline(&mut self, state: &State) {
        for work in self.queue.range_mut(..self.flushed) {
            if work.wr.inline
                && work.saved.is_none()
                && let Some(span) = state.regions.local(&work.wr.sge, Use::Local)
            {
                let mut bytes = vec![0; span.len()];
                memory::read(span, &mut bytes);
                work.saved = Some(bytes.into());
            }
        }
    }
}

/// How one work request went.
pub(super) enum Step {
    Done,
    Wait,
    Failed(WcStatus),
}

/// The two queue pairs of a work request.
pub(super) struct Ends<'a> {
    pub(super) fabric: &'a Fabric,
    pub(super) options: &'a LocalOptions,
    pub(super) link: &'a Link,
    pub(super) peer_qp: QpId,
    /// RDMA READ and WRITE copy their bytes.
    pub(super) copies: bool,
}

impl Ends<'_> {
    pub(super) fn carry_out(
        &self,
        work: &Work,
        reads: u32,
        read_limit: u32,
        mine: &mut State,
        theirs: &mut State,
    ) -> Step {
        let wr = &work.wr;
        match wr.op {
            SendOp::Send => self.send(work, None, mine, theirs),
            SendOp::SendInvalidate { rkey } => {
                if !self.options.caps.send_with_invalidate || FaultState::take(&self.fabric.faults.fail_send_invalidate)
                {
                    return Step::Failed(LOCAL_QP_OPERATION);
                }
                self.send(work, Some(rkey), mine, theirs)
            }
            SendOp::RdmaWrite { remote, rkey } => {
                let Some(from) = mine.regions.local(&wr.sge, Use::Local) else {
                    return Step::Failed(WcStatus::LocalProtection);
                };
                let Some(to) = theirs.regions.remote(remote, wr.sge.len, rkey) else {
                    theirs.fail(self.peer_qp, true);
                    return Step::Failed(WcStatus::RemoteAccess);
                };
                mine.counters.writes += 1;
                self.transfer(WorkKind::Write, from, to, mine)
            }
            SendOp::RdmaRead { remote, rkey } => {
                let sink =
                    if self.options.caps.read_sink_needs_remote_write { Use::RemoteWriteSink } else { Use::Local };
                let Some(to) = mine.regions.local(&wr.sge, sink) else {
                    return Step::Failed(WcStatus::LocalProtection);
                };
                if reads > read_limit {
                    theirs.fail(self.peer_qp, true);
                    return Step::Failed(WcStatus::RemoteInvalidRequest);
                }
                let Some(from) = theirs.regions.remote(remote, wr.sge.len, rkey) else {
                    theirs.fail(self.peer_qp, true);
                    return Step::Failed(WcStatus::RemoteAccess);
                };
                mine.counters.reads += 1;
                self.transfer(WorkKind::Read, from, to, mine)
            }
        }
    }

    fn transfer(&self, kind: WorkKind, from: memory::Span, to: memory::Span, mine: &mut State) -> Step {
        if self.fabric.faults.breaks_now(kind) {
            memory::copy(from.head(from.len() / 2), to);
            return self.lose();
        }
        if self.copies {
            memory::copy(from, to);
        }
        mine.counters.rdma_bytes += from.len() as u64;
        Step::Done
    }

    fn lose(&self) -> Step {
        self.link.lost.store(true, Ordering::Release);
        Step::Failed(WcStatus::RetryExceeded)
    }

    fn send(&self, work: &Work, invalidate: Option<u32>, mine: &mut State, theirs: &mut State) -> Step {
        let wr = &work.wr;
        let source = match (&work.saved, mine.regions.local(&wr.sge, Use::Local)) {
            (Some(bytes), _) => Source::Inline(bytes),
            (None, Some(span)) => Source::Memory(span),
            (None, None) => return Step::Failed(WcStatus::LocalProtection),
        };
        if self.fabric.faults.breaks_now(WorkKind::Send) {
            return self.lose();
        }
        let Some((receive, origin)) = theirs.take_receive(self.peer_qp) else {
            return if self.fabric.faults.fatal_rnr.load(Ordering::Acquire) {
                Step::Failed(WcStatus::RnrRetryExceeded)
            } else {
                Step::Wait
            };
        };
        let placed = theirs.place(&receive, &source);
        let byte_len = match placed {
            Ok(byte_len) => byte_len,
            Err(status) => {
                theirs.complete_failed(self.peer_qp, receive.tag, status, origin);
                theirs.fail(self.peer_qp, true);
                let told = match status {
                    WcStatus::LocalLength => WcStatus::RemoteInvalidRequest,
                    _ => WcStatus::RemoteOperation,
                };
                return Step::Failed(told);
            }
        };
        if let Some(rkey) = invalidate
            && !theirs.regions.invalidate(rkey)
        {
            theirs.complete_failed(self.peer_qp, receive.tag, WcStatus::LocalProtection, origin);
            theirs.fail(self.peer_qp, true);
            return Step::Failed(WcStatus::RemoteAccess);
        }
        let completion = Completion {
            tag: receive.tag,
            status: WcStatus::Success,
            byte_len,
            qp: self.peer_qp,
            invalidated: invalidate,
        };
        theirs.complete(completion, origin, wr.solicited);
        mine.counters.sends += 1;
        mine.counters.send_invalidates += u64::from(invalidate.is_some());
        Step::Done
    }
}

/// `ibv_wc_status` of a local queue pair operation error.
const LOCAL_QP_OPERATION: WcStatus = WcStatus::Other(2);
