//! vCPUs of aarch64.

mod clock;
pub mod code;
mod machine;
pub mod reg;
mod registers;

pub use clock::{clock_offset, host_ticks};
pub(crate) use machine::create_vcpu;
pub use machine::{create_vm, preferred};
pub(crate) use registers::sync;
pub use registers::{ExitRegisters, registers, syncs_registers};

use vpmu::Exit;

use crate::run_page::RunPage;

/// KVM's statistic of halts: of WFI. A WFE waits for another vCPU, and is not one.
pub const HALTS: &str = "wfi_exit_stat";

/// The exit in `page`, if it is one that only this architecture has: none is.
pub(crate) fn exit(_page: &RunPage, _reason: u32) -> Option<Exit> {
    None
}
