//! Port accesses, and the TSC.
#![expect(unsafe_code, reason = "instructions without a safe wrapper")]

use std::arch::{asm, x86_64::_rdtsc};
use std::io;

use crate::packets::DETAIL_WRITE;

/// The reason of exits for port accesses.
pub(crate) const EXIT_PORT: u64 = 2;
/// The event that counts exits for that reason.
pub(crate) const PORT_EXITS: &str = "exits-io";
/// The reason as `vperf exits` names it.
pub(crate) const PORT_REASON: &str = "io";
/// A write as `vperf exits` describes it.
pub(crate) const PORT_WRITTEN: &str = "port 0x80 write 1 byte";
/// The detail in the packet for a write to [`IDLE_PORT`]. It describes a single access, which writes one byte.
pub(crate) const PORT_DETAIL: u64 = 1 << 32 | DETAIL_WRITE | 1;
/// Whether an event that counts a program's [`EXIT_PORT`] exits must exclude the kernel. This is false on x86: in the
/// kernel, only the console's driver causes such exits, and tests avoid the console's interrupts.
pub(crate) const OWN_IN_USER_MODE: bool = false;
/// Number of [`EXIT_PORT`] exits for a mark that a program places with a store. It is zero, because the store causes an
/// MMIO exit.
pub(crate) const STORE_EXITS: u64 = 0;
/// A port at which no device of the machine answers. A write there has no effect other than an exit.
pub(crate) const IDLE_PORT: u16 = 0x80;

/// Gives this thread access to every port.
pub(crate) fn allow_ports() -> io::Result<()> {
    // SAFETY: the call changes only this thread's I/O privilege.
    let result = unsafe { libc::iopl(3) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes once to [`IDLE_PORT`]; call [`allow_ports`] first.
pub(crate) fn port_write() {
    // SAFETY: no device answers at the port. Without privilege, the write faults and ends the test, but does not
    // violate memory safety.
    unsafe { asm!("out dx, al", in("dx") IDLE_PORT, in("al") 0_u8, options(nomem, nostack)) }
}

/// The guest's time stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every CPU that runs 64-bit Linux has the instruction.
    unsafe { _rdtsc() }
}
