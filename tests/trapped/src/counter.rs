//! The backing of a counter: the host's CPU clock of the vCPU's thread, in nanoseconds, whichever
//! event the guest selects. Its overflow signals the thread.
#![expect(
    unsafe_code,
    reason = "perf_event_open, its ioctls and mapping have no safe form"
)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_ulong};
use perf_event_open_sys as perf;
use perf_event_open_sys::bindings::{
    self, PERF_FLAG_FD_CLOEXEC, perf_event_attr, perf_event_mmap_page,
};
use vmm::signal::kick_signal;

const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const F_OWNER_TID: c_int = 0;
const PAGES: usize = 2;
const PAGE: usize = 4096;
/// A period that does not end in practice: 26 days.
const NEVER: u64 = 1 << 51;

/// `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: c_int,
    pid: c_int,
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A clock of the calling thread, initially stopped.
#[derive(Debug)]
pub(crate) struct Clock {
    event: File,
    /// Its ring, which is not read: the head moves at each overflow.
    ring: NonNull<perf_event_mmap_page>,
    seen: u64,
}

impl Clock {
    pub(crate) fn open() -> io::Result<Self> {
        let mut attr = perf_event_attr {
            type_: bindings::PERF_TYPE_SOFTWARE,
            size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(0),
            config: bindings::PERF_COUNT_SW_CPU_CLOCK.into(),
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = NEVER;
        attr.__bindgen_anon_2.wakeup_events = 1;
        attr.set_disabled(1);
        let flags = c_ulong::from(PERF_FLAG_FD_CLOEXEC);
        // SAFETY: `attr` is a whole, initialised struct that outlives the call.
        let fd = unsafe { perf::perf_event_open(&raw mut attr, 0, -1, -1, flags) };
        check(fd)?;
        // SAFETY: the call has just made this descriptor, and nothing else owns it.
        let event = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        announce(fd)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let ring = unsafe {
            let (length, protection) = (PAGES * PAGE, libc::PROT_READ);
            libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0)
        };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let ring = NonNull::new(ring.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            event,
            ring,
            seen: 0,
        })
    }

    /// Nanoseconds that it has run.
    pub(crate) fn read(&mut self) -> io::Result<u64> {
        let mut count = [0; 8];
        self.event.read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Starts it, to overflow once after `period`.
    pub(crate) fn start(&mut self, period: u64) -> io::Result<()> {
        self.disarm()?;
        self.rearm(period)?;
        // SAFETY: an ioctl without a pointer, on a descriptor that this value owns.
        check(unsafe { perf::ioctls::ENABLE(self.event.as_raw_fd(), 0) })
    }

    pub(crate) fn stop(&mut self) -> io::Result<()> {
        // SAFETY: see above.
        check(unsafe { perf::ioctls::DISABLE(self.event.as_raw_fd(), 0) })
    }

    /// Sets the next overflow to `period` from now.
    fn rearm(&mut self, period: u64) -> io::Result<()> {
        let period = period.clamp(1, NEVER);
        let argument = (&raw const period).expose_provenance() as u64;
        // SAFETY: the kernel reads one u64 at the address, which lives until the call returns.
        check(unsafe { perf::ioctls::PERIOD(self.event.as_raw_fd(), argument) })
    }

    /// Whether it has overflowed since it was started or disarmed.
    pub(crate) fn overflowed(&self) -> bool {
        self.head() != self.seen
    }

    /// Prevents overflows until the next start.
    pub(crate) fn disarm(&mut self) -> io::Result<()> {
        self.rearm(NEVER)?;
        self.seen = self.head();
        Ok(())
    }

    fn head(&self) -> u64 {
        // SAFETY: the field is in the mapping, which lives as long as this value.
        let head = unsafe { &raw mut (*self.ring.as_ptr()).data_head };
        // SAFETY: aligned, and the kernel alone writes it, atomically.
        unsafe { AtomicU64::from_ptr(head) }.load(Ordering::Acquire)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`; no reference to it remains.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), PAGES * PAGE) };
    }
}

/// Makes overflows of the event kick the calling thread's vCPU.
fn announce(fd: c_int) -> io::Result<()> {
    let owner = Owner {
        kind: F_OWNER_TID,
        // SAFETY: takes nothing, cannot fail.
        pid: unsafe { libc::gettid() },
    };
    // SAFETY: the kernel reads one `f_owner_ex` at the address, which lives until then.
    check(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: no pointer.
    check(unsafe { libc::fcntl(fd, F_SETSIG, kick_signal()) })?;
    // SAFETY: no pointer.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC) })
}
