//! Reservation commands of a connected host: to the namespace's state machine, and from there to the other hosts.

use super::{Action, Controller, ControllerId, Drain, Event, Registry, Settle, gone};
use crate::aer::Notice;
use crate::completion::Completion;
use crate::reservation::{AcquireAction, HostId, Keys, Notified, Outcome, ReservationCommand};
use crate::status::Status;

impl Registry {
    /// A reservation command that [`crate::io::check`] took, with its data; `cid` is its identifier. The answer is complete,
    /// has data, or has to settle: another host's command may be in progress that the new state keeps out.
    pub fn reserve(
        &mut self,
        ctrl: ControllerId,
        nsid: u32,
        cid: u16,
        command: ReservationCommand,
        data: &[u8],
    ) -> Action {
        match self.try_reserve(ctrl, nsid, cid, command, data) {
            Ok(action) => action,
            Err(status) => Action::Complete(Completion::failed(cid, status)),
        }
    }

    fn try_reserve(
        &mut self,
        ctrl: ControllerId,
        nsid: u32,
        cid: u16,
        command: ReservationCommand,
        data: &[u8],
    ) -> Result<Action, Status> {
        let Some(controller) = self.controller_ref(ctrl) else { return Ok(Action::Complete(gone(cid))) };
        let (host, subsystem) = (controller.association.hostid, controller.association.subsystem);
        let Self { subsystems, slots, .. } = self;
        let found = subsystems.get_mut(&subsystem).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        if found.holds(nsid) {
            return Err(Status::NAMESPACE_NOT_READY);
        }
        let namespace = found.namespaces.get_mut(&nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        let keys = Keys::parse(data);
        let keys = || keys.ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr());
        let reservations = &mut namespace.reservations;
        let was_kept = reservations.persists();
        let (outcome, abort) = match command {
            ReservationCommand::Report { len } => {
                let live =
                    |controller: &&Controller| controller.association.subsystem == subsystem && !controller.is_dying();
                let tenants = || slots.iter().filter_map(|slot| slot.tenant.as_ref()).filter(live);
                let mut data = reservations.report(|host| {
                    let theirs = tenants().filter(|controller| controller.association.hostid == *host);
                    theirs.map(|controller| controller.association.cntlid).collect()
                });
                data.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
                return Ok(Action::SendData { data, completion: Completion::success(cid) });
            }
            ReservationCommand::Register { action, ignore_key, persist } => {
                let outcome = reservations.register(host, action, ignore_key, keys()?)?;
                if let Some(persist) = persist {
                    reservations.set_persist(persist);
                }
                (outcome, false)
            }
            ReservationCommand::Acquire { action, rtype } => {
                let outcome = reservations.acquire(host, action, rtype, keys()?)?;
                (outcome, action == AcquireAction::PreemptAndAbort)
            }
            ReservationCommand::Release { action, rtype } => {
                (reservations.release(host, action, rtype, keys()?.current)?, false)
            }
        };
        let keep = was_kept || reservations.persists();
        let mask = namespace.notification_mask;
        let Outcome { notices, preempted, changed } = outcome;
        let completion = Completion::success(cid);
        if !changed {
            // What is so already may not be kept yet: the one who did it could have been cut off, or told that it failed.
            let settle = Settle { subsystem, nsid, drain: Drain::Nothing, flush: false, keep };
            return Ok(if keep { Action::Settle { settle, completion } } else { Action::Complete(completion) });
        }
        // Published before anybody is told.
        self.events.push_back(Event::Publish { subsystem, nsid });
        for (host, what) in notices {
            if mask & what.mask_bit() == 0 {
                self.notify_host(subsystem, &host, what, nsid);
            }
        }
        let drain = if abort { Drain::Hosts(preempted.into()) } else { Drain::Nothing };
        let settle = Settle { subsystem, nsid, drain, flush: false, keep };
        Ok(Action::Settle { settle, completion })
    }

    fn notify_host(&mut self, subsystem: super::SubsystemId, host: &HostId, what: Notified, nsid: u32) {
        let controllers = self.slots.iter_mut().filter_map(|slot| slot.tenant.as_mut());
        let theirs = controllers.filter(|controller| {
            controller.association.subsystem == subsystem && controller.association.hostid == *host
        });
        for controller in theirs {
            controller.reservation_log.push(what, nsid);
            controller.notify(Notice::Reservation, &mut self.events);
        }
    }
}
