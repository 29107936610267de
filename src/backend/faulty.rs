//! A test tool: a backend with another one behind it, that fails, delays, stalls, or lies about flushes.
//!
//! Deterministic: what happens depends on the seed, the order in which queues were opened and the order of their operations,
//! never on a clock. A failed operation does not reach the storage behind. Not for serving anybody's data.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{
    Backend, BackendError, BackendInfo, Io, IoDone, IoError, IoOp, IoQueue, QueueContext, Submit, Waker, ZoneWork,
    Zoned,
};

/// What goes wrong by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Where chance starts.
    pub seed: u64,
    /// One operation in so many fails, with [`IoError::Read`] or [`IoError::Write`]; 0 = none.
    pub fail_one_in: u32,
    /// Operations start up to so many polls later than they came.
    pub delay_polls: u32,
    /// Flush does nothing and FUA is ignored, though answered as if.
    pub drop_flush: bool,
    /// A Flush holds the thread that brings it until [`FaultControl::hang_on_flush`] lets it go: a hung reactor.
    pub hang_on_flush: bool,
}

/// See the module's doc.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    plan: FaultPlan,
    control: FaultControl,
    queues: AtomicU64,
}

const READS: u8 = 1;
const WRITES: u8 = 2;
const OTHERS: u8 = 4;

/// What a test does to a [`Faulty`] backend while it is used. Clones control the same one.
#[derive(Clone, Debug, Default)]
pub struct FaultControl(Arc<Control>);

#[derive(Default)]
struct Control {
    /// Which operations do not start: [`READS`], [`WRITES`], [`OTHERS`].
    stalled: AtomicU8,
    drop_flush: AtomicBool,
    deaf: AtomicBool,
    hang_on_flush: AtomicBool,
    fail_next: AtomicU32,
    dropped: AtomicU64,
    failed: AtomicU64,
    held: AtomicUsize,
    wakers: Mutex<Vec<Waker>>,
}

impl Faulty {
    /// Puts faults before `inner`.
    pub fn new(inner: Arc<dyn Backend>, plan: FaultPlan) -> Self {
        let control = FaultControl::default();
        control.drop_flush(plan.drop_flush);
        control.hang_on_flush(plan.hang_on_flush);
        Self { inner, plan, control, queues: AtomicU64::new(0) }
    }

    /// The handle that makes faults happen at a time.
    pub fn control(&self) -> FaultControl {
        self.control.clone()
    }
}

impl FaultControl {
    /// From now on nothing starts, until `release`.
    pub fn stall(&self) {
        self.0.stalled.store(READS | WRITES | OTHERS, Ordering::Release);
    }

    /// From now on no read starts, until `release`.
    pub fn stall_reads(&self) {
        self.0.stalled.store(READS, Ordering::Release);
    }

    /// From now on no write starts, until `release`.
    pub fn stall_writes(&self) {
        self.0.stalled.store(WRITES, Ordering::Release);
    }

    /// Ends a stall.
    pub fn release(&self) {
        self.0.stalled.store(0, Ordering::Release);
        self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Waker::wake);
    }

    /// Whether wishes to end an operation early go unheard from now on, as with a disk that cannot.
    pub fn ignore_cancel(&self, ignore: bool) {
        self.0.deaf.store(ignore, Ordering::Release);
    }

    /// Whether a Flush holds the thread that brings it from now on; `false` lets those go that are held.
    pub fn hang_on_flush(&self, hang: bool) {
        self.0.hang_on_flush.store(hang, Ordering::Release);
    }

    /// The next `count` operations fail.
    pub fn fail_next(&self, count: u32) {
        self.0.fail_next.store(count, Ordering::Release);
    }

    /// Whether flushes and FUA are ignored from now on.
    pub fn drop_flush(&self, drop: bool) {
        self.0.drop_flush.store(drop, Ordering::Release);
    }

    /// Flushes and FUAs that were ignored so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Acquire)
    }

    /// Operations that the storage has by now and that have not started: stalled or delayed.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Acquire)
    }

    /// Operations that were made to fail so far.
    pub fn failed(&self) -> u64 {
        self.0.failed.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("stalled", &self.stalled)
            .field("drop_flush", &self.drop_flush)
            .finish_non_exhaustive()
    }
}

