//! Counts of code whose instructions are known.

use std::error::Error;

use super::event::{BRANCHES, CYCLES, INSTRUCTIONS, MOST_BORDER, Mode, PER_ROUND, counted, offered, open, read, spin};
use super::{Row, RowResult, absent, holds};
use crate::Fallible;
use crate::arch::mmio_pio;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::os::KernelCode;
use crate::pages::{Pages, READ};
use crate::raw::Event;

pub(super) const ROWS: &[Row] = &[
    ("user_loop_counts_its_instructions", user_loop),
    ("kernel_code_counts_its_instructions", kernel_code),
    ("loop_counts_its_branches", branches),
    ("cycles_fit_the_instructions", cycles),
    ("trapped_instruction_counts_at_most_once", trapped),
    ("count_goes_on_past_32_bits", past_32_bits),
    ("disabled_event_stands_still", disabled),
    ("reset_while_counting_starts_from_zero", reset),
    ("mode_that_is_left_out_counts_nothing", modes),
    ("count_in_the_page_is_the_count_read", page),
];

/// Rounds of the loops that are compared.
const ROUNDS: [u64; 4] = [1_000, 10_000, 100_000, 1_000_000];
/// Upper bound on the number of instructions that a core completes in a cycle.
const WIDEST: u64 = 16;

/// A loop executes `each` instructions per round. Returns how many more instructions `count` counts. This number must
/// not depend on the number of rounds.
fn border(
    each: u64,
    // This is a trait object, so that the same code surrounds the loop for every number of rounds.
    count: &dyn Fn(u64) -> Fallible<u64>,
) -> Fallible<u64> {
    let mut found = Vec::new();
    for rounds in ROUNDS {
        let count = count(rounds)?;
        let border = count.checked_sub(each * rounds);
        let border = border.ok_or_else(|| format!("{count} of {rounds} rounds of {each}"))?;
        found.push(border);
    }
    ensure!(
        found.iter().all(|border| *border == found[0]),
        "counts of {ROUNDS:?} rounds exceed {each} a round by {found:?}"
    );
    ensure!(found[0] <= MOST_BORDER, "the count exceeds the loop by {}", found[0]);
    Ok(found[0])
}

/// Returns by how much a count of [`spin`] exceeds the number of instructions in the loop.
pub(super) fn border_of_the_loop() -> Fallible<u64> {
    let event = open(INSTRUCTIONS, Mode::User)?;
    border(PER_ROUND, &|rounds| Ok(counted(&event, || spin(rounds))?.count))
}

fn user_loop() -> RowResult {
    let border = border_of_the_loop()?;
    holds(format!("2,000 to 2,000,000, each + {border}"))
}

/// Number of runs. Only the lowest count is used, because interrupts can only increase a count.
const TRIES: usize = 9;
/// Number of times that the kernel's code runs during one count.
const RUNS: u32 = 100;

fn kernel_code() -> RowResult {
    let event = open(INSTRUCTIONS, Mode::Kernel)?;
    let least = |code: &KernelCode| -> Fallible<u64> {
        let mut least = u64::MAX;
        for _ in 0..TRIES {
            event.reset(0)?;
            event.enable(0)?;
            code.run(RUNS)?;
            event.disable(0)?;
            least = least.min(read(&event)?.count);
        }
        Ok(least)
    };
    let mut counts = Vec::new();
    for additions in [1_000, 2_000, 3_000] {
        counts.push(least(&KernelCode::additions(additions)?)?);
    }
    let grown: Vec<u64> = counts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let expected = u64::from(RUNS) * 1_000;
    ensure!(
        grown.iter().all(|grown| grown.abs_diff(expected) <= MOST_BORDER),
        "100 runs with 1,000 more additions add {grown:?} to the counts"
    );
    holds(format!("100 runs with 1,000 more additions add {} and {} to the count", grown[0], grown[1]))
}

fn branches() -> RowResult {
    let Some(event) = offered(BRANCHES, Mode::User)? else {
        return absent("the PMU has no event for branches");
    };
    let border = border(1, &|rounds| Ok(counted(&event, || spin(rounds))?.count))?;
    holds(format!("1,000 to 1,000,000, each + {border}"))
}

fn cycles() -> RowResult {
    let instructions = counted(&open(INSTRUCTIONS, Mode::User)?, || spin(1_000_000))?.count;
    let cycles = counted(&open(CYCLES, Mode::User)?, || spin(1_000_000))?.count;
    ensure!(cycles >= instructions / WIDEST, "{cycles} cycles of {instructions} instructions");
    holds(format!("{cycles} of {instructions} instructions"))
}

