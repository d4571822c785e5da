//! Permissions for calls to the driver: perf's rules, capabilities, and the limit on events for users without
//! `CAP_PERFMON`.

tests::group!("permissions");
