//! The demo. A stock guest counts and samples a program and traces the guest's exits, and the host reports the cost.
//! Then another guest panics, and the host shows that guest's last events, as text and as pictures.

mod counters;
mod crash;

pub use counters::known_program;

use std::fmt::Write as _;

use serde_json::Value;
use thiserror::Error;

use crate::arch::Arch;
use crate::boot::Boot;
use crate::cache::CacheError;
use crate::error::BootError;
use crate::file_error::FileError;
use crate::kernel::KernelError;
use crate::kvm_host::{KvmHost, KvmHostChoice};
use crate::run::Outcome;
use crate::third_party::{self, ThirdPartyError};

/// The guest runs this script once init has loaded the driver. First it counts, if the host has counters. Then `vperf
/// exits record` runs the script again, with the argument `tour`, and records all exits until that run ends. The last
/// command reports the exits.
fn script() -> String {
    format!(
        r#"
show() {{ echo; echo "guest# $*"; "$@" 2>&1; }}
set -e
if [ "$1" = tour ]; then
	show vperf list
	show vperf stat -- workload hot
	show vperf record -e task-clock -o /tmp/demo.data -- workload hot
	show vperf report -i /tmp/demo.data --limit 8
	exit
fi
if vperf list | grep -q '^instructions '; then
	{}
fi
show vperf exits record -a -o /tmp/boot.data -- sh "$0" tour
show vperf exits report -i /tmp/boot.data --top 5
"#,
        counters::script()
    )
}
/// The function that `workload hot` spends most of its time in.
const HOT: &str = "hot_three_quarters";

/// The heading of the table of exits by reason.
const REASONS: &str = "WORST  REASON";

/// Errors of the demo.
#[derive(Debug, Error)]
pub enum DemoError {
    /// The guest did not run.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A command failed in the guest.
    #[error("a command failed in the guest, with exit code {0}; see its message above")]
    Command(i32),
    /// The guest ran, but the profile lacks the workload's hottest function.
    #[error("the report lacks {HOT}, where the workload spends its time")]
    Profile,
    /// The guest ran, but the report of exits has no row with a reason.
    #[error("the report of exits lists no exit reasons")]
    Exits,
    /// The VMM's report lacks a figure.
    #[error("the VMM's report lacks {0}")]
    Report(&'static str),
    /// perf's count differs from the number of executed instructions.
    #[error("the program executed {expected} instructions, but perf counted {found}")]
    Instructions {
        /// The program's instructions.
        expected: u64,
        /// Counted instructions.
        found: u64,
    },
    /// A run of perf did not print a count.
    #[error("perf stat printed no count of instructions")]
    NoCount,
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The kernel with the symbols is missing.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A picture of the recording could not be written.
    #[error(transparent)]
    Picture(#[from] FileError),
    /// perf, which reads recordings, is missing.
    #[error(transparent)]
    Perf(#[from] ThirdPartyError),
    /// The guest ended without the expected panic.
    #[error("the guest should have panicked, but ended with exit code {0}")]
    NoPanic(i32),
    /// perf cannot read the flight recorder's file.
    #[error("perf cannot read the recording: {0}")]
    Recording(String),
    /// The recording lacks marks, or has them out of order.
    #[error("the recording should have the marks 1 to {wanted} in order, but has {found:?}")]
    Marks {
        /// Marks placed.
        wanted: u64,
        /// Marks in the recording.
        found: Vec<u64>,
    },
}

/// Boots a guest, counts and profiles programs in it, and prints the reports. Then lets another guest panic, and prints
/// the contents of that guest's flight recorder. If `arch` is not this machine's architecture, shows the
/// hardware counters of a guest in the lab of `arch` instead.
///
/// # Errors
/// [`DemoError`]: the demo did not show everything.
pub fn run(kvm_host: KvmHostChoice, arch: Arch) -> Result<(), DemoError> {
    if !arch.is_native() {
        return counters::run(kvm_host, arch);
    }
    let mut files = third_party::perf(arch)?;
    files.extend(counters::known_program(arch)?);
    let boot = Boot {
        command: script(),
        vcpus: 1,
        memory_mib: Boot::default().memory_mib.saturating_add(third_party::memory_mib(&files)),
        files,
        // Only the exact lab has counters.
        kvm_host: if kvm_host == KvmHostChoice::Auto { KvmHostChoice::AutoExact } else { kvm_host },
        echo: true,
        ..Boot::default()
    };
    let outcome = boot.run()?;
    if outcome.status != 0 {
        return Err(DemoError::Command(outcome.status));
    }
    if matches!(outcome.kvm_host, KvmHost::Lab { exact: true, .. }) {
        counters::check(arch, &outcome.output)?;
    }
    if !outcome.output.contains(HOT) {
        return Err(DemoError::Profile);
    }
    if top_reason(&outcome.output).is_none() {
        return Err(DemoError::Exits);
    }
    println!("\n{}", summary(&outcome)?);
    crash::run(&outcome.kvm_host)
}

/// Returns the row of the exit reason that took the most time: the first row below the heading.
fn top_reason(output: &str) -> Option<&str> {
    let mut lines = output.lines().map(str::trim);
    lines.find(|line| line.ends_with(REASONS))?;
    // A row begins with the number of exits.
    lines.next().filter(|line| line.starts_with(|first: char| first.is_ascii_digit()))
}

/// The figures of this run, as text.
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
        return Err(DemoError::Report("a count of written samples above zero"));
    }
    let traced = number(vpmu, "aux_written")?;
    let untraced = number(vpmu, "aux_lost")?;
    let boot = number(report, "boot_to_init_ns")?;
    let all: u64 = report["vcpus"]
        .as_array()
        .ok_or(DemoError::Report("vcpus"))?
        .iter()
        .map(|vcpu| number(&vcpu["exits"], "total"))
        .sum::<Result<u64, _>>()?;

    let mut text = String::from("Costs of this run, as counted by the VMM\n");
    let mut row = |name: &str, value: String, note: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<22} {value:>10}  {note}");
    };
    let per_thousand = |count: u64| format!("{:.0} per 1,000 samples", ratio(count, written));
    row("boot to init", seconds(boot), "from the first guest instruction");
    row("records written", written.to_string(), "by the host, into the guest's pages");
    row("records lost", lost.to_string(), "");
    row("trace of exits, bytes", traced.to_string(), &format!("by the host, into the guest's pages; {untraced} lost"));
    row("exits for samples", exits.to_string(), &per_thousand(exits));
    row("interrupts", interrupts.to_string(), &per_thousand(interrupts));
    row("  for control requests", requests.to_string(), "at most");
    row("  wakeups", notices.to_string(), &per_thousand(notices));
    row("all exits to the VMM", all.to_string(), "boot and console included");
    let _ = write!(text, "ran on {}, {:.1} s", outcome.kvm_host, outcome.wall.as_secs_f64());
    Ok(text)
}

