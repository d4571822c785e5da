//! Selects the module of the target architecture. No other module contains architecture-specific code.
//!
//! The modules of all architectures have the same items: a vCPU's state with its registers in perf's order
//! ([`CpuState`]), the guest's page tables (`Tables`), the registers that the guest's kernel saves (`saved`),
//! the counters that the device reads with an instruction (`ticks`, `performance_counter`), and the exit
//! reasons that never occur (`UNREACHABLE_EXITS`).

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod page;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

pub(crate) use page::Page;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the device supports only x86-64 and aarch64");

// The code that walks aarch64 tables uses no instructions of that architecture, so it is tested on every machine.
#[cfg(all(test, not(target_arch = "aarch64")))]
#[path = "aarch64/paging.rs"]
mod aarch64_paging;
