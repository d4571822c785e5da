//! Overflows of many host rings on their way to guest rings: in the order of time, whatever ring
//! they came from. Knows nothing of events but their ids.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::machine::GuestRegs;

/// One overflow of the guest's, as the host recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// The event that overflowed.
    pub(crate) event: u64,
    /// On which vCPU.
    pub(crate) vcpu: u32,
    /// The guest's TSC at that moment.
    pub(crate) tsc: u64,
    pub(crate) regs: GuestRegs,
    pub(crate) period: u64,
}

/// Overflows that have been taken from the host and not been written yet.
#[derive(Debug)]
pub(crate) struct Merge {
    held: BinaryHeap<Entry>,
    /// Overflows added so far: those of one moment keep their order.
    added: u64,
    /// The newest overflow of each vCPU that was given out.
    newest: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    number: u64,
    found: Found,
}

impl Ord for Entry {
    /// The oldest is the greatest: the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |entry: &Self| (entry.found.tsc, entry.number);
        key(other).cmp(&key(self))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Merge {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            held: BinaryHeap::new(),
            added: 0,
            newest: vec![0; vcpus],
        }
    }

    pub(crate) fn add(&mut self, found: Found) {
        let number = self.added;
        self.added += 1;
        self.held.push(Entry { number, found });
    }

    /// The oldest overflow, if it is no newer than `until`.
    pub(crate) fn next(&mut self, until: u64) -> Option<Found> {
        if self.held.peek()?.found.tsc > until {
            return None;
        }
        let mut found = self.held.pop()?.found;
        // The host's clock is converted anew at each drain: never so that a vCPU's time goes back.
        let newest = &mut self.newest[found.vcpu as usize];
        *newest = found.tsc.max(*newest);
        found.tsc = *newest;
        Some(found)
    }

    /// Forgets the overflows of an event.
    pub(crate) fn forget(&mut self, event: u64) {
        self.held.retain(|entry| entry.found.event != event);
    }

    /// Overflows that wait.
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

    fn found(event: u64, vcpu: u32, tsc: u64) -> Found {
        Found {
            event,
            vcpu,
            tsc,
            regs: GuestRegs { ip: 1, user: true },
            period: 1,
        }
    }

    fn all(merge: &mut Merge, until: u64) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| merge.next(until))
            .map(|found| (found.tsc, found.event))
            .collect()
    }

    #[test]
    fn the_newest_wait() {
        let mut merge = Merge::new(2);
        for (event, vcpu, tsc) in [(1, 0, 30), (1, 0, 50), (2, 1, 20), (2, 1, 40)] {
            merge.add(found(event, vcpu, tsc));
        }
        assert_eq!(all(&mut merge, 40), [(20, 2), (30, 1), (40, 2)]);
        assert!(!merge.is_empty());
        merge.add(found(3, 1, 45));
        merge.forget(1);
        assert_eq!(all(&mut merge, u64::MAX), [(45, 3)]);
        assert!(merge.is_empty());
    }

    #[test]
    fn time_does_not_go_back_on_a_vcpu() {
        let mut merge = Merge::new(2);
        merge.add(found(1, 0, 100));
        assert_eq!(all(&mut merge, 100), [(100, 1)]);
        merge.add(found(2, 0, 99));
        merge.add(found(3, 1, 98));
        assert_eq!(all(&mut merge, 100), [(98, 3), (100, 2)]);
    }

    proptest! {
        #[test]
        fn everything_comes_out_once_and_in_order(
            rounds in prop::collection::vec(
                (prop::collection::vec((0_u64..4, 0_u32..3, 0_u64..100), 0..20), 0_u64..120),
                0..10,
            ),
        ) {
            let mut merge = Merge::new(3);
            let mut given = Vec::new();
            let mut number = 0;
            let mut added = Vec::new();
            let mut now = 0;
            for (round, until) in rounds {
                for (event, vcpu, tsc) in round {
                    // As the host does: nothing comes that is older than what was given out.
                    added.push((event, number));
                    merge.add(Found { period: number, ..found(event, vcpu, now + tsc) });
                    number += 1;
                }
                let from = given.len();
                given.extend(std::iter::from_fn(|| merge.next(now + until)));
                prop_assert!(given[from..].iter().all(|found: &Found| found.tsc <= now + until));
                now += until;
            }
            given.extend(std::iter::from_fn(|| merge.next(u64::MAX)));
            prop_assert!(given.is_sorted_by_key(|found| found.tsc));
            // Those of one moment as they came.
            prop_assert!(given.windows(2).all(|two| two[0].tsc != two[1].tsc
                || two[0].vcpu != two[1].vcpu
                || two[0].period < two[1].period));
            let mut out: Vec<_> = given.iter().map(|found| (found.event, found.period)).collect();
            out.sort_unstable_by_key(|&(_, number)| number);
            prop_assert_eq!(out, added);
        }
    }
}
