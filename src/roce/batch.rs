//! Packets to send, laid out so that one system call sends many.
//!
//! A [`Run`] is what generic segmentation offload (UDP_SEGMENT) takes: packets for one destination, back to back in one
//! buffer, of one size except for a shorter last one. They are for one queue pair, as a receiver may be given a run as a
//! whole and steer it by its first packet. The kernel gives the packets of a run the IPv4 identifications 0,
//! 1, 2 and so on, so the ICRC of each is computed for its place in the run.
use core::net::IpAddr;

use super::icrc::{self, Flow};
use super::packet::Header;
use super::{Qpn, UDP_PORT};

/// Packets to send, in order.
#[derive(Debug)]
pub struct TxBatch {
    bytes: Vec<u8>,
    used: usize,
    runs: Vec<Run>,
    max_segments: usize,
    /// A small packet follows that could end a run: none is ended before.
    keep_open: bool,
}

/// Packets of one size for one destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The destination.
    pub remote: IpAddr,
    /// The destination's queue pair.
    pub dest: Qpn,
    /// IP type of service.
    pub tos: u8,
    /// Bytes of each packet but the last, which may be shorter.
    pub segment: usize,
    /// Packets.
    pub count: usize,
    start: usize,
    len: usize,
}

/// Where a packet goes, and from where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Path {
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    pub(super) tos: u8,
}

/// Why a packet was not added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotAdded<E> {
    /// There is no room: send what there is.
    Full,
    /// The payload could not be filled in.
    Payload(E),
}

impl TxBatch {
    /// An empty batch of up to `capacity` bytes, whose runs have up to `max_segments` packets: 1 where segmentation
    /// offload does not work.
    #[must_use]
    pub fn new(capacity: usize, max_segments: usize) -> Self {
        Self {
            bytes: vec![0; capacity],
            used: 0,
            runs: Vec::with_capacity(capacity / 256),
            max_segments: max_segments.clamp(1, MAX_SEGMENTS),
            keep_open: false,
        }
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.used = 0;
        self.runs.clear();
    }

    /// Limits the packets in each run from now on.
    pub fn set_max_segments(&mut self, max_segments: usize) {
        self.max_segments = max_segments.clamp(1, MAX_SEGMENTS);
    }

    /// Bytes of all packets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs with their bytes.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = (&Run, &[u8])> {
        self.runs.iter().map(|run| (run, self.bytes.get(run.start..run.start + run.len).unwrap_or_default()))
    }

    /// Every single packet, with its destination.
    pub fn packets(&self) -> impl Iterator<Item = (&Run, &[u8])> {
        self.runs().flat_map(|(run, bytes)| bytes.chunks(run.segment).map(move |packet| (run, packet)))
    }

    /// Whether a packet of the smallest size is about to follow, so that a packet which is shorter than its run's starts one of
    /// its own for that one to end, instead of ending it.
    pub(super) const fn keep_open(&mut self, keep: bool) {
        self.keep_open = keep;
    }

    /// Adds a packet; `fill` writes its payload.
    pub(super) fn push<E>(
        &mut self,
        path: &Path,
        header: &Header,
        payload: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), NotAdded<E>> {
        let len = Header::packet_len(header.opcode, payload);
        let packet = self.bytes.get_mut(self.used..self.used + len).ok_or(NotAdded::Full)?;
        let place = header.emit(payload, packet).ok_or(NotAdded::Full)?;
        fill(place).map_err(NotAdded::Payload)?;
        let ends = !self.keep_open;
        let joined = self
            .runs
            .last_mut()
            .filter(|run| run.takes(path, header.dest, len, self.max_segments) && (ends || len == run.segment));
        let id = joined.as_ref().map_or(0, |run| run.count);
        icrc::seal(&path.flow(), u16::try_from(id).unwrap_or(0), packet);
        if let Some(run) = joined {
            run.count += 1;
            run.len += len;
        } else {
            let run = Run {
                remote: path.remote,
                dest: header.dest,
                tos: path.tos,
                segment: len,
                count: 1,
                start: self.used,
                len,
            };
            self.runs.push(run);
        }
        self.used += len;
        Ok(())
    }
}

