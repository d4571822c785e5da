//! Signals that are counted by a handler at the moment when they arrive. A blocked signal that a program fetches later
//! would not show whether it arrived before the program's next instruction.
#![expect(unsafe_code, reason = "a signal's handler")]

use std::io;
use std::mem;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings;

use crate::os::{self, POLL_HUP, POLL_IN};

/// The descriptors whose signals are counted apart are less than this.
const DESCRIPTORS: usize = 64;

static INPUT: AtomicU64 = AtomicU64::new(0);
static HANG_UP: AtomicU64 = AtomicU64::new(0);
static STRANGE: AtomicU64 = AtomicU64::new(0);
static BY_DESCRIPTOR: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];
/// The event that the handler enables for one more overflow, or [`NONE`] or [`SENDER`].
static REFRESHED: AtomicI32 = AtomicI32::new(NONE);
/// No event.
const NONE: i32 = -1;
/// The event that has sent the signal.
const SENDER: i32 = -2;

/// The signals since [`install`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handled {
    /// Signals with `POLL_IN`.
    pub(crate) input: u64,
    /// Signals with `POLL_HUP`.
    pub(crate) hang_up: u64,
    /// Signals with any other code.
    pub(crate) strange: u64,
}

extern "C" fn handler(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure.
    let code = unsafe { (*info).si_code };
    // In the siginfo of a SIGPOLL, `si_fd` follows signo, errno, code, padding and the band, which is a long.
    // SAFETY: the word is inside siginfo_t, which is 128 bytes of integers.
    let fd = unsafe { info.cast::<i32>().add(6) };
    // SAFETY: as above; the word is aligned.
    let fd = unsafe { fd.read() };
    let counter = match code {
        POLL_IN => &INPUT,
        POLL_HUP => &HANG_UP,
        _ => &STRANGE,
    };
    counter.fetch_add(1, Ordering::SeqCst);
    let own = usize::try_from(fd).ok().and_then(|fd| BY_DESCRIPTOR.get(fd));
    own.unwrap_or(&STRANGE).fetch_add(1, Ordering::SeqCst);
    let refreshed = match REFRESHED.load(Ordering::SeqCst) {
        SENDER => fd,
        refreshed => refreshed,
    };
    if refreshed != NONE {
        // SAFETY: the call takes its argument by value.
        unsafe { libc::ioctl(refreshed, u64::from(bindings::REFRESH), 1) };
    }
}

/// Handles [`os::signal`] from now on, and begins to count at zero.
pub(crate) fn install() -> io::Result<()> {
    REFRESHED.store(NONE, Ordering::SeqCst);
    // SAFETY: all zeros are valid for this plain structure.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the kernel reads the action during the call.
    if unsafe { libc::sigaction(os::signal(), &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for counter in [&INPUT, &HANG_UP, &STRANGE].into_iter().chain(&BY_DESCRIPTOR) {
        counter.store(0, Ordering::SeqCst);
    }
    Ok(())
}

/// From now on, the handler enables the event behind `fd` for one more overflow.
pub(crate) fn refresh_in_handler(fd: RawFd) {
    REFRESHED.store(fd, Ordering::SeqCst);
}

/// From now on, the handler enables each event that sends a signal for one more overflow.
pub(crate) fn refresh_sender_in_handler() {
    REFRESHED.store(SENDER, Ordering::SeqCst);
}

/// The signals so far.
pub(crate) fn so_far() -> Handled {
    Handled {
        input: INPUT.load(Ordering::SeqCst),
        hang_up: HANG_UP.load(Ordering::SeqCst),
        strange: STRANGE.load(Ordering::SeqCst),
    }
}

/// The number of signals so far.
pub(crate) fn all() -> u64 {
    let handled = so_far();
    handled.input + handled.hang_up + handled.strange
}

/// The number of signals so far whose `si_fd` is `fd`.
pub(crate) fn of(fd: RawFd) -> u64 {
    let own = usize::try_from(fd).ok().and_then(|fd| BY_DESCRIPTOR.get(fd));
    own.map_or(0, |own| own.load(Ordering::SeqCst))
}

/// Waits until `expected` signals have arrived, or until `limit`. Then waits for signals beyond these.
pub(crate) fn wait_for(expected: u64, limit: Duration) {
    let end = Instant::now() + limit;
    while all() < expected && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(10));
}
