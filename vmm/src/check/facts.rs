//! The results of a survey as plain data, which `vmm check --json` prints.
//!
//! The field names are the keys of the JSON, and are stable. The module `verdict` derives the consequences.

use std::collections::BTreeMap;

use serde::Serialize;
use vpmu_kvm::probe::Samples;

use super::events::Offered;
use super::serving::Serving;
use crate::arch::check::Guest;
use crate::confine::Available;
use crate::probe::{Check, Finding};

/// All results of `vmm check`.
#[derive(Debug, Clone, Serialize)]
pub struct Survey {
    /// Whether a stock Linux kernel can be expected to boot under `vmm run` here.
    pub stock_kernel: bool,
    /// The hypervisor's own capability list.
    pub kvm: Kvm,
    /// Results of the probes that run small guests. `None` if KVM is not usable.
    pub guest: Option<Guest>,
    /// Perf events of the host, as seen on a vCPU thread.
    pub perf: Perf,
    /// Whether KVM gives its guests mediated PMUs; `None` if this kernel does not support them.
    pub mediated_pmu: Option<bool>,
    /// The confinement that `vmm run` has here.
    pub confinement: Available,
    /// The abilities of `vmm serve` on this host.
    pub serving: Serving,
    /// The events that a guest may open with each tier, or with the list on the command line.
    pub pmu: Vec<Offered>,
    /// The same facts, written as lines of a table. Each line also states the consequence.
    pub checks: Vec<Check>,
}

/// `/dev/kvm` and its capabilities.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Kvm {
    /// `/dev/kvm` exists.
    pub present: bool,
    /// `/dev/kvm` can be opened, and has the stable API version and every required capability.
    pub usable: bool,
    /// The error, and how to fix it.
    pub error: Option<String>,
    /// The loaded KVM module for this processor, if the host reveals it.
    pub module: Option<String>,
    /// `KVM_GET_API_VERSION`; 12 on every kernel since 2.6.22.
    pub api_version: Option<i32>,
    /// Maximum number of vCPUs in one VM.
    pub max_vcpus: Option<u32>,
    /// Capabilities by name, present or not.
    pub capabilities: BTreeMap<&'static str, bool>,
    /// Missing capabilities that every guest requires.
    pub missing: Vec<&'static str>,
}

/// The host's `perf_event_open(2)`.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Perf {
    /// `kernel.perf_event_paranoid`; `None` on a kernel without perf events.
    pub paranoid: Option<i32>,
    /// Candidate events by name.
    pub events: BTreeMap<&'static str, Event>,
    /// Whether the processor is known to be emulated, and with it the counters of hardware events.
    pub emulated: bool,
    /// The reason why hardware events are refused or not used, with the remedy. `None` if a hardware event opens and
    /// `vmm run` uses hardware events.
    pub hardware_refused: Option<String>,
    /// The reason why KVM may lose counts when the host moves a hardware event to another counter. `None` if KVM loses
    /// no counts.
    pub hardware_loses: Option<String>,
    /// The reason why software events are refused, with the remedy. `None` if a software event opens.
    pub software_refused: Option<String>,
    /// Whether `exclude_host` keeps host work out of the count of a software clock. `None` if not observed.
    pub software_excludes_host: Option<bool>,
    /// Whether `exclude_host` keeps host work out of the count of hardware cycles. `None` if there is no cycle counter.
    pub hardware_excludes_host: Option<bool>,
    /// Clock samples taken while a guest loop ran in ring 0.
    pub guest_kernel: Option<Samples>,
    /// Clock samples taken while a guest loop ran in ring 3.
    pub guest_user: Option<Samples>,
    /// The engine that `vmm run --engine auto` selects for host events.
    pub auto_engine: AutoEngine,
    /// Whether the `kvm:` tracepoints can trace exits that the host's kernel handles itself.
    pub tracepoints: Finding,
    /// Host PMUs whose traces guests cannot have.
    pub host_traces: Vec<HostTrace>,
}

/// A host PMU whose trace guests cannot have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostTrace {
    /// The host's name for the PMU.
    pub pmu: String,
    /// The reason why guests cannot have the trace.
    pub refused: String,
}

impl From<vpmu::host::HostTrace> for HostTrace {
    fn from(trace: vpmu::host::HostTrace) -> Self {
        Self { pmu: trace.pmu, refused: trace.refused.to_owned() }
    }
}

/// The engine for a guest's samples of host events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AutoEngine {
    /// The host takes the samples, without an exit per sample.
    Batched,
    /// The vCPU leaves the guest for each sample.
    #[default]
    Exit,
}

/// Whether one event can be opened on a thread of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Event {
    /// `perf_event_open(2)` returned a descriptor.
    pub opens: bool,
    /// Only user mode may be counted, because this process lacks privileges.
    pub user_only: bool,
    /// It opened, but never counts, so guests do not have it.
    pub silent: bool,
    /// The text of the errno, if the event did not open.
    pub error: Option<String>,
    /// The errno, for programs.
    pub errno: Option<i32>,
}
