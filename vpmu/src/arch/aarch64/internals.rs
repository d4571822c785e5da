//! vCPU states for benchmarks.

use super::paging;
use super::registers::{CpuState, GENERAL_REGS};

/// The state of a vCPU that runs a program in user mode, with page tables at `tables`.
pub(crate) fn program(tables: u64) -> CpuState {
    CpuState {
        general: [0; GENERAL_REGS],
        pstate: 0,
        user: true,
        code64: true,
        sctlr: paging::SCTLR_MMU,
        tcr: paging::TCR_48_BITS,
        ttbr0: tables,
        ttbr1: tables,
    }
}
