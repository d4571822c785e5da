//! A minimal VMM with the paravirtual PMU.
//!
//! [`cli`] and [`config`] parse the configuration; [`vm`] builds the machine and runs it. For this it uses
//! [`kvm`], [`memory`], the architecture's code in [`arch`], and [`board`], which places [`devices`] on their
//! [`bus`]. Each [`vcpu`] has a thread; the main thread runs the [`event_loop`]. [`exit`] defines the ways in
//! which a run ends, and [`report`] writes the run's result.
//!
//! [`operator`] manages the operator's persistent events: [`ctl`] serves requests about them while the
//! machine runs, [`recording`] writes their records to a file. The crate `vpmu-export` writes such files in other formats.
//! [`snapshot`] saves a machine to a directory and restores it.
//! [`serve`] carries the PMU of a machine that another VMM runs.
//! [`confine`] drops the process's privileges before the guest's first instruction.
//! [`printable`] keeps control characters of strangers away from the operator's terminal.
//! [`check`] reports what this host can do: its KVM, its perf events, and the guests that it can run.
//!
//! The modules form layers, which README.md lists. A module never uses a higher layer.

pub mod arch;
pub mod board;
pub mod boot_data;
mod bucket;
pub mod bus;
pub mod check;
pub mod cli;
pub mod config;
pub mod confine;
pub mod ctl;
pub mod devices;
pub mod event_loop;
pub mod exit;
pub mod footprint;
pub mod host_kernel;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
pub mod kvm;
pub mod limits;
pub mod logger;
pub mod machine;
pub mod memory;
pub mod operator;
mod path_at;
pub mod policy;
pub mod printable;
pub mod probe;
pub mod raw_events;
pub mod recording;
pub mod report;
pub mod serve;
pub mod signal;
pub mod snapshot;
pub mod terminal;
pub mod vcpu;
pub mod vm;
