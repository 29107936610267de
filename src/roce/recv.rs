//! Receive queues, per queue pair or shared, and scatter/gather over registered memory.
use std::collections::VecDeque;

use super::keys::{Access, KeyError, Keys, Memory};
use super::verbs::{MAX_SGE, PostError, RecvWr, Sge};

/// Posted receives, first in first out.
#[derive(Debug)]
pub(super) struct RecvQueue {
    entries: VecDeque<(u64, usize)>,
    /// The elements of all entries, in order.
    sges: VecDeque<Sge>,
    capacity: usize,
}

/// A receive that was taken off its queue.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) tag: u64,
    pub(super) sges: Vec<Sge>,
}

impl RecvQueue {
    pub(super) fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::with_capacity(capacity), sges: VecDeque::with_capacity(capacity), capacity }
    }

    pub(super) fn post(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if wr.sges.len() > MAX_SGE {
            return Err(PostError::TooLong);
        }
        if self.entries.len() >= self.capacity {
            return Err(PostError::Full);
        }
        self.entries.push_back((wr.tag, wr.sges.len()));
        self.sges.extend(wr.sges);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Moves the oldest receive to `taken`. False when there is none.
    pub(super) fn take(&mut self, taken: &mut Taken) -> bool {
        let Some((tag, count)) = self.entries.pop_front() else {
            return false;
        };
        taken.tag = tag;
        taken.sges.clear();
        taken.sges.extend(self.sges.drain(..count));
        true
    }

    /// The tag of the oldest receive, which is dropped.
    pub(super) fn flush_one(&mut self) -> Option<u64> {
        let (tag, count) = self.entries.pop_front()?;
        self.sges.drain(..count);
        Some(tag)
    }
}

/// Why a payload did not reach the memory of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ScatterError {
    /// Longer than the elements.
    Length,
    /// A key does not allow it.
    Key(KeyError),
}

impl From<KeyError> for ScatterError {
    fn from(error: KeyError) -> Self {
        Self::Key(error)
    }
}

/// Total bytes of the elements.
pub(super) fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// Copies `data` to the elements, from byte `at` of them on.
pub(super) fn scatter<'s, M: Memory>(
    keys: &Keys,
    memory: &mut M,
    sges: impl Iterator<Item = &'s Sge>,
    at: u64,
    mut data: &[u8],
) -> Result<(), ScatterError> {
    let mut skip = at;
    for sge in sges {
        if data.is_empty() {
            return Ok(());
        }
        let Some((va, room)) = after(sge, &mut skip) else {
            continue;
        };
        let (part, rest) = data.split_at_checked(room).unwrap_or((data, &[]));
        let len = u32::try_from(part.len()).map_err(|_| ScatterError::Length)?;
        let span = keys.local(sge.lkey, va, len, Access::LOCAL_WRITE)?;
        if !memory.write(span, part) {
            return Err(ScatterError::Key(KeyError::Unknown));
        }
        data = rest;
    }
    if data.is_empty() { Ok(()) } else { Err(ScatterError::Length) }
}

/// Fills `out` from the elements, from byte `at` of them on.
pub(super) fn gather<'s, M: Memory>(
    keys: &Keys,
    memory: &M,
    sges: impl Iterator<Item = &'s Sge>,
    at: u64,
    mut out: &mut [u8],
) -> Result<(), ScatterError> {
    let mut skip = at;
    for sge in sges {
        if out.is_empty() {
            return Ok(());
        }
        let Some((va, room)) = after(sge, &mut skip) else {
            continue;
        };
        let (part, rest) = out.split_at_mut(room.min(out.len()));
        let len = u32::try_from(part.len()).map_err(|_| ScatterError::Length)?;
        let span = keys.local(sge.lkey, va, len, Access::LOCAL_READ)?;
        if !memory.read(span, part) {
            return Err(ScatterError::Key(KeyError::Unknown));
        }
        out = rest;
    }
    if out.is_empty() { Ok(()) } else { Err(ScatterError::Length) }
}

/// Address and room of an element behind the first `skip` bytes; none when it lies wholly within them.
fn after(sge: &Sge, skip: &mut u64) -> Option<(u64, usize)> {
    let len = u64::from(sge.len);
    if *skip >= len {
        *skip -= len;
        return None;
    }
    let at = core::mem::take(skip);
    Some((sge.va.checked_add(at)?, usize::try_from(len - at).ok()?))
}
