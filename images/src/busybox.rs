//! The shell and tools of guests and labs: a static busybox, from this host or from a package of another
//! architecture, and the names of its tools.

use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::file_error::FileError;
use crate::packages::{self, PackageError};
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::progress::Step;

const PACKAGE: &str = "busybox-static";
const PROGRAM: &str = "bin/busybox";
/// The program's own name. The program's list of tools contains this name, too, but only the other tools need a link
/// to the program.
const OWN: &str = "busybox";

/// Errors of getting busybox.
#[derive(Debug, Error)]
pub enum BusyboxError {
    /// The host lacks busybox.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// The package of busybox could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The program has no table of its tools.
    #[error("cannot find the table of tools in {0}")]
    Tools(PathBuf),
}

impl Stale for BusyboxError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Package(error) if error.is_stale())
    }
}

/// A static busybox for `arch`.
///
/// # Errors
/// [`BusyboxError`].
pub fn get(cache: &Cache, arch: Arch) -> Result<PathBuf, BusyboxError> {
    if arch.is_native() {
        prerequisites::ensure(&[Prerequisite::Busybox])?;
        return Ok(prerequisites::busybox().unwrap_or_default());
    }
    let apt = Apt::of(arch)?;
    apt.refreshing(|| {
        let key = apt.state(Key::new("busybox"))?.hex();
        let place = cache.get(&arch.kind("busybox"), &key, |root| {
            let step = Step::new(format!("getting busybox for {arch}"));
            let (package, _) = packages::candidate(apt, PACKAGE)?;
            packages::unpack(apt, &package, root, &step)?;
            step.done();
            Ok::<_, BusyboxError>(())
        })?;
        Ok(place.join(PROGRAM))
    })
}

/// The names of the tools in the program `busybox`, which need not run on this machine.
///
/// # Errors
/// [`BusyboxError`].
pub fn applets(busybox: &Path) -> Result<Vec<String>, BusyboxError> {
    let bytes = fs::read(busybox).map_err(FileError::at(busybox))?;
    table(&bytes).ok_or_else(|| BusyboxError::Tools(busybox.to_owned()))
}

/// The names in the program's table. They are sorted. A zero byte ends each name, and another zero byte
/// ends the table. The first two names are those of `test`: `[` and `[[`.
fn table(program: &[u8]) -> Option<Vec<String>> {
    const FIRST: &[u8] = b"[\0[[\0";
    let begin = program.windows(FIRST.len()).position(|w| w == FIRST)?;
    let table = &program[begin..];
    let end = table.windows(2).position(|w| w == [0, 0])?;
    let names = table[..end].split(|&byte| byte == 0);
    let names = names.map(|name| String::from_utf8(name.to_vec()).ok());
    let names: Option<Vec<String>> = names.collect();
    names.map(|names| names.into_iter().filter(|name| name != OWN).collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process;

    #[test]
    fn table_of_this_hosts_busybox_is_what_it_lists() {
        let cache = Cache::user().unwrap();
        let busybox = get(cache, Arch::default()).unwrap();
        let list = process::output(Command::new(&busybox).arg("--list")).unwrap();
        let list = String::from_utf8(list).unwrap();
        let expected: Vec<&str> = list.lines().filter(|name| *name != OWN).collect();
        assert_eq!(applets(&busybox).unwrap(), expected);
    }

    #[test]
    fn program_without_a_table_is_named() {
        let error = applets(Path::new("/etc/passwd")).unwrap_err();
        assert!(error.to_string().contains("/etc/passwd"), "{error}");
        assert_eq!(table(b"x\0[\0[[\0sh"), None);
        assert_eq!(table(b"x [\0[[\0busybox\0sh\0\0y").unwrap(), ["[", "[[", "sh"]);
    }
}
