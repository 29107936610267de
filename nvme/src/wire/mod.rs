//! Structures that go to the host as they lie on the wire: Identify data, log pages, the discovery log.
//!
//! Byte order is in the field types, sizes and offsets are asserted at compile time, and reserved bytes are zero
//! because every structure starts from zeroes.

pub(crate) mod discovery;
pub(crate) mod identify_ctrl;
pub(crate) mod identify_ns;
pub(crate) mod logs;
pub(crate) mod zns;

/// An ASCII string field: left justified, padded with spaces. Bytes that are not printable ASCII become '?', what does
/// not fit is cut.
pub(crate) fn ascii<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = if matches!(from, b' '..=b'~') { from } else { b'?' };
    }
    field
}

/// Asserts the offset of each named field of a structure.
macro_rules! assert_offsets {
    ($structure:ty: $($field:ident = $offset:literal),+ $(,)?) => {
        const _: () = {
            $(assert!(core::mem::offset_of!($structure, $field) == $offset);)+
        };
    };
}
pub(crate) use assert_offsets;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ascii_fields_are_padded_cut_and_printable() {
        assert_eq!(&ascii::<5>("ab"), b"ab   ");
        assert_eq!(&ascii::<2>("abc"), b"ab");
        assert_eq!(&ascii::<3>("a\0b"), b"a?b");
    }
}
