//! A program whose call tree is known to the frame: two callers of one leaf, of which one has
//! it work three times as long. Its functions keep frame pointers by themselves, whatever the
//! compiler makes of the rest of the program, and what called them is out of their chains.
#![expect(unsafe_code, reason = "frames as they are written, not as compiled")]

use std::arch::naked_asm;

/// Turns of the leaf's loop in a quarter of a round: some tens of microseconds.
const QUARTER: u32 = 20_000;

/// Has `tree` called once, as the outermost function: no frame lies above this one.
pub(crate) fn round() {
    // SAFETY: the function keeps the registers that C's calling convention has it keep, and
    // touches no memory but its own stack.
    unsafe { begin() };
}

/// Ends the chain: the frame pointer that its callees save is zero.
#[unsafe(naked)]
unsafe extern "C" fn begin() {
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

/// Takes its number of turns in `edi`.
#[unsafe(naked)]
unsafe extern "C" fn hot_leaf() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "2:",
        "dec edi",
        "jnz 2b",
        "pop rbp",
        "ret",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_leaves_its_callers_registers_alone() {
        let before: u64 = std::hint::black_box(7);
        for _ in 0..3 {
            round();
        }
        assert_eq!(before, 7);
    }
}
