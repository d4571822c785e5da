//! User-mode writes to an address without a device. Each write causes a VM exit, like a port write
//! on x86-64.
#![expect(unsafe_code, reason = "memory of devices is mapped and written")]

use std::arch::asm;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// A guest-physical address between the devices and the vPMU's window.
const ADDRESS: libc::off_t = 0x1000_0000;
const PAGE: usize = 4096;

/// The mapped page at [`ADDRESS`].
#[derive(Debug)]
pub(crate) struct Port(*mut u8);

// SAFETY: no device answers at the address, so concurrent writes do not interfere.
unsafe impl Send for Port {}
// SAFETY: see above.
unsafe impl Sync for Port {}

impl Port {
    /// Maps the page, which requires CAP_SYS_RAWIO.
    pub(crate) fn open() -> Result<Self, String> {
        let refused = |error: io::Error| format!("address {ADDRESS:#x} (CAP_SYS_RAWIO is needed): {error}");
        let memory = File::options().read(true).write(true).open("/dev/mem");
        let memory = memory.map_err(refused)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
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

    /// Writes once.
    pub(crate) fn write(&self) {
        // KVM can emulate this form of store. For some other forms, ESR_EL2 does not contain the
        // number of the stored register.
        // SAFETY: the store goes to a mapped page, which has no device behind it.
        unsafe { asm!("strb wzr, [{}]", in(reg) self.0, options(nostack, preserves_flags)) };
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: exactly the page that was mapped.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}
