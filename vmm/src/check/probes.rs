//! Runs small guests for the architecture's probes, one fresh machine each.

use std::time::Duration;

use kvm_ioctls::Kvm;

use super::machine::{Exit, Machine, MachineError};
use super::{Finding, Ring, Watch, watched};
use crate::arch::check::code;
use crate::report;

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
    let probe = move |watch: &Watch| {
        let kvm = Kvm::new().map_err(|e| MachineError::Kvm("opening /dev/kvm", e))?;
        judge(&mut Machine::new(&kvm, watch, ring, program)?)
    };
    match watched(budget, probe) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(report::chain(&error)),
        Err(error) => Err(report::chain(&error)),
    }
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

/// Observes a machine from outside while it loops in kernel or user mode.
///
/// The observer starts before the guest, on the guest's thread, and returns its result once
/// `budget` has ended the run, or earlier if `done`, which is called after each signal.
pub(crate) fn spin<O: 'static, T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    start: impl FnOnce() -> Result<O, String> + Send + 'static,
    mut done: impl FnMut(&O) -> bool + Send + 'static,
    finish: impl FnOnce(O) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let answer = on_machine(budget, ring, code::LOOP, move |machine| {
        let observer = match start() {
            Ok(observer) => observer,
            Err(error) => return Ok(Err(error)),
        };
        let exit = machine.run_until(|| done(&observer));
        Ok(match exit {
            Exit::Stopped => finish(observer),
            exit => Err(format!("the guest {}", exit.describe())),
        })
    });
    answer.and_then(|observed| observed)
}

/// Whether `ip` is in the loop that [`spin`] runs.
pub(crate) fn in_loop(ip: u64) -> bool {
    let length = size_of_val(code::LOOP) as u64;
    (code::PROGRAM..code::PROGRAM + length).contains(&ip)
}
