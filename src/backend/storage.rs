//! A file or block device behind a namespace: the description, and queues on the reactor's ring.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::ioctl::{self, DirectAnswer};
use super::open_file::{Direct, Kind, OpenFile};
use super::ring::RingQueue;
use super::{Backend, BackendError, BackendInfo, IoQueue, QueueContext};

/// A file or block device behind a namespace. Made by [`super::open`].
#[derive(Debug)]
pub struct Storage {
    file: Arc<OpenFile>,
    info: BackendInfo,
    /// To be taken back unless it comes to be served.
    made: Mutex<Option<Made>>,
}

/// What was made of a file to serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Made {
    /// The file, under this name.
    File(PathBuf),
    /// Its size: it was empty.
    Size,
}

impl Made {
    /// Takes it back, if the file is still what was made of it: under that name, and never written to.
    pub(super) fn take_back(&self, file: &File) {
        let Ok(ours) = file.metadata() else { return };
        if ours.blocks() != 0 {
            return;
        }
        // What fails here leaves an empty file: there is nobody to tell more than the error that led here says.
        let _ = match self {
            Self::File(path) if is_at(path, &ours) => fs::remove_file(path),
            Self::File(_) => Ok(()),
            Self::Size => file.set_len(0),
        };
    }
}

/// Whether a name leads to this file.
fn is_at(path: &Path, file: &fs::Metadata) -> bool {
    fs::symlink_metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (file.dev(), file.ino()))
}

impl Storage {
    pub(super) fn new(file: OpenFile, info: BackendInfo, made: Option<Made>) -> Self {
        Self { file: Arc::new(file), info, made: Mutex::new(made) }
    }

    /// The open file, for what works on it beside the ring.
    pub(super) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    fn take_made(&self) -> Option<Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    #[cfg(test)]
    pub(super) fn descriptor(&self) -> &File {
        self.file.file()
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // The descriptor is still open: its lock keeps others out, and its inode cannot have become another file's.
        if let Some(made) = self.take_made() {
            made.take_back(self.file.file());
        }
    }
}

impl Backend for Storage {
    fn info(&self) -> BackendInfo {
        BackendInfo { size: self.file.size(), ..self.info.clone() }
    }

    fn keep(&self) {
        self.take_made();
    }

    fn open_queue(&self, context: &QueueContext) -> Result<Box<dyn IoQueue>, BackendError> {
        let ring = context.ring.as_ref().ok_or_else(|| {
            BackendError::new(&self.info.name, "this reactor has no io_uring", "files and devices need io_uring")
        })?;
        Ok(Box::new(RingQueue::open(ring, self.file.clone())))
    }

    fn refresh(&self) -> Result<BackendInfo, BackendError> {
        let size = size(self.file.file(), self.file.kind())
            .map_err(|error| BackendError::new(&self.info.name, error, "see whether the storage is still there"))?;
        let block = u64::from(self.info.block_size);
        if size % block != 0 {
            let reason = format!("has {size} bytes, no multiple of its blocks of {block}");
            return Err(BackendError::new(&self.info.name, reason, "give it a size that is one (truncate -s)"));
        }
        self.file.set_size(size);
        Ok(self.info())
    }
}

/// Bytes right now.
pub(super) fn size(file: &File, kind: Kind) -> io::Result<u64> {
    match kind {
        Kind::File => Ok(file.metadata()?.len()),
        Kind::Device => (&*file).seek(SeekFrom::End(0)),
    }
}

/// Takes back the O_NONBLOCK that kept the open from waiting (a pipe, a drive without a medium). With it the ring would not
/// wait either where a file system has no asynchronous way: every such operation would come back with EAGAIN.
pub(super) fn let_it_wait(file: &File) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Turns O_DIRECT on where it works: as statx says, else by trying. The reason where it does not.
pub(super) fn turn_direct_on(file: &File, size: u64) -> Result<Direct, String> {
    let said = ioctl::statx(file).map_err(|error| error.to_string())?.direct;
    let candidates = match said {
        Some(DirectAnswer::Refused) => return Err("the file system refuses O_DIRECT".into()),
        Some(DirectAnswer::Aligned(direct)) => vec![direct],
        None => vec![Direct { memory: 512, offset: 512 }, Direct { memory: 4096, offset: 4096 }],
    };
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL).map_err(|errno| errno.desc())?);
    if fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).is_err() {
        return Err("the file system refuses O_DIRECT".into());
    }
    let usable =
        |direct: &Direct| direct.offset <= MAX_UNIT && direct.memory <= MAX_UNIT && try_direct(file, *direct, size);
    if let Some(direct) = candidates.iter().copied().find(usable) {
        return Ok(Direct { offset: direct.offset.max(512), ..direct });
    }
    fcntl(file, FcntlArg::F_SETFL(flags & !OFlag::O_DIRECT)).map_err(|errno| errno.desc())?;
    Err(format!("O_DIRECT needs more than {MAX_UNIT} byte alignment here"))
}

/// The largest LBA, and the alignment that buffers have.
const MAX_UNIT: u32 = 4096;

/// Whether a read with such an alignment is taken: the last unit of the file, as an address that is aligned no better.
fn try_direct(file: &File, direct: Direct, size: u64) -> bool {
    let (memory, unit) = (direct.memory as usize, direct.offset.max(1) as usize);
    let mut bytes = vec![0; unit + 3 * MAX_UNIT as usize];
    let page = bytes.as_ptr().align_offset(MAX_UNIT as usize);
    let start = page + memory % MAX_UNIT as usize;
    let offset = (size / unit as u64).saturating_sub(1) * unit as u64;
    match file.read_at(&mut bytes[start..start + unit], offset) {
        Ok(_) => true,
        // A bad block is no question of alignment.
        Err(error) => error.raw_os_error() != Some(libc::EINVAL),
    }
}
