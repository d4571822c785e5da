//! The program `guest-tests`: the tests that run in a booted guest, and the commands that tests run there.
//!
//! `guest-tests run GROUP` runs each test of a group in a separate process, and prints one framed line for each test.
//! On the host, tests of the same names boot a guest and read these lines. The host takes the names from
//! `guest-tests list`.

// `#[apply(MACRO)]` passes a function to a macro by example.
#[macro_use(apply)]
extern crate macro_rules_attribute;

// Before the modules that use its macros.
#[macro_use]
mod registry;

mod arch;
mod areas;
mod aux_exits;
mod aux_life;
mod aux_lockdown;
mod aux_mapping;
mod aux_pausing;
mod aux_records;
mod aux_samples;
mod aux_scope;
mod aux_sharing;
mod aux_vperf;
mod aux_wakeup;
mod aux_writer;
mod baseline;
mod beside;
mod boots;
mod carriers;
mod conformance;
mod counting;
mod cpu;
mod doorbell;
mod driver_life;
mod end_scenarios;
mod ensure;
mod fair;
mod fields;
mod flush;
mod groups;
mod hammer;
mod handled;
mod hostile;
mod interrupt;
mod kernel_log;
mod kexec;
mod known_code;
mod library;
mod loads;
mod module;
mod nesting;
mod one_shot;
mod open_cost;
mod os;
mod output_capped;
mod output_chains;
mod output_fields;
mod output_life;
mod output_mapping;
mod output_metadata;
mod output_reader;
mod output_reading;
mod output_redirect;
mod output_wakeup;
mod output_who;
mod output_writer;
mod overflows;
mod packets;
mod pages;
mod perf_command;
mod perf_core;
mod perf_habits;
mod perf_limits;
mod perf_options;
mod perf_order;
mod perf_record;
mod permissions;
mod persistent_life;
mod persistent_names;
mod persistent_operator;
mod persistent_rules;
mod persistent_window;
mod persisting;
mod policy;
mod policy_events;
mod probes;
mod profiled;
mod profiles;
mod programs;
mod raw;
mod recordings;
mod refusals;
mod restore;
mod ring_calls;
mod rings;
mod sampling;
mod stock_counters;
mod stock_perf;
mod storms;
mod switches;
mod tasks;
mod third_party_tools;
mod traced;
mod trigger_driver;
mod trigger_family;
mod trigger_forms;
mod trigger_regions;
mod trigger_rules;
mod triggers;
mod vperf_persist;
mod vperf_region;

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use guest_tests::wire::{self, Verdict};

use crate::registry::Test;

/// A result whose error is the reason for a test's failure.
type Fallible<T> = Result<T, Box<dyn Error>>;
/// The result of a test.
type Outcome = Fallible<()>;

/// The time limit of a test, which is far longer than any test needs. If a test hangs, only this test fails, not its
/// whole group.
const LIMIT: Duration = Duration::from_secs(300);
/// The time within which a killed test must end. A test that hangs in the kernel does not end.
const KILLED: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["list"] => list(),
        ["run", group] => match registry::group(group).as_slice() {
            [] => usage(),
            tests => run(group, tests),
        },
        ["one", group, name] => {
            let found = registry::group(group).into_iter().find(|test| test.name == *name);
            match found.map(|test| (test.run)()) {
                Some(Ok(())) => ExitCode::SUCCESS,
                Some(Err(error)) => {
                    eprintln!("{error}");
                    ExitCode::FAILURE
                }
                None => usage(),
            }
        }
        ["mark", value, times] => programs::place_marks(value, times, false),
        ["mark", value, times, "in-turn"] => programs::place_marks(value, times, true),
        ["conformance"] => conformance::run(),
        ["count-guests", file, program, arguments @ ..] => conformance::count_guests(file, program, arguments),
        ["hold-counters", count] => conformance::hold_counters(count),
        ["baseline", samples, rounds] => baseline::measure(samples, rounds),
        ["load", name, rounds] => loads::run(name, rounds),
        ["boots", rounds] => boots::measure(rounds),
        ["carriers"] => carriers::run(),
        ["overflows"] => overflows::run(),
        ["act"] => end_scenarios::act(),
        ["hammer", seed, operations] => hammer_by_hand(seed, operations),
        ["ports", times] => stock_perf::write_ports(times),
        ["deep", depth] => perf_habits::place_deep(depth),
        ["threads"] => perf_habits::place_by_threads(None),
        ["threads", rounds] => perf_habits::place_by_threads(Some(rounds)),
        _ => usage(),
    }
}

