//! The IPv4 identifications of peers.
//!
//! A UDP socket does not show the identification that the ICRC covers; the ICRC itself tells what it must have been (see
//! [`crate::roce::icrc`]). A corrupt packet yields a random one, so those that do not follow from the peer's last one are
//! refused. A real jump costs one packet: the next one confirms it. A second copy of the same packet does not, as the network
//! may have doubled a corrupt one; a third does, for a peer that sends nothing else and always the same identification.
//!
//! Single-bit errors look like packets without "don't fragment", never like others; what peers send has it (Linux, rdma_rxe).
//! So a packet without it is refused too, until a second one like it came: then the peer does send such packets.
//!
//! A peer counts all its packets to an address of ours together, whichever thread they are for. So a thread that hears
//! little from a busy peer goes by what the others heard: each notes now and then, in [`SharedIds`], how far the peer is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::debug;

use super::world::World;
use crate::roce::packet::ICRC_LEN;

/// How far each peer of one address is, for all threads that receive on it.
#[derive(Debug)]
pub(super) struct SharedIds {
    world: World,
    peers: Mutex<HashMap<IpAddr, Arc<Newest>>>,
}

/// A peer's newest identification as some thread saw it; all zeros when none did.
#[derive(Debug, Default)]
struct Newest(AtomicU64);

/// What one thread knows of every peer.
#[derive(Debug)]
pub(super) struct PeerIds {
    shared: Arc<SharedIds>,
    /// What to add to the caller's time for that of `shared`, in milliseconds, wrapping.
    offset: Option<u32>,
    peers: HashMap<IpAddr, Peer>,
    /// Who sent the last packet whose identification is that of a batch.
    plain: Option<IpAddr>,
}

#[derive(Debug, Clone)]
struct Peer {
    last: Seen,
    jump: Option<Jump>,
    dont_fragment: bool,
    newest: Arc<Newest>,
    /// What this thread told the others last.
    told: Seen,
}

/// An identification that was refused, with its flag, and may turn out to be a jump.
#[derive(Debug, Clone, Copy)]
struct Jump {
    id: u16,
    dont_fragment: bool,
    /// The ICRC of its packet, and how often that came.
    icrc: [u8; ICRC_LEN],
    copies: u8,
}

/// An identification, and when it was seen, in milliseconds, wrapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    id: u16,
    at: u32,
}

impl SharedIds {
    pub(super) fn new(world: &World) -> Arc<Self> {
        Arc::new(Self { world: world.clone(), peers: Mutex::default() })
    }

    fn peer(&self, from: IpAddr) -> Arc<Newest> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= MAX_PEERS && !peers.contains_key(&from) {
            peers.clear();
        }
        Arc::clone(peers.entry(from).or_default())
    }
}

impl Newest {
    fn load(&self) -> Option<Seen> {
        let word = self.0.load(Ordering::Relaxed);
        let [i0, i1, a0, a1, a2, a3, known, _] = word.to_le_bytes();
        (known != 0).then(|| Seen { id: u16::from_le_bytes([i0, i1]), at: u32::from_le_bytes([a0, a1, a2, a3]) })
    }

    fn store(&self, seen: Seen) {
        let ([i0, i1], [a0, a1, a2, a3]) = (seen.id.to_le_bytes(), seen.at.to_le_bytes());
        self.0.store(u64::from_le_bytes([i0, i1, a0, a1, a2, a3, 1, 0]), Ordering::Relaxed);
    }
}

impl Seen {
    /// Whether `id`, seen now, follows from this one: a peer may have sent `ahead` packets since to others, and one may
    /// come after `behind` that were sent later. Linux lets the counter jump by up to the clock ticks that passed since
    /// its last use.
    fn leads_to(self, now: Self, behind: u16, ahead: u16) -> bool {
        let passed = now.at.wrapping_sub(self.at);
        let idle = if passed > u32::MAX / 2 { 0 } else { u16::try_from(passed).unwrap_or(u16::MAX) };
        now.id.wrapping_sub(self.id) <= ahead.saturating_add(idle) || self.id.wrapping_sub(now.id) <= behind
    }
}

impl Jump {
    fn new(id: u16, dont_fragment: bool, packet: &[u8]) -> Self {
        Self { id, dont_fragment, icrc: icrc_of(packet), copies: 1 }
    }

    /// Whether this packet shows that the peer's identifications did jump.
    fn is_confirmed_by(&mut self, id: u16, dont_fragment: bool, packet: &[u8]) -> bool {
        if icrc_of(packet) == self.icrc {
            self.copies = self.copies.saturating_add(1);
            return self.copies >= COPIES;
        }
        dont_fragment == self.dont_fragment && id.wrapping_sub(self.id) <= AHEAD
    }
}

impl PeerIds {
    pub(super) fn new(shared: &Arc<SharedIds>) -> Self {
        Self { shared: Arc::clone(shared), offset: None, peers: HashMap::new(), plain: None }
    }

