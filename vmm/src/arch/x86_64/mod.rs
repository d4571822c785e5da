//! What a PC is: where things lie, how a kernel wants to be entered, what firmware would say.

pub mod acpi;
pub mod board;
pub mod boot;
pub mod calls;
pub mod check;
pub mod clock;
pub mod cpuid;
pub mod cpus;
pub mod emulation;
pub(crate) mod exits;
pub mod kernel;
pub mod layout;
pub mod msrs;
pub mod platform;
pub mod power;
pub(crate) mod registers;
pub mod regs;
