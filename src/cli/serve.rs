//! `farside serve`: from arguments or a file to a running target, until a signal ends it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use farside::ProviderChoice;
use farside::backend::{self, BackendSpec, Source};
use farside::target::{NamespaceSpec, Options, SubsystemSpec, Target, TargetBuilder, TargetError};
use nix::sys::signal::{SigSet, Signal};
use tracing::info;
use uuid::Uuid;

use super::table::table;

const DEFAULT_NQN: &str = "nqn.2026-11.io.farside:disk";
const DEFAULT_PORT: u16 = 4420;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["file", "device", "memory", "null", "config"]))]
pub(crate) struct Serve {
    /// Serve a file; made with --size when it does not exist
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Serve a block device
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Serve a disk in memory, of this size
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Serve a disk that stores nothing, of this size
    #[arg(long, value_name = "SIZE", value_parser = size)]
    null: Option<u64>,
    /// Serve what a configuration file says
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Size of a new file: 1G, 512M, ..
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "file")]
    size: Option<u64>,
    /// LBA size in bytes: 512 or 4096
    #[arg(long, value_name = "N", conflicts_with = "config")]
    block_size: Option<u32>,
    /// Name of the subsystem
    #[arg(long, default_value = DEFAULT_NQN, conflicts_with = "config")]
    nqn: String,
    /// UUID of the namespace; derived from what is served when left out
    #[arg(long, conflicts_with = "config")]
    uuid: Option<Uuid>,
    /// Address to listen on; may be given several times [default: 0.0.0.0:4420]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = listen_address, conflicts_with = "config")]
    listen: Vec<SocketAddr>,
    /// verbs (a NIC, rdma_rxe), soft (the software stack) or auto, the first of them that this machine has
    #[arg(long)]
    provider: Option<ProviderChoice>,
    /// Spin instead of sleeping when idle
    #[arg(long)]
    poll: bool,
    /// Reactor threads [default: one per core]
    #[arg(long)]
    reactors: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration file
    file: PathBuf,
}

impl Serve {
    pub(crate) fn run(self) -> ExitCode {
        // Blocked before any thread exists, so that only this one sees them.
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGTERM);
        signals.add(Signal::SIGINT);
        if let Err(error) = signals.thread_block() {
            eprintln!("farside: signals: {error}");
            return ExitCode::from(2);
        }
        let target = match self.start() {
            Ok(target) => target,
            Err(error) => {
                eprintln!("farside: {error}");
                return ExitCode::from(2);
            }
        };
        print!("{}", table(target.served()));
        let _ = std::io::Write::flush(&mut std::io::stdout());
        let signal = signals.wait();
        info!(?signal, "stopping");
        // A second signal does not wait.
        std::thread::spawn(move || {
            let _ = signals.wait();
            std::process::exit(1);
        });
        target.shutdown();
        ExitCode::SUCCESS
    }

    fn start(self) -> Result<Target, TargetError> {
        let provider = self.provider.unwrap_or_default();
        self.quick()?.start_on(provider)
    }

    /// The target of the quick form: one subsystem with one namespace.
    fn quick(self) -> Result<TargetBuilder, TargetError> {
        let source = match (self.file, self.device, self.memory, self.null) {
            (Some(path), ..) => Source::File { path, size: self.size },
            (_, Some(path), ..) => Source::Device { path },
            (_, _, Some(size), _) => Source::Memory { size },
            (_, _, _, Some(size)) => Source::Null { size },
            _ => {
                return Err(TargetError {
                    object: "serve".into(),
                    reason: "nothing to serve".into(),
                    remedy: "give --file, --device, --memory or --null".into(),
                });
            }
        };
        let mut spec = BackendSpec::new(source);
        spec.block_size = self.block_size;
        let backend = backend::open(&spec)?;
        let mut namespace = NamespaceSpec::new(1, backend);
        namespace.block_size = self.block_size;
        namespace.uuid = self.uuid;
        let mut options = Options { poll: self.poll, ..Options::default() };
        if let Some(reactors) = self.reactors {
            options.reactors = reactors;
        }
        let listeners = if self.listen.is_empty() {
            vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT)]
        } else {
            self.listen
        };
        let builder = Target::builder().options(options).subsystem(SubsystemSpec::new(self.nqn).namespace(namespace));
        Ok(listeners.into_iter().fold(builder, TargetBuilder::listen))
    }
}

impl Check {
    pub(crate) fn run(self) -> ExitCode {
        let _ = self.file;
        ExitCode::from(2)
    }
}

/// `1G`, `512M`, `4096`: bytes with a binary unit.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        unit => return Err(format!("unknown unit {unit:?}; use K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is not a size such as 1G or 512M"))?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(|| format!("{text:?} is out of range"))
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let ip = text.trim_start_matches('[').trim_end_matches(']');
    ip.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, DEFAULT_PORT)).map_err(|_| {
        format!("{text:?} is not an IP address with an optional port, such as 192.0.2.1:4420 or [fd00::2]:4420")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_units() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("1G"), Ok(1 << 30));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("2m"), Ok(2 << 20));
        for wrong in ["", "G", "1X", "0", "99999999T", "-1"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_take_an_optional_port() {
        assert_eq!(listen_address("192.0.2.1"), Ok("192.0.2.1:4420".parse().unwrap()));
        assert_eq!(listen_address("192.0.2.1:1"), Ok("192.0.2.1:1".parse().unwrap()));
        assert_eq!(listen_address("fd00::2"), Ok("[fd00::2]:4420".parse().unwrap()));
        assert_eq!(listen_address("[fd00::2]"), Ok("[fd00::2]:4420".parse().unwrap()));
        assert!(listen_address("localhost").is_err());
    }
}
