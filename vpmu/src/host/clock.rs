//! Converts the times in host records to values of the time stamp counter, which is the basis of guest time. Host
//! records contain times of `CLOCK_MONOTONIC_RAW`. NTP does not slew this clock, so it is a linear function of the
//! counter. This module computes the function as a line through two anchors. An anchor is a pair of readings, one of
//! each clock, taken at nearly the same moment. The anchors are so far apart that the reading error is negligible.

use std::sync::{Mutex, PoisonError};

use super::sys;
use crate::arch;

/// Largest age, in nanoseconds, of the newer anchor when records are converted.
const FRESH: u64 = 1_000_000;
/// When the anchors are more than this many nanoseconds apart, a later anchor replaces the older one. After the host
/// resumes from suspend, conversions may be wrong for about this long, because an anchor from before the suspend is
/// still in use.
const SPAN: u64 = 10_000_000_000;
/// Number of attempts to read both clocks for an anchor. The shortest attempt is used, because others may have
/// been interrupted.
const TRIES: usize = 3;

/// Keeps the current [`Line`], and takes new anchors as needed.
#[derive(Debug)]
pub(super) struct Clock(Mutex<Anchors>);

#[derive(Debug)]
struct Anchors {
    line: Line,
    /// Replaces the older anchor of `line` when `line` becomes longer than [`SPAN`].
    middle: Anchor,
}

/// A moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Anchor {
    tsc: u64,
    /// Nanoseconds.
    raw: u64,
}

/// Converts nanoseconds of `CLOCK_MONOTONIC_RAW` to TSC ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Line {
    old: Anchor,
    new: Anchor,
}

impl Clock {
    /// Takes the first anchor immediately, because the line becomes more exact as the time between its
    /// anchors grows.
    pub(super) fn new() -> Self {
        let now = Anchor::now();
        Self(Mutex::new(Anchors { line: Line { old: now, new: now }, middle: now }))
    }

    /// A line through a recent anchor.
    pub(super) fn line(&self) -> Line {
        // Every anchor is complete, even if a thread panicked while it held the lock.
        let mut anchors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sys::raw_time().saturating_sub(anchors.line.new.raw) > FRESH {
            anchors.add(Anchor::now());
        }
        anchors.line
    }
}

impl Anchors {
    fn add(&mut self, now: Anchor) {
        if now.raw.saturating_sub(self.line.old.raw) > SPAN {
            self.line.old = self.middle;
            self.middle = now;
        }
        self.line.new = now;
    }
}

impl Anchor {
    fn now() -> Self {
        let read = || {
            let before = arch::ticks();
            let raw = sys::raw_time();
            let took = arch::ticks().wrapping_sub(before);
            let tsc = before.wrapping_add(took / 2);
            (took, Self { tsc, raw })
        };
        let mut best = read();
        for _ in 1..TRIES {
            let other = read();
            if other.0 < best.0 {
                best = other;
            }
        }
        best.1
    }
}

impl Line {
    /// The time stamp counter's value when `CLOCK_MONOTONIC_RAW` is `raw`.
    pub(super) fn tsc(&self, raw: u64) -> u64 {
        let ticks = self.new.tsc.wrapping_sub(self.old.tsc);
        let nanoseconds = self.new.raw.wrapping_sub(self.old.raw).max(1);
        let scale = |span: u64| {
            let scaled = u128::from(span) * u128::from(ticks) / u128::from(nanoseconds);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        match raw.checked_sub(self.new.raw) {
            Some(after) => self.new.tsc.wrapping_add(scale(after)),
            None => self.new.tsc.wrapping_sub(scale(self.new.raw - raw)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    const OLD: Anchor = Anchor { tsc: 5_000, raw: 1_000_000 };

    proptest! {
        #[test]
        fn clock_readings_are_on_the_line_and_in_order(khz in 100_000_u64..6_000_000, span in 1_000_000_u64..1 << 40, at in 0_u64..1 << 40, more in 0_u64..1 << 30) {
            let ticks = |ns: u64| u64::try_from(u128::from(ns) * u128::from(khz) / 1_000_000).expect("small");
            let line = Line {
                old: OLD,
                new: Anchor { tsc: OLD.tsc + ticks(span), raw: OLD.raw + span },
            };
            prop_assume!(at < 1000 * span);
            let exact = OLD.tsc + ticks(at);
            let got = line.tsc(OLD.raw + at);
            // Rounding moves each anchor by up to a tick. Beyond the anchors, this error grows with the
            // distance.
            prop_assert!(got.abs_diff(exact) <= 2 + at / span, "{got} {exact}");
            prop_assert!(line.tsc(OLD.raw + at + more) >= got);
        }
    }

    #[test]
    fn line_through_one_point_is_that_point() {
        let line = Line { old: OLD, new: OLD };
        assert_eq!(line.tsc(OLD.raw), OLD.tsc);
        assert_eq!(line.tsc(0), OLD.tsc);
    }

    #[test]
    fn clock_line_recovers_after_a_jump() {
        let at = |seconds: u64, tsc_per_ns: u64, from: u64| Anchor {
            tsc: from + seconds * 1_000_000_000 * tsc_per_ns,
            raw: seconds * 1_000_000_000,
        };
        let start = at(0, 3, 0);
        let mut anchors = Anchors { line: Line { old: start, new: start }, middle: start };
        // The counter advanced for an hour while the raw clock stood still.
        let jump = 3 * 3_600_000_000_000;
        for second in 1..=40 {
            anchors.add(at(second, 3, jump));
        }
        let asked = at(39, 3, jump);
        assert_eq!(anchors.line.tsc(asked.raw), asked.tsc);
    }

    #[test]
    fn this_hosts_clocks_agree() {
        let clock = Clock::new();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        for _ in 0..100 {
            let line = clock.line();
            let before = arch::ticks();
            let raw = sys::raw_time();
            let after = arch::ticks();
            let got = line.tsc(raw);
            let ticks = line.new.tsc - line.old.tsc;
            let nanoseconds = line.new.raw - line.old.raw;
            // The result may be up to a microsecond before the first reading of the counter, or after the second.
            let slack = 1_000 * ticks / nanoseconds;
            assert!((before - slack..=after + slack).contains(&got), "{got} not in {before}..={after}");
        }
    }
}
