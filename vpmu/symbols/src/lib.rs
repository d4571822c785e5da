//! Finds functions by address: kernel functions in the text of `/proc/kallsyms` and `System.map`, and functions of
//! programs and kernels in ELF files.
//!
//! The input may be forged. Malformed lines and symbols are skipped, and memory is bounded by the size of the
//! input. The crate opens no files: its callers decide which file to read, and how much of it.

mod elf;
mod functions;
mod kallsyms;
mod name;

pub use self::elf::{Elf, ElfError, Segments, build_id};
pub use self::functions::{Function, Functions, Symbol};
pub use self::kallsyms::{Name, kallsyms};
pub use self::name::printable;
