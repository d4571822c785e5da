//! Results of the probes that run small guests: plain data, which `vmm check --json` prints.

use serde::Serialize;

use crate::probe::Finding;

/// Results of the probes, each of which runs a guest of a few instructions.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Guest {
    /// A guest in long mode wrote to a port and then halted, and both exits reached the VMM.
    pub port_io: Finding,
    /// The instruction pointer at a port-write exit.
    pub port_io_rip: ExitRip,
    /// A store outside guest memory reached the VMM with its address and data.
    pub mmio: Finding,
    /// `syscall` in ring 3 entered ring 0, and `sysret` returned to ring 3.
    pub syscall: Finding,
    /// `int3` in ring 0 raised a breakpoint exception.
    pub breakpoint: Finding,
    /// `cmpxchg16b` in ring 0 exchanged its operand, or CPUID does not report the instruction.
    pub cmpxchg16b: Finding,
    /// A hypercall with an unknown number returned an error to the guest.
    pub hypercall: Finding,
    /// While a vCPU was spinning in the guest, its thread received a signal, and `KVM_RUN` returned.
    pub signal: Finding,
    /// The registers that KVM copies to `struct kvm_run` at an exit equal the registers that `KVM_GET_REGS` returns.
    pub sync_regs: Finding,
    /// Relation of the guest's time-stamp counter to the host's.
    pub tsc: GuestTsc,
}

/// The guest's instruction pointer after `KVM_RUN` returned for a port write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitRip {
    /// At the `out` instruction. The next `KVM_RUN` completes it.
    At,
    /// At the instruction after the `out`.
    After,
    /// Not observed, or at another instruction.
    #[default]
    Unknown,
}

/// Relation of the guest's time-stamp counter to the host's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestTsc {
    /// The guest's counter equals the host's counter plus the offset that KVM reports.
    Offset,
    /// The guest's counter equals the host's counter. KVM reports no offset, or an offset of zero.
    Host,
    /// The guest's counter equals the host's counter, but KVM reports an offset that is not zero.
    HostDespiteOffset,
    /// No known relation, or not observed.
    #[default]
    Unknown,
}
