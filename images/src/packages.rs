//! Fetches Debian packages and unpacks them, without installing them. Finds the packages of a kernel by their
//! names and dependencies.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::apt::{self, Apt, AptError, Release, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::file_error::FileError;
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::progress::Step;

/// To look packages up and fetch them.
const NEEDS: [Prerequisite; 2] = [Prerequisite::Apt, Prerequisite::Keyring];
/// The newest series of kernels that Debian 12 has.
const NEWEST_OF_BOOKWORM: [u64; 2] = [6, 12];
/// Dependencies of the packages of compilers and build tools that a build of this driver does not use, or takes from the
/// host.
const UNUSED: [&str; 2] = ["binutils-x86-64-linux-gnu", "pahole"];

/// Errors of fetching packages.
#[derive(Debug, Error)]
pub enum PackageError {
    /// The lists have no kernel of that version.
    #[error("Debian's lists have no cloud kernel {wanted}; they have: {known}")]
    NoKernel {
        /// The requested version.
        wanted: String,
        /// The versions that the lists have.
        known: String,
    },
    /// The lists have no package of that name.
    #[error("Debian's lists have no package {0}")]
    NoPackage(String),
    /// The lists could not be searched.
    #[error("cannot look up {what} in Debian's lists")]
    Lookup {
        /// A package, or names.
        what: String,
        /// The output of apt.
        #[source]
        source: ProcessError,
    },
    /// The lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The host lacks something.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// Fetching failed.
    #[error("cannot fetch {package}")]
    Fetch {
        /// Its name and version.
        package: String,
        /// The output of apt.
        #[source]
        source: ProcessError,
    },
    /// Unpacking failed.
    #[error("cannot unpack {package}")]
    Unpack {
        /// Its name.
        package: String,
        /// The output of dpkg.
        #[source]
        source: ProcessError,
    },
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Stale for PackageError {
    fn is_stale(&self) -> bool {
        match self {
            Self::NoKernel { .. } | Self::NoPackage(_) => true,
            Self::Fetch { source, .. } => apt::blames_lists(source),
            _ => false,
        }
    }
}

/// One version of one package.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its Debian version.
    pub version: String,
}

/// Everything that belongs to one kernel.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct KernelPackages {
    /// The release, as `uname -r` prints it.
    pub release: String,
    /// Image and headers; also the build tools if the kernel is for this machine's architecture.
    pub packages: Vec<Package>,
    /// Build tools for this machine's architecture if the kernel is for another architecture.
    #[serde(default)]
    pub tools: Vec<Package>,
    /// The compiler that built the kernel, like `gcc-14`, if its package is one of `packages`. Those then also have the
    /// libraries of the compiler and of the build tools.
    #[serde(default)]
    pub compiler: Option<String>,
}

/// The Debian release that has the newest kernel whose version begins with `wanted`.
pub fn release_of(wanted: &str) -> Release {
    match numbers(wanted).get(..2) {
        Some(series) if series > &NEWEST_OF_BOOKWORM[..] => Release::Trixie,
        _ => Release::Bookworm,
    }
}

/// The packages of the newest kernel whose version begins with `wanted`, say `6.1`. Does not refresh stale
/// lists: call it within [`Apt::refreshing`].
///
/// # Errors
/// [`PackageError`].
pub fn resolve(apt: &Apt, cache: &Cache, wanted: &str) -> Result<KernelPackages, PackageError> {
    // Keep the result: apt takes most of a second to read its lists, and the result changes only if the lists change.
    let mut key = Key::new("packages").text("wanted", wanted);
    if !apt.arch().is_native() {
        key = apt.native().state(key.text("arch", apt.arch().debian()))?;
    }
    let key = apt.state(key)?.hex();
    keep(cache, &apt.arch().kind("packages"), &key, || {
        let step = Step::new(format!("looking for kernel {wanted}"));
        let found = ask(apt, wanted)?;
        step.done();
        Ok(found)
    })
}

