//! Sizes as people write them: `4096`, `64K`, `1G`, `2TiB`; powers of 1024.

use std::fmt;

/// Bytes in the shortest exact form: `64K`, `1G`, `1000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) =
            UNITS.iter().rev().find(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit)).unwrap_or(&UNITS[0]);
        write!(f, "{}{name}", self.0 / unit)
    }
}

const UNITS: [(u64, &str); 6] =
    [(1, ""), (1 << 10, "K"), (1 << 20, "M"), (1 << 30, "G"), (1 << 40, "T"), (1 << 50, "P")];

/// Reads a size. The error says what is wrong, in words that fit after the key.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.strip_suffix("iB").unwrap_or(unit);
    let factor = UNITS.iter().find(|(_, name)| name.eq_ignore_ascii_case(unit)).map(|(factor, _)| *factor);
    match (number.parse::<u64>(), factor) {
        (Ok(number), Some(factor)) => number.checked_mul(factor).ok_or_else(|| format!("{text:?} is too large")),
        _ => Err(format!(
            "{text:?} is no size; write bytes, or a whole number of K, M, G or T (1024 each), such as 512M"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65536),
            ("1g", 1 << 30),
            ("2TiB", 2 << 40),
            ("1000", 1000),
            ("3P", 3 << 50),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
            assert_eq!(parse_size(&Bytes(bytes).to_string()), Ok(bytes));
        }
        assert_eq!(Bytes(1 << 20).to_string(), "1M");
        assert_eq!(Bytes(1536).to_string(), "1536");
        for text in ["", "G", "1.5G", "-1", "1GB", "1 G", "1X", "99999999999999999999", "16777216T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
