//! The frequency of this host's time-stamp counter, which the lab's emulated processors read.
//!
//! Without this value, the lab's kernel measures the frequency against an emulated timer in its first milliseconds. On
//! a busy host, the result was nearly always wrong by 0.1 %, and once by a factor of 40.

use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

/// Time between the two readings. Each reading takes less than a microsecond, so the error is a few ppm.
const MEASURED: Duration = Duration::from_millis(100);
/// Attempts at each reading: enough that at least one is not interrupted.
const READINGS: usize = 16;

/// The counter's value and the time at which it was read.
#[derive(Clone, Copy, Debug)]
struct Reading {
    time: Instant,
    counter: u64,
    /// Ticks that the reading took.
    doubt: u64,
}

impl Reading {
    fn take() -> Self {
        let before = sys::tsc();
        let time = Instant::now();
        let doubt = sys::tsc().saturating_sub(before);
        Self { time, counter: before.saturating_add(doubt / 2), doubt }
    }

    fn best() -> Self {
        (1..READINGS).map(|_| Self::take()).fold(
            Self::take(),
            |best, next| {
                if next.doubt < best.doubt { next } else { best }
            },
        )
    }
}

/// The counter's frequency in kHz.
pub fn tsc_khz() -> u32 {
    let start = Reading::best();
    thread::sleep(MEASURED);
    let end = Reading::best();
    khz(end.counter.saturating_sub(start.counter), end.time.duration_since(start.time))
}

fn khz(counted: u64, time: Duration) -> u32 {
    let khz = u128::from(counted) * 1_000_000 / time.as_nanos().max(1);
    u32::try_from(khz).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_over_time() {
        assert_eq!(khz(250_000_000, Duration::from_millis(100)), 2_500_000);
        assert_eq!(khz(1_999_979, Duration::from_millis(1)), 1_999_979);
        assert_eq!(khz(u64::MAX, Duration::ZERO), u32::MAX);
    }

    #[test]
    fn tsc_frequency_is_not_zero() {
        assert!(tsc_khz() > 0);
    }
}
