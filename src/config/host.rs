//! What a machine has against a configuration that is sound in itself.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{AccessFlags, access};

use super::keys::{HostSpec, read_secret};
use super::problem::Problem;
use super::size::Bytes;
use super::{Config, ListenAddress, NamespaceSpec, Options, SubsystemSpec};
use crate::backend::{Source, check_zones, place_of};
use crate::target::{self, TargetError};

/// Something to be looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Addition<'a> {
    /// A subsystem's namespaces.
    Subsystem(&'a SubsystemSpec),
    /// A namespace of the subsystem of this NQN.
    Namespace(&'a str, &'a NamespaceSpec),
    /// A host of the subsystem of this NQN, with rules of its own.
    Host(&'a str, &'a HostSpec),
    /// An address to listen on.
    Listener(&'a ListenAddress),
}

pub(super) fn check(config: &Config, name: &str) -> Vec<Problem> {
    let subsystems = config.subsystems.iter().map(Addition::Subsystem);
    let all: Vec<_> = subsystems.chain(config.listeners.iter().map(Addition::Listener)).collect();
    let mut problems = check_additions(config, name, &all);
    // Arguments may have changed what the file's reader had looked at.
    if let Err(TargetError { object: key, reason, remedy }) = target::Options::from(&config.options).check() {
        problems.push(Problem { file: name.to_owned(), line: None, key, reason, remedy });
    } else if let Err((reason, remedy)) = check_memlock(&config.options) {
        problems.push(Problem { file: name.to_owned(), line: None, key: "options.pool_size".into(), reason, remedy });
    }
    problems
}

/// What the machine has against these parts of a configuration, which has them beside others.
pub(super) fn check_additions(config: &Config, name: &str, added: &[Addition<'_>]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut add = |line: Option<usize>, key: &str, (reason, remedy): (String, String)| {
        problems.push(Problem { file: name.to_owned(), line, key: key.to_owned(), reason, remedy });
    };
    let is_new = |nqn: &str, namespace: &NamespaceSpec| {
        added.iter().any(|one| match one {
            Addition::Subsystem(spec) => spec.nqn == nqn,
            Addition::Namespace(of, spec) => *of == nqn && spec.nsid == namespace.nsid,
            Addition::Host(..) | Addition::Listener(_) => false,
        })
    };
    let mut served = HashSet::new();
    let all = config.subsystems.iter().flat_map(|one| one.namespaces.iter().map(move |namespace| (one, namespace)));
    let (new, old): (Vec<_>, Vec<_>) = all.partition(|(one, namespace)| is_new(&one.nqn, namespace));
    served.extend(old.iter().filter_map(|(_, namespace)| check_source(namespace).ok().flatten()));
    for (subsystem, namespace) in new {
        let key = format!("namespace {} of {}", namespace.nsid, subsystem.nqn);
        match check_source(namespace) {
            Err(problem) => add(namespace.line, &key, problem),
            Ok(Some(inode)) if !served.insert(inode) => {
                add(
                    namespace.line,
                    &key,
                    ("is another namespace's file or device under another name".into(), "serve it once".into()),
                );
            }
            Ok(_) => {}
        }
    }
    let hosts = added.iter().flat_map(|one| match one {
        Addition::Subsystem(spec) => spec.host_specs.iter().map(|host| (spec.nqn.as_str(), host)).collect(),
        Addition::Host(nqn, host) => vec![(*nqn, *host)],
        Addition::Namespace(..) | Addition::Listener(_) => Vec::new(),
    });
    for (nqn, host) in hosts {
        for refused in host.key_files().filter_map(|file| read_secret(file).err()) {
            let TargetError { object, reason, remedy } = refused;
            add(host.line, &format!("host {} of {nqn}", host.nqn), (format!("{object}: {reason}"), remedy));
        }
    }
    for one in added {
        let Addition::Listener(listener) = one else { continue };
        let address = listener.resolve().and_then(|address| {
            // A socket on any port there: whether the address is ours, whatever transport comes later.
            UdpSocket::bind((address.ip(), 0)).map(drop).or_else(|error| scoped(&address, error))
        });
        if let Err(error) = address {
            let reason = match error.raw_os_error() {
                Some(libc::EADDRNOTAVAIL) => "is no address of this machine".to_owned(),
                Some(libc::ENODEV) => "names an interface that is not there".to_owned(),
                _ => error.to_string(),
            };
            add(
                listener.line,
                &format!("listener {listener}"),
                (reason, "see `ip address`, or add the address first".into()),
            );
        }
    }
    problems
}

/// A link-local address needs its scope to be bound.
fn scoped(address: &std::net::SocketAddr, error: io::Error) -> io::Result<()> {
    match address {
        std::net::SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            let any_port = std::net::SocketAddrV6::new(*v6.ip(), 0, 0, v6.scope_id());
            UdpSocket::bind(any_port).map(drop)
        }
        _ => Err(error),
    }
}

