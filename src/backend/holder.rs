//! Who else uses a file or device, so that a refusal can name them.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::stat::{major, minor};

/// How long a claim of a process that has ended may linger: the kernel closes the files of its ring when what was in flight
/// there has ended.
pub(super) const LINGER: Duration = Duration::from_secs(3);

/// How long a process that has a device open may be one that merely looks at it.
pub(super) const GLANCE: Duration = Duration::from_secs(1);

/// Who holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// As in `qemu (pid 4711)`.
    pub(super) name: String,
    /// False: a process that has ended.
    pub(super) alive: bool,
}

/// The holder of a lock on the file. `flock`: whether to look at locks of the kind that farside takes itself, or only at the
/// kinds that it does not.
pub(super) fn of_file(file: &File, flock: bool) -> Option<Holder> {
    let metadata = file.metadata().ok()?;
    let inode = format!("{:02x}:{:02x}:{}", major(metadata.dev()), minor(metadata.dev()), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let pid = lock_holder(&locks, &inode, flock);
    let living = |name| Holder { name, alive: true };
    match pid {
        Some(pid) if pid > 0 => {
            let alive = Path::new(&format!("/proc/{pid}")).exists();
            Some(Holder { name: describe(pid as u32), alive })
        }
        // The holder lives in another process namespace, or the lock belongs to no process.
        Some(_) => Some(living("a process that cannot be seen from here".to_owned())),
        None => loop_device(&metadata).map(living),
    }
}

/// The process in /proc/locks that holds a lock on an inode: -1 or 0 where it cannot be seen.
fn lock_holder(locks: &str, inode: &str, flock: bool) -> Option<i64> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let kind = words.next()?;
        // A lock that is only waited for is marked with an arrow and holds nothing.
        if kind == "->" || (kind == "FLOCK") != flock || kind == "LEASE" {
            return None;
        }
        let (_, _) = (words.next()?, words.next()?);
        let pid = words.next()?.parse().ok()?;
        (words.next()? == inode).then_some(pid)
    })
}

/// The loop device that a file is attached to.
fn loop_device(metadata: &fs::Metadata) -> Option<String> {
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        let backing = fs::metadata(backing.trim_end_matches('\n')).ok()?;
        let same = (backing.dev(), backing.ino()) == (metadata.dev(), metadata.ino());
        same.then(|| format!("/dev/{}", entry.file_name().display()))
    })
}

/// Who holds a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceHolder {
    /// A mount of it or of a partition, swap, an array or mapping on it.
    Kernel(String),
    /// A process that has it open, whether or not that is what keeps others out.
    Process(u32),
}

impl DeviceHolder {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Kernel(name) => name.clone(),
            Self::Process(pid) => describe(*pid),
        }
    }
}

/// Who holds a block device.
pub(super) fn of_device(path: &Path) -> Option<DeviceHolder> {
    let rdev = fs::metadata(path).ok()?.rdev();
    let folder = PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)));
    let mut numbers = vec![(rdev, folder.clone())];
    for entry in fs::read_dir(&folder).ok().into_iter().flatten().flatten() {
        if let Some(number) = device_number(&entry.path()) {
            numbers.push((number, entry.path()));
        }
    }
    let kernel = numbers.iter().find_map(|(number, folder)| mount_of(*number).or_else(|| user_of(*number, folder)));
    let process = || numbers.iter().find_map(|(number, _)| opener(*number));
    kernel.map(DeviceHolder::Kernel).or_else(|| process().map(DeviceHolder::Process))
}

/// The number of a partition's folder in sysfs.
fn device_number(folder: &Path) -> Option<u64> {
    let text = fs::read_to_string(folder.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(nix::sys::stat::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn mount_of(number: u64) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mount_point(&mounts, &format!("{}:{}", major(number), minor(number))).map(|point| format!("a mount on {point}"))
}

/// The first mount point of a device in mountinfo.
fn mount_point(mounts: &str, number: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(2);
        (words.next()? == number).then_some(())?;
        words.nth(1).map(str::to_owned)
    })
}

/// A mapping, an array or swap on a device.
fn user_of(number: u64, folder: &Path) -> Option<String> {
    let above = fs::read_dir(folder.join("holders")).ok().and_then(|mut holders| holders.next()?.ok());
    if let Some(above) = above {
        return Some(format!("/dev/{}", above.file_name().display()));
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let same = |path: &str| fs::metadata(path).is_ok_and(|metadata| metadata.rdev() == number);
    swaps.lines().filter_map(|line| line.split_whitespace().next()).any(same).then(|| "swap".to_owned())
}

/// A process that has the device open; one that is not farside, if there is one.
fn opener(number: u64) -> Option<u32> {
    let opens = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.filter_map(|entry| fs::metadata(entry.path()).ok()).any(|metadata| metadata.rdev() == number)
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let found: Vec<u32> =
        processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(opens).collect();
    found.iter().find(|pid| **pid != std::process::id()).or_else(|| found.first()).copied()
}

/// A process by name and number.
pub(super) fn describe(pid: u32) -> String {
    if pid == std::process::id() {
        return format!("this farside itself (pid {pid})");
    }
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(comm) => format!("{} (pid {pid})", comm.trim_end()),
        Err(_) => format!("pid {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKS: &str = "1: FLOCK  ADVISORY  WRITE 812 fe:00:1319 0 EOF\n\
                         1: -> FLOCK  ADVISORY  WRITE 900 fe:00:1320 0 EOF\n\
                         2: OFDLCK ADVISORY  READ  -1 fe:00:1321 100 101\n\
                         3: POSIX  ADVISORY  WRITE 77 fe:00:1319 0 EOF\n";

    #[test]
    fn lock_holders_are_found_by_inode_and_kind() {
        assert_eq!(lock_holder(LOCKS, "fe:00:1319", true), Some(812));
        assert_eq!(lock_holder(LOCKS, "fe:00:1319", false), Some(77));
        assert_eq!(lock_holder(LOCKS, "fe:00:1320", true), None);
        assert_eq!(lock_holder(LOCKS, "fe:00:1321", false), Some(-1));
        assert_eq!(lock_holder(LOCKS, "fe:00:1", true), None);
    }

    #[test]
    fn mount_points_are_found_by_device_number() {
        let mounts = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n30 22 7:1 / /mnt/a\\040b rw - xfs /dev/loop1 rw\n";
        assert_eq!(mount_point(mounts, "7:1").as_deref(), Some("/mnt/a\\040b"));
        assert_eq!(mount_point(mounts, "7:2"), None);
    }
}
