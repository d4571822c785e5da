//! Selects the module for the host's architecture. No other module depends on the architecture.
//!
//! Each module has the same items: a vCPU's registers at an exit, the offset of its time counter, the exits that
//! are specific to the architecture, and the machine code of micro guests.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("only vCPUs of x86-64 and aarch64 are supported");
