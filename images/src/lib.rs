//! Builds guests and boots them. Fetches a stock kernel, builds the guest's driver and static programs, packs
//! initramfs archives, and runs a command in a guest: on this machine's KVM or, if that cannot boot a stock
//! kernel, in the lab.
//!
//! All results are in the user's cache, keyed by the content of their inputs.

pub mod apt;
pub mod arch;
pub mod boot;
pub mod busybox;
pub mod cache;
pub mod clock;
mod cloud_hypervisor;
pub mod console_protocol;
pub mod cpio;
pub mod daemon;
pub mod debug;
pub mod demo;
pub mod digest;
pub mod dkms;
pub mod error;
pub mod file_error;
pub mod initramfs;
pub mod kallsyms;
pub mod kernel;
pub mod kmod;
pub mod kvm_host;
pub mod lab;
pub mod lz4;
pub mod machine;
pub mod module;
mod orc;
mod other_vmm;
pub mod packages;
pub mod post_run;
pub mod prerequisites;
pub mod process;
pub mod profile_readers;
pub mod programs;
pub mod progress;
pub mod qemu;
pub mod run;
pub mod size;
pub mod sources;
pub mod stock_qemu;
pub mod style;
pub mod sys;
pub mod third_party;
pub mod toolchain;
pub mod unpacked;
pub mod vmlinux;

pub use arch::Arch;
pub use boot::{Boot, Carrier};
pub use debug::Debug;
pub use error::BootError as Error;
pub use kernel::Sources;
pub use kvm_host::{KvmHost, KvmHostChoice};
pub use post_run::PostRun;
pub use run::Outcome;
