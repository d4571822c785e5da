//! The ways in which a run can end, and [`StopLatch`], which announces the end.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::c_int;
use vmm_sys_util::eventfd::EventFd;

/// The reason for the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The guest powered off.
    Poweroff,
    /// The guest asked for a reset.
    Reset,
    /// A triple fault: the processor shut down.
    TripleFault,
    /// The guest kernel panicked.
    GuestPanic,
    /// Ctrl-A x, or a snapshot with `--then-exit`.
    ByHand,
    /// A signal to the VMM.
    Signal(c_int),
}

/// Exit status of a VMM that failed.
pub const EXIT_FAILURE: u8 = 1;
/// Exit status for wrong usage.
pub const EXIT_USAGE: u8 = 2;
/// Exit status of a VMM whose seccomp filter refused a system call.
pub const EXIT_REFUSED_CALL: u8 = 7;
/// Exit status if KVM can no longer run the guest (see [`VcpuError::Stopped`]).
pub const EXIT_STOPPED: u8 = 8;

impl Ending {
    /// Whether the guest can boot again after this end.
    #[must_use]
    pub fn is_reset(self) -> bool {
        matches!(self, Self::Reset | Self::TripleFault)
    }

    fn is_from_outside(self) -> bool {
        matches!(self, Self::ByHand | Self::Signal(_))
    }

    /// The exit status for this end.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Poweroff => 0,
            Self::Reset => 3,
            Self::TripleFault => 4,
            Self::GuestPanic => 5,
            Self::ByHand | Self::Signal(_) => 6,
        }
    }

    /// The name of this end in reports. The name is stable.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Poweroff => "poweroff",
            Self::Reset => "reset",
            Self::TripleFault => "triple-fault",
            Self::GuestPanic => "guest-panic",
            Self::ByHand => "by-hand",
            Self::Signal(_) => "signal",
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poweroff => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest asked for a reset"),
            Self::TripleFault => f.write_str("the guest triple-faulted"),
            Self::GuestPanic => f.write_str("the guest panicked"),
            Self::ByHand => f.write_str("ended by Ctrl-A x or a snapshot"),
            Self::Signal(number) => write!(f, "ended by signal {number}"),
        }
    }
}

