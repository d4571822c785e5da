//! Runs small guests for the architecture's probes, one fresh machine each.

use std::time::Duration;

use vpmu_kvm::micro::{self, Machine, MachineError, Ring, code};

use super::Finding;

/// Builds a machine on a watched thread and lets `judge` run it.
///
/// # Errors
/// Text: the step that KVM refused, or that the probe never returned.
pub(crate) fn on_machine<T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    program: &'static [code::Unit],
    judge: impl FnOnce(&mut Machine) -> Result<T, MachineError> + Send + 'static,
) -> Result<T, String> {
    micro::on_machine(budget, ring, program, judge).map_err(|error| vpmu_errors::chain(&error))
}

/// The result of `judge`, or the reason for its absence.
pub(crate) fn finding(
    budget: Duration,
    ring: Ring,
    program: &'static [code::Unit],
    judge: impl FnOnce(&mut Machine) -> Result<Finding, MachineError> + Send + 'static,
) -> Finding {
    on_machine(budget, ring, program, judge).unwrap_or_else(Finding::no)
}
