//! Work requests that wait for the next doorbell.
//!
//! One pool per endpoint and direction, made once: posting fills the next entry and appends it to its queue's [`Chain`];
//! flushing turns each chain into the linked list that verbs want. Links are indices until then, so nothing here holds
//! a pointer across calls. A full pool is flushed early by its owner, which costs a doorbell and nothing else.

use rdma_sys::{ibv_recv_wr, ibv_send_flags as flag, ibv_send_wr, ibv_sge, ibv_wr_opcode as opcode};

use crate::rdma::{SendOp, SendWr, Sge};

/// Entries of a pool.
pub(super) const POOL: usize = 512;
/// Elements per receive at most.
pub(super) const MAX_RECV_SGE: usize = 8;

const END: u32 = u32::MAX;

/// Requests of one queue, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    first: u32,
    last: u32,
}

impl Chain {
    pub(super) const EMPTY: Self = Self { first: END, last: END };

    pub(super) fn is_empty(self) -> bool {
        self.first == END
    }
}

/// What both directions' requests have in common.
trait Request {
    const SGES: usize;
    fn zeroed() -> Self;
    fn set_links(&mut self, next: *mut Self, sges: *mut ibv_sge);
    fn wr_id(&self) -> u64;
}

impl Request for ibv_send_wr {
    const SGES: usize = 1;

    fn zeroed() -> Self {
        // SAFETY: a C struct of integers, pointers and unions of those: all zeros is a value of it.
        unsafe { std::mem::zeroed() }
    }

    fn set_links(&mut self, next: *mut Self, sges: *mut ibv_sge) {
        (self.next, self.sg_list) = (next, sges);
    }

    fn wr_id(&self) -> u64 {
        self.wr_id
    }
}

impl Request for ibv_recv_wr {
    const SGES: usize = MAX_RECV_SGE;

    fn zeroed() -> Self {
        Self { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 }
    }

    fn set_links(&mut self, next: *mut Self, sges: *mut ibv_sge) {
        (self.next, self.sg_list) = (next, sges);
    }

    fn wr_id(&self) -> u64 {
        self.wr_id
    }
}

/// A pool of requests of one direction.
#[expect(private_bounds, reason = "the trait only joins the two C structs")]
pub(super) struct Pool<W: Request> {
    wrs: Box<[W]>,
    sges: Box<[ibv_sge]>,
    next: Box<[u32]>,
    used: usize,
}

/// Sends of every queue pair of an endpoint.
pub(super) type SendPool = Pool<ibv_send_wr>;
/// Receives of every queue of an endpoint.
pub(super) type RecvPool = Pool<ibv_recv_wr>;

#[expect(private_bounds, reason = "the trait only joins the two C structs")]
impl<W: Request> Pool<W> {
    pub(super) fn new() -> Self {
        Self {
            wrs: (0..POOL).map(|_| W::zeroed()).collect(),
            sges: vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; POOL * W::SGES].into_boxed_slice(),
            next: vec![END; POOL].into_boxed_slice(),
            used: 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == POOL
    }

    /// Forgets all entries: every chain was handed over.
    pub(super) fn reset(&mut self) {
        self.used = 0;
    }

    fn append(&mut self, chain: &mut Chain) -> usize {
        let index = self.used;
        self.used += 1;
        self.next[index] = END;
        if chain.is_empty() {
            chain.first = index as u32;
        } else {
            self.next[chain.last as usize] = index as u32;
        }
        chain.last = index as u32;
        index
    }

    /// Turns a chain into the linked list that verbs take. The pointers in it are good until the pool is touched again.
    pub(super) fn link(&mut self, chain: Chain) -> *mut W {
        let (wrs, sges) = (self.wrs.as_mut_ptr(), self.sges.as_mut_ptr());
        let mut at = chain.first;
        while at != END {
            let index = at as usize;
            let next = self.next[index];
            let link = if next == END { std::ptr::null_mut() } else { wrs.wrapping_add(next as usize) };
            // SAFETY: `index` was made by `append`, so it is below POOL, and nothing else refers to the entry now.
            unsafe { (*wrs.add(index)).set_links(link, sges.wrapping_add(index * W::SGES)) };
            at = next;
        }
        if chain.is_empty() { std::ptr::null_mut() } else { wrs.wrapping_add(chain.first as usize) }
    }

