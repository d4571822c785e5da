//! What counts: the host's clock and its perf events, behind a trait so that tests have exact
//! ones.

use std::fmt::Debug;

/// The host's clock and what it can count on a vCPU's thread.
pub trait Source: Send + Debug {
    /// The host's time stamp counter now.
    fn tsc(&self) -> u64;
}
