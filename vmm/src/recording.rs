//! The file of the flight recorder. This module checks and creates the file, and keeps the previous one.
//! `vpmu-recorder` writes the contents.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use vpmu::History;
use vpmu_recorder::{Recording, Summary, Symbols, SymbolsError};

use crate::path_at::{PathAt, PersistError};

/// Errors of a recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// A file cannot be created in the directory.
    #[error("cannot write a recording in {directory}; choose another path with --recording")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A directory or a device exists at the path.
    #[error("{0} is not a regular file; choose another path with --recording")]
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
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The symbols of the guest's kernel cannot be read.
    #[error(transparent)]
    Symbols(#[from] SymbolsError),
}

/// Writes recordings to one file. The file always contains the newest recording.
#[derive(Debug)]
pub struct Recorder {
    place: PathAt,
    symbols: Option<Symbols>,
}

impl Recorder {
    /// Creates a recorder that writes to `path`. Opens the directory of `path`. Also opens and checks the file
    /// `symbols`, which has the names of the guest kernel's functions.
    ///
    /// # Errors
    /// [`RecordingError::Symbols`].
    pub fn new(path: &Path, symbols: Option<&Path>) -> Result<Self, RecordingError> {
        Ok(Self { place: PathAt::open(path), symbols: symbols.map(Symbols::open).transpose()? })
    }

    /// Checks that a recording can be written, without leaving a file. Call this before the guest runs, because an
    /// error after the run would lose the recording.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn check(&self) -> Result<(), RecordingError> {
        if self.place.is_taken() {
            return Err(RecordingError::NotFile(self.place.path().to_owned()));
        }
        match self.place.create_temporary() {
            Ok(_) => Ok(()),
            Err(source) => Err(RecordingError::Directory { directory: self.place.directory().to_owned(), source }),
        }
    }

    /// The file of recordings.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// The descriptor of the directory of recordings, if it could be opened.
    #[must_use]
    pub fn directory(&self) -> Option<BorrowedFd<'_>> {
        self.place.descriptor()
    }

    /// Writes a recording. If there is an older recording, keeps it and appends `.old` to its name.
    ///
    /// # Errors
    /// [`RecordingError`]; a partial file is removed.
    pub fn write(&self, histories: &[History]) -> Result<Summary, RecordingError> {
        self.check()?;
        let path = self.place.path();
        let failed = |source| RecordingError::Write { path: path.to_owned(), source };
        let temporary = self.place.create_temporary().map_err(failed)?;
        let summary = self.write_to(temporary.file(), path, histories)?;
        temporary.persist_and_keep_older().map_err(|error| match error {
            PersistError::KeepOlder(source) => RecordingError::Keep { path: self.place.older(), source },
            PersistError::Rename(source) => failed(source),
        })?;
        Ok(summary)
    }

    /// Writes a recording to the open file `file`, whose path is `path`.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn write_to(&self, file: &File, path: &Path, histories: &[History]) -> Result<Summary, RecordingError> {
        let failed = |source| RecordingError::Write { path: path.to_owned(), source };
        let mut recording = Recording::new(histories);
        // The symbol file was readable before the guest ran. If it is no longer readable, write the recording without
        // names, because the samples matter more.
        if let Some(symbols) = &self.symbols
            && let Err(error) = recording.name_functions(symbols)
        {
            log::warn!("recording without symbols: {}", vpmu_errors::chain(&error));
        }
        let mut out = BufWriter::new(file);
        let summary = recording.write(&mut out).map_err(failed)?;
        out.flush().map_err(failed)?;
        Ok(summary)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn recording_keeps_the_older_one_and_leaves_no_temporary() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("perf.data");
        fs::write(&path, "older").unwrap();
        let recorder = Recorder::new(&path, None).unwrap();
        recorder.write(&[]).unwrap();
        let old = directory.path().join("perf.data.old");
        assert_eq!(fs::read(&old).unwrap(), b"older");
        let first = fs::read(&path).unwrap();
        recorder.write(&[]).unwrap();
        assert_eq!(fs::read(&old).unwrap(), first);
        let mut names: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["perf.data", "perf.data.old"]);
    }

    #[test]
    fn recording_is_its_owners_alone_and_follows_no_link() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("another's"), "text").unwrap();
        std::os::unix::fs::symlink("another's", at("perf.data")).unwrap();
        let recorder = Recorder::new(&at("perf.data"), None).unwrap();
        for _ in 0..2 {
            recorder.write(&[]).unwrap();
            let found = fs::symlink_metadata(at("perf.data")).unwrap();
            assert!(found.is_file());
            assert_eq!(found.permissions().mode() & 0o7777, 0o600);
            assert_eq!(fs::read(at("another's")).unwrap(), b"text");
        }
    }

    #[test]
    fn path_of_a_recording_never_lacks_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("perf.data");
        let recorder = Recorder::new(&path, None).unwrap();
        recorder.write(&[]).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut missing = 0;
                while !done.load(Ordering::Relaxed) {
                    missing += u32::from(!path.exists());
                }
                missing
            });
            for _ in 0..1_000 {
                recorder.write(&[]).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().unwrap(), 0, "times without a file");
        });
    }

    /// Two machines with the same path: two processes differ from two threads only in the names of temporary files,
    /// which are never opened if they exist.
    #[test]
    fn recorders_of_one_path_leave_whole_recordings() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("perf.data");
        Recorder::new(&path, None).unwrap().write(&[]).unwrap();
        let whole = fs::read(&path).unwrap();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let recorder = Recorder::new(&path, None).unwrap();
                    for _ in 0..500 {
                        recorder.write(&[]).unwrap();
                        assert_eq!(fs::read(&path).unwrap(), whole);
                    }
                });
            }
        });
        let names = fs::read_dir(directory.path()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().path()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        for name in names {
            assert_eq!(fs::read(&name).unwrap(), whole, "{}", name.display());
        }
    }

    #[test]
    fn check_refuses_a_path_that_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let of = |path: &Path| Recorder::new(path, None).unwrap();
        of(&directory.path().join("perf.data")).check().unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let missing = of(Path::new("/nonexistent/perf.data")).check().unwrap_err();
        assert!(missing.to_string().contains("/nonexistent"), "{missing}");
        for taken in [directory.path(), Path::new("/dev/null")] {
            let error = of(taken).check().unwrap_err();
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
    }
}
