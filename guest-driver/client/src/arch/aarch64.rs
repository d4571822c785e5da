//! aarch64.
#![expect(unsafe_code, reason = "an instruction without a safe wrapper")]

/// Number of the first register that packets omit (x9). Packets contain the registers before it,
/// which pass arguments.
const ARGUMENTS: u32 = 9;
/// Number of the first register after the omitted ones (x19). From there on, packets contain the
/// callee-saved registers, LR, SP and PC.
const PRESERVED: u32 = 19;
/// Number of registers in perf's numbering, from X0 to PC.
const REGISTERS: u32 = 33;

/// The guest's virtual counter.
pub(crate) fn ticks() -> u64 {
    let ticks;
    // Without the barrier the CPU may read the counter before it executes earlier instructions.
    // SAFETY: only reads the virtual counter, which Linux lets user space read.
    unsafe {
        core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
    }
    ticks
}

/// Index of perf's register `number` among the registers of a sample packet; `None` if packets omit
/// it.
pub(crate) fn packet_register(number: u32) -> Option<usize> {
    let place = match number {
        ..ARGUMENTS => number,
        PRESERVED..REGISTERS => ARGUMENTS + number - PRESERVED,
        _ => return None,
    };
    usize::try_from(place).ok()
}

/// perf's register numbers for the stack pointer and the program counter.
#[cfg(test)]
pub(crate) const SP: u32 = 31;
#[cfg(test)]
pub(crate) const IP: u32 = 32;