fn number(object: &Value, name: &'static str) -> Result<u64, DemoError> {
    object[name].as_u64().ok_or(DemoError::Report(name))
}

#[expect(clippy::cast_precision_loss, reason = "rounded for display")]
fn ratio(count: u64, samples: u64) -> f64 {
    count as f64 * 1000.0 / samples as f64
}

#[expect(clippy::cast_precision_loss, reason = "rounded for display")]
fn seconds(nanoseconds: u64) -> String {
    format!("{:.2} s", nanoseconds as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn outcome(report: Value) -> Outcome {
        Outcome {
            output: String::new(),
            status: 0,
            post_run: None,
            kvm_host: KvmHost::Direct,
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
                "aux_written": 640, "aux_lost": 64,
            },
        })
    }

    #[test]
    fn figures_are_the_reports() {
        let text = summary(&outcome(report(500))).unwrap();
        for part in ["1.50 s", "1000 per 1,000", "50 per 1,000", "42", "640", "64 lost", "direct KVM"] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }

    #[test]
    fn top_reason_is_below_the_tables_heading() {
        let table = "# heading\r\n\r\n EXITS  %EXITS  TIME  MEAN  WORST  REASON\r\n";
        let row = "1,000  50.00%  1.000 s  1 ms  1 ms  io";
        let output = format!("{table}  {row}\r\n");
        assert_eq!(top_reason(&output), Some(row));
        assert_eq!(top_reason(table), None);
        assert_eq!(top_reason(&format!("{table}\nEXITS ...")), None);
        assert_eq!(top_reason(row), None);
    }

    #[test]
    fn missing_figures_are_errors() {
        assert!(matches!(summary(&outcome(report(0))), Err(DemoError::Report(_))));
        let mut broken = report(5);
        broken["vcpus"][1]["exits"] = Value::Null;
        assert!(matches!(summary(&outcome(broken)), Err(DemoError::Report("total"))));
    }
}
