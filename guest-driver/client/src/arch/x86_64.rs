//! x86-64.
#![expect(unsafe_code, reason = "an instruction without a safe wrapper")]

/// The guest's TSC.
pub(crate) fn ticks() -> u64 {
    // SAFETY: only reads the TSC, which every x86-64 CPU has and Linux lets user space read.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Index of perf's register `number` among the registers of a sample packet.
pub(crate) fn packet_register(number: u32) -> Option<usize> {
    usize::try_from(number).ok()
}

/// perf's register numbers for the stack pointer and the instruction pointer.
#[cfg(test)]
pub(crate) const SP: u32 = 7;
#[cfg(test)]
pub(crate) const IP: u32 = 8;
