//! Programs that are not this project's read the recordings of the VMM and of stock perf, and the profiles that `vmm
//! export` makes of them. Each must find what the recorded program did, sample for sample.

use std::fs;
use std::path::Path;
use std::process::Command;

use images::prerequisites::{self, Prerequisite};
use images::profile_readers;

use crate::persistent::ends::{MARKS, SESSION};

/// Functions of `workload tree`, outermost first.
const TREE: [&str; 5] = ["tree::begin", "tree::tree", "three_quarters", "one_quarter", "tree::hot_leaf"];

/// Runs a program in a directory with the files of the session, and returns what it prints.
fn output(mut command: Command, files: &[&str], arguments: &[&str]) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().expect("a directory");
    for name in files {
        fs::write(directory.path().join(name), SESSION.get().file(name)).expect("a file");
    }
    // The programs keep configuration and caches there.
    let command = command.args(arguments).current_dir(directory.path()).env("HOME", directory.path());
    let output = command.env("LC_ALL", "C").output().expect("the program runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (directory, text)
}

fn read(directory: &Path, name: &str) -> Vec<u8> {
    fs::read(directory.join(name)).expect("a file")
}

fn exported(name: &str) {
    let session = SESSION.get();
    assert_eq!(session.exit(&format!("export-{name}")), 0, "{}", session.text(&format!("{name}.notes")));
}

/// The samples of a profile: how many, and the functions of their stack, innermost first.
fn pprof(name: &str) -> Vec<(u64, Vec<String>)> {
    let text = output(profile_readers::pprof().expect("pprof"), &[name], &["-raw", name]).1;
    let (_, samples) = text.split_once("Samples:\n").expect("samples");
    let (samples, locations) = samples.split_once("Locations\n").expect("locations");
    // `number: address mapping function file:line`
    let function = |number: &str| {
        let line = locations.lines().find(|line| line.trim_start().starts_with(&format!("{number}: ")));
        let words: Vec<&str> = line.expect("a location").split_whitespace().collect();
        words.iter().skip(2).find(|word| !word.starts_with("M=")).copied().unwrap_or_default().to_owned()
    };
    let sample = |line: &str| {
        let (values, stack) = line.split_once(": ")?;
        let count = values.split_whitespace().next()?.parse().ok()?;
        Some((count, stack.split_whitespace().map(function).collect()))
    };
    samples.lines().filter_map(sample).collect()
}

#[apply(tests::host_test)]
fn pprof_counts_every_mark_before_the_panic() {
    exported("panic.pprof");
    let samples = pprof("panic.pprof");
    assert_eq!(samples.iter().map(|(count, _)| count).sum::<u64>(), MARKS, "{samples:?}");
}

/// The samples of `perf script` that have the function on their stack, and all.
fn scripted(function: &str) -> (u64, u64) {
    let text = SESSION.get().text("tree.script");
    let samples = text.split("\n\n").filter(|sample| !sample.trim().is_empty());
    let with = samples.clone().filter(|sample| sample.contains(function));
    (with.count() as u64, samples.count() as u64)
}

#[apply(tests::host_test)]
fn pprof_finds_the_callers_that_perf_finds() {
    exported("tree.pprof");
    let samples = pprof("tree.pprof");
    let sum = |samples: &mut dyn Iterator<Item = &(u64, Vec<String>)>| samples.map(|(count, _)| count).sum::<u64>();
    let all = sum(&mut samples.iter());
    for function in TREE {
        let with = |(_, stack): &&(u64, Vec<String>)| stack.iter().any(|name| name.contains(function));
        let found = sum(&mut samples.iter().filter(with));
        assert_eq!((found, all), scripted(function), "{function}");
        assert!(found > 0, "no sample of {function}");
    }
}

/// Counts the samples in what hotspot's parser writes: after a magic and a version, messages with their lengths.
fn hotspot(name: &str) -> usize {
    const MAGIC: &[u8] = b"QPERFSTREAM\0";
    const SAMPLE: u8 = 13;
    let parser = profile_readers::perfparser().expect("hotspot's parser");
    let (directory, _) = output(parser, &[name], &["--input", name, "--output", "messages"]);
    let bytes = read(directory.path(), "messages");
    let mut rest = bytes.strip_prefix(MAGIC).and_then(|rest| rest.get(4..)).expect("the magic and the version");
    let mut samples = 0;
    while let Some((size, message)) = rest.split_first_chunk() {
        let size = u32::from_le_bytes(*size) as usize;
        samples += usize::from(message.first() == Some(&SAMPLE));
        rest = message.get(size..).expect("a whole message");
    }
    samples
}

#[apply(tests::host_test)]
fn hotspot_reads_every_sample() {
    let script = SESSION.get().text("panic.script");
    assert_eq!(hotspot("panic.data"), script.lines().count(), "samples of hotspot and perf");
    assert_eq!(hotspot("tree.data") as u64, scripted("").1, "samples of hotspot and perf");
}

#[apply(tests::host_test)]
fn recording_keeps_its_marks_through_perf_inject() {
    prerequisites::ensure(&[Prerequisite::Perf]).expect("stock perf");
    let perf = || Command::new(prerequisites::perf().expect("stock perf"));
    let (directory, _) = output(perf(), &["panic.data"], &["inject", "-f", "-i", "panic.data", "-o", "injected.data"]);
    let script = ["script", "-f", "-i", "injected.data", "-F", "tid,cpu,time,event,addr"];
    let mut command = perf();
    let output = command.args(script).current_dir(directory.path()).env("LC_ALL", "C").output().expect("perf runs");
    let lines = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    let expected = lines(&SESSION.get().text("panic.script"));
    assert_eq!(lines(&String::from_utf8_lossy(&output.stdout)), expected);
    assert!(expected.len() as u64 >= MARKS);
}
