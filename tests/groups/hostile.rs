//! Attacks on the machine by an unprivileged guest program. `tests/hostile.rs` contains attacks by the guest's kernel.

tests::group!("hostile");
