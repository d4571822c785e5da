//! A stock QEMU, which runs a guest while the device is in a process of its own. QEMU reaches the device by vfio-user,
//! which QEMU has since 10.1. Debian's newest backport has it. Its programs need a newer C library than Debian 12 has, so
//! they run with the loader and the libraries of their own release.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Release};
use crate::arch::Arch;
use crate::cache::Cache;
use crate::process::{self, ProcessError};
use crate::unpacked::{self, Files, UnpackedError};

const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "qemu-system-x86_64";
/// The loader and the directory of libraries, below the root.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The directories of firmware, below the root.
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// The firmware of a machine that boots a kernel.
const ROMS: [&str; 3] = ["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin"];

/// Errors of getting a stock QEMU.
#[derive(Debug, Error)]
pub enum StockQemuError {
    /// Debian's lists are not available.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// Its packages could not be fetched.
    #[error(transparent)]
    Unpacked(#[from] UnpackedError),
    /// QEMU does not report its version.
    #[error("cannot use Debian's QEMU")]
    Version(#[source] ProcessError),
}

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceleration {
    /// On the processor, with this machine's KVM.
    Kvm,
    /// By emulation, with one thread for each vCPU.
    Tcg,
}

impl fmt::Display for Acceleration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        })
    }
}

/// A machine for QEMU to run.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// How the guest's instructions run.
    pub acceleration: Acceleration,
    /// The number of vCPUs.
    pub vcpus: u32,
    /// The guest's memory.
    pub memory_mib: u32,
    /// The socket of the process that has the device.
    pub socket: &'a str,
    /// The guest's kernel.
    pub kernel: &'a str,
    /// The guest's initramfs.
    pub initramfs: &'a str,
    /// The guest kernel's command line.
    pub cmdline: &'a str,
    /// More arguments.
    pub more: &'a [String],
}

impl Machine<'_> {
    /// QEMU's arguments. The guest's console is QEMU's stdout, and QEMU ends when the guest powers off or resets.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let (accel, cpu) = match self.acceleration {
            Acceleration::Kvm => ("kvm", "host"),
            Acceleration::Tcg => ("tcg,thread=multi", "max"),
        };
        let socket = serde_json::json!({"type": "unix", "path": self.socket});
        let device = serde_json::json!({"driver": "vfio-user-pci", "socket": socket});
        let memory = self.memory_mib;
        [
            // The device's process finds the threads of the vCPUs by their names.
            ["-name", "vpmu,debug-threads=on"],
            ["-M", "q35,memory-backend=ram"],
            ["-accel", accel],
            ["-cpu", cpu],
            ["-smp", &self.vcpus.to_string()],
            ["-m", &memory.to_string()],
            // The device's process maps the guest's memory.
            ["-object", &format!("memory-backend-memfd,id=ram,size={memory}M,share=on")],
            ["-device", &device.to_string()],
            ["-kernel", self.kernel],
            ["-initrd", self.initramfs],
            ["-append", self.cmdline],
            ["-display", "none"],
            ["-serial", "stdio"],
        ]
        .iter()
        .flatten()
        .chain(&["-nodefaults", "-no-user-config", "-no-reboot"])
        .map(|&word| word.to_owned())
        .chain(self.more.iter().cloned())
        .collect()
    }
}

/// A stock QEMU in the cache.
#[derive(Clone, Debug)]
pub struct StockQemu {
    /// The directory that has the files of its packages.
    root: PathBuf,
    version: String,
}

impl StockQemu {
    /// Gets QEMU; the first call fetches it.
    ///
    /// # Errors
    /// [`StockQemuError`].
    pub fn get(cache: &Cache) -> Result<Self, StockQemuError> {
        let apt = Apt::of_release(Release::Trixie, Arch::X86_64)?;
        let root = unpacked::directory(cache, apt, &[PACKAGE])?;
        let text = process::output(program(&root).arg("--version")).map_err(StockQemuError::Version)?;
        Ok(Self { version: version(&String::from_utf8_lossy(&text)), root })
    }

    /// QEMU's version, as in `11.1.3`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The command that runs `machine`.
    #[must_use]
    pub fn command(&self, machine: &Machine<'_>) -> Command {
        let mut command = program(&self.root);
        for directory in FIRMWARE {
            command.arg("-L").arg(self.root.join(directory));
        }
        command.args(machine.arguments());
        command
    }

    /// The files of [`PROGRAM`] for the lab's host, where [`typed`] runs it: path without the leading slash, contents.
    ///
    /// # Errors
    /// [`StockQemuError::Unpacked`].
    pub fn files(&self) -> Result<Files, StockQemuError> {
        let mut files = unpacked::with_libraries(&self.root, Arch::X86_64, PROGRAM)?;
        for rom in ROMS {
            let found =
                FIRMWARE.map(|directory| self.root.join(directory).join(rom)).into_iter().find(|rom| rom.exists());
            let found = found.unwrap_or_else(|| self.root.join(FIRMWARE[0]).join(rom));
            files.push((format!("{}/{rom}", FIRMWARE[0]), unpacked::read(&found)?));
        }
        Ok(files)
    }
}

