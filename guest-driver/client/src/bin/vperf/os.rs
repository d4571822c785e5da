//! Signals and processes as file descriptors, and the signal mask of a new program. std has no
//! functions for these.
#![expect(unsafe_code, reason = "signal masks and signalfd(2) are in neither std nor rustix")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The signal that requests a snapshot.
pub(crate) const SNAPSHOT: libc::c_int = libc::SIGUSR2;

/// The set of the termination signals and `more`.
fn signals(more: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: a sigset_t is plain numbers, for which zeros are valid.
    let mut set = unsafe { std::mem::zeroed() };
    let ending = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    for &signal in ending.iter().chain(more) {
        // SAFETY: `set` is valid, and the signal exists.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// A signalfd(2) from which this process reads the signals that would terminate it (SIGINT,
/// SIGTERM, SIGHUP, SIGQUIT), and any that the caller adds.
#[derive(Debug)]
pub(crate) struct Signals(File);

impl Signals {
    /// Blocks the termination signals and `more`. Call it before the first thread starts, because threads inherit the
    /// mask.
    pub(crate) fn catch(more: &[libc::c_int]) -> io::Result<Self> {
        let set = signals(more);
        // SAFETY: reads the set, changes only this thread's mask.
        let result = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: reads the set; with -1, signalfd creates a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned the descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }.into()))
    }

    /// Waits for the next signal and returns its number.
    pub(crate) fn next(&self) -> io::Result<i32> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        (&self.0).read_exact(&mut info)?;
        // ssi_signo, the first field.
        Ok(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Unblocks the termination signals and [`SNAPSHOT`] in the calling thread, as a new program
/// expects. Async-signal-safe.
pub(crate) fn unblock_signals() -> io::Result<()> {
    let set = signals(&[SNAPSHOT]);
    // SAFETY: reads the set, changes only this thread's mask.
    let result = unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// A descriptor of a process, readable once it has exited.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Sends a signal; an exited process is not an error.
    pub(crate) fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
        match pidfd_send_signal(&self.0, signal) {
            Err(error) if error != rustix::io::Errno::SRCH => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
