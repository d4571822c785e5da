//! The console lines in which `guest-tests` reports to the tests on the host. These tests parse the lines.

pub mod figures;
pub mod rows;
pub mod wire;
