//! Readers of a recording assume that its samples are in the order of time, and that a task's samples lie between its
//! switches in and out. Samples that reach perf's rings late, or with a wrong time, break both.

use std::collections::BTreeMap;

use crate::ensure::{ensure, ensure_eq};
use crate::perf_record::{Fallible, perf, record, shown};
use crate::programs::text;
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[
    ("recording_of_switches_and_a_clock_is_in_order", recording_of_switches_and_a_clock_is_in_order),
    ("samples_of_a_task_lie_between_its_switches", samples_of_a_task_lie_between_its_switches),
];

/// Tasks that sleep and wake often, and two that use both CPUs.
const SWITCHING: &str = "for i in 1 2 3; do \
    (j=0; while [ $j -lt 300 ]; do j=$((j+1)); usleep 500; done) & \
    done; workload hot > /dev/null & workload hot > /dev/null; wait";
/// Tasks that take turns on both CPUs.
const TURNS: &str = "for i in 1 2 3 4; do workload hot > /dev/null & done; wait";

/// Returns the number of records, and how many of them perf found out of order.
fn out_of_order(clock: &[&str]) -> Fallible<(usize, usize)> {
    let switches = ["-m", "2", "-a", "-e", "sched:sched_switch"];
    let command = ["--", "sh", "-c", SWITCHING];
    record("order", &[&switches[..], clock, &command].concat())?;
    let output = perf(&["script", "-v", "-f", "-i", "order"])?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf script: {said}");
    // perf sums up its complaints in a line.
    let late = said
        .lines()
        .find_map(|line| line.trim().strip_suffix(" out of order events recorded."))
        .map_or(Ok(0), str::parse)?;
    Ok((text(&output.stdout).lines().count(), late))
}

/// `perf record` writes a mark after each round through its rings. A sample that enters a ring after a later round of
/// other rings is out of order.
fn recording_of_switches_and_a_clock_is_in_order() -> Outcome {
    for (clock, name) in [
        (&["-F", "20", "-e", "cpu-clock"][..], "the kernel's clock"),
        (&["-e", "vpmu/cpu-clock,freq=20/"], "our clock"),
    ] {
        let (records, late) = out_of_order(clock)?;
        println!("{late} of {records} records with {name} are out of order");
        ensure!(records > 100, "only {records} records with {name}");
        ensure_eq!(late, 0, "records out of order, of {records} with {name}");
    }
    Ok(())
}

/// Whether a task runs, and the time of its last switch.
#[derive(Debug, Clone, Copy)]
struct Last {
    runs: bool,
    time: u128,
}

/// Parses `SECONDS.NANOSECONDS:`.
fn nanoseconds(word: &str) -> Option<u128> {
    let (seconds, rest) = word.strip_suffix(':')?.split_once('.')?;
    let (seconds, nanoseconds): (u128, u128) = (seconds.parse().ok()?, rest.parse().ok()?);
    (rest.len() == 9).then_some(seconds * 1_000_000_000 + nanoseconds)
}

/// Returns the numbers of samples inside and outside of their tasks' turns, and the lines of some outside.
fn turns(lines: &str) -> Fallible<(usize, usize, Vec<&str>)> {
    let mut tasks: BTreeMap<&str, Last> = BTreeMap::new();
    let (mut inside, mut outside, mut shown) = (0, 0, Vec::new());
    for line in lines.lines() {
        let mut words = line.split_whitespace();
        let (Some(task), Some(time)) = (words.next(), words.next().and_then(nanoseconds)) else {
            continue;
        };
        let rest: Vec<&str> = words.collect();
        if rest.first() == Some(&"PERF_RECORD_SWITCH") {
            let runs = match rest.get(1) {
                Some(&"IN") => true,
                Some(&"OUT") => false,
                _ => return Err(format!("a switch without direction: {line}").into()),
            };
            tasks.insert(task, Last { runs, time });
            continue;
        }
        // Before its first switch, a task runs: the recording begins with its exec, or its parent's fork.
        let last = tasks.get(task);
        if last.is_none_or(|last| last.runs || last.time == time) {
            inside += 1;
        } else {
            outside += 1;
            if shown.len() < 5 {
                shown.push(line);
            }
        }
    }
    Ok((inside, outside, shown))
}

fn samples_of_a_task_lie_between_its_switches() -> Outcome {
    for clock in [&["-F", "1000", "-e", "cpu-clock"][..], &["-e", "vpmu/cpu-clock,freq=1000/"]] {
        let command = ["--switch-events", "--", "sh", "-c", TURNS];
        record("turns", &[clock, &command].concat())?;
        let fields = ["--show-switch-events", "--ns", "-F", "tid,time,event"];
        let lines = shown(&[&["script", "-f", "-i", "turns"], &fields[..]].concat())?;
        let (inside, outside, shown) = turns(&lines)?;
        println!("{clock:?}: {inside} samples inside, {outside} outside");
        ensure!(inside > 100, "only {inside} samples:\n{lines:.2000}");
        ensure_eq!(outside, 0, "samples of {clock:?} outside of their task's turn, beside {inside} inside: {shown:?}");
    }
    Ok(())
}
