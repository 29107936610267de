//! `farside generate`: manual pages and shell completions from the command definitions, and a systemd unit.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Subcommand};
use clap_complete::Shell;

#[derive(Debug, Args)]
pub(crate) struct Generate {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Manual pages
    Man {
        /// Write one page per command into this folder; else farside(1) goes to standard output
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
    },
    /// Completions for a shell, to standard output
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// A systemd unit, to standard output
    Systemd {
        /// The program, by its whole path
        #[arg(long, value_name = "PATH", default_value = "/usr/local/bin/farside")]
        binary: PathBuf,
        /// The configuration that it serves
        #[arg(long, value_name = "FILE", default_value = "/etc/farside.toml")]
        config: PathBuf,
    },
}

impl Generate {
    pub(crate) fn run(self) -> ExitCode {
        let mut text = Vec::new();
        let made = match self.what {
            What::Man { dir: Some(dir) } => std::fs::create_dir_all(&dir)
                .and_then(|()| clap_mangen::generate_to(super::Arguments::command(), &dir))
                .map_err(|error| format!("{}: {error}; name a folder that can be written to", dir.display())),
            What::Man { dir: None } => clap_mangen::Man::new(super::Arguments::command())
                .render(&mut text)
                .map_err(|error| format!("manual page: {error}")),
            What::Completions { shell } => {
                clap_complete::generate(shell, &mut super::Arguments::command(), "farside", &mut text);
                Ok(())
            }
            What::Systemd { binary, config } => unit(&binary, &config).map(|unit| text = unit.into_bytes()),
        };
        // A reader that has seen enough is no failure.
        let written = made.and_then(|()| match io::stdout().lock().write_all(&text) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
            _ => Ok(()),
        });
        match written {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("farside: {error}");
                ExitCode::FAILURE
            }
        }
    }
}

/// A unit that serves a configuration: ready when hosts can connect, restarted when a reactor hangs.
fn unit(binary: &std::path::Path, config: &std::path::Path) -> Result<String, String> {
    let word = |path: &std::path::Path| {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+:@".contains(byte);
        let text = path.to_str().filter(|text| path.is_absolute() && text.as_bytes().iter().all(plain));
        let remedy = "give a whole path of letters, digits and ._-+:@";
        text.map(str::to_owned).ok_or_else(|| format!("{}: does not go into a unit; {remedy}", path.display()))
    };
    let (binary, config) = (word(binary)?, word(config)?);
    Ok(format!(
        "\
[Unit]
Description=farside, NVMe over Fabrics target for RDMA
Documentation=man:farside(1)
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={binary} serve --config {config}
ExecReload={binary} ctl apply {config}
Restart=on-failure
RestartSec=1
# Fed only while every reactor turns.
WatchdogSec=30
# Commands in progress get 1.5 s to end; a disk that hangs must not hold the stop.
TimeoutStopSec=15
# Memory is registered with the RDMA device and with io_uring, and counted by both.
LimitMEMLOCK=infinity
LimitNOFILE=65536
# Reservations and write protection survive a power loss here.
StateDirectory=farside

[Install]
WantedBy=multi-user.target
"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use clap::Parser;

    /// The value of a key of the unit's section.
    fn value<'a>(unit: &'a str, section: &str, key: &str) -> &'a str {
        let mut at = "";
        let mut found = Vec::new();
        for line in unit.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match (line.strip_prefix('[').and_then(|name| name.strip_suffix(']')), line.split_once('=')) {
                (Some(name), _) => at = name,
                (None, Some((known, value))) if at == section && known == key => found.push(value),
                (None, Some(_)) => {}
                (None, None) => panic!("neither section nor key: {line}"),
            }
        }
        assert_eq!(found.len(), 1, "{section}.{key}: {found:?}");
        found[0]
    }

    #[test]
    fn unit_runs_commands_that_exist_and_says_what_the_target_needs() {
        let unit = unit(Path::new("/opt/farside"), Path::new("/etc/disks.toml")).unwrap();
        for key in ["ExecStart", "ExecReload"] {
            let words: Vec<&str> = value(&unit, "Service", key).split(' ').collect();
            assert_eq!(words[0], "/opt/farside");
            assert!(words.contains(&"/etc/disks.toml"));
            super::super::Arguments::try_parse_from(&words).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        assert_eq!(value(&unit, "Service", "Type"), "notify");
        assert_eq!(value(&unit, "Service", "LimitMEMLOCK"), "infinity");
        assert_eq!(value(&unit, "Service", "WatchdogSec"), "30");
        assert_eq!(value(&unit, "Service", "StateDirectory"), "farside");
        assert_eq!(value(&unit, "Install", "WantedBy"), "multi-user.target");
        for odd in ["relative", "/a b", "/a\nExecStart=/bin/sh", "/a%i", "/a\"b"] {
            assert!(super::unit(Path::new(odd), Path::new("/c")).unwrap_err().contains("whole path"), "{odd:?}");
        }
    }

    #[test]
    fn every_command_and_option_is_in_its_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        let mut root = super::super::Arguments::command();
        root.build();
        clap_mangen::generate_to(root.clone(), folder.path()).unwrap();
        let mut pages = 0;
        let mut left = vec![("farside".to_owned(), root)];
        while let Some((name, command)) = left.pop() {
            let page = std::fs::read_to_string(folder.path().join(format!("{name}.1"))).unwrap_or_else(|error| {
                panic!("{name}.1: {error}");
            });
            pages += 1;
            for option in command.get_opts().filter(|option| !option.is_hide_set()) {
                let long = option.get_long().unwrap().replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{long}")), "{name} lacks --{long}");
            }
            assert!(!page.contains("test\\-"), "{name} tells of test hooks");
            for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
                left.push((format!("{name}-{}", sub.get_name()), sub.clone()));
            }
        }
        assert!(pages > 20, "only {pages} pages");
    }

    #[test]
    fn shells_are_given_something_to_complete() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut super::super::Arguments::command(), "farside", &mut text);
            let text = String::from_utf8(text).unwrap();
            for word in ["add-namespace", "doctor", "provider"] {
                assert!(text.contains(word), "{shell} lacks {word}");
            }
        }
    }
}
