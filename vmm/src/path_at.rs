//! A file name in an open directory. The VMM can write the file even if the directory's path is no longer reachable
//! because the root directory or the user has changed.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

/// Flags that create a new file and never open an existing one. Seccomp filters allow only these flags.
pub(crate) const CREATE: OFlags = OFlags::RDWR
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    // rustix adds this flag anyway.
    .union(OFlags::LARGEFILE)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Number of temporary names to try. Some names may be taken by files that killed processes left behind.
const TRIES: u32 = 64;

/// Errors of [`Temporary::persist_and_keep_older`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum PersistError {
    /// The older file cannot be renamed.
    #[error("cannot keep the older file")]
    KeepOlder(#[source] io::Error),
    /// The new file cannot get its final name.
    #[error("cannot rename the new file")]
    Rename(#[from] io::Error),
}

/// A file name in an open directory.
#[derive(Debug)]
pub(crate) struct PathAt {
    /// If the directory cannot be opened, the error is reported when the directory is first used.
    directory: Result<OwnedFd, Errno>,
    name: OsString,
    path: PathBuf,
}

impl PathAt {
    /// Opens the directory that contains `path`. The file `path` itself need not exist.
    pub(crate) fn open(path: &Path) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self {
            directory: rustix::fs::open(directory(path), flags, Mode::empty()),
            name: path.file_name().unwrap_or_else(|| OsStr::new(".")).to_owned(),
            path: path.to_owned(),
        }
    }

    /// The path that the file had when [`PathAt::open`] was called.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the directory.
    pub(crate) fn directory(&self) -> &Path {
        directory(&self.path)
    }

    /// The descriptor of the directory, if it could be opened.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.directory.as_ref().ok().map(AsFd::as_fd)
    }

    /// The file's status, or `None` if the file does not exist. Follows symbolic links if `follow` is true.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn status(&self, follow: bool) -> io::Result<Option<Stat>> {
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        match rustix::fs::statat(self.fd()?, &self.name, flags) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the file itself, without access to its contents. Does not follow a symbolic link at this name.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(self.fd()?, &self.name, flags, Mode::empty())?)
    }

    /// The status of the directory.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn directory_status(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(self.fd()?)?)
    }

    /// Whether this name belongs to an existing file that is not a regular file.
    pub(crate) fn is_taken(&self) -> bool {
        let status = self.status(true).ok().flatten();
        status.is_some_and(|status| FileType::from_raw_mode(status.st_mode) != FileType::RegularFile)
    }

    /// Removes the file.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(self.fd()?, &self.name, AtFlags::empty())?)
    }

    /// Creates a temporary file in the same directory.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn create_temporary(&self) -> io::Result<Temporary<'_>> {
        // Machines in PID namespaces of their own have the same process id, so the time tells their files apart.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_nanos());
        for number in 0..TRIES {
            let mut name = OsString::from(".");
            name.push(&self.name);
            name.push(format!(".{now}-{number}.tmp"));
            match rustix::fs::openat(self.fd()?, &name, CREATE, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    return Ok(Temporary { place: self, file: File::from(file), name: Some(name) });
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Errno::EXIST.into())
    }

    /// The path of an older file that [`Temporary::persist_and_keep_older`] keeps: this path with `.old` appended.
    pub(crate) fn older(&self) -> PathBuf {
        older(self.path.as_os_str()).into()
    }

    /// Exchanges the names of this file and of the file `other` in the same directory.
    fn exchange(&self, other: &OsStr) -> Result<(), Errno> {
        let directory = self.fd()?;
        rustix::fs::renameat_with(directory, other, directory, &self.name, RenameFlags::EXCHANGE)
    }

    /// Renames the file `from` to the name of an older file.
    fn keep(&self, from: &OsStr) -> Result<(), PersistError> {
        let directory = self.fd().map_err(io::Error::from)?;
        rustix::fs::renameat(directory, from, directory, older(&self.name))
            .map_err(|error| PersistError::KeepOlder(error.into()))
    }

    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        match &self.directory {
            Ok(directory) => Ok(directory.as_fd()),
            Err(error) => Err(*error),
        }
    }
}

/// A file that is removed when this value is dropped, unless [`Temporary::persist`] was called.
#[derive(Debug)]
pub(crate) struct Temporary<'a> {
    place: &'a PathAt,
    file: File,
    /// `None` once the file has its final name.
    name: Option<OsString>,
}

