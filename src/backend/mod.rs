//! What stands behind a namespace.
//!
//! A backend has two halves. [`Backend`] is the shared description: geometry, limits, write cache, abilities, identity.
//! [`IoQueue`] is one reactor's submission queue of it. An embedder implements both, or wraps blocking code with the helper
//! that runs it on threads.
//!
//! Contract of a queue:
//! * Every [`Io`] is answered exactly once, in any order: at once as [`Submit::Done`], or later as an [`IoDone`] with the same
//!   token. Its buffer comes back with the answer.
//! * Short transfers, EAGAIN and EINTR are retried inside and never come out.
//! * A write that was answered is visible to every later read through any queue. `fua`: it is on stable storage too.
//! * [`IoOp::Flush`] is answered when every write that was answered before the flush was submitted, through any queue, is on
//!   stable storage.
//! * `submit`, `poll` and `cancel` never block.
//! * A queue that completes by itself (not through the reactor's ring) calls its [`Waker`] when something is to be polled.

mod block;
mod blocking;
mod faulty;
mod file;
mod holder;
mod ioctl;
mod memory;
mod null;
mod open_file;
mod ring;
mod spec;
mod storage;
#[cfg(test)]
mod tests;
mod zone_worker;
mod zoned;
mod zoned_device;

use std::fmt;
use std::sync::Arc;

pub(crate) use block::check_zones;
pub use blocking::{Blocking, BlockingStorage};
pub use faulty::{FaultControl, FaultPlan, Faulty};
pub use memory::{Memory, MemoryZones};
pub use null::Null;
pub use ring::{Ring, RingError, RingHandle, RingOptions};
pub use spec::{BackendSpec, Source, open};
pub(crate) use spec::{place_of, same_place};
pub use storage::Storage;
pub use zoned::Zoned;

use crate::mem::Buffer;
use nvme::zns::ZoneAction;

/// Byte ranges and abilities of what stands behind a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// What it is, in words: a path, `memory`, `null`.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The smallest unit and alignment of offsets and lengths, in bytes (a power of two, 512 to 4096). A namespace's LBA is
    /// at least this.
    pub block_size: u32,
    /// Preferred write granularity and alignment, in bytes (NPWG, NPWA).
    pub preferred_write: u32,
    /// Preferred deallocate granularity, in bytes (NPDG, NPDA).
    pub preferred_deallocate: u32,
    /// Optimal write size, in bytes (NOWS); 0 = none.
    pub optimal_write: u32,
    /// Answered writes may be lost at power loss until flushed.
    pub write_cache: bool,
    /// Only reads.
    pub read_only: bool,
    /// It has heads to move: hosts order what they send by address.
    pub rotational: bool,
    /// Operations beyond read, write and flush.
    pub abilities: Abilities,
    /// Bytes a queue can take in one read or write.
    pub max_transfer: u32,
    /// Remarks for the start-up table: "buffered: the file system refuses O_DIRECT".
    pub remarks: Vec<String>,
    /// Stable bytes that identify the storage (device and inode, a serial, a configured name): UUIDs are derived from it
    /// when none is configured.
    pub identity: Vec<u8>,
}

/// Operations beyond read, write and flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// [`IoOp::Deallocate`] gives space back.
    pub deallocate: bool,
    /// [`IoOp::WriteZeroes`] works, by whatever means.
    pub write_zeroes: bool,
    /// Deallocated blocks read as zeroes.
    pub deallocated_reads_zero: bool,
}

/// An operation, in bytes. Ranges were checked against the size before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Fills the data range of the buffer.
    Read {
        /// From this byte.
        offset: u64,
    },
    /// Stores the data range of the buffer.
    Write {
        /// At this byte.
        offset: u64,
        /// On stable storage when answered.
        fua: bool,
    },
    /// All answered writes onto stable storage.
    Flush,
    /// Reads return zeroes afterwards.
    WriteZeroes {
        /// From this byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// May give the space back.
        deallocate: bool,
        /// On stable storage when answered.
        fua: bool,
    },
    /// Gives space back; a hint that may do nothing.
    Deallocate {
        /// From this byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Work on zones; only of a backend that has some (see [`Zoned`]).
    Zone {
        /// First byte of the first zone.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What to do.
        work: ZoneWork,
    },
}

/// What is to be done to zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneWork {
    /// Change the state of the zones: of one, or of as many as [`Zoned::run`] says. After a failure too the zones may have been told
    /// how it ended ([`Zones::end_action`](nvme::zns::Zones::end_action)); those that were not are not known from then on.
    Act(ZoneAction),
    /// Find out the state of the zones, and have [`Zones::learn`](nvme::zns::Zones::learn) it before the answer, or say
    /// [`Zones::trust`](nvme::zns::Zones::trust) where there is nobody to ask. A zone that is not known after a success cannot be
    /// used: what asked for it is answered Write Fault.
    Look,
}

