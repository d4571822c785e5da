//! Why there is no machine, or why it failed.

use std::io;
use std::path::PathBuf;

use crate::arch::{boot, cpus, kernel, state};
use crate::{board, confine, ctl, event_loop, kvm, memory, operator, signal, snapshot, vcpu};

/// Why there is no machine, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file named in the configuration.
    #[error("cannot open the {what} {path}")]
    Open {
        /// What it is for.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A directory or a device where a file is needed.
    #[error("the {what} {path} is not a file")]
    NotFile {
        /// What it is for.
        what: &'static str,
        /// Which path.
        path: PathBuf,
    },
    /// The kernel.
    #[error("the kernel {path}")]
    Kernel {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: kernel::KernelError,
    },
    /// The configuration names no kernel: a mistake of ours, for only a machine that is restored needs none.
    #[error("there is no kernel to boot")]
    NothingToBoot,
    /// A snapshot that the machine cannot go on from.
    #[error(transparent)]
    Snapshot(#[from] snapshot::SnapshotError),
    /// KVM does not say what a snapshot would need.
    #[error("the machine could not be saved; it runs without --ctl")]
    Saver(#[source] state::StateError),
    /// KVM itself.
    #[error(transparent)]
    Kvm(#[from] kvm::KvmError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// What the kernel boots with.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// Its vCPUs.
    #[error(transparent)]
    Cpus(#[from] cpus::CpuError),
    /// The embedder's registers do not take the guest.
    #[error("the embedder refuses the guest")]
    Embedder(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The devices.
    #[error(transparent)]
    Devices(#[from] board::PlugError),
    /// The paravirtual PMU's host side.
    #[error("the host's perf events cannot serve the PMU; --no-vpmu leaves it out")]
    PerfSource(#[from] vpmu::host::Error),
    /// The paravirtual PMU.
    #[error("cannot make the PMU device; --no-vpmu leaves it out")]
    Vpmu(#[from] vpmu::Error),
    /// What the operator asked for besides.
    #[error(transparent)]
    Operator(#[from] operator::OperatorError),
    /// The control socket.
    #[error(transparent)]
    Socket(#[from] ctl::SocketError),
    /// Its server.
    #[error(transparent)]
    Server(#[from] ctl::ServerError),
    /// A descriptor or a thread.
    #[error("the host has no more {0}")]
    Host(&'static str, #[source] io::Error),
    /// The locked-down process.
    #[error(transparent)]
    Confine(#[from] confine::ConfineError),
    /// Signals.
    #[error(transparent)]
    Signals(#[from] signal::SignalError),
    /// The terminal.
    #[error("cannot make the terminal raw")]
    Terminal(#[source] io::Error),
    /// The event loop.
    #[error(transparent)]
    EventLoop(#[from] event_loop::LoopError),
    /// A vCPU.
    #[error(transparent)]
    Vcpu(#[from] vcpu::VcpuError),
    /// A thread went away without a word: a mistake of ours.
    #[error("the run ended without a reason")]
    NoReason,
}
