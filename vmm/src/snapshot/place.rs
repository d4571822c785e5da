//! The directory of a snapshot that is read, and the files in it. A stranger may have made them: whoever can put a file
//! of another user, or a link to one, into a snapshot would otherwise show that file to the guest.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use super::SnapshotError;

/// The users whose snapshots are read: the user of this process, and at most one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owners {
    own: u32,
    other: u32,
}

impl Owners {
    /// The user of this process, and the user `other` if there is one.
    pub(crate) fn new(other: Option<Uid>) -> Self {
        let own = rustix::process::geteuid();
        Self { own: own.as_raw(), other: other.unwrap_or(own).as_raw() }
    }

    fn include(self, uid: u32) -> bool {
        uid == self.own || uid == self.other
    }
}

impl fmt::Display for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user {}", self.own)?;
        if self.other == self.own { Ok(()) } else { write!(f, " or {}", self.other) }
    }
}

/// The open directory of a snapshot. It belongs to one of the owners that were named when it was opened.
#[derive(Debug)]
pub(crate) struct Place {
    directory: OwnedFd,
    /// For messages.
    path: PathBuf,
    uid: u32,
}

impl Place {
    /// Opens the directory `path`, which must not be a symbolic link.
    ///
    /// # Errors
    /// [`SnapshotError::Read`], [`SnapshotError::Link`], [`SnapshotError::Owner`].
    pub(crate) fn open(path: &Path, owners: Owners) -> Result<Self, SnapshotError> {
        // A path that ends with a slash or a dot would be followed even if it is a link.
        let path: PathBuf = path.components().collect();
        Self::open_at(CWD, &path.clone(), path, owners)
    }

    /// Opens the directory `name` that lies beside this directory.
    ///
    /// # Errors
    /// Like [`Place::open`].
    pub(crate) fn beside(&self, name: &str, owners: Owners) -> Result<Self, SnapshotError> {
        let path = match self.path.file_name() {
            Some(_) => self.path.with_file_name(name),
            None => self.path.join("..").join(name),
        };
        Self::open_at(self.directory.as_fd(), &Path::new("..").join(name), path, owners)
    }

    fn open_at(at: BorrowedFd<'_>, relative: &Path, path: PathBuf, owners: Owners) -> Result<Self, SnapshotError> {
        let failed = |error: Errno| SnapshotError::Read { path: path.clone(), source: error.into() };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(at, relative, flags, Mode::empty()).map_err(failed)?;
        let found = rustix::fs::fstat(&directory).map_err(failed)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => return Err(SnapshotError::Link(path)),
            _ => return Err(failed(Errno::NOTDIR)),
        }
        if !owners.include(found.st_uid) {
            return Err(SnapshotError::Owner { path, found: found.st_uid, owners: owners.to_string() });
        }
        Ok(Self { directory, path, uid: found.st_uid })
    }

    /// Opens the file `name` in this directory, and returns its status. The file is a regular file of the directory's
    /// owner.
    ///
    /// # Errors
    /// [`SnapshotError::Read`], [`SnapshotError::Link`], [`SnapshotError::NoFile`], [`SnapshotError::MixedOwners`].
    pub(crate) fn file(&self, name: &str) -> Result<(File, Stat), SnapshotError> {
        let path = || self.join(name);
        let failed = |error: Errno| match error {
            Errno::LOOP => SnapshotError::Link(path()),
            error => SnapshotError::Read { path: path(), source: error.into() },
        };
        // Don't wait for the writer of a FIFO.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, name, flags, Mode::empty());
        let file = file.map_err(failed)?;
        let found = rustix::fs::fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(SnapshotError::NoFile(path()));
        }
        if found.st_uid != self.uid {
            return Err(SnapshotError::MixedOwners { path: path(), found: found.st_uid, directory: self.uid });
        }
        Ok((File::from(file), found))
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file `name` in the directory.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The name of the directory in its parent directory, also if its path ends with a dot.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn name(&self) -> io::Result<Option<OsString>> {
        let path = std::fs::canonicalize(&self.path)?;
        Ok(path.file_name().map(OsStr::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A user that owns no file of these tests.
    fn stranger() -> Owners {
        let uid = rustix::process::geteuid().as_raw() + 1;
        Owners { own: uid, other: uid }
    }

    #[test]
    fn directory_that_is_a_link_is_refused_however_its_path_ends() {
        let bench = tempfile::tempdir().expect("a directory");
        let at = |name: &str| bench.path().join(name);
        fs::create_dir(at("here")).expect("made");
        symlink("here", at("link")).expect("made");
        let owners = Owners::new(None);
        Place::open(&at("here/."), owners).expect("a directory");
        for path in ["link", "link/", "link/."] {
            let refused = Place::open(&at(path), owners).expect_err("a link");
            assert!(matches!(refused, SnapshotError::Link(_)), "{refused}");
        }
        let here = Place::open(&at("here"), owners).expect("a directory");
        let refused = here.beside("link", owners).expect_err("a link");
        assert!(matches!(refused, SnapshotError::Link(_)), "{refused}");
    }

    #[test]
    fn directory_of_a_user_who_was_not_named_is_refused() {
        let bench = tempfile::tempdir().expect("a directory");
        let refused = Place::open(bench.path(), stranger()).expect_err("another user");
        assert!(matches!(refused, SnapshotError::Owner { .. }), "{refused}");
        let owners = Owners { other: rustix::process::geteuid().as_raw(), ..stranger() };
        Place::open(bench.path(), owners).expect("the second user");
    }

    #[test]
    fn neighbour_is_found_by_the_directory_and_not_by_its_path() {
        let bench = tempfile::tempdir().expect("a directory");
        let at = |name: &str| bench.path().join(name);
        fs::create_dir_all(at("before/one")).expect("made");
        fs::create_dir(at("before/two")).expect("made");
        let owners = Owners::new(None);
        let one = Place::open(&at("before/one"), owners).expect("a directory");
        fs::rename(at("before"), at("after")).expect("ours");
        let two = one.beside("two", owners).expect("beside");
        fs::write(at("after/two/file"), "text").expect("written");
        let (_, status) = two.file("file").expect("there");
        assert_eq!(status.st_size, 4);
        fs::write(at("after/secret"), "text").expect("written");
        symlink("../secret", at("after/two/link")).expect("made");
        let refused = two.file("link").expect_err("a link");
        assert!(matches!(refused, SnapshotError::Link(_)), "{refused}");
    }
}
