//! The directory of a snapshot that `vmm ctl` makes. The machine writes its memory and its state to two files, and the
//! state is on disk last. While the state file is empty, the directory is not a snapshot, and the next snapshot replaces
//! its files.
//!
//! All files are created, renamed and removed in the open directory. Whoever can rename the directory, or replace it by
//! another one, cannot redirect them.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{MEMORY, STATE};
use crate::path_at;

/// The copy of the state that is being made.
const COPY: &str = "state.copy";

/// The reason why a directory cannot take a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory has other files.
    #[error("the directory is not empty: must be empty or new")]
    NotEmpty,
    /// Another process holds the directory's lock.
    #[error("another snapshot is being written there")]
    InUse,
    /// The directory belongs to another user, who could replace the files.
    #[error("the directory belongs to user {0}: must be new, or empty and your own")]
    Owner(u32),
    /// The path is a symbolic link or a file.
    #[error("this is not a directory, or is a symbolic link: must be an empty or new directory")]
    NoDirectory,
    /// The host refused.
    #[error(transparent)]
    Host(#[from] io::Error),
}

impl From<Errno> for DirectoryError {
    fn from(error: Errno) -> Self {
        Self::Host(error.into())
    }
}

/// A directory for a new snapshot. If the value is dropped, the files are removed.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The open directory. It is locked while the snapshot is written.
    directory: File,
    /// Whether [`Directory::make`] created the directory.
    made: bool,
    memory: File,
    state: File,
    kept: bool,
}

impl Directory {
    /// Creates the directory `path`, which only its owner can access. If the directory exists, it must belong to the
    /// user of this process. Then removes the leftover files of an interrupted snapshot. There must be no other files.
    /// When this function returns, the new files' names are on disk.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub(crate) fn make(path: &Path) -> Result<Self, DirectoryError> {
        // A path that ends with a slash or a dot would be followed even if it is a link.
        let path: PathBuf = path.components().collect();
        let made = match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error.into()),
        };
        let directory = open(&path)?;
        if !made {
            for leftover in leftovers(&directory)? {
                rustix::fs::unlinkat(&directory, leftover, AtFlags::empty())?;
            }
            directory.set_permissions(Permissions::from_mode(0o700))?;
        }
        let made_files = make_files(&directory, &path, made);
        if made && made_files.is_err() {
            // The caller gets the first error.
            remove(&directory, &path, made);
        }
        let [state, memory] = made_files?;
        Ok(Self { path, directory, made, memory, state, kept: false })
    }

    /// The file for the memory.
    pub(crate) fn memory(&self) -> &File {
        &self.memory
    }

    /// The file for the state.
    pub(crate) fn state(&self) -> &File {
        &self.state
    }

    /// Keeps the files, because the machine has completed them.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }

    /// Keeps the files, and replaces the state file by a copy that has the contents `state`. Call this with a state that
    /// has been checked: the machine can still write to its own file.
    ///
    /// # Errors
    /// The host's error. The files are kept nevertheless.
    pub(crate) fn finish(self, state: &[u8]) -> io::Result<()> {
        let copied = self.copy(state);
        if copied.is_err() {
            // The caller gets the first error.
            let _ = rustix::fs::unlinkat(&self.directory, COPY, AtFlags::empty());
        }
        self.keep();
        copied
    }

    fn copy(&self, state: &[u8]) -> io::Result<()> {
        let read_only = Permissions::from_mode(0o400);
        let mut copy = create(&self.directory, COPY)?;
        copy.write_all(state)?;
        copy.set_permissions(read_only.clone())?;
        copy.sync_all()?;
        self.memory.set_permissions(read_only)?;
        rustix::fs::renameat(&self.directory, COPY, &self.directory, STATE)?;
        self.directory.sync_all()
    }
}

/// Creates the files for state and memory, and brings their names to disk.
fn make_files(directory: &File, path: &Path, made: bool) -> io::Result<[File; 2]> {
    // `leftovers` knows a snapshot that was interrupted here by its state file.
    let files = [create(directory, STATE)?, create(directory, MEMORY)?];
    directory.sync_all()?;
    if made {
        File::open(parent(path))?.sync_all()?;
    }
    Ok(files)
}

/// Removes the files of an incomplete snapshot, and the directory if it was `made` for them.
fn remove(directory: &File, path: &Path, made: bool) {
    for name in [COPY, STATE, MEMORY] {
        // Ignore errors: the file may not exist, and the caller already reports an error.
        let _ = rustix::fs::unlinkat(directory, name, AtFlags::empty());
    }
    if made {
        let _ = rustix::fs::rmdir(path);
    }
}

