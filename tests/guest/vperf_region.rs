//! Tests `vperf stat` and `record` with --from and --to. They must measure exactly the code between a program's own
//! marks, down to a single exit.

use std::process::Command;

use serde_json::Value;

use crate::cpu::{self, PORT_REASON, PORT_WRITTEN};
use crate::ensure::{ensure, ensure_eq};
use crate::programs::{count, json, text, vperf, vperf_succeeds, words};
use crate::{Fallible, Outcome};

const GROUP: &str = "vperf";

/// Returns the counts of `workload regions`, which places each mark with a store.
fn stat(options: &str, regions: &str) -> Fallible<Value> {
    let line = format!("stat --json {options} -- workload regions {regions}");
    let said = text(&vperf_succeeds(&words(&line))?.stdout);
    let (reported, counts) = said.split_once('\n').ok_or("only one line")?;
    ensure!(reported.ends_with("each mark by a store"), "the first line does not end in the kind of mark: {reported}");
    json(counts.as_bytes())
}

/// Checks how often the region was entered and left, and the counts of marks in it.
fn ensure_counts(counts: &Value, passed: [Option<u64>; 2], marks: &[(&str, u64)]) -> Outcome {
    let region = &counts["region"];
    ensure_eq!([region["entered"].as_u64(), region["left"].as_u64()], passed, "regions entered and left: {counts}");
    for &(mark, expected) in marks {
        ensure_eq!(count(counts, mark), Some(expected), "the count of {mark}: {counts}");
    }
    Ok(())
}

#[apply(guest_test)]
fn counts_of_ten_thousand_regions_are_exact() -> Outcome {
    cpu::leave_console()?;
    // Each region has one mark and one port write, and so does the code between two regions.
    let exits = cpu::own_port_exits();
    let events = format!("mark=3,{exits},task-clock");
    let counts = stat(&format!("--from 1 --to 2 -e {events}"), "10000 --marks 1 --ports 1 --outside")?;
    ensure_counts(&counts, [Some(10_000); 2], &[("mark=3", 10_000)])?;
    // On some architectures, the store that places a mark causes the same kind of exit as a port write. There, the
    // exits of two marks also count: the mark inside the region, and the stop mark.
    let each = 1 + 2 * cpu::STORE_EXITS;
    ensure_eq!(count(&counts, &exits), Some(10_000 * each), "exits: {counts}");
    ensure!(count(&counts, "task-clock") > Some(0), "the task-clock is zero: {counts}");
    Ok(())
}

#[apply(guest_test)]
fn each_thread_has_regions_of_its_own() -> Outcome {
    let counts = stat("--from 1 --to 2 -e mark=3", "300 --marks 2 --outside --threads 4")?;
    ensure_counts(&counts, [Some(1200); 2], &[("mark=3", 2400)])
}

#[apply(guest_test)]
fn one_end_alone_has_a_meaning() -> Outcome {
    let regions = "10 --marks 1 --outside";
    // Counting starts at the mark of value 2 that ends the first region. One mark of value 3 follows in the same round,
    // and two follow in each of the nine later rounds.
    ensure_counts(&stat("--from 2 -e mark=3", regions)?, [Some(1), None], &[("mark=3", 19)])?;
    let counts = stat("--to 2 -e mark=3,mark=1", regions)?;
    ensure_counts(&counts, [None, Some(1)], &[("mark=3", 1), ("mark=1", 1)])
}

#[apply(guest_test)]
fn one_mark_for_both_ends_is_every_other_region() -> Outcome {
    let counts = stat("--from 1 --to 1 -e mark=5,mark=1", "11 --marks 1 --value 5 --outside")?;
    // The first region is from the first mark to the second, the next from the third to the fourth, and so on. The last
    // mark begins a region that has no end. A region includes the mark that ends it, but not the mark that begins it.
    ensure_counts(&counts, [Some(6), Some(5)], &[("mark=5", 12), ("mark=1", 5)])
}

#[apply(guest_test)]
fn marks_that_change_nothing_enter_nothing() -> Outcome {
    // All 40 marks have the value that starts a region. The first mark enters the region, and the others change
    // nothing.
    let counts = stat("--from 1 --to 9 -e mark=1", "10 --marks 2 --value 1 --to 1")?;
    ensure_counts(&counts, [Some(1), Some(0)], &[("mark=1", 39)])
}

#[apply(guest_test)]
fn regions_of_a_cpu_are_exact() -> Outcome {
    // The program that vperf starts inherits this affinity, so it runs on the measured CPU.
    cpu::pin(0)?;
    let counts = stat("-C 0 --from 1 --to 2 -e mark=3", "500 --marks 2 --outside")?;
    ensure_counts(&counts, [Some(500); 2], &[("mark=3", 1000)])
}

