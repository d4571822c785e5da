//! A timer descriptor that becomes readable when the device is due for a drain.
#![expect(unsafe_code, reason = "timerfd and poll have no safe wrapper")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between two drains.
const PERIOD: Duration = Duration::from_millis(10);

/// A timer that runs while the device needs periodic drains. Its descriptor becomes readable when
/// [`Vpmu::drain`](vpmu::Vpmu::drain) is due. Use it in one of two ways: an event loop waits for the descriptor and
/// drains if [`DrainTimer::take`] returns `true`, or a separate thread drains each time that [`DrainTimer::wait`]
/// returns `true`. A vCPU's thread must do neither.
#[derive(Debug)]
pub struct DrainTimer {
    /// The timer descriptor, which is non-blocking.
    timer: File,
    /// Whether [`DrainTimer::end`] was called. If so, [`DrainTimer::run`] has no effect.
    ended: Mutex<bool>,
}

impl DrainTimer {
    /// Creates a stopped timer.
    ///
    /// # Errors
    /// The error of timerfd_create(2).
    pub fn new() -> io::Result<Self> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: the call takes no pointer.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
            timer: unsafe { File::from_raw_fd(fd) },
            ended: Mutex::new(false),
        })
    }

    /// Starts the timer if `wanted` is true, and otherwise stops it. Call this from
    /// [`Machine::draining`](vpmu::Machine::draining).
    pub fn run(&self, wanted: bool) {
        let ended = self.ended();
        if !*ended {
            self.set(if wanted { PERIOD } else { Duration::ZERO });
        }
    }

    /// Returns whether a drain is due, and consumes the timer's expirations.
    #[must_use]
    pub fn take(&self) -> bool {
        (&self.timer).read_exact(&mut [0; 8]).is_ok()
    }

    /// Waits until a drain is due, and returns `true`. Returns `false` after [`DrainTimer::end`].
    #[must_use]
    pub fn wait(&self) -> bool {
        let mut timer = libc::pollfd { fd: self.timer.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        loop {
            // SAFETY: the kernel reads and writes one `pollfd`, `timer`. The result is ignored. `take` decides whether
            // a drain is due, also when a signal ended the call.
            unsafe { libc::poll(&raw mut timer, 1, -1) };
            let due = self.take();
            if *self.ended() {
                return false;
            }
            if due {
                return true;
            }
        }
    }

    /// Makes all current and future calls of [`DrainTimer::wait`] return, on every thread.
    pub fn end(&self) {
        let mut ended = self.ended();
        *ended = true;
        // Make the timer expire repeatedly. A thread that wakes up consumes all expirations so far, so each other
        // waiting thread needs a later expiration.
        self.set(Duration::from_nanos(1));
    }

    fn set(&self, period: Duration) {
        let time = libc::timespec {
            tv_sec: 0,
            // Periods are below a second.
            tv_nsec: period.subsec_nanos().into(),
        };
        let spec = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the kernel reads one `itimerspec`, `spec`. The last argument is null, so the kernel writes nothing.
        let set = unsafe { libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const spec, ptr::null_mut()) };
        if set < 0 {
            // This should not fail: the descriptor is a timer, and the time is valid.
            log::error!("cannot set the drain timer: {}", io::Error::last_os_error());
        }
    }

    fn ended(&self) -> MutexGuard<'_, bool> {
        // A panic while the lock is held leaves the flag valid.
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for DrainTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl AsRawFd for DrainTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn drain_is_due_while_it_is_wanted() {
        let timer = DrainTimer::new().expect("a timer");
        assert!(!timer.take(), "the timer is not started yet");
        timer.run(true);
        assert!(timer.wait());
        assert!(timer.wait(), "the timer expires repeatedly");
        timer.run(false);
        assert!(!timer.take(), "a stopped timer has no expirations");
    }

    #[test]
    fn waiting_ends_and_does_not_begin_again() {
        let timer = Arc::new(DrainTimer::new().expect("a timer"));
        let waits = Arc::clone(&timer);
        let thread = thread::spawn(move || waits.wait());
        timer.end();
        timer.run(false);
        assert!(!thread.join().expect("no panic"));
        assert!(!timer.wait());
    }
}
