//! The program itself over the software provider, as a process of its own: what hostile packets do to it, and what it costs to
//! have many hosts.

mod doctor;
mod foreign;
mod hostile;
mod many;
#[cfg(target_arch = "x86_64")]
mod seccomp;
mod served;
mod service;