    /// The ids of a chain, in order, from the entry at `bad` on.
    pub(super) fn ids_from(&self, chain: Chain, bad: *const W) -> impl Iterator<Item = u64> + '_ {
        let mut at = chain.first;
        let base = self.wrs.as_ptr();
        while at != END && !std::ptr::eq(base.wrapping_add(at as usize), bad) {
            at = self.next[at as usize];
        }
        self.ids_at(at)
    }

    fn ids_at(&self, first: u32) -> impl Iterator<Item = u64> + '_ {
        let mut at = first;
        std::iter::from_fn(move || {
            let wr = self.wrs.get(at as usize)?;
            at = self.next[at as usize];
            Some(wr.wr_id())
        })
    }
}

impl SendPool {
    /// Appends a send. The pool must not be full.
    pub(super) fn push(&mut self, chain: &mut Chain, id: u64, request: &SendWr) {
        let index = self.append(chain);
        let sge = &mut self.sges[index];
        (sge.addr, sge.length, sge.lkey) = (request.sge.addr, request.sge.len, request.sge.lkey);
        let mut flags = flag(0);
        for (wanted, bit) in [
            (request.signaled, flag::IBV_SEND_SIGNALED),
            (request.solicited, flag::IBV_SEND_SOLICITED),
            (request.inline, flag::IBV_SEND_INLINE),
        ] {
            if wanted {
                flags |= bit;
            }
        }
        let wr = &mut self.wrs[index];
        wr.wr_id = id;
        wr.num_sge = i32::from(request.sge.len != 0);
        wr.send_flags = flags.0;
        match request.op {
            SendOp::Send => wr.opcode = opcode::IBV_WR_SEND,
            SendOp::SendInvalidate { rkey } => {
                wr.opcode = opcode::IBV_WR_SEND_WITH_INV;
                wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
            }
            SendOp::RdmaWrite { remote, rkey } => {
                wr.opcode = opcode::IBV_WR_RDMA_WRITE;
                wr.wr.rdma = rdma_sys::rdma_t { remote_addr: remote, rkey };
            }
            SendOp::RdmaRead { remote, rkey } => {
                wr.opcode = opcode::IBV_WR_RDMA_READ;
                wr.wr.rdma = rdma_sys::rdma_t { remote_addr: remote, rkey };
            }
        }
    }
}

