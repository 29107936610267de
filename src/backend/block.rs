//! Opening a block device for serving: exclusively, with what its queue limits say.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::stat::{major, minor};

use super::holder;
use super::ioctl;
use super::open_file::{Kind, OpenFile, RangeCall};
use super::ring;
use super::storage::{self, Storage, turn_direct_on};
use super::zoned_device::{self, ZonedDevice};
use super::{Abilities, Backend, BackendError, BackendInfo, Zoned};

pub(super) fn open(path: &Path, read_only: bool, buffered: bool) -> Result<Arc<dyn Backend>, BackendError> {
    let (storage, zoned) = open_storage(path, read_only, buffered)?;
    match zoned {
        Some(zoned) => Ok(Arc::new(ZonedDevice::new(storage, zoned)?)),
        None => Ok(Arc::new(storage)),
    }
}

/// The device, and its zones if it has zones.
pub(super) fn open_storage(
    path: &Path,
    read_only: bool,
    buffered: bool,
) -> Result<(Storage, Option<Zoned>), BackendError> {
    let name = path.display().to_string();
    check_type(path, &name)?;
    let file = claim(path, &name, read_only)?;
    let error = |error: io::Error| BackendError::new(&name, error, "see whether the device works (dmesg)");
    storage::let_it_wait(&file).map_err(error)?;
    let size = storage::size(&file, Kind::Device).map_err(error)?;
    let mut remarks = Vec::new();
    let direct = if buffered {
        remarks.push("buffered: chosen".to_owned());
        None
    } else {
        turn_direct_on(&file, size).inspect_err(|reason| remarks.push(format!("buffered: {reason}"))).ok()
    };
    let logical = ioctl::logical_block_size(&file).map_err(error)?;
    let physical = ioctl::physical_block_size(&file).unwrap_or(logical);
    let sysfs = Sysfs::of(&file);
    let zoned = match sysfs.text("queue/zoned").as_deref() {
        None | Some("none") => None,
        Some(model) => {
            let limits = zoned_device::Limits {
                max_open: sysfs.number("queue/max_open_zones").unwrap_or(0),
                max_active: sysfs.number("queue/max_active_zones").unwrap_or(0),
                granularity: sysfs.number("queue/zone_write_granularity").unwrap_or(0).max(logical),
            };
            let zoned = zoned_device::read(&file, size, model, limits);
            Some(zoned.map_err(|(reason, remedy)| BackendError::new(&name, reason, remedy))?)
        }
    };
    if zoned.is_some() && direct.is_none() {
        let reason = format!("zones cannot be written through the page cache ({})", remarks.join(", "));
        return Err(BackendError::new(&name, reason, "leave buffered out"));
    }
    let open = OpenFile::new(file, Kind::Device, read_only, direct, size);
    let open = if zoned.is_some() { open.with_zones() } else { open };
    let discards = !read_only && zoned.is_none() && find_discard(&open, &sysfs);
    let info = BackendInfo {
        size,
        block_size: match &zoned {
            Some(zoned) => zoned.block_size(),
            None => direct.map_or(512, |direct| direct.offset).max(logical),
        },
        preferred_write: sysfs.number("queue/minimum_io_size").unwrap_or(0).max(physical),
        preferred_deallocate: if discards { sysfs.number("queue/discard_granularity").unwrap_or(0) } else { 0 },
        optimal_write: sysfs.number("queue/optimal_io_size").unwrap_or(0),
        // Unknown counts as yes: a needless flush costs time, a missing one data. The page cache is a cache too.
        write_cache: !read_only
            && (direct.is_none() || sysfs.text("queue/write_cache").is_none_or(|mode| mode != "write through")),
        read_only,
        rotational: sysfs.rotational(),
        abilities: Abilities { deallocate: discards, write_zeroes: !read_only, deallocated_reads_zero: false },
        max_transfer: 1 << 30,
        remarks,
        identity: sysfs.identity(&name),
        name,
    };
    Ok((Storage::new(open, info, None), zoned))
}

/// What can be said against serving a zoned device before it is opened.
pub(crate) fn check_zones(device: &fs::Metadata, buffered: bool) -> Result<(), (String, &'static str)> {
    match Sysfs::of_number(device.rdev()).text("queue/zoned").as_deref() {
        None | Some("none") => Ok(()),
        Some(model) => {
            zoned_device::check_model(model)?;
            if buffered {
                Err(("is zoned, and cannot be written through the page cache".into(), "leave buffered out"))
            } else {
                Ok(())
            }
        }
    }
}

