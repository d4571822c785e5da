//! The demo of hardware counters: Debian's perf in a stock guest counts the instructions of a program exactly,
//! and samples another program by cycles.

use std::path::Path;

use super::{DemoError, HOT};
use crate::arch::Arch;
use crate::boot::Boot;
use crate::kvm_host::KvmHostChoice;
use crate::third_party::{self, Files, ThirdPartyError};

/// A program that executes a known number of instructions, `million_*.S`. It has no C library, because a C library's
/// startup executes more or fewer instructions depending on random addresses.
const PROGRAM: &str = "million";
/// The number of words on the program's command line in each run. The program runs its loop a million times for each
/// word.
const WORDS: [u64; 3] = [1, 2, 5];
/// The number of instructions that the program executes for each word.
const PER_WORD: u64 = 2_000_000;
/// The event, as perf prints it beside its count.
const EVENT: &str = "instructions:u";

/// The number of instructions that the program executes outside its loop.
fn besides(arch: Arch) -> u64 {
    match arch {
        Arch::X86_64 => 4,
        Arch::Aarch64 => 6,
    }
}

/// The commands that count in a guest that has perf and [`known_program`]. They use the shell's function `show`.
pub(super) fn script() -> String {
    let runs = WORDS.map(|words| {
        let more = (1..words).map(|_| " more").collect::<String>();
        format!("show perf stat -e {EVENT} {PROGRAM}{more}\n")
    });
    format!("show perf stat workload hot --rounds 200\n{}", runs.concat())
}

/// A program for the guest's /bin that executes a known number of instructions: `million`.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn known_program(arch: Arch) -> Result<Files, ThirdPartyError> {
    let name = match arch {
        Arch::X86_64 => "million_x86_64.S",
        Arch::Aarch64 => "million_aarch64.S",
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo").join(name);
    third_party::assembled(arch, PROGRAM, &source)
}

/// Compares the counts in a guest's output with the numbers of instructions that the programs of [`script`] executed.
///
/// # Errors
/// [`DemoError`]: a count is missing or wrong.
pub(super) fn check(arch: Arch, output: &str) -> Result<(), DemoError> {
    let counts = counts(output);
    if counts.len() != WORDS.len() {
        return Err(DemoError::NoCount);
    }
    println!("\nInstructions of {PROGRAM}, in user mode");
    for (words, found) in WORDS.into_iter().zip(counts) {
        let expected = words * PER_WORD + besides(arch);
        println!("  {found:>10} counted, {expected:>10} executed");
        if found != expected {
            return Err(DemoError::Instructions { expected, found });
        }
    }
    Ok(())
}

/// Boots a guest in the lab of `arch`, checks the counts that its perf prints, and samples a program by cycles.
///
/// # Errors
/// [`DemoError`]: a count is wrong, or the profile lacks [`HOT`].
pub(super) fn run(kvm_host: KvmHostChoice, arch: Arch) -> Result<(), DemoError> {
    let command = format!(
        r#"
show() {{ echo; echo "guest# $*"; "$@" 2>&1; }}
set -e
cd /tmp
show vperf list | head -6
{}
show perf record -q -e cycles:u -c 73013 -o hot.data workload hot --rounds 200
show perf report -q -i hot.data --stdio --stdio-color=never --percent-limit 1
"#,
        script()
    );
    let mut files = third_party::perf(arch)?;
    files.extend(known_program(arch)?);
    let mut boot = Boot { command, vcpus: 1, memory_mib: 512, files, kvm_host, echo: true, ..Boot::default() };
    boot.sources.arch = arch;
    let outcome = boot.run()?;
    if outcome.status != 0 {
        return Err(DemoError::Command(outcome.status));
    }
    check(arch, &outcome.output)?;
    if !outcome.output.contains(HOT) {
        return Err(DemoError::Profile);
    }
    println!("ran on {}, {:.1} s", outcome.kvm_host, outcome.wall.as_secs_f64());
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
