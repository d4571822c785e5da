//! Whether perf lets this process see the data of tracepoints: as the kernel decides it, without
//! opening one.

use std::fs;

const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
const STATUS: &str = "/proc/self/status";
/// `CAP_SYS_ADMIN` and `CAP_PERFMON`.
const CAPABLE: u64 = 1 << 21 | 1 << 38;

/// Asks the host.
pub(super) fn granted() -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    allows(&read(PARANOID), &read(STATUS))
}

/// Everybody may where the host is not paranoid at all, else who has a capability for it.
fn allows(paranoid: &str, status: &str) -> bool {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    let level: Option<i32> = paranoid.trim().parse().ok();
    level.is_some_and(|level| level < 0) || effective.is_some_and(|set| set & CAPABLE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unparanoid_and_the_capable_may() {
        let none = "Name:\tvmm\nCapEff:\t0000000000000000\n";
        let perfmon = "CapEff:\t0000004000000000\n";
        let admin = "CapEff:\t0000000000200000\n";
        assert!(allows("-1\n", none));
        assert!(allows("2\n", perfmon) && allows("4\n", admin));
        for (paranoid, status) in [("0", none), ("1", none), ("", none), ("x", "CapEff:\tyes")] {
            assert!(!allows(paranoid, status), "{paranoid} {status}");
        }
        assert!(!allows("2", "CapEff:\tffffffbfffdfffff\n"));
    }
}
