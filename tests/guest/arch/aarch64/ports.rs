//! Accesses to an address where no device answers, which replace x86's port accesses. Also reads the virtual counter.
#![expect(unsafe_code, reason = "instructions without a safe wrapper")]

use std::arch::asm;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::packets::DETAIL_WRITE;
use crate::pages::map_physical;

/// The reason of exits for these accesses.
pub(crate) const EXIT_PORT: u64 = 3;
/// The event that counts exits for that reason.
pub(crate) const PORT_EXITS: &str = "exits-mmio";
/// The reason as `vperf exits` names it.
pub(crate) const PORT_REASON: &str = "mmio";
/// A write as `vperf exits` describes it.
pub(crate) const PORT_WRITTEN: &str = "memory 0x10000000 write 1 byte";
/// The detail in the packet for a write to [`IDLE_PORT`]. It describes a write of one byte.
pub(crate) const PORT_DETAIL: u64 = DETAIL_WRITE | 1;
/// Whether an event that counts a program's [`EXIT_PORT`] exits must exclude the kernel. This is true on aarch64, where
/// the kernel's driver causes exits for the same reason when it notifies the device.
pub(crate) const OWN_IN_USER_MODE: bool = true;
/// Number of [`EXIT_PORT`] exits that a program causes when it places a mark with a store. The store itself is such an
/// exit.
pub(crate) const STORE_EXITS: u64 = 1;
/// An address at which no device of the machine answers. A write there has no effect other than an exit.
pub(crate) const IDLE_PORT: u32 = 0x1000_0000;

/// The mapping of [`IDLE_PORT`] in this process, or null.
static MAPPED: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Maps [`IDLE_PORT`] into this process. It stays mapped.
pub(crate) fn allow_ports() -> io::Result<()> {
    if MAPPED.load(Ordering::Acquire).is_null() {
        MAPPED.store(map_physical(IDLE_PORT)?, Ordering::Release);
    }
    Ok(())
}

/// Returns the address of the mapping. Call [`allow_ports`] first.
pub(super) fn idle() -> *mut u8 {
    MAPPED.load(Ordering::Acquire)
}

/// Writes once to [`IDLE_PORT`]; call [`allow_ports`] first.
pub(crate) fn port_write() {
    // SAFETY: no device answers at the address. Where it is not mapped, the write faults and ends the test, but does
    // not violate memory safety.
    unsafe { asm!("strb wzr, [{}]", in(reg) idle(), options(nostack, preserves_flags)) };
}

/// The guest's virtual counter.
pub(crate) fn ticks() -> u64 {
    let ticks;
    // The barrier keeps the read from happening before the instructions that precede it.
    // SAFETY: reads a register that Linux leaves to user space.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
    ticks
}
