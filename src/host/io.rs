//! Commands of an I/O queue, from their owner to the capsule and back.

use std::time::Duration;

use super::error::{HostError, IoFailure};
use super::host::Host;
use super::queue::{Finished, Purpose, Taken};
use super::wire::{self, Sqe};
use crate::mem::Buffer;
use crate::rdma::{Access, Provider, WcStatus};

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fills the buffer.
    Read,
    /// Stores the buffer; with FUA it is on stable storage when answered.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Everything answered before is on stable storage when answered.
    Flush,
    /// The blocks read as zeroes afterwards.
    WriteZeroes {
        /// They may be given back.
        deallocate: bool,
    },
    /// Gives blocks back. The buffer holds ranges ([`wire::dsm_range`]); `blocks` counts them.
    Deallocate,
    /// Fails with Compare Failure unless the blocks hold what the buffer does.
    Compare,
}

/// A command to submit. It owns its buffer until it is done.
#[derive(Debug)]
pub struct Command {
    /// Comes back in [`Done`].
    pub token: u64,
    /// What to do.
    pub op: Op,
    /// In which namespace.
    pub nsid: u32,
    /// First block.
    pub slba: u64,
    /// Blocks (a real count), or ranges.
    pub blocks: u32,
    /// As many bytes as the blocks have, from [`Host::take_buffer`].
    pub data: Option<Buffer>,
}

/// A command that is done.
#[derive(Debug)]
pub struct Done {
    /// The command's token.
    pub token: u64,
    /// How it went.
    pub result: Result<(), IoFailure>,
    /// Its buffer.
    pub data: Option<Buffer>,
    /// From submission to the answer.
    pub latency: Duration,
}

impl<P: Provider> Host<P> {
    /// Commands that a queue can take now.
    pub fn room(&self, queue: usize) -> usize {
        self.io.get(queue).filter(|_| self.is_ready()).map_or(0, |queue| queue.room())
    }

    /// Submits a command; it goes out with the next [`Host::poll`]. It comes back when the queue has no room, or while the
    /// host is not connected.
    ///
    /// # Errors
    /// The command itself.
    pub fn submit(&mut self, queue: usize, command: Command) -> Result<(), Command> {
        let now = self.now();
        if self.room(queue) == 0 {
            return Err(command);
        }
        let in_capsule = self.in_capsule_limit();
        let Some(state) = self.io.get_mut(queue) else { return Err(command) };
        let channel = state.channel;
        let Some(Taken { slot, cid, signaled }) = state.take(Purpose::Io, now) else { return Err(command) };
        let mut mr = None;
        let sqe = encode(&command).cid(cid);
        let (sqe, extra) = match &command.data {
            None => (sqe, Extra::None),
            Some(data) if carries_data(command.op) && data.len() <= in_capsule => {
                (sqe.sgl(wire::by_offset(0, data.len() as u32, 0x01)), Extra::Data)
            }
            Some(data) => {
                let rkey = if self.options.invalidate {
                    mr = self.link.register(Access::Remote).ok();
                    mr.map_or(0, |mr| mr.rkey)
                } else {
                    self.link.rkey()
                };
                let pieces = usize::from(self.options.descriptors);
                if pieces > 1 && pieces * 16 <= in_capsule && data.len() >= pieces {
                    let list = cut(data, pieces, rkey, self.options.invalidate);
                    (sqe.sgl(wire::by_offset(0, list.len() as u32, 0x31)), Extra::List(list))
                } else {
                    (sqe.sgl(wire::keyed(data.addr(), data.len() as u32, rkey, self.options.invalidate)), Extra::None)
                }
            }
        };
        let mut len = wire::SQE_LEN;
        if let Some(capsule) = self.link.capsule(channel, slot.into()) {
            capsule[..len].copy_from_slice(&sqe.0);
            let extra = match &extra {
                Extra::None => &[][..],
                Extra::Data => command.data.as_ref().map_or(&[][..], Buffer::as_slice),
                Extra::List(list) => list,
            };
            capsule[len..len + extra.len()].copy_from_slice(extra);
            len += extra.len();
        }
        if let Some(slot) = self.io.get_mut(queue).and_then(|queue| queue.slot(slot)) {
            slot.command = Some(command);
            slot.mr = mr;
        }
        if let Err(error) = self.link.send(channel, slot.into(), len as u32, signaled) {
            self.lose(error);
        }
        Ok(())
    }