/// Returns the cached result of kind `kind` for `key`. If the cache has none, calls `ask` and caches its result.
pub(crate) fn keep<T, E>(cache: &Cache, kind: &str, key: &str, ask: impl FnOnce() -> Result<T, E>) -> Result<T, E>
where
    T: Serialize + DeserializeOwned,
    E: From<CacheError> + From<FileError>,
{
    const FILE: &str = "packages.json";
    let place = cache.get(kind, key, |dir| {
        let file = dir.join(FILE);
        let text = serde_json::to_vec_pretty(&ask()?).map_err(io::Error::from);
        text.and_then(|text| fs::write(&file, text)).map_err(FileError::at(&file))?;
        Ok::<_, E>(())
    })?;
    let file = place.join(FILE);
    let text = fs::read(&file).map_err(FileError::at(&file))?;
    let answer = serde_json::from_slice(&text).map_err(io::Error::from);
    Ok(answer.map_err(FileError::at(&file))?)
}

/// Fetches `package` and unpacks it into `root`. Adds only the package's files to `root`, not the downloaded archive.
///
/// # Errors
/// [`PackageError`].
pub fn unpack(apt: &Apt, package: &Package, root: &Path, step: &Step) -> Result<(), PackageError> {
    let name = &package.name;
    step.detail(&format!("{name} {}", package.version));
    let download = tempfile::tempdir_in(root).map_err(FileError::at(root))?;
    let mut fetch = apt.get()?;
    fetch.args(["-q", "download"]);
    fetch.arg(format!("{name}={}", package.version)).current_dir(download.path());
    process::output(&mut fetch)
        .map_err(|source| PackageError::Fetch { package: format!("{name} {}", package.version), source })?;
    let files = fs::read_dir(download.path()).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    for file in files.map_err(FileError::at(download.path()))? {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(file.path()).arg(root);
        process::output(&mut unpack).map_err(|source| PackageError::Unpack { package: name.clone(), source })?;
    }
    Ok(())
}

/// Asks apt which packages make up the newest kernel `wanted`.
fn ask(apt: &Apt, wanted: &str) -> Result<KernelPackages, PackageError> {
    prerequisites::ensure(&NEEDS)?;
    let names = process::output(apt.cache()?.args(["pkgnames", "linux-image-"]));
    let names = names.map_err(|source| PackageError::Lookup { what: "the names of kernels".to_owned(), source })?;
    let names = String::from_utf8_lossy(&names).into_owned();
    let of_arch = |name| release(apt.arch(), name);
    let releases: Vec<&str> = names.lines().filter_map(of_arch).collect();
    let release = newest(&releases, wanted)
        .ok_or_else(|| PackageError::NoKernel { wanted: wanted.to_owned(), known: known(&releases) })?;
    let headers = format!("linux-headers-{release}");
    let (image, parts) = candidate(apt, &format!("linux-image-{release}"))?;
    let (headers, depends) = candidate(apt, &headers)?;
    let (mut packages, mut tools) = (vec![image, headers], Vec::new());
    for name in parts.iter().filter(|name| is_part(name, release)) {
        packages.push(candidate(apt, name)?.0);
    }
    for name in &depends {
        if is_tool(name) && !apt.arch().is_native() {
            tools.push(candidate(apt.native(), name)?.0);
        } else if is_tool(name) || is_common(name) {
            packages.push(candidate(apt, name)?.0);
        }
    }
    let mut compiler = None;
    if apt.release() == Some(Release::Trixie) {
        // The host's C library may be too old for the build tools, and its compiler for the kernel's headers.
        let names: Vec<&str> =
            depends.iter().map(String::as_str).filter(|name| is_tool(name) || is_compiler(name)).collect();
        for package in closure(apt, &names, &UNUSED)? {
            if !packages.contains(&package) {
                packages.push(package);
            }
        }
        let name = names.iter().find(|name| is_compiler(name));
        compiler = name.map(|name| name.trim_end_matches("-for-host").to_owned());
    }
    Ok(KernelPackages { release: release.to_owned(), packages, tools, compiler })
}

/// Whether the package has a part of the kernel's image. Since Linux 7.2, the image's package is empty and depends on
/// its parts.
fn is_part(name: &str, release: &str) -> bool {
    name.strip_prefix("linux-").is_some_and(|part| part.ends_with(release))
}

