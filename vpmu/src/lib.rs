//! The paravirtual PMU: the device, for VMMs that keep guest memory in vm-memory's
//! `GuestMemoryMmap` and virtqueues in virtio-queue's `Queue`.
//!
//! A VMM makes a [`Vpmu`] from [`Settings`], a [`Machine`] (the services that the device needs) and
//! a [`Source`] (the counters: [`host::PerfSource`] on a real host), and attaches it to a virtio
//! transport. Each vCPU's thread [attaches](Vpmu::attach) and reports its entries, exits, marks and
//! notifications to its [`VcpuSession`]. The operator's persistent events survive every reset, in a
//! window of the VMM's memory. The crate knows guest memory and perf; it knows nothing of KVM,
//! event loops or command lines.
//!
//! Events belong to the vCPU that they are placed on. A vCPU's work takes only the lock of its own
//! shard; the order of all locks is documented in `locks`.

pub use vpmu_abi as abi;
mod arch;
mod aux;
mod backend;
mod catalogue;
mod clock;
pub mod confine;
mod control;
mod device;
mod errno;
mod event;
mod flush;
pub mod host;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod links;
mod locks;
mod machine;
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
mod ring;
mod session;
mod settings;
mod shard;
mod shared;
mod sink;
pub mod source;
mod tasks;
mod throttle;
mod trace;
mod vcpu;
mod walk;
mod window;
mod work;

pub use arch::{CpuState, GENERAL_REGS};
pub use device::{Error, FlushError, Vpmu};
pub use machine::{Access, Exit, ExitReason, GuestRegs, Machine, Registers};
pub use metrics::{ExitCounts, Metrics};
pub use persistent::{History, Persist, PersistError, PersistentStatus};
pub use policy::{EventMatch, Policy, Tier};
pub use producer::{AuxError, AuxPlace, AuxProducer, AuxWriter};
pub use refusal::Refusal;
pub use session::VcpuSession;
pub use settings::{CountMode, Engines, Hardware, Limits, LimitsError, RawEvents, Settings};
pub use source::Source;
pub use work::{Turn, Work};
