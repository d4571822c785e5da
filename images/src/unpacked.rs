//! Gets files from Debian packages, which are unpacked, not installed: programs of another architecture with their
//! shared libraries, and firmware.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use object::read::elf::{Dyn, ElfFile64, ProgramHeader};
use object::{Endianness, elf};
use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::file_error::FileError;
use crate::packages::{self, Package, PackageError};
use crate::progress::Step;

/// Files for [`crate::Boot::files`]: path in the guest without the leading slash, contents.
pub type Files = Vec<(String, Vec<u8>)>;

/// Directories in which an architecture's loader looks for libraries, below the root.
const DIRECTORIES: [&str; 2] = ["lib", "usr/lib"];

/// Errors of getting the program.
#[derive(Debug, Error)]
pub enum UnpackedError {
    /// Its packages could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not a program.
    #[error("{path} is not a program")]
    NotProgram {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: object::Error,
    },
    /// The packages lack one of the program's libraries.
    #[error("{program} needs {library}, which is in none of the unpacked packages")]
    Library {
        /// The program.
        program: String,
        /// The library's name.
        library: String,
    },
}

impl Stale for UnpackedError {
    fn is_stale(&self) -> bool {
        match self {
            Self::Package(error) => error.is_stale(),
            Self::Apt(error) => error.is_stale(),
            _ => false,
        }
    }
}

/// Returns the program usr/bin/`name` of `package` as the file bin/`name`, and the shared libraries and the loader that
/// it needs.
///
/// # Errors
/// [`UnpackedError`].
pub fn program(cache: &Cache, arch: Arch, package: &str, name: &str) -> Result<Files, UnpackedError> {
    let root = directory(cache, Apt::of(arch)?, &[package])?;
    with_libraries(&root, arch, name)
}

/// Like [`program`], of a directory that has the package's files.
///
/// # Errors
/// [`UnpackedError`].
pub fn with_libraries(root: &Path, arch: Arch, name: &str) -> Result<Files, UnpackedError> {
    let library = |name: &str| {
        let directories = DIRECTORIES.map(|directory| root.join(directory));
        let triplet = arch.gnu().trim_end_matches('-');
        directories
            .into_iter()
            .flat_map(|directory| [directory.join(triplet), directory])
            .map(|directory| directory.join(name))
            .find(|path| path.is_file())
    };
    let program = root.join("usr/bin").join(name);
    let mut files = BTreeMap::from([(format!("bin/{name}"), read(&program)?)]);
    let (mut wanted, mut seen) = (vec![program], BTreeSet::new());
    while let Some(path) = wanted.pop() {
        for place in needed(&path, &read(&path)?)? {
            if !seen.insert(place.clone()) {
                continue;
            }
            let needed = place.rsplit('/').next().unwrap_or(&place);
            let found = library(needed)
                .ok_or_else(|| UnpackedError::Library { program: name.to_owned(), library: needed.to_owned() })?;
            files.insert(place, read(&found)?);
            wanted.push(found);
        }
    }
    Ok(files.into_iter().collect())
}

/// Returns a directory that has the files of `packages` and of their dependencies, as below the root of a host.
///
/// # Errors
/// [`UnpackedError`].
pub fn directory(cache: &Cache, apt: &Apt, packages: &[&str]) -> Result<PathBuf, UnpackedError> {
    directory_without(cache, apt, packages, &[])
}

/// Like [`directory`], without the packages `unused` and their dependencies.
///
/// # Errors
/// [`UnpackedError`].
pub fn directory_without(
    cache: &Cache,
    apt: &Apt,
    packages: &[&str],
    unused: &[&str],
) -> Result<PathBuf, UnpackedError> {
    // Look the packages up in each attempt, because refreshed lists may name other versions.
    apt.refreshing(|| unpack(apt, cache, packages, unused))
}

fn unpack(apt: &Apt, cache: &Cache, wanted: &[&str], unused: &[&str]) -> Result<PathBuf, UnpackedError> {
    let arch = apt.arch();
    let names = wanted.join(" ");
    let mut key = Key::new("unpacked").text("packages", &names);
    if !unused.is_empty() {
        key = key.text("unused", &unused.join(" "));
    }
    let key = apt.state(key)?;
    let kind = arch.kind("dependencies");
    let found: Vec<Package> = packages::keep(cache, &kind, &key.hex(), || {
        let step = Step::new(format!("looking for {names} for {arch}"));
        let found = packages::closure(apt, wanted, unused)?;
        step.done();
        Ok::<_, UnpackedError>(found)
    })?;
    let mut key = Key::new("unpacked");
    for package in &found {
        key = key.text(&package.name, &package.version);
    }
    cache.get(&arch.kind("unpacked"), &key.hex(), |root| {
        let step = Step::new(format!("getting {names} for {arch}"));
        for package in &found {
            packages::unpack(apt, package, root, &step)?;
        }
        step.done();
        Ok(())
    })
}

/// Returns a file's contents.
///
/// # Errors
/// [`UnpackedError::File`].
pub fn read(path: &Path) -> Result<Vec<u8>, UnpackedError> {
    Ok(fs::read(path).map_err(FileError::at(path))?)
}

/// Returns the paths of the libraries that an ELF file loads, and of its loader, without the leading slash.
fn needed(path: &Path, bytes: &[u8]) -> Result<Vec<String>, UnpackedError> {
    let wrong = |source| UnpackedError::NotProgram { path: path.to_owned(), source };
    parse(bytes).map_err(wrong)
}

fn parse(bytes: &[u8]) -> Result<Vec<String>, object::Error> {
    let file = ElfFile64::<Endianness>::parse(bytes)?;
    let endian = file.endian();
    let mut paths = Vec::new();
    for header in file.elf_program_headers() {
        if let Some(interpreter) = header.interpreter(endian, bytes)? {
            let path = String::from_utf8_lossy(interpreter);
            paths.push(path.trim_start_matches('/').to_owned());
        }
    }
    if let Some((entries, link)) = file.elf_section_table().dynamic(endian, bytes)? {
        let strings = file.elf_section_table().strings(endian, bytes, link)?;
        for entry in entries.iter().filter(|e| e.d_tag(endian) == elf::DT_NEEDED) {
            let name = entry.string(endian, strings)?;
            paths.push(format!("lib/{}", String::from_utf8_lossy(name)));
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_names_its_loader_and_its_libraries() {
        let shell = fs::canonicalize("/bin/sh").unwrap();
        let paths = parse(&fs::read(shell).unwrap()).unwrap();
        assert!(paths.iter().any(|path| path == "lib/libc.so.6"), "{paths:?}");
        assert!(paths.iter().any(|path| path.starts_with("lib") && path.contains("/ld-linux")), "{paths:?}");
    }

    #[test]
    fn file_that_is_not_a_program_is_named() {
        let error = needed(Path::new("/a/text"), b"text").unwrap_err();
        assert_eq!(error.to_string(), "/a/text is not a program");
    }
}
