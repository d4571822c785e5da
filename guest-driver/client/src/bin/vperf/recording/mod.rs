//! Code shared by `vperf record` and `vperf exits`: copies records from rings and packets from AUX
//! areas to the file, and adds the names and mappings of the sampled processes.

mod traces;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vpmu_client::error::chain;
use vpmu_client::ring::RingError;
use vpmu_client::tasks::{Clocks, TasksError};
use vpmu_client::{Chunk, Info, Record};

use crate::data::{Chain, DataError, End, EventLine, Line, Lost, Sample, Throttle, Writer};
use crate::events::Chosen;
use crate::format::grouped;
use crate::processes::Processes;
use crate::sampling::Rings;
use crate::session::Session;
use crate::symbols;
use crate::target::{Opened, Target, TargetError};
use crate::tracing::{self, TraceBuffer};

/// Maximum time between a sample and the look-up of its process, unless the ring fills earlier.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Prints a message for the user. Ignores errors: if stderr is closed, there is no place to report them.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "vperf: {text}");
}

/// An error that ends a recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordingError {
    #[error("{}", path.display())]
    Data { path: PathBuf, source: DataError },
    #[error(transparent)]
    Tasks(#[from] TasksError),
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// Converts a sample of event number `event` to the line that is written to the file.
pub(crate) fn sample_line(event: usize, sample: &vpmu_client::Sample) -> Sample {
    Sample(
        event,
        sample.ip,
        sample.pid,
        sample.tid,
        sample.time,
        sample.cpu,
        sample.period,
        sample.user,
        addresses(sample),
    )
}

/// The call chain's addresses by mode; empty without a chain.
fn addresses(sample: &vpmu_client::Sample) -> Chain {
    if sample.chain.is_empty() {
        return Chain::default();
    }
    let frames = sample.frames();
    let of = |user| {
        let of_mode = frames.iter().filter(|frame| frame.user == user);
        of_mode.map(|frame| frame.ip).collect()
    };
    Chain(of(false), of(true))
}

/// Sources of a recording.
#[derive(Debug, Default)]
pub(crate) struct Sources<'a> {
    /// The sampled events.
    pub(crate) sampled: &'a [Chosen],
    pub(crate) rings: Rings,
    /// The traces. [`Opened::index`] numbers the sampled events first, then the traces.
    pub(crate) traced: &'a [Chosen],
    pub(crate) buffers: Vec<TraceBuffer<'a>>,
    /// Whether only the newest part of AUX areas is read.
    pub(crate) snapshot: bool,
}

impl Sources<'_> {
    fn name(&self, index: usize) -> &str {
        let mut all = self.sampled.iter().chain(self.traced);
        all.nth(index).map_or("", |chosen| chosen.name.as_str())
    }
}

/// A running recording, from rings and areas to the file.
#[derive(Debug)]
pub(crate) struct Recording<'a> {
    writer: Writer,
    path: &'a Path,
    sources: Sources<'a>,
    /// The buffer for reads of an area.
    chunk: Chunk,
    taken: traces::Taken,
    info: Info,
    processes: Processes,
    kernel_ips: BTreeSet<u64>,
    /// The cause of the first unreadable record.
    unreadable: Option<String>,
    started: Instant,
    end: End,
}

impl<'a> Recording<'a> {
    /// Creates the file `path`, and writes everything that is known before the recording starts:
    /// the header, the events and the processes that already run.
    pub(crate) fn begin(
        path: &'a Path,
        heading: &str,
        sources: Sources<'a>,
        info: Info,
        target: &Target,
    ) -> Result<Self, RecordingError> {
        let data = |source| RecordingError::Data { path: path.into(), source };
        let followed = target.follow().unwrap_or_else(|error| {
            let error = chain(&error);
            say(&format!("{error}: short-lived processes may have no names"));
            Vec::new()
        });
        let mut recording = Self {
            writer: Writer::create(path, heading).map_err(data)?,
            path,
            sources,
            chunk: Chunk::default(),
            taken: traces::Taken::default(),
            info,
            processes: Processes::new(Path::new("/proc"), followed),
            kernel_ips: BTreeSet::new(),
            unreadable: None,
            started: Instant::now(),
            end: End::default(),
        };
        recording.events()?;
        for pid in target.present() {
            recording.processes.saw(pid, 0);
        }
        recording.news()?;
        recording.started = Instant::now();
        Ok(recording)
    }

    fn line(&mut self, line: &Line) -> Result<(), RecordingError> {
        let error = |source| RecordingError::Data { path: self.path.into(), source };
        self.writer.line(line).map_err(error)
    }

    fn events(&mut self) -> Result<(), RecordingError> {
        for event in self.sources.sampled {
            self.line(&Line::Event(EventLine {
                name: event.name.clone(),
                unit: event.entry.unit.clone(),
                period: event.attr.period,
                freq: event.attr.freq,
                source: event.entry.source.clone(),
                guest_only: event.entry.samples_guest_only(),
            }))?;
        }
        for trace in self.sources.traced {
            self.line(&Line::Trace(tracing::line(trace, self.sources.snapshot)))?;
        }
        Ok(())
    }

    fn news(&mut self) -> Result<(), RecordingError> {
        for line in self.processes.news(&Clocks::read(&self.info))? {
            self.line(&line)?;
        }
        Ok(())
    }

