//! Sorts the overflows that the host recorded while one vCPU ran. They are sorted by time before they are written to
//! guest rings. This module identifies events only by their ids.

use std::collections::VecDeque;

use crate::machine::GuestRegs;
use crate::source::Overflow;
use crate::work;

/// One overflow of the guest, from the host's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// The event that overflowed.
    pub(crate) event: u64,
    pub(crate) overflow: Overflow,
}

impl Recorded {
    /// The registers at the overflow, as far as the host recorded them.
    pub(crate) fn regs(&self) -> GuestRegs {
        GuestRegs::at(self.overflow.ip)
    }
}

/// Overflows that were taken from the host and have not been written yet.
///
/// Each host ring is sorted by time, so the held overflows consist of a few sorted runs. The sort finds these
/// runs and merges them.
#[derive(Debug, Default)]
pub(crate) struct Merge {
    held: VecDeque<Recorded>,
    /// Whether `held` is sorted by time.
    sorted: bool,
    /// The TSC of the latest overflow returned.
    newest: u64,
}

impl Merge {
    pub(crate) fn add(&mut self, recorded: Recorded) {
        self.sorted = false;
        self.held.push_back(recorded);
    }

    /// Takes the oldest overflow, if it is not later than `until`. Overflows with equal times are taken in
    /// the order in which they were added.
    pub(crate) fn next(&mut self, until: u64) -> Option<Recorded> {
        self.sort();
        self.held.front().filter(|recorded| recorded.overflow.tsc <= until)?;
        let mut recorded = self.held.pop_front()?;
        // Each drain recomputes the conversion of the host's clock, so a later record can get an earlier time. The
        // returned times must not decrease.
        self.newest = recorded.overflow.tsc.max(self.newest);
        recorded.overflow.tsc = self.newest;
        Some(recorded)
    }

    /// The overflows up to `until`, oldest first.
    pub(crate) fn due(&mut self, until: u64) -> impl Iterator<Item = &Recorded> {
        self.sort();
        self.held.iter().take_while(move |recorded| recorded.overflow.tsc <= until)
    }

    fn sort(&mut self) {
        if !self.sorted {
            let held = self.held.make_contiguous();
            held.sort_by_key(|recorded| recorded.overflow.tsc);
            self.sorted = true;
        }
    }

    /// Drops the overflows of an event.
    pub(crate) fn forget(&mut self, event: u64) {
        work::charge_examined(self.held.len());
        self.held.retain(|recorded| recorded.event != event);
    }

    /// Number of held overflows.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::source::Mode;

    fn recorded(event: u64, tsc: u64) -> Recorded {
        Recorded { event, overflow: Overflow { tsc, ip: 1, mode: Mode::Guest, period: 1 } }
    }

    fn all(merge: &mut Merge, until: u64) -> Vec<(u64, u64)> {
        let due: Vec<_> = merge.due(until).copied().collect();
        let taken: Vec<_> = std::iter::from_fn(|| merge.next(until)).collect();
        assert_eq!(due.len(), taken.len());
        taken.iter().map(|one| (one.overflow.tsc, one.event)).collect()
    }

    #[test]
    fn newest_overflows_wait() {
        let mut merge = Merge::default();
        for (event, tsc) in [(1, 30), (1, 50), (2, 20), (2, 40)] {
            merge.add(recorded(event, tsc));
        }
        assert_eq!(all(&mut merge, 40), [(20, 2), (30, 1), (40, 2)]);
        assert!(!merge.is_empty());
        merge.add(recorded(3, 45));
        merge.forget(1);
        assert_eq!(all(&mut merge, u64::MAX), [(45, 3)]);
        assert!(merge.is_empty());
    }

    #[test]
    fn time_does_not_go_back() {
        let mut merge = Merge::default();
        merge.add(recorded(1, 100));
        assert_eq!(all(&mut merge, 100), [(100, 1)]);
        merge.add(recorded(2, 99));
        assert_eq!(all(&mut merge, 100), [(100, 2)]);
    }

    proptest! {
        #[test]
        fn overflows_come_out_once_and_in_order(
            rounds in prop::collection::vec(
                (prop::collection::vec((0_u64..4, 0_u64..100), 0..20), 0_u64..120),
                0..10,
            ),
        ) {
            let mut merge = Merge::default();
            let mut given = Vec::new();
            let mut number = 0;
            let mut added = Vec::new();
            let mut now = 0;
            for (round, until) in rounds {
                for (event, tsc) in round {
                    // Like a host, this test adds no overflow that is older than those already returned.
                    added.push((event, number));
                    let mut numbered = recorded(event, now + tsc);
                    numbered.overflow.period = number;
                    merge.add(numbered);
                    number += 1;
                }
                let from = given.len();
                given.extend(std::iter::from_fn(|| merge.next(now + until)));
                prop_assert!(given[from..].iter().all(|one: &Recorded| one.overflow.tsc <= now + until));
                now += until;
            }
            given.extend(std::iter::from_fn(|| merge.next(u64::MAX)));
            prop_assert!(given.is_sorted_by_key(|one| one.overflow.tsc));
            // Overflows with equal times come out in the order in which they were added.
            prop_assert!(given.windows(2).all(|two| two[0].overflow.tsc != two[1].overflow.tsc
                || two[0].overflow.period < two[1].overflow.period));
            let mut out: Vec<_> = given.iter().map(|one| (one.event, one.overflow.period)).collect();
            out.sort_unstable_by_key(|&(_, number)| number);
            prop_assert_eq!(out, added);
        }
    }
}
