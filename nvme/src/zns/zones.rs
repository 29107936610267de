//! The state of zones, and what commands do to it. (Zoned Namespace Command Set 1.x, Zone State Machine.)

use core::fmt;

use super::ZoneAction;
use crate::status::Status;

/// What all zones of a namespace have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks from the first of a zone to the first of the next (ZSZE): a power of two.
    pub zone_blocks: u64,
    /// Zones that can be open at a time; 0 is no limit.
    pub max_open: u32,
    /// Zones that can be open or closed at a time; 0 is no limit.
    pub max_active: u32,
}

/// Zone State (ZS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneState {
    /// Nothing is written.
    Empty,
    /// A write opened it.
    ImplicitlyOpened,
    /// A host opened it.
    ExplicitlyOpened,
    /// Written in part, and not open.
    Closed,
    /// It can only be read: it is worn out.
    ReadOnly,
    /// All is written, or a host said that it is.
    Full,
    /// It is lost.
    Offline,
}

impl ZoneState {
    pub(crate) const fn to_wire(self) -> u8 {
        match self {
            Self::Empty => 0x1,
            Self::ImplicitlyOpened => 0x2,
            Self::ExplicitlyOpened => 0x3,
            Self::Closed => 0x4,
            Self::ReadOnly => 0xd,
            Self::Full => 0xe,
            Self::Offline => 0xf,
        }
    }

    const fn is_open(self) -> bool {
        matches!(self, Self::ImplicitlyOpened | Self::ExplicitlyOpened)
    }

    const fn is_active(self) -> bool {
        self.is_open() || matches!(self, Self::Closed)
    }
}

/// One zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Its state.
    pub state: ZoneState,
    /// Blocks that can be written (ZCAP).
    pub capacity: u64,
    /// Blocks that are written: the write pointer, from the first block of the zone on.
    pub written: u64,
}

/// What keeps zones from being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeometryError {
    /// Hosts refuse a size that is no power of two.
    ZoneSize(u64),
    /// There are none, or more than can be numbered.
    Count(usize),
    /// A zone can take no block, or more than it has.
    Capacity(u64),
    /// More zones can be open than active.
    Limits {
        /// Most open zones.
        open: u32,
        /// Most active zones.
        active: u32,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZoneSize(blocks) => write!(f, "a zone size of {blocks} blocks is no power of two"),
            Self::Count(count) => write!(f, "{count} zones are not possible"),
            Self::Capacity(blocks) => {
                write!(f, "a zone capacity of {blocks} blocks is not from 1 to the size of a zone")
            }
            Self::Limits { open, active } => {
                write!(f, "a limit of {open} open zones is above that of {active} active ones")
            }
        }
    }
}

impl core::error::Error for GeometryError {}

/// All zones of a namespace.
#[derive(Clone, Debug)]
pub struct Zones {
    geometry: Geometry,
    zone_shift: u8,
    zones: Vec<Slot>,
    open: u32,
    active: u32,
    /// Where the search for a zone to close began last.
    cursor: usize,
    /// Counts changes: what was reported before a zone's latest one is out of date.
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    zone: Zone,
    /// A command is at work on it.
    busy: bool,
    /// A write failed: how far it came is not known.
    unknown: bool,
    changed: u64,
}

impl Slot {
    /// Whether an action on all zones is about this one, or could be.
    fn is_meant(&self, action: ZoneAction) -> bool {
        let state = self.zone.state;
        let meant = match action {
            ZoneAction::Open => state == ZoneState::Closed,
            ZoneAction::Close => state.is_open(),
            ZoneAction::Finish => state.is_active(),
            ZoneAction::Reset => state.is_active() || state == ZoneState::Full,
            ZoneAction::Offline => state == ZoneState::ReadOnly,
        };
        meant || self.unknown
    }
}

