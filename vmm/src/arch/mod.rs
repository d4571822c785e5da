//! The one place that chooses an architecture; everything else speaks of "the" architecture.
//!
//! Each module gives the same items. Of the machine: `layout`, `board` (which device sits where), and
//! what a guest boots from (`kernel`, `boot`). Of KVM: `platform` (a VM and what it needs), `cpus`,
//! `clock`, `registers`, `exits`, `emulation`, and the requests of seccomp filters (`calls`). For the
//! survey: `check`.

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("this VMM runs x86-64 guests only");
