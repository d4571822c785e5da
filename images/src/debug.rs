//! Builds debug kernels from Debian's source, with Debian's configuration reduced to the guest's devices, plus
//! the options of a checker.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use clap::ValueEnum;

use crate::apt::Apt;
use crate::arch::Arch;
use crate::cache::Cache;
use crate::digest::Key;
use crate::file_error::FileError;
use crate::kernel::{Kernel, KernelError};
use crate::packages::{self, Package};
use crate::prerequisites::{self, Prerequisite};
use crate::process;
use crate::progress::Step;
use crate::vmlinux;

const GUEST: &str = include_str!("../kernel/guest.config");
const LOCKDEP: &str = include_str!("../kernel/lockdep.config");
const KASAN: &str = include_str!("../kernel/kasan.config");

/// Compiled files per update of the progress.
const STRIDE: usize = 250;

/// Files that are needed to build a module, besides the directories in [`BUILD_TREES`].
const BUILD_FILES: [&str; 8] = [
    ".config",
    "Makefile",
    "Module.symvers",
    "arch/x86/Makefile",
    "arch/x86/Makefile_32.cpu",
    "arch/x86/Makefile.um",
    "kernel/bounds.s",
    "tools/objtool/objtool",
];
const BUILD_TREES: [&str; 4] = ["include", "scripts", "arch/x86/include", "arch/x86/tools"];

const NEEDS: [Prerequisite; 9] = [
    Prerequisite::Gcc,
    Prerequisite::Make,
    Prerequisite::Flex,
    Prerequisite::Bison,
    Prerequisite::Bc,
    Prerequisite::LibElfHeader,
    Prerequisite::OpensslHeader,
    Prerequisite::Xz,
    Prerequisite::Zstd,
];

/// The checker of a debug kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Debug {
    /// Checks locks, sleeping in atomic context, RCU, and the lifetimes of timers and work items
    Lockdep,
    /// Checks memory accesses for use after free and out of bounds, and checks indices and shifts
    Kasan,
}

impl Debug {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lockdep => "lockdep",
            Self::Kasan => "kasan",
        }
    }

    fn config(self) -> &'static str {
        match self {
            Self::Lockdep => LOCKDEP,
            Self::Kasan => KASAN,
        }
    }
}

/// Returns the debug kernel of a series. The first call builds it, which takes many minutes.
///
/// # Errors
/// [`KernelError`].
pub fn get(cache: &Cache, series: &str, debug: Debug) -> Result<Kernel, KernelError> {
    let apt = Apt::of(Arch::default())?;
    let stock = Kernel::stock(cache, series)?;
    let config =
        stock.config().ok_or_else(|| KernelError::Layout("configuration, which a debug kernel starts from".into()))?;
    prerequisites::ensure(&NEEDS)?;
    let compiler = process::output(Command::new("gcc").arg("--version"));
    let compiler = compiler.map_err(KernelError::Build)?;
    // Look the version up in each attempt, because refreshed lists may name another version.
    apt.refreshing(|| {
        let (source, _) = packages::candidate(apt, &format!("linux-source-{series}"))?;
        let key = Key::new("debug kernel, recipe 1")
            .text("source", &source.version)
            .file("stock", &config)?
            .text("guest", GUEST)
            .text("debug", debug.config())
            .bytes("compiler", &compiler);
        let id = format!("{series}-{}-{}", debug.name(), key.hex());
        let place = cache.get("debug-kernel", &id, |dir| build(apt, &source, series, &config, debug, dir))?;
        Ok(Kernel {
            image: place.join("vmlinux"),
            bzimage: place.join("bzImage"),
            modules: Some(place.join("modules")),
            headers: place.join("headers"),
            compiler: None,
            id,
            arch: stock.arch,
        })
    })
}

