//! Status codes: what a command is answered with.
//!
//! A [`Status`] holds the status code type and the status code in one number, `SCT << 8 | SC`, so 0x180 is unambiguous,
//! and the Do Not Retry bit (DNR). The constants carry no DNR: whoever chooses a code decides there whether the same
//! command could ever succeed, and writes `.dnr()` when it could not. (NVMe Base 2.x, Completion Queue Entry: Status
//! Field.)

use core::fmt;

/// Status of a command: SCT and SC folded together, and DNR.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

const DNR: u16 = 0x4000;
const MORE: u16 = 0x2000;
const CRD: u16 = 0x1800;
const CODE: u16 = 0x07ff;

impl Status {
    /// From the 15 bits of the wire (phase bit removed).
    #[must_use]
    pub const fn from_wire(bits: u16) -> Self {
        Self(bits & (DNR | MORE | CRD | CODE))
    }

    /// The 15 bits of the wire, without the phase bit.
    #[must_use]
    pub const fn to_wire(self) -> u16 {
        self.0
    }

    /// The same code with Do Not Retry set.
    #[must_use]
    pub const fn dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// The same code with a Command Retry Delay (CRD): after the time of CRDT1.
    #[must_use]
    pub const fn retry_later(self) -> Self {
        Self(self.0 & !CRD | 1 << 11)
    }

    /// Whether Do Not Retry is set.
    #[must_use]
    pub const fn is_dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// `SCT << 8 | SC` alone, for comparisons that do not care for DNR.
    #[must_use]
    pub const fn code(self) -> u16 {
        self.0 & CODE
    }

    /// Whether the command succeeded.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.code() == 0
    }
}

/// The table of codes: constant, value, words.
macro_rules! codes {
    ($($name:ident = $value:literal, $words:literal;)+) => {
        impl Status {
            $(
                #[doc = $words]
                pub const $name: Self = Self($value);
            )+

            /// The words of the specification for this code, if it is one that this crate knows.
            #[must_use]
            pub const fn words(self) -> Option<&'static str> {
                match self.code() {
                    $($value => Some($words),)+
                    _ => None,
                }
            }
        }

        #[cfg(test)]
        const ALL: &[(Status, u16)] = &[$((Status::$name, $value),)+];
    };
}

