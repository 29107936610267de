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
    /// The reader was woken, and has not begun a sleep since.
    rung: AtomicBool,
}

impl<M> Mailbox<M> {
    pub(crate) fn new() -> std::io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let (asleep, rung) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { messages: SegQueue::new(), event, asleep, rung })
    }

    /// Delivers a message and wakes the reader if it sleeps.
    pub(crate) fn send(&self, message: M) {
        self.messages.push(message);
        self.end_sleep();
    }

    /// Wakes the reader without a message. A reader that is awake may have looked already for what it is woken for: it looks once
    /// more before it sleeps.
    pub(crate) fn wake(&self) {
        // Pairs with the swap in `prepare_sleep`: who finds it rung sees what was done before it was.
        self.rung.store(true, Ordering::Release);
        self.end_sleep();
    }

    fn end_sleep(&self) {
        // Pairs with the fence in `prepare_sleep`: either the reader sees the message, or the ring, or we see that it sleeps.
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

    /// Messages that wait.
    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Announces sleep; `false` when there is a message already, or a wake since the last time. Reader only.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        if !self.rung.swap(false, Ordering::AcqRel) && self.messages.is_empty() {
            return true;
        }
        self.asleep.store(false, Ordering::Relaxed);
        false
    }

    /// Ends the sleep and clears the descriptor. Reader only.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        // What it was woken for is looked for now.
        self.rung.swap(false, Ordering::AcqRel);
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
    fn a_wake_between_the_last_look_and_the_sleep_is_not_lost() {
        let mailbox: Mailbox<()> = Mailbox::new().unwrap();
        mailbox.wake();
        assert!(!mailbox.prepare_sleep(), "there may be something to look for");
        assert!(mailbox.prepare_sleep(), "it was looked for");
        mailbox.wake();
        assert_eq!(mailbox.event.read(), Ok(1));
        mailbox.awake();
        assert!(mailbox.prepare_sleep(), "the sleep that it ended was the only one");
    }

    #[test]
    fn no_wake_is_lost_between_threads() {
        let mailbox: Arc<Mailbox<()>> = Arc::new(Mailbox::new().unwrap());
        let (port, (answer, answers)) = (Arc::clone(&mailbox), crossbeam::channel::unbounded());
        // One at a time: no later wake makes up for one that is lost.
        let (taken, takes) = crossbeam::channel::unbounded();
        let thread = std::thread::spawn(move || {
            (0..5_000).for_each(|n| {
                answer.send(n).unwrap();
                port.wake();
                takes.recv().unwrap();
            });
        });
        let mut expected = 0;
        while expected < 5_000 {
            if let Ok(n) = answers.try_recv() {
                assert_eq!(n, expected);
                expected += 1;
                taken.send(()).unwrap();
            } else if mailbox.prepare_sleep() {
                let mut fds = [nix::poll::PollFd::new(mailbox.fd(), nix::poll::PollFlags::POLLIN)];
                assert_eq!(nix::poll::poll(&mut fds, 5_000u16), Ok(1), "slept through a wake");
                mailbox.awake();
            }
        }
        thread.join().unwrap();
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
