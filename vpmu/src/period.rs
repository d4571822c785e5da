//! The overflow periods of events that the device counts itself.

use crate::saved::saved;
use crate::source::Rate;

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Each step of the adaptation moves the period towards the right period, by 1/`STEPS` of the difference.
const STEPS: i128 = 8;

/// The longest period that perf accepts.
pub(crate) const LONGEST: u64 = u64::MAX >> 1;

/// A period that is fixed or adapted to a frequency, and how much of the period has elapsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Period {
    length: u64,
    counted: u64,
    frequency: Option<Frequency>,
}

/// The overflows caused by an increase of the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completed {
    pub(crate) overflows: u64,
    /// The period of each overflow.
    pub(crate) length: u64,
}

/// Overflows per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frequency {
    hertz: u64,
    /// Time of the last overflow. If no overflow has happened since the event began or since the last
    /// [`Period::resume`], time of the first increase of the count.
    since: Option<u64>,
    /// The count at that time.
    base: u64,
}

saved! {
    /// A period. If the device itself counts the event, also how much of the period has elapsed.
    pub(crate) struct SavedPeriod {
        pub(crate) length: u64,
        pub(crate) counted: u64,
        /// In hertz.
        pub(crate) frequency: Option<u64>,
    }
}

impl Period {
    /// Returns a new period of `length`, which must not be zero.
    pub(crate) fn new(length: u64) -> Self {
        Self { length: length.max(1), counted: 0, frequency: None }
    }

    /// Returns a period that is adapted to `hertz` overflows per second. `hertz` must not be zero.
    pub(crate) fn frequency(hertz: u64) -> Self {
        Self { frequency: Some(Frequency { hertz: hertz.max(1), since: None, base: 0 }), ..Self::new(1) }
    }

    /// Returns the current state for saving. The measurement of the count's rate is not saved. A restored event starts
    /// this measurement again.
    pub(crate) fn save(self) -> SavedPeriod {
        SavedPeriod {
            length: self.length,
            counted: self.counted,
            frequency: self.frequency.map(|frequency| frequency.hertz),
        }
    }

    /// Restores a saved period. Returns `None` if the saved state is not valid.
    pub(crate) fn restore(saved: &SavedPeriod) -> Option<Self> {
        let SavedPeriod { length, counted, frequency } = *saved;
        // An adapted period may be shorter than its elapsed part.
        let most = if frequency.is_some() { LONGEST } else { length };
        let sound = (1..=LONGEST).contains(&length) && counted < most && frequency != Some(0);
        sound.then_some(Self {
            length,
            counted,
            frequency: frequency.map(|hertz| Frequency { hertz, since: None, base: 0 }),
        })
    }

    /// The requested rate.
    pub(crate) fn rate(self) -> Rate {
        match self.frequency {
            None => Rate::Period(self.length),
            Some(frequency) => Rate::Frequency(frequency.hertz),
        }
    }

    pub(crate) fn is_frequency(self) -> bool {
        self.frequency.is_some()
    }

    /// Resumes after a time without counting. The duration of that time must not affect the adaptation.
    pub(crate) fn resume(&mut self) {
        if let Some(frequency) = &mut self.frequency {
            frequency.since = None;
        }
    }

    /// Adds `more` to the count, and returns the overflows that this increase causes. `now` returns the guest's time in
    /// nanoseconds.
    pub(crate) fn grow(&mut self, more: u64, now: impl FnOnce() -> u64) -> Option<Completed> {
        let before = self.counted;
        let completed = self.complete(more);
        let Some(mut frequency) = self.frequency else {
            return completed;
        };
        let now = now();
        let since = *frequency.since.get_or_insert_with(|| {
            frequency.base = before;
            now
        });
        let elapsed = now.saturating_sub(since);
        let grown = (before - frequency.base).saturating_add(more);
        let interval = NANOS_PER_SECOND / frequency.hertz;
        let overdue = completed.is_none() && elapsed > interval.saturating_mul(2);
        if completed.is_some() || overdue {
            self.length = adapt(self.length, grown, elapsed, frequency.hertz);
        }
        let completed = completed.or_else(|| {
            // An overdue overflow means that the count has slowed down, so `adapt` has shortened the period. If the
            // count has reached the new period, report an overflow now.
            let length = self.counted;
            (overdue && length >= self.length).then(|| {
                self.counted = 0;
                Completed { overflows: 1, length }
            })
        });
        if completed.is_some() {
            self.counted = self.counted.min(self.length - 1);
            frequency.since = Some(now);
            frequency.base = self.counted;
        }
        self.frequency = Some(frequency);
        completed
    }

