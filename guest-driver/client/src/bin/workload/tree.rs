//! A program with a known call tree: two callers of one leaf, one with three times the work. Its
//! functions keep frame pointers whatever the compiler's options for the rest of the program are,
//! and their call chains end at `begin`.
#![expect(unsafe_code, reason = "functions that are written in assembly")]

use crate::arch::{begin, exact_loop};

/// Iterations of the leaf's loop in a quarter of a round: tens of microseconds.
pub(crate) const QUARTER: u32 = 20_000;

/// Calls `tree` once as the outermost function: no frame is above it.
pub(crate) fn round() {
    // SAFETY: the function preserves the registers that C's calling convention requires, and
    // touches no memory but its own stack.
    unsafe { begin() };
}

/// Runs `rounds` rounds, at least one, of a loop of two instructions.
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
