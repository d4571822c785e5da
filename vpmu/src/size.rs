//! Sizes of memory as an operator writes them.

/// Errors of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text is not a number with an optional unit.
    #[error("must be a number of bytes, or a number followed by K or M")]
    Number,
    /// The size exceeds 64 bits.
    #[error("the size does not fit in 64 bits")]
    TooLarge,
}

/// Parses a size such as `65536`, `64K` or `16M` into bytes. Units are case-insensitive.
///
/// # Errors
/// [`SizeError`].
///
/// ```
/// assert_eq!(vpmu::parse_bytes("64K"), Ok(65536));
/// assert_eq!(vpmu::parse_bytes("64T"), Err(vpmu::SizeError::Number));
/// ```
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    parse_scaled(text, &[('K', 1 << 10), ('M', 1 << 20)])
}

/// Parses a number with an optional unit, and returns the number multiplied by the unit's factor. `units` lists
/// the units as upper-case letters; `text` may use either case.
///
/// # Errors
/// [`SizeError`].
pub fn parse_scaled(text: &str, units: &[(char, u64)]) -> Result<u64, SizeError> {
    let scaled = units.iter().find_map(|&(unit, factor)| {
        let number = text.strip_suffix([unit, unit.to_ascii_lowercase()])?;
        Some((number, factor))
    });
    let (number, factor) = scaled.unwrap_or((text, 1));
    let number: u64 = number.parse().map_err(|_| SizeError::Number)?;
    number.checked_mul(factor).ok_or(SizeError::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_has_units() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("64K"), Ok(64 << 10));
        assert_eq!(parse_bytes("16m"), Ok(16 << 20));
        assert_eq!(parse_scaled("4g", &[('M', 1), ('G', 1024)]), Ok(4096));
    }

    #[test]
    fn text_that_is_no_size_is_refused() {
        for bad in ["", "K", "1.5M", "-1", "4G", "é", "99999999999999999999"] {
            assert_eq!(parse_bytes(bad), Err(SizeError::Number), "{bad}");
        }
        let much = format!("{}M", u64::MAX);
        assert_eq!(parse_bytes(&much), Err(SizeError::TooLarge));
    }
}
