//! Who holds the data buffers of a reactor, and who waits for some: a share for each host.
//!
//! A host that takes no responses, answers no RDMA READs or has its namespace on a disk that stands still keeps the buffers of
//! its commands. So that it cannot have them all, a host that holds some takes more only while it then holds at most [`SPREAD`]
//! times what is left, and the largest buffer is left: one host alone gets four fifths of a pool, and some is left for whoever
//! comes (the dynamic threshold of switches that share their packet memory; Choudhury and Hahne, 1998). Within a share the oldest
//! waits first; between shares it goes round.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;

use super::limits::Limiter;
use super::memory::Memory;
use super::request::{Request, RequestId};
use crate::mem::Pool;

/// What a host may hold, as a multiple of what it leaves.
const SPREAD: usize = 4;

/// Where a buffer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The data pool.
    Data,
    /// The admin pool.
    Admin,
    /// The receive pages: a host has no more of them than it has commands in progress.
    Page,
}

/// Index of a share. The first one is that of all queues without an association.
pub(crate) type ShareId = u32;

/// The share of queues whose hosts are not known yet.
pub(crate) const STRANGERS: ShareId = 0;

/// A pool whose buffers are shared out, as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Of {
    Data = 0,
    Admin = 1,
}

impl Of {
    pub(crate) const BOTH: [Self; 2] = [Self::Admin, Self::Data];

    #[inline(always)]
    pub(crate) fn queue(admin: bool) -> Self {
        if admin { Self::Admin } else { Self::Data }
    }
}

/// What became of a wish for buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Yes,
    /// The host has its share.
    Enough,
    /// The pool has none.
    Short,
}

/// What one host holds and waits for in one pool.
#[derive(Debug, Default)]
struct Claim {
    /// Bytes.
    held: usize,
    line: VecDeque<RequestId>,
}

#[derive(Debug, Default)]
struct Share {
    /// Names the host: every queue of it in a subsystem has the same. `None` for the strangers.
    host: Option<Arc<Limiter>>,
    queues: u32,
    claims: [Claim; 2],
}

/// The shares of all hosts of a reactor.
#[derive(Debug)]
pub(crate) struct Shares {
    shares: Slab<Share>,
    /// Shares with a line, the next to be served first.
    round: [VecDeque<ShareId>; 2],
    /// The next one's wish is within its share, and the pool could not fill it: nobody takes anything before that is done, or
    /// small wishes would keep a large one waiting for ever.
    short: [bool; 2],
    /// Shares that had to wait since somebody last looked.
    waited: Vec<ShareId>,
}

impl Shares {
    pub(crate) fn new() -> Self {
        let mut shares = Slab::new();
        shares.insert(Share::default());
        Self { shares, round: Default::default(), short: [false; 2], waited: Vec::new() }
    }

    /// The share of a queue's host, from its Connect command on.
    pub(crate) fn join(&mut self, host: &Arc<Limiter>) -> ShareId {
        let is_its = |share: &Share| share.host.as_ref().is_some_and(|known| Arc::ptr_eq(known, host));
        let known = self.shares.iter().find(|(_, share)| is_its(share)).map(|(at, _)| at);
        let at =
            known.unwrap_or_else(|| self.shares.insert(Share { host: Some(Arc::clone(host)), ..Share::default() }));
        self.shares[at].queues += 1;
        at as ShareId
    }

    /// A queue is gone, and its requests are.
    pub(crate) fn leave(&mut self, at: ShareId) {
        if at == STRANGERS {
            return;
        }
        let share = &mut self.shares[at as usize];
        share.queues -= 1;
        if share.queues == 0 {
            debug_assert!(share.claims.iter().all(|claim| claim.held == 0 && claim.line.is_empty()), "{share:?}");
            self.shares.remove(at as usize);
        }
    }

    /// Takes all the buffers that a request of this share needs, or puts it into its line.
    #[inline(always)]
    pub(crate) fn take(
        &mut self,
        of: Of,
        id: RequestId,
        request: &mut Request,
        follows: bool,
        memory: &mut Memory,
    ) -> bool {
        let at = request.share;
        if !self.short[of as usize] && self.shares[at as usize].claims[of as usize].line.is_empty() {
            match self.try_take(of, request, follows, memory) {
                Taken::Yes => return true,
                Taken::Enough => {}
                Taken::Short => self.short[of as usize] = true,
            }
        }
        self.wait(of, id, at, follows);
        false
    }