impl Backend for Faulty {
    fn info(&self) -> BackendInfo {
        let mut info = self.inner.info();
        info.remarks.push(format!("TEST TOOL, makes faults: {:?}", self.plan));
        info
    }

    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        self.inner.refresh()?;
        Ok(self.info())
    }

    fn keep(&self) {
        self.inner.keep();
    }

    fn zoned(&self) -> Option<Arc<Zoned>> {
        self.inner.zoned()
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let number = self.queues.fetch_add(1, Ordering::Relaxed);
        self.control.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(context.waker.clone());
        Ok(Box::new(FaultyQueue {
            inner: self.inner.open_queue(context)?,
            plan: self.plan,
            control: self.control.0.clone(),
            waker: context.waker.clone(),
            chance: Chance::new(self.plan.seed, number),
            held: Vec::new(),
            answered: Vec::new(),
        }))
    }
}

struct FaultyQueue {
    inner: Box<dyn IoQueue>,
    plan: FaultPlan,
    control: Arc<Control>,
    waker: Waker,
    chance: Chance,
    /// Operations that have not started, with the polls until they do.
    held: Vec<(u32, Io)>,
    answered: Vec<IoDone>,
}

impl IoQueue for FaultyQueue {
    fn submit(&mut self, io: Io) -> Submit {
        if self.fails() {
            self.control.failed.fetch_add(1, Ordering::AcqRel);
            let reads = matches!(io.op, IoOp::Read { .. } | IoOp::Zone { work: ZoneWork::Look, .. });
            let error = if reads { IoError::Read } else { IoError::Write };
            return Submit::Done(IoDone { token: io.token, result: Err(error), data: io.data });
        }
        let delay = match self.plan.delay_polls {
            0 => 0,
            most => self.chance.below(u64::from(most) + 1) as u32,
        };
        if delay == 0 && !self.stalls(&io.op) {
            return self.start(io);
        }
        self.held.push((delay, io));
        self.control.held.fetch_add(1, Ordering::AcqRel);
        self.waker.wake();
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<IoDone>) {
        done.append(&mut self.answered);
        let mut again = false;
        for (delay, io) in std::mem::take(&mut self.held) {
            if self.stalls(&io.op) {
                self.held.push((delay, io));
            } else if delay > 0 {
                self.held.push((delay - 1, io));
                again = true;
            } else {
                self.control.held.fetch_sub(1, Ordering::AcqRel);
                if let Submit::Done(answer) = self.start(io) {
                    done.push(answer);
                }
            }
        }
        if again {
            self.waker.wake();
        }
        self.inner.poll(done);
    }

    fn cancel(&mut self, token: u64) {
        if self.control.deaf.load(Ordering::Acquire) {
            return;
        }
        match self.held.iter().position(|(_, io)| io.token == token) {
            Some(at) => {
                let (_, Io { token, data, .. }) = self.held.remove(at);
                self.control.held.fetch_sub(1, Ordering::AcqRel);
                self.answered.push(IoDone { token, result: Err(IoError::Cancelled), data });
                self.waker.wake();
            }
            None => self.inner.cancel(token),
        }
    }
}

impl Drop for FaultyQueue {
    fn drop(&mut self) {
        self.control.held.fetch_sub(self.held.len(), Ordering::AcqRel);
    }
}

impl FaultyQueue {
    fn stalls(&self, op: &IoOp) -> bool {
        let kind = match op {
            IoOp::Read { .. } => READS,
            IoOp::Write { .. } => WRITES,
            _ => OTHERS,
        };
        self.control.stalled.load(Ordering::Acquire) & kind != 0
    }

    fn fails(&mut self) -> bool {
        let less = |count: u32| count.checked_sub(1);
        self.control.fail_next.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
            || (self.plan.fail_one_in > 0 && self.chance.below(u64::from(self.plan.fail_one_in)) == 0)
    }

    fn start(&mut self, mut io: Io) -> Submit {
        while matches!(io.op, IoOp::Flush) && self.control.hang_on_flush.load(Ordering::Acquire) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        if self.control.drop_flush.load(Ordering::Acquire) {
            match &mut io.op {
                IoOp::Flush => {
                    self.control.dropped.fetch_add(1, Ordering::AcqRel);
                    return Submit::Done(IoDone { token: io.token, result: Ok(()), data: io.data });
                }
                IoOp::Write { fua, .. } | IoOp::WriteZeroes { fua, .. } if *fua => {
                    self.control.dropped.fetch_add(1, Ordering::AcqRel);
                    *fua = false;
                }
                _ => {}
            }
        }
        self.inner.submit(io)
    }
}

/// A small generator of numbers (splitmix64), enough for tests.
struct Chance(u64);

impl Chance {
    fn new(seed: u64, stream: u64) -> Self {
        Self(seed ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit
    }
}
