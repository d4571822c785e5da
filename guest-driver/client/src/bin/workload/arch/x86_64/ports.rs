//! Writes to a port that no device has: a VM exit each, from user mode.
#![expect(unsafe_code, reason = "port I/O is an instruction")]

use std::arch::asm;
use std::io;

/// Debug cards show what is written to it; virtual machines have none.
const PORT: u16 = 0x80;

/// The permission to write to the port: of the thread that asked for it, and of those that it
/// starts later.
#[derive(Debug)]
pub(crate) struct Port(());

impl Port {
    /// Needs CAP_SYS_RAWIO.
    pub(crate) fn open() -> Result<Self, String> {
        // SAFETY: changes which ports this thread may access; touches no memory.
        let result = unsafe { libc::ioperm(PORT.into(), 1, 1) };
        if result == 0 {
            Ok(Self(()))
        } else {
            let error = io::Error::last_os_error();
            Err(format!("port {PORT:#x} (CAP_SYS_RAWIO is needed): {error}"))
        }
    }

    /// One write, by a thread that has the permission.
    pub(crate) fn write(&self) {
        // SAFETY: one write to a port that does nothing; no memory or flag is touched.
        unsafe {
            asm!("out dx, al", in("dx") PORT, in("al") 0u8,
                 options(nomem, nostack, preserves_flags));
        }
    }
}
