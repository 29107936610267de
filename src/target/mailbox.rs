//! Messages to one thread from any thread: a lock-free queue and an eventfd that is written only when the reader sleeps.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::SegQueue;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A queue of messages for one reader.
#[derive(Debug)]
pub(crate) struct Mailbox<M> {
    messages: SegQueue<M>,
    event: EventFd,
    asleep: AtomicBool,
}

impl<M> Mailbox<M> {
    pub(crate) fn new() -> std::io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Self { messages: SegQueue::new(), event, asleep: AtomicBool::new(false) })
    }

    /// Delivers a message and wakes the reader if it sleeps.
    pub(crate) fn send(&self, message: M) {
        self.messages.push(message);
        self.wake();
    }

    /// Wakes the reader without a message.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `prepare_sleep`: either the reader sees the message, or we see that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            // Full only after 2^64 - 1 wakes that nobody read: then it is readable anyway.
            let _ = self.event.write(1);
        }
    }

    /// The oldest message.
    pub(crate) fn take(&self) -> Option<M> {
        self.messages.pop()
    }

    /// Whether no message waits.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Announces sleep; `false` when there is a message already. Reader only.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.messages.is_empty() {
            return true;
        }
        self.asleep.store(false, Ordering::Relaxed);
        false
    }

    /// Ends the sleep and clears the descriptor. Reader only.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let _ = self.event.read();
    }

    /// Readable after a wake.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_wake_is_written_only_for_a_sleeper() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.send(1);
        assert!(mailbox.event.read().is_err(), "nobody sleeps: no eventfd write");
        assert!(!mailbox.prepare_sleep(), "a message waits");
        assert_eq!(mailbox.take(), Some(1));
        assert!(mailbox.prepare_sleep());
        mailbox.send(2);
        mailbox.send(3);
        assert_eq!(mailbox.event.read(), Ok(1), "one write for one sleep");
        mailbox.awake();
        assert_eq!((mailbox.take(), mailbox.take(), mailbox.take()), (Some(2), Some(3), None));
    }

    #[test]
    fn no_message_is_lost_between_threads() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let sender = Arc::clone(&mailbox);
        let thread = std::thread::spawn(move || (0..50_000).for_each(|n| sender.send(n)));
        let mut expected = 0;
        while expected < 50_000 {
            if let Some(n) = mailbox.take() {
                assert_eq!(n, expected);
                expected += 1;
            } else if mailbox.prepare_sleep() {
                let mut fds = [nix::poll::PollFd::new(mailbox.fd(), nix::poll::PollFlags::POLLIN)];
                assert_eq!(nix::poll::poll(&mut fds, 5_000u16), Ok(1), "slept through a message");
                mailbox.awake();
            }
        }
        thread.join().unwrap();
    }
}
