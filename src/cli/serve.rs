//! `farside serve` and `farside check`: from arguments or a file to a running target, until a signal ends it.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use farside::ProviderChoice;
use farside::backend::{FaultPlan, Faulty, Source};
use farside::config::{Config, Loaded, Quick, import, machine_id, parse_size};
use farside::control::{ControlPath, ControlServer, Failure, Manager, MetricsAddress, MetricsServer, default_path};
use farside::target::Target;
use nix::sys::signal::{SigSet, Signal};
use sd_notify::NotifyState;
use tracing::{info, warn};

use super::notify::{Watchdog, notify};
use super::table::{figures, table};

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
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Serve a disk that stores nothing, of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    null: Option<u64>,
    /// Serve what a configuration file says: TOML, or JSON of nvmetcli or SPDK
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Size of a new file: 1G, 512M, ..
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = ["device", "memory", "null", "config"])]
    size: Option<u64>,
    /// LBA size in bytes: 512 or 4096
    #[arg(long, value_name = "N", value_parser = block_size, conflicts_with = "config")]
    block_size: Option<u32>,
    /// Name of the subsystem [default: made of this machine and what is served]
    #[arg(long, conflicts_with = "config")]
    nqn: Option<String>,
    /// UUID of the namespace [default: made of what is served]
    #[arg(long, conflicts_with = "config")]
    uuid: Option<String>,
    /// Address to listen on; may be given several times [default: 0.0.0.0:4420]
    #[arg(long, value_name = "ADDR[:PORT]", conflicts_with = "config")]
    listen: Vec<String>,
    /// verbs (a NIC, rdma_rxe), soft (the software stack) or auto, the first of them that this machine has
    #[arg(long)]
    provider: Option<ProviderChoice>,
    /// Spin instead of sleeping when idle
    #[arg(long)]
    poll: bool,
    /// Reactor threads [default: one per core]
    #[arg(long)]
    reactors: Option<u16>,
    /// Where `farside ctl` finds this target [default: /run/farside.sock, or in the user's run-time directory]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Serve metrics over HTTP on this address, for Prometheus
    #[arg(long, value_name = "ADDR:PORT", value_parser = metrics_address)]
    metrics: Option<SocketAddr>,
    /// For tests: lay bytes over Identify data, CNS:OFFSET:HEX
    #[arg(long, hide = true, value_parser = identify_override)]
    test_identify: Vec<IdentifyBytes>,
    /// For tests: answer Flush and FUA without doing them
    #[arg(long, hide = true)]
    test_drop_flush: bool,
    /// For tests: a Flush hangs its reactor
    #[arg(long, hide = true)]
    test_hang_on_flush: bool,
}

/// A block size, as other sizes are written.
fn block_size(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| format!("{text} is too large; choose 512 or 4096"))
}

fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write an address and a port, such as 127.0.0.1:9000 or [::1]:9000".into())
}

/// Bytes to lay over an Identify data structure.
#[derive(Clone, Debug, PartialEq, Eq)]
struct IdentifyBytes {
    cns: u8,
    offset: usize,
    bytes: Vec<u8>,
}

#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// What `nvmetcli save` or SPDK's save_config wrote
    file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration file: TOML, or JSON of nvmetcli or SPDK
    file: PathBuf,
}

impl Serve {
    pub(crate) fn run(self, set_log: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> ExitCode {
        // Blocked before any thread exists, so that only this one sees them.
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGTERM);
        signals.add(Signal::SIGINT);
        // Its terminal is gone.
        signals.add(Signal::SIGHUP);
        signals.add(Signal::SIGUSR1);
        if let Err(error) = signals.thread_block() {
            eprintln!("farside: signals: {error}");
            return ExitCode::from(2);
        }
        let (control, metrics) = (self.control.clone(), self.metrics);
        // What may be refused comes first: nothing is made, and no host served, by a start that fails.
        let started = Frames::bind(control, metrics).and_then(|frames| {
            let manager = Arc::new(self.start()?.with_log(set_log));
            Ok((frames.open(&manager)?, manager))
        });
        let (doors, manager) = match started {
            Ok(started) => started,
            Err(error) => {
                eprintln!("farside: {error}");
                return ExitCode::from(2);
            }
        };
        let watchdog = match Watchdog::start(&manager) {
            Ok(watchdog) => watchdog,
            Err(error) => {
                eprintln!("farside: {error}");
                return ExitCode::from(2);
            }
        };
        let target = manager.target();
        say(&table(target.served()));
        say(&doors.lines());
        let status = format!("serving on {} listeners", target.served().listeners.len());
        notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
        let signal = loop {
            match signals.wait() {
                Ok(Signal::SIGUSR1) => say(&figures(&target.counters(), &target.io_totals())),
                signal => break signal,
            }
        };
        info!(?signal, "stopping");
        // A second signal to stop does not wait.
        std::thread::spawn(move || {
            while signals.wait() == Ok(Signal::SIGUSR1) {}
            std::process::exit(1);
        });
        // Its last ping comes before the end is told.
        drop(watchdog);
        notify(&[NotifyState::Stopping]);
        let held = target.counters();
        drop(doors);
        // The doors are closed: nobody else holds it.
        let totals = Arc::into_inner(manager).map(Manager::into_target).map(Target::shutdown).unwrap_or_default();
        say(&figures(&held, &totals));
        ExitCode::SUCCESS
    }