impl Zones {
    /// Zones as they are found.
    ///
    /// # Errors
    /// What hosts would not take.
    pub fn new(geometry: Geometry, zones: impl IntoIterator<Item = Zone>) -> Result<Self, GeometryError> {
        let Geometry { zone_blocks, max_open, max_active } = geometry;
        if !zone_blocks.is_power_of_two() {
            return Err(GeometryError::ZoneSize(zone_blocks));
        }
        if max_active != 0 && max_open > max_active {
            return Err(GeometryError::Limits { open: max_open, active: max_active });
        }
        let slot = |zone| Slot { zone, busy: false, unknown: false, changed: 0 };
        let zones: Vec<Slot> = zones.into_iter().map(slot).collect();
        if zones.is_empty() || u32::try_from(zones.len()).is_err() {
            return Err(GeometryError::Count(zones.len()));
        }
        let usable = |zone: &Zone| {
            let capacity = (1..=zone_blocks).contains(&zone.capacity) || zone.state == ZoneState::Offline;
            capacity && zone.written <= zone.capacity
        };
        if let Some(bad) = zones.iter().find(|slot| !usable(&slot.zone)) {
            return Err(GeometryError::Capacity(bad.zone.capacity));
        }
        let zone_shift = u8::try_from(zone_blocks.trailing_zeros()).unwrap_or(0);
        let number = |which: fn(ZoneState) -> bool| {
            u32::try_from(zones.iter().filter(|slot| which(slot.zone.state)).count()).unwrap_or(u32::MAX)
        };
        let (open, active) = (number(ZoneState::is_open), number(ZoneState::is_active));
        Ok(Self { geometry, zone_shift, zones, open, active, cursor: 0, clock: 0 })
    }