fn build(
    apt: &Apt,
    package: &Package,
    series: &str,
    stock: &Path,
    debug: Debug,
    dir: &Path,
) -> Result<(), KernelError> {
    let step = Step::new(format!("building kernel {series} with {}, once; this takes many minutes", debug.name()));
    let work = tempfile::tempdir_in(dir).map_err(FileError::at(dir))?;
    packages::unpack(apt, package, work.path(), &step)?;
    step.detail("unpacking the source");
    let source = work.path().join("source");
    fs::create_dir(&source).map_err(FileError::at(&source))?;
    let mut tar = Command::new("tar");
    tar.arg("-xf")
        .arg(work.path().join(format!("usr/src/linux-source-{series}.tar.xz")))
        .arg("-C")
        .arg(&source)
        .arg("--strip-components=1");
    process::output(&mut tar).map_err(KernelError::Build)?;

    step.detail("configuring");
    configure(&source, stock, debug)?;
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let mut made = 0;
    let mut make = make(&source);
    make.arg(format!("-j{jobs}")).args(["bzImage", "modules"]);
    process::follow(&mut make, |line| {
        if line.trim_start().starts_with("CC ") {
            made += 1;
            if made % STRIDE == 0 {
                step.detail(&format!("{made} files compiled"));
            }
        }
    })
    .map_err(KernelError::Build)?;
    step.detail("keeping what a guest and its modules need");
    keep(&source, dir)?;
    step.done();
    Ok(())
}

/// Writes `source/.config`: the stock kernel's configuration without modules, cut down by [`GUEST`], and the
/// checker's options. Fails if the source does not accept one of the checker's options.
fn configure(source: &Path, stock: &Path, debug: Debug) -> Result<(), KernelError> {
    let path = source.join(".config");
    fs::copy(stock, &path).map_err(FileError::at(stock))?;
    process::output(make(source).arg("mod2noconfig")).map_err(KernelError::Build)?;
    let mut config = fs::read_to_string(&path).map_err(FileError::at(&path))?;
    config.push_str(GUEST);
    config.push_str(debug.config());
    fs::write(&path, config).map_err(FileError::at(&path))?;
    process::output(make(source).arg("olddefconfig")).map_err(KernelError::Build)?;
    let config = fs::read_to_string(&path).map_err(FileError::at(&path))?;
    match missing(debug.config(), &config) {
        Some(option) => Err(KernelError::Option(option.to_owned())),
        None => Ok(()),
    }
}

/// Returns the first option of `wanted` that `config` does not have.
fn missing<'a>(wanted: &'a str, config: &str) -> Option<&'a str> {
    let mut options = wanted.lines().filter(|line| line.starts_with("CONFIG_"));
    options.find(|option| match option.strip_suffix("=n") {
        Some(name) => config.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('='))),
        None => !config.lines().any(|line| line == *option),
    })
}

/// A `make` in the source, at a low priority.
fn make(source: &Path) -> Command {
    let mut make = Command::new("nice");
    make.args(["-n", "10", "make", "-C"]).arg(source);
    for variable in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CARGO_MAKEFLAGS"] {
        make.env_remove(variable);
    }
    make.env("KBUILD_BUILD_TIMESTAMP", "1970-01-01")
        .env("KBUILD_BUILD_USER", "images")
        .env("KBUILD_BUILD_HOST", "images");
    make
}

/// Moves the image and the files for building modules out of the built tree.
fn keep(source: &Path, dir: &Path) -> Result<(), KernelError> {
    let image = source.join("arch/x86/boot/bzImage");
    let bytes = fs::read(&image).map_err(FileError::at(&image))?;
    let kernel = vmlinux::extract(&bytes).map_err(|source| KernelError::Extract { image: image.clone(), source })?;
    let (headers, modules) = (dir.join("headers"), dir.join("modules"));
    for directory in [&headers, &modules] {
        fs::create_dir(directory).map_err(FileError::at(directory))?;
    }
    let path = dir.join("vmlinux");
    fs::write(&path, kernel).map_err(FileError::at(&path))?;
    relocate(&image, &dir.join("bzImage"))?;
    let builtin = "modules.builtin";
    relocate(&source.join(builtin), &modules.join(builtin))?;
    for name in BUILD_TREES {
        relocate(&source.join(name), &headers.join(name))?;
    }
    for name in BUILD_FILES {
        let from = source.join(name);
        // Some of these files exist in only one series.
        if from.exists() {
            relocate(&from, &headers.join(name))?;
        }
    }
    Ok(())
}

fn relocate(from: &Path, to: &Path) -> Result<(), KernelError> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(FileError::at(parent))?;
    }
    Ok(fs::rename(from, to).map_err(FileError::at(from))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_that_the_source_does_not_know_is_named() {
        let wanted = "# Locks.\nCONFIG_A=y\nCONFIG_B=n\nCONFIG_C=1\n";
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=1\n";
        assert_eq!(missing(wanted, config), None);
        assert_eq!(missing(wanted, "CONFIG_A=y\n"), Some("CONFIG_C=1"));
        let set = "CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=1\n";
        assert_eq!(missing(wanted, set), Some("CONFIG_B=n"));
    }
}
