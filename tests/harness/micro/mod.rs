//! Guests of a few instructions with a known set of exits.
//!
//! They run through the built VMM on this machine's `/dev/kvm`, which need not support a stock
//! kernel.

#![expect(clippy::expect_used, reason = "tests fail by panicking")]

pub mod attack;
mod code;
pub mod device;
mod halts;
mod image;
mod looping;
mod run;
pub mod sampled;

pub use code::Code;
pub use halts::halts;
pub use image::{address_of, kernel, power_off, single};
pub use looping::Looping;
pub use run::{RunResult, Vcpu, run, vmm_binary};
