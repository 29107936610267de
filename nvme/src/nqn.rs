//! NVMe Qualified Names (NQN): of subsystems and of hosts.
//!
//! Two rules on purpose. What arrives from a host is matched byte by byte and only refused when it is empty,
//! unterminated or longer than 223 bytes: real hosts send bare UUIDs and other odd names, and refusing them breaks
//! installations. What an operator *creates* is checked strictly ([`Nqn::strict`]), with an error that names the rule.
//! (NVMe Base 2.x, NVMe Qualified Names.)

use core::fmt;

/// Longest name in bytes, without the terminating NUL.
pub const NQN_MAX: usize = 223;

/// Bytes of the field that holds a name on the wire.
pub const NQN_FIELD: usize = 256;

/// The well-known name of every discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A name of 1 to 223 bytes without NUL. Not necessarily UTF-8: it is what the peer sent.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(Box<[u8]>);

/// A name that may not be configured; says which rule it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NqnError {
    /// No bytes at all.
    Empty,
    /// More than 223 bytes.
    TooLong,
    /// A NUL, a space, a line end or another control character.
    Character,
    /// It does not start with `nqn.`.
    Prefix,
    /// No `yyyy-mm.` after the prefix.
    Date,
    /// The domain is not dot-separated labels of letters, digits and inner hyphens.
    Domain,
    /// No `:name` after the domain.
    Name,
    /// A UUID name whose UUID is not 8-4-4-4-12 hexadecimal digits.
    Uuid,
    /// The well-known discovery name, which the target keeps for its own discovery subsystem.
    Reserved,
}

impl fmt::Display for NqnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the NQN is empty",
            Self::TooLong => "the NQN is longer than 223 bytes",
            Self::Character => "the NQN contains a space, a line end or a control character",
            Self::Prefix => "the NQN does not start with \"nqn.\"",
            Self::Date => "the NQN has no date \"yyyy-mm.\" after \"nqn.\"",
            Self::Domain => "the NQN's reversed domain is not made of labels of letters, digits and inner hyphens",
            Self::Name => "the NQN has no \":name\" after the reversed domain",
            Self::Uuid => "the NQN's UUID is not of the form 8-4-4-4-12 hexadecimal digits",
            Self::Reserved => "the NQN is the well-known discovery NQN",
        })
    }
}

impl core::error::Error for NqnError {}

impl Nqn {
    /// From a 256-byte wire field: the bytes before the first NUL. What follows the NUL is ignored. `None` when it is
    /// empty, not terminated or too long.
    #[must_use]
    pub fn from_wire(field: &[u8; NQN_FIELD]) -> Option<Self> {
        let len = field.iter().position(|&byte| byte == 0)?;
        if len == 0 || len > NQN_MAX {
            return None;
        }
        field.get(..len).map(|name| Self(name.into()))
    }