    /// Whether a packet with this solved identification and "don't fragment" flag is taken.
    pub(super) fn accept(
        &mut self,
        now: Duration,
        from: IpAddr,
        (id, dont_fragment): (u16, bool),
        packet: &[u8],
    ) -> bool {
        // Of a kernel that sends 0, or counts the segments of a batch. Once is enough to know the peer by.
        let plain = id < BATCH && dont_fragment;
        if plain && self.plain == Some(from) {
            return true;
        }
        let world = &self.shared.world;
        let offset = *self.offset.get_or_insert_with(|| millis(world.now()).wrapping_sub(millis(now)));
        let at = millis(now).wrapping_add(offset);
        let seen = Seen { id, at };
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(&from) {
            self.peers.clear();
        }
        if plain {
            self.plain = Some(from);
            if self.peers.contains_key(&from) {
                return true;
            }
        }
        let Some(peer) = self.peers.get_mut(&from) else {
            let newest = self.shared.peer(from);
            // A thread that never heard of the peer may be the last one of many.
            let follows = newest.load().is_none_or(|last| last.leads_to(seen, NEAR, NEAR));
            if !plain && (!follows || !dont_fragment) {
                let (last, jump) = (Seen { id, at: 0 }, Some(Jump::new(id, dont_fragment, packet)));
                self.peers.insert(from, Peer { last, jump, dont_fragment: true, newest, told: last });
                return false;
            }
            newest.store(seen);
            self.peers.insert(from, Peer { last: seen, jump: None, dont_fragment, newest, told: seen });
            return true;
        };
        let follows = dont_fragment == peer.dont_fragment
            && (peer.last.leads_to(seen, BEHIND, AHEAD)
                || peer.newest.load().is_some_and(|newest| newest.leads_to(seen, NEAR, NEAR)));
        let mut jump = peer.jump;
        let confirmed = !follows && jump.as_mut().is_some_and(|jump| jump.is_confirmed_by(id, dont_fragment, packet));
        if !follows && !confirmed {
            let newest = peer.newest.load();
            debug!(peer = %from, ?seen, dont_fragment, last = ?peer.last, ?newest, "an identification that does not follow");
            peer.jump =
                jump.filter(|jump| jump.icrc == icrc_of(packet)).or_else(|| Some(Jump::new(id, dont_fragment, packet)));
            return false;
        }
        if confirmed || peer.last.id.wrapping_sub(id) > BEHIND {
            peer.last = seen;
        }
        (peer.jump, peer.dont_fragment) = (None, dont_fragment);
        if peer.told.at != at || id.wrapping_sub(peer.told.id) > TELL_EVERY {
            peer.told = peer.last;
            peer.newest.store(peer.last);
        }
        true
    }
}

/// What a packet ends with.
fn icrc_of(packet: &[u8]) -> [u8; ICRC_LEN] {
    packet.last_chunk().copied().unwrap_or_default()
}

/// Whole milliseconds, modulo 2^32.
const fn millis(time: Duration) -> u32 {
    (time.as_millis() & 0xffff_ffff) as u32
}

