//! The books of work queues: which tags are with the device, and the ids under which they are there.
//!
//! The device gets an id of ours, not the caller's tag. It tells a send from a receive on a failed completion, where the
//! opcode means nothing; it finds the queue pair without a look-up; and it lets a stale or doubled completion be
//! recognised. A send or receive queue of a queue pair completes in order ([`Ring`]); a shared one does not ([`Slots`]).

/// Kind of a work request, in the upper bits of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Recv,
    SharedRecv,
}

/// A work request id: kind, queue pair index, sequence number or slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrId {
    pub(super) kind: Kind,
    /// Index of the queue pair; 0 for shared receives. 30 bits.
    pub(super) queue: u32,
    /// Sequence number ([`Ring`]) or slot ([`Slots`]).
    pub(super) seq: u32,
}

impl WrId {
    const QUEUE_BITS: u32 = 30;

    pub(super) fn pack(self) -> u64 {
        let kind = match self.kind {
            Kind::Send => 1u64,
            Kind::Recv => 2,
            Kind::SharedRecv => 3,
        };
        debug_assert!(self.queue < 1 << Self::QUEUE_BITS);
        kind << 62 | u64::from(self.queue) << 32 | u64::from(self.seq)
    }

    /// `None` for an id that is not of ours.
    pub(super) fn unpack(id: u64) -> Option<Self> {
        let kind = match id >> 62 {
            1 => Kind::Send,
            2 => Kind::Recv,
            3 => Kind::SharedRecv,
            _ => return None,
        };
        Some(Self { kind, queue: (id >> 32) as u32 & ((1 << Self::QUEUE_BITS) - 1), seq: id as u32 })
    }
}

/// Tags of a queue that completes in order. Unsignaled requests that succeed have no completion of their own: they are
/// done when a later one completes.
///
/// When the device refuses a request although the queue has room (it does so for a dead queue pair, on some devices), that
/// one and all later ones are kept here as refused. They are handed back, flushed, once every signaled request before
/// them has completed, so that the order holds and each completes exactly once.
#[derive(Debug)]
pub(super) struct Ring {
    tags: Box<[u64]>,
    signaled: Box<[bool]>,
    mask: u32,
    capacity: u32,
    head: u32,
    tail: u32,
    refused: Option<Refused>,
}

/// The refused end of a [`Ring`].
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// The first refused request that was not handed back.
    from: u32,
    /// One past the last signaled request that the device took.
    signaled_end: u32,
}

impl Ring {
    pub(super) fn new(capacity: u32) -> Self {
        let slots = capacity.max(1).next_power_of_two();
        Self {
            tags: vec![0; slots as usize].into_boxed_slice(),
            signaled: vec![false; slots as usize].into_boxed_slice(),
            mask: slots - 1,
            capacity,
            head: 0,
            tail: 0,
            refused: None,
        }
    }

    /// Requests that are not known to be done.
    pub(super) fn outstanding(&self) -> u32 {
        self.head.wrapping_sub(self.tail)
    }

    pub(super) fn is_full(&self) -> bool {
        self.outstanding() >= self.capacity
    }

    /// Books a request and names its sequence number; `None` when the queue is full.
    pub(super) fn push(&mut self, tag: u64, signaled: bool) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        let seq = self.head;
        self.tags[(seq & self.mask) as usize] = tag;
        self.signaled[(seq & self.mask) as usize] = signaled;
        self.head = seq.wrapping_add(1);
        Some(seq)
    }

    /// A completion arrived: its tag, and all before it are done. `None` if the device does not hold this one.
    pub(super) fn complete(&mut self, seq: u32) -> Option<u64> {
        let held = self.refused.map_or(self.head, |refused| refused.from).wrapping_sub(self.tail);
        if seq.wrapping_sub(self.tail) >= held {
            return None;
        }
        self.tail = seq.wrapping_add(1);
        Some(self.tags[(seq & self.mask) as usize])
    }

    /// The device refused request `seq` and so all after it.
    pub(super) fn refuse(&mut self, seq: u32) {
        let before = seq.wrapping_sub(self.tail);
        if self.refused.is_some() || before >= self.outstanding() {
            return;
        }
        let unsignaled = (0..before)
            .take_while(|back| !self.signaled[(seq.wrapping_sub(back + 1) & self.mask) as usize])
            .count() as u32;
        self.refused = Some(Refused { from: seq, signaled_end: seq.wrapping_sub(unsignaled) });
    }

    /// New requests are not for the device any more.
    pub(super) fn is_refusing(&self) -> bool {
        self.refused.is_some()
    }

    /// The next refused request that is due to be handed back.
    pub(super) fn pop_refused(&mut self) -> Option<u64> {
        let refused = self.refused.as_mut()?;
        let held = refused.from.wrapping_sub(self.tail);
        let signaled = refused.signaled_end.wrapping_sub(self.tail);
        if (1..=held).contains(&signaled) || refused.from == self.head {
            return None;
        }
        let tag = self.tags[(refused.from & self.mask) as usize];
        refused.from = refused.from.wrapping_add(1);
        self.tail = refused.from;
        Some(tag)
    }
}

/// Tags of a queue that completes in any order.
#[derive(Debug)]
pub(super) struct Slots {
    tags: Box<[Option<u64>]>,
    free: Vec<u32>,
}

impl Slots {
    pub(super) fn new(capacity: u32) -> Self {
        Self { tags: vec![None; capacity as usize].into_boxed_slice(), free: (0..capacity).rev().collect() }
    }

