//! Programs and libraries that the host must have. As root, installs their Debian packages; otherwise reports the
//! command that installs them.

use std::env;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{self, Apt, AptError, Stale};
use crate::process::{self, ProcessError};
use crate::progress::Step;
use crate::sys;

/// Something is missing and cannot be installed.
#[derive(Debug, Error)]
pub enum PrerequisiteError {
    /// The process is not root, or the host has no `apt-get`, or a program or library is still not found after its
    /// installation.
    #[error("this host lacks {what}; {remedy}")]
    Missing {
        /// Programs and libraries, separated by commas.
        what: String,
        /// The remedy.
        remedy: String,
    },
    /// The installation failed.
    #[error("cannot install {packages}; try by hand: apt-get install {packages}")]
    Install {
        /// Separated by blanks.
        packages: String,
        /// The output of apt.
        #[source]
        source: ProcessError,
    },
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
}

impl Stale for PrerequisiteError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Install { source, .. } if apt::blames_lists(source))
    }
}

/// Something the host must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prerequisite {
    /// To build the kernel module and the lab's QEMU.
    Gcc,
    /// To build the kernel module and the lab's QEMU.
    Make,
    /// To build the lab's QEMU.
    Ninja,
    /// To build the lab's QEMU.
    Meson,
    /// To build the lab's QEMU.
    PkgConfig,
    /// To build the lab's QEMU.
    Glib,
    /// To build the lab's QEMU.
    Pixman,
    /// To build the lab's QEMU.
    Fdt,
    /// To build the lab's QEMU.
    Python,
    /// Applies the patches to QEMU's source.
    Patch,
    /// Unpacks Debian's sources.
    DpkgSource,
    /// The kernel's build tools load it.
    LibElf,
    /// To build kernels with checkers.
    LibElfHeader,
    /// To build kernels with checkers.
    OpensslHeader,
    /// To build kernels with checkers.
    Flex,
    /// To build kernels with checkers.
    Bison,
    /// To build kernels with checkers.
    Bc,
    /// Runs the kernel's scripts that check the driver's comments and style.
    Perl,
    /// Checks the driver's annotations.
    Sparse,
    /// For DKMS.
    Depmod,
    /// The shell and tools of guests; linked statically.
    Busybox,
    /// Fetches packages. Only Debian and its derivatives have it.
    Apt,
    /// The keys that sign Debian's archives. Debian's derivatives have them in a package.
    Keyring,
    /// Unpacks some kernels and modules.
    Xz,
    /// Unpacks some kernels and modules.
    Zstd,
    /// The kernel's own tool, which tests use with the driver.
    Perf,
    /// Disassembles programs for perf.
    Objdump,
    /// A third-party tool, which tests use with the driver.
    Bpftrace,
    /// A third-party tool, which tests use with the driver.
    Papi,
    /// A third-party tool, which people use in guests.
    Strace,
    /// A third-party tool, which tests use with the driver.
    StressNg,
    /// A third-party tool, which tests use with the driver.
    TraceCmd,
}

