//! `vperf record`: samples, out of the rings into a file.

use std::path::PathBuf;

use clap::Args;
use vpmu_client::device::DeviceError;
use vpmu_client::ring::RingError;
use vpmu_client::{EventAttr, Vpmu};

use crate::events::{Chosen, EventArgs};
use crate::period::{PeriodArgs, PeriodError};
use crate::recording::{Recording, RecordingError, Rings};
use crate::target::{Opened, Target, TargetArgs, TargetError};
use crate::workload::WorkloadError;

/// 64 pages.
const DEFAULT_PAGES_LOG2: u32 = 6;

/// Sample where a command, tasks, or CPUs spend an event.
///
/// Every so many of the event (-c), a record of where the machine was goes to a ring in its
/// memory, and from there to a file, which `vperf report` shows. Records for which a ring
/// had no room are counted: then give it more pages (-m) or sample more seldom (-c).
///
/// Examples:
///   vperf record -- make -j2
///   vperf record -e task-clock -F 2000 -- workload hot
///   vperf record -e exits-io -c 1 -a -o io.data -- sleep 5
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    events: EventArgs,
    #[command(flatten)]
    period: PeriodArgs,
    /// Data pages of 4 KiB of each ring, a power of two. [default: 64, or the most that the
    /// device allows]
    #[arg(short = 'm', long, value_name = "PAGES", value_parser = power_of_two)]
    pages: Option<u32>,
    /// The file to write; one that is there is kept as FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "vperf.data")]
    output: PathBuf,
    #[command(flatten)]
    target: TargetArgs,
}

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Events(vpmu_client::Error),
    #[error(
        "no event that samples is among the defaults on this host: name one with -e, `vperf list` shows which can"
    )]
    NoDefault,
    #[error(
        "event {0:?} counts, but takes no samples: `vperf list` shows which do, `vperf stat` counts it"
    )]
    NoSamples(String),
    #[error(transparent)]
    Period(#[from] PeriodError),
    #[error("-m: a ring of this device has at most {0} data pages")]
    Pages(u32),
    #[error("event {name:?}")]
    Open {
        name: String,
        source: vpmu_client::Error,
    },
    #[error("event {name:?}{}", memory_hint(source))]
    Map { name: String, source: RingError },
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

fn memory_hint(error: &RingError) -> &'static str {
    match error {
        RingError::Map { source, .. } => match source.raw_os_error() {
            Some(libc::EPERM | libc::ENOMEM | libc::EINVAL | libc::E2BIG) => {
                " (the ring may be too large: try fewer pages with -m, or raise `ulimit -l`)"
            }
            _ => "",
        },
        _ => "",
    }
}

impl From<TargetError> for RecordError {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Workload(error) => Self::Workload(error),
            error => Self::Target(error),
        }
    }
}

/// The number of pages as its logarithm.
fn power_of_two(text: &str) -> Result<u32, String> {
    let pages: u32 = text
        .parse()
        .map_err(|_| "not a number of pages".to_owned())?;
    if pages.is_power_of_two() {
        Ok(pages.ilog2())
    } else {
        Err("not a power of two, such as 64".into())
    }
}

/// What was asked for, if the device allows as much; both as logarithms.
fn ring_pages(asked: Option<u32>, most: u32) -> Result<u32, RecordError> {
    let most_log2 = most.checked_ilog2().unwrap_or(0);
    match asked {
        Some(asked) if asked > most_log2 => Err(RecordError::Pages(most)),
        Some(asked) => Ok(asked),
        None => Ok(DEFAULT_PAGES_LOG2.min(most_log2)),
    }
}

pub(crate) fn run(args: &RecordArgs) -> Result<u8, RecordError> {
    let vpmu = Vpmu::open()?;
    let chosen = choose(args, &vpmu)?;
    let pages_log2 = ring_pages(args.pages, vpmu.info().max_ring_pages)?;
    let target = args.target.prepare()?;
    let (opened, rings) = open_all(&vpmu, &target, &chosen, pages_log2)?;
    let heading = args.target.describe();
    let info = *vpmu.info();
    let mut recording = Recording::begin(&args.output, &heading, &chosen, rings, info, &target)?;
    let mut measuring = target.start(&opened)?;
    recording.follow(&opened, &mut measuring)?;
    Ok(recording.finish(&opened, measuring)?)
}

fn choose(args: &RecordArgs, vpmu: &Vpmu) -> Result<Vec<Chosen>, RecordError> {
    let mut chosen = args.events.to_sample(vpmu).map_err(RecordError::Events)?;
    if chosen.is_empty() {
        return Err(RecordError::NoDefault);
    }
    for event in &mut chosen {
        if !event.entry.samples {
            return Err(RecordError::NoSamples(event.name.clone()));
        }
        let period = args
            .period
            .of(&event.name, &event.entry.unit, vpmu.info().tsc_khz)?;
        event.attr = event.attr.clone().sampling(period);
    }
    Ok(chosen)
}

/// A quarter of a ring before its reader is woken: room enough for what comes until it is.
fn open_all(
    vpmu: &Vpmu,
    target: &Target,
    chosen: &[Chosen],
    pages_log2: u32,
) -> Result<(Vec<Opened>, Rings), RecordError> {
    let quarter = 4096u32
        .checked_shl(pages_log2)
        .map_or(u32::MAX, |bytes| bytes / 4);
    let mut opened = Vec::new();
    let mut rings = Vec::new();
    for (index, event) in chosen.iter().enumerate() {
        let attr = EventAttr {
            wakeup: quarter,
            watermark: true,
            ..event.attr.clone()
        };
        let name = || event.name.clone();
        let events = target
            .open(index, &attr, |attr| vpmu.open_event(attr))
            .map_err(|source| RecordError::Open {
                name: name(),
                source,
            })?;
        for opened in &events {
            let ring = opened.event.map(pages_log2);
            rings.push((
                index,
                ring.map_err(|source| RecordError::Map {
                    name: name(),
                    source,
                })?,
            ));
        }
        opened.extend(events);
    }
    Ok((opened, rings))
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
        assert!(matches!(
            ring_pages(Some(11), 1024),
            Err(RecordError::Pages(1024))
        ));
        for wrong in ["0", "3", "-1", "", "x", "4294967296"] {
            assert!(power_of_two(wrong).is_err(), "{wrong}");
        }
    }
}
