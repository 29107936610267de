//! The command line: `farside serve`, `check`, `convert`, `ctl`, `doctor`, `discover`, `identify`, `bench`, `generate`.
//!
//! Exit status: 0 done, 1 it failed while running, 2 it could not start (one line on standard error with the object, the
//! reason and the remedy).

mod bench;
mod connect;
mod ctl;
mod discover;
mod doctor;
mod generate;
mod identify;
mod notify;
mod serve;
mod table;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Serve files, block devices and memory to NVMe over Fabrics hosts by RDMA.
#[derive(Debug, Parser)]
#[command(name = "farside", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// What to log: error, warn, info, debug, trace, or a filter such as farside::target=debug
    #[arg(long, global = true, default_value = "info", env = "FARSIDE_LOG")]
    log: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a disk until SIGTERM or SIGINT
    Serve(Box<serve::Serve>),
    /// Check a configuration file and this machine against it, without starting anything
    Check(serve::Check),
    /// Print another target's configuration (nvmetcli, SPDK) as one of ours
    Convert(serve::Convert),
    /// Look at a running target and change it
    Ctl(ctl::Ctl),
    /// Find out what keeps RDMA from working here, or what a host's messages mean
    Doctor(doctor::DoctorArguments),
    /// List what an address serves
    Discover(discover::Discover),
    /// Show a controller and its namespaces
    Identify(identify::Identify),
    /// Put load on a namespace and measure it
    Bench(bench::Bench),
    /// Write manual pages, shell completions, a systemd unit
    Generate(generate::Generate),
}

/// Runs the command line.
pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = match log_filter(&arguments.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("farside: --log {:?}: {error}; use error, warn, info, debug or trace", arguments.log);
            return ExitCode::from(2);
        }
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .with_filter_reloading();
    let reload = log.reload_handle();
    log.init();
    let set_log = move |level: &str| {
        let filter = log_filter(level)?;
        reload.reload(filter).map_err(|error| error.to_string())
    };
    match arguments.command {
        Command::Serve(serve) => serve.run(set_log),
        Command::Check(check) => check.run(),
        Command::Convert(convert) => convert.run(),
        Command::Ctl(ctl) => ctl.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Discover(discover) => discover.run(),
        Command::Identify(identify) => identify.run(),
        Command::Bench(bench) => bench.run(),
        Command::Generate(generate) => generate.run(),
    }
}

/// A filter for the log. A word that is no level is taken for a mistake, not for the name of a module.
fn log_filter(text: &str) -> Result<EnvFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_module = |word: &str| word.contains(['=', '[']) || word.starts_with("farside") || word.starts_with("nvme");
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    match text.split(',').find(|word| !is_level(word) && !is_module(word)) {
        Some(word) => Err(format!("{word:?} is no level")),
        None => EnvFilter::try_new(text).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_log_levels_are_refused() {
        for right in ["info", "WARN", "off", "farside::target=debug", "warn,farside::roce=trace", "farside"] {
            assert!(log_filter(right).is_ok(), "{right}");
        }
        for wrong in ["inof", "", "info,dbug", "farside=loud"] {
            assert!(log_filter(wrong).is_err(), "{wrong}");
        }
    }
}
