//! Authentication of hosts: which of them has to, the commands that carry it, and what is refused until it is done.

use core::time::Duration;

use super::config::ConfigError;
use super::controller::Controller;
use super::subsystem::host_nqn;
use super::{Action, Change, ControllerId, Registry, SubsystemId, Surroundings, gone};
use crate::admin::{Refused, location};
use crate::auth::exchange::{Exchange, Fetched, Names, Sent};
use crate::auth::{Computed, HostAuth};
use crate::command::Command;
use crate::completion::Completion;
use crate::fabrics::{AUTH_MESSAGE_MAX, AuthTransfer};
use crate::nqn::Nqn;
use crate::status::Status;

impl Registry {
    /// Has a host prove who it is, from its next Connect or its next exchange on; `None` asks it no more. Connections stay.
    ///
    /// # Errors
    /// There is no such subsystem, the NQN breaks a rule, or there is no source of random bytes.
    pub fn set_host_auth(&mut self, id: SubsystemId, host: &str, auth: Option<HostAuth>) -> Result<(), ConfigError> {
        let host = host_nqn(host)?;
        if auth.is_some() && self.config.random.is_none() {
            return Err(ConfigError::Limit("random: authentication needs a source of random bytes"));
        }
        let keys = &mut self.subsystem_mut(id)?.auth;
        match auth {
            Some(auth) => drop(keys.insert(host, auth)),
            None => drop(keys.remove(&host)),
        }
        Ok(())
    }

    /// What is asked of a host; `None` when it need not prove who it is.
    ///
    /// # Errors
    /// There is no such subsystem, or the NQN breaks a rule.
    pub fn host_auth(&self, id: SubsystemId, host: &str) -> Result<Option<&HostAuth>, ConfigError> {
        let subsystem = self.subsystems.get(&id).ok_or(ConfigError::NoSuchSubsystem)?;
        Ok(subsystem.auth.get(&host_nqn(host)?))
    }

    /// Whether commands of a queue are taken: it need not be authenticated, or is.
    #[must_use]
    pub fn is_authenticated(&self, ctrl: ControllerId, qid: u16) -> bool {
        self.controller_ref(ctrl).is_some_and(|controller| controller.is_authenticated(qid))
    }

    /// How often hosts proved themselves since the start: once per queue, and again whenever they liked.
    #[must_use]
    pub fn authentications(&self) -> u64 {
        self.authentications
    }

    /// What [`Action::Compute`] asked for is done. The answer to the command that asked for it.
    pub fn computed(&mut self, ctrl: ControllerId, qid: u16, cid: u16, result: &Computed) -> Action {
        let Some((controller, cx)) = self.split(ctrl) else { return Action::Complete(gone(cid)) };
        let Controller { association, exchanges, .. } = controller;
        let subsystem = cx.subsystems.get(&association.subsystem);
        let auth = subsystem.and_then(|subsystem| subsystem.auth.get(&association.hostnqn));
        if let Some(exchange) = exchanges.get_mut(&qid) {
            exchange.computed(result, auth, names(&association.hostnqn, &association.subnqn));
        }
        Action::Complete(Completion::success(cid))
    }
}

fn names<'a>(host: &'a Nqn, subsystem: &'a Nqn) -> Names<'a> {
    Names { host: host.as_bytes(), subsystem: subsystem.as_bytes() }
}

impl Controller {
    /// A queue was connected: its host may have to prove itself on it. Whether it does.
    pub(super) fn expect_authentication(&mut self, required: bool, qid: u16, deadline: Duration) -> bool {
        if required {
            self.exchanges.insert(qid, Exchange::new(deadline));
        }
        required
    }

    pub(super) fn is_authenticated(&self, qid: u16) -> bool {
        self.exchanges.get(&qid).is_none_or(Exchange::is_authenticated)
    }

    /// When a host must have proven itself, on the queue where that is due first.
    pub(super) fn authentication_deadline(&self) -> Option<Duration> {
        self.exchanges.values().filter_map(Exchange::deadline).min()
    }

