//! All code that depends on the architecture. The code outside this directory is the same on every architecture.
//!
//! Both architectures have the following modules, with the same items. For the machine: `layout`, `board`
//! (devices and their addresses), and boot images (`kernel`, `boot`). For KVM: `platform` (a VM and its
//! requirements), `cpus`, `clock`, `state` (saves and restores the VM), `exits`, and system calls and ioctls
//! for seccomp filters (`calls`). For `vmm check`: `check`.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("this VMM supports only x86-64 and aarch64");
