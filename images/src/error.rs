//! The errors from running a command in a guest.

use std::io;
use std::path::PathBuf;

use crate::arch::Arch;
use crate::cache::CacheError;
use crate::cpio::CpioError;
use crate::daemon::DaemonError;
use crate::file_error::FileError;
use crate::initramfs::InitramfsError;
use crate::kernel::KernelError;
use crate::kvm_host::{KvmHost, KvmHostError};
use crate::lab::LabError;
use crate::machine::MachineError;
use crate::module::ModuleError;
use crate::process::ProcessError;
use crate::programs::ProgramError;
use crate::stock_qemu::StockQemuError;
use crate::third_party::ThirdPartyError;

/// Errors from running a command in a guest.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel is not available.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The driver could not be built.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The programs could not be built.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The initramfs could not be packed.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A file that the caller added cannot be put into the initramfs.
    #[error(transparent)]
    File(#[from] CpioError),
    /// The lab is not available.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The KVM host could not be chosen.
    #[error(transparent)]
    KvmHost(#[from] KvmHostError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The boot needs several vCPUs, but in this exact lab only a guest with one vCPU runs reliably.
    #[error("with --exact, the x86 lab runs only guests with one vCPU, not {0}: guests with more vCPUs can hang")]
    ExactVcpus(u32),
    /// A guest that this machine's processors cannot run.
    #[error("this machine's KVM cannot run {0} guests: omit --direct to use the lab")]
    ForeignDirect(Arch),
    /// A setting of the boot needs this project's VMM, but another VMM is to run the guest.
    #[error("with another VMM, {0}")]
    WithOtherVmm(&'static str),
    /// The stock QEMU is not available.
    #[error(transparent)]
    StockQemu(#[from] StockQemuError),
    /// The program is not one that reports its version.
    #[error("cannot use this Cloud Hypervisor: name the path of its program")]
    CloudHypervisor(#[source] ProcessError),
    /// The program cannot run in the lab.
    #[error("cannot put Cloud Hypervisor into the lab")]
    Libraries(#[source] ThirdPartyError),
    /// The device's own process did not start.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The command ended, but the device's own process failed.
    #[error("the guest's command ended with {status}, but the device's own process failed")]
    DaemonFailed {
        /// The command's exit code.
        status: i32,
        /// The command's output.
        output: String,
        /// How the process failed.
        #[source]
        source: DaemonError,
    },
    /// The run failed. The device's own process may have logged why.
    #[error("the guest of the other VMM failed ({daemon})")]
    Beside {
        /// The log of the device's process, or how it failed, too.
        daemon: String,
        /// The failure of the run.
        #[source]
        source: Box<BootError>,
    },
    /// The console's output could not be written.
    #[error(transparent)]
    Console(#[from] FileError),
    /// A temporary file could not be written.
    #[error("cannot write a temporary file; check free space and TMPDIR")]
    Temporary(#[source] io::Error),
    /// The machine did not start, or did not end in time.
    #[error("{kvm_host}: the guest did not run; its console output is in {console}")]
    Machine {
        /// The machine that the guest ran on.
        kvm_host: KvmHost,
        /// The bytes of the guest's console.
        console: PathBuf,
        /// The command's output until then.
        output: String,
        /// The cause.
        #[source]
        source: MachineError,
    },
    /// The machine ended before its command did, or the VMM failed.
    #[error("{kvm_host}: {what}; its console output is in {console}")]
    Ended {
        /// The machine that the guest ran on.
        kvm_host: KvmHost,
        /// Description of the end.
        what: String,
        /// The bytes of the guest's console.
        console: PathBuf,
        /// The command's output until then.
        output: String,
    },
}

impl BootError {
    /// Returns the command's output until the machine failed. The output is empty if the command never began.
    #[must_use]
    pub fn output(&self) -> &str {
        match self {
            Self::Machine { output, .. } | Self::Ended { output, .. } | Self::DaemonFailed { output, .. } => output,
            Self::Beside { source, .. } => source.output(),
            _ => "",
        }
    }
}
