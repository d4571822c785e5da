//! Builds the guest's driver against a kernel's headers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::cache::{Cache, CacheError};
use crate::digest::{DigestError, Key};
use crate::file_error::FileError;
use crate::kernel::Kernel;
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::toolchain::{Toolchain, ToolchainError};

/// The module's file name.
pub const NAME: &str = "virtio_pmu.ko";

/// Errors of building the module.
#[derive(Debug, Error)]
pub enum ModuleError {
    /// The host lacks something.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A source could not be read.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The compilers for the kernel's architecture are missing.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// The compiler did not report its version.
    #[error("cannot get the compiler's version")]
    Compiler(#[source] ProcessError),
    /// The driver does not compile.
    #[error("the driver does not build against {headers}")]
    Build {
        /// The kernel's build directory.
        headers: PathBuf,
        /// The output of make.
        #[source]
        source: ProcessError,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Builds the driver for `kernel`, unless the cache has it; returns the module.
///
/// # Errors
/// [`ModuleError`].
pub fn build(cache: &Cache, kernel: &Kernel) -> Result<PathBuf, ModuleError> {
    build_from(cache, kernel, &driver())
}

/// The directory of the driver's sources.
pub fn driver() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-driver/linux")
}

/// Like [`build`], from the sources in `driver`. A compiler's warning is an error.
///
/// # Errors
/// [`ModuleError`].
pub fn build_from(cache: &Cache, kernel: &Kernel, driver: &Path) -> Result<PathBuf, ModuleError> {
    prerequisites::ensure(&[Prerequisite::Gcc])?;
    let toolchain = Toolchain::get(cache, kernel.arch)?;
    let sources = sources(driver)?;
    let mut key = Key::new("module, recipe 3").text("kernel", &kernel.id);
    key = match &toolchain {
        None => {
            let compiler = process::output(Command::new("gcc").arg("--version"));
            key.bytes("compiler", &compiler.map_err(ModuleError::Compiler)?)
        }
        Some(toolchain) => key.text("toolchain", toolchain.id()),
    };
    for source in &sources {
        key = key.file(&file_name(source), source)?;
    }
    let place = cache.get(&kernel.arch.kind("module"), &key.hex(), |dir| {
        prerequisites::ensure(&[Prerequisite::Make, Prerequisite::LibElf, Prerequisite::Perl])?;
        let step = Step::new("building the guest's driver");
        for source in &sources {
            // kbuild writes its products beside the sources. Therefore, build from copies in the cache.
            fs::copy(source, dir.join(file_name(source))).map_err(FileError::at(source))?;
        }
        let mut make = make(kernel, dir, toolchain.as_ref());
        make.args(["W=1", "KCFLAGS=-Werror"]);
        let mut strip = match &toolchain {
            Some(toolchain) => Command::new(toolchain.gnu("strip")),
            None => Command::new("strip"),
        };
        if let Err(source) = process::output(&mut make) {
            drop(step);
            if let ProcessError::Failed(failure) = &source {
                eprint!("{}", failure.everything);
            }
            return Err(ModuleError::Build { headers: kernel.headers.clone(), source });
        }
        strip.arg("--strip-debug").arg(dir.join(NAME));
        process::output(&mut strip).map_err(|source| ModuleError::Build { headers: kernel.headers.clone(), source })?;
        step.done();
        Ok(())
    })?;
    Ok(place.join(NAME))
}

/// Definitions for sparse, which is older than the compiler of some kernels: their headers use an operator that it does
/// not know, and need the length of a literal as a constant.
const FOR_SPARSE: &str = "#define __typeof_unqual__ __typeof__\n#define __builtin_strlen(s) (sizeof(s) - 1)\n";

/// Returns sparse's errors and warnings for the driver's sources in `driver`, one per line. Sparse checks address
/// spaces and byte orders, and that functions release the locks that they take. The headers of Linux 7.3 do not tell
/// sparse about locks.
///
/// # Errors
/// [`ModuleError`].
pub fn sparse(kernel: &Kernel, driver: &Path) -> Result<Vec<String>, ModuleError> {
    prerequisites::ensure(&[Prerequisite::Gcc, Prerequisite::Make, Prerequisite::LibElf, Prerequisite::Sparse])?;
    let work = tempfile::tempdir().map_err(FileError::at(driver))?;
    for source in sources(driver)? {
        let copy = work.path().join(file_name(&source));
        fs::copy(&source, copy).map_err(FileError::at(&source))?;
    }
    let mut make = make(kernel, work.path(), None);
    // Run sparse on each file that is compiled. `C=1` would do the same, but is ignored if the headers' package lacks the
    // script that looks for sparse, as in Linux 7.3. `-Wsparse-error` makes sparse's warnings fail the build.
    make.arg("KBUILD_CHECKSRC=1");
    let mut flags = "CF=-Wsparse-error".to_owned();
    if kernel.compiler.is_some() {
        let header = work.path().join("sparse.h");
        fs::write(&header, FOR_SPARSE).map_err(FileError::at(&header))?;
        flags.push_str(&format!(" -include {}", header.display()));
    }
    make.arg(flags);
    complaints(process::output(&mut make))
        .map_err(|source| ModuleError::Build { headers: kernel.headers.clone(), source })
}

/// Returns sparse's errors and warnings from the output of `make`. If `make` failed but its output has none, returns
/// the error of `make`.
fn complaints(made: Result<Vec<u8>, ProcessError>) -> Result<Vec<String>, ProcessError> {
    let failure = match made {
        Ok(_) => return Ok(Vec::new()),
        Err(ProcessError::Failed(failure)) if failure.everything.contains("vpmu") => failure,
        Err(error) => return Err(error),
    };
    let lines = failure.everything.lines();
    let complaints: Vec<String> =
        lines.filter(|line| line.contains(": error: ") || line.contains(": warning: ")).map(str::to_owned).collect();
    if complaints.is_empty() { Err(ProcessError::Failed(failure)) } else { Ok(complaints) }
}

/// Returns the `make` that builds the module in `dir` for `kernel`.
fn make(kernel: &Kernel, dir: &Path, toolchain: Option<&Toolchain>) -> Command {
    let mut make = Command::new("make");
    make.arg("-C").arg(&kernel.headers).arg(format!("M={}", dir.display()));
    // If the kernel has BTF, kbuild would run pahole on the module. Nothing here reads the module's BTF, so skip this.
    make.args(["modules", "-j2", "CONFIG_DEBUG_INFO_BTF_MODULES="]);
    match toolchain {
        None => make.arg(compiler(kernel)),
        Some(toolchain) => {
            make.arg(format!("ARCH={}", kernel.arch.kernel()));
            make.arg(format!("CROSS_COMPILE={}", kernel.arch.gnu()));
            toolchain.lead(&mut make)
        }
    };
    for variable in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CARGO_MAKEFLAGS"] {
        make.env_remove(variable);
    }
    make
}

/// The argument of `make` that selects the compiler, if the kernel is for this machine's architecture. Without it, Debian's
/// headers name the compiler that built the kernel, such as gcc-12, which this host may lack.
pub(crate) fn compiler(kernel: &Kernel) -> String {
    let compiler = kernel.compiler.as_deref().unwrap_or_else(|| Path::new("gcc"));
    format!("CC={}", compiler.display())
}

/// The driver's sources, without the files that a manual build leaves beside them.
///
/// # Errors
/// [`ModuleError::File`].
pub fn sources(driver: &Path) -> Result<Vec<PathBuf>, ModuleError> {
    let entries = fs::read_dir(driver).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(FileError::at(driver))?;
    let mut sources: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    sources.retain(|path| {
        let name = file_name(path);
        let code = [".c", ".h"].iter().any(|end| name.ends_with(end)) && !name.ends_with(".mod.c");
        code || name == "Kbuild" || name == "Makefile"
    });
    sources.sort();
    Ok(sources)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_not_taken_for_sources() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a.c", "a.h", "a.o", "x.mod.c", "x.mod", "Kbuild", "Makefile", ".a.o.cmd"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let names: Vec<_> = sources(directory.path()).unwrap().iter().map(|p| file_name(p)).collect();
        assert_eq!(names, ["Kbuild", "Makefile", "a.c", "a.h"]);
        assert!(matches!(sources(Path::new("/no/dir")), Err(ModuleError::File { .. })));
    }

    #[test]
    fn make_that_fails_without_complaint_is_an_error() {
        let made = |line: &str| {
            let script = format!("echo 'CHECK vpmu_main.c'; echo '{line}' >&2; exit 2");
            complaints(process::output(Command::new("sh").args(["-c", &script])))
        };
        for line in ["ERROR: modpost: missing MODULE_LICENSE() in virtio_pmu.o", "/bin/sh: 1: sparse: not found"] {
            let failed = made(line);
            assert!(matches!(failed, Err(ProcessError::Failed(_))), "{failed:?}");
        }
        let complaint = "vpmu_main.c:1:2: error: incorrect type in argument 1";
        assert_eq!(made(complaint).unwrap(), [complaint]);
        assert!(complaints(Ok(Vec::new())).unwrap().is_empty());
    }
}
