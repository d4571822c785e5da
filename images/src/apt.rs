//! Runs Debian's package tools for packages that the callers choose. If an operation fails because the package lists
//! are stale, refreshes the lists.
//!
//! Packages that are unpacked come from Debian 12, whatever release this host runs, so that kernels, compilers and QEMU
//! are the same on every host. Only kernels that Debian 12 does not have, and a QEMU that has vfio-user, come from Debian
//! 13. The lists of both are in the cache, so any user may refresh them. Packages that are installed come from the host's
//! own lists.

use std::error::Error as StdError;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use thiserror::Error;

use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::sys;

#[cfg(test)]
pub(crate) mod archive;

/// The keys that sign Debian's archives, on Debian and its derivatives.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const LISTS: &str = "/var/lib/apt/lists";
/// The format for `apt-get indextargets`: the fields that name an archive.
const TARGETS: &str = "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)";

/// The option that makes `apt-get update` fail when it cannot reach an archive.
pub(crate) const UPDATE_OR_FAIL: &str = "APT::Update::Error-Mode=any";

/// apt's errors when its package lists are out of date. Such lists name a file that the archive has dropped, lack a
/// package or a version, or are older than an installed package.
const STALE: [&str; 10] = [
    "Failed to fetch",
    "Unable to locate package",
    "has no installation candidate",
    "No packages found",
    "was not found",
    "Can't find a source to download",
    "Can not find version",
    "Unable to find a source package",
    "You must put some 'deb-src' URIs",
    "Unable to correct problems",
];

/// apt's errors when the archive does not answer. Fresh lists would not help.
const UNREACHABLE: [&str; 6] = [
    "Could not resolve",
    "Temporary failure resolving",
    "Could not connect",
    "Unable to connect",
    "Cannot initiate the connection",
    "Connection failed",
];

/// Errors of refreshing the package lists.
#[derive(Debug, Error)]
pub enum AptError {
    /// The lists must be refreshed, which only root may do.
    #[error("{problem}: run `sudo apt-get update`, then try again")]
    NotRoot {
        /// The problem with the lists.
        problem: &'static str,
        /// The failure that the problem caused.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The update failed, and so did the operation after it.
    #[error("{operation}; `apt-get update` failed before that")]
    Update {
        /// The operation's failure.
        operation: String,
        /// The update's failure.
        #[source]
        source: ProcessError,
    },
    /// A list, or the directory of the lists, could not be read.
    #[error("cannot read apt's lists {path}")]
    Lists {
        /// A list, or the directory of the lists.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The lock between processes could not be taken.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The host's configuration could not be read.
    #[error("cannot list the archives that apt fetches from")]
    Targets(#[source] ProcessError),
    /// The host's lists do not name a Debian archive.
    #[error(
        "apt's sources on this host have no Debian archive, which has the guests' kernels: \
         run this in a container of Debian 12 or 13"
    )]
    NoArchive,
    /// A file or a directory of an [`Apt`] with lists of its own could not be written.
    #[error("cannot write {path}")]
    Write {
        /// A file, or a directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Stale for AptError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::NoArchive)
    }
}

/// An error that stale package lists may cause.
pub trait Stale: StdError + From<AptError> + Send + Sync + 'static {
    /// Whether stale lists caused the error.
    fn is_stale(&self) -> bool;
}

/// Whether apt failed because of its lists.
pub fn blames_lists(error: &ProcessError) -> bool {
    let ProcessError::Failed(failure) = error else {
        return false;
    };
    let has = |errors: &[&str]| {
        let mut lines = failure.everything.lines().filter(|line| line.starts_with("E: "));
        lines.any(|line| errors.iter().any(|error| line.contains(error)))
    };
    has(&STALE) && !has(&UNREACHABLE)
}

/// A Debian release whose packages are unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Debian 12: QEMU, the compilers and most kernels.
    Bookworm,
    /// Debian 13 with its backports: newer kernels, and a newer QEMU.
    Trixie,
}

/// apt's preferences for [`Release::Trixie`]. By default, apt takes a package from the backports only if Debian 13 has no
/// version of it. This takes QEMU, and the BIOS of the version that QEMU needs, from the backports.
const BACKPORTS: &str = "Package: src:qemu src:seabios\nPin: release n=trixie-backports\nPin-Priority: 500\n";

