//! What Zone Management Receive transfers. (Zoned Namespace Command Set 1.x, Report Zones.)

use zerocopy::IntoBytes;

use super::{Zone, ZoneFilter, ZoneState, Zones};
use crate::wire::zns::{ZoneDescriptor, ZoneReportHeader};

/// Bytes before the first descriptor.
pub(super) const HEADER_LEN: u32 = 64;

/// Fills all of `into` with the report of the zones from the one that `slba` lies in: header, descriptors as far as they fit
/// whole, zeroes behind them.
pub fn report(zones: &Zones, slba: u64, filter: ZoneFilter, partial: bool, into: &mut [u8]) {
    into.fill(0);
    let Some((header, rest)) = into.split_first_chunk_mut::<64>() else { return };
    let (slots, _) = rest.as_chunks_mut::<64>();
    let mut slots = slots.iter_mut();
    let (mut listed, mut transferred) = (0u64, 0u64);
    for (zslba, zone) in zones.from(slba).filter(|(_, zone)| filter.takes(zone.state)) {
        listed += 1;
        match slots.next() {
            Some(slot) => {
                slot.copy_from_slice(descriptor(zslba, zone, zones.geometry().zone_blocks).as_bytes());
                transferred += 1;
            }
            // The rest need not even be counted.
            None if partial => break,
            None => {}
        }
    }
    header.copy_from_slice(ZoneReportHeader::of(if partial { transferred } else { listed }).as_bytes());
}

/// Where a zone has no write pointer, the field says what block layers say then: the end of the zone.
fn descriptor(zslba: u64, zone: &Zone, zone_blocks: u64) -> ZoneDescriptor {
    let mut descriptor = ZoneDescriptor::zeroed();
    descriptor.zt = SEQUENTIAL_WRITE_REQUIRED;
    descriptor.zs = zone.state.to_wire() << 4;
    descriptor.zcap.set(zone.capacity);
    descriptor.zslba.set(zslba);
    let wp = match zone.state {
        ZoneState::Full | ZoneState::ReadOnly | ZoneState::Offline => zone_blocks,
        _ => zone.written,
    };
    descriptor.wp.set(zslba.saturating_add(wp));
    descriptor
}

const SEQUENTIAL_WRITE_REQUIRED: u8 = 2;
