//! How often an event may make samples: a share in each window of guest time, so that no guest
//! makes its host write records without end.

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Windows of a second, unless fewer samples than that are allowed in one.
const WINDOWS: u64 = 100;

/// What one event may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateLimit {
    window: u64,
    share: u64,
}

impl RateLimit {
    /// `most` samples a second; not zero.
    pub(crate) fn new(most: u32) -> Self {
        let most = u64::from(most.max(1));
        let windows = WINDOWS.min(most);
        Self {
            window: NANOS_PER_SECOND / windows,
            share: most / windows,
        }
    }
}

/// What becomes of an overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It makes a record.
    Within,
    /// It makes a record, the last one of this window.
    Last,
    /// It makes none.
    Throttled,
}

/// How much of its share an event has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Throttle {
    window: u64,
    used: u64,
    closed: bool,
}

impl Throttle {
    /// An overflow at `time`, in guest nanoseconds.
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

    /// As [`Throttle::admit`], but only for an overflow that is [`Verdict::Within`]; whether it is. Else
    /// nothing has changed.
    pub(crate) fn admit_within(&mut self, limit: RateLimit, time: u64) -> bool {
        let mut after = *self;
        let within = after.admit(limit, time) == Verdict::Within;
        if within {
            *self = after;
        }
        within
    }

    /// Whether overflows make no records until [`Throttle::unthrottle`].
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// At `time`: whether a later window than the one that was used up has just been found.
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
    fn a_share_in_each_window() {
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
    fn few_samples_a_second_have_longer_windows() {
        let limit = RateLimit::new(1);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(limit, 5), Verdict::Last);
        assert!(!throttle.unthrottle(limit, NANOS_PER_SECOND - 1));
        assert!(throttle.unthrottle(limit, NANOS_PER_SECOND));
    }

    #[test]
    fn time_that_goes_back_opens_no_window() {
        let limit = RateLimit::new(100);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(limit, 50_000_000), Verdict::Last);
        assert!(!throttle.unthrottle(limit, 0));
        assert_eq!(throttle.admit(limit, 0), Verdict::Throttled);
    }
}
