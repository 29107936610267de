//! What is said on the control socket.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{ConfigError, Problem};
use crate::target::TargetError;

/// One request, as the JSON object `{"op": "add_namespace", "nqn": .., ..}`. Keys that a request does not have are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// What is served, to whom, and how much was done: subsystems, listeners, controllers with their queues, hosts, counters;
    /// and why the latest queues ended, and what drains. Namespaces, queues and hosts have `reads`, `bytes_read`, `writes`,
    /// `bytes_written` and `errors`; a host's are those of all its queues, of those that ended too.
    Status,
    /// The metrics as text in Prometheus' exposition format.
    Metrics,
    /// How long commands took, by stage: for each namespace, host and connected queue. Times in microseconds.
    Latency,
    /// The running configuration as TOML.
    Config,
    /// Makes the running configuration what a TOML text says; answers with the list of changes. All or nothing.
    Apply {
        /// The text of a configuration file.
        config: String,
        /// Only say what would change.
        #[serde(default)]
        dry_run: bool,
    },
    /// Writes the running configuration to a file: the one that the target was started with, unless another is named.
    Save {
        /// An absolute path.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
    /// Adds a subsystem; the keys are those of `[[subsystem]]` in the configuration file.
    AddSubsystem {
        /// `nqn`, `serial`, `namespace`, ..
        subsystem: Map<String, Value>,
    },
    /// Removes a subsystem; its hosts are disconnected. What is said of [`Self::RemoveNamespace`] holds for its namespaces.
    RemoveSubsystem {
        /// Its NQN.
        nqn: String,
    },
    /// Adds a namespace; the keys are those of `[[subsystem.namespace]]`. Without `nsid` it gets the smallest free one.
    AddNamespace {
        /// NQN of its subsystem.
        nqn: String,
        /// `file`, `size`, ..
        namespace: Map<String, Value>,
    },
    /// Removes a namespace. The answer has `draining`, a list of `nqn`, `nsid` and `backend`, where commands have not ended
    /// within 10 s: hosts have the namespace no more, and its storage is closed when they do. So it is with
    /// [`Self::Apply`] and [`Self::Status`].
    RemoveNamespace {
        /// NQN of its subsystem.
        nqn: String,
        /// Its NSID.
        nsid: u32,
    },
    /// Takes over the size that a namespace's storage has become.
    ResizeNamespace {
        /// NQN of its subsystem.
        nqn: String,
        /// Its NSID.
        nsid: u32,
    },
    /// Lets a host connect to a subsystem that not everybody may connect to.
    AllowHost {
        /// NQN of the subsystem.
        nqn: String,
        /// NQN of the host.
        host: String,
    },
    /// Lets a host connect no more, and disconnects it.
    RemoveHost {
        /// NQN of the subsystem.
        nqn: String,
        /// NQN of the host.
        host: String,
    },
    /// Says whether any host may connect. Turned off, all but the listed ones are disconnected.
    AllowAnyHost {
        /// NQN of the subsystem.
        nqn: String,
        /// On or off.
        allow: bool,
    },
    /// Listens on one more address; the keys are those of `[[listener]]`.
    AddListener {
        /// `address`, `tos`
        listener: Map<String, Value>,
    },
    /// Stops to listen on an address. Connections stay.
    RemoveListener {
        /// As it was given.
        address: String,
    },
    /// Disconnects a host; it may connect again.
    Disconnect {
        /// NQN of the host.
        host: String,
        /// From this subsystem alone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nqn: Option<String>,
    },
    /// Keeps histograms of how long commands take from now on, or not; what was recorded stays.
    Histograms {
        /// On or off.
        on: bool,
    },
    /// Changes what is logged.
    Log {
        /// `error`, `warn`, `info`, `debug` or `trace`
        level: String,
    },
}

/// Why a request was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{object}: {reason}{}{remedy}", if .remedy.is_empty() { "" } else { "; " })]
pub struct Failure {
    /// What it is about.
    pub object: String,
    /// Why.
    pub reason: String,
    /// What to do about it; may be empty.
    #[serde(default)]
    pub remedy: String,
}

impl Failure {
    pub(crate) fn new(object: impl Into<String>, reason: impl ToString, remedy: impl Into<String>) -> Self {
        Self { object: object.into(), reason: reason.to_string(), remedy: remedy.into() }
    }
}

impl Failure {
    /// The same, with what could not be taken back of what was done before.
    pub(super) fn with_left(mut self, left: &[String]) -> Self {
        if !left.is_empty() {
            self.reason =
                format!("{}; and what was done before could not be taken back: {}", self.reason, left.join(", "));
            self.remedy = format!("{}; then apply the whole configuration", self.remedy);
        }
        self
    }
}

impl From<TargetError> for Failure {
    fn from(error: TargetError) -> Self {
        Self { object: error.object, reason: error.reason, remedy: error.remedy }
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        let line = problem.line.map(|line| format!(":{line}")).unwrap_or_default();
        let key = if problem.key.is_empty() { String::new() } else { format!(": {}", problem.key) };
        Self { object: format!("{}{line}{key}", problem.file), reason: problem.reason, remedy: problem.remedy }
    }
}

impl From<Vec<Problem>> for Failure {
    /// The first one whole, and how many more there are.
    fn from(problems: Vec<Problem>) -> Self {
        let more = problems.len().saturating_sub(1);
        let first = problems.into_iter().next().map(Self::from);
        let mut failure =
            first.unwrap_or_else(|| Self::new("configuration", "is refused", "see `farside check` for why"));
        if more > 0 {
            failure.remedy = format!("{}; and {more} more", failure.remedy);
        }
        failure
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        error.0.into()
    }
}

/// The answer as a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Ok(Value),
    Error(Failure),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_documented_and_nothing_else() {
        let read = |text: &str| serde_json::from_str::<Request>(text);
        assert_eq!(read(r#"{"op":"status"}"#).unwrap(), Request::Status);
        let removal = Request::RemoveNamespace { nqn: "nqn.x".into(), nsid: 3 };
        assert_eq!(read(r#"{"op":"remove_namespace","nqn":"nqn.x","nsid":3}"#).unwrap(), removal);
        assert_eq!(read(&serde_json::to_string(&removal).unwrap()).unwrap(), removal);
        let dry = Request::Apply { config: "x".into(), dry_run: false };
        assert_eq!(read(r#"{"op":"apply","config":"x"}"#).unwrap(), dry);
        for wrong in [
            "",
            "{}",
            r#"{"op":"fly"}"#,
            r#"{"op":"remove_namespace","nqn":"nqn.x"}"#,
            r#"{"op":"remove_namespace","nqn":"nqn.x","nsid":-1}"#,
            r#"{"op":"remove_namespace","nqn":"nqn.x","nsid":1,"force":true}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
