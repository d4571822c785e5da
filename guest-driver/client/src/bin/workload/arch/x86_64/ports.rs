//! User-mode writes to a port without a device. Each write causes a VM exit.
#![expect(unsafe_code, reason = "port I/O is an instruction")]

use std::arch::asm;
use std::io;

/// The POST code port; virtual machines have no device there.
const PORT: u16 = 0x80;

/// Permission to write to the port. The thread that calls [`Port::open`] gets the permission, and the
/// threads that it starts later inherit it.
#[derive(Debug)]
pub(crate) struct Port(());

impl Port {
    /// Gets the permission, which requires CAP_SYS_RAWIO.
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

    /// Writes once, from a thread with the permission.
    pub(crate) fn write(&self) {
        // SAFETY: writes once to a port without a device, and touches no memory and no flag.
        unsafe {
            asm!("out dx, al", in("dx") PORT, in("al") 0u8,
                 options(nomem, nostack, preserves_flags));
        }
    }
}
