//! A file or block device behind a namespace: the description, and queues on the reactor's ring.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

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
}

impl Storage {
    pub(super) fn new(file: OpenFile, info: BackendInfo) -> Self {
        Self { file: Arc::new(file), info }
    }

    #[cfg(test)]
    pub(super) fn descriptor(&self) -> &File {
        self.file.file()
    }
}

impl Backend for Storage {
    fn info(&self) -> BackendInfo {
        BackendInfo { size: self.file.size(), ..self.info.clone() }
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
