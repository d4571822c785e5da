//! Knows when each result was used last, and removes results that no process uses.
//!
//! Beside each result is a stamp, a file with the name of the result and the ending `.use`. Its time of modification is
//! the time of the last use. Its content is the result's size. A process that uses the result holds a shared lock on
//! the stamp, and a process that removes the result holds an exclusive lock.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::{CacheError, failed};
use crate::sys::Lock;

const STAMP: &str = ".use";
/// The beginning of the names of results that are not finished.
pub(super) const MAKING: &str = ".making-";

/// The locks of the results that this process uses. They are held until the process ends, because any code with the path
/// of a result may still use it.
static HELD: Mutex<BTreeMap<PathBuf, Lock>> = Mutex::new(BTreeMap::new());

/// A use of a result that may not exist yet. No process removes the result while the use lasts.
pub(super) struct Use {
    result: PathBuf,
    lock: Lock,
}

impl Use {
    /// Begins to use `result` now.
    pub(super) fn begin(result: &Path) -> Result<Self, CacheError> {
        let stamp = stamp(result);
        let lock = Lock::share(&stamp).map_err(|source| failed("lock", &stamp, source))?;
        lock.touch().map_err(|source| failed("write", &stamp, source))?;
        Ok(Self { result: result.to_owned(), lock })
    }

    /// Makes the use last until this process ends.
    pub(super) fn keep(self) {
        HELD.lock().unwrap_or_else(PoisonError::into_inner).insert(self.result, self.lock);
    }
}

/// A result that exists.
pub(super) struct Kept {
    path: PathBuf,
    used: SystemTime,
    pub(super) size: u64,
}

impl Kept {
    /// Removes the result, by way of the directory `trash`. Returns whether it was removed: `false` if it is in use.
    pub(super) fn remove(&self, trash: &Path) -> Result<bool, CacheError> {
        let stamp = stamp(&self.path);
        let lock = Lock::try_take(&stamp).map_err(|source| failed("lock", &stamp, source))?;
        let Some(_lock) = lock else {
            return Ok(false);
        };
        // Rename the result first: if this process is killed, no half of it must stay.
        let away = tempfile::tempdir_in(trash).map_err(|source| failed("write in", trash, source))?;
        fs::rename(&self.path, away.path().join("result"))
            .and_then(|()| fs::remove_file(&stamp))
            .and_then(|()| away.close())
            .map_err(|source| failed("remove", &self.path, source))?;
        Ok(true)
    }
}

/// The results in the directory `home`. Measures those whose stamps lack a size.
pub(super) fn list(home: &Path) -> Result<Vec<Kept>, CacheError> {
    let is_result = |name: &&OsString| {
        let name = name.as_encoded_bytes();
        !name.starts_with(b".") && !name.ends_with(STAMP.as_bytes())
    };
    names(home)?.iter().filter(is_result).map(|name| kept(home.join(name))).collect()
}

fn kept(path: PathBuf) -> Result<Kept, CacheError> {
    let stamp = stamp(&path);
    let read = || {
        let mut file = File::options().read(true).append(true).create(true).open(&stamp)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let used = file.metadata()?.modified()?;
        Ok((file, text, used))
    };
    let (mut file, text, used) = read().map_err(|source| failed("read", &stamp, source))?;
    if let Ok(size) = text.parse() {
        return Ok(Kept { path, used, size });
    }
    let size = measure(&path).map_err(|source| failed("read", &path, source))?;
    // Measuring a result must not count as a use, so restore the time.
    let written = file.set_len(0).and_then(|()| write!(file, "{size}")).and_then(|()| file.set_modified(used));
    written.map_err(|source| failed("write", &stamp, source))?;
    Ok(Kept { path, used, size })
}

/// Removes the results that were used longest ago, until the others in `homes` have at most `size` bytes. Leaves those
/// that are in use.
pub(super) fn prune(homes: &[PathBuf], trash: &Path, size: u64) -> Result<(), CacheError> {
    let mut results = Vec::new();
    for home in homes {
        results.extend(list(home)?);
    }
    results.sort_by_key(|result| result.used);
    let mut total: u64 = results.iter().map(|result| result.size).sum();
    for result in results {
        if total <= size {
            break;
        }
        if result.remove(trash)? {
            total -= result.size;
        }
    }
    Ok(())
}

/// Removes what killed processes have left in `home`: results that are not finished, and stamps without a result. The
/// caller prevents that another process makes a result in `home`.
pub(super) fn sweep(home: &Path) -> Result<(), CacheError> {
    let names = names(home)?;
    for name in &names {
        let path = home.join(name);
        let bytes = name.as_encoded_bytes();
        if bytes.starts_with(MAKING.as_bytes()) {
            fs::remove_dir_all(&path).map_err(|source| failed("remove", &path, source))?;
        } else if bytes.ends_with(STAMP.as_bytes()) && !path.with_extension("").exists() {
            let lock = Lock::try_take(&path).map_err(|source| failed("lock", &path, source))?;
            if lock.is_some() {
                fs::remove_file(&path).map_err(|source| failed("remove", &path, source))?;
            }
        }
    }
    Ok(())
}

/// Returns the names in `directory`; none if it does not exist.
pub(super) fn names(directory: &Path) -> Result<BTreeSet<OsString>, CacheError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
    };
    let entries = entries.map_err(|source| failed("read", directory, source))?;
    Ok(entries.iter().map(fs::DirEntry::file_name).collect())
}

fn stamp(result: &Path) -> PathBuf {
    let mut stamp = result.as_os_str().to_owned();
    stamp.push(STAMP);
    stamp.into()
}

/// The space that the files in `directory` take.
fn measure(directory: &Path) -> io::Result<u64> {
    /// The unit of `st_blocks`, whatever the file system.
    const BLOCK: u64 = 512;
    let mut size = fs::symlink_metadata(directory)?.blocks() * BLOCK;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        size += if entry.file_type()?.is_dir() { measure(&entry.path())? } else { entry.metadata()?.blocks() * BLOCK };
    }
    Ok(size)
}
