//! aarch64.
#![expect(unsafe_code, reason = "an instruction without a safe wrapper")]

/// Number of the first register that packets leave out, x9: the registers before it hold arguments.
const ARGUMENTS: u32 = 9;
/// Number of the first register after that gap, x19: packets hold the callee-saved registers, LR,
/// SP and PC.
const PRESERVED: u32 = 19;
/// perf's number of PC, plus one.
const REGISTERS: u32 = 33;

/// The guest's virtual counter.
pub(crate) fn ticks() -> u64 {
    let ticks;
    // Without the barrier the CPU may read the counter before it executes earlier instructions.
    // SAFETY: reads a register that Linux leaves to user space.
    unsafe {
        core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
    }
    ticks
}

/// Index in a sample's packet of the register that perf numbers `number`; `None` if packets lack
/// it.
pub(crate) fn packet_register(number: u32) -> Option<usize> {
    let place = match number {
        ..ARGUMENTS => number,
        PRESERVED..REGISTERS => ARGUMENTS + number - PRESERVED,
        _ => return None,
    };
    usize::try_from(place).ok()
}

/// perf's numbers of the stack pointer and the program counter.
#[cfg(test)]
pub(crate) const SP: u32 = 31;
#[cfg(test)]
pub(crate) const IP: u32 = 32;
