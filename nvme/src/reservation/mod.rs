//! Reservations of one namespace: who is registered with which key, who holds it and how, and what each command makes of
//! that.
//!
//! Hosts are known by their 128-bit identifier, so a registration outlives associations. [`Reservations`] is a pure state
//! machine: a command changes it or is refused; what has to be told to others comes back as [`Outcome`]. What I/O
//! commands are checked against is a [`Guard`], made from it and published. (NVMe Base 2.x, Reservations; NVM Command
//! Set 1.x, reservation commands. Where the specification is silent we do as Linux nvmet.)

mod command;
mod log;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub(crate) use command::opcode;
pub use command::{AcquireAction, RegisterAction, ReleaseAction, ReservationCommand};
pub(crate) use log::{MASK, NotificationLog, Notified};

use crate::status::Status;

/// 128-bit host identifier.
pub type HostId = [u8; 16];

/// Most registrants of a namespace: what Reservation Report can count.
pub const MAX_REGISTRANTS: usize = 65_535;

/// Reservation type (RTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationType {
    /// The holder alone writes.
    WriteExclusive,
    /// The holder alone reads and writes.
    ExclusiveAccess,
    /// Registrants alone write.
    WriteExclusiveRegistrants,
    /// Registrants alone read and write.
    ExclusiveAccessRegistrants,
    /// Registrants alone write, and all of them hold it.
    WriteExclusiveAll,
    /// Registrants alone read and write, and all of them hold it.
    ExclusiveAccessAll,
}

impl ReservationType {
    /// From the wire; `None` for 0 and reserved values.
    #[must_use]
    pub const fn from_wire(rtype: u8) -> Option<Self> {
        Some(match rtype {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrants,
            4 => Self::ExclusiveAccessRegistrants,
            5 => Self::WriteExclusiveAll,
            6 => Self::ExclusiveAccessAll,
            _ => return None,
        })
    }

    /// To the wire.
    #[must_use]
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::WriteExclusive => 1,
            Self::ExclusiveAccess => 2,
            Self::WriteExclusiveRegistrants => 3,
            Self::ExclusiveAccessRegistrants => 4,
            Self::WriteExclusiveAll => 5,
            Self::ExclusiveAccessAll => 6,
        }
    }

    /// Every registrant is a holder.
    const fn held_by_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// The holder alone has what the others have not.
    const fn for_one(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    const fn excludes_reads(self) -> bool {
        matches!(self, Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll)
    }
}

/// A reservation that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// How.
    pub rtype: ReservationType,
    /// Who took it; of a type that all registrants hold, one of them.
    pub holder: HostId,
}

/// What survives a power loss, while persistence is on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationState {
    /// Keys by host.
    pub registrants: BTreeMap<HostId, u64>,
    /// The reservation.
    pub held: Option<Held>,
}

/// What others have to be told of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Notifications for the controllers of these hosts.
    pub(crate) notices: Vec<(HostId, Notified)>,
    /// Hosts whose registration ended against their will.
    pub(crate) preempted: Vec<HostId>,
    /// Something changed that has to be published, and kept.
    pub(crate) changed: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reservations {
    state: ReservationState,
    generation: u32,
    /// Persist through power loss (PTPL).
    persist: bool,
}

const CONFLICT: Status = Status::RESERVATION_CONFLICT.dnr();

impl Reservations {
    /// What was kept, with persistence on.
    pub(crate) fn restored(state: ReservationState) -> Self {
        Self { state, generation: 0, persist: true }
    }

    pub(crate) fn persists(&self) -> bool {
        self.persist
    }

    pub(crate) fn set_persist(&mut self, persist: bool) {
        self.persist = persist;
    }

    /// What is to be kept; `None` while persistence is off.
    pub(crate) fn kept(&self) -> Option<&ReservationState> {
        self.persist.then_some(&self.state)
    }

    /// What I/O commands are checked against; `None` when nothing is held.
    pub(crate) fn guard(&self) -> Option<Guard> {
        let Held { rtype, holder } = self.state.held?;
        Some(Guard { rtype, holder, registrants: self.state.registrants.keys().copied().collect() })
    }

