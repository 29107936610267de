//! Sizes and switches of a target, with their defaults, and the memory that they cost.

use std::time::Duration;

use nvme::io::IoLimits;

use super::builder::TargetError;
use super::request::MAX_DESCRIPTORS;
use crate::mem::Pool;

/// Sizes and switches. The defaults suit a first try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Reactor threads; by default one per core.
    pub reactors: usize,
    /// I/O queues of one controller, 1 to 128.
    pub io_queues: u16,
    /// Entries of an I/O submission queue, 2 to 1024.
    pub queue_depth: u32,
    /// Entries of an admin submission queue, 32 to 128.
    pub admin_queue_depth: u32,
    /// In-capsule data of an I/O queue in bytes: 0 to 16 KiB, a multiple of 16.
    pub in_capsule_data: u32,
    /// Largest data transfer of one command in bytes: a power of two, 4 KiB to 1 MiB.
    pub mdts: u32,
    /// What one command may ask for besides; MDTS is `mdts`, and Verify has the same limit or a lower one.
    pub io_limits: IoLimits,
    /// Data buffers of one reactor in bytes. Up to a quarter of it are pages for in-capsule data, as many as there are receives.
    pub pool_size: usize,
    /// Receives of one reactor: the sum of the submission queue entries of the queues that it can hold.
    pub receive_slots: u32,
    /// Use SEND with invalidate where the host asks for it and the device can.
    pub remote_invalidate: bool,
    /// Spin instead of sleeping.
    pub poll: bool,
    /// Keep histograms of how long commands take.
    pub histograms: bool,
    /// How soon work has to come, as a rule, for a reactor to spin for it instead of sleeping.
    pub poll_window: Duration,
    /// Lowest and highest controller ID handed out.
    pub cntlid: (u16, u16),
    /// How long a connection may be without a successful Connect command before it is closed.
    pub connect_timeout: Duration,
    /// Granularity of keep alive timeouts (KAS): a multiple of 100 ms.
    pub keep_alive_granularity: Duration,
    /// Hosts may reset a subsystem, which disconnects all of its hosts.
    pub subsystem_reset: bool,
    /// When hosts should retry what failed for a reason that passes: a multiple of 100 ms; zero leaves it to them.
    pub retry_delay: Duration,
    /// NQN of the discovery subsystem beside the well-known one; `None` = none.
    pub discovery_nqn: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reactors: std::thread::available_parallelism().map_or(1, usize::from),
            io_queues: 128,
            queue_depth: 1024,
            admin_queue_depth: 128,
            in_capsule_data: 4096,
            mdts: 1 << 20,
            io_limits: IoLimits::default(),
            pool_size: 64 << 20,
            receive_slots: 4096,
            remote_invalidate: true,
            poll: false,
            histograms: false,
            poll_window: Duration::from_micros(20),
            cntlid: (1, 0xffef),
            connect_timeout: Duration::from_secs(30),
            keep_alive_granularity: Duration::from_secs(1),
            subsystem_reset: false,
            retry_delay: Duration::ZERO,
            discovery_nqn: None,
        }
    }
}

/// Requests beyond those that queues may hold by their sizes.
pub(crate) const REQUEST_RESERVE: usize = 256;

/// Where the memory of one reactor goes, in bytes. The arena is the sum, rounded up to 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Data buffers.
    pub pool: usize,
    /// Receive pages: one for each receive, and those with the in-capsule data of commands in progress.
    pub pages: usize,
    /// Buffers of admin commands.
    pub admin_pool: usize,
    /// 64-byte commands of the receives.
    pub commands: usize,
    /// 16-byte completions of the responses.
    pub completions: usize,
    /// The one mapping that holds all of these.
    pub arena: usize,
}

/// Buffers that admin commands have to themselves, per reactor.
const ADMIN_POOL: usize = 4 << 20;

/// In-capsule data that an admin queue takes (Connect data are 1024 bytes), whatever I/O queues take.
pub(crate) const ADMIN_IN_CAPSULE: u32 = 4096;

