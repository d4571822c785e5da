//! `perf_event_open(2)` on the calling thread and its ring, without interpretation of either.

#![expect(unsafe_code, reason = "system calls and a shared mapping")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use libc::c_int;
use perf_event_open_sys::bindings::{perf_event_attr, perf_event_mmap_page};
use perf_event_open_sys::ioctls;

const PAGE: usize = 4096;
/// Data pages of a ring: a power of two.
const DATA_PAGES: usize = 8;

/// One event on the calling thread.
#[derive(Debug)]
pub struct Event {
    file: File,
}

impl Event {
    /// Opens a disabled event on the calling thread, on any CPU.
    ///
    /// # Errors
    /// The error of perf_event_open(2).
    pub fn open(mut attr: perf_event_attr) -> io::Result<Self> {
        attr.size = u32::try_from(size_of::<perf_event_attr>()).map_err(io::Error::other)?;
        attr.set_disabled(1);
        let cloexec = perf_event_open_sys::bindings::PERF_FLAG_FD_CLOEXEC;
        // SAFETY: `attr` is initialised and its size field matches it.
        let fd = unsafe {
            perf_event_open_sys::perf_event_open(&raw mut attr, 0, -1, -1, cloexec.into())
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor and nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        Ok(Event { file })
    }

    /// Starts counting.
    pub fn enable(&self) -> io::Result<()> {
        // SAFETY: the descriptor is a perf event's as long as `file` lives.
        let answer = unsafe { ioctls::ENABLE(self.file.as_raw_fd(), 0) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Makes it send `signal` to the calling thread whenever it wakes its readers.
    pub fn announce(&self, signal: c_int) -> io::Result<()> {
        /// `struct f_owner_ex`, and the kind of owner that is a thread.
        #[repr(C)]
        struct Owner {
            kind: c_int,
            pid: c_int,
        }
        const THREAD: c_int = 0;
        const F_SETOWN_EX: c_int = 15;
        const F_SETSIG: c_int = 10;
        let fd = self.file.as_raw_fd();
        // SAFETY: takes nothing.
        let pid = unsafe { libc::gettid() };
        let owner = Owner { kind: THREAD, pid };
        let checked = |answer: c_int| match answer {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: the kernel reads one `f_owner_ex` within the call.
        checked(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: no pointer.
        checked(unsafe { libc::fcntl(fd, F_SETSIG, signal) })?;
        // SAFETY: no pointer.
        checked(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC) })
    }

    /// Stops counting.
    pub fn disable(&self) -> io::Result<()> {
        // SAFETY: see `enable`.
        let answer = unsafe { ioctls::DISABLE(self.file.as_raw_fd(), 0) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Reads its count.
    pub fn count(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        (&self.file).read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Maps a ring for its samples.
    pub fn ring(&self) -> io::Result<Ring> {
        let length = (1 + DATA_PAGES) * PAGE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Ring { base, length })
    }
}

/// The pages that the kernel writes samples to.
#[derive(Debug)]
pub struct Ring {
    base: NonNull<u8>,
    length: usize,
}

impl Ring {
    /// The bytes written since the ring was mapped; they are never consumed, so the kernel stops
    /// when the ring is full. The event must be disabled.
    pub fn records(&self) -> Vec<u8> {
        let page = self.base.cast::<perf_event_mmap_page>();
        // SAFETY: the first page of the mapping is a perf_event_mmap_page; no reference is made.
        let head = unsafe { &raw mut (*page.as_ptr()).data_head };
        // SAFETY: an aligned word that is only ever accessed as a whole, here and in the kernel.
        let head = unsafe { AtomicU64::from_ptr(head) };
        let written = head.load(Ordering::Acquire);
        fence(Ordering::Acquire);
        let size = self.length - PAGE;
        let written = usize::try_from(written).map_or(size, |written| written.min(size));
        let mut records = vec![0; written];
        // SAFETY: the data pages follow the first one within the mapping.
        let data = unsafe { self.base.add(PAGE) };
        // SAFETY: `written` bytes lie within the data pages, and the event is disabled, so the
        // kernel does not write to them.
        let data = unsafe { std::slice::from_raw_parts(data.as_ptr(), written) };
        records.copy_from_slice(data);
        records
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `Event::ring` made; no reference to it remains.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}
