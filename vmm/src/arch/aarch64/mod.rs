//! The aarch64 machine: its addresses, the state in which its kernel starts, and its device tree.

pub mod board;
pub mod boot;
pub mod calls;
pub mod check;
pub mod clock;
pub mod cpus;
pub(crate) mod exits;
mod fdt;
mod gic;
pub mod kernel;
pub mod layout;
pub mod platform;
pub mod state;

/// The host may move an event to another counter while the guest runs. From this Linux version on, KVM then continues
/// to count. In older versions, the moved event does not count the guest's EL0 until the vCPU is loaded again. `None`
/// means that all versions continue to count.
pub const FIRST_TO_KEEP_COUNTS: Option<(u32, u32)> = Some((6, 6));
