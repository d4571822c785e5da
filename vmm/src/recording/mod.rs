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
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use vpmu::{History, PersistError, Vpmu, abi};

use crate::report;

use self::stream::Stream;
use self::symbols::{Symbols, SymbolsError};

/// Bytes that a guest may make a recording hold beyond those of rings in the window. Any number of rings
/// can name the same pages of its memory, and the shortest records come to many times their length:
/// what a guest spends on them does not bound what recording them takes.
const MOST_OF_GUESTS: usize = 64 << 20;
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
}

/// Writes recordings to one file, the last one staying.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    symbols: Option<Symbols>,
}

/// Every persistent event of `vpmu` with what its ring holds; nothing, where it cannot be read.
#[must_use]
pub fn histories(vpmu: &Vpmu) -> Vec<History> {
    let events = vpmu.persistent().into_iter();
    let history = |event: vpmu::PersistentStatus| match vpmu.history(event.id) {
        Ok(history) => Some(history),
        // Ended since the list was made.
        Err(PersistError::NoSuch(_)) => None,
        Err(error) => {
            match error {
                PersistError::NoRing(_) => {}
                error => log::warn!("`{}` is recorded without samples: {error}", event.name),
            }
            let records = Vec::new();
            Some(History { event, records })
        }
    };
    bounded(events.filter_map(history), MOST_OF_GUESTS)
}

/// What an event's records come to beyond the room that its operator gave them: the ring in the window.
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
            let name = &history.event.name;
            log::warn!("`{name}` is recorded without samples: the guest's rings hold too much");
            return History {
                records: Vec::new(),
                ..history
            };
        };
        room = left;
        history
    });
    kept.collect()
}

impl Recorder {
    /// Recordings go to `path`; names of the guest's kernel functions come from the file
    /// `symbols`, which is opened and looked into now.
    ///
    /// # Errors
    /// [`RecordingError::Symbols`].
    pub fn new(path: &Path, symbols: Option<&Path>) -> Result<Self, RecordingError> {
        Ok(Self {
            path: path.to_owned(),
            symbols: symbols.map(Symbols::open).transpose()?,
        })
    }

    /// Tries whether a recording can be written, leaving nothing behind: where one is expected,
    /// the end of a guest is no time to find a mistake.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn check(&self) -> Result<(), RecordingError> {
        usable(&self.path)
    }

    /// Where recordings go.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a recording. An older one is kept as the same name with `.old`.
    ///
    /// # Errors
    /// [`RecordingError`]; no half of a file stays.
    pub fn write(&self, histories: &[History]) -> Result<Summary, RecordingError> {
        self.write_to(&self.path, histories)
    }

    /// As [`Recorder::write`], to another file.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn write_to(&self, path: &Path, histories: &[History]) -> Result<Summary, RecordingError> {
        usable(path)?;
        // perf prints no field that one of a file's events lacks.
        let sampling = |history: &&History| history.event.rate.is_some();
        let histories = || histories.iter().filter(sampling);
        let streams: Vec<Stream<'_>> = histories().map(Stream::new).collect();
        let addresses: BTreeSet<u64> = streams
            .iter()
            .flat_map(|stream| stream.kernel_addresses.iter().copied())
            .collect();
        let functions = match &self.symbols {
            // They were there when the guest began; what it did is worth more than what it is called.
            Some(symbols) => symbols.covering(&addresses).unwrap_or_else(|error| {
                log::warn!("the recording has no names: {}", report::chain(&error));
                Vec::new()
            }),
            None => Vec::new(),
        };
        let failed = |source| RecordingError::Write {
            path: path.to_owned(),
            source,
        };
        let file = tempfile::NamedTempFile::new_in(directory(path)).map_err(failed)?;
        let mut out = BufWriter::new(file);
        layout::write(&mut out, &streams, &functions).map_err(failed)?;
        out.flush().map_err(failed)?;
        let file = out.into_inner().map_err(|error| failed(error.into()))?;
        keep_older(path)?;
        file.persist(path).map_err(|error| failed(error.error))?;
        Ok(Summary {
            events: streams.len(),
            samples: streams.iter().map(|stream| stream.samples).sum(),
            lost: histories().map(|history| history.event.lost).sum(),
            left_out: streams.iter().map(|stream| stream.left_out).sum(),
        })
    }
}

/// Whether a recording can be written there.
fn usable(path: &Path) -> Result<(), RecordingError> {
    if path.exists() && !path.is_file() {
        return Err(RecordingError::NotFile(path.to_owned()));
    }
    let directory = directory(path);
    match tempfile::tempfile_in(directory) {
        Ok(_) => Ok(()),
        Err(source) => Err(RecordingError::Directory {
            directory: directory.to_owned(),
            source,
        }),
    }
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn keep_older(path: &Path) -> Result<(), RecordingError> {
    if !path.is_file() {
        return Ok(());
    }
    let mut older = OsString::from(path);
    older.push(".old");
    let older = PathBuf::from(older);
    fs::rename(path, &older).map_err(|source| RecordingError::Keep {
        path: older,
        source,
    })
}

#[cfg(test)]
mod tests;
