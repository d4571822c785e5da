//! The labs' QEMU: Debian's source with this project's fixes, built for the one machine that a lab needs. This module
//! does not depend on what runs on QEMU.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::packages::PackageError;
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::sources;
use crate::unpacked::{self, UnpackedError};

/// The Debian package that determines which version of QEMU's source is built.
const PACKAGE: &str = "qemu-system-x86";
const X86_FIXES: &str = concat!(
    include_str!("../lab/vmrun.patch"),
    include_str!("../lab/debugregs.patch"),
    include_str!("../lab/translations.patch"),
    include_str!("../lab/pause.patch"),
    include_str!("../lab/jumps.patch"),
    include_str!("../lab/counters.patch")
);
const ARM_FIXES: &str = concat!(include_str!("../lab/pmuovf.patch"), include_str!("../lab/jumps.patch"));
const OPTIONS: [&str; 8] = [
    "--enable-tcg",
    "--disable-kvm",
    "--audio-drv-list=",
    "--disable-docs",
    "--disable-tools",
    "--disable-user",
    "--disable-debug-info",
    "--meson=meson",
];
/// The machine, its interrupt controller, and three options without which QEMU's code for Arm CPUs does not link.
const VIRT: &str = "CONFIG_ARM_VIRT=y\nCONFIG_ARM_GICV3_TCG=y\nCONFIG_ARM_V7M=y\n\
    CONFIG_SEMIHOSTING=y\nCONFIG_ARM_COMPATIBLE_SEMIHOSTING=y\n";

/// The machine that is built for an architecture's lab.
struct Machine {
    arch: Arch,
    /// The devices, in QEMU's configuration.
    devices: &'static str,
    /// Patches of QEMU's source, concatenated.
    fixes: &'static str,
}

impl Machine {
    fn of(arch: Arch) -> Self {
        match arch {
            Arch::X86_64 => Self { arch, devices: "CONFIG_Q35=y\nCONFIG_ISA_DEBUG=y\n", fixes: X86_FIXES },
            Arch::Aarch64 => Self { arch, devices: VIRT, fixes: ARM_FIXES },
        }
    }

    fn program(&self) -> String {
        format!("qemu-system-{}", self.arch.qemu())
    }

    fn options(&self) -> Vec<String> {
        let arch = self.arch.qemu();
        let ours = [
            format!("--target-list={arch}-softmmu"),
            "--without-default-features".to_owned(),
            "--without-default-devices".to_owned(),
            format!("--with-devices-{arch}=lab"),
        ];
        let options = OPTIONS.into_iter().map(str::to_owned);
        ours.into_iter().chain(options).collect()
    }
}

const NEEDS: [Prerequisite; 10] = [
    Prerequisite::Gcc,
    Prerequisite::Make,
    Prerequisite::Ninja,
    Prerequisite::Meson,
    Prerequisite::PkgConfig,
    Prerequisite::Glib,
    Prerequisite::Pixman,
    Prerequisite::Fdt,
    Prerequisite::Patch,
    Prerequisite::Python,
];

