//! Loads that measure their own time, and how much longer they take when a profiler counts or samples them.
//!
//! In the exact lab, time is the number of instructions that the guest and its host have executed.

use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::figures;

use crate::baseline::{has_kvms_pmu, sample_as_asked};
use crate::ensure::ensure;
use crate::known_code;
use crate::switches::Turn;
use crate::{Fallible, Outcome};

const GROUP: &str = "baseline";

/// Rounds of the loop, each of which has two instructions and so two cycles of the exact lab.
const LOOP: &str = "150000000";
/// Cycles between two samples. In the exact lab, 1,000 to 10,000 samples for each second.
const PERIODS: [&str; 3] = ["1000000", "250000", "100000"];
/// The rate of samples for which the kernel adapts the period.
const RATE: &str = "4000";
/// Rounds of task switches, each of which has two.
const SWITCHES: &str = "2000";
/// Six events that count at the same time.
const EVENTS: &str = "cycles,instructions,branches,branch-misses,stalled-cycles-frontend,stalled-cycles-backend";
/// Six events to sample at the same time, each with the longest of [`PERIODS`]. The loop causes all of them. Their rate is
/// not adapted: if a sample of one of them takes as long as on KVM's own PMU, samples at a rate would follow each other
/// without end.
const SAMPLED: &str = "cycles:u,instructions:u,branches:u,cycles,instructions,branches";
/// The subject of a load's line of figures.
const SUBJECT: &str = "load";

/// `guest-tests load NAME ROUNDS`: runs a load, and prints the nanoseconds that it took.
pub(crate) fn run(name: &str, rounds: &str) -> ExitCode {
    match load(name, rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The act of a guest that its host profiles.
pub(crate) fn act() -> Outcome {
    load("loop", LOOP)
}

fn load(name: &str, rounds: &str) -> Outcome {
    let rounds = rounds.parse()?;
    let took = match name {
        "loop" => spin(rounds),
        "switches" => switch(rounds)?,
        _ => return Err(format!("no load {name}").into()),
    };
    println!("{}", figures::line(SUBJECT, &[("elapsed", u64::try_from(took.as_nanos())?)]));
    Ok(())
}

/// A loop of two instructions.
fn spin(rounds: u64) -> Duration {
    let [one, _] = known_code::loops();
    let began = Instant::now();
    one.run(rounds);
    began.elapsed()
}

/// Two threads take turns on the only CPU.
fn switch(rounds: u64) -> Fallible<Duration> {
    let [mut one, mut other] = Turn::pair()?;
    thread::scope(|scope| {
        let partner = scope.spawn(move || {
            // The first round is not measured.
            (0..=rounds).try_for_each(|_| {
                other.wait()?;
                other.give()
            })
        });
        let mut round = || {
            one.give()?;
            one.wait()
        };
        round()?;
        let began = Instant::now();
        (0..rounds).try_for_each(|_| round())?;
        let took = began.elapsed();
        partner.join().map_err(|_| "a thread panicked")??;
        Ok(took)
    })
}

/// Returns the nanoseconds that a load takes. The load is the end of this command.
fn elapsed(command: &[&str]) -> Fallible<u64> {
    let (program, arguments) = command.split_first().ok_or("no command")?;
    let output = Command::new(program).args(arguments).current_dir("/tmp").env("HOME", "/tmp").output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let took = said.lines().filter_map(figures::parse).find_map(|(_, figures)| figures.get("elapsed").copied());
    took.filter(|_| output.status.success())
        .ok_or_else(|| format!("{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr)).into())
}

const SPINNING: [&str; 4] = ["guest-tests", "load", "loop", LOOP];
const SWITCHING: [&str; 4] = ["guest-tests", "load", "switches", SWITCHES];

/// The profilers of this guest, and what the figures call their PMU.
fn profilers() -> &'static [(&'static str, &'static str)] {
    match has_kvms_pmu() {
        true => &[("perf", "kvm")],
        false => &[("perf", "perf-core"), ("vperf", "device")],
    }
}

/// The time of the loop while a profiler samples these events with this option.
fn recorded(profiler: &str, events: &str, option: [&str; 2]) -> Fallible<u64> {
    let record = [profiler, "record", "-o", "samples", "-e", events];
    elapsed(&[&record[..], &option, &["--"], &SPINNING].concat())
}

/// The time of the switches while a profiler counts [`EVENTS`].
fn counted(profiler: &str) -> Fallible<u64> {
    elapsed(&[&[profiler, "stat", "-o", "counts", "-e", EVENTS, "--"][..], &SWITCHING].concat())
}

/// Prints how long the loads take alone, and with profilers.
pub(crate) fn measure() -> Outcome {
    let tell = |subject: String, took: u64| println!("{}", figures::line(&subject, &[("elapsed", took)]));
    for &(profiler, name) in profilers() {
        tell(format!("alone:{name}:loop"), elapsed(&SPINNING)?);
        tell(format!("alone:{name}:switches"), elapsed(&SWITCHING)?);
        for period in PERIODS {
            tell(format!("record:{name}:{period}"), recorded(profiler, "cycles:u", ["-c", period])?);
        }
        tell(format!("record:{name}:rate"), recorded(profiler, "cycles:u", ["-F", RATE])?);
        tell(format!("record:{name}:six"), recorded(profiler, SAMPLED, ["-c", PERIODS[0]])?);
        tell(format!("stat:{name}"), counted(profiler)?);
    }
    Ok(())
}

#[apply(guest_test)]
fn profiled_loads_are_at_most_a_tenth_slower() -> Outcome {
    sample_as_asked()?;
    let (spinning, switching) = (elapsed(&SPINNING)?, elapsed(&SWITCHING)?);
    for &(profiler, name) in profilers() {
        let (recorded, counted) = (recorded(profiler, "cycles:u", ["-c", PERIODS[2]])?, counted(profiler)?);
        for (took, alone) in [(recorded, spinning), (counted, switching)] {
            ensure!(took * 10 <= alone * 11, "{took} ns by {name}, {alone} ns alone");
        }
    }
    Ok(())
}

#[apply(guest_test)]
#[group = "baseline-kvm"]
fn profiled_loads_are_a_tenth_and_ten_times_slower() -> Outcome {
    sample_as_asked()?;
    let (spinning, switching) = (elapsed(&SPINNING)?, elapsed(&SWITCHING)?);
    let (recorded, counted) = (recorded("perf", "cycles:u", ["-c", PERIODS[2]])?, counted("perf")?);
    ensure!(recorded * 10 >= spinning * 11, "{recorded} ns sampled, {spinning} ns alone");
    ensure!(counted >= switching * 10, "{counted} ns counted, {switching} ns alone");
    Ok(())
}
