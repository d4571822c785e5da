//! Errors of a machine.

use std::io;
use std::path::PathBuf;

use crate::arch::{boot, cpus, kernel, state};
use crate::{board, confine, ctl, event_loop, exit, kvm, memory, operator, signal, snapshot};

/// Errors from building or running a machine.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file of the configuration cannot be opened.
    #[error("cannot open the {what} {path}")]
    Open {
        /// The file's purpose.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The path is a directory or a device, but a file is needed.
    #[error("the {what} {path} is not a file")]
    NotFile {
        /// Its purpose.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The kernel cannot be loaded.
    #[error("the kernel {path}")]
    Kernel {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: kernel::KernelError,
    },
    /// The file of --vmlinux has no usable ORC tables.
    #[error("cannot use the vmlinux {path}")]
    Vmlinux {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: vpmu::orc::OrcError,
    },
    /// The configuration has no kernel. This is a bug: every machine that boots needs a kernel. Only a restored machine
    /// that never boots can do without.
    #[error("there is no kernel to boot")]
    NothingToBoot,
    /// The snapshot cannot be restored.
    #[error(transparent)]
    Snapshot(#[from] snapshot::SnapshotError),
    /// This KVM cannot save a machine.
    #[error("--ctl needs a KVM that can save the machine, and this KVM cannot; run without --ctl")]
    Saver(#[source] state::StateError),
    /// KVM cannot be opened, or it refuses a request.
    #[error(transparent)]
    Kvm(#[from] kvm::KvmError),
    /// Guest memory cannot be reserved, mapped or registered.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// The boot data cannot be written.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// The vCPUs cannot be created.
    #[error(transparent)]
    Cpus(#[from] cpus::CpuError),
    /// A device cannot be added.
    #[error(transparent)]
    Devices(#[from] board::PlugError),
    /// The paravirtual PMU cannot use the host's perf events.
    #[error("the PMU cannot use the host's perf events; to run without a PMU, use --no-vpmu")]
    PerfSource(#[from] vpmu::host::Error),
    /// The PMU device cannot be created.
    #[error("cannot create the PMU device; to run without a PMU, use --no-vpmu")]
    Vpmu(#[from] vpmu::Error),
    /// A persistent event of the operator cannot be started, or its recording cannot be written.
    #[error(transparent)]
    Operator(#[from] operator::OperatorError),
    /// The control socket cannot be created.
    #[error(transparent)]
    Socket(#[from] ctl::SocketError),
    /// The control socket cannot be served.
    #[error(transparent)]
    Server(#[from] ctl::ServerError),
    /// The host has no free descriptors or threads.
    #[error("the host has no more {0}")]
    Host(&'static str, #[source] io::Error),
    /// The process cannot be confined.
    #[error(transparent)]
    Confine(#[from] confine::ConfineError),
    /// Signals cannot be set up.
    #[error(transparent)]
    Signals(#[from] signal::SignalError),
    /// The terminal cannot be made raw.
    #[error("cannot make the terminal raw")]
    Terminal(#[source] io::Error),
    /// The event loop failed.
    #[error(transparent)]
    EventLoop(#[from] event_loop::LoopError),
    /// A vCPU failed.
    #[error(transparent)]
    Vcpu(#[from] exit::VcpuError),
    /// A thread ended without announcing a reason, which is a bug.
    #[error("the run ended without a reason")]
    NoReason,
}

impl VmError {
    /// The exit status for this error, and the error's stable name in reports.
    pub(crate) fn exit(&self) -> (u8, &'static str) {
        match self {
            Self::Vcpu(exit::VcpuError::Stopped { .. }) => (exit::EXIT_STOPPED, "stopped"),
            _ => (exit::EXIT_FAILURE, "error"),
        }
    }
}
