//! Counters that this process reads with an instruction.
#![expect(unsafe_code, reason = "instructions without a safe wrapper")]

/// The time stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction, and user space may use it unless the process has disabled it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Whether the device reads performance counters with RDPMC instead of a system call.
pub(crate) const READS_COUNTERS: bool = true;

/// Returns this CPU's performance counter with RDPMC number `index`. `None` unless [`READS_COUNTERS`] is true.
///
/// `index` must come from the metadata page of an event that counts this thread, and the page must permit the
/// read. Otherwise, the CPU faults and the kernel ends the process.
pub(crate) fn performance_counter(index: u32) -> Option<u64> {
    let (low, high): (u32, u32);
    // SAFETY: the instruction changes no memory, and no registers except EAX and EDX. If the CPU does not permit the
    // instruction, it raises a fault. `nomem` is left out so that the compiler does not move the instruction across
    // the loads around it.
    unsafe {
        core::arch::asm!(
            "rdpmc",
            in("ecx") index,
            out("eax") low,
            out("edx") high,
            options(nostack, preserves_flags),
        );
    }
    Some(u64::from(high) << 32 | u64::from(low))
}
