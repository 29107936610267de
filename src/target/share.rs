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
use super::request::{Request, RequestId, Requests};
use crate::mem::{Buffer, Pool};

/// What a host may hold, as a multiple of what it leaves.
const SPREAD: usize = 4;

/// Where a buffer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Origin {
    /// The data pool.
    Data = 0,
    /// The admin pool.
    Admin = 1,
    /// The receive pages: a host has no more of them than it has commands in progress.
    Page = 2,
}

impl Origin {
    /// The pools are named after it.
    #[inline(always)]
    pub(crate) fn of(buffer: &Buffer) -> Self {
        match buffer.pool() {
            0 => Self::Data,
            1 => Self::Admin,
            _ => Self::Page,
        }
    }
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

impl Claim {
    /// Whether so many bytes more are within the host's share.
    #[inline(always)]
    fn admits(&self, need: usize, pool: &Pool) -> bool {
        let left = pool.stats().free.saturating_sub(need);
        self.held == 0 || (left >= Pool::MAX_BUFFER && self.held + need <= SPREAD * left)
    }
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
    pub(crate) fn take(&mut self, of: Of, id: RequestId, request: &mut Request, memory: &mut Memory) -> bool {
        if self.is_next(of, request.share) {
            match self.try_take(of, [request], memory) {
                Taken::Yes => return true,
                Taken::Enough => {}
                Taken::Short => self.short[of as usize] = true,
            }
        }
        self.wait(of, id, request.share);
        false
    }

    /// The one buffer of a plain command. `None`, and nothing has changed, where `take` might have it wait.
    #[inline(always)]
    pub(crate) fn take_one(&mut self, at: ShareId, len: u32, memory: &mut Memory) -> Option<Buffer> {
        let claim = &mut self.shares.get_mut(at as usize)?.claims[Of::Data as usize];
        let (len, need) = (len as usize, Pool::footprint(len as usize));
        if self.short[Of::Data as usize] || !claim.line.is_empty() || !claim.admits(need, &memory.pool) {
            return None;
        }
        let buffer = memory.pool.take(len)?;
        claim.held += need;
        Some(buffer)
    }

    /// As `take`, for both halves of a fused pair; `first` stands in the line for both. One of them alone would keep what it has
    /// while the other waits.
    pub(crate) fn take_pair(
        &mut self,
        of: Of,
        [first, second]: [RequestId; 2],
        requests: &mut Requests,
        memory: &mut Memory,
    ) -> bool {
        let share = requests[first].share;
        if self.is_next(of, share) {
            match self.try_take(of, requests.two(first, second), memory) {
                Taken::Yes => return true,
                Taken::Enough => {}
                Taken::Short => self.short[of as usize] = true,
            }
        }
        self.wait(of, first, share);
        false
    }

    #[inline(always)]
    fn is_next(&self, of: Of, at: ShareId) -> bool {
        !self.short[of as usize] && self.shares[at as usize].claims[of as usize].line.is_empty()
    }

    /// All that these requests of one share need, or nothing.
    #[inline(always)]
    fn try_take<const N: usize>(&mut self, of: Of, requests: [&mut Request; N], memory: &mut Memory) -> Taken {
        let claim = &mut self.shares[requests[0].share as usize].claims[of as usize];
        let pool = match of {
            Of::Data => &mut memory.pool,
            Of::Admin => &mut memory.admin_pool,
        };
        let need = requests.iter().map(|request| need(request)).sum::<usize>();
        if !claim.admits(need, pool) {
            return Taken::Enough;
        }
        let had = requests.each_ref().map(|request| request.buffer.is_some());
        for at in 0..N {
            if fill(requests[at], pool) {
                continue;
            }
            for (request, had) in requests.into_iter().zip(had).take(at) {
                request.second.take().into_iter().for_each(|buffer| pool.give(buffer));
                request.buffer.take_if(|_| !had).into_iter().for_each(|buffer| pool.give(buffer));
            }
            return Taken::Short;
        }
        claim.held += need;
        Taken::Yes
    }

    #[cold]
    fn wait(&mut self, of: Of, id: RequestId, at: ShareId) {
        let line = &mut self.shares[at as usize].claims[of as usize].line;
        if line.is_empty() {
            self.round[of as usize].push_back(at);
        }
        line.push_back(id);
        if !self.waited.contains(&at) {
            self.waited.push(at);
        }
    }

