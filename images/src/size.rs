//! Sizes as a person writes them, in the forms of `vmm`'s options: a whole number, with an optional unit of 1024, 1024²
//! or 1024³. The code is not the device's, on which `vmm` depends: this crate would have to build the device first.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

const UNITS: [(char, u64); 3] = [('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];
const MIB: u64 = 1 << 20;

/// Errors of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// The text is not a number with an optional unit.
    #[error("must be a whole number, or one followed by K, M or G")]
    Number,
    /// The size exceeds 64 bits.
    #[error("the size does not fit in 64 bits")]
    TooLarge,
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Size {
    /// A number of GiB. Its bytes must fit in 64 bits.
    pub const fn gib(gib: u64) -> Self {
        Self(gib << 30)
    }
}

/// Parses a number of bytes, or a number with a unit: `65536`, `64K`, `16M`, `20G`. Units are case-insensitive.
impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        parse(text, 1).map(Self)
    }
}

/// Prints a whole number, rounded to the largest unit of which there are 10 or more.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = self;
        let text = match UNITS.iter().find(|(_, factor)| bytes / factor >= 10) {
            Some((unit, factor)) => format!("{}{unit}", bytes.saturating_add(factor / 2) / factor),
            None => bytes.to_string(),
        };
        f.pad(&text)
    }
}

/// Parses a guest's memory in MiB: `512`, `512M` or `4G`.
///
/// # Errors
/// [`SizeError`], also if the size is not a multiple of 1 MiB.
pub fn mebibytes(text: &str) -> Result<u64, SizeError> {
    let bytes = parse(text, MIB)?;
    if bytes.is_multiple_of(MIB) { Ok(bytes / MIB) } else { Err(SizeError::Number) }
}

/// Parses a size in bytes. A number without a unit is multiplied by `factor`.
fn parse(text: &str, factor: u64) -> Result<u64, SizeError> {
    let with_unit = UNITS.iter().find_map(|&(unit, factor)| {
        let number = text.strip_suffix([unit, unit.to_ascii_lowercase()])?;
        Some((number, factor))
    });
    let (number, factor) = with_unit.unwrap_or((text, factor));
    let number: u64 = number.parse().map_err(|_| SizeError::Number)?;
    number.checked_mul(factor).ok_or(SizeError::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_has_units() {
        let sizes = ["4096", "64K", "16m", "20G"].map(|text| text.parse());
        assert_eq!(sizes, [4096, 64 << 10, 16 << 20, 20 << 30].map(|bytes| Ok(Size(bytes))));
        assert_eq!(["512", "512M", "4g"].map(mebibytes), [Ok(512), Ok(512), Ok(4096)]);
    }

    #[test]
    fn text_that_is_no_size_is_refused() {
        for bad in ["", "K", "1.5M", "-1", "4T", "20GiB", "é", "99999999999999999999"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::Number), "{bad}");
        }
        assert_eq!(format!("{}M", u64::MAX).parse::<Size>(), Err(SizeError::TooLarge));
        assert_eq!(mebibytes("1K"), Err(SizeError::Number));
    }

    #[test]
    fn printed_size_is_a_size() {
        for (bytes, text) in [(0, "0"), (10_239, "10239"), (10_240, "10K"), (2_600 << 20, "2600M"), (20 << 30, "20G")] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
        assert_eq!(format!("{:>5}|", Size((10 << 20) + (1 << 19))), "  11M|");
        assert_eq!(Size(u64::MAX).to_string(), "17179869183G");
    }
}
