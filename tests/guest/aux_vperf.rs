//! Tests `vperf exits` and `vperf record --aux` as users run them, on commands whose exits are known exactly.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;
use vpmu_client::trace::Format;
use vpmu_client::{Entry, Vpmu};

use crate::cpu::{OWN_IN_USER_MODE, PORT_REASON, PORT_WRITTEN};
use crate::ensure::{ensure, ensure_eq};
use crate::programs::{json, text, vperf, vperf_succeeds, words};
use crate::{Fallible, Outcome};

const GROUP: &str = "aux";

/// Numbers that the device defines: the kinds of the two traces, the config for exits to the VMM, and the pace that
/// counts exits.
const KIND_EXIT_TRACE: u32 = 0x105;
const KIND_SAMPLE_TRACE: u32 = 0x106;
const EXIT_USER: u64 = 1;
const PACE_EXITS: u64 = 1;

fn entry(kind: u32, config: u64) -> Fallible<Entry> {
    let vpmu = Vpmu::open()?;
    let mut entries = vpmu.catalogue().entries().iter();
    let found = entries.find(|entry| (entry.kind, entry.config) == (kind, config));
    Ok(found.ok_or_else(|| format!("no trace of kind {kind:#x} and config {config}"))?.clone())
}

/// Runs `vperf exits record` with the output file `file`. Returns its messages.
fn record(file: &str, args: &[&str]) -> Fallible<String> {
    let output = vperf_succeeds(&[&["exits", "record", "-o", file], args].concat())?;
    let said = text(&output.stderr);
    ensure!(!said.contains("could not be read"), "packets could not be read: {said}");
    Ok(said)
}

/// Returns the first trace in the output of `vperf exits report --sort KEYS` for `file`.
fn report(file: &str, keys: &str) -> Fallible<Value> {
    let output = vperf_succeeds(&["exits", "report", "-i", file, "--json", "--sort", keys])?;
    let report = json(&output.stdout)?;
    Ok(report["traces"][0].clone())
}

fn rows(trace: &Value) -> Fallible<&Vec<Value>> {
    let rows = trace["tables"][0]["rows"].as_array();
    Ok(rows.ok_or_else(|| format!("no rows: {trace}"))?)
}

