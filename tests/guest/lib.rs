//! The console lines with which `guest-tests` reports to the tests on the host, which parse them.

pub mod figures;
pub mod rows;
pub mod wire;
