//! The PC: its addresses, the state in which its kernel starts, and the tables of its firmware.

pub mod acpi;
pub mod board;
pub mod boot;
pub mod calls;
pub mod check;
pub mod clock;
pub mod cpuid;
pub mod cpus;
pub(crate) mod exits;
pub mod kernel;
pub mod layout;
pub mod platform;
pub mod power;
pub mod regs;
pub mod state;

/// The host may move an event to another counter while the guest runs. From this Linux version on, KVM then continues
/// to count. `None` means that all versions continue to count.
pub const FIRST_TO_KEEP_COUNTS: Option<(u32, u32)> = None;
