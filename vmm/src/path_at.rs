//! A file name in an open directory. The VMM can write the file even if the directory's path is no longer reachable
//! because the root directory or the user has changed.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
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
            name: path
                .file_name()
                .unwrap_or_else(|| OsStr::new("."))
                .to_owned(),
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
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.directory.as_ref().ok().map(AsRawFd::as_raw_fd)
    }

    /// The file's status, or `None` if the file does not exist. Follows symbolic links if `follow` is true.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn status(&self, follow: bool) -> io::Result<Option<Stat>> {
        let flags = match follow {
            true => AtFlags::empty(),
            false => AtFlags::SYMLINK_NOFOLLOW,
        };
        match rustix::fs::statat(self.fd()?, &self.name, flags) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether this name belongs to an existing file that is not a regular file.
    pub(crate) fn is_taken(&self) -> bool {
        let status = self.status(true).ok().flatten();
        status
            .is_some_and(|status| FileType::from_raw_mode(status.st_mode) != FileType::RegularFile)
    }

    /// Removes the file.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(
            self.fd()?,
            &self.name,
            AtFlags::empty(),
        )?)
    }

    /// Creates a temporary file in the same directory.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn create_temporary(&self) -> io::Result<Temporary<'_>> {
        let process = std::process::id();
        for number in 0..TRIES {
            let mut name = OsString::from(".");
            name.push(&self.name);
            name.push(format!(".{process}-{number}.tmp"));
            match rustix::fs::openat(self.fd()?, &name, CREATE, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    return Ok(Temporary {
                        place: self,
                        file: File::from(file),
                        name: Some(name),
                    });
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Errno::EXIST.into())
    }

    /// If the file exists, appends `.old` to its name.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn keep_older(&self) -> io::Result<()> {
        if self.status(true)?.is_none() {
            return Ok(());
        }
        Ok(rustix::fs::renameat(
            self.fd()?,
            &self.name,
            self.fd()?,
            older(&self.name),
        )?)
    }

    /// The target path of [`PathAt::keep_older`].
    pub(crate) fn older(&self) -> PathBuf {
        older(self.path.as_os_str()).into()
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        match &self.directory {
            Ok(directory) => Ok(directory.as_fd()),
            Err(error) => Err((*error).into()),
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

    use std::fs;
    use std::io::Write;

    use super::*;

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
        place.keep_older().unwrap();
        assert_eq!(fs::read_dir(&after).unwrap().count(), 1);
        assert!(after.join("file.old").exists());
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
