//! Caches results by the content of their inputs: equal inputs share a result, and different inputs never do. A result
//! is a directory with any content.
//!
//! A user has one cache for all clones of the project, so a result must not depend on where the clone is. If the code
//! that makes a result changes, so must a number in the result's key, as in `recipe 2`.
//!
//! ```text
//! results/KIND/KEY       a result
//! results/KIND/KEY.use   its stamp: see `uses`
//! state/NAME             files that change, such as lists of packages
//! locks/, slots/         locks between processes
//! trash/                 results that are being removed
//! ```

mod place;
mod uses;

use std::env;
use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use thiserror::Error;

use crate::size::Size;
use crate::sys::Lock;
use uses::Use;

/// Errors of the cache.
#[derive(Debug, Error)]
pub enum CacheError {
    /// There is no place for the cache.
    #[error("there is no home directory for a cache: set VPMU_CACHE to a directory of your own")]
    NoHome,
    /// The variable would name a different directory for each working directory.
    #[error("VPMU_CACHE is {0}, which is not an absolute path: set it to one, such as /home/me/cache")]
    Relative(PathBuf),
    /// The variable is not a size.
    #[error("VPMU_CACHE_SIZE is {0}, which is not a size: set it to one, such as 20G")]
    Size(String),
    /// The directory's owner could replace results.
    #[error(
        "the cache {directory} belongs to user {owner}, and you are user {user}: set VPMU_CACHE to a directory of \
         your own"
    )]
    Owner {
        /// The directory.
        directory: PathBuf,
        /// Its owner's number.
        owner: u32,
        /// This user's number.
        user: u32,
    },
    /// Other users could replace results.
    #[error("other users can write to the cache {0}: set VPMU_CACHE to a directory to which only you can write")]
    Writable(PathBuf),
    /// The cache would mix its files with others.
    #[error("{0} contains files, but is not a cache: set VPMU_CACHE to a new or empty directory")]
    NotCache(PathBuf),
    /// Something in the cache cannot be made, moved or removed.
    #[error("cannot {action} {path}; check permissions and free space, or set VPMU_CACHE to another directory")]
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
    size: Size,
}

/// The numbers of results that [`Cache::clear`] removed and left.
#[derive(Debug, Default)]
pub struct Cleared {
    /// For each kind, the number of results and their size.
    pub removed: Vec<(String, usize, Size)>,
    /// The number of results that stay, because a process uses them.
    pub in_use: usize,
}

