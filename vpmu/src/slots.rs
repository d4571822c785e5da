//! Limits the host counters that sample on one vCPU for the guest. Each such counter may interrupt its host CPU in
//! hard-IRQ context, and lengthens each context switch of the vCPU's thread. Therefore, both the number of
//! these counters and the sum of their known rates are limited. An event that would exceed a limit waits: its enabled
//! time advances, but its count does not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Limits on the counters that run on one vCPU at the same time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunLimit {
    pub(crate) counters: u32,
    /// Total interrupts per second of all counters with a known rate.
    pub(crate) rate: u64,
}

impl RunLimit {
    /// Returns whether a counter with `rate` stays within the limit if the other counters have the total rate `others`.
    /// A counter always fits if its rate is unknown (zero). It also fits if `others` is zero, because its rate was
    /// checked when its event was opened.
    fn fits(self, others: u64, rate: u64) -> bool {
        others == 0 || rate == 0 || others.saturating_add(rate) <= self.rate
    }
}

/// Tracks the sampling counters that run on one vCPU.
#[derive(Debug, Default)]
pub(crate) struct RunSlots(Arc<Used>);

/// The number of slots in use, and their total rate. Only the thread that holds the shard's lock takes slots and
/// changes rates, but any thread may drop a slot. Between a check and the update that follows it, `counters` and
/// `rate` can therefore only decrease, so granting a slot never exceeds a limit. A drop decreases both fields first
/// and then sets `freed` with release semantics, so a thread that finds `freed` set also finds the lower values.
#[derive(Debug, Default)]
struct Used {
    counters: AtomicU32,
    rate: AtomicU64,
    /// Whether waiting counters may be able to start because of a change since the last [`RunSlots::take_freed`].
    freed: AtomicBool,
}

/// The slot of a running counter. It is freed when this value is dropped.
#[derive(Debug)]
pub(crate) struct RunSlot {
    used: Arc<Used>,
    rate: u64,
}

impl RunSlots {
    /// Takes a slot for a counter with `rate` interrupts per second (zero if unknown). Returns `None` if the counter
    /// would exceed `limit`.
    pub(crate) fn take(&self, limit: RunLimit, rate: u64) -> Option<RunSlot> {
        let used = &self.0;
        let counters = used.counters.load(Ordering::Relaxed);
        let rates = used.rate.load(Ordering::Relaxed);
        if counters >= limit.counters || !limit.fits(rates, rate) {
            return None;
        }
        used.counters.fetch_add(1, Ordering::Relaxed);
        used.rate.fetch_add(rate, Ordering::Relaxed);
        Some(RunSlot { used: Arc::clone(used), rate })
    }

    /// Returns whether a slot was freed, a rate was lowered or [`RunSlots::look_again`] was called since the last call.
    pub(crate) fn take_freed(&self) -> bool {
        self.0.freed.swap(false, Ordering::Acquire)
    }

    /// Makes the next [`RunSlots::take_freed`] return true. Called when the rate of a waiting counter changes, because
    /// a lower rate may fit.
    pub(crate) fn look_again(&self) {
        self.0.freed.store(true, Ordering::Relaxed);
    }
}

impl RunSlot {
    /// Changes the counter's rate if the new rate fits. Returns whether it fits.
    pub(crate) fn change(&mut self, limit: RunLimit, rate: u64) -> bool {
        let others = self.used.rate.load(Ordering::Relaxed) - self.rate;
        let fits = limit.fits(others, rate);
        if fits {
            let freed = rate < self.rate;
            self.used.rate.fetch_add(rate, Ordering::Relaxed);
            self.used.rate.fetch_sub(self.rate, Ordering::Relaxed);
            self.used.freed.fetch_or(freed, Ordering::Release);
            self.rate = rate;
        }
        fits
    }
}

impl Drop for RunSlot {
    fn drop(&mut self) {
        self.used.counters.fetch_sub(1, Ordering::Relaxed);
        self.used.rate.fetch_sub(self.rate, Ordering::Relaxed);
        self.used.freed.store(true, Ordering::Release);
    }
}

