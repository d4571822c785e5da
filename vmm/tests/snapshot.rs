//! Saves a running machine. Afterwards that machine continues, and so does each machine that is restored from the
//! snapshot.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Output};

use common::machine::{Machine, marking, restore_refused, spelling};
use common::{Bench, ctl, messages, out, read_report, refused, run, values, vmm};
use serde_json::{Value, json};

/// The page that the guests in these tests write to.
const WRITTEN: u64 = (3 << 20) / 4096;
/// The first page of the operator's rings in the memory file. The file has 16 MiB of RAM, and then the window of 16
/// MiB. These rings are in the last quarter of the window.
const RING: u64 = (28 << 20) / 4096;

/// The pages in the diff in `directory`.
fn pages(directory: &Path) -> Value {
    let state = fs::read_to_string(directory.join("state")).expect("text");
    let line = state.lines().nth(1).expect("a second line");
    let state: Value = serde_json::from_str(line).expect("JSON");
    state["changed"].clone()
}

/// The memory of the snapshot in `directory`, without the last page of the file, which has the snapshot's name.
fn memory(directory: &Path) -> Vec<u8> {
    let mut memory = fs::read(directory.join("memory")).expect("readable");
    memory.truncate(memory.len() - 4096);
    memory
}

#[test]
fn snapshot_continues_where_it_was_taken_at_each_restore() {
    for args in [&["--no-vpmu"][..], &[], &["--vcpus", "2"]] {
        let bench = Bench::new();
        let mut machine = Machine::boot(&bench, args);
        assert_eq!([machine.next(), machine.next()], ["aa", "bb"]);
        let directory = bench.path("here");
        machine.saved(&directory);
        assert_eq!(machine.next(), "cc", "the saved machine itself continues");
        let sockets = ["one.sock", "two.sock"];
        let [mut one, mut two] = sockets.map(|name| Machine::restore(&directory, bench.path(name), &[]));
        assert_eq!([one.next(), one.next(), two.next()], ["cc", "dd", "cc"]);
        assert_eq!([two.next(), one.next(), machine.next()], ["dd", "ee", "dd"]);
        // A restored machine can be saved, too.
        let later = bench.path("later");
        one.saved(&later);
        let mut three = Machine::restore(&later, bench.path("three.sock"), &[]);
        assert_eq!(three.next(), "ff");
        for machine in [machine, one, two, three] {
            machine.end();
        }
    }
}

#[test]
fn machine_without_a_pmu_is_restored_by_the_flags_it_was_started_with() {
    let bench = Bench::new();
    let flags = ["--no-vpmu", "--window", "32M"];
    let machine = Machine::boot(&bench, &flags);
    let directory = bench.path("here");
    machine.saved(&directory);
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &flags);
    assert_eq!(other.next(), "aa");
    machine.end();
    other.end();
}

#[test]
fn machine_ends_with_its_snapshot_when_asked() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &["--then-exit"]);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert_eq!(machine.child.wait().expect("a child").code(), Some(6));
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!(other.next(), "bb");
    other.end();
}

#[test]
fn machine_completes_its_snapshot_without_its_client() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let directory = bench.path("here");
    fs::create_dir(&directory).expect("made");
    let [memory, state] = ["memory", "state"].map(|name| File::create(directory.join(name)).expect("made"));
    drop(machine.asked(&memory, &state));
    let (code, text, log) = machine.rest();
    assert_eq!((code, text.as_str()), (6, ""), "{log}");
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!(other.next(), "bb");
    other.end();
}

#[test]
fn machine_continues_if_its_state_cannot_be_written() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let memory = File::create(bench.path("memory")).expect("made");
    let state = bench.file("state", b"");
    let mut client = machine.asked(&memory, &File::open(&state).expect("ours"));
    let mut reply = String::new();
    client.read_line(&mut reply).expect("a reply");
    assert!(reply.starts_with("{\"error\":\"cannot write the snapshot's files to disk: "), "{reply}");
    assert_eq!(fs::metadata(state).expect("there").len(), 0);
    // The machine can be saved again.
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &["--then-exit"]);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    let (code, _, log) = machine.rest();
    assert_eq!(code, 6, "{log}");
}

