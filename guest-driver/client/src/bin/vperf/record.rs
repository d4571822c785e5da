//! `vperf record`: samples, out of the rings into a file.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use vpmu_client::device::DeviceError;
use vpmu_client::error::chain;
use vpmu_client::ring::RingError;
use vpmu_client::tasks::{Clocks, TasksError};
use vpmu_client::{Info, Record, Ring, Vpmu};

use crate::data::{DataError, End, EventLine, Line, Lost, Sample, Writer};
use crate::events::{Chosen, EventArgs};
use crate::format::grouped;
use crate::period::{PeriodArgs, PeriodError};
use crate::processes::Processes;
use crate::symbols;
use crate::target::{Measuring, Opened, Target, TargetArgs, TargetError};
use crate::workload::WorkloadError;

/// 64 pages.
const DEFAULT_PAGES_LOG2: u32 = 6;

/// How long samples may lie in a ring that does not fill, before their processes are asked
/// who they are.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Sample where a command, tasks, or CPUs spend an event.
///
/// Every so many of the event (-c), a record of where the machine was goes to a ring in its
/// memory, and from there to a file, which `vperf report` shows. Records for which a ring
/// had no room are counted: then give it more pages (-m) or sample more seldom (-c).
///
/// Examples:
///   vperf record -- make -j2
///   vperf record -e task-clock -c 100000 -- workload hot
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
    Tasks(#[from] TasksError),
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error("reading the ring of {name:?}")]
    Ring { name: String, source: RingError },
    #[error("{}", path.display())]
    Data { path: PathBuf, source: DataError },
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
    let followed = target.follow().unwrap_or_else(|error| {
        say(&format!(
            "{}: short-lived processes may stay without a name",
            chain(&error)
        ));
        Vec::new()
    });
    let path = &args.output;
    let data = |source| RecordError::Data {
        path: path.clone(),
        source,
    };
    let mut recording = Recording {
        writer: Writer::create(path, &args.target.describe()).map_err(data)?,
        path,
        chosen: &chosen,
        rings,
        info: *vpmu.info(),
        processes: Processes::new(Path::new("/proc"), followed),
        kernel_ips: BTreeSet::new(),
        end: End::default(),
    };
    recording.events()?;
    for pid in target.present() {
        recording.processes.saw(pid, 0);
    }
    recording.news()?;
    let started = Instant::now();
    let mut measuring = target.start(&opened)?;
    recording.follow(&opened, &mut measuring)?;
    recording.end.elapsed_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    measuring.stop(&opened)?;
    // A reading has the device tell the last loss, for which there was no room before.
    let dead = opened
        .iter()
        .find_map(|opened| Some((opened.index, opened.event.read().err()?)));
    recording.drain()?;
    recording.end.exit_code = measuring.finish()?;
    let exit_code = recording.finish()?;
    if let Some((index, error)) = dead {
        let name = &chosen[index].name;
        say(&format!(
            "{name}: {}: the recording holds what came before",
            chain(&error)
        ));
    }
    Ok(exit_code)
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

/// For people; where stderr is closed there is nobody to tell.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "vperf: {text}");
}

/// Each with the index of its event.
type Rings = Vec<(usize, Ring)>;

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
        let attr = vpmu_client::EventAttr {
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

/// What goes from rings to file.
struct Recording<'a> {
    writer: Writer,
    path: &'a Path,
    chosen: &'a [Chosen],
    rings: Rings,
    info: Info,
    processes: Processes,
    kernel_ips: BTreeSet<u64>,
    end: End,
}

impl Recording<'_> {
    fn line(&mut self, line: &Line) -> Result<(), RecordError> {
        let error = |source| RecordError::Data {
            path: self.path.into(),
            source,
        };
        self.writer.line(line).map_err(error)
    }

    fn events(&mut self) -> Result<(), RecordError> {
        for event in self.chosen {
            self.line(&Line::Event(EventLine {
                name: event.name.clone(),
                unit: event.entry.unit.clone(),
                period: event.attr.period,
                source: event.entry.source.clone(),
                guest_only: event.entry.guest_only,
            }))?;
        }
        Ok(())
    }

    fn news(&mut self) -> Result<(), RecordError> {
        for line in self.processes.news(&Clocks::read(&self.info))? {
            self.line(&line)?;
        }
        Ok(())
    }

    /// Reads the rings until what is measured has ended.
    fn follow(&mut self, opened: &[Opened], measuring: &mut Measuring) -> Result<(), RecordError> {
        // An event that is closed would be ready for ever.
        let mut open: Vec<BorrowedFd<'_>> = opened.iter().map(|o| o.event.as_fd()).collect();
        let mut ready = Vec::new();
        let mut ended = false;
        while !ended {
            ended = measuring.wait(&open, Some(LOOK_EVERY), &mut ready)?;
            self.end.wakeups += ready.iter().filter(|ready| ready.readable).count() as u64;
            let mut answers = ready.iter();
            open.retain(|_| !answers.next().is_some_and(|ready| ready.closed));
            self.drain()?;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), RecordError> {
        // Taken out while each is read: what is read goes elsewhere in `self`.
        let mut rings = std::mem::take(&mut self.rings);
        for (event, ring) in &mut rings {
            // No more than the ring holds now: one that fills as fast must not keep the rest
            // from being read.
            let head = ring.head();
            while ring.tail() != head {
                let name = || self.chosen[*event].name.clone();
                let record = ring.next_record().map_err(|source| RecordError::Ring {
                    name: name(),
                    source,
                })?;
                let Some(record) = record else { break };
                self.record(*event, &record)?;
            }
        }
        self.rings = rings;
        self.news()
    }

    fn record(&mut self, event: usize, record: &Record) -> Result<(), RecordError> {
        match *record {
            Record::Sample(sample) => {
                self.processes.saw(sample.pid, sample.time);
                if !sample.user {
                    self.kernel_ips.insert(sample.ip);
                }
                self.end.samples += 1;
                self.line(&Line::Sample(Sample(
                    event,
                    sample.ip,
                    sample.pid,
                    sample.tid,
                    sample.time,
                    sample.cpu,
                    sample.period,
                    sample.user,
                )))
            }
            Record::Lost { lost, .. } => {
                self.end.lost = self.end.lost.saturating_add(lost);
                self.line(&Line::Lost(Lost { event, lost }))
            }
            _ => Ok(()),
        }
    }

    fn finish(mut self) -> Result<u8, RecordError> {
        let ips: Vec<u64> = std::mem::take(&mut self.kernel_ips).into_iter().collect();
        let kernel = symbols::kernel(Path::new("/proc/kallsyms"), &ips);
        self.line(&Line::Kernel(kernel))?;
        let end = self.end;
        self.line(&Line::End(end))?;
        self.writer.flush().map_err(|source| RecordError::Data {
            path: self.path.into(),
            source,
        })?;
        say(&format!(
            "{} samples written to {}, {} lost, {} wakeups",
            grouped(end.samples),
            self.path.display(),
            grouped(end.lost),
            grouped(end.wakeups)
        ));
        if self.processes.lost() > 0 {
            say("the kernel told of more processes than could be read: some names may be wrong");
        }
        Ok(end.exit_code)
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
        assert!(matches!(
            ring_pages(Some(11), 1024),
            Err(RecordError::Pages(1024))
        ));
        for wrong in ["0", "3", "-1", "", "x", "4294967296"] {
            assert!(power_of_two(wrong).is_err(), "{wrong}");
        }
    }
}
