//! Programs with a known profile, for demos and tests of `vperf`.

mod arch;
mod regions;
mod tree;

use std::hint::black_box;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use arch::Port;
use clap::{Args, Parser, Subcommand};
use vpmu_client::{Vpmu, error};

/// Run a program with a known profile.
///
/// Examples:
///   workload hot --ms 500      3/4 of the time in one function, 1/4 in another
///   workload hot --rounds 100  the same, as a fixed amount of work
///   workload tree              one leaf, called 3/4 of the time by one caller, 1/4 by another
///   workload spin 200          200 ms of CPU time in one function
///   workload loop 1000000      2,000,000 instructions, plus those of program start and exit
///   workload ports 1000        1000 writes to a port that no device has: 1000 VM exits
///   workload marks 10 7        10 marks with the value 7
///   workload marks 10 1 --step 1       10 marks, numbered from 1
///   workload regions 100 --ports 3     100 times: mark 1, 3 port writes, mark 2
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    work: Work,
}

#[derive(Debug, Subcommand)]
enum Work {
    /// Spend 3/4 of the work in `hot_three_quarters`, 1/4 in `warm_one_quarter`.
    Hot(Amount),
    /// Do the work in `hot_leaf`: 3/4 of it in calls from `three_quarters`, 1/4 in calls from
    /// `one_quarter`. `tree` calls both of these functions.
    Tree(Amount),
    /// Spend CPU time in `spin`.
    Spin {
        /// Milliseconds.
        #[arg(value_parser = clap::value_parser!(u64).range(..=86_400_000))]
        ms: u64,
    },
    /// Run a loop of two instructions, `exact_loop`.
    Loop {
        /// Number of rounds.
        #[arg(value_parser = clap::value_parser!(u64).range(1..))]
        rounds: u64,
    },
    /// Write to port 0x80 or, on aarch64, to an address without a device, from user mode.
    Ports {
        /// Number of writes.
        count: u64,
    },
    /// Place marks through the vPMU.
    Marks {
        /// Number of marks.
        count: u64,
        /// Value of the first mark.
        value: u32,
        /// Difference between successive values.
        #[arg(long, default_value_t = 0)]
        step: u32,
    },
    Regions(regions::RegionsArgs),
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct Amount {
    /// Duration in milliseconds.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(..=86_400_000))]
    ms: u64,
    /// Number of rounds, instead of a duration.
    #[arg(long)]
    rounds: Option<u64>,
}

/// Number of random number generator steps in a quarter of a round. These steps take tens
/// of microseconds.
const QUARTER: u32 = 10_000;

/// Runs `count` steps. Inlined, so that a caller's time depends only on the number of steps.
#[inline(always)]
fn steps(mut state: u64, count: u32) -> u64 {
    for _ in 0..count {
        state = black_box(state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e));
    }
    state
}

#[inline(never)]
fn hot_three_quarters(state: u64) -> u64 {
    steps(state, 3 * QUARTER)
}

#[inline(never)]
fn warm_one_quarter(state: u64) -> u64 {
    steps(state ^ 1, QUARTER)
}

#[inline(never)]
fn spin(until: Instant) -> u64 {
    let mut state = 1;
    while Instant::now() < until {
        state = steps(state, QUARTER);
    }
    state
}

/// Calls `round` for the requested time or the requested number of times, and prints the number of
/// calls.
fn rounds(name: &str, amount: &Amount, mut round: impl FnMut()) {
    let until = Instant::now() + Duration::from_millis(amount.ms);
    let mut rounds = 0;
    while amount.rounds.map_or_else(|| Instant::now() < until, |wanted| rounds < wanted) {
        round();
        rounds += 1;
    }
    println!("{name}: {rounds} rounds");
}

fn hot(amount: &Amount) {
    let mut state = 1;
    rounds("hot", amount, || {
        state = black_box(warm_one_quarter(hot_three_quarters(state)));
    });
}

fn ports(count: u64) -> Result<(), String> {
    let port = Port::open()?;
    (0..count).for_each(|_| port.write());
    Ok(())
}

fn marks(count: u64, mut value: u32, step: u32) -> Result<(), vpmu_client::Error> {
    let vpmu = Vpmu::open()?;
    for _ in 0..count {
        vpmu.mark(value)?;
        value = value.wrapping_add(step);
    }
    Ok(())
}

fn main() -> ExitCode {
    let result = match Cli::parse().work {
        Work::Hot(amount) => {
            hot(&amount);
            Ok(())
        }
        Work::Tree(amount) => {
            rounds("tree", &amount, tree::round);
            Ok(())
        }
        Work::Spin { ms } => {
            black_box(spin(Instant::now() + Duration::from_millis(ms)));
            Ok(())
        }
        Work::Loop { rounds } => {
            tree::run_loop(rounds);
            Ok(())
        }
        Work::Ports { count } => ports(count),
        Work::Regions(args) => regions::run(&args),
        Work::Marks { count, value, step } => marks(count, value, step).map_err(|error| error::chain(&error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Ignore an error: if stderr is closed, nothing can show it.
            let _ = writeln!(io::stderr(), "workload: {error}");
            ExitCode::FAILURE
        }
    }
}
