//! A running target with the configuration that it runs: what requests are carried out on.

use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use serde_json::{Value, json};
use tracing::warn;

use super::carry_out::carry_out;
use super::edit::edited;
use super::plan::{Change, arrange, plan, renewed};
use super::protocol::{Failure, Request};
use super::{metrics, report};
use crate::backend::{Source, same_place};
use crate::config::Config;
use crate::target::Target;

type SetLog = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// A running target and its configuration, which change together.
pub struct Manager {
    target: Target,
    config: Mutex<Config>,
    file: Option<PathBuf>,
    set_log: Option<SetLog>,
    started: Instant,
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").field("target", &self.target).field("file", &self.file).finish_non_exhaustive()
    }
}

impl Manager {
    /// A target that was started from this configuration. `file` is where `save` writes unless told otherwise.
    pub fn new(target: Target, config: Config, file: Option<PathBuf>) -> Self {
        Self { target, config: Mutex::new(config), file, set_log: None, started: Instant::now() }
    }

    /// How to change what is logged.
    #[must_use]
    pub fn with_log(mut self, set: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.set_log = Some(Box::new(set));
        self
    }

    /// The target.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The target, to shut it down.
    pub fn into_target(self) -> Target {
        self.target
    }

    /// The metrics as text.
    pub fn metrics(&self) -> String {
        metrics::text(&self.target.status(), &self.target.counters(), &self.target.latency())
    }