/// Looks at a file or device without opening it; its identity if it is there.
fn check_source(namespace: &NamespaceSpec) -> Result<Option<(u64, u64)>, (String, String)> {
    let (path, size, device) = match &namespace.backend.source {
        Source::File { path, size } => (path, *size, false),
        Source::Device { path } => (path, None, true),
        Source::Memory { .. } | Source::Null { .. } => return Ok(None),
    };
    let say = |reason: String, remedy: &str| Err((format!("{} {reason}", path.display()), remedy.to_owned()));
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound && size.is_some() => return check_folder(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !device => {
            return say("does not exist".into(), "check the path, or give a size to create it");
        }
        Err(error) => return say(format!("cannot be used: {error}"), "check the path"),
    };
    let kind = metadata.file_type();
    match device {
        true if kind.is_file() => return say("is a regular file".into(), "write file = in the place of device ="),
        true if !kind.is_block_device() => return say("is no block device".into(), "name one, such as /dev/nvme0n1"),
        false if kind.is_block_device() => {
            return say("is a block device".into(), "write device = in the place of file =");
        }
        false if !kind.is_file() => return say("is no regular file".into(), "name a regular file"),
        _ => {}
    }
    let mut needs = AccessFlags::R_OK;
    needs.set(AccessFlags::W_OK, !namespace.backend.read_only);
    if let Err(errno) = access(path, needs) {
        return say(
            format!("cannot be opened: {}", errno.desc()),
            "let the user that farside runs as read and write it, or set read_only",
        );
    }
    if device {
        check_zones(&metadata, namespace.backend.buffered)
            .map_err(|(reason, remedy)| (format!("{} {reason}", path.display()), remedy.to_owned()))?;
    }
    if !device {
        let (len, lba) = (metadata.len(), u64::from(namespace.backend.block_size.unwrap_or(512)));
        match size {
            None if len == 0 => return say("is empty".into(), "give a size"),
            Some(size) if len != 0 && size != len => {
                return say(format!("has {len} bytes, not {}", Bytes(size)), "leave the size out, or change the file");
            }
            _ if len % lba != 0 => {
                return say(
                    format!("has {len} bytes, not a multiple of the block size {lba}"),
                    "change the file's size or the block_size",
                );
            }
            _ => {}
        }
    }
    Ok(Some(place_of(&metadata)))
}

/// Whether a file that is to be made can be.
fn check_folder(path: &Path) -> Result<Option<(u64, u64)>, (String, String)> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    match access(folder, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => Ok(None),
        Err(errno) => Err((
            format!("{} cannot be made: {}: {}", path.display(), folder.display(), errno.desc()),
            "make the folder, and let the user that farside runs as write to it".into(),
        )),
    }
}

/// Memory registered with a device is locked memory. The software provider locks none.
fn check_memlock(options: &Options) -> Result<(), (String, String)> {
    if !crate::provider::uses_verbs(options.provider) {
        return Ok(());
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_MEMLOCK) else { return Ok(()) };
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let needed = options.registered_memory() * options.reactors.map_or(cores, u64::from);
    if may_lock_anything(&status) || needed <= limit {
        return Ok(());
    }
    Err((
        format!("{} bytes of registered memory are needed and the memlock limit is {limit}", needed),
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), or lower pool_size, receive_slots or reactors".into(),
    ))
}

/// CAP_IPC_LOCK, from /proc/self/status.
pub(crate) fn may_lock_anything(status: &str) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_is_read_from_the_status() {
        assert!(may_lock_anything("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(may_lock_anything("CapEff:\t0000000000004000\n"));
        assert!(!may_lock_anything("CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"));
        assert!(!may_lock_anything(""));
    }
}
