//! Fetches the kernel's checkpatch.pl, and runs it on the driver without the rules that do not apply to this driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::file_error::FileError;
use crate::kernel::DEFAULT_SERIES;
use crate::module::{self, ModuleError};
use crate::packages::{self, PackageError};
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::progress::Step;

/// The script, and the files that it reads.
const SCRIPTS: [&str; 3] = ["scripts/checkpatch.pl", "scripts/spelling.txt", "scripts/const_structs.checkpatch"];
/// Headers that the driver shares with programs and the host, and the directory in which they are checked. In this
/// directory, checkpatch.pl does not demand that headers use the kernel's macros.
const SHARED: [&str; 2] = ["vpmu_abi.h", "vpmu_uapi.h"];
const SHARED_PLACE: &str = "include/uapi/linux";
/// Files, and the rules that each file must break because of its purpose.
const EXCEPTIONS: [(&str, &str); 2] = [
    // An out-of-tree driver supports more than one kernel version.
    ("compat.h", "LINUX_VERSION_CODE,CONSTANT_COMPARISON"),
    // An iterating macro uses its variable more than once.
    ("vpmu_file.h", "MACRO_ARG_REUSE"),
];

/// Errors of checking the style.
#[derive(Debug, Error)]
pub enum StyleError {
    /// The host lacks something.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// The script's package could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The driver's files cannot be listed.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The package does not unpack.
    #[error("cannot extract checkpatch.pl from the kernel's source")]
    Unpack(#[source] ProcessError),
    /// The script does not run.
    #[error("cannot run checkpatch.pl")]
    Run(#[source] ProcessError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Stale for StyleError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Package(error) if error.is_stale())
    }
}

/// Returns the messages of `checkpatch.pl --strict` about the driver's sources in `driver`, one per line.
///
/// # Errors
/// [`StyleError`].
pub fn check(cache: &Cache, driver: &Path) -> Result<Vec<String>, StyleError> {
    prerequisites::ensure(&[Prerequisite::Perl])?;
    let apt = Apt::of(Arch::default())?;
    let script = apt.refreshing(|| script(apt, cache))?;
    let copy = tempfile::tempdir().map_err(FileError::at(driver))?;
    let shared = copy.path().join(SHARED_PLACE);
    fs::create_dir_all(&shared).map_err(FileError::at(&shared))?;
    let mut complaints = Vec::new();
    for source in module::sources(driver)? {
        let name = source.file_name().unwrap_or_default().to_string_lossy();
        if !name.ends_with(".c") && !name.ends_with(".h") {
            continue;
        }
        let path = if SHARED.contains(&&*name) { format!("{SHARED_PLACE}/{name}") } else { name.to_string() };
        fs::copy(&source, copy.path().join(&path)).map_err(FileError::at(&source))?;
        complaints.extend(complaints_about(&script, copy.path(), &path, &name)?);
    }
    Ok(complaints)
}

fn complaints_about(script: &Path, directory: &Path, path: &str, name: &str) -> Result<Vec<String>, StyleError> {
    let mut command = Command::new("perl");
    command.arg(script).current_dir(directory);
    command.args(["--no-tree", "--strict", "--terse", "--show-types", "--no-summary"]);
    if let Some((_, rules)) = EXCEPTIONS.iter().find(|(file, _)| *file == name) {
        command.args(["--ignore", rules]);
    }
    command.args(["-f", path]);
    match process::output(&mut command) {
        Ok(_) => Ok(Vec::new()),
        // The script exits with an error if it reports anything.
        Err(ProcessError::Failed(failure)) if failure.everything.contains(&format!("{path}:")) => {
            Ok(failure.everything.lines().map(str::to_owned).collect())
        }
        Err(error) => Err(StyleError::Run(error)),
    }
}

/// The script of Debian's newest kernel of the default series.
fn script(apt: &Apt, cache: &Cache) -> Result<PathBuf, StyleError> {
    let name = format!("linux-source-{DEFAULT_SERIES}");
    let (package, _) = packages::candidate(apt, &name)?;
    let key = Key::new("checkpatch, recipe 1").text("version", &package.version);
    let place = cache.get("checkpatch", &key.hex(), |dir| {
        prerequisites::ensure(&[Prerequisite::Xz])?;
        let step = Step::new("getting the kernel's checkpatch.pl");
        let work = tempfile::tempdir_in(dir).map_err(FileError::at(dir))?;
        packages::unpack(apt, &package, work.path(), &step)?;
        step.detail("extracting the script from the source");
        let archive = format!("usr/src/{name}.tar.xz");
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(work.path().join(archive)).arg("-C").arg(dir);
        tar.args(SCRIPTS.map(|script| format!("{name}/{script}")));
        tar.arg("--strip-components=1");
        process::output(&mut tar).map_err(StyleError::Unpack)?;
        step.done();
        Ok::<_, StyleError>(())
    })?;
    Ok(place.join(SCRIPTS[0]))
}
