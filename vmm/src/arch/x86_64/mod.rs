//! What a PC is: where things lie, how a kernel wants to be entered, what firmware would say.

pub mod acpi;
pub mod boot;
pub mod calls;
pub mod cpuid;
pub mod kernel;
pub mod layout;
pub mod regs;
