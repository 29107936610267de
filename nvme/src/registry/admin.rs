//! Admin and fabrics commands of a connected queue: one dispatcher, every check before any effect.

use core::time::Duration;

use super::controller::{Association, Controller};
use super::{AbortReply, Action, Change, ControllerId, Registry, Surroundings, discovery, gone, identify};
use crate::admin::{AdminCommand, GetFeatures, GetLogPage, Refused, SetFeatures, location};
use crate::aer::{Notice, Requested};
use crate::command::Command;
use crate::completion::Completion;
use crate::fabrics::FabricsCommand;
use crate::features::{FeatureValue, SetOutcome, fid};
use crate::logs::{self, CommandError, lid};
use crate::status::Status;
use crate::wire::ascii;
use crate::wire::logs::FirmwareSlots;
use crate::{io, zns};
use zerocopy::IntoBytes;

impl Registry {
    /// A command of an admin queue. `data` are those of a command that asked for them with [`Action::FetchData`], else
    /// `None`.
    pub fn admin(&mut self, ctrl: ControllerId, command: &Command, data: Option<&[u8]>, now: Duration) -> Action {
        let Some((controller, mut cx)) = self.split(ctrl) else {
            return Action::Complete(gone(command.cid));
        };
        if controller.is_dying() {
            return Action::Complete(gone(command.cid));
        }
        controller.last_activity = now;
        let outcome = if command.is_fabrics() {
            controller.admin_fabrics(&mut cx, command, data)
        } else if !controller.is_authenticated(0) {
            Err(Status::AUTHENTICATION_REQUIRED.dnr().into())
        } else {
            controller.admin_command(&mut cx, command, data, now)
        };
        let action = outcome.unwrap_or_else(|refused| controller.refuse(command, 0, refused));
        self.tell_changes();
        action
    }

    /// A fabrics command of an I/O queue that is connected: authentication, Disconnect, or something that does not belong there.
    /// `data` as with [`Self::admin`].
    pub fn io_fabrics(
        &mut self,
        ctrl: ControllerId,
        qid: u16,
        command: &Command,
        data: Option<&[u8]>,
        now: Duration,
    ) -> Action {
        let Some((controller, mut cx)) = self.split(ctrl) else {
            return Action::Complete(gone(command.cid));
        };
        controller.last_activity = now;
        let outcome = match FabricsCommand::parse(command) {
            Ok(FabricsCommand::Disconnect { recfmt: 0 }) => {
                Ok(Action::DisconnectQueue { completion: Completion::success(command.cid) })
            }
            Ok(FabricsCommand::AuthenticationSend(transfer)) => {
                controller.authentication_send(&mut cx, qid, command, transfer, data)
            }
            Ok(FabricsCommand::AuthenticationReceive(transfer)) => {
                controller.authentication_receive(&mut cx, qid, command, transfer)
            }
            Ok(FabricsCommand::Disconnect { .. }) => Err(Status::CONNECT_INCOMPATIBLE_FORMAT.dnr().into()),
            Ok(FabricsCommand::Connect(_)) => Err(Status::COMMAND_SEQUENCE_ERROR.dnr().into()),
            Ok(FabricsCommand::PropertyGet(_) | FabricsCommand::PropertySet { .. }) => {
                Err(Status::INVALID_QUEUE_TYPE.dnr().into())
            }
            Err(status) => Err(status.into()),
        };
        outcome.unwrap_or_else(|refused| controller.refuse(command, qid, refused))
    }
}

impl Command {
    /// Whether it is a Get Log Page of SMART / health, for which [`Registry::set_io_counters`] should be fed first.
    #[must_use]
    pub fn reads_counters(&self) -> bool {
        let [page, ..] = self.cdw10.to_le_bytes();
        self.opcode.0 == crate::admin::GET_LOG_PAGE && page == lid::SMART
    }
}

