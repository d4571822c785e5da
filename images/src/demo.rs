//! The demo: a stock guest counts and samples a program, and the host says what it cost.

use std::fmt::Write as _;

use serde_json::Value;
use thiserror::Error;

use crate::boot::Boot;
use crate::error::BootError;
use crate::place::PlaceChoice;
use crate::run::Outcome;

/// What a person would type in the guest, in that order.
const SCRIPT: &str = r#"
show() { echo; echo "guest# $*"; "$@"; }
set -e
show vperf list
show vperf stat -- workload hot
show vperf record -e task-clock -o /tmp/demo.vperf -- workload hot
show vperf report -i /tmp/demo.vperf --limit 8
"#;
/// Where `workload hot` spends most of its time.
const HOT: &str = "hot_three_quarters";

/// Why the demo did not show what it should.
#[derive(Debug, Error)]
pub enum DemoError {
    /// No guest.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A command of the guest's failed.
    #[error("a command failed in the guest, with exit code {0}; its message stands above")]
    Command(i32),
    /// The guest ran, but the profile is not the workload's.
    #[error("the report names no {HOT}, where the workload spends its time")]
    Profile,
    /// No report, or not the numbers that belong there.
    #[error("the VMM's report lacks {0}")]
    Report(&'static str),
}

/// Boots a guest with two vCPUs, profiles a program in it, prints what a person wants to see.
///
/// # Errors
/// [`DemoError`]: the exit code of the demo says whether it showed all it should.
pub fn run(place: PlaceChoice) -> Result<(), DemoError> {
    let outcome = Boot {
        command: SCRIPT.to_owned(),
        place,
        echo: true,
        ..Boot::default()
    }
    .run()?;
    if outcome.status != 0 {
        return Err(DemoError::Command(outcome.status));
    }
    if !outcome.output.contains(HOT) {
        return Err(DemoError::Profile);
    }
    println!("\n{}", summary(&outcome)?);
    Ok(())
}

/// What it took, for people: figures of this very run.
fn summary(outcome: &Outcome) -> Result<String, DemoError> {
    let report = &outcome.report;
    let vpmu = &report["vpmu"];
    let written = number(vpmu, "samples_written")?;
    let lost = number(vpmu, "samples_lost")?;
    let exits = number(vpmu, "overflow_exits")?;
    let interrupts = number(vpmu, "interrupts")?;
    let requests = number(vpmu, "control_requests")?;
    let notices = number(vpmu, "notices")?;
    if written == 0 {
        return Err(DemoError::Report("any sample written"));
    }
    let boot = number(report, "boot_to_init_ns")?;
    let all: u64 = report["vcpus"]
        .as_array()
        .ok_or(DemoError::Report("vcpus"))?
        .iter()
        .map(|vcpu| number(&vcpu["exits"], "total"))
        .sum::<Result<u64, _>>()?;

    let mut text = String::from("What it took, by the VMM's own count\n");
    let mut row = |name: &str, value: String, note: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<22} {value:>10}  {note}");
    };
    let per_thousand = |count: u64| format!("{:.0} per 1,000 samples", ratio(count, written));
    row(
        "boot to init",
        seconds(boot),
        "from the first guest instruction",
    );
    row(
        "records written",
        written.to_string(),
        "by the host, into the guest's pages",
    );
    row("records lost", lost.to_string(), "");
    row("exits for samples", exits.to_string(), &per_thousand(exits));
    row(
        "interrupts",
        interrupts.to_string(),
        &per_thousand(interrupts),
    );
    row(
        "  of them",
        requests.to_string(),
        "answers to control requests, at most",
    );
    row("  wakeups", notices.to_string(), &per_thousand(notices));
    row(
        "all exits to the VMM",
        all.to_string(),
        "boot and console included",
    );
    let _ = write!(
        text,
        "ran on {}, 2 vCPUs, {:.1} s",
        outcome.place,
        outcome.wall.as_secs_f64()
    );
    Ok(text)
}

fn number(object: &Value, name: &'static str) -> Result<u64, DemoError> {
    object[name].as_u64().ok_or(DemoError::Report(name))
}

#[expect(clippy::cast_precision_loss, reason = "rounded for people anyway")]
fn ratio(count: u64, samples: u64) -> f64 {
    count as f64 * 1000.0 / samples as f64
}

#[expect(clippy::cast_precision_loss, reason = "rounded for people anyway")]
fn seconds(nanoseconds: u64) -> String {
    format!("{:.2} s", nanoseconds as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::place::Place;

    fn outcome(report: Value) -> Outcome {
        Outcome {
            output: String::new(),
            status: 0,
            place: Place::Direct,
            report,
            wall: Duration::from_secs(2),
        }
    }

    fn report(written: u64) -> Value {
        json!({
            "boot_to_init_ns": 1_500_000_000_u64,
            "vcpus": [{"exits": {"total": 40}}, {"exits": {"total": 2}}],
            "vpmu": {
                "samples_written": written, "samples_lost": 3, "overflow_exits": 500,
                "interrupts": 25, "control_requests": 10, "notices": 15,
            },
        })
    }

    #[test]
    fn figures_are_the_reports() {
        let text = summary(&outcome(report(500))).unwrap();
        for part in [
            "1.50 s",
            "1000 per 1,000",
            "50 per 1,000",
            "42",
            "direct KVM",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }

    #[test]
    fn missing_figures_are_no_zeroes() {
        assert!(matches!(
            summary(&outcome(report(0))),
            Err(DemoError::Report(_))
        ));
        let mut broken = report(5);
        broken["vcpus"][1]["exits"] = Value::Null;
        assert!(matches!(
            summary(&outcome(broken)),
            Err(DemoError::Report("total"))
        ));
    }
}
