//! What guests of a few instructions do here, one fresh machine per question.

use std::time::Duration;

use kvm_ioctls::Kvm;

use super::super::reg;
use super::code;
use super::facts::Guest;
use super::machine::{Exit, Machine, MachineError};
use crate::check::{Finding, Ring, Watch, watched};
use crate::report;

/// For a probe that ends on its own: generous, an emulated host is slow.
const BUDGET: Duration = Duration::from_secs(2);
/// For the one that only a signal ends.
const BUDGET_SPIN: Duration = Duration::from_millis(20);

/// Runs every probe.
pub(crate) fn probe() -> Guest {
    Guest {
        mmio: finding(BUDGET, Ring::Kernel, code::STORE, |machine| {
            Ok(match machine.run() {
                Exit::Store(code::RESULT, code::STORE_VALUE) => {
                    Finding::yes("address and data arrive")
                }
                exit => Finding::no(exit.describe()),
            })
        }),
        system_call: finding(BUDGET, Ring::User, code::CALL, system_call),
        breakpoint: finding(BUDGET, Ring::Kernel, code::BREAKPOINT, |machine| {
            Ok(match machine.run() {
                Exit::Store(code::EXCEPTION, code::CLASS_BRK) => {
                    Finding::yes("raises a breakpoint exception")
                }
                exit => Finding::no(exit.describe()),
            })
        }),
        hypercall: finding(BUDGET, Ring::Kernel, code::HYPERCALL, |machine| {
            machine.set(reg::x(0), code::PSCI_VERSION)?;
            machine.set(reg::x(4), code::WINDOW)?;
            Ok(match machine.run() {
                Exit::Store(code::RESULT, version) if version >= code::PSCI_0_2 => {
                    let (major, minor) = (version >> 16, version & 0xffff);
                    Finding::yes(format!("PSCI {major}.{minor} answers"))
                }
                exit => Finding::no(exit.describe()),
            })
        }),
        signal: finding(BUDGET_SPIN, Ring::Kernel, code::LOOP, |machine| {
            let exit = machine.run();
            let at = machine.get(reg::PC)?;
            Ok(match exit {
                Exit::Stopped if in_loop(at) => Finding::yes("ends the run call"),
                Exit::Stopped => Finding::no(format!("left the guest at {at:#x}")),
                exit => Finding::no(exit.describe()),
            })
        }),
    }
}

/// Up to EL1 and back down.
fn system_call(machine: &mut Machine) -> Result<Finding, MachineError> {
    let up = machine.run();
    if up != Exit::Store(code::RESULT, code::EL1) {
        return Ok(Finding::no(format!(
            "{} instead of arriving",
            up.describe()
        )));
    }
    let down = machine.run();
    let back = down == Exit::Store(code::RETURNED, code::STORE_VALUE);
    let user = vpmu::CpuState::is_user(machine.get(reg::PSTATE)?);
    Ok(match back && user {
        true => Finding::yes("EL0 to EL1 and back"),
        false => Finding::no(format!("{} instead of returning", down.describe())),
    })
}

/// Builds a machine on a watched thread and lets `judge` run it.
///
/// # Errors
/// In words: what KVM refused, or that the probe never came back.
fn on_machine<T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    program: &'static [u32],
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

fn finding(
    budget: Duration,
    ring: Ring,
    program: &'static [u32],
    judge: impl FnOnce(&mut Machine) -> Result<Finding, MachineError> + Send + 'static,
) -> Finding {
    on_machine(budget, ring, program, judge).unwrap_or_else(Finding::no)
}

/// A machine whose kernel or user mode is to be watched from outside while it loops.
///
/// The observer starts before the guest runs, on the thread that runs it, and is asked for its
/// answer once `budget` has ended the run, or earlier when `done`, which each signal asks.
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

/// Whether `ip` lies in the loop that [`spin`] runs.
pub(crate) fn in_loop(ip: u64) -> bool {
    (code::PROGRAM..code::PROGRAM + 4 * code::LOOP.len() as u64).contains(&ip)
}
