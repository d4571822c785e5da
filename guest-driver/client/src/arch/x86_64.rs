//! x86-64.
#![expect(unsafe_code, reason = "an instruction without a safe wrapper")]

/// The guest's TSC.
pub(crate) fn ticks() -> u64 {
    // SAFETY: reads a register that every x86-64 CPU has and Linux leaves to user space.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Index in a sample's packet of the register that perf numbers `number`.
pub(crate) fn packet_register(number: u32) -> Option<usize> {
    usize::try_from(number).ok()
}

/// perf's numbers of the stack pointer and the instruction pointer.
#[cfg(test)]
pub(crate) const SP: u32 = 7;
#[cfg(test)]
pub(crate) const IP: u32 = 8;