#[test]
fn complete_snapshot_is_kept_if_its_state_cannot_be_copied() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let directory = bench.path("here");
    let output = machine.snapshot_without_room(&directory, &["--then-exit"]);
    refused(&output, 1, &["has completed the snapshot", "too large"]);
    assert_eq!(machine.rest().0, 6);
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!(other.next(), "bb");
    other.end();
}

#[test]
fn files_of_an_interrupted_snapshot_are_replaced_by_the_next() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    fs::create_dir(&directory).expect("made");
    for (name, contents) in [("memory", "part"), ("state", "")] {
        fs::write(directory.join(name), contents).expect("written");
    }
    machine.saved(&directory);
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!([machine.next(), other.next()], ["aa", "aa"]);
    machine.end();
    other.end();
}

#[test]
fn directory_that_is_not_empty_keeps_its_files_and_the_machine_runs_on() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    fs::create_dir(&directory).expect("made");
    fs::write(directory.join("notes"), "mine").expect("written");
    let output = machine.snapshot(&directory, &[]);
    refused(&output, 1, &["empty"]);
    assert_eq!(fs::read_dir(&directory).expect("there").count(), 1);
    assert_eq!(machine.next(), "aa");
    machine.end();
}

#[test]
fn failed_write_leaves_nothing_and_the_machine_runs_on() {
    let bench = Bench::new();
    // Ignore SIGXFSZ, so that a write beyond the file size limit fails instead of killing the machine.
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$@\"";
    command.args(["-c", script, "sh"]);
    let machine = run(&bench.kernel(&spelling()));
    command.arg(machine.get_program()).args(machine.get_args());
    let mut machine = Machine::start(command, bench.path("vm.sock"));
    assert_eq!(machine.said(1), "!");
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &[]);
    refused(&output, 1, &["cannot write the memory"]);
    assert!(!directory.exists());
    assert_eq!(machine.next(), "aa");
    machine.end();
}

#[test]
fn reset_of_a_restored_machine_boots_from_zeroed_memory() {
    let bench = Bench::new();
    // mov ecx, 3 MiB; cmp byte [rcx], 0
    let mut second = vec![0xb9, 0x00, 0x00, 0x30, 0x00, 0x80, 0x39, 0x00];
    // setne al; add al, '0'; mov dx, 0x3f8; out dx, al
    second.extend([0x0f, 0x95, 0xc0, 0x04, b'0', 0x66, 0xba, 0xf8, 0x03, 0xee]);
    second.extend(common::power_off());
    let kernel = bench.file("second.elf", &common::elf(&second, 0));
    let first = bench.file("first.elf", &common::elf(&resetting(), 0));
    let mut machine = Machine::start(run(&first), bench.path("first.sock"));
    assert_eq!(machine.said(1), "!");
    let directory = bench.path("here");
    machine.saved(&directory);
    machine.end();
    let mut command = vmm(["run", "--on-reset", "restart", "--kernel"]);
    command.arg(&kernel).arg("--restore").arg(&directory);
    let mut machine = Machine::start(command, bench.path("second.sock"));
    let input = machine.child.stdin.as_mut().expect("piped");
    input.write_all(b"x").expect("the machine reads");
    assert_eq!(machine.said(1), "0");
    assert_eq!(machine.child.wait().expect("a child").code(), Some(0));
}

/// A guest that writes to memory, prints `!`, and resets when it gets the first byte of input.
fn resetting() -> Vec<u8> {
    // mov ecx, 3 MiB; mov byte [rcx], 1
    let mut code = vec![0xb9, 0x00, 0x00, 0x30, 0x00, 0xc6, 0x01, 0x01];
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    code.extend(out(0xcf9, 0x06));
    code.extend(common::HALT);
    code
}

