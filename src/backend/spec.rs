//! What to open, in words of the configuration.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::block;
use super::file::{self, Wish};
use super::{Backend, BackendError, FaultPlan, Faulty, Memory, MemoryZones, Null};

/// What to open and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    /// Where the bytes are.
    pub source: Source,
    /// The LBA size that is wanted: 512 or 4096. `None`: the smallest that the storage takes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: bool,
    /// Use the page cache even where O_DIRECT works.
    pub buffered: bool,
    /// Zones of memory.
    pub zones: Option<MemoryZones>,
    /// Faults before it, for tests.
    pub faults: Option<FaultPlan>,
}

/// Where a namespace's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A regular file.
    File {
        /// Where.
        path: PathBuf,
        /// Bytes: made that long (sparse) when it is missing or empty, checked otherwise.
        size: Option<u64>,
    },
    /// A block device.
    Device {
        /// Where.
        path: PathBuf,
    },
    /// A RAM disk.
    Memory {
        /// Bytes.
        size: u64,
    },
    /// Writes are forgotten, reads return zeroes.
    Null {
        /// Bytes.
        size: u64,
    },
}

impl Source {
    /// Where a file or device is.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } | Self::Device { path } => Some(path),
            Self::Memory { .. } | Self::Null { .. } => None,
        }
    }

    /// Whether both are the same file or device, by whatever names.
    pub fn is_same(&self, other: &Self) -> bool {
        self.path().zip(other.path()).is_some_and(|(one, other)| same_place(one, other))
    }
}

/// Whether two paths lead to one file or device.
pub(crate) fn same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| std::fs::metadata(path).ok().map(|metadata| place_of(&metadata));
    one == other || place(one).is_some_and(|found| place(other) == Some(found))
}

/// What tells a file or device from others, whatever its name.
pub(crate) fn place_of(metadata: &Metadata) -> (u64, u64) {
    let device = metadata.file_type().is_block_device();
    if device { (u64::MAX, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) }
}

impl BackendSpec {
    /// A source with the defaults of everything else.
    pub fn new(source: Source) -> Self {
        Self { source, block_size: None, read_only: false, buffered: false, zones: None, faults: None }
    }

    /// The LBA size of a namespace on the opened backend.
    pub fn lba(&self, backend: &dyn Backend) -> u32 {
        self.block_size.unwrap_or_else(|| match backend.zoned() {
            Some(zoned) => zoned.block_size(),
            None => backend.info().block_size,
        })
    }
}

/// Opens and claims what a namespace is to stand on.
pub fn open(spec: &BackendSpec) -> Result<Arc<dyn Backend>, BackendError> {
    check_wish(spec)?;
    let backend: Arc<dyn Backend> = match &spec.source {
        Source::File { path, size } => {
            let wish = Wish { size: *size, read_only: spec.read_only, buffered: spec.buffered };
            Arc::new(file::open(path, wish)?)
        }
        Source::Device { path } => block::open(path, spec.read_only, spec.buffered)?,
        Source::Memory { size } => match &spec.zones {
            Some(zones) => Arc::new(Memory::zoned(*size, zones, spec.block_size.unwrap_or(512))?),
            None => Arc::new(Memory::new(*size)),
        },
        Source::Null { size } => Arc::new(Null::new(*size)),
    };
    check(spec, &*backend)?;
    match spec.faults {
        Some(plan) => Ok(Arc::new(Faulty::new(backend, plan))),
        None => Ok(backend),
    }
}

/// What can be refused before anything is touched: no file is made only to be refused.
fn check_wish(spec: &BackendSpec) -> Result<(), BackendError> {
    let (name, size) = match &spec.source {
        Source::File { path, size } => (path.display().to_string(), *size),
        Source::Device { path } => (path.display().to_string(), None),
        Source::Memory { size } => ("memory".into(), Some(*size)),
        Source::Null { size } => ("null".into(), Some(*size)),
    };
    if spec.zones.is_some() && !matches!(spec.source, Source::Memory { .. }) {
        return Err(BackendError::new(name, "only memory can be cut into zones", "leave zone_size out"));
    }
    let lba = spec.block_size.unwrap_or(512);
    if !matches!(lba, 512 | 4096) {
        return Err(BackendError::new(name, format!("a block size of {lba} bytes"), "set block_size to 512 or 4096"));
    }
    match size {
        Some(0) => Err(BackendError::new(name, "it is empty: a size of 0 bytes", "give it a size, such as 1G")),
        Some(size) if size % u64::from(lba) != 0 => Err(BackendError::new(
            name,
            format!("its size, {size} bytes, is not a multiple of the block size {lba}"),
            "change the size or the block_size",
        )),
        Some(size) if size > MAX_SIZE => {
            Err(BackendError::new(name, format!("{size} bytes"), "choose a size up to 8 EiB"))
        }
        _ => Ok(()),
    }
}

/// Offsets of files are signed.
const MAX_SIZE: u64 = i64::MAX as u64;

fn check(spec: &BackendSpec, backend: &dyn Backend) -> Result<(), BackendError> {
    let info = backend.info();
    let lba = spec.lba(backend);
    let error = |reason: String, remedy: String| Err(BackendError::new(&info.name, reason, remedy));
    if lba < info.block_size {
        return error(
            format!("needs blocks of {} bytes, {lba} are configured", info.block_size),
            format!("set block_size to {}, or buffered = true", info.block_size),
        );
    }
    if info.size == 0 {
        return error("it is empty: a size of 0 bytes".into(), "give it a size, such as with size = \"1G\"".into());
    }
    if !info.size.is_multiple_of(u64::from(lba)) {
        return error(
            format!("its size, {} bytes, is not a multiple of the block size {lba}", info.size),
            "change the size or the block_size".into(),
        );
    }
    if let Some(zoned) = backend.zoned().filter(|zoned| zoned.block_size() != lba) {
        return error(
            format!("its zones are counted in blocks of {} bytes, {lba} are configured", zoned.block_size()),
            format!("set block_size to {}", zoned.block_size()),
        );
    }
    if spec.read_only && !info.read_only {
        return error("cannot be read-only".into(), "leave read_only out".into());
    }
    Ok(())
}
