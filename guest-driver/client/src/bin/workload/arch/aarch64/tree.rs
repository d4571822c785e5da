//! The call tree, and a loop of two instructions.
#![expect(unsafe_code, reason = "naked functions, whose frames must be exactly as written")]

use std::arch::naked_asm;

use crate::tree::QUARTER;

/// Ends the call chain: `tree` saves a frame pointer of zero.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn begin() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "mov x29, #0",
        "bl {tree}",
        "ldp x29, x30, [sp], #16",
        "ret",
        tree = sym tree,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn tree() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "bl {often}",
        "bl {seldom}",
        "ldp x29, x30, [sp], #16",
        "ret",
        often = sym three_quarters,
        seldom = sym one_quarter,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn three_quarters() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "mov w0, #{turns}",
        "bl {leaf}",
        "ldp x29, x30, [sp], #16",
        "ret",
        turns = const 3 * QUARTER,
        leaf = sym hot_leaf,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn one_quarter() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "mov w0, #{turns}",
        "bl {leaf}",
        "ldp x29, x30, [sp], #16",
        "ret",
        turns = const QUARTER,
        leaf = sym hot_leaf,
    )
}

/// Takes the number of iterations in `w0`.
#[unsafe(naked)]
unsafe extern "C" fn hot_leaf() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "2:",
        "subs w0, w0, #1",
        "b.ne 2b",
        "ldp x29, x30, [sp], #16",
        "ret",
    )
}

/// Executes two instructions per round. `rounds` must not be zero.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn exact_loop(rounds: u64) {
    naked_asm!("2:", "subs x0, x0, #1", "b.ne 2b", "ret",)
}