impl Options {
    /// Whether all sizes are in range.
    pub(crate) fn check(&self) -> Result<(), TargetError> {
        let refuse = |key: &str, reason: String, remedy: &str| {
            Err(TargetError { object: format!("options.{key}"), reason, remedy: remedy.into() })
        };
        if !(1..=256).contains(&self.reactors) {
            return refuse("reactors", format!("{} is out of range", self.reactors), "use 1 to 256");
        }
        if !(1..=128).contains(&self.io_queues) {
            return refuse("io_queues", format!("{} is out of range", self.io_queues), "use 1 to 128");
        }
        if !(2..=1024).contains(&self.queue_depth) {
            return refuse("queue_depth", format!("{} is out of range", self.queue_depth), "use 2 to 1024");
        }
        if !(32..=128).contains(&self.admin_queue_depth) {
            return refuse("admin_queue_depth", format!("{} is out of range", self.admin_queue_depth), "use 32 to 128");
        }
        if self.in_capsule_data > 16384 || !self.in_capsule_data.is_multiple_of(16) {
            let reason = format!("{} is not a multiple of 16 up to 16384", self.in_capsule_data);
            return refuse("in_capsule_data", reason, "use 0, or 4K for most hosts");
        }
        if !self.mdts.is_power_of_two() || !(4096..=1 << 20).contains(&self.mdts) {
            return refuse("mdts", format!("{} is not a power of two from 4K to 1M", self.mdts), "use 1M");
        }
        if self.pool_size < 4 << 20 {
            return refuse("pool_size", format!("{} bytes are too few", self.pool_size), "use 4M or more");
        }
        if self.receive_slots < 128 {
            return refuse("receive_slots", format!("{} are too few", self.receive_slots), "use 128 or more");
        }
        let (low, high) = self.cntlid;
        if low < 1 || high > 0xffef || low > high {
            return refuse(
                "cntlid_min, cntlid_max",
                format!("{low} to {high} is not a range in 1 to 65519"),
                "leave them out",
            );
        }
        Ok(())
    }

    /// Limits of one I/O command. A Verify reads into one buffer.
    pub(crate) fn io_limits(&self) -> IoLimits {
        let limits = self.io_limits;
        let verify = if limits.verify_bytes == 0 { self.mdts } else { limits.verify_bytes.min(self.mdts) };
        IoLimits { mdts_bytes: self.mdts, verify_bytes: verify, ..limits }
    }

    /// Bytes of the page that stands behind each receive.
    pub(crate) fn receive_page(&self) -> usize {
        (self.in_capsule_data as usize).max(ADMIN_IN_CAPSULE as usize)
    }

    /// Keyed descriptors that one command may carry (MSDBD): a list of more than one lies in the capsule, so without room there
    /// is one.
    pub(crate) fn max_descriptors(&self) -> usize {
        if (self.in_capsule_data as usize) < MAX_DESCRIPTORS * nvme::sgl::SGL_LEN { 1 } else { MAX_DESCRIPTORS }
    }

    /// Requests of one reactor: each submission queue entry can have a command under way and a response that is sent but
    /// not yet seen to be. The reserve is for the others while queues that hold more than that are being closed.
    pub(crate) fn requests(&self) -> usize {
        2 * self.receive_slots as usize + REQUEST_RESERVE
    }

    /// The memory formula: `pool_size + receive_slots x (receive page + 64 + 2 x 16) + 4 MiB` per reactor.
    pub fn memory_plan(&self) -> MemoryPlan {
        let receives = self.receive_slots as usize * self.receive_page().next_power_of_two();
        let both = (self.pool_size + receives).next_multiple_of(Pool::MAX_BUFFER);
        let pages = (receives + receives.min(self.pool_size / 4)).next_multiple_of(Pool::MAX_BUFFER);
        let pool = both - pages;
        let commands = self.receive_slots as usize * 64;
        let completions = self.requests() * 16;
        let arena = (both + ADMIN_POOL + commands + completions).next_multiple_of(2 << 20);
        MemoryPlan { pool, pages, admin_pool: ADMIN_POOL, commands, completions, arena }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_formula_says() {
        let options = Options::default();
        // pool_size + receive_slots x (page + 64 + 32) + 4 MiB, with the reserve of requests, rounded up to 2 MiB.
        let formula = (64 << 20) + 4096 * (4096 + 64 + 32) + (4 << 20) + REQUEST_RESERVE * 16;
        assert_eq!(options.memory_plan().arena, usize::next_multiple_of(formula, 2 << 20));
        let wide = Options { in_capsule_data: 12_288, ..options };
        let plan = wide.memory_plan();
        assert_eq!((plan.pool, plan.pages), (48 << 20, (16 << 20) + 4096 * 16_384));
        let small = Options { pool_size: 4 << 20, receive_slots: 128, ..Options::default() }.memory_plan();
        // 128 pages and as many to spare.
        assert_eq!((small.pool, small.pages), (4 << 20, 1 << 20));
    }

    #[test]
    fn each_option_has_both_sides() {
        let good = Options::default();
        assert!(good.check().is_ok());
        let wrong: [fn(&mut Options); 12] = [
            |options| options.reactors = 0,
            |options| options.reactors = 257,
            |options| options.io_queues = 0,
            |options| options.io_queues = 129,
            |options| options.queue_depth = 1,
            |options| options.queue_depth = 1025,
            |options| options.in_capsule_data = 16_385,
            |options| options.in_capsule_data = 100,
            |options| options.mdts = 3 << 18,
            |options| options.mdts = 2 << 20,
            |options| options.pool_size = 1 << 20,
            |options| options.cntlid = (5, 4),
        ];
        for change in wrong {
            let mut options = good.clone();
            change(&mut options);
            let error = options.check().unwrap_err();
            assert!(error.object.starts_with("options."), "{error}");
        }
    }
}
