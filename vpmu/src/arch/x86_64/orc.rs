//! The registers that ORC tables refer to.

use vpmu_orc::Register;

use super::registers::SAVED;

/// perf's number of a register. `None` on architectures whose kernels have no ORC tables.
pub(crate) const fn orc_register(register: Register) -> Option<usize> {
    Some(match register {
        Register::Ax => 0,
        Register::Dx => 3,
        Register::Di => 5,
        Register::Bp => 6,
        Register::Sp => 7,
        Register::R10 => 18,
        Register::R13 => 21,
    })
}

/// The position of a register in the words that the kernel saves. `None` if it is not one of them.
pub(crate) fn saved_word(number: usize) -> Option<usize> {
    SAVED.iter().position(|&saved| saved == Some(number))
}