    fn complete(&mut self, more: u64) -> Option<Completed> {
        let left = self.length.saturating_sub(self.counted);
        if more < left {
            self.counted += more;
            return None;
        }
        let beyond = more - left;
        self.counted = beyond % self.length;
        Some(Completed { overflows: 1 + beyond / self.length, length: self.length })
    }
}

/// Moves `length` one step towards the right period. With the right period, a count that grows by `grown` in `elapsed`
/// nanoseconds overflows `hertz` times a second.
fn adapt(length: u64, grown: u64, elapsed: u64, hertz: u64) -> u64 {
    if elapsed == 0 {
        return length;
    }
    let right = u128::from(grown) * u128::from(NANOS_PER_SECOND) / (u128::from(elapsed) * u128::from(hertz));
    // The longest period that perf accepts.
    let right = i128::try_from(right).unwrap_or(i128::MAX).min(i128::from(i64::MAX));
    let way = right - i128::from(length);
    let step = match way / STEPS {
        0 => way.signum(),
        step => step,
    };
    u64::try_from(i128::from(length) + step).unwrap_or(length).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn overflows(completed: Option<Completed>) -> u64 {
        completed.map_or(0, |completed| completed.overflows)
    }

    proptest! {
        #[test]
        fn overflows_are_n_over_p_for_any_steps(length in 1_u64..50, steps in prop::collection::vec(0_u64..200, 0..50)) {
            let mut period = Period::new(length);
            let got: u64 = steps.iter().map(|&step| overflows(period.grow(step, || 0))).sum();
            prop_assert_eq!(got, steps.iter().sum::<u64>() / length);
        }

        #[test]
        fn largest_numbers_do_not_wrap(length in 1_u64.., more in 0_u64..) {
            let mut period = Period::new(length);
            prop_assert_eq!(overflows(period.grow(more, || 0)), more / length);
        }

        #[test]
        fn frequency_survives_any_times(hertz in 0_u64.., steps in prop::collection::vec((0_u64.., 0_u64..), 0..50)) {
            let mut period = Period::frequency(hertz);
            for (more, now) in steps {
                let completed = period.grow(more, || now);
                prop_assert!(completed.is_none_or(|completed| completed.length > 0));
            }
            prop_assert_eq!(period.rate(), Rate::Frequency(hertz.max(1)));
        }
    }

    /// Returns how many times a count overflows if it grows by one every `gap` nanoseconds for `seconds` seconds.
    fn run(period: &mut Period, start: u64, gap: u64, seconds: u64) -> u64 {
        (0..seconds * NANOS_PER_SECOND / gap).map(|step| overflows(period.grow(1, || start + step * gap))).sum()
    }

    #[test]
    fn frequency_is_reached_and_kept() {
        for gap in [1_000, 10_000, 900_000] {
            let mut period = Period::frequency(100);
            run(&mut period, 0, gap, 1);
            let kept = run(&mut period, NANOS_PER_SECOND, gap, 1);
            assert!((90..=112).contains(&kept), "{kept} with {gap}");
        }
    }

    #[test]
    fn count_slower_than_its_frequency_overflows_each_time() {
        let mut period = Period::frequency(1000);
        assert_eq!(run(&mut period, 0, 10_000_000, 10), 1000);
    }

    #[test]
    fn slower_count_gets_a_shorter_period() {
        let mut period = Period::frequency(1000);
        run(&mut period, 0, 100, 1);
        assert!(period.length > 5000, "{period:?}");
        // The count slows down from ten million per second to a thousand.
        let slow = run(&mut period, NANOS_PER_SECOND, 1_000_000, 2);
        assert!(slow > 900, "{slow}");
    }

    #[test]
    fn pause_does_not_shorten_the_period() {
        let mut period = Period::frequency(100);
        run(&mut period, 0, 10_000, 1);
        let length = period.length;
        period.resume();
        assert_eq!(period.grow(1, || 3600 * NANOS_PER_SECOND), None);
        assert_eq!(period.length, length);
    }
}
