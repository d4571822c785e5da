//! The only module that selects code by architecture. It contains instructions that cause exits, instructions that
//! cause no exits, and the values that registers have at these instructions.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

/// The known value of a register.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Known {
    /// Exactly this value.
    Is(u64),
    /// These bits, and maybe others.
    Has(u64),
    /// The address of the instruction that writes.
    Write,
    /// Nothing is known.
    Unknown,
}

/// An access as the host sees it: instruction, address, detail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) ip: u64,
    pub(crate) qualification: u64,
    pub(crate) detail: u64,
}

/// A program's access to the page at `page`, which returns the program's exit code. It may end the program.
pub(crate) type Attack = fn(page: *mut u8) -> i32;
