//! The ORC tables of an x86-64 Linux kernel. Stock kernels have no frame pointers. Instead, the build stores for each
//! instruction where the caller's stack pointer, frame pointer and return address are (`CONFIG_UNWINDER_ORC`), in the
//! sections `.orc_unwind_ip` and `.orc_unwind` of the `vmlinux`. Stripped kernels keep these sections.
//!
//! The file belongs to the operator, but it may be damaged. No content makes the reader panic, and its memory is
//! bounded by the file's size. The addresses that are looked up may come from a guest.

mod format;
mod table;

pub use self::format::{BpRule, FrameKind, FrameRule, Register, Rule, SpRule};
pub use self::table::{OrcError, OrcTable};
