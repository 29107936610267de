//! Opening a file for serving: locked, O_DIRECT where it works, made or checked to the size that was asked for.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};

use super::holder;
use super::ioctl;
use super::open_file::{Direct, Kind, OpenFile, RangeCall};
use super::storage::{Made, Storage, let_it_wait, turn_direct_on};
use super::{Abilities, BackendError, BackendInfo};

/// How a file is to be opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) size: Option<u64>,
    pub(super) read_only: bool,
    pub(super) buffered: bool,
}

pub(super) fn open(path: &Path, wish: Wish) -> Result<Storage, BackendError> {
    let name = path.display().to_string();
    let (file, new) = open_or_make(path, &name, wish)?;
    let mut made = new.then(|| Made::File(path.to_owned()));
    check_type(&file, &name)?;
    claim(&file, &name, wish.read_only, made.as_ref())?;
    match prepare(&file, path, &name, wish, &mut made) {
        Ok(prepared) => Ok(describe(file, name, wish, prepared, made)),
        Err(error) => {
            made.iter().for_each(|made| made.take_back(&file));
            let _ = ioctl::unlock(&file);
            Err(error)
        }
    }
}

/// What was settled and learnt about a file that is ours.
struct Prepared {
    size: u64,
    direct: Option<Direct>,
    grain: u32,
    identity: Vec<u8>,
    remarks: Vec<String>,
}

/// Settles and learns it. What is made of the file for that is noted at once, so that it can be taken back.
fn prepare(
    file: &File,
    path: &Path,
    name: &str,
    wish: Wish,
    made: &mut Option<Made>,
) -> Result<Prepared, BackendError> {
    let size = settle_size(file, name, wish, made)?;
    if matches!(made, Some(Made::File(_))) {
        // The name is as durable as the bytes that will be acknowledged under it.
        sync_parent(path).map_err(|error| BackendError::new(name, error, "see to the folder it lies in"))?;
    }
    let mut remarks = Vec::new();
    let direct = if wish.buffered {
        remarks.push("buffered: chosen".to_owned());
        None
    } else {
        turn_direct_on(file, size).inspect_err(|reason| remarks.push(format!("buffered: {reason}"))).ok()
    };
    let error = |error: io::Error| BackendError::new(name, error, "check the file system");
    let_it_wait(file).map_err(error)?;
    let metadata = file.metadata().map_err(error)?;
    let grain = u32::try_from(metadata.blksize()).unwrap_or(0);
    Ok(Prepared { size, direct, grain, identity: identity(file, &metadata), remarks })
}

fn open_or_make(path: &Path, name: &str, wish: Wish) -> Result<(File, bool), BackendError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!wish.read_only).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
    let error = match options.open(path) {
        Ok(file) => return Ok((file, false)),
        Err(error) => error,
    };
    if error.kind() == io::ErrorKind::NotFound && wish.size.is_some() && !wish.read_only {
        let made = options.create_new(true).mode(0o600).open(path);
        return made.map(|file| (file, true)).map_err(|error| open_error(name, &error));
    }
    Err(open_error(name, &error))
}

fn open_error(name: &str, error: &io::Error) -> BackendError {
    let remedy = match error.raw_os_error() {
        Some(libc::ENOENT) => "check the path, or give a size to create it",
        Some(libc::EACCES | libc::EPERM) => "let the user that farside runs as read and write it, or set read_only",
        Some(libc::EROFS) => "set read_only",
        Some(libc::EISDIR) => "name a file in that folder",
        Some(libc::EMFILE) => "raise the limit of open files (ulimit -n, LimitNOFILE=)",
        _ => "check the path",
    };
    BackendError::new(name, error, remedy)
}

fn check_type(file: &File, name: &str) -> Result<(), BackendError> {
    let kind = file.metadata().map_err(|error| open_error(name, &error))?.file_type();
    if kind.is_file() {
        Ok(())
    } else if kind.is_block_device() {
        Err(BackendError::new(name, "is a block device", "serve it as a device"))
    } else {
        Err(BackendError::new(name, "is no regular file", "serve a regular file or a block device"))
    }
}

