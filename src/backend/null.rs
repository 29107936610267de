//! Storage that is not there: writes are taken and forgotten, reads return zeroes. For measuring everything else.
//!
//! Reads do fill the buffer: buffers are shared between hosts, and what was in one before is nobody else's to see.

use super::{Abilities, Backend, BackendError, BackendInfo, Io, IoDone, IoOp, IoQueue, QueueContext, Submit};

/// See the module's doc.
#[derive(Debug)]
pub struct Null {
    size: u64,
}

impl Null {
    /// Of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self { size }
    }
}

impl Backend for Null {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "null".into(),
            size: self.size,
            block_size: 512,
            preferred_write: 0,
            preferred_deallocate: 0,
            optimal_write: 0,
            write_cache: false,
            read_only: false,
            rotational: false,
            abilities: Abilities { deallocate: true, write_zeroes: true, deallocated_reads_zero: true },
            max_transfer: u32::MAX,
            remarks: vec!["null: writes are forgotten".into()],
            identity: b"null".to_vec(),
        }
    }

    fn open_queue(&self, _: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        Ok(Box::new(NullQueue))
    }
}

struct NullQueue;

impl IoQueue for NullQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let Io { token, op, mut data } = io;
        if let (IoOp::Read { .. }, Some(data)) = (op, &mut data) {
            data.bytes_mut().fill(0);
        }
        Submit::Done(IoDone { token, result: Ok(()), data })
    }
}
