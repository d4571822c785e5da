//! The distribution's own `perf` in a guest with hardware counters. The tests use plain event names, and no options for
//! the device.

use std::hint::black_box;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_SW_TASK_CLOCK, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE,
};
use vpmu_client::perf::PerfPmu;
use vpmu_client::{Event, EventAttr};

use crate::arch::{MILLIONS_OTHER_BRANCHES, MILLIONS_OTHERS};
use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{perf, record, row_of, script, stat, tally};
use crate::programs::text;
use crate::{Fallible, Outcome};

const GROUP: &str = "stock-counters";

/// Instructions of one round of `workload loop`.
const PER_ROUND: u64 = 2;
/// Number of instructions by which two runs of a program may differ outside the loop.
const BORDER: u64 = 1_000;
/// Maximum number of instructions of a program before and after its loop.
const STARTUP: u64 = 1_000_000;
/// A sampling period that does not divide the length of the loop.
const PERIOD: u64 = 100_003;

/// Runs `perf stat`, and returns the count of one of its events.
fn count_of(event: &str, args: &[&str]) -> Fallible<u64> {
    let rows = stat(args)?;
    let row = row_of(&rows, event)?;
    Ok(row.value.parse().map_err(|e| format!("{e}: {row:?}"))?)
}

fn of_loop(event: &str, rounds: u64) -> Fallible<u64> {
    count_of(event, &["-e", event, "workload", "loop", &rounds.to_string()])
}

