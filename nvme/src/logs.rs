//! Log pages of one controller: the ring of errors, the list of changed namespaces, the counters, and the tables of
//! what is supported.
//!
//! Every page is built whole and then cut by [`slice()`], so offsets and lengths are handled in one place.

use core::time::Duration;
use std::collections::{BTreeSet, VecDeque};

use zerocopy::IntoBytes;

use crate::admin;
use crate::features;
use crate::io;
use crate::reservation;
use crate::status::Status;
use crate::wire::logs::{ErrorEntry, SmartLog};
use crate::zns;

/// Log page identifiers (LID).
pub(crate) mod lid {
    pub(crate) const SUPPORTED: u8 = 0x00;
    pub(crate) const ERROR: u8 = 0x01;
    pub(crate) const SMART: u8 = 0x02;
    pub(crate) const FIRMWARE_SLOT: u8 = 0x03;
    pub(crate) const CHANGED_NAMESPACES: u8 = 0x04;
    pub(crate) const COMMAND_EFFECTS: u8 = 0x05;
    pub(crate) const ANA: u8 = 0x0c;
    pub(crate) const FEATURE_EFFECTS: u8 = 0x12;
    pub(crate) const MI_EFFECTS: u8 = 0x13;
    pub(crate) const DISCOVERY: u8 = 0x70;
    pub(crate) const RESERVATION: u8 = 0x80;
}

/// Pages of an I/O controller.
pub(crate) const IO_PAGES: [u8; 10] = [
    lid::SUPPORTED,
    lid::ERROR,
    lid::SMART,
    lid::FIRMWARE_SLOT,
    lid::CHANGED_NAMESPACES,
    lid::COMMAND_EFFECTS,
    lid::ANA,
    lid::FEATURE_EFFECTS,
    lid::MI_EFFECTS,
    lid::RESERVATION,
];

/// Pages of a discovery controller.
pub(crate) const DISCOVERY_PAGES: [u8; 4] = [lid::SUPPORTED, lid::ERROR, lid::FEATURE_EFFECTS, lid::DISCOVERY];

/// Most namespaces that the changed namespace list holds.
const CHANGED_MAX: usize = 1024;

/// Entries of the error log (ELPE is one less).
pub(crate) const ERROR_SLOTS: usize = 128;

/// The bytes `[offset, offset + len)` of a page; what lies past its end is zero, so the host gets exactly what it asked
/// for. An offset past the end is refused.
pub(crate) fn slice(page: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Status> {
    let invalid = Status::INVALID_FIELD.dnr();
    let offset = usize::try_from(offset).map_err(|_| invalid)?;
    let rest = page.get(offset..).ok_or(invalid)?;
    let mut data = rest.get(..len).unwrap_or(rest).to_vec();
    data.resize(len, 0);
    Ok(data)
}

/// What a failed command leaves in the error log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandError {
    /// Queue that it came on.
    pub sqid: u16,
    /// Its command identifier.
    pub cid: u16,
    /// Its opcode.
    pub opcode: u8,
    /// Its namespace, or zero.
    pub nsid: u32,
    /// First LBA that failed, or zero.
    pub lba: u64,
    /// What it was answered with.
    pub status: Status,
    /// Byte of the command at fault, or FFFFh. For I/O commands [`io::error_location`] knows it.
    pub location: u16,
}

/// The last errors, newest first when read.
#[derive(Clone, Debug, Default)]
pub(crate) struct ErrorLog {
    count: u64,
    entries: VecDeque<ErrorEntry>,
}

impl ErrorLog {
    pub(crate) fn record(&mut self, error: &CommandError) {
        self.count = self.count.saturating_add(1);
        let mut entry = ErrorEntry::zeroed();
        entry.error_count.set(self.count);
        entry.sqid.set(error.sqid);
        entry.cid.set(error.cid);
        entry.status.set(error.status.to_wire() << 1);
        entry.parameter_error_location.set(error.location);
        entry.lba.set(error.lba);
        entry.nsid.set(error.nsid);
        entry.trtype = TRTYPE_RDMA;
        entry.opcode = error.opcode;
        entry.log_page_version = 1;
        self.entries.truncate(ERROR_SLOTS - 1);
        self.entries.push_front(entry);
    }

