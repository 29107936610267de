//! A small storage appliance on farside's public API: a thin disk in memory that can be frozen.
//!
//! The disk holds only blocks that were written (others read as zeroes), gives space back when the host trims, and serves a
//! second, read-only namespace that shows it as it was when the appliance last received SIGUSR1.
//!
//! ```text
//! cargo run --release --example appliance -- 192.0.2.1:4420 [auto|verbs|soft]
//! kill -USR1 PID       # freeze what namespace 2 shows
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use farside::ProviderChoice;
use farside::backend::{Abilities, BackendInfo, Blocking, BlockingStorage, IoError};
use farside::target::{NamespaceSpec, SubsystemSpec, Target};
use nix::sys::signal::{SigSet, Signal};

const BLOCK: usize = 4096;
const SIZE: u64 = 256 << 20;
const NQN: &str = "nqn.2026-11.io.farside:appliance";

/// Blocks by number. A frozen copy shares every block that was not written since.
type Blocks = HashMap<u64, Arc<[u8; BLOCK]>>;

/// The disk that hosts write.
#[derive(Clone, Debug, Default)]
struct Thin(Arc<RwLock<Blocks>>);

/// The disk as it was.
#[derive(Clone, Debug, Default)]
struct Frozen(Arc<RwLock<Blocks>>);

impl Thin {
    fn freeze_into(&self, frozen: &Frozen) {
        let blocks = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        *frozen.0.write().unwrap_or_else(PoisonError::into_inner) = blocks;
    }

    fn held(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl BlockingStorage for Thin {
    fn info(&self) -> BackendInfo {
        info("thin disk", false)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        read(&self.0, offset, into);
        Ok(())
    }

    fn write_at(&self, offset: u64, from: &[u8], _fua: bool) -> Result<(), IoError> {
        let mut blocks = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for (number, piece) in (offset / BLOCK as u64..).zip(from.chunks_exact(BLOCK)) {
            let block: [u8; BLOCK] = piece.try_into().map_err(|_| IoError::OutOfRange)?;
            blocks.insert(number, Arc::new(block));
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }

    fn deallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let mut blocks = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for number in offset / BLOCK as u64..(offset + len) / BLOCK as u64 {
            blocks.remove(&number);
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, len: u64, _deallocate: bool, _fua: bool) -> Result<(), IoError> {
        self.deallocate(offset, len)
    }
}

impl BlockingStorage for Frozen {
    fn info(&self) -> BackendInfo {
        info("frozen disk", true)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        read(&self.0, offset, into);
        Ok(())
    }

    fn write_at(&self, _offset: u64, _from: &[u8], _fua: bool) -> Result<(), IoError> {
        Err(IoError::ReadOnly)
    }

    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }
}

fn read(blocks: &RwLock<Blocks>, offset: u64, into: &mut [u8]) {
    let blocks = blocks.read().unwrap_or_else(PoisonError::into_inner);
    for (number, piece) in (offset / BLOCK as u64..).zip(into.chunks_exact_mut(BLOCK)) {
        match blocks.get(&number) {
            Some(block) => piece.copy_from_slice(&block[..]),
            None => piece.fill(0),
        }
    }
}

fn info(name: &str, read_only: bool) -> BackendInfo {
    BackendInfo {
        name: name.into(),
        size: SIZE,
        block_size: BLOCK as u32,
        preferred_write: BLOCK as u32,
        preferred_deallocate: BLOCK as u32,
        optimal_write: 0,
        write_cache: false,
        read_only,
        rotational: false,
        abilities: Abilities { deallocate: !read_only, write_zeroes: !read_only, deallocated_reads_zero: true },
        max_transfer: 1 << 20,
        remarks: Vec::new(),
        identity: name.as_bytes().to_vec(),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address: SocketAddr = arguments.next().ok_or("usage: appliance ADDRESS:PORT [auto|verbs|soft]")?.parse()?;
    let provider: ProviderChoice = arguments.next().as_deref().unwrap_or("auto").parse()?;

    let mut signals = SigSet::empty();
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1].into_iter().for_each(|signal| signals.add(signal));
    signals.thread_block()?;

    let (disk, frozen) = (Thin::default(), Frozen::default());
    let subsystem = SubsystemSpec::new(NQN)
        .namespace(NamespaceSpec::new(1, Arc::new(Blocking::new(disk.clone(), 2)?)))
        .namespace(NamespaceSpec::new(2, Arc::new(Blocking::new(frozen.clone(), 1)?)));
    let target = Target::builder().subsystem(subsystem).listen(address).start_on(provider)?;
    println!("nvme connect -t rdma -a {} -s {} -n {NQN}", address.ip(), address.port());

    while signals.wait()? == Signal::SIGUSR1 {
        disk.freeze_into(&frozen);
        println!("frozen with {} blocks", disk.held());
    }
    target.shutdown();
    println!("stopped with {} blocks", disk.held());
    Ok(())
}