    /// Books a request and names its slot; `None` when the queue is full.
    pub(super) fn take(&mut self, tag: u64) -> Option<u32> {
        let slot = self.free.pop()?;
        self.tags[slot as usize] = Some(tag);
        Some(slot)
    }

    /// Ends a request; `None` if nothing is outstanding there.
    pub(super) fn give(&mut self, slot: u32) -> Option<u64> {
        let tag = self.tags.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(tag)
    }

    pub(super) fn capacity(&self) -> u32 {
        self.tags.len() as u32
    }

    /// Requests that the queue holds.
    pub(super) fn outstanding(&self) -> u32 {
        (self.tags.len() - self.free.len()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn ids_round_trip() {
        for kind in [Kind::Send, Kind::Recv, Kind::SharedRecv] {
            for (queue, seq) in [(0, 0), (1, u32::MAX), ((1 << 30) - 1, 7)] {
                let id = WrId { kind, queue, seq };
                assert_eq!(WrId::unpack(id.pack()), Some(id));
            }
        }
        assert_eq!(WrId::unpack(0), None);
    }

    #[test]
    fn a_ring_takes_its_capacity_and_no_more() {
        let mut ring = Ring::new(3);
        assert_eq!((ring.push(10, false), ring.push(11, false), ring.push(12, true)), (Some(0), Some(1), Some(2)));
        assert_eq!(ring.push(13, true), None);
        assert_eq!(ring.complete(2), Some(12));
        assert_eq!(ring.outstanding(), 0);
        assert_eq!(ring.push(13, true), Some(3));
    }

    #[test]
    fn a_completion_is_taken_once_and_only_if_outstanding() {
        let mut ring = Ring::new(4);
        ring.push(1, true);
        ring.push(2, true);
        assert_eq!(ring.complete(2), None);
        assert_eq!(ring.complete(1), Some(2));
        assert_eq!(ring.complete(0), None);
        assert_eq!(ring.complete(1), None);
    }

    #[test]
    fn sequence_numbers_wrap() {
        let mut ring = Ring::new(2);
        (ring.head, ring.tail) = (u32::MAX, u32::MAX);
        assert_eq!(ring.push(1, true), Some(u32::MAX));
        assert_eq!(ring.push(2, true), Some(0));
        assert_eq!(ring.complete(u32::MAX), Some(1));
        assert_eq!(ring.complete(0), Some(2));
    }

    #[test]
    fn refused_requests_come_back_after_those_the_device_holds() {
        let mut ring = Ring::new(8);
        let taken = ring.push(1, true).unwrap();
        ring.push(2, false);
        let refused = ring.push(3, true).unwrap();
        ring.refuse(refused);
        assert_eq!(ring.push(4, false), Some(3));
        assert_eq!(ring.pop_refused(), None);
        assert_eq!(ring.complete(taken), Some(1));
        assert_eq!((ring.pop_refused(), ring.pop_refused(), ring.pop_refused()), (Some(3), Some(4), None));
        ring.push(5, true);
        assert_eq!((ring.pop_refused(), ring.pop_refused()), (Some(5), None));
        assert_eq!(ring.outstanding(), 0);
    }

    #[test]
    fn refusing_the_first_request_hands_back_at_once() {
        let mut ring = Ring::new(2);
        let seq = ring.push(1, true).unwrap();
        ring.refuse(seq);
        assert_eq!((ring.pop_refused(), ring.pop_refused()), (Some(1), None));
    }

    #[test]
    fn slots_are_taken_and_given_once() {
        let mut slots = Slots::new(2);
        let (a, b) = (slots.take(7).unwrap(), slots.take(8).unwrap());
        assert_eq!(slots.take(9), None);
        assert_eq!(slots.give(b), Some(8));
        assert_eq!(slots.give(b), None);
        assert_eq!(slots.give(99), None);
        assert_eq!(slots.outstanding(), 1);
        assert_eq!(slots.give(a), Some(7));
    }

    proptest! {
        /// Whatever is posted, completed and refused: each signaled tag comes back exactly once and in order, and no
        /// more than the capacity is ever out.
        #[test]
        fn every_signaled_tag_comes_back_once_in_order(
            ops in proptest::collection::vec((0u8..4, any::<bool>()), 1..200),
            capacity in 1u32..9,
        ) {
            let mut ring = Ring::new(capacity);
            let mut device: VecDeque<(u32, u64, bool)> = VecDeque::new();
            let mut refused: VecDeque<u64> = VecDeque::new();
            let mut expected: VecDeque<u64> = VecDeque::new();
            let mut next = 0u64;
            for (op, flag) in ops {
                match op {
                    0 | 1 => {
                        let refusing = ring.is_refusing();
                        let Some(seq) = ring.push(next, flag) else { continue };
                        if refusing {
                            refused.push_back(next);
                        } else if op == 1 && next % 7 == 6 {
                            ring.refuse(seq);
                            refused.push_back(next);
                        } else {
                            device.push_back((seq, next, flag));
                            if flag { expected.push_back(next) }
                        }
                        next += 1;
                    }
                    2 => {
                        while let Some((seq, tag, signaled)) = device.pop_front() {
                            if signaled {
                                prop_assert_eq!(ring.complete(seq), Some(tag));
                                prop_assert_eq!(expected.pop_front(), Some(tag));
                                break;
                            }
                        }
                    }
                    _ => {
                        while let Some(tag) = ring.pop_refused() {
                            prop_assert!(expected.is_empty());
                            device.clear();
                            prop_assert_eq!(refused.pop_front(), Some(tag));
                        }
                    }
                }
                prop_assert!(ring.outstanding() <= capacity);
            }
        }
    }
}
