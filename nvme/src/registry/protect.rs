//! Namespace write protection (feature 84h): the one feature that belongs to a namespace.
//! (NVMe Base 2.x, Namespace Write Protection Config.)

use super::config::ConfigError;
use super::controller::Controller;
use super::subsystem::{Namespace, WriteProtection};
use super::{Action, Change, Drain, Registry, Settle, SubsystemId, Surroundings};
use crate::admin::{GetFeatures, Refused, Select, SetFeatures, location};
use crate::completion::Completion;
use crate::features::{CHANGEABLE, NAMESPACE_SPECIFIC, fid};
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
        let _ = self.set_write_protection(settle.subsystem, settle.nsid, WriteProtection::None);
    }
}

impl Controller {
    /// Whether a feature is the write protection, which I/O controllers have.
    pub(super) fn is_write_protection(&self, feature: u8) -> bool {
        feature == fid::WRITE_PROTECTION && !self.is_discovery()
    }

    pub(super) fn get_protection(&self, cx: &Surroundings<'_>, cid: u16, get: GetFeatures) -> Result<Action, Refused> {
        let subsystem = cx.subsystems.get(&self.association.subsystem);
        let namespace = subsystem.and_then(|subsystem| subsystem.namespaces.get(&get.nsid)).ok_or(NO_NAMESPACE)?;
        let value = match get.select {
            Select::Current => state(namespace).to_wire(),
            Select::Default | Select::Saved => WriteProtection::None.to_wire(),
            Select::Capabilities => CHANGEABLE | NAMESPACE_SPECIFIC,
        };
        Ok(Action::Complete(Completion::with_result(cid, value.into())))
    }

    /// Protection holds once it is answered: writes in progress have ended, and what they wrote is on stable storage.
    pub(super) fn set_protection(
        &self,
        cx: &mut Surroundings<'_>,
        cid: u16,
        set: SetFeatures,
    ) -> Result<Action, Refused> {
        if set.save {
            return Err(Refused::at(location::CDW10, Status::FEATURE_NOT_SAVEABLE.dnr()));
        }
        let id = self.association.subsystem;
        let subsystem = cx.subsystems.get_mut(&id);
        let namespace = subsystem.and_then(|subsystem| subsystem.namespaces.get_mut(&set.nsid)).ok_or(NO_NAMESPACE)?;
        let wanted = WriteProtection::from_wire(set.value & WPS).ok_or(Refused::invalid_field(location::CDW11))?;
        let was = state(namespace);
        if was == wanted {
            return Ok(Action::Complete(Completion::success(cid)));
        }
        if namespace.config.read_only || was == WriteProtection::UntilPowerCycle {
            return Err(Refused::at(location::CDW11, Status::FEATURE_NOT_CHANGEABLE.dnr()));
        }
        namespace.protection = wanted;
        cx.changes.push(Change::Namespace { subsystem: id, nsid: set.nsid, by: self.id });
        let protects = was == WriteProtection::None;
        let drain = if protects { Drain::Writes } else { Drain::Nothing };
        let settle = Settle { subsystem: id, nsid: set.nsid, drain, flush: protects };
        Ok(Action::Settle { settle, completion: Completion::success(cid) })
    }
}

/// What hosts are told: storage that cannot be written is protected whatever they set.
fn state(namespace: &Namespace) -> WriteProtection {
    match namespace.protection {
        WriteProtection::None if namespace.config.read_only => WriteProtection::Protected,
        set => set,
    }
}

/// Write Protection State (WPS) of Dword 11.
const WPS: u32 = 7;

const NO_NAMESPACE: Refused = Refused::at(location::NSID, Status::INVALID_NAMESPACE.dnr());