/// `guest-tests hammer SEED OPERATIONS`: runs the hammer test with this seed and number of calls.
fn hammer_by_hand(seed: &str, operations: &str) -> ExitCode {
    let (Ok(seed), Ok(operations)) = (seed.parse(), operations.parse()) else {
        return usage();
    };
    match hammer::run(seed, operations).and_then(|()| hammer::ensure_clean()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!(
        "usage: guest-tests list | run GROUP | one GROUP TEST | conformance | count-guests FILE PROGRAM [ARGUMENT...] | hold-counters COUNT | mark VALUE TIMES [in-turn] | ports TIMES | threads [in-turn] | overflows | act | baseline SAMPLES ROUNDS | load loop ROUNDS | load switches ROUNDS | boots ROUNDS | carriers | hammer SEED OPERATIONS"
    );
    ExitCode::from(2)
}

/// Prints the group and the name of each test.
fn list() -> ExitCode {
    for test in registry::all() {
        println!("{} {}", test.group, test.name);
    }
    ExitCode::SUCCESS
}

/// Runs the tests of a group one after another. Prints a framed line for each test, and one for the kernel's log.
fn run(group: &str, tests: &[Test]) -> ExitCode {
    if let Err(error) = cpu::bind_console() {
        eprintln!("binding the console's interrupt: {error}");
        return ExitCode::FAILURE;
    }
    let mut failed = false;
    for test in tests {
        // If the machine hangs during the test, this line names the test.
        println!("{}", wire::begins(test.name));
        os::drain_console();
        let began = Instant::now();
        let verdict = one(test);
        failed |= verdict != Verdict::Passed;
        println!("{}", wire::line(test.name, began.elapsed(), &verdict));
    }
    let began = Instant::now();
    let verdict = match kernel_log::ensure_no_fault_after(group) {
        Ok(()) => Verdict::Passed,
        Err(error) => Verdict::Failed(error.to_string()),
    };
    failed |= verdict != Verdict::Passed;
    println!("{}", wire::line(wire::KERNEL_LOG, began.elapsed(), &verdict));
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs one test in its own process. Whatever the test leaves open or locked ends with that process.
fn one(test: &Test) -> Verdict {
    let started = messages().and_then(|messages| {
        let child = Command::new("/proc/self/exe")
            .args(["one", test.group, test.name])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages.try_clone()?)
            .spawn()?;
        Ok((messages, child))
    });
    let (mut messages, mut child) = match started {
        Ok(started) => started,
        Err(error) => return Verdict::Failed(format!("cannot start: {error}")),
    };
    let ended_in_time = os::ends_within(child.id(), LIMIT);
    if !matches!(ended_in_time, Ok(true)) {
        print_stacks();
        let _ = child.kill();
        let dies = matches!(os::ends_within(child.id(), KILLED), Ok(true));
        if dies {
            let _ = child.wait();
        }
        return Verdict::Failed(match (ended_in_time, dies) {
            (Ok(_), true) => format!("still running after {LIMIT:?}"),
            (Ok(_), false) => format!("still running after {LIMIT:?}, and cannot be killed"),
            (Err(error), _) => format!("cannot wait: {error}"),
        });
    }
    let mut said = Vec::new();
    // The child's offset in the file is also this process's.
    let ended = child.wait().and_then(|status| {
        messages.rewind()?;
        messages.read_to_end(&mut said)?;
        Ok(status)
    });
    match ended {
        Ok(status) if status.success() => Verdict::Passed,
        Ok(status) => Verdict::Failed(format!("{}: {}", how(status), String::from_utf8_lossy(&said).trim())),
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

/// Has the kernel print the stacks of all CPUs and tasks on the console, which show what a test that hangs waits for.
fn print_stacks() {
    // 8 is the log level at which the console prints all messages.
    for request in ["8", "l", "t"] {
        let _ = fs::write("/proc/sysrq-trigger", request);
    }
}

/// A file without a name, for the messages of a test. A pipe holds only 64 KiB, and blocks a test that writes more,
/// because nobody reads it before the test ends.
fn messages() -> io::Result<File> {
    const NAME: &str = "/tmp/messages";
    let file = File::options().read(true).write(true).create_new(true).open(NAME)?;
    fs::remove_file(NAME)?;
    Ok(file)
}

#[apply(guest_test)]
#[group = "counting"]
fn test_that_writes_more_than_a_pipe_holds_ends() -> Outcome {
    const PIPE: usize = 64 << 10;
    let line = "no message ".repeat(10);
    for _ in 0..=PIPE / line.len() {
        eprintln!("{line}");
    }
    Ok(())
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "ended".into(),
    }
}