/// Opens the directory `path` of this process's user, and locks it if its file system supports that.
fn open(path: &Path) -> Result<File, DirectoryError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(DirectoryError::NoDirectory),
        opened => File::from(opened?),
    };
    let owner = directory.metadata()?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err(DirectoryError::Owner(owner));
    }
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(DirectoryError::InUse),
        _ => Ok(directory),
    }
}

/// Returns the names of the files that an interrupted snapshot left in the directory: an empty state file, and perhaps a
/// memory file. Any other file in the directory is an error.
fn leftovers(directory: &File) -> Result<Vec<OsString>, DirectoryError> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_owned());
        }
    }
    let ours = names.iter().all(|name| [MEMORY, STATE].map(OsStr::new).contains(&name.as_os_str()));
    if names.is_empty() || ours && has_empty_state(directory)? {
        return Ok(names);
    }
    Err(DirectoryError::NotEmpty)
}

fn has_empty_state(directory: &File) -> io::Result<bool> {
    match rustix::fs::statat(directory, STATE, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_size == 0),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
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

fn create(directory: &File, name: &str) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::openat(directory, name, path_at::CREATE, mode)?;
    Ok(File::from(file))
}

impl Drop for Directory {
    fn drop(&mut self) {
        if !self.kept {
            remove(&self.directory, &self.path, self.made);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        assert_eq!(names(&path), [MEMORY, STATE]);
        directory.state().write_all(b"unchecked").expect("room");
        directory.finish(b"state").expect("room");
        assert_eq!(names(&path), [MEMORY, STATE]);
        assert_eq!(fs::read(path.join(STATE)).expect("ours"), b"state");
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
        assert!(matches!(refused, DirectoryError::NotEmpty), "{refused}");
        assert_eq!(names(bench.path()), ["notes"]);
    }

    #[test]
    fn files_of_an_interrupted_snapshot_are_replaced_and_no_others() {
        let make = |files: &[(&str, &str)]| {
            let bench = tempfile::tempdir().expect("a directory");
            for (name, contents) in files {
                fs::write(bench.path().join(name), contents).expect("written");
            }
            let made = Directory::make(bench.path()).map(|_| ());
            (made, names(bench.path()))
        };
        for files in [&[(STATE, "")][..], &[(MEMORY, "part"), (STATE, "")]] {
            let (made, left) = make(files);
            made.expect("taken");
            assert!(left.is_empty(), "{files:?}");
        }
        let others: [&[(&str, &str)]; 4] = [
            &[(MEMORY, "whole")],
            &[(MEMORY, "whole"), (STATE, "whole")],
            &[(MEMORY, "part"), ("notes", ""), (STATE, "")],
            // The client was interrupted while it copied the state of a complete snapshot.
            &[(MEMORY, "whole"), (STATE, "whole"), (COPY, "part")],
        ];
        for files in others {
            let (made, left) = make(files);
            assert!(matches!(made, Err(DirectoryError::NotEmpty)), "{files:?}");
            assert_eq!(left, files.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        }
    }

    #[test]
    fn directory_in_which_a_snapshot_is_made_is_refused() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        let directory = Directory::make(&path).expect("made");
        let refused = Directory::make(&path).expect_err("in use");
        assert!(matches!(refused, DirectoryError::InUse), "{refused}");
        directory.finish(b"state").expect("room");
        assert_eq!(names(&path), [MEMORY, STATE]);
        let refused = Directory::make(&path).expect_err("finished");
        assert!(matches!(refused, DirectoryError::NotEmpty), "{refused}");
    }

    #[test]
    fn link_to_a_directory_is_refused_however_its_path_ends() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        fs::create_dir(&path).expect("made");
        let link = bench.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("made");
        for path in [link.clone(), link.join(""), link.join(".")] {
            let refused = Directory::make(&path).expect_err("a link");
            assert!(matches!(refused, DirectoryError::NoDirectory), "{refused}");
        }
        assert!(names(&path).is_empty());
    }

    #[test]
    fn files_stay_in_the_directory_that_was_opened() {
        let bench = tempfile::tempdir().expect("a directory");
        let at = |name: &str| bench.path().join(name);
        let directory = Directory::make(&at("snapshot")).expect("made");
        fs::rename(at("snapshot"), at("moved")).expect("ours");
        fs::create_dir(at("snapshot")).expect("made");
        fs::write(at("snapshot/memory"), "another's").expect("written");
        directory.finish(b"state").expect("room");
        assert_eq!(names(&at("moved")), [MEMORY, STATE]);
        assert_eq!(fs::read(at("snapshot/memory")).expect("there"), b"another's");
        assert_eq!(names(&at("snapshot")), [MEMORY]);
    }
}
