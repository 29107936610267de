//! What follows once several threads are done with something: each holds a ticket, and the last one that lets go of it makes
//! it happen. A thread that ends without ever looking lets go too, so nothing waits for the dead.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

type Work = Box<dyn FnOnce() + Send>;

/// A share in something that waits until all shares are gone.
#[derive(Clone)]
pub(crate) struct Ticket(#[expect(dead_code, reason = "held for its drop")] Arc<Then>);

struct Then(Mutex<Option<Work>>);

impl Ticket {
    /// The first share.
    pub(crate) fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Self(Arc::new(Then(Mutex::new(Some(Box::new(then))))))
    }
}

impl Drop for Then {
    fn drop(&mut self) {
        if let Some(work) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            work();
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn the_last_share_makes_it_happen_once() {
        let happened = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&happened);
        let first = Ticket::new(move || {
            seen.fetch_add(1, Ordering::AcqRel);
        });
        let second = first.clone();
        drop(first);
        assert_eq!(happened.load(Ordering::Acquire), 0);
        std::thread::spawn(move || drop(second)).join().unwrap();
        assert_eq!(happened.load(Ordering::Acquire), 1);
    }
}
