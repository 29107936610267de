//! Features that belong to a namespace: its write protection (84h), and what concerns its reservations (82h, 83h).
//! (NVMe Base 2.x, Namespace Write Protection Config, Reservation Notification Mask, Reservation Persistence.)

use super::config::ConfigError;
use super::controller::Controller;
use super::subsystem::{Namespace, WriteProtection};
use super::{Action, Change, Drain, Registry, Settle, SubsystemId, Surroundings};
use crate::admin::{GetFeatures, Refused, Select, SetFeatures, location};
use crate::command::NSID_ALL;
use crate::completion::Completion;
use crate::features::{self, CHANGEABLE, NAMESPACE_SPECIFIC, fid};
use crate::reservation;
use crate::status::Status;

impl Registry {
    /// Write protects a namespace, or lets it be written again. In-flight writes are for the caller to wait for.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn set_write_protection(
        &mut self,
        id: SubsystemId,
        nsid: u32,
        state: WriteProtection,
    ) -> Result<(), ConfigError> {
        let namespaces = &mut self.subsystem_mut(id)?.namespaces;
        let namespace = namespaces.get_mut(&nsid).ok_or(ConfigError::NoSuchNamespace(nsid))?;
        if core::mem::replace(&mut namespace.protection, state) != state {
            self.namespace_changed(id, nsid);
        }
        Ok(())
    }

    /// The flush of a [`Settle`] failed: what was changed goes back, as the host was told that it did not work.
    pub fn settle_failed(&mut self, settle: &Settle) {
        let Settle { subsystem, nsid, .. } = *settle;
        let away = self.subsystems.get_mut(&subsystem).and_then(|subsystem| subsystem.away.get_mut(&nsid));
        if let Some(Some(namespace)) = away {
            // Whoever puts it back publishes it.
            namespace.protection = WriteProtection::None;
            return;
        }
        let _ = self.set_write_protection(subsystem, nsid, WriteProtection::None);
    }
}

impl Controller {
    /// Whether a feature belongs to a namespace; discovery controllers have none.
    pub(super) fn is_of_namespace(&self, feature: u8) -> bool {
        features::is_of_namespace(feature) && !self.is_discovery()
    }

    pub(super) fn get_namespace_feature(
        &self,
        cx: &Surroundings<'_>,
        cid: u16,
        get: GetFeatures,
    ) -> Result<Action, Refused> {
        let subsystem = cx.subsystems.get(&self.association.subsystem);
        let host = &self.association.hostnqn;
        let namespace = subsystem.and_then(|subsystem| subsystem.seen(get.nsid, host)).ok_or(NO_NAMESPACE)?;
        let value = match get.select {
            Select::Current => match get.fid {
                fid::RESERVATION_MASK => namespace.notification_mask,
                fid::RESERVATION_PERSISTENCE => namespace.reservations.persists().into(),
                _ => protection(namespace).to_wire(),
            },
            Select::Default | Select::Saved => 0,
            Select::Capabilities => CHANGEABLE | NAMESPACE_SPECIFIC,
        };
        Ok(Action::Complete(Completion::with_result(cid, value.into())))
    }

    pub(super) fn set_namespace_feature(
        &self,
        cx: &mut Surroundings<'_>,
        cid: u16,
        set: SetFeatures,
    ) -> Result<Action, Refused> {
        if set.save {
            return Err(Refused::at(location::CDW10, Status::FEATURE_NOT_SAVEABLE.dnr()));
        }
        match set.fid {
            fid::RESERVATION_MASK => self.set_notification_mask(cx, cid, set),
            fid::RESERVATION_PERSISTENCE => self.set_persistence(cx, cid, set),
            _ => self.set_protection(cx, cid, set),
        }
    }

    /// Which reservation notifications of a namespace, or of all, are not wanted.
    fn set_notification_mask(&self, cx: &mut Surroundings<'_>, cid: u16, set: SetFeatures) -> Result<Action, Refused> {
        if set.value & !reservation::MASK != 0 {
            return Err(Refused::invalid_field(location::CDW11));
        }
        let subsystem = cx.subsystems.get_mut(&self.association.subsystem).ok_or(NO_NAMESPACE)?;
        let host = &self.association.hostnqn;
        let known = subsystem.namespaces.values_mut().chain(subsystem.away.values_mut().flatten());
        let concerned = known.filter(|namespace| {
            (set.nsid == NSID_ALL || namespace.config.nsid == set.nsid) && namespace.audience.sees(host)
        });
        let changed = concerned.map(|namespace| namespace.notification_mask = set.value).count();
        if changed == 0 && set.nsid != NSID_ALL {
            return Err(NO_NAMESPACE);
        }
        Ok(Action::Complete(Completion::success(cid)))
    }

