//! Command slots of one queue: command identifiers, what each is for, and what came back.

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
    sent: bool,
    answer: Option<(Completion, Option<u32>)>,
    pub(crate) since: Duration,
    pub(crate) command: Option<Command>,
    pub(crate) mr: Option<Mr>,
}

/// A command whose capsule was sent and whose answer is here.
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
}

const SLOT_BITS: u32 = 10;

impl Queue {
    /// `entries`: commands that may be under way, one less than the submission queue has entries.
    pub(crate) fn new(channel: ChannelId, qid: u16, entries: u16) -> Self {
        let slot = || Slot {
            purpose: Purpose::Free,
            generation: 0,
            sent: false,
            answer: None,
            since: Duration::ZERO,
            command: None,
            mr: None,
        };
        Self {
            channel,
            qid,
            ready: false,
            slots: std::iter::repeat_with(slot).take(entries.into()).collect(),
            free: (0..entries).rev().collect(),
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Takes a slot: its index and the command identifier.
    pub(crate) fn take(&mut self, purpose: Purpose, now: Duration) -> Option<(u16, u16)> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.purpose = purpose;
        slot.generation = (slot.generation + 1) & 0x3f;
        slot.sent = false;
        slot.answer = None;
        slot.since = now;
        Some((index, slot.generation << SLOT_BITS | index))
    }

    pub(crate) fn slot(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index))
    }

    /// The identifier of a command of the owner's that has no answer, from slot `from` on.
    #[cfg(test)]
    pub(crate) fn unanswered(&self, from: usize) -> Option<u16> {
        let under_way = |(_, slot): &(usize, &Slot)| slot.purpose == Purpose::Io && slot.answer.is_none();
        let (index, slot) = self.slots.iter().enumerate().skip(from % self.slots.len()).find(under_way)?;
        Some(slot.generation << SLOT_BITS | index as u16)
    }

    /// The capsule was sent.
    pub(crate) fn on_sent(&mut self, index: u32) -> Option<Finished> {
        let index = u16::try_from(index).ok()?;
        self.slot(index)?.sent = true;
        self.finish(index)
    }

    /// An answer arrived. `Err` when no command waits for it.
    pub(crate) fn on_answer(
        &mut self,
        completion: Completion,
        invalidated: Option<u32>,
    ) -> Result<Option<Finished>, u16> {
        let (index, generation) = (completion.cid & ((1 << SLOT_BITS) - 1), completion.cid >> SLOT_BITS);
        match self.slot(index) {
            Some(slot) if slot.purpose != Purpose::Free && slot.generation == generation && slot.answer.is_none() => {
                slot.answer = Some((completion, invalidated));
                Ok(self.finish(index))
            }
            _ => Err(completion.cid),
        }
    }

    /// Both have happened: the slot is free again.
    fn finish(&mut self, index: u16) -> Option<Finished> {
        let slot = self.slot(index).filter(|slot| slot.sent)?;
        let (completion, invalidated) = slot.answer.take()?;
        let finished = Finished {
            purpose: std::mem::replace(&mut slot.purpose, Purpose::Free),
            completion,
            invalidated,
            since: slot.since,
            command: slot.command.take(),
            mr: slot.mr.take(),
        };
        self.free.push(index);
        Some(finished)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_before_the_send_completion_waits_for_it_and_a_second_answer_is_refused() {
        let mut queue = Queue::new(ChannelId::test(), 1, 2);
        let (index, cid) = queue.take(Purpose::Io, Duration::ZERO).unwrap();
        assert!(queue.on_answer(Completion::success(cid), None).unwrap().is_none());
        assert_eq!(queue.on_answer(Completion::success(cid), None).unwrap_err(), cid);
        assert!(queue.on_sent(index.into()).is_some());
        assert_eq!(queue.room(), 2);
        assert_eq!(queue.on_answer(Completion::success(cid), None).unwrap_err(), cid);
        let (again, next) = queue.take(Purpose::Io, Duration::ZERO).unwrap();
        assert_eq!(again, index);
        assert_ne!(next, cid, "the next use of a slot has another identifier");
        assert!(queue.on_answer(Completion::success(cid), None).is_err());
        assert!(queue.on_answer(Completion::success(1023), None).is_err());
    }
}