impl Release {
    /// The name in the archive's addresses.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }

    /// The name of an [`Apt`]'s directory and lock.
    fn home(self, arch: Arch) -> String {
        match self {
            Self::Bookworm => format!("apt-{}", arch.debian()),
            Self::Trixie => format!("apt-{}-{}", self.name(), arch.debian()),
        }
    }
}

/// An apt with its own set of lists.
#[derive(Debug)]
pub struct Apt {
    /// A configuration file that apt reads before the host's configuration; `None` if apt reads only the host's
    /// configuration.
    config: Option<PathBuf>,
    /// The file with preferences among versions of packages, if there are any.
    preferences: Option<PathBuf>,
    lists: PathBuf,
    may_update: bool,
    /// The cache that has the locks; `None` for the user's.
    locks: Option<Cache>,
    /// The name of the lock for updates.
    lock: String,
    updated: Mutex<bool>,
    arch: Arch,
    /// The release of the packages in the lists; `None` for the host's.
    release: Option<Release>,
    /// The [`Apt`] for packages of this machine's architecture; `None` if `self` is for that architecture.
    native: Option<&'static Apt>,
    /// The list of archives, which this process has yet to write; `None` if the host has it.
    sources: Option<Sources>,
}

/// The file with the archives of an [`Apt`] whose lists are in the cache.
#[derive(Debug)]
struct Sources {
    file: PathBuf,
    /// The host's apt, whose mirrors are used.
    host: &'static Apt,
    release: Release,
    /// Whether this process has written the file. The host's mirrors may have changed since another process wrote it.
    written: Mutex<bool>,
}

