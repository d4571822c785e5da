//! Shared code of the guest tests: boots one guest per group of tests, and reads its verdicts.
//!
//! This code uses only the programs that users run. It does not use internals of the device or the VMM.

pub mod boots;
pub mod guest;
pub mod host;
pub mod micro;
pub mod program;
mod slowest;

// For the macros of this crate.
#[doc(hidden)]
pub use linkme;
