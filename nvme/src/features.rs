//! Features: the values that Get Features and Set Features work on.
//!
//! One table says which identifiers (FID) exist for which kind of controller and whether they can be changed; none can
//! be saved, so a saved value is the default one. Values go back to their defaults at a controller reset, but for the
//! keep alive timeout and the host identifier, which belong to the association. (NVMe Base 2.x, Feature Specific
//! Information.)

use core::time::Duration;

use crate::admin::{GetFeatures, Refused, Select, SetFeatures, location};
use crate::aer::{ANA_CHANGE_NOTICES, DISCOVERY_LOG_NOTICES, NAMESPACE_ATTRIBUTE_NOTICES};
use crate::command::NSID_ALL;
use crate::status::Status;

/// Feature identifiers (FID).
pub(crate) mod fid {
    pub(crate) const ARBITRATION: u8 = 0x01;
    pub(crate) const POWER_MANAGEMENT: u8 = 0x02;
    pub(crate) const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub(crate) const ERROR_RECOVERY: u8 = 0x05;
    pub(crate) const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub(crate) const NUMBER_OF_QUEUES: u8 = 0x07;
    pub(crate) const WRITE_ATOMICITY: u8 = 0x0a;
    pub(crate) const ASYNC_EVENT_CONFIGURATION: u8 = 0x0b;
    pub(crate) const KEEP_ALIVE_TIMER: u8 = 0x0f;
    pub(crate) const HOST_BEHAVIOR: u8 = 0x16;
    pub(crate) const IO_COMMAND_SET_PROFILE: u8 = 0x19;
    pub(crate) const HOST_IDENTIFIER: u8 = 0x81;
    pub(crate) const RESERVATION_MASK: u8 = 0x82;
    pub(crate) const RESERVATION_PERSISTENCE: u8 = 0x83;
    pub(crate) const WRITE_PROTECTION: u8 = 0x84;
}

/// Bytes of the Host Behavior Support data structure.
pub(crate) const HOST_BEHAVIOR_LEN: u32 = 512;

struct Entry {
    fid: u8,
    changeable: bool,
    /// Discovery controllers have it too.
    discovery: bool,
}

const fn entry(fid: u8, changeable: bool, discovery: bool) -> Entry {
    Entry { fid, changeable, discovery }
}

const TABLE: [Entry; 15] = [
    entry(fid::ARBITRATION, true, false),
    entry(fid::POWER_MANAGEMENT, true, false),
    entry(fid::TEMPERATURE_THRESHOLD, true, false),
    entry(fid::ERROR_RECOVERY, true, false),
    // The cache belongs to what is behind the namespaces; a host cannot turn it off.
    entry(fid::VOLATILE_WRITE_CACHE, false, false),
    entry(fid::NUMBER_OF_QUEUES, true, false),
    entry(fid::WRITE_ATOMICITY, true, false),
    entry(fid::ASYNC_EVENT_CONFIGURATION, true, true),
    entry(fid::KEEP_ALIVE_TIMER, true, true),
    entry(fid::HOST_BEHAVIOR, true, false),
    entry(fid::IO_COMMAND_SET_PROFILE, true, false),
    // On fabrics it comes with Connect.
    entry(fid::HOST_IDENTIFIER, false, false),
    // Of a namespace, which keeps them: the registry answers.
    entry(fid::RESERVATION_MASK, true, false),
    entry(fid::RESERVATION_PERSISTENCE, true, false),
    entry(fid::WRITE_PROTECTION, true, false),
];

/// Whether a feature belongs to a namespace.
pub(crate) const fn is_of_namespace(feature: u8) -> bool {
    matches!(feature, fid::RESERVATION_MASK | fid::RESERVATION_PERSISTENCE | fid::WRITE_PROTECTION)
}

/// The identifiers that a kind of controller has, in order.
pub(crate) fn identifiers(discovery: bool) -> impl Iterator<Item = u8> {
    TABLE.iter().filter(move |entry| entry.discovery || !discovery).map(|entry| entry.fid)
}

