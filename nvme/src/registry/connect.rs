//! Connect: a queue pair becomes a queue of a controller.
//!
//! Every parameter is checked before anything is made; a refusal names the field at fault in Dword 0, as hosts print
//! it. (NVMe Base 2.x, Connect command.)

use core::net::SocketAddr;
use core::time::Duration;

use super::config::Duplicates;
use super::controller::{Association, Controller};
use super::{ControllerId, KillReason, Registry, Slot, SubsystemId};
use crate::command::{Command, Fuse};
use crate::completion::Completion;
use crate::fabrics::{CNTLID_DYNAMIC, CONNECT_AUTHENTICATION_REQUIRED, Connect, ConnectData, ConnectField};
use crate::nqn::Nqn;
use crate::status::Status;

/// What the transport knows of a queue pair before Connect.
#[derive(Clone, Copy, Debug)]
pub struct QueueContext {
    /// Queue identifier of the connection manager's private data.
    pub qid: u16,
    /// HSQSIZE of the private data: the submission queue's entries, zero's based.
    pub hsqsize: u16,
    /// HRQSIZE of the private data: the host's receives, a real count.
    pub hrqsize: u16,
    /// Address that the host reached.
    pub local: SocketAddr,
}

/// A queue that was connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The controller; the transport owes it one [`Registry::queue_closed`] for this queue.
    pub ctrl: ControllerId,
    /// Its controller identifier.
    pub cntlid: u16,
    /// Its subsystem.
    pub subsystem: SubsystemId,
    /// The queue's identifier; 0 is the admin queue.
    pub qid: u16,
    /// Entries of the submission queue, zero's based.
    pub sqsize: u16,
    /// SQ flow control is off: SQHD is FFFFh in every completion of this queue.
    pub sq_flow_control_disabled: bool,
    /// Number of the host's NQN, for gates.
    pub host: u64,
    /// An earlier association of the host, which may have commands in progress, was ended for this one.
    pub replaces: bool,
    /// The host has to authenticate before anything else is taken on this queue.
    pub authenticate: bool,
    /// The host chose all command sets that there are (CC.CSS): zoned namespaces are there for it. Of I/O queues: there are none
    /// before it chose, and they end before it can choose anew.
    pub all_command_sets: bool,
    /// The answer to Connect.
    pub completion: Completion,
}

/// Why Connect is refused: a status, and what goes into Dword 0.
struct Refusal {
    status: Status,
    dword0: u32,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status, dword0: 0 }
    }
}

impl Refusal {
    /// Without Do Not Retry. Hosts take that bit in an answer to Connect as "never come back", and what ended the old
    /// controller does not keep the host from getting a new one.
    fn come_back(field: ConnectField) -> Self {
        Self { status: Status::CONNECT_INVALID_PARAMETERS, dword0: field.to_dword0() }
    }
}

impl From<ConnectField> for Refusal {
    fn from(field: ConnectField) -> Self {
        Self { status: Status::CONNECT_INVALID_PARAMETERS.dnr(), dword0: field.to_dword0() }
    }
}

impl Registry {
    /// A Connect command and its data, on a queue pair that is not connected yet.
    ///
    /// # Errors
    /// The answer that refuses it; nothing was made.
    pub fn connect(
        &mut self,
        queue: &QueueContext,
        command: &Command,
        data: &[u8],
        now: Duration,
    ) -> Result<Connected, Completion> {
        self.try_connect(queue, command, data, now).map_err(|refusal| Completion {
            result: refusal.dword0.into(),
            cid: command.cid,
            status: refusal.status,
        })
    }