    /// For names that must match what hosts send (lists of allowed hosts): any 1 to 223 bytes without spaces or control
    /// characters.
    ///
    /// # Errors
    /// Names the rule that is broken.
    pub fn lenient(name: &str) -> Result<Self, NqnError> {
        if name.is_empty() {
            return Err(NqnError::Empty);
        }
        if name.len() > NQN_MAX {
            return Err(NqnError::TooLong);
        }
        if name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(NqnError::Character);
        }
        Ok(Self(name.as_bytes().into()))
    }

    /// For names that an operator creates: the full form `nqn.yyyy-mm.reversed.domain:name`.
    ///
    /// # Errors
    /// Names the rule that is broken.
    pub fn strict(name: &str) -> Result<Self, NqnError> {
        let nqn = Self::lenient(name)?;
        if name == DISCOVERY_NQN {
            return Err(NqnError::Reserved);
        }
        let rest = name.strip_prefix("nqn.").ok_or(NqnError::Prefix)?;
        let (date, rest) = rest.split_once('.').ok_or(NqnError::Date)?;
        if !is_date(date) {
            return Err(NqnError::Date);
        }
        let (domain, id) = rest.split_once(':').unwrap_or((rest, ""));
        if !domain.split('.').all(is_label) {
            return Err(NqnError::Domain);
        }
        if id.is_empty() {
            return Err(NqnError::Name);
        }
        if let Some(uuid) = name.strip_prefix(UUID_PREFIX)
            && !is_uuid(uuid)
        {
            return Err(NqnError::Uuid);
        }
        Ok(nqn)
    }

    /// The well-known discovery name.
    #[must_use]
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.as_bytes().into())
    }

    /// Whether it is the well-known discovery name.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        *self.0 == *DISCOVERY_NQN.as_bytes()
    }

    /// The bytes of the name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The 256-byte wire field: the name, and NULs.
    #[must_use]
    pub fn to_wire(&self) -> [u8; NQN_FIELD] {
        let mut field = [0; NQN_FIELD];
        for (to, from) in field.iter_mut().zip(self.0.iter()) {
            *to = *from;
        }
        field
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A peer chose these bytes: keep control characters out of logs.
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

fn is_date(date: &str) -> bool {
    let Some((year, month)) = date.split_once('-') else {
        return false;
    };
    let digits = |part: &str, len| part.len() == len && part.bytes().all(|b| b.is_ascii_digit());
    digits(year, 4) && digits(month, 2) && ("01"..="12").contains(&month)
}

fn is_label(label: &str) -> bool {
    (1..=63).contains(&label.len())
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn is_uuid(uuid: &str) -> bool {
    let groups: Vec<&str> = uuid.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    lengths == [8, 4, 4, 4, 12] && groups.iter().all(|group| group.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &[u8]) -> [u8; 256] {
        let mut field = [0; 256];
        field[..name.len()].copy_from_slice(name);
        field
    }

    #[test]
    fn wire_names_of_1_to_223_bytes_are_taken_as_they_are() {
        for len in [1, 11, 222, 223] {
            let nqn = Nqn::from_wire(&field(&vec![b'a'; len])).unwrap();
            assert_eq!(nqn.as_bytes().len(), len);
            assert_eq!(nqn.to_wire(), field(&vec![b'a'; len]));
        }
        assert_eq!(Nqn::from_wire(&field(b"")), None);
        assert_eq!(Nqn::from_wire(&field(&[b'a'; 224])), None);
        assert_eq!(Nqn::from_wire(&[b'a'; 256]), None);
    }

    #[test]
    fn bytes_after_the_nul_do_not_count() {
        let mut junk = field(b"nqn.x");
        junk[6..20].fill(0xee);
        assert_eq!(Nqn::from_wire(&junk), Nqn::lenient("nqn.x").ok());
    }

    #[test]
    fn uuid_without_dashes_from_a_host_is_taken() {
        let odd = "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5";
        assert!(Nqn::from_wire(&field(odd.as_bytes())).is_some());
        assert!(Nqn::lenient(odd).is_ok());
        assert_eq!(Nqn::strict(odd), Err(NqnError::Uuid));
    }

    #[test]
    fn strict_names_each_broken_rule() {
        let long = format!("nqn.2026-01.io.x:{}", "a".repeat(224));
        for (name, error) in [
            ("", NqnError::Empty),
            (long.as_str(), NqnError::TooLong),
            ("nqn.2026-01.io.x:a\n", NqnError::Character),
            ("testnqn", NqnError::Prefix),
            ("nqn.2026-13.io.x:a", NqnError::Date),
            ("nqn.io.x:a", NqnError::Date),
            ("nqn.2026-01.io.-x:a", NqnError::Domain),
            ("nqn.2026-01.io..x:a", NqnError::Domain),
            ("nqn.2026-01.io.x", NqnError::Name),
            ("nqn.2026-01.io.x:", NqnError::Name),
            (DISCOVERY_NQN, NqnError::Reserved),
        ] {
            assert_eq!(Nqn::strict(name), Err(error), "{name}");
        }
    }

    #[test]
    fn strict_takes_usual_names() {
        for name in [
            "nqn.2016-06.io.spdk:cnode1",
            "nqn.2016-06.io.3x:y",
            "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
        ] {
            assert_eq!(Nqn::strict(name).unwrap().to_string(), name);
        }
    }

    #[test]
    fn display_escapes_what_a_peer_sent() {
        let nqn = Nqn::from_wire(&field(b"a\nb\xff")).unwrap();
        assert_eq!(nqn.to_string(), "a\\nb\\xff");
    }
}
