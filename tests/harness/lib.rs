//! What every guest test shares: one boot for each group, and the verdicts that it tells.
//!
//! Knows the programs that a user has, and no internals of the device or the machine.

pub mod figures;
pub mod guest;
pub mod host;
pub mod micro;
pub mod rows;
pub mod wire;