/// What features need to know of their controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeatureContext {
    pub(crate) discovery: bool,
    pub(crate) max_io_queues: u16,
    pub(crate) keep_alive_granularity: Duration,
    /// I/O queues exist, so their number cannot be negotiated any more.
    pub(crate) io_queues_exist: bool,
    pub(crate) hostid: [u8; 16],
}

/// The answer to Get Features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FeatureValue {
    Dword(u32),
    Data(Vec<u8>),
}

/// What Set Features asks for next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SetOutcome {
    /// Done, with this Dword 0.
    Done(u32),
    /// The data of the feature are needed: call again with them.
    NeedsData(u32),
}

/// Values of one controller.
#[derive(Clone, Debug)]
pub(crate) struct Features {
    arbitration: u32,
    over_temperature: u32,
    under_temperature: u32,
    error_recovery: u32,
    write_atomicity: u32,
    async_events: u32,
    /// I/O queues granted.
    queues: u16,
    host_behavior: Vec<u8>,
    /// Keep alive timeout, rounded up to the granularity; `None` is off.
    kato: Option<Duration>,
}

impl Features {
    pub(crate) fn new(context: &FeatureContext, kato: Option<Duration>) -> Self {
        Self {
            arbitration: 7,
            over_temperature: 0xffff,
            under_temperature: 0,
            error_recovery: 0,
            write_atomicity: 0,
            async_events: supported_notices(context.discovery),
            queues: context.max_io_queues,
            host_behavior: vec![0; 512],
            kato: kato.map(|kato| round_up(kato, context.keep_alive_granularity)),
        }
    }

    /// A controller reset.
    pub(crate) fn reset(&mut self, context: &FeatureContext) {
        *self = Self::new(context, self.kato);
    }

    /// I/O queues that the host may connect.
    pub(crate) fn queues(&self) -> u16 {
        self.queues
    }

    pub(crate) fn kato(&self) -> Option<Duration> {
        self.kato
    }

    /// Whether the host looks at the retry delay of a status (Advanced Command Retry Enable).
    pub(crate) fn advanced_retry(&self) -> bool {
        self.host_behavior.first() == Some(&1)
    }

    /// Whether the host wants the notice of this bit.
    pub(crate) fn notice_enabled(&self, bit: u32) -> bool {
        self.async_events & bit != 0
    }

    pub(crate) fn get(&self, get: GetFeatures, context: &FeatureContext) -> Result<FeatureValue, Refused> {
        let entry = find(get.fid, context)?;
        match get.select {
            Select::Current => self.value(get, context),
            // Nothing can be saved, so the saved value is the default one.
            Select::Default | Select::Saved => {
                let mut defaults = Self::new(context, None);
                if get.fid == fid::KEEP_ALIVE_TIMER {
                    defaults.kato = None;
                }
                defaults.value(get, context)
            }
            Select::Capabilities => Ok(FeatureValue::Dword(if entry.changeable { CHANGEABLE } else { 0 })),
        }
    }

    fn value(&self, get: GetFeatures, context: &FeatureContext) -> Result<FeatureValue, Refused> {
        Ok(FeatureValue::Dword(match get.fid {
            fid::ARBITRATION => self.arbitration,
            fid::TEMPERATURE_THRESHOLD => {
                let threshold = TemperatureThreshold::parse(get.value)?;
                if threshold.sensor != 0 {
                    return Err(Refused::invalid_field(location::CDW11 + 2));
                }
                match threshold.under {
                    false => self.over_temperature,
                    true => self.under_temperature,
                }
            }
            fid::ERROR_RECOVERY => self.error_recovery,
            fid::VOLATILE_WRITE_CACHE => 1,
            fid::NUMBER_OF_QUEUES => both_halves(self.queues),
            fid::WRITE_ATOMICITY => self.write_atomicity,
            fid::ASYNC_EVENT_CONFIGURATION => self.async_events,
            fid::KEEP_ALIVE_TIMER => self.kato.map_or(0, |kato| u32::try_from(kato.as_millis()).unwrap_or(u32::MAX)),
            fid::HOST_BEHAVIOR => return Ok(FeatureValue::Data(self.host_behavior.clone())),
            fid::HOST_IDENTIFIER => {
                // Fabrics has the extended, 128-bit identifier alone: EXHID must be set.
                if get.value & 1 == 0 {
                    return Err(Refused::invalid_field(location::CDW11));
                }
                return Ok(FeatureValue::Data(context.hostid.to_vec()));
            }
            // Power state 0 and command set combination 0 are the only ones.
            _ => 0,
        }))
    }