#[test]
fn diff_has_the_pages_written_since_its_base_and_no_others() {
    let bench = Bench::new();
    let ring = ["--persistent", "marks,name=flight,size=4K"];
    let args = [&["--track-dirty"], &ring[..]].concat();
    let mut machine = Machine::boot_of(&bench, &marking(), &args);
    assert_eq!(machine.next(), "aa");
    let [base, one, two] = ["base", "one", "two"].map(|name| bench.path(name));
    machine.saved(&base);
    assert_eq!(pages(&base), Value::Null);
    assert_eq!(machine.next(), "bb");
    machine.saved_diff(&one, &base);
    // The guest wrote its page. The device wrote the ring's metadata page, and the page that has the records.
    let written = json!([[WRITTEN, 1], [RING, 2]]);
    assert_eq!(pages(&one), written);
    machine.saved_diff(&two, &one);
    // Only the ring's metadata page was written, because the save updated the event's times there.
    assert_eq!(pages(&two), json!([[RING, 1]]));
    machine.end();
    let recording = bench.path("perf.data");
    let path = recording.to_str().expect("text");
    let args = ["--track-dirty", "--recording", path];
    let mut machine = Machine::restore(&two, bench.path("other.sock"), &args);
    assert_eq!(machine.next(), "cc");
    // The restored snapshot can be a base, too.
    let three = bench.path("three");
    machine.saved_diff(&three, &two);
    assert_eq!(pages(&three), written);
    machine.end();
    assert_eq!(values(&recording), [1, 7, 7, 7]);
    let mut machine = Machine::restore(&three, bench.path("third.sock"), &[]);
    assert_eq!(machine.next(), "dd");
    machine.end();
}

#[test]
fn diff_on_its_base_is_the_memory_of_a_whole_snapshot() {
    for args in [&["--track-dirty", "--no-vpmu"][..], &["--track-dirty"]] {
        let bench = Bench::new();
        let mut machine = Machine::boot(&bench, args);
        let [base, one, two, whole] = ["base", "one", "two", "whole"].map(|name| bench.path(name));
        assert_eq!(machine.next(), "aa");
        machine.saved(&base);
        assert_eq!(machine.next(), "bb");
        machine.saved_diff(&one, &base);
        assert_eq!([machine.next(), machine.next()], ["cc", "dd"]);
        machine.saved_diff(&two, &one);
        machine.saved(&whole);
        machine.end();
        // Move the snapshots, so that they are restored from another directory.
        let moved = bench.path("moved");
        fs::create_dir(&moved).expect("made");
        let place = |path: &Path| moved.join(path.file_name().expect("a name"));
        for path in [&base, &one, &two, &whole] {
            fs::rename(path, place(path)).expect("ours");
        }
        let [by_diff, by_whole] = [(&two, "by-diff"), (&whole, "by-whole")].map(|(from, name)| {
            let mut machine = Machine::restore(&place(from), bench.path("other.sock"), &[]);
            let again = bench.path(name);
            machine.listens();
            machine.saved(&again);
            machine.end();
            memory(&again)
        });
        assert!(by_diff == by_whole, "memory differs");
        assert!(by_whole == memory(&place(&whole)), "memory has changed");
    }
}

#[test]
fn diff_without_its_base_is_refused() {
    let bench = Bench::new();
    let [base, other, diff, one] = ["base", "other", "diff", "one"].map(|name| bench.path(name));
    let said = |output: &Output, words: &str| {
        refused(output, 1, &[words]);
        assert!(!diff.exists());
    };
    let machine = Machine::boot(&bench, &[]);
    machine.saved(&base);
    said(&machine.diff(&diff, &base), "--track-dirty");
    machine.end();
    fs::remove_dir_all(&base).expect("ours");
    let machine = Machine::boot(&bench, &["--track-dirty"]);
    said(&machine.diff(&diff, &base), "base: No such file");
    machine.saved(&base);
    machine.saved(&other);
    said(&machine.diff(&diff, &base), "the last one");
    machine.saved_diff(&one, &other);
    machine.end();
    restore_refused(&one, &["--memory", "64"], 2, &["--memory"]);
    fs::rename(&other, bench.path("away")).expect("ours");
    restore_refused(&one, &[], 1, &["snapshot's base", "other does not exist", "--base"]);
    fs::rename(&base, &other).expect("ours");
    restore_refused(&one, &[], 1, &["other is not the snapshot"]);
}