    /// Persist through power loss (PTPL), as Reservation Register can turn it on and off too.
    fn set_persistence(&self, cx: &mut Surroundings<'_>, cid: u16, set: SetFeatures) -> Result<Action, Refused> {
        let id = self.association.subsystem;
        let namespace = self.find(cx, set.nsid)?;
        let persist = set.value & PTPL != 0;
        if persist && !namespace.config.persistent {
            return Err(Refused::invalid_field(location::CDW11));
        }
        // What is so already may not be kept yet.
        if !namespace.config.reservations || !namespace.config.persistent {
            return Ok(Action::Complete(Completion::success(cid)));
        }
        namespace.reservations.set_persist(persist);
        let settle = Settle { subsystem: id, nsid: set.nsid, drain: Drain::Nothing, flush: false, keep: true };
        Ok(Action::Settle { settle, completion: Completion::success(cid) })
    }

    /// Protection holds once it is answered: writes in progress have ended, and what they wrote is on stable storage.
    fn set_protection(&self, cx: &mut Surroundings<'_>, cid: u16, set: SetFeatures) -> Result<Action, Refused> {
        let id = self.association.subsystem;
        let namespace = self.find(cx, set.nsid)?;
        let wanted = WriteProtection::from_wire(set.value & WPS).ok_or(Refused::invalid_field(location::CDW11))?;
        let was = protection(namespace);
        let keep = namespace.config.persistent;
        if was == wanted {
            // Of another host's doing, and that may not be over: writes may still land, and nothing be kept.
            let protects = namespace.protection != WriteProtection::None;
            let drain = if protects { Drain::Writes } else { Drain::Nothing };
            let settle = Settle { subsystem: id, nsid: set.nsid, drain, flush: protects, keep };
            let completion = Completion::success(cid);
            return Ok(if protects || keep {
                Action::Settle { settle, completion }
            } else {
                Action::Complete(completion)
            });
        }
        if namespace.config.read_only || was == WriteProtection::UntilPowerCycle {
            return Err(Refused::at(location::CDW11, Status::FEATURE_NOT_CHANGEABLE.dnr()));
        }
        namespace.protection = wanted;
        cx.changes.push(Change::Namespace { subsystem: id, nsid: set.nsid });
        let protects = was == WriteProtection::None;
        let drain = if protects { Drain::Writes } else { Drain::Nothing };
        let settle = Settle { subsystem: id, nsid: set.nsid, drain, flush: protects, keep };
        Ok(Action::Settle { settle, completion: Completion::success(cid) })
    }

    /// A namespace that the host sees, to be changed.
    fn find<'a>(&self, cx: &'a mut Surroundings<'_>, nsid: u32) -> Result<&'a mut Namespace, Refused> {
        let subsystem = cx.subsystems.get_mut(&self.association.subsystem).ok_or(NO_NAMESPACE)?;
        let host = &self.association.hostnqn;
        if subsystem.holds_for(nsid, host) {
            return Err(Refused::at(location::NSID, Status::NAMESPACE_NOT_READY));
        }
        subsystem.namespaces.get_mut(&nsid).filter(|namespace| namespace.audience.sees(host)).ok_or(NO_NAMESPACE)
    }
}

/// What hosts are told: storage that cannot be written is protected whatever they set.
fn protection(namespace: &Namespace) -> WriteProtection {
    match namespace.protection {
        WriteProtection::None if namespace.config.read_only => WriteProtection::Protected,
        set => set,
    }
}

/// Write Protection State (WPS) of Dword 11.
const WPS: u32 = 7;

/// Persist Through Power Loss (PTPL) of Dword 11.
const PTPL: u32 = 1;

const NO_NAMESPACE: Refused = Refused::at(location::NSID, Status::INVALID_NAMESPACE.dnr());
