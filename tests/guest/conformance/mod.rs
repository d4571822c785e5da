//! Checks whether a PMU's counts obey the rules for counters. Each rule is a row of a table.
//!
//! Most rows use only `perf_event_open(2)`, so they can check any CPU PMU of the guest's kernel: the vPMU, or a PMU
//! that KVM emulates. Only the rows about regions and about listed events need the vPMU.

mod counting;
mod event;
mod host;
mod overflows;
mod refusals;
mod sampling;
mod sharing;
mod triggers;

use std::process::ExitCode;
use std::time::Instant;

use guest_tests::rows::{self, Finding};

pub(crate) use self::host::{count_guests, counts, hold_counters, steps};
use crate::{Fallible, Outcome, cpu, os};

/// The result of a row, or an error that says why the row's rule does not hold.
type RowResult = Fallible<Finding>;
/// A row's name and its test.
type Row = (&'static str, fn() -> RowResult);

/// The row holds, with these figures.
fn holds(figures: impl Into<String>) -> RowResult {
    Ok(Finding::Holds(figures.into()))
}

/// The guest lacks the feature that the row checks.
fn absent(reason: impl Into<String>) -> RowResult {
    Ok(Finding::Absent(reason.into()))
}

/// `guest-tests conformance`: prints a line for each row.
pub(crate) fn run() -> ExitCode {
    let mut failed = false;
    let rows = [counting::ROWS, sharing::ROWS, sampling::ROWS, overflows::ROWS, triggers::ROWS, refusals::ROWS];
    if let Err(error) = prepare() {
        eprintln!("preparing the guest: {error}");
        return ExitCode::FAILURE;
    }
    for (name, row) in rows.concat() {
        os::drain_console();
        let began = Instant::now();
        let finding = row().unwrap_or_else(|error| Finding::Fails(error.to_string()));
        failed |= matches!(finding, Finding::Fails(_));
        println!("{}", rows::line(name, began.elapsed(), &finding));
    }
    match failed {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// Keeps other tasks off this CPU, and lets perf sample at any requested rate.
fn prepare() -> Outcome {
    cpu::bind_console()?;
    cpu::leave_console()?;
    cpu::keep()?;
    // While the limit on the time for sampling is off (0 or 100), the kernel refuses to change the rate.
    std::fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "25")?;
    std::fs::write("/proc/sys/kernel/perf_event_max_sample_rate", "1000000")?;
    std::fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "100")?;
    Ok(())
}