impl Apt {
    /// Returns the host's own apt, which installs packages. All calls in a process return the same [`Apt`].
    pub fn host() -> &'static Self {
        static HOST: LazyLock<Apt> = LazyLock::new(|| Apt {
            config: None,
            preferences: None,
            lists: LISTS.into(),
            may_update: sys::is_root(),
            locks: None,
            lock: "apt".to_owned(),
            updated: Mutex::new(false),
            arch: Arch::default(),
            release: None,
            native: None,
            sources: None,
        });
        &HOST
    }

    /// Returns the apt for packages of `arch` from Debian 12, which are unpacked. It has lists of its own, fetched from
    /// the host's mirrors. All calls in a process return the same [`Apt`].
    ///
    /// # Errors
    /// [`AptError`].
    pub fn of(arch: Arch) -> Result<&'static Self, AptError> {
        Self::of_release(Release::Bookworm, arch)
    }

    /// Like [`Apt::of`], for packages of `release`.
    ///
    /// # Errors
    /// [`AptError`].
    pub fn of_release(release: Release, arch: Arch) -> Result<&'static Self, AptError> {
        static APTS: [[OnceLock<Apt>; 2]; 2] = [const { [const { OnceLock::new() }; 2] }; 2];
        let [native_place, foreign_place] = match release {
            Release::Bookworm => &APTS[0],
            Release::Trixie => &APTS[1],
        };
        let (place, native) = if arch.is_native() {
            (native_place, None)
        } else {
            (foreign_place, Some(Self::of_release(release, Arch::default())?))
        };
        if let Some(apt) = place.get() {
            return Ok(apt);
        }
        let apt = Self::in_cache(Self::host(), native, Cache::user()?, release, arch)?;
        Ok(place.get_or_init(|| apt))
    }

    /// Returns an apt whose lists are in `cache`, fetched from the mirrors of `host`.
    fn in_cache(
        host: &'static Self,
        native: Option<&'static Self>,
        cache: &Cache,
        release: Release,
        arch: Arch,
    ) -> Result<Self, AptError> {
        let name = release.home(arch);
        let home = cache.state(&name)?;
        let lists = home.join("lists");
        for directory in [lists.join("partial"), home.join("cache/archives/partial")] {
            fs::create_dir_all(&directory).map_err(|e| unwritten(&directory, e))?;
        }
        let (config, status, sources) = (home.join("config"), home.join("status"), home.join("sources.list"));
        write(&status, "")?;
        let include = |config: &PathBuf| format!("#include \"{}\";\n", config.display());
        let text = format!(
            "{included}APT::Architecture \"{debian}\";\n\
            APT::Architectures {{ \"{debian}\"; }};\n\
            Dir::Etc::sourcelist \"{home}/sources.list\";\n\
            Dir::Etc::sourceparts \"-\";\n\
            Dir::Etc::preferences \"-\";\n\
            Dir::Etc::preferencesparts \"-\";\n\
            Dir::State::lists \"{home}/lists\";\n\
            Dir::State::status \"{home}/status\";\n\
            Dir::Cache \"{home}/cache\";\n\
            APT::Sandbox::User \"root\";\n\
            Acquire::Languages \"none\";\n",
            included = host.config.as_ref().map(include).unwrap_or_default(),
            debian = arch.debian(),
            home = home.display()
        );
        write(&config, &text)?;
        let preferences = (release == Release::Trixie).then(|| home.join("preferences"));
        if let Some(file) = &preferences {
            write(file, BACKPORTS)?;
        }
        Ok(Self {
            config: Some(config),
            preferences,
            lists,
            may_update: true,
            locks: Some(cache.clone()),
            lock: name,
            updated: Mutex::new(false),
            arch,
            release: Some(release),
            native,
            sources: Some(Sources { file: sources, host, release, written: Mutex::new(false) }),
        })
    }

    /// The architecture of the packages that this apt fetches.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The release of the packages that this apt fetches; `None` for the host's.
    pub fn release(&self) -> Option<Release> {
        self.release
    }

    /// The apt for packages of this machine's architecture.
    pub fn native(&self) -> &Self {
        self.native.unwrap_or(self)
    }

    /// The mirrors of Debian's archives that this apt has fetched lists from.
    fn mirrors(&self) -> Result<Vec<Mirror>, AptError> {
        let mut targets = self.get()?;
        targets.args(["indextargets", "--format", TARGETS, "Created-By: Packages"]);
        let targets = process::output(&mut targets).map_err(AptError::Targets)?;
        Ok(mirrors(&String::from_utf8_lossy(&targets)))
    }

    /// An `apt-get` without arguments.
    ///
    /// # Errors
    /// [`AptError`]: the archives cannot be listed.
    pub fn get(&self) -> Result<Command, AptError> {
        self.command("apt-get")
    }

    /// An `apt-cache` without arguments.
    ///
    /// # Errors
    /// [`AptError`]: the archives cannot be listed.
    pub fn cache(&self) -> Result<Command, AptError> {
        self.command("apt-cache")
    }

    /// Adds the state of the lists to `key`. The state changes whenever apt replaces a list, even if the new
    /// list has the same size and date.
    ///
    /// # Errors
    /// [`AptError::Lists`].
    pub fn state(&self, mut key: Key) -> Result<Key, AptError> {
        for path in self.list_files()? {
            let meta = match fs::metadata(&path) {
                // Another process is updating the lists.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                meta => meta.map_err(|e| failed(&path, e))?,
            };
            let state = format!("{} {}.{:09}", meta.len(), meta.ctime(), meta.ctime_nsec());
            key = key.text(&path.to_string_lossy(), &state);
        }
        Ok(key)
    }

    /// Runs `operation`. If it fails because the lists are stale, refreshes them and runs it again, so
    /// `operation` must look everything up in the lists each time. A process refreshes the lists at most
    /// once.
    ///
    /// # Errors
    /// The errors of `operation`, and [`AptError`].
    pub fn refreshing<T, E: Stale>(&self, mut operation: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        let before = self.state(Key::new("lists"))?.hex();
        let error = match operation() {
            Err(error) if error.is_stale() => error,
            done => return done,
        };
        let update = self.refresh(&before, error)?;
        // Try again even if the update failed: the failure may concern only sources that the operation does not need.
        operation().map_err(|error| match update {
            Err(source) if error.is_stale() => E::from(AptError::Update { operation: error.to_string(), source }),
            _ => error,
        })
    }

    /// Updates the lists, unless their state already differs from `before`. Returns the update's result. Fails
    /// with `error` if this process has updated the lists before, and with [`AptError::NotRoot`] if
    /// this process may not update the lists.
    fn refresh<E: Stale>(&self, before: &str, error: E) -> Result<Result<(), ProcessError>, E> {
        let mut updated = locked(&self.updated);
        let take = || match &self.locks {
            Some(cache) => cache.lock(&self.lock),
            None => Cache::user()?.lock(&self.lock),
        };
        let lock = self.may_update.then(take);
        let _lock = lock.transpose().map_err(AptError::from)?;
        if self.state(Key::new("lists"))?.hex() != before {
            return Ok(Ok(())); // another thread or process refreshed them
        }
        if *updated {
            return Err(error);
        }
        let problem =
            if self.list_files()?.is_empty() { "there are no package lists" } else { "package lists are stale" };
        if !self.may_update {
            let source = error.into();
            return Err(AptError::NotRoot { problem, source }.into());
        }
        *updated = true;
        let step = Step::new(format!("{error}; {problem}: running apt-get update"));
        let mut update = self.get()?;
        update.args(["-q", "-o", UPDATE_OR_FAIL, "update"]);
        let result = process::output(&mut update).map(drop);
        step.done();
        Ok(result)
    }

    fn list_files(&self) -> Result<Vec<PathBuf>, AptError> {
        let entries = match fs::read_dir(&self.lists) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
        };
        let mut files: Vec<PathBuf> = entries
            .map_err(|source| failed(&self.lists, source))?
            .iter()
            .filter(|entry| entry.file_name().to_string_lossy().contains("Packages"))
            .map(fs::DirEntry::path)
            .collect();
        files.sort();
        Ok(files)
    }

    fn command(&self, program: &str) -> Result<Command, AptError> {
        if let Some(sources) = &self.sources {
            sources.write(self.arch)?;
        }
        let mut command = Command::new(program);
        command.env("LC_ALL", "C"); // failures are recognised by their English messages
        if let Some(config) = &self.config {
            command.env("APT_CONFIG", config);
        }
        if self.sources.is_some() {
            // The host's release, if its configuration names one, is not in these lists.
            command.args(["-o", "APT::Default-Release="]);
            // Images of containers turn apt's cache off. Without it, apt takes over a second to read these lists.
            let cache = self.lists.with_file_name("cache").join("pkgcache.bin");
            command.args(["-o", &format!("Dir::Cache::pkgcache={}", cache.display())]);
        }
        if let Some(file) = &self.preferences {
            command.args(["-o", &format!("Dir::Etc::preferences={}", file.display())]);
        }
        Ok(command)
    }
}

