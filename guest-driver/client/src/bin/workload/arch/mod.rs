//! The only architecture-dependent module: accesses that exit to the VMM, and functions with
//! hand-written frames.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{Port, begin, exact_loop};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Port, begin, exact_loop};
