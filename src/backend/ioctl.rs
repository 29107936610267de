//! The system calls about files and devices that have no safe form elsewhere. An unsafe island; no logic lives here.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use super::open_file::Direct;

mod raw {
    nix::ioctl_read_bad!(blksszget, libc::BLKSSZGET, std::ffi::c_int);
    nix::ioctl_read_bad!(blkpbszget, libc::BLKPBSZGET, std::ffi::c_uint);
    // linux/blkzoned.h
    nix::ioctl_readwrite!(blkreportzone, 0x12, 130, super::RawReportHeader);
    nix::ioctl_write_ptr!(blkresetzone, 0x12, 131, super::RawRange);
    nix::ioctl_read!(blkgetzonesz, 0x12, 132, u32);
    nix::ioctl_write_ptr!(blkopenzone, 0x12, 134, super::RawRange);
    nix::ioctl_write_ptr!(blkclosezone, 0x12, 135, super::RawRange);
    nix::ioctl_write_ptr!(blkfinishzone, 0x12, 136, super::RawRange);
}

/// Bytes of a device's smallest unit.
pub(crate) fn logical_block_size(device: &File) -> io::Result<u32> {
    let mut size: c_int = 0;
    // SAFETY: the descriptor is open, and the call writes one int.
    unsafe { raw::blksszget(device.as_raw_fd(), &mut size) }?;
    u32::try_from(size).map_err(io::Error::other)
}

/// Bytes that a device writes without reading before.
pub(crate) fn physical_block_size(device: &File) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the descriptor is open, and the call writes one unsigned int.
    unsafe { raw::blkpbszget(device.as_raw_fd(), &mut size) }?;
    Ok(size)
}

/// `struct blk_zone_report` without its zones, as the calls' numbers count it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawReportHeader {
    sector: u64,
    nr_zones: u32,
    flags: u32,
}

/// `struct blk_zone`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawZone {
    start: u64,
    len: u64,
    wp: u64,
    kind: u8,
    cond: u8,
    non_seq: u8,
    reset: u8,
    resv: [u8; 4],
    capacity: u64,
    reserved: [u8; 24],
}

/// `struct blk_zone_range`.
#[repr(C)]
struct RawRange {
    sector: u64,
    nr_sectors: u64,
}

const _: () = assert!(size_of::<RawReportHeader>() == 16 && size_of::<RawZone>() == 64 && size_of::<RawRange>() == 16);
const _: () = assert!(std::mem::offset_of!(RawZone, cond) == 25 && std::mem::offset_of!(RawZone, capacity) == 32);

/// `BLK_ZONE_REP_CAPACITY`: the capacities are filled.
const REPORTS_CAPACITY: u32 = 1;

/// A zone as the kernel reports it, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ZoneReport {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) write_pointer: u64,
    pub(crate) kind: u8,
    pub(crate) condition: u8,
    pub(crate) capacity: u64,
}

/// What can be done to zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZoneCall {
    Reset,
    Open,
    Close,
    Finish,
}

/// Sectors of a device's zones.
pub(crate) fn zone_sectors(device: &File) -> io::Result<u32> {
    let mut sectors = 0;
    // SAFETY: the descriptor is open, and the call writes one unsigned int.
    unsafe { raw::blkgetzonesz(device.as_raw_fd(), &mut sectors) }?;
    Ok(sectors)
}

/// Up to `count` zones from the one that a sector lies in.
pub(crate) fn report_zones(device: &File, sector: u64, count: u32) -> io::Result<Vec<ZoneReport>> {
    // A header of 16 bytes at the end of a first slot, so that the zones lie right behind it.
    let mut slots = vec![RawZone::default(); count as usize + 1];
    let header_at = (size_of::<RawZone>() - size_of::<RawReportHeader>()) as isize;
    let header = slots.as_mut_ptr().cast::<u8>().wrapping_offset(header_at).cast::<RawReportHeader>();
    // SAFETY: the header lies in the first slot, aligned to 8 bytes as slots are.
    unsafe { header.write(RawReportHeader { sector, nr_zones: count, flags: 0 }) };
    // SAFETY: the descriptor is open; the call writes a header, and behind it at most `nr_zones` zones: the other slots.
    unsafe { raw::blkreportzone(device.as_raw_fd(), header) }?;
    // SAFETY: as above; all are plain integers.
    let RawReportHeader { nr_zones, flags, .. } = unsafe { header.read() };
    let zones = slots.iter().skip(1).take(nr_zones as usize);
    let report = |zone: &RawZone| ZoneReport {
        start: zone.start,
        len: zone.len,
        write_pointer: zone.wp,
        kind: zone.kind,
        condition: zone.cond,
        capacity: if flags & REPORTS_CAPACITY == 0 { zone.len } else { zone.capacity },
    };
    Ok(zones.map(report).collect())
}

/// Changes the state of whole zones. May take long.
pub(crate) fn change_zones(device: &File, call: ZoneCall, sector: u64, sectors: u64) -> io::Result<()> {
    let (fd, range) = (device.as_raw_fd(), RawRange { sector, nr_sectors: sectors });
    // SAFETY: the descriptor is open, and the call reads one `RawRange`.
    unsafe {
        match call {
            ZoneCall::Reset => raw::blkresetzone(fd, &range),
            ZoneCall::Open => raw::blkopenzone(fd, &range),
            ZoneCall::Close => raw::blkclosezone(fd, &range),
            ZoneCall::Finish => raw::blkfinishzone(fd, &range),
        }
    }?;
    Ok(())
}

/// What statx says about a file beyond the classic fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statx {
    /// O_DIRECT: `None` = it does not say (a file system or kernel that predates the question).
    pub(crate) direct: Option<DirectAnswer>,
    /// When the file was made: seconds and nanoseconds.
    pub(crate) born: Option<(i64, u32)>,
}

/// A file system's answer to whether O_DIRECT works on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectAnswer {
    Refused,
    Aligned(Direct),
}

/// Asks statx about an open file.
pub(crate) fn statx(file: &File) -> io::Result<Statx> {
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BTIME | libc::STATX_DIOALIGN;
    // SAFETY: the path is an empty C string, which AT_EMPTY_PATH allows; the call fills at most one `statx`.
    let result = unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, mask, answer.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain integers, zeroed before the call.
    let answer = unsafe { answer.assume_init() };
    let direct = match (answer.stx_dio_mem_align, answer.stx_dio_offset_align) {
        _ if answer.stx_mask & libc::STATX_DIOALIGN == 0 => None,
        (0, _) | (_, 0) => Some(DirectAnswer::Refused),
        (memory, offset) => Some(DirectAnswer::Aligned(Direct { memory, offset })),
    };
    let born =
        (answer.stx_mask & libc::STATX_BTIME != 0).then_some((answer.stx_btime.tv_sec, answer.stx_btime.tv_nsec));
    Ok(Statx { direct, born })
}

/// Takes an advisory lock on the open file, or says at once that another has it.
pub(crate) fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    flock(file, if exclusive { libc::LOCK_EX } else { libc::LOCK_SH } | libc::LOCK_NB)
}

/// Gives the lock up, also while the kernel or a child process about to exec still holds a reference to the open file.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_UN)
}

fn flock(file: &File, operation: c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open; the call takes no pointer.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