    /// Errors since the controller was made, the ones that fell out of the ring included.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn page(&self) -> Vec<u8> {
        let unused = ErrorEntry::zeroed();
        let slots = self.entries.iter().chain(core::iter::repeat(&unused));
        slots.take(ERROR_SLOTS).flat_map(|entry| entry.as_bytes()).copied().collect()
    }
}

/// Namespaces that changed since the host last read the list.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangedNamespaces(BTreeSet<u32>);

impl ChangedNamespaces {
    pub(crate) fn add(&mut self, nsid: u32) {
        // One more than fits says "too many" as well as all of them would.
        if self.0.len() <= CHANGED_MAX {
            self.0.insert(nsid);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// In ascending order; FFFFFFFFh alone when they do not fit.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = vec![0; CHANGED_MAX * 4];
        let too_many = BTreeSet::from([u32::MAX]);
        let list = if self.0.len() > CHANGED_MAX { &too_many } else { &self.0 };
        let (slots, _) = page.as_chunks_mut::<4>();
        for (slot, nsid) in slots.iter_mut().zip(list) {
            *slot = nsid.to_le_bytes();
        }
        page
    }
}

/// Counters of one subsystem's I/O, which the transport keeps and hands to the registry for the SMART / health log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Bytes of Read and Compare.
    pub bytes_read: u64,
    /// Bytes of Write.
    pub bytes_written: u64,
    /// Read and Compare commands.
    pub read_commands: u64,
    /// Write commands.
    pub write_commands: u64,
    /// Time with at least one I/O command outstanding.
    pub busy: Duration,
    /// Commands that failed with a media or data integrity status.
    pub media_errors: u64,
}

/// SMART / health. There is no sensor and no wear behind a file, so temperature is 0 K (WCTEMP and CCTEMP of 0 say that
/// no threshold is reported) and the spare is whole.
pub(crate) fn smart_page(counters: &IoCounters, errors: u64, power_on: Duration) -> Vec<u8> {
    let mut smart = SmartLog::zeroed();
    smart.available_spare = 100;
    smart.data_units_read.set(data_units(counters.bytes_read));
    smart.data_units_written.set(data_units(counters.bytes_written));
    smart.host_read_commands.set(counters.read_commands.into());
    smart.host_write_commands.set(counters.write_commands.into());
    let minutes = counters.busy.as_secs() / 60;
    smart.controller_busy_time.set(minutes.into());
    smart.power_cycles.set(1);
    smart.power_on_hours.set((power_on.as_secs() / 3600).into());
    smart.media_errors.set(counters.media_errors.into());
    smart.error_log_entries.set(errors.into());
    smart.as_bytes().to_vec()
}

/// Thousands of 512-byte units, rounded up.
fn data_units(bytes: u64) -> u128 {
    u128::from(bytes.div_ceil(512_000))
}

/// Supported log pages (LID 00h): bit 0 of a page's Dword says it is there.
pub(crate) fn supported_page(pages: &[u8]) -> Vec<u8> {
    dword_table(256, pages.iter().map(|&lid| (lid.into(), SUPPORTED)))
}

