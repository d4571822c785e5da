//! vCPUs of x86-64.

mod clock;
pub mod code;
mod exits;
mod machine;
mod registers;

pub use clock::{clock_offset, set_clock_offset};
pub(crate) use exits::exit;
pub(crate) use machine::{create_vcpu, create_vm};
pub(crate) use registers::sync;
pub use registers::{ExitRegisters, registers, syncs_registers};

/// Name of KVM's statistic of halts.
pub const HALTS: &str = "halt_exits";
