//! Converts guest TSC ticks to guest nanoseconds. The device reports the parameters of this conversion in its
//! configuration space and in every metadata page.

/// Largest shift that the device reports. Programs convert with 64-bit arithmetic, in which the product of `mult` and
/// a number below `1 << shift` must not overflow.
const MAX_SHIFT: u16 = 31;
const NANOS_PER_MILLI: u64 = 1_000_000;

/// `nanoseconds = (ticks * mult) >> shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Clock {
    pub(crate) mult: u32,
    pub(crate) shift: u16,
}

impl Clock {
    /// Returns the conversion with the highest resolution for a TSC frequency of `khz`. `None` if `khz` is zero.
    pub(crate) fn new(khz: u32) -> Option<Self> {
        if khz == 0 {
            return None;
        }
        (0..=MAX_SHIFT).rev().find_map(|shift| {
            let mult = (NANOS_PER_MILLI << shift) / u64::from(khz);
            u32::try_from(mult).ok().filter(|&mult| mult > 0).map(|mult| Self { mult, shift })
        })
    }

    /// Converts `ticks` to nanoseconds, modulo 2^64.
    pub(crate) fn nanoseconds(self, ticks: u64) -> u64 {
        let nanoseconds = (u128::from(ticks) * u128::from(self.mult)) >> self.shift;
        // The product of `ticks` and `mult` has up to 96 bits. Keep the low 64 bits of the shifted result, so that the
        // time wraps like any 64-bit clock.
        let [low, _] = zerocopy::transmute!(nanoseconds.to_le_bytes());
        u64::from_le_bytes(low)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stopped_tsc_has_no_clock() {
        assert_eq!(Clock::new(0), None);
    }

    #[test]
    fn one_gigahertz_converts_one_to_one() {
        let clock = Clock::new(1_000_000).expect("ticks");
        assert_eq!(clock.nanoseconds(123_456_789_012_345), 123_456_789_012_345);
    }

    proptest! {
        #[test]
        fn conversion_is_within_a_millionth_and_monotonic(khz in 1_u32..20_000_000, ticks in 0_u64..1 << 56, more in 0_u64..1 << 40) {
            let clock = Clock::new(khz).expect("ticks");
            let exact = u128::from(ticks) * u128::from(NANOS_PER_MILLI) / u128::from(khz);
            prop_assume!(exact < 1 << 63);
            let got = u128::from(clock.nanoseconds(ticks));
            prop_assert!(got <= exact);
            prop_assert!(exact - got <= exact / 1_000_000 + 1, "{exact} {got}");
            prop_assert!(clock.nanoseconds(ticks + more) >= clock.nanoseconds(ticks));
        }

        #[test]
        fn conversion_in_64_bits_agrees(khz in 1000_u32..20_000_000, ticks in 0_u64..1 << 50) {
            let clock = Clock::new(khz).expect("ticks");
            let (mult, shift) = (u64::from(clock.mult), u32::from(clock.shift));
            let (whole, rest) = (ticks >> shift, ticks & ((1 << shift) - 1));
            prop_assert_eq!(clock.nanoseconds(ticks), whole * mult + ((rest * mult) >> shift));
        }
    }
}
