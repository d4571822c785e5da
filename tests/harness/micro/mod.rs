//! Guests of a few instructions, whose every exit is known beforehand.
//!
//! They run through the built VMM on this machine's `/dev/kvm`, which need not be able to boot
//! a stock kernel.

#![expect(clippy::expect_used, reason = "a harness fails a test by panicking")]

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
pub use run::{Ran, Vcpu, run, vmm_binary};