/// Number of instructions in one round of [`mmio_pio::out_loop`]. One of them leaves the guest, and the hypervisor
/// emulates it.
const PER_WRITE: u64 = 3;

fn trapped() -> RowResult {
    cpu::allow_ports()?;
    let event = open(INSTRUCTIONS, Mode::User)?;
    let count = |rounds| -> Fallible<u64> { Ok(counted(&event, || mmio_pio::out_loop(rounds))?.count) };
    let grown = count(3_000)? - count(1_000)?;
    match grown.checked_div(2_000) {
        Some(PER_WRITE) if grown % 2_000 == 0 => holds("once"),
        Some(each) if each == PER_WRITE - 1 && grown % 2_000 == 0 => {
            holds("not at all: the processor does not complete the instruction")
        }
        _ => Err(format!("2,000 more rounds of {PER_WRITE} instructions add {grown}").into()),
    }
}

/// Maximum number of instructions that a read adds to the count of the event that it reads.
const MOST_READ: u64 = 4_000;

fn past_32_bits() -> RowResult {
    const STEP: u64 = 1 << 30;
    let event = open(INSTRUCTIONS, Mode::User)?;
    let mut counts = vec![0];
    event.enable(0)?;
    for _ in 0..5 {
        spin(STEP / PER_ROUND);
        counts.push(event.count()?);
    }
    event.disable(0)?;
    let steps: Vec<u64> = counts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    ensure!(
        steps.iter().all(|step| (STEP..STEP + MOST_READ).contains(step)),
        "counts grow by {steps:?}, not by {STEP} each"
    );
    holds(format!("2^30 five times: {}", counts[5]))
}

fn disabled() -> RowResult {
    let event = open(INSTRUCTIONS, Mode::Both)?;
    let before = counted(&event, || spin(1_000))?;
    spin(1_000_000);
    ensure_eq!(read(&event)?, before, "the reading after work while disabled");
    event.enable(0)?;
    spin(1_000_000);
    event.disable(0)?;
    let grown = read(&event)?.count - before.count;
    ensure!(grown >= 2_000_000, "the event, enabled again, counts only {grown}");
    holds(format!("{} before and after 2,000,000", before.count))
}

fn reset() -> RowResult {
    let event = open(INSTRUCTIONS, Mode::User)?;
    let after = |rounds| -> Fallible<u64> {
        event.enable(0)?;
        spin(500_000);
        event.reset(0)?;
        spin(rounds);
        event.disable(0)?;
        event.count().map_err(Into::into)
    };
    let border = border(PER_ROUND, &after)?;
    holds(format!("the loop after the reset + {border}"))
}

fn modes() -> RowResult {
    let user = open(INSTRUCTIONS, Mode::User)?;
    let kernel = open(INSTRUCTIONS, Mode::Kernel)?;
    let both = open(INSTRUCTIONS, Mode::Both)?;
    let of = |event: &Event, rounds| -> Fallible<u64> {
        // An interrupt only adds to a count.
        let mut least = u64::MAX;
        for _ in 0..TRIES {
            least = least.min(counted(event, || spin(rounds))?.count);
        }
        Ok(least)
    };
    let growth = |event: &Event| Ok::<_, Box<dyn Error>>(of(event, 50_000)?.abs_diff(of(event, 10_000)?));
    let (by_user, by_kernel, by_both) = (growth(&user)?, growth(&kernel)?, growth(&both)?);
    let expected = 40_000 * PER_ROUND;
    ensure_eq!(by_user, expected, "growth of the user-mode count");
    ensure!(by_kernel <= MOST_BORDER, "growth of the kernel-mode count: {by_kernel}");
    ensure!(by_both.abs_diff(expected) <= MOST_BORDER, "growth of the count of both modes: {by_both}");
    holds(format!(
        "40,000 more rounds change the counts by {by_user} (user), {by_kernel} (kernel) and \
         {by_both} (both)"
    ))
}

fn page() -> RowResult {
    let event = open(INSTRUCTIONS, Mode::User)?;
    let pages = Pages::map(&event, 0, READ)?;
    for rounds in ROUNDS {
        let reading = counted(&event, || spin(rounds))?;
        let snapshot = pages.snapshot();
        ensure_eq!(snapshot.index, 0, "the counter index of a disabled event");
        ensure_eq!(snapshot.count, reading.count, "the count in the page");
    }
    holds("four counts")
}