    pub(crate) fn set(
        &mut self,
        set: SetFeatures,
        data: Option<&[u8]>,
        context: &FeatureContext,
    ) -> Result<SetOutcome, Refused> {
        let entry = find(set.fid, context)?;
        let refused = |status: Status| Refused::at(location::CDW10, status.dnr());
        if set.save {
            return Err(refused(Status::FEATURE_NOT_SAVEABLE));
        }
        if set.fid == fid::HOST_IDENTIFIER {
            // It was set by Connect and cannot be set again.
            return Err(refused(Status::COMMAND_SEQUENCE_ERROR));
        }
        if !entry.changeable {
            return Err(refused(Status::FEATURE_NOT_CHANGEABLE));
        }
        if !matches!(set.nsid, 0 | NSID_ALL) {
            let status = Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr();
            return Err(Refused::at(location::NSID, status));
        }
        self.change(set, data, context)
    }

    fn change(
        &mut self,
        set: SetFeatures,
        data: Option<&[u8]>,
        context: &FeatureContext,
    ) -> Result<SetOutcome, Refused> {
        let invalid = Refused::invalid_field(location::CDW11);
        let mut result = 0;
        match set.fid {
            fid::ARBITRATION => self.arbitration = set.value,
            fid::POWER_MANAGEMENT if set.value & 0x1f != 0 => return Err(invalid),
            fid::POWER_MANAGEMENT => {}
            fid::TEMPERATURE_THRESHOLD => {
                let threshold = TemperatureThreshold::parse(set.value)?;
                match threshold.under {
                    false => self.over_temperature = threshold.kelvin,
                    true => self.under_temperature = threshold.kelvin,
                }
            }
            // Deallocated or unwritten block errors (DULBE) are not supported by any namespace.
            fid::ERROR_RECOVERY if set.value & 1 << 16 != 0 => return Err(invalid),
            fid::ERROR_RECOVERY => self.error_recovery = set.value & 0xffff,
            fid::NUMBER_OF_QUEUES => result = self.set_queues(set.value, context)?,
            fid::WRITE_ATOMICITY => self.write_atomicity = set.value & 1,
            fid::ASYNC_EVENT_CONFIGURATION => {
                let supported = SMART_EVENTS | supported_notices(context.discovery);
                if set.value & !supported != 0 {
                    return Err(invalid);
                }
                self.async_events = set.value;
            }
            fid::KEEP_ALIVE_TIMER => {
                let kato = Duration::from_millis(set.value.into());
                self.kato = (set.value != 0).then(|| round_up(kato, context.keep_alive_granularity));
            }
            fid::HOST_BEHAVIOR => {
                let Some(data) = data else {
                    return Ok(SetOutcome::NeedsData(HOST_BEHAVIOR_LEN));
                };
                self.set_host_behavior(data)?;
            }
            fid::IO_COMMAND_SET_PROFILE if set.value & 0x1ff != 0 => {
                let status = Status::IO_COMMAND_SET_COMBINATION_REJECTED.dnr();
                return Err(Refused::at(location::CDW11, status));
            }
            _ => {}
        }
        Ok(SetOutcome::Done(result))
    }

