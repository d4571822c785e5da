//! How often samples are taken: `-c`, `-F`, or what is sensible for the event's unit.

use clap::Args;

/// Samples a second of CPU time, where nobody says otherwise: few enough not to disturb.
const DEFAULT_FREQUENCY: u64 = 1000;
/// Of events that have a rate nobody knows.
const DEFAULT_PERIOD: u64 = 1_000_000;

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct PeriodArgs {
    /// Take a sample every COUNT of the event. [default: 1 ms for events in ns or ticks, 1 for
    /// exits, halts and marks, else 1000000]
    #[arg(short = 'c', long = "count", value_name = "COUNT",
          value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Take so many samples a second, of an event that is a clock.
    #[arg(short = 'F', long = "freq", value_name = "HZ",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    frequency: Option<u64>,
}

/// What is wrong with it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PeriodError {
    #[error("event {0:?} is no clock, so -F cannot say how often: give a period with -c")]
    NoClock(String),
}

impl PeriodArgs {
    /// The period of the event `name`, which counts in `unit`.
    pub(crate) fn of(&self, name: &str, unit: &str, tsc_khz: u32) -> Result<u64, PeriodError> {
        if let Some(count) = self.count {
            return Ok(count);
        }
        let per_second = match unit {
            "ns" => Some(1_000_000_000),
            "ticks" => Some(u64::from(tsc_khz) * 1000),
            _ => None,
        };
        match (per_second, self.frequency) {
            (Some(rate), frequency) => Ok((rate / frequency.unwrap_or(DEFAULT_FREQUENCY)).max(1)),
            (None, Some(_)) => Err(PeriodError::NoClock(name.into())),
            (None, None) => Ok(default_period(name)),
        }
    }
}

fn default_period(name: &str) -> u64 {
    let rare = [
        "exits",
        "halts",
        "mark",
        "page-faults",
        "context-switches",
        "cpu-migrations",
    ];
    if rare.iter().any(|rare| name.starts_with(rare)) {
        1
    } else {
        DEFAULT_PERIOD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_have_frequencies_and_all_have_periods() {
        let of = |count, frequency, name, unit| {
            PeriodArgs { count, frequency }.of(name, unit, 2_000_000)
        };
        assert_eq!(of(None, None, "task-clock", "ns"), Ok(1_000_000));
        assert_eq!(of(None, Some(4000), "task-clock", "ns"), Ok(250_000));
        assert_eq!(of(None, Some(1000), "tsc", "ticks"), Ok(2_000_000));
        assert_eq!(of(Some(7), None, "task-clock", "ns"), Ok(7));
        assert_eq!(of(None, None, "exits-io", ""), Ok(1));
        assert_eq!(of(None, None, "mark=7", ""), Ok(1));
        assert_eq!(of(None, None, "cycles", ""), Ok(1_000_000));
        let error = of(None, Some(1000), "cycles", "");
        assert_eq!(error, Err(PeriodError::NoClock("cycles".into())));
    }
}
