//! Machines with one vCPU that run a few instructions, to check how this host's KVM behaves.
//!
//! A broken hypervisor can spin in one guest instruction forever. Each machine therefore runs on its own thread, and
//! the signal `SIGRTMIN + 9` ends the machine's run call when the time limit is reached.

mod machine;
mod watch;

use std::io;
use std::time::Duration;

use kvm_ioctls::Kvm;

pub use self::machine::{Exit, Machine, MachineError};
pub use self::watch::{Watch, WatchError, signal, watched};
pub use crate::arch::code;

/// The mode that a machine starts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ring {
    /// Guest kernel mode: ring 0, or EL1.
    Kernel,
    /// Guest user mode: ring 3, or EL0.
    User,
}

/// Errors of running a machine.
#[derive(Debug, thiserror::Error)]
pub enum MicroError {
    /// The machine's thread did not start or did not respond.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The machine could not be built or run.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The observer of [`spin`] failed.
    #[error(transparent)]
    Observer(#[from] io::Error),
    /// The guest left its loop.
    #[error("the guest {0}")]
    Left(String),
}

/// Starts a thread that builds a machine for running `program` in `ring`, and then calls `judge` to run the machine.
/// The thread must end within the time limit `budget`.
///
/// # Errors
/// [`MicroError`]: KVM refused a step, or the thread failed or did not end.
pub fn on_machine<T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    program: &'static [code::Unit],
    judge: impl FnOnce(&mut Machine) -> Result<T, MachineError> + Send + 'static,
) -> Result<T, MicroError> {
    let probe = move |watch: &Watch| {
        let kvm = Kvm::new().map_err(|e| MachineError::Kvm("opening /dev/kvm", e))?;
        judge(&mut Machine::new(&kvm, watch, ring, program)?)
    };
    Ok(watched(budget, probe)??)
}

/// Observes a machine while it loops in kernel or user mode.
///
/// `start` creates the observer before the guest runs, on the guest's thread. The run ends after `budget`, or earlier
/// if `done` returns `true`. `done` is called at the start and after each signal. After the run, `finish` returns the
/// observer's result.
///
/// # Errors
/// [`MicroError`].
pub fn spin<O: 'static, T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    start: impl FnOnce() -> io::Result<O> + Send + 'static,
    mut done: impl FnMut(&O) -> bool + Send + 'static,
    finish: impl FnOnce(O) -> io::Result<T> + Send + 'static,
) -> Result<T, MicroError> {
    on_machine(budget, ring, code::LOOP, move |machine| {
        let observer = match start() {
            Ok(observer) => observer,
            Err(error) => return Ok(Err(error.into())),
        };
        let exit = machine.run_until(|| done(&observer));
        Ok(match exit {
            Exit::Stopped => finish(observer).map_err(MicroError::from),
            exit => Err(MicroError::Left(exit.describe())),
        })
    })?
}

/// Returns whether `ip` is in the loop that [`spin`] runs.
#[must_use]
pub fn in_loop(ip: u64) -> bool {
    let length = size_of_val(code::LOOP) as u64;
    (code::PROGRAM..code::PROGRAM + length).contains(&ip)
}
