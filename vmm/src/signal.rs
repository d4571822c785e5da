//! Signals: the kick that makes a vCPU leave the guest, and the signals that end the run.
//!
//! A kick that arrives while its thread is outside the guest must not be lost: the handler sets
//! `immediate_exit` in the vCPU's run page, so the next run call returns at once.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::signal::{SIGRTMIN, block_signal, create_sigset, register_signal_handler};

/// Errors of setting up signals.
#[derive(Debug, thiserror::Error)]
pub enum SignalError {
    /// A handler could not be installed.
    #[error("cannot install a signal handler")]
    Handler(#[source] vmm_sys_util::errno::Error),
    /// The mask could not be set.
    #[error("cannot block the ending signals: {0}")]
    Block(vmm_sys_util::signal::Error),
    /// The descriptor could not be opened.
    #[error("cannot open a signal descriptor")]
    Descriptor(#[source] io::Error),
}

/// Signals that end the run in order.
const ENDING: [c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signal that kicks a vCPU; host perf events use it to signal overflows, too.
#[must_use]
pub fn kick_signal() -> c_int {
    SIGRTMIN()
}

thread_local! {
    /// `immediate_exit` of the vCPU that runs on this thread.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_kick(_signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: `Kickable` keeps the run page mapped while the pointer is set, and the kernel
        // reads this byte only in a run call of this same thread.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the kick's handler for every thread.
///
/// # Errors
/// [`SignalError::Handler`].
pub fn install_kick() -> Result<(), SignalError> {
    // The kernel falls back to SIGIO when the queue of real-time signals is full; by default that
    // would kill the process.
    for signal in [kick_signal(), libc::SIGIO] {
        register_signal_handler(signal, on_kick).map_err(SignalError::Handler)?;
    }
    Ok(())
}

/// The vCPUs' threads, for callers that must kick a vCPU out of the guest.
#[derive(Debug)]
pub struct Threads(Vec<AtomicI32>);

impl Threads {
    /// For `vcpus` vCPUs, none of them running yet.
    #[must_use]
    pub fn new(vcpus: u8) -> Self {
        Self((0..vcpus).map(|_| AtomicI32::new(0)).collect())
    }

    /// Registers this thread as `vcpu`'s, until the value is dropped.
    #[must_use]
    pub fn join(&self, vcpu: u32) -> Joined<'_> {
        let slot = usize::try_from(vcpu).ok().and_then(|vcpu| self.0.get(vcpu));
        if let Some(slot) = slot {
            // SAFETY: asks for a number and touches no memory.
            let thread = unsafe { libc::gettid() };
            slot.store(thread, Ordering::SeqCst);
        }
        Joined(slot)
    }

    /// Makes `vcpu` leave the guest shortly, if it is there.
    ///
    /// # Errors
    /// It has no thread, or the host's error.
    pub fn kick(&self, vcpu: u32) -> io::Result<()> {
        let slot = usize::try_from(vcpu).ok().and_then(|vcpu| self.0.get(vcpu));
        let thread = slot.map_or(0, |slot| slot.load(Ordering::SeqCst));
        if thread == 0 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // The kernel's process numbers are positive.
        let process = std::process::id();
        // SAFETY: touches no memory. If the thread has ended, another one of this process may get
        // the signal, whose handler then has no effect.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, kick_signal()) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// A vCPU's thread registered with [`Threads`].
#[derive(Debug)]
pub struct Joined<'a>(Option<&'a AtomicI32>);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(0, Ordering::SeqCst);
        }
    }
}

/// While it lives, kicks to this thread reach a vCPU.
#[derive(Debug)]
pub struct Kickable(());

impl Kickable {
    /// Directs this thread's kicks to `immediate_exit`.
    ///
    /// # Safety
    /// The byte stays mapped and writable until the value is dropped, which happens on this
    /// thread.
    #[must_use]
    pub unsafe fn new(immediate_exit: *mut u8) -> Self {
        IMMEDIATE_EXIT.set(immediate_exit);
        Self(())
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}

/// The ending signals, as a descriptor. Made before any thread, so that all inherit the mask.
#[derive(Debug)]
pub struct EndingSignals(File);

impl EndingSignals {
    /// Blocks the ending signals from here on and makes them readable instead.
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
        let set = create_sigset(&ENDING).map_err(SignalError::Handler)?;
        // SAFETY: the kernel reads the set during the call only.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(SignalError::Descriptor(io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Another descriptor of the same signals, to wait on.
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

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::signal::Killable;

    #[test]
    fn a_kick_outside_the_guest_is_remembered() {
        install_kick().expect("a handler");
        let (ready, wait) = std::sync::mpsc::channel();
        let (kicked, resume) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut flag = 0u8;
            // SAFETY: `flag` outlives the guard, on this thread.
            let guard = unsafe { Kickable::new(&raw mut flag) };
            ready.send(()).expect("the test waits");
            resume.recv().expect("the test goes on");
            drop(guard);
            // SAFETY: `flag` is this thread's own.
            unsafe { (&raw const flag).read_volatile() }
        });
        wait.recv().expect("the thread runs");
        thread.kill(kick_signal()).expect("a live thread");
        kicked.send(()).expect("the thread waits");
        assert_eq!(thread.join().expect("no panic"), 1);
    }

    #[test]
    fn a_vcpu_is_kicked_by_its_number_while_it_runs() {
        install_kick().expect("a handler");
        let threads = Threads::new(1);
        let mut flag = 0u8;
        // SAFETY: `flag` outlives the guard, on this thread.
        let guard = unsafe { Kickable::new(&raw mut flag) };
        let kicked = || {
            // SAFETY: `flag` is this thread's own; the handler runs on it too.
            unsafe { IMMEDIATE_EXIT.get().replace(0) }
        };
        assert!(threads.kick(0).is_err(), "it has no thread yet");
        let joined = threads.join(0);
        assert!(threads.kick(1).is_err(), "no such vCPU");
        assert_eq!(kicked(), 0);
        threads.kick(0).expect("a thread");
        assert_eq!(kicked(), 1);
        drop(joined);
        assert!(threads.kick(0).is_err(), "it has none any more");
        assert_eq!(kicked(), 0);
        drop(guard);
    }
}