    /// The next request that waited and has its buffers now; its partner, if it has one, has them too.
    pub(crate) fn serve(&mut self, of: Of, requests: &mut Requests, memory: &mut Memory) -> Option<RequestId> {
        self.short[of as usize] = false;
        for _ in 0..self.round[of as usize].len() {
            let at = *self.round[of as usize].front()?;
            let id = *self.shares[at as usize].claims[of as usize].line.front()?;
            let taken = match requests.partner(id) {
                Some(partner) => self.try_take(of, requests.two(id, partner), memory),
                None => self.try_take(of, [&mut requests[id]], memory),
            };
            match taken {
                Taken::Yes => {
                    let line = &mut self.shares[at as usize].claims[of as usize].line;
                    line.pop_front();
                    if line.is_empty() {
                        self.round[of as usize].pop_front();
                    } else {
                        self.round[of as usize].rotate_left(1);
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
        let (buffer, second) = (request.buffer.take(), request.second.take());
        let any = buffer.is_some() || second.is_some();
        if let Some(buffer) = buffer {
            self.give_one(request.share, buffer, memory);
        }
        if let Some(second) = second {
            self.give_one(request.share, second, memory);
        }
        any
    }

    #[inline(always)]
    fn give_one(&mut self, at: ShareId, buffer: Buffer, memory: &mut Memory) {
        let bytes = buffer.capacity();
        let of = match memory.give(buffer) {
            Origin::Data => Of::Data,
            Origin::Admin => Of::Admin,
            Origin::Page => return,
        };
        self.shares[at as usize].claims[of as usize].held -= bytes;
    }

    /// Bytes held, over all shares.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.shares.iter().flat_map(|(_, share)| &share.claims).map(|claim| claim.held).sum()
    }
}

/// Bytes of the pool that a request wants.
#[inline(always)]
fn need(request: &Request) -> usize {
    let (len, scratch) = (request.data_len as usize, request.scratch_len as usize);
    let data = if len > 0 && request.buffer.is_none() { Pool::footprint(len) } else { 0 };
    data + if scratch > 0 { Pool::footprint(scratch) } else { 0 }
}

/// Takes what a request wants, or nothing.
#[inline(always)]
fn fill(request: &mut Request, pool: &mut Pool) -> bool {
    let (len, scratch) = (request.data_len as usize, request.scratch_len as usize);
    if scratch > 0 {
        request.second = pool.take(scratch);
        if request.second.is_none() {
            return false;
        }
    }
    if len > 0 && request.buffer.is_none() {
        request.buffer = pool.take(len);
        if request.buffer.is_none() {
            request.second.take().into_iter().for_each(|buffer| pool.give(buffer));
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Options;

    const MIB: usize = 1 << 20;

    struct World {
        shares: Shares,
        requests: Requests,
        memory: Memory,
    }

    impl World {
        /// Data buffers of 8 MiB.
        fn new() -> Self {
            let options = Options { pool_size: 8 * MIB, receive_slots: 128, ..Options::default() };
            let memory = Memory::new(&options).expect("memory");
            assert_eq!(memory.pool.stats().total, 8 * MIB);
            Self { shares: Shares::new(), requests: Requests::new(64), memory }
        }

        fn request(&mut self, share: ShareId, len: usize) -> RequestId {
            let (id, _) = self.requests.take(0, 0).expect("a request");
            self.requests[id].share = share;
            self.requests[id].data_len = len as u32;
            id
        }

        fn take(&mut self, share: ShareId, len: usize) -> (RequestId, bool) {
            let id = self.request(share, len);
            let got = self.shares.take(Of::Data, id, &mut self.requests[id], &mut self.memory);
            (id, got)
        }

        fn give(&mut self, id: RequestId) -> Vec<RequestId> {
            self.shares.give(&mut self.requests[id], &mut self.memory);
            std::iter::from_fn(|| self.shares.serve(Of::Data, &mut self.requests, &mut self.memory)).collect()
        }
    }

    #[test]
    fn one_host_leaves_some_and_a_newcomer_gets_it() {
        let mut world = World::new();
        let hosts: Vec<Arc<Limiter>> = (0..2).map(|_| Arc::default()).collect();
        let (greedy, other) = (world.shares.join(&hosts[0]), world.shares.join(&hosts[1]));
        assert_eq!(world.shares.join(&hosts[0]), greedy);
        let taken: Vec<(RequestId, bool)> = (0..10).map(|_| world.take(greedy, MIB)).collect();
        assert_eq!(taken.iter().filter(|(_, got)| *got).count(), 6, "four fifths of 8 MiB");
        let (mine, got) = world.take(other, MIB);
        assert!(got, "its line does not hold up others");
        assert!(world.give(mine).is_empty(), "the greedy one has its share still");
        // One of its own back: its oldest goes on.
        assert_eq!(world.give(taken[0].0), [taken[6].0]);
        assert!(
            world.shares.anybody_waited() && world.shares.others_waited(other) && !world.shares.others_waited(greedy)
        );
    }

    #[test]
    fn a_large_wish_is_not_overtaken_by_small_ones() {
        let mut world = World::new();
        let hosts: Vec<Arc<Limiter>> = (0..9).map(|_| Arc::default()).collect();
        let shares: Vec<ShareId> = hosts.iter().map(|host| world.shares.join(host)).collect();
        // A host that holds nothing may always have its first one.
        let held: Vec<RequestId> = shares[..7].iter().map(|share| world.take(*share, MIB).0).collect();
        let (small, got) = world.take(shares[7], 4096);
        assert!(got);
        let (large, got) = world.take(shares[8], MIB);
        assert!(!got, "no MiB is left in one piece");
        let (late, got) = world.take(STRANGERS, 4096);
        assert!(!got, "who comes later stands behind");
        assert!(world.give(small).contains(&large), "all that was split is whole again");
        assert_eq!(world.give(held[0]), [late]);
    }

    #[test]
    fn a_pair_gets_all_or_nothing() {
        let mut world = World::new();
        let hosts: Vec<Arc<Limiter>> = (0..2).map(|_| Arc::default()).collect();
        let (one, other) = (world.shares.join(&hosts[0]), world.shares.join(&hosts[1]));
        let (mine, _) = world.take(one, 6 * MIB / 6);
        let theirs: Vec<RequestId> = (0..5).map(|_| world.take(other, MIB).0).collect();
        let (compare, write) = (world.request(one, MIB), world.request(one, MIB));
        world.requests[compare].scratch_len = MIB as u32;
        for (half, partner) in [(compare, write), (write, compare)] {
            world.requests[half].extra_mut().partner = Some(partner);
        }
        let World { shares, requests, memory } = &mut world;
        assert!(!shares.take_pair(Of::Data, [write, compare], requests, memory));
        let held = |world: &World| world.memory.pool.stats().total - world.memory.pool.stats().free;
        assert_eq!(held(&world), 6 * MIB, "nothing is held by one half alone");
        assert!(world.give(theirs[0]).is_empty());
        assert_eq!(world.give(theirs[1]), [write], "1 MiB held, 3 wanted, 1 left");
        assert_eq!(held(&world), 7 * MIB);
        assert!(world.requests[compare].buffer.is_some() && world.requests[compare].second.is_some());
        for id in [mine, theirs[2], theirs[3], theirs[4], compare, write] {
            world.give(id);
        }
        assert_eq!((held(&world), world.shares.held()), (0, 0));
    }

    #[test]
    fn a_plain_command_overtakes_nobody_and_keeps_to_its_share() {
        let mut world = World::new();
        let hosts: Vec<Arc<Limiter>> = (0..2).map(|_| Arc::default()).collect();
        let (one, other) = (world.shares.join(&hosts[0]), world.shares.join(&hosts[1]));
        let World { shares, memory, .. } = &mut world;
        let plain = |shares: &mut Shares, memory: &mut Memory, at| shares.take_one(at, MIB as u32, memory);
        let taken: Vec<Buffer> = std::iter::from_fn(|| plain(shares, memory, one)).collect();
        assert_eq!((taken.len(), shares.held()), (6, 6 * MIB), "four fifths of 8 MiB, and counted");
        assert!(!shares.anybody_waited(), "nothing waits by it");
        let theirs = plain(shares, memory, other);
        assert!(theirs.is_some(), "the other host's share is its own");
        // Somebody of the first host waits: nobody of it comes before.
        let (waiting, got) = world.take(one, MIB);
        assert!(!got);
        let World { shares, memory, requests } = &mut world;
        let last = taken.into_iter().map(|buffer| shares.give_one(one, buffer, memory)).count();
        assert_eq!((last, shares.held()), (6, MIB), "all are back");
        assert!(plain(shares, memory, one).is_none());
        assert_eq!(shares.serve(Of::Data, requests, memory), Some(waiting));
        assert!(plain(shares, memory, one).is_some());
    }

    #[test]
    fn who_leaves_the_line_holds_up_nobody() {
        let mut world = World::new();
        let host: Arc<Limiter> = Arc::default();
        let share = world.shares.join(&host);
        let held: Vec<RequestId> = (0..6).map(|_| world.take(share, MIB).0).collect();
        let (waiting, got) = world.take(share, MIB);
        assert!(!got);
        world.shares.leave_line(waiting, share);
        let (small, got) = world.take(share, 4096);
        assert!(got, "the line is empty again");
        let (next, got) = world.take(share, MIB);
        assert!(!got);
        assert_eq!(world.give(held[0]), [next]);
        for id in held[1..].iter().chain([&small, &next]) {
            world.give(*id);
        }
        world.shares.leave(share);
        assert_eq!(world.shares.shares.len(), 1, "only that of the strangers is left");
    }
}