/// The command line of `machine`, to be typed where QEMU is installed.
#[must_use]
pub fn typed(machine: &Machine<'_>) -> String {
    let words = machine.arguments();
    [PROGRAM.to_owned()].into_iter().chain(words.iter().map(|word| process::shown(word))).collect::<Vec<_>>().join(" ")
}

/// QEMU's errors in its output on stderr, without its warnings.
pub(crate) fn errors(stderr: &str) -> String {
    stderr.lines().filter(|line| !line.contains(": warning: ")).collect::<Vec<_>>().join("\n")
}

fn program(root: &Path) -> Command {
    let mut command = Command::new(root.join(LOADER));
    command.arg("--library-path").arg(root.join(LIBRARIES)).arg(root.join("usr/bin").join(PROGRAM));
    command
}

/// The version in the output of `--version`.
fn version(text: &str) -> String {
    let version = text.split_once("version ").map_or("", |(_, rest)| rest);
    version.split_whitespace().next().unwrap_or("of unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine<'_> = Machine {
        acceleration: Acceleration::Tcg,
        vcpus: 3,
        memory_mib: 256,
        socket: "/tmp/a \"socket\"",
        kernel: "vmlinux",
        initramfs: "initramfs",
        cmdline: "console=ttyS0 quiet",
        more: &[],
    };

    /// Returns the argument after `name`.
    fn after(arguments: &[String], name: &str) -> String {
        let at = arguments.iter().position(|argument| argument == name).unwrap();
        arguments[at + 1].clone()
    }

    #[test]
    fn machine_shares_its_memory_with_the_device() {
        let arguments = MACHINE.arguments();
        let object = after(&arguments, "-object");
        assert_eq!(object, "memory-backend-memfd,id=ram,size=256M,share=on");
        assert_eq!((after(&arguments, "-m"), after(&arguments, "-smp")), ("256".to_owned(), "3".to_owned()));
        let device: serde_json::Value = serde_json::from_str(&after(&arguments, "-device")).unwrap();
        assert_eq!(device["driver"], "vfio-user-pci");
        assert_eq!(device["socket"]["path"], MACHINE.socket);
    }

    #[test]
    fn more_arguments_follow_the_machines() {
        let more = ["-qmp", "unix:q,server=on,wait=off"].map(str::to_owned);
        assert!(Machine { more: &more, ..MACHINE }.arguments().ends_with(&more));
    }

    #[test]
    fn acceleration_selects_the_processor() {
        let of = |acceleration| {
            let arguments = Machine { acceleration, ..MACHINE }.arguments();
            (after(&arguments, "-accel"), after(&arguments, "-cpu"))
        };
        assert_eq!(of(Acceleration::Kvm), ("kvm".to_owned(), "host".to_owned()));
        assert_eq!(of(Acceleration::Tcg), ("tcg,thread=multi".to_owned(), "max".to_owned()));
    }

    #[test]
    fn typed_command_reaches_the_program_word_for_word() {
        let typed = typed(&MACHINE).replacen(PROGRAM, "printf '%s\\n'", 1);
        let output = process::output(Command::new("sh").args(["-c", &typed])).unwrap();
        let words: Vec<String> = String::from_utf8(output).unwrap().lines().map(str::to_owned).collect();
        assert_eq!(words, MACHINE.arguments());
    }

    #[test]
    fn program_runs_with_its_own_loader_and_libraries() {
        let qemu = StockQemu { root: "/r".into(), version: String::new() };
        let command = qemu.command(&MACHINE);
        assert_eq!(command.get_program(), "/r/usr/lib64/ld-linux-x86-64.so.2");
        let begin: Vec<_> = command.get_args().take(5).collect();
        let expected = [
            "--library-path",
            "/r/usr/lib/x86_64-linux-gnu",
            "/r/usr/bin/qemu-system-x86_64",
            "-L",
            "/r/usr/share/qemu",
        ];
        assert_eq!(begin, expected);
    }

    #[test]
    fn warnings_are_not_errors() {
        let stderr = "qemu: -device {}: warning: vfio: no error recovery\nqemu: -device {}: Connection refused\n";
        assert_eq!(errors(stderr), "qemu: -device {}: Connection refused");
    }

    #[test]
    fn versions() {
        assert_eq!(version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\nCopyright"), "11.1.3");
        assert_eq!(version("something else"), "of unknown version");
    }
}
