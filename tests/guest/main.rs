//! The program `guest-tests`: the tests that run in a booted guest, and the commands that tests run there.
//!
//! `guest-tests run GROUP` runs each test of a group in a separate process, and prints one framed line for each test.
//! On the host, tests of the same names boot a guest and read these lines.

mod arch;
mod areas;
mod aux_core;
mod aux_core_writer;
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
mod boots;
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
mod perf_core;
mod perf_habits;
mod perf_limits;
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
mod refusals;
mod restore;
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
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use guest_tests::wire::{self, Verdict};

/// The result of a test. The error is the reason for the failure.
type Outcome = Result<(), Box<dyn Error>>;
/// A test's name and what it does.
type Test = (&'static str, fn() -> Outcome);

/// The time limit of a test, which is far longer than any test needs. If a test hangs, only this test fails, not its
/// whole group.
const LIMIT: Duration = Duration::from_secs(300);
/// The time within which a killed test must end. A test that hangs in the kernel does not end.
const KILLED: Duration = Duration::from_secs(10);

fn group(name: &str) -> Option<Vec<Test>> {
    match name {
        "counting" => Some([counting::TESTS, tasks::TESTS, groups::TESTS].concat()),
        "sampling" => Some([sampling::TESTS, rings::TESTS].concat()),
        "output" => Some(
            [
                output_mapping::TESTS,
                output_metadata::TESTS,
                output_writer::TESTS,
                output_redirect::TESTS,
                output_wakeup::TESTS,
                output_reader::TESTS,
                output_fields::TESTS,
                output_chains::TESTS,
                output_reading::TESTS,
                output_life::TESTS,
                output_who::TESTS,
            ]
            .concat(),
        ),
        "aux" => Some(
            [
                aux_mapping::TESTS,
                aux_life::TESTS,
                aux_writer::TESTS,
                aux_records::TESTS,
                aux_sharing::TESTS,
                aux_wakeup::TESTS,
                aux_exits::TESTS,
                aux_scope::TESTS,
                aux_samples::TESTS,
                aux_pausing::TESTS,
                aux_core::TESTS,
                aux_core_writer::TESTS,
                aux_vperf::TESTS,
                aux_lockdown::TESTS,
            ]
            .concat(),
        ),
        "output-batched" => Some([output_who::BATCHED, flush::BATCHED, trigger_rules::BATCHED].concat()),
        "output-capped" => Some(output_capped::TESTS.to_vec()),
        "module" => Some([perf_core::TESTS, switches::TESTS, module::TESTS].concat()),
        "vperf" => {
            Some([programs::TESTS, profiles::TESTS, library::TESTS, vperf_region::TESTS, vperf_persist::TESTS].concat())
        }
        "aux-hardware" => arch::hardware(),
        "persistent" => Some(
            [persistent_life::TESTS, persistent_rules::TESTS, persistent_names::TESTS, persistent_window::TESTS]
                .concat(),
        ),
        "persistent-operator" => Some(persistent_operator::TESTS.to_vec()),
        "trigger" => Some(
            [
                trigger_regions::TESTS,
                trigger_forms::TESTS,
                trigger_rules::TESTS,
                trigger_family::TESTS,
                doorbell::TESTS,
                trigger_driver::TESTS,
            ]
            .concat(),
        ),
        "flush" => Some(flush::TESTS.to_vec()),
        "vperf-operator" => Some(vperf_persist::OPERATOR.to_vec()),
        "driver-life" => Some(driver_life::TESTS.to_vec()),
        "kexec" => Some(kexec::TESTS.to_vec()),
        "hostile" => Some(hostile::TESTS.to_vec()),
        "fair" => Some(fair::TESTS.to_vec()),
        "costs" => Some([fair::EXACT, one_shot::TESTS, open_cost::TESTS].concat()),
        "overflows" => Some(overflows::TESTS.to_vec()),
        "nesting" => Some(nesting::TESTS.to_vec()),
        "hammer" => Some(hammer::TESTS.to_vec()),
        "storms" => Some(storms::TESTS.to_vec()),
        "policy" => Some(policy::TESTS.to_vec()),
        "policy-allowed" => Some(policy_events::ALLOWED.to_vec()),
        "policy-denied" => Some(policy_events::DENIED.to_vec()),
        "refusals" => Some(refusals::TESTS.to_vec()),
        "permissions" => Some(permissions::TESTS.to_vec()),
        "baseline" => Some(baseline::TESTS.to_vec()),
        "stock-perf" => Some([stock_perf::TESTS, perf_habits::TESTS].concat()),
        "stock-record" => Some(perf_record::TESTS.to_vec()),
        "stock-order" => Some(perf_order::TESTS.to_vec()),
        "stock-counters" => Some(stock_counters::TESTS.to_vec()),
        "stock-few" => Some(perf_limits::FEW_EVENTS.to_vec()),
        "stock-waiting" => Some(perf_limits::ONE_COUNTER.to_vec()),
        "third-party-tools" => Some(third_party_tools::TESTS.to_vec()),
        "third-party-bpftrace" => Some(third_party_tools::BPFTRACE.to_vec()),
        _ => None,
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["run", name] => match group(name) {
            Some(tests) => run(name, &tests),
            None => usage(),
        },
        ["one", name, test] => {
            let found = group(name).and_then(|t| t.into_iter().find(|(n, _)| n == test));
            match found.map(|(_, run)| run()) {
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
        ["boots", rounds] => boots::measure(rounds),
        ["overflows"] => overflows::run(),
        ["act"] => end_scenarios::act(),
        ["hammer", seed, operations] => hammer_by_hand(seed, operations),
        ["ports", times] => stock_perf::write_ports(times),
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
        "usage: guest-tests run GROUP | one GROUP TEST | conformance | count-guests FILE PROGRAM [ARGUMENT...] | hold-counters COUNT | mark VALUE TIMES [in-turn] | ports TIMES | threads [in-turn] | overflows | act | baseline SAMPLES ROUNDS | boots ROUNDS | hammer SEED OPERATIONS"
    );
    ExitCode::from(2)
}

/// Runs the tests one after another. Prints a framed line for each test, and one for the kernel's log.
fn run(name: &str, tests: &[Test]) -> ExitCode {
    if let Err(error) = cpu::bind_console() {
        eprintln!("binding the console's interrupt: {error}");
        return ExitCode::FAILURE;
    }
    let mut failed = false;
    for (test, _) in tests {
        // If the machine hangs during the test, this line names the test.
        println!("{}", wire::begins(test));
        os::drain_console();
        let began = Instant::now();
        let verdict = one(name, test);
        failed |= verdict != Verdict::Passed;
        println!("{}", wire::line(test, began.elapsed(), &verdict));
    }
    let began = Instant::now();
    let verdict = match kernel_log::ensure_no_fault() {
        Ok(()) => Verdict::Passed,
        Err(error) => Verdict::Failed(error.to_string()),
    };
    failed |= verdict != Verdict::Passed;
    println!("{}", wire::line(wire::KERNEL_LOG, began.elapsed(), &verdict));
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs one test in its own process. Whatever the test leaves open or locked ends with that process.
fn one(name: &str, test: &str) -> Verdict {
    let child = Command::new("/proc/self/exe")
        .args(["one", name, test])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Verdict::Failed(format!("cannot start: {error}")),
    };
    let ended_in_time = os::ends_within(child.id(), LIMIT);
    if !matches!(ended_in_time, Ok(true)) {
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
    match child.wait_with_output() {
        Ok(output) if output.status.success() => Verdict::Passed,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Verdict::Failed(format!("{}: {}", ended(output.status), said.trim()))
        }
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "ended".into(),
    }
}
