//! Checks what perf lets a thread open. The checks apply the kernel's rules and do not open an event.

use std::fs;

use crate::host::sys;

const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
/// `CAP_SYS_ADMIN` and `CAP_PERFMON`.
const CAPABLE: u64 = 1 << 21 | 1 << 38;

/// The host's `perf_event_paranoid`, which decides what a thread without capabilities may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::host) struct Paranoid(Option<i32>);

impl Paranoid {
    pub(in crate::host) fn read() -> Self {
        Self::from(fs::read_to_string(PARANOID).unwrap_or_default().as_str())
    }

    /// Whether the thread may read the data of tracepoints.
    pub(in crate::host) fn allows_tracepoints(self) -> bool {
        self.0.is_some_and(|level| level < 0)
    }

    /// Whether the thread may count kernel mode on threads of its own process.
    pub(in crate::host) fn allows_kernel(self) -> bool {
        self.0.is_some_and(|level| level <= 1)
    }
}

impl From<&str> for Paranoid {
    fn from(text: &str) -> Self {
        Self(text.trim().parse().ok())
    }
}

/// Whether the calling thread has a capability that permits access.
pub(super) fn is_capable() -> bool {
    sys::effective_capabilities().is_ok_and(|set| set & CAPABLE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_allows_tracepoints_below_0_and_kernel_mode_below_2() {
        for (level, tracepoints, kernel) in [
            ("-1\n", true, true),
            ("0\n", false, true),
            ("1", false, true),
            ("2", false, false),
            ("4", false, false),
            ("", false, false),
            ("x", false, false),
        ] {
            let paranoid = Paranoid::from(level);
            assert_eq!(paranoid.allows_tracepoints(), tracepoints, "{level}");
            assert_eq!(paranoid.allows_kernel(), kernel, "{level}");
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
