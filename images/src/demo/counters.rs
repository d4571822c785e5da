//! The demo of hardware counters: Debian's perf in a stock guest counts a loop to the instruction, and
//! samples a program by cycles.

use super::{DemoError, HOT};
use crate::arch::Arch;
use crate::boot::Boot;
use crate::foreign;
use crate::place::PlaceChoice;

/// Rounds of the loop in the runs that are compared.
const ROUNDS: [u64; 3] = [1_000_000, 2_000_000, 5_000_000];
/// Instructions of a round.
const PER_ROUND: u64 = 2;
/// The event, as perf prints it beside its count.
const EVENT: &str = "instructions:u";
/// Most instructions by which the program's start may differ between two runs.
const BORDER: u64 = 1_000;

fn script() -> String {
    let runs = ROUNDS.map(|rounds| format!("show perf stat -e {EVENT} workload loop {rounds}\n"));
    format!(
        r#"
show() {{ echo; echo "guest# $*"; "$@" 2>&1; }}
set -e
cd /tmp
show vperf list | head -6
{runs}
show perf stat workload hot --rounds 200
show perf record -q -e cycles:u -c 73013 -o hot.data workload hot --rounds 200
show perf report -q -i hot.data --stdio --stdio-color=never --percent-limit 1
"#,
        runs = runs.concat()
    )
}

/// Boots a guest on the lab of `arch` and checks its perf counts.
///
/// # Errors
/// [`DemoError`]: a count is wrong, or the profile is not the program's.
pub(super) fn run(place: PlaceChoice, arch: Arch) -> Result<(), DemoError> {
    let mut boot = Boot {
        command: script(),
        vcpus: 1,
        memory_mib: 512,
        files: foreign::perf(arch)?,
        place,
        echo: true,
        ..Boot::default()
    };
    boot.sources.arch = arch;
    let outcome = boot.run()?;
    if outcome.status != 0 {
        return Err(DemoError::Command(outcome.status));
    }
    let counts = counts(&outcome.output);
    if counts.len() != ROUNDS.len() {
        return Err(DemoError::NoCount);
    }
    println!("\nInstructions of the loop, by the differences of those counts");
    for at in 1..ROUNDS.len() {
        let rounds = ROUNDS[at] - ROUNDS[at - 1];
        let expected = rounds * PER_ROUND;
        let found = counts[at].wrapping_sub(counts[at - 1]);
        if found.abs_diff(expected) > BORDER {
            return Err(DemoError::Instructions {
                rounds,
                expected,
                found: found.cast_signed(),
            });
        }
        println!("  {rounds:>9} rounds more: {found:>9} counted, {expected:>9} executed");
    }
    if !outcome.output.contains(HOT) {
        return Err(DemoError::Profile);
    }
    println!(
        "ran on {}, {:.1} s",
        outcome.place,
        outcome.wall.as_secs_f64()
    );
    Ok(())
}

/// The counts of [`EVENT`] in perf's output.
fn counts(output: &str) -> Vec<u64> {
    let count = |line: &str| {
        let mut words = line.split_whitespace();
        let (value, event) = (words.next()?, words.next()?);
        let digits: String = value.split(',').collect();
        (event == EVENT).then(|| digits.parse().ok()).flatten()
    };
    output.lines().filter_map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_the_event() {
        let output = "guest# perf stat -e instructions:u workload loop 1\n\n\
            \x20        2,113,004      instructions:u\n\
            \x20    1,234      cycles:u   # 3 GHz\n  <not counted>   instructions:u\n";
        assert_eq!(counts(output), [2_113_004]);
    }
}
