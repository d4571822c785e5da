//! A program whose call tree is known to the frame: two callers of one leaf, of which one has
//! it work three times as long. Its functions keep frame pointers by themselves, whatever the
//! compiler makes of the rest of the program, and what called them is out of their chains.
#![expect(unsafe_code, reason = "functions that are written in assembly")]

use crate::arch::{begin, exact_loop};

/// Turns of the leaf's loop in a quarter of a round: some tens of microseconds.
pub(crate) const QUARTER: u32 = 20_000;

/// Has `tree` called once, as the outermost function: no frame lies above this one.
pub(crate) fn round() {
    // SAFETY: the function keeps the registers that C's calling convention has it keep, and
    // touches no memory but its own stack.
    unsafe { begin() };
}

/// Runs `rounds` rounds, one at least, of a loop of two instructions.
pub(crate) fn run_loop(rounds: u64) {
    // SAFETY: counts its argument down, and touches no memory.
    unsafe { exact_loop(rounds.max(1)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_preserves_callee_saved_registers() {
        let before: u64 = std::hint::black_box(7);
        for _ in 0..3 {
            round();
        }
        assert_eq!(before, 7);
    }
}
