//! The code that every VMM based on kvm-ioctls needs to embed the paravirtual PMU on KVM.
//!
//! - [`VcpuThread`] runs a vCPU and reports its entries and exits to its [`VcpuSession`](vpmu::VcpuSession). For each
//!   exit, it also passes the registers and, if an access caused the exit, this access. [`here`] is for buses that do
//!   not report which vCPU makes an access.
//! - [`kick`] installs the handler of the signal that makes a vCPU leave the guest. [`Threads`] sends
//!   the signal.
//! - [`Statistics`] reads KVM's counts of exits and halts.
//! - [`DrainTimer`] is a descriptor that becomes readable when the device is due for a drain.
//! - [`KvmMachine`] implements [`Machine`](vpmu::Machine) with these types.
//! - [`clock_offset`] returns the guest's time counter minus the host's, for [`Vpmu::attach`](vpmu::Vpmu::attach).
//! - [`probe`] checks whether this host's samples have guest addresses. It samples a guest of a few instructions, which
//!   [`micro`] builds.
//!
//! `vpmu/EMBEDDING.md` describes the order of the calls, and `vpmu/examples/embed.rs` is a minimal VMM.

pub mod arch;
mod drain;
pub mod here;
pub mod kick;
mod machine;
pub mod micro;
pub mod probe;
mod run_page;
mod stats;
mod vcpu;

// Re-exported, because this crate's signatures use their types.
pub use {kvm_bindings, kvm_ioctls};

pub use arch::{ExitRegisters, HALTS, clock_offset, registers, syncs_registers};
pub use drain::DrainTimer;
pub use kick::{Joined, Threads};
pub use machine::KvmMachine;
pub use stats::{Statistics, Stats};
pub use vcpu::{AtExit, VcpuThread};
