//! Caches results by the content of their inputs: equal inputs share a result, and different inputs never do. A result
//! is a directory with any content.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

use thiserror::Error;

use crate::sys::Lock;

/// The number of results of one kind to keep: enough for several branches.
const KEPT: usize = 4;

/// Errors of the cache.
#[derive(Debug, Error)]
pub enum CacheError {
    /// Something in the cache cannot be made, moved or removed.
    #[error("cannot {action} {path}; check permissions and free space")]
    Access {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The number of emulated machines that may run at a time: three for every two processors. A machine keeps at most one
/// processor busy, and leaves it idle while its guest sleeps.
pub fn slots() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors + processors.div_ceil(2)
}

/// A directory of results, shared by any number of processes.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// The project's own, `images/cache`.
    pub fn project() -> Self {
        Self::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("cache"))
    }

    /// A cache in another directory.
    pub fn at(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Its path.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the directory of the result of kind `kind` for `key`. If it does not exist, `make` fills a
    /// fresh directory, which becomes the result only if `make` succeeds.
    ///
    /// # Errors
    /// The errors of `make`, and [`CacheError`].
    pub fn get<E: From<CacheError>>(
        &self,
        kind: &str,
        key: &str,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let place = self.directory.join(kind).join(key);
        if place.is_dir() {
            return Ok(place);
        }
        let _lock = self.lock(kind)?;
        if place.is_dir() {
            return Ok(place); // made while we waited
        }
        let home = self.directory.join(kind);
        let fresh = tempfile::Builder::new()
            .prefix(".making-")
            .tempdir_in(&home)
            .map_err(|source| failed("write in", &home, source))?;
        make(fresh.path())?;
        fs::rename(fresh.path(), &place).map_err(|source| failed("write", &place, source))?;
        self.prune(kind, &place)?;
        Ok(place)
    }

    /// Takes the lock `name`. Other threads and processes that want this lock wait until it is dropped.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn lock(&self, name: &str) -> Result<Lock, CacheError> {
        let home = self.directory.join(name);
        fs::create_dir_all(&home).map_err(|source| failed("make", &home, source))?;
        let path = self.directory.join(format!("{name}.lock"));
        Lock::take(&path, || eprintln!("waiting for another process to finish with {name}…"))
            .map_err(|source| failed("lock", &path, source))
    }

    /// Takes one of the [`slots`] for emulated machines. Waits while all are taken.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn slot(&self) -> Result<Lock, CacheError> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let slots = slots();
        let home = self.directory.join("run");
        fs::create_dir_all(&home).map_err(|source| failed("make", &home, source))?;
        let path = |slot| home.join(format!("{slot}.lock"));
        for slot in (0..slots).map(path) {
            let lock = Lock::try_take(&slot).map_err(|source| failed("lock", &slot, source))?;
            if let Some(lock) = lock {
                return Ok(lock);
            }
        }
        // Spread the waiters over the slots.
        let slot = path(NEXT.fetch_add(1, Ordering::Relaxed) % slots);
        Lock::take(&slot, || ()).map_err(|source| failed("lock", &slot, source))
    }

    /// Removes everything.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn clear(&self) -> Result<(), CacheError> {
        match fs::remove_dir_all(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &self.directory, error)),
            _ => Ok(()),
        }
    }

    /// Removes the oldest results of `kind`, and unfinished results of killed processes.
    fn prune(&self, kind: &str, newest: &Path) -> Result<(), CacheError> {
        let home = self.directory.join(kind);
        let entries = fs::read_dir(&home).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.map_err(|source| failed("read", &home, source))?;
        let mut results: Vec<(SystemTime, PathBuf)> = Vec::new();
        for path in entries.iter().map(fs::DirEntry::path).filter(|path| path != newest) {
            let modified = fs::metadata(&path).and_then(|m| m.modified());
            let modified = modified.map_err(|source| failed("read", &path, source))?;
            let half_made = path.file_name().is_some_and(|n| n.as_encoded_bytes()[0] == b'.');
            results.push((if half_made { SystemTime::UNIX_EPOCH } else { modified }, path));
        }
        results.sort();
        results.reverse();
        let half_made = |time: &SystemTime| *time == SystemTime::UNIX_EPOCH;
        for (index, (time, path)) in results.iter().enumerate() {
            if index + 1 >= KEPT || half_made(time) {
                fs::remove_dir_all(path).map_err(|source| failed("remove", path, source))?;
            }
        }
        Ok(())
    }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> CacheError {
    CacheError::Access { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn count(path: &Path) -> usize {
        fs::read_dir(path).unwrap().count()
    }

    #[test]
    fn result_is_made_once_per_key() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let mut made = 0;
        for key in ["a", "a", "b", "a"] {
            let place = cache.get("kind", key, |dir| {
                made += 1;
                fs::write(dir.join("content"), key).unwrap();
                Ok::<_, CacheError>(())
            });
            assert_eq!(fs::read_to_string(place.unwrap().join("content")).unwrap(), key);
        }
        assert_eq!(made, 2);
        cache.clear().unwrap();
        cache.clear().unwrap();
        assert!(!cache.directory().exists());
    }

    #[test]
    fn failed_result_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().to_owned());
        let failed = cache.get("kind", "a", |dir| {
            fs::write(dir.join("half"), "").unwrap();
            Err(CacheError::Access { action: "fail at", path: dir.to_owned(), source: io::ErrorKind::Other.into() })
        });
        assert!(failed.is_err());
        assert_eq!(count(&directory.path().join("kind")), 0);
    }

    #[test]
    fn machines_beyond_the_slots_wait() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().to_owned());
        let mut taken_slots: Vec<Lock> = (0..slots()).map(|_| cache.slot().unwrap()).collect();
        let (taken, was_taken) = mpsc::channel();
        thread::scope(|scope| {
            let cache = &cache;
            for _ in 0..slots() {
                let taken = taken.clone();
                scope.spawn(move || taken.send(cache.slot().unwrap()).unwrap());
            }
            let early = was_taken.recv_timeout(Duration::from_millis(50));
            assert!(early.is_err(), "more machines than slots");
            taken_slots.clear();
            // The waiters get the released locks in any order. If two waiters wait for the same lock, the first sends
            // the lock to this loop, which drops it. Only then does the second waiter get the lock.
            for _ in 0..slots() {
                was_taken.recv().unwrap();
            }
        });
    }

    #[test]
    fn old_results_and_killed_makers_go() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().to_owned());
        fs::create_dir_all(directory.path().join("kind/.making-killed")).unwrap();
        for key in 0..KEPT + 3 {
            cache.get("kind", &key.to_string(), |_| Ok::<_, CacheError>(())).unwrap();
        }
        assert_eq!(count(&directory.path().join("kind")), KEPT);
        assert!(directory.path().join("kind").join((KEPT + 2).to_string()).is_dir());
        assert!(!directory.path().join("kind/.making-killed").exists());
    }
}