    fn start(mut self) -> Result<Manager, String> {
        let identify = std::mem::take(&mut self.test_identify);
        let plan = FaultPlan {
            drop_flush: self.test_drop_flush,
            hang_on_flush: self.test_hang_on_flush,
            ..FaultPlan::default()
        };
        let name = self.config.as_ref().map_or_else(|| "command line".to_owned(), |path| path.display().to_string());
        let file = self.config.clone().and_then(|path| std::path::absolute(path).ok());
        let Loaded { config, notes, foreign } = self.configuration().map_err(|error| error.to_string())?;
        notes.iter().for_each(|note| warn!("{note}"));
        config.odd_hosts().iter().for_each(|line| warn!("{line}"));
        // Another target's file is not written back to.
        let file = file.filter(|_| !foreign);
        let problems = config.check_host(&name);
        if !problems.is_empty() {
            return Err(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nfarside: "));
        }
        let provider = config.options.provider;
        let mut builder = config.open().map_err(|error| error.to_string())?;
        for IdentifyBytes { cns, offset, bytes } in identify {
            warn!(cns, offset, "test: Identify data are made wrong on purpose");
            builder = builder.identify_override(cns, offset, bytes);
        }
        if plan != FaultPlan::default() {
            warn!(?plan, "test: the storage misbehaves on purpose; data will be lost");
            builder = builder.map_backends(|backend| Arc::new(Faulty::new(backend, plan)));
        }
        let target = builder.start_on(provider).map_err(|error| error.to_string())?;
        Ok(Manager::new(target, config, file))
    }

    /// The configuration of the file or of the arguments, with the switches that go with both.
    fn configuration(self) -> Result<Loaded, farside::config::ConfigError> {
        let source = match (self.file, self.device, self.memory, self.null) {
            (Some(path), ..) => Some(Source::File { path, size: self.size }),
            (_, Some(path), ..) => Some(Source::Device { path }),
            (_, _, Some(size), _) => Some(Source::Memory { size }),
            (_, _, _, Some(size)) => Some(Source::Null { size }),
            _ => None,
        };
        let own = |config| Loaded { config, notes: Vec::new(), foreign: false };
        let mut loaded = match (source, self.config) {
            (Some(source), _) => {
                let quick = Quick {
                    source,
                    block_size: self.block_size,
                    nqn: self.nqn,
                    uuid: self.uuid,
                    listen: self.listen,
                    provider: ProviderChoice::Auto,
                };
                own(Config::quick(quick, &machine_id())?)
            }
            (None, Some(path)) => Config::load_any(&path)?,
            (None, None) => own(Config::load(std::path::Path::new(""))?),
        };
        let config = &mut loaded.config;
        if let Some(provider) = self.provider {
            config.options.provider = provider;
        }
        config.options.poll |= self.poll;
        if self.reactors.is_some() {
            config.options.reactors = self.reactors;
        }
        Ok(loaded)
    }
}

/// Where the ways in besides RDMA are to be: taken, and not open yet.
struct Frames {
    control: Option<ControlPath>,
    metrics: Option<MetricsAddress>,
    /// Why there is no control socket where nobody asked for one: no reason not to serve.
    without: Option<Failure>,
}

impl Frames {
    fn bind(control: Option<PathBuf>, metrics: Option<SocketAddr>) -> Result<Self, String> {
        let metrics = metrics.map(MetricsAddress::bind).transpose().map_err(|failure| failure.to_string())?;
        let control = match control {
            Some(path) => Ok(Some(ControlPath::bind(&path).map_err(|failure| failure.to_string())?)),
            None => default_path().map(|path| ControlPath::bind(&path)).transpose(),
        };
        let (control, without) = match control {
            Ok(control) => (control, None),
            Err(failure) => (None, Some(failure)),
        };
        Ok(Self { control, metrics, without })
    }

