//! The console lines in which a guest reports conformance results. The parser skips all other lines.

use std::fmt;
use std::time::Duration;

const MARK: &str = "@row";

/// The result of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// The rule holds, with these figures.
    Holds(String),
    /// The rule does not hold, for this reason.
    Fails(String),
    /// The PMU lacks the event or feature that this text names.
    Absent(String),
}

impl Finding {
    fn word(&self) -> (&'static str, &str) {
        match self {
            Self::Holds(text) => ("holds", text),
            Self::Fails(text) => ("fails", text),
            Self::Absent(text) => ("absent", text),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.word() {
            ("holds", text) => f.write_str(text),
            (word, text) => write!(f, "{word}: {text}"),
        }
    }
}

/// The line of a row's result.
#[must_use]
pub fn line(row: &str, took: Duration, finding: &Finding) -> String {
    let (word, text) = finding.word();
    let (millis, text) = (took.as_millis(), text.replace('\n', "; "));
    format!("{MARK} {row} {millis} {word} {text}")
}

/// Parses a line with a result. Returns the row's name, the milliseconds that the row took, and the finding.
#[must_use]
pub fn parse(line: &str) -> Option<(&str, u64, Finding)> {
    let mut words = line.trim_end().splitn(5, ' ');
    if words.next()? != MARK {
        return None;
    }
    let (row, millis) = (words.next()?, words.next()?.parse().ok()?);
    let (word, text) = (words.next()?, words.next()?.to_owned());
    let finding = match word {
        "holds" => Finding::Holds(text),
        "fails" => Finding::Fails(text),
        "absent" => Finding::Absent(text),
        _ => return None,
    };
    Some((row, millis, finding))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_survives_the_console() {
        let took = Duration::from_millis(12);
        for finding in [
            Finding::Holds("2,000 + 17".into()),
            Finding::Fails("1, not 2".into()),
            Finding::Absent("no branches".into()),
        ] {
            let line = line("loop", took, &finding);
            assert_eq!(parse(&format!("{line}\r\n")), Some(("loop", 12, finding)));
        }
        let fails = Finding::Fails("two\nlines".into());
        assert_eq!(line("r", took, &fails).lines().count(), 1);
    }

    #[test]
    fn line_of_another_form_is_not_a_row() {
        for line in ["", "@row", "@row a 1 holds", "@row a b holds x", "@row a 1 ok x", "@test a 1 ok"] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }
}
