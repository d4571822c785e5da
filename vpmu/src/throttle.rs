//! Two kinds of limits on sampling. The first kind limits the samples in each window of guest time, and therefore the
//! rate at which a guest can make its host write records. The second kind limits the share of a vCPU's time that
//! samples may take.

use std::sync::atomic::{AtomicU64, Ordering};

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Maximum number of windows per second. If fewer samples than this are allowed per second, each sample has a window of
/// its own.
const WINDOWS: u64 = 100;

/// A limit on the samples of one event, or of all events in a [`Budget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateLimit {
    window: u64,
    share: u64,
}

impl RateLimit {
    /// Returns a limit of `most` samples per second. `most` must not be zero.
    pub(crate) fn new(most: u32) -> Self {
        let most = u64::from(most.max(1));
        let windows = WINDOWS.min(most);
        Self { window: NANOS_PER_SECOND / windows, share: most / windows }
    }
}

/// The limit on the time that the samples of a vCPU may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TimeLimit {
    window: u64,
    /// Nanoseconds per window.
    share: u64,
}

impl TimeLimit {
    /// Allows samples to take `percent` of each window. 100 or more means no limit. The windows have the same length as
    /// the windows of `rate`.
    pub(crate) fn new(rate: RateLimit, percent: u32) -> Self {
        let share = match percent {
            0..100 => rate.window / 100 * u64::from(percent),
            _ => u64::MAX,
        };
        Self { window: rate.window, share }
    }
}

/// The time spent on samples of a vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SamplingTime {
    window: u64,
    /// Nanoseconds charged to this window. Any excess over the share is carried over to the next window.
    spent: u64,
    total: u64,
}

impl SamplingTime {
    /// Charges a sample that took `took` nanoseconds and ended at `time`, in guest nanoseconds.
    pub(crate) fn charge(&mut self, limit: TimeLimit, time: u64, took: u64) {
        self.turn(limit, time);
        // Charge at most one window for a sample, so that one long sample does not throttle its vCPU for long.
        let took = took.min(limit.window);
        self.spent = self.spent.saturating_add(took);
        self.total = self.total.saturating_add(took);
    }

    /// Whether samples have used up their share of the window that contains `time`.
    pub(crate) fn is_used_up(&mut self, limit: TimeLimit, time: u64) -> bool {
        self.turn(limit, time);
        self.spent >= limit.share
    }

    /// Nanoseconds charged since the device was created.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    fn turn(&mut self, limit: TimeLimit, time: u64) {
        let passed = (time / limit.window).saturating_sub(self.window);
        self.window += passed;
        self.spent = self.spent.saturating_sub(limit.share.saturating_mul(passed));
    }
}

/// The decision on an overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Make a record.
    Within,
    /// Write a record, which is the last record in this window.
    Last,
    /// Make no record.
    Throttled,
    /// Do not write a record, because the budget that all events share is used up. From now on, the event is throttled.
    Exhausted,
}

/// The budget that all events of a guest share on all vCPUs, in one window of guest time.
#[derive(Debug)]
pub(crate) struct Budget {
    samples: RateLimit,
    /// Bytes per window.
    bytes: u64,
    window: AtomicU64,
    samples_used: AtomicU64,
    bytes_used: AtomicU64,
}

/// Number of parts of the budget. A shard takes one part at a time. Therefore, vCPUs that sample concurrently
/// rarely contend for the budget's cache line, and no shard takes the whole budget at once.
const PARTS: u64 = 64;

impl Budget {
    /// Returns a budget of `samples` samples and `bytes` bytes per second. Both must be greater than zero.
    pub(crate) fn new(samples: u32, bytes: u64) -> Self {
        let samples = RateLimit::new(samples);
        let windows = NANOS_PER_SECOND / samples.window;
        Self {
            samples,
            bytes: (bytes / windows).max(1),
            window: AtomicU64::new(0),
            samples_used: AtomicU64::new(0),
            bytes_used: AtomicU64::new(0),
        }
    }

    /// The number of the window that contains `time`, in guest nanoseconds. Clears the used counts if the window
    /// is new. If two threads begin a window at the same time, one thread may take parts before the other clears the
    /// counts. These parts are then not counted.
    fn window(&self, time: u64) -> u64 {
        let now = time / self.samples.window;
        let before = self.window.load(Ordering::Relaxed);
        if now <= before {
            return before;
        }
        let before = self.window.fetch_max(now, Ordering::Relaxed);
        if now > before {
            self.samples_used.store(0, Ordering::Relaxed);
            self.bytes_used.store(0, Ordering::Relaxed);
        }
        now.max(before)
    }

