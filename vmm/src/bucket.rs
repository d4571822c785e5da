//! A token bucket, which limits the work that a guest can cause. It allows an initial burst, and then a fixed number of
//! tokens per period.

use std::time::{Duration, Instant};

/// Tokens that refill up to a limit.
#[derive(Debug)]
pub(crate) struct Bucket {
    most: u64,
    /// Tokens per period.
    refill: u64,
    period: Duration,
    tokens: u64,
    /// Tokens spent in advance.
    debt: u64,
    /// Time of the last refill.
    filled: Instant,
}

impl Bucket {
    /// A full bucket of `most` tokens that gains `refill` tokens per second.
    pub(crate) fn per_second(most: u64, refill: u64) -> Self {
        Self::new(most, refill, Duration::from_secs(1), Instant::now())
    }

    /// A full bucket of `most` tokens that gains `most` tokens per minute.
    pub(crate) fn per_minute(most: u64) -> Self {
        Self::new(most, most, Duration::from_secs(60), Instant::now())
    }

    /// A full bucket of `most` tokens that gains `refill` tokens per `period`, which must not be zero.
    fn new(most: u64, refill: u64, period: Duration, now: Instant) -> Self {
        Self { most, refill, period, tokens: most, debt: 0, filled: now }
    }

    /// Takes up to `wanted` tokens, and returns the number of tokens taken.
    pub(crate) fn take(&mut self, wanted: u64, now: Instant) -> u64 {
        self.fill(now);
        let taken = wanted.min(self.tokens);
        self.tokens -= taken;
        taken
    }

    /// Takes `wanted` tokens. If the bucket has fewer, the missing tokens are deducted from later refills.
    pub(crate) fn spend(&mut self, wanted: u64, now: Instant) {
        let taken = self.take(wanted, now);
        self.debt = self.debt.saturating_add(wanted - taken);
    }

    /// Time until the bucket has a token. Zero if it already has one.
    #[must_use]
    pub(crate) fn wait(&mut self, now: Instant) -> Duration {
        self.fill(now);
        if self.tokens > 0 {
            return Duration::ZERO;
        }
        match self.refill {
            0 => Duration::MAX,
            // Round up, because the bucket would still be empty after a time that was rounded down.
            _ => {
                let flows = self.flow_time(self.debt.saturating_add(1)) + Duration::from_nanos(1);
                let at = self.filled.checked_add(flows);
                at.map_or(Duration::MAX, |at| at.saturating_duration_since(now))
            }
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        let flown = passed.as_nanos().saturating_mul(self.refill.into());
        let flown = flown / self.period.as_nanos().max(1);
        let flown = u64::try_from(flown).unwrap_or(u64::MAX);
        if flown == 0 {
            return;
        }
        let paid = self.debt.min(flown);
        self.debt -= paid;
        self.tokens = self.tokens.saturating_add(flown - paid).min(self.most);
        // Keep the remainder of the elapsed time, which counts toward the next token.
        self.filled = if self.tokens == self.most { now } else { self.filled + self.flow_time(flown) };
    }

    /// The time to gain this many tokens, rounded down.
    fn flow_time(&self, tokens: u64) -> Duration {
        let nanos = self.period.as_nanos().saturating_mul(tokens.into());
        let nanos = nanos / u128::from(self.refill.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn full_bucket_gives_what_it_holds_and_no_more() {
        let now = Instant::now();
        let mut bucket = Bucket::new(10, 5, SECOND, now);
        assert_eq!(bucket.take(7, now), 7);
        assert_eq!(bucket.take(7, now), 3);
        assert_eq!(bucket.take(7, now), 0);
    }

    #[test]
    fn tokens_flow_by_the_second_and_fractions_add_up() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, 3, SECOND, start);
        assert_eq!(bucket.take(10, start), 10);
        assert_eq!(bucket.wait(start), Duration::from_nanos(333_333_334));
        let taken: u64 = (1..=1000).map(|step| bucket.take(1, start + Duration::from_millis(10) * step)).sum();
        assert_eq!(taken, 30);
        assert_eq!(bucket.take(100, start + Duration::from_secs(100)), 10);
    }

    #[test]
    fn debt_is_paid_before_there_are_tokens_again() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, 1, SECOND, start);
        bucket.spend(13, start);
        assert_eq!(bucket.wait(start), 4 * SECOND + Duration::from_nanos(1));
        assert_eq!(bucket.take(1, start + 3 * SECOND), 0);
        assert_eq!(bucket.take(2, start + 5 * SECOND), 2);
    }

    #[test]
    fn few_tokens_flow_in_a_long_period() {
        let start = Instant::now();
        let mut bucket = Bucket::new(2, 30, 60 * SECOND, start);
        assert_eq!(bucket.take(2, start), 2);
        let wait = bucket.wait(start + SECOND);
        assert_eq!(wait, SECOND + Duration::from_nanos(1));
        assert_eq!(bucket.take(1, start + 2 * SECOND), 1);
    }

    #[test]
    fn bucket_that_nothing_flows_into_stays_empty() {
        let start = Instant::now();
        let mut bucket = Bucket::new(2, 0, SECOND, start);
        assert_eq!(bucket.take(3, start), 2);
        let later = start + Duration::from_secs(1 << 40);
        assert_eq!((bucket.take(1, later), bucket.wait(later)), (0, Duration::MAX));
    }

    #[test]
    fn time_that_does_not_advance_adds_no_tokens() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut bucket = Bucket::new(1, u64::MAX, SECOND, start);
        assert_eq!(bucket.take(1, start), 1);
        assert_eq!(bucket.take(1, start - Duration::from_secs(5)), 0);
    }
}
