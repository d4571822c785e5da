//! The call tree, and a loop of two instructions.
#![expect(unsafe_code, reason = "naked functions, whose frames must be exactly as written")]

use std::arch::naked_asm;

use crate::tree::QUARTER;

/// Ends the call chain: `tree` saves a frame pointer of zero.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn begin() {
    naked_asm!(
        "push rbx",
        "mov rbx, rbp",
        "xor ebp, ebp",
        "call {tree}",
        "mov rbp, rbx",
        "pop rbx",
        "ret",
        tree = sym tree,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn tree() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "call {often}",
        "call {seldom}",
        "pop rbp",
        "ret",
        often = sym three_quarters,
        seldom = sym one_quarter,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn three_quarters() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "mov edi, {turns}",
        "call {leaf}",
        "pop rbp",
        "ret",
        turns = const 3 * QUARTER,
        leaf = sym hot_leaf,
    )
}

#[unsafe(naked)]
unsafe extern "C" fn one_quarter() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "mov edi, {turns}",
        "call {leaf}",
        "pop rbp",
        "ret",
        turns = const QUARTER,
        leaf = sym hot_leaf,
    )
}

/// Takes the number of iterations in `edi`.
#[unsafe(naked)]
unsafe extern "C" fn hot_leaf() {
    naked_asm!("push rbp", "mov rbp, rsp", "2:", "dec edi", "jnz 2b", "pop rbp", "ret",)
}

/// Executes two instructions per round. `rounds` must not be zero.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn exact_loop(rounds: u64) {
    naked_asm!("2:", "dec rdi", "jnz 2b", "ret",)
}