    /// The next command that is done.
    pub fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    pub(crate) fn on_io(&mut self, finished: Finished) {
        let Finished { completion, invalidated, since, command, mr, .. } = finished;
        let Some(command) = command else { return };
        let mine = mr.map(|mr| mr.rkey);
        if let Some(mr) = mr {
            if invalidated.is_none() {
                self.note_missed_invalidate();
            }
            self.link.deregister(mr);
        }
        let result = if invalidated.is_some() && invalidated != mine {
            self.lose(HostError::protocol("response", "it invalidated a key that its command did not name"));
            Err(IoFailure::BogusInvalidate)
        } else if completion.status.is_success() {
            Ok(())
        } else {
            Err(IoFailure::Status(completion.status))
        };
        let latency = self.now().saturating_sub(since);
        self.done.push_back(Done { token: command.token, result, data: command.data, latency });
    }

    /// A command whose queue is gone: again later, or never.
    pub(crate) fn orphan(&mut self, command: Command, since: Duration) {
        if self.options.reconnect.is_some() {
            self.requeue.push_back(command);
        } else {
            let latency = self.now().saturating_sub(since);
            let result = Err(IoFailure::Lost(WcStatus::Flushed));
            self.done.push_back(Done { token: command.token, result, data: command.data, latency });
        }
    }

    /// Sends again what was under way when the connection was lost.
    pub(crate) fn resubmit(&mut self) {
        let queues = self.io.len();
        while self.is_ready()
            && let Some(queue) = (0..queues).max_by_key(|queue| self.room(*queue)).filter(|queue| self.room(*queue) > 0)
            && let Some(command) = self.requeue.pop_front()
        {
            if let Err(command) = self.submit(queue, command) {
                self.requeue.push_front(command);
                return;
            }
        }
    }
}

/// What a capsule carries behind the command.
enum Extra {
    None,
    Data,
    List(Vec<u8>),
}

fn carries_data(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::Compare | Op::Deallocate)
}

fn encode(command: &Command) -> Sqe {
    let Command { op, nsid, slba, blocks, .. } = *command;
    let flag = |on: bool, bit: u32| u32::from(on) << bit;
    let range = |opcode: u8, flags: u32| {
        let sqe = wire::block_command(opcode, nsid, slba, blocks);
        sqe.cdw(12, blocks.wrapping_sub(1) & 0xffff | flags)
    };
    match op {
        Op::Read => range(0x02, 0),
        Op::Write { fua } => range(0x01, flag(fua, 30)),
        Op::Flush => Sqe::new(0x00).nsid(nsid),
        Op::WriteZeroes { deallocate } => range(0x08, flag(deallocate, 25)),
        Op::Compare => range(0x05, 0),
        Op::Deallocate => Sqe::new(0x09).nsid(nsid).cdw(10, blocks.wrapping_sub(1) & 0xff).cdw(11, 4),
    }
}

/// Cuts a buffer into descriptors of nearly equal length; the first asks for the invalidation.
fn cut(data: &Buffer, pieces: usize, rkey: u32, invalidate: bool) -> Vec<u8> {
    let mut list = Vec::with_capacity(pieces * 16);
    let mut at = 0;
    for piece in 0..pieces {
        let end = data.len() * (piece + 1) / pieces;
        list.extend(wire::keyed(data.addr() + at as u64, (end - at) as u32, rkey, invalidate && piece == 0));
        at = end;
    }
    list
}
