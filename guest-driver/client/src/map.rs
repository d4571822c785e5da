//! Pages of an event, mapped into this process and written by the host at any moment: reached
//! by atomic words only, never by reference. Knows nothing of what lies in them.
#![expect(unsafe_code, reason = "the edge to shared memory")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// A shared mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only reached through
// atomics; the pointer is private and dropped once.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `bytes` (a multiple of the page size, not zero) of `fd` from its offset 0.
    pub(crate) fn new(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(fd, bytes, true)
    }

    /// As [`Mapping::new`], not to be written by this process.
    pub(crate) fn new_read_only(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(fd, bytes, false)
    }

    fn map(fd: BorrowedFd<'_>, bytes: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_READ
        };
        // SAFETY: the kernel chooses an address range free of other mappings; the result is
        // checked before use.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped address zero"))?;
        Ok(Self {
            base,
            words: bytes / WORD,
            writable,
        })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: the index is inside the mapping (asserted).
        let word = unsafe { self.base.add(index) };
        // SAFETY: the mapping lives as long as `self`, is page-aligned and only ever reached
        // atomically.
        unsafe { word.as_ref() }
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.words * WORD
    }

    /// The word at byte `offset`, which is a multiple of 8 inside the mapping.
    pub(crate) fn load(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset / WORD).load(order)
    }

    /// See [`Mapping::load`]; the mapping is writable.
    pub(crate) fn store(&self, offset: usize, value: u64, order: Ordering) {
        assert!(self.writable, "a store to a read-only mapping");
        self.word(offset / WORD).store(value, order);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped, to which no reference can be left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len()) };
    }
}
