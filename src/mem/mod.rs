//! Buffers: one arena per reactor, registered once with the provider and once with io_uring, carved by a buddy pool.
//!
//! A [`Buffer`] is an exclusive claim on a contiguous, page-aligned piece of its arena. It travels: from the pool into a
//! request, to a backend and back. While a NIC or the kernel may touch its bytes nobody looks at them; that is the duty of
//! the one who posted the work (the request machine and the ring), and the reason why a buffer returns to its pool only
//! after the completion that ended such use, or after the queue pair was destroyed.

mod arena;
mod pool;
mod records;

pub use arena::{Arena, MemError, PAGE};
pub use pool::{Buffer, Pool, PoolStats};
pub use records::Records;
