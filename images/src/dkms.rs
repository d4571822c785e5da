//! Builds and installs the driver with Debian's DKMS, as distributions do for each new kernel. DKMS works in separate
//! directories, so the host's modules stay untouched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::file_error::FileError;
use crate::kernel::Kernel;
use crate::module::{self, ModuleError};
use crate::packages::{self, PackageError};
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::progress::Step;

const CONFIGURATION: &str = "dkms.conf";

/// Errors of installing the driver with DKMS.
#[derive(Debug, Error)]
pub enum DkmsError {
    /// The host lacks something.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// DKMS's package could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The driver's files cannot be listed.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The kernel is not Debian's.
    #[error("DKMS needs a Debian kernel, in a file that is named vmlinuz-RELEASE")]
    NoRelease,
    /// DKMS failed.
    #[error("DKMS cannot install the driver")]
    Install(#[source] ProcessError),
    /// DKMS succeeded, but the module is missing.
    #[error("DKMS did not install {}", module::NAME)]
    NoModule,
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Stale for DkmsError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Package(error) if error.is_stale())
    }
}

/// Has DKMS build the driver for `kernel` and install it below `directory`; returns the module.
///
/// # Errors
/// [`DkmsError`].
pub fn install(kernel: &Kernel, directory: &Path) -> Result<PathBuf, DkmsError> {
    prerequisites::ensure(&[Prerequisite::Gcc, Prerequisite::Make, Prerequisite::LibElf, Prerequisite::Depmod])?;
    let release = kernel.release().ok_or(DkmsError::NoRelease)?;
    let step = Step::new(format!("installing the driver for {release} with DKMS"));
    let at = |name: &str| directory.join(name);
    let modules = at("modules").join(release);
    for place in [at("package"), at("tree"), at("sources"), at("driver"), modules.clone()] {
        fs::create_dir_all(&place).map_err(FileError::at(&place))?;
    }
    let apt = Apt::of(kernel.arch)?;
    apt.refreshing(|| {
        let (package, _) = packages::candidate(apt, "dkms")?;
        packages::unpack(apt, &package, &at("package"), &step).map_err(DkmsError::from)
    })?;
    let driver = module::driver();
    let sources = module::sources(&driver)?;
    for source in sources.into_iter().chain([driver.join(CONFIGURATION)]) {
        let copy = at("driver").join(source.file_name().unwrap_or_default());
        fs::copy(&source, copy).map_err(FileError::at(&source))?;
    }
    // Don't run depmod: it would update the host's index of modules.
    let mut dkms = Command::new("bash");
    dkms.arg(at("package/usr/sbin/dkms")).args(["install", "--no-depmod"]);
    dkms.arg("--dkmstree").arg(at("tree"));
    dkms.arg("--sourcetree").arg(at("sources"));
    dkms.arg("--installtree").arg(at("modules"));
    dkms.arg("--kernelsourcedir").arg(&kernel.headers);
    dkms.args(["-k", &format!("{release}/x86_64")]).arg(at("driver"));
    for variable in ["MFLAGS", "MAKELEVEL", "CARGO_MAKEFLAGS"] {
        dkms.env_remove(variable);
    }
    dkms.env("MAKEFLAGS", module::compiler(kernel));
    if let Err(error) = process::output(&mut dkms) {
        if let ProcessError::Failed(failure) = &error {
            eprint!("{}", failure.everything);
        }
        return Err(DkmsError::Install(error));
    }
    step.done();
    let module = modules.join("updates/dkms").join(module::NAME);
    if module.is_file() { Ok(module) } else { Err(DkmsError::NoModule) }
}