impl Cache {
    /// Returns the cache of this user, which is the same for the whole process.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn user() -> Result<&'static Self, CacheError> {
        Self::select(None, None)
    }

    /// Like [`Cache::user`], in another directory or with another size than the environment's variables name. Has no
    /// effect unless it is this process's first call of either function.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn select(directory: Option<&Path>, size: Option<Size>) -> Result<&'static Self, CacheError> {
        static USER: OnceLock<Cache> = OnceLock::new();
        if let Some(cache) = USER.get() {
            return Ok(cache);
        }
        let directory = match directory {
            Some(directory) => path::absolute(directory).map_err(|source| failed("find", directory, source))?,
            // The home directory is known even without HOME.
            None => place::directory(|name| match name {
                "HOME" => env::home_dir().map(PathBuf::into_os_string),
                name => env::var_os(name),
            })?,
        };
        let size = size.map_or_else(|| place::size(|name| env::var_os(name)), Ok)?;
        let cache = Self::open(directory, size)?;
        Ok(USER.get_or_init(|| cache))
    }

    /// Opens the cache in `directory`, which is made if it does not exist. When a result is made, the results that were
    /// used longest ago are removed until all have at most `size`, but none that is in use.
    ///
    /// # Errors
    /// [`CacheError`]: the directory is not a cache, or other users could put results into it.
    pub fn open(directory: PathBuf, size: Size) -> Result<Self, CacheError> {
        place::prepare(&directory)?;
        Ok(Self { directory, size })
    }

    /// A cache for one test.
    #[cfg(test)]
    pub(crate) fn at(directory: PathBuf) -> Self {
        Self::open(directory, Size(u64::MAX)).unwrap()
    }

    /// Its path.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the directory of the result of kind `kind` for `key`. If it does not exist, `make` fills a
    /// fresh directory, which becomes the result only if `make` succeeds. The result is in use until this process ends.
    ///
    /// # Errors
    /// The errors of `make`, and [`CacheError`].
    pub fn get<E: From<CacheError>>(
        &self,
        kind: &str,
        key: &str,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let home = self.home(&format!("results/{kind}"))?;
        let place = home.join(key);
        let used = Use::begin(&place)?;
        if place.is_dir() {
            used.keep();
            return Ok(place);
        }
        let lock = self.lock(kind)?;
        // Otherwise, it was made while we waited.
        if !place.is_dir() {
            uses::sweep(&home)?;
            if let Err(error) = fill(&home, &place, make) {
                drop(used);
                // Remove the stamp. If that fails, the next process does it; the error to report is that of `make`.
                let _ = uses::sweep(&home);
                return Err(error);
            }
        }
        used.keep();
        drop(lock);
        self.prune()?;
        Ok(place)
    }

    /// Returns the directory for the files `name`, which change and are not results. It is in use until this process
    /// ends, and no size limits it.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn state(&self, name: &str) -> Result<PathBuf, CacheError> {
        let place = self.home("state")?.join(name);
        Use::begin(&place)?.keep();
        fs::create_dir_all(&place).map_err(|source| failed("make", &place, source))?;
        Ok(place)
    }

    /// Takes the lock `name`. Other threads and processes that want this lock wait until it is dropped.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn lock(&self, name: &str) -> Result<Lock, CacheError> {
        let path = self.lock_file(name)?;
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
        let home = self.home("slots")?;
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

    /// Removes everything that no process uses.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn clear(&self) -> Result<Cleared, CacheError> {
        let (_lock, trash) = self.trash()?;
        let mut cleared = Cleared::default();
        for home in self.kinds()?.into_iter().chain([self.home("state")?]) {
            let kind = home.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let (mut count, mut size) = (0, 0);
            for result in uses::list(&home)? {
                if result.remove(&trash)? {
                    count += 1;
                    size += result.size;
                } else {
                    cleared.in_use += 1;
                }
            }
            if count > 0 {
                cleared.removed.push((kind.clone(), count, Size(size)));
            }
            let path = self.lock_file(&kind)?;
            if let Some(_lock) = Lock::try_take(&path).map_err(|source| failed("lock", &path, source))? {
                uses::sweep(&home)?;
            }
        }
        Ok(cleared)
    }

    fn prune(&self) -> Result<(), CacheError> {
        let (_lock, trash) = self.trash()?;
        uses::prune(&self.kinds()?, &trash, self.size.0)
    }

    /// Takes the lock for removing results. Returns it and the directory for results that are being removed.
    fn trash(&self) -> Result<(Lock, PathBuf), CacheError> {
        let path = self.lock_file("trash")?;
        let lock = Lock::take(&path, || ()).map_err(|source| failed("lock", &path, source))?;
        let trash = self.home("trash")?;
        for name in uses::names(&trash)? {
            let left = trash.join(name); // by a process that was killed
            fs::remove_dir_all(&left).map_err(|source| failed("remove", &left, source))?;
        }
        Ok((lock, trash))
    }

    /// The directories of all kinds of results.
    fn kinds(&self) -> Result<Vec<PathBuf>, CacheError> {
        let results = self.home("results")?;
        Ok(uses::names(&results)?.iter().map(|kind| results.join(kind)).collect())
    }

    fn lock_file(&self, name: &str) -> Result<PathBuf, CacheError> {
        Ok(self.home("locks")?.join(format!("{name}.lock")))
    }

    /// Returns the directory `name` of the cache.
    fn home(&self, name: &str) -> Result<PathBuf, CacheError> {
        let home = self.directory.join(name);
        fs::create_dir_all(&home).map_err(|source| failed("make", &home, source))?;
        Ok(home)
    }
}

