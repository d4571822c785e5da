//! The paravirtual PMU: the device, for any rust-vmm VMM.
//!
//! A VMM makes a [`Vpmu`] from [`Settings`], a [`Machine`] (what the device asks of it) and a
//! [`Source`] (what counts: [`host::PerfSource`] on a real host), carries it on a virtio
//! transport, and tells it when each vCPU enters and leaves the guest. Persistent events are its
//! operator's way in: they live on over every reset, in a window of the VMM's memory. The crate
//! knows guest memory and perf; it knows nothing of KVM, event loops or command lines.

pub mod abi;
mod aux;
mod catalogue;
mod clock;
mod command;
mod control;
mod device;
mod errno;
mod event;
pub mod host;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod links;
mod machine;
mod merge;
mod metrics;
mod notice;
mod output;
mod pages;
mod period;
mod persistent;
mod queues;
mod record;
mod ring;
mod settings;
pub mod source;
mod state;
mod tasks;
mod throttle;
mod trace;
mod vcpu;
mod walk;
mod window;

pub use device::{Error, FlushError, Vpmu};
pub use machine::{
    Access, CpuState, Exit, ExitReason, GENERAL_REGS, GuestRegs, Machine, Registers,
};
pub use metrics::{ExitCounts, Metrics};
pub use persistent::{History, Persist, PersistError, PersistentStatus};
pub use settings::{Engines, Limits, Settings};
pub use source::Source;