#[apply(guest_test)]
fn plain_stat_counts_cycles_and_instructions() -> Outcome {
    for event in ["cycles", "instructions"] {
        let value = count_of(event, &["workload", "loop", "10000000"])?;
        ensure!(value >= 10_000_000 * PER_ROUND, "{event} counts only {value} of 20,000,000 instructions");
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_grows_by_the_instructions_of_a_loop() -> Outcome {
    let counts = [1_000_000, 2_000_000, 5_000_000].map(|rounds| of_loop("instructions:u", rounds));
    let [first, second, third] = counts;
    let (first, second, third) = (first?, second?, third?);
    for (more, expected) in [(second - first, 2_000_000), (third - second, 6_000_000)] {
        ensure!(more.abs_diff(expected) <= BORDER, "{more} more instructions, expected {expected}");
    }
    Ok(())
}

/// `million` is a program without a C library, of which each instruction is known.
#[apply(guest_test)]
fn stat_of_a_known_program_is_exact_each_time() -> Outcome {
    const PER_WORD: u64 = 1_000_000;
    for words in [1, 3] {
        for _ in 0..3 {
            let arguments = [&["-e", "instructions:u,branches:u"][..], &vec!["million"; words]].concat();
            let rows = stat(&arguments)?;
            let rounds = PER_WORD * u64::try_from(words)?;
            let instructions: u64 = row_of(&rows, "instructions:u")?.value.parse()?;
            ensure_eq!(instructions, rounds * PER_ROUND + MILLIONS_OTHERS, "instructions of {words} million rounds");
            let branches = MILLIONS_OTHER_BRANCHES.map(|others| (rounds + others).to_string());
            let expected = branches.unwrap_or_else(|| "<not supported>".to_owned());
            ensure_eq!(row_of(&rows, "branches:u")?.value, expected, "branches of {words} million rounds");
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_by_intervals_prints_the_whole_count_in_parts() -> Outcome {
    const ROUNDS: u64 = 50_000_000;
    let rows = stat(&["-I", "20", "-e", "instructions:u", "workload", "loop", &ROUNDS.to_string()])?;
    ensure!(rows.len() > 2, "intervals in {rows:?}");
    let parts: Vec<u64> = rows.iter().map(|row| row.value.parse()).collect::<Result<_, _>>()?;
    let (sum, expected) = (parts.iter().sum::<u64>(), ROUNDS * PER_ROUND);
    ensure!((expected..expected + STARTUP).contains(&sum), "{sum} instructions of {expected} in {parts:?}");
    Ok(())
}

#[apply(guest_test)]
fn stat_of_repeated_runs_prints_the_mean() -> Outcome {
    let mean = count_of("instructions:u", &["-r", "3", "-e", "instructions:u", "million"])?;
    ensure_eq!(mean, 2_000_000 + MILLIONS_OTHERS, "mean of three runs of a million rounds");
    Ok(())
}

/// A breakdown by the pipeline's slots needs events that no PMU here has.
#[apply(guest_test)]
fn stat_of_slots_is_refused() -> Outcome {
    let output = perf(&["stat", "-a", "--topdown", "workload", "loop", "1"])?;
    let said = text(&output.stderr).to_lowercase();
    ensure!(!output.status.success(), "perf stat --topdown succeeds: {said}");
    ensure!(said.contains("topdown"), "the message of perf stat --topdown: {said}");
    Ok(())
}

#[apply(guest_test)]
fn record_of_a_group_reads_each_member_at_each_sample() -> Outcome {
    let period = PERIOD.to_string();
    record("group", &["-e", "{cycles,instructions}:S", "-c", &period, "workload", "loop", "10000000"])?;
    let lines = script("group", "event")?;
    let counts = tally(&lines);
    let of = |event: &str| counts.iter().filter(|(line, _)| line.starts_with(event)).map(|(_, count)| *count).sum();
    let (cycles, instructions): (usize, usize) = (of("cycles"), of("instructions"));
    ensure!(cycles > 100, "samples: {counts:?}");
    ensure_eq!(instructions, cycles, "readings of the member at the leader's samples");
    Ok(())
}

#[apply(guest_test)]
fn stat_of_a_group_counts_at_once() -> Outcome {
    let rows = stat(&["-e", "{instructions:u,cycles:u}", "workload", "loop", "10000000"])?;
    ensure_eq!(rows.len(), 2, "counts in {rows:?}");
    for row in &rows {
        ensure!(row.value.parse::<u64>()? >= 20_000_000, "the count is too low: {row:?}");
        ensure_eq!(row.share(), "100.00", "the percentage of the time in {row:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_of_more_events_than_counters_scales_each() -> Outcome {
    /// Events that count mostly the loop when they count user mode.
    const KINDS: [&str; 4] = ["instructions", "cycles", "stalled-cycles-frontend", "stalled-cycles-backend"];
    const ROUNDS: u64 = 50_000_000;
    // Identical events would share a counter.
    let events: Vec<String> =
        ["u", "k", "uk"].iter().flat_map(|mode| KINDS.map(|kind| format!("{kind}:{mode}"))).collect();
    let rounds = ROUNDS.to_string();
    let list = events.join(",");
    let rows = stat(&["-e", &list, "workload", "loop", &rounds])?;
    let (value, expected): (u64, u64) = (row_of(&rows, "instructions:u")?.value.parse()?, ROUNDS * PER_ROUND);
    ensure!(value.abs_diff(expected) * 50 <= expected, "{value} instructions of {expected}: {rows:?}");
    let shares: Vec<f64> = rows.iter().map(|row| row.share().parse()).collect::<Result<_, _>>()?;
    ensure_eq!(shares.len(), events.len(), "events in {rows:?}");
    ensure!(shares.iter().all(|share| *share > 0.0), "an event never ran: {rows:?}");
    ensure!(shares.iter().any(|share| *share < 100.0), "all events ran all the time: {rows:?}");
    Ok(())
}

/// Some programs look for the number of counters: they open equal events until one no longer runs all the time. Equal
/// events share a counter of the host, so each of them counts everything, also beside a clock in its group.
#[apply(guest_test)]
fn equal_events_all_run_all_the_time() -> Outcome {
    const GROUPS: usize = 40;
    const ROUNDS: u64 = 1_000_000;
    let pmu = PerfPmu::open()?;
    let of = |kind: u32, config: u32| EventAttr::new(kind, config.into());
    let open = || -> Fallible<(Event, Event)> {
        let leader = pmu.open_event(&of(PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS))?;
        let clock = pmu.open_member(&of(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK), &leader)?;
        Ok((leader, clock))
    };
    let groups: Vec<_> = (0..GROUPS).map(|_| open()).collect::<Fallible<_>>()?;
    for (leader, clock) in &groups {
        leader.enable()?;
        clock.enable()?;
    }
    (0..ROUNDS).for_each(|round| _ = black_box(round));
    for (leader, clock) in &groups {
        let (instructions, time) = (leader.read()?, clock.read()?);
        ensure_eq!(instructions.time_running, instructions.time_enabled, "times of {instructions:?}");
        ensure!(instructions.value >= ROUNDS, "instructions of the loop: {instructions:?}");
        ensure!(time.value > 0, "the clock of the group: {time:?}");
    }
    Ok(())
}

/// Returns whether a sample's line ends with the loop's name. Some versions of perf print the name without the path.
fn in_loop(line: &str) -> bool {
    line.ends_with("exact_loop")
}

#[apply(guest_test)]
fn record_of_cycles_samples_the_loop() -> Outcome {
    let period = PERIOD.to_string();
    let run = ["-e", "cycles:u", "-c", &period, "workload", "loop", "50000000"];
    record("cycles", &run)?;
    let lines = script("cycles", "ip,sym")?;
    let inside = lines.iter().filter(|line| in_loop(line)).count();
    // In the lab, each instruction takes one cycle. Elsewhere, the two instructions of a round may take fewer than two
    // cycles, so the number of samples is not known. Therefore, the test checks only the share of samples in the loop.
    ensure!(inside > 0 && inside * 100 >= lines.len() * 95, "only {inside} of {} samples are in the loop", lines.len());
    Ok(())
}

#[apply(guest_test)]
fn record_without_an_event_samples_cycles() -> Outcome {
    record("plain", &["workload", "loop", "50000000"])?;
    let lines = script("plain", "event,ip,sym")?;
    ensure!(!lines.is_empty(), "the recording has no samples");
    let other = lines.iter().find(|line| !line.starts_with("cycles"));
    ensure_eq!(other, None, "the line of a sample of another event");
    let inside = lines.iter().filter(|line| in_loop(line));
    let (inside, all) = (inside.count(), lines.len());
    ensure!(inside * 10 >= all * 9, "only {inside} of {all} samples are in the loop");
    Ok(())
}

#[apply(guest_test)]
fn event_that_the_host_lacks_is_not_supported() -> Outcome {
    let rows = stat(&["-e", "cache-misses", "workload", "loop", "1"])?;
    ensure_eq!(row_of(&rows, "cache-misses")?.value, "<not supported>", "the count of cache-misses");
    Ok(())
}