    /// NSQR and NCQR are zero's based; FFFFh is invalid. Submission and completion queues come in pairs on fabrics.
    fn set_queues(&mut self, value: u32, context: &FeatureContext) -> Result<u32, Refused> {
        let [s0, s1, c0, c1] = value.to_le_bytes();
        let nsqr = u16::from_le_bytes([s0, s1]).checked_add(1);
        let ncqr = u16::from_le_bytes([c0, c1]).checked_add(1);
        let (Some(nsqr), Some(ncqr)) = (nsqr, ncqr) else {
            return Err(Refused::invalid_field(location::CDW11));
        };
        if context.io_queues_exist {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr().into());
        }
        self.queues = nsqr.min(ncqr).min(context.max_io_queues);
        Ok(both_halves(self.queues))
    }

    /// Every field of Host Behavior Support is an enable of 0 or 1, and we have none of the behaviours but Advanced
    /// Command Retry.
    fn set_host_behavior(&mut self, data: &[u8]) -> Result<(), Refused> {
        let data = data.get(..self.host_behavior.len()).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
        if !matches!(data, [0 | 1, rest @ ..] if rest.iter().all(|&byte| byte == 0)) {
            return Err(Status::INVALID_FIELD.dnr().into());
        }
        self.host_behavior = data.to_vec();
        Ok(())
    }
}

/// Dword 11 of Temperature Threshold.
struct TemperatureThreshold {
    kelvin: u32,
    sensor: u32,
    under: bool,
}

impl TemperatureThreshold {
    /// Sensor 0 is the composite temperature, Fh is all; there are no others. Types 0 and 1 are over and under.
    fn parse(value: u32) -> Result<Self, Refused> {
        let sensor = value >> 16 & 0xf;
        let threshold_type = value >> 20 & 3;
        if !matches!(sensor, 0 | 0xf) || threshold_type > 1 {
            return Err(Refused::invalid_field(location::CDW11 + 2));
        }
        Ok(Self { kelvin: value & 0xffff, sensor, under: threshold_type == 1 })
    }
}

fn find(fid: u8, context: &FeatureContext) -> Result<&'static Entry, Refused> {
    TABLE
        .iter()
        .find(|entry| entry.fid == fid && (entry.discovery || !context.discovery))
        .ok_or(Refused::invalid_field(location::CDW10))
}

/// The notices that a kind of controller has: OAES, and what is enabled from the start, as nvmet and SPDK do.
pub(crate) const fn supported_notices(discovery: bool) -> u32 {
    if discovery { DISCOVERY_LOG_NOTICES } else { NAMESPACE_ATTRIBUTE_NOTICES | ANA_CHANGE_NOTICES }
}

/// Capabilities that Get Features tells.
pub(crate) const NAMESPACE_SPECIFIC: u32 = 1 << 1;
pub(crate) const CHANGEABLE: u32 = 1 << 2;

/// SMART / health critical warnings of Asynchronous Event Configuration.
const SMART_EVENTS: u32 = 0x3f;

fn round_up(kato: Duration, granularity: Duration) -> Duration {
    let granularity = granularity.as_millis().max(1);
    let millis = kato.as_millis().div_ceil(granularity) * granularity;
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
}

