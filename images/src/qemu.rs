//! The lab's QEMU: Debian's, with the project's fix, built for the one machine that the lab is.
//! Knows how QEMU is built, nothing of what runs on it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::host::{self, HostError, Need};
use crate::packages::PackageError;
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::{sources, sys};

/// Debian's package whose version is built.
const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "qemu-system-x86_64";
/// The series that the fix is for.
const SERIES: &str = "7.2";
const FIX: &str = include_str!("../lab/vmrun.patch");
/// What the fix is called where the lab says what it runs on.
pub const FIX_NAME: &str = "the VMRUN fix";
const DEVICES: &str = "CONFIG_Q35=y\nCONFIG_ISA_DEBUG=y\n";
const OPTIONS: [&str; 12] = [
    "--target-list=x86_64-softmmu",
    "--without-default-features",
    "--without-default-devices",
    "--with-devices-x86_64=lab",
    "--enable-tcg",
    "--disable-kvm",
    "--audio-drv-list=",
    "--disable-docs",
    "--disable-tools",
    "--disable-user",
    "--disable-debug-info",
    "--meson=meson",
];
const NEEDS: [Need; 10] = [
    Need::Gcc,
    Need::Make,
    Need::Ninja,
    Need::Meson,
    Need::PkgConfig,
    Need::Glib,
    Need::Pixman,
    Need::Fdt,
    Need::Patch,
    Need::Python,
];

/// Why there is no QEMU.
#[derive(Debug, Error)]
pub enum QemuError {
    /// The host lacks something.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Its source cannot be had.
    #[error(transparent)]
    Source(#[from] PackageError),
    /// This host's Debian has another QEMU than the fix is for.
    #[error("the lab is built from Debian 12's QEMU {SERIES}; this host's lists have {0}")]
    Series(String),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// It cannot be built.
    #[error("cannot build QEMU")]
    Build(#[source] ProcessError),
    /// A file could not be read or written.
    #[error("cannot use {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// QEMU, built at the first call.
///
/// # Errors
/// [`QemuError`].
pub fn get(cache: &Cache) -> Result<PathBuf, QemuError> {
    host::ensure(&[Need::Firmware, Need::Gcc])?;
    let made = newest(cache);
    match made {
        // Most likely Debian has a newer one than the host's lists know of.
        Err(QemuError::Source(PackageError::Fetch { .. })) if sys::is_root() => {
            host::update_lists()?;
            newest(cache)
        }
        other => other,
    }
}

fn newest(cache: &Cache) -> Result<PathBuf, QemuError> {
    let version = sources::version(cache, PACKAGE)?;
    if !is_of_series(&version) {
        return Err(QemuError::Series(version));
    }
    let compiler = process::output(Command::new("gcc").arg("--version"));
    let compiler = compiler.map_err(QemuError::Build)?;
    let place = cache.get("qemu", &key(&version, &compiler), |dir| make(&version, dir))?;
    Ok(place.join(PROGRAM))
}

fn is_of_series(version: &str) -> bool {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    let rest = upstream.strip_prefix(SERIES);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Debian never changes what a version is.
fn key(version: &str, compiler: &[u8]) -> String {
    Key::new("qemu")
        .text("version", version)
        .text("fix", FIX)
        .text("devices", DEVICES)
        .text("options", &OPTIONS.join(" "))
        .bytes("compiler", compiler)
        .hex()
}

fn make(version: &str, dir: &Path) -> Result<(), QemuError> {
    host::ensure(&NEEDS)?;
    let step = Step::new("building the lab's QEMU, once");
    let work = tempfile::tempdir_in(dir).map_err(|e| failed(dir, e))?;
    sources::unpack("qemu", version, work.path(), &step)?;
    let source = work.path().join("source");
    let fix = work.path().join("fix");
    let devices = source.join("configs/devices/x86_64-softmmu/lab.mak");
    fs::write(&fix, FIX).map_err(|e| failed(&fix, e))?;
    fs::write(&devices, DEVICES).map_err(|e| failed(&devices, e))?;
    let mut patch = Command::new("patch");
    patch.args(["-p1", "--fuzz=0", "-i"]).arg(&fix);
    process::output(patch.current_dir(&source)).map_err(QemuError::Build)?;

    let build = work.path().join("build");
    fs::create_dir(&build).map_err(|e| failed(&build, e))?;
    step.detail("configuring");
    let mut configure = Command::new(source.join("configure"));
    process::output(configure.args(OPTIONS).current_dir(&build)).map_err(QemuError::Build)?;
    let mut ninja = Command::new("ninja");
    let mut told = 0;
    process::follow(ninja.arg(PROGRAM).current_dir(&build), |line| {
        if let Some(tenths) = tenths(line).filter(|tenths| *tenths > told) {
            told = tenths;
            step.detail(&format!("{tenths}0 %"));
        }
    })
    .map_err(QemuError::Build)?;
    let program = dir.join(PROGRAM);
    fs::copy(build.join(PROGRAM), &program).map_err(|e| failed(&program, e))?;
    step.done();
    Ok(())
}

/// How far ninja is: its lines begin like `[840/1210] `.
fn tenths(line: &str) -> Option<u32> {
    let (done, all) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    let (done, all): (u32, u32) = (done.parse().ok()?, all.parse().ok()?);
    done.checked_mul(10)?.checked_div(all)
}

fn failed(path: &Path, source: io::Error) -> QemuError {
    QemuError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_or_compiler_is_another_build() {
        let first = key("1:7.2-7", b"gcc 12");
        assert_eq!(first, key("1:7.2-7", b"gcc 12"));
        assert_ne!(first, key("1:7.2-8", b"gcc 12"));
        assert_ne!(first, key("1:7.2-7", b"gcc 13"));
    }

    #[test]
    fn the_fix_is_for_one_series() {
        assert!(is_of_series("1:7.2+dfsg-7+deb12u18") && is_of_series("7.2.22"));
        assert!(!is_of_series("1:10.0.2+ds-1") && !is_of_series("1:7.20-1") && !is_of_series(""));
    }

    #[test]
    fn ninja_tells_how_far_it_is() {
        assert_eq!(tenths("[840/1210] Compiling C object a.o"), Some(6));
        assert_eq!(tenths("[1210/1210] Linking"), Some(10));
        for other in ["[1/0] x", "ninja: no work to do.", "[x/y]", "[1]", ""] {
            assert_eq!(tenths(other), None, "{other}");
        }
    }
}
