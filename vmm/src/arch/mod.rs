//! The one place that chooses an architecture; everything else speaks of "the" architecture.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("this VMM runs x86-64 guests only");
