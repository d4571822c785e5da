//! Flushes that wait for vCPUs: a flush makes a vCPU leave the guest that may hold samples, and waits
//! for the exit to be handled.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Flushes that wait, and vCPUs that pass.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    waiting: AtomicUsize,
    /// Held alone, and last: see [`crate::locks`].
    gate: Mutex<()>,
    left: Condvar,
}

/// A vCPU in the guest, and which of its visits there it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Visit {
    pub(crate) vcpu: u32,
    pub(crate) number: u64,
}

/// A flush that waits, counted as long as it lives.
#[derive(Debug)]
pub(crate) struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Flushes {
    /// A flush begins to look for vCPUs in the guest.
    pub(crate) fn begin(&self) -> Waiting<'_> {
        // Sequentially consistent, as a vCPU's entry and exit are: either the vCPU sees that someone
        // waits, or who waits sees where the vCPU is.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(&self.waiting)
    }

    /// Whether anyone waits.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// A vCPU has left, and its exit is handled: waiting flushes look.
    pub(crate) fn vcpu_left(&self) {
        if self.is_waiting() {
            // Under the gate, or a flush between its check and its wait misses it.
            let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            self.left.notify_all();
            drop(gate);
        }
    }

    /// Waits until `over` holds, which vCPUs make true as they leave.
    pub(crate) fn wait(&self, over: impl Fn() -> bool) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        while !over() {
            let left = self.left.wait(gate);
            gate = left.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
