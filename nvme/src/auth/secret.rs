//! A secret in its written form: `DHHC-1:hh:base64:`, where the base64 is of the key and its CRC-32.

use core::fmt;
use core::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::Hash;

/// A secret of a host or of a controller. It prints nothing of itself.
#[derive(Clone)]
pub struct Secret {
    /// The hash function that turns it into the key of one peer; `None` uses it as it is.
    transform: Option<Hash>,
    key: Zeroizing<Vec<u8>>,
}

/// Why a text is no secret. Says nothing of what the text was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretError {
    /// It is not of the form `DHHC-1:hh:base64:`.
    Form,
    /// The number of the hash function is not 00 to 03.
    Hash,
    /// The base64 part is none.
    Base64,
    /// The key has neither 32 nor 48 nor 64 bytes.
    Length,
    /// The CRC-32 behind the key is not its own: a character was mistyped.
    Checksum,
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Form => "it is not of the form DHHC-1:hh:base64:",
            Self::Hash => "its hash function is not 00 to 03",
            Self::Base64 => "its base64 part is none",
            Self::Length => "its key has neither 32 nor 48 nor 64 bytes",
            Self::Checksum => "its checksum is wrong: a character is mistyped or missing",
        })
    }
}

impl core::error::Error for SecretError {}

impl FromStr for Secret {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let rest = text.trim().strip_prefix("DHHC-1:").and_then(|rest| rest.strip_suffix(':'));
        let (hash, encoded) = rest.and_then(|rest| rest.split_once(':')).ok_or(SecretError::Form)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(SecretError::Hash),
        };
        let decoded = Zeroizing::new(STANDARD.decode(encoded).map_err(|_| SecretError::Base64)?);
        let (key, checksum) = decoded.split_last_chunk::<4>().ok_or(SecretError::Length)?;
        if !matches!(key.len(), 32 | 48 | 64) {
            return Err(SecretError::Length);
        }
        if crc32fast::hash(key) != u32::from_le_bytes(*checksum) {
            return Err(SecretError::Checksum);
        }
        Ok(Self { transform, key: Zeroizing::new(key.to_vec()) })
    }
}

impl Secret {
    /// The key of the peer of this name.
    pub(crate) fn key_of(&self, nqn: &[u8]) -> Zeroizing<Vec<u8>> {
        match self.transform {
            None => self.key.clone(),
            Some(hash) => hash.hmac(&self.key, &[nqn, b"NVMe-over-Fabrics"]),
        }
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.transform == other.transform && bool::from(self.key.as_slice().ct_eq(&other.key))
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A secret as the tools write it.
    pub(crate) fn written(transform: u8, key: &[u8]) -> String {
        let bytes = [key, &crc32fast::hash(key).to_le_bytes()].concat();
        format!("DHHC-1:{transform:02}:{}:", STANDARD.encode(bytes))
    }

    #[test]
    fn secrets_of_every_length_and_hash_are_read() {
        for (transform, len) in [(0, 32), (1, 32), (2, 48), (3, 64), (0, 64)] {
            let key: Vec<u8> = (0..len).map(|at| (at * 3) ^ transform).collect();
            let secret: Secret = written(transform, &key).parse().unwrap();
            assert_eq!(secret.key.as_slice(), key);
            assert_eq!(secret.key_of(b"nqn.x").as_slice() == key, transform == 0);
            assert_eq!(secret, format!("  {}\n", written(transform, &key)).parse().unwrap());
        }
    }

    #[test]
    fn what_is_mistyped_is_refused_and_not_repeated() {
        let good = written(1, &[7; 32]);
        let changed = |old: &str, new: &str| good.replacen(old, new, 1);
        for (text, error) in [
            (String::new(), SecretError::Form),
            (changed("DHHC-1", "DHHC-2"), SecretError::Form),
            (good.trim_end_matches(':').to_owned(), SecretError::Form),
            (changed(":01:", ":04:"), SecretError::Hash),
            (changed("BwcH", "B*cH"), SecretError::Base64),
            (changed("BwcH", "BwcI"), SecretError::Checksum),
            (written(1, &[7; 31]), SecretError::Length),
            (written(1, &[7; 65]), SecretError::Length),
            ("DHHC-1:00:AAA=:".into(), SecretError::Length),
        ] {
            assert_eq!(text.parse::<Secret>().unwrap_err(), error, "{text}");
        }
        assert_eq!(format!("{:?}", good.parse::<Secret>().unwrap()), "Secret(..)");
    }
}