/// Locks the file against other servers of it, and looks for other users that do not take that kind of lock. A file that was
/// made here and that somebody else got hold of before is theirs.
fn claim(file: &File, name: &str, read_only: bool, made: Option<&Made>) -> Result<(), BackendError> {
    let taken = |by: String| BackendError::new(name, format!("is in use by {by}"), "stop that, or serve another file");
    let end = Instant::now() + holder::LINGER;
    while let Err(error) = ioctl::lock(file, !read_only) {
        if error.raw_os_error() != Some(libc::EWOULDBLOCK) {
            made.inspect(|made| made.take_back(file));
            let reason = format!("cannot be locked: {error}");
            return Err(BackendError::new(name, reason, "serve it from a file system with locks"));
        }
        match holder::of_file(file, true) {
            Some(holder) if holder.alive => return Err(taken(holder.name)),
            _ if Instant::now() >= end => return Err(taken("a process that ended and is not gone yet".into())),
            _ => thread::sleep(Duration::from_millis(20)),
        }
    }
    match holder::of_file(file, false) {
        Some(holder) if !read_only => {
            let _ = ioctl::unlock(file);
            Err(taken(holder.name))
        }
        _ => Ok(()),
    }
}

fn settle_size(file: &File, name: &str, wish: Wish, made: &mut Option<Made>) -> Result<u64, BackendError> {
    let error = |error: io::Error| BackendError::new(name, error, "check the file system");
    let len = file.metadata().map_err(error)?.len();
    match wish.size {
        None if len == 0 => Err(BackendError::new(name, "is empty", "give a size")),
        Some(size) if len == 0 && !wish.read_only => {
            file.set_len(size).map_err(|error| {
                BackendError::new(name, format!("cannot be made {size} bytes long: {error}"), "choose a smaller size")
            })?;
            made.get_or_insert(Made::Size);
            file.sync_all().map_err(error)?;
            Ok(size)
        }
        Some(size) if size != len => Err(BackendError::new(
            name,
            format!("has {len} bytes and the size asked for is {size}"),
            "leave the size out, or change the file with truncate",
        )),
        _ => Ok(len),
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    File::open(parent)?.sync_all()
}

fn describe(file: File, name: String, wish: Wish, prepared: Prepared, made: Option<Made>) -> Storage {
    let Prepared { size, direct, grain, identity, remarks } = prepared;
    let open = OpenFile::new(file, Kind::File, wish.read_only, direct, size);
    let punches = !wish.read_only && try_punch(open.file(), size);
    if !punches {
        open.refuse(RangeCall::Punch);
    }
    let info = BackendInfo {
        name,
        size,
        block_size: direct.map_or(512, |direct| direct.offset),
        preferred_write: grain,
        preferred_deallocate: if punches { grain } else { 0 },
        optimal_write: 0,
        write_cache: !wish.read_only,
        read_only: wish.read_only,
        // What is behind a file system is not asked for.
        rotational: false,
        abilities: Abilities { deallocate: punches, write_zeroes: !wish.read_only, deallocated_reads_zero: punches },
        max_transfer: 1 << 30,
        remarks,
        identity,
    };
    Storage::new(open, info, made)
}

/// Whether holes can be punched: tried behind the end, where there is nothing to lose.
fn try_punch(file: &File, size: u64) -> bool {
    let Ok(offset) = i64::try_from(size.next_multiple_of(1 << 20)) else { return false };
    fallocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, 4096).is_ok()
}

/// The inode and its birth, as inode numbers are used again; where no birth is known, the file system's number instead. It
/// stays when the file is renamed and when device numbers change.
fn identity(file: &File, metadata: &Metadata) -> Vec<u8> {
    let mut identity = b"file".to_vec();
    identity.extend(metadata.ino().to_le_bytes());
    match ioctl::statx(file).ok().and_then(|statx| statx.born) {
        Some((seconds, nanoseconds)) => {
            identity.extend(seconds.to_le_bytes());
            identity.extend(nanoseconds.to_le_bytes());
        }
        None => {
            let number = nix::sys::statvfs::fstatvfs(file).map_or(0, |statvfs| statvfs.filesystem_id());
            identity.extend(if number == 0 { metadata.dev() } else { number }.to_le_bytes());
        }
    }
    identity
}