/// Limits the total number of host counters that the guest's sampling events hold open on all vCPUs.
#[derive(Debug)]
pub(crate) struct CounterPool {
    open: Arc<AtomicU32>,
    most: u32,
    /// The highest number of counters that were open at the same time.
    peak: AtomicU32,
}

/// The slot of an open counter in the pool. It is freed when this value is dropped.
#[derive(Debug)]
pub(crate) struct OpenSlot(Arc<AtomicU32>);

impl CounterPool {
    pub(crate) fn new(most: u32) -> Self {
        Self { open: Arc::default(), most, peak: AtomicU32::new(0) }
    }

    /// Takes a slot, if one is left.
    pub(crate) fn take(&self) -> Option<OpenSlot> {
        let one_more = |open: u32| (open < self.most).then_some(open + 1);
        let taken = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        let before = taken.ok()?;
        self.peak.fetch_max(before + 1, Ordering::Relaxed);
        Some(OpenSlot(Arc::clone(&self.open)))
    }

    /// The highest number of counters that were open at the same time.
    pub(crate) fn peak(&self) -> u32 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for OpenSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const LIMIT: RunLimit = RunLimit { counters: 3, rate: 1000 };

    #[test]
    fn counters_beyond_the_limit_find_no_slot() {
        let slots = RunSlots::default();
        let mut taken: Vec<_> = (0..3).filter_map(|_| slots.take(LIMIT, 0)).collect();
        assert_eq!(taken.len(), 3);
        assert!(slots.take(LIMIT, 0).is_none());
        assert!(!slots.take_freed());
        taken.pop();
        assert!(slots.take_freed() && !slots.take_freed());
        assert!(slots.take(LIMIT, 0).is_some());
    }

    #[test]
    fn clocks_share_the_rate() {
        let slots = RunSlots::default();
        let mut first = slots.take(LIMIT, 600).expect("a slot");
        assert!(slots.take(LIMIT, 401).is_none());
        let second = slots.take(LIMIT, 400).expect("a slot");
        assert!(!first.change(LIMIT, 601));
        assert!(first.change(LIMIT, 100) && slots.take_freed());
        drop(second);
        assert!(first.change(LIMIT, 1000));
    }

    #[test]
    fn clock_alone_gets_a_slot_whatever_its_rate() {
        let slots = RunSlots::default();
        let mut slot = slots.take(LIMIT, u64::MAX).expect("a slot");
        assert!(slots.take(LIMIT, 1).is_none());
        assert!(slot.change(LIMIT, 5000) && slot.change(LIMIT, 1));
        assert!(slots.take(LIMIT, 999).is_some());
    }

    #[test]
    fn counter_of_unknown_rate_gets_a_slot_beside_any_clock() {
        let slots = RunSlots::default();
        let _clock = slots.take(LIMIT, 5000).expect("a slot");
        let mut counter = slots.take(LIMIT, 0).expect("a slot");
        assert!(counter.change(LIMIT, 0) && !counter.change(LIMIT, 1));
    }

    #[test]
    fn slots_dropped_on_another_thread_are_freed() {
        const SLOTS: usize = 200_000;
        let limit = RunLimit { counters: u32::MAX, rate: u64::MAX };
        let slots = RunSlots::default();
        thread::scope(|scope| {
            let (sender, ended) = mpsc::sync_channel(64);
            scope.spawn(move || ended.into_iter().for_each(drop::<RunSlot>));
            for _ in 0..SLOTS {
                let mut slot = slots.take(limit, 3).expect("a slot");
                assert!(slot.change(limit, 5));
                sender.send(slot).expect("a receiver");
            }
        });
        assert_eq!(slots.0.counters.load(Ordering::Relaxed), 0);
        assert_eq!(slots.0.rate.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn pool_grants_slots_up_to_its_limit() {
        let pool = CounterPool::new(2);
        let slots = [pool.take(), pool.take(), pool.take()];
        assert!(slots[1].is_some() && slots[2].is_none());
        assert_eq!(pool.peak(), 2);
        drop(slots);
        assert!(pool.take().is_some());
        assert_eq!(pool.peak(), 2);
    }
}
