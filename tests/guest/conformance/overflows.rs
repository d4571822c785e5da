//! Overflows of an event of the CPU: signals, limits, wakeups.

use std::os::fd::{AsFd, AsRawFd};

use perf_event_open_sys::bindings::perf_event_attr;

use super::event::{CYCLES, INSTRUCTIONS, Mode, PER_ROUND, attr, spin};
use super::{Row, RowResult, holds};
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{IP, SAMPLE};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Event, How, kernels, kernels_own, sampling, waking};
use crate::{Fallible, Outcome, handled, os};

pub(super) const ROWS: &[Row] = &[
    ("each_period_of_instructions_signals", each_period_of_instructions_signals),
    ("each_period_of_a_siblings_instructions_signals", each_period_of_a_siblings_instructions_signals),
    ("limit_of_one_period_hangs_up_each_time", limit_of_one_period_hangs_up_each_time),
    ("each_period_of_instructions_wakes_a_poll", each_period_of_instructions_wakes_a_poll),
];

const PERIOD: u64 = 100_003;
const PERIODS: u64 = 100;
const RING_PAGES: usize = 16;

/// Instructions of user mode, with a wakeup at each sample.
fn instructions() -> perf_event_attr {
    waking(sampling(attr(INSTRUCTIONS, Mode::User), PERIOD, IP), 1)
}

/// Makes `event` signal this thread, and begins to count the signals.
fn signals(event: &Event) -> Outcome {
    os::limit_signals(10_000)?;
    handled::install()?;
    Ok(os::signal_from(event.as_fd())?)
}

/// Runs the loop for [`PERIODS`] periods.
fn run() {
    spin(PERIODS * PERIOD / PER_ROUND + 1);
}

/// Checks the signals against the count. A signal's handler is code of user mode, too, so only the count is exact.
fn signalled(event: &Event) -> RowResult {
    let count = event.count()?;
    let handled = handled::so_far();
    ensure_eq!(handled.input, count / PERIOD, "signals for {count} instructions: {handled:?}");
    ensure_eq!((handled.hang_up, handled.strange), (0, 0), "other signals");
    ensure_eq!(handled::of(event.as_raw_fd()), handled.input, "signals with the event's descriptor");
    ensure!(handled.input >= PERIODS, "only {handled:?}");
    holds(format!("{count} by {PERIOD}: {}", handled.input))
}

fn each_period_of_instructions_signals() -> RowResult {
    let event = kernels_own(&instructions())?;
    let _ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    signals(&event)?;
    event.enable(0)?;
    run();
    event.disable(0)?;
    signalled(&event)
}

fn each_period_of_a_siblings_instructions_signals() -> RowResult {
    let leader = kernels_own(&attr(CYCLES, Mode::User))?;
    let mut member = instructions();
    member.set_disabled(0);
    let member = kernels(&member, How::OWN.led_by(leader.as_fd()))?;
    let _ring = Pages::map(&member, RING_PAGES, READ_WRITE)?;
    signals(&member)?;
    leader.enable(0)?;
    run();
    leader.disable(0)?;
    signalled(&member)
}

/// Returns the number of samples in a ring.
fn samples(ring: &mut Pages) -> Fallible<u64> {
    let records = ring.take()?;
    let samples = records.iter().filter(|record| record.kind == SAMPLE);
    Ok(samples.count() as u64)
}

/// The handler enables the event for the next period. The few instructions until then are not counted, so the loop has
/// fewer periods than instructions.
fn limit_of_one_period_hangs_up_each_time() -> RowResult {
    let event = kernels_own(&instructions())?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    signals(&event)?;
    handled::refresh_sender_in_handler();
    event.refresh(1)?;
    run();
    event.disable(0)?;
    // The signal of an overflow just before has enabled the event again.
    event.disable(0)?;
    let handled = handled::so_far();
    ensure_eq!((handled.input, handled.strange), (0, 0), "other signals");
    let fits = PERIODS * 9 / 10..=PERIODS * 11 / 10;
    ensure!(fits.contains(&handled.hang_up), "{handled:?} for {PERIODS} periods");
    ensure_eq!(samples(&mut ring)?, handled.hang_up, "samples");
    holds(format!("{} for {PERIODS} periods", handled.hang_up))
}

fn each_period_of_instructions_wakes_a_poll() -> RowResult {
    let event = kernels_own(&instructions())?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    event.enable(0)?;
    let mut woken = 0;
    for round in 0..PERIODS {
        spin(PERIOD / PER_ROUND + 1);
        let ready = event.poll(0)?;
        ensure_eq!(ready, libc::POLLIN, "poll after period {round}");
        woken += 1;
    }
    event.disable(0)?;
    let (count, samples) = (event.count()?, samples(&mut ring)?);
    ensure_eq!(samples, count / PERIOD, "samples of {count} instructions");
    holds(format!("{woken} polls, {samples} samples"))
}
