//! vCPU states for benchmarks.

use super::registers::{CpuState, GENERAL_REGS};

/// The state of a vCPU that runs a program in user mode, with page tables at `tables`.
pub(crate) fn program(tables: u64) -> CpuState {
    CpuState {
        general: [0; GENERAL_REGS],
        user: true,
        code64: true,
        cr0: 1 << 31,
        cr3: tables,
        cr4: 1 << 5,
        efer: 1 << 10,
    }
}
