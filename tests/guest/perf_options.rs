//! Loading the module takes nothing away: with each of its options, perf does as much with its own events as in the same
//! guest without the module. In a guest without hardware counters, perf counts a clock instead of cycles, or leaves an
//! event out, but only after certain errors.

use std::fs;

use crate::ensure::{ensure, ensure_eq};
use crate::module;
use crate::perf_command::{SEPARATED, perf, rows, shown, stat};
use crate::perf_habits::is_counted;
use crate::programs::text;
use crate::{Fallible, Outcome};

const GROUP: &str = "stock-options";

/// Options of `perf record`. Those that no version of perf core or of a PMU refuses are in one list.
const RECORD: &[&[&str]] = &[
    &[],
    &["-e", "cycles:u"],
    &["-e", "cycles:pp"],
    &["-e", "cycles:G"],
    &["-e", "{cycles,instructions}:S"],
    &["-e", "cycles,page-faults"],
    &["-a", "-F", "max"],
    &["-c", "100000", "--per-thread"],
    &["-T", "-P", "-R", "-s", "--sample-cpu", "--sample-identifier", "--namespaces", "--switch-events", "--no-inherit"],
    &["-g"],
    &["--call-graph", "dwarf"],
    &["--call-graph", "lbr"],
    &["-d", "--phys-data"],
    &["--data-page-size"],
    &["--code-page-size"],
    &["-W"],
    &["-b"],
    &["-I", "--user-regs", ""],
    &["--all-cgroups"],
    &["--transaction"],
    &["--overwrite"],
    &["-k", "CLOCK_MONOTONIC"],
    &["--all-kernel"],
    &["--aux-sample"],
];

/// Options of `perf stat`.
const STAT: &[&[&str]] = &[
    &["-d", "-d", "-d"],
    &["-e", "cycles:pp,cycles:G,cycles:H,cycles:u,cycles:k,L1-dcache-load-misses,r1a8,branch-misses"],
    &["-e", "{cycles,instructions}:W"],
    &["-e", "{cycles,page-faults}"],
    &["-T"],
    &["-a", "--per-core"],
];

/// Commands that open events of their own choice.
const OTHERS: &[&[&str]] =
    &[&["mem", "record", "-o", "options", "--", "true"], &["c2c", "record", "-o", "options", "--", "true"]];

/// Returns the events of the recording or, if perf failed, its message.
fn recorded(options: &[&str]) -> Fallible<String> {
    let output = perf(&[&["record", "-o", "options"], options, &["--", "true"]].concat())?;
    if !output.status.success() {
        return Ok(text(&output.stderr));
    }
    // Without the events' ids, which differ each time.
    let events = shown(&["evlist", "-v", "-i", "options"])?;
    Ok(events.lines().map(|line| line.split(", id:").next().unwrap_or(line)).collect::<Vec<_>>().join("\n"))
}

/// Each event that perf counted, and whether it has a count.
fn counted(options: &[&str]) -> Fallible<String> {
    let output = perf(&[&["stat", SEPARATED], options, &["--", "true"]].concat())?;
    let said = text(&output.stderr);
    if !output.status.success() {
        return Ok(said);
    }
    let row = |row: crate::perf_command::Row| {
        let value = if row.value.starts_with('<') { &row.value } else { "a number" };
        format!("{:?} {}: {value}\n", row.subject, row.event)
    };
    Ok(rows(&said).into_iter().map(row).collect())
}

fn other(command: &[&str]) -> Fallible<String> {
    let output = perf(command)?;
    Ok(if output.status.success() { "success".to_owned() } else { text(&output.stderr) })
}

fn all() -> Fallible<Vec<(String, String)>> {
    let mut results = Vec::new();
    for options in RECORD {
        results.push((format!("perf record {}", options.join(" ")), recorded(options)?));
    }
    for options in STAT {
        results.push((format!("perf stat {}", options.join(" ")), counted(options)?));
    }
    for command in OTHERS {
        results.push((format!("perf {}", command.join(" ")), other(command)?));
    }
    Ok(results)
}

#[apply(guest_test)]
fn perfs_options_do_the_same_without_the_module() -> Outcome {
    // With hardware counters on the host, perf counts cycles only because of the module.
    let better = is_counted("cycles")?;
    let with = all()?;
    ensure!(module::run("rmmod", "virtio_pmu")?, "the module was not unloaded");
    let without = all()?;
    ensure!(module::run("insmod", module::FILE)?, "the module was not loaded again");
    let mut different = String::new();
    for ((options, with), (_, without)) in with.iter().zip(&without) {
        let worse = if better { with.contains("Error") && !without.contains("Error") } else { with != without };
        if worse {
            different += &format!("{options}: with the module:\n{with}\nwithout:\n{without}\n\n");
        }
    }
    ensure!(different.is_empty(), "{different}");
    Ok(())
}

/// With exclude_host, an event counts only nested guests. If the CPU cannot run any, the count is zero, as on a bare
/// machine. If it can, the event is refused, because the device cannot tell nested guests from this one.
#[apply(guest_test)]
fn event_of_this_guests_guests_counts_nothing_or_is_refused() -> Outcome {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let can_nest = cpus.split_whitespace().any(|flag| flag == "svm" || flag == "vmx");
    let events = ["vpmu/mark,event=3/G", "vpmu/mark,event=3/H", "vpmu/mark,event=3/"];
    let rows = stat(&["-e", &events.join(","), "--", "guest-tests", "mark", "3", "5"])?;
    let counts: Vec<_> = rows.iter().map(|row| row.value.as_str()).collect();
    let expected = if can_nest { "<not supported>" } else { "0" };
    ensure_eq!(counts, [expected, "5", "5"], "counts of {events:?}");
    Ok(())
}