impl Sources {
    fn write(&self, arch: Arch) -> Result<(), AptError> {
        let mut written = locked(&self.written);
        if *written {
            return Ok(());
        }
        let mirrors = self.host.refreshing(|| match self.host.mirrors()? {
            mirrors if mirrors.is_empty() => Err(AptError::NoArchive),
            mirrors => Ok(mirrors),
        })?;
        write(&self.file, &mirrors.iter().map(|mirror| mirror.lines(self.release, arch)).collect::<String>())?;
        *written = true;
        Ok(())
    }
}

/// A mirror of one of Debian's archives.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mirror {
    address: String,
    /// Whether the archive has only security updates.
    security: bool,
}

impl Mirror {
    /// The lines about `release` in a list of archives. Only programs of this machine's architecture are built from
    /// Debian's sources, and only from those of Debian 12.
    fn lines(&self, release: Release, arch: Arch) -> String {
        let name = release.name();
        let suites = match (self.security, release) {
            (true, _) => vec![format!("{name}-security")],
            (false, Release::Bookworm) => vec![name.to_owned()],
            (false, Release::Trixie) => vec![name.to_owned(), format!("{name}-backports")],
        };
        let types = [("deb", "Packages"), ("deb-src", "Sources")];
        let types = if arch.is_native() && release == Release::Bookworm { &types[..] } else { &types[..1] };
        let line = |suite: &String, (kind, list): &(&str, &str)| {
            format!("{kind} [signed-by={KEYRING} target={list}] {} {suite} main\n", self.address)
        };
        suites.iter().flat_map(|suite| types.iter().map(move |kind| line(suite, kind))).collect()
    }
}

/// Finds Debian's own archives in `targets`, which is the output of `apt-get indextargets` in the format [`TARGETS`].
fn mirrors(targets: &str) -> Vec<Mirror> {
    let mut mirrors: Vec<Mirror> = Vec::new();
    for target in targets.lines() {
        let parts: Vec<&str> = target.split('|').collect();
        let (security, address) = match parts[..] {
            ["Debian", "Debian", "main", address] => (false, address),
            ["Debian", "Debian-Security", "main", address] => (true, address),
            _ => continue,
        };
        let mirror = Mirror { address: address.to_owned(), security };
        // An archive has several suites.
        if !mirrors.contains(&mirror) {
            mirrors.push(mirror);
        }
    }
    mirrors
}

