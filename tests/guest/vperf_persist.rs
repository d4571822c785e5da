//! `vperf persist` and `vperf flush` from the command line.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use vpmu_client::Vpmu;

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::os;
use crate::persisting;
use crate::programs::{json, text, vperf, vperf_succeeds};
use crate::{Fallible, Outcome};

const GROUP: &str = "vperf";

fn said(args: &[&str]) -> Fallible<String> {
    let output = vperf_succeeds(args)?;
    Ok(text(&output.stdout))
}

/// The list of persistent events.
fn list() -> Fallible<Vec<Value>> {
    let list = json(said(&["persist", "ls", "--json"])?.as_bytes())?;
    Ok(list.as_array().ok_or("no list")?.clone())
}

fn named(name: &str) -> Fallible<Option<Value>> {
    Ok(list()?.into_iter().find(|event| event["name"] == name))
}

fn new(args: &[&str]) -> Fallible<Value> {
    json(said(&[&["persist", "new", "--json"], args].concat())?.as_bytes())
}

/// Places marks of these values on CPU 0.
fn place(values: std::ops::Range<u32>) -> Outcome {
    cpu::pin(0)?;
    let marks = Vpmu::open()?.marks()?;
    for value in values {
        marks.place(value)?;
    }
    Ok(())
}

/// Returns the values of the marks in lines of text.
fn values(lines: &str, name: &str) -> Vec<u64> {
    let word = format!("{name}: 0x");
    let value = |line: &str| {
        let rest = &line[line.find(&word)? + word.len()..];
        u64::from_str_radix(rest.split(' ').next()?, 16).ok()
    };
    lines.lines().filter_map(value).collect()
}

fn fails(args: &[&str], remedy: &str) -> Outcome {
    let output = vperf(args)?;
    let said = text(&output.stderr);
    ensure_eq!(output.status.code(), Some(125), "exit code of {args:?}: {said}");
    ensure!(said.contains(remedy), "{args:?}: no {remedy:?} in {said}");
    ensure_eq!(said.trim_end().lines().count(), 1, "lines of the message: {said}");
    Ok(())
}

#[apply(guest_test)]
fn recorder_is_created_read_and_ended() -> Outcome {
    persisting::fresh()?;
    let made = new(&["-e", "mark=7", "-C", "0", "--size", "16K", "--name", "signposts"])?;
    ensure_eq!(made[0]["name"], "signposts", "the name in {made}");
    place(5..10)?;
    let event = named("signposts")?.ok_or("the event is not listed")?;
    ensure_eq!(event["id"], made[0]["id"], "the id in {event}");
    for (key, expected) in [
        ("cpu", Value::from(0)),
        ("event", "mark=7".into()),
        ("period", 1.into()),
        ("ring", 16384.into()),
        ("count", 1.into()),
        ("enabled", true.into()),
        ("overwrites", true.into()),
        ("operators", false.into()),
    ] {
        ensure_eq!(event[key], expected, "{key} of {event}");
    }
    let id = event["id"].to_string();
    // The test dumps the event by name, by id, and in a dump of all events. A dump removes no records.
    for args in [&["persist", "dump", "signposts"][..], &["persist", "dump", &id], &["persist", "dump"]] {
        let lines = said(args)?;
        ensure_eq!(values(&lines, "signposts"), [7], "values shown by {args:?}: {lines}");
    }
    let table = said(&["persist", "ls"])?;
    ensure!(table.contains("signposts") && table.contains("16 KiB"), "the list lacks the event or its size: {table}");
    said(&["persist", "rm", "signposts"])?;
    ensure!(named("signposts")?.is_none(), "the event was not ended");
    Ok(())
}

#[apply(guest_test)]
fn dump_can_be_reported() -> Outcome {
    persisting::fresh()?;
    new(&["-e", "mark=7", "-C", "0", "--size", "16K", "--name", "posts"])?;
    new(&["-e", "marks", "-C", "0", "--size", "16K", "--name", "all"])?;
    place(0..20)?;
    let file = "/tmp/persist.vperf";
    let _ = fs::remove_file(file);
    said(&["persist", "dump", "posts", "all", "-o", file])?;
    let report = json(said(&["report", "-i", file, "--json"])?.as_bytes())?;
    ensure_eq!(report["samples"], 21, "samples in {report}");
    ensure_eq!(report["events"][0]["event"], "posts", "name of the first event in {report}");
    ensure_eq!(report["events"][1]["event"], "all", "name of the second event in {report}");
    Ok(())
}

