//! Faults in the guest's kernel log: the kernel's own checks, and those of a kernel built with a checker.

use std::process::Command;

use crate::Outcome;
use crate::ensure::ensure;

/// Words with which a kernel begins a report of a fault, or continues one.
const FAULTS: [&str; 18] = [
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
    "suspicious RCU usage",
    "bad unlock balance",
    "turning off the locking correctness validator",
];
/// Most lines of a report to show.
const LINES: usize = 40;

/// The log since boot, a line each.
fn log() -> std::io::Result<String> {
    let output = Command::new("dmesg").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the log from the first report of a fault on, up to [`LINES`] lines.
fn fault<'a>(log: &'a str, more: &[&str]) -> Option<Vec<&'a str>> {
    let names_fault = |line: &&str| {
        // The allocator and a checker introduce themselves; a program's own fault is not the kernel's.
        let harmless = [
            "SLUB: HWalign",
            "KernelAddressSanitizer initialized",
            "traps: ",
        ];
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

/// Like [`ensure_no_fault`], with more words that a healthy kernel does not log.
pub(crate) fn ensure_none_of(more: &[&str]) -> Outcome {
    let log = log()?;
    if let Some(report) = fault(&log, more) {
        ensure!(false, "the kernel says:\n{}", report.join("\n"));
    }
    Ok(())
}
