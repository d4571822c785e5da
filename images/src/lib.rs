//! Builds guests and boots them. Fetches a stock kernel, builds the guest's driver and static programs, packs
//! initramfs archives, and runs a command in a guest: on this machine's KVM or, if that cannot boot a stock
//! kernel, in the lab.
//!
//! All results are cached under `images/cache`, keyed by the content of their inputs.

pub mod afterwards;
pub mod apt;
pub mod arch;
pub mod boot;
pub mod busybox;
pub mod cache;
pub mod clock;
pub mod cpio;
pub mod debug;
pub mod demo;
pub mod digest;
pub mod dkms;
pub mod error;
pub mod foreign;
pub mod frame;
pub mod host;
pub mod initramfs;
pub mod kallsyms;
pub mod kernel;
pub mod kmod;
pub mod lab;
pub mod lz4;
pub mod machine;
pub mod module;
pub mod packages;
pub mod place;
pub mod process;
pub mod programs;
pub mod progress;
pub mod qemu;
pub mod run;
pub mod sources;
pub mod style;
pub mod sys;
pub mod toolchain;
pub mod unpacked;
pub mod vmlinux;

pub use afterwards::Afterwards;
pub use arch::Arch;
pub use boot::Boot;
pub use debug::Debug;
pub use error::BootError as Error;
pub use kernel::Sources;
pub use place::{Place, PlaceChoice};
pub use run::Outcome;