/// Commands supported and effects (LID 05h): 256 Dwords for admin commands, 256 for I/O commands. Writes change content
/// (LBCC); the scope is the controller for admin commands and not reported for I/O commands: Linux warns of "unusual effects"
/// at any bit but these.
pub(crate) fn command_effects_page(namespace_commands: &NamespaceCommands, zoned: bool) -> Vec<u8> {
    let admin = [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
    ]
    .map(|opcode| (usize::from(opcode), SUPPORTED | SCOPE_CONTROLLER));
    let optional = [
        (namespace_commands.compare, io::opcode::COMPARE, 0),
        (namespace_commands.write_zeroes, io::opcode::WRITE_ZEROES, CONTENT_CHANGE),
        (namespace_commands.deallocate, io::opcode::DATASET_MANAGEMENT, CONTENT_CHANGE),
        (namespace_commands.verify, io::opcode::VERIFY, 0),
        (namespace_commands.copy, io::opcode::COPY, CONTENT_CHANGE),
    ];
    let reservation = reservation::opcode::ALL.map(|opcode| (namespace_commands.reservations, opcode, 0));
    let of_zones = [
        (zoned, zns::opcode::ZONE_MANAGEMENT_SEND, CONTENT_CHANGE),
        (zoned, zns::opcode::ZONE_MANAGEMENT_RECEIVE, 0),
        (zoned, zns::opcode::ZONE_APPEND, CONTENT_CHANGE),
    ];
    let optional = optional.into_iter().chain(reservation).chain(of_zones);
    let optional = optional.filter(|(supported, ..)| *supported).map(|(_, opcode, effects)| (opcode, effects));
    let always = io::ALWAYS.map(|opcode| {
        let writes = opcode == io::opcode::WRITE;
        (opcode, if writes { CONTENT_CHANGE } else { 0 })
    });
    let io = always.into_iter().chain(optional).map(|(opcode, effects)| {
        let slot = 256 + usize::from(opcode.0);
        (slot, SUPPORTED | effects)
    });
    dword_table(1024, admin.into_iter().chain(io))
}

/// Which optional I/O commands the namespaces of a subsystem have between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamespaceCommands {
    pub(crate) compare: bool,
    pub(crate) write_zeroes: bool,
    pub(crate) deallocate: bool,
    pub(crate) verify: bool,
    pub(crate) copy: bool,
    pub(crate) reservations: bool,
}

/// Feature identifiers supported and effects (LID 12h).
pub(crate) fn feature_effects_page(discovery: bool, write_protection: bool) -> Vec<u8> {
    let scope = |fid| if features::is_of_namespace(fid) { SCOPE_NAMESPACE } else { SCOPE_CONTROLLER };
    let there =
        features::identifiers(discovery).filter(|fid| write_protection || *fid != features::fid::WRITE_PROTECTION);
    let features = there.map(|fid| (usize::from(fid), SUPPORTED | scope(fid)));
    dword_table(256, features)
}

/// NVMe-MI commands supported and effects (LID 13h): there are none, but LPA bit 5 promises the page.
pub(crate) fn mi_effects_page() -> Vec<u8> {
    dword_table(1024, [])
}

fn dword_table(len: usize, entries: impl IntoIterator<Item = (usize, u32)>) -> Vec<u8> {
    let mut page = vec![0; len * 4];
    let (dwords, _) = page.as_chunks_mut::<4>();
    for (index, value) in entries {
        if let Some(dword) = dwords.get_mut(index) {
            *dword = value.to_le_bytes();
        }
    }
    page
}

