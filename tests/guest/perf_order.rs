//! Readers of a recording assume that its samples are in the order of time, and that a task's samples lie between its
//! switches in and out. Samples that reach perf's rings late, or with a wrong time, break both.

use std::collections::BTreeMap;

use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{perf, record, shown};
use crate::programs::text;
use crate::{Fallible, Outcome};

const GROUP: &str = "stock-order";

/// Tasks that sleep and wake often, and two that use both CPUs.
const SWITCHING: &str = "for i in 1 2 3; do \
    (j=0; while [ $j -lt 300 ]; do j=$((j+1)); usleep 500; done) & \
    done; workload hot > /dev/null & workload hot > /dev/null; wait";
/// Tasks that take turns on both CPUs.
const TURNS: &str = "for i in 1 2 3 4; do workload hot > /dev/null & done; wait";

/// The records that perf found out of order, and the number of samples of the clock.
struct Order {
    samples: usize,
    /// Lines of the clock's samples.
    late_samples: Vec<String>,
    /// Number of other records: the kernel's own of its switches.
    late_switches: usize,
}

/// Records switches and a clock.
fn order(clock: &[&str]) -> Fallible<Order> {
    let switches = ["-m", "2", "-a", "-e", "sched:sched_switch"];
    let command = ["--", "sh", "-c", SWITCHING];
    record("order", &[&switches[..], clock, &command].concat())?;
    // perf prints the time of each record that is out of order, in microseconds.
    let output =
        perf(&["--debug", "ordered-events=1", "script", "-v", "-f", "-i", "order", "--ns", "-F", "time,event"])?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf script: {said}");
    let late: Vec<&str> = said
        .lines()
        .filter_map(|line| line.trim_start_matches('[').strip_suffix("] out of order event").map(str::trim))
        .collect();
    let all = said.lines().find_map(|line| line.trim().strip_suffix(" out of order events recorded."));
    ensure_eq!(late.len(), all.map_or(Ok(0), str::parse)?, "records out of order: {said:.2000}");
    let lines = text(&output.stdout);
    let samples: Vec<&str> = lines.lines().filter(|line| line.contains("cpu-clock")).collect();
    let is_late = |line: &&&str| late.iter().any(|time| line.trim_start().starts_with(time));
    let late_samples: Vec<String> = samples.iter().filter(is_late).map(ToString::to_string).collect();
    Ok(Order { samples: samples.len(), late_switches: late.len().saturating_sub(late_samples.len()), late_samples })
}

/// `perf record` writes a mark after each round through its rings. A sample that enters a ring after a later round of
/// other rings is out of order. A record of a switch, which the kernel itself writes, can be, too: the lab's host may
/// take the vCPU away after the kernel has read the clock for the record.
#[apply(guest_test)]
fn recording_of_switches_and_a_clock_is_in_order() -> Outcome {
    for clock in [&["-F", "20", "-e", "cpu-clock"][..], &["-e", "vpmu/cpu-clock,freq=20/"]] {
        let Order { samples, late_samples, late_switches } = order(clock)?;
        println!(
            "{clock:?}: of {samples} samples, {} are out of order; of the switches, {late_switches}",
            late_samples.len()
        );
        ensure!(samples > 20, "only {samples} samples of {clock:?}");
        ensure!(late_samples.is_empty(), "samples of {clock:?} out of order, of {samples}: {late_samples:?}");
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

/// Returns the numbers of samples inside and outside of their tasks' turns, and the lines of some outside, each with the
/// time of its task's last switch.
fn turns(lines: &str) -> Fallible<(usize, usize, Vec<String>)> {
    let timed = |line| Some((str::split_whitespace(line).nth(1).and_then(nanoseconds)?, line));
    let mut records: Vec<(u128, &str)> = lines.lines().filter_map(timed).collect();
    // A sample enters perf's ring up to a tick late, maybe after its task has left the CPU. If perf has read the rings
    // twice by then, it prints the sample after the switch. The claim here is about the times alone.
    records.sort_by_key(|&(time, _)| time);
    let mut tasks: BTreeMap<&str, Last> = BTreeMap::new();
    let (mut inside, mut outside, mut shown) = (0, 0, Vec::new());
    for (time, line) in records {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [task, _, rest @ ..] = &words[..] else { continue };
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
        match tasks.get(task) {
            Some(last) if !last.runs && last.time != time => {
                outside += 1;
                if shown.len() < 5 {
                    shown.push(format!("{line} after the switch at {} ns", last.time));
                }
            }
            _ => inside += 1,
        }
    }
    Ok((inside, outside, shown))
}

#[apply(guest_test)]
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
