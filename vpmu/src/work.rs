//! The cost of a guest's requests: operations, and calls to the [`Source`](crate::source::Source) of counters. They are
//! counted on the thread that executes the requests. The limits apply to this work, not to the number of requests,
//! because one request can affect many events.
//!
//! The counts are per thread, because one request can use several shards and the source, but always runs on one
//! thread.

use std::cell::Cell;
use std::ops::{Add, Sub};

/// A turn ends after the request or command that reaches this number of operations. With the default limit on open
/// events, one turn is enough to schedule all events in and out.
const TURN_OPERATIONS: u64 = 4096;
/// A turn ends after the request or command that reaches this number of calls to the source.
const TURN_HOST_CALLS: u64 = 512;

/// Number of list entries that the device examines at the cost of one operation.
const EXAMINED_PER_OPERATION: u64 = 8;
/// Number of page addresses that the device checks at the cost of one operation.
const PAGES_PER_OPERATION: u64 = 4;
/// Number of bytes of a request that the device copies at the cost of one operation.
const BYTES_PER_OPERATION: u64 = 1024;

thread_local! {
    static OPERATIONS: Cell<u64> = const { Cell::new(0) };
    static HOST_CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The work of one thread, either since the thread started or between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Work {
    /// Number of operations. Each of these is one operation: a start, stop or read of an event; an occurrence that the
    /// device counts for an event; a record written for an event; a lookup of a host counter's records; a request; a
    /// command; a descriptor of a buffer of requests or commands; a page of the window that is zeroed; and each time
    /// that the device locks the events of a vCPU. Checking a page address, copying a byte of a request, and examining
    /// an event or another entry of a list cost less: several of them together count as one operation.
    pub operations: u64,
    /// Number of calls to the [`Source`](crate::source::Source) that open, start, stop, read or change counters.
    pub host_calls: u64,
}

impl Work {
    /// Returns the work that the calling thread has done so far.
    pub(crate) fn so_far() -> Self {
        Self { operations: OPERATIONS.get(), host_calls: HOST_CALLS.get() }
    }

    /// Returns the work that the calling thread has done since `self`.
    pub(crate) fn since(self) -> Self {
        Self::so_far() - self
    }

    /// Whether this work fills a turn. If so, the remaining requests must wait until the caller has done its other
    /// pending work.
    pub(crate) fn fills_a_turn(self) -> bool {
        self.operations >= TURN_OPERATIONS || self.host_calls >= TURN_HOST_CALLS
    }

    /// The sum, saturating.
    #[must_use]
    pub(crate) fn saturating_add(self, more: Self) -> Self {
        Self {
            operations: self.operations.saturating_add(more.operations),
            host_calls: self.host_calls.saturating_add(more.host_calls),
        }
    }

    /// Returns the larger of the two values for each field.
    #[must_use]
    pub(crate) fn max(self, other: Self) -> Self {
        Self { operations: self.operations.max(other.operations), host_calls: self.host_calls.max(other.host_calls) }
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            operations: self.operations.wrapping_add(more.operations),
            host_calls: self.host_calls.wrapping_add(more.host_calls),
        }
    }
}

impl Sub for Work {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            operations: self.operations.wrapping_sub(earlier.operations),
            host_calls: self.host_calls.wrapping_sub(earlier.host_calls),
        }
    }
}

/// Charges operations to the calling thread.
pub(crate) fn charge(operations: u64) {
    OPERATIONS.set(OPERATIONS.get().wrapping_add(operations));
}

/// Charges the examination of `entries` entries of a list whose length the guest controls. If a list is examined in
/// more than one place, charge in the function that returns the list, so that no caller can omit the charge.
pub(crate) fn charge_examined(entries: usize) {
    charge(entries as u64 / EXAMINED_PER_OPERATION);
}

/// Charges the check of `pages` page addresses.
pub(crate) fn charge_pages(pages: usize) {
    charge(pages as u64 / PAGES_PER_OPERATION);
}

/// Charges the copy of `bytes` bytes of a request.
pub(crate) fn charge_copied(bytes: usize) {
    charge(bytes as u64 / BYTES_PER_OPERATION);
}

/// Charges a call to the source to the calling thread.
pub(crate) fn charge_host_call() {
    HOST_CALLS.set(HOST_CALLS.get().wrapping_add(1));
}

/// Whether a notification has been served completely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Turn {
    /// Nothing is left.
    Done,
    /// The turn's budget is used up, but work remains. Do other pending work first, then continue.
    Unfinished,
}
