//! A survey's findings about guests: plain data, as `vmm check --json` prints it.

use serde::Serialize;

use crate::probe::Finding;

/// Behaviour of real guests of a few instructions.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Guest {
    /// A guest in long mode ran to a port write and a halt that the VMM saw.
    pub port_io: Finding,
    /// The instruction pointer at a port-write exit.
    pub port_io_rip: ExitRip,
    /// A store outside guest memory reached the VMM with its address and data.
    pub mmio: Finding,
    /// `syscall` in ring 3 arrived in ring 0, `sysret` went back to ring 3.
    pub syscall: Finding,
    /// `int3` in ring 0 raised a breakpoint exception.
    pub breakpoint: Finding,
    /// `cmpxchg16b` in ring 0 exchanged its operand, or CPUID does not offer it.
    pub cmpxchg16b: Finding,
    /// A hypercall with an unknown number returned an error to the guest.
    pub hypercall: Finding,
    /// A signal to the thread of a vCPU that spins in the guest ended the run call.
    pub signal: Finding,
    /// Registers copied with the exit equal those read by a system call.
    pub sync_regs: Finding,
    /// Relation of the guest's time-stamp counter to the host's.
    pub tsc: GuestTsc,
}

/// The guest's instruction pointer when a port write has ended the run call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitRip {
    /// At the `out`; the next run call completes it.
    At,
    /// Behind the `out`.
    After,
    /// Not observed, or at another instruction.
    #[default]
    Unknown,
}

/// Relation of the guest's time-stamp counter to the host's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestTsc {
    /// The host counter plus the offset that KVM reports.
    Offset,
    /// The host counter itself; KVM reports no offset, or an offset of zero.
    Host,
    /// The host counter itself, although KVM reports an offset that is not zero.
    HostDespiteOffset,
    /// No known relation, or not observed.
    #[default]
    Unknown,
}
