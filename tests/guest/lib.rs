//! The console lines in which `guest-tests` reports to the tests on the host, which parse them; and what needs no guest
//! to be tested: the search of a kernel's log.

pub mod faults;
pub mod figures;
pub mod rows;
pub mod wire;
