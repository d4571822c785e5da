//! The signal that makes a vCPU leave the guest (the *kick*), and the signals that end the run.

#![expect(unsafe_code, reason = "signalfd has no safe wrapper")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use libc::c_int;
use vmm_sys_util::signal::{SIGRTMIN, block_signal, create_sigset};
use vpmu_kvm::kick;

/// Errors from setting up signals.
#[derive(Debug, thiserror::Error)]
pub enum SignalError {
    /// A handler could not be installed.
    #[error("cannot install a signal handler")]
    Handler(#[source] io::Error),
    /// The mask could not be set.
    #[error("cannot block the signals that end the run: {0}")]
    Block(vmm_sys_util::signal::Error),
    /// The descriptor could not be opened.
    #[error("cannot open a signal descriptor")]
    Descriptor(#[source] io::Error),
}

/// Signals that make the run end in an orderly way.
pub(crate) const ENDING: [c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signal that kicks a vCPU. Host perf events also use it to signal overflows.
#[must_use]
pub fn kick_signal() -> c_int {
    SIGRTMIN()
}

/// Installs the kick's handler for every thread.
///
/// # Errors
/// [`SignalError::Handler`].
pub fn install_kick() -> Result<(), SignalError> {
    kick::install(kick_signal()).map_err(SignalError::Handler)
}

/// A descriptor that becomes readable when a signal that ends the run has arrived. Create this value before the threads
/// that run with the guest, so that the threads inherit a signal mask that blocks these signals.
#[derive(Debug)]
pub struct EndingSignals(File);

impl EndingSignals {
    /// Blocks the signals that end the run, and makes them readable from the descriptor instead.
    ///
    /// # Errors
    /// [`SignalError::Block`], [`SignalError::Descriptor`].
    pub fn new() -> Result<Self, SignalError> {
        for signal in ENDING {
            match block_signal(signal) {
                Ok(()) | Err(vmm_sys_util::signal::Error::SignalAlreadyBlocked(_)) => {}
                Err(error) => return Err(SignalError::Block(error)),
            }
        }
        let set = create_sigset(&ENDING).map_err(|error| SignalError::Descriptor(error.into()))?;
        // SAFETY: the kernel reads the set only during the call.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(SignalError::Descriptor(io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Another descriptor for the same signals, which the caller can wait on.
    ///
    /// # Errors
    /// [`SignalError::Descriptor`].
    pub fn try_clone(&self) -> Result<Self, SignalError> {
        let file = self.0.try_clone().map_err(SignalError::Descriptor)?;
        Ok(Self(file))
    }

    /// The signal that arrived, if any.
    #[must_use]
    pub fn read(&self) -> Option<c_int> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let count = (&self.0).read(&mut info).ok()?;
        let number = info.get(..4).filter(|_| count >= 4)?;
        c_int::try_from(u32::from_ne_bytes(number.try_into().ok()?)).ok()
    }
}

impl AsRawFd for EndingSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
