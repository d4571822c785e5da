//! Names that are safe to print.

use std::fmt::{self, Write};

/// Returns the first `most` characters of a name, without control characters, because escape sequences in a forged name
/// must not reach a terminal.
#[must_use]
pub fn printable(name: impl fmt::Display, most: usize) -> String {
    let mut printable = Printable { text: String::new(), room: most };
    // `Printable` returns an error only to end the formatting after `most` characters. So ignore the error.
    let _ = write!(printable, "{name}");
    printable.text
}

struct Printable {
    text: String,
    room: usize,
}

impl Write for Printable {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars().filter(|character| !character.is_control()) {
            self.room = self.room.checked_sub(1).ok_or(fmt::Error)?;
            self.text.push(character);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats without end.
    struct Endless;

    impl fmt::Display for Endless {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            loop {
                f.write_str("é")?;
            }
        }
    }

    #[test]
    fn name_loses_control_characters() {
        assert_eq!(printable("a\x1b[31mb\u{9b}c\n\0", 255), "a[31mbc");
    }

    #[test]
    fn name_is_limited_in_characters() {
        assert_eq!(printable("", 3), "");
        assert_eq!(printable("abc", 3), "abc");
        assert_eq!(printable("a\nbcd", 3), "abc");
        assert_eq!(printable(Endless, 255).chars().count(), 255);
        assert_eq!(printable("abc", 0), "");
    }
}
