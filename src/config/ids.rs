//! Identifiers of a namespace that are derived where none is configured: the same as long as the storage, the subsystem and
//! the NSID are the same, on every start and every machine.

use uuid::Uuid;

/// Namespace of the names that farside hashes (RFC 9562, version 5).
const SPACE: Uuid = Uuid::from_u128(0x6d0f_5f4b_5a0c_4b0e_9f0e_2c7c_0b7a_51de);

/// A UUID of a namespace.
pub fn derive_uuid(nqn: &str, nsid: u32, identity: &[u8]) -> Uuid {
    hash("uuid", nqn, &nsid.to_le_bytes(), identity)
}

/// A Namespace Globally Unique Identifier (NGUID). Its organisation part is marked as locally administered.
pub fn derive_nguid(nqn: &str, nsid: u32, identity: &[u8]) -> [u8; 16] {
    let mut nguid = hash("nguid", nqn, &nsid.to_le_bytes(), identity).into_bytes();
    // Bytes 8 to 10 are the organisation (NVMe Base 2.x, Namespace Globally Unique Identifier).
    nguid[8] = (nguid[8] & 0xfc) | 2;
    nguid
}

/// A serial number of a subsystem: 20 characters.
pub fn derive_serial(nqn: &str) -> String {
    let mut serial = hash("serial", nqn, &[], &[]).simple().to_string();
    serial.truncate(20);
    serial
}

/// A name of the quick form's subsystem, of one machine and what it serves.
pub fn derive_nqn(machine: &str, source: &str) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", hash("nqn", machine, source.as_bytes(), &[]))
}

fn hash(label: &str, name: &str, detail: &[u8], identity: &[u8]) -> Uuid {
    let mut bytes = Vec::new();
    for part in [label.as_bytes(), name.as_bytes(), detail, identity] {
        // With their lengths before them no two lists of parts look alike.
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    Uuid::new_v5(&SPACE, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_identifiers_never_change() {
        // Hosts find their disks by these: whoever changes them changes every disk in the field.
        assert_eq!(
            derive_uuid("nqn.2024-01.io.example:a", 1, b"x").to_string(),
            "cd68b3a1-eac0-51c1-82dd-63bbf998ab17"
        );
        let nguid = u128::from_be_bytes(derive_nguid("nqn.2024-01.io.example:a", 1, b"x"));
        assert_eq!(format!("{nguid:032x}"), "66bfbcdaaea35917865ee772b7edfc8c");
        assert_eq!(derive_serial("nqn.2024-01.io.example:a"), "0e4efafd968557e59619");
        assert_eq!(
            derive_nqn("machine", "/srv/disk"),
            "nqn.2014-08.org.nvmexpress:uuid:50b0eb9e-cacd-5ced-a126-268e25657151"
        );
    }

    #[test]
    fn every_part_counts() {
        let base = derive_uuid("a", 1, b"x");
        assert_ne!(base, derive_uuid("b", 1, b"x"));
        assert_ne!(base, derive_uuid("a", 2, b"x"));
        assert_ne!(base, derive_uuid("a", 1, b"y"));
        assert_ne!(base.as_bytes(), &derive_nguid("a", 1, b"x"));
        assert_eq!(derive_nguid("a", 1, b"x")[8] & 3, 2);
        assert_eq!(derive_serial("a").len(), 20);
    }
}
