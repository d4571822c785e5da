//! Lets a flush wait for vCPUs. If a vCPU is in the guest and may have pending samples, the flush makes the
//! vCPU leave the guest, and waits until the exit is handled.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Counts the flushes that wait, and lets them wait for exits.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    waiting: AtomicUsize,
    /// This lock is taken only while no other lock is held (see [`crate::locks`]).
    gate: Mutex<()>,
    left: Condvar,
}

/// One stay of a vCPU in the guest: from the entry until the exit is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Visit {
    pub(crate) vcpu: u32,
    pub(crate) number: u64,
}

/// A waiting flush, counted while it lives.
#[derive(Debug)]
pub(crate) struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Flushes {
    /// Counts a flush as waiting until the returned value is dropped. Call this before the flush checks which
    /// vCPUs are in the guest.
    pub(crate) fn begin(&self) -> Waiting<'_> {
        // Sequentially consistent, like the stores that record a vCPU's entry and exit. Therefore, either the vCPU sees
        // the waiting flush, or the flush sees the vCPU's latest entry or exit.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(&self.waiting)
    }

    /// Whether any flush waits.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Notifies waiting flushes that a vCPU has left the guest and that its exit is handled.
    pub(crate) fn vcpu_left(&self) {
        if self.is_waiting() {
            // Notify while the gate is locked. Otherwise, a flush that is between its check and its wait would miss the
            // notification.
            let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            self.left.notify_all();
            drop(gate);
        }
    }

    /// Waits until `over` returns true. Calls `over` again each time a vCPU leaves the guest.
    pub(crate) fn wait(&self, over: impl Fn() -> bool) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        while !over() {
            let left = self.left.wait(gate);
            gate = left.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
