//! Configurations of other targets as input: what nvmetcli saves of the kernel's target, and what SPDK saves and loads
//! (`save_config`, `--json`). Both are JSON.
//!
//! What is read becomes a configuration in this program's own words ([`Imported::toml`]), which is then checked like any
//! other. Every key of the input is either carried over, or is named in [`Imported::notes`] by its path and with the reason; a
//! setting that keeps hosts out is never left out, it is refused.

mod draft;
mod nvmet;
mod object;
mod spdk;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::problem::{ConfigError, Problem};
use super::{Config, parse};
use draft::Draft;
use object::{Object, Report};

/// A setting that was not carried over.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// Where it stands: `ports[0].addr.treq`.
    pub path: String,
    /// Why, and what happens in its place.
    pub reason: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: not carried over: {}", self.path, self.reason)
    }
}

/// Another target's configuration.
#[derive(Clone, Debug)]
pub struct Imported {
    /// Whose it was: `nvmetcli` or `SPDK`.
    pub origin: &'static str,
    /// As a file of this program says it.
    pub toml: String,
    /// The same, checked.
    pub config: Config,
    /// What was left out.
    pub notes: Vec<Note>,
}

/// A configuration of any of the known forms, with what could not be carried over.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Checked in itself.
    pub config: Config,
    /// Empty for a file of our own form.
    pub notes: Vec<Note>,
    /// Another target's form: it is not written back to.
    pub foreign: bool,
}

/// Whether a text is JSON, and so another target's configuration: no TOML file starts with a brace.
pub fn is_foreign(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
}

/// Reads another target's configuration. `name` stands for its file in problems.
///
/// # Errors
/// It is no JSON, neither of the two forms, or asks for what cannot be done here.
pub fn import(text: &str, name: &str) -> Result<Imported, ConfigError> {
    let text = text.trim_start_matches('\u{feff}');
    let one = |line: Option<usize>, key: &str, reason: String, remedy: &str| {
        let (file, key, remedy) = (name.to_owned(), key.to_owned(), remedy.to_owned());
        ConfigError(vec![Problem { file, line, key, reason, remedy }])
    };
    let root: Value = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.split(" at line ").next().unwrap_or_default().to_owned();
        one(Some(error.line()), "", format!("column {}: {reason}", error.column()), "correct the JSON here")
    })?;
    let mut report = Report::default();
    let Value::Object(map) = &root else {
        return Err(one(None, "", "is no JSON object".into(), FORMS));
    };
    // The kernel's subsystems have an NQN; SPDK's "subsystems" are parts of the program, each with a list of calls.
    let parts = map.get("subsystems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let spdk =
        parts.iter().any(|part| part.get("subsystem").is_some_and(Value::is_string) && part.get("nqn").is_none());
    let nvmet = map.contains_key("ports") || parts.iter().any(|part| part.get("nqn").is_some());
    let (origin, draft) = match (spdk, nvmet) {
        (true, false) => ("SPDK", spdk::read(Object::root(map), &mut report)),
        (false, true) => ("nvmetcli", nvmet::read(Object::root(map), &mut report)),
        (true, true) => return Err(one(None, "subsystems", "mixes nvmetcli's form with SPDK's".into(), FORMS)),
        (false, false) => return Err(one(None, "", "is neither nvmetcli's form nor SPDK's".into(), FORMS)),
    };
    finish(origin, &draft, report, name)
}

const FORMS: &str = "give what `nvmetcli save` or SPDK's save_config wrote, or a TOML file";

fn finish(origin: &'static str, draft: &Draft, mut report: Report, name: &str) -> Result<Imported, ConfigError> {
    let (toml, paths) = draft.to_toml();
    report.notes.sort();
    report.notes.dedup();
    let parsed = parse::parse(&toml, name);
    let mut problems: Vec<Problem> = report.problems.into_iter().map(|problem| problem.of(name)).collect();
    // What our own rules say of it is worth saying only of what was understood.
    if let (true, Err(ConfigError(found))) = (problems.is_empty(), &parsed) {
        // What breaks our rules is named by where it came from.
        problems.extend(found.iter().map(|problem| {
            let path = problem.line.and_then(|line| paths.get(line - 1)).filter(|path| !path.is_empty());
            Problem { line: None, key: path.unwrap_or(&problem.key).clone(), ..problem.clone() }
        }));
    }
    match parsed {
        Ok(mut config) if problems.is_empty() => {
            config.listeners.iter_mut().for_each(|listener| listener.line = None);
            let namespaces = config.subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces);
            namespaces.for_each(|namespace| namespace.line = None);
            Ok(Imported { origin, toml, config, notes: report.notes })
        }
        _ => Err(ConfigError(problems)),
    }
}

impl Config {
    /// Reads a file of our own form, or another target's.
    ///
    /// # Errors
    /// As [`Config::load`] and [`import`].
    pub fn load_any(path: &Path) -> Result<Loaded, ConfigError> {
        let name = path.display().to_string();
        Self::parse_any(&Self::read_text(path)?, &name)
    }

    /// As [`Config::load_any`], of a text.
    ///
    /// # Errors
    /// As [`Config::parse`] and [`import`].
    pub fn parse_any(text: &str, name: &str) -> Result<Loaded, ConfigError> {
        if !is_foreign(text) {
            return Ok(Loaded { config: Self::parse(text, name)?, notes: Vec::new(), foreign: false });
        }
        let Imported { config, notes, .. } = import(text, name)?;
        Ok(Loaded { config, notes, foreign: true })
    }
}
