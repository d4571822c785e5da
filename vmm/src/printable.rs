//! Text for the operator's terminal. Some of it comes from strangers: another program may listen on a control socket,
//! and a snapshot may be forged. Their control characters could change what the operator sees, or type into a terminal.

use std::fmt::{self, Display, Write};

use serde::Serialize;

/// Text without control characters, apart from the newline that ends each of its lines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Printable(String);

impl Printable {
    /// The text `line`, and a newline. Each control character in `line` is replaced by its number, as in `\u{1b}`.
    pub fn line(line: impl Display) -> Self {
        Self::lines([line])
    }

    /// Like [`Printable::line`], for several lines.
    pub fn lines<T: Display>(lines: impl IntoIterator<Item = T>) -> Self {
        let mut text = String::new();
        for line in lines {
            for character in line.to_string().chars() {
                if character.is_control() { text.extend(character.escape_unicode()) } else { text.push(character) }
            }
            text.push('\n');
        }
        Self(text)
    }

    /// JSON on several lines. Control characters in its strings are escaped, also those that JSON permits.
    ///
    /// # Errors
    /// `value` cannot be written as JSON.
    pub fn json(value: &impl Serialize) -> serde_json::Result<Self> {
        let mut text = String::new();
        for character in serde_json::to_string_pretty(value)?.chars() {
            match character {
                // serde_json has escaped all newlines in strings.
                '\n' => text.push('\n'),
                // Outside of strings, JSON has no other control character.
                character if character.is_control() => {
                    // Writing to a string does not fail.
                    let _ = write!(text, "\\u{:04x}", u32::from(character));
                }
                character => text.push(character),
            }
        }
        text.push('\n');
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Display for Printable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every control character: C0, DEL and C1.
    fn controls() -> String {
        let all = (0..=0x1f).chain(0x7f..=0x9f);
        all.filter_map(char::from_u32).collect()
    }

    fn has_controls(text: &Printable) -> bool {
        text.0.lines().any(|line| line.chars().any(char::is_control))
    }

    #[test]
    fn lines_have_no_control_characters() {
        let text = Printable::line(controls());
        assert_eq!(text.0.matches('\n').count(), 1, "{text}");
        assert!(!has_controls(&text), "{text}");
        let text = Printable::lines(["a\u{1b}[2J\u{7}", "é\n\u{9b}"]);
        assert_eq!(text.to_string(), "a\\u{1b}[2J\\u{7}\né\\u{a}\\u{9b}\n");
        let none: [&str; 0] = [];
        assert_eq!(Printable::lines(none), Printable::default());
    }

    #[test]
    fn json_means_the_same_without_control_characters() {
        let value = serde_json::json!({"name": controls(), "others": ["é", 1]});
        let text = Printable::json(&value).expect("JSON");
        assert!(!has_controls(&text), "{text}");
        let parsed: serde_json::Value = serde_json::from_str(&text.0).expect("JSON");
        assert_eq!(parsed, value);
    }
}
