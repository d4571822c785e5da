//! The paravirtual PMU on KVM, for VMMs based on kvm-ioctls: the code that every such VMM needs to embed the device.
//!
//! - [`VcpuThread`] runs a vCPU and reports its entries and exits to its [`VcpuSession`](vpmu::VcpuSession), with the
//!   access and the registers of each exit. [`here`] is for buses that do not report which vCPU makes an access.
//! - [`kick`] installs the handler of the signal that makes a vCPU leave the guest; [`Threads`] sends
//!   the signal.
//! - [`Statistics`] reads KVM's counts of exits and halts.
//! - [`DrainTimer`] is a descriptor that is readable when the device is due for a drain.
//! - [`KvmMachine`] implements [`Machine`](vpmu::Machine) with these types.
//! - [`clock_offset`] returns the guest's time counter minus the host's, for [`Vpmu::attach`](vpmu::Vpmu::attach).
//! - [`probe`] finds out whether this host's samples have guest addresses: it samples a guest of a few instructions,
//!   which [`micro`] builds.
//!
//! `vpmu/EMBEDDING.md` describes the order of the calls; `vpmu/examples/embed.rs` is a minimal VMM.

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

// Re-exported, because their types are in this crate's signatures.
pub use {kvm_bindings, kvm_ioctls};

pub use arch::{ExitRegisters, HALTS, clock_offset, registers, syncs_registers};
pub use drain::DrainTimer;
pub use kick::{Joined, Threads};
pub use machine::KvmMachine;
pub use stats::{Statistics, Stats};
pub use vcpu::{AtExit, VcpuThread};
