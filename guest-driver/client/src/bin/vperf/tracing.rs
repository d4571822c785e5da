//! Selects and opens traces, and maps their AUX areas. Traces are recorded in addition to samples, or
//! instead of them.

use vpmu_abi::{KIND_SAMPLE_TRACE, PACE_CPU_CLOCK, PACE_EXITS};
use vpmu_client::area::AreaError;
use vpmu_client::ring::RingError;
use vpmu_client::trace::Format;
use vpmu_client::{Area, Entry, Ring, Snapshot, Vpmu};

use crate::events::{Chosen, EventsError};
use crate::period::{PeriodArgs, PeriodError};
use crate::target::{Opened, Target};

/// 4 MiB: about sixty thousand exits.
const DEFAULT_PAGES_LOG2: u32 = 10;
/// 8 pages are enough: the ring of a trace holds only records that report new bytes in the area.
const RING_PAGES_LOG2: u32 = 3;
const PAGE: u64 = 4096;

/// An error of tracing events.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TracingError {
    #[error(transparent)]
    Events(#[from] EventsError),
    #[error("event {0:?} is not a trace; `vperf list` shows the traces")]
    NoTrace(String),
    #[error(transparent)]
    Period(#[from] PeriodError),
    #[error("this device has no AUX areas, which traces need")]
    NoAreas,
    #[error("an AUX area of this device has at most {0} bytes")]
    Size(u64),
    #[error("trace {name:?}")]
    Open { name: String, source: vpmu_client::Error },
    #[error("the ring of the trace {name:?}")]
    Ring { name: String, source: RingError },
    #[error("trace {name:?}")]
    Map { name: String, source: AreaError },
}

/// Size and mode of AUX areas.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AreaChoice {
    /// The number of pages, as a base-2 logarithm; `None` for the default.
    pub(crate) pages: Option<u32>,
    /// Whether only the newest packets are kept.
    pub(crate) snapshot: bool,
}

/// The ring and area of one trace on one target.
#[derive(Debug)]
pub(crate) struct TraceBuffer<'a> {
    /// Index of the trace.
    pub(crate) trace: usize,
    pub(crate) opened: &'a Opened,
    pub(crate) ring: Ring,
    pub(crate) area: Mapped<'a>,
    /// For a snapshot: the position in the area up to which bytes have been written to the file.
    pub(crate) until: u64,
}

/// The reading mode of an area.
#[derive(Debug)]
pub(crate) enum Mapped<'a> {
    Emptied(Area),
    Newest(Snapshot<'a>),
}

/// Parses `64K`, `4M` or a number of bytes; returns the number of pages, as a base-2 logarithm.
pub(crate) fn area_size(text: &str) -> Result<u32, String> {
    let wrong = || "not a size such as 256K, 4M or 1G".to_owned();
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let units: u64 = digits.parse().map_err(|_| wrong())?;
    let bytes = units.checked_mul(1 << shift).ok_or_else(wrong)?;
    if bytes >= PAGE && bytes.is_power_of_two() {
        Ok((bytes / PAGE).ilog2())
    } else {
        Err("the size must be a power of two and at least 4K".into())
    }
}

impl AreaChoice {
    /// Returns the number of pages, as a base-2 logarithm. Fails if more than `most` are requested.
    fn pages_log2(self, most: u32) -> Result<u32, TracingError> {
        let most_log2 = most.checked_ilog2().ok_or(TracingError::NoAreas)?;
        match self.pages {
            Some(asked) if asked > most_log2 => Err(TracingError::Size(u64::from(most) * PAGE)),
            Some(asked) => Ok(asked),
            None => Ok(DEFAULT_PAGES_LOG2.min(most_log2)),
        }
    }