    /// Reads the rings until the measurement ends.
    pub(crate) fn follow(&mut self, opened: &[Opened], session: &mut Session) -> Result<(), RecordingError> {
        // Events that make no more records are removed below: for them, poll(2) would always return
        // immediately.
        let mut open: Vec<BorrowedFd<'_>> = opened.iter().map(|o| o.event.as_fd()).collect();
        let mut ready = Vec::new();
        let mut ended = false;
        while !ended {
            ended = session.wait(&open, Some(LOOK_EVERY), &mut ready)?;
            self.end.wakeups += ready.iter().filter(|ready| ready.readable).count() as u64;
            let mut answers = ready.iter();
            open.retain(|_| !answers.next().is_some_and(|ready| ready.closed));
            self.drain()?;
            if session.snapshots() > 0 {
                self.take_snapshots()?;
                self.flush()?;
                self.report_snapshot();
            }
            if !session.has_command() {
                self.show_progress();
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), RecordingError> {
        // Moved out during the loop, which borrows the rest of `self`.
        let mut rings = std::mem::take(&mut self.sources.rings);
        for (event, ring) in &mut rings {
            // Stop at the current head, so that a ring that fills as fast as it is read does not starve the other
            // rings.
            let head = ring.head();
            while head.wrapping_sub(ring.tail()).cast_signed() > 0 {
                match ring.next_record() {
                    Ok(Some(record)) => self.record(*event, &record)?,
                    Ok(None) => break,
                    Err(error) => {
                        if !matches!(error, RingError::Record { .. }) {
                            ring.skip();
                        }
                        self.unreadable(*event, &error);
                    }
                }
            }
        }
        self.sources.rings = rings;
        self.drain_areas()?;
        self.news()
    }

    /// Keeps the cause of the first unreadable record for the summary. Later records are still read.
    fn unreadable(&mut self, event: usize, error: &(dyn std::error::Error + 'static)) {
        let name = self.sources.name(event);
        self.unreadable.get_or_insert_with(|| format!("{name}: {}", chain(error)));
    }

    fn record(&mut self, event: usize, record: &Record) -> Result<(), RecordingError> {
        match record {
            Record::Sample(sample) => {
                self.processes.saw(sample.pid, sample.time);
                let line = sample_line(event, sample);
                if !sample.user {
                    self.kernel_ips.insert(sample.ip);
                }
                self.kernel_ips.extend(&line.8.0);
                self.end.samples += 1;
                self.line(&Line::Sample(line))
            }
            Record::Throttle(throttle) => {
                self.end.throttled += 1;
                let time = throttle.time;
                self.line(&Line::Throttle(Throttle { event, time }))
            }
            Record::Lost { lost, .. } => {
                let lost = *lost;
                self.end.lost = self.end.lost.saturating_add(lost);
                self.line(&Line::Lost(Lost { event, lost }))
            }
            _ => Ok(()),
        }
    }

    /// Stops the measurement and writes the rest of the recording; returns the exit code.
    pub(crate) fn finish(mut self, opened: &[Opened], session: Session) -> Result<u8, RecordingError> {
        let elapsed = self.started.elapsed().as_nanos();
        self.end.elapsed_ns = u64::try_from(elapsed).unwrap_or(u64::MAX);
        session.stop(opened)?;
        // Reading an event makes the device publish the event's trace, and write the record of lost
        // samples if the ring had no space for it before.
        let dead = first_error(opened.iter().map(|o| (o.index, o.event.read())));
        self.drain()?;
        self.take_snapshots()?;
        self.account()?;
        self.end.exit_code = session.finish()?;
        self.write_end()?;
        self.report();
        if let Some((index, error)) = dead {
            let (name, error) = (self.sources.name(index), chain(&error));
            say(&format!("{name}: {error}: the recording has only the event's earlier data"));
        }
        Ok(self.end.exit_code)
    }

    fn write_end(&mut self) -> Result<(), RecordingError> {
        let ips: Vec<u64> = std::mem::take(&mut self.kernel_ips).into_iter().collect();
        let kernel = symbols::kernel(Path::new(symbols::KALLSYMS), &ips);
        self.line(&Line::Kernel(kernel))?;
        self.line(&Line::End(self.end))?;
        self.flush()
    }

    fn flush(&mut self) -> Result<(), RecordingError> {
        let flushed = self.writer.flush();
        flushed.map_err(|source| RecordingError::Data { path: self.path.into(), source })
    }

    fn report(&self) {
        if self.end.throttled > 0 {
            say(&format!(
                "too many samples: the device throttled the event {} times; raise -c or lower -F",
                grouped(self.end.throttled)
            ));
        }
        if !self.sources.sampled.is_empty() {
            say(&format!(
                "{} samples written to {}, {} lost, {} wakeups",
                grouped(self.end.samples),
                self.path.display(),
                grouped(self.end.lost),
                grouped(self.end.wakeups)
            ));
        }
        self.report_traces();
        if let Some(first) = &self.unreadable {
            say(&format!("records that could not be read are missing; the first error: {first}"));
        }
        if self.processes.lost() > 0 {
            say("the kernel lost reports about processes: some names may be wrong");
        }
    }
}

/// Evaluates all results; returns the first error, with its event's index.
fn first_error<T, E>(results: impl Iterator<Item = (usize, Result<T, E>)>) -> Option<(usize, E)> {
    results.fold(None, |first, (index, result)| first.or_else(|| Some((index, result.err()?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_after_unreadable_one_are_read() {
        let mut read = Vec::new();
        let first = first_error((0..4).map(|index| {
            read.push(index);
            let result = if index % 2 == 1 { Err(index * 10) } else { Ok(()) };
            (index, result)
        }));
        assert_eq!(first, Some((1, 10)));
        assert_eq!(read, [0, 1, 2, 3]);
        assert_eq!(first_error([(0, Ok::<_, ()>(()))].into_iter()), None);
    }
}