impl RecvPool {
    /// Appends a receive of at most [`MAX_RECV_SGE`] elements. The pool must not be full.
    pub(super) fn push(&mut self, chain: &mut Chain, id: u64, elements: &[Sge]) {
        let index = self.append(chain);
        let first = index * MAX_RECV_SGE;
        for (to, from) in self.sges[first..first + MAX_RECV_SGE].iter_mut().zip(elements) {
            (to.addr, to.length, to.lkey) = (from.addr, from.len, from.lkey);
        }
        let wr = &mut self.wrs[index];
        wr.wr_id = id;
        wr.num_sge = elements.len() as i32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(tag: u64, op: SendOp, len: u32) -> SendWr {
        SendWr { tag, op, sge: Sge { addr: 0x1000, len, lkey: 5 }, signaled: true, solicited: false, inline: false }
    }

    fn walk(mut at: *mut ibv_send_wr) -> Vec<u64> {
        let mut ids = Vec::new();
        while !at.is_null() {
            // SAFETY: the list was just linked by the pool, which is alive and untouched.
            let wr = unsafe { &*at };
            ids.push(wr.wr_id);
            at = wr.next;
        }
        ids
    }

    #[test]
    fn two_queues_share_the_pool_and_keep_their_order() {
        let mut pool = SendPool::new();
        let (mut a, mut b) = (Chain::EMPTY, Chain::EMPTY);
        for id in 0..6 {
            pool.push(if id % 2 == 0 { &mut a } else { &mut b }, id, &send(id, SendOp::Send, 16));
        }
        assert_eq!(walk(pool.link(a)), [0, 2, 4]);
        assert_eq!(walk(pool.link(b)), [1, 3, 5]);
        assert!(pool.link(Chain::EMPTY).is_null());
    }

    #[test]
    fn the_rest_of_a_chain_is_found_by_the_bad_pointer() {
        let mut pool = SendPool::new();
        let mut chain = Chain::EMPTY;
        for id in 10..14 {
            pool.push(&mut chain, id, &send(id, SendOp::Send, 16));
        }
        let first = pool.link(chain);
        // SAFETY: the chain has four entries.
        let third = unsafe { (*(*first).next).next };
        assert_eq!(pool.ids_from(chain, third).collect::<Vec<_>>(), [12, 13]);
        assert_eq!(pool.ids_from(chain, first).collect::<Vec<_>>(), [10, 11, 12, 13]);
        assert_eq!(pool.ids_from(chain, std::ptr::null()).count(), 0);
    }

    #[test]
    fn requests_carry_what_was_asked() {
        let mut pool = SendPool::new();
        let mut chain = Chain::EMPTY;
        let mut request = send(1, SendOp::RdmaRead { remote: 0xabcd, rkey: 9 }, 4096);
        pool.push(&mut chain, 1, &request);
        request.op = SendOp::SendInvalidate { rkey: 77 };
        (request.signaled, request.solicited, request.inline) = (false, true, true);
        pool.push(&mut chain, 2, &request);
        request.sge.len = 0;
        pool.push(&mut chain, 3, &request);
        let first = pool.link(chain);
        // SAFETY: three entries were linked, each with the union member that its opcode names.
        unsafe {
            let (read, invalidate) = (&*first, &*(*first).next);
            assert_eq!((read.opcode, read.send_flags, read.num_sge), (4, 2, 1));
            assert_eq!((read.wr.rdma.remote_addr, read.wr.rdma.rkey), (0xabcd, 9));
            assert_eq!(((*read.sg_list).addr, (*read.sg_list).length, (*read.sg_list).lkey), (0x1000, 4096, 5));
            assert_eq!((invalidate.opcode, invalidate.send_flags), (9, 4 | 8));
            assert_eq!(invalidate.imm_data_invalidated_rkey_union.invalidated_rkey, 77);
            assert_eq!((*invalidate.next).num_sge, 0);
        }
    }

    #[test]
    fn receives_carry_each_element() {
        let mut pool = RecvPool::new();
        let mut chain = Chain::EMPTY;
        let elements = [Sge { addr: 64, len: 64, lkey: 1 }, Sge { addr: 4096, len: 8192, lkey: 2 }];
        pool.push(&mut chain, 1, &elements);
        pool.push(&mut chain, 2, &elements[1..]);
        let first = pool.link(chain);
        // SAFETY: two entries were linked, with two elements and one.
        unsafe {
            let (one, two) = (&*first, &*(*first).next);
            assert_eq!((one.num_sge, two.num_sge), (2, 1));
            assert_eq!((*one.sg_list.add(1)).length, 8192);
            assert_eq!((*two.sg_list).addr, 4096);
        }
    }

    #[test]
    fn a_pool_is_full_at_its_size_and_empty_after_reset() {
        let mut pool = RecvPool::new();
        let mut chain = Chain::EMPTY;
        for id in 0..POOL as u64 {
            assert!(!pool.is_full());
            pool.push(&mut chain, id, &[]);
        }
        assert!(pool.is_full());
        pool.reset();
        assert!(!pool.is_full());
    }
}