    /// Reservation Register.
    pub(crate) fn register(
        &mut self,
        host: HostId,
        action: RegisterAction,
        ignore_key: bool,
        keys: Keys,
    ) -> Result<Outcome, Status> {
        let Keys { current, new } = keys;
        let registered = self.state.registrants.get(&host).copied();
        let mut outcome = Outcome { changed: true, ..Outcome::default() };
        match action {
            RegisterAction::Register => {
                if registered.is_some_and(|key| key != new) {
                    return Err(CONFLICT);
                }
                if registered.is_none() && self.state.registrants.len() >= MAX_REGISTRANTS {
                    return Err(Status::INTERNAL_ERROR.dnr());
                }
                self.state.registrants.insert(host, new);
            }
            RegisterAction::Unregister | RegisterAction::Replace => {
                let key = registered.ok_or(CONFLICT)?;
                if !ignore_key && key != current {
                    return Err(CONFLICT);
                }
                if action == RegisterAction::Replace {
                    self.state.registrants.insert(host, new);
                } else {
                    self.unregister(host, &mut outcome);
                }
            }
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(outcome)
    }

    /// Reservation Acquire. `keys.new` is the key to preempt (PRKEY).
    pub(crate) fn acquire(
        &mut self,
        host: HostId,
        action: AcquireAction,
        rtype: ReservationType,
        keys: Keys,
    ) -> Result<Outcome, Status> {
        self.check_key(host, keys.current)?;
        match action {
            AcquireAction::Acquire => match self.state.held {
                None => {
                    self.state.held = Some(Held { rtype, holder: host });
                    Ok(Outcome { changed: true, ..Outcome::default() })
                }
                Some(held) if self.holds(host) && held.rtype == rtype => Ok(Outcome::default()),
                Some(_) => Err(CONFLICT),
            },
            AcquireAction::Preempt | AcquireAction::PreemptAndAbort => {
                let outcome = self.preempt(host, rtype, keys.new)?;
                self.generation = self.generation.wrapping_add(1);
                Ok(outcome)
            }
        }
    }

    /// Reservation Release.
    pub(crate) fn release(
        &mut self,
        host: HostId,
        action: ReleaseAction,
        rtype: Option<ReservationType>,
        current: u64,
    ) -> Result<Outcome, Status> {
        self.check_key(host, current)?;
        let mut outcome = Outcome::default();
        match action {
            ReleaseAction::Release => {
                // Of somebody else's, or of nothing, it has no effect.
                let Some(held) = self.state.held.filter(|_| self.holds(host)) else { return Ok(outcome) };
                if rtype != Some(held.rtype) {
                    return Err(Status::INVALID_FIELD.dnr());
                }
                self.state.held = None;
                if !held.rtype.for_one() {
                    self.notify_others(host, Notified::ReservationReleased, &mut outcome);
                }
            }
            ReleaseAction::Clear => {
                self.notify_others(host, Notified::ReservationPreempted, &mut outcome);
                self.state = ReservationState::default();
                self.generation = self.generation.wrapping_add(1);
            }
        }
        outcome.changed = true;
        Ok(outcome)
    }

    /// Reservation Report, whole. `controllers` knows the controller identifiers that a host has now; without any, FFFFh
    /// stands for the host.
    pub(crate) fn report(&self, controllers: impl Fn(&HostId) -> Vec<u16>) -> Vec<u8> {
        let entries = self.state.registrants.iter().flat_map(|(host, key)| {
            let ids = controllers(host);
            let ids = if ids.is_empty() { vec![u16::MAX] } else { ids };
            let holds = self.holds(*host);
            ids.into_iter().map(move |cntlid| report::Entry { cntlid, holds, key: *key, host: *host })
        });
        let rtype = self.state.held.map_or(0, |held| held.rtype.to_wire());
        report::report(self.generation, rtype, self.persist, entries)
    }

    /// Whether a host is a reservation holder.
    fn holds(&self, host: HostId) -> bool {
        self.state.held.is_some_and(|held| {
            let all = held.rtype.held_by_all() && self.state.registrants.contains_key(&host);
            all || held.holder == host
        })
    }

    fn check_key(&self, host: HostId, current: u64) -> Result<(), Status> {
        if self.state.registrants.get(&host) == Some(&current) { Ok(()) } else { Err(CONFLICT) }
    }

    /// A host unregisters itself.
    fn unregister(&mut self, host: HostId, outcome: &mut Outcome) {
        self.state.registrants.remove(&host);
        let Some(held) = self.state.held else { return };
        if held.rtype.held_by_all() {
            self.pass_on();
        } else if held.holder == host {
            self.state.held = None;
            if !held.rtype.for_one() {
                self.notify_others(host, Notified::ReservationReleased, outcome);
            }
        }
    }

    /// A reservation that all registrants hold ends with the last one.
    fn pass_on(&mut self) {
        if let Some(held) = &mut self.state.held
            && held.rtype.held_by_all()
            && !self.state.registrants.contains_key(&held.holder)
        {
            match self.state.registrants.keys().next() {
                Some(next) => held.holder = *next,
                None => self.state.held = None,
            }
        }
    }

    fn preempt(&mut self, host: HostId, rtype: ReservationType, key: u64) -> Result<Outcome, Status> {
        let mut outcome = Outcome { changed: true, ..Outcome::default() };
        let held = self.state.held;
        let takes = match held {
            Some(held) if held.rtype.held_by_all() => key == 0,
            Some(held) => self.state.registrants.get(&held.holder) == Some(&key),
            None => false,
        };
        if !takes {
            // The reservation stays as it is; registrations of this key end, the host's own included.
            if key == 0 {
                return Err(Status::INVALID_FIELD.dnr());
            }
            self.expel(host, |_, theirs| theirs == key, &mut outcome);
            if outcome.preempted.is_empty() && self.state.registrants.get(&host) != Some(&key) {
                return Err(CONFLICT);
            }
            if self.state.registrants.get(&host) == Some(&key) {
                self.unregister(host, &mut outcome);
            }
            self.pass_on();
            return Ok(outcome);
        }
        let all = held.is_some_and(|held| held.rtype.held_by_all());
        self.expel(host, |_, theirs| all || theirs == key, &mut outcome);
        self.state.held = Some(Held { rtype, holder: host });
        if held.is_some_and(|held| held.rtype != rtype) {
            self.notify_others(host, Notified::ReservationReleased, &mut outcome);
        }
        Ok(outcome)
    }

    /// Ends registrations of hosts other than `by`.
    fn expel(&mut self, by: HostId, condition: impl Fn(&HostId, u64) -> bool, outcome: &mut Outcome) {
        self.state.registrants.retain(|host, key| {
            let goes = *host != by && condition(host, *key);
            if goes {
                outcome.preempted.push(*host);
                outcome.notices.push((*host, Notified::RegistrationPreempted));
            }
            !goes
        });
    }

    fn notify_others(&self, host: HostId, what: Notified, outcome: &mut Outcome) {
        let others = self.state.registrants.keys().filter(|other| **other != host);
        outcome.notices.extend(others.map(|other| (*other, what)));
    }
}

/// The two keys that come with a command: CRKEY, and NRKEY or PRKEY.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) current: u64,
    pub(crate) new: u64,
}

impl Keys {
    /// Of the data of Register and Acquire; of Release the first 8 bytes are all there is.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let (current, rest) = data.split_first_chunk::<8>()?;
        let new = rest.first_chunk::<8>().copied().unwrap_or_default();
        Some(Self { current: u64::from_le_bytes(*current), new: u64::from_le_bytes(new) })
    }
}

/// What a reservation keeps out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    rtype: ReservationType,
    holder: HostId,
    /// In ascending order.
    registrants: Box<[HostId]>,
}

impl Guard {
    /// Whether a host may read, or write.
    #[must_use]
    pub fn admits(&self, host: &HostId, writes: bool) -> bool {
        if !writes && !self.rtype.excludes_reads() {
            return true;
        }
        if self.rtype.for_one() { self.holder == *host } else { self.registrants.binary_search(host).is_ok() }
    }
}
