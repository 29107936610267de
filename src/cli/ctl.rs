//! `farside ctl`: look at a running target and change it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use farside::config::{Config, import, is_foreign};
use farside::control::{Client, Request, default_path};
use serde_json::{Map, Value, json};

#[derive(Debug, Args)]
pub(crate) struct Ctl {
    /// The target's control socket [default: /run/farside.sock, or in the user's run-time directory]
    #[arg(long, global = true, value_name = "PATH", env = "FARSIDE_CONTROL")]
    control: Option<PathBuf>,
    /// Print the answer for scripts
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// What is served, to whom, and how much was done
    Status,
    /// The metrics, in Prometheus' text format
    Metrics,
    /// How long commands took, by stage: for each namespace, host and connected queue
    Latency,
    /// Keep histograms of how long commands take, or not
    Histograms {
        /// on or off
        on: Switch,
    },
    /// The running configuration, as a file would say it
    Config,
    /// Make the running target what a configuration file says, and show the difference
    Apply {
        /// The file
        file: PathBuf,
        /// Only show the difference
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the running configuration to the file that the target was started with, or to another
    Save {
        /// The other file
        file: Option<PathBuf>,
    },
    /// Serve one more subsystem
    AddSubsystem {
        /// Its NQN
        nqn: String,
        /// Hosts that may connect; none: any host
        #[arg(long = "host", value_name = "NQN")]
        hosts: Vec<String>,
        /// Its serial number [default: made of the NQN]
        #[arg(long)]
        serial: Option<String>,
        /// Its model number
        #[arg(long)]
        model: Option<String>,
    },
    /// Serve a subsystem no more; its hosts are disconnected
    RemoveSubsystem {
        /// Its NQN
        nqn: String,
    },
    /// Serve one more namespace
    AddNamespace(AddNamespace),
    /// Serve a namespace no more
    RemoveNamespace {
        /// NQN of its subsystem
        nqn: String,
        /// Its NSID
        nsid: u32,
    },
    /// Take over the size that a namespace's storage has become
    ResizeNamespace {
        /// NQN of its subsystem
        nqn: String,
        /// Its NSID
        nsid: u32,
    },
    /// Let a host connect
    AllowHost {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// Let a host connect no more, and disconnect it
    RemoveHost {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// Say whether any host may connect
    AllowAnyHost {
        /// NQN of the subsystem
        nqn: String,
        /// on or off
        allow: Switch,
    },
    /// Listen on one more address
    AddListener {
        /// Address and port
        address: String,
        /// Traffic class of its connections
        #[arg(long)]
        tos: Option<u8>,
    },
    /// Stop to listen on an address; connections stay
    RemoveListener {
        /// Address and port
        address: String,
    },
    /// Disconnect a host; it may connect again
    Disconnect {
        /// NQN of the host
        host: String,
        /// From this subsystem alone
        #[arg(long)]
        nqn: Option<String>,
    },
    /// Change what is logged: error, warn, info, debug, trace
    Log {
        /// The level
        level: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["file", "device", "memory", "null"]))]
struct AddNamespace {
    /// NQN of its subsystem
    nqn: String,
    /// Its NSID [default: the smallest free one]
    #[arg(long)]
    nsid: Option<u32>,
    /// Serve a file; made with --size when it does not exist
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Size of a new file
    #[arg(long, requires = "file")]
    size: Option<String>,
    /// Serve a block device
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Serve a disk in memory, of this size
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Serve a disk that stores nothing, of this size
    #[arg(long, value_name = "SIZE")]
    null: Option<String>,
    /// LBA size in bytes: 512 or 4096
    #[arg(long, value_name = "N")]
    block_size: Option<u32>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Its UUID [default: made of what is served]
    #[arg(long)]
    uuid: Option<String>,
}

impl Ctl {
    pub(crate) fn run(self) -> ExitCode {
        let Some(path) = self.control.clone().or_else(default_path) else {
            eprintln!("farside: control socket: no default for this user; name it with --control");
            return ExitCode::from(2);
        };
        let request = match self.what.request() {
            Ok(request) => request,
            Err(error) => {
                eprintln!("farside: {error}");
                return ExitCode::from(2);
            }
        };
        let answer = Client::connect(&path).and_then(|mut client| client.request(&request));
        match answer {
            Ok(answer) if self.json => println!("{answer:#}"),
            Ok(answer) => print!("{}", text(&request, &answer)),
            Err(error) => {
                eprintln!("farside: {}: {error}", path.display());
                return ExitCode::FAILURE;
            }
        }
        ExitCode::SUCCESS
    }
}

impl What {
    fn request(self) -> Result<Request, String> {
        Ok(match self {
            Self::Status => Request::Status,
            Self::Metrics => Request::Metrics,
            Self::Latency => Request::Latency,
            Self::Histograms { on } => Request::Histograms { on: matches!(on, Switch::On) },
            Self::Config => Request::Config,
            Self::Apply { file, dry_run } => {
                let name = file.display().to_string();
                let mut config = std::fs::read_to_string(&file)
                    .map_err(|error| format!("{name}: {error}; check the path of the configuration"))?;
                if is_foreign(&config) {
                    let imported = import(&config, &name).map_err(|error| error.to_string())?;
                    imported.notes.iter().for_each(|note| eprintln!("farside: {name}: {note}"));
                    config = imported.toml;
                }
                // What is wrong with the text itself is said here, with the file's name and all of it.
                Config::parse_running(&config, &name).map_err(|error| error.to_string())?;
                Request::Apply { config, dry_run }
            }
            Self::Save { file } => {
                let absolute = file.map(std::path::absolute).transpose().map_err(|error| error.to_string())?;
                Request::Save { path: absolute.map(|path| path.display().to_string()) }
            }
            Self::AddSubsystem { nqn, hosts, serial, model } => {
                let hosts = (!hosts.is_empty()).then_some(hosts);
                let keys =
                    [("nqn", json!(nqn)), ("hosts", json!(hosts)), ("serial", json!(serial)), ("model", json!(model))];
                Request::AddSubsystem { subsystem: object(keys) }
            }
            Self::RemoveSubsystem { nqn } => Request::RemoveSubsystem { nqn },
            Self::AddNamespace(add) => add.request()?,
            Self::RemoveNamespace { nqn, nsid } => Request::RemoveNamespace { nqn, nsid },
            Self::ResizeNamespace { nqn, nsid } => Request::ResizeNamespace { nqn, nsid },
            Self::AllowHost { nqn, host } => Request::AllowHost { nqn, host },
            Self::RemoveHost { nqn, host } => Request::RemoveHost { nqn, host },
            Self::AllowAnyHost { nqn, allow } => Request::AllowAnyHost { nqn, allow: matches!(allow, Switch::On) },
            Self::AddListener { address, tos } => {
                Request::AddListener { listener: object([("address", json!(address)), ("tos", json!(tos))]) }
            }
            Self::RemoveListener { address } => Request::RemoveListener { address },
            Self::Disconnect { host, nqn } => Request::Disconnect { host, nqn },
            Self::Log { level } => Request::Log { level },
        })
    }
}

impl AddNamespace {
    fn request(self) -> Result<Request, String> {
        // The target has another working directory.
        let absolute =
            |path: Option<PathBuf>| path.map(std::path::absolute).transpose().map_err(|error| error.to_string());
        let keys = [
            ("nsid", json!(self.nsid)),
            ("file", json!(absolute(self.file)?)),
            ("size", json!(self.size)),
            ("device", json!(absolute(self.device)?)),
            ("memory", json!(self.memory)),
            ("null", json!(self.null)),
            ("block_size", json!(self.block_size)),
            ("read_only", json!(self.read_only.then_some(true))),
            ("uuid", json!(self.uuid)),
        ];
        Ok(Request::AddNamespace { nqn: self.nqn, namespace: object(keys) })
    }
}

/// Without the keys that have no value.
fn object<const N: usize>(keys: [(&str, Value); N]) -> Map<String, Value> {
    keys.into_iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.to_owned(), value)).collect()
}

