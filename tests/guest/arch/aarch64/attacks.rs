//! Accesses to the doorbell by unusual instructions.
#![expect(unsafe_code, reason = "instructions that no program needs")]

use std::arch::asm;

use crate::arch::Attack;
use crate::raw::PAGE;

/// Accesses that a program can make, each with the exit code of the program after it, or with the negative number of the
/// signal that ends the program. KVM cannot emulate instructions for which the processor provides no valid syndrome.
pub(crate) const ATTACKS: [(&str, Attack, i32); 6] = [
    (
        "a store of a pair",
        |page| {
            // SAFETY: the page belongs to this process. It is device memory, and no reference to it exists.
            unsafe { asm!("stp xzr, xzr, [{}]", in(reg) page) }
            0
        },
        -libc::SIGBUS,
    ),
    (
        "a store of 16 bytes",
        |page| {
            // SAFETY: as above.
            unsafe { asm!("str q0, [{}]", in(reg) page) }
            0
        },
        -libc::SIGBUS,
    ),
    (
        "a store with a post-indexed address",
        |page| {
            // SAFETY: as above.
            unsafe { asm!("str wzr, [{page}], #4", page = inout(reg) page => _) }
            0
        },
        -libc::SIGBUS,
    ),
    (
        "an exclusive load and store",
        |page| {
            // SAFETY: as above.
            unsafe {
                asm!(
                    "ldxr {old}, [{page}]",
                    "stxr {done:w}, {old}, [{page}]",
                    old = out(reg) _,
                    done = out(reg) _,
                    page = in(reg) page,
                );
            }
            0
        },
        -libc::SIGBUS,
    ),
    (
        "the zeroing of a cache block",
        |page| {
            // SAFETY: as above.
            unsafe { asm!("dc zva, {}", in(reg) page) }
            0
        },
        -libc::SIGBUS,
    ),
    (
        "execution from the page",
        |page| {
            // SAFETY: the page belongs to this process. If the call is refused, the page does not change.
            unsafe { libc::mprotect(page.cast(), PAGE, libc::PROT_READ | libc::PROT_EXEC) };
            // SAFETY: as above. The page cannot be made executable, so the jump to it ends the process.
            unsafe { asm!("blr {}", in(reg) page, clobber_abi("C")) };
            0
        },
        -libc::SIGSEGV,
    ),
];
