//! Runs a probe on its own thread, within a time limit.
//!
//! A broken hypervisor can spin in one guest instruction forever, so a signal ends the probe's run call at the time
//! limit. If the process's queue of real-time signals is full, `SIGIO` is sent instead: by the kernel for overflows of
//! a probe's event, and by this module at the time limit. The thread blocks both signals outside of run calls.

#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls does not wrap, pthread_kill and sigtimedwait")]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;
use vmm_sys_util::signal::{self as signals, SIGRTMIN, block_signal, create_sigset, register_signal_handler};

use self::WatchError::{Panicked, Signal, Spawn, Stuck};

/// How long to wait for a signalled probe before abandoning it.
const GRACE: Duration = Duration::from_secs(1);

ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, kvm_bindings::KVMIO, 0x8b, u32);

/// Errors of a probe.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The thread could not be started.
    #[error("cannot start a probe thread")]
    Spawn(#[source] io::Error),
    /// The signal for the time limit could not be prepared.
    #[error("cannot prepare the signal that ends a probe at its time limit")]
    Signal(#[source] io::Error),
    /// The probe did not react to the signal.
    #[error("the probe was still running one second after its time limit")]
    Stuck,
    /// The probe panicked.
    #[error("the probe panicked")]
    Panicked,
}

/// A probe's time limit.
#[derive(Debug, Clone)]
pub struct Watch {
    over: Arc<AtomicBool>,
}

impl Watch {
    /// Returns `true` once the probe must end.
    pub fn over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Consumes the signals that ended a run call, because a pending signal would end the next call immediately.
    /// Callers check [`Watch::over`] afterwards.
    pub fn take_signals(&self) {
        let Ok(set) = create_sigset(&ending()) else {
            return;
        };
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel reads `set` and `now`, and writes nothing, because the info pointer is null.
        while unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const now) } > 0 {}
    }

    /// Unblocks all signals during this vCPU's run calls, including the signal for the time limit.
    ///
    /// Outside run calls, the thread keeps the time limit's signal blocked. A signal that arrives just before a run
    /// call therefore stays pending and ends the call immediately.
    pub fn guard(&self, vcpu: &impl AsRawFd) -> io::Result<()> {
        #[repr(C)]
        struct Mask {
            length: u32,
            blocked: [u8; 8],
        }
        let mask = Mask { length: 8, blocked: [0; 8] };
        // SAFETY: `mask` has the layout of a `kvm_signal_mask` with a set of `length` bytes; KVM only reads it.
        let answer = unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Returns the signal that ends a probe's run call.
pub fn signal() -> c_int {
    SIGRTMIN() + 9
}

/// The signals that end a run call.
fn ending() -> [c_int; 2] {
    [signal(), libc::SIGIO]
}

/// Runs `probe`, signals it after `budget`, and returns its result.
///
/// A probe may run until the time limit. It must check [`Watch::over`] before each run call and after each
/// interruption. If a probe still runs one second after the signal, this function abandons the probe.
pub fn watched<T: Send + 'static>(
    budget: Duration,
    probe: impl FnOnce(&Watch) -> T + Send + 'static,
) -> Result<T, WatchError> {
    let signal = signal();
    // Without a handler, the signal would end the process. Installing the handler again is harmless.
    register_signal_handler(signal, ignore).map_err(|e| Signal(e.into()))?;

    let watch = Watch { over: Arc::new(AtomicBool::new(false)) };
    let over = Arc::clone(&watch.over);
    let (sender, receiver) = mpsc::sync_channel(1);
    let blocked = Arc::new(AtomicBool::new(false));
    let has_blocked = Arc::clone(&blocked);
    let thread = thread::Builder::new()
        .name("probe".into())
        .spawn(move || {
            let answer = ending().into_iter().try_for_each(block).map(|()| {
                has_blocked.store(true, Ordering::SeqCst);
                probe(&watch)
            });
            // An abandoned probe has no receiver.
            drop(sender.send(answer));
        })
        .map_err(Spawn)?;

    match receiver.recv_timeout(budget) {
        Ok(answer) => {
            // Wait until the thread has ended, because the caller may rely on that. Ignore the result: the thread sent
            // an answer, so it did not panic.
            let _ = thread.join();
            return answer;
        }
        Err(RecvTimeoutError::Disconnected) => return Err(Panicked),
        Err(RecvTimeoutError::Timeout) => {}
    }
    // Set the flag before the signal is sent. If the thread has not blocked the signal yet, the handler discards the
    // signal. The probe has not started in this case, and will see the flag.
    over.store(true, Ordering::SeqCst);
    match kick(&thread, signal) {
        // Send `SIGIO` only if the thread has already blocked it. This module installs no handler for `SIGIO`, so an
        // unblocked `SIGIO` would end the process.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            if blocked.load(Ordering::SeqCst) {
                kick(&thread, libc::SIGIO).map_err(Signal)?;
            }
        }
        result => result.map_err(Signal)?,
    }
    let answer = receiver.recv_timeout(GRACE).map_err(|error| match error {
        RecvTimeoutError::Timeout => Stuck,
        RecvTimeoutError::Disconnected => Panicked,
    })?;
    let _ = thread.join();
    answer
}

/// Blocks `signal` in this thread. The thread's inherited mask may already block `signal`, and this is not an error.
fn block(signal: c_int) -> Result<(), WatchError> {
    match block_signal(signal) {
        Ok(()) | Err(signals::Error::SignalAlreadyBlocked(_)) => Ok(()),
        Err(e) => Err(Signal(io::Error::other(e.to_string()))),
    }
}

/// Sends `signal` to a thread that has not been joined.
fn kick<T>(thread: &thread::JoinHandle<T>, signal: c_int) -> io::Result<()> {
    // SAFETY: the handle was not joined, so the thread's id is still valid, even if the thread has
    // ended.
    let answer = unsafe { libc::pthread_kill(thread.as_pthread_t() as _, signal) };
    match answer {
        // The thread may have ended since the time-out. In that case, its result is in the channel.
        0 | libc::ESRCH => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

extern "C" fn ignore(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_in_time_is_returned() {
        assert_eq!(watched(Duration::from_secs(10), |_| 7).unwrap(), 7);
    }

    #[test]
    fn probe_that_checks_the_watch_ends_at_its_limit() {
        let spun = watched(Duration::from_millis(5), |watch| {
            while !watch.over() {
                thread::yield_now();
            }
            "stopped"
        });
        assert_eq!(spun.unwrap(), "stopped");
    }

    #[test]
    fn panicking_probe_is_an_error_and_no_hang() {
        let outcome = watched(Duration::from_secs(10), |_| std::panic::resume_unwind(Box::new("quiet")));
        let outcome: Result<(), WatchError> = outcome;
        assert!(matches!(outcome, Err(Panicked)));
    }
}