#[apply(guest_test)]
fn newest_marks_are_dumped() -> Outcome {
    persisting::fresh()?;
    new(&["-e", "marks", "-C", "0", "--size", "4K", "--name", "newest"])?;
    place(0..1000)?;
    let lines = said(&["persist", "dump", "newest"])?;
    let values = values(&lines, "newest");
    let first = values.first().copied().unwrap_or_default();
    ensure_eq!(values, (first..1000).collect::<Vec<_>>(), "values of the newest marks");
    // A record has 64 bytes at most.
    ensure!(values.len() >= 4096 / 64 - 1, "only {} marks", values.len());
    Ok(())
}

#[apply(guest_test)]
fn unread_marks_stay_until_they_are_read() -> Outcome {
    persisting::fresh()?;
    new(&["-e", "marks", "-C", "0", "--size", "4K", "--until-full", "--name", "oldest"])?;
    place(0..1000)?;
    let read = |lines: &str| values(lines, "oldest");
    let kept = read(&said(&["persist", "dump", "oldest"])?);
    ensure_eq!(kept, (0..kept.len() as u64).collect::<Vec<_>>(), "values of the oldest marks");
    ensure!((10..1000).contains(&kept.len()), "{} marks were kept", kept.len());
    ensure_eq!(read(&said(&["persist", "dump", "oldest"])?), kept, "values in a second dump");
    Ok(())
}

/// Attaches a reader to `name`, and calls `then` when the reader has started to read. Interrupts the reader after it
/// has shown `last`. Returns the values and the rest of the reader's output.
fn attach(name: &str, last: u64, then: impl FnOnce() -> Outcome) -> Fallible<(Vec<u64>, Output)> {
    let mut reader = Command::new("vperf")
        .args(["persist", "attach", name])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(reader.stdout.take().ok_or("no output")?);
    let mut line = String::new();
    let mut seen = Vec::new();
    // The reader prints its first line when it has started to read.
    ensure!(lines.read_line(&mut line)? > 0, "the reader printed nothing");
    seen.extend(values(&line, name));
    then()?;
    while seen.last() != Some(&last) {
        line.clear();
        ensure!(lines.read_line(&mut line)? > 0, "the reader ended before mark {last}: {seen:?}");
        seen.extend(values(&line, name));
    }
    let pid = reader.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status()?;
    ensure!(sent.success(), "kill -INT failed");
    Ok((seen, reader.wait_with_output()?))
}

#[apply(guest_test)]
fn attached_event_ends_with_its_reader() -> Outcome {
    for (name, manner) in [("kept", &["--until-full"][..]), ("newest", &[])] {
        persisting::fresh()?;
        new(&[&["-e", "marks", "-C", "0", "--size", "64K", "--name", name], manner].concat())?;
        place(0..30)?;
        let (seen, output) = attach(name, 99, || place(30..100))?;
        ensure_eq!(seen, (0..100).collect::<Vec<_>>(), "{name}: values shown");
        let reported = text(&output.stderr);
        ensure!(output.status.success(), "vperf persist attach failed: {reported}");
        ensure!(reported.contains("counted 100;"), "the count is not 100: {reported}");
        ensure!(
            reported.contains("100 samples shown, 0 lost, 0 bytes"),
            "the summary does not report 100 samples and no losses: {reported}"
        );
        ensure!(named(name)?.is_none(), "{name} has not ended");
    }
    Ok(())
}

