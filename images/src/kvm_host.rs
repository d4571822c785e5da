//! Selects the machine for guests: this machine's KVM if a stock kernel boots there, else the lab.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thiserror::Error;

use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::{DigestError, Key};
use crate::file_error::FileError;
use crate::progress::Step;
use crate::stock_qemu::Acceleration;
use crate::sys;

/// Errors of choosing the machine.
#[derive(Debug, Error)]
pub enum KvmHostError {
    /// The VMM could not be started.
    #[error("cannot start {program} to check whether this machine's KVM boots a stock kernel")]
    Start {
        /// The VMM.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The VMM's answer lacks the verdict on stock kernels.
    #[error("`vmm check --json` does not report whether a stock kernel boots here; choose with --lab or --direct")]
    Answer,
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The VMM could not be read.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The caller's choice of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvmHostChoice {
    /// On this machine's KVM if a stock kernel boots there, else in the lab.
    #[default]
    Auto,
    /// On this machine's KVM if a stock kernel boots there, else in the exact lab.
    AutoExact,
    /// On this machine's KVM.
    Direct,
    /// In the lab.
    Lab,
    /// In the exact lab, where time advances only with executed instructions.
    Exact,
}

/// Where another VMM ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Here,
    /// In the lab.
    Lab,
    /// In the exact lab.
    ExactLab,
}

/// The machine that a guest ran on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmHost {
    /// On this machine's KVM.
    Direct,
    /// In the lab.
    Lab {
        /// The emulated architecture.
        arch: Arch,
        /// QEMU's version.
        qemu: String,
        /// Whether time advanced only with executed instructions.
        exact: bool,
    },
    /// In another VMM, beside the device's process.
    Beside {
        /// The VMM and its version.
        vmm: String,
        /// How the guest's instructions ran.
        acceleration: Acceleration,
        /// Where the VMM ran.
        place: Place,
    },
}

impl fmt::Display for KvmHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => write!(f, "direct KVM"),
            Self::Lab { arch, qemu, exact: false } => write!(f, "lab ({arch}, QEMU TCG {qemu}, emulated)"),
            Self::Beside { vmm, acceleration, place } => {
                let place = match place {
                    Place::Here => "",
                    Place::Lab => " of the lab",
                    Place::ExactLab => " of the exact lab",
                };
                write!(f, "{vmm} ({acceleration}{place}, the device beside it)")
            }
            Self::Lab { arch, qemu, exact: true } => write!(f, "exact lab ({arch}, QEMU TCG {qemu}, icount, emulated)"),
        }
    }
}

/// Whether a stock kernel boots on this machine's KVM, according to `vmm check`. The answer is kept until the
/// machine's next boot, or until the VMM, the permissions of /dev/kvm or the user (root or not) change.
///
/// # Errors
/// [`KvmHostError`].
pub fn stock_kernel_boots(cache: &Cache, vmm: &Path) -> Result<bool, KvmHostError> {
    let state = |path: &str| match fs::metadata(path) {
        Ok(meta) => format!("{:o} {} {} {}", meta.mode(), meta.uid(), meta.gid(), meta.rdev()),
        Err(error) => error.kind().to_string(),
    };
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let key = Key::new("kvm-host").file("vmm", vmm)?.text("boot", &boot);
    let key = key.text("kvm", &state("/dev/kvm")).text("us", &format!("{}", sys::is_root()));
    let place = cache.get("kvm-host", &key.hex(), |dir| {
        let step = Step::new("checking whether this machine's KVM boots a stock kernel");
        let answer = if ask(vmm)? { "yes" } else { "no" };
        let file = dir.join("stock-kernel");
        fs::write(&file, answer).map_err(FileError::at(&file))?;
        step.done();
        Ok::<_, KvmHostError>(())
    })?;
    let file = place.join("stock-kernel");
    let answer = fs::read_to_string(&file);
    Ok(answer.map_err(FileError::at(&file))? == "yes")
}

/// Runs `vmm check`. Its exit code reports whether any guest runs at all, so it is ignored.
fn ask(vmm: &Path) -> Result<bool, KvmHostError> {
    let mut command = Command::new(vmm);
    command.args(["check", "--json"]).stdin(Stdio::null());
    let output = sys::dies_with_us(&mut command).output();
    let output = output.map_err(|source| KvmHostError::Start { program: vmm.to_owned(), source })?;
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).map_err(|_| KvmHostError::Answer)?;
    answer["stock_kernel"].as_bool().ok_or(KvmHostError::Answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmm(directory: &Path, script: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = directory.join("vmm");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn verdict_of_the_vmm_is_asked_for_once() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let count = directory.path().join("count");
        let script = format!("echo >> {}; echo '{{\"stock_kernel\": true}}'; exit 1", count.display());
        let vmm = vmm(directory.path(), &script);
        for _ in 0..2 {
            assert!(stock_kernel_boots(&cache, &vmm).unwrap());
        }
        assert_eq!(fs::read(count).unwrap(), b"\n");
    }

    #[test]
    fn silent_vmm_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        for script in ["true", "echo '{}'", "echo broken"] {
            let vmm = vmm(directory.path(), script);
            let answer = stock_kernel_boots(&cache, &vmm);
            assert!(matches!(answer, Err(KvmHostError::Answer)), "{script}");
        }
    }

    #[test]
    fn kvm_hosts_have_names() {
        let lab = |arch, exact| KvmHost::Lab { arch, qemu: "7.2".to_owned(), exact }.to_string();
        assert_eq!(KvmHost::Direct.to_string(), "direct KVM");
        let x86 = lab(Arch::X86_64, false);
        assert_eq!(x86, "lab (x86, QEMU TCG 7.2, emulated)");
        let exact = lab(Arch::Aarch64, true);
        assert!(exact.starts_with("exact lab (aarch64, "), "{exact}");
        let beside = |acceleration, place| {
            KvmHost::Beside { vmm: "stock QEMU 11.1.3".to_owned(), acceleration, place }.to_string()
        };
        assert_eq!(beside(Acceleration::Tcg, Place::Here), "stock QEMU 11.1.3 (TCG, the device beside it)");
        let exact = beside(Acceleration::Kvm, Place::ExactLab);
        assert_eq!(exact, "stock QEMU 11.1.3 (KVM of the exact lab, the device beside it)");
    }
}
