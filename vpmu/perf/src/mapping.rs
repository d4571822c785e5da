//! Pages of an event, mapped into this process. The kernel or the host can write them at any moment, so
//! they are accessed only as atomic words. The module does not interpret them.
#![expect(unsafe_code, reason = "memory shared with the kernel")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// A shared mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is accessed only as atomics; the
// pointer is private, and `drop` unmaps it once.
unsafe impl Send for Mapping {}
// SAFETY: as above; several threads may load and store atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `event` for reading and writing. `bytes` is a multiple of the page size and not
    /// zero.
    ///
    /// # Errors
    /// The error of mmap(2).
    pub fn new(event: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(event, 0, bytes, true)
    }

    /// Like [`Mapping::new`], for reading only.
    pub fn new_read_only(event: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(event, 0, bytes, false)
    }

    /// Maps `bytes` bytes of `event`, starting at `offset`. Both numbers are multiples of the page size.
    pub fn map(event: BorrowedFd<'_>, offset: u64, bytes: usize, writable: bool) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let fd = event.as_raw_fd();
        let flags = libc::MAP_SHARED;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address zero"))?;
        Ok(Self { base, words: bytes / WORD, writable })
    }

    /// Returns the number of mapped bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.words * WORD
    }

    /// Loads the word that contains byte `offset`; 0 beyond the mapping.
    #[inline]
    #[must_use]
    pub fn load(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset).map_or(0, |word| word.load(order))
    }

    /// Stores `value` in the word that contains byte `offset`. Does nothing if `offset` is beyond the mapping, or if
    /// the mapping is read-only.
    #[inline]
    pub fn store(&self, offset: usize, value: u64, order: Ordering) {
        if let Some(word) = self.word(offset).filter(|_| self.writable) {
            word.store(value, order);
        }
    }

    /// Appends to `copy` the `bytes` bytes that begin at `offset`; bytes beyond the mapping are zero. `bytes` and
    /// `offset` are multiples of 8. A concurrent write can happen between two words of the copy, but not within a word.
    pub fn copy(&self, offset: usize, bytes: usize, copy: &mut Vec<u8>) {
        let offsets = (0..bytes).step_by(WORD).map(|at| offset.saturating_add(at));
        copy.reserve(bytes);
        copy.extend(offsets.flat_map(|at| self.load(at, Ordering::Relaxed).to_ne_bytes()));
    }

    #[inline]
    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let index = offset / WORD;
        if index >= self.words {
            return None;
        }
        // SAFETY: `index` is inside the mapping, as checked above.
        let word = unsafe { self.base.add(index) };
        // SAFETY: the mapping begins at a page, so the word is aligned; it lives as long as `self`,
        // and all sides access it atomically.
        Some(unsafe { word.as_ref() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the range that `map` mapped, and no reference into it remains.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len()) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    const RELAXED: Ordering = Ordering::Relaxed;

    #[test]
    fn access_beyond_mapping_loads_zero_and_stores_nothing() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        file.write_all_at(&[7; 8192], 0).unwrap();
        let mapping = Mapping::new(file.as_fd(), 4096).unwrap();
        assert_eq!(mapping.len(), 4096);
        let sevens = u64::from_ne_bytes([7; 8]);
        assert_eq!(mapping.load(4088, RELAXED), sevens);
        assert_eq!(mapping.load(4096, RELAXED), 0);
        assert_eq!(mapping.load(usize::MAX, RELAXED), 0);
        mapping.store(4088, 1, RELAXED);
        mapping.store(4096, 1, RELAXED);
        mapping.store(usize::MAX, 1, RELAXED);
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 4088).unwrap();
        assert_eq!(bytes, [[1, 0, 0, 0, 0, 0, 0, 0], [7; 8]].concat()[..]);
    }

    #[test]
    fn store_to_read_only_mapping_changes_nothing() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mapping = Mapping::new_read_only(file.as_fd(), 4096).unwrap();
        mapping.store(8, 1, RELAXED);
        assert_eq!(mapping.load(8, RELAXED), 0);
    }

    #[test]
    fn copy_appends_words_and_zeros_beyond_mapping() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        file.write_all_at(b"8 bytes.", 4088).unwrap();
        let mapping = Mapping::new_read_only(file.as_fd(), 4096).unwrap();
        let mut copy = vec![1];
        mapping.copy(4088, 16, &mut copy);
        assert_eq!(copy, b"\x018 bytes.\0\0\0\0\0\0\0\0");
    }
}
