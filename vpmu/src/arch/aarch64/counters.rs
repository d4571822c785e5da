//! Counters that this process reads with an instruction.
#![expect(unsafe_code, reason = "instructions without a safe wrapper")]

/// The host's virtual counter. A guest's virtual counter differs from it by a fixed offset, just as a guest's time
/// stamp counter differs from the host's on x86-64.
pub(crate) fn ticks() -> u64 {
    let ticks: u64;
    // The barrier keeps the read from happening before the instructions that precede it.
    // SAFETY: the instructions only read the virtual counter, which Linux lets user space read.
    unsafe {
        core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
    }
    ticks
}

/// Whether the device reads performance counters with an instruction. It does not, because user space needs an
/// administrator's permission to do so.
pub(crate) const READS_COUNTERS: bool = false;

/// Returns performance counter `index` of this CPU. `None` unless [`READS_COUNTERS`] is true.
pub(crate) fn performance_counter(_index: u32) -> Option<u64> {
    None
}
