//! The console lines in which a guest reports measurements. The parser skips all other lines.

use std::collections::BTreeMap;

const MARK: &str = "@figures";

/// Counts on a CPU, with the number of measured operations.
pub type Figures = BTreeMap<String, u64>;

/// The line with the figures of `subject`.
#[must_use]
pub fn line(subject: &str, figures: &[(&str, u64)]) -> String {
    let words = figures.iter().map(|(name, value)| format!(" {name} {value}"));
    format!("{MARK} {subject}{}", words.collect::<String>())
}

/// The subject and figures of a line.
#[must_use]
pub fn parse(line: &str) -> Option<(&str, Figures)> {
    let mut words = line.split_ascii_whitespace();
    if words.next()? != MARK {
        return None;
    }
    let subject = words.next()?;
    let mut figures = Figures::new();
    while let Some(name) = words.next() {
        figures.insert(name.to_owned(), words.next()?.parse().ok()?);
    }
    Some((subject, figures))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_survive_the_console() {
        let line = line("switch:kvm:6", &[("times", 1000), ("exits", 7)]) + "\r\n";
        let (subject, figures) = parse(&line).expect("figures");
        assert_eq!(subject, "switch:kvm:6");
        assert_eq!((figures["times"], figures["exits"]), (1000, 7));
        for other in ["", "@figures", "x @figures a", "@figures a b", "@figures a b c"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }
}
