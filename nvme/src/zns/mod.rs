//! The Zoned Namespace command set: zones, the rules of writing to them, and its commands.
//!
//! [`Zones`] is the state of all zones of one namespace, and what commands do to it. It is asked before a command runs and told
//! how the command ended; who holds it sees to it that a zone has one such command at a time. [`ZoneCommand`] is what hosts ask
//! beside reading and writing, checked. (Zoned Namespace Command Set 1.x.)

mod command;
mod report;
#[cfg(test)]
mod tests;
mod zones;

pub use command::{ZoneAction, ZoneCommand, ZoneFilter};
pub use report::report;
pub use zones::{Geometry, GeometryError, Zone, ZoneState, Zones};

/// Command set identifier (CSI) of the Zoned Namespace command set.
pub(crate) const CSI: u8 = 2;

/// Opcodes of the Zoned Namespace command set that the NVM command set has not.
pub mod opcode {
    use crate::command::Opcode;

    /// Zone Management Send.
    pub const ZONE_MANAGEMENT_SEND: Opcode = Opcode(0x79);
    /// Zone Management Receive.
    pub const ZONE_MANAGEMENT_RECEIVE: Opcode = Opcode(0x7a);
    /// Zone Append.
    pub const ZONE_APPEND: Opcode = Opcode(0x7d);
}
