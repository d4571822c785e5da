//! Checks whether perf lets a thread read tracepoint data. The check applies the kernel's rules and does not open an
//! event.

use std::fs;

use crate::host::sys;

const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
/// `CAP_SYS_ADMIN` and `CAP_PERFMON`.
const CAPABLE: u64 = 1 << 21 | 1 << 38;

/// Whether access is unrestricted: `perf_event_paranoid` is negative.
pub(super) fn is_open_to_all() -> bool {
    allows_all(&fs::read_to_string(PARANOID).unwrap_or_default())
}

/// Whether the calling thread has a capability that permits access.
pub(super) fn is_capable() -> bool {
    sys::effective_capabilities().is_ok_and(|set| set & CAPABLE != 0)
}

fn allows_all(paranoid: &str) -> bool {
    let level: Option<i32> = paranoid.trim().parse().ok();
    level.is_some_and(|level| level < 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_negative_level_allows_all() {
        assert!(allows_all("-1\n"));
        for level in ["0\n", "1", "4", "", "x"] {
            assert!(!allows_all(level), "{level}");
        }
    }

    #[test]
    fn effective_capabilities_are_those_of_the_status() {
        let status = fs::read_to_string("/proc/thread-self/status").expect("a thread");
        let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = u64::from_str_radix(set.expect("a line").trim(), 16).expect("hexadecimal");
        assert_eq!(sys::effective_capabilities().expect("known"), set);
    }
}
