//! Writes to an address that no device has, which stand for those to a port: a VM exit each, from
//! user mode.
#![expect(unsafe_code, reason = "memory of devices is mapped and written")]

use std::arch::asm;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// Between the devices and the window of the vPMU.
const ADDRESS: libc::off_t = 0x1000_0000;
const PAGE: usize = 4096;

/// The address, mapped.
#[derive(Debug)]
pub(crate) struct Port(*mut u8);

// SAFETY: nothing answers to the address, so writes of several threads do nothing to each other.
unsafe impl Send for Port {}
// SAFETY: as above.
unsafe impl Sync for Port {}

impl Port {
    /// Needs CAP_SYS_RAWIO.
    pub(crate) fn open() -> Result<Self, String> {
        let refused =
            |error: io::Error| format!("address {ADDRESS:#x} (CAP_SYS_RAWIO is needed): {error}");
        let memory = File::options().read(true).write(true).open("/dev/mem");
        let memory = memory.map_err(refused)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                memory.as_raw_fd(),
                ADDRESS,
            )
        };
        match page {
            libc::MAP_FAILED => Err(refused(io::Error::last_os_error())),
            page => Ok(Self(page.cast())),
        }
    }

    /// One write.
    pub(crate) fn write(&self) {
        // By an instruction that KVM can take apart: of others it does not learn what they write.
        // SAFETY: writes to a page that is mapped, and that nothing answers to.
        unsafe { asm!("strb wzr, [{}]", in(reg) self.0, options(nostack, preserves_flags)) };
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: exactly the page that was mapped.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}
