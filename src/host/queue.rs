//! Command slots of one queue: command identifiers, what each is for, and what came back.
//!
//! A slot is free again when its answer is here: an answer proves that the capsule arrived, and what a queue pair might still
//! send again of it the target drops as a duplicate. So only one capsule of many is signaled; its completion gives the entries
//! of the send queue back that those before it took. The send queue has room for twice as many more than the submission queue
//! has entries, so that this seldom has to be waited for.

use std::time::Duration;

use nvme::Completion;

use super::io::Command;
use super::link::ChannelId;
use crate::rdma::Mr;

/// What a command in a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Free,
    /// A step of bringing the association up.
    Setup,
    KeepAlive,
    Event,
    /// A command of the owner, on the admin queue.
    Admin,
    Io,
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) purpose: Purpose,
    /// Upper bits of the command identifier: an answer to the slot's last use is not taken for this one's.
    generation: u16,
    pub(crate) since: Duration,
    pub(crate) command: Option<Command>,
    pub(crate) mr: Option<Mr>,
}

/// A command whose answer is here.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) purpose: Purpose,
    pub(crate) completion: Completion,
    pub(crate) invalidated: Option<u32>,
    pub(crate) since: Duration,
    pub(crate) command: Option<Command>,
    pub(crate) mr: Option<Mr>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) channel: ChannelId,
    pub(crate) qid: u16,
    /// Connect was answered well.
    pub(crate) ready: bool,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Free entries of the send queue.
    send_room: u32,
    /// Capsules since the last signaled one.
    unsignaled: u32,
    /// One capsule in so many is signaled.
    signal_every: u32,
}

/// A slot that was taken for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) slot: u16,
    pub(crate) cid: u16,
    /// Its capsule asks for a completion.
    pub(crate) signaled: bool,
}

const SLOT_BITS: u32 = 10;

impl Queue {
    /// `entries`: commands that may be under way, one less than the submission queue has entries.
    pub(crate) fn new(channel: ChannelId, qid: u16, entries: u16) -> Self {
        let slot = || Slot { purpose: Purpose::Free, generation: 0, since: Duration::ZERO, command: None, mr: None };
        Self {
            channel,
            qid,
            ready: false,
            slots: std::iter::repeat_with(slot).take(entries.into()).collect(),
            free: (0..entries).rev().collect(),
            send_room: send_entries(u32::from(entries) + 1),
            unsignaled: 0,
            signal_every: signal_every(u32::from(entries) + 1),
        }
    }

    /// The send queue has no more than so many entries. Before the first command.
    pub(crate) fn limit_send(&mut self, entries: u32) {
        self.send_room = self.send_room.min(entries);
        self.signal_every = self.signal_every.min(entries / 2).max(1);
    }

    pub(crate) fn room(&self) -> usize {
        self.free.len().min(self.send_room as usize)
    }

    /// Takes a slot for a command.
    pub(crate) fn take(&mut self, purpose: Purpose, now: Duration) -> Option<Taken> {
        if self.send_room == 0 {
            return None;
        }
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.purpose = purpose;
        slot.generation = (slot.generation + 1) & 0x3f;
        slot.since = now;
        self.send_room -= 1;
        self.unsignaled += 1;
        let signaled = self.unsignaled == self.signal_every;
        if signaled {
            self.unsignaled = 0;
        }
        Some(Taken { slot: index, cid: slot.generation << SLOT_BITS | index, signaled })
    }

    pub(crate) fn slot(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index))
    }

    /// The identifier of a command of the owner's that has no answer, from slot `from` on.
    #[cfg(test)]
    pub(crate) fn unanswered(&self, from: usize) -> Option<u16> {
        let under_way = |(_, slot): &(usize, &Slot)| slot.purpose == Purpose::Io;
        let (index, slot) = self.slots.iter().enumerate().skip(from % self.slots.len()).find(under_way)?;
        Some(slot.generation << SLOT_BITS | index as u16)
    }

    /// A signaled capsule was sent, and with it those before it.
    pub(crate) fn on_sent(&mut self) {
        self.send_room += self.signal_every;
    }

    /// An answer arrived. `Err` when no command waits for it.
    pub(crate) fn on_answer(&mut self, completion: Completion, invalidated: Option<u32>) -> Result<Finished, u16> {
        let (index, generation) = (completion.cid & ((1 << SLOT_BITS) - 1), completion.cid >> SLOT_BITS);
        let slot = self
            .slot(index)
            .filter(|slot| slot.purpose != Purpose::Free && slot.generation == generation)
            .ok_or(completion.cid)?;
        let finished = Finished {
            purpose: std::mem::replace(&mut slot.purpose, Purpose::Free),
            completion,
            invalidated,
            since: slot.since,
            command: slot.command.take(),
            mr: slot.mr.take(),
        };
        self.free.push(index);
        Ok(finished)
    }

    /// The commands that will never be answered: the queue pair is gone.
    pub(crate) fn abandon(self) -> impl Iterator<Item = (Command, Option<Mr>, Duration)> {
        self.slots.into_iter().filter_map(|slot| Some((slot.command?, slot.mr, slot.since)))
    }

    /// When the oldest of these was sent.
    pub(crate) fn oldest(&self, purpose: Purpose) -> Option<Duration> {
        self.slots.iter().filter(|slot| slot.purpose == purpose).map(|slot| slot.since).min()
    }
}

/// Entries of the send queue for so many of the submission queue.
pub(crate) const fn send_entries(entries: u32) -> u32 {
    entries + 2 * signal_every(entries)
}

/// Capsules of which one is signaled.
const fn signal_every(entries: u32) -> u32 {
    if entries > 32 { entries / 2 } else { 16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(queue: &mut Queue) -> Taken {
        queue.take(Purpose::Io, Duration::ZERO).expect("room")
    }

    #[test]
    fn a_second_answer_is_refused_and_a_slots_next_use_has_another_identifier() {
        let mut queue = Queue::new(ChannelId::test(), 1, 2);
        let first = taken(&mut queue);
        assert_eq!(queue.room(), 1);
        assert!(queue.on_answer(Completion::success(first.cid), None).is_ok());
        assert_eq!(queue.room(), 2);
        assert_eq!(queue.on_answer(Completion::success(first.cid), None).unwrap_err(), first.cid);
        let again = taken(&mut queue);
        assert_eq!(again.slot, first.slot);
        assert_ne!(again.cid, first.cid);
        assert!(queue.on_answer(Completion::success(first.cid), None).is_err());
        assert!(queue.on_answer(Completion::success(1023), None).is_err());
    }

    #[test]
    fn answers_without_send_completions_use_the_send_queue_up_and_one_completion_gives_half_back() {
        for (entries, limit) in [(1, 64), (2, 64), (3, 4), (31, 64), (128, 4096), (1023, 4096), (1023, 1024), (1023, 1)]
        {
            let mut queue = Queue::new(ChannelId::test(), 1, entries);
            queue.limit_send(limit);
            let mut signaled = 0;
            let mut sent = 0;
            while queue.room() > 0 {
                let taken = taken(&mut queue);
                sent += 1;
                signaled += u32::from(taken.signaled);
                queue.on_answer(Completion::success(taken.cid), None).expect("under way");
            }
            assert_eq!(sent, send_entries(u32::from(entries) + 1).min(limit));
            assert!(queue.take(Purpose::Io, Duration::ZERO).is_none());
            for _ in 0..signaled {
                queue.on_sent();
            }
            let most = usize::from(entries).min(limit as usize);
            assert!(queue.room() >= most, "all slots can be used again: {} of {most}", queue.room());
        }
    }
}
