//! How often an event may make samples: a share in each window of guest time, so that no guest
//! makes its host write records without end.

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Windows of a second, unless fewer samples than that are allowed in one.
const WINDOWS: u64 = 100;

/// What one event may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    window: u64,
    share: u64,
}

impl Allowance {
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
    Beyond,
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
    pub(crate) fn admit(&mut self, allowance: Allowance, time: u64) -> Verdict {
        let window = time / allowance.window;
        if window > self.window {
            self.window = window;
            self.used = 0;
        }
        if self.closed {
            return Verdict::Beyond;
        }
        self.used += 1;
        if self.used < allowance.share {
            return Verdict::Within;
        }
        self.closed = true;
        Verdict::Last
    }

    /// Whether overflows make no records until [`Throttle::lift`].
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// At `time`: whether a later window than the one that was used up has just been found.
    pub(crate) fn lift(&mut self, allowance: Allowance, time: u64) -> bool {
        let over = self.closed && time / allowance.window > self.window;
        self.closed &= !over;
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_in_each_window() {
        let allowance = Allowance::new(300);
        let mut throttle = Throttle::default();
        let at = |time: u64| 70_000_000 + time;
        assert_eq!(throttle.admit(allowance, at(0)), Verdict::Within);
        assert_eq!(throttle.admit(allowance, at(1)), Verdict::Within);
        assert_eq!(throttle.admit(allowance, at(2)), Verdict::Last);
        assert_eq!(throttle.admit(allowance, at(3)), Verdict::Beyond);
        assert!(throttle.is_closed() && !throttle.lift(allowance, at(9_999_999)));
        assert!(throttle.lift(allowance, at(10_000_000)));
        assert!(!throttle.lift(allowance, at(20_000_000)), "once");
        assert_eq!(throttle.admit(allowance, at(10_000_001)), Verdict::Within);
        assert_eq!(throttle.admit(allowance, at(20_000_001)), Verdict::Within);
        assert_eq!(throttle.admit(allowance, at(20_000_002)), Verdict::Within);
        assert_eq!(throttle.admit(allowance, at(20_000_003)), Verdict::Last);
    }

    #[test]
    fn few_samples_a_second_have_longer_windows() {
        let allowance = Allowance::new(1);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(allowance, 5), Verdict::Last);
        assert!(!throttle.lift(allowance, NANOS_PER_SECOND - 1));
        assert!(throttle.lift(allowance, NANOS_PER_SECOND));
    }

    #[test]
    fn time_that_goes_back_opens_no_window() {
        let allowance = Allowance::new(100);
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(allowance, 50_000_000), Verdict::Last);
        assert!(!throttle.lift(allowance, 0));
        assert_eq!(throttle.admit(allowance, 0), Verdict::Beyond);
    }
}
