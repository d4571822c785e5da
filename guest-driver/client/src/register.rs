//! The device's doorbell: a page that is a write-only register.
#![expect(unsafe_code, reason = "a device register has no safe wrapper")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A device page; its first 32 bits are a write-only register.
#[derive(Debug)]
pub(crate) struct Register(NonNull<u32>);

// SAFETY: the page belongs to the process, not to a thread. It is never read, and each write is a
// single store of the register's width.
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
            libc::mmap(std::ptr::null_mut(), Self::BYTES, libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address zero"))?;
        Ok(Self(base))
    }

    /// Stores 32 bits with a single instruction.
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