/// Errors of getting QEMU.
#[derive(Debug, Error)]
pub enum QemuError {
    /// The host lacks something.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// QEMU's source could not be fetched.
    #[error(transparent)]
    Source(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// QEMU cannot be built.
    #[error("cannot build QEMU")]
    Build(#[source] ProcessError),
    /// A file could not be read or written.
    #[error("cannot use {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Stale for QemuError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Source(error) if error.is_stale())
    }
}

/// Returns the directories of x86 machines' firmware: of the BIOS, and of the option ROMs and the firmware of microvm.
///
/// # Errors
/// [`UnpackedError`].
pub fn firmware(cache: &Cache) -> Result<[PathBuf; 2], UnpackedError> {
    let root = unpacked::directory(cache, Apt::of(Arch::X86_64)?, &["seabios", "qemu-system-data"])?;
    Ok(["usr/share/seabios", "usr/share/qemu"].map(|directory| root.join(directory)))
}

/// Returns QEMU; the first call builds it.
///
/// # Errors
/// [`QemuError`].
pub fn get(cache: &Cache, arch: Arch) -> Result<PathBuf, QemuError> {
    prerequisites::ensure(&[Prerequisite::Gcc])?;
    let machine = Machine::of(arch);
    get_from(Apt::of(Arch::default())?, cache, &machine, &NEEDS, |work, dir, step| build(&machine, work, dir, step))
}

/// Returns the program that `build` makes. The arguments of `build` are a directory that contains the unpacked
/// `source`, and the directory for the result. `needs` are the host's programs and libraries that `build` uses.
fn get_from(
    apt: &Apt,
    cache: &Cache,
    machine: &Machine,
    needs: &[Prerequisite],
    build: impl Fn(&Path, &Path, &Step) -> Result<(), QemuError>,
) -> Result<PathBuf, QemuError> {
    let make = |version: &str, dir: &Path| {
        prerequisites::ensure(needs)?;
        let step = Step::new(format!("building the {} lab's QEMU, once", machine.arch));
        let work = tempfile::tempdir_in(dir).map_err(|e| failed(dir, e))?;
        sources::unpack(apt, "qemu", version, work.path(), &step)?;
        build(work.path(), dir, &step)?;
        step.done();
        Ok::<_, QemuError>(())
    };
    // Look the version up in each attempt: refreshed lists may name another version.
    apt.refreshing(|| {
        let version = sources::version(apt, cache, PACKAGE)?;
        let compiler = process::output(Command::new("gcc").arg("--version"));
        let compiler = compiler.map_err(QemuError::Build)?;
        let key = key(machine, &version, &compiler);
        let place = cache.get(&machine.arch.kind("qemu"), &key, |dir| make(&version, dir))?;
        Ok(place.join(machine.program()))
    })
}

/// The cache key of a build. The version identifies the source, because Debian never changes the source of a version.
fn key(machine: &Machine, version: &str, compiler: &[u8]) -> String {
    Key::new("qemu")
        .text("version", version)
        .text("fixes", machine.fixes)
        .text("devices", machine.devices)
        .text("options", &machine.options().join(" "))
        .bytes("compiler", compiler)
        .hex()
}

fn build(machine: &Machine, work: &Path, dir: &Path, step: &Step) -> Result<(), QemuError> {
    let source = work.join("source");
    let devices = format!("configs/devices/{}-softmmu/lab.mak", machine.arch.qemu());
    let devices = source.join(devices);
    fs::write(&devices, machine.devices).map_err(|e| failed(&devices, e))?;
    let fixes = work.join("fixes");
    fs::write(&fixes, machine.fixes).map_err(|e| failed(&fixes, e))?;
    let mut patch = Command::new("patch");
    patch.args(["-p1", "--fuzz=0", "-i"]).arg(&fixes);
    process::output(patch.current_dir(&source)).map_err(QemuError::Build)?;

    let build = work.join("build");
    fs::create_dir(&build).map_err(|e| failed(&build, e))?;
    step.detail("configuring");
    let mut configure = Command::new(source.join("configure"));
    process::output(configure.args(machine.options()).current_dir(&build)).map_err(QemuError::Build)?;
    let mut ninja = Command::new("ninja");
    let mut reported = 0;
    let name = machine.program();
    process::follow(ninja.arg(&name).current_dir(&build), |line| {
        if let Some(tenths) = tenths(line).filter(|tenths| *tenths > reported) {
            reported = tenths;
            step.detail(&format!("{tenths}0 %"));
        }
    })
    .map_err(QemuError::Build)?;
    let program = dir.join(&name);
    fs::copy(build.join(&name), &program).map_err(|e| failed(&program, e))?;
    Ok(())
}

/// Returns ninja's progress in tenths, from a line that begins like `[840/1210] `.
fn tenths(line: &str) -> Option<u32> {
    let (done, all) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    let (done, all): (u32, u32) = (done.parse().ok()?, all.parse().ok()?);
    done.checked_mul(10)?.checked_div(all)
}

fn failed(path: &Path, source: io::Error) -> QemuError {
    QemuError::File { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apt::archive::{Archive, Deb, Source};
    use vpmu_errors::chain;

    const FIRST: &str = "1:7.2+dfsg.1";
    const SECOND: &str = "1:7.2+dfsg.2";

    fn binary(version: &str) -> Deb {
        let mut deb = Deb::new(PACKAGE, version);
        deb.fields = "Source: qemu\n".to_owned();
        deb
    }

    /// Publishes a binary package and its source in the archive.
    fn publish(archive: &Archive, version: &str, source: (&str, &str)) {
        prerequisites::ensure(&[Prerequisite::DpkgSource, Prerequisite::Xz]).unwrap();
        let source = Source { name: source.0.to_owned(), version: source.1.to_owned() };
        archive.publish(&[binary(version)], &[source]);
    }

    /// Gets a stand-in for QEMU: a copy of the source's file `version`. Returns the content of this file.
    fn get_version(archive: &Archive, apt: &Apt) -> Result<String, QemuError> {
        let cache = Cache::at(archive.root().join("cache"));
        let machine = Machine::of(Arch::X86_64);
        let program = get_from(apt, &cache, &machine, &[], |work, dir, _| {
            let version = work.join("source/version");
            fs::copy(&version, dir.join(machine.program())).map_err(|e| failed(&version, e))?;
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
        assert_eq!(archive.updates(), 2);
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), SECOND);
        assert_eq!(archive.updates(), 2, "the second time, the cache has it");
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
        assert_eq!(archive.updates(), 2);
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
        assert!(error.contains("connect to 127.0.0.1:"), "{error}");
        assert!(!error.contains("lists are stale"), "{error}");
    }

    #[test]
    fn source_is_fetched_when_there_are_no_lists() {
        let archive = Archive::new();
        publish(&archive, FIRST, ("qemu", FIRST));
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), FIRST);
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn source_of_installed_package_without_lists_is_fetched_after_one_refresh() {
        // Without lists, apt knows the installed version, but no archive that has its source.
        let archive = Archive::new();
        publish(&archive, SECOND, ("qemu", SECOND));
        archive.pretend_installed(&[binary(FIRST)]);
        assert_eq!(get_version(&archive, &archive.apt()).unwrap(), SECOND);
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn another_version_compiler_or_machine_is_another_build() {
        let key = |arch, version, compiler| key(&Machine::of(arch), version, compiler);
        let first = key(Arch::X86_64, "1:7.2-7", b"gcc 12");
        assert_eq!(first, key(Arch::X86_64, "1:7.2-7", b"gcc 12"));
        assert_ne!(first, key(Arch::X86_64, "1:7.2-8", b"gcc 12"));
        assert_ne!(first, key(Arch::X86_64, "1:7.2-7", b"gcc 13"));
        assert_ne!(first, key(Arch::Aarch64, "1:7.2-7", b"gcc 12"));
    }

    #[test]
    fn fixes_are_mails_that_begin_with_what_fails_without_them() {
        let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab");
        for entry in fs::read_dir(lab).unwrap() {
            let path = entry.unwrap().path();
            let (name, text) = (path.display(), fs::read_to_string(&path).unwrap());
            assert!(X86_FIXES.contains(&text) || ARM_FIXES.contains(&text), "{name} is in no lab");
            let (head, diff) = text.split_once("\n---\n").unwrap();
            let (fields, body) = head.split_once("\n\n").unwrap();
            let fields: Vec<&str> = fields.lines().collect();
            let begins = ["From ", "From: ", "Date: ", "Subject: [PATCH] "];
            assert_eq!(fields.len(), begins.len(), "{name}");
            for (field, begin) in fields.iter().zip(begins) {
                assert!(field.starts_with(begin), "{name}: {field}");
            }
            assert!(body.starts_with("Without this patch, "), "{name}");
            let signature = fields[1].replace("From: ", "Signed-off-by: ");
            assert_eq!(body.lines().last(), Some(&*signature), "{name}");
            assert!(diff.contains(" changed, ") && diff.contains("\ndiff --git a/"), "{name}");
        }
    }

    #[test]
    fn ninjas_progress_is_parsed() {
        assert_eq!(tenths("[840/1210] Compiling C object a.o"), Some(6));
        assert_eq!(tenths("[1210/1210] Linking"), Some(10));
        for other in ["[1/0] x", "ninja: no work to do.", "[x/y]", "[1]", ""] {
            assert_eq!(tenths(other), None, "{other}");
        }
    }
}
