//! The device's view of x86-64: registers as perf numbers them, page tables of long mode, and the TSC.

mod counters;
#[cfg(feature = "internals")]
mod internals;
mod orc;
mod paging;
mod prologue;
mod registers;

pub(crate) use counters::{READS_COUNTERS, performance_counter, ticks};
pub(crate) use orc::{orc_register, saved_word};
pub(crate) use paging::{Tables, is_user_address};
pub(crate) use prologue::{LOOKED_AT, return_address};
pub use registers::{CpuState, GENERAL_REGS};
pub(crate) use registers::{
    FP, IP, KERNEL_STACK, REGISTERS, SAVED_WORDS, SP, WALKS_32_BIT_CODE, packet_registers, saved,
};
#[cfg(feature = "internals")]
pub(crate) use {internals::program, paging::ENTRIES};

/// Exit reasons (`EXIT_*`) that never occur.
pub(crate) const UNREACHABLE_EXITS: [u64; 0] = [];
