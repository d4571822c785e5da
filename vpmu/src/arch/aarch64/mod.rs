//! The device's view of aarch64: registers as perf numbers them, page tables of EL1, and the virtual counter.

mod counters;
#[cfg(feature = "internals")]
mod internals;
mod orc;
mod paging;
mod prologue;
mod registers;

pub(crate) use counters::{READS_COUNTERS, performance_counter, ticks};
pub(crate) use orc::{orc_register, saved_word};
pub(crate) use paging::is_user_address;
pub(crate) use prologue::{LOOKED_AT, return_address};
pub use registers::{CpuState, GENERAL_REGS};
pub(crate) use registers::{
    FP, IP, KERNEL_STACK, REGISTERS, SAVED_WORDS, SP, Tables, WALKS_32_BIT_CODE, packet_registers, saved,
};
#[cfg(feature = "internals")]
pub(crate) use {internals::program, registers::ENTRIES};

/// Exit reasons (`EXIT_*`) that never occur, because the architecture has no I/O ports, and KVM handles WFI without an
/// exit to the VMM.
pub(crate) const UNREACHABLE_EXITS: [u64; 2] = [crate::abi::EXIT_IO, crate::abi::EXIT_HLT];