/// One operation handed to a queue.
#[derive(Debug)]
pub struct Io {
    /// Comes back with the answer.
    pub token: u64,
    /// What to do.
    pub op: IoOp,
    /// Data for reads and writes.
    pub data: Option<IoData>,
}

/// A buffer and the part of it that an operation is about.
#[derive(Debug)]
pub struct IoData {
    /// Owned by the queue until the answer.
    pub buffer: Buffer,
    /// First byte in the buffer.
    pub start: u32,
    /// Bytes.
    pub len: u32,
}

impl IoData {
    /// The bytes that the operation is about. Nothing may be in flight on them.
    ///
    /// # Panics
    /// If the range lies outside of what was asked for when the buffer was taken.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.as_slice()[self.start as usize..][..self.len as usize]
    }

    /// The bytes, to write. Nothing may be in flight on them.
    ///
    /// # Panics
    /// As `bytes`.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer.as_mut_slice()[self.start as usize..][..self.len as usize]
    }
}

/// The answer to an [`Io`].
#[derive(Debug)]
pub struct IoDone {
    /// The operation's token.
    pub token: u64,
    /// How it went.
    pub result: Result<(), IoError>,
    /// Its buffer.
    pub data: Option<IoData>,
}

/// Whether an operation was answered at once.
#[derive(Debug)]
pub enum Submit {
    /// Yes.
    Done(IoDone),
    /// It will come out of `poll`, or out of the reactor's ring.
    Pending,
}

/// Why an operation failed, as far as a host can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The medium could not be read.
    #[error("the medium could not be read")]
    Read,
    /// The medium could not be written.
    #[error("the medium could not be written")]
    Write,
    /// No space is left.
    #[error("no space is left")]
    NoSpace,
    /// The range lies outside what is there.
    #[error("the range lies outside what is there")]
    OutOfRange,
    /// It may only be read.
    #[error("it may only be read")]
    ReadOnly,
    /// This backend cannot do that.
    #[error("not supported")]
    Unsupported,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
    /// Cancelled at the host's wish.
    #[error("cancelled")]
    Cancelled,
    /// More zones would be open than can be.
    #[error("too many open zones")]
    OpenZones,
    /// More zones would be open or closed than can be.
    #[error("too many active zones")]
    ActiveZones,
    /// Conflicts with a reservation of the device itself.
    #[error("reservation conflict")]
    Reservation,
    /// Anything else, by the system's error number.
    #[error("errno {0}")]
    Other(i32),
}

/// A backend could not be opened or used: what, why, and what to try.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{object}: {reason}; {remedy}")]
pub struct BackendError {
    /// Path or kind.
    pub object: String,
    /// Why.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

impl BackendError {
    /// From its parts.
    pub fn new(object: impl ToString, reason: impl ToString, remedy: impl ToString) -> Self {
        Self { object: object.to_string(), reason: reason.to_string(), remedy: remedy.to_string() }
    }
}

/// The shared description of what stands behind a namespace.
pub trait Backend: Send + Sync + fmt::Debug + 'static {
    /// Geometry and abilities.
    fn info(&self) -> BackendInfo;

    /// Looks again whether the size changed, for `info` and the answer. May take as long as a stat does.
    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        Ok(self.info())
    }

    /// It is served now: what was made for it stays when it is dropped. A backend that is opened for a start that fails never
    /// hears it, and takes back what it made. One that wraps another passes it on.
    fn keep(&self) {}

    /// Its zones, if it has zones.
    fn zoned(&self) -> Option<Arc<Zoned>> {
        None
    }

    /// A submission queue for the calling reactor.
    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError>;
}

/// What a reactor offers to the queues opened on it.
#[derive(Clone, Debug)]
pub struct QueueContext {
    /// Wakes this reactor.
    pub waker: Waker,
    /// Its ring, for queues that complete there.
    pub ring: Option<RingHandle>,
}

/// One reactor's submission queue of a backend.
pub trait IoQueue {
    /// Starts an operation.
    fn submit(&mut self, io: Io) -> Submit;

    /// Adds finished operations. Called while operations are pending and after the waker was called. Queues that complete
    /// through the reactor's ring leave it empty.
    fn poll(&mut self, done: &mut Vec<IoDone>) {
        let _ = done;
    }

    /// Wishes an operation to end early. It is answered as usual, cancelled or not.
    fn cancel(&mut self, token: u64) {
        let _ = token;
    }

    /// Whether pending operations complete through the reactor's ring, so that `poll` need not be called.
    fn completes_on_ring(&self) -> bool {
        false
    }
}

/// Wakes the reactor that a queue belongs to, from any thread.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// From a function that does it.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(wake))
    }

    /// Makes the reactor poll soon. Cheap when it is awake.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}
