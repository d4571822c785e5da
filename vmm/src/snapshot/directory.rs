//! The directory of a snapshot while it is made, by 'vmm ctl': whole under its names, or not at all.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{MEMORY, STATE};

/// A name until the file is whole.
const UNFINISHED: &str = ".unfinished";

/// A directory that gets a snapshot. What is in it goes when the value is dropped before that.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// It was made for the snapshot.
    made: bool,
    memory: File,
    finished: bool,
}

impl Directory {
    /// Makes `path`, or takes it if it is empty; only its owner may look into it.
    ///
    /// # Errors
    /// The host's; [`io::ErrorKind::DirectoryNotEmpty`].
    pub(crate) fn make(path: &Path) -> io::Result<Self> {
        let made = match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if fs::read_dir(path)?.next().is_some() {
                    return Err(io::ErrorKind::DirectoryNotEmpty.into());
                }
                fs::set_permissions(path, Permissions::from_mode(0o700))?;
                false
            }
            Err(error) => return Err(error),
        };
        let memory = create(&unfinished(path, MEMORY));
        if made && memory.is_err() {
            // The reason is in the result.
            let _ = fs::remove_dir(path);
        }
        Ok(Self {
            path: path.to_owned(),
            made,
            memory: memory?,
            finished: false,
        })
    }

    /// The file that gets the memory.
    pub(crate) fn memory(&self) -> &File {
        &self.memory
    }

    /// The memory is written: writes the rest, and gives both files their names. When this returns they
    /// are on the disk. The state's name comes last.
    ///
    /// # Errors
    /// The host's.
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
        self.finished = true;
        File::open(&self.path)?.sync_all()?;
        match self.path.parent() {
            Some(parent) if self.made && !parent.as_os_str().is_empty() => {
                File::open(parent)?.sync_all()
            }
            _ => Ok(()),
        }
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
                // Mostly it does not exist. If it cannot be removed, no caller is left to get the error.
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
    fn unfinished_directory_goes_and_one_that_was_there_stays_empty() {
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
}
