//! The host's own clock event, without the device.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use perf_event_open_sys as perf;
use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_CPU_CLOCK, PERF_SAMPLE_IP, PERF_SAMPLE_PERIOD, PERF_SAMPLE_TIME,
    PERF_TYPE_SOFTWARE, perf_event_attr,
};

const PERIOD: u64 = 1_000_000;
/// The metadata page and the data pages.
const RING: usize = 17 * 4096;

/// A clock of the calling thread that samples every millisecond into a ring without a reader.
#[derive(Debug)]
pub(crate) struct HostClock {
    event: File,
    ring: *mut libc::c_void,
}

impl HostClock {
    pub(crate) fn open() -> io::Result<Self> {
        let mut attr = perf_event_attr {
            size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(0),
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_CPU_CLOCK.into(),
            sample_type: u64::from(PERF_SAMPLE_IP | PERF_SAMPLE_TIME | PERF_SAMPLE_PERIOD),
            clockid: libc::CLOCK_MONOTONIC_RAW,
            ..perf_event_attr::default()
        };
        attr.set_disabled(1);
        attr.set_use_clockid(1);
        attr.set_watermark(1);
        attr.__bindgen_anon_1.sample_period = PERIOD;
        attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
        // SAFETY: `attr` is a whole, initialised struct that outlives the call.
        let fd = unsafe { perf::perf_event_open(&raw mut attr, 0, -1, -1, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just made this descriptor, and nothing else owns it.
        let event = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let ring = unsafe { libc::mmap(ptr::null_mut(), RING, access, libc::MAP_SHARED, fd, 0) };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { event, ring })
    }

    pub(crate) fn start(&self) -> io::Result<()> {
        // SAFETY: an ioctl without a pointer, on a descriptor that `event` owns.
        checked(unsafe { perf::ioctls::ENABLE(self.event.as_raw_fd(), 0) })
    }

    pub(crate) fn stop(&self) -> io::Result<()> {
        // SAFETY: see `start`.
        checked(unsafe { perf::ioctls::DISABLE(self.event.as_raw_fd(), 0) })
    }
}

impl Drop for HostClock {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`; no reference to it remains.
        unsafe { libc::munmap(self.ring, RING) };
    }
}

fn checked(result: i32) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