    /// Takes a part of the samples. Returns the number of samples taken.
    fn take_samples(&self) -> u64 {
        let wanted = self.samples.share.div_ceil(PARTS);
        take(&self.samples_used, self.samples.share, wanted)
    }

    /// Takes a part of the bytes: at least `wanted`, if that many are left. Returns the number of bytes taken.
    fn take_bytes(&self, wanted: u64) -> u64 {
        let wanted = wanted.max(self.bytes.div_ceil(PARTS));
        take(&self.bytes_used, self.bytes, wanted)
    }
}

/// Takes up to `wanted` from a budget of `all`, of which `used` has already been taken. Returns the amount taken.
fn take(used: &AtomicU64, all: u64, wanted: u64) -> u64 {
    // Once the budget is exhausted, `used` no longer grows, so repeated calls cannot overflow it.
    if used.load(Ordering::Relaxed) >= all {
        return 0;
    }
    let before = used.fetch_add(wanted, Ordering::Relaxed);
    all.saturating_sub(before).min(wanted)
}

/// The part of the budget that a shard has taken but not used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BudgetShare {
    window: u64,
    samples: u64,
    /// Negative if the last record was longer than the share.
    bytes: i64,
}

impl BudgetShare {
    /// Returns whether a sample at `time`, in guest nanoseconds, may be written. If so, counts the sample.
    pub(crate) fn admit(&mut self, budget: &Budget, time: u64) -> bool {
        let window = budget.window(time);
        if window > self.window {
            *self = Self { window, ..Self::default() };
        }
        if self.bytes <= 0 {
            let taken = budget.take_bytes(self.bytes.unsigned_abs() + 1);
            self.bytes = self.bytes.saturating_add_unsigned(taken);
        }
        if self.samples == 0 {
            self.samples = budget.take_samples();
        }
        let admitted = self.samples > 0 && self.bytes > 0;
        self.samples -= u64::from(admitted);
        admitted
    }

    /// Undoes [`BudgetShare::admit`] for a sample that was not written.
    pub(crate) fn give_back(&mut self) {
        self.samples += 1;
    }

    /// Charges the bytes of an admitted sample's record.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub_unsigned(bytes as u64);
    }
}

/// An event's use of its rate limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Throttle {
    window: u64,
    used: u64,
    closed: bool,
}

impl Throttle {
    /// The throttle of a restored event. If `closed`, records stay suppressed until the next [`Throttle::unthrottle`].
    pub(crate) fn restore(closed: bool) -> Self {
        Self { closed, ..Self::default() }
    }

    /// Decides on an overflow at `time`, in guest nanoseconds.
    pub(crate) fn admit(&mut self, limit: RateLimit, time: u64) -> Verdict {
        let window = time / limit.window;
        if window > self.window {
            self.window = window;
            self.used = 0;
        }
        if self.closed {
            return Verdict::Throttled;
        }
        self.used += 1;
        if self.used < limit.share {
            return Verdict::Within;
        }
        self.closed = true;
        Verdict::Last
    }

    /// Admits the overflow and returns true if [`Throttle::admit`] would return [`Verdict::Within`].
    /// Otherwise changes nothing and returns false.
    pub(crate) fn admit_within(&mut self, limit: RateLimit, time: u64) -> bool {
        let mut after = *self;
        let within = after.admit(limit, time) == Verdict::Within;
        if within {
            *self = after;
        }
        within
    }

    /// Suppresses records starting at `time`, even if the limit is not used up.
    pub(crate) fn close(&mut self, limit: RateLimit, time: u64) {
        self.window = self.window.max(time / limit.window);
        self.closed = true;
    }

