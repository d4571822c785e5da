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

/// Name of KVM's statistic for halts. It counts exits due to WFI. Exits due to WFE are not halts, because a vCPU uses
/// WFE to wait for another vCPU.
pub const HALTS: &str = "wfi_exit_stat";

/// Returns `None`, because no exit is specific to this architecture.
pub(crate) fn exit(_page: &RunPage, _reason: u32) -> Option<Exit> {
    None
}
