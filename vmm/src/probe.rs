//! Probes this host by running small guests. Also defines the findings of the probes, and the rows of the table that
//! `vmm check` prints.

use std::time::Duration;

use serde::Serialize;
use vpmu_kvm::micro::{self, Machine, MachineError, Ring, code};

/// The result of a probe, and what the probe observed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The machine behaved as the architecture manual specifies.
    pub ok: bool,
    /// The observation.
    pub detail: String,
}

impl Finding {
    pub(crate) fn yes(detail: impl Into<String>) -> Self {
        Finding { ok: true, detail: detail.into() }
    }

    pub(crate) fn no(detail: impl Into<String>) -> Self {
        Finding { ok: false, detail: detail.into() }
    }

    /// The names of the failed findings.
    pub(crate) fn failed<const N: usize>(named: [(&'static str, &Self); N]) -> Vec<&'static str> {
        named.into_iter().filter(|(_, finding)| !finding.ok).map(|(name, _)| name).collect()
    }
}

/// One line of the table that `vmm check` prints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name, `section.subject`.
    pub name: &'static str,
    /// The result.
    pub value: String,
    /// The consequence for users of this machine.
    pub consequence: String,
}

impl Check {
    pub(crate) fn new(name: &'static str, value: impl Into<String>, consequence: impl Into<String>) -> Self {
        Self { name, value: value.into(), consequence: consequence.into() }
    }

    /// A line whose value is the finding's observation. The line's consequence is `good` if the finding is ok, and
    /// `bad` otherwise.
    pub(crate) fn choose(name: &'static str, finding: &Finding, good: &str, bad: &str) -> Self {
        let consequence = if finding.ok { good } else { bad };
        Self::new(name, finding.detail.as_str(), consequence)
    }
}

/// Builds a machine on another thread and lets `judge` run it there.
///
/// # Errors
/// The error message, if KVM refused a step, the thread failed, or the thread did not end within `budget`.
pub(crate) fn on_machine<T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    program: &'static [code::Unit],
    judge: impl FnOnce(&mut Machine) -> Result<T, MachineError> + Send + 'static,
) -> Result<T, String> {
    micro::on_machine(budget, ring, program, judge).map_err(|error| vpmu_errors::chain(&error))
}

/// Returns the finding of `judge`. If [`on_machine`] fails, returns a failed finding with the error message.
pub(crate) fn finding(
    budget: Duration,
    ring: Ring,
    program: &'static [code::Unit],
    judge: impl FnOnce(&mut Machine) -> Result<Finding, MachineError> + Send + 'static,
) -> Finding {
    on_machine(budget, ring, program, judge).unwrap_or_else(Finding::no)
}
