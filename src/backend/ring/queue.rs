//! A file's queue on a ring.

use std::sync::Arc;

use super::RingHandle;
use crate::backend::open_file::OpenFile;
use crate::backend::{Io, IoQueue, Submit};

/// See the module's doc. Dropped with operations in flight it leaves them to be answered by the ring.
#[derive(Debug)]
pub(in crate::backend) struct RingQueue {
    ring: RingHandle,
    file: usize,
}

impl RingQueue {
    /// A queue for a file on this ring.
    pub(in crate::backend) fn open(ring: &RingHandle, file: Arc<OpenFile>) -> Self {
        let file = ring.borrow_mut().add_file(file);
        Self { ring: ring.clone(), file }
    }
}

impl IoQueue for RingQueue {
    fn submit(&mut self, io: Io) -> Submit {
        self.ring.borrow_mut().start(self.file, io)
    }

    fn cancel(&mut self, token: u64) {
        self.ring.borrow_mut().cancel(token);
    }

    fn completes_on_ring(&self) -> bool {
        true
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        self.ring.borrow_mut().close_file(self.file);
    }
}