    /// Whether records are suppressed until [`Throttle::unthrottle`].
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Ends the suppression if `time` is in a later window. Returns whether the suppression ended.
    pub(crate) fn unthrottle(&mut self, limit: RateLimit, time: u64) -> bool {
        let over = self.closed && time / limit.window > self.window;
        self.closed &= !over;
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_in_each_window() {
        let limit = RateLimit::new(300);
        let mut throttle = Throttle::default();
        let at = |time: u64| 70_000_000 + time;
        assert_eq!(throttle.admit(limit, at(0)), Verdict::Within);
        assert_eq!(throttle.admit(limit, at(1)), Verdict::Within);
        assert_eq!(throttle.admit(limit, at(2)), Verdict::Last);
        assert_eq!(throttle.admit(limit, at(3)), Verdict::Throttled);
        assert!(throttle.is_closed() && !throttle.unthrottle(limit, at(9_999_999)));
        assert!(throttle.unthrottle(limit, at(10_000_000)));
        assert!(!throttle.unthrottle(limit, at(20_000_000)), "once");
        assert_eq!(throttle.admit(limit, at(10_000_001)), Verdict::Within);
        assert_eq!(throttle.admit(limit, at(20_000_001)), Verdict::Within);
        assert_eq!(throttle.admit(limit, at(20_000_002)), Verdict::Within);
        assert_eq!(throttle.admit(limit, at(20_000_003)), Verdict::Last);
    }

    #[test]
    fn samples_take_their_share_of_each_window() {
        let limit = TimeLimit::new(RateLimit::new(100_000), 25);
        let mut time = SamplingTime::default();
        for sample in 0..250 {
            assert!(!time.is_used_up(limit, 70_000_000), "sample {sample}");
            time.charge(limit, 70_000_000, 10_000);
        }
        assert!(time.is_used_up(limit, 79_999_999));
        assert!(!time.is_used_up(limit, 80_000_000), "a later window");
        assert_eq!(time.total(), 2_500_000);
    }

    #[test]
    fn samples_longer_than_a_share_are_charged_to_later_windows() {
        let limit = TimeLimit::new(RateLimit::new(100_000), 25);
        let mut time = SamplingTime::default();
        time.charge(limit, 0, 9_000_000);
        let windows = [10, 20, 30, 40].map(|ms| time.is_used_up(limit, ms * 1_000_000));
        assert_eq!(windows, [true, true, false, false]);
        time.charge(limit, 500_000_000, u64::MAX);
        assert_eq!(time.total(), 9_000_000 + 10_000_000, "a sample is charged at most one window");
    }

    #[test]
    fn hundred_percent_is_without_limit() {
        let limit = TimeLimit::new(RateLimit::new(100_000), 100);
        let mut time = SamplingTime::default();
        (0..100).for_each(|_| time.charge(limit, 0, 10_000_000));
        assert!(!time.is_used_up(limit, 0) && !time.is_used_up(limit, 20_000_000));
        assert_eq!(time.total(), 1_000_000_000);
    }

    #[test]
    fn budget_is_for_all_shards_together() {
        let budget = Budget::new(5000, 1 << 30);
        let mut shards = [BudgetShare::default(); 3];
        let at = 20_000_000;
        let admitted = (0..100).filter(|turn| shards[turn % 3].admit(&budget, at + 5));
        assert_eq!(admitted.count(), 50, "10 ms of 5000 per second");
        assert!(shards[0].admit(&budget, at + 10_000_000), "a later window");
        assert!(!shards[1].admit(&budget, at) || budget.window(at) > at / 10_000_000);
    }

    #[test]
    fn bytes_end_a_window_too() {
        let budget = Budget::new(100_000, 100_000);
        let mut shard = BudgetShare::default();
        assert!(shard.admit(&budget, 0));
        shard.spend(999);
        assert!(shard.admit(&budget, 1));
        shard.spend(100);
        assert!(!shard.admit(&budget, 2));
        let mut other = BudgetShare::default();
        assert!(!other.admit(&budget, 3));
        assert!(shard.admit(&budget, 10_000_000));
    }

    #[test]
    fn few_samples_a_second_have_longer_windows() {
        let limit = RateLimit::new(1);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(limit, 5), Verdict::Last);
        assert!(!throttle.unthrottle(limit, NANOS_PER_SECOND - 1));
        assert!(throttle.unthrottle(limit, NANOS_PER_SECOND));
    }

    #[test]
    fn time_that_runs_backwards_opens_no_window() {
        let limit = RateLimit::new(100);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(limit, 50_000_000), Verdict::Last);
        assert!(!throttle.unthrottle(limit, 0));
        assert_eq!(throttle.admit(limit, 0), Verdict::Throttled);
    }
}
