//! Accesses to the doorbell by unusual instructions.
#![expect(unsafe_code, reason = "instructions that no program needs")]

use std::arch::asm;

use crate::arch::Attack;
use crate::raw::PAGE;

/// Accesses that a program can make, each with the exit code of the program after it, or with the negative number of the
/// signal that ends the program.
pub(crate) const ATTACKS: [(&str, Attack, i32); 6] = [
    (
        "FXSAVE",
        |page| {
            // SAFETY: the page belongs to this process. It is device memory, and no reference to it exists.
            unsafe { asm!("fxsave64 [{}]", in(reg) page) }
            0
        },
        -libc::SIGILL,
    ),
    (
        "a store of 16 bytes",
        |page| {
            // SAFETY: as above.
            unsafe { asm!("movups [{}], xmm0", in(reg) page) }
            0
        },
        0,
    ),
    (
        "a string store over the whole page",
        |page| {
            // SAFETY: as above.
            unsafe {
                asm!("rep stosb", inout("rdi") page => _, inout("rcx") PAGE => _, in("al") 1_u8);
            }
            0
        },
        0,
    ),
    (
        "CMPXCHG16B",
        |page| {
            // SAFETY: as above; rbx is restored.
            unsafe {
                asm!(
                    "xchg rbx, {old}",
                    "lock cmpxchg16b [{page}]",
                    "mov rbx, {old}",
                    old = inout(reg) 1_u64 => _,
                    page = in(reg) page,
                    inout("rax") 0_u64 => _,
                    inout("rdx") 0_u64 => _,
                    in("rcx") 1_u64,
                );
            }
            0
        },
        -libc::SIGILL,
    ),
    (
        "a store across the end of the page",
        |page| {
            // SAFETY: as above. The memory after the page either is unmapped or belongs to this process, which ends after
            // the store.
            unsafe { asm!("mov qword ptr [{} + 4092], rax", in(reg) page) }
            0
        },
        -libc::SIGSEGV,
    ),
    (
        "execution from the page",
        |page| {
            // SAFETY: the page belongs to this process. If the call is refused, the page does not change.
            unsafe { libc::mprotect(page.cast(), PAGE, libc::PROT_READ | libc::PROT_EXEC) };
            // SAFETY: as above. The page cannot be made executable, so the jump to it ends the process.
            unsafe { asm!("call {}", in(reg) page, clobber_abi("C")) };
            0
        },
        -libc::SIGSEGV,
    ),
];
