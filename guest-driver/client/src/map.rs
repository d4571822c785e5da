//! Pages of an event, mapped into this process and written by the host at any moment: accessed only
//! by atomic words, never by reference. Doesn't interpret them. Also the device's write-only
//! doorbell page.
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
// SAFETY: see above: several threads may load and store atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` (a multiple of the page size, not zero) of `fd` from its offset 0.
    pub(crate) fn new(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(fd, 0, bytes, true)
    }

    /// Like [`Mapping::new`], without write access.
    pub(crate) fn new_read_only(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(fd, 0, bytes, false)
    }

    /// Maps from `offset`, a multiple of the page size.
    pub(crate) fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        writable: bool,
    ) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset)
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
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
                offset,
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

    /// Appends the `bytes` at byte `offset` to `copy`: both are multiples of 8 and inside the
    /// mapping. Concurrent writes tear only between words.
    pub(crate) fn copy(&self, offset: usize, bytes: usize, copy: &mut Vec<u8>) {
        let first = offset / WORD;
        let words = first..first + bytes / WORD;
        copy.reserve(bytes);
        copy.extend(words.flat_map(|index| self.word(index).load(Ordering::Relaxed).to_ne_bytes()));
    }

    /// See [`Mapping::load`]; the mapping is writable.
    pub(crate) fn store(&self, offset: usize, value: u64, order: Ordering) {
        assert!(self.writable, "a store to a read-only mapping");
        self.word(offset / WORD).store(value, order);
    }
}

/// A device page; its first 32 bits are a write-only register.
#[derive(Debug)]
pub(crate) struct Register(NonNull<u32>);

// SAFETY: the page belongs to the process, not to a thread, and is only written, in single stores
// of the register's width.
unsafe impl Send for Register {}
// SAFETY: see above.
unsafe impl Sync for Register {}

impl Register {
    const BYTES: usize = 4096;

    /// Maps the page at offset 0 of `fd`.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: the kernel chooses an address range free of other mappings; the result is
        // checked before use.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::BYTES,
                libc::PROT_WRITE,
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
        Ok(Self(base))
    }

    /// One store of exactly 32 bits.
    #[inline]
    pub(crate) fn store(&self, value: u32) {
        // SAFETY: the page is mapped for writing as long as `self` lives, and aligned.
        unsafe { self.0.as_ptr().write_volatile(value) };
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped; no reference to it remains.
        unsafe { libc::munmap(self.0.as_ptr().cast(), Self::BYTES) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped; no reference to it remains.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn register_store_writes_first_word_of_page() {
        let file = tempfile::tempfile().unwrap();
        assert!(Register::new(std::fs::File::open("/dev/null").unwrap().as_fd()).is_err());
        file.set_len(4096).unwrap();
        let register = Register::new(file.as_fd()).unwrap();
        register.store(0x0403_0201);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 0, 0, 0, 0]);
    }
}
