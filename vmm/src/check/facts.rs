//! What a survey finds: plain data, as `vmm check --json` prints it.
//!
//! The field names are the keys of the JSON and so a contract with whoever reads it. Nothing here
//! probes anything and nothing here judges: `verdict` puts the consequences into words.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::Serialize;

use super::events::Offered;
use crate::arch::check::Guest;

/// Everything `vmm check` knows about this machine.
#[derive(Debug, Clone, Serialize)]
pub struct Survey {
    /// Whether a stock Linux kernel can be expected to boot under `vmm run` here.
    pub stock_kernel: bool,
    /// The hypervisor as its own capability list describes it.
    pub kvm: Kvm,
    /// What small guests did when they were run; `None` where none could be run.
    pub guest: Option<Guest>,
    /// What the host's perf events can do for a vCPU thread.
    pub perf: Perf,
    /// Whether KVM gives its guests mediated PMUs; `None`: this kernel knows none.
    pub mediated_pmu: Option<bool>,
    /// The events that guests of each tier, or of the list in question, have here.
    pub pmu: Vec<Offered>,
    /// The same facts line by line, with what follows from each.
    pub checks: Vec<Check>,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name, `section.subject`.
    pub name: &'static str,
    /// What was found.
    pub value: String,
    /// What that means for somebody who wants to use this machine.
    pub consequence: String,
}

impl Check {
    pub(crate) fn new(
        name: &'static str,
        value: impl Into<String>,
        consequence: impl Into<String>,
    ) -> Self {
        Self {
            name,
            value: value.into(),
            consequence: consequence.into(),
        }
    }

    /// A line whose value is what was seen and whose consequence hangs on whether it is right.
    pub(crate) fn choose(name: &'static str, finding: &Finding, good: &str, bad: &str) -> Self {
        let consequence = if finding.ok { good } else { bad };
        Self::new(name, finding.detail.as_str(), consequence)
    }
}

/// `/dev/kvm` and its capabilities.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Kvm {
    /// `/dev/kvm` exists.
    pub present: bool,
    /// It can be opened, speaks the stable API and has all that a guest needs.
    pub usable: bool,
    /// Why it is not usable, with the remedy.
    pub error: Option<String>,
    /// The loaded module of the processor's kind, if the host shows it.
    pub module: Option<String>,
    /// `KVM_GET_API_VERSION`; 12 on every kernel since 2.6.22.
    pub api_version: Option<i32>,
    /// Most vCPUs in one VM.
    pub max_vcpus: Option<u32>,
    /// Capabilities by name, present or not.
    pub capabilities: BTreeMap<&'static str, bool>,
    /// Those of them without which no guest runs, and that are absent.
    pub missing: Vec<&'static str>,
}

/// A yes or no, with what was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The machine did what the architecture manual says.
    pub ok: bool,
    /// What it did.
    pub detail: String,
}

impl Finding {
    pub(crate) fn yes(detail: impl Into<String>) -> Self {
        Finding {
            ok: true,
            detail: detail.into(),
        }
    }

    pub(crate) fn no(detail: impl Into<String>) -> Self {
        Finding {
            ok: false,
            detail: detail.into(),
        }
    }

    /// The names of the findings that are not ok.
    pub(crate) fn failed<const N: usize>(named: [(&'static str, &Self); N]) -> Vec<&'static str> {
        named
            .into_iter()
            .filter(|(_, finding)| !finding.ok)
            .map(|(name, _)| name)
            .collect()
    }
}

/// What `perf_event_open(2)` offers.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Perf {
    /// `kernel.perf_event_paranoid`; `None` on a kernel without perf events.
    pub paranoid: Option<i32>,
    /// Candidate events by name.
    pub events: BTreeMap<&'static str, Event>,
    /// Why no hardware event opens, with the remedy; `None`: one does.
    pub hardware_refused: Option<String>,
    /// Why KVM may lose counts of hardware events that the host moves between counters; `None`: it does
    /// not.
    pub hardware_loses: Option<String>,
    /// As [`Perf::hardware_refused`], of software events.
    pub software_refused: Option<String>,
    /// Whether `exclude_host` keeps host work out of a software clock; `None`: not observed.
    pub software_excludes_host: Option<bool>,
    /// The same for hardware cycles; `None`: no such counter.
    pub hardware_excludes_host: Option<bool>,
    /// Clock samples taken while a guest loop ran in ring 0.
    pub guest_kernel: Option<Samples>,
    /// Clock samples taken while a guest loop ran in ring 3.
    pub guest_user: Option<Samples>,
    /// What `vmm run --engine auto` takes here for samples of host events.
    pub auto_engine: AutoEngine,
    /// Whether exits that the host's kernel handles by itself can be traced, by the `kvm:`
    /// tracepoints.
    pub tracepoints: Finding,
    /// The host's PMUs that trace.
    pub host_traces: Vec<HostTrace>,
}

/// A PMU of the host's whose trace no guest gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostTrace {
    /// As the host names it.
    pub pmu: String,
    /// Why.
    pub refused: String,
}

impl From<vpmu::host::HostTrace> for HostTrace {
    fn from(trace: vpmu::host::HostTrace) -> Self {
        Self {
            pmu: trace.pmu,
            refused: trace.refused.to_owned(),
        }
    }
}

/// What makes a guest's samples of host events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AutoEngine {
    /// The host, without an exit for each.
    Batched,
    /// The vCPU, which leaves the guest for each.
    #[default]
    Exit,
}

/// Whether one event can be opened on a thread of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Event {
    /// `perf_event_open(2)` gave a descriptor.
    pub opens: bool,
    /// Only user mode may be counted, for want of privilege.
    pub user_only: bool,
    /// The errno's text where it did not open.
    pub error: Option<String>,
    /// Its number, for programs.
    pub errno: Option<i32>,
}

/// How many samples of a guest loop landed where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Samples {
    /// All of them.
    pub total: u32,
    /// Labelled guest kernel or guest user by the host.
    pub guest: u32,
    /// Labelled guest, with the instruction pointer inside the guest's loop.
    pub in_loop: u32,
    /// Labelled guest user.
    pub labelled_user: u32,
}

impl AddAssign for Samples {
    fn add_assign(&mut self, more: Self) {
        self.total += more.total;
        self.guest += more.guest;
        self.in_loop += more.in_loop;
        self.labelled_user += more.labelled_user;
    }
}

impl Samples {
    /// Fewer than this say nothing.
    const ENOUGH: u32 = 20;

    /// Whether more would tell no more: there are enough of the guest, or so many of the host
    /// instead that those of the guest are not to come.
    pub(super) fn are_enough(&self) -> bool {
        self.guest >= Self::ENOUGH || self.total >= 8 * Self::ENOUGH
    }

    /// Whether host samples carry guest instruction pointers; `None`: too few samples to tell.
    pub fn carry_guest_ips(&self) -> Option<bool> {
        (self.total >= Self::ENOUGH).then_some(self.in_loop > self.total / 2)
    }

    /// Whether they can stand for samples of the guest: of those that name it, nearly all name its
    /// place. Those that name the host do not count against it: there is much work for the host
    /// where KVM is emulated.
    pub(super) fn name_places(&self) -> bool {
        self.guest >= Self::ENOUGH
            && self.guest >= self.total / 4
            && self.in_loop >= self.guest - self.guest / 10
    }
}