/// Checks that no part of the trace is missing or reported as lost.
fn nothing_is_lost(trace: &Value) -> Outcome {
    ensure_eq!(trace["lost"], 0, "lost exits: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn exits_of_a_command_are_all_there() -> Outcome {
    let file = "/tmp/ports.vperf";
    for times in [0, 1, 5000] {
        let count = times.to_string();
        let command = ["--reason", PORT_REASON, "--", "guest-tests", "ports", &count];
        let said = record(file, &command)?;
        ensure!(said.contains("0 bytes lost"), "vperf does not report zero lost bytes: {said}");
        let trace = report(file, "what,task")?;
        nothing_is_lost(&trace)?;
        let written: Vec<(&str, u64)> = rows(&trace)?
            .iter()
            .filter(|row| row["what"] == PORT_WRITTEN)
            .filter_map(|row| Some((row["task"].as_str()?, row["exits"].as_u64()?)))
            .collect();
        if times == 0 {
            ensure!(written.is_empty(), "a command without port writes has some: {written:?}");
        } else {
            ensure_eq!(written, [("guest-tests", times)], "port writes by task: {trace}");
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn exits_name_who_caused_them() -> Outcome {
    let file = "/tmp/callers.vperf";
    // Records all CPUs, so that the report must distinguish the command's exits from other tasks' exits.
    record(file, &["-a", "--reason", "user", "--", "guest-tests", "ports", "300"])?;
    let trace = report(file, "reason,what,task,symbol")?;
    nothing_is_lost(&trace)?;
    let (mut sum, mut time) = (0, 0);
    for row in rows(&trace)?.iter().filter(|row| row["what"] == PORT_WRITTEN) {
        ensure_eq!(row["reason"], PORT_REASON, "the reason in {row}");
        ensure_eq!(row["task"], "guest-tests", "the task in {row}");
        let symbol = row["symbol"].as_str().unwrap_or_default();
        ensure!(
            symbol.starts_with("[.] ") && symbol.contains("guest_tests"),
            "not a user symbol of guest-tests: {row}"
        );
        let number = |key: &str| row[key].as_u64().unwrap_or_default();
        ensure!(
            number("worst_ns") >= number("mean_ns") && number("mean_ns") > 0,
            "the worst time is below the mean, or the mean is zero: {row}"
        );
        sum += number("exits");
        time += number("total_ns");
    }
    ensure_eq!(sum, 300, "port writes: {trace}");
    ensure!(Some(time) <= trace["total_ns"].as_u64(), "port writes took {time} ns, more than all exits: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn exits_alone_records_and_shows() -> Outcome {
    let file = "/tmp/alone.vperf";
    // Without `--reason`, vperf records the exits for every reason that the host reports.
    let command = ["sh", "-c", "guest-tests ports 20; exit 7"];
    let output = vperf(&[&["exits", "-o", file, "--"], &command[..]].concat())?;
    ensure_eq!(output.status.code(), Some(7), "vperf's exit code: {}", text(&output.stderr));
    let shown = text(&output.stdout);
    for part in ["EXITS", "WORST  REASON", "TASK"] {
        ensure!(shown.contains(part), "{part} is not in:\n{shown}");
    }
    // The report describes an access in the same words, whether the reason is defined by the device or by the hardware.
    let trace = report(file, "what,task")?;
    nothing_is_lost(&trace)?;
    let ports = rows(&trace)?.iter().filter(|row| row["what"] == PORT_WRITTEN);
    let ports: Vec<u64> = ports.filter_map(|row| row["exits"].as_u64()).collect();
    ensure_eq!(ports, [20], "port writes: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn timeline_has_every_exit() -> Outcome {
    let file = "/tmp/timeline.vperf";
    record(file, &["--reason", PORT_REASON, "--", "guest-tests", "ports", "400"])?;
    vperf_succeeds(&["exits", "timeline", "-i", file, "-o", "/tmp/timeline.json"])?;
    let timeline = json(&fs::read("/tmp/timeline.json")?)?;
    let events = timeline["traceEvents"].as_array().ok_or("no events")?;
    let ports: Vec<&Value> =
        events.iter().filter(|event| event["ph"] == "X" && event["args"]["what"] == PORT_WRITTEN).collect();
    ensure_eq!(ports.len(), 400, "port writes in the timeline");
    // In the timeline, the exits of one task do not overlap. No exit begins before the previous exit has ended.
    let mut after = f64::MIN;
    for event in ports {
        let (at, lasted) = (event["ts"].as_f64(), event["dur"].as_f64());
        let (Some(at), Some(lasted)) = (at, lasted) else {
            return Err(format!("no time: {event}").into());
        };
        // The sum is rounded, so it may be off by a thousandth of a nanosecond.
        ensure!(at >= after - 1e-6 && lasted > 0.0, "{event} begins before {after}, or lasts no time");
        after = at + lasted;
    }
    let lines = events.iter().filter(|event| event["name"] == "thread_name");
    ensure!(lines.count() >= 1, "the timeline names no thread");
    Ok(())
}

#[apply(guest_test)]
fn trace_beside_samples_is_in_the_file() -> Outcome {
    let file = "/tmp/beside.vperf";
    let trace = entry(KIND_EXIT_TRACE, EXIT_USER)?;
    ensure_eq!(trace.trace, Some(Format::Exits), "the format of {}", trace.name);
    let line = format!(
        "record -e mark=3 -c 10 --aux {trace} --aux-size 1M -o {file} -- guest-tests mark 3 500",
        trace = trace.name
    );
    vperf_succeeds(&words(&line))?;
    let shown = text(&vperf(&["report", "-i", file])?.stdout);
    ensure!(
        shown.contains(&trace.name) && shown.contains("vperf exits report"),
        "the report does not name the trace and its tool: {shown}"
    );
    let output = vperf(&["report", "-i", file, "--json"])?;
    let samples = json(&output.stdout)?;
    ensure_eq!(samples["events"][0]["samples"], 50, "samples of the marks: {samples}");
    let exits = report(file, "reason")?;
    nothing_is_lost(&exits)?;
    ensure_eq!(samples["events"][1]["samples"], exits["exits"], "exits: {samples}");
    // Each mark causes an exit, and the program may have caused other exits, too.
    ensure!(exits["exits"].as_u64() >= Some(500), "fewer exits than marks: {exits}");
    Ok(())
}

#[apply(guest_test)]
fn trace_of_samples_is_a_profile() -> Outcome {
    let file = "/tmp/registers.vperf";
    let trace = entry(KIND_SAMPLE_TRACE, PACE_EXITS)?;
    let line = format!("record -e mark=3 -c 10 --aux {trace} -o {file} -- guest-tests ports 1000", trace = trace.name);
    vperf_succeeds(&words(&line))?;
    let output = vperf(&["report", "-i", file, "--json", "--sort", "comm"])?;
    let report = json(&output.stdout)?;
    let events = report["events"].as_array().ok_or("no events")?;
    let profile = events.iter().find(|event| event["event"] == trace.name.as_str());
    let profile = profile.ok_or_else(|| format!("no {}: {report}", trace.name))?;
    ensure_eq!(profile["lost"], 0, "lost samples: {report}");
    // There is a sample for every tenth exit to the VMM, and the command made a few more than a thousand exits.
    let samples = profile["samples"].as_u64().unwrap_or_default();
    ensure!((100..150).contains(&samples), "{samples} samples for about 1,000 exits by 10: {report}");
    Ok(())
}

#[apply(guest_test)]
fn snapshot_holds_the_newest_exits() -> Outcome {
    let file = "/tmp/newest.vperf";
    let args = ["--snapshot", "-m", "8K", "--reason", PORT_REASON, "--"];
    record(file, &[&args[..], &["guest-tests", "ports", "2000"]].concat())?;
    let trace = report(file, "what")?;
    ensure_eq!(trace["snapshot"], true, "whether the trace is a snapshot: {trace}");
    ensure_eq!(trace["lost"], 0, "lost exits of a snapshot: {trace}");
    // The area has two pages. The snapshot leaves out only the page that is being overwritten.
    let exits = trace["exits"].as_u64().unwrap_or_default();
    ensure!((62..=126).contains(&exits), "the exits do not fill one to two pages: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn signal_takes_a_snapshot_and_another_ends_it() -> Outcome {
    let file = "/tmp/signal.vperf";
    // The command prints a line after its last exit, and then waits.
    let mut recorder = Command::new("vperf")
        .args(["exits", "record", "--snapshot", "-m", "64K", "--reason", PORT_REASON, "-o", file, "--"])
        .args(["sh", "-c", "guest-tests ports 100; echo done; exec sleep 1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let output = recorder.stdout.take().ok_or("no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    ensure_eq!(line, "done\n", "the command's output");
    let pid = recorder.id().to_string();
    let kill = |signal: &str| -> Outcome {
        let sent = Command::new("kill").args([signal, &pid]).status()?;
        ensure!(sent.success(), "kill {signal} failed");
        Ok(())
    };
    kill("-USR2")?;
    let mut said = BufReader::new(recorder.stderr.take().ok_or("no standard error")?);
    let mut line = String::new();
    while !line.contains("snapshot taken") {
        line.clear();
        ensure!(said.read_line(&mut line)? > 0, "no snapshot was reported");
    }
    kill("-INT")?;
    let status = recorder.wait()?;
    // The signal ended the command, and vperf returns the command's status.
    ensure_eq!(status.code(), Some(128 + 2), "vperf's end");
    let trace = report(file, "what,task")?;
    let row = |row: &&Value| row["what"] == PORT_WRITTEN && row["task"] == "guest-tests";
    let row = rows(&trace)?.iter().find(row);
    let exits = row.and_then(|row| row["exits"].as_u64());
    ensure_eq!(exits, Some(100), "exits of the command: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn recorder_that_stalls_reports_losses() -> Outcome {
    let file = "/tmp/stalled.vperf";
    // The command stops vperf, its parent process, so that the area of two pages fills.
    let script = "kill -STOP $PPID; guest-tests ports 1000; kill -CONT $PPID; guest-tests ports 50";
    let said = record(file, &["-m", "8K", "--reason", PORT_REASON, "--", "sh", "-c", script])?;
    ensure!(said.contains("--aux-size"), "vperf does not name --aux-size: {said}");
    let trace = report(file, "what")?;
    let number = |key: &str| trace[key].as_u64().unwrap_or_default();
    let lost = number("lost");
    // On architectures with ports, only the command's accesses cause these exits. On others, the driver's notifications
    // cause some of them.
    let exits = number("exits") + lost;
    match OWN_IN_USER_MODE {
        true => ensure!(exits >= 1050, "{exits} exits, written and lost, are too few: {trace}"),
        false => ensure_eq!(exits, 1050, "exits, written and lost: {trace}"),
    }
    ensure!(lost >= 1000 - 128, "too few exits were lost: {trace}");
    Ok(())
}

#[apply(guest_test)]
fn wrong_traces_name_the_remedy() -> Outcome {
    let trace = entry(KIND_EXIT_TRACE, EXIT_USER)?.name;
    let cases: [(&[&str], &str); 6] = [
        (&["record", "-e", &trace, "--", "true"], "--aux"),
        (&["record", "--aux", "task-clock", "--", "true"], "vperf list"),
        (&["record", "--snapshot", "--", "true"], "--aux"),
        (&["exits", "record", "-m", "3M", "--", "true"], "power of two"),
        (&["exits", "record", "-m", "1024G", "--", "true"], "at most"),
        (&["exits", "report", "-i", "/proc/cpuinfo"], "/proc/cpuinfo"),
    ];
    for (args, remedy) in cases {
        let output = vperf(args)?;
        let said = text(&output.stderr);
        ensure_eq!(output.status.code(), Some(125), "exit code of {args:?}: {said}");
        ensure!(said.contains(remedy), "{args:?}: no {remedy:?} in {said}");
    }
    Ok(())
}
