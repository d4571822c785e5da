//! The directory of a snapshot that `vmm ctl` writes. The files get their final names when they are complete.
//! Incomplete files are removed.
//!
//! All files are created, renamed and removed in the open directory. Whoever can rename the directory, or replace it by
//! another one, cannot redirect them.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{MEMORY, STATE};
use crate::path_at;

/// The suffix that a file has until it is complete.
const UNFINISHED: &str = ".unfinished";

/// The reason why a directory cannot take a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory has other files.
    #[error("the directory is not empty: give an empty or new directory")]
    NotEmpty,
    /// Another process holds the directory's lock.
    #[error("another snapshot is being written there")]
    InUse,
    /// The directory belongs to another user, who could replace the files.
    #[error("the directory belongs to user {0}: give a new directory, or an empty one of your own")]
    Owner(u32),
    /// The path is a symbolic link or a file.
    #[error("this is not a directory, or is a symbolic link: give an empty or new directory")]
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

/// A directory for a new snapshot. If the value is dropped before the files are complete, the files are removed.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The open directory. It is locked while the snapshot is written.
    directory: File,
    /// Whether [`Directory::make`] created the directory.
    made: bool,
    memory: File,
    finished: bool,
}

impl Directory {
    /// Creates the directory `path`, which only its owner can access. If the directory exists, it must belong to the
    /// user of this process. Then removes the leftover files of an interrupted snapshot. There must be no other files.
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
        let memory = create(&directory, &unfinished(MEMORY));
        if made && memory.is_err() {
            // The caller gets the first error.
            let _ = rustix::fs::rmdir(&path);
        }
        Ok(Self { path, directory, made, memory: memory?, finished: false })
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
        let mut file = create(&self.directory, &unfinished(STATE))?;
        file.write_all(state.as_bytes())?;
        file.set_permissions(read_only.clone())?;
        file.sync_all()?;
        self.memory.set_permissions(read_only)?;
        self.memory.sync_all()?;
        for name in [MEMORY, STATE] {
            let (from, to) = (&self.directory, &self.directory);
            rustix::fs::renameat(from, unfinished(name), to, name)?;
        }
        self.directory.sync_all()?;
        if self.made {
            File::open(parent(&self.path))?.sync_all()?;
        }
        self.finished = true;
        Ok(())
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

/// Returns the names of the files that an interrupted snapshot left in the directory. Any other file in the directory is
/// an error. If the state file is still unfinished, `memory` is a leftover too, because a snapshot renames the state
/// file last.
fn leftovers(directory: &File) -> Result<Vec<OsString>, DirectoryError> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_owned());
        }
    }
    let of_two = [MEMORY, STATE].map(|name| OsString::from(unfinished(name)));
    let broken_off = names.iter().any(|name| of_two.contains(name));
    let ours = |name: &OsString| of_two.contains(name) || name == MEMORY;
    if names.is_empty() || broken_off && names.iter().all(ours) {
        return Ok(names);
    }
    Err(DirectoryError::NotEmpty)
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

fn unfinished(name: &str) -> String {
    format!("{name}{UNFINISHED}")
}

fn create(directory: &File, name: &str) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::openat(directory, name, path_at::CREATE, mode)?;
    Ok(File::from(file))
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        for name in [STATE, MEMORY] {
            for name in [unfinished(name), name.to_owned()] {
                // Ignore errors: usually the file does not exist, and a drop could not return an error.
                let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
            }
        }
        if self.made {
            let _ = rustix::fs::rmdir(&self.path);
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
        assert!(matches!(refused, DirectoryError::NotEmpty), "{refused}");
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
            (made, names(bench.path()))
        };
        let broken_off: [&[&str]; 3] = [
            &["memory.unfinished"],
            &["memory.unfinished", "state.unfinished"],
            // The snapshot was interrupted between the two renames.
            &["memory", "state.unfinished"],
        ];
        for files in broken_off {
            let (made, left) = make(files);
            made.expect("taken");
            assert!(left.is_empty(), "{files:?}");
        }
        let others: [&[&str]; 4] =
            [&["memory"], &["memory", "state"], &["memory.unfinished", "notes"], &["memory.unfinished", "state"]];
        for files in others {
            let (made, left) = make(files);
            assert!(matches!(made, Err(DirectoryError::NotEmpty)), "{files:?}");
            assert_eq!(left, files);
        }
    }

    #[test]
    fn directory_in_which_a_snapshot_is_made_is_refused() {
        let bench = tempfile::tempdir().expect("a directory");
        let path = bench.path().join("snapshot");
        let directory = Directory::make(&path).expect("made");
        let refused = Directory::make(&path).expect_err("in use");
        assert!(matches!(refused, DirectoryError::InUse), "{refused}");
        directory.finish("state").expect("room");
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
        fs::write(at("snapshot/memory.unfinished"), "another's").expect("written");
        directory.finish("state").expect("room");
        assert_eq!(names(&at("moved")), [MEMORY, STATE]);
        assert_eq!(names(&at("snapshot")), ["memory.unfinished"]);
    }
}
