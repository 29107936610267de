//! Log page structures: error information (01h), SMART / health (02h), firmware slots (03h).
//! (NVMe Base 2.x, Get Log Page command.)

use zerocopy::byteorder::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::assert_offsets;

/// Error information log entry.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ErrorEntry {
    pub(crate) error_count: U64,
    pub(crate) sqid: U16,
    pub(crate) cid: U16,
    /// Status field as in the completion queue entry, above the phase tag.
    pub(crate) status: U16,
    /// Byte of the command at fault; FFFFh for none.
    pub(crate) parameter_error_location: U16,
    pub(crate) lba: U64,
    pub(crate) nsid: U32,
    pub(crate) vendor_log_page: u8,
    pub(crate) trtype: u8,
    pub(crate) csi: u8,
    pub(crate) opcode: u8,
    pub(crate) command_specific: U64,
    pub(crate) transport_specific: U16,
    _reserved42: [u8; 21],
    /// Version of this format: 1 when CSI and OPC are given.
    pub(crate) log_page_version: u8,
}

const _: () = assert!(size_of::<ErrorEntry>() == 64);
assert_offsets!(ErrorEntry:
    sqid = 8, status = 12, parameter_error_location = 14, lba = 16, nsid = 24, trtype = 29, opcode = 31,
    command_specific = 32, log_page_version = 63,
);

impl ErrorEntry {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// SMART / health information.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct SmartLog {
    pub(crate) critical_warning: u8,
    pub(crate) composite_temperature: U16,
    pub(crate) available_spare: u8,
    pub(crate) available_spare_threshold: u8,
    pub(crate) percentage_used: u8,
    pub(crate) endurance_group_critical_warning: u8,
    _reserved7: [u8; 25],
    pub(crate) data_units_read: U128,
    pub(crate) data_units_written: U128,
    pub(crate) host_read_commands: U128,
    pub(crate) host_write_commands: U128,
    pub(crate) controller_busy_time: U128,
    pub(crate) power_cycles: U128,
    pub(crate) power_on_hours: U128,
    pub(crate) unsafe_shutdowns: U128,
    pub(crate) media_errors: U128,
    pub(crate) error_log_entries: U128,
    _reserved192: [u8; 320],
}

const _: () = assert!(size_of::<SmartLog>() == 512);
assert_offsets!(SmartLog:
    available_spare = 3, percentage_used = 5, data_units_read = 32, host_read_commands = 64,
    controller_busy_time = 96, power_on_hours = 128, media_errors = 160, error_log_entries = 176,
);

impl SmartLog {
    pub(crate) fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Firmware slot information.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct FirmwareSlots {
    /// Active firmware info: the slot in its low three bits.
    pub(crate) afi: u8,
    _reserved1: [u8; 7],
    pub(crate) frs: [[u8; 8]; 7],
    _reserved64: [u8; 448],
}

const _: () = assert!(size_of::<FirmwareSlots>() == 512);

impl FirmwareSlots {
    pub(crate) fn slot_1(revision: [u8; 8]) -> Self {
        let mut slots = Self::new_zeroed();
        slots.afi = 1;
        let [first, ..] = &mut slots.frs;
        *first = revision;
        slots
    }
}
