//! The doorbell: a page of the device that a program can map. A write to it places a mark.
#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use super::{Device, PAGE};

/// A mapping of the doorbell, which is unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Doorbell(*mut u32);

// SAFETY: the page belongs to the device, which accepts accesses from any thread.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

impl Doorbell {
    pub(crate) fn map(device: &Device) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        Self::map_raw(device, PAGE, protection, libc::MAP_SHARED, 0)
    }

    /// Calls mmap(2) without checking the arguments first.
    pub(crate) fn map_raw(device: &Device, bytes: usize, protection: i32, flags: i32, offset: i64) -> io::Result<Self> {
        let fd = device.as_raw_fd();
        // SAFETY: the kernel chooses an unused address, so no existing mapping is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(base.cast()))
    }

    /// The address of the mapping.
    pub(crate) fn base(&self) -> *mut u8 {
        self.0.cast()
    }

    /// Places a mark by a single store.
    pub(crate) fn mark(&self, value: u32) {
        // SAFETY: the address is the first word of the page, which stays mapped for writing as long as `self` lives.
        unsafe { self.0.write_volatile(value) };
    }

    /// Reads the word at the doorbell.
    pub(crate) fn load(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.0.read_volatile() }
    }

    /// Places `times` marks.
    pub(crate) fn place(&self, value: u32, times: u64) {
        (0..times).for_each(|_| self.mark(value));
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // SAFETY: the call unmaps the one page that was mapped. The driver refuses to map more than one page.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}
