//! Who a host is and how it behaves.

use std::net::IpAddr;
use std::time::Duration;

/// Identity, sizes and switches of a [`Host`](super::Host). The defaults suit a first try.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Host NQN; targets may allow hosts by it.
    pub hostnqn: String,
    /// Host identifier, not all zero. One host NQN goes with one host ID.
    pub hostid: [u8; 16],
    /// I/O queues to ask for; the target may give fewer. 0 for a discovery controller.
    pub io_queues: u16,
    /// Entries of an I/O queue, 2 to 1024.
    pub queue_depth: u16,
    /// Keep alive timeout; zero = none.
    pub keep_alive: Duration,
    /// Data of writes up to this many bytes travel in the capsule, where the target allows it; 0 = never.
    pub in_capsule: u32,
    /// Descriptors that a transfer by RDMA is cut into, 1 to 16 and not more than the target allows.
    pub descriptors: u8,
    /// Ask the target to invalidate the key of each transfer. Costs a registration per command.
    pub invalidate: bool,
    /// RDMA READs that the target may have under way on a queue.
    pub read_depth: u8,
    /// Take asynchronous events.
    pub events: bool,
    /// Bytes of buffers for the data of commands.
    pub memory: usize,
    /// Local address to connect from.
    pub source: Option<IpAddr>,
    /// Number of the thread that this host runs on, from 0: providers that keep something per thread tell threads by it.
    pub thread: usize,
    /// How long connecting, and each admin command, may take.
    pub timeout: Duration,
    /// A command without an answer for so long means that its connection is lost; zero = wait for ever.
    pub io_timeout: Duration,
    /// What to do when the connection is lost; `None` = give up. Commands under way are sent again after a reconnect.
    pub reconnect: Option<Reconnect>,
}

/// How to come back after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconnect {
    /// Wait before the first attempt; doubled for each further one.
    pub first: Duration,
    /// The longest wait.
    pub most: Duration,
    /// Give up after so long without a connection.
    pub give_up: Duration,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self { first: Duration::from_millis(100), most: Duration::from_secs(10), give_up: Duration::from_secs(600) }
    }
}

impl Default for HostOptions {
    fn default() -> Self {
        let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_DNS, machine().as_bytes());
        Self {
            hostnqn: format!("nqn.2014-08.org.nvmexpress:uuid:{id}"),
            hostid: *id.as_bytes(),
            io_queues: 1,
            queue_depth: 128,
            keep_alive: Duration::from_secs(5),
            in_capsule: 4096,
            descriptors: 1,
            invalidate: false,
            read_depth: 16,
            events: false,
            memory: 16 << 20,
            source: None,
            thread: 0,
            timeout: Duration::from_secs(10),
            io_timeout: Duration::from_secs(30),
            reconnect: None,
        }
    }
}

/// What tells this process's host from others: the machine, and the process, as several may run at a time.
fn machine() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    format!("{}:{}:farside", id.trim(), std::process::id())
}
