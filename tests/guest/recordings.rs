//! One format of recordings: stock perf reads what vperf recorded, vperf reads what stock perf recorded, and both find
//! the same samples.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::cpu::{PORT_REASON, PORT_WRITTEN};
use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{MARK_3, record, script, shown, tally};
use crate::programs::{json, text, vperf_succeeds, words};
use crate::{Fallible, Outcome};

const GROUP: &str = "stock-record";

const MARKS: [&str; 5] = ["--", "guest-tests", "mark", "3", "200"];
/// A function of `workload hot`.
const HOT: &str = "hot_three_quarters";

/// The first event in the report of vperf.
fn report(file: &str, sort: &str) -> Fallible<Value> {
    let output = vperf_succeeds(&["report", "-i", file, "--json", "--sort", sort])?;
    Ok(json(&output.stdout)?["events"][0].clone())
}

/// The number of samples in each row of a report, by the field `key`.
fn rows(event: &Value, key: &str) -> Fallible<BTreeMap<String, u64>> {
    let rows = event["rows"].as_array().ok_or("no rows")?;
    let row = |row: &Value| Some((row[key].as_str()?.to_owned(), row["samples"].as_u64()?));
    Ok(rows.iter().filter_map(row).collect())
}

/// The folded stacks of vperf with their samples.
fn folded(file: &str, event: &str) -> Fallible<Vec<(String, usize)>> {
    let output = vperf_succeeds(&["export", file, "--to", "folded", "--event", event])?;
    let stack = |line: &str| {
        let (stack, samples) = line.rsplit_once(' ').ok_or_else(|| format!("no samples in {line}"))?;
        Ok((stack.to_owned(), samples.parse()?))
    };
    text(&output.stdout).lines().map(stack).collect()
}

/// The samples of `perf script`, each with its functions, innermost first.
fn chains(file: &str) -> Fallible<Vec<Vec<String>>> {
    let shown = shown(&["script", "-f", "-i", file, "-F", "event,ip,sym"])?;
    let mut samples: Vec<Vec<String>> = Vec::new();
    for line in shown.lines() {
        match line.strip_prefix('\t') {
            Some(frame) => {
                let function = frame.split_whitespace().skip(1).collect::<Vec<_>>().join(" ");
                samples.last_mut().ok_or("a frame before the first sample")?.push(function);
            }
            None if line.trim().is_empty() => {}
            None => samples.push(Vec::new()),
        }
    }
    Ok(samples)
}

#[apply(guest_test)]
fn perf_reads_marks_that_vperf_recorded() -> Outcome {
    let file = "ours.data";
    vperf_succeeds(&[&["record", "-e", "mark=3", "-c", "1", "-o", file], &MARKS[..]].concat())?;
    let lines = script(file, "comm,event,addr")?;
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let tally: Vec<(Vec<String>, usize)> =
        tally(&lines).into_iter().map(|(line, times)| (words(line), times)).collect();
    ensure_eq!(tally, [(words("guest-tests mark=3: 3"), 200)], "the samples that perf lists");
    let report = shown(&["report", "-f", "-i", file, "--stdio", "--sort", "comm"])?;
    ensure!(report.contains("100.00%  guest-tests"), "perf report: {report}");
    // perf copies the records into another file, and compares files.
    shown(&["inject", "-f", "-i", file, "-o", "injected.data"])?;
    ensure_eq!(script("injected.data", "comm,event,addr")?, lines, "the samples after perf inject");
    shown(&["diff", "-f", file, "injected.data"])?;
    let header = shown(&["report", "-f", "-i", file, "--header-only"])?;
    ensure!(header.contains("vperf record -e mark=3"), "the header lacks the command: {header}");
    Ok(())
}

#[apply(guest_test)]
fn perf_names_functions_that_vperf_recorded() -> Outcome {
    let file = "/tmp/hot.data";
    vperf_succeeds(&words(&format!("record -e task-clock -o {file} -- workload hot --rounds 1500")))?;
    let lines = script(file, "comm,ip,sym")?;
    let theirs = lines.iter().filter(|line| line.starts_with("workload") && line.contains(HOT)).count();
    let event = report(file, "symbol")?;
    ensure_eq!(event["samples"].as_u64(), Some(lines.len() as u64), "samples of vperf and perf: {event}");
    let ours: u64 = rows(&event, "symbol")?.iter().filter(|(symbol, _)| symbol.contains(HOT)).map(|(_, n)| n).sum();
    ensure_eq!(ours, theirs as u64, "samples of {HOT}");
    ensure!(ours >= 30, "only {ours} samples of {HOT}");
    // Of the kernel's functions, perf takes the names from the recording.
    let kernel: u64 =
        rows(&event, "symbol")?.iter().filter(|(symbol, _)| symbol.starts_with("[k]")).map(|(_, n)| n).sum();
    let unknown = lines.iter().filter(|line| line.contains("[unknown]")).count();
    ensure_eq!(unknown, 0, "samples without a function, {kernel} in the kernel");
    Ok(())
}