/// Errors of a vCPU. Each of them ends the run.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// KVM's run call failed.
    #[error("vCPU {vcpu}: KVM cannot run the guest")]
    Run {
        /// The vCPU.
        vcpu: u32,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The run page cannot be mapped.
    #[error("cannot map a vCPU's run page")]
    RunPage(#[source] io::Error),
    /// KVM encountered an instruction or state that it cannot emulate. A guest kernel can cause this whenever it likes.
    #[error("vCPU {vcpu} at {ip:#x}: {what}; 'vmm check' shows what this host supports")]
    Stopped {
        /// The vCPU.
        vcpu: u32,
        /// The guest's instruction pointer. Zero if KVM does not report it.
        ip: u64,
        /// The reason in KVM's terms.
        what: String,
    },
    /// The PMU device rejects this vCPU.
    #[error("vCPU {vcpu}: cannot attach to the PMU device")]
    Attach {
        /// The vCPU.
        vcpu: u32,
        /// The device's reason.
        #[source]
        source: vpmu::Error,
    },
    /// The counters of KVM's own PMU cannot go on after a restore.
    #[error("vCPU {vcpu}: cannot start the counters of its PMU again")]
    Counters {
        /// The vCPU.
        vcpu: u32,
        /// The reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The thread panicked, which is a bug.
    #[error("vCPU {0}: its thread panicked")]
    Panicked(u32),
}

#[derive(Debug, Default)]
struct StopState {
    how: Option<Result<Ending, VcpuError>>,
    /// The end that the user or a signal requested. It is remembered even if this boot had already ended for another
    /// reason.
    outside: Option<Ending>,
}

/// The end of a run. If several ends are announced, the first one counts.
#[derive(Debug)]
pub struct StopLatch {
    ended: AtomicBool,
    state: Mutex<StopState>,
    event: EventFd,
    force: EventFd,
}

impl StopLatch {
    /// The initial state: the run has not ended yet.
    ///
    /// # Errors
    /// The host has no free event descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            ended: AtomicBool::new(false),
            state: Mutex::new(StopState::default()),
            event: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            force: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Announces the end.
    pub fn announce(&self, how: Result<Ending, VcpuError>) {
        let mut state = self.state();
        let outside = how.as_ref().ok().copied().filter(|how| how.is_from_outside());
        state.outside = state.outside.or(outside);
        if state.how.is_none() {
            state.how = Some(how);
            self.ended.store(true, Ordering::SeqCst);
            signal(&self.event);
        }
        if outside.is_some() {
            signal(&self.force);
        }
    }

    /// Clears the end of a boot, so that the guest can boot again. Fails if the user or a signal requested an end.
    ///
    /// # Errors
    /// The requested end.
    pub fn rearm(&self) -> Result<(), Ending> {
        let mut state = self.state();
        if let Some(outside) = state.outside {
            return Err(outside);
        }
        state.how = None;
        self.ended.store(false, Ordering::SeqCst);
        // Clear the descriptor. The read fails if it is already clear.
        let _ = self.event.read();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an end was announced. vCPUs then no longer enter the guest.
    #[must_use]
    pub fn reached(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// An event that is readable once the run has ended.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// An event that is readable once the user or a signal has requested the end. From then on, the VMM must not wait
    /// for pending work, such as console output.
    #[must_use]
    pub fn force(&self) -> &EventFd {
        &self.force
    }

    /// Returns the reason for the end, but does not take the result as [`StopLatch::take`] does. Returns `None` if no
    /// end was announced yet, if the end is an error, or if [`StopLatch::take`] has taken the result.
    #[must_use]
    pub fn peek(&self) -> Option<Ending> {
        let state = self.state();
        state.how.as_ref().and_then(|how| how.as_ref().ok()).copied()
    }

    /// Takes the result. `None` before the end, and after the result was taken.
    pub fn take(&self) -> Option<Result<Ending, VcpuError>> {
        self.state().how.take()
    }
}

fn signal(event: &EventFd) {
    if let Err(error) = event.write(1) {
        log::error!("cannot signal the end of the run: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_reported_end_is_kept() {
        let end = StopLatch::new().expect("an event descriptor");
        assert!(!end.reached());
        end.announce(Ok(Ending::Reset));
        end.announce(Ok(Ending::Poweroff));
        assert!(end.reached());
        assert!(matches!(end.take(), Some(Ok(Ending::Reset))));
        assert_eq!(end.event().read().expect("signalled"), 1);
        assert!(end.force().read().is_err());
    }

    #[test]
    fn machine_continues_after_a_reset_but_not_after_an_external_end() {
        let end = StopLatch::new().expect("event descriptors");
        end.announce(Ok(Ending::Reset));
        assert!(matches!(end.take(), Some(Ok(Ending::Reset))));
        assert_eq!(end.rearm(), Ok(()));
        assert!(!end.reached() && end.event().read().is_err());
        end.announce(Ok(Ending::TripleFault));
        end.announce(Ok(Ending::Signal(15)));
        end.announce(Ok(Ending::ByHand));
        assert!(matches!(end.take(), Some(Ok(Ending::TripleFault))));
        assert_eq!(end.rearm(), Err(Ending::Signal(15)));
        assert!(end.reached());
    }

    #[test]
    fn ending_from_outside_is_in_a_hurry() {
        for ending in [Ending::ByHand, Ending::Signal(15)] {
            let end = StopLatch::new().expect("event descriptors");
            end.announce(Ok(ending));
            assert!(end.force().read().is_ok());
        }
    }

    #[test]
    fn exit_codes_distinguish_endings_from_failures() {
        let endings = [Ending::Poweroff, Ending::Reset, Ending::TripleFault, Ending::GuestPanic, Ending::ByHand];
        let mut codes: Vec<u8> = endings.iter().map(|ending| ending.exit_code()).collect();
        codes.extend([EXIT_FAILURE, EXIT_USAGE, EXIT_REFUSED_CALL, EXIT_STOPPED]);
        codes.sort_unstable();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(Ending::Signal(15).exit_code(), Ending::ByHand.exit_code());
    }
}
