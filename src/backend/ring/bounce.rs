//! Memory in the place of a buffer that O_DIRECT would refuse.

use crate::backend::open_file::OpenFile;
use crate::backend::{IoData, IoOp};
use crate::mem::PAGE;

/// Aligned memory of its own.
#[derive(Debug)]
pub(super) struct Bounce {
    bytes: Vec<u8>,
    start: usize,
}

impl Bounce {
    /// Memory to use in the buffer's place, if O_DIRECT would refuse the buffer: in-capsule data may start anywhere.
    pub(super) fn needed(data: &IoData, op: IoOp, file: &OpenFile) -> Option<Self> {
        let align = file.direct()?.memory as usize;
        let base = data.buffer.as_ptr().wrapping_add(data.start as usize);
        if (base as usize).is_multiple_of(align) {
            return None;
        }
        let bytes = vec![0; data.len as usize + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        let mut bounce = Self { bytes, start };
        if matches!(op, IoOp::Write { .. }) {
            // SAFETY: the range lies in the buffer (checked by `start`), whose only owner is this operation.
            let from = unsafe { std::slice::from_raw_parts(base, data.len as usize) };
            bounce.aligned()[..from.len()].copy_from_slice(from);
        }
        Some(bounce)
    }

    pub(super) fn aligned(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    pub(super) fn copy_out(&mut self, data: &mut IoData) {
        let base = data.buffer.as_ptr().wrapping_add(data.start as usize);
        // SAFETY: the range lies in the buffer (checked by `start`), which nothing else uses: the bounce memory did.
        let to = unsafe { std::slice::from_raw_parts_mut(base, data.len as usize) };
        to.copy_from_slice(&self.aligned()[..to.len()]);
    }
}