// Fabrics and I/O command sets share 0x180 and up; the command tells which is meant. Where both are used here, the
// words name both.
codes! {
    SUCCESS = 0x000, "Successful Completion";
    INVALID_OPCODE = 0x001, "Invalid Command Opcode";
    INVALID_FIELD = 0x002, "Invalid Field in Command";
    CID_CONFLICT = 0x003, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0x004, "Data Transfer Error";
    INTERNAL_ERROR = 0x006, "Internal Error";
    ABORT_REQUESTED = 0x007, "Command Abort Requested";
    ABORTED_SQ_DELETION = 0x008, "Command Aborted due to SQ Deletion";
    FAILED_FUSED = 0x009, "Command Aborted due to Failed Fused Command";
    MISSING_FUSED = 0x00a, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0x00b, "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0x00c, "Command Sequence Error";
    INVALID_SGL_SEGMENT = 0x00d, "Invalid SGL Segment Descriptor";
    INVALID_SGL_COUNT = 0x00e, "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = 0x00f, "Data SGL Length Invalid";
    SGL_TYPE_INVALID = 0x011, "SGL Descriptor Type Invalid";
    SGL_OFFSET_INVALID = 0x016, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT = 0x018, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0x019, "Keep Alive Timer Expired";
    KEEP_ALIVE_TIMEOUT_INVALID = 0x01a, "Keep Alive Timeout Invalid";
    ABORTED_BY_PREEMPT = 0x01b, "Command Aborted due to Preempt and Abort";
    NAMESPACE_WRITE_PROTECTED = 0x020, "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0x021, "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0x022, "Transient Transport Error";
    LBA_OUT_OF_RANGE = 0x080, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0x081, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0x082, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0x083, "Reservation Conflict";
    INVALID_QUEUE_ID = 0x101, "Invalid Queue Identifier";
    ABORT_LIMIT_EXCEEDED = 0x103, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 0x105, "Asynchronous Event Request Limit Exceeded";
    INVALID_LOG_PAGE = 0x109, "Invalid Log Page";
    FEATURE_NOT_SAVEABLE = 0x10d, "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 0x10e, "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f, "Feature Not Namespace Specific";
    IO_COMMAND_SET_COMBINATION_REJECTED = 0x12b, "I/O Command Set Combination Rejected";
    CONNECT_INCOMPATIBLE_FORMAT = 0x180, "Connect Incompatible Format";
    CONNECT_CONTROLLER_BUSY = 0x181, "Connect Controller Busy";
    CONNECT_INVALID_PARAMETERS = 0x182, "Connect Invalid Parameters";
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183, "Connect Restart Discovery; of an I/O command: Command Size Limit Exceeded";
    CONNECT_INVALID_HOST = 0x184, "Connect Invalid Host";
    INVALID_QUEUE_TYPE = 0x185, "Invalid Queue Type";
    OVERLAPPING_IO_RANGE = 0x187, "Overlapping I/O Range";
    AUTHENTICATION_REQUIRED = 0x191, "Authentication Required";
    DISCOVER_RESTART = 0x190, "Discover Restart";
    ZONE_BOUNDARY_ERROR = 0x1b8, "Zone Boundary Error";
    ZONE_IS_FULL = 0x1b9, "Zone Is Full";
    ZONE_IS_READ_ONLY = 0x1ba, "Zone Is Read Only";
    ZONE_IS_OFFLINE = 0x1bb, "Zone Is Offline";
    ZONE_INVALID_WRITE = 0x1bc, "Zone Invalid Write";
    TOO_MANY_ACTIVE_ZONES = 0x1bd, "Too Many Active Zones";
    TOO_MANY_OPEN_ZONES = 0x1be, "Too Many Open Zones";
    INVALID_ZONE_STATE_TRANSITION = 0x1bf, "Invalid Zone State Transition";
    WRITE_FAULT = 0x280, "Write Fault";
    UNRECOVERED_READ_ERROR = 0x281, "Unrecovered Read Error";
    COMPARE_FAILURE = 0x285, "Compare Failure";
    ACCESS_DENIED = 0x286, "Access Denied";
    DEALLOCATED_BLOCK = 0x287, "Deallocated or Unwritten Logical Block";
    INTERNAL_PATH_ERROR = 0x300, "Internal Path Error";
    ANA_PERSISTENT_LOSS = 0x301, "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 0x302, "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 0x303, "Asymmetric Access Transition";
    ABORTED_BY_HOST = 0x371, "Command Aborted By Host";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.words().unwrap_or("unknown status");
        write!(f, "{words} ({:#05x}", self.code())?;
        if self.is_dnr() {
            f.write_str(", DNR")?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips_and_has_words() {
        for &(status, value) in ALL {
            assert_eq!(status.code(), value);
            assert!(!status.is_dnr());
            assert_eq!(Status::from_wire(status.dnr().to_wire()), status.dnr());
            assert!(status.words().is_some());
        }
    }

    #[test]
    fn dnr_is_bit_14_of_the_status_as_the_kernel_logs_it() {
        assert_eq!(Status::INVALID_FIELD.dnr().to_wire(), 0x4002);
        assert_eq!(Status::INVALID_FIELD.dnr().code(), 0x002);
    }

    #[test]
    fn display_gives_the_words() {
        assert_eq!(Status::INVALID_FIELD.dnr().to_string(), "Invalid Field in Command (0x002, DNR)");
        assert_eq!(Status::from_wire(0x07f3).to_string(), "unknown status (0x7f3)");
    }
}