#[apply(guest_test)]
fn group_counts_only_in_the_region() -> Outcome {
    let counts = stat("--from 1 --to 2 -e {mark=3,mark=2}", "50 --marks 4 --outside")?;
    ensure_counts(&counts, [Some(50); 2], &[("mark=3", 200), ("mark=2", 50)])
}

#[apply(guest_test)]
fn regions_of_a_running_process_are_exact() -> Outcome {
    // The process waits at a FIFO until the measurement runs. The measurement then waits at another FIFO until the
    // process is done.
    let (go, over) = ("/tmp/region.go", "/tmp/region.over");
    ensure!(Command::new("mkfifo").args([go, over]).status()?.success(), "mkfifo");
    let script =
        format!("read x < {go}; workload regions 30 --marks 2 --outside --threads 2 > /dev/null; echo > {over}");
    let mut running = Command::new("sh").args(["-c", &script]).spawn()?;
    let pid = running.id().to_string();
    let until = format!("echo > {go}; read x < {over}");
    let output = vperf_succeeds(&[
        "stat", "--json", "-p", &pid, "--from", "1", "--to", "2", "-e", "mark=3", "--", "sh", "-c", &until,
    ])?;
    ensure!(running.wait()?.success(), "the process failed");
    ensure_counts(&json(&output.stdout)?, [Some(60); 2], &[("mark=3", 120)])
}

#[apply(guest_test)]
fn samples_are_of_the_region_alone() -> Outcome {
    let file = "/tmp/region.vperf";
    let line = format!("record --from 1 --to 2 -e mark=3 -c 1 -o {file} -- workload regions 200 --marks 2 --outside");
    let output = vperf_succeeds(&words(&line))?;
    let said = text(&output.stderr);
    ensure!(said.contains("400 samples"), "vperf does not report 400 samples: {said}");
    ensure!(said.contains("region entered 200 times, left 200 times"), "vperf does not report 200 regions: {said}");
    let output = vperf_succeeds(&["report", "-i", file, "--json"])?;
    let report = json(&output.stdout)?;
    ensure_eq!(report["samples"], 400, "samples in {report}");
    ensure_eq!(report["lost"], 0, "lost samples in {report}");
    Ok(())
}

#[apply(guest_test)]
fn trace_covers_only_the_region() -> Outcome {
    let file = "/tmp/region-trace.vperf";
    let trace = format!("exit-trace-{PORT_REASON}");
    cpu::leave_console()?;
    let regions = "workload regions 100 --ports 3 --outside";
    let line = format!("record --from 1 --to 2 -e mark=3 -c 1 --aux {trace} -o {file} -- {regions}");
    vperf_succeeds(&words(&line))?;
    let output = vperf_succeeds(&["exits", "report", "-i", file, "--json", "--sort", "what"])?;
    let report = json(&output.stdout)?;
    let trace = &report["traces"][0];
    let rows = trace["tables"][0]["rows"].as_array();
    let rows = rows.ok_or_else(|| format!("no rows: {report}"))?;
    let writes = rows.iter().filter(|row| row["what"] == PORT_WRITTEN);
    let writes: Vec<&Value> = writes.map(|row| &row["exits"]).collect();
    ensure_eq!(writes, [300], "port writes in {report}");
    // On architectures where a port access is a memory access, the driver's notifications and the marks cause exits
    // with the same reason as port writes, so the total is larger.
    if !cpu::OWN_IN_USER_MODE {
        ensure_eq!(trace["exits"], 300, "exits in {report}");
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_names_the_region_and_its_visits() -> Outcome {
    let regions = ["workload", "regions", "1", "--marks", "1"];
    let measured = |from: &str, to: &str| -> Fallible<String> {
        let options = ["stat", "--from", from, "--to", to, "-e", "mark=3", "--"];
        let output = vperf_succeeds(&[&options[..], &regions].concat())?;
        Ok(text(&output.stderr))
    };
    let said = measured("1", "0x2")?;
    ensure!(said.contains("from mark 1 to mark 2:"), "vperf does not name the two marks: {said}");
    ensure!(said.contains("region entered once, left once"), "vperf does not report one region: {said}");
    let said = measured("77", "78")?;
    ensure!(said.contains("did not place mark 77"), "vperf does not report the missing mark: {said}");
    for wrong in ["begin", "4294967296", "-1"] {
        let output = vperf(&["stat", &format!("--from={wrong}"), "--", "true"])?;
        let said = text(&output.stderr);
        ensure_eq!(output.status.code(), Some(125), "vperf's exit code: {said}");
        ensure!(said.contains("not a mark"), "vperf does not refuse the value as a mark: {said}");
    }
    Ok(())
}
