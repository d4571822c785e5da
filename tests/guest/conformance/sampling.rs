//! Samples of a loop.

use std::error::Error;

use perf_event_open_sys::bindings::perf_event_attr;

use super::event::{CYCLES, INSTRUCTIONS, Mode, PER_ROUND, What, attr, code, spin};
use super::{Row, RowResult, holds};
use crate::Fallible;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, IP, PERIOD, Sample, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Event, kernels_own, sampling};

pub(super) const ROWS: &[Row] = &[
    ("each_period_of_instructions_is_a_sample", instructions),
    ("each_period_of_cycles_is_a_sample", cycles),
    ("samples_spread_over_the_loop_as_it_runs", spread),
    ("period_changed_while_counting_holds_from_then_on", changed),
    ("frequency_settles_at_the_rate_asked_for", frequency),
];

/// Odd, so that samples alternate between the two instructions of the loop.
const PERIODS: [u64; 2] = [20_011, 100_003];
/// Samples of each period.
const SAMPLES: u64 = 50;
const RING_PAGES: usize = 32;

fn paced(what: What, period: u64) -> perf_event_attr {
    sampling(attr(what, Mode::User), period, IP | TIME | PERIOD)
}

/// Takes the samples out of the ring. No sample may be lost.
fn samples(ring: &mut Pages, attr: &perf_event_attr) -> Fallible<Vec<Sample>> {
    let (samples, lost) = fields::samples(&ring.take()?, attr)?;
    ensure_eq!(lost, 0, "samples lost");
    Ok(samples)
}

/// Returns the count and the samples of a loop of `rounds` rounds.
fn sampled(attr: &perf_event_attr, rounds: u64) -> Fallible<(u64, Vec<Sample>)> {
    let event = kernels_own(attr)?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    event.enable(0)?;
    spin(rounds);
    event.disable(0)?;
    Ok((event.count()?, samples(&mut ring, attr)?))
}

fn each_period(what: What) -> RowResult {
    let mut figures = Vec::new();
    for period in PERIODS {
        let attr = paced(what, period);
        let (count, samples) = sampled(&attr, SAMPLES * period / PER_ROUND + 1)?;
        ensure_eq!(samples.len() as u64, count / period, "samples of {count} by {period}");
        let mut last = 0;
        for sample in &samples {
            let ip = sample.ip.ok_or("no address")?;
            ensure!(code().contains(&ip), "{ip:#x} is not in {:x?}", code());
            ensure_eq!(sample.period, Some(period), "the period of a sample");
            let time = sample.time.ok_or("no time")?;
            ensure!(time > last, "time {time} follows {last}");
            last = time;
        }
        figures.push(format!("{count} by {period}: {}", samples.len()));
    }
    holds(figures.join(", "))
}

fn instructions() -> RowResult {
    each_period(INSTRUCTIONS)
}

fn cycles() -> RowResult {
    each_period(CYCLES)
}

fn spread() -> RowResult {
    let attr = paced(INSTRUCTIONS, PERIODS[0]);
    let (_, samples) = sampled(&attr, 4 * SAMPLES * PERIODS[0] / PER_ROUND)?;
    let first = samples.iter().filter(|s| s.ip == Some(code().start)).count();
    let others = samples.len() - first;
    ensure!(first.abs_diff(others) <= 2, "{first} samples of the loop's first instruction, {others} of the other");
    holds(format!("first instruction: {first}, second: {others}"))
}

fn changed() -> RowResult {
    let attr = paced(INSTRUCTIONS, PERIODS[0]);
    let event = kernels_own(&attr)?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    let step = |event: &Event| -> Fallible<u64> {
        spin(20 * PERIODS[1] / PER_ROUND);
        Ok(event.count()?)
    };
    event.enable(0)?;
    let before = step(&event)?;
    event.period(PERIODS[1])?;
    let after = step(&event)?;
    event.disable(0)?;
    let samples = samples(&mut ring, &attr)?;
    let short = samples.iter().filter(|s| s.period == Some(PERIODS[0]));
    let short = short.count() as u64;
    let long = samples.len() as u64 - short;
    ensure!(short.abs_diff(before / PERIODS[0]) <= 1, "{short} samples of {before} by {}", PERIODS[0]);
    ensure!(
        long.abs_diff((after - before) / PERIODS[1]) <= 1,
        "{long} samples of {} by {}",
        after - before,
        PERIODS[1]
    );
    holds(format!("{short}, then {long}"))
}

/// Maximum error of the sampling rate, in percent, after the rate has settled.
const PERCENT: u64 = 10;

fn frequency() -> RowResult {
    const HERTZ: u64 = 4_000;
    let mut attr = paced(INSTRUCTIONS, HERTZ);
    attr.set_freq(1);
    let event = kernels_own(&attr)?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    event.enable(0)?;
    // The kernel starts with a short period, and adapts it at each tick. So the first samples are discarded.
    spin(50_000_000);
    ring.take()?;
    let samples = (0..4).try_fold(Vec::new(), |mut all, _| {
        spin(25_000_000);
        all.extend(samples(&mut ring, &attr)?);
        Ok::<_, Box<dyn Error>>(all)
    })?;
    event.disable(0)?;
    let times = samples.iter().filter_map(|sample| sample.time);
    let (first, last) = (times.clone().min(), times.max());
    let (first, last) = first.zip(last).ok_or("no sample")?;
    let rate = (samples.len() as u64 - 1) * 1_000_000_000 / (last - first).max(1);
    ensure!(rate.abs_diff(HERTZ) * 100 <= HERTZ * PERCENT, "{rate} samples a second, not {HERTZ}");
    holds(format!("{rate} a second, {HERTZ} asked for"))
}
