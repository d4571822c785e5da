//! The slowest boots and guest tests of a test program, which are printed when its last boot has ended: they show where
//! the time of a run goes.

use std::cmp::Reverse;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Number of boots, and of guest tests, that are printed.
const PRINTED: usize = 20;

/// The times of everything that has ended so far.
static TIMES: Times = Times { boots: Mutex::new(Vec::new()), tests: Mutex::new(Vec::new()) };

type Named = (String, Duration);

#[derive(Debug)]
struct Times {
    boots: Mutex<Vec<Named>>,
    tests: Mutex<Vec<Named>>,
}

/// Notes the time from the start of a boot until its guest has ended.
pub(crate) fn note_boot(module: &str, time: Duration) {
    note(&TIMES.boots, module.to_owned(), time);
}

/// Notes the time of a guest test.
pub(crate) fn note_test(group: &str, test: &str, time: Duration) {
    note(&TIMES.tests, format!("{group}::{test}"), time);
}

fn note(times: &Mutex<Vec<Named>>, name: String, time: Duration) {
    times.lock().unwrap_or_else(PoisonError::into_inner).push((name, time));
}

/// Both tables. The time of a boot includes the time of its tests, and that of building what the guest needs.
pub(crate) fn tables() -> String {
    table("boots", &TIMES.boots) + &table("guest tests", &TIMES.tests)
}

fn table(what: &str, times: &Mutex<Vec<Named>>) -> String {
    let mut times = times.lock().unwrap_or_else(PoisonError::into_inner).clone();
    times.sort_by_key(|&(_, time)| Reverse(time));
    let all: Duration = times.iter().map(|&(_, time)| time).sum();
    let mut text = format!("slowest of {} {what}, which took {:.0} s in total:\n", times.len(), all.as_secs_f64());
    for (name, time) in times.iter().take(PRINTED) {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:8.1} s  {name}", time.as_secs_f64());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_the_slowest_first_and_counts_all() {
        let times = Mutex::new((0..30).map(|n| (format!("of {n}"), Duration::from_secs(n))).collect());
        let text = table("boots", &times);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + PRINTED);
        assert_eq!(lines[0], "slowest of 30 boots, which took 435 s in total:");
        assert_eq!(lines[1], "    29.0 s  of 29");
    }
}