impl Run {
    /// Whether a packet of `len` bytes can follow.
    fn takes(&self, path: &Path, dest: Qpn, len: usize, max_segments: usize) -> bool {
        self.remote == path.remote
            && self.dest == dest
            && self.tos == path.tos
            && self.count < max_segments
            && len <= self.segment
            && self.len == self.count * self.segment
            && self.len + len <= MAX_RUN
    }
}

impl Path {
    pub(super) const fn flow(&self) -> Flow {
        Flow { src: self.local, dst: self.remote, src_port: UDP_PORT }
    }
}

/// The most segments that Linux takes in one call.
const MAX_SEGMENTS: usize = 64;
/// The most bytes in one run: an IP packet's 65,535, less the largest headers.
const MAX_RUN: usize = 65_535 - 40 - 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::icrc::matches;
    use crate::roce::{Opcode, Place, Psn};

    fn push(batch: &mut TxBatch, remote: u8, payload: usize) -> bool {
        let path = Path { local: [127, 0, 0, 1].into(), remote: [127, 0, 0, remote].into(), tos: 2 };
        let header = Header::new(Opcode::Send(Place::Only), Qpn::new(17), Psn::new(0));
        batch.push(&path, &header, payload, |_| Ok::<(), ()>(())).is_ok()
    }

    #[test]
    fn equal_packets_share_a_run_and_a_shorter_one_ends_it() {
        let mut batch = TxBatch::new(1 << 16, 64);
        for payload in [100, 100, 40, 40, 100] {
            assert!(push(&mut batch, 2, payload));
        }
        assert!(push(&mut batch, 3, 100));
        let counts: Vec<_> = batch.runs().map(|(run, _)| run.count).collect();
        assert_eq!(counts, [3, 1, 1, 1]);
        let flow = |remote: IpAddr| Flow { src: [127, 0, 0, 1].into(), dst: remote, src_port: UDP_PORT };
        for (run, bytes) in batch.runs() {
            for (id, packet) in (0..).zip(bytes.chunks(run.segment)) {
                assert!(matches(&flow(run.remote), id, packet));
            }
        }
        assert_eq!(batch.packets().count(), 6);
        batch.clear();
        assert!(batch.is_empty());
    }

    #[test]
    fn the_last_packet_of_a_run_is_kept_for_a_smaller_one_that_follows() {
        let mut batch = TxBatch::new(1 << 16, 64);
        batch.keep_open(true);
        assert!(push(&mut batch, 2, 4096) && push(&mut batch, 2, 16) && push(&mut batch, 2, 16));
        batch.keep_open(false);
        assert!(push(&mut batch, 2, 4));
        assert_eq!(batch.runs().map(|(run, _)| run.count).collect::<Vec<_>>(), [1, 3]);
        assert!(push(&mut batch, 2, 4), "it ended that run");
        assert_eq!(batch.runs().len(), 3);
    }

    #[test]
    fn a_run_holds_what_one_system_call_takes() {
        let mut batch = TxBatch::new(1 << 18, 64);
        for _ in 0..17 {
            assert!(push(&mut batch, 2, 4096));
        }
        assert_eq!(batch.runs().map(|(run, _)| run.count).collect::<Vec<_>>(), [15, 2]);
        batch.clear();
        for _ in 0..65 {
            assert!(push(&mut batch, 2, 4));
        }
        assert_eq!(batch.runs().map(|(run, _)| run.count).collect::<Vec<_>>(), [64, 1]);
        batch.set_max_segments(1);
        batch.clear();
        assert!(push(&mut batch, 2, 4) && push(&mut batch, 2, 4));
        assert_eq!(batch.runs().len(), 2);
    }

    #[test]
    fn a_full_batch_takes_no_more() {
        let mut batch = TxBatch::new(116, 64);
        assert!(!push(&mut batch, 2, 104));
        assert!(push(&mut batch, 2, 100));
        assert!(!push(&mut batch, 2, 0));
    }
}