impl Temporary<'_> {
    /// The file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its final name, replacing an existing file.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn persist(mut self) -> io::Result<()> {
        let directory = self.place.fd()?;
        if let Some(name) = &self.name {
            rustix::fs::renameat(directory, name, directory, &self.place.name)?;
            self.name = None;
        }
        Ok(())
    }

    /// Like [`Temporary::persist`], but appends `.old` to the name of an existing file.
    ///
    /// Other processes find a file at the path at any time, because the two files exchange their names. Only on a file
    /// system that cannot exchange names, the path is without a file for a moment.
    ///
    /// # Errors
    /// [`PersistError`]. An existing file is never lost: it has its name, `.old` appended, or the temporary name.
    pub(crate) fn persist_and_keep_older(mut self) -> Result<(), PersistError> {
        let (Some(name), Some(_)) = (self.name.clone(), self.place.status(true)?) else {
            return Ok(self.persist()?);
        };
        match self.place.exchange(&name) {
            Ok(()) => {}
            // The file system or the kernel cannot exchange names.
            Err(Errno::INVAL | Errno::NOSYS) => {
                self.place.keep(&self.place.name)?;
                return Ok(self.persist()?);
            }
            // Another process has removed the older file.
            Err(Errno::NOENT) => return Ok(self.persist()?),
            Err(error) => return Err(io::Error::from(error).into()),
        }
        // The older file has the temporary name now. It must not be removed.
        self.name = None;
        if let Err(error) = self.place.keep(&name) {
            self.place.exchange(&name).map_err(io::Error::from)?;
            self.name = Some(name);
            return Err(error);
        }
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let (Some(name), Ok(directory)) = (&self.name, self.place.fd())
            && let Err(error) = rustix::fs::unlinkat(directory, name, AtFlags::empty())
        {
            log::warn!("cannot remove temporary file {}: {error}", name.display());
        }
    }
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn older(name: &OsStr) -> OsString {
    let mut older = name.to_owned();
    older.push(".old");
    older
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use std::collections::BTreeMap;
    use std::fs;
    use std::io::Write;
    use std::thread;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    use super::*;

    /// Makes `renameat2` fail with `errno` in this thread.
    fn refuse_exchange(errno: Errno) {
        let filter = SeccompFilter::new(
            BTreeMap::from([(libc::SYS_renameat2, Vec::new())]),
            SeccompAction::Allow,
            SeccompAction::Errno(errno.raw_os_error().cast_unsigned()),
            std::env::consts::ARCH.try_into().unwrap(),
        );
        let program: BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&program).unwrap();
    }

    #[test]
    fn file_gets_its_place_after_its_directory_was_renamed() {
        let directory = tempfile::tempdir().unwrap();
        let before = directory.path().join("before");
        fs::create_dir(&before).unwrap();
        let place = PathAt::open(&before.join("file"));
        let after = directory.path().join("after");
        fs::rename(&before, &after).unwrap();
        let temporary = place.create_temporary().unwrap();
        temporary.file().write_all(b"text").unwrap();
        assert!(place.status(false).unwrap().is_none());
        temporary.persist().unwrap();
        assert_eq!(fs::read(after.join("file")).unwrap(), b"text");
        let second = place.create_temporary().unwrap();
        second.persist_and_keep_older().unwrap();
        assert_eq!(fs::read_dir(&after).unwrap().count(), 2);
        assert_eq!(fs::read(after.join("file")).unwrap(), b"");
        assert_eq!(fs::read(after.join("file.old")).unwrap(), b"text");
    }

    #[test]
    fn file_that_cannot_be_kept_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "older").unwrap();
        fs::create_dir(directory.path().join("file.old")).unwrap();
        let place = PathAt::open(&path);
        let temporary = place.create_temporary().unwrap();
        let error = temporary.persist_and_keep_older().unwrap_err();
        assert!(matches!(error, PersistError::KeepOlder(_)), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"older");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn older_file_is_kept_where_names_cannot_be_exchanged() {
        for errno in [Errno::INVAL, Errno::NOSYS] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("file");
            fs::write(&path, "older").unwrap();
            let place = PathAt::open(&path);
            let temporary = place.create_temporary().unwrap();
            temporary.file().write_all(b"newer").unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    refuse_exchange(errno);
                    temporary.persist_and_keep_older().unwrap();
                });
            });
            assert_eq!(fs::read(&path).unwrap(), b"newer");
            assert_eq!(fs::read(place.older()).unwrap(), b"older");
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        }
    }

    #[test]
    fn temporary_file_without_a_place_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let place = PathAt::open(&directory.path().join("file"));
        let first = place.create_temporary().unwrap();
        let second = place.create_temporary().unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        drop((first, second));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn directory_or_device_takes_a_place() {
        let directory = tempfile::tempdir().unwrap();
        assert!(PathAt::open(directory.path()).is_taken());
        assert!(PathAt::open(Path::new("/dev/null")).is_taken());
        assert!(PathAt::open(Path::new("/")).is_taken());
        assert!(!PathAt::open(&directory.path().join("file")).is_taken());
        let nowhere = PathAt::open(Path::new("/nonexistent/file"));
        assert!(nowhere.create_temporary().is_err());
    }
}
