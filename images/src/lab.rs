//! The lab: a KVM host in a box. QEMU emulates a CPU with SVM; a stock kernel loads KVM on it.

use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::cache::Cache;
use crate::clock;
use crate::process::{self, ProcessError};
use crate::qemu::{self, QemuError};

/// Where Debian's packages have what the machine starts with.
const FIRMWARE: [&str; 2] = ["/usr/share/seabios", "/usr/share/qemu"];
/// The port of QEMU's `isa-debug-exit`.
pub const EXIT_PORT: u16 = 0xf4;
/// What the lab needs besides the guest's memory: kernel, archives and what it copies of them.
const OWN_MEMORY_MIB: u32 = 768;
/// The kernel's self-test of its ciphers would be 40 % of its boot. Above loglevel 2 (a dying
/// kernel) are remarks that must not get between the lines of the guest's console. Its TSC and
/// the timer it would check that against are one host clock, read late when the host is busy.
const CMDLINE: &str = "console=ttyS0 loglevel=2 nokaslr mitigations=off reboot=t panic=-1 \
    random.trust_cpu=on cryptomgr.notests tsc=reliable";
/// The exact lab's TSC: one nanosecond an instruction.
const EXACT_TSC_KHZ: u32 = 1_000_000;

/// Why there is no lab.
#[derive(Debug, Error)]
pub enum LabError {
    /// No QEMU.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// QEMU does not tell its version.
    #[error("cannot use the lab's QEMU")]
    Version(#[from] ProcessError),
}

/// A QEMU that can be the lab's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lab {
    qemu: PathBuf,
    version: (u32, u32),
    exact: bool,
    tsc_khz: u32,
}

impl Lab {
    /// Gets QEMU. `exact`: time is instructions retired, and runs repeat bit for bit.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn get(cache: &Cache, exact: bool) -> Result<Self, LabError> {
        let qemu = qemu::get(cache)?;
        let text = process::output(Command::new(&qemu).arg("--version"))?;
        Ok(Self {
            qemu,
            version: version(&String::from_utf8_lossy(&text)),
            exact,
            tsc_khz: if exact {
                EXACT_TSC_KHZ
            } else {
                clock::tsc_khz()
            },
        })
    }

    /// QEMU's version, as in `7.2 with a fix`.
    pub fn version(&self) -> String {
        let (major, minor) = self.version;
        format!("{major}.{minor} with {}", qemu::FIX_NAME)
    }

    /// The command that runs the lab. Its exit code is 1 when the lab ended by itself.
    pub fn command(&self, kernel: &Path, initramfs: &Path, guest_memory_mib: u32) -> Command {
        let mut qemu = Command::new(&self.qemu);
        for directory in FIRMWARE {
            qemu.args(["-L", directory]);
        }
        let memory = guest_memory_mib.saturating_add(OWN_MEMORY_MIB);
        // One processor: boots are no faster with more.
        qemu.args(["-M", "q35", "-m", &memory.to_string(), "-smp", "1"]);
        // Without XSAVE: TCG lets a guest's XSETBV past KVM, whose CPUID then contradicts it.
        if self.exact {
            qemu.args([
                "-accel",
                "tcg,thread=single",
                "-icount",
                "shift=0,sleep=off",
            ]);
            qemu.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
            qemu.args(["-cpu", "EPYC,+svm,-xsave,-rdrand,-rdseed"]);
        } else {
            qemu.args(["-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,-xsave"]);
        }
        qemu.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        qemu.args(["-serial", "stdio"]);
        qemu.args([
            "-device",
            &format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=4"),
        ]);
        qemu.arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .arg("-append")
            .arg(format!("{CMDLINE} tsc_early_khz={}", self.tsc_khz));
        qemu
    }
}

fn version(text: &str) -> (u32, u32) {
    let number = text.split("version ").nth(1).unwrap_or("");
    let mut parts = number
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().ok());
    let mut next = || parts.next().flatten().unwrap_or(0);
    (next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(
            version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)"),
            (7, 2)
        );
        assert_eq!(version("QEMU emulator version 10.0.2"), (10, 0));
        assert_eq!(version("something else"), (0, 0));
    }

    #[test]
    fn the_exact_lab_counts_instructions() {
        let arguments = |exact| {
            let lab = Lab {
                qemu: PathBuf::from("qemu"),
                version: (7, 2),
                exact,
                tsc_khz: 2_500_000,
            };
            let command = lab.command(Path::new("k"), Path::new("i"), 256);
            format!("{:?}", command.get_args().collect::<Vec<_>>())
        };
        assert!(arguments(true).contains("icount"));
        assert!(!arguments(false).contains("icount"));
        assert!(arguments(false).contains("\"1024\""));
        assert!(arguments(false).contains(" tsc_early_khz=2500000\""));
    }
}