/// Whether the package has the compiler that built the kernel.
fn is_compiler(name: &str) -> bool {
    name.starts_with("gcc-")
}

/// Whether the package has the headers that kernels of all flavours share.
fn is_common(name: &str) -> bool {
    name.starts_with("linux-headers-") && name.contains("-common")
}

/// Whether the package has programs that run on the machine that builds modules.
fn is_tool(name: &str) -> bool {
    name.starts_with("linux-kbuild-")
}

/// Returns the package's candidate version and the names of its dependencies.
pub(crate) fn candidate(apt: &Apt, name: &str) -> Result<(Package, Vec<String>), PackageError> {
    let text = show(apt, name)?;
    let field = |label: &str| text.lines().find_map(|line| line.strip_prefix(label));
    let version = field("Version: ").ok_or_else(|| PackageError::NoPackage(name.to_owned()))?.to_owned();
    Ok((Package { name: name.to_owned(), version }, depends(field("Depends: ").unwrap_or(""))))
}

/// Returns the packages `names` and all their dependencies except `without`.
pub(crate) fn closure(apt: &Apt, names: &[&str], without: &[&str]) -> Result<Vec<Package>, PackageError> {
    let mut found: BTreeMap<String, Package> = BTreeMap::new();
    let mut wanted: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    while let Some(name) = wanted.pop() {
        if found.contains_key(&name) {
            continue;
        }
        let (package, depends) = candidate(apt, &name)?;
        found.insert(name, package);
        let others = depends.into_iter();
        wanted.extend(others.filter(|name| !without.contains(&name.as_str())));
    }
    Ok(found.into_values().collect())
}

/// The record of the package's candidate version.
pub(crate) fn show(apt: &Apt, name: &str) -> Result<String, PackageError> {
    prerequisites::ensure(&NEEDS)?;
    let mut command = apt.cache()?;
    command.args(["show", "--no-all-versions", name]);
    match process::output(&mut command) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(source) if apt::blames_lists(&source) => Err(PackageError::NoPackage(name.to_owned())),
        Err(source) => Err(PackageError::Lookup { what: name.to_owned(), source }),
    }
}

/// The first alternative of each dependency, by name.
pub(crate) fn depends(field: &str) -> Vec<String> {
    // A name may have an architecture, as in `perl:any`.
    let name = |item: &str| {
        let end = |c: char| c.is_whitespace() || c == ':';
        item.trim_start().split(end).next().unwrap_or("").to_owned()
    };
    field.split(',').map(name).filter(|name| !name.is_empty()).collect()
}

/// The release in a package's name, like `6.1.0-56-cloud-amd64`; `None` for meta-packages, debug symbols
/// and the like.
fn release(arch: Arch, name: &str) -> Option<&str> {
    let release = name.strip_prefix("linux-image-")?;
    let version = release.strip_suffix(arch.flavour())?;
    let numbers = version.split('.').take_while(|p| p.starts_with(|c: char| c.is_ascii_digit()));
    (numbers.count() >= 3).then_some(release)
}

fn newest<'a>(releases: &[&'a str], wanted: &str) -> Option<&'a str> {
    let fits = |release: &&&str| match release.strip_prefix(wanted) {
        Some(rest) => !rest.starts_with(|c: char| c.is_ascii_digit()),
        None => false,
    };
    releases.iter().filter(fits).max_by_key(|release| numbers(release)).copied()
}