    /// Carries a request out.
    ///
    /// # Errors
    /// It was refused or failed: nothing has changed.
    pub fn handle(&self, request: &Request) -> Result<Value, Failure> {
        match request {
            Request::Status => {
                let served = self.target.served();
                let (status, counters) = (self.target.status(), self.target.counters());
                let mut report = report::status(&status, &counters, served.provider, self.started.elapsed());
                report["disconnects"] = report::disconnects(&self.target.disconnects());
                Ok(report)
            }
            Request::Metrics => Ok(self.metrics().into()),
            Request::Latency => Ok(report::latency(&self.target.latency())),
            Request::Histograms { on } => {
                let mut running = self.lock();
                self.target.set_histograms(*on);
                running.options.histograms = *on;
                Ok(json!({ "histograms": on }))
            }
            Request::Config => Ok(self.lock().to_toml().into()),
            Request::Apply { config, dry_run } => self.apply(config, *dry_run),
            Request::Save { path } => self.save(path.as_deref()),
            Request::ResizeNamespace { nqn, nsid } => self.resize(nqn, *nsid),
            Request::Disconnect { host, nqn } => {
                Ok(json!({ "disconnected": self.target.disconnect(host, nqn.as_deref()) }))
            }
            Request::Log { level } => self.log(level),
            change => {
                let mut running = self.lock();
                match edited(&running, change)? {
                    Some(wanted) => self.become_(&mut running, wanted, Vec::new(), false),
                    None => Err(Failure::new(
                        "request",
                        "changes nothing",
                        "name a change: `farside ctl --help` lists them",
                    )),
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn apply(&self, text: &str, dry_run: bool) -> Result<Value, Failure> {
        let wanted = Config::parse_running(text, "file")?;
        let mut running = self.lock();
        let renewed = renewed(&self.target, &running, &wanted)?;
        self.become_(&mut running, wanted, renewed, dry_run)
    }

    /// Makes the running configuration the wanted one, with `more` that the two do not show, or leaves it as it is.
    fn become_(
        &self,
        running: &mut Config,
        wanted: Config,
        more: Vec<Change>,
        dry_run: bool,
    ) -> Result<Value, Failure> {
        let mut changes = plan(running, &wanted)?;
        changes.extend(more);
        arrange(&mut changes);
        self.check_draining(&changes)?;
        let new: Vec<_> = changes.iter().filter_map(Change::addition).collect();
        let problems = wanted.check_additions("request", &new);
        if !problems.is_empty() {
            return Err(problems.into());
        }
        let known = running.odd_hosts();
        let odd: Vec<String> = wanted.odd_hosts().into_iter().filter(|line| !known.contains(line)).collect();
        let mut draining = Vec::new();
        if !dry_run {
            odd.iter().for_each(|line| warn!("{line}"));
            let (before, after) = (&running.options.log, &wanted.options.log);
            if before != after {
                self.set_log(after)?;
            }
            draining = carry_out(&self.target, &changes).inspect_err(|_| {
                if before != after {
                    let _ = self.set_log(before);
                }
            })?;
            self.target.set_histograms(wanted.options.histograms);
            *running = wanted;
        }
        let mut answer = json!({ "changes": changes.iter().map(ToString::to_string).collect::<Vec<_>>() });
        if !odd.is_empty() {
            answer["notes"] = json!(odd);
        }
        if !draining.is_empty() {
            answer["draining"] = report::draining(&draining);
        }
        Ok(answer)
    }

    /// Storage that commands of a removed namespace are still under way on cannot be served anew.
    fn check_draining(&self, changes: &[Change]) -> Result<(), Failure> {
        let draining = self.target.draining();
        for change in changes.iter().filter(|change| change.adds()) {
            let (nqn, namespaces) = change.namespaces();
            for (spec, path) in namespaces.iter().filter_map(|spec| Some((spec, spec.backend.source.path()?))) {
                if let Some(old) = draining.iter().find(|old| same_place(Path::new(&old.backend), path)) {
                    let reason = format!(
                        "{} is not closed yet: commands on namespace {} of {}, which was removed, have not ended",
                        old.backend, old.nsid, old.nqn
                    );
                    let remedy =
                        "look at the disk behind it; serve it when `farside ctl status` lists it no more as draining";
                    return Err(Failure::new(format!("namespace {} of {nqn}", spec.nsid), reason, remedy));
                }
            }
        }
        Ok(())
    }

    fn resize(&self, nqn: &str, nsid: u32) -> Result<Value, Failure> {
        let mut running = self.lock();
        let blocks = self.target.resize_namespace(nqn, nsid)?;
        let size = self
            .target
            .status()
            .subsystems
            .iter()
            .filter(|one| one.nqn == nqn)
            .flat_map(|one| &one.namespaces)
            .find(|one| one.nsid == nsid)
            .map_or(0, |one| one.blocks * u64::from(one.block_size));
        let mut answer = json!({ "blocks": blocks, "bytes": size });
        let namespaces = running.subsystems.iter_mut().filter(|one| one.nqn == nqn).flat_map(|one| &mut one.namespaces);
        for namespace in namespaces.filter(|one| one.nsid == nsid) {
            // A size that was configured is the size that a restart expects.
            if let Source::File { size: Some(configured), .. } = &mut namespace.backend.source {
                *configured = size;
                answer["note"] =
                    json!("its configuration names a size, which has to change too: `farside ctl save` does that");
            }
        }
        Ok(answer)
    }

    fn log(&self, level: &str) -> Result<Value, Failure> {
        const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
        if !LEVELS.contains(&level) {
            let remedy = format!("choose one of {}", LEVELS.join(", "));
            return Err(Failure::new("log level", format!("{level:?} is none"), remedy));
        }
        let mut running = self.lock();
        self.set_log(level)?;
        running.options.log = level.to_owned();
        Ok(json!({ "level": level }))
    }

    fn set_log(&self, level: &str) -> Result<(), Failure> {
        let refuse = |reason: String| Failure::new("log level", reason, "set it in the configuration, and restart");
        match &self.set_log {
            Some(set) => set(level).map_err(refuse),
            None => Err(refuse("this program does not let it be changed".into())),
        }
    }

    fn save(&self, path: Option<&str>) -> Result<Value, Failure> {
        let path = path.map(PathBuf::from).or_else(|| self.file.clone()).ok_or_else(|| {
            Failure::new("save", "the target was started without a configuration file", "name a file to write")
        })?;
        if !path.is_absolute() {
            return Err(Failure::new(path.display().to_string(), "is no absolute path", "start it with /"));
        }
        let text = self.lock().to_toml();
        keep_former(&path, &text).map_err(|error| {
            Failure::new(format!("{}.old", path.display()), error, "choose a place that the target's user may write")
        })?;
        write_whole(&path, &text).map_err(|error| {
            Failure::new(path.display().to_string(), error, "choose a place that the target's user may write")
        })?;
        Ok(json!({ "path": path.display().to_string(), "bytes": text.len() }))
    }
}

/// What a file holds that is about to be written, comments and all, stays beside it as `.old`.
fn keep_former(path: &Path, text: &str) -> std::io::Result<()> {
    let former = match std::fs::read(path) {
        Ok(former) if former != text.as_bytes() => former,
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".old");
    std::fs::write(path.with_file_name(name), former)
}

/// Replaces a file by another content, on stable storage: after a crash it is the old one or the new one.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let written = std::fs::File::create(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        std::fs::File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written
}
