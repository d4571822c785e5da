//! The directory of a snapshot that `vmm ctl` writes. The files get their final names when they are complete.
//! Incomplete files are removed.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{MEMORY, STATE};

/// The suffix that a file has until it is complete.
const UNFINISHED: &str = ".unfinished";

/// A directory for a new snapshot. If the value is dropped before the files are complete, the files are removed.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Held while the snapshot is written.
    _lock: File,
    /// Whether [`Directory::make`] created the directory.
    made: bool,
    memory: File,
    finished: bool,
}

impl Directory {
    /// Creates the directory `path`, which only its owner can access. If the directory exists, removes the leftover
    /// files of an interrupted snapshot. There must be no other files.
    ///
    /// # Errors
    /// The host's error. [`io::ErrorKind::DirectoryNotEmpty`] if the directory has other files.
    /// [`io::ErrorKind::WouldBlock`] if another snapshot is being written there.
    pub(crate) fn make(path: &Path) -> io::Result<Self> {
        let made = match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        let lock = lock(path)?;
        if !made {
            for leftover in leftovers(path)? {
                fs::remove_file(leftover)?;
            }
            lock.set_permissions(Permissions::from_mode(0o700))?;
        }
        let memory = create(&unfinished(path, MEMORY));
        if made && memory.is_err() {
            // The caller gets the first error.
            let _ = fs::remove_dir(path);
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            made,
            memory: memory?,
            finished: false,
        })
    }

    /// The file for the memory.
    pub(crate) fn memory(&self) -> &File {
        &self.memory
    }

    /// Writes the state. Then renames both files, the state file last. When this function returns, both files are on
    /// disk. Call it after the memory has been written.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn finish(mut self, state: &str) -> io::Result<()> {
        let read_only = Permissions::from_mode(0o400);
        let path = unfinished(&self.path, STATE);
        let mut file = create(&path)?;
        file.write_all(state.as_bytes())?;
        file.set_permissions(read_only.clone())?;
        file.sync_all()?;
        self.memory.set_permissions(read_only)?;
        self.memory.sync_all()?;
        fs::rename(unfinished(&self.path, MEMORY), self.path.join(MEMORY))?;
        fs::rename(path, self.path.join(STATE))?;
        File::open(&self.path)?.sync_all()?;
        if self.made {
            File::open(parent(&self.path))?.sync_all()?;
        }
        self.finished = true;
        Ok(())
    }
}

/// Opens the directory `path`, and locks it if its file system supports that.
fn lock(path: &Path) -> io::Result<File> {
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY)
        .open(path)?;
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK.into()),
        _ => Ok(directory),
    }
}

/// Returns the files that an interrupted snapshot left in the directory. Any other file in the directory is an error.
/// If the state file is still unfinished, `memory` is a leftover too, because a snapshot renames the state file last.
fn leftovers(path: &Path) -> io::Result<Vec<PathBuf>> {
    let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name()));
    let names: Vec<OsString> = names.collect::<io::Result<_>>()?;
    let of_two = [MEMORY, STATE].map(|name| OsString::from(format!("{name}{UNFINISHED}")));
    let broken_off = names.iter().any(|name| of_two.contains(name));
    let ours = |name: &OsString| of_two.contains(name) || name == MEMORY;
    if names.is_empty() || broken_off && names.iter().all(ours) {
        return Ok(names.iter().map(|name| path.join(name)).collect());
    }
    Err(io::ErrorKind::DirectoryNotEmpty.into())
}

/// The directory that contains `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) => Path::new("."),
        // The root directory is its own parent.
        None => path,
    }
}

fn unfinished(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{UNFINISHED}"))
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        for name in [STATE, MEMORY] {
            for path in [unfinished(&self.path, name), self.path.join(name)] {
                // Ignore errors: usually the file does not exist, and a drop could not return an error.
                let _ = fs::remove_file(path);
            }
        }
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).expect("a directory");
        let mut names: Vec<String> = entries
            .map(|entry| {
                let name = entry.expect("an entry").file_name();
                name.to_string_lossy().into_owned()
            })
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn finished_directory_has_both_files_for_their_owner_to_read() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        let directory = Directory::make(&path).expect("made");
        assert_eq!(names(&path), ["memory.unfinished"]);
        directory.finish("state").expect("room");
        assert_eq!(names(&path), [MEMORY, STATE]);
        let mode = |path: &Path| {
            let status = fs::metadata(path).expect("there");
            status.permissions().mode() & 0o777
        };
        assert_eq!(mode(&path), 0o700);
        assert_eq!(mode(&path.join(MEMORY)), 0o400);
        assert_eq!(mode(&path.join(STATE)), 0o400);
    }

    #[test]
    fn entry_of_each_path_is_in_a_directory_that_opens() {
        let of = |path| parent(Path::new(path)).to_str();
        assert_eq!(of("here"), Some("."));
        assert_eq!(of("/tmp/here"), Some("/tmp"));
        assert_eq!(of("../here"), Some(".."));
        assert_eq!(of("/"), Some("/"));
    }

    #[test]
    fn unfinished_directory_is_removed_and_an_existing_one_stays_empty() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        drop(Directory::make(&path).expect("made"));
        assert!(!path.exists());
        fs::create_dir(&path).expect("made");
        drop(Directory::make(&path).expect("taken"));
        assert!(names(&path).is_empty());
    }

    #[test]
    fn directory_with_something_in_it_is_left_alone() {
        let bench = tempfile::tempdir().expect("a directory");
        fs::write(bench.path().join("notes"), "mine").expect("written");
        let refused = Directory::make(bench.path()).expect_err("not empty");
        assert_eq!(refused.kind(), io::ErrorKind::DirectoryNotEmpty);
        assert_eq!(names(bench.path()), ["notes"]);
    }

    #[test]
    fn files_of_a_snapshot_that_was_broken_off_are_replaced_and_no_others() {
        let make = |files: &[&str]| {
            let bench = tempfile::tempdir().expect("a directory");
            for name in files {
                fs::write(bench.path().join(name), "part").expect("written");
            }
            let made = Directory::make(bench.path()).map(|_| ());
            (made.map_err(|error| error.kind()), names(bench.path()))
        };
        let broken_off: [&[&str]; 3] = [
            &["memory.unfinished"],
            &["memory.unfinished", "state.unfinished"],
            // The snapshot was interrupted between the two renames.
            &["memory", "state.unfinished"],
        ];
        for files in broken_off {
            assert_eq!(make(files), (Ok(()), Vec::new()), "{files:?}");
        }
        let others: [&[&str]; 4] = [
            &["memory"],
            &["memory", "state"],
            &["memory.unfinished", "notes"],
            &["memory.unfinished", "state"],
        ];
        for files in others {
            let (made, left) = make(files);
            assert_eq!(made, Err(io::ErrorKind::DirectoryNotEmpty), "{files:?}");
            assert_eq!(left, files);
        }
    }

    #[test]
    fn directory_in_which_a_snapshot_is_made_is_refused() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        let directory = Directory::make(&path).expect("made");
        let refused = Directory::make(&path).expect_err("in use");
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        directory.finish("state").expect("room");
        assert_eq!(names(&path), [MEMORY, STATE]);
        let refused = Directory::make(&path).expect_err("finished");
        assert_eq!(refused.kind(), io::ErrorKind::DirectoryNotEmpty);
    }
}