/// Opens with O_EXCL but not O_CREAT: nobody else may open it so, mount it or put it into an array.
fn claim(path: &Path, name: &str, read_only: bool) -> Result<File, BackendError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let begun = Instant::now();
    loop {
        let error = match options.open(path) {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        let patience = match holder::of_device(path) {
            _ if error.raw_os_error() != Some(libc::EBUSY) => Duration::ZERO,
            Some(holder::DeviceHolder::Kernel(_)) => Duration::ZERO,
            // It may have the device open without claiming it, as udev has every new device for a moment.
            Some(holder::DeviceHolder::Process(_)) => holder::GLANCE,
            // Nobody is to be seen: a process that ended, whose ring is not gone yet.
            None => holder::LINGER,
        };
        if begun.elapsed() >= patience {
            return Err(open_error(path, name, &error));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn check_type(path: &Path, name: &str) -> Result<(), BackendError> {
    let kind = fs::metadata(path).map_err(|error| open_error(path, name, &error))?.file_type();
    if kind.is_block_device() {
        Ok(())
    } else if kind.is_file() {
        Err(BackendError::new(name, "is a regular file", "serve it as a file"))
    } else {
        Err(BackendError::new(name, "is no block device", "name a block device, such as /dev/nvme0n1"))
    }
}

fn open_error(path: &Path, name: &str, error: &io::Error) -> BackendError {
    match error.raw_os_error() {
        Some(libc::EBUSY) => {
            let by = holder::of_device(path).map_or_else(|| "another user".to_owned(), |holder| holder.name());
            BackendError::new(name, format!("is in use by {by}"), "unmount or stop that, or serve another device")
        }
        Some(libc::ENOENT) => BackendError::new(name, error, "check the path"),
        Some(libc::EACCES | libc::EPERM) => {
            BackendError::new(name, error, "let the user that farside runs as read and write it, or set read_only")
        }
        Some(libc::EROFS) => BackendError::new(name, "is write protected", "set read_only"),
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => {
            BackendError::new(name, error, "see whether the device works (dmesg)")
        }
        _ => BackendError::new(name, error, "check the path"),
    }
}

/// Notes which calls the device takes; whether one of them gives space back.
fn find_discard(open: &OpenFile, sysfs: &Sysfs) -> bool {
    let takes_discard = sysfs.number("queue/discard_max_bytes").is_some_and(|bytes| bytes > 0);
    if !takes_discard || !ring::kernel_discards(open.fd()) {
        open.refuse(RangeCall::Discard);
    }
    let punches = sysfs.number("queue/write_zeroes_max_bytes").is_some_and(|bytes| bytes > 0);
    if !punches {
        open.refuse(RangeCall::Punch);
    }
    open.takes(RangeCall::Discard) || open.takes(RangeCall::Punch)
}

/// A device's folder in sysfs.
struct Sysfs {
    folder: PathBuf,
    /// The whole disk's, if it is a partition: the queue limits are there.
    disk: PathBuf,
}

impl Sysfs {
    fn of(file: &File) -> Self {
        Self::of_number(file.metadata().map_or(0, |metadata| metadata.rdev()))
    }

    fn of_number(rdev: u64) -> Self {
        let link = PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)));
        let folder = fs::canonicalize(&link).unwrap_or(link);
        let disk = match folder.parent() {
            Some(parent) if folder.join("partition").exists() => parent.to_owned(),
            _ => folder.clone(),
        };
        Self { folder, disk }
    }

    fn text(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.disk.join(name)).ok()?;
        Some(text.trim().to_owned())
    }

    /// A number; what does not fit counts as the largest that does.
    fn number(&self, name: &str) -> Option<u32> {
        let number: u64 = self.text(name)?.parse().ok()?;
        Some(u32::try_from(number).unwrap_or(u32::MAX))
    }

    /// Whether it has heads to move. A device that does not say has none.
    fn rotational(&self) -> bool {
        self.text("queue/rotational").as_deref() == Some("1")
    }

    /// The device's own identity where it has one, and its place in a partition table; else its name.
    fn identity(&self, name: &str) -> Vec<u8> {
        let own = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "device/serial", "serial", "loop/backing_file"]
            .iter()
            .find_map(|file| self.text(file).filter(|text| !text.is_empty()).map(|text| format!("{file} {text}")));
        let part = fs::read_to_string(self.folder.join("partition")).unwrap_or_default();
        format!("device {} {}", own.unwrap_or_else(|| name.to_owned()), part.trim()).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotational_is_what_the_queue_of_the_whole_disk_says() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().to_owned();
        let sysfs = Sysfs { folder: disk.join("part1"), disk: disk.clone() };
        assert!(!sysfs.rotational(), "a device that says nothing");
        fs::create_dir(disk.join("queue")).unwrap();
        for (says, rotational) in [("1\n", true), ("0\n", false)] {
            fs::write(disk.join("queue/rotational"), says).unwrap();
            assert_eq!(sysfs.rotational(), rotational, "{says}");
        }
    }
}
