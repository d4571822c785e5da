//! Profiles against stock perf: `perf script` lists the same stacks of the same file.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hint::black_box;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use images::prerequisites::{self, Prerequisite};
use vpmu_profile::{Format, Names, Options, Profile};

/// Set in the process that perf records.
const SPIN: &str = "VPMU_PROFILE_TEST_SPINS";

fn perf(arguments: &[&str], path: &Path) -> Output {
    prerequisites::ensure(&[Prerequisite::Perf]).expect("stock perf");
    let perf = prerequisites::perf().expect("stock perf");
    let output = Command::new(perf).args(arguments).arg(path).env("LC_ALL", "C").output().expect("perf starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "perf {arguments:?}: {errors}");
    output
}

/// The samples of `perf script`, folded. Names in brackets are different ways to say that the name is unknown.
fn script(path: &Path, event: &str) -> BTreeMap<String, u64> {
    let output = perf(&["script", "-F", "comm,tid,event,ip,sym", "-i"], path);
    let text = String::from_utf8(output.stdout).unwrap();
    let symbol = |words: &[&str]| unknown(&words[1..].join(" "));
    // The task and the frames of each sample, innermost first.
    let mut samples: Vec<(String, Vec<String>)> = Vec::new();
    let mut is_wanted = false;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with('\t') {
            if is_wanted {
                samples.last_mut().unwrap().1.push(symbol(&words));
            }
            continue;
        }
        // A task without a name is `:TID`.
        let at = words.iter().position(|word| word.ends_with(':')).unwrap();
        let name = words[at].trim_end_matches(':');
        is_wanted = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-') == event;
        if is_wanted {
            // Without a chain, the address and the symbol are in the same line.
            let frame = words.get(at + 1..).filter(|words| !words.is_empty()).map(symbol);
            samples.push((words[..at - 1].join(" "), frame.into_iter().collect()));
        }
    }
    let mut stacks: BTreeMap<String, u64> = BTreeMap::new();
    for (task, mut frames) in samples {
        frames.push(task);
        frames.reverse();
        *stacks.entry(frames.join(";")).or_default() += 1;
    }
    stacks
}

fn unknown(name: &str) -> String {
    if name.starts_with('[') { "?".to_owned() } else { name.to_owned() }
}

fn folded(profile: &Profile) -> BTreeMap<String, u64> {
    let text = String::from_utf8(common::exported(profile, Format::Folded, &Options::default())).unwrap();
    let mut stacks: BTreeMap<String, u64> = BTreeMap::new();
    for line in text.lines() {
        let (stack, weight) = line.rsplit_once(' ').unwrap();
        let stack = stack.split(';').map(unknown).collect::<Vec<_>>().join(";");
        *stacks.entry(stack).or_default() += weight.parse::<u64>().unwrap();
    }
    stacks
}

#[test]
fn folded_stacks_of_a_guest_are_those_of_perf_script() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("perf.data");
    fs::write(&path, common::guest()).unwrap();
    let profile = Profile::read(File::open(&path).unwrap(), Names::none()).unwrap();
    // perf does not tell the idle tasks of the vCPUs apart.
    let mut expected = BTreeMap::new();
    for (stack, weight) in folded(&profile) {
        let stack = match stack.split_once(';') {
            Some((task, frames)) if task.starts_with("swapper/") => format!("swapper;{frames}"),
            _ => stack,
        };
        *expected.entry(stack).or_default() += weight;
    }
    let found: BTreeMap<String, u64> = script(&path, "cpu-clock")
        .into_iter()
        .map(|(stack, weight)| (stack.replace(":0;", "swapper;"), weight))
        .collect();
    assert_eq!(found, expected);
}

/// Spins in the process that perf records.
#[inline(never)]
fn spin_for_the_profiler() -> u64 {
    let end = Instant::now() + Duration::from_millis(300);
    let mut sum: u64 = 1;
    while Instant::now() < end {
        for _ in 0..100_000 {
            sum = black_box(sum.wrapping_mul(3));
        }
    }
    sum
}

#[test]
fn functions_of_a_stock_recording_are_named_by_build_id() {
    if std::env::var_os(SPIN).is_some() {
        black_box(spin_for_the_profiler());
        return;
    }
    prerequisites::ensure(&[Prerequisite::Perf]).expect("stock perf");
    // perf notes build ids at the end of the recording, or in the records of mappings.
    for build_ids in ["--no-buildid-mmap", "--buildid-mmap"] {
        named_by_build_id(build_ids);
    }
}

fn named_by_build_id(option: &str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("perf.data");
    let output = Command::new(prerequisites::perf().expect("stock perf"))
        .args(["record", "-q", "-e", "cpu-clock:u", "-F", "499", option, "-o"])
        .arg(&path)
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "functions_of_a_stock_recording_are_named_by_build_id"])
        .env(SPIN, "1")
        .output()
        .expect("perf starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |names| Profile::read(File::open(&path).unwrap(), names).unwrap();
    let total = |stacks: &BTreeMap<String, u64>| stacks.values().sum::<u64>();
    let spinning = |stacks: &BTreeMap<String, u64>| -> u64 {
        let found = stacks.iter().filter(|(stack, _)| stack.contains("spin_for_the_profiler"));
        found.map(|(_, weight)| weight).sum()
    };
    let expected = script(&path, "cpu-clock:u");
    let named = folded(&read(Names::none().with(None, Some(Path::new("/"))).unwrap()));
    assert_eq!(total(&named), total(&expected));
    assert_eq!(spinning(&named), spinning(&expected));
    assert!(spinning(&named) * 2 > total(&named), "{named:?}");
    // The directory of another machine has files with other build ids.
    let other = tempfile::tempdir().unwrap();
    let executable = std::env::current_exe().unwrap();
    let copy = other.path().join(executable.strip_prefix("/").unwrap());
    fs::create_dir_all(copy.parent().unwrap()).unwrap();
    fs::copy("/bin/true", &copy).unwrap();
    let unnamed = folded(&read(Names::none().with(None, Some(other.path())).unwrap()));
    assert_eq!((total(&unnamed), spinning(&unnamed)), (total(&expected), 0));
}