/// A zero's based count in both halves of a Dword.
fn both_halves(count: u16) -> u32 {
    let zeros_based = u32::from(count.saturating_sub(1));
    zeros_based | zeros_based << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: FeatureContext = FeatureContext {
        discovery: false,
        max_io_queues: 128,
        keep_alive_granularity: Duration::from_secs(1),
        io_queues_exist: false,
        hostid: [7; 16],
    };
    const DISCOVERY: FeatureContext = FeatureContext { discovery: true, ..CONTEXT };

    fn features() -> Features {
        Features::new(&CONTEXT, Some(Duration::from_secs(5)))
    }

    fn set(f: &mut Features, fid: u8, value: u32) -> Result<SetOutcome, u16> {
        let set = SetFeatures { nsid: 0, fid, save: false, value };
        f.set(set, None, &CONTEXT).map_err(|r| r.status.code())
    }

    fn get(f: &Features, fid: u8, select: Select, value: u32) -> Result<u32, u16> {
        let get = GetFeatures { nsid: 0, fid, select, value };
        match f.get(get, &CONTEXT) {
            Ok(FeatureValue::Dword(value)) => Ok(value),
            Ok(FeatureValue::Data(data)) => Ok(u32::try_from(data.len()).unwrap()),
            Err(refused) => Err(refused.status.code()),
        }
    }

    #[test]
    fn all_identifiers_by_all_selects() {
        let f = features();
        // Current, default, saved, capabilities.
        let expected = |fid: u8| match fid {
            0x01 => Some([7, 7, 7, 4]),
            0x02 | 0x05 | 0x0a | 0x19 => Some([0, 0, 0, 4]),
            0x04 => Some([0xffff, 0xffff, 0xffff, 4]),
            0x06 => Some([1, 1, 1, 0]),
            0x07 => Some([0x7f_007f, 0x7f_007f, 0x7f_007f, 4]),
            0x0b => Some([0x900, 0x900, 0x900, 4]),
            0x0f => Some([5000, 0, 0, 4]),
            0x16 => Some([512, 512, 512, 4]),
            _ => None,
        };
        for fid in (0..=0xffu8).filter(|fid| !(0x81..=0x84).contains(fid)) {
            let selects = [Select::Current, Select::Default, Select::Saved, Select::Capabilities];
            for (n, select) in selects.into_iter().enumerate() {
                let expected = expected(fid).map(|values| values[n]).ok_or(0x02);
                assert_eq!(get(&f, fid, select, 0), expected, "{fid:x} {select:?}");
            }
        }
    }

    #[test]
    fn host_identifier_is_128_bits_and_cannot_be_set() {
        let mut f = features();
        assert_eq!(get(&f, 0x81, Select::Current, 1), Ok(16));
        assert_eq!(get(&f, 0x81, Select::Current, 0), Err(0x02));
        assert_eq!(get(&f, 0x81, Select::Capabilities, 0), Ok(0));
        assert_eq!(set(&mut f, 0x81, 0), Err(0x0c));
    }

    #[test]
    fn saving_is_refused_for_known_features_only_as_not_saveable() {
        let mut f = features();
        let mut save = |fid| {
            let set = SetFeatures { nsid: 0, fid, save: true, value: 0 };
            f.set(set, None, &CONTEXT).map_err(|r| r.status.code())
        };
        assert_eq!(save(0x07), Err(0x10d));
        assert_eq!(save(0x03), Err(0x02));
    }

    #[test]
    fn number_of_queues_is_granted_up_to_the_maximum_before_queues_exist() {
        let mut f = features();
        assert_eq!(set(&mut f, 7, 0x0003_0007), Ok(SetOutcome::Done(0x3_0003)));
        assert_eq!(f.queues(), 4);
        assert_eq!(get(&f, 7, Select::Current, 0), Ok(0x3_0003));
        assert_eq!(set(&mut f, 7, 0xfffe_fffe), Ok(SetOutcome::Done(0x7f_007f)));
        assert_eq!(set(&mut f, 7, 0xffff_0001), Err(0x02));
        assert_eq!(set(&mut f, 7, 0x0001_ffff), Err(0x02));
        let late = FeatureContext { io_queues_exist: true, ..CONTEXT };
        let set = SetFeatures { nsid: 0, fid: 7, save: false, value: 0 };
        let refused = f.set(set, None, &late).unwrap_err();
        assert_eq!(refused.status, Status::COMMAND_SEQUENCE_ERROR.dnr());
    }

    #[test]
    fn keep_alive_is_rounded_up_and_can_be_turned_off() {
        let mut f = features();
        for (millis, rounded) in [(1, 1000), (1000, 1000), (1001, 2000), (0, 0)] {
            assert_eq!(set(&mut f, 0x0f, millis), Ok(SetOutcome::Done(0)));
            assert_eq!(get(&f, 0x0f, Select::Current, 0), Ok(rounded));
        }
        assert_eq!(set(&mut f, 0x0f, u32::MAX), Ok(SetOutcome::Done(0)));
        assert_eq!(get(&f, 0x0f, Select::Current, 0), Ok(u32::MAX));
    }

    #[test]
    fn only_supported_notices_can_be_enabled() {
        let mut f = features();
        assert_eq!(set(&mut f, 0x0b, 0x11f), Ok(SetOutcome::Done(0)));
        assert!(f.notice_enabled(NAMESPACE_ATTRIBUTE_NOTICES));
        assert_eq!(set(&mut f, 0x0b, 0x200), Err(0x02));
        assert_eq!(set(&mut f, 0x0b, 1 << 31), Err(0x02));
        assert_eq!(set(&mut f, 0x0b, 0), Ok(SetOutcome::Done(0)));
        assert!(!f.notice_enabled(NAMESPACE_ATTRIBUTE_NOTICES));
    }

    #[test]
    fn values_that_we_do_not_support_are_refused() {
        let mut f = features();
        assert_eq!(set(&mut f, 0x02, 1), Err(0x02));
        assert_eq!(set(&mut f, 0x05, 1 << 16), Err(0x02));
        assert_eq!(set(&mut f, 0x06, 0), Err(0x10e));
        assert_eq!(set(&mut f, 0x19, 1), Err(0x12b));
        assert_eq!(set(&mut f, 0x04, 1 << 16), Err(0x02));
        assert_eq!(set(&mut f, 0x04, 2 << 20), Err(0x02));
        assert_eq!(get(&f, 0x04, Select::Current, 3 << 16), Err(0x02));
        assert_eq!(set(&mut f, 0x04, 1 << 20 | 300), Ok(SetOutcome::Done(0)));
        assert_eq!(get(&f, 0x04, Select::Current, 1 << 20), Ok(300));
    }

    #[test]
    fn a_namespace_is_refused_for_features_of_the_controller() {
        let mut f = features();
        let set = SetFeatures { nsid: 1, fid: 0x0b, save: false, value: 0 };
        let refused = f.set(set, None, &CONTEXT).unwrap_err();
        assert_eq!(refused.status, Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
    }

    #[test]
    fn host_behavior_needs_its_data() {
        let mut f = features();
        assert_eq!(set(&mut f, 0x16, 0), Ok(SetOutcome::NeedsData(512)));
        let set = SetFeatures { nsid: 0, fid: 0x16, save: false, value: 0 };
        let mut data = vec![0; 512];
        data[0] = 1;
        assert_eq!(f.set(set, Some(&data), &CONTEXT), Ok(SetOutcome::Done(0)));
        data[0] = 2;
        assert!(f.set(set, Some(&data), &CONTEXT).is_err());
        data[..3].copy_from_slice(&[0, 0, 1]);
        assert!(f.set(set, Some(&data), &CONTEXT).is_err());
        assert!(f.set(set, Some(&data[..511]), &CONTEXT).is_err());
    }

    #[test]
    fn reset_restores_defaults_but_not_the_keep_alive_timeout() {
        let mut f = features();
        set(&mut f, 0x0b, 0).unwrap();
        set(&mut f, 0x07, 0).unwrap();
        f.reset(&CONTEXT);
        assert!(f.notice_enabled(NAMESPACE_ATTRIBUTE_NOTICES));
        assert_eq!(f.queues(), 128);
        assert_eq!(f.kato(), Some(Duration::from_secs(5)));
    }

    #[test]
    fn discovery_controllers_have_keep_alive_and_events_alone() {
        assert_eq!(identifiers(true).collect::<Vec<_>>(), [0x0b, 0x0f]);
        let f = Features::new(&DISCOVERY, None);
        for fid in 0..=0xffu8 {
            let get = GetFeatures { nsid: 0, fid, select: Select::Current, value: 1 };
            assert_eq!(f.get(get, &DISCOVERY).is_ok(), [0x0b, 0x0f].contains(&fid));
        }
        assert!(f.notice_enabled(DISCOVERY_LOG_NOTICES));
    }
}
