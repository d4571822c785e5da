//! Machines of one vCPU that run a few instructions, to find out what this host's KVM does.
//!
//! A broken hypervisor can spin in one guest instruction for ever: each machine runs on a thread of its own, for
//! a limited time, which the signal `SIGRTMIN + 9` ends.

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
    /// The guest kernel's.
    Kernel,
    /// The guest user's.
    User,
}

/// Why a machine gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum MicroError {
    /// Its thread.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Its observer.
    #[error(transparent)]
    Observer(#[from] io::Error),
    /// It has left its loop.
    #[error("the guest {0}")]
    Left(String),
}

/// Builds a machine on a watched thread and lets `judge` run it.
///
/// # Errors
/// [`MicroError`]: the step that KVM refused, or that the probe never returned.
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

/// Observes a machine from outside while it loops in kernel or user mode.
///
/// The observer starts before the guest, on the guest's thread, and returns its result once
/// `budget` has ended the run, or earlier if `done`, which is called after each signal.
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

/// Whether `ip` is in the loop that [`spin`] runs.
#[must_use]
pub fn in_loop(ip: u64) -> bool {
    let length = size_of_val(code::LOOP) as u64;
    (code::PROGRAM..code::PROGRAM + length).contains(&ip)
}
