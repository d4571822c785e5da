//! The raw events that an operator permits a guest to open, in the syntax of `vmm run --help`.

use std::collections::BTreeSet;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// Maximum number of raw events in a list. Each raw event has an entry in the catalogue, and the probe opens each raw
/// event once.
const MOST: usize = 256;
/// Number of bits of the config, from bit 0 up, that a raw event can use.
const BITS: u32 = 48;

/// The raw events that a guest may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawEvents(vpmu::RawEvents);

/// Errors in a list.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RawEventsError {
    /// The text is neither a number nor a range.
    #[error("`{0}` is not a raw event: must be 'all', numbers such as 0x11, or ranges such as 0x40-0x4f")]
    Number(String),
    /// The list has too many events.
    #[error("more than {MOST} raw events: use 'all' instead")]
    TooMany,
}

impl From<RawEvents> for vpmu::RawEvents {
    fn from(events: RawEvents) -> Self {
        events.0
    }
}

impl FromStr for RawEvents {
    type Err = RawEventsError;

    fn from_str(text: &str) -> Result<Self, RawEventsError> {
        if text == "all" {
            return Ok(Self(vpmu::RawEvents::All));
        }
        let mut configs = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let wrong = || RawEventsError::Number(part.to_owned());
            let first = number(first).ok_or_else(wrong)?;
            let last = number(last).filter(|&last| last >= first).ok_or_else(wrong)?;
            // Take one more than the limit, so that exceeding the limit is detected.
            configs.extend((first..=last).take(MOST + 1));
            if configs.len() > MOST {
                return Err(RawEventsError::TooMany);
            }
        }
        Ok(Self(vpmu::RawEvents::Listed(configs)))
    }
}

fn number(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x")?;
    let is_digit = |digit: char| digit.is_ascii_hexdigit();
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| digits.chars().all(is_digit));
    number.filter(|number| number >> BITS == 0)
}

impl<'de> Deserialize<'de> for RawEvents {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(configs: impl IntoIterator<Item = u64>) -> RawEvents {
        RawEvents(vpmu::RawEvents::Listed(configs.into_iter().collect()))
    }

    #[test]
    fn list_has_numbers_and_ranges() {
        assert_eq!("all".parse(), Ok(RawEvents(vpmu::RawEvents::All)));
        assert_eq!("0x11".parse(), Ok(listed([0x11])));
        assert_eq!("0x11,0x8,0x40-0x42,0x8".parse(), Ok(listed([8, 0x11, 0x40, 0x41, 0x42])));
        assert_eq!("0xF0000ffff".parse(), Ok(listed([0xf_0000_ffff])));
        assert_eq!("0x0-0xff".parse(), Ok(listed(0..=0xff)));
    }

    #[test]
    fn list_without_sense_is_refused() {
        for text in ["", "11", "r11", "0x", "0x+1", "0x11,", "0x2-0x1", "0x1-", "0xg", "ALL", "all,0x1"] {
            let error = text.parse::<RawEvents>().expect_err(text);
            assert!(matches!(error, RawEventsError::Number(_)), "{text}: {error}");
        }
        let beyond = "0x1000000000000".parse::<RawEvents>();
        assert!(matches!(beyond, Err(RawEventsError::Number(_))));
        for text in ["0x0-0x100", "0x0-0xffffffffffff", "0x0-0xff,0x100"] {
            assert_eq!(text.parse::<RawEvents>(), Err(RawEventsError::TooMany), "{text}");
        }
    }
}
