//! What can go wrong for a host: what was tried, why it failed, what to try.

use nvme::Status;

use crate::rdma::{RdmaError, RejectReason, WcStatus};

/// An error of the host. `kind` is for programs, the text for people.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what}: {kind}{}{remedy}", if .remedy.is_empty() { "" } else { "; " })]
pub struct HostError {
    /// The object and what was tried with it.
    pub what: String,
    /// Why it failed.
    pub kind: HostErrorKind,
    /// What to do about it; may be empty.
    pub remedy: String,
}

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostErrorKind {
    /// The provider or its device.
    #[error("{0}")]
    Rdma(String),
    /// The target's connection management refused; NVMe's status from its private data if there is one.
    #[error("connection refused ({})", refusal(.reason, .status))]
    Refused {
        /// The reason of connection management.
        reason: u16,
        /// The NVMe/RDMA reject status.
        status: Option<u16>,
    },
    /// A command was answered with an error.
    #[error("{status}{}", location(.status, .result))]
    Status {
        /// The status.
        status: Status,
        /// Dword 0 and 1 of the completion.
        result: u64,
    },
    /// The connection is lost.
    #[error("connection lost: {0}")]
    Lost(String),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(std::time::Duration),
    /// The target said something that makes no sense.
    #[error("the target broke the protocol: {0}")]
    Protocol(String),
    /// The caller asked for something impossible.
    #[error("{0}")]
    Usage(String),
}

impl HostError {
    /// From its parts.
    pub fn new(what: impl Into<String>, kind: HostErrorKind, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), kind, remedy: remedy.into() }
    }

    pub(crate) fn usage(what: impl Into<String>, why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(what, HostErrorKind::Usage(why.into()), remedy)
    }

    pub(crate) fn protocol(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(what, HostErrorKind::Protocol(why.into()), "")
    }

    pub(crate) fn lost(what: impl Into<String>, why: impl ToString) -> Self {
        Self::new(what, HostErrorKind::Lost(why.to_string()), "")
    }

    /// The status of the command that failed, if that is what happened.
    pub fn status(&self) -> Option<Status> {
        match self.kind {
            HostErrorKind::Status { status, .. } => Some(status),
            _ => None,
        }
    }

    /// Of a refused connection.
    pub(crate) fn refused(what: impl Into<String>, reason: RejectReason, private_data: &[u8]) -> Self {
        let status = match (reason, private_data) {
            (RejectReason::CONSUMER, [0, 0, low, high, ..]) => Some(u16::from_le_bytes([*low, *high])),
            _ => None,
        };
        let remedy = match (reason, status) {
            (RejectReason::INVALID_SERVICE_ID, _) => "is the target running, and is the port right?",
            (RejectReason::STALE_CONNECTION, _) => "try again in a moment",
            (_, Some(4 | 5)) => "ask for smaller queues",
            (_, Some(6)) => "ask for fewer or smaller queues, or give the target more memory",
            _ => "",
        };
        Self::new(what, HostErrorKind::Refused { reason: reason.0, status }, remedy)
    }
}

impl From<RdmaError> for HostError {
    fn from(error: RdmaError) -> Self {
        Self { what: error.what, kind: HostErrorKind::Rdma(error.reason), remedy: error.remedy }
    }
}

/// Why an I/O command has no good answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoFailure {
    /// The target answered with an error.
    #[error("{0}")]
    Status(Status),
    /// The connection was lost before the answer came: nobody knows whether the command took effect.
    #[error("connection lost ({0})")]
    Lost(WcStatus),
    /// The answer was for a key that the command did not name.
    #[error("the target invalidated a foreign key")]
    BogusInvalidate,
}

/// What the words of the reject status mean (NVMe RDMA Transport, "Connection Establishment").
fn refusal(reason: &u16, status: &Option<u16>) -> String {
    match (RejectReason(*reason), status) {
        (RejectReason::INVALID_SERVICE_ID, _) => "nobody listens on that address and port".into(),
        (RejectReason::STALE_CONNECTION, _) => "stale connection".into(),
        (_, Some(1)) => "invalid private data length".into(),
        (_, Some(2)) => "invalid record format".into(),
        (_, Some(3)) => "invalid queue ID".into(),
        (_, Some(4)) => "invalid host send queue size".into(),
        (_, Some(5)) => "invalid host receive queue size".into(),
        (_, Some(6)) => "no resources".into(),
        (_, Some(7)) => "invalid RDMA READ depth (IRD)".into(),
        (_, Some(8)) => "invalid RDMA READ depth (ORD)".into(),
        (_, Some(9)) => "invalid controller ID".into(),
        (_, Some(other)) => format!("reject status {other}"),
        (reason, None) => format!("reason {}", reason.0),
    }
}

/// Of an answer that says Connect Invalid Parameters: whether the byte is one of the data, and which.
fn field(result: u64) -> (u64, u64) {
    ((result >> 16) & 1, result & 0xffff)
}

/// What to do about a command of a controller's start that failed.
pub(super) fn setup_remedy(status: &Status, result: u64) -> &'static str {
    match *status {
        code if code.code() == Status::CONNECT_INVALID_PARAMETERS.code() => match field(result) {
            (1, 256) => "name a subsystem that the target serves: farside discover",
            (1, 512) => "name this host by a valid NQN",
            (_, 42 | 44) => "ask for fewer or smaller queues",
            _ => "connect again",
        },
        code if code.code() == Status::CONNECT_INVALID_HOST.code() => {
            "have the target's operator allow this host's NQN"
        }
        code if code.code() == Status::CONNECT_CONTROLLER_BUSY.code() => "try again later",
        _ => "",
    }
}

/// Which field of a Connect command was wrong.
fn location(status: &Status, result: &u64) -> String {
    if status.code() != Status::CONNECT_INVALID_PARAMETERS.code() {
        return String::new();
    }
    let (attribute, offset) = field(*result);
    let name = match (attribute, offset) {
        (0, 42) => "QID",
        (0, 44) => "SQSIZE",
        (1, 0) => "host ID",
        (1, 16) => "controller ID",
        (1, 256) => "subsystem NQN",
        (1, 512) => "host NQN",
        _ => return format!(" (byte {offset} of the {})", if attribute == 0 { "command" } else { "data" }),
    };
    format!(" ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_why_and_what_to_try() {
        let error = HostError::refused("connect to 192.0.2.1:4420", RejectReason::CONSUMER, &[0, 0, 6, 0, 0, 0]);
        assert_eq!(
            error.to_string(),
            "connect to 192.0.2.1:4420: connection refused (no resources); ask for fewer or smaller queues, or give the \
             target more memory"
        );
        let kind = HostErrorKind::Status { status: Status::CONNECT_INVALID_PARAMETERS.dnr(), result: 256 | 1 << 16 };
        let text = HostError::new("Connect", kind, "").to_string();
        assert!(text.ends_with("(subsystem NQN)"), "{text}");
        let invalid = Status::CONNECT_INVALID_PARAMETERS.dnr();
        assert!(setup_remedy(&invalid, 256 | 1 << 16).contains("discover"));
        assert!(setup_remedy(&invalid, 44).contains("smaller") && setup_remedy(&invalid, 1 << 16).contains("again"));
        assert!(setup_remedy(&Status::CONNECT_INVALID_HOST.dnr(), 0).contains("allow"));
        let nobody = HostError::refused("x", RejectReason::INVALID_SERVICE_ID, &[]).to_string();
        assert!(nobody.contains("nobody listens"), "{nobody}");
    }
}
