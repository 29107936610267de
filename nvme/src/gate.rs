//! What keeps commands of some hosts out of a namespace: made by the registry, published with the namespace's view, and
//! looked at only where there is one.

use crate::io::IoCommand;
use crate::reservation::{Guard, HostId};
use crate::status::Status;

/// Who sends a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Its host's identifier.
    pub hostid: HostId,
    /// The port that it came by.
    pub portid: u16,
    /// The registry's number for its host's NQN.
    pub host: u64,
}

/// All that a command has to pass beside [`crate::io::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// Numbers of the hosts that see it, ascending; `None`: all do.
    pub(crate) audience: Option<Box<[u64]>>,
    pub(crate) reservation: Option<Guard>,
    /// Ports through which it is not reached, and the answer there.
    pub(crate) unreached: Box<[(u16, Status)]>,
    /// It was taken away and may come back, or is in the place of one that may: nothing is executed until that is decided.
    pub(crate) held: bool,
}

impl Gate {
    /// It keeps nobody out.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a command may pass.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn check(&self, sender: &Sender, io: &IoCommand) -> Result<(), Status> {
        if self.audience.as_ref().is_some_and(|hosts| hosts.binary_search(&sender.host).is_err()) {
            return Err(crate::io::no_namespace());
        }
        if let Some((_, status)) = self.unreached.iter().find(|(port, _)| *port == sender.portid) {
            return Err(*status);
        }
        if self.held {
            return Err(Status::NAMESPACE_NOT_READY);
        }
        if let Some(guard) = &self.reservation
            && let Some(writes) = access(io)
            && !guard.admits(&sender.hostid, writes)
        {
            return Err(Status::RESERVATION_CONFLICT.dnr());
        }
        Ok(())
    }

    /// The answer to a command that [`crate::io::check`] refused with `status`. While the namespace is held, what it looks like
    /// refuses nothing for good.
    #[must_use]
    pub fn refusal(&self, status: Status) -> Status {
        if self.held { Status::NAMESPACE_NOT_READY } else { status }
    }

    /// Whether nothing is executed because another namespace may have this place in the end.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held
    }
}

/// Whether a command belongs to the writes or to the reads that reservations tell apart; reservation commands decide for
/// themselves.
fn access(io: &IoCommand) -> Option<bool> {
    match io {
        IoCommand::Read { .. } | IoCommand::Compare { .. } | IoCommand::Verify { .. } => Some(false),
        IoCommand::Write { .. }
        | IoCommand::WriteZeroes { .. }
        | IoCommand::Deallocate { .. }
        | IoCommand::DsmHint
        | IoCommand::Flush
        | IoCommand::Copy { .. } => Some(true),
        IoCommand::Zone(command) => Some(command.changes_media()),
        IoCommand::Reservation(_) => None,
    }
}
