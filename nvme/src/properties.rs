//! Properties: the registers of a fabrics controller, and the life cycle behind them.
//!
//! [`Properties`] is the enable, ready, shutdown and fatal state machine. It decides nothing about queues: a write to
//! Controller Configuration (CC) returns what has to happen ([`CcEffects`]), and whoever owns the queues reports back.
//! CSTS.RDY goes to 0 only when the I/O queues of the old life are gone, so no late write can land in the next one.
//! (NVMe Base 2.x, Controller Properties; Property Get and Set commands.)

use crate::fabrics::PropertyRef;
use crate::status::Status;

const CAP: u32 = 0x00;
const VS: u32 = 0x08;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const NSSR: u32 = 0x20;
const CRTO: u32 = 0x68;

/// Version (VS): 2.0.
pub(crate) const VERSION: u32 = 0x0002_0000;

/// Where a controller stands between reset and ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// CC.EN = 0, CSTS.RDY = 0.
    Disabled,
    /// CC.EN = 1, CSTS.RDY = 1.
    Ready,
    /// CC.EN went 1 to 0; CSTS.RDY stays 1 until the I/O queues are gone.
    Draining,
    /// CSTS.CFS = 1: only a reset leads out.
    Fatal,
}

/// Shutdown status (CSTS.SHST).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shutdown {
    Normal,
    InProgress,
    Complete,
}

/// What a write to CC asks of the owner of the queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CcEffects {
    /// EN went 1 to 0: close the I/O queues, then [`Properties::reset_done`].
    pub(crate) reset: bool,
    /// SHN asks for shutdown: settle I/O, then [`Properties::shutdown_done`].
    pub(crate) shutdown: bool,
    /// An NVM subsystem reset is asked for.
    pub(crate) subsystem_reset: bool,
}

/// The registers of one controller.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    cap: u64,
    crto: u32,
    cc: u32,
    /// An NVM subsystem reset can be asked for (CAP.NSSRS).
    subsystem_reset: bool,
    /// One took place since a host last said that it knows (CSTS.NSSRO).
    subsystem_was_reset: bool,
    /// Command sets that CC.CSS may choose.
    css: &'static [u32],
    /// What it chose when it was last enabled: a change while CC.EN is 1 has no effect.
    chosen_css: u32,
    life: Life,
    shutdown: Shutdown,
}

/// What CAP is built from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// Maximum queue entries supported, zero's based.
    pub(crate) mqes: u16,
    /// Worst time to become ready or disabled, in units of 500 ms.
    pub(crate) timeout: u8,
    /// Serves the NVM command set (an I/O controller), or admin commands only (a discovery controller).
    pub(crate) io: bool,
    /// The host may reset the NVM subsystem.
    pub(crate) subsystem_reset: bool,
    /// A host did.
    pub(crate) subsystem_was_reset: bool,
}

impl Properties {
    pub(crate) fn new(capabilities: Capabilities) -> Self {
        let Capabilities { mqes, timeout, io, subsystem_reset, subsystem_was_reset } = capabilities;
        let mut cap = u64::from(mqes) | CAP_CQR | u64::from(timeout) << 24 | CAP_CSS_NVM | CAP_CRWMS;
        let css: &[u32] = if io {
            cap |= CAP_CSS_CSI;
            &[CSS_NVM, CSS_CSI]
        } else {
            cap |= CAP_CSS_ADMIN_ONLY;
            // It has no I/O commands whatever the host selects, and some select what the I/O controllers of the same
            // target offer.
            &[CSS_NVM, CSS_CSI, CSS_ADMIN_ONLY]
        };
        if subsystem_reset {
            cap |= CAP_NSSRS;
        }
        Self {
            cap,
            crto: u32::from(timeout),
            cc: 0,
            subsystem_reset,
            subsystem_was_reset,
            css,
            chosen_css: CSS_NVM,
            life: Life::Disabled,
            shutdown: Shutdown::Normal,
        }
    }

    /// Property Get. The size must be that of the property.
    pub(crate) fn get(&self, property: PropertyRef) -> Result<u64, Status> {
        match (property.offset, property.size) {
            (CAP, 8) => Ok(self.cap),
            (VS, 4) => Ok(VERSION.into()),
            (CC, 4) => Ok(self.cc.into()),
            (CSTS, 4) => Ok(self.csts().into()),
            (CRTO, 4) => Ok(self.crto.into()),
            (NSSR, 4) if self.subsystem_reset => Ok(0),
            _ => Err(Status::INVALID_FIELD.dnr()),
        }
    }

