//! Searches the guest's kernel log for reports of faults. Every kernel checks for some faults. A kernel that is built
//! with a checker also reports others.

use std::process::Command;

use crate::ensure::ensure;
use crate::{Fallible, Outcome};

/// Words with which the kernel begins or continues a report of a fault.
const FAULTS: [&str; 22] = [
    "WARNING:",
    "BUG",
    "Oops",
    "refcount",
    "general protection",
    "Redzone",
    "Poison",
    "Object already free",
    "SLUB: ",
    "ODEBUG:",
    "UBSAN:",
    "KASAN:",
    "INFO: possible",
    "INFO: trying to register",
    "INFO: task",
    // Reports of CPUs and tasks that make no progress. A guest that continues afterwards has still lost that time.
    "rcu: INFO:",
    "self-detected stall",
    "hard LOCKUP",
    "blocked for more than",
    "suspicious RCU usage",
    "bad unlock balance",
    "turning off the locking correctness validator",
];
/// Maximum number of lines of a report that are shown.
const LINES: usize = 40;

/// The kernel's log since boot.
pub(crate) fn log() -> Fallible<String> {
    let output = Command::new("dmesg").output()?;
    ensure!(output.status.success(), "dmesg: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns up to [`LINES`] lines of the log, starting with the first report of a fault.
fn fault<'a>(log: &'a str, more: &[&str]) -> Option<Vec<&'a str>> {
    let names_fault = |line: &&str| {
        // Harmless lines: boot messages of the allocator and of KASAN, and reports of faults in programs.
        let harmless = ["SLUB: HWalign", "KernelAddressSanitizer initialized", "traps: "];
        let begins = |word: &&str| line.contains(*word);
        FAULTS.iter().chain(more).any(begins) && !harmless.iter().any(begins)
    };
    let lines: Vec<&str> = log.lines().collect();
    let first = lines.iter().position(names_fault)?;
    Some(lines[first..lines.len().min(first + LINES)].to_vec())
}

/// Checks that the kernel has reported no fault since it booted.
pub(crate) fn ensure_no_fault() -> Outcome {
    ensure_none_of(&[])
}

/// Like [`ensure_no_fault`], but also searches for the words in `more`, which a healthy kernel does not log.
pub(crate) fn ensure_none_of(more: &[&str]) -> Outcome {
    let log = log()?;
    if let Some(report) = fault(&log, more) {
        ensure!(false, "the kernel says:\n{}", report.join("\n"));
    }
    Ok(())
}
