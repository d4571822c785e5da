//! The lab: an emulated KVM host. QEMU emulates a CPU with SVM or EL2, so that the CPU can run guests. A stock kernel
//! provides KVM on this CPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::arch::Arch;
use crate::cache::Cache;
use crate::clock;
use crate::kernel::DEFAULT_SERIES;
use crate::process::{self, ProcessError};
use crate::qemu::{self, QemuError};
use crate::unpacked::UnpackedError;

/// The port of QEMU's `isa-debug-exit`.
const EXIT_PORT: u16 = 0xf4;
/// How much more memory the lab has than its guest: room for the lab's kernel, the initramfs archives and their
/// unpacked files.
const OWN_MEMORY_MIB: u32 = 768;
/// Without `cryptomgr.notests`, the self-test of ciphers would take 40 % of the boot. With `loglevel=2`, only messages
/// of a crashing kernel appear between the lines of the guest's console.
const CMDLINE: &str = "loglevel=2 nokaslr mitigations=off reboot=t panic=-1 \
    random.trust_cpu=on cryptomgr.notests";
/// Without `tsc=reliable`, the kernel checks its TSC against another timer. QEMU emulates both from the host's clock.
/// A busy host may read them late, and the TSC would seem unstable. Without `no_timer_check`, the kernel panics if it
/// does not get five timer interrupts (20 ms) in 160 million cycles of its TSC. A busy host may run QEMU's timer thread
/// too late for that.
pub(crate) const CLOCK: &str = "tsc=reliable no_timer_check";
/// Without this, the kernel keeps one of the CPU's counters for its watchdog.
const COUNTERS: &str = "nmi_watchdog=0";
/// The frequency of the exact lab's TSC: one tick per nanosecond. Each instruction takes one nanosecond there.
const EXACT_TSC_KHZ: u32 = 1_000_000;

/// Errors of getting the lab.
#[derive(Debug, Error)]
pub enum LabError {
    /// QEMU is missing.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// The machine's firmware is missing.
    #[error(transparent)]
    Firmware(#[from] UnpackedError),
    /// QEMU does not report its version.
    #[error("cannot use the lab's QEMU")]
    Version(#[from] ProcessError),
}

/// A QEMU that can be the lab's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lab {
    arch: Arch,
    qemu: PathBuf,
    /// The directories of the firmware.
    firmware: Vec<PathBuf>,
    version: (u32, u32),
    exact: bool,
}

impl Lab {
    /// Gets QEMU. With `exact`, time advances only with executed instructions, so runs repeat bit for bit.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn get(cache: &Cache, arch: Arch, exact: bool) -> Result<Self, LabError> {
        let qemu = qemu::get(cache, arch)?;
        let firmware = match arch {
            Arch::X86_64 => qemu::firmware(cache)?.to_vec(),
            Arch::Aarch64 => Vec::new(),
        };
        let text = process::output(Command::new(&qemu).arg("--version"))?;
        Ok(Self { arch, qemu, firmware, version: version(&String::from_utf8_lossy(&text)), exact })
    }

    /// QEMU's version, as in `7.2 with the lab's fixes`.
    pub fn version(&self) -> String {
        let (major, minor) = self.version;
        format!("{major}.{minor} with the lab's fixes")
    }

