//! Hosts with rules of their own, and the files that their secrets lie in.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nvme::auth::{Group, Hash, HostAuth, Secret};
use zeroize::Zeroizing;

use crate::target::{Limits, TargetError};

/// A host of a subsystem with rules of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// Its NQN.
    pub nqn: String,
    /// The file with its secret: it has to authenticate. `None`: it has not.
    pub dhchap_key: Option<PathBuf>,
    /// The file with the controllers' secret, for a host that wants that proven.
    pub dhchap_controller_key: Option<PathBuf>,
    /// Hash functions that it may use.
    pub dhchap_hashes: Vec<Hash>,
    /// Groups that it may use.
    pub dhchap_groups: Vec<Group>,
    /// What it may do with the subsystem's namespaces per second.
    pub limits: Limits,
    /// Its line in the file, for messages.
    pub line: Option<usize>,
}

impl HostSpec {
    /// A host that may connect, and no more.
    pub fn new(nqn: impl Into<String>) -> Self {
        Self {
            nqn: nqn.into(),
            dhchap_key: None,
            dhchap_controller_key: None,
            dhchap_hashes: Hash::ALL.to_vec(),
            dhchap_groups: Group::ALL.to_vec(),
            limits: Limits::default(),
            line: None,
        }
    }

    /// Reads its secrets; `None` when it need not authenticate.
    pub fn auth(&self) -> Result<Option<HostAuth>, TargetError> {
        let Some(file) = &self.dhchap_key else { return Ok(None) };
        let controller_key = self.dhchap_controller_key.as_deref().map(read_secret).transpose()?;
        Ok(Some(HostAuth {
            key: read_secret(file)?,
            controller_key,
            hashes: self.dhchap_hashes.clone(),
            groups: self.dhchap_groups.clone(),
        }))
    }

    /// The files that it names.
    pub(super) fn key_files(&self) -> impl Iterator<Item = &Path> {
        [&self.dhchap_key, &self.dhchap_controller_key].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// More than any secret has characters, with the spaces around it.
const SECRET_MAX: usize = 1024;

/// A secret that a file holds alone. Nothing of it is repeated in errors.
pub(super) fn read_secret(file: &Path) -> Result<Secret, TargetError> {
    let refuse = |reason: String, remedy: &str| TargetError {
        object: format!("key file {}", file.display()),
        reason,
        remedy: remedy.to_owned(),
    };
    let unreadable =
        |error: std::io::Error| refuse(error.to_string(), "check the path, and that farside's user may read it");
    let opened = File::open(file).map_err(unreadable)?;
    // Of what was opened, whatever the name stands for by now.
    if opened.metadata().map_err(unreadable)?.mode() & 0o077 != 0 {
        let reason = "others than its owner may read it".to_owned();
        return Err(refuse(reason, "chmod 600, and make a new secret if somebody did"));
    }
    // Memory that does not move, so that nothing of it is left behind.
    let mut text = Zeroizing::new(String::with_capacity(SECRET_MAX));
    opened.take(SECRET_MAX as u64).read_to_string(&mut text).map_err(unreadable)?;
    let secret = text.parse().map_err(|error: nvme::auth::SecretError| {
        refuse(error.to_string(), "write a secret into it, as nvme gen-dhchap-key makes it")
    })?;
    Ok(secret)
}

/// Hash functions by their words in a configuration.
pub(super) const HASHES: [(&str, Hash); 3] =
    [("sha256", Hash::Sha256), ("sha384", Hash::Sha384), ("sha512", Hash::Sha512)];

/// Groups by their words in a configuration.
pub(super) const GROUPS: [(&str, Group); 6] = [
    ("null", Group::Null),
    ("ffdhe2048", Group::Ffdhe2048),
    ("ffdhe3072", Group::Ffdhe3072),
    ("ffdhe4096", Group::Ffdhe4096),
    ("ffdhe6144", Group::Ffdhe6144),
    ("ffdhe8192", Group::Ffdhe8192),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn secrets_are_read_from_files_that_nobody_else_reads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let mut host = HostSpec { dhchap_key: Some(file.clone()), ..HostSpec::new("nqn.x") };
        assert!(host.auth().unwrap_err().remedy.contains("path"), "no such file");
        let key = [7u8; 32];
        let checksum = crc32fast::hash(&key).to_le_bytes();
        let whole: Vec<u8> = [&key[..], &checksum].concat();
        let written = format!("DHHC-1:00:{}:\n", base64(&whole));
        fs::write(&file, &written).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(host.auth().unwrap_err().remedy.contains("chmod 600"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let auth = host.auth().unwrap().unwrap();
        assert_eq!((auth.key, auth.controller_key), (written.parse().unwrap(), None));
        fs::write(&file, written.replace("BwcH", "BwcI")).unwrap();
        let refused = host.auth().unwrap_err().to_string();
        assert!(refused.contains("checksum") && !refused.contains("BwcI"), "{refused}");
        host.dhchap_key = None;
        assert_eq!(host.auth().unwrap(), None);
    }

    fn base64(bytes: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let digit = |value: u32| char::from(DIGITS[(value & 63) as usize]);
        bytes
            .chunks(3)
            .flat_map(|chunk| {
                let [a, b, c] = [0, 1, 2].map(|at| u32::from(chunk.get(at).copied().unwrap_or(0)));
                let value = a << 16 | b << 8 | c;
                let digits = [value >> 18, value >> 12, value >> 6, value].map(digit);
                (0..4).map(move |at| if at <= chunk.len() { digits[at] } else { '=' })
            })
            .collect()
    }
}
