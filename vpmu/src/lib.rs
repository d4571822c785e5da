//! The paravirtual PMU: the device, for any rust-vmm VMM.

pub mod abi;
