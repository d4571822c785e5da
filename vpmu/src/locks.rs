//! The device's locks, and the order in which a thread takes them.
//!
//! | lock | protects | taken by |
//! |---|---|---|
//! | `CONTROL` | ids, names, rings' owners, window, control queue | control requests, the operator, cross-vCPU links |
//! | `SHARD` | one vCPU's events, host counters and queue | that vCPU's thread; the drain; requests about its events |
//! | `SINK` | one ring and its AUX area | a thread that writes a record or packet |
//! | `NOTICES` | pending notices, event queue | a thread that adds or delivers notices |
//! | `DRAIN` | number of shards that need draining | a thread that changes whether a shard needs draining |
//! | `WINDOW` | allocated pages of the window | control requests and the operator, for a ring in the window |
//!
//! The gate of [`crate::flush`] is locked only while no other lock is held. A thread takes locks in the order of the
//! table, from top to bottom, and never holds two locks of the same kind. A thread that needs two shards unlocks the
//! first before it locks the second. If events must not move between these shards in the meantime, the thread holds
//! `CONTROL` throughout. Debug builds check each acquisition.

use std::fmt::{self, Debug, Formatter};
use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError};

use parking_lot::{Mutex, MutexGuard};

/// Rank of the control plane's lock.
pub(crate) const CONTROL: u8 = 0;
/// Rank of a shard's lock.
pub(crate) const SHARD: u8 = 1;
/// Rank of a sink's lock.
pub(crate) const SINK: u8 = 2;
/// Rank of the notices' lock.
pub(crate) const NOTICES: u8 = 3;
/// Rank of the drain count's lock.
pub(crate) const DRAIN: u8 = 4;
/// Rank of the lock of the window's allocated pages.
pub(crate) const WINDOW: u8 = 5;

/// A mutex that has a rank in the lock order.
pub(crate) struct Lock<T, const RANK: u8>(Mutex<T>);

/// A lock held by this thread.
pub(crate) struct Held<'a, T, const RANK: u8> {
    guard: MutexGuard<'a, T>,
    _rank: order::Taken<RANK>,
}

impl<T, const RANK: u8> Lock<T, RANK> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits for the lock. From time to time, the mutex is handed to the thread that has waited longest, so a vCPU that
    /// retakes its own shard in a loop cannot starve other threads. A panic does not poison the lock: a half-done
    /// change cannot make the data unsafe to use, and can affect only the guest that caused the panic.
    ///
    /// # Panics
    /// Panics in debug builds if this thread already holds a lock of this rank or of a later rank.
    pub(crate) fn lock(&self) -> Held<'_, T, RANK> {
        let _rank = order::Taken::new();
        Held { guard: self.0.lock(), _rank }
    }
}

/// A mutex of rank [`CONTROL`] for which a thread waits as long as one other thread holds it, and no longer: a thread
/// that unlocks it and takes it again at once comes after a thread that waits. A thread that waits sleeps, because to
/// yield its processor, as [`Lock`] does first, takes milliseconds on a busy host.
pub(crate) struct FairLock<T> {
    /// Held by the thread that is the next to hold `value`, until it does.
    next: sync::Mutex<()>,
    value: sync::Mutex<T>,
}

/// A fair lock held by this thread.
pub(crate) struct HeldFairly<'a, T> {
    guard: sync::MutexGuard<'a, T>,
    _rank: order::Taken<CONTROL>,
}

impl<T> FairLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { next: sync::Mutex::new(()), value: sync::Mutex::new(value) }
    }

    /// Waits for the lock. A panic does not poison it, as with [`Lock::lock`].
    ///
    /// # Panics
    /// Panics in debug builds if this thread already holds a lock.
    pub(crate) fn lock(&self) -> HeldFairly<'_, T> {
        let _rank = order::Taken::new();
        let _next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        HeldFairly { guard: self.value.lock().unwrap_or_else(PoisonError::into_inner), _rank }
    }
}

impl<T> Debug for FairLock<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FairLock").finish()
    }
}

impl<T> Deref for HeldFairly<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for HeldFairly<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T, const RANK: u8> Debug for Lock<T, RANK> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // Print only the rank. To print the content, this thread would need the lock, which it may already hold.
        f.debug_tuple("Lock").field(&RANK).finish()
    }
}

impl<T, const RANK: u8> Deref for Held<'_, T, RANK> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T, const RANK: u8> DerefMut for Held<'_, T, RANK> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(debug_assertions)]
mod order {
    use std::cell::Cell;

    thread_local! {
        /// One bit for each rank. A bit is set while this thread holds a lock of that rank.
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    /// A guard. While it exists, this thread holds a lock of this rank.
    pub(super) struct Taken<const RANK: u8>;

    impl<const RANK: u8> Taken<RANK> {
        pub(super) fn new() -> Self {
            HELD.with(|held| {
                let ranks = held.get();
                assert!(ranks >> RANK == 0, "lock order: rank {RANK} taken while ranks {ranks:#b} are held");
                held.set(ranks | 1 << RANK);
            });
            Self
        }
    }

    impl<const RANK: u8> Drop for Taken<RANK> {
        fn drop(&mut self) {
            HELD.with(|held| held.set(held.get() & !(1 << RANK)));
        }
    }
}

#[cfg(not(debug_assertions))]
mod order {
    /// Empty: release builds do not check.
    pub(super) struct Taken<const RANK: u8>;

    impl<const RANK: u8> Taken<RANK> {
        pub(super) fn new() -> Self {
            Self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By chance, an unfair lock sometimes goes to the thread that waits, so there are many rounds.
    #[test]
    fn fair_lock_goes_to_the_thread_that_waits() {
        for _ in 0..100 {
            let lock = FairLock::new(Vec::new());
            let (send, receive) = std::sync::mpsc::channel();
            let held = lock.lock();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    send.send(std::fs::read_link("/proc/thread-self").expect("a thread")).expect("a receiver");
                    lock.lock().push("waits");
                });
                let status = std::path::Path::new("/proc").join(receive.recv().expect("a thread")).join("status");
                // The other thread sleeps only in order to wait for the lock.
                while !std::fs::read_to_string(&status).expect("a thread").contains("State:\tS") {
                    std::thread::yield_now();
                }
                drop(held);
                lock.lock().push("retakes");
            });
            assert_eq!(*lock.lock(), ["waits", "retakes"]);
        }
    }

    #[test]
    fn locks_in_order_are_taken() {
        let (control, shard, sink) = (FairLock::new(1), Lock::<_, SHARD>::new(2), Lock::<_, SINK>::new(3));
        let one = control.lock();
        let two = shard.lock();
        assert_eq!(*one + *two + *sink.lock(), 6);
        drop(one);
        drop(two);
        assert_eq!(*control.lock(), 1);
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "lock order"))]
    fn second_shard_under_a_shard_is_refused() {
        let shards = [Lock::<_, SHARD>::new(1), Lock::<_, SHARD>::new(2)];
        let first = shards[0].lock();
        let second = shards[1].lock();
        assert_eq!(*first + *second, 3);
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "lock order"))]
    fn control_under_a_sink_is_refused() {
        let (control, sink) = (FairLock::new(1), Lock::<_, SINK>::new(2));
        let sink = sink.lock();
        assert_eq!(*control.lock() + *sink, 3);
    }
}