    /// The series of the lab's kernel. Before Linux 6.6, KVM on aarch64 loses the guest's counts of an event that moves
    /// to another counter while the vCPU is loaded.
    pub(crate) fn series(&self) -> &'static str {
        match self.arch {
            Arch::X86_64 => DEFAULT_SERIES,
            Arch::Aarch64 => "6.12",
        }
    }

    /// The QEMU command that runs the lab. QEMU ends when the shell command of [`Lab::end`] runs inside the lab.
    pub fn command(&self, kernel: &Path, initramfs: &Path, guest_memory_mib: u32) -> Command {
        let memory = guest_memory_mib.saturating_add(OWN_MEMORY_MIB);
        let mut qemu = Command::new(&self.qemu);
        qemu.args(["-m", &memory.to_string(), "-smp", self.processors()]);
        let cmdline = match self.arch {
            Arch::X86_64 => self.x86_64(&mut qemu),
            Arch::Aarch64 => self.aarch64(&mut qemu),
        };
        if self.exact {
            qemu.args(["-icount", "shift=0,sleep=off"]);
            qemu.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
        }
        qemu.args(["-nodefaults", "-no-user-config"]);
        qemu.args(["-display", "none", "-serial", "stdio", "-no-reboot"]);
        qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).arg("-append").arg(cmdline);
        qemu
    }

    /// The shell command that ends the lab.
    pub fn end(&self) -> String {
        match self.arch {
            Arch::X86_64 => format!("outb {EXIT_PORT:#x} 0"),
            Arch::Aarch64 => "poweroff -f".to_owned(),
        }
    }

    /// Adds the machine's arguments; returns the kernel's command line.
    fn x86_64(&self, qemu: &mut Command) -> String {
        for directory in &self.firmware {
            qemu.arg("-L").arg(directory);
        }
        qemu.args(["-M", "q35"]);
        // Leave out XSAVE: TCG does not intercept a guest's XSETBV, so the CPUID that KVM emulates for the guest
        // would not match the guest's XCR0. With `pause-filter`, KVM runs another vCPU of the guest in place of a
        // spinning vCPU. The exact lab does not need `pause-filter`, because its guests have only one vCPU.
        let tsc_khz = if self.exact {
            qemu.args(["-accel", "tcg,thread=single"]);
            // `perfctr-core` gives the CPU counters. QEMU has them only with `-icount`.
            qemu.args(["-cpu", "EPYC,+svm,+perfctr-core,-xsave,-rdrand,-rdseed"]);
            EXACT_TSC_KHZ
        } else {
            qemu.args(["-accel", "tcg,thread=multi"]);
            qemu.args(["-cpu", "EPYC,+svm,-xsave,+pause-filter,+pfthreshold"]);
            clock::tsc_khz()
        };
        let exit = format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=4");
        qemu.args(["-device", &exit]);
        format!("console=ttyS0 {CMDLINE} {CLOCK} {COUNTERS} tsc_early_khz={tsc_khz}")
    }

    /// Like [`Lab::x86_64`], for a CPU that has EL2 and event counters. The counters are exact in the exact lab.
    fn aarch64(&self, qemu: &mut Command) -> String {
        qemu.args(["-M", "virt,virtualization=on,gic-version=3"]);
        if self.exact {
            // Use QEMU's own algorithm for pointer authentication. With the architecture's algorithm, the lab would
            // spend most of its time emulating this algorithm.
            qemu.args(["-accel", "tcg,thread=single", "-cpu", "max,pauth-impdef=on"]);
        } else {
            // Use a processor whose events user-space libraries know.
            qemu.args(["-accel", "tcg,thread=multi", "-cpu", "neoverse-n1"]);
        }
        format!("console=ttyAMA0 {CMDLINE}")
    }

    /// The number of the lab's processors. A boot is no faster with more than one. Only the inexact aarch64 lab has
    /// two. With one, a vCPU that waits for another vCPU would run until its time slice ends, because KVM on aarch64
    /// does not yield to a vCPU that was preempted in user mode.
    fn processors(&self) -> &'static str {
        match (self.arch, self.exact) {
            (Arch::Aarch64, false) => "2",
            _ => "1",
        }
    }
}

fn version(text: &str) -> (u32, u32) {
    let number = text.split("version ").nth(1).unwrap_or("");
    let mut parts = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    let mut next = || parts.next().flatten().unwrap_or(0);
    (next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)"), (7, 2));
        assert_eq!(version("QEMU emulator version 10.0.2"), (10, 0));
        assert_eq!(version("something else"), (0, 0));
    }

    fn arguments(arch: Arch, exact: bool) -> String {
        let lab = Lab { arch, qemu: PathBuf::from("qemu"), firmware: Vec::new(), version: (7, 2), exact };
        let command = lab.command(Path::new("k"), Path::new("i"), 256);
        format!("{:?}", command.get_args().collect::<Vec<_>>())
    }

    #[test]
    fn exact_lab_has_icount() {
        for arch in [Arch::X86_64, Arch::Aarch64] {
            assert!(arguments(arch, true).contains("icount"));
            assert!(!arguments(arch, false).contains("icount"));
            assert!(arguments(arch, false).contains("\"1024\""));
        }
    }

    #[test]
    fn exact_x86_lab_has_counters() {
        assert!(arguments(Arch::X86_64, true).contains("+perfctr-core"));
        assert!(!arguments(Arch::X86_64, false).contains("perfctr"));
    }

    #[test]
    fn inexact_x86_lab_has_filter_of_pauses() {
        let filter = "+pause-filter,+pfthreshold";
        assert!(arguments(Arch::X86_64, false).contains(filter));
        assert!(!arguments(Arch::X86_64, true).contains(filter));
    }

    #[test]
    fn lab_command_line_has_tsc_and_console() {
        let exact = arguments(Arch::X86_64, true);
        assert!(exact.contains(" tsc_early_khz=1000000\""), "{exact}");
        let plain = arguments(Arch::X86_64, false);
        assert!(plain.contains("console=ttyS0 ") && plain.contains(" tsc_early_khz="));
        let clock = " tsc=reliable no_timer_check ";
        assert!(exact.contains(clock) && plain.contains(clock), "{plain}");
        let other = arguments(Arch::Aarch64, true);
        assert!(other.contains("console=ttyAMA0 ") && !other.contains("tsc"), "{other}");
    }
}
