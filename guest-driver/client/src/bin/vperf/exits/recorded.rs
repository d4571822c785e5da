//! Exits of a recording.

use std::path::{Path, PathBuf};

use vpmu_client::Packet;
use vpmu_client::trace::{Exit, Packets};
use vpmu_profile::{Event, Profile, Sample};

use super::reasons::Processor;
use crate::labels::{self, UNKNOWN};
use crate::report::{OpenError, read};

/// An error of reading the recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordedError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(
        "{}: the recording has no trace of exits: record one with `vperf exits record -- COMMAND` or `vperf record --aux exit-trace-user`", .0.display()
    )]
    NoTrace(PathBuf),
}

/// A recording with at least one trace of exits.
#[derive(Debug)]
pub(super) struct Recorded {
    profile: Profile,
    pub(super) processor: Processor,
}

/// An exit with the names of its task and function.
#[derive(Debug)]
pub(super) struct NamedExit<'a> {
    pub(super) exit: &'a Exit,
    pub(super) task: &'a str,
    pub(super) symbol: String,
}

impl Recorded {
    pub(super) fn read(path: &Path) -> Result<Self, RecordedError> {
        let profile = read(path)?;
        if !profile.events.iter().any(|event| event.has_packets) {
            return Err(RecordedError::NoTrace(path.to_owned()));
        }
        let processor = Processor::of(&profile.cpu_id);
        Ok(Self { profile, processor })
    }

    /// The command that made the recording.
    pub(super) fn command(&self) -> &str {
        &self.profile.command
    }

    /// The traces, each with the index of its event.
    pub(super) fn traces(&self) -> impl Iterator<Item = (usize, &Event)> {
        self.profile.events.iter().enumerate().filter(|(_, event)| event.has_packets)
    }

    /// The time of the first exit: the origin of a time axis.
    pub(super) fn began(&self) -> u64 {
        self.profile.samples.first().map_or(0, |sample| sample.time)
    }

    /// Number of frames in the kernel without a name.
    pub(super) fn nameless(&self) -> u64 {
        self.profile.nameless.0
    }

    /// The exits of the trace with the index `event`, in order of time.
    pub(super) fn exits(&self, event: usize) -> impl Iterator<Item = NamedExit<'_>> {
        let samples = self.profile.samples.iter().filter(move |sample| sample.event == event);
        samples.filter_map(|sample| self.exit(sample))
    }

    fn exit(&self, sample: &Sample) -> Option<NamedExit<'_>> {
        // The field of a sample ends with a padding.
        let bytes = self.profile.packet(sample).get(..size_of::<Exit>())?;
        let Some(Ok(Packet::Exit(exit))) = Packets::new(0, bytes).next() else {
            return None;
        };
        let frame = self.profile.stacks.frames(sample.stack).next().filter(|_| exit.ip().is_some());
        Some(NamedExit {
            exit,
            task: self.profile.tasks.get(sample.task).map_or("", |task| &task.name),
            symbol: frame.map_or_else(|| UNKNOWN.to_owned(), labels::symbol),
        })
    }
}
