//! Kernels for aarch64 have frame pointers, and no ORC tables.

use vpmu_orc::Register;

/// perf's number of a register that ORC tables refer to. `None` on architectures whose kernels have no such tables.
pub(crate) const fn orc_register(_: Register) -> Option<usize> {
    None
}

/// The position of a register in the words that the kernel saves, for architectures with ORC tables.
pub(crate) const fn saved_word(_: usize) -> Option<usize> {
    None
}
