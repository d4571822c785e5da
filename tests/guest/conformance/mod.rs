//! Compares a PMU's counts with the rules for counters, row by row.
//!
//! All rows except those of regions and of listed events use only `perf_event_open(2)`, so they judge any PMU
//! of the guest's processors: the vPMU's driver in that role, or a PMU that KVM emulates.

mod counting;
mod event;
mod host;
mod refusals;
mod sampling;
mod sharing;
mod triggers;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use tests::rows::{self, Finding};

pub(crate) use self::host::{count_guests, counts, hold_counters};
use crate::{cpu, os};

/// The result of a row; the error is the reason why it does not hold.
type Found = Result<Finding, Box<dyn Error>>;
/// A row's name and its test.
type Row = (&'static str, fn() -> Found);

/// The row holds, with these figures.
fn holds(figures: impl Into<String>) -> Found {
    Ok(Finding::Holds(figures.into()))
}

/// The guest lacks what the row would judge.
fn absent(reason: impl Into<String>) -> Found {
    Ok(Finding::Absent(reason.into()))
}

/// `guest-tests conformance`: prints a line for each row.
pub(crate) fn run() -> ExitCode {
    let mut failed = false;
    let rows = [
        counting::ROWS,
        sharing::ROWS,
        sampling::ROWS,
        triggers::ROWS,
        refusals::ROWS,
    ];
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

/// Keeps other tasks off this CPU, and lets perf sample as often as asked.
fn prepare() -> Result<(), Box<dyn Error>> {
    cpu::bind_console()?;
    cpu::leave_console()?;
    cpu::keep()?;
    // The kernel refuses to change the rate while nothing limits the time.
    std::fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "25")?;
    std::fs::write("/proc/sys/kernel/perf_event_max_sample_rate", "1000000")?;
    std::fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "100")?;
    Ok(())
}
