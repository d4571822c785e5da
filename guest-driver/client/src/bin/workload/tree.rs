//! A program with a known call tree: two functions call one leaf, which does three times as much work for one caller as
//! for the other. Its functions keep frame pointers, regardless of the compiler options for the rest of the program,
//! and their call chains end at `begin`.
#![expect(unsafe_code, reason = "functions that are written in assembly")]

use crate::arch::{begin, exact_loop};

/// Iterations of the leaf's loop in a quarter of a round. They take tens of microseconds.
pub(crate) const QUARTER: u32 = 20_000;

/// Calls `begin`, which calls `tree` once. No call chain has a frame above `begin`.
pub(crate) fn round() {
    // SAFETY: the function preserves the registers that C's calling convention requires, and
    // touches no memory but its own stack.
    unsafe { begin() };
}

/// Runs a loop of two instructions `rounds` times, but at least once.
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