#[test]
fn pages_of_a_snapshot_that_failed_are_in_the_next_diff() {
    let bench = Bench::new();
    let mut machine = Machine::boot_of(&bench, &marking(), &["--track-dirty"]);
    let [base, diff] = ["base", "diff"].map(|name| bench.path(name));
    machine.saved(&base);
    assert_eq!(machine.next(), "aa");
    let file = |name| File::open(bench.file(name, b"")).expect("ours");
    let mut reply = String::new();
    machine.asked(&file("memory"), &file("state")).read_line(&mut reply).expect("a reply");
    assert!(reply.starts_with("{\"error\":\"cannot write the memory: "), "{reply}");
    machine.saved_diff(&diff, &base);
    assert_eq!(pages(&diff), json!([[WRITTEN, 1]]));
    machine.end();
}

#[test]
fn machine_that_was_reset_has_no_base() {
    let bench = Bench::new();
    let mut command = run(&bench.kernel(&resetting()));
    command.args(["--track-dirty", "--on-reset", "restart"]);
    let mut machine = Machine::start(command, bench.path("vm.sock"));
    assert_eq!(machine.said(1), "!");
    let base = bench.path("base");
    machine.saved(&base);
    let input = machine.child.stdin.as_mut().expect("piped");
    input.write_all(b"x").expect("the machine reads");
    assert_eq!(machine.said(1), "!");
    let output = machine.diff(&bench.path("diff"), &base);
    refused(&output, 1, &["reset"]);
    machine.end();
}

#[test]
fn events_go_on_over_twenty_saves_and_restores() {
    let bench = Bench::new();
    let event = ["--persistent", "marks,name=flight"];
    let mut machine = Machine::boot_of(&bench, &marking(), &event);
    let recording = bench.path("perf.data");
    let path = recording.to_str().expect("text");
    for (cycle, letter) in ('a'..='t').enumerate() {
        assert_eq!(machine.next(), format!("{letter}{letter}"));
        let directory = bench.path(&format!("{cycle}"));
        let output = machine.snapshot(&directory, &["--then-exit"]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
        assert_eq!(machine.child.wait().expect("a child").code(), Some(6));
        let socket = bench.path(&format!("{cycle}.sock"));
        machine = Machine::restore(&directory, socket, &["--recording", path]);
        if let Some(before) = cycle.checked_sub(1) {
            fs::remove_dir_all(bench.path(&format!("{before}"))).expect("ours");
        }
    }
    assert_eq!(machine.next(), "uu");
    let output = ctl(&machine.socket, &["list", "--json"]);
    let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let event = &listed["events"][0];
    assert_eq!((&event["count"], &event["lost"]), (&22.into(), &0.into()));
    machine.end();
    let marks = [&[1], &[7; 21][..]].concat();
    assert_eq!(values(&recording), marks);
}

#[test]
fn report_of_a_restored_machine_is_that_of_its_own_run() {
    let bench = Bench::new();
    let machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    machine.saved(&directory);
    machine.end();
    let report = bench.path("report.json");
    let path = report.to_str().expect("text");
    let mut machine = Machine::restore(&directory, bench.path("other.sock"), &["--report", path]);
    assert_eq!(machine.next(), "aa");
    machine.end();
    let report = read_report(&report);
    assert_eq!(report["boots"], 1);
    assert_eq!(report["confinement"]["seccomp"], true);
    assert_eq!(report["boot_to_init_ns"], Value::Null);
}
