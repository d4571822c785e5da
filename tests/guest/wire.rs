//! The console lines in which a guest reports the verdicts of tests. The parser skips all other lines.

use std::time::Duration;

const MARK: &str = "@test";
/// The name of an additional test result: whether the guest kernel's log is free of faults.
pub const KERNEL_LOG: &str = "kernel_log";

/// The result of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Success.
    Passed,
    /// Failure, with the reason.
    Failed(String),
}

/// The line that is printed before a test. If no verdict follows, the machine ended or hung during this test.
#[must_use]
pub fn begins(test: &str) -> String {
    format!("{MARK} {test} begins")
}

/// Parses a line that is printed before a test. Returns the test's name.
#[must_use]
pub fn parse_begins(line: &str) -> Option<&str> {
    let (mark, rest) = line.trim_end().split_once(' ')?;
    let test = rest.strip_suffix(" begins")?;
    (mark == MARK && !test.contains(' ')).then_some(test)
}

/// The line of a verdict.
#[must_use]
pub fn line(test: &str, took: Duration, verdict: &Verdict) -> String {
    let millis = took.as_millis();
    match verdict {
        Verdict::Passed => format!("{MARK} {test} {millis} ok"),
        Verdict::Failed(reason) => {
            format!("{MARK} {test} {millis} failed {}", reason.replace('\n', "; "))
        }
    }
}

/// Parses a line with a verdict. Returns the test's name, the milliseconds that the test took, and the result.
#[must_use]
pub fn parse(line: &str) -> Option<(&str, u64, Verdict)> {
    let mut words = line.trim_end().splitn(4, ' ');
    if words.next()? != MARK {
        return None;
    }
    let test = words.next()?;
    let millis = words.next()?.parse().ok()?;
    let rest = words.next()?;
    let verdict = match rest.strip_prefix("failed ") {
        Some(reason) => Verdict::Failed(reason.to_owned()),
        None if rest == "ok" => Verdict::Passed,
        None => return None,
    };
    Some((test, millis, verdict))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_survive_the_console() {
        let took = Duration::from_millis(12);
        for verdict in [Verdict::Passed, Verdict::Failed("a, not b".into())] {
            let line = line("rings::wrap", took, &verdict);
            assert_eq!(parse(&format!("{line}\r\n")), Some(("rings::wrap", 12, verdict)));
        }
        let failed = Verdict::Failed("two\nlines".into());
        assert_eq!(line("t", took, &failed).lines().count(), 1);
    }

    #[test]
    fn beginning_survives_the_console_and_is_no_verdict() {
        let line = format!("{}\r\n", begins("rings::wrap"));
        assert_eq!(parse_begins(&line), Some("rings::wrap"));
        assert_eq!(parse(&line), None);
        for other in ["@test a 1 ok", "x a begins", "@test begins", "@test a b begins"] {
            assert_eq!(parse_begins(other), None, "{other:?}");
        }
    }

    #[test]
    fn other_lines_are_no_verdicts() {
        for line in ["", "@test", "@test a", "@test a b ok", "@test a 1 okay", "x @test a 1 ok"] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }
}
