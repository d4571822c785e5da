//! Searches the guest's kernel log for reports of faults.

use std::process::Command;

use guest_tests::faults::fault;

use crate::ensure::ensure;
use crate::{Fallible, Outcome, driver_life};

/// The kernel's log since boot.
pub(crate) fn log() -> Fallible<String> {
    read(&[])
}

fn read(options: &[&str]) -> Fallible<String> {
    let output = Command::new("dmesg").args(options).output()?;
    ensure!(output.status.success(), "dmesg: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Checks that the kernel and the driver have reported no fault since the kernel booted.
pub(crate) fn ensure_no_fault() -> Outcome {
    ensure_none_of(&[], &[])
}

/// Like [`ensure_no_fault`], for a log after the tests of `group`, which may provoke errors of the driver.
pub(crate) fn ensure_no_fault_after(group: &str) -> Outcome {
    let expected: &[&str] = if group == driver_life::GROUP { &driver_life::ERRORS } else { &[] };
    ensure_none_of(&[], expected)
}

/// Like [`ensure_no_fault`], but also searches for the words in `more`, which a healthy kernel does not log, and accepts
/// lines that contain a word of `expected`.
pub(crate) fn ensure_none_of(more: &[&str], expected: &[&str]) -> Outcome {
    let log = read(&["-r"])?;
    if let Some(report) = fault(&log, more, expected) {
        ensure!(false, "the kernel says:\n{}", report.join("\n"));
    }
    Ok(())
}