#[apply(guest_test)]
fn perf_and_vperf_find_the_same_callers() -> Outcome {
    let file = "/tmp/tree.data";
    vperf_succeeds(&words(&format!("record -g -e task-clock -o {file} -- workload tree --rounds 1500")))?;
    let (theirs, ours) = (chains(file)?, folded(file, "task-clock")?);
    let all: usize = ours.iter().map(|(_, samples)| samples).sum();
    ensure_eq!(all, theirs.len(), "samples");
    for function in ["::begin", "::tree", "::three_quarters", "::one_quarter", "::hot_leaf"] {
        let of_perf = theirs.iter().filter(|chain| chain.iter().any(|name| name.ends_with(function))).count();
        let with = ours.iter().filter(|(stack, _)| stack.split(';').any(|name| name.ends_with(function)));
        let of_vperf: usize = with.map(|(_, samples)| samples).sum();
        ensure_eq!(of_vperf, of_perf, "samples below {function}");
        ensure!(of_perf > 0, "no sample below {function}");
    }
    Ok(())
}

#[apply(guest_test)]
fn perf_reads_exits_that_vperf_recorded() -> Outcome {
    let file = "/tmp/exits.data";
    let line = format!("exits record --reason {PORT_REASON} -o {file} -- guest-tests ports 300");
    vperf_succeeds(&words(&line))?;
    let output = vperf_succeeds(&["exits", "report", "-i", file, "--json", "--sort", "what"])?;
    let report = json(&output.stdout)?;
    let rows = report["traces"][0]["tables"][0]["rows"].as_array().ok_or("no rows")?;
    let written: Vec<&Value> = rows.iter().filter(|row| row["what"] == PORT_WRITTEN).map(|row| &row["exits"]).collect();
    ensure_eq!(written, [300], "port writes in {report}");
    let lines = script(file, "comm,event,addr")?;
    ensure_eq!(report["traces"][0]["exits"], lines.len(), "exits of vperf and samples of perf");
    // perf shows the address of the access that caused the exit.
    let address = PORT_WRITTEN.split(' ').find_map(|word| word.strip_prefix("0x")).ok_or("no address")?;
    let ports = lines.iter().filter(|line| line.starts_with("guest-tests") && line.ends_with(&format!(" {address}")));
    ensure_eq!(ports.count(), 300, "samples of perf at {address}: {:?}", lines.first());
    Ok(())
}

#[apply(guest_test)]
fn vperf_reads_marks_that_perf_recorded() -> Outcome {
    record("theirs", &[&["-e", MARK_3, "-c", "1"], &MARKS[..]].concat())?;
    let event = report("/tmp/theirs", "comm")?;
    ensure_eq!(rows(&event, "comm")?, BTreeMap::from([("guest-tests".to_owned(), 200)]), "samples by command: {event}");
    ensure_eq!(event["lost"], 0, "lost samples: {event}");
    Ok(())
}

#[apply(guest_test)]
fn vperf_names_functions_that_perf_recorded() -> Outcome {
    record("clock", &["-e", "cpu-clock", "-F", "500", "--", "workload", "hot", "--rounds", "1500"])?;
    let lines = script("clock", "comm,ip,sym")?;
    let theirs = lines.iter().filter(|line| line.contains(HOT)).count() as u64;
    let event = report("/tmp/clock", "symbol")?;
    ensure_eq!(event["samples"], lines.len(), "samples of vperf and perf: {event}");
    let rows = rows(&event, "symbol")?;
    let ours: u64 = rows.iter().filter(|(symbol, _)| symbol.contains(HOT)).map(|(_, n)| n).sum();
    ensure_eq!(ours, theirs, "samples of {HOT}: {event}");
    ensure!(ours >= 30, "only {ours} samples of {HOT}");
    let nameless: u64 = rows.iter().filter(|(symbol, _)| symbol.ends_with(" [kernel]")).map(|(_, n)| n).sum();
    ensure_eq!(nameless, 0, "samples in the kernel without a function: {event}");
    Ok(())
}

#[apply(guest_test)]
fn recording_is_exported_in_each_format() -> Outcome {
    let file = "/tmp/exported.data";
    vperf_succeeds(&[&["record", "-e", "mark=3", "-c", "1", "-o", file], &MARKS[..]].concat())?;
    let samples: usize = folded(file, "mark=3")?.iter().map(|(_, samples)| samples).sum();
    ensure_eq!(samples, 200, "samples of the folded stacks");
    for (format, start) in [("svg", "<"), ("firefox", "{"), ("perfetto", "{"), ("pprof", "\x1f")] {
        let output = format!("/tmp/exported.{format}");
        vperf_succeeds(&["export", file, "--to", format, "-o", &output])?;
        ensure!(fs::read(&output)?.starts_with(start.as_bytes()), "{format} does not start with {start:?}");
    }
    Ok(())
}