/// An answer as people read it.
fn text(request: &Request, answer: &Value) -> String {
    match (request, answer) {
        (Request::Status, answer) => status(answer),
        (Request::Latency, answer) => latency(answer),
        (_, Value::String(text)) => text.clone(),
        (Request::Apply { .. }, answer) if items(answer, "changes").is_empty() => "nothing changes\n".into(),
        (_, answer) if answer.get("changes").is_some() => {
            let changes = items(answer, "changes").iter();
            let text = changes.fold(String::new(), |text, change| text + word(change) + "\n") + &draining(answer);
            items(answer, "notes").iter().fold(text, |text, note| text + "note: " + word(note) + "\n")
        }
        (_, Value::Object(keys)) => {
            keys.iter().fold(String::new(), |text, (key, value)| text + &format!("{key}: {value}\n"))
        }
        (_, other) => format!("{other}\n"),
    }
}

fn items<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn status(answer: &Value) -> String {
    let number = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
    let mut text = String::new();
    let listeners: Vec<&str> = items(answer, "listeners").iter().map(word).collect();
    let _ = writeln!(
        text,
        "farside {}, provider {}, up {} s, listening on {}",
        word(&answer["version"]),
        word(&answer["provider"]),
        number(answer, "uptime_seconds"),
        listeners.join(", ")
    );
    for subsystem in items(answer, "subsystems") {
        let who = match subsystem["allow_any_host"].as_bool() {
            Some(true) => "any host".to_owned(),
            _ => format!("{} hosts", items(subsystem, "hosts").len()),
        };
        let _ = writeln!(text, "subsystem  {} ({who})", word(&subsystem["nqn"]));
        for one in items(subsystem, "namespaces") {
            let _ = writeln!(
                text,
                "  namespace {}: {}, {} blocks of {} B{}; {} reads, {} writes, {} errors",
                number(one, "nsid"),
                word(&one["backend"]),
                number(one, "blocks"),
                number(one, "block_size"),
                if one["read_only"] == true { ", read-only" } else { "" },
                number(one, "reads"),
                number(one, "writes"),
                number(one, "errors")
            );
            let zones = &one["zones"];
            if zones.is_object() {
                let _ = writeln!(
                    text,
                    "    {} zones of {} B, {} open, {} active",
                    number(zones, "count"),
                    number(zones, "size"),
                    number(zones, "open"),
                    number(zones, "active")
                );
            }
        }
    }
    text += &draining(answer);
    for one in items(answer, "controllers") {
        let _ = writeln!(
            text,
            "controller {} of {}: host {}, {} queues{}",
            number(one, "cntlid"),
            word(&one["subnqn"]),
            word(&one["hostnqn"]),
            items(one, "queues").len(),
            if one["dying"] == true { ", ending" } else { "" }
        );
        for queue in items(one, "queues") {
            let _ = writeln!(text, "  queue {} on reactor {}: {}", queue["qid"], queue["reactor"], traffic(queue));
        }
    }
    for one in items(answer, "hosts") {
        let _ =
            writeln!(text, "host       {}: {} queues; {}", word(&one["hostnqn"]), number(one, "queues"), traffic(one));
    }
    for one in items(answer, "disconnects") {
        let whose = match one["cntlid"].as_u64() {
            Some(cntlid) => format!("controller {cntlid} of {}, host {}", word(&one["subnqn"]), word(&one["hostnqn"])),
            None => "no controller".to_owned(),
        };
        let _ = writeln!(
            text,
            "ended      {} s ago: {whose}, {} queues, from {}: {}",
            number(one, "ago_seconds"),
            number(one, "queues"),
            word(&one["peer"]),
            word(&one["detail"])
        );
    }
    text
}