const TRTYPE_RDMA: u8 = 1;
const SUPPORTED: u32 = 1;
const CONTENT_CHANGE: u32 = 1 << 1;
const SCOPE_NAMESPACE: u32 = 1 << 20;
const SCOPE_CONTROLLER: u32 = 1 << 21;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_exact_and_padded_with_zeroes() {
        let page: Vec<u8> = (1..=16).collect();
        assert_eq!(slice(&page, 0, 4).unwrap(), [1, 2, 3, 4]);
        assert_eq!(slice(&page, 12, 8).unwrap(), [13, 14, 15, 16, 0, 0, 0, 0]);
        assert_eq!(slice(&page, 16, 4).unwrap(), [0; 4]);
        assert_eq!(slice(&page, 17, 4), Err(Status::INVALID_FIELD.dnr()));
        assert_eq!(slice(&page, u64::MAX - 3, 4), Err(Status::INVALID_FIELD.dnr()));
    }

    #[test]
    fn error_log_holds_the_newest_128_first() {
        let mut log = ErrorLog::default();
        assert_eq!(log.page(), vec![0; 128 * 64]);
        for n in 0..130u16 {
            log.record(&CommandError {
                sqid: 1,
                cid: n,
                opcode: 2,
                nsid: 3,
                lba: 5,
                status: Status::LBA_OUT_OF_RANGE.dnr(),
                location: 40,
            });
        }
        let page = log.page();
        assert_eq!(page.len(), 128 * 64);
        let golden =
            [130, 0, 0, 0, 0, 0, 0, 0, 1, 0, 129, 0, 0x00, 0x81, 40, 0, 5, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 2];
        assert_eq!(page[..32], golden);
        assert_eq!(page[63], 1);
        assert_eq!(page[127 * 64], 3);
        assert_eq!(log.count(), 130);
    }

    #[test]
    fn changed_namespaces_are_sorted_and_overflow_to_all() {
        let mut changed = ChangedNamespaces::default();
        for nsid in [7, 3, 7] {
            changed.add(nsid);
        }
        assert_eq!(changed.page()[..12], [3, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        (1..=1024).for_each(|nsid| changed.add(nsid));
        assert_eq!(changed.page()[4092..], [0, 4, 0, 0], "1024 still fit");
        changed.add(2000);
        assert_eq!(changed.page()[..8], [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        changed.clear();
        assert_eq!(changed.page(), vec![0; 4096]);
    }

    #[test]
    fn smart_counts_in_thousands_of_512_bytes_rounded_up() {
        let counters = IoCounters {
            bytes_read: 512_001,
            bytes_written: 512_000,
            read_commands: 3,
            write_commands: 4,
            busy: Duration::from_secs(119),
            media_errors: 6,
        };
        let page = smart_page(&counters, 9, Duration::from_secs(7300));
        assert_eq!(page.len(), 512);
        assert_eq!(page[..6], [0, 0, 0, 100, 0, 0]);
        let at = |offset: usize| u128::from_le_bytes(page[offset..offset + 16].try_into().unwrap());
        let values = [32, 48, 64, 80, 96, 112, 128, 144, 160, 176].map(at);
        assert_eq!(values, [2, 1, 3, 4, 1, 1, 2, 0, 6, 9]);
    }

    #[test]
    fn effects_list_what_is_served() {
        let all = NamespaceCommands {
            compare: true,
            write_zeroes: true,
            deallocate: true,
            verify: true,
            copy: true,
            reservations: true,
        };
        let page = command_effects_page(&all, false);
        assert_eq!(page.len(), 4096);
        let at = |n: usize| u32::from_le_bytes(page[n * 4..n * 4 + 4].try_into().unwrap());
        let admin: Vec<usize> = (0..256).filter(|&n| at(n) != 0).collect();
        assert_eq!(admin, [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18]);
        let io: Vec<usize> = (0..256).filter(|&n| at(256 + n) != 0).collect();
        assert_eq!(io, [0, 1, 2, 5, 8, 9, 0x0c, 0x0d, 0x0e, 0x11, 0x15, 0x19]);
        assert_eq!(at(257), 3, "write changes content");
        assert_eq!(at(258), 1);
        let none = command_effects_page(&NamespaceCommands::default(), true);
        assert_eq!(none[1024 + 5 * 4], 0);
        let at = |n: usize| u32::from_le_bytes(none[n * 4..n * 4 + 4].try_into().unwrap());
        let io: Vec<(usize, u32)> = (0..256).map(|n| (n, at(256 + n))).filter(|(_, effects)| *effects != 0).collect();
        assert_eq!(io, [(0, 1), (1, 3), (2, 1), (0x79, 3), (0x7a, 1), (0x7d, 3)], "of zones");
    }

    #[test]
    fn supported_pages_are_marked() {
        let page = supported_page(&IO_PAGES);
        let marked: Vec<usize> = (0..256).filter(|&n| page[n * 4] == 1).collect();
        assert_eq!(marked, [0, 1, 2, 3, 4, 5, 0x0c, 0x12, 0x13, 0x80]);
        assert_eq!(page.len(), 1024);
        assert_eq!(feature_effects_page(false, true).len(), 1024);
        assert_eq!(mi_effects_page(), vec![0; 4096]);
    }
}
