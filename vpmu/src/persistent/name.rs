//! Names of persistent events. They serve as file names in sysfs and as words on a command line.

use std::fmt;

use crate::abi::PERSISTENT_NAME;

/// The default name of an event is this prefix, followed by the event's id.
const UNNAMED: &str = "event";

/// A name of a persistent event: lower-case letters, digits, `-` and `_`, beginning with a letter. The name is shorter
/// than its field in the wire format, so the field ends with a zero byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name(String);

impl Name {
    /// Returns `None` if `text` is not a valid name.
    pub(crate) fn new(text: &str) -> Option<Self> {
        let of_name = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
        let fits = text.len() < PERSISTENT_NAME
            && text.as_bytes().first().is_some_and(u8::is_ascii_lowercase)
            && text.bytes().all(of_name);
        fits.then(|| Self(text.to_owned()))
    }

    /// The default name of an event.
    pub(crate) fn of(id: u64) -> Self {
        Self(format!("{UNNAMED}{id}"))
    }

    /// Whether the name has the form of a default name. Such a name is reserved for the event whose id it contains.
    pub(crate) fn is_reserved(&self) -> bool {
        let id = self.0.strip_prefix(UNNAMED);
        id.is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()))
    }

    /// Parses a name in wire format, which is padded with zeros. Returns `None` if the name is not valid.
    pub(crate) fn from_wire(bytes: &[u8; PERSISTENT_NAME]) -> Option<Self> {
        let len = bytes.iter().position(|&byte| byte == 0)?;
        let (text, padding) = bytes.split_at(len);
        let blank = padding.iter().all(|&byte| byte == 0);
        std::str::from_utf8(text).ok().filter(|_| blank).and_then(Self::new)
    }

    pub(crate) fn to_wire(&self) -> [u8; PERSISTENT_NAME] {
        let mut bytes = [0; PERSISTENT_NAME];
        for (to, from) in bytes.iter_mut().zip(self.0.bytes()) {
            *to = from;
        }
        bytes
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_names_are_accepted_and_others_refused() {
        let longest = "a".repeat(PERSISTENT_NAME - 1);
        for good in ["a", "exits-0", "a_b", "z9", &longest] {
            let name = Name::new(good).expect(good);
            assert_eq!(Name::from_wire(&name.to_wire()), Some(name));
        }
        let longer = "a".repeat(PERSISTENT_NAME);
        for bad in ["", "9a", "-a", "_a", "A", "a b", "a/b", "..", "a.b", "\u{e4}", "a\n", &longer] {
            assert_eq!(Name::new(bad), None, "{bad:?}");
        }
        assert_eq!(Name::new("event18446744073709551615"), Some(Name::of(u64::MAX)));
    }

    #[test]
    fn names_of_ids_are_reserved() {
        let reserved = |text| Name::new(text).map(|name| name.is_reserved());
        for text in ["event0", "event4", "event007", "event18446744073709551616"] {
            assert_eq!(reserved(text), Some(true), "{text}");
        }
        for text in ["event", "event-4", "event4a", "events4", "anevent4"] {
            assert_eq!(reserved(text), Some(false), "{text}");
        }
    }

    #[test]
    fn name_on_the_wire_is_padded_with_zeros() {
        let mut bytes = Name::of(3).to_wire();
        bytes[20] = b'x';
        assert_eq!(Name::from_wire(&bytes), None);
        assert_eq!(Name::from_wire(&[b'a'; PERSISTENT_NAME]), None);
        assert_eq!(Name::from_wire(&[0; PERSISTENT_NAME]), None);
        bytes = Name::of(3).to_wire();
        bytes[0] = 0xff;
        assert_eq!(Name::from_wire(&bytes), None);
    }
}