    /// Property Set: CC can be written, and where a subsystem can be reset, NSSR, and the bit of CSTS that tells of that.
    pub(crate) fn set(&mut self, property: PropertyRef, value: u64) -> Result<CcEffects, Status> {
        let value = u32::try_from(value).map_err(|_| Status::INVALID_FIELD.dnr())?;
        match (property.offset, property.size) {
            (CC, 4) => Ok(self.set_cc(value)),
            (NSSR, 4) if self.subsystem_reset => {
                Ok(CcEffects { subsystem_reset: value == NSSR_RESET, ..CcEffects::default() })
            }
            (CSTS, 4) if self.subsystem_reset => {
                self.subsystem_was_reset &= value & CSTS_NSSRO == 0;
                Ok(CcEffects::default())
            }
            _ => Err(Status::INVALID_FIELD.dnr()),
        }
    }

    fn set_cc(&mut self, cc: u32) -> CcEffects {
        let was = core::mem::replace(&mut self.cc, cc);
        let mut effects = CcEffects::default();
        if cc & CC_SHN != 0 && was & CC_SHN == 0 {
            effects.shutdown = self.begin_shutdown();
        }
        match (was & CC_EN != 0, cc & CC_EN != 0) {
            (false, true) => self.enable(),
            (true, false) => effects.reset = self.begin_reset(),
            _ => {}
        }
        effects
    }

    /// EN 0 to 1. A configuration that we cannot run is a fatal status, as there is no status in CC itself. While the
    /// old life drains, the new one starts when that is done.
    fn enable(&mut self) {
        if self.life != Life::Disabled {
            return;
        }
        self.shutdown = Shutdown::Normal;
        self.chosen_css = (self.cc & CC_CSS) >> 4;
        let supported = self.cc & (CC_MPS | CC_AMS) == 0 && self.css.contains(&self.chosen_css);
        self.life = if supported { Life::Ready } else { Life::Fatal };
    }

    fn begin_reset(&mut self) -> bool {
        match self.life {
            Life::Ready | Life::Fatal => {
                self.life = Life::Draining;
                true
            }
            Life::Disabled | Life::Draining => false,
        }
    }

    fn begin_shutdown(&mut self) -> bool {
        if self.shutdown != Shutdown::Normal {
            return false;
        }
        if self.life != Life::Ready {
            self.shutdown = Shutdown::Complete;
            return false;
        }
        self.shutdown = Shutdown::InProgress;
        true
    }

    /// The I/O queues of the life that CC.EN = 0 ended are gone.
    pub(crate) fn reset_done(&mut self) {
        if self.life == Life::Draining {
            self.life = Life::Disabled;
            self.shutdown = match self.shutdown {
                // With the queues drained and closed there is nothing left to settle; a host that still asks for it is
                // told so.
                Shutdown::InProgress | Shutdown::Complete if self.cc & CC_SHN != 0 => Shutdown::Complete,
                _ => Shutdown::Normal,
            };
            if self.cc & CC_EN != 0 {
                self.enable();
            }
        }
    }

    /// I/O is settled and flushed after CC.SHN asked for it.
    pub(crate) fn shutdown_done(&mut self) {
        if self.shutdown == Shutdown::InProgress {
            self.shutdown = Shutdown::Complete;
        }
    }

    /// Something this controller cannot recover from: CSTS.CFS until a reset.
    pub(crate) fn fail(&mut self) {
        self.life = Life::Fatal;
    }

    /// Whether CC.EN and CSTS.RDY are 1: admin commands besides fabrics ones are taken.
    pub(crate) fn is_ready(&self) -> bool {
        self.life == Life::Ready
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.life == Life::Draining
    }

    /// Whether I/O commands are taken.
    pub(crate) fn io_allowed(&self) -> bool {
        self.life == Life::Ready && self.shutdown == Shutdown::Normal
    }

    /// The host chose all command sets that there are (CC.CSS), not the NVM command set alone, when it enabled the controller.
    pub(crate) fn all_command_sets(&self) -> bool {
        self.chosen_css == CSS_CSI
    }

    /// CC.IOSQES and CC.IOCQES are 64 and 16 bytes, as an I/O queue needs.
    pub(crate) fn io_entry_sizes_valid(&self) -> bool {
        self.cc & (CC_IOSQES | CC_IOCQES) == 6 << 16 | 4 << 20
    }

    fn csts(&self) -> u32 {
        let life = match self.life {
            Life::Disabled => 0,
            Life::Ready | Life::Draining => CSTS_RDY,
            Life::Fatal => CSTS_CFS,
        };
        let shst = match self.shutdown {
            Shutdown::Normal => 0,
            Shutdown::InProgress => 1 << 2,
            Shutdown::Complete => 2 << 2,
        };
        let reset = if self.subsystem_was_reset { CSTS_NSSRO } else { 0 };
        life | shst | reset
    }
}

