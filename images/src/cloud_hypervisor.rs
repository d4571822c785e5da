//! Cloud Hypervisor, which runs a guest while the device is in a process of its own. Debian has no package of it, so the
//! user names its program.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{self, ProcessError};
use crate::stock_qemu::Machine;
use crate::third_party::{self, Files, ThirdPartyError};

const PROGRAM: &str = "cloud-hypervisor";

/// A Cloud Hypervisor of the user's.
#[derive(Clone, Debug)]
pub(crate) struct CloudHypervisor {
    program: PathBuf,
    version: String,
}

impl CloudHypervisor {
    /// The program at `program`.
    ///
    /// # Errors
    /// The program does not report its version.
    pub(crate) fn at(program: &Path) -> Result<Self, ProcessError> {
        let text = process::output(Command::new(program).arg("--version"))?;
        Ok(Self { program: program.to_owned(), version: version(&String::from_utf8_lossy(&text)) })
    }

    /// Its version, as in `53.0`.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// The command that runs `machine`.
    pub(crate) fn command(&self, machine: &Machine<'_>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments(machine));
        command
    }

    /// The program and its libraries, for the lab's host, where [`typed`] runs it.
    ///
    /// # Errors
    /// [`ThirdPartyError`].
    pub(crate) fn files(&self) -> Result<Files, ThirdPartyError> {
        third_party::with_libraries(PROGRAM, &self.program)
    }
}

/// The command line of `machine`, to be typed where Cloud Hypervisor is installed.
pub(crate) fn typed(machine: &Machine<'_>) -> String {
    let words = arguments(machine);
    [PROGRAM.to_owned()].into_iter().chain(words.iter().map(|word| process::shown(word))).collect::<Vec<_>>().join(" ")
}

/// Its arguments. The guest's console is its stdout, and it ends when the guest powers off.
fn arguments(machine: &Machine<'_>) -> Vec<String> {
    [
        ["--cpus", &format!("boot={}", machine.vcpus)],
        // The device's process maps the guest's memory.
        ["--memory", &format!("size={}M,shared=on", machine.memory_mib)],
        ["--user-device", &format!("socket={}", machine.socket)],
        ["--kernel", machine.kernel],
        ["--initramfs", machine.initramfs],
        ["--cmdline", machine.cmdline],
        ["--serial", "tty"],
        ["--console", "off"],
    ]
    .iter()
    .flatten()
    .map(|&word| word.to_owned())
    .chain(machine.more.iter().cloned())
    .collect()
}

/// The version in the output of `--version`.
fn version(text: &str) -> String {
    let version = text.split_whitespace().nth(1).unwrap_or("of unknown version");
    version.strip_prefix('v').unwrap_or(version).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stock_qemu::Acceleration;

    #[test]
    fn machine_shares_its_memory_with_the_device() {
        let more = ["--pvpanic".to_owned()];
        let machine = Machine {
            acceleration: Acceleration::Kvm,
            vcpus: 3,
            memory_mib: 256,
            socket: "/tmp/socket",
            kernel: "vmlinux",
            initramfs: "initramfs",
            cmdline: "console=ttyS0 quiet",
            more: &more,
        };
        let line = typed(&machine);
        for words in [
            "cloud-hypervisor --cpus boot=3 ",
            " --memory size=256M,shared=on ",
            " --user-device socket=/tmp/socket ",
            " --cmdline 'console=ttyS0 quiet' ",
        ] {
            assert!(line.contains(words), "{line}");
        }
        assert!(line.ends_with(" --pvpanic"), "{line}");
    }

    #[test]
    fn versions() {
        assert_eq!(
            version("cloud-hypervisor v53.0-246-gae44c2971\nMigration Protocol Versions: 0\n"),
            "53.0-246-gae44c2971"
        );
        assert_eq!(version("something"), "of unknown version");
    }
}
