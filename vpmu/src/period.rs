//! When an event that the device itself counts overflows.

/// A period and how much of it is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Period {
    length: u64,
    left: u64,
}

impl Period {
    /// A full period; `length` is not zero.
    pub(crate) fn new(length: u64) -> Self {
        let length = length.max(1);
        Self {
            length,
            left: length,
        }
    }

    pub(crate) fn length(self) -> u64 {
        self.length
    }

    /// The count grows by `more`; how many periods that completes.
    pub(crate) fn grow(&mut self, more: u64) -> u64 {
        if more < self.left {
            self.left -= more;
            return 0;
        }
        let beyond = more - self.left;
        self.left = self.length - beyond % self.length;
        1 + beyond / self.length
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn n_over_p_whatever_the_steps(length in 1_u64..50, steps in prop::collection::vec(0_u64..200, 0..50)) {
            let mut period = Period::new(length);
            let overflows: u64 = steps.iter().map(|&step| period.grow(step)).sum();
            prop_assert_eq!(overflows, steps.iter().sum::<u64>() / length);
        }

        #[test]
        fn the_largest_numbers_do_not_wrap(length in 1_u64.., more in 0_u64..) {
            let mut period = Period::new(length);
            prop_assert_eq!(period.grow(more), more / length);
        }
    }
}
