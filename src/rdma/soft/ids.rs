//! The IPv4 identifications of peers.
//!
//! A UDP socket does not show the identification that the ICRC covers; the ICRC itself tells what it must have been (see
//! [`crate::roce::icrc`]). A corrupt packet yields a random one, so those that do not follow from the peer's last one are
//! refused. A real jump costs one packet: the next one confirms it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

/// What is known of every peer.
#[derive(Debug, Default)]
pub(super) struct PeerIds {
    peers: HashMap<IpAddr, Peer>,
}

#[derive(Debug, Clone, Copy)]
struct Peer {
    last: u16,
    at: Duration,
    /// An identification that was refused, and may turn out to be a jump.
    jump: Option<u16>,
    dont_fragment: bool,
}

impl PeerIds {
    /// Whether a packet with this solved identification is taken.
    pub(super) fn accept(&mut self, now: Duration, from: IpAddr, id: u16, dont_fragment: bool) -> bool {
        // Of a kernel that sends 0, or counts the segments of a batch.
        if id < BATCH && dont_fragment {
            return true;
        }
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(&from) {
            self.peers.clear();
        }
        let fresh = Peer { last: id, at: now, jump: None, dont_fragment };
        let Some(peer) = self.peers.get_mut(&from) else {
            self.peers.insert(from, fresh);
            return true;
        };
        // Linux lets the counter jump by up to the clock ticks that passed since its last use.
        let idle = u16::try_from(now.saturating_sub(peer.at).as_millis()).unwrap_or(u16::MAX);
        let window = AHEAD.saturating_add(idle);
        let ahead = id.wrapping_sub(peer.last);
        let behind = peer.last.wrapping_sub(id);
        if dont_fragment == peer.dont_fragment && behind <= BEHIND {
            return true;
        }
        let confirmed = peer.jump.is_some_and(|jump| id.wrapping_sub(jump) <= AHEAD);
        if dont_fragment == peer.dont_fragment && ahead <= window || confirmed {
            *peer = fresh;
            return true;
        }
        peer.jump = Some(id);
        false
    }
}

/// Identifications of a segmented batch.
const BATCH: u16 = 64;
/// How far a peer's counter may move between two packets to us.
const AHEAD: u16 = 1024;
/// How late a packet may be.
const BEHIND: u16 = 256;
/// Peers to remember; a stranger's packets cost no more than this memory.
const MAX_PEERS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rising_identifications_pass_and_random_ones_do_not() {
        let mut ids = PeerIds::default();
        let from = IpAddr::from([10, 0, 0, 1]);
        let now = Duration::from_secs(1);
        assert!(ids.accept(now, from, 40_000, true), "nothing is known yet");
        for id in [40_001, 40_500, 40_400, 41_524, 0, 63] {
            assert!(ids.accept(now, from, id, true), "{id}");
        }
        assert!(!ids.accept(now, from, 42_549, true), "one too far");
        assert!(!ids.accept(now, from, 64, true));
        assert!(!ids.accept(now, from, 41_525, false), "this peer never fragments");
        assert!(ids.accept(now, from, 42_548, true), "the last of the window");
    }

    #[test]
    fn a_jump_costs_one_packet() {
        let mut ids = PeerIds::default();
        let from = IpAddr::from([10, 0, 0, 1]);
        let now = Duration::from_secs(1);
        assert!(ids.accept(now, from, 1000, true));
        assert!(!ids.accept(now, from, 60_000, true));
        assert!(ids.accept(now, from, 60_001, true));
        assert!(ids.accept(now, from, 60_002, true));
        assert!(ids.accept(now + Duration::from_secs(30), from, 20_000, true), "30 s of idling");
    }
}
