//! The sampling period: `-c`, `-F`, or a default for the event's unit.

use clap::Args;
use vpmu_client::{EventAttr, Info};

/// Default samples per second of CPU time: few enough for a small overhead.
const DEFAULT_FREQUENCY: u64 = 1000;
/// Default period of events whose rate is unknown.
const DEFAULT_PERIOD: u64 = 1_000_000;

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct PeriodArgs {
    /// Take a sample every COUNT units of the event. [default: 1 ms for events in ns or ticks, 1
    /// for exits, halts, marks, page faults, context switches and migrations, else 1000000]
    #[arg(short = 'c', long = "count", value_name = "COUNT",
          value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Take about HZ samples per second of CPU time. For a clock the frequency is exact; for
    /// another event, the device adapts the period to the event's rate.
    #[arg(short = 'F', long = "freq", value_name = "HZ",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    frequency: Option<u64>,
}

/// An error of the options.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PeriodError {
    #[error("-F is too high: the host takes at most {0} samples of an event per second")]
    TooOften(u32),
}

impl PeriodArgs {
    /// Adds the period to `attr`, the attributes of the event `name`, which counts in `unit`.
    pub(crate) fn apply(&self, attr: EventAttr, name: &str, unit: &str, info: &Info) -> Result<EventAttr, PeriodError> {
        if let Some(count) = self.count {
            return Ok(attr.sampling(count));
        }
        if self.frequency > Some(info.max_sample_rate.into()) {
            return Err(PeriodError::TooOften(info.max_sample_rate));
        }
        let per_second = match unit {
            "ns" => Some(1_000_000_000),
            "ticks" => Some(u64::from(info.tsc_khz) * 1000),
            _ => None,
        };
        Ok(match (per_second, self.frequency) {
            (Some(rate), frequency) => attr.sampling((rate / frequency.unwrap_or(DEFAULT_FREQUENCY)).max(1)),
            (None, Some(frequency)) => attr.sampling_at(frequency),
            (None, None) => attr.sampling(default_period(name)),
        })
    }
}

fn default_period(name: &str) -> u64 {
    let rare = ["exits", "halts", "mark", "page-faults", "context-switches", "cpu-migrations"];
    if rare.iter().any(|rare| name.starts_with(rare)) { 1 } else { DEFAULT_PERIOD }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> Info {
        Info {
            version: 1,
            vcpus: 1,
            max_events: 1,
            max_ring_pages: 1,
            host_work_counted: false,
            time_zero: 0,
            time_mult: 0,
            time_shift: 0,
            pmu_type: 9,
            tsc_khz: 2_000_000,
            max_sample_rate: 10_000,
            max_aux_pages: 1,
            max_persistent: 1,
            persistent_type: 10,
        }
    }

    #[test]
    fn clocks_have_periods_and_all_have_frequencies() {
        let of = |count, frequency, name, unit| {
            let attr = EventAttr::new(9, 0);
            let args = PeriodArgs { count, frequency };
            let attr = args.apply(attr, name, unit, &info())?;
            Ok((attr.period, attr.freq))
        };
        assert_eq!(of(None, None, "task-clock", "ns"), Ok((1_000_000, false)));
        let clock = of(None, Some(4000), "task-clock", "ns");
        assert_eq!(clock, Ok((250_000, false)));
        assert_eq!(of(None, Some(1000), "tsc", "ticks"), Ok((2_000_000, false)));
        assert_eq!(of(Some(7), None, "task-clock", "ns"), Ok((7, false)));
        assert_eq!(of(None, None, "exits-io", ""), Ok((1, false)));
        assert_eq!(of(None, None, "mark=7", ""), Ok((1, false)));
        assert_eq!(of(None, None, "cycles", ""), Ok((1_000_000, false)));
        assert_eq!(of(None, Some(1000), "cycles", ""), Ok((1000, true)));
        let error = of(None, Some(10_001), "cycles", "");
        assert_eq!(error, Err(PeriodError::TooOften(10_000)));
    }
}
