//! The metadata page: an event's count and times, readable without a system call, under the
//! kernel's sequence lock.

use std::sync::atomic::{Ordering, fence};

use vpmu_perf::Mapping;
use vpmu_perf::page::{
    CAP_USER_TIME, CAPABILITIES, LOCK_INDEX, OFFSET, TIME_ENABLED, TIME_OFFSET, TIME_RUNNING, TIME_ZERO,
    WIDTH_SHIFT_MULT,
};

use crate::arch;
use crate::reading::Reading;

/// Maximum number of attempts to read the page. An attempt fails if the page is written during the
/// attempt.
const SEQUENCE_TRIES: u32 = 1000;

/// The metadata page's contents at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metadata {
    /// perf's index of the hardware counter to read; zero if there is none.
    pub index: u32,
    /// The count; if `index` is not zero, the hardware counter's value must be added to it.
    pub offset: u64,
    /// Nanoseconds for which the event was enabled.
    pub time_enabled: u64,
    /// Nanoseconds for which the event counted.
    pub time_running: u64,
    /// perf's `cap_*` bits.
    pub capabilities: u64,
    /// Width of the hardware counter.
    pub pmc_width: u16,
    /// Shift of the conversion from TSC to time.
    pub time_shift: u16,
    /// Multiplier of the conversion.
    pub time_mult: u32,
    /// Add this to a converted TSC to get the nanoseconds since `time_enabled` and `time_running`
    /// were written.
    pub time_offset: u64,
    /// Add this to a converted TSC to get the time on the records' clock.
    pub time_zero: u64,
}

impl Metadata {
    /// Returns the reading at the TSC value `tsc`; `None` if a hardware counter must be added,
    /// because this library does not read hardware counters.
    pub(crate) fn reading(&self, tsc: u64) -> Option<Reading> {
        if self.index != 0 {
            return None;
        }
        let since =
            if self.capabilities & CAP_USER_TIME == 0 { 0 } else { self.time_offset.wrapping_add(self.scaled(tsc)) };
        // The page is written whenever the event loses its counter. So an event that has counted
        // for all of its enabled time is still counting.
        let running = if self.time_running == self.time_enabled { since } else { 0 };
        Some(Reading {
            value: self.offset,
            time_enabled: self.time_enabled.wrapping_add(since),
            time_running: self.time_running.wrapping_add(running),
            ..Reading::default()
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "the clock is modulo 2^64")]
    fn scaled(&self, tsc: u64) -> u64 {
        let product = u128::from(tsc) * u128::from(self.time_mult);
        product.checked_shr(self.time_shift.into()).unwrap_or(0) as u64
    }
}

/// Reads the page and the TSC; `None` if the page was written during every attempt.
pub(crate) fn read(page: &Mapping) -> Option<(Metadata, u64)> {
    for _ in 0..SEQUENCE_TRIES {
        let before = page.load(LOCK_INDEX, Ordering::Acquire);
        let metadata = unlocked(page, before);
        let tsc = arch::ticks();
        fence(Ordering::Acquire);
        let after = page.load(LOCK_INDEX, Ordering::Relaxed);
        if before == after && before & 1 == 0 {
            return Some((metadata, tsc));
        }
        std::hint::spin_loop();
    }
    None
}

#[expect(clippy::cast_possible_truncation, reason = "splits words into fields")]
fn unlocked(page: &Mapping, lock_index: u64) -> Metadata {
    let load = |offset| page.load(offset, Ordering::Relaxed);
    let conversion = load(WIDTH_SHIFT_MULT);
    Metadata {
        index: (lock_index >> 32) as u32,
        offset: load(OFFSET),
        time_enabled: load(TIME_ENABLED),
        time_running: load(TIME_RUNNING),
        capabilities: load(CAPABILITIES),
        pmc_width: conversion as u16,
        time_shift: (conversion >> 16) as u16,
        time_mult: (conversion >> 32) as u32,
        time_offset: load(TIME_OFFSET),
        time_zero: load(TIME_ZERO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROWING: Metadata = Metadata {
        index: 0,
        offset: 7,
        time_enabled: 100,
        time_running: 100,
        capabilities: CAP_USER_TIME,
        pmc_width: 64,
        time_shift: 1,
        time_mult: 1,
        // Times at a TSC of 1000.
        time_offset: 500_u64.wrapping_neg(),
        time_zero: 0,
    };

    fn times(metadata: &Metadata, tsc: u64) -> (u64, u64) {
        let reading = metadata.reading(tsc).unwrap();
        assert_eq!(reading.value, 7);
        (reading.time_enabled, reading.time_running)
    }

    #[test]
    fn times_go_on_while_the_event_is_enabled() {
        assert_eq!(times(&GROWING, 1000), (100, 100));
        assert_eq!(times(&GROWING, 1100), (150, 150));
        let contended = Metadata { time_running: 60, ..GROWING };
        assert_eq!(times(&contended, 1100), (150, 60));
        let stopped = Metadata { capabilities: 0, ..GROWING };
        assert_eq!(times(&stopped, 1100), (100, 100));
    }

    #[test]
    fn nonsense_does_not_panic_and_registers_are_not_guessed() {
        let wild = Metadata { time_shift: u16::MAX, time_mult: u32::MAX, time_offset: u64::MAX, ..GROWING };
        assert!(wild.reading(u64::MAX).is_some());
        let register = Metadata { index: 1, ..GROWING };
        assert_eq!(register.reading(0), None);
    }
}
