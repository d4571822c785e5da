//! When an event overflows, and which of its overflows may leave a record.

use std::io;

use super::counting::Counting;
use crate::period::{Completed, Period};
use crate::source::Rate;
use crate::throttle::{RateLimit, Throttle, Verdict};

/// The overflows of one event.
#[derive(Debug)]
pub(crate) struct OverflowControl {
    /// `None` if the event never overflows. The fields below are then unused.
    pub(super) period: Option<Period>,
    throttle: Throttle,
    /// Whether overflows of the event's host counters are disabled until the throttle is lifted. If the event has a
    /// frequency, they are reduced to 1 Hz instead.
    silent: bool,
    /// Number of overflows until the event is disabled. Zero means no limit.
    pub(super) limit: u64,
}

impl OverflowControl {
    pub(super) fn new(period: Option<Period>) -> Self {
        Self { period, throttle: Throttle::default(), silent: false, limit: 0 }
    }

    pub(super) fn restore(period: Option<Period>, throttled: bool, limit: u64) -> Self {
        Self { throttle: Throttle::restore(throttled), limit, ..Self::new(period) }
    }

    pub(crate) fn period(&self) -> Option<Period> {
        self.period
    }

    pub(super) fn rate(&self) -> Option<Rate> {
        self.period.map(Period::rate)
    }

    fn is_frequency(&self) -> bool {
        self.period.is_some_and(Period::is_frequency)
    }

    /// Number of overflows until the event is disabled. Zero means no limit.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Adds to the overflow limit.
    pub(crate) fn add_to_limit(&mut self, overflows: u64) {
        self.limit = self.limit.saturating_add(overflows);
    }

    /// Counts an overflow towards the limit, if there is one. Returns whether the limit is reached.
    pub(super) fn use_up_limit(&mut self) -> bool {
        let is_last = self.limit == 1;
        self.limit = self.limit.saturating_sub(1);
        is_last
    }

    /// Continues the period of an event that starts or resumes.
    pub(super) fn resume(&mut self) {
        self.period.iter_mut().for_each(Period::resume);
    }

    /// Counts one occurrence. Returns the resulting overflow, if any. `now` returns guest nanoseconds.
    pub(super) fn grow(&mut self, now: impl FnOnce() -> u64) -> Option<Completed> {
        self.period.as_mut()?.grow(1, now)
    }

    /// Sets a new period, or a new frequency if the event was opened with a frequency.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn set_period(&mut self, counting: &mut Counting, period: Period) -> io::Result<()> {
        // If overflows are disabled on the host, the host gets the new rate when the throttle is lifted.
        if !self.silent {
            counting.backing_mut().set_rate(period.rate())?;
        }
        self.period = Some(period);
        Ok(())
    }

    // Throttling.

    /// Returns whether the event is throttled. The overflows of a throttled event leave no records.
    pub(crate) fn is_throttled(&self) -> bool {
        self.throttle.is_closed()
    }

    /// Decides whether the device writes a record for an overflow at `time`. If it is the last record that the rate
    /// limit allows in a window of guest time, disables overflows on the host until the throttle is lifted, unless
    /// the event has a frequency.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn admit(&mut self, counting: &mut Counting, limit: RateLimit, time: u64) -> (Verdict, io::Result<()>) {
        let verdict = self.throttle.admit(limit, time);
        // If the event has a frequency, the host adjusts the period to match it. The frequency does not exceed the rate
        // limit, so overflows can stay enabled.
        let silences = verdict == Verdict::Last && !self.is_frequency();
        let silenced = if silences { self.silence(counting) } else { Ok(()) };
        (verdict, silenced)
    }

    /// Admits an overflow at `time` that needs no work besides its record. This requires that the event has no overflow
    /// limit, is not throttled, and does not become throttled. For any other overflow, returns `false` and changes
    /// nothing.
    pub(super) fn admit_plain(&mut self, limit: RateLimit, time: u64) -> bool {
        self.limit == 0 && self.throttle.admit_within(limit, time)
    }

    /// Drops overflows from `time` until the next window of guest time begins. Disables overflows on the host, unless
    /// the event has a frequency.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn exhaust(&mut self, counting: &mut Counting, limit: RateLimit, time: u64) -> io::Result<()> {
        self.throttle.close(limit, time);
        if self.is_frequency() { Ok(()) } else { self.silence(counting) }
    }

    /// Like [`OverflowControl::exhaust`], but reduces the frequency of an event that has one. Call this for an event
    /// whose overflows took too much time.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn rest(&mut self, counting: &mut Counting, limit: RateLimit, time: u64) -> io::Result<()> {
        self.throttle.close(limit, time);
        self.silence(counting)
    }

    /// Lifts the throttle if its window has ended at `time`. Returns whether it was lifted.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn unthrottle(&mut self, counting: &mut Counting, limit: RateLimit, time: u64) -> io::Result<bool> {
        if !self.throttle.unthrottle(limit, time) {
            return Ok(false);
        }
        match self.period.filter(|_| std::mem::take(&mut self.silent)) {
            Some(period) => counting.backing_mut().set_rate(period.rate()).map(|()| true),
            None => Ok(true),
        }
    }

    /// Disables overflows of the event's host counters until the throttle is lifted. If the event has a
    /// frequency, sets a frequency of 1 Hz on the host instead.
    fn silence(&mut self, counting: &mut Counting) -> io::Result<()> {
        self.silent = true;
        if self.is_frequency() {
            counting.backing_mut().set_rate(Rate::Frequency(1))
        } else {
            counting.backing_mut().silence()
        }
    }

    /// Disables overflows of a new counter if those of the counter before were disabled.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn silence_again(&mut self, counting: &mut Counting) -> io::Result<()> {
        if self.silent { self.silence(counting) } else { Ok(()) }
    }
}