/// The numbers in a version, by which versions are ordered.
fn numbers(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// The series of `releases`, like `6.1, 6.12`.
fn known(releases: &[&str]) -> String {
    let mut series: Vec<Vec<u64>> = releases.iter().map(|r| numbers(r).into_iter().take(2).collect()).collect();
    series.sort();
    series.dedup();
    let text = |s: &Vec<u64>| s.iter().map(u64::to_string).collect::<Vec<_>>().join(".");
    if series.is_empty() { "none".to_owned() } else { series.iter().map(text).collect::<Vec<_>>().join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apt::archive::{Archive, Deb};

    const NAMES: [&str; 8] = [
        "linux-image-6.12.117+deb12-cloud-arm64",
        "linux-image-cloud-amd64",
        "linux-image-6.12-cloud-amd64",
        "linux-image-6.1.0-9-cloud-amd64",
        "linux-image-6.1.0-56-cloud-amd64",
        "linux-image-6.12.9+deb12-cloud-amd64",
        "linux-image-6.12.117+deb12-cloud-amd64",
        "linux-image-6.1.0-57-cloud-amd64-dbg",
    ];

    #[test]
    fn packages_come_with_their_dependencies_but_those_left_out() {
        let archive = Archive::new();
        let deb = |name: &str, depends: &str| {
            let mut deb = Deb::new(name, "1");
            deb.fields = format!("Depends: {depends}\n");
            deb
        };
        let debs = [
            deb("a", "b:any (= 1), libc6 (>= 2), gcc | clang"),
            deb("b", "a, c"),
            Deb::new("c", "2"),
            Deb::new("d", "3"),
        ];
        archive.publish(&debs, &[]);
        archive.update_lists();
        let found = closure(&archive.apt(), &["a"], &["libc6", "gcc"]).unwrap();
        let names: Vec<_> = found.iter().map(|p| (&*p.name, &*p.version)).collect();
        assert_eq!(names, [("a", "1"), ("b", "1"), ("c", "2")]);
    }

    #[test]
    fn newest_release_of_series_compares_numbers() {
        let of = |arch| move |name| release(arch, name);
        let names = || NAMES.iter().copied();
        let releases: Vec<&str> = names().filter_map(of(Arch::X86_64)).collect();
        assert_eq!(releases.len(), 4);
        let others: Vec<&str> = names().filter_map(of(Arch::Aarch64)).collect();
        assert_eq!(others, ["6.12.117+deb12-cloud-arm64"]);
        let newest = |wanted| newest(&releases, wanted);
        assert_eq!(newest("6.1"), Some("6.1.0-56-cloud-amd64"));
        assert_eq!(newest("6.12"), Some("6.12.117+deb12-cloud-amd64"));
        assert_eq!(newest("6.1.0-9"), Some("6.1.0-9-cloud-amd64"));
        assert_eq!(newest("5.10"), None);
        assert_eq!(known(&releases), "6.1, 6.12");
        assert_eq!(known(&[]), "none");
    }

    #[test]
    fn kernel_newer_than_those_of_debian_12_is_of_debian_13() {
        for old in ["6.1", "6.12", "6.1.0-56-cloud-amd64", "6.12.117+deb12-cloud-amd64", "6", "odd"] {
            assert_eq!(release_of(old), Release::Bookworm, "{old}");
        }
        for new in ["6.13", "7.0", "7.3", "7.3.4+deb13-cloud-amd64"] {
            assert_eq!(release_of(new), Release::Trixie, "{new}");
        }
    }

    #[test]
    fn parts_of_an_image_have_its_release_in_their_names() {
        let release = "7.3.4+deb13-cloud-amd64";
        let depends = depends(
            "dracut | initramfs-tools, linux-base (>= 4), linux-base-7.3.4+deb13-cloud-amd64 (= 1), \
            linux-binary-7.3.4+deb13-cloud-amd64 (= 1), linux-modules-7.3.4+deb13-cloud-amd64 (= 1)",
        );
        let parts: Vec<_> = depends.iter().filter(|name| is_part(name, release)).collect();
        assert_eq!(parts, ["base", "binary", "modules"].map(|part| format!("linux-{part}-{release}")).each_ref());
    }

    #[test]
    fn dependencies_by_name() {
        let names = depends("linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= 6), gcc-12 | gcc");
        assert_eq!(names, ["linux-headers-6.1.0-56-common", "linux-kbuild-6.1", "gcc-12"]);
        assert_eq!(names.iter().filter(|n| is_common(n)).count(), 1);
        assert_eq!(names.iter().filter(|n| is_tool(n)).count(), 1);
        assert!(depends("").is_empty());
    }
}
