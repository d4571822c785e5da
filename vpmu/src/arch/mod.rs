//! Selects the architecture; no other module names an architecture.
//!
//! Each module has the same items: a vCPU's state and perf's numbers of its registers
//! ([`CpuState`]), the guest's page tables (`Tables`), the registers that its kernel saves
//! (`saved`), the counters that this process reads itself, and the exits that no vCPU makes.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the device supports only x86-64 and aarch64");

// The walk of aarch64 tables uses no instructions of that architecture, so it is tested on every machine.
#[cfg(all(test, not(target_arch = "aarch64")))]
#[path = "aarch64/paging.rs"]
mod aarch64_paging;