    fn open(self, manager: &Arc<Manager>) -> Result<Doors, String> {
        self.without.iter().for_each(|failure| info!("without a control socket: {failure}"));
        let metrics = self.metrics.map(|bound| MetricsServer::serve(bound, Arc::clone(manager)));
        let control = self.control.map(|bound| ControlServer::serve(bound, Arc::clone(manager)));
        let said = |failure: Failure| failure.to_string();
        Ok(Doors { control: control.transpose().map_err(said)?, metrics: metrics.transpose().map_err(said)? })
    }
}

/// The ways in besides RDMA: the control socket and the metrics.
struct Doors {
    control: Option<ControlServer>,
    metrics: Option<MetricsServer>,
}

impl Doors {
    /// For the table.
    fn lines(&self) -> String {
        let control = self.control.as_ref().map(|door| format!("control    {}\n", door.path().display()));
        let metrics = self.metrics.as_ref().map(|door| format!("metrics    http://{}/metrics\n", door.address()));
        control.into_iter().chain(metrics).collect()
    }
}

/// Standard output at once, also where it is a file or a pipe. Nobody may be reading it any more.
fn say(text: &str) {
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}

impl Check {
    pub(crate) fn run(self) -> ExitCode {
        let name = self.file.display().to_string();
        let problems = match Config::load_any(&self.file) {
            Ok(Loaded { config, notes, .. }) => {
                notes.iter().for_each(|note| eprintln!("farside: {name}: {note}"));
                config.odd_hosts().iter().for_each(|line| eprintln!("farside: {name}: {line}"));
                config.check_host(&name)
            }
            Err(error) => error.0,
        };
        for problem in &problems {
            eprintln!("farside: {problem}");
        }
        if problems.is_empty() {
            println!("{name}: sound, and this machine can serve it");
            ExitCode::SUCCESS
        } else {
            ExitCode::from(2)
        }
    }
}

impl Convert {
    /// Prints the configuration in our words, and on standard error what was left out.
    pub(crate) fn run(self) -> ExitCode {
        let name = self.file.display().to_string();
        let text = match std::fs::read_to_string(&self.file) {
            Ok(text) => text,
            Err(error) => {
                eprintln!("farside: {name}: {error}; check the path of the configuration");
                return ExitCode::from(2);
            }
        };
        match import(&text, &name) {
            Ok(imported) => {
                imported.notes.iter().for_each(|note| eprintln!("farside: {name}: {note}"));
                say(&imported.toml);
                ExitCode::SUCCESS
            }
            Err(error) => {
                error.0.iter().for_each(|problem| eprintln!("farside: {problem}"));
                ExitCode::from(2)
            }
        }
    }
}

/// `1:77:20`: CNS, offset (both decimal), bytes in hexadecimal.
fn identify_override(text: &str) -> Result<IdentifyBytes, String> {
    let wrong = || format!("{text:?} is not CNS:OFFSET:HEX");
    let mut parts = text.splitn(3, ':');
    let mut part = || parts.next().ok_or_else(wrong);
    let (cns, offset, hex) = (part()?, part()?, part()?);
    let bytes = (0..hex.len())
        .step_by(2)
        .map(|at| hex.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(wrong))
        .collect::<Result<_, _>>()?;
    Ok(IdentifyBytes { cns: cns.parse().map_err(|_| wrong())?, offset: offset.parse().map_err(|_| wrong())?, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_bytes_are_parsed_whole_or_refused() {
        assert_eq!(identify_override("1:320:0a00"), Ok(IdentifyBytes { cns: 1, offset: 320, bytes: vec![10, 0] }));
        for wrong in ["", "1:2", "1:2:a", "1:2:zz", "256:0:00", "1:x:00"] {
            assert!(identify_override(wrong).is_err(), "{wrong}");
        }
    }
}
