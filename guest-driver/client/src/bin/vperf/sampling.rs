//! Options of sampling events: period, engine and ring size.

use clap::{Args, ValueEnum};
use vpmu_abi::KIND_MARK;
use vpmu_client::attr::{EventAttr, SAMPLE_ADDR, SAMPLE_CALLCHAIN};
use vpmu_client::ring::RingError;
use vpmu_client::{Engine, Ring, Vpmu};

use crate::events::{Chosen, EventArgs, EventsError};
use crate::period::{PeriodArgs, PeriodError};
use crate::target::{Opened, Target};

/// 64 pages.
const DEFAULT_PAGES_LOG2: u32 = 6;

#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    #[command(flatten)]
    period: PeriodArgs,
    /// How samples are taken: by the host in batches while the machine runs (batched), or with one
    /// VM exit for each sample (exit). auto selects batched where the host supports it.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,
    /// Number of data pages (4 KiB each) of each ring, a power of two. [default: 64, or the
    /// device's limit]
    #[arg(short = 'm', long, value_name = "PAGES", value_parser = power_of_two)]
    pages: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EngineChoice {
    Auto,
    Exit,
    Batched,
}

/// Each ring with the index of its event.
pub(crate) type Rings = Vec<(usize, Ring)>;

/// An error of sampling events.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SamplingError {
    #[error(transparent)]
    Events(#[from] EventsError),
    #[error(
        "no default event can be sampled on this host: name an event with -e; `vperf list` shows the events that can be sampled"
    )]
    NoDefault,
    #[error(
        "event {0:?} takes no samples: count it with `vperf stat`; `vperf list` shows the events that take samples"
    )]
    NoSamples(String),
    #[error("event {0:?} is a trace and takes no samples: record it with `vperf record --aux {0}`")]
    Trace(String),
    #[error("event {0:?} is in a group: groups cannot be sampled, only counted (`vperf stat`)")]
    Group(String),
    #[error(transparent)]
    Period(#[from] PeriodError),
    #[error("-m: a ring of this device has at most {0} data pages")]
    Pages(u32),
    #[error("the batched engine cannot record call chains: omit --engine batched or -g")]
    BatchedChains,
    #[error("event {name:?}")]
    Open { name: String, source: vpmu_client::Error },
    #[error("event {name:?}")]
    Map { name: String, source: RingError },
}

/// Parses a number of pages, a power of two; returns its base-2 logarithm.
fn power_of_two(text: &str) -> Result<u32, String> {
    let pages: u32 = text.parse().map_err(|_| "not a number of pages".to_owned())?;
    if pages.is_power_of_two() { Ok(pages.ilog2()) } else { Err("not a power of two, such as 64".into()) }
}

/// Returns the base-2 logarithm of the number of data pages. `asked` is such a logarithm; if it is
/// `None`, returns the default, reduced to fit `most` pages. Fails if `asked` exceeds `most` pages.
fn ring_pages(asked: Option<u32>, most: u32) -> Result<u32, SamplingError> {
    let most_log2 = most.checked_ilog2().unwrap_or(0);
    match asked {
        Some(asked) if asked > most_log2 => Err(SamplingError::Pages(most)),
        Some(asked) => Ok(asked),
        None => Ok(DEFAULT_PAGES_LOG2.min(most_log2)),
    }
}

impl SamplingArgs {
    /// Selects the events and sets their periods and engine. As the last step for each event,
    /// `finish` can change its attributes.
    pub(crate) fn choose(
        &self,
        events: &EventArgs,
        vpmu: &Vpmu,
        finish: impl Fn(EventAttr) -> EventAttr,
    ) -> Result<Vec<Chosen>, SamplingError> {
        let mut chosen = events.to_sample(vpmu)?;
        if chosen.is_empty() {
            return Err(SamplingError::NoDefault);
        }
        for event in &mut chosen {
            if event.entry.trace.is_some() {
                return Err(SamplingError::Trace(event.name.clone()));
            }
            if !event.entry.samples {
                return Err(SamplingError::NoSamples(event.name.clone()));
            }
            if event.leader.is_some() {
                return Err(SamplingError::Group(event.name.clone()));
            }
            let attr = event.attr.clone();
            let attr = self.period.apply(attr, &event.name, &event.entry.unit, vpmu.info())?;
            event.attr = finish(attr.sampled_by(self.engine()));
            if event.entry.kind == KIND_MARK {
                // The field has the mark's value.
                event.attr.sample_type |= SAMPLE_ADDR;
            }
            let has_chains = event.attr.sample_type & SAMPLE_CALLCHAIN != 0;
            if has_chains && self.engine == EngineChoice::Batched {
                return Err(SamplingError::BatchedChains);
            }
        }
        Ok(chosen)
    }

    /// The period options.
    pub(crate) fn period(&self) -> &PeriodArgs {
        &self.period
    }

    fn engine(&self) -> Engine {
        match self.engine {
            EngineChoice::Auto => Engine::Any,
            EngineChoice::Exit => Engine::Exit,
            EngineChoice::Batched => Engine::Batched,
        }
    }

    /// Opens and maps the events. Readers wake when a quarter of a ring is full, so the ring has space for the samples
    /// that arrive before the reader runs.
    pub(crate) fn open(
        &self,
        vpmu: &Vpmu,
        target: &Target,
        chosen: &[Chosen],
    ) -> Result<(Vec<Opened>, Rings), SamplingError> {
        let pages_log2 = ring_pages(self.pages, vpmu.info().max_ring_pages)?;
        let quarter = 4096u32.checked_shl(pages_log2).map_or(u32::MAX, |bytes| bytes / 4);
        let mut opened = Vec::new();
        let mut rings = Vec::new();
        for (index, event) in chosen.iter().enumerate() {
            let attr = event.attr.clone().with(|attr| {
                attr.wakeup = quarter;
                attr.watermark = true;
            });
            let name = || event.name.clone();
            let events = target
                .open(index, &attr, |_, attr| vpmu.open_event(attr))
                .map_err(|source| SamplingError::Open { name: name(), source })?;
            for opened in &events {
                let ring = opened.event.map(pages_log2);
                let ring = ring.map_err(|source| SamplingError::Map { name: name(), source })?;
                rings.push((index, ring));
            }
            opened.extend(events);
        }
        Ok((opened, rings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_powers_of_two() {
        assert_eq!(power_of_two("1"), Ok(0));
        assert_eq!(power_of_two("64"), Ok(6));
        assert!(matches!(ring_pages(None, 1024), Ok(6)));
        assert!(matches!(ring_pages(None, 16), Ok(4)));
        assert!(matches!(ring_pages(Some(10), 1024), Ok(10)));
        assert!(matches!(ring_pages(Some(11), 1024), Err(SamplingError::Pages(1024))));
        for wrong in ["0", "3", "-1", "", "x", "4294967296"] {
            assert!(power_of_two(wrong).is_err(), "{wrong}");
        }
    }
}
