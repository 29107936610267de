//! Making the ring: the newest set-up the kernel takes, and one clear error where it takes none.

use std::io;
use std::os::fd::RawFd;

use io_uring::{IoUring, squeue};

use super::request::Step;
use super::sqe::{self, Target};

/// io_uring could not be had or used: why, and what to try.
#[derive(Clone, Debug, thiserror::Error)]
#[error("io_uring: {reason}; {remedy}")]
pub struct RingError {
    /// Why.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

impl RingError {
    pub(super) fn new(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: remedy.into() }
    }
}

/// Sizes of a ring.
#[derive(Clone, Debug)]
pub struct RingOptions {
    /// Entries of the submission queue (rounded up to a power of two). What does not fit waits in a list.
    pub entries: u32,
    /// Files that can be registered; later ones are used by their descriptors.
    pub files: u32,
    /// Threads of the kernel, made when needed, for operations that can only wait: flushes, and all I/O of a device that
    /// stalls. The kernel's own limit is four per core, which one stalled device uses up for every other on the ring.
    pub workers: u32,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self { entries: 1024, files: 256, workers: 64 }
    }
}

/// How completions come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// When this thread enters the kernel for them (6.1).
    Deferred,
    /// When this thread enters the kernel for anything (5.19).
    Cooperative,
    /// Whenever the kernel likes.
    Plain,
}

/// A ring in the best mode, of the wanted size or of what the memlock limit allows.
pub(super) fn build(entries: u32) -> Result<(IoUring, Mode), RingError> {
    let mut entries = entries;
    loop {
        match build_sized(entries) {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && entries > SMALLEST => entries /= 2,
            Err(error) => return Err(explain(&error)),
            Ok((ring, mode)) if ring.params().is_feature_nodrop() && ring.params().is_feature_ext_arg() => {
                return Ok((ring, mode));
            }
            Ok(_) => return Err(RingError::new("the kernel is older than 5.11", "use Linux 6.1 or later")),
        }
    }
}

/// Entries of the smallest queue that is worth having: three pages with its completions.
const SMALLEST: u32 = 32;

fn build_sized(entries: u32) -> io::Result<(IoUring, Mode)> {
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for mode in [Mode::Deferred, Mode::Cooperative, Mode::Plain] {
        match build_mode(entries, mode) {
            Ok(ring) => return Ok((ring, mode)),
            Err(error) => last = error,
        }
        if last.raw_os_error() != Some(libc::EINVAL) {
            break;
        }
    }
    Err(last)
}

fn build_mode(entries: u32, mode: Mode) -> io::Result<IoUring> {
    let mut builder = IoUring::<squeue::Entry>::builder();
    builder.dontfork().setup_clamp().setup_cqsize(entries.saturating_mul(4));
    match mode {
        Mode::Deferred => {
            builder.setup_submit_all().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        }
        Mode::Cooperative => {
            builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
        }
        Mode::Plain => {}
    }
    builder.build(entries)
}

/// Whether the kernel discards on a block device through the ring (6.12). Asked with a range that no device takes: invalid
/// where it does, unknown where it does not.
pub(crate) fn kernel_discards(device: RawFd) -> bool {
    let Ok(mut ring) = IoUring::new(2) else { return false };
    let entry = sqe::entry(Step::Discard { offset: 1, len: 1 }, Target::Fd(device), None);
    // SAFETY: the entry has no pointer, and the descriptor is open while this function waits for its only completion.
    let pushed = unsafe { ring.submission().push(&entry) };
    if pushed.is_err() || ring.submit_and_wait(1).is_err() {
        return false;
    }
    ring.completion().next().is_some_and(|answer| answer.result() == -libc::EINVAL)
}

fn explain(error: &io::Error) -> RingError {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            match disabled.trim() {
                "1" | "2" => RingError::new(
                    format!("refused: kernel.io_uring_disabled is {}", disabled.trim()),
                    "run `sysctl kernel.io_uring_disabled=0` on this machine",
                ),
                _ => RingError::new(
                    "refused by a seccomp filter",
                    "start the container with the profile that `farside doctor --seccomp-profile` prints: \
                     --security-opt seccomp=FILE",
                ),
            }
        }
        Some(libc::ENOSYS) => RingError::new(
            "not there: an old kernel, one built without it, or a seccomp filter that hides it",
            "use Linux 6.1 or later, and in a container the profile that `farside doctor --seccomp-profile` prints",
        ),
        Some(libc::ENOMEM) => {
            RingError::new("no memory for the ring", "raise the memlock limit (ulimit -l, LimitMEMLOCK=)")
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            RingError::new("no file descriptor is left", "raise the limit of open files (ulimit -n, LimitNOFILE=)")
        }
        _ => RingError::new(error.to_string(), "use Linux 6.1 or later"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_its_remedy() {
        let text = |errno| explain(&io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::EPERM).contains("seccomp"), "{}", text(libc::EPERM));
        assert!(text(libc::ENOSYS).contains("6.1"));
        assert!(text(libc::ENOMEM).contains("memlock"));
        assert!(text(libc::EMFILE).contains("LimitNOFILE"));
    }
}