    /// Opens the traces. Their indexes begin at `first`, after the indexes of the events. Sets the AUX watermark to a
    /// quarter of the area, so that the area has space for the packets that arrive before the reader runs.
    pub(crate) fn open(
        self,
        vpmu: &Vpmu,
        target: &Target,
        traces: &[Chosen],
        first: usize,
    ) -> Result<Vec<Opened>, TracingError> {
        if traces.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = PAGE << self.pages_log2(vpmu.info().max_aux_pages)?;
        let quarter = u32::try_from(bytes / 4).unwrap_or(u32::MAX);
        let mut opened = Vec::new();
        for (index, trace) in traces.iter().enumerate() {
            let attr = trace.attr.clone().tracing(quarter);
            let events = target
                .open(first + index, &attr, |_, attr| vpmu.open_event(attr))
                .map_err(|source| TracingError::Open { name: trace.name.clone(), source })?;
            opened.extend(events);
        }
        Ok(opened)
    }

    /// Maps a ring and an area for each trace in `opened`. Entries with an index below `first` are not
    /// traces.
    pub(crate) fn map<'a>(
        self,
        vpmu: &Vpmu,
        traces: &[Chosen],
        opened: &'a [Opened],
        first: usize,
    ) -> Result<Vec<TraceBuffer<'a>>, TracingError> {
        let mut buffers: Vec<TraceBuffer<'a>> = Vec::new();
        for opened in opened.iter().filter(|opened| opened.index >= first) {
            let trace = opened.index - first;
            let name = || traces[trace].name.clone();
            let pages_log2 = self.pages_log2(vpmu.info().max_aux_pages)?;
            let event = &opened.event;
            let ring = event.map(RING_PAGES_LOG2.min(vpmu.info().max_ring_pages.checked_ilog2().unwrap_or(0)));
            let ring = ring.map_err(|source| TracingError::Ring { name: name(), source })?;
            let area = if self.snapshot {
                Snapshot::map(event, &ring, pages_log2).map(Mapped::Newest)
            } else {
                Area::map(event, &ring, pages_log2).map(Mapped::Emptied)
            };
            let area = area.map_err(|source| TracingError::Map { name: name(), source })?;
            buffers.push(TraceBuffer { trace, opened, ring, area, until: 0 });
        }
        Ok(buffers)
    }
}

/// The traces named by `specs`.
pub(crate) fn choose(vpmu: &Vpmu, specs: &[String], period: &PeriodArgs) -> Result<Vec<Chosen>, TracingError> {
    let mut chosen = Vec::new();
    for spec in specs {
        let mut trace = crate::events::choose(vpmu, spec, None)?;
        match trace.entry.trace {
            None => return Err(TracingError::NoTrace(spec.clone())),
            Some(Format::Samples) => {
                let (name, unit) = pace(&trace.entry);
                trace.attr = period.apply(trace.attr, name, unit, vpmu.info())?;
            }
            Some(_) => {}
        }
        chosen.push(trace);
    }
    Ok(chosen)
}

/// Returns the name of the event that a sample trace samples, and the unit of the trace's period.
/// The trace's count has another unit: bytes.
fn pace(entry: &Entry) -> (&str, &'static str) {
    match (entry.kind, entry.config) {
        (KIND_SAMPLE_TRACE, PACE_CPU_CLOCK) => ("cpu-clock", "ns"),
        (KIND_SAMPLE_TRACE, PACE_EXITS) => ("exits", ""),
        _ => (&entry.name, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_of_pages() {
        assert_eq!(area_size("4096"), Ok(0));
        assert_eq!(area_size("4K"), Ok(0));
        assert_eq!(area_size("64k"), Ok(4));
        assert_eq!(area_size("4M"), Ok(10));
        assert_eq!(area_size("1g"), Ok(18));
        for wrong in ["", "K", "0", "2K", "3M", "-4K", "4T", "1.5M", "18446744073709551615G"] {
            assert!(area_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn areas_are_as_large_as_the_device_allows() {
        let of = |pages, most| AreaChoice { pages, snapshot: false }.pages_log2(most);
        assert!(matches!(of(None, 16384), Ok(10)));
        assert!(matches!(of(None, 64), Ok(6)));
        assert!(matches!(of(Some(14), 16384), Ok(14)));
        assert!(matches!(of(Some(15), 16384), Err(TracingError::Size(0x400_0000))));
        assert!(matches!(of(None, 0), Err(TracingError::NoAreas)));
    }
}