impl Controller {
    fn admin_fabrics(
        &mut self,
        cx: &mut Surroundings<'_>,
        command: &Command,
        data: Option<&[u8]>,
    ) -> Result<Action, Refused> {
        let parsed = FabricsCommand::parse(command)?;
        match parsed {
            FabricsCommand::AuthenticationSend(transfer) => {
                return self.authentication_send(cx, 0, command, transfer, data);
            }
            FabricsCommand::AuthenticationReceive(transfer) => {
                return self.authentication_receive(cx, 0, command, transfer);
            }
            _ if !self.is_authenticated(0) => return Err(Status::AUTHENTICATION_REQUIRED.dnr().into()),
            _ => {}
        }
        let complete = |result| Ok(Action::Complete(Completion::with_result(command.cid, result)));
        match parsed {
            FabricsCommand::PropertyGet(property) => {
                let value = self.properties.get(property);
                complete(value.map_err(|status| Refused::at(location::CDW11, status))?)
            }
            FabricsCommand::PropertySet { property, value } => {
                let effects = self.properties.set(property, value);
                let effects = effects.map_err(|status| Refused::at(location::CDW11, status))?;
                if effects.subsystem_reset {
                    let subsystem = self.association.subsystem;
                    cx.changes.push(Change::SubsystemReset { subsystem, by: self.id });
                    // Answered before it takes effect here.
                    return Ok(Action::DisconnectQueue { completion: Completion::success(command.cid) });
                }
                if effects.shutdown {
                    self.begin_shutdown(cx);
                }
                if effects.reset {
                    self.reset(cx.config, cx.events);
                }
                complete(0)
            }
            // The queue is connected already.
            FabricsCommand::Connect(_) => Err(Status::COMMAND_SEQUENCE_ERROR.dnr().into()),
            // An admin queue ends with its association. Authentication is dealt with above.
            FabricsCommand::Disconnect { .. }
            | FabricsCommand::AuthenticationSend(_)
            | FabricsCommand::AuthenticationReceive(_) => Err(Status::INVALID_QUEUE_TYPE.dnr().into()),
        }
    }

    fn begin_shutdown(&mut self, cx: &mut Surroundings<'_>) {
        if self.is_discovery() {
            self.properties.shutdown_done();
        } else {
            cx.events.push_back(super::Event::ShutDown { ctrl: self.id });
        }
    }