impl Prerequisite {
    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Ninja => "ninja",
            Self::Meson => "meson",
            Self::PkgConfig => "pkg-config",
            Self::Glib => "glib.h",
            Self::Pixman => "pixman.h",
            Self::Fdt => "libfdt.h",
            Self::Python => "python3",
            Self::Patch => "patch",
            Self::DpkgSource => "dpkg-source",
            Self::Gcc => "gcc",
            Self::Make => "make",
            Self::LibElf => "libelf.so.1",
            Self::LibElfHeader => "gelf.h",
            Self::OpensslHeader => "openssl/evp.h",
            Self::Flex => "flex",
            Self::Bison => "bison",
            Self::Bc => "bc",
            Self::Perl => "perl with its modules",
            Self::Sparse => "sparse",
            Self::Depmod => "depmod",
            Self::Busybox => "a static busybox",
            Self::Apt => "apt-get",
            Self::Keyring => "the keys of Debian's archives",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Perf => "perf",
            Self::Objdump => "objdump",
            Self::Bpftrace => "bpftrace",
            Self::Papi => "papi_command_line",
            Self::Strace => "strace",
            Self::StressNg => "stress-ng",
            Self::TraceCmd => "trace-cmd",
        }
    }

    pub(crate) fn package(self) -> &'static str {
        match self {
            Self::Ninja => "ninja-build",
            Self::Meson => "meson",
            Self::PkgConfig => "pkg-config",
            Self::Glib => "libglib2.0-dev",
            Self::Pixman => "libpixman-1-dev",
            Self::Fdt => "libfdt-dev",
            Self::Python => "python3",
            Self::Patch => "patch",
            Self::DpkgSource => "dpkg-dev",
            Self::Gcc => "gcc",
            Self::Make => "make",
            Self::LibElf | Self::LibElfHeader => "libelf-dev",
            Self::OpensslHeader => "libssl-dev",
            Self::Flex => "flex",
            Self::Bison => "bison",
            Self::Bc => "bc",
            Self::Perl => "perl",
            Self::Sparse => "sparse",
            Self::Depmod => "kmod",
            Self::Busybox => "busybox-static",
            Self::Apt => "apt",
            Self::Keyring => "debian-archive-keyring",
            Self::Xz => "xz-utils",
            Self::Zstd => "zstd",
            Self::Perf => "linux-perf",
            Self::Objdump => "binutils",
            Self::Bpftrace => "bpftrace",
            Self::Papi => "papi-tools",
            Self::Strace => "strace",
            Self::StressNg => "stress-ng",
            Self::TraceCmd => "trace-cmd",
        }
    }

    fn is_met(self) -> bool {
        match self {
            Self::LibElf => ["/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib"]
                .iter()
                .any(|dir| Path::new(dir).join("libelf.so.1").exists()),
            Self::Keyring => Path::new(apt::KEYRING).exists(),
            // A minimal Debian has perl without most of its modules.
            Self::Perl => process::output(Command::new("perl").args(["-MPod::Usage", "-e", "1"])).is_ok(),
            Self::Busybox => busybox().is_some(),
            Self::Perf => perf().is_some(),
            Self::Glib => has_header("glib-2.0/glib.h"),
            Self::Pixman => has_header("pixman-1/pixman.h"),
            Self::Fdt => has_header("libfdt.h"),
            Self::LibElfHeader => has_header("gelf.h"),
            Self::OpensslHeader => has_header("openssl/evp.h"),
            other => find(other.what()).is_some(),
        }
    }
}

/// The remedy on other distributions. Guests of stock kernels and the labs are made of Debian's packages.
const WITHOUT_APT: &str = "run this in a container of Debian 12 or 13 that has /dev/kvm, or boot your own kernel: \
    images boot --direct --kernel FILE --headers DIR";

fn has_header(name: &str) -> bool {
    Path::new("/usr/include").join(name).exists()
}

/// Checks that the host has all of `needs`; as root, installs the missing ones.
///
/// # Errors
/// [`PrerequisiteError`], with the command to type.
pub fn ensure(needs: &[Prerequisite]) -> Result<(), PrerequisiteError> {
    let missing = || needs.iter().copied().filter(|need| !need.is_met()).collect::<Vec<_>>();
    let absent = missing();
    if absent.is_empty() {
        return Ok(());
    }
    let packages = list(&absent, Prerequisite::package, " ");
    if find("apt-get").is_none() || !sys::is_root() {
        return Err(refusal(&absent, by_hand(&absent, find("apt-get").is_some())));
    }
    install(Apt::host(), &packages)?;
    match missing() {
        absent if absent.is_empty() => Ok(()),
        absent => Err(refusal(&absent, format!("{packages} is installed, but not found: add its directory to PATH"))),
    }
}

fn refusal(absent: &[Prerequisite], remedy: String) -> PrerequisiteError {
    PrerequisiteError::Missing { what: list(absent, Prerequisite::what, ", "), remedy }
}

/// The remedy for a user who must install `absent` by hand.
fn by_hand(absent: &[Prerequisite], has_apt: bool) -> String {
    let packages = list(absent, Prerequisite::package, " ");
    if has_apt {
        return format!("install with: sudo apt-get update && sudo apt-get install -y {packages}");
    }
    if absent.contains(&Prerequisite::Apt) {
        WITHOUT_APT.to_owned()
    } else {
        format!("install the equivalents of the Debian packages {packages}")
    }
}

fn list(needs: &[Prerequisite], of: fn(Prerequisite) -> &'static str, by: &str) -> String {
    needs.iter().map(|need| of(*need)).collect::<Vec<_>>().join(by)
}

/// Installs `packages`, separated by blanks. Refreshes stale lists.
fn install(apt: &Apt, packages: &str) -> Result<(), PrerequisiteError> {
    apt.refreshing(|| {
        let step = Step::new(format!("installing {packages}"));
        let mut command = apt.get()?;
        command.args(["install", "-y", "--no-install-recommends"]);
        // Wait for other installations to finish: a new machine may be installing packages on its own.
        command.args(["-o", "DPkg::Lock::Timeout=600"]);
        command.args(packages.split(' ')).env("DEBIAN_FRONTEND", "noninteractive");
        process::output(&mut command)
            .map_err(|source| PrerequisiteError::Install { packages: packages.to_owned(), source })?;
        step.done();
        Ok(())
    })
}