/// Identifications of a segmented batch.
const BATCH: u16 = 64;
/// How far a peer's counter may move between two packets to one thread of ours.
const AHEAD: u16 = 1024;
/// How late a packet may be.
const BEHIND: u16 = 256;
/// How far the threads may be from each other: packets that wait in the buffer of one of them.
const NEAR: u16 = 4096;
/// Packets of a peer after which a thread tells the others, if not once in a millisecond.
const TELL_EVERY: u16 = 64;
/// Copies of one packet that a network is not taken to make.
const COPIES: u8 = 3;
/// Peers to remember; a stranger's packets cost no more than this memory.
const MAX_PEERS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn peer() -> IpAddr {
        IpAddr::from([10, 0, 0, 1])
    }

    /// A packet like no other.
    fn accept(ids: &mut PeerIds, now: Duration, id: (u16, bool)) -> bool {
        static PACKETS: AtomicU64 = AtomicU64::new(0);
        ids.accept(now, peer(), id, &PACKETS.fetch_add(1, Ordering::Relaxed).to_le_bytes()[..4])
    }

    #[test]
    fn rising_identifications_pass_and_random_ones_do_not() {
        let mut ids = PeerIds::new(&SharedIds::new(&World::machine()));
        assert!(accept(&mut ids, NOW, (40_000, true)), "nothing is known yet");
        for id in [40_001, 40_500, 40_400, 41_524, 0, 63] {
            assert!(accept(&mut ids, NOW, (id, true)), "{id}");
        }
        let far = 41_524 + NEAR + 1;
        assert!(!accept(&mut ids, NOW, (far, true)), "one too far");
        assert!(!accept(&mut ids, NOW, (64, true)));
        assert!(!accept(&mut ids, NOW, (41_525, false)), "this peer never fragments");
        assert!(accept(&mut ids, NOW, (far - 1, true)), "the last of the window");
    }

    #[test]
    fn packets_that_may_be_fragmented_have_to_come_twice() {
        for known in [false, true] {
            let mut ids = PeerIds::new(&SharedIds::new(&World::machine()));
            if known {
                assert!(accept(&mut ids, NOW, (0, true)));
            }
            assert!(!accept(&mut ids, NOW, (7000, false)), "as a single-bit error looks");
            assert!(accept(&mut ids, NOW, (0, true)));
            assert!(!accept(&mut ids, NOW, (9000, false)), "another one");
            assert!(accept(&mut ids, NOW, (9001, false)), "it means it");
            assert!(accept(&mut ids, NOW, (9002, false)));
        }
    }

    /// A network that doubles packets doubles corrupt ones too; a peer that sends the same packet until it is heard is heard.
    #[test]
    fn copies_of_one_packet_confirm_nothing_until_there_are_three() {
        for dont_fragment in [false, true] {
            for known in [false, true] {
                let mut ids = PeerIds::new(&SharedIds::new(&World::machine()));
                assert!(!known || accept(&mut ids, NOW, (1000, true)));
                if known || !dont_fragment {
                    assert!(!ids.accept(NOW, peer(), (20_000, dont_fragment), b"same"));
                    assert!(!ids.accept(NOW, peer(), (20_000, dont_fragment), b"same"), "its copy");
                }
                assert!(ids.accept(NOW, peer(), (20_000, dont_fragment), b"same"), "once more");
                assert!(accept(&mut ids, NOW, (20_000, dont_fragment)), "and its identification never changes");
            }
        }
    }

    #[test]
    fn a_peer_that_counts_from_zero_does_not_jump_by_one_corrupt_packet() {
        let mut ids = PeerIds::new(&SharedIds::new(&World::machine()));
        assert!(accept(&mut ids, NOW, (3, true)));
        assert!(!accept(&mut ids, NOW, (40_000, true)));
        assert!(accept(&mut ids, NOW, (1, true)));
    }

    /// Every single-bit error of a packet, from a peer that is known and from one that is not.
    #[test]
    fn no_single_bit_error_passes_without_the_identification() {
        use crate::roce::icrc::{Checker, Flow, Verdict, seal};
        let checker = Checker::new(4400);
        let flow = Flow { src: peer(), dst: [10, 0, 0, 2].into(), src_port: 0xc000 };
        let (mut solved, mut tried) = (0, 0);
        for (id, len) in [(0, 4128), (0xbeef, 4128), (0, 28), (0xbeef, 28)] {
            let shared = SharedIds::new(&World::machine());
            let mut packet: Vec<u8> = (0..=255).cycle().take(len).collect();
            seal(&flow, id, &mut packet);
            let mut known = PeerIds::new(&shared);
            assert!(accept(&mut known, NOW, (id, true)));
            for bit in (0..len * 8).filter(|bit| bit / 8 != 4) {
                packet[bit / 8] ^= 1 << (bit % 8);
                tried += 1;
                if let Verdict::ValidWithId { id: seen, dont_fragment } = checker.check(&flow, &packet) {
                    solved += 1;
                    let mut stranger = PeerIds::new(&SharedIds::new(&World::machine()));
                    assert!(!accept(&mut stranger, NOW, (seen, dont_fragment)), "bit {bit} of {len} bytes");
                    let mut known = PeerIds::new(&shared);
                    assert!(accept(&mut known, NOW, (id, true)));
                    assert!(!accept(&mut known, NOW, (seen, dont_fragment)), "bit {bit} of {len} bytes");
                }
                packet[bit / 8] ^= 1 << (bit % 8);
            }
        }
        println!("{solved} of {tried} single-bit errors look like a packet without \"don't fragment\"; none is taken");
    }

    #[test]
    fn a_jump_costs_one_packet() {
        let mut ids = PeerIds::new(&SharedIds::new(&World::machine()));
        assert!(accept(&mut ids, NOW, (1000, true)));
        assert!(!accept(&mut ids, NOW, (60_000, true)));
        assert!(accept(&mut ids, NOW, (60_001, true)));
        assert!(accept(&mut ids, NOW, (60_002, true)));
        assert!(accept(&mut ids, NOW + Duration::from_secs(30), (20_000, true)), "30 s of idling");
    }

    #[test]
    fn what_one_thread_hears_helps_another_that_does_not() {
        let shared = SharedIds::new(&World::machine());
        let (mut busy, mut quiet) = (PeerIds::new(&shared), PeerIds::new(&shared));
        assert!(accept(&mut quiet, NOW, (1000, true)));
        for id in 1001..=30_000 {
            assert!(accept(&mut busy, NOW, (id, true)), "{id}");
        }
        assert!(accept(&mut quiet, NOW, (30_001, true)), "the peer was busy with the other");
        assert!(accept(&mut busy, NOW, (30_002, true)));
        assert!(accept(&mut quiet, NOW, (29_000, true)), "it waited in the buffer");
        assert!(accept(&mut quiet, NOW, (30_003, true)), "and the peer has not gone back");
        assert!(!accept(&mut quiet, NOW, (50_000, true)));
        let mut new = PeerIds::new(&shared);
        assert!(!accept(&mut new, NOW, (10_000, true)), "the others know better");
        assert!(accept(&mut new, NOW, (30_010, true)));
        assert!(accept(&mut new, NOW, (30_011, true)));
    }
}
