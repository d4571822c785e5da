//! The three things that std has no word for: signals as a descriptor, processes as
//! descriptors, and a signal mask set back.
#![expect(unsafe_code, reason = "the edge to the kernel")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Asks a recording for a snapshot.
pub(crate) const SNAPSHOT: libc::c_int = libc::SIGUSR2;

fn checked(result: libc::c_long) -> io::Result<RawFd> {
    match RawFd::try_from(result) {
        Ok(value) if value >= 0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass a descriptor that the kernel has just returned to them alone.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The signals that ask a program to end, and `more`, in a set.
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

/// SIGINT, SIGTERM, SIGHUP, SIGQUIT and others, kept from ending this process and to be read
/// instead.
#[derive(Debug)]
pub(crate) struct Signals(File);

impl Signals {
    /// Those and `more`. To be called before any thread is started: threads inherit the mask.
    pub(crate) fn catch(more: &[libc::c_int]) -> io::Result<Self> {
        let set = signals(more);
        // SAFETY: reads the set, changes this thread's mask alone.
        let result =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: reads the set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        Ok(Self(owned(checked(fd.into())?).into()))
    }

    /// The next signal's number; waits for it.
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

/// Gives the calling thread the mask that programs expect. Async-signal-safe.
pub(crate) fn unblock_signals() -> io::Result<()> {
    let set = signals(&[SNAPSHOT]);
    // SAFETY: reads the set, changes this thread's mask alone.
    let result =
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(result))
    }
}

/// A descriptor of a process, readable when it has ended.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        // SAFETY: takes two numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        Ok(Self(owned(checked(fd)?)))
    }

    /// Sends a signal; to a process that has ended, none.
    pub(crate) fn signal(&self, signal: i32) -> io::Result<()> {
        // SAFETY: takes numbers and a null pointer, which stands for "as from kill(2)".
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        match checked(result) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
