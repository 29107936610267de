//! Connect: a queue pair becomes a queue of a controller.
//!
//! Every parameter is checked before anything is made; a refusal names the field at fault in Dword 0, as hosts print
//! it. (NVMe Base 2.x, Connect command.)

use core::net::SocketAddr;
use core::time::Duration;

use super::controller::{Association, Controller};
use super::{ControllerId, Registry, Slot, SubsystemId};
use crate::command::{Command, Fuse};
use crate::completion::Completion;
use crate::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, ConnectField};
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
        let (ctrl, subsystem, cntlid) = if connect.qid == 0 {
            self.connect_admin(queue, &connect, peer, now)?
        } else {
            self.connect_io(&connect, &peer, now)?
        };
        Ok(Connected {
            ctrl,
            cntlid,
            subsystem,
            qid: connect.qid,
            sqsize: connect.sqsize,
            sq_flow_control_disabled: connect.disable_sq_flow_control,
            completion: Completion::with_result(command.cid, cntlid.into()),
        })
    }

    /// A new association. Controllers are dynamic: the host asks for FFFFh and gets whatever is free.
    fn connect_admin(
        &mut self,
        queue: &QueueContext,
        connect: &Connect,
        peer: Peer,
        now: Duration,
    ) -> Result<(ControllerId, SubsystemId, u16), Refusal> {
        let subsystem = if peer.subnqn.is_discovery() {
            SubsystemId::DISCOVERY
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
        let association = Association {
            cntlid,
            subsystem,
            subnqn: peer.subnqn,
            hostnqn: peer.hostnqn,
            hostid: peer.hostid,
            local: queue.local,
            portid: self.port_of(queue.local),
            kato: connect.kato,
        };
        Ok((self.insert(association, now), subsystem, cntlid))
    }

    /// One more queue of an association that exists. A controller that is unknown, gone, of another subsystem or of
    /// another host is the same answer: the controller identifier is wrong.
    fn connect_io(
        &mut self,
        connect: &Connect,
        peer: &Peer,
        now: Duration,
    ) -> Result<(ControllerId, SubsystemId, u16), Refusal> {
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
        Ok((controller.id, controller.association.subsystem, peer.cntlid))
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
            slot.tenant = Some(Controller::new(id, association, &self.config, now));
        }
        id
    }
}

/// Who connects to what.
struct Peer {
    hostid: [u8; 16],
    hostnqn: Nqn,
    subnqn: Nqn,
    cntlid: u16,
}
