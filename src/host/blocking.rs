//! Calls that drive the host until they are done.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme::Completion;

use super::error::{HostError, HostErrorKind, IoFailure};
use super::host::Host;
use super::io::{Command, Op};
use super::options::HostOptions;
use super::queue::Purpose;
use super::wire::{self, DISCOVERY_ENTRY, DiscoveryEntry, IdentifyNamespace, Sqe};
use super::zones::{self, ZonedNamespace};
use crate::rdma::Provider;

/// Well-known name of discovery subsystems.
const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Bytes of the discovery log read at a time, so that logs of any length are read in pieces.
const PIECE: usize = 4096;

/// Entries taken from a discovery log, whatever it claims to hold.
const MOST_ENTRIES: u64 = 16_384;

/// Types of identification descriptors (NIDT): UUID, command set identifier.
const UUID_TYPE: u8 = 3;
const CSI_TYPE: u8 = 4;

/// How often a discovery log may change while it is read.
const MOST_CHANGES: u32 = 10;

impl<P: Provider> Host<P> {
    /// Connects to a subsystem and waits until commands can be submitted.
    pub fn connect(
        provider: Arc<P>,
        address: SocketAddr,
        subnqn: impl Into<String>,
        options: HostOptions,
    ) -> Result<Self, HostError> {
        // A few steps, each with the limit of its own.
        let limit = options.timeout.saturating_mul(4);
        let mut host = Self::start(provider, address, subnqn, options)?;
        host.run("connect", limit, |host| {
            host.is_ready().then_some(Ok(())).or_else(|| host.failure().cloned().map(Err))
        })??;
        Ok(host)
    }