    fn try_connect(
        &mut self,
        queue: &QueueContext,
        command: &Command,
        data: &[u8],
        now: Duration,
    ) -> Result<Connected, Refusal> {
        if !command.is_connect() {
            // Nothing else may be sent on a queue that is not connected.
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr().into());
        }
        if command.fuse != Fuse::Normal {
            return Err(Status::INVALID_FIELD.dnr().into());
        }
        let connect = Connect::parse(command);
        if connect.recfmt != 0 {
            return Err(Status::CONNECT_INCOMPATIBLE_FORMAT.dnr().into());
        }
        let data = ConnectData::parse(data)?;
        if connect.qid != queue.qid {
            return Err(ConnectField::Qid.into());
        }
        if connect.sqsize == 0 || connect.sqsize > queue.hsqsize {
            return Err(ConnectField::Sqsize.into());
        }
        if data.hostid == [0; 16] {
            return Err(ConnectField::HostId.into());
        }
        let subnqn = Nqn::from_wire(&data.subnqn).ok_or(ConnectField::Subnqn)?;
        let hostnqn = Nqn::from_wire(&data.hostnqn).ok_or(ConnectField::Hostnqn)?;
        let peer = Peer { hostid: data.hostid, hostnqn, subnqn, cntlid: data.cntlid.get() };
        let joined = if connect.qid == 0 {
            self.connect_admin(queue, &connect, peer, now)?
        } else {
            self.connect_io(&connect, &peer, now)?
        };
        let Joined { ctrl, subsystem, cntlid, host, replaces, all_command_sets } = joined;
        let authenticate = self.expect_authentication(ctrl, connect.qid, now);
        let authreq = if authenticate { CONNECT_AUTHENTICATION_REQUIRED } else { 0 };
        Ok(Connected {
            ctrl,
            cntlid,
            subsystem,
            qid: connect.qid,
            sqsize: connect.sqsize,
            sq_flow_control_disabled: connect.disable_sq_flow_control,
            host,
            replaces,
            authenticate,
            all_command_sets,
            completion: Completion::with_result(command.cid, (u32::from(cntlid) | authreq).into()),
        })
    }

    fn expect_authentication(&mut self, ctrl: ControllerId, qid: u16, now: Duration) -> bool {
        let deadline = now.saturating_add(self.config.authentication_timeout);
        let Some((controller, cx)) = self.split(ctrl) else { return false };
        let Association { subsystem, hostnqn, .. } = &controller.association;
        let required = cx.subsystems.get(subsystem).is_some_and(|subsystem| subsystem.auth.contains_key(hostnqn));
        controller.expect_authentication(required, qid, deadline)
    }

    /// A new association. Controllers are dynamic: the host asks for FFFFh and gets whatever is free.
    fn connect_admin(
        &mut self,
        queue: &QueueContext,
        connect: &Connect,
        mut peer: Peer,
        now: Duration,
    ) -> Result<Joined, Refusal> {
        let subsystem = if peer.subnqn.is_discovery() || peer.subnqn == self.discovery_nqn {
            // Whichever of its names was used: identifiers are unique among the controllers of both.
            peer.subnqn = self.discovery_nqn.clone();
            SubsystemId::DISCOVERY
        } else if self.subsystems.values().any(|subsystem| !subsystem.is_served() && subsystem.nqn == peer.subnqn) {
            // What will be served by this name is being decided.
            return Err(Status::CONNECT_CONTROLLER_BUSY.into());
        } else {
            let found = self.find_subsystem(&peer.subnqn);
            found.ok_or(ConnectField::Subnqn)?
        };
        let allowed = self.subsystems.get(&subsystem).is_none_or(|subsystem| subsystem.allows(&peer.hostnqn));
        if !allowed {
            return Err(Status::CONNECT_INVALID_HOST.dnr().into());
        }
        if peer.cntlid != CNTLID_DYNAMIC {
            return Err(ConnectField::Cntlid.into());
        }
        let cntlid = self.free_cntlid(&peer.subnqn).ok_or(Status::CONNECT_CONTROLLER_BUSY)?;
        let portid = self.port_of(queue.local);
        let replaces = self.admit(subsystem, &peer, portid)?;
        let host = self.host_number(&peer.hostnqn);
        let association = Association {
            cntlid,
            subsystem,
            subnqn: peer.subnqn,
            hostnqn: peer.hostnqn,
            host,
            hostid: peer.hostid,
            local: queue.local,
            portid,
            kato: connect.kato,
        };
        let ctrl = self.insert(association, now);
        Ok(Joined { ctrl, subsystem, cntlid, host, replaces, all_command_sets: false })
    }

    /// Whether a subsystem takes one more controller of this host; whether it ends earlier ones of the same for that.
    fn admit(&mut self, id: SubsystemId, peer: &Peer, portid: u16) -> Result<bool, Refusal> {
        let Some(subsystem) = self.subsystems.get(&id) else { return Ok(false) };
        let proves_itself = subsystem.auth.contains_key(&peer.hostnqn);
        let replace = subsystem.admission.duplicates == Duplicates::Replace;
        self.has_place(id, &peer.hostnqn, peer.hostid, portid, None)?;
        if proves_itself {
            self.make_room_for_unproven(id);
            return Ok(false);
        }
        Ok(replace && self.replace(id, &peer.hostnqn, peer.hostid, portid, None))
    }

    /// Whether a subsystem has a place for one more controller of this host that is what it says. Who has not proven itself
    /// keeps nobody out, and takes nobody's place.
    fn has_place(
        &self,
        id: SubsystemId,
        hostnqn: &Nqn,
        hostid: [u8; 16],
        portid: u16,
        newcomer: Option<ControllerId>,
    ) -> Result<(), Status> {
        let Some(admission) = self.subsystems.get(&id).map(|subsystem| subsystem.admission) else { return Ok(()) };
        let (mut all, mut of_host) = (0, 0);
        for controller in self.slots.iter().filter_map(|slot| slot.tenant.as_ref()) {
            let theirs = &controller.association;
            let counts = theirs.subsystem == id && !controller.is_dying() && controller.is_authenticated(0);
            if !counts || Some(controller.id) == newcomer {
                continue;
            }
            if theirs.is_duplicate(hostnqn, hostid, portid) {
                match admission.duplicates {
                    Duplicates::Refuse => return Err(Status::CONNECT_CONTROLLER_BUSY),
                    Duplicates::Replace => continue,
                    Duplicates::Allow => {}
                }
            }
            all += 1;
            of_host += u16::from(theirs.hostnqn == *hostnqn);
        }
        let full = |limit: Option<u16>, count| limit.is_some_and(|limit| count >= limit);
        let full = full(admission.controllers, all) || full(admission.controllers_per_host, of_host);
        if full { Err(Status::CONNECT_CONTROLLER_BUSY) } else { Ok(()) }
    }

    /// Those that have not proven themselves have places of their own; the one that has had the most time for it makes room.
    fn make_room_for_unproven(&mut self, id: SubsystemId) {
        let Self { slots, events, .. } = self;
        let controllers = slots.iter_mut().filter_map(|slot| slot.tenant.as_mut());
        let of_subsystem = controllers.filter(|one| one.association.subsystem == id && !one.is_dying());
        let mut unproven: Vec<_> = of_subsystem.filter(|one| !one.is_authenticated(0)).collect();
        if unproven.len() >= MAX_UNPROVEN
            && let Some(first) = unproven.iter_mut().min_by_key(|one| one.authentication_deadline())
        {
            first.kill(KillReason::AuthenticationTimedOut, events);
        }
    }

    /// Ends the earlier associations of a host that comes again; whether there were any.
    fn replace(
        &mut self,
        id: SubsystemId,
        hostnqn: &Nqn,
        hostid: [u8; 16],
        portid: u16,
        newcomer: Option<ControllerId>,
    ) -> bool {
        let mut any = false;
        self.kill_where(KillReason::Replaced, |other| {
            let theirs = &other.association;
            let replaced = theirs.subsystem == id && Some(other.id) != newcomer && !other.is_dying();
            let replaced = replaced && theirs.is_duplicate(hostnqn, hostid, portid);
            any |= replaced;
            replaced
        });
        any
    }

    /// A host has proven who it is: now it counts, and takes the place of its earlier associations where its subsystem has it
    /// so. Where there is no place any more, it goes.
    pub(super) fn take_place(&mut self, ctrl: ControllerId) {
        let Some(controller) = self.controller_ref(ctrl) else { return };
        let Association { subsystem, hostnqn, hostid, portid, .. } = controller.association.clone();
        let Some(admission) = self.subsystems.get(&subsystem).map(|subsystem| subsystem.admission) else { return };
        if self.has_place(subsystem, &hostnqn, hostid, portid, Some(ctrl)).is_err() {
            return self.kill_where(KillReason::TooMany, |one| one.id == ctrl);
        }
        if admission.duplicates == Duplicates::Replace {
            let replaces = self.replace(subsystem, &hostnqn, hostid, portid, Some(ctrl));
            if let Some(controller) = self.controller_mut(ctrl) {
                controller.replaces |= replaces;
            }
        }
    }

    /// The number of a host's NQN: that of the configuration, or of another controller of it, or a new one.
    fn host_number(&mut self, nqn: &Nqn) -> u64 {
        if let Some(number) = self.known_hosts.get(nqn) {
            return *number;
        }
        let mut controllers = self.slots.iter().filter_map(|slot| slot.tenant.as_ref());
        let connected = controllers.find(|controller| controller.association.hostnqn == *nqn);
        if let Some(controller) = connected {
            return controller.association.host;
        }
        self.last_host += 1;
        self.last_host
    }

    /// The number of a host that the configuration names.
    pub(super) fn known_host(&mut self, nqn: &Nqn) -> u64 {
        let number = self.host_number(nqn);
        self.known_hosts.insert(nqn.clone(), number);
        number
    }

    /// One more queue of an association that exists. A controller that is unknown, gone, of another subsystem or of
    /// another host is the same answer: the controller identifier is wrong.
    fn connect_io(&mut self, connect: &Connect, peer: &Peer, now: Duration) -> Result<Joined, Refusal> {
        let mqes = self.config.max_io_queue_entries.saturating_sub(1);
        let controller = self
            .slots
            .iter_mut()
            .filter_map(|slot| slot.tenant.as_mut())
            .find(|controller| {
                controller.association.cntlid == peer.cntlid
                    && controller.association.subnqn == peer.subnqn
                    && !controller.is_dying()
            })
            .ok_or_else(|| Refusal::come_back(ConnectField::Cntlid))?;
        if controller.association.hostnqn != peer.hostnqn {
            return Err(ConnectField::Hostnqn.into());
        }
        if controller.association.hostid != peer.hostid {
            return Err(ConnectField::HostId.into());
        }
        if controller.is_discovery() || connect.qid > controller.features.queues() {
            return Err(ConnectField::Qid.into());
        }
        if connect.sqsize > mqes {
            return Err(ConnectField::Sqsize.into());
        }
        if !controller.properties.io_allowed() || controller.io_queues.contains(&connect.qid) {
            // Both pass: the controller gets enabled, the old queue of this identifier gets closed.
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        if !controller.properties.io_entry_sizes_valid() {
            return Err(ConnectField::Qid.into());
        }
        controller.io_queues.insert(connect.qid);
        controller.last_activity = now;
        Ok(Joined {
            ctrl: controller.id,
            subsystem: controller.association.subsystem,
            cntlid: peer.cntlid,
            host: controller.association.host,
            replaces: controller.replaces,
            all_command_sets: controller.properties.all_command_sets(),
        })
    }

    /// The next identifier that no live controller of this name has, a dying one included: its queues may still be
    /// open.
    fn free_cntlid(&mut self, subnqn: &Nqn) -> Option<u16> {
        let (first, last) = (*self.config.cntlids.start(), *self.config.cntlids.end());
        let candidates = (self.next_cntlid..=last).chain(first..self.next_cntlid);
        let cntlid =
            candidates.into_iter().find(|&cntlid| {
                !self.slots.iter().filter_map(|slot| slot.tenant.as_ref()).any(|controller| {
                    controller.association.cntlid == cntlid && controller.association.subnqn == *subnqn
                })
            })?;
        self.next_cntlid = if cntlid >= last { first } else { cntlid + 1 };
        Some(cntlid)
    }

    fn insert(&mut self, association: Association, now: Duration) -> ControllerId {
        let free = self.slots.iter().position(|slot| slot.tenant.is_none());
        let index = free.unwrap_or(self.slots.len());
        if free.is_none() {
            self.slots.push(Slot::default());
        }
        let mut id = ControllerId { slot: index, generation: 0 };
        if let Some(slot) = self.slots.get_mut(index) {
            slot.generation = slot.generation.wrapping_add(1);
            id.generation = slot.generation;
            let was_reset = self.subsystems.get(&association.subsystem).is_some_and(|subsystem| subsystem.was_reset);
            slot.tenant = Some(Controller::new(id, association, &self.config, was_reset, now));
        }
        id
    }
}

/// Controllers of a subsystem at a time whose hosts have not proven themselves: more than hosts that come at once after a power
/// failure, and few beside what a reactor takes.
pub(super) const MAX_UNPROVEN: usize = 256;

/// What a queue became part of.
struct Joined {
    ctrl: ControllerId,
    subsystem: SubsystemId,
    cntlid: u16,
    host: u64,
    replaces: bool,
    all_command_sets: bool,
}

/// Who connects to what.
struct Peer {
    hostid: [u8; 16],
    hostnqn: Nqn,
    subnqn: Nqn,
    cntlid: u16,
}