    #[inline(always)]
    fn try_take(&mut self, of: Of, request: &mut Request, follows: bool, memory: &mut Memory) -> Taken {
        let claim = &mut self.shares[request.share as usize].claims[of as usize];
        let (len, scratch) = (request.data_len as usize, request.scratch_len as usize);
        let wants_data = len > 0 && request.buffer.is_none();
        let need =
            if wants_data { Pool::footprint(len) } else { 0 } + if scratch > 0 { Pool::footprint(scratch) } else { 0 };
        let pool = match of {
            Of::Data => &mut memory.pool,
            Of::Admin => &mut memory.admin_pool,
        };
        // The other half of a pair holds buffers already: to let this one wait for them would be to wait for ever.
        if claim.held > 0 && !follows {
            let left = pool.stats().free.saturating_sub(need);
            if left < Pool::MAX_BUFFER || claim.held + need > SPREAD * left {
                return Taken::Enough;
            }
        }
        if scratch > 0 {
            request.second = pool.take(scratch);
            if request.second.is_none() {
                return Taken::Short;
            }
        }
        if wants_data {
            request.buffer = pool.take(len);
            if request.buffer.is_none() {
                if let Some(second) = request.second.take() {
                    pool.give(second);
                }
                return Taken::Short;
            }
        }
        claim.held += need;
        Taken::Yes
    }

    #[cold]
    fn wait(&mut self, of: Of, id: RequestId, at: ShareId, follows: bool) {
        let line = &mut self.shares[at as usize].claims[of as usize].line;
        let round = &mut self.round[of as usize];
        if line.is_empty() {
            // What others would take before it is what it waits for, when they wait for what its other half holds.
            if follows { round.push_front(at) } else { round.push_back(at) }
        }
        line.push_back(id);
        if !self.waited.contains(&at) {
            self.waited.push(at);
        }
    }

    /// The next request that waited and has its buffers now.
    pub(crate) fn serve(
        &mut self,
        of: Of,
        requests: &mut super::request::Requests,
        memory: &mut Memory,
    ) -> Option<RequestId> {
        self.short[of as usize] = false;
        for _ in 0..self.round[of as usize].len() {
            let at = *self.round[of as usize].front()?;
            let id = *self.shares[at as usize].claims[of as usize].line.front()?;
            let follows = requests.follows(id);
            match self.try_take(of, &mut requests[id], follows, memory) {
                Taken::Yes => {
                    self.shares[at as usize].claims[of as usize].line.pop_front();
                    let next = self.shares[at as usize].claims[of as usize].line.front().copied();
                    match next {
                        None => drop(self.round[of as usize].pop_front()),
                        // The second half of a pair comes right behind the first.
                        Some(next) if requests.follows(next) => {}
                        Some(_) => self.round[of as usize].rotate_left(1),
                    }
                    return Some(id);
                }
                Taken::Enough => self.round[of as usize].rotate_left(1),
                Taken::Short => {
                    self.short[of as usize] = true;
                    return None;
                }
            }
        }
        None
    }

    /// Whether anybody had to wait lately.
    #[inline]
    pub(crate) fn anybody_waited(&self) -> bool {
        !self.waited.is_empty()
    }

    /// Whether another share than this one had to wait lately.
    pub(crate) fn others_waited(&self, at: ShareId) -> bool {
        self.waited.iter().any(|waited| *waited != at)
    }

    /// What was lately is over: only who waits now is remembered.
    pub(crate) fn look_away(&mut self) {
        let Self { waited, round, .. } = self;
        waited.retain(|at| round.iter().any(|round| round.contains(at)));
    }

    /// Takes a request out of its line, if it stands in one.
    pub(crate) fn leave_line(&mut self, id: RequestId, at: ShareId) {
        for of in Of::BOTH {
            let line = &mut self.shares[at as usize].claims[of as usize].line;
            let before = line.len();
            line.retain(|other| *other != id);
            if line.is_empty() && before > 0 {
                self.round[of as usize].retain(|other| *other != at);
            }
        }
    }

    /// Takes a request's buffers back into the pools that they came from; whether there were any.
    #[inline(always)]
    pub(crate) fn give(&mut self, request: &mut Request, memory: &mut Memory) -> bool {
        let mut any = false;
        let share = request.share;
        for buffer in [request.buffer.take(), request.second.take()].into_iter().flatten() {
            let bytes = buffer.capacity();
            let of = match memory.give(buffer) {
                Origin::Data => Some(Of::Data),
                Origin::Admin => Some(Of::Admin),
                Origin::Page => None,
            };
            if let Some(of) = of {
                self.shares[share as usize].claims[of as usize].held -= bytes;
            }
            any = true;
        }
        any
    }

    /// Bytes held, over all shares.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.shares.iter().flat_map(|(_, share)| &share.claims).map(|claim| claim.held).sum()
    }
}
