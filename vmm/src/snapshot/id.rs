//! The name of a snapshot, which connects its two files, and a diff with its base.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Number of digits in the text of an [`Id`].
pub(crate) const DIGITS: usize = 32;

/// The name of a snapshot. Its text is exactly 32 lowercase hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(pub(crate) u128);

/// A text that is not the name of a snapshot.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the name of a snapshot has {DIGITS} lowercase hexadecimal digits")]
pub struct IdError;

impl Id {
    /// A name that no other snapshot has.
    #[must_use]
    pub(crate) fn random() -> Self {
        let [high, low] = [0u8, 1].map(|half| RandomState::new().hash_one(half));
        Self(u128::from(high) << 64 | u128::from(low))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0width$x}", self.0, width = DIGITS)
    }
}

impl FromStr for Id {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != DIGITS || !text.bytes().all(is_digit) {
            return Err(IdError);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| IdError)
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_exactly_its_digits() {
        for id in [Id(0), Id(0xabc), Id(u128::MAX), Id::random()] {
            assert_eq!(id.to_string().len(), DIGITS);
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        let digits = Id(7).to_string();
        for wrong in [
            "",
            "7",
            &digits[1..],
            &format!("{digits}0"),
            &digits.replace('7', "A"),
            &digits.replace('7', "+"),
            &format!("+{}", &digits[1..]),
            &format!(" {}", &digits[1..]),
        ] {
            assert_eq!(wrong.parse::<Id>(), Err(IdError), "{wrong:?}");
        }
        assert_ne!(Id::random(), Id::random());
    }
}
