//! A reactor's memory: one arena holding the data pool, the receive pages, the admin pool, the receives' commands and the
//! responses' completions; and the receive slots that are posted from it.
//!
//! Pages are apart from data buffers: they stay posted for long, and would leave no 1 MiB in one piece.

use std::rc::Rc;

use crate::mem::{Arena, Buffer, MemError, Pool, Records};
use crate::rdma::Sge;

use super::options::Options;
use super::request::GENERATION_MASK;
use super::share::Origin;

/// Index of a receive slot.
pub(crate) type SlotId = u32;

/// Where a slot's receive stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Free,
    /// Posted to a device's shared receive queue.
    Shared {
        device: u32,
    },
    /// Posted to a queue pair's own receive queue.
    Queue {
        queue: u32,
    },
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) home: Home,
    /// Tells a late completion from those of the slot's next use.
    pub(crate) generation: u32,
    /// Takes in-capsule data; always there while the slot is posted, unless in-capsule data are off.
    pub(crate) page: Option<Buffer>,
}

pub(crate) struct Memory {
    pub(crate) pool: Pool,
    pub(crate) pages: Pool,
    pub(crate) admin_pool: Pool,
    pub(crate) slots: Vec<Slot>,
    pub(crate) free_slots: Vec<SlotId>,
    /// Receives that wait for a page, and where they belong.
    pub(crate) starved: Vec<(SlotId, Home)>,
    page_len: usize,
    /// Bytes of their pool that a page takes.
    page_footprint: usize,
    commands: Records<64>,
    completions: Records<16>,
    arena: Rc<Arena>,
}

impl Memory {
    pub(crate) fn new(options: &Options) -> Result<Self, MemError> {
        let plan = options.memory_plan();
        let arena = Arena::new(plan.arena)?;
        let pool = Pool::named(Origin::Data as u8, &arena, 0, plan.pool);
        let admin_start = plan.pool + plan.pages;
        let pages = Pool::named(Origin::Page as u8, &arena, plan.pool, plan.pages);
        let admin_pool = Pool::named(Origin::Admin as u8, &arena, admin_start, plan.admin_pool);
        let after_pools = admin_start + plan.admin_pool;
        let commands = Records::new(&arena, after_pools, options.receive_slots as usize);
        let completions = Records::new(&arena, after_pools + plan.commands, options.requests());
        let slots = (0..options.receive_slots).map(|_| Slot { home: Home::Free, generation: 0, page: None }).collect();
        Ok(Self {
            pool,
            pages,
            admin_pool,
            slots,
            free_slots: (0..options.receive_slots).rev().collect(),
            starved: Vec::new(),
            page_len: options.receive_page(),
            page_footprint: Pool::footprint(options.receive_page()),
            commands,
            completions,
            arena: Rc::new(arena),
        })
    }

    pub(crate) fn arena(&self) -> &Rc<Arena> {
        &self.arena
    }

    /// Takes a buffer back into the pool that it came from, and tells which.
    #[inline(always)]
    pub(crate) fn give(&mut self, buffer: Buffer) -> Origin {
        let origin = Origin::of(&buffer);
        let pool = match origin {
            Origin::Data => &mut self.pool,
            Origin::Page => &mut self.pages,
            Origin::Admin => &mut self.admin_pool,
        };
        pool.give(buffer);
        origin
    }

    /// Where a slot's receive stood that completed; `None` when the slot has moved on.
    #[inline(always)]
    pub(crate) fn home(&self, slot: SlotId, generation: u32) -> Option<Home> {
        self.slots.get(slot as usize).filter(|slot| slot.generation == generation).map(|slot| slot.home)
    }

    /// A free slot with a page, or `None` when either is missing.
    pub(crate) fn take_slot(&mut self, home: Home) -> Option<SlotId> {
        let slot = *self.free_slots.last()?;
        let page = self.pages.take(self.page_len)?;
        self.free_slots.pop();
        let state = &mut self.slots[slot as usize];
        state.home = home;
        state.page = Some(page);
        Some(slot)
    }

    /// Gives a slot back; its receive is not posted any more.
    pub(crate) fn free_slot(&mut self, slot: SlotId) {
        let state = &mut self.slots[slot as usize];
        if state.home == Home::Free {
            return;
        }
        state.home = Home::Free;
        state.generation = state.generation.wrapping_add(1) & GENERATION_MASK;
        if let Some(page) = state.page.take() {
            self.pages.give(page);
        }
        self.free_slots.push(slot);
    }

    /// Gives a starved slot a page again; `false` when there still is none.
    pub(crate) fn refill(&mut self, slot: SlotId, home: Home) -> bool {
        let receives = self.free_slots.len() * self.page_footprint;
        let Some(page) = self.pages.take_leaving(self.page_len, receives) else { return false };
        let state = &mut self.slots[slot as usize];
        state.home = home;
        state.page = Some(page);
        true
    }

    /// Frees the slots of a device that is gone.
    pub(crate) fn free_shared_slots(&mut self, device: u32) {
        self.free_slots_where(|home| home == Home::Shared { device });
    }

    /// Frees the slots of a queue whose queue pair is destroyed.
    pub(crate) fn free_queue_slots(&mut self, queue: u32) {
        self.free_slots_where(|home| home == Home::Queue { queue });
    }

    fn free_slots_where(&mut self, matches: impl Fn(Home) -> bool) {
        let free = &mut self.free_slots;
        self.starved.retain(|(slot, home)| {
            let keep = !matches(*home);
            if !keep {
                free.push(*slot);
            }
            keep
        });
        for slot in 0..self.slots.len() {
            if matches(self.slots[slot].home) {
                self.free_slot(slot as SlotId);
            }
        }
    }

    /// Takes the page out of a slot and puts a fresh one in; `None` when there is none to spare: the receives that are not posted
    /// yet keep theirs, so that however many commands wait for a disk, a new host's queue finds its pages.
    #[inline(always)]
    pub(crate) fn swap_page(&mut self, slot: SlotId) -> Option<Buffer> {
        let receives = (self.free_slots.len() + self.starved.len()) * self.page_footprint;
        let fresh = self.pages.take_leaving(self.page_len, receives)?;
        self.slots[slot as usize].page.replace(fresh)
    }

    /// The elements of a slot's receive: the command, then the page.
    #[inline(always)]
    pub(crate) fn receive_sges(&self, slot: SlotId, lkey: u32) -> ([Sge; 2], usize) {
        let command = Sge { addr: self.commands.addr(slot), len: 64, lkey };
        match &self.slots[slot as usize].page {
            Some(page) => ([command, Sge { addr: page.addr(), len: self.page_len as u32, lkey }], 2),
            None => ([command, command], 1),
        }
    }

    /// Copies a received command out. Its receive completed.
    #[inline(always)]
    pub(crate) fn command(&self, slot: SlotId) -> [u8; 64] {
        self.commands.read(slot)
    }

    /// Writes a response and returns the element that sends it. The request's previous response was sent.
    #[inline(always)]
    pub(crate) fn completion(&mut self, request: u32, cqe: [u8; 16], lkey: u32) -> Sge {
        self.completions.write(request, cqe);
        Sge { addr: self.completions.addr(request), len: 16, lkey }
    }
}
