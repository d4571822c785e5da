//! More events than counters.

use std::os::fd::AsFd;

use super::event::{
    BACKEND, BRANCHES, CYCLES, FRONTEND, INSTRUCTIONS, Mode, PER_ROUND, Reading, What, attr, offered, open, read, spin,
};
use super::{Row, RowResult, absent, holds};
use crate::Fallible;
use crate::ensure::{ensure, ensure_eq};
use crate::raw::{Event, How, kernels};

pub(super) const ROWS: &[Row] = &[
    ("as_many_events_as_counters_run_all_the_time", as_many),
    ("one_event_more_than_counters_takes_turns", one_more),
    ("more_events_than_counters_scale_to_the_count", twelve),
    ("members_of_a_group_count_at_once", group),
];

/// Long enough for many turns.
const LONG: u64 = 50_000_000;
/// Events that a PMU may be able to count at the same time. Events that count the loop's work come first. No two events
/// are identical, because identical events would share one counter of the device.
const KINDS: [What; 5] = [INSTRUCTIONS, CYCLES, BRANCHES, FRONTEND, BACKEND];
const MODES: [Mode; 3] = [Mode::User, Mode::Both, Mode::Kernel];

/// The combinations of [`KINDS`] and [`MODES`] that the PMU offers.
fn different() -> Fallible<Vec<(What, Mode)>> {
    let mut found = Vec::new();
    for mode in MODES {
        for what in KINDS {
            if offered(what, mode)?.is_some() {
                found.push((what, mode));
            }
        }
    }
    Ok(found)
}

/// Whether the event counts the loop, which runs in user mode.
fn counts_the_loop((what, mode): (What, Mode)) -> bool {
    [INSTRUCTIONS, CYCLES].contains(&what) && mode != Mode::Kernel
}

/// Returns the events' readings over a loop of `rounds` rounds.
fn together(kinds: &[(What, Mode)], rounds: u64) -> Fallible<Vec<Reading>> {
    let events: Vec<Event> = kinds.iter().map(|&(what, mode)| open(what, mode)).collect::<Result<_, _>>()?;
    for event in &events {
        event.enable(0)?;
    }
    spin(rounds);
    for event in &events {
        event.disable(0)?;
    }
    events.iter().map(read).collect()
}

fn always(reading: &Reading) -> bool {
    reading.running == reading.enabled
}

/// Returns the PMU's number of counters. This is the largest number of events, taken from the start of `kinds`, that
/// all run the whole time when they are counted together. Returns `None` if even all events in `kinds` run the whole
/// time, because the PMU may then have more counters.
fn counters(kinds: &[(What, Mode)]) -> Fallible<Option<usize>> {
    for events in 1..=kinds.len() {
        if !together(&kinds[..events], LONG / 5)?.iter().all(always) {
            ensure!(events > 1, "one event does not run all the time");
            return Ok(Some(events - 1));
        }
    }
    Ok(None)
}

/// Counts `events` different events together. Returns how many of them do not run the whole time.
pub(super) fn waiting(events: usize) -> Fallible<usize> {
    let kinds = different()?;
    let kinds = kinds.get(..events).ok_or("the PMU has fewer events")?;
    let readings = together(kinds, LONG / 5)?;
    Ok(readings.iter().filter(|reading| !always(reading)).count())
}

fn as_many() -> RowResult {
    let kinds = different()?;
    let counters = counters(&kinds)?.unwrap_or(kinds.len());
    let kinds = &kinds[..counters];
    for (kind, reading) in kinds.iter().zip(together(kinds, LONG)?) {
        ensure!(always(&reading), "one of {counters} events does not run all the time: {reading:?}");
        ensure!(reading.enabled > 0, "an event has no enabled time");
        ensure!(!counts_the_loop(*kind) || reading.count >= LONG * PER_ROUND, "{kind:?} counts only {}", reading.count);
    }
    holds(format!("{counters} at once"))
}

fn one_more() -> RowResult {
    let kinds = different()?;
    let Some(counters) = counters(&kinds)? else {
        return absent(format!("{} different events run at once", kinds.len()));
    };
    let kinds = &kinds[..=counters];
    let readings = together(kinds, LONG)?;
    let waiting = readings.iter().filter(|reading| !always(reading)).count();
    ensure!(waiting > 0, "all of {} events run all the time", kinds.len());
    for (kind, reading) in kinds.iter().zip(&readings) {
        ensure!(reading.running <= reading.enabled, "an event runs longer than it is enabled: {reading:?}");
        ensure!(reading.running > 0, "one of {} events never ran: {reading:?}", kinds.len());
        ensure!(!counts_the_loop(*kind) || reading.count > 0, "an event counts zero although it ran: {reading:?}");
    }
    holds(format!("{waiting} of {} take turns", kinds.len()))
}

/// Maximum error of a scaled count, in percent.
const PERCENT: u64 = 2;

fn twelve() -> RowResult {
    let kinds = different()?;
    let Some(counters) = counters(&kinds)? else {
        return absent(format!("{} different events run at once", kinds.len()));
    };
    let rounds = 10 * LONG;
    let expected = rounds * PER_ROUND;
    let mut worst = 0;
    for (kind, reading) in kinds.iter().zip(together(&kinds, rounds)?) {
        ensure!(reading.running > 0, "an event never ran: {reading:?}");
        if !counts_the_loop(*kind) {
            continue;
        }
        let scaled = u128::from(reading.count) * u128::from(reading.enabled) / u128::from(reading.running);
        let off = scaled.abs_diff(expected.into());
        worst = worst.max(off);
        ensure!(off * 100 <= u128::from(expected * PERCENT), "{scaled}, not {expected}: {reading:?}");
    }
    let worst = worst * 10_000 / u128::from(expected);
    holds(format!("{} events on {counters} counters, {}.{:02} % off at most", kinds.len(), worst / 100, worst % 100))
}

fn group() -> RowResult {
    let leader = open(INSTRUCTIONS, Mode::User)?;
    let mut member = attr(INSTRUCTIONS, Mode::User);
    member.set_disabled(0);
    let member = kernels(&member, How::OWN.led_by(leader.as_fd()))?;
    leader.enable(0)?;
    spin(1_000_000);
    leader.disable(0)?;
    let (leader, member) = (read(&leader)?, read(&member)?);
    ensure_eq!(leader.count, member.count, "the leader's count, compared with the member's");
    ensure_eq!(leader.running, member.running, "the leader's time running, compared with the member's");
    holds(format!("{} each", leader.count))
}
