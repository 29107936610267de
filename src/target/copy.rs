//! Copy: ranges of a namespace, one behind the other, to a place of the same namespace.
//!
//! The source ranges are fetched like the data of any command and checked whole. Source and destination are locked against all
//! reactors; then a bounce buffer at a time is read and written. (NVM Command Set 1.x, Copy command.)

use std::time::Duration;

use nvme::completion::Completion;
use nvme::io::{BlockRange, parse_copy};
use nvme::status::Status;

use super::reactor::Reactor;
use super::request::{Job, RequestId};
use crate::backend::IoOp;
use crate::rdma::Provider;

/// How far a Copy is.
#[derive(Debug)]
pub(crate) struct CopyProgress {
    sources: Vec<BlockRange>,
    destination: u64,
    fua: bool,
    /// The range at work, and the blocks of it that are copied.
    range: usize,
    done: u32,
    /// The bounce buffer holds the next blocks.
    read: bool,
}

impl CopyProgress {
    /// The next operation and its bytes; `None` when all is copied. `most` bytes fit into the bounce buffer.
    pub(crate) fn next(&self, shift: u8, most: u32) -> Option<(IoOp, u32)> {
        let source = self.sources.get(self.range)?;
        let blocks = self.step(source, shift, most);
        let len = blocks << shift;
        Some(if self.read {
            (IoOp::Write { offset: self.destination << shift, fua: self.fua }, len)
        } else {
            (IoOp::Read { offset: (source.slba + u64::from(self.done)) << shift }, len)
        })
    }

    fn step(&self, source: &BlockRange, shift: u8, most: u32) -> u32 {
        (source.blocks - self.done).min(most >> shift)
    }

    /// The operation of [`CopyProgress::next`] was done: whether there is another.
    pub(crate) fn advance(&mut self, shift: u8, most: u32) -> bool {
        let Some(source) = self.sources.get(self.range) else { return false };
        self.read = !self.read;
        if !self.read {
            let blocks = self.step(source, shift, most);
            self.destination += u64::from(blocks);
            self.done += blocks;
            if self.done == source.blocks {
                (self.range, self.done) = (self.range + 1, 0);
            }
        }
        self.range < self.sources.len()
    }

    /// Number of the first source range that is not copied whole, for Dword 0 of a failure.
    pub(crate) fn at(&self) -> u32 {
        self.range as u32
    }
}

impl<P: Provider> Reactor<P> {
    /// The next operation of a Copy, and its bytes.
    pub(crate) fn copy_step(&self, id: RequestId, shift: u8) -> Option<(IoOp, u32)> {
        let request = &self.requests[id];
        request.extra.as_ref()?.copy.as_ref()?.next(shift, request.scratch_len)
    }

    /// The source ranges are here: they are checked, and locked together with the destination.
    pub(crate) fn begin_copy(&mut self, id: RequestId, at: u32, slba: u64, count: u16, fua: bool, now: Duration) {
        let request = &self.requests[id];
        let (start, len, cid) = (request.data_start as usize, request.data_len as usize, request.cid);
        let bytes = request.buffer.as_ref().and_then(|buffer| buffer.as_slice().get(start..start + len));
        let view = &self.namespaces[at].view;
        let parsed = match bytes {
            Some(bytes) => parse_copy(bytes, slba, count, view, &self.shared.io_limits),
            None => Err((Status::INTERNAL_ERROR, 0)),
        };
        let sources = match parsed {
            Ok(sources) => sources,
            Err((status, range)) => {
                let status = self.record_failure(id, status, now);
                return self.finish(id, Completion { result: range.into(), cid, status }, now);
            }
        };
        let blocks = sources.iter().map(|source| source.blocks).sum();
        let locked = sources.iter().copied().chain([BlockRange { slba, blocks }]).collect();
        let progress = CopyProgress { sources, destination: slba, fua, range: 0, done: 0, read: false };
        self.requests[id].extra_mut().copy = Some(progress);
        self.ask_lock(id, at, locked);
    }

    /// A lock is held: the Copy, or the Compare of a pair, runs.
    pub(crate) fn run_locked(&mut self, id: RequestId, now: Duration) {
        let partner = self.requests[id].extra.as_ref().and_then(|extra| extra.partner);
        let first = partner.unwrap_or(id);
        if let Job::Io { namespace, command } = self.requests[first].job {
            self.submit_io(first, namespace, command, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(sources: &[(u64, u32)], destination: u64, most: u32) -> Vec<(IoOp, u32)> {
        let sources = sources.iter().map(|(slba, blocks)| BlockRange { slba: *slba, blocks: *blocks }).collect();
        let mut copy = CopyProgress { sources, destination, fua: false, range: 0, done: 0, read: false };
        let mut steps = Vec::new();
        while let Some(step) = copy.next(9, most) {
            steps.push(step);
            if !copy.advance(9, most) {
                break;
            }
        }
        steps
    }

    #[test]
    fn ranges_are_read_and_written_a_buffer_at_a_time() {
        let read = |block: u64, blocks: u32| (IoOp::Read { offset: block * 512 }, blocks * 512);
        let write = |block: u64, blocks: u32| (IoOp::Write { offset: block * 512, fua: false }, blocks * 512);
        let expected = [
            read(10, 8),
            write(100, 8),
            read(18, 2),
            write(108, 2),
            read(3, 1),
            write(110, 1),
            read(40, 8),
            write(111, 8),
        ];
        assert_eq!(steps(&[(10, 10), (3, 1), (40, 8)], 100, 4096), expected);
    }
}