fn locked(flag: &Mutex<bool>) -> MutexGuard<'_, bool> {
    flag.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces the file `path`, unless it already contains `text`. The apt of another process may be reading the file.
fn write(path: &Path, text: &str) -> Result<(), AptError> {
    if fs::read(path).is_ok_and(|found| found == text.as_bytes()) {
        return Ok(());
    }
    let home = path.parent().unwrap_or(path);
    let written = tempfile::NamedTempFile::new_in(home).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.persist(path).map_err(|error| error.error)
    });
    written.map(drop).map_err(|e| unwritten(path, e))
}

fn unwritten(path: &Path, source: io::Error) -> AptError {
    AptError::Write { path: path.to_owned(), source }
}

fn failed(path: &Path, source: io::Error) -> AptError {
    AptError::Lists { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::archive::{Archive, Deb};
    use super::*;
    use crate::packages::{self, PackageError};
    use vpmu_errors::chain;

    const NAME: &str = "linux-kbuild-6.1";

    /// Looks up the package `NAME` and fetches it. Returns the version that the fetched package contains as a file.
    fn fetch(apt: &Apt) -> Result<String, PackageError> {
        let directory = tempfile::tempdir().unwrap();
        apt.refreshing(|| {
            let (package, _) = packages::candidate(apt, NAME)?;
            packages::unpack(apt, &package, directory.path(), &Step::new("fetching"))
        })?;
        Ok(fs::read_to_string(directory.path().join("usr/share").join(NAME)).unwrap())
    }

    /// An archive that has replaced version 1 with version 2, while apt's lists still name version 1.
    fn stale() -> (Archive, Deb, Deb) {
        let archive = Archive::new();
        let (first, second) = (Deb::new(NAME, "6.1.1-1"), Deb::new(NAME, "6.1.2-1"));
        archive.publish(from_ref(&first), &[]);
        archive.update_lists();
        archive.publish(from_ref(&second), &[]);
        (archive, first, second)
    }

    #[test]
    fn package_replaced_in_archive_is_fetched_after_one_refresh() {
        let (archive, first, second) = stale();
        assert_eq!(fetch(&archive.apt()).unwrap(), "6.1.2-1");
        assert_eq!(archive.answers_for(&first), [404]);
        assert_eq!(archive.answers_for(&second), [200]);
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn package_missing_after_refresh_fails_with_name_and_cause() {
        let (archive, _, second) = stale();
        archive.drop_file(&second);
        let apt = archive.apt();
        for _ in 0..2 {
            let error = fetch(&apt).unwrap_err();
            assert!(matches!(error, PackageError::Fetch { .. }), "{error:?}");
            let error = chain(&error);
            assert!(error.contains("cannot fetch linux-kbuild-6.1 6.1.2-1"), "{error}");
            assert!(error.contains("404"), "{error}");
            assert_eq!(archive.updates(), 2, "one refresh for the whole process");
        }
        assert_eq!(archive.answers_for(&second), [404, 404]);
    }

    #[test]
    fn package_is_fetched_when_there_are_no_lists() {
        let archive = Archive::new();
        let deb = Deb::new(NAME, "6.1.1-1");
        archive.publish(from_ref(&deb), &[]);
        assert_eq!(fetch(&archive.apt()).unwrap(), "6.1.1-1");
        assert_eq!(archive.answers_for(&deb), [200]);
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn package_is_fetched_when_the_directory_of_lists_is_missing() {
        let archive = Archive::new();
        archive.publish(&[Deb::new(NAME, "6.1.1-1")], &[]);
        let apt = archive.apt();
        fs::remove_dir_all(&apt.lists).unwrap();
        assert_eq!(fetch(&apt).unwrap(), "6.1.1-1");
    }

    #[test]
    fn package_unknown_to_fresh_lists_fails_after_one_refresh() {
        let archive = Archive::new();
        archive.publish(&[], &[]);
        archive.update_lists();
        let error = fetch(&archive.apt()).unwrap_err();
        assert!(matches!(&error, PackageError::NoPackage(name) if name == NAME), "{error:?}");
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn stale_lists_of_ordinary_user_fail_with_remedy_and_cause() {
        let (archive, ..) = stale();
        let error = chain(&fetch(&archive.user_apt()).unwrap_err());
        let remedy = "package lists are stale: run `sudo apt-get update`, then try again: \
            cannot fetch linux-kbuild-6.1 6.1.1-1: ";
        assert!(error.starts_with(remedy) && error.contains("404"), "{error}");
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn missing_lists_of_ordinary_user_fail_with_remedy() {
        let archive = Archive::new();
        let error = chain(&fetch(&archive.user_apt()).unwrap_err());
        let remedy = "there are no package lists: run `sudo apt-get update`, then try again: ";
        assert!(error.starts_with(remedy), "{error}");
        assert_eq!(archive.updates(), 0);
    }

    #[test]
    fn lists_refreshed_by_another_process_are_not_fetched_again() {
        let (archive, ..) = stale();
        let apt = archive.apt();
        let mut tries = 0;
        let directory = tempfile::tempdir().unwrap();
        apt.refreshing(|| {
            let (package, _) = packages::candidate(&apt, NAME)?;
            if tries == 0 {
                archive.update_lists();
            }
            tries += 1;
            packages::unpack(&apt, &package, directory.path(), &Step::new("fetching"))
        })
        .unwrap();
        assert_eq!(tries, 2);
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn threads_with_stale_lists_refresh_them_once() {
        let (archive, ..) = stale();
        let apt = archive.apt();
        std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(|| fetch(&apt).unwrap()));
            assert_eq!(threads.map(|t| t.join().unwrap()), ["6.1.2-1"; 2]);
        });
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn update_that_fails_for_another_source_does_not_stop_the_fetch() {
        let (archive, ..) = stale();
        archive.set_sources(Release::Bookworm.name(), &["debian", "no-such-archive"]);
        assert_eq!(fetch(&archive.apt()).unwrap(), "6.1.2-1");
        let mut update = archive.apt().get().unwrap();
        update.args(["-o", UPDATE_OR_FAIL, "update"]);
        let failed = process::output(&mut update).unwrap_err();
        assert!(failed.to_string().contains("no-such-archive"), "{failed}");
    }

    #[test]
    fn failed_update_is_the_cause_when_the_fetch_fails_again() {
        let archive = Archive::new(); // publishes nothing: the update gets status 404
        let error = chain(&fetch(&archive.apt()).unwrap_err());
        let begin = "Debian's lists have no package linux-kbuild-6.1; \
            `apt-get update` failed before that: apt-get failed";
        assert!(error.starts_with(begin), "{error}");
    }

    #[test]
    fn unreachable_archive_is_not_blamed_on_the_lists() {
        let (mut archive, ..) = stale();
        archive.shut_down();
        let apt = archive.apt();
        let error = fetch(&apt).unwrap_err();
        assert!(!error.is_stale(), "{error:?}");
        assert!(chain(&error).contains("connect to 127.0.0.1:"), "{error:?}");
        assert!(!*apt.updated.lock().unwrap());
    }

    #[test]
    fn mirrors_are_only_those_of_debian_main() {
        let targets = "Debian|Debian|main|http://deb.example/debian/\n\
            Debian|Debian|main|http://deb.example/debian/\n\
            Debian|Debian|contrib|http://deb.example/debian/\n\
            Debian|Debian debug|main|http://deb.example/debian-debug/\n\
            Debian|Debian-Security|main|http://deb.example/security/\n\
            Other|Debian|main|http://other.example/\nbroken\n";
        let mirrors = mirrors(targets);
        let lines: String = mirrors.iter().map(|mirror| mirror.lines(Release::Bookworm, Arch::Aarch64)).collect();
        let signed = format!("deb [signed-by={KEYRING} target=Packages]");
        let expected = format!(
            "{signed} http://deb.example/debian/ bookworm main\n\
            {signed} http://deb.example/security/ bookworm-security main\n"
        );
        assert_eq!(lines, expected);
        assert!(mirrors[0].lines(Release::Bookworm, Arch::X86_64).contains("deb-src "));
        let lines: String = mirrors.iter().map(|mirror| mirror.lines(Release::Trixie, Arch::X86_64)).collect();
        let expected = format!(
            "{signed} http://deb.example/debian/ trixie main\n\
            {signed} http://deb.example/debian/ trixie-backports main\n\
            {signed} http://deb.example/security/ trixie-security main\n"
        );
        assert_eq!(lines, expected);
    }

    /// The apt for `arch` on a host that fetches from `archive`.
    fn in_cache(archive: &Archive, arch: Arch) -> Apt {
        of_release(archive, Release::Bookworm, arch)
    }

    fn of_release(archive: &Archive, release: Release, arch: Arch) -> Apt {
        let host: &'static Apt = Box::leak(Box::new(archive.apt()));
        let cache = Cache::at(archive.root().join("cache"));
        Apt::in_cache(host, None, &cache, release, arch).unwrap()
    }

    #[test]
    fn of_the_backports_only_qemu_and_its_bios_are_taken() {
        let archive = Archive::new();
        archive.publish(&[Deb::new("other", "1")], &[]);
        let of = |name: &str, source: &str, version: &str| {
            let mut deb = Deb::new(name, version);
            deb.fields = format!("Source: {source}\n");
            deb
        };
        let debs = |version| {
            [of("qemu-system-x86", "qemu", version), of("seabios", "seabios", version), of("libc6", "glibc", version)]
        };
        archive.publish_next(&debs("1"), &debs("2"));
        let apt = of_release(&archive, Release::Trixie, Arch::X86_64);
        let names = ["qemu-system-x86", "seabios", "libc6"];
        let candidates = apt.refreshing(|| {
            let versions = names.map(|name| packages::candidate(&apt, name).map(|(package, _)| package.version));
            versions.into_iter().collect::<Result<Vec<_>, PackageError>>()
        });
        assert_eq!(candidates.unwrap(), ["2", "2", "1"]);
    }

    #[test]
    fn package_of_another_architecture_is_fetched_from_the_hosts_archive() {
        let archive = Archive::new();
        let mut foreign = Deb::new(NAME, "6.1.3-1");
        foreign.arch = Some(Arch::Aarch64);
        archive.publish(&[Deb::new("other", "1"), foreign], &[]);
        assert_eq!(fetch(&in_cache(&archive, Arch::Aarch64)).unwrap(), "6.1.3-1");
        let error = fetch(&in_cache(&archive, Arch::X86_64)).unwrap_err();
        assert!(matches!(error, PackageError::NoPackage(_)), "{error:?}");
    }

    #[test]
    fn package_on_host_of_another_release_is_the_pinned_releases() {
        let archive = Archive::new();
        archive.set_sources(archive::NEXT, &["debian"]);
        archive.publish(&[Deb::new(NAME, "6.1.3-1")], &[]);
        archive.update_lists();
        let config = archive.root().join("etc/apt/apt.conf.d/release");
        fs::write(config, format!("APT::Default-Release \"{}\";\n", archive::NEXT)).unwrap();
        let error = fetch(&archive.apt()).unwrap_err();
        assert!(matches!(error, PackageError::NoPackage(_)), "{error:?}");
        assert_eq!(fetch(&in_cache(&archive, Arch::X86_64)).unwrap(), "6.1.3-1");
    }

    #[test]
    fn host_without_debians_archive_fails_with_remedy() {
        let archive = Archive::new();
        archive.set_sources(Release::Bookworm.name(), &[]);
        let error = chain(&fetch(&in_cache(&archive, Arch::X86_64)).unwrap_err());
        assert!(error.starts_with("apt's sources on this host have no Debian archive, "), "{error}");
        assert!(error.contains("run this in a container of Debian 12 or 13"), "{error}");
    }

    #[test]
    fn apt_reports_in_english_whatever_the_locale() {
        for command in [Apt::host().get().unwrap(), Apt::host().cache().unwrap()] {
            let set = command.get_envs().find(|(name, _)| *name == "LC_ALL");
            assert_eq!(set.unwrap().1.unwrap(), "C");
        }
    }

    #[test]
    fn apt_of_another_process_keeps_its_files() {
        let archive = Archive::new();
        archive.publish(&[Deb::new(NAME, "1")], &[]);
        let files = || {
            let apt = in_cache(&archive, Arch::Aarch64);
            apt.get().unwrap();
            let config = apt.config.unwrap();
            ["config", "sources.list", "status"].map(|name| {
                let meta = fs::metadata(config.with_file_name(name)).unwrap();
                (meta.ino(), meta.ctime(), meta.ctime_nsec())
            })
        };
        assert_eq!(files(), files());
    }
}