    /// Queues whose hosts had their time, told once.
    pub(super) fn late_queues(&mut self, now: Duration) -> Vec<u16> {
        let late = self.exchanges.iter_mut().filter(|(_, exchange)| exchange.deadline().is_some_and(|at| at <= now));
        let late = late.map(|(qid, exchange)| {
            exchange.expire();
            *qid
        });
        late.collect()
    }

    /// Authentication Send: the data are a message of the host.
    pub(super) fn authentication_send(
        &mut self,
        cx: &mut Surroundings<'_>,
        qid: u16,
        command: &Command,
        transfer: AuthTransfer,
        data: Option<&[u8]>,
    ) -> Result<Action, Refused> {
        transfer.check(command, false)?;
        let Some(data) = data else {
            self.exchange_of(qid)?;
            return Ok(Action::FetchData { len: transfer.len });
        };
        let complete = Completion::success(command.cid);
        let random = cx.config.random.ok_or(Status::INTERNAL_ERROR.dnr())?;
        let Self { association, exchanges, .. } = self;
        let subsystem = cx.subsystems.get(&association.subsystem);
        let auth = subsystem.and_then(|subsystem| subsystem.auth.get(&association.hostnqn));
        let exchange = exchanges.get_mut(&qid).ok_or(NOT_ASKED)?;
        let before = exchange.completed();
        let sent = exchange.send(data, auth, names(&association.hostnqn, &association.subnqn), random);
        let completed = exchange.completed();
        self.note_completed(cx, qid, before, completed);
        Ok(match sent {
            Sent::Taken => Action::Complete(complete),
            Sent::Compute(job) => Action::Compute { job },
            Sent::GivenUp => Action::DisconnectQueue { completion: complete },
        })
    }

    /// Authentication Receive: the host fetches a message of ours, padded to what it asked for.
    pub(super) fn authentication_receive(
        &mut self,
        cx: &mut Surroundings<'_>,
        qid: u16,
        command: &Command,
        transfer: AuthTransfer,
    ) -> Result<Action, Refused> {
        transfer.check(command, true)?;
        let exchange = self.exchange_of(qid)?;
        let before = exchange.completed();
        let fetched = exchange.receive();
        let completed = exchange.completed();
        self.note_completed(cx, qid, before, completed);
        let completion = Completion::success(command.cid);
        let padded = |mut message: Vec<u8>| {
            let len = usize::try_from(transfer.len).unwrap_or_default();
            (message.len() <= len).then(|| {
                message.resize(len, 0);
                message
            })
        };
        let short = Refused::invalid_field(location::CDW11);
        Ok(match fetched {
            Fetched::Message(message) => Action::SendData { data: padded(message).ok_or(short)?, completion },
            Fetched::Last(message) => Action::SendLast { data: padded(message).ok_or(short)?, completion },
        })
    }

    /// Counts, and has a host that just became known as what it says take its place.
    fn note_completed(&self, cx: &mut Surroundings<'_>, qid: u16, before: u64, completed: u64) {
        *cx.authentications += completed - before;
        if qid == 0 && before == 0 && completed > 0 {
            cx.changes.push(Change::Authenticated { ctrl: self.id });
        }
    }

    fn exchange_of(&mut self, qid: u16) -> Result<&mut Exchange, Refused> {
        self.exchanges.get_mut(&qid).ok_or(NOT_ASKED)
    }
}

impl AuthTransfer {
    /// The protocol must be ours, the length one that a message can have, and the descriptor must cover it.
    fn check(self, command: &Command, to_host: bool) -> Result<(), Refused> {
        if !self.protocol {
            return Err(Refused::invalid_field(location::CDW10));
        }
        if self.len == 0 || self.len > AUTH_MESSAGE_MAX {
            return Err(Refused::invalid_field(location::CDW11));
        }
        super::admin::covers(command, self.len, to_host)
    }
}

/// The host need not authenticate on this queue.
const NOT_ASKED: Refused = Refused::at(location::OPCODE, Status::INVALID_OPCODE.dnr());
