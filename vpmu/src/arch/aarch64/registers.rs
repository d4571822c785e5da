//! A vCPU's state, with registers as perf numbers them, and the registers that Linux saves when a program
//! enters the kernel.

use super::paging::{self, Control};
use crate::arch::Page;
use crate::memory::View;

/// Number of registers that a sample can hold.
pub const GENERAL_REGS: usize = 33;

/// The parts of a vCPU's state that a call chain or a record of registers needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuState {
    /// In the order of perf's numbers for arm64: X0 to X29, LR, SP, PC. SP is the stack pointer in use.
    pub general: [u64; GENERAL_REGS],
    /// PSTATE, in the format of SPSR_EL1.
    pub pstate: u64,
    /// Whether the vCPU was in guest user mode.
    pub user: bool,
    /// Whether the vCPU ran AArch64 code.
    pub code64: bool,
    /// SCTLR_EL1, which enables address translation.
    pub sctlr: u64,
    /// TCR_EL1, which configures the translation.
    pub tcr: u64,
    /// TTBR0_EL1, the address of the programs' tables.
    pub ttbr0: u64,
    /// TTBR1_EL1, the address of the kernel's tables.
    pub ttbr1: u64,
}

impl CpuState {
    /// Whether a CPU with this `pstate` is in user mode (EL0).
    #[must_use]
    pub fn is_user(pstate: u64) -> bool {
        pstate & MODE_LEVEL == 0
    }

    /// Whether a CPU with this `pstate` runs AArch64 code.
    #[must_use]
    pub fn is_code64(pstate: u64) -> bool {
        pstate & MODE_AARCH32 == 0
    }
}

/// The exception level and the AArch32 bit of a PSTATE.
const MODE_LEVEL: u64 = 0xf;
const MODE_AARCH32: u64 = 1 << 4;

/// perf's register numbers for the frame pointer, the stack pointer and the program counter.
pub(crate) const FP: usize = 29;
pub(crate) const SP: usize = 31;
pub(crate) const IP: usize = 32;

/// Registers that an event may request: all except the SVE registers.
pub(crate) const REGISTERS: u64 = (1 << GENERAL_REGS) - 1;

/// Linux's kernel stacks have this size, and begin at a multiple of it.
pub(crate) const KERNEL_STACK: u64 = 16 << 10;

/// Whether frames of 32-bit code are walked. They are not walked here, because compilers for 32-bit code do not agree
/// on a frame pointer.
pub(crate) const WALKS_32_BIT_CODE: bool = false;

/// Number of words in Linux's `struct pt_regs` that hold registers: perf's registers in perf's order, followed by
/// PSTATE.
pub(crate) const SAVED_WORDS: usize = GENERAL_REGS + 1;

/// Returns the registers in the words of a `struct pt_regs`, and whether they belong to 64-bit code. `None` unless the
/// kernel saved these registers when a program entered the kernel.
pub(crate) fn saved(words: [u64; SAVED_WORDS]) -> Option<([u64; GENERAL_REGS], bool)> {
    let [general @ .., pstate] = words;
    CpuState::is_user(pstate).then_some((general, CpuState::is_code64(pstate)))
}

/// The registers in a packet of a sample trace: arguments (X0 to X8), callee-saved registers (X19 to X29), LR,
/// SP, PC, PSTATE.
pub(crate) fn packet_registers(cpu: &CpuState) -> [u64; 24] {
    const ARGUMENTS: usize = 9;
    const PRESERVED: usize = 19;
    let mut registers = [0; 24];
    let (arguments, rest) = registers.split_at_mut(ARGUMENTS);
    arguments.copy_from_slice(&cpu.general[..ARGUMENTS]);
    let (preserved, pstate) = rest.split_at_mut(GENERAL_REGS - PRESERVED);
    preserved.copy_from_slice(&cpu.general[PRESERVED..]);
    pstate[0] = cpu.pstate;
    registers
}

/// The page tables that a vCPU uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables(paging::Tables);

impl Tables {
    /// Returns the tables of `cpu`. `None` if translation is off.
    pub(crate) fn new(cpu: &CpuState) -> Option<Self> {
        let control = Control { sctlr: cpu.sctlr, tcr: cpu.tcr, ttbr0: cpu.ttbr0, ttbr1: cpu.ttbr1 };
        paging::Tables::new(&control).map(Self)
    }

    /// Translates through the tables.
    pub(crate) fn walk(&self, memory: &View<'_>, address: u64) -> Option<Page> {
        self.0.walk(memory, address)
    }
}

/// Flags of page-table entries that let user mode access a page. The first value is for an entry that points to a
/// table, and the second value is for an entry that maps a page.
#[cfg(feature = "internals")]
pub(crate) const ENTRIES: [u64; 2] = [paging::VALID | paging::TABLE, paging::VALID | paging::TABLE | paging::USER];
