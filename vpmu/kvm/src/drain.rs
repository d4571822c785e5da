//! When the device is to be drained, as a descriptor.
#![expect(unsafe_code, reason = "timerfd and poll have no safe form")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between two drains.
const PERIOD: Duration = Duration::from_millis(10);

/// A timer that runs while the device wants draining. Its descriptor is readable when
/// [`Vpmu::drain`](vpmu::Vpmu::drain) is due: an event loop calls [`DrainTimer::take`] and drains, or a thread
/// drains for as long as [`DrainTimer::wait`] returns `true`. It must not be a vCPU's.
#[derive(Debug)]
pub struct DrainTimer {
    /// Never blocks.
    timer: File,
    /// Nothing starts or stops the timer any more.
    ended: Mutex<bool>,
}

impl DrainTimer {
    /// A timer that stands still.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> io::Result<Self> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: takes no pointer.
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

    /// Starts or stops it: for [`Machine::draining`](vpmu::Machine::draining).
    pub fn run(&self, wanted: bool) {
        let ended = self.ended();
        if !*ended {
            self.set(if wanted { PERIOD } else { Duration::ZERO });
        }
    }

    /// Whether a drain is due; clears that.
    #[must_use]
    pub fn take(&self) -> bool {
        (&self.timer).read_exact(&mut [0; 8]).is_ok()
    }

    /// Waits until a drain is due; `false` after [`DrainTimer::end`].
    #[must_use]
    pub fn wait(&self) -> bool {
        let mut timer = libc::pollfd {
            fd: self.timer.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        loop {
            // SAFETY: the kernel writes to one structure, `timer`. A signal makes it return early.
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

    /// Ends [`DrainTimer::wait`] on every thread, now and later.
    pub fn end(&self) {
        let mut ended = self.ended();
        *ended = true;
        // Each thread that waits takes an expiration: there are more.
        self.set(Duration::from_nanos(1));
    }

    fn set(&self, period: Duration) {
        let time = libc::timespec {
            tv_sec: 0,
            // Below a second.
            tv_nsec: period.subsec_nanos().into(),
        };
        let spec = libc::itimerspec {
            it_interval: time,
            it_value: time,
        };
        // SAFETY: the kernel reads one structure, `spec`, and writes none.
        let set = unsafe {
            libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const spec, ptr::null_mut())
        };
        if set < 0 {
            // It is a timer, and the time is valid.
            log::error!("the drain's timer: {}", io::Error::last_os_error());
        }
    }

    fn ended(&self) -> MutexGuard<'_, bool> {
        // One flag: a panic elsewhere does not spoil it.
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
        assert!(!timer.take(), "not wanted yet");
        timer.run(true);
        assert!(timer.wait());
        assert!(timer.wait(), "again and again");
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