    /// Drives the host until `done` has a value.
    pub fn run<T>(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, HostError> {
        let deadline = self.now() + limit;
        loop {
            self.poll();
            if let Some(value) = done(self) {
                self.send_waiting();
                return Ok(value);
            }
            let now = self.now();
            if now >= deadline {
                return Err(HostError::new(what, HostErrorKind::TimedOut(limit), ""));
            }
            self.wait((deadline - now).min(Duration::from_millis(500)));
        }
    }

    /// One admin command without data, with its completion.
    pub fn admin(&mut self, what: &str, sqe: Sqe) -> Result<Completion, HostError> {
        let limit = self.options.timeout;
        let ready = |host: &mut Self| host.is_ready().then_some(Ok(())).or_else(|| host.failure().cloned().map(Err));
        let completion = loop {
            self.run(what, limit, ready)??;
            while self.next_admin_done().is_some() {}
            self.send_admin(Purpose::Admin, sqe);
            let answer = self.run(what, limit, |host| match host.next_admin_done() {
                Some(completion) => Some(Some(completion)),
                None => (!host.is_ready()).then_some(None),
            })?;
            // Lost on the way: what is asked here may be asked twice.
            if let Some(completion) = answer {
                break completion;
            }
        };
        if completion.status.is_success() {
            Ok(completion)
        } else {
            let kind = HostErrorKind::Status { status: completion.status, result: completion.result };
            Err(HostError::new(what, kind, ""))
        }
    }

    /// One admin command that fetches `len` bytes.
    pub fn admin_read(&mut self, what: &str, sqe: Sqe, len: usize) -> Result<Vec<u8>, HostError> {
        let short = || HostError::usage(what, "no free buffer", "give the host more memory");
        let mut buffer = self.take_buffer(len).ok_or_else(short)?;
        buffer.as_mut_slice().fill(0);
        let sgl = wire::keyed(buffer.addr(), len as u32, self.rkey(), false);
        let result = self.admin(what, sqe.sgl(sgl));
        let bytes = buffer.as_slice().to_vec();
        // After a limit ran out the target may still write into it: then it is not used again.
        if !matches!(result, Err(HostError { kind: HostErrorKind::TimedOut(_), .. })) {
            self.give_buffer(buffer);
        }
        result.map(|_| bytes)
    }

    /// Namespace identifiers that are active.
    pub fn active_namespaces(&mut self) -> Result<Vec<u32>, HostError> {
        let mut all = Vec::new();
        loop {
            let after = all.last().copied().unwrap_or(0);
            let bytes = self.admin_read("Identify (active namespaces)", wire::identify(0x02, after, 0), 4096)?;
            let ids: Vec<u32> = bytes.chunks_exact(4).map(|id| wire::u32_at(id, 0)).take_while(|id| *id != 0).collect();
            if ids.iter().zip(std::iter::once(&after).chain(&ids)).any(|(id, before)| id <= before) {
                return Err(HostError::protocol("Identify (active namespaces)", "identifiers do not ascend"));
            }
            let whole = ids.len() == 1024;
            all.extend(ids);
            if !whole || all.len() >= 1 << 20 {
                return Ok(all);
            }
        }
    }

    /// What a namespace is.
    pub fn namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace, HostError> {
        let what = format!("Identify namespace {nsid}");
        let bytes = self.admin_read(&what, wire::identify(0x00, nsid, 0), 4096)?;
        IdentifyNamespace::read(nsid, &bytes)
            .ok_or_else(|| HostError::usage(what, "there is no such namespace", "list those that there are"))
    }

    /// UUID of a namespace, if it has one (Identify CNS 03h).
    pub fn namespace_uuid(&mut self, nsid: u32) -> Result<Option<[u8; 16]>, HostError> {
        let uuid = self.namespace_descriptor(nsid, UUID_TYPE)?;
        Ok(uuid.and_then(|uuid| uuid.try_into().ok()))
    }

    /// A namespace's identification descriptor of a type (Identify CNS 03h).
    fn namespace_descriptor(&mut self, nsid: u32, wanted: u8) -> Result<Option<Vec<u8>>, HostError> {
        let bytes = self.admin_read("Identify namespace descriptors", wire::identify(0x03, nsid, 0), 4096)?;
        let mut rest = &bytes[..];
        while let [kind, len, _, _, tail @ ..] = rest {
            let (kind, len) = (*kind, usize::from(*len));
            if kind == 0 || len == 0 || len > tail.len() {
                break;
            }
            if kind == wanted {
                return Ok(tail.get(..len).map(<[u8]>::to_vec));
            }
            rest = &tail[len..];
        }
        Ok(None)
    }

    /// What a zoned namespace says of its zones; `None`: it has none.
    pub fn zones(&mut self, nsid: u32) -> Result<Option<ZonedNamespace>, HostError> {
        if self.namespace_descriptor(nsid, CSI_TYPE)?.as_deref() != Some(&[zones::CSI]) {
            return Ok(None);
        }
        let bytes = self.admin_read("Identify zoned namespace", zones::identify_zoned(5, nsid), 4096)?;
        Ok(ZonedNamespace::read(&bytes))
    }

    /// Runs one I/O command on the queue with the most room.
    pub fn io(&mut self, mut command: Command) -> Result<Option<crate::mem::Buffer>, HostError> {
        let limit = self.options.timeout.saturating_mul(3);
        command.token = u64::MAX;
        let mut pending = Some(command);
        let done = self.run("I/O command", limit, |host| {
            if let Some(command) = pending.take() {
                let queue = (0..host.queues()).max_by_key(|queue| host.room(*queue)).unwrap_or(0);
                pending = host.submit(queue, command).err();
                host.poll();
            }
            match host.next_done() {
                Some(done) => Some(Ok(done)),
                None => host.failure().cloned().map(Err),
            }
        })??;
        match done.result {
            Ok(()) => Ok(done.data),
            Err(failure) => {
                if let Some(buffer) = done.data {
                    self.give_buffer(buffer);
                }
                Err(match failure {
                    IoFailure::Status(status) => {
                        HostError::new("I/O command", HostErrorKind::Status { status, result: 0 }, "")
                    }
                    other => HostError::lost("I/O command", other),
                })
            }
        }
    }

    /// Reads bytes. Offset and length are whole blocks of the namespace.
    pub fn read_at(&mut self, namespace: &IdentifyNamespace, offset: u64, bytes: &mut [u8]) -> Result<(), HostError> {
        let step = self.max_transfer();
        for (at, chunk) in bytes.chunks_mut(step).enumerate() {
            let command = self.transfer(namespace, Op::Read, offset + (at * step) as u64, chunk.len())?;
            if let Some(buffer) = self.io(command)? {
                chunk.copy_from_slice(buffer.as_slice());
                self.give_buffer(buffer);
            }
        }
        Ok(())
    }

    /// Writes bytes. Offset and length are whole blocks of the namespace.
    pub fn write_at(&mut self, namespace: &IdentifyNamespace, offset: u64, bytes: &[u8]) -> Result<(), HostError> {
        let step = self.max_transfer();
        for (at, chunk) in bytes.chunks(step).enumerate() {
            let mut command =
                self.transfer(namespace, Op::Write { fua: false }, offset + (at * step) as u64, chunk.len())?;
            if let Some(buffer) = &mut command.data {
                buffer.as_mut_slice().copy_from_slice(chunk);
            }
            if let Some(buffer) = self.io(command)? {
                self.give_buffer(buffer);
            }
        }
        Ok(())
    }

    /// Puts everything written onto stable storage.
    pub fn flush(&mut self, namespace: &IdentifyNamespace) -> Result<(), HostError> {
        let command = Command { token: 0, op: Op::Flush, nsid: namespace.nsid, slba: 0, blocks: 0, data: None };
        self.io(command).map(|_| ())
    }

    fn transfer(
        &mut self,
        namespace: &IdentifyNamespace,
        op: Op,
        offset: u64,
        len: usize,
    ) -> Result<Command, HostError> {
        let size = u64::from(namespace.block_size);
        if !offset.is_multiple_of(size) || !(len as u64).is_multiple_of(size) {
            return Err(HostError::usage(
                format!("{len} bytes at {offset}"),
                "not whole blocks",
                format!("{size} B each"),
            ));
        }
        let short = || HostError::usage("I/O command", "no free buffer", "give the host more memory");
        let data = self.take_buffer(len).ok_or_else(short)?;
        let blocks = (len as u64 / size) as u32;
        Ok(Command { token: 0, op, nsid: namespace.nsid, slba: offset / size, blocks, data: Some(data) })
    }

    /// Reads the whole discovery log: in pieces, and again from the start when it changed meanwhile.
    pub fn discovery_log(&mut self) -> Result<Vec<DiscoveryEntry>, HostError> {
        for _ in 0..MOST_CHANGES {
            let header = self.log_piece(0, DISCOVERY_ENTRY)?;
            let (generation, count) = (wire::u64_at(&header, 0), wire::u64_at(&header, 8));
            if count > MOST_ENTRIES {
                let why = format!("it claims {count} entries");
                return Err(HostError::protocol("discovery log", why));
            }
            let mut bytes = Vec::new();
            let total = count as usize * DISCOVERY_ENTRY;
            while bytes.len() < total {
                let len = PIECE.min(total - bytes.len());
                bytes.extend(self.log_piece((DISCOVERY_ENTRY + bytes.len()) as u64, len)?);
            }
            if wire::u64_at(&self.log_piece(0, 16)?, 0) == generation {
                return Ok(bytes.chunks(DISCOVERY_ENTRY).filter_map(DiscoveryEntry::read).collect());
            }
        }
        Err(HostError::protocol("discovery log", "it never stops changing"))
    }

    fn log_piece(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, HostError> {
        self.admin_read("discovery log", wire::get_log_page(0x70, 0, offset, len as u32, false), len)
    }
}

/// Asks the discovery controller at an address what can be connected to.
pub fn discover<P: Provider>(
    provider: Arc<P>,
    address: SocketAddr,
    options: HostOptions,
) -> Result<Vec<DiscoveryEntry>, HostError> {
    let options = HostOptions { io_queues: 0, memory: 2 << 20, events: false, reconnect: None, ..options };
    Host::connect(provider, address, DISCOVERY_NQN, options)?.discovery_log()
}
