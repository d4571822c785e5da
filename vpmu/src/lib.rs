//! A paravirtual PMU device for VMMs whose guest memory implements vm-memory's traits ([`Memory`]). The device marks
//! each page that it writes as dirty in the memory's bitmaps.
//!
//! A VMM creates a [`Vpmu`] from [`Settings`], a [`Machine`] (services of the VMM that the device uses) and a
//! [`Source`] (the counters: [`host::PerfSource`] on a real host), and connects it to a virtio transport.
//! [`Vpmu::activate`] gives the device the transport's queues ([`QueueState`]) and its [`Interrupt`]. Each vCPU's
//! thread [attaches](Vpmu::attach) to the device, and reports the vCPU's entries, exits, marks and notifications to its
//! [`VcpuSession`]. The operator's persistent events survive every reset, because their rings are in a window: VMM
//! memory outside guest memory. [`Vpmu::save`] returns the device's state as plain data, and [`Vpmu::restore`]
//! restores it into a new device. With the feature `serde`, the state can be serialized. The crate uses guest memory
//! and perf. It does not depend on KVM, an event loop or a command line.
//!
//! Each vCPU has a shard, which contains the events of that vCPU. A vCPU's thread usually locks only the shard of its
//! own vCPU. The module `locks` documents the order of all locks.

pub use vpmu_abi as abi;
pub use vpmu_orc as orc;
mod arch;
mod area;
mod aux_writer;
mod backend;
mod catalogue;
mod clock;
pub mod confine;
mod control;
mod cpu;
mod device;
mod errno;
mod error;
mod event;
mod flush;
pub mod host;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod kind;
mod links;
mod locks;
mod machine;
mod memory;
mod metrics;
mod notices;
mod pages;
mod period;
mod persistent;
mod policy;
mod producer;
mod queues;
mod record;
mod refusal;
mod remote;
mod ring;
mod save;
mod saved;
mod session;
mod settings;
mod shard;
mod shared;
mod sink;
mod size;
mod slots;
pub mod source;
mod spec;
mod syscall;
mod tasks;
mod throttle;
mod trace;
mod unwind;
mod vcpu;
mod window;
mod work;

pub use arch::{CpuState, GENERAL_REGS};
pub use aux_writer::{AuxPlace, AuxWriter};
pub use device::Vpmu;
pub use error::{Error, FlushError, RestoreError, SaveError};
pub use machine::{Access, Exit, ExitReason, GuestRegs, Interrupt, Machine, Registers};
pub use memory::Memory;
pub use metrics::{ExitCounts, Metrics};
pub use persistent::{History, Persist, PersistError, PersistSpec, PersistSpecError, PersistentStatus};
pub use policy::{EventMatch, Policy, Tier};
pub use producer::{AuxError, AuxProducer};
pub use queues::QueueState;
pub use refusal::Refusal;
pub use remote::RemoteVcpu;
pub use save::SavedState;
pub use session::{Paused, VcpuSession};
pub use settings::{CountMode, Engines, Hardware, Limits, LimitsError, RawEvents, Settings};
pub use size::{SizeError, parse_bytes, parse_scaled};
pub use source::Source;
/// The version of vm-memory whose traits [`Memory`] accepts.
pub use vm_memory;
pub use work::{Turn, Work};