/// The static busybox of this host.
pub fn busybox() -> Option<PathBuf> {
    find("busybox").filter(|path| is_static(path))
}

/// This host's perf: the program, not the wrapper script of some hosts, which looks for a perf that matches
/// the running kernel.
pub fn perf() -> Option<PathBuf> {
    let tools = versions("/usr/lib", "linux-tools").map(|dir| dir.join("perf"));
    find("perf").into_iter().chain(versions("/usr/bin", "perf_")).chain(tools).find(|file| is_elf(file))
}

/// The entries of `directory` whose names begin with `prefix`, in descending order.
fn versions(directory: &str, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.into_iter().rev()
}

/// A program in PATH or in the administrator's directories.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| file.is_file())
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok()) && magic == *b"\x7fELF"
}

fn is_static(path: &Path) -> bool {
    use object::read::elf::{ElfFile64, ProgramHeader};
    let Ok(bytes) = std::fs::read(path) else {
        return false;
    };
    let Ok(elf) = ElfFile64::<object::Endianness>::parse(&*bytes) else {
        return false;
    };
    let interpreter = |h: &object::elf::ProgramHeader64<_>| h.p_type(elf.endian()) == object::elf::PT_INTERP;
    !elf.elf_program_headers().iter().any(interpreter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apt::archive::{Archive, Deb};
    use vpmu_errors::chain;

    #[test]
    fn installation_of_package_replaced_in_archive_refreshes_lists_once() {
        let archive = Archive::new();
        let versions = ["1", "2"].map(|version| [Deb::new("ninja-build", version)]);
        archive.publish(&versions[0], &[]);
        archive.update_lists();
        archive.publish(&versions[1], &[]);
        install(&archive.apt(), "ninja-build").unwrap();
        let answers = versions.map(|deb| archive.answers_for(&deb[0]));
        assert_eq!(answers, [[404], [200]]);
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn installation_without_lists_fetches_them_first() {
        let archive = Archive::new();
        let debs = [Deb::new("meson", "1"), Deb::new("ninja-build", "1")];
        archive.publish(&debs, &[]);
        install(&archive.apt(), "meson ninja-build").unwrap();
        assert_eq!(debs.map(|deb| archive.answers_for(&deb)), [[200], [200]]);
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn installation_with_lists_older_than_the_host_refreshes_them() {
        // The package of the headers depends on the library of the same version. The lists name version 1 of both
        // packages, but version 2 of the library is installed.
        let library = |version| Deb::new("libglib2.0-0", version);
        let headers = |version: &str| {
            let mut deb = Deb::new("libglib2.0-dev", version);
            deb.fields = format!("Depends: libglib2.0-0 (= {version})\n");
            deb
        };
        let archive = Archive::new();
        archive.publish(&[library("1"), headers("1")], &[]);
        archive.update_lists();
        archive.publish(&[library("2"), headers("2")], &[]);
        archive.pretend_installed(&[library("2")]);
        install(&archive.apt(), "libglib2.0-dev").unwrap();
        assert_eq!(archive.answers_for(&headers("2")), [200]);
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn installation_that_fails_after_refresh_names_package_and_cause() {
        let archive = Archive::new();
        archive.publish(&[], &[]);
        archive.update_lists();
        let error = chain(&install(&archive.apt(), "meson").unwrap_err());
        assert!(error.starts_with("cannot install meson; "), "{error}");
        assert!(error.ends_with("E: Unable to locate package meson"), "{error}");
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn remedy_depends_on_the_hosts_package_manager() {
        let tools = [Prerequisite::Gcc, Prerequisite::Ninja];
        let with_apt = "install with: sudo apt-get update && sudo apt-get install -y gcc ninja-build";
        assert_eq!(by_hand(&tools, true), with_apt);
        assert_eq!(by_hand(&tools, false), "install the equivalents of the Debian packages gcc ninja-build");
        let absent = [Prerequisite::Apt, Prerequisite::Keyring];
        let error = refusal(&absent, by_hand(&absent, false)).to_string();
        assert!(error.starts_with("this host lacks apt-get, the keys of Debian's archives; run this in"), "{error}");
        assert!(error.contains("images boot --direct --kernel") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn programs_are_found_and_static_ones_recognised() {
        let shell = find("sh").unwrap();
        assert!(!is_static(&shell));
        assert!(find("no-such-program-anywhere").is_none());
        assert!(!is_static(Path::new("/etc/passwd")));
        assert!(is_elf(&shell) && !is_elf(Path::new("/etc/passwd")) && !is_elf(Path::new("/")));
        assert!(ensure(&[]).is_ok());
    }
}