/// What was done on something.
fn traffic(one: &Value) -> String {
    let number = |key: &str| one.get(key).and_then(Value::as_u64).unwrap_or(0);
    format!(
        "{} reads of {} bytes, {} writes of {} bytes, {} errors",
        number("reads"),
        number("bytes_read"),
        number("writes"),
        number("bytes_written"),
        number("errors")
    )
}

/// Namespaces that are gone and whose storage is not closed yet.
fn draining(answer: &Value) -> String {
    let line = |one: &Value| {
        let (nsid, nqn, backend) = (&one["nsid"], word(&one["nqn"]), word(&one["backend"]));
        format!(
            "draining   namespace {nsid} of {nqn}: commands on it have not ended; {backend} is closed when they do\n"
        )
    };
    items(answer, "draining").iter().map(line).collect()
}

/// A line per stage of each.
fn latency(answer: &Value) -> String {
    let mut text = String::new();
    if answer["on"] != true {
        text += "histograms are off: farside ctl histograms on\n";
    }
    let mut lines = |what: String, one: &Value| {
        for (stage, times) in one["stages"].as_object().into_iter().flatten() {
            let time = |key: &str| times[key].as_f64().unwrap_or(0.0);
            let _ = writeln!(
                text,
                "{what} {stage:14} {:>10} commands, mean {:.1} us, 50% {:.1}, 99% {:.1}, 99.9% {:.1}, max {:.1}",
                times["count"],
                time("mean"),
                time("p50"),
                time("p99"),
                time("p999"),
                time("max")
            );
        }
    };
    for one in items(answer, "namespaces") {
        lines(format!("namespace {} of {}:", one["nsid"], word(&one["nqn"])), one);
    }
    for one in items(answer, "hosts") {
        lines(format!("host {}:", word(&one["hostnqn"])), one);
    }
    for one in items(answer, "queues") {
        lines(format!("queue {} of controller {} of {}:", one["qid"], one["cntlid"], word(&one["subnqn"])), one);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        ctl: Ctl,
    }

    fn request(line: &str) -> Value {
        let line = Line::parse_from(format!("ctl {line}").split(' '));
        serde_json::to_value(line.ctl.what.request().unwrap()).unwrap()
    }

    #[test]
    fn commands_become_requests_without_empty_keys() {
        assert_eq!(
            request("add-namespace nqn.x --memory 1G --read-only"),
            json!({"op": "add_namespace", "nqn": "nqn.x", "namespace": {"memory": "1G", "read_only": true}})
        );
        assert_eq!(
            request("add-subsystem nqn.x --host a --host b"),
            json!({"op": "add_subsystem", "subsystem": {"nqn": "nqn.x", "hosts": ["a", "b"]}})
        );
        assert_eq!(
            request("allow-any-host nqn.x off"),
            json!({"op": "allow_any_host", "nqn": "nqn.x", "allow": false})
        );
        let folder = tempfile::tempdir().unwrap();
        let foreign = folder.path().join("saved.json");
        std::fs::write(&foreign, include_str!("../config/import/sample_nvmet.json")).unwrap();
        let apply = request(&format!("apply {} --dry-run", foreign.display()));
        assert!(word(&apply["config"]).starts_with("[[subsystem]]\nnqn = "), "{apply}");
        let file = request("add-namespace nqn.x --file disk.img");
        assert!(word(&file["namespace"]["file"]).starts_with('/'), "{file}");
    }

    #[test]
    fn answers_are_lines() {
        let apply = Request::Apply { config: String::new(), dry_run: true };
        assert_eq!(text(&apply, &json!({"changes": ["+ a", "- b"]})), "+ a\n- b\n");
        assert_eq!(text(&apply, &json!({"changes": []})), "nothing changes\n");
        let slow = json!({"changes": ["- b"], "draining": [{"nqn": "nqn.x", "nsid": 3, "backend": "/d"}]});
        let says = "draining   namespace 3 of nqn.x: commands on it have not ended; /d is closed when they do\n";
        assert_eq!(text(&apply, &slow), format!("- b\n{says}"));
        assert!(status(&slow).ends_with(says));
        assert_eq!(text(&Request::Config, &json!("x = 1\n")), "x = 1\n");
        let odd = json!({"changes": ["+ a"], "notes": ["host \"foo\": looks odd"]});
        assert_eq!(text(&apply, &odd), "+ a\nnote: host \"foo\": looks odd\n");
        let shown = status(&json!({
            "version": "1", "provider": "soft", "uptime_seconds": 5, "listeners": ["192.0.2.1:4420"],
            "subsystems": [{"nqn": "nqn.x", "allow_any_host": false, "hosts": ["h"], "namespaces":
                [{"nsid": 2, "backend": "null", "blocks": 8, "block_size": 512, "read_only": true, "reads": 3}]}],
            "controllers": [{"subnqn": "nqn.x", "cntlid": 4, "hostnqn": "h", "dying": false,
                "queues": [{"qid": 0, "reactor": 1}, {"qid": 1, "reactor": 0, "reads": 3, "bytes_read": 1536}]}],
            "hosts": [{"hostnqn": "h", "queues": 2, "reads": 3, "bytes_read": 1536, "errors": 1}],
            "disconnects": [{"ago_seconds": 7, "peer": "192.0.2.8:1", "hostnqn": "h", "subnqn": "nqn.x", "cntlid": 3,
                "queues": 2, "detail": "the connection was lost"}, {"ago_seconds": 9, "queues": 1}],
        }));
        assert_eq!(
            shown,
            "farside 1, provider soft, up 5 s, listening on 192.0.2.1:4420\n\
             subsystem  nqn.x (1 hosts)\n\
             \x20 namespace 2: null, 8 blocks of 512 B, read-only; 3 reads, 0 writes, 0 errors\n\
             controller 4 of nqn.x: host h, 2 queues\n\
             \x20 queue 0 on reactor 1: 0 reads of 0 bytes, 0 writes of 0 bytes, 0 errors\n\
             \x20 queue 1 on reactor 0: 3 reads of 1536 bytes, 0 writes of 0 bytes, 0 errors\n\
             host       h: 2 queues; 3 reads of 1536 bytes, 0 writes of 0 bytes, 1 errors\n\
             ended      7 s ago: controller 3 of nqn.x, host h, 2 queues, from 192.0.2.8:1: the connection was lost\n\
             ended      9 s ago: no controller, 1 queues, from : \n"
        );
    }
}