    /// What they have in common.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Binary logarithm of the zone size in blocks.
    #[must_use]
    pub fn zone_shift(&self) -> u8 {
        self.zone_shift
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.zones.len()).unwrap_or(u32::MAX)
    }

    /// Blocks of the namespace (NSZE).
    #[must_use]
    pub fn blocks(&self) -> u64 {
        u64::from(self.count()) << self.zone_shift
    }

    /// Blocks that can be written (NCAP).
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.zones.iter().map(|slot| slot.zone.capacity).sum()
    }

    /// Open and active zones.
    #[must_use]
    pub fn in_use(&self) -> (u32, u32) {
        (self.open, self.active)
    }

    /// The zone that a block lies in.
    #[must_use]
    pub fn zone_of(&self, lba: u64) -> u32 {
        u32::try_from(lba >> self.zone_shift).unwrap_or(u32::MAX)
    }

    /// First block of a zone.
    #[must_use]
    pub fn start(&self, zone: u32) -> u64 {
        u64::from(zone) << self.zone_shift
    }

    /// The state of a zone.
    #[must_use]
    pub fn get(&self, zone: u32) -> Option<&Zone> {
        self.slot(zone).map(|slot| &slot.zone)
    }

    /// Zones from the one that a block lies in, each with its first block.
    pub fn from(&self, slba: u64) -> impl Iterator<Item = (u64, &Zone)> {
        let first = self.zone_of(slba);
        let all = (first..).zip(self.zones.iter().skip(usize::try_from(first).unwrap_or(usize::MAX)));
        all.map(|(number, slot)| (self.start(number), &slot.zone))
    }

    /// Whether blocks can be read; that may go across zones (OZCS says so), and beyond what is written.
    ///
    /// # Errors
    /// Zone Is Offline, of any of them.
    pub fn may_read(&self, slba: u64, blocks: u32) -> Result<(), Status> {
        let last = self.zone_of(slba.saturating_add(u64::from(blocks).saturating_sub(1)));
        let offline =
            |zone: u32| matches!(self.slot(zone), Some(Slot { zone: Zone { state: ZoneState::Offline, .. }, .. }));
        if (self.zone_of(slba)..=last).any(offline) { Err(Status::ZONE_IS_OFFLINE.dnr()) } else { Ok(()) }
    }

    /// Begins a write of any kind to one zone, at `slba`; `None` (an append): where its write pointer is. The answer is the first
    /// block that is written. [`Self::end_write`] follows.
    ///
    /// # Errors
    /// The status to answer with; nothing was done.
    pub fn begin_write(&mut self, zone: u32, slba: Option<u64>, blocks: u32) -> Result<u64, Status> {
        let start = self.start(zone);
        let Zone { state, capacity, written } = *self.get(zone).ok_or(Status::LBA_OUT_OF_RANGE.dnr())?;
        match state {
            ZoneState::Full => return Err(Status::ZONE_IS_FULL.dnr()),
            ZoneState::ReadOnly => return Err(Status::ZONE_IS_READ_ONLY.dnr()),
            ZoneState::Offline => return Err(Status::ZONE_IS_OFFLINE.dnr()),
            _ => {}
        }
        let wp = start.saturating_add(written);
        let at = slba.unwrap_or(wp);
        if u64::from(blocks) > capacity.saturating_sub(at.saturating_sub(start)) {
            return Err(Status::ZONE_BOUNDARY_ERROR.dnr());
        }
        if at != wp {
            return Err(Status::ZONE_INVALID_WRITE.dnr());
        }
        if !state.is_open() {
            self.make_room(state)?;
            self.put(zone, ZoneState::ImplicitlyOpened);
        }
        self.touch(zone, true);
        Ok(at)
    }

    /// A write ended. After one that failed the zone's write pointer is not known until [`Self::learn`] tells it.
    pub fn end_write(&mut self, zone: u32, blocks: u32, success: bool) {
        self.touch(zone, false);
        let Some(slot) = self.slot_mut(zone) else { return };
        if !success {
            slot.unknown = true;
            // Nothing is known to be written: the room that it took is for others, unless the storage says that it is not. The
            // write had opened the zone; where it is closed now, that was to make room for another.
            if slot.zone.written == 0 && matches!(slot.zone.state, ZoneState::ImplicitlyOpened | ZoneState::Closed) {
                self.put(zone, ZoneState::Empty);
            }
            return;
        }
        slot.zone.written = slot.zone.written.saturating_add(blocks.into()).min(slot.zone.capacity);
        if slot.zone.written == slot.zone.capacity {
            self.put(zone, ZoneState::Full);
        }
    }

    /// Whether it has to be asked where the zone's write pointer is before anything else is done to it.
    #[must_use]
    pub fn is_unknown(&self, zone: u32) -> bool {
        self.slot(zone).is_some_and(|slot| slot.unknown)
    }

    /// Whether a write or a change of the zone's state has begun, and no end of it was told.
    #[must_use]
    pub fn is_busy(&self, zone: u32) -> bool {
        self.slot(zone).is_some_and(|slot| slot.busy)
    }

    /// Begins a change of a zone's state: whether there is anything to do. Then [`Self::end_action`] follows.
    ///
    /// # Errors
    /// The status to answer with; nothing was done.
    pub fn begin_action(&mut self, zone: u32, action: ZoneAction) -> Result<bool, Status> {
        use ZoneState as S;
        let Slot { zone: Zone { state, .. }, unknown, .. } = *self.slot(zone).ok_or(Status::LBA_OUT_OF_RANGE.dnr())?;
        let needed = match (action, state) {
            // There may be more in it than is known here.
            (ZoneAction::Reset, S::Empty) if unknown => true,
            (ZoneAction::Open, S::ExplicitlyOpened)
            | (ZoneAction::Close, S::Closed)
            | (ZoneAction::Finish, S::Full)
            | (ZoneAction::Reset, S::Empty)
            | (ZoneAction::Offline, S::Offline) => false,
            (ZoneAction::Open, S::Empty | S::Closed | S::ImplicitlyOpened) => {
                if !state.is_open() {
                    self.make_room(state)?;
                }
                // The room is taken at once: other zones ask for it too.
                self.put(zone, S::ExplicitlyOpened);
                true
            }
            (ZoneAction::Close, S::ImplicitlyOpened | S::ExplicitlyOpened)
            | (ZoneAction::Finish, S::Empty | S::ImplicitlyOpened | S::ExplicitlyOpened | S::Closed)
            | (ZoneAction::Reset, S::ImplicitlyOpened | S::ExplicitlyOpened | S::Closed | S::Full)
            | (ZoneAction::Offline, S::ReadOnly) => true,
            _ => return Err(Status::INVALID_ZONE_STATE_TRANSITION.dnr()),
        };
        if needed {
            self.touch(zone, true);
        }
        Ok(needed)
    }

    /// A change of a zone's state ended. What came of one that failed is not known until [`Self::learn`] tells it.
    pub fn end_action(&mut self, zone: u32, action: ZoneAction, success: bool) {
        self.touch(zone, false);
        let Some(slot) = self.slot_mut(zone) else { return };
        slot.unknown = !success;
        if !success {
            // The room that it took is for others, unless the storage says that it is not.
            let before = if slot.zone.written == 0 { ZoneState::Empty } else { ZoneState::Closed };
            if action == ZoneAction::Open {
                self.put(zone, before);
            }
            return;
        }
        let state = match action {
            ZoneAction::Close => ZoneState::Closed,
            ZoneAction::Finish => ZoneState::Full,
            ZoneAction::Open => ZoneState::ExplicitlyOpened,
            ZoneAction::Reset => ZoneState::Empty,
            ZoneAction::Offline => ZoneState::Offline,
        };
        if state == ZoneState::Empty {
            slot.zone.written = 0;
        }
        self.put(zone, state);
    }

    /// The first zone from `from` on that an action on all zones is about; or could be: where [`Self::is_unknown`], the storage is
    /// asked, and then [`Self::is_meant`].
    #[must_use]
    pub fn next_for(&self, action: ZoneAction, from: u32) -> Option<u32> {
        let rest = (from..).zip(self.zones.iter().skip(usize::try_from(from).unwrap_or(usize::MAX)));
        rest.into_iter().find(|(_, slot)| slot.is_meant(action)).map(|(zone, _)| zone)
    }

    /// Whether an action on all zones is about this one, and nothing has to be asked before.
    #[must_use]
    pub fn is_meant(&self, action: ZoneAction, zone: u32) -> bool {
        let known = |slot: &Slot| action == ZoneAction::Reset || !slot.unknown;
        self.slot(zone).is_some_and(|slot| slot.is_meant(action) && known(slot))
    }

    /// Whether all closed zones can be open at once, as opening all zones asks.
    ///
    /// # Errors
    /// Too Many Open Zones.
    pub fn may_open_all(&self) -> Result<(), Status> {
        let max = self.geometry.max_open;
        if max != 0 && self.active > max { Err(Status::TOO_MANY_OPEN_ZONES) } else { Ok(()) }
    }

    /// A time, for [`Self::learn`]: what is asked after it knows all that was done before.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.clock
    }

    /// What the storage itself said of zones from `first` on, asked after `mark`; `None`: nothing that has a meaning. What it said
    /// of zones that are being worked on, or have been since, is out of date.
    pub fn learn(&mut self, mark: u64, first: u32, said: impl IntoIterator<Item = Option<Zone>>) {
        for (number, said) in (first..).zip(said) {
            let Some(slot) = self.slot_mut(number) else { return };
            // A zone that a host gave up stays so, though the storage could still read it.
            if let Some(Zone { state, capacity, written }) = said
                && !slot.busy
                && slot.changed <= mark
                && slot.zone.state != ZoneState::Offline
            {
                (slot.zone.capacity, slot.zone.written, slot.unknown) = (capacity, written.min(capacity), false);
                self.put(number, state);
            }
        }
    }

    /// There is nobody to ask: zones are as they are written down here.
    pub fn trust(&mut self, zone: u32) {
        if let Some(slot) = self.slot_mut(zone) {
            slot.unknown = false;
        }
    }

    /// Room for one more open zone, which is in this state: a zone that a write opened is closed where that is what it takes.
    fn make_room(&mut self, state: ZoneState) -> Result<(), Status> {
        let Geometry { max_open, max_active, .. } = self.geometry;
        if max_active != 0 && !state.is_active() && self.active >= max_active {
            return Err(Status::TOO_MANY_ACTIVE_ZONES);
        }
        if max_open == 0 || self.open < max_open {
            return Ok(());
        }
        let count = self.zones.len();
        let order = (self.cursor..count).chain(0..self.cursor);
        let mut implicit = order.filter_map(|at| {
            let slot = self.zones.get(at)?;
            (slot.zone.state == ZoneState::ImplicitlyOpened).then_some((at, slot.busy))
        });
        let first = implicit.next().ok_or(Status::TOO_MANY_OPEN_ZONES)?;
        // One that is being written to would be opened again at once.
        let idle = if first.1 { implicit.find(|(_, busy)| !busy) } else { None };
        let (victim, _) = idle.unwrap_or(first);
        self.cursor = if victim + 1 < count { victim + 1 } else { 0 };
        self.put(u32::try_from(victim).unwrap_or(u32::MAX), ZoneState::Closed);
        Ok(())
    }

    fn put(&mut self, zone: u32, state: ZoneState) {
        let Some(slot) = self.slot_mut(zone) else { return };
        let was = core::mem::replace(&mut slot.zone.state, state);
        let count = |total: &mut u32, was: bool, is: bool| match (was, is) {
            (true, false) => *total = total.saturating_sub(1),
            (false, true) => *total = total.saturating_add(1),
            _ => {}
        };
        count(&mut self.open, was.is_open(), state.is_open());
        count(&mut self.active, was.is_active(), state.is_active());
    }

    fn touch(&mut self, zone: u32, busy: bool) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(slot) = self.slot_mut(zone) {
            (slot.busy, slot.changed) = (busy, clock);
        }
    }

    fn slot(&self, zone: u32) -> Option<&Slot> {
        self.zones.get(usize::try_from(zone).ok()?)
    }

    fn slot_mut(&mut self, zone: u32) -> Option<&mut Slot> {
        self.zones.get_mut(usize::try_from(zone).ok()?)
    }
}
