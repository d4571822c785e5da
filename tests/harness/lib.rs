//! The shared part of guest tests: one boot per group, and its verdicts.
//!
//! Uses the programs of a user, and no internals of the device or the machine.

pub mod boots;
pub mod figures;
pub mod guest;
pub mod host;
pub mod micro;
pub mod rows;
pub mod wire;
