//! SENDs that are held back until the doorbell, so that the RDMA WRITEs of several commands leave in one run.
//!
//! A target answers each read with an RDMA WRITE and a SEND. In that order they make a run of two packets each (see
//! [`crate::roce::TxBatch`]); with the WRITEs of a batch first and its SENDs after them the same packets make two runs in all.
//! Each SEND still follows every WRITE that was posted before it. A WRITE that was posted after a SEND may pass it, which no
//! receiver can tell: it may not look at that WRITE's data before a later SEND.

use crate::rdma::{SendOp, SendWr};

/// The held SENDs of one queue pair, oldest first.
#[derive(Debug, Default)]
pub(super) struct Held {
    sends: Vec<SendWr>,
    /// A WRITE was posted since the last doorbell: without one there is nothing to gain.
    wrote: bool,
}

/// What to do with a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Post it now; what is held stays held.
    Now,
    /// Post what is held, then it.
    AfterHeld,
    /// Hold it.
    Hold,
}

impl Held {
    /// What to do with a work request on a queue pair whose packets carry up to `mtu` bytes.
    pub(super) fn order(&mut self, wr: &SendWr, mtu: u32) -> Order {
        let one_packet = wr.sge.len <= mtu;
        match wr.op {
            SendOp::RdmaWrite { .. } if one_packet => {
                self.wrote = true;
                Order::Now
            }
            SendOp::Send | SendOp::SendInvalidate { .. } if one_packet && self.wrote => Order::Hold,
            // Nothing to post before it, or packets that others must not wait for.
            _ => Order::AfterHeld,
        }
    }

    /// Holds a work request. True when that is enough for a run.
    pub(super) fn push(&mut self, wr: &SendWr) -> bool {
        self.sends.push(*wr);
        self.sends.len() >= MOST
    }

    pub(super) fn len(&self) -> usize {
        self.sends.len()
    }

    /// Everything that was held, to be posted in this order.
    pub(super) fn release(&mut self) -> impl Iterator<Item = SendWr> + '_ {
        self.wrote = false;
        self.sends.drain(..)
    }
}

/// As many as the WRITEs of one run, of 4,096 bytes each: more would wait for nothing.
const MOST: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::Sge;

    fn wr(op: SendOp, len: u32) -> SendWr {
        SendWr { tag: 0, op, sge: Sge { addr: 0, len, lkey: 0 }, signaled: true, solicited: false, inline: false }
    }

    const WRITE: SendOp = SendOp::RdmaWrite { remote: 0, rkey: 0 };
    const READ: SendOp = SendOp::RdmaRead { remote: 0, rkey: 0 };

    #[test]
    fn sends_wait_only_behind_small_writes_and_until_a_run_is_full() {
        let mut held = Held::default();
        assert_eq!(held.order(&wr(SendOp::Send, 16), 1024), Order::AfterHeld, "there is no WRITE");
        assert_eq!(held.order(&wr(WRITE, 1024), 1024), Order::Now);
        assert_eq!(held.order(&wr(SendOp::Send, 16), 1024), Order::Hold);
        assert!(!held.push(&wr(SendOp::Send, 16)));
        assert_eq!(held.order(&wr(WRITE, 1024), 1024), Order::Now);
        assert_eq!(held.order(&wr(WRITE, 1025), 1024), Order::AfterHeld, "a WRITE of several packets");
        assert_eq!(held.order(&wr(READ, 16), 1024), Order::AfterHeld);
        assert_eq!(held.order(&wr(SendOp::Send, 1025), 1024), Order::AfterHeld);
        for _ in 1..MOST - 1 {
            assert!(!held.push(&wr(SendOp::Send, 16)));
        }
        assert!(held.push(&wr(SendOp::Send, 16)));
        assert_eq!(held.release().count(), MOST);
        assert_eq!(held.len(), 0);
        assert_eq!(held.order(&wr(SendOp::Send, 16), 1024), Order::AfterHeld, "the WRITEs have left");
    }
}