/// Makes the result `place` in `home`.
fn fill<E: From<CacheError>>(home: &Path, place: &Path, make: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
    let fresh = tempfile::Builder::new().prefix(uses::MAKING).tempdir_in(home);
    let fresh = fresh.map_err(|source| failed("write in", home, source))?;
    make(fresh.path())?;
    fs::rename(fresh.path(), place).map_err(|source| failed("write", place, source))?;
    Ok(())
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> CacheError {
    CacheError::Access { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, SystemTime};

    use super::*;

    fn count(path: &Path) -> usize {
        fs::read_dir(path).unwrap().count()
    }

    fn names(path: &Path) -> Vec<String> {
        let results = uses::names(path).unwrap();
        results
            .iter()
            .filter_map(|name| name.to_str())
            .filter(|name| !name.ends_with(".use"))
            .map(str::to_owned)
            .collect()
    }

    /// Puts a result of about `kib` KiB into the cache, as another process would have that has ended. The result was
    /// used `hours` ago.
    fn made_by_another(cache: &Cache, kind: &str, key: &str, kib: usize, hours: u64) -> PathBuf {
        let place = cache.directory().join("results").join(kind).join(key);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("content"), vec![1; kib << 10]).unwrap();
        let stamp = fs::File::create(place.with_extension("use")).unwrap();
        stamp.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
        place
    }

    fn nothing(_: &Path) -> Result<(), CacheError> {
        Ok(())
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
    }

    #[test]
    fn result_that_threads_want_at_once_is_made_once() {
        let directory = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = Cache::at(directory.path().join("cache"));
                    let make = |dir: &Path| {
                        made.fetch_add(1, Ordering::Relaxed);
                        fs::write(dir.join("content"), "x").unwrap();
                        Ok::<_, CacheError>(())
                    };
                    assert!(cache.get("kind", "key", make).unwrap().join("content").is_file());
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
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
        assert_eq!(count(&directory.path().join("results/kind")), 0);
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
    fn results_used_longest_ago_go_until_the_rest_fits() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().to_owned(), Size(2500 << 10)).unwrap();
        for (kind, key, hours) in [("one", "old", 3), ("two", "older", 4), ("one", "new", 1), ("two", "oldest", 5)] {
            made_by_another(&cache, kind, key, 1000, hours);
        }
        cache.get("small", "a", nothing).unwrap();
        assert_eq!(names(&directory.path().join("results/one")), ["new", "old"]);
        assert!(names(&directory.path().join("results/two")).is_empty());
        assert_eq!(names(&directory.path().join("results/small")), ["a"]);
        assert_eq!(count(&directory.path().join("results/two")), 0, "stamps go with their results");
        assert_eq!(count(&directory.path().join("trash")), 0);
    }

    #[test]
    fn result_that_is_got_again_is_used_last() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().to_owned(), Size(1500 << 10)).unwrap();
        let place = made_by_another(&cache, "kind", "old", 1000, 5);
        made_by_another(&cache, "kind", "new", 1000, 1);
        cache.get("kind", "old", nothing).unwrap();
        let used = fs::metadata(place.with_extension("use")).unwrap().modified().unwrap();
        assert!(used.elapsed().unwrap_or_default() < Duration::from_secs(1800));
        cache.get("small", "a", nothing).unwrap();
        assert_eq!(names(&directory.path().join("results/kind")), ["old"]);
    }

    #[test]
    fn result_in_use_by_another_process_stays() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().to_owned(), Size(1 << 10)).unwrap();
        let place = made_by_another(&cache, "kind", "used", 1000, 5);
        made_by_another(&cache, "kind", "unused", 1000, 1);
        let other = Use::begin(&place).unwrap();
        cache.get("small", "a", nothing).unwrap();
        assert_eq!(names(&directory.path().join("results/kind")), ["used"]);
        drop(other);
        cache.get("small", "b", nothing).unwrap();
        assert!(names(&directory.path().join("results/kind")).is_empty());
        assert_eq!(names(&directory.path().join("results/small")), ["a", "b"], "this process uses them");
    }

    #[test]
    fn results_of_killed_makers_go() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().to_owned());
        let home = directory.path().join("results/kind");
        fs::create_dir_all(home.join(".making-killed/part")).unwrap();
        fs::write(home.join("killed.use"), "").unwrap();
        fs::create_dir_all(directory.path().join("trash/killed/result")).unwrap();
        cache.get("kind", "a", nothing).unwrap();
        assert_eq!(count(&home), 2);
        assert_eq!(count(&directory.path().join("trash")), 0);
    }

    #[test]
    fn clearing_removes_what_no_process_uses_and_counts_it() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().to_owned());
        made_by_another(&cache, "one", "a", 1000, 1);
        made_by_another(&cache, "one", "b", 1000, 1);
        let place = made_by_another(&cache, "two", "used", 1000, 1);
        fs::create_dir_all(directory.path().join("state/lists")).unwrap();
        let other = Use::begin(&place).unwrap();
        let cleared = cache.clear().unwrap();
        let removed: Vec<_> = cleared.removed.iter().map(|(kind, count, _)| (kind.as_str(), *count)).collect();
        assert_eq!((removed, cleared.in_use), (vec![("one", 2), ("state", 1)], 1));
        assert!(cleared.removed[0].2 >= Size(2000 << 10));
        assert_eq!(names(&directory.path().join("results/two")), ["used"]);
        drop(other);
        assert_eq!(cache.clear().unwrap().in_use, 0);
        for home in ["results/one", "results/two", "state", "trash"] {
            assert_eq!(count(&directory.path().join(home)), 0, "{home}");
        }
        assert!(cache.clear().unwrap().removed.is_empty());
    }
}
