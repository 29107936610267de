//! Blocking storage as a backend: an embedder's ordinary code, run on threads.
//!
//! Implement [`BlockingStorage`] and wrap it in [`Blocking`]. Calls come from several threads at once; each one returns when
//! its work is done. A call that panics is answered as a failed operation, and its thread goes on. A queue that is dropped
//! waits for its operations to end, as their buffers must outlive them.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::{Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit, Waker};

/// Storage that is used by calls which return when they are done. Ranges were checked against the size before.
pub trait BlockingStorage: Send + Sync + fmt::Debug + 'static {
    /// Geometry and abilities.
    fn info(&self) -> BackendInfo;

    /// Fills all of `into`.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError>;

    /// Stores all of `from`; on stable storage when it returns if `fua`.
    fn write_at(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), IoError>;

    /// Brings every write that returned before onto stable storage.
    fn flush(&self) -> Result<(), IoError>;

    /// Makes a range read as zeroes; `deallocate` allows to give its space back. Writes zeroes unless there is a better way.
    fn write_zeroes(&self, offset: u64, len: u64, deallocate: bool, fua: bool) -> Result<(), IoError> {
        let _ = deallocate;
        let zeroes = [0; 65536];
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(zeroes.len() as u64);
            self.write_at(at, &zeroes[..count as usize], fua)?;
            at += count;
        }
        Ok(())
    }

    /// Gives space back, if that is something this storage does.
    fn deallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let _ = (offset, len);
        Ok(())
    }

    /// Looks again whether the size changed.
    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        Ok(self.info())
    }
}

/// Runs a [`BlockingStorage`] on threads of its own. They end with the last queue.
#[derive(Debug)]
pub struct Blocking {
    storage: Arc<dyn BlockingStorage>,
    jobs: Sender<Job>,
}

impl Blocking {
    /// On `threads` threads: as many operations run at once.
    pub fn new(storage: impl BlockingStorage, threads: usize) -> Result<Self, BackendError> {
        let storage: Arc<dyn BlockingStorage> = Arc::new(storage);
        let name = storage.info().name;
        let (jobs, todo) = unbounded();
        for number in 0..threads.max(1) {
            let (storage, todo) = (storage.clone(), todo.clone());
            let run = move || work(&*storage, &todo);
            thread::Builder::new().name(format!("blocking-{number}")).spawn(run).map_err(|error| {
                BackendError::new(&name, error, "lower the number of threads, or raise the limit (ulimit -u)")
            })?;
        }
        Ok(Self { storage, jobs })
    }
}

impl Backend for Blocking {
    fn info(&self) -> BackendInfo {
        self.storage.info()
    }

    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        self.storage.refresh()
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let (answer, answers) = unbounded();
        let waker = context.waker.clone();
        Ok(Box::new(BlockingQueue { jobs: self.jobs.clone(), answer, answers, waker, pending: 0 }))
    }
}

struct Job {
    io: Io,
    answer: Sender<IoDone>,
    waker: Waker,
}

struct BlockingQueue {
    jobs: Sender<Job>,
    answer: Sender<IoDone>,
    answers: Receiver<IoDone>,
    waker: Waker,
    pending: usize,
}

impl IoQueue for BlockingQueue {
    fn submit(&mut self, io: Io) -> Submit {
        let job = Job { io, answer: self.answer.clone(), waker: self.waker.clone() };
        match self.jobs.send(job) {
            Ok(()) => {
                self.pending += 1;
                Submit::Pending
            }
            Err(refused) => {
                let Io { token, data, .. } = refused.0.io;
                Submit::Done(IoDone { token, result: Err(IoError::Gone), data })
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<IoDone>) {
        while let Ok(answer) = self.answers.try_recv() {
            self.pending -= 1;
            done.push(answer);
        }
    }
}

impl Drop for BlockingQueue {
    fn drop(&mut self) {
        while self.pending > 0 && self.answers.recv().is_ok() {
            self.pending -= 1;
        }
    }
}

fn work(storage: &dyn BlockingStorage, todo: &Receiver<Job>) {
    while let Ok(Job { io: Io { token, op, mut data }, answer, waker }) = todo.recv() {
        let result = catch_unwind(AssertUnwindSafe(|| match (op, &mut data) {
            (IoOp::Read { offset }, Some(data)) => storage.read_at(offset, data.bytes_mut()),
            (IoOp::Write { offset, fua }, Some(data)) => storage.write_at(offset, data.bytes(), fua),
            (IoOp::Flush, _) => storage.flush(),
            (IoOp::WriteZeroes { offset, len, deallocate, fua }, _) => {
                storage.write_zeroes(offset, len, deallocate, fua)
            }
            (IoOp::Deallocate { offset, len }, _) => storage.deallocate(offset, len),
            (IoOp::Zone { .. }, _) => Err(IoError::Unsupported),
            (IoOp::Read { .. } | IoOp::Write { .. }, None) => panic!("{op:?} without a buffer"),
        }));
        let result = result.unwrap_or_else(|_| {
            tracing::error!(?op, "blocking storage panicked");
            Err(if matches!(op, IoOp::Read { .. }) { IoError::Read } else { IoError::Write })
        });
        // Nobody hears it when the queue was leaked.
        let _ = answer.send(IoDone { token, result, data });
        waker.wake();
    }
}
