//! The recording: what persistent events hold, in a `perf.data` that stock perf reads without an
//! option.
//!
//! Knows perf's file format and what the device tells of its persistent events; nothing of
//! machines, of how a run ends, or of who asks. The file may be given away: it holds what the
//! guest did, and nothing of the host (no name, no path, no kernel of it).

mod layout;
mod record;
mod stream;
mod symbols;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use vpmu::{History, PersistError, PersistentStatus, Vpmu, abi};

use crate::place::Place;
use crate::report;

use self::stream::Stream;
use self::symbols::{Symbols, SymbolsError};

/// Addresses in the guest's kernel that are named, at most: a guest can forge as many as it likes.
const MOST_NAMED: usize = 16_384;
/// What even the shortest record comes to, in the file and on the way there.
const LEAST_OF_RECORD: usize = 64;

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// There would be no room for it, or no right to make one.
    #[error("no recording can be written in the directory {directory}; --recording names another")]
    Directory {
        /// Where.
        directory: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// Something else has the name: a directory, a device.
    #[error("the recording {0} would replace what is no file; --recording names another")]
    NotFile(PathBuf),
    /// The older file cannot be moved.
    #[error("cannot keep the older recording as {path}")]
    Keep {
        /// Its new name.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the recording {path}")]
    Write {
        /// Which file.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The symbols of the guest's kernel.
    #[error(transparent)]
    Symbols(#[from] SymbolsError),
}

/// What went into a recording.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Persistent events that sample: those that only count have no place there.
    pub events: usize,
    /// Samples of theirs.
    pub samples: u64,
    /// Overflows that the device wrote no record of.
    pub lost: u64,
    /// Records that the guest has spoiled, or that belong to events that are not persistent.
    pub left_out: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Writes recordings to one file, the last one staying.
#[derive(Debug)]
pub struct Recorder {
    place: Place,
    symbols: Option<Symbols>,
}

/// The persistent events of `vpmu` that are `wanted`, with what their rings hold; nothing, where that
/// cannot be read. Of rings in guest memory, `most` bytes are taken at most: any number of rings can
/// name the same pages, and a short record becomes a longer one in the file. A ring larger than that
/// is not even read.
#[must_use]
pub fn histories(
    vpmu: &Vpmu,
    wanted: impl Fn(&PersistentStatus) -> bool,
    most: u64,
) -> Vec<History> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let events = vpmu.persistent().into_iter().filter(|event| wanted(event));
    let history = |event: PersistentStatus| {
        let pages = event.pages.filter(|_| !event.window).unwrap_or(0);
        if pages as usize * abi::PAGE_SIZE > most {
            too_much(&event);
            return Some(without_records(event));
        }
        match vpmu.history(event.id) {
            Ok(history) => Some(history),
            // Ended since the list was made.
            Err(PersistError::NoSuch(_)) => None,
            Err(PersistError::NoRing(_)) => Some(without_records(event)),
            Err(error) => {
                log::warn!("`{}` is recorded without samples: {error}", event.name);
                Some(without_records(event))
            }
        }
    };
    bounded(events.filter_map(history), most)
}

fn without_records(event: PersistentStatus) -> History {
    History {
        event,
        records: Vec::new(),
    }
}

fn too_much(event: &PersistentStatus) {
    log::warn!(
        "`{}` is recorded without samples: rings in guest memory hold more than \
         --max-guest-recording allows",
        event.name
    );
}

/// What an event's records come to in the file beyond the room that its operator gave them: the ring in
/// the window.
fn beyond_the_window(history: &History) -> usize {
    let pages = history.event.pages.filter(|_| history.event.window);
    let given = pages.map_or(0, |pages| pages as usize * abi::PAGE_SIZE);
    let records = history.iter();
    let come_to: usize = records
        .map(|record| record.len().max(LEAST_OF_RECORD))
        .sum();
    come_to.saturating_sub(given)
}

/// The same, one by one, with their records as long as those come to no more than `most` bytes together
/// beyond what the window has room for.
fn bounded(histories: impl Iterator<Item = History>, most: usize) -> Vec<History> {
    let mut room = most;
    let kept = histories.map(|history| {
        let Some(left) = room.checked_sub(beyond_the_window(&history)) else {
            too_much(&history.event);
            return without_records(history.event);
        };
        room = left;
        history
    });
    kept.collect()
}

impl Recorder {
    /// Recordings go to `path`, whose directory is opened now; names of the guest's kernel functions come
    /// from the file `symbols`, which is opened and looked into now.
    ///
    /// # Errors
    /// [`RecordingError::Symbols`].
    pub fn new(path: &Path, symbols: Option<&Path>) -> Result<Self, RecordingError> {
        Ok(Self {
            place: Place::open(path),
            symbols: symbols.map(Symbols::open).transpose()?,
        })
    }

    /// Tries whether a recording can be written, leaving nothing behind: where one is expected,
    /// the end of a guest is no time to find a mistake.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn check(&self) -> Result<(), RecordingError> {
        if self.place.is_taken() {
            return Err(RecordingError::NotFile(self.place.path().to_owned()));
        }
        match self.place.create_temporary() {
            Ok(_) => Ok(()),
            Err(source) => Err(RecordingError::Directory {
                directory: self.place.directory().to_owned(),
                source,
            }),
        }
    }

    /// Where recordings go.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// The descriptor of the directory of recordings, if it could be opened.
    #[must_use]
    pub fn directory(&self) -> Option<RawFd> {
        self.place.descriptor()
    }

    /// Writes a recording. An older one is kept as the same name with `.old`.
    ///
    /// # Errors
    /// [`RecordingError`]; no half of a file stays.
    pub fn write(&self, histories: &[History]) -> Result<Summary, RecordingError> {
        self.check()?;
        let path = self.place.path();
        let failed = |source| RecordingError::Write {
            path: path.to_owned(),
            source,
        };
        let temporary = self.place.create_temporary().map_err(failed)?;
        let summary = self.write_to(temporary.file(), path, histories)?;
        keep(&self.place)?;
        temporary.persist().map_err(failed)?;
        Ok(summary)
    }

    /// Writes a recording to a file that is open, called `path`.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn write_to(
        &self,
        file: &File,
        path: &Path,
        histories: &[History],
    ) -> Result<Summary, RecordingError> {
        let failed = |source| RecordingError::Write {
            path: path.to_owned(),
            source,
        };
        let mut out = BufWriter::new(file);
        let summary = self.compose(histories, &mut out).map_err(failed)?;
        out.flush().map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        Ok(Summary { bytes, ..summary })
    }

    /// Writes the bytes of a recording; the summary does not count them.
    ///
    /// # Errors
    /// Those of `out`.
    pub(crate) fn compose(
        &self,
        histories: &[History],
        out: &mut impl Write,
    ) -> io::Result<Summary> {
        // perf prints no field that one of a file's events lacks.
        let sampling = |history: &&History| history.event.rate.is_some();
        let histories = || histories.iter().filter(sampling);
        let mut addresses = BTreeSet::new();
        let mut see = |address| {
            if self.symbols.is_some() && addresses.len() < MOST_NAMED {
                addresses.insert(address);
            }
        };
        let streams: Vec<Stream<'_>> = histories()
            .map(|history| Stream::new(history, &mut see))
            .collect();
        let functions = match &self.symbols {
            // They were there when the guest began; what it did is worth more than what it is called.
            Some(symbols) => symbols.covering(&addresses).unwrap_or_else(|error| {
                log::warn!("the recording has no names: {}", report::chain(&error));
                Vec::new()
            }),
            None => Vec::new(),
        };
        layout::write(out, &streams, &functions)?;
        Ok(Summary {
            events: streams.len(),
            samples: streams.iter().map(|stream| stream.samples).sum(),
            lost: histories().map(|history| history.event.lost).sum(),
            left_out: streams.iter().map(|stream| stream.left_out).sum(),
            bytes: 0,
        })
    }
}

/// Keeps the recording that is at `place`.
pub(crate) fn keep(place: &Place) -> Result<(), RecordingError> {
    place.keep_older().map_err(|source| RecordingError::Keep {
        path: place.older(),
        source,
    })
}

#[cfg(test)]
mod tests;
