//! Measures a guest's exits and interrupts per sample and per task switch, with two PMUs. One is a CPU PMU with trapped
//! and emulated registers, driven by the stock kernel's own driver. The other is the paravirtual PMU. Both PMUs are in
//! one guest and count the same host clock.
//!
//! The figures are counts, not times. The guest runs in the exact lab, where every run has the same counts.

use std::collections::BTreeMap;
use std::process::ExitCode;

use guest_tests::figures::{self, Figures};
use images::{Boot, KvmHostChoice};
use vpmu_client::error::chain;

const SAMPLES: u64 = 50;
const ROUNDS: u64 = 50;
const EVENTS: [u64; 3] = [1, 6, 20];

/// The CPU PMUs of the program `trapped`.
const PMUS: [(&str, &str); 3] = [
    ("amd-v2", "PerfMonV2: 6 counters, and registers that control all of them at once"),
    ("amd", "the 4 counters that every AMD processor has"),
    ("intel-v2", "architectural perfmon version 2: 8 general-purpose and 3 fixed counters"),
];

/// Rows of the table of samples. Each has the name in the guest's figures, the name to print, and the maximum number of
/// returns to the VMM per sample.
const SAMPLERS: [(&str, &str, Option<f64>); 4] = [
    ("trapped", "CPU PMU, trapped", None),
    ("perf-core", "vPMU, perf_event_open", Some(1.2)),
    ("device-exit", "vPMU, /dev/vpmu, exit engine", Some(1.2)),
    ("device-batched", "vPMU, /dev/vpmu, batched engine", Some(0.2)),
];
const SWITCHERS: [(&str, &str, Option<f64>); 3] = [
    ("trapped", "CPU PMU, trapped", None),
    ("perf-core", "vPMU, perf_event_open", Some(2.0)),
    ("device", "vPMU, /dev/vpmu", Some(2.0)),
];

/// The guest's figures by subject.
type Reported = BTreeMap<String, Figures>;

/// Figures per sample or per switch.
struct Row {
    exits: f64,
    returns: f64,
    interrupts: f64,
}

fn main() -> ExitCode {
    let mut kept = true;
    for (pmu, described) in PMUS {
        match measure(pmu) {
            Ok((kvm_host, reported)) => {
                println!("\nA guest on {kvm_host}; its CPU PMU: {described}.");
                println!(
                    "Every event counts the host's cpu-clock of the vCPU in nanoseconds: no hardware \
                     counter is read."
                );
                kept &= print(&reported);
            }
            Err(error) => {
                eprintln!("no figures of {pmu}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    match kept {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn measure(pmu: &str) -> Result<(String, Reported), String> {
    let boot = Boot {
        command: format!("guest-tests baseline {SAMPLES} {ROUNDS}"),
        vcpus: 1,
        programs: vec!["guest-tests".to_owned()],
        kvm_host: KvmHostChoice::Exact,
        timeout: std::time::Duration::from_secs(900),
        vmm: "trapped".to_owned(),
        vmm_args: vec!["--pmu".to_owned(), pmu.to_owned()],
        ..Boot::default()
    };
    let outcome = boot.run().map_err(|error| chain(&error))?;
    if outcome.status != 0 {
        return Err(outcome.output);
    }
    let reported = outcome.output.lines().filter_map(figures::parse);
    let reported = reported.map(|(subject, figures)| (subject.to_owned(), figures));
    Ok((outcome.kvm_host.to_string(), reported.collect()))
}

#[expect(clippy::cast_precision_loss, reason = "counts of one boot")]
fn row(reported: &Reported, subject: &str, without: &str) -> Option<Row> {
    let (with, without) = (reported.get(subject)?, reported.get(without)?);
    let sum = |names: &[&str]| -> Option<f64> {
        let values = names.iter().map(|name| Some(*with.get(*name)? as f64 - *without.get(*name)? as f64));
        let sum: f64 = values.sum::<Option<f64>>()?;
        Some(sum / *with.get("times")? as f64)
    };
    Some(Row { exits: sum(&["exits", "host"])?, returns: sum(&["user"])?, interrupts: sum(&["nmis", "lines"])? })
}

/// Prints a row, and returns whether it is within its limit. A row without figures gets a dash. Such a row exceeds its
/// limit, unless the limit is `None`.
fn line(name: &str, row: Option<&Row>, limit: Option<f64>) -> bool {
    let Some(row) = row else {
        println!("  {name:32} {:>8}", "-");
        return limit.is_none();
    };
    let kept = limit.is_none_or(|limit| row.returns <= limit);
    let aimed = limit.map_or_else(String::new, |limit| format!("<= {limit}"));
    let said = if kept { "" } else { "  exceeded" };
    println!("  {name:32} {:8.2} {:8.2} {:10.2}   {aimed}{said}", row.exits, row.returns, row.interrupts);
    kept
}

fn head(what: &str) {
    println!("\n  {what:32} {:>8} {:>8} {:>10}   limit on returns", "exits", "returns", "interrupts");
}

/// Prints the tables, and returns whether all limits hold.
fn print(reported: &Reported) -> bool {
    let mut kept = true;
    head("per sample");
    for (interface, name, limit) in SAMPLERS {
        let row = row(reported, &format!("sample:{interface}"), &format!("idle:{interface}"));
        kept &= line(name, row.as_ref(), limit);
    }
    for events in EVENTS {
        head(&format!("per task switch, {events} event(s) each"));
        for (interface, name, limit) in SWITCHERS {
            let (with, without) = (format!("switch:{interface}:{events}"), format!("switch:{interface}:0"));
            kept &= line(name, row(reported, &with, &without).as_ref(), limit);
        }
    }
    println!(
        "\n  exits: all that KVM made, less those of a guest that does the same without events; returns: those \
         of them\n  that reached the VMM; interrupts: those injected into the guest. A sample's exits include \
         the one for the\n  host's own timer. More events than counters take turns on the trapped PMU."
    );
    kept
}