#[apply(guest_test)]
fn events_of_all_cpus_are_made_or_none() -> Outcome {
    persisting::fresh()?;
    let cpus = std::thread::available_parallelism()?.get();
    let made = new(&["-e", "task-clock", "-F", "100", "--name", "flight"])?;
    ensure_eq!(made.as_array().map(Vec::len), Some(cpus), "number of events made: {made}");
    for cpu in 0..cpus {
        let event = named(&format!("flight-{cpu}"))?.ok_or("not listed")?;
        ensure_eq!(event["cpu"], cpu, "the CPU in {event}");
    }
    // The name of the last CPU's event is still in use. So vperf must end the event that it has just created on CPU 0.
    said(&["persist", "rm", "flight-0"])?;
    fails(&["persist", "new", "-e", "task-clock", "--name", "flight"], "another event has this name")?;
    ensure_eq!(list()?.len(), cpus - 1, "the events that are left");
    Ok(())
}

#[apply(guest_test)]
fn persistent_event_without_a_ring_is_listed() -> Outcome {
    persisting::fresh()?;
    new(&["-e", "mark=9", "-C", "0", "--size", "0", "--name", "counter"])?;
    place(0..10)?;
    let event = named("counter")?.ok_or("not listed")?;
    ensure_eq!(event["count"], 1, "the count in {event}");
    ensure_eq!(event["ring"], Value::Null, "the ring in {event}");
    fails(&["persist", "dump", "counter"], "only counts")?;
    ensure_eq!(said(&["persist", "dump"])?, "", "the dump of an event without a ring");
    let output = vperf(&["persist", "attach", "counter"])?;
    let reported = text(&output.stderr);
    ensure!(
        output.status.success() && reported.contains("counted 1;"),
        "vperf persist attach failed, or the count is not 1: {reported}"
    );
    ensure!(named("counter")?.is_none(), "the event has not ended");
    Ok(())
}

#[apply(guest_test)]
fn wrong_names_have_their_remedy() -> Outcome {
    persisting::fresh()?;
    fails(&["persist", "dump", "signpost"], "vperf persist ls")?;
    new(&["-e", "mark=7", "-C", "0", "--name", "signposts"])?;
    fails(&["persist", "dump", "signpost"], "did you mean signposts?")?;
    // If one of the names is wrong, vperf ends none of the events.
    fails(&["persist", "rm", "signposts", "12345678"], "12345678")?;
    ensure!(named("signposts")?.is_some(), "the event was ended");
    for wrong in ["Posts", "1st", "a b", &"a".repeat(40)] {
        fails(&["persist", "new", "-e", "mark=8", "-C", "0", "--name", wrong], "lower-case letters")?;
    }
    fails(&["persist", "new", "-e", "mark=1,mark=2", "--name", "two"], "--name two")?;
    fails(&["persist", "new", "-e", "halts"], "takes no samples")?;
    ensure_eq!(list()?.len(), 1, "events listed");
    Ok(())
}

#[apply(guest_test)]
fn persist_without_perfmon_is_refused() -> Outcome {
    persisting::fresh()?;
    new(&["-e", "mark=7", "-C", "0", "--name", "signposts"])?;
    os::become_nobody()?;
    for args in [
        &["persist", "new", "-e", "mark=8", "-C", "0"][..],
        &["persist", "dump", "signposts"],
        &["persist", "attach", "signposts"],
        &["persist", "rm", "signposts"],
    ] {
        fails(args, "CAP_PERFMON")?;
    }
    Ok(())
}

#[apply(guest_test)]
fn flush_names_the_missing_event() -> Outcome {
    persisting::fresh()?;
    said(&["flush"])?;
    new(&["-e", "mark=7", "-C", "0", "--name", "signposts"])?;
    said(&["flush"])?;
    said(&["flush", "signposts"])?;
    fails(&["flush", "signposts", "nobody"], "vperf persist ls")
}

#[apply(guest_test)]
#[group = "vperf-operator"]
fn operators_events_can_be_read_but_not_ended() -> Outcome {
    let operators = |event: &Value| event["operators"] == true;
    let before: Vec<Value> = list()?.into_iter().filter(operators).collect();
    ensure!(!before.is_empty(), "the operator started no event");
    let name = before[0]["name"].as_str().ok_or("the event has no name")?.to_owned();
    said(&["persist", "dump", &name])?;
    said(&["flush", &name])?;
    for verb in ["rm", "attach"] {
        fails(&["persist", verb, &name], "vmm ctl")?;
    }
    let after = list()?.into_iter().filter(operators).count();
    ensure_eq!(after, before.len(), "the operator's events that are left");
    Ok(())
}
