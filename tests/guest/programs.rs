//! vperf as a person uses it.

use std::io::{self, Read, Write};
use std::process::{Command, ExitCode, Output};

use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::{Fallible, Outcome};

const GROUP: &str = "vperf";

/// `guest-tests mark VALUE TIMES`: a command that places a known number of marks, for other programs to measure.
///
/// With `in_turn`, the command reads a byte before each mark, and writes the byte after the mark. Two such commands
/// that are connected by pipes place their marks alternately.
pub(crate) fn place_marks(value: &str, times: &str, in_turn: bool) -> ExitCode {
    let (Ok(value), Ok(times)) = (value.parse(), times.parse::<u32>()) else {
        return ExitCode::from(2);
    };
    let place = || -> Outcome {
        let vpmu = Vpmu::open()?;
        let mut turn = [0];
        for _ in 0..times {
            if in_turn {
                io::stdin().read_exact(&mut turn)?;
            }
            vpmu.mark(value)?;
            if in_turn {
                io::stdout().write_all(&turn)?;
                io::stdout().flush()?;
            }
        }
        Ok(())
    };
    match place() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn vperf(args: &[&str]) -> Fallible<Output> {
    Ok(Command::new("vperf").args(args).current_dir("/tmp").output()?)
}

/// Runs vperf, which must succeed.
pub(crate) fn vperf_succeeds(args: &[&str]) -> Fallible<Output> {
    let output = vperf(args)?;
    ensure!(output.status.success(), "vperf {args:?} failed: {}", text(&output.stderr));
    Ok(output)
}

/// Returns arguments without spaces as a slice for [`vperf`].
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn json(bytes: &[u8]) -> Fallible<serde_json::Value> {
    serde_json::from_slice(bytes).map_err(|e| format!("{e}: {}", text(bytes)).into())
}

#[apply(guest_test)]
fn list_names_every_source() -> Outcome {
    let output = vperf_succeeds(&["list"])?;
    let listed = text(&output.stdout);
    for entry in Vpmu::open()?.catalogue().entries() {
        ensure!(!entry.source.is_empty(), "{} names no source", entry.name);
        ensure!(!entry.counts.is_empty(), "{} does not say what it counts", entry.name);
        ensure!(listed.contains(&entry.name), "{} is not in:\n{listed}", entry.name);
        ensure!(listed.contains(&entry.source), "{} is not in:\n{listed}", entry.source);
    }
    Ok(())
}

/// Returns the count of `event` from the JSON of `vperf stat`.
pub(crate) fn count(json: &serde_json::Value, event: &str) -> Option<u64> {
    json["events"].as_array()?.iter().find(|e| e["event"] == event)?["value"].as_u64()
}

#[apply(guest_test)]
fn stat_counts_a_command_exactly() -> Outcome {
    let args = ["stat", "--json", "-e", "mark=3,mark=4,task-clock", "--"];
    // Directly, and as children of a shell.
    for command in
        [&["guest-tests", "mark", "3", "123"][..], &["sh", "-c", "guest-tests mark 3 100; guest-tests mark 3 23"]]
    {
        let output = vperf_succeeds(&[&args[..], command].concat())?;
        let counts = json(&output.stdout)?;
        ensure_eq!(count(&counts, "mark=3"), Some(123), "marks of value 3 by {command:?}: {counts}");
        ensure_eq!(count(&counts, "mark=4"), Some(0), "marks of value 4 by {command:?}: {counts}");
        ensure!(count(&counts, "task-clock") > Some(0), "the task-clock is zero: {counts}");
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_passes_the_exit_code_on() -> Outcome {
    for code in [0, 7] {
        let output = vperf(&["stat", "--", "sh", "-c", &format!("exit {code}")])?;
        ensure_eq!(output.status.code(), Some(code), "vperf's exit code: {}", text(&output.stderr));
    }
    let missing = vperf(&["stat", "--", "no-such-program"])?;
    ensure!(!missing.status.success(), "a command that does not exist succeeded");
    ensure!(
        text(&missing.stderr).contains("no-such-program"),
        "vperf does not name the missing program: {}",
        text(&missing.stderr)
    );
    Ok(())
}

#[apply(guest_test)]
fn stat_counts_cpus() -> Outcome {
    let marks = ["guest-tests", "mark", "3", "50"];
    let output = vperf_succeeds(&[&["stat", "--json", "-a", "-e", "mark=3", "--"], &marks[..]].concat())?;
    let counts = json(&output.stdout)?;
    ensure_eq!(count(&counts, "mark=3"), Some(50), "marks on all CPUs: {counts}");
    Ok(())
}

#[apply(guest_test)]
fn stat_names_what_it_does_not_know() -> Outcome {
    let output = vperf(&["stat", "-e", "task-clok", "--", "true"])?;
    let said = text(&output.stderr);
    ensure!(!output.status.success(), "an unknown event was accepted");
    ensure!(
        said.contains("task-clok") && said.contains("task-clock"),
        "vperf does not suggest task-clock for task-clok: {said}"
    );
    ensure_eq!(said.trim_end().lines().count(), 1, "lines of the message: {said}");
    Ok(())
}

/// While the command stops vperf, its ring becomes full and stays full to the end.
#[apply(guest_test)]
fn record_reports_the_samples_lost_at_the_end() -> Outcome {
    let burst = "kill -STOP $PPID; guest-tests mark 3 400; kill -CONT $PPID";
    let args = ["record", "-e", "mark=3", "-c", "1", "-m", "1", "-o", "/tmp/burst.vperf", "--", "sh", "-c", burst];
    let output = vperf_succeeds(&args)?;
    let said = text(&output.stderr);
    let numbers: Vec<u64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [written, lost, ..] = numbers[..] else {
        return Err(format!("no numbers of samples: {said}").into());
    };
    ensure!(lost > 0, "400 samples fit into a page: {said}");
    ensure_eq!(written + lost, 400, "samples written and lost: {said}");
    Ok(())
}

#[apply(guest_test)]
fn record_and_report_find_the_hot_function() -> Outcome {
    let file = "/tmp/hot.vperf";
    let output = vperf(&["record", "-e", "task-clock", "-o", file, "--", "workload", "hot", "--rounds", "1500"])?;
    let said = text(&output.stderr) + &text(&output.stdout);
    ensure!(output.status.success(), "vperf record failed: {said}");
    ensure!(said.contains("0 lost"), "records were lost, or no number is reported: {said}");
    let output = vperf_succeeds(&["report", "-i", file, "--json"])?;
    let report = json(&output.stdout)?;
    let rows = report["events"][0]["rows"].as_array().ok_or("no rows in the report")?;
    let samples = |name: &str| {
        rows.iter()
            .find(|s| s["symbol"].as_str().is_some_and(|s| s.contains(name)))
            .and_then(|s| s["samples"].as_u64())
            .unwrap_or_default()
    };
    // Compares only samples of the two functions, because the cost of the program's start varies with the machine.
    let hot = samples("hot_three_quarters");
    let both = hot + samples("warm_one_quarter");
    ensure!(both >= 100, "{both} samples are too few: {report}");
    let percent = hot * 100 / both;
    ensure!((60..=90).contains(&percent), "the hot function has {percent} % of the work: {report}");
    let table = vperf(&["report", "-i", file])?;
    ensure!(
        text(&table.stdout).contains("hot_three_quarters"),
        "the report's text lacks hot_three_quarters: {}",
        text(&table.stdout)
    );
    Ok(())
}

#[apply(guest_test)]
fn report_refuses_what_is_no_recording() -> Outcome {
    for file in ["/tmp/no-such-file", "/proc/cpuinfo"] {
        let output = vperf(&["report", "-i", file])?;
        ensure!(!output.status.success(), "{file} was accepted");
        ensure!(text(&output.stderr).contains(file), "vperf does not name {file}: {}", text(&output.stderr));
    }
    Ok(())
}
