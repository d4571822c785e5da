//! perf's rules for overflows, for events of both interfaces and of the kernel itself. `guest-tests overflows` prints them
//! as a table.

tests::group!("overflows");
