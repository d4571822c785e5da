//! The paravirtual PMU under KVM, for VMMs on kvm-ioctls: the part of an embedding that is the same in each.
//!
//! [`VcpuThread`] runs a vCPU and reports its entries and exits to its [`VcpuSession`](vpmu::VcpuSession), with
//! the access and the registers of each exit; [`here`] is for buses that do not pass the vCPU on. [`kick`] has
//! the signal that makes a vCPU leave the guest, [`Statistics`] KVM's numbers of exits and halts, [`DrainTimer`]
//! the descriptor that is readable when the device is to be drained; [`KvmMachine`] is the
//! [`Machine`](vpmu::Machine) made of them. [`clock_offset`] is the guest's time counter minus the host's, as
//! [`Vpmu::attach`](vpmu::Vpmu::attach) takes it. [`probe`] finds out whether this host's samples have guest
//! addresses, by running a guest of a few instructions, which [`micro`] makes.
//!
//! `vpmu/EMBEDDING.md` has the order of the calls, `vpmu/examples/embed.rs` a VMM that consists of them.

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

// Their types are in this crate's signatures.
pub use {kvm_bindings, kvm_ioctls};

pub use arch::{ExitRegisters, HALTS, clock_offset, registers, syncs_registers};
pub use drain::DrainTimer;
pub use kick::{Joined, Threads};
pub use machine::KvmMachine;
pub use stats::{Statistics, Stats};
pub use vcpu::{AtExit, VcpuThread};