const CAP_CQR: u64 = 1 << 16;
const CAP_NSSRS: u64 = 1 << 36;
const CAP_CSS_NVM: u64 = 1 << 37;
const CAP_CSS_CSI: u64 = 1 << 43;
const CAP_CSS_ADMIN_ONLY: u64 = 1 << 44;
const CAP_CRWMS: u64 = 1 << 59;

const CC_EN: u32 = 1;
const CC_CSS: u32 = 7 << 4;
const CC_MPS: u32 = 0xf << 7;
const CC_AMS: u32 = 7 << 11;
const CC_SHN: u32 = 3 << 14;
const CC_IOSQES: u32 = 0xf << 16;
const CC_IOCQES: u32 = 0xf << 20;

const CSS_NVM: u32 = 0;
const CSS_CSI: u32 = 6;
const CSS_ADMIN_ONLY: u32 = 7;

const CSTS_RDY: u32 = 1;
const CSTS_CFS: u32 = 1 << 1;
const CSTS_NSSRO: u32 = 1 << 4;

/// "NVMe", as a host writes it to reset the subsystem.
const NSSR_RESET: u32 = 0x4e56_4d65;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ENABLE: u32 = 0x0046_0061;

    fn properties() -> Properties {
        Properties::new(CAPABILITIES)
    }

    const CAPABILITIES: Capabilities =
        Capabilities { mqes: 1023, timeout: 30, io: true, subsystem_reset: false, subsystem_was_reset: false };

    #[test]
    fn a_subsystem_reset_is_asked_for_by_its_word_alone() {
        let mut p = Properties::new(Capabilities { subsystem_reset: true, ..CAPABILITIES });
        assert_eq!(get(&p, CAP, 8), Some(0x0800_0830_1e01_03ff));
        let mut write = |offset, value| p.set(PropertyRef { offset, size: 4 }, value);
        assert_eq!(write(NSSR, 1), Ok(CcEffects::default()));
        assert!(write(NSSR, 0x4e56_4d65).unwrap().subsystem_reset);
        assert_eq!(get(&p, NSSR, 4), Some(0));
        let mut p = Properties::new(Capabilities { subsystem_reset: true, subsystem_was_reset: true, ..CAPABILITIES });
        assert_eq!(csts(&p), 1 << 4);
        p.set(PropertyRef { offset: CSTS, size: 4 }, 1 << 4).unwrap();
        assert_eq!(csts(&p), 0);
    }

    fn get(p: &Properties, offset: u32, size: u8) -> Option<u64> {
        p.get(PropertyRef { offset, size }).ok()
    }

    fn csts(p: &Properties) -> u64 {
        get(p, CSTS, 4).unwrap()
    }

    fn write_cc(p: &mut Properties, cc: u32) -> CcEffects {
        let property = PropertyRef { offset: CC, size: 4 };
        p.set(property, cc.into()).unwrap()
    }

    #[test]
    fn each_property_answers_at_its_own_size_only() {
        let p = properties();
        assert_eq!(get(&p, CAP, 8), Some(0x0800_0820_1e01_03ff));
        assert_eq!(get(&p, VS, 4), Some(0x2_0000));
        assert_eq!(get(&p, CRTO, 4), Some(30));
        assert_eq!(get(&p, CC, 4), Some(0));
        assert_eq!(get(&p, CSTS, 4), Some(0));
        for offset in 0..0x1000 {
            let sizes = [4, 8].map(|size| get(&p, offset, size).is_some());
            let expected = match offset {
                CAP => [false, true],
                VS | CC | CSTS | CRTO => [true, false],
                _ => [false, false],
            };
            assert_eq!(sizes, expected, "{offset:x}");
        }
    }

    #[test]
    fn crto_is_never_less_than_cap_to() {
        let p = properties();
        let to = get(&p, CAP, 8).unwrap() >> 24 & 0xff;
        assert!(get(&p, CRTO, 4).unwrap() & 0xffff >= to);
    }

    #[test]
    fn only_cc_can_be_written() {
        let mut p = properties();
        for offset in 0..0x100 {
            for size in [4, 8] {
                let set = p.set(PropertyRef { offset, size }, 0);
                assert_eq!(set.is_ok(), (offset, size) == (CC, 4), "{offset:x}");
            }
        }
        let cc = PropertyRef { offset: CC, size: 4 };
        assert_eq!(p.set(cc, 1 << 32), Err(Status::INVALID_FIELD.dnr()));
    }

    #[test]
    fn enable_makes_ready_and_reset_waits_for_the_queues() {
        let mut p = properties();
        assert_eq!(write_cc(&mut p, ENABLE), CcEffects::default());
        assert_eq!(csts(&p), 1);
        assert!(p.io_allowed() && p.io_entry_sizes_valid());
        assert!(write_cc(&mut p, ENABLE & !1).reset);
        assert_eq!(csts(&p), 1, "RDY stays until the queues are gone");
        assert!(!p.io_allowed());
        p.reset_done();
        assert_eq!(csts(&p), 0);
    }

    #[test]
    fn enable_while_draining_takes_effect_when_drained() {
        let mut p = properties();
        write_cc(&mut p, ENABLE);
        write_cc(&mut p, 0);
        write_cc(&mut p, ENABLE);
        assert!(p.is_draining() && !p.io_allowed());
        p.reset_done();
        assert!(p.io_allowed());
    }

    #[test]
    fn configurations_that_cannot_run_are_fatal_and_a_reset_recovers() {
        for bad in [ENABLE | 1 << 7, ENABLE | 1 << 11, ENABLE & !0x70 | 1 << 4] {
            let mut p = properties();
            write_cc(&mut p, bad);
            assert_eq!(csts(&p), 2, "{bad:x}");
            assert!(!p.is_ready());
            assert!(write_cc(&mut p, 0).reset);
            p.reset_done();
            write_cc(&mut p, ENABLE);
            assert_eq!(csts(&p), 1);
        }
    }

    #[test]
    fn command_set_selection_depends_on_the_kind_of_controller() {
        for (io, css, ready) in [
            (true, 0, true),
            (true, 6, true),
            (true, 7, false),
            (false, 0, true),
            (false, 6, true),
            (false, 1, false),
            (false, 7, true),
        ] {
            let mut p = Properties::new(Capabilities { mqes: 127, timeout: 1, io, ..CAPABILITIES });
            write_cc(&mut p, 1 | css << 4);
            assert_eq!(p.is_ready(), ready, "{io} {css}");
        }
    }

    #[test]
    fn command_sets_are_chosen_while_disabled() {
        const ALL: u32 = ENABLE & !CC_CSS | CSS_CSI << 4;
        const NVM: u32 = ENABLE & !CC_CSS;
        for (first, then) in [(NVM, ALL), (ALL, NVM)] {
            let mut p = properties();
            write_cc(&mut p, first);
            write_cc(&mut p, then);
            assert_eq!((p.is_ready(), p.all_command_sets()), (true, first == ALL), "{first:x}");
            write_cc(&mut p, then & !CC_EN);
            p.reset_done();
            write_cc(&mut p, then);
            assert_eq!(p.all_command_sets(), then == ALL, "{then:x}");
        }
    }

    #[test]
    fn shutdown_goes_through_in_progress_to_complete() {
        let mut p = properties();
        write_cc(&mut p, ENABLE);
        assert!(write_cc(&mut p, ENABLE | 1 << 14).shutdown);
        assert_eq!(csts(&p), 0b0101);
        assert!(!p.io_allowed());
        assert!(!write_cc(&mut p, ENABLE | 1 << 14).shutdown, "only once");
        p.shutdown_done();
        assert_eq!(csts(&p), 0b1001);
        assert!(write_cc(&mut p, 0).reset);
        p.reset_done();
        assert_eq!(csts(&p), 0);
    }

    #[test]
    fn after_a_shutdown_only_a_reset_lets_io_start_again() {
        let mut p = properties();
        write_cc(&mut p, ENABLE);
        write_cc(&mut p, ENABLE | 2 << 14);
        p.shutdown_done();
        write_cc(&mut p, ENABLE);
        assert_eq!(csts(&p), 0b1001);
        assert!(!p.io_allowed());
        write_cc(&mut p, 0);
        p.reset_done();
        write_cc(&mut p, ENABLE);
        assert!(p.io_allowed());
    }

    #[test]
    fn shutdown_of_a_disabled_controller_is_complete_at_once() {
        let mut p = properties();
        assert_eq!(write_cc(&mut p, 1 << 14), CcEffects::default());
        assert_eq!(csts(&p), 0b1000);
        write_cc(&mut p, ENABLE);
        assert_eq!(csts(&p), 1);
    }

    #[test]
    fn shutdown_and_disable_in_one_write_end_in_complete() {
        let mut p = properties();
        write_cc(&mut p, ENABLE);
        let effects = write_cc(&mut p, ENABLE & !1 | 1 << 14);
        assert!(effects.reset && effects.shutdown);
        p.reset_done();
        assert_eq!(csts(&p), 0b1000);
    }

    proptest! {
        #[test]
        fn no_sequence_of_writes_is_ready_without_enable(
            writes in proptest::collection::vec((any::<u32>(), 0u8..4), 0..40),
        ) {
            let mut p = properties();
            for (cc, then) in writes {
                write_cc(&mut p, cc);
                match then {
                    0 => p.reset_done(),
                    1 => p.shutdown_done(),
                    2 => p.fail(),
                    _ => {}
                }
                if p.io_allowed() {
                    prop_assert!(p.cc & CC_EN != 0);
                    prop_assert_eq!(csts(&p), 1);
                }
            }
        }
    }
}
