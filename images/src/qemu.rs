//! The lab's QEMU: Debian's, with the project's fix, built for the one machine that the lab is.
//! Knows how QEMU is built, nothing of what runs on it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::host::{self, HostError, Need};
use crate::packages::PackageError;
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::sources;

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
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
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

impl Stale for QemuError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Source(error) if error.is_stale())
    }
}

/// QEMU, built at the first call.
///
/// # Errors
/// [`QemuError`].
pub fn get(cache: &Cache) -> Result<PathBuf, QemuError> {
    host::ensure(&[Need::Firmware, Need::Gcc])?;
    get_from(Apt::host(), cache, &NEEDS, build)
}

/// The program that `build`, which has `needs`, makes of the source: it gets a directory with the
/// source and the result's directory.
fn get_from(
    apt: &Apt,
    cache: &Cache,
    needs: &[Need],
    build: impl Fn(&Path, &Path, &Step) -> Result<(), QemuError>,
) -> Result<PathBuf, QemuError> {
    let make = |version: &str, dir: &Path| {
        host::ensure(needs)?;
        let step = Step::new("building the lab's QEMU, once");
        let work = tempfile::tempdir_in(dir).map_err(|e| failed(dir, e))?;
        sources::unpack(apt, "qemu", version, work.path(), &step)?;
        build(work.path(), dir, &step)?;
        step.done();
        Ok::<_, QemuError>(())
    };
    // The refreshed lists may name another version.
    apt.refreshing(|| {
        let version = sources::version(apt, cache, PACKAGE)?;
        if !is_of_series(&version) {
            return Err(QemuError::Series(version));
        }
        let compiler = process::output(Command::new("gcc").arg("--version"));
        let compiler = compiler.map_err(QemuError::Build)?;
        let key = key(&version, &compiler);
        let place = cache.get("qemu", &key, |dir| make(&version, dir))?;
        Ok(place.join(PROGRAM))
    })
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

fn build(work: &Path, dir: &Path, step: &Step) -> Result<(), QemuError> {
    let source = work.join("source");
    let fix = work.join("fix");
    let devices = source.join("configs/devices/x86_64-softmmu/lab.mak");
    fs::write(&fix, FIX).map_err(|e| failed(&fix, e))?;
    fs::write(&devices, DEVICES).map_err(|e| failed(&devices, e))?;
    let mut patch = Command::new("patch");
    patch.args(["-p1", "--fuzz=0", "-i"]).arg(&fix);
    process::output(patch.current_dir(&source)).map_err(QemuError::Build)?;

    let build = work.join("build");
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
    use crate::apt::archive::{Archive, Deb, Source, chain};

    const FIRST: &str = "1:7.2+dfsg.1";
    const SECOND: &str = "1:7.2+dfsg.2";

    fn binary(version: &str) -> Deb {
        let mut deb = Deb::new(PACKAGE, version);
        deb.fields = "Source: qemu\n".to_owned();
        deb
    }

    /// Makes the archive one of a binary package and a source.
    fn publish(archive: &Archive, version: &str, source: (&str, &str)) {
        host::ensure(&[Need::DpkgSource, Need::Xz]).unwrap();
        let source = Source {
            name: source.0.to_owned(),
            version: source.1.to_owned(),
        };
        archive.publish(&[binary(version)], &[source]);
    }

    /// Builds a program that consists of its source's version.
    fn get_version(archive: &Archive, apt: &Apt) -> Result<String, QemuError> {
        let cache = Cache::at(archive.root().join("cache"));
        let program = get_from(apt, &cache, &[], |work, dir, _| {
            let version = work.join("source/version");
            fs::copy(&version, dir.join(PROGRAM)).map_err(|e| failed(&version, e))?;
            Ok(())
        })?;
        Ok(fs::read_to_string(program).unwrap())
    }

    #[test]
    fn source_replaced_in_archive_is_the_new_one_after_one_refresh() {
        let archive = Archive::new();
        publish(&archive, FIRST, ("qemu", FIRST));
        archive.update_lists();
        publish(&archive, SECOND, ("qemu", SECOND));
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), SECOND);
        // Both attempts fetched lists of sources, too.
        assert_eq!(archive.updates(), 2 + 2);
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), SECOND);
        assert_eq!(
            archive.updates(),
            2 + 2,
            "the second time, the cache has it"
        );
    }

    #[test]
    fn source_missing_after_refresh_fails_with_version_and_cause() {
        let archive = Archive::new();
        publish(&archive, FIRST, ("other", FIRST));
        archive.update_lists();
        let error = chain(&get_version(&archive, &archive.apt()).unwrap_err());
        let begin = format!("cannot fetch the source of qemu {FIRST}: apt-get failed");
        assert!(error.starts_with(&begin), "{error}");
        assert!(error.contains("E: Can not find version"), "{error}");
        assert_eq!(archive.updates(), 2 + 2);
    }

    #[test]
    fn source_of_stale_lists_of_ordinary_user_fails_with_remedy_and_cause() {
        let archive = Archive::new();
        publish(&archive, FIRST, ("qemu", FIRST));
        archive.update_lists();
        publish(&archive, SECOND, ("qemu", SECOND));
        let error = chain(&get_version(&archive, &archive.user_apt()).unwrap_err());
        let begin = format!(
            "package lists are stale: run `sudo apt-get update`, then try again: \
            cannot fetch the source of qemu {FIRST}: "
        );
        assert!(error.starts_with(&begin), "{error}");
    }

    #[test]
    fn source_in_unreachable_archive_is_not_blamed_on_the_lists() {
        let mut archive = Archive::new();
        publish(&archive, FIRST, ("qemu", FIRST));
        archive.update_lists();
        archive.shut_down();
        let error = get_version(&archive, &archive.user_apt()).unwrap_err();
        assert!(!error.is_stale(), "{error:?}");
        let error = chain(&error);
        assert!(error.contains("Could not connect"), "{error}");
        assert!(!error.contains("lists are stale"), "{error}");
    }

    #[test]
    fn source_is_fetched_when_there_are_no_lists() {
        let archive = Archive::new();
        publish(&archive, FIRST, ("qemu", FIRST));
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), FIRST);
        assert_eq!(archive.updates(), 1 + 1);
    }

    #[test]
    fn source_of_installed_package_without_lists_is_fetched_after_one_refresh() {
        // The version is known then, but not where Debian's sources are.
        let archive = Archive::new();
        publish(&archive, SECOND, ("qemu", SECOND));
        archive.pretend_installed(&[binary(FIRST)]);
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), SECOND);
        assert_eq!(archive.updates(), 1 + 1);
    }

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