    fn admin_command(
        &mut self,
        cx: &mut Surroundings<'_>,
        command: &Command,
        data: Option<&[u8]>,
        now: Duration,
    ) -> Result<Action, Refused> {
        let parsed = AdminCommand::parse(command)?;
        let cid = command.cid;
        if !self.properties.is_ready() && parsed != AdminCommand::KeepAlive {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr().into());
        }
        if self.is_discovery() && matches!(parsed, AdminCommand::Abort { .. }) {
            return Err(Refused::at(location::OPCODE, Status::INVALID_OPCODE.dnr()));
        }
        match parsed {
            AdminCommand::Identify(identify) => {
                covers(command, identify::LEN, true)?;
                let data = identify::identify(self, cx, identify)?;
                Ok(send(cid, data))
            }
            AdminCommand::GetLogPage(get) => self.get_log_page(cx, command, get, now),
            AdminCommand::GetFeatures(GetFeatures { fid, .. }) | AdminCommand::SetFeatures(SetFeatures { fid, .. })
                if fid == fid::WRITE_PROTECTION && !cx.config.write_protection =>
            {
                Err(Refused::invalid_field(location::CDW10))
            }
            AdminCommand::GetFeatures(get) if self.is_of_namespace(get.fid) => self.get_namespace_feature(cx, cid, get),
            AdminCommand::SetFeatures(set) if self.is_of_namespace(set.fid) => self.set_namespace_feature(cx, cid, set),
            AdminCommand::GetFeatures(get) => self.get_features(cx, command, get),
            AdminCommand::SetFeatures(set) => self.set_features(cx, command, set, data),
            AdminCommand::KeepAlive => self.keep_alive(cid),
            AdminCommand::AsyncEventRequest => match self.events.request(cid) {
                Requested::Parked => Ok(Action::Hold),
                Requested::Fired(fired) => {
                    let completion = Completion::with_result(fired.cid, fired.dword0.into());
                    if fired.cid == cid {
                        return Ok(Action::Complete(completion));
                    }
                    cx.events.push_back(super::Event::CompleteHeld { ctrl: self.id, completion });
                    Ok(Action::Hold)
                }
                Requested::LimitExceeded => Err(Status::AER_LIMIT_EXCEEDED.dnr().into()),
            },
            AdminCommand::Abort { sqid, cid: target } => self.abort(cx, cid, sqid, target),
        }
    }

    /// Traffic of any kind keeps the association alive; the command itself only has to be answered. Without a timeout
    /// there is nothing to keep alive (nvmet answers the same).
    fn keep_alive(&self, cid: u16) -> Result<Action, Refused> {
        if self.features.kato().is_none() {
            return Err(Status::KEEP_ALIVE_TIMEOUT_INVALID.dnr().into());
        }
        Ok(Action::Complete(Completion::success(cid)))
    }

    /// Abort is best effort: not finding the command is a success that says so. On the admin queue only Asynchronous
    /// Event Requests last long enough to be aborted, and those are held here; an Abort that names itself finds nothing
    /// either.
    fn abort(&mut self, cx: &mut Surroundings<'_>, cid: u16, sqid: u16, target: u16) -> Result<Action, Refused> {
        let reply = AbortReply { cid };
        if sqid == 0 && self.events.abort(target) {
            let completion = Completion::failed(target, Status::ABORT_REQUESTED);
            cx.events.push_back(super::Event::CompleteHeld { ctrl: self.id, completion });
            return Ok(Action::Complete(reply.completion(true)));
        }
        if self.aborts > identify::ACL {
            return Err(Status::ABORT_LIMIT_EXCEEDED.into());
        }
        if !self.io_queues.contains(&sqid) {
            return Ok(Action::Complete(reply.completion(false)));
        }
        self.aborts += 1;
        Ok(Action::Abort { sqid, cid: target, reply })
    }

    fn get_features(&self, cx: &Surroundings<'_>, command: &Command, get: GetFeatures) -> Result<Action, Refused> {
        match self.features.get(get, &self.feature_context(cx.config))? {
            FeatureValue::Dword(value) => Ok(Action::Complete(Completion::with_result(command.cid, value.into()))),
            FeatureValue::Data(data) => {
                covers(command, u32::try_from(data.len()).unwrap_or(u32::MAX), true)?;
                Ok(send(command.cid, data))
            }
        }
    }

    fn set_features(
        &mut self,
        cx: &Surroundings<'_>,
        command: &Command,
        set: SetFeatures,
        data: Option<&[u8]>,
    ) -> Result<Action, Refused> {
        let context = self.feature_context(cx.config);
        match self.features.set(set, data, &context)? {
            SetOutcome::Done(value) => Ok(Action::Complete(Completion::with_result(command.cid, value.into()))),
            SetOutcome::NeedsData(len) => {
                covers(command, len, false)?;
                Ok(Action::FetchData { len })
            }
        }
    }

    fn get_log_page(
        &mut self,
        cx: &mut Surroundings<'_>,
        command: &Command,
        get: GetLogPage,
        now: Duration,
    ) -> Result<Action, Refused> {
        let len = u32::try_from(get.len).unwrap_or(u32::MAX);
        if len > cx.config.io_limits.mdts_bytes {
            return Err(Refused::invalid_field(location::CDW10 + 2));
        }
        covers(command, len, true)?;
        let page = self.log_page(cx, get, now)?;
        let data = logs::slice(&page, get.offset, usize::try_from(len).unwrap_or(usize::MAX))
            .map_err(|status| Refused::at(location::CDW12, status))?;
        match get.lid {
            lid::CHANGED_NAMESPACES => {
                if !get.retain {
                    self.changed.clear();
                }
                let notice = Notice::NamespaceAttribute;
                self.log_read(notice, get.offset, get.retain, cx.events);
            }
            lid::DISCOVERY => {
                self.log_read(Notice::DiscoveryLog, get.offset, get.retain, cx.events);
            }
            lid::ANA => self.log_read(Notice::AsymmetricAccess, get.offset, get.retain, cx.events),
            lid::RESERVATION => {
                let more = !get.retain && self.reservation_log.pop();
                self.log_read(Notice::Reservation, get.offset, get.retain, cx.events);
                if more {
                    self.notify(Notice::Reservation, cx.events);
                }
            }
            _ => {}
        }
        Ok(send(command.cid, data))
    }

    /// The whole page.
    fn log_page(&self, cx: &Surroundings<'_>, get: GetLogPage, now: Duration) -> Result<Vec<u8>, Refused> {
        let discovery = self.is_discovery();
        let pages: &[u8] = if discovery { &logs::DISCOVERY_PAGES } else { &logs::IO_PAGES };
        if !pages.contains(&get.lid) {
            let status = Status::INVALID_LOG_PAGE.dnr();
            return Err(Refused::at(location::CDW10, status));
        }
        let subsystem = cx.subsystems.get(&self.association.subsystem);
        Ok(match get.lid {
            lid::SUPPORTED => logs::supported_page(pages),
            lid::ERROR => self.errors.page(),
            lid::SMART => {
                // LPA bit 0 is clear: no page of one namespace.
                if !get.is_controller_scope() {
                    return Err(Refused::invalid_field(location::NSID));
                }
                let counters = subsystem.map(|s| s.counters).unwrap_or_default();
                logs::smart_page(&counters, self.errors.count(), now)
            }
            lid::FIRMWARE_SLOT => FirmwareSlots::slot_1(ascii(&cx.config.firmware)).as_bytes().to_vec(),
            lid::CHANGED_NAMESPACES => self.changed.page(),
            lid::COMMAND_EFFECTS => {
                if !matches!(get.csi, io::CSI | zns::CSI) {
                    return Err(Refused::invalid_field(location::CDW14 + 3));
                }
                let commands = subsystem.map(|s| s.commands_of_set(get.csi)).unwrap_or_default();
                logs::command_effects_page(&commands, get.csi == zns::CSI)
            }
            lid::FEATURE_EFFECTS => logs::feature_effects_page(discovery, cx.config.write_protection),
            lid::MI_EFFECTS => logs::mi_effects_page(),
            lid::RESERVATION => self.reservation_log.page(),
            lid::ANA => {
                let Association { portid, hostnqn, .. } = &self.association;
                subsystem.map(|s| s.ana_page(*portid, get.lsp & 1 != 0, hostnqn)).unwrap_or_default()
            }
            _ => discovery::log_page(self, cx),
        })
    }

    /// Answers with a failure and leaves an entry in the error log.
    fn refuse(&mut self, command: &Command, sqid: u16, refused: Refused) -> Action {
        self.errors.record(&CommandError {
            sqid,
            cid: command.cid,
            opcode: command.opcode.0,
            nsid: command.nsid,
            lba: 0,
            status: refused.status,
            location: refused.location,
        });
        Action::Complete(Completion::failed(command.cid, refused.status))
    }
}

/// The command's descriptor must cover the transfer.
pub(super) fn covers(command: &Command, len: u32, to_host: bool) -> Result<(), Refused> {
    command.sgl.check_transfer(len, to_host).map_err(|status| Refused::at(location::SGL_LENGTH, status))
}

fn send(cid: u16, data: Vec<u8>) -> Action {
    Action::SendData { data, completion: Completion::success(cid) }
}
