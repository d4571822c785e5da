//! Code shared by `vperf record` and `vperf exits`: copies records from rings and packets from AUX
//! areas to the file, and adds the names and mappings of the sampled processes.

#[cfg(test)]
pub(crate) mod composed;
mod file;
mod traces;

pub(crate) use file::{FileError, Output, event};
#[cfg(test)]
pub(crate) use traces::exit_sample;

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use vpmu_client::error::chain;
use vpmu_client::ring::RingError;
use vpmu_client::tasks::{Clocks, TasksError};
use vpmu_client::{Chunk, Info, Record};

use crate::events::Chosen;
use crate::format::grouped;
use crate::processes::Processes;
use crate::sampling::Rings;
use crate::session::Session;
use crate::target::{Opened, Target, TargetError};
use crate::tracing::TraceBuffer;

/// Maximum time between a sample and the look-up of its process, unless the ring fills earlier.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Prints a message for the user. Ignores errors: if stderr is closed, there is no place to report them.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "vperf: {text}");
}

/// An error that ends a recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordingError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Tasks(#[from] TasksError),
    #[error(transparent)]
    Target(#[from] TargetError),
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

/// Totals of a recording.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    samples: u64,
    lost: u64,
    throttled: u64,
    wakeups: u64,
}

/// A running recording, from rings and areas to the file.
#[derive(Debug)]
pub(crate) struct Recording<'a> {
    output: Output,
    sources: Sources<'a>,
    /// The buffer for reads of an area.
    chunk: Chunk,
    taken: traces::Taken,
    info: Info,
    processes: Processes,
    /// The time of the last record.
    now: u64,
    /// The cause of the first unreadable record.
    unreadable: Option<String>,
    totals: Totals,
}

impl<'a> Recording<'a> {
    /// Creates the file `path`, and writes everything that is known before the recording starts:
    /// the events, and the processes that already run.
    pub(crate) fn begin(
        path: &Path,
        sources: Sources<'a>,
        info: Info,
        target: &Target,
    ) -> Result<Self, RecordingError> {
        let followed = target.follow().unwrap_or_else(|error| {
            let error = chain(&error);
            say(&format!("{error}: short-lived processes may have no names"));
            Vec::new()
        });
        let chosen = sources.sampled.iter().map(|chosen| (chosen, false));
        let chosen = chosen.chain(sources.traced.iter().map(|chosen| (chosen, sources.snapshot))).enumerate();
        let events = chosen.map(|(index, (chosen, is_newest_only))| {
            event(index, &chosen.name, Some(&chosen.entry), &chosen.attr, is_newest_only)
        });
        let mut recording = Self {
            output: Output::create(path, events.collect())?,
            sources,
            chunk: Chunk::default(),
            taken: traces::Taken::default(),
            info,
            processes: Processes::new(Path::new("/proc"), followed),
            now: 0,
            unreadable: None,
            totals: Totals::default(),
        };
        for pid in target.present() {
            recording.processes.saw(pid, 0);
        }
        recording.news()?;
        Ok(recording)
    }

    fn news(&mut self) -> Result<(), RecordingError> {
        for change in self.processes.news(&Clocks::read(&self.info))? {
            self.output.change(&change)?;
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
            self.totals.wakeups += ready.iter().filter(|ready| ready.readable).count() as u64;
            let mut answers = ready.iter();
            open.retain(|_| !answers.next().is_some_and(|ready| ready.closed));
            self.drain()?;
            if session.snapshots() > 0 {
                self.take_snapshots()?;
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
                self.totals.samples += 1;
                self.now = self.now.max(sample.time);
                self.output.sample(event, sample, &[])?;
            }
            Record::Throttle(throttle) => {
                self.totals.throttled += 1;
                self.output.throttle(event, throttle.time)?;
            }
            Record::Lost { lost, .. } => {
                self.totals.lost = self.totals.lost.saturating_add(*lost);
                self.output.lost(event, *lost, self.now)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Stops the measurement and writes the rest of the recording; returns the exit code.
    pub(crate) fn finish(mut self, opened: &[Opened], session: Session) -> Result<u8, RecordingError> {
        session.stop(opened)?;
        self.drain()?;
        // The rings now have space for the record of lost samples. A flush makes the device write it,
        // and publish the event's trace.
        let dead = first_error(opened.iter().map(|o| (o.index, o.event.flush())));
        self.drain()?;
        self.take_snapshots()?;
        self.account()?;
        let code = session.finish()?;
        self.output.finish()?;
        self.report();
        if let Some((index, error)) = dead {
            let (name, error) = (self.sources.name(index), chain(&error));
            say(&format!("{name}: {error}: the recording has only the event's earlier data"));
        }
        Ok(code)
    }

    fn report(&self) {
        if self.totals.throttled > 0 {
            say(&format!(
                "too many samples: the device throttled the event {} times; raise -c or lower -F",
                grouped(self.totals.throttled)
            ));
        }
        if !self.sources.sampled.is_empty() {
            say(&format!(
                "{} samples written to {}, {} lost, {} wakeups",
                grouped(self.totals.samples),
                self.output.path().display(),
                grouped(self.totals.lost),
                grouped(self.totals.wakeups)
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
