//! The program itself over the software provider, as a process of its own: what hostile packets do to it, what it costs to
//! have many hosts, and how it starts and ends.

mod bench;
mod crowd;
mod doctor;
mod foreign;
mod hostile;
mod killed;
mod logged;
mod many;
#[cfg(target_arch = "x86_64")]
mod seccomp;
mod served;
mod service;
#[path = "../hosts/skipped.rs"]
mod skipped;
mod start;
