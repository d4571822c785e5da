//! Counters that this process reads by an instruction.
#![expect(unsafe_code, reason = "instructions without a safe wrapper")]

/// The time stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 has the instruction, and user space may use it unless the process has disabled
    // it for itself.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Whether the device reads performance counters by an instruction.
pub(crate) const READS_COUNTERS: bool = true;

/// Performance counter `index` of this CPU, as RDPMC numbers it; `None` unless [`READS_COUNTERS`].
///
/// The CPU faults, and the kernel ends the process, if `index` does not come from the metadata page
/// of an event of this thread that allows it.
pub(crate) fn performance_counter(index: u32) -> Option<u64> {
    let (low, high): (u32, u32);
    // SAFETY: the instruction changes no memory, and no registers but EAX and EDX; where it is not allowed,
    // it faults. Without `nomem`, the compiler keeps it between the loads around it.
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
